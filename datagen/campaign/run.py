"""The course of a campaign: find the accelerator, measure by value until the time is up, pack."""

from __future__ import annotations

import errno
import importlib.util
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...common.errors import ProfileError
from ...common.files import locked
from ...common.types import JsonObject
from .archive import pack
from .client import WORKERS, Workers
from .journal import Journal
from .machine import Telemetry, host_record, scrubbed_text
from .plan import DEVICES, TURN_PART, CampaignSettings, Case, Plan, load_plan

#: Exit status: everything is measured or the budget used up; nothing could be measured, or the
#: accelerator is lost; the slice has ended and the same command continues.
DONE, FAILED, MORE = 0, 1, 3
_USED_UP = "the budget is used up"
#: Fraction of a slice for packing the archive, and its bounds in seconds.
_PACK_PART, _PACK_S = 0.02, (2.0, 20.0)
#: Minimum time for a stage in one go, as a multiple of the last change of workers.
_STARTS = 2.0
#: Pauses in seconds before retrying a worker that does not start.
_PAUSES_S = (2.0, 10.0, 30.0)


@dataclass(frozen=True)
class Outcome:
    """Outcome of a call.

    Attributes:
        status: Exit status, one of :data:`DONE`, :data:`FAILED` and :data:`MORE`.
        archive: The archive; ``None`` if nothing was measured yet.
        done: Number of cases measured so far.
        failed: Number of cases that failed so far.
        left: Number of cases of the plan that were not tried.
        why: Reason for the end, in words.
    """

    status: int
    archive: Path | None
    done: int
    failed: int
    left: int
    why: str


def run_campaign(
    settings: CampaignSettings, tell: Callable[[str], None] = lambda what: None
) -> Outcome:
    """Measure until the slice, the budget or the plan ends; then pack the results.

    Args:
        settings: What is measured, and how long.
        tell: Called with a line for each block, and for each case that failed.

    Raises:
        ProfileError: No framework is installed, none sees the requested device, a given folder
            contains no programs, or the folder cannot be written or is in use.
    """
    if settings.device not in DEVICES:
        raise ProfileError(
            f"unknown device {settings.device!r}", hint=f"one of {', '.join(DEVICES)}"
        )
    began = time.monotonic()
    fresh = not settings.out.exists()
    try:
        settings.out.mkdir(parents=True, exist_ok=True)
        with _alone(settings.out):
            return _Campaign(settings, began, tell).run()
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise ProfileError(
            f"cannot write: {error}",
            where=str(settings.out),
            hint="make room, then give the same command again: what was measured is kept"
            if full
            else "choose another folder with --out",
        ) from error
    except ProfileError:
        if fresh and not Journal(settings.out).finished:
            shutil.rmtree(settings.out)
        raise


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Hold the folder's lock, or refuse it."""
    with ExitStack() as held:
        try:
            held.enter_context(locked(out / ".lock", wait=False))
        except BlockingIOError:
            raise ProfileError(
                "another campaign is writing to this folder",
                where=str(out),
                hint="wait until it ends, or choose another folder with --out",
            ) from None
        yield


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C and SIGTERM while results are written."""
    if threading.current_thread() is not threading.main_thread():  # others get no signals
        yield
        return
    before = {s: signal.signal(s, signal.SIG_IGN) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Campaign:
    def __init__(
        self, settings: CampaignSettings, began: float, tell: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._tell = tell
        self._journal = Journal(settings.out)
        left = settings.budget_s - self._journal.elapsed_s
        own = min(left, settings.slice_s or left)
        reserve = min(max(own * _PACK_PART, _PACK_S[0]), _PACK_S[1])
        self._left_s = left
        # Whether this call continues to the end of the budget.
        self._last = own >= left
        self._workers = Workers(settings.device, began + own - min(reserve, own / 2))
        self._hosts: JsonObject = {}
        last = self._journal.hosts[-1]["frameworks"] if self._journal.hosts else {}
        self._able = _kinds({n: str(h.get("platform")) for n, h in last.items()}, self._platform)

    def run(self) -> Outcome:
        plan = self._plan(self._platform)
        # The rest of the budget is shorter than the time reserved for packing.
        if self._left_s < 1.0 or self._settings.budget_s <= self._journal.used_up_s:
            return self._outcome(DONE, plan, _USED_UP)
        self._journal.add("slice")
        before = len(self._journal.finished)
        try:
            platform = self._find()
            if not platform:
                return self._ended_used_up(plan)
            plan = self._plan(platform)
            telemetry = self._settings.out / f"telemetry-{self._journal.slices:03d}.csv"
            with Telemetry(telemetry, platform):
                why = self._loop(plan)
        except KeyboardInterrupt:
            with _uninterrupted():
                # It may have come between writing a line and updating this object.
                self._journal = Journal(self._settings.out)
                self._journal.add("end")
                self._outcome(MORE, plan, "interrupted")
                self._workers.stop()
            raise
        finally:
            self._workers.stop()
        left = self._remaining(plan)
        if left and self._last and not why:
            return self._ended_used_up(plan)
        self._journal.add("end")
        if why:
            return self._outcome(FAILED, plan, why)
        if left and not self._last and len(self._journal.finished) == before:
            # Otherwise a script that repeats the command until the status changes would never end.
            return self._outcome(FAILED, plan, "the slice is too short for what is left")
        if left:
            return self._outcome(MORE, plan, "the slice has ended; the same command goes on")
        return self._outcome(DONE, plan, "all is measured")

    def _plan(self, platform: str) -> Plan:
        return load_plan(platform, self._settings.programs, self._settings.budget_s)

    def _ended_used_up(self, plan: Plan) -> Outcome:
        self._journal.add("end", used_up_s=self._settings.budget_s)
        return self._outcome(DONE, plan, _USED_UP)

    @property
    def _platform(self) -> str:
        """The platform that was found before."""
        return self._journal.platform or "cpu"

    def _find(self) -> str:
        """Ask each framework for its devices; those that see the device measure.

        Returns:
            The platform; empty if the rest of the budget is too short to start a framework.

        Raises:
            ProfileError: There is no framework, or no such device.
        """
        wanted = self._settings.device
        seen: dict[str, str] = {}
        # JAX last, since its worker then measures the first cases.
        for framework, kind in (("torch", "torch"), ("jax", "xla")):
            if importlib.util.find_spec(framework) is None:
                self._hosts[framework] = {"missing": "not installed"}
                continue
            try:
                self._hosts[framework] = self._workers.hello(kind)
                seen[framework] = str(self._hosts[framework]["platform"])
            except ProfileError as error:
                self._hosts[framework] = {"missing": error.what}
        if not seen:
            reasons = "; ".join(f"{n}: {h['missing']}" for n, h in self._hosts.items())
            late = self._workers.left_s < 1.0
            if late and self._last and self._journal.done:
                return ""
            raise ProfileError(
                f"no framework can measure here ({reasons})",
                hint="give it more time" if late else "install jax or torch",
            )
        # An accelerator that one framework sees counts, even if the other has its CPU build.
        platform = next((p for p in seen.values() if p != "cpu"), "cpu")
        if wanted not in ("auto", platform):
            raise ProfileError(
                f"no {wanted} is seen: "
                + ", ".join(f"{name} sees a {own}" for name, own in seen.items()),
                hint="install the build of the framework for it",
            )
        if self._journal.platform not in ("", platform):
            raise ProfileError(
                f"the folder has a campaign of a {self._journal.platform}, this is a {platform}",
                where=str(self._settings.out),
                hint="give another folder",
            )
        self._able = _kinds(seen, platform)
        self._workers.measure_on(platform)
        if platform == "cpu" and wanted == "auto":
            own = {n: h.get("missing") or h.get("no_accelerator") for n, h in self._hosts.items()}
            reasons = "; ".join(f"{name} ({scrubbed_text(str(why))})" for name, why in own.items())
            self._tell(f"rehearsal on a CPU: no accelerator was seen by {reasons}")
        self._journal.add("host", platform=platform, record=host_record(self._hosts, platform))
        return platform

    def _loop(self, plan: Plan) -> str:
        """Measure block by block; returns why the campaign has to give up, or an empty text."""
        stage, since = "", time.monotonic()
        while self._workers.left_s > 0.5:
            turn = max(self._settings.budget_s * TURN_PART, _STARTS * self._workers.start_s)
            prefer = stage if time.monotonic() - since < turn else ""
            block = plan.next_block(
                self._journal.finished,
                self._journal.spent_s,
                self._able,
                self._journal.each_s,
                self._workers.left_s,
                prefer,
                self._workers.kind,
                self._workers.measured,
            )
            if not block:
                return ""
            if block[0].stage != stage:
                stage, since = block[0].stage, time.monotonic()
            if not self._measure(block):
                self._able.discard(block[0].worker)
            if not self._able:
                return "the accelerator is lost: no worker starts any more"
            if self._workers.stuck:
                return "the driver holds a worker that cannot be ended: restart the machine"
        return ""

    def _measure(self, block: Sequence[Case]) -> bool:
        """Measure a block; returns whether a worker of its kind could be started."""
        begin = time.monotonic()
        rows = self._ready(block)
        if rows is None:
            return self._workers.left_s < 1.0
        self._journal.add("begin", keys=[case.key for case in block])
        found = self._workers.measure(block)
        self._journal.add(
            "block",
            stage=block[0].stage,
            kind=block[0].kind,
            worker=block[0].worker,
            seconds=round(time.monotonic() - begin, 3),
            done=found.done,
            failed=found.failed,
            unfinished=found.unfinished,
            rows=self._journal.keep([*rows, *found.rows]),
        )
        for key, reason in found.failed.items():
            self._tell(f"{key} failed: {reason}")
        done = len(self._journal.done)
        self._tell(f"{self._journal.elapsed_s:.0f} s: {block[0].stage}, {done} cases measured")
        return True

    def _ready(self, block: Sequence[Case]) -> list[JsonObject] | None:
        """Prepare a worker for a block; ``None`` if none starts after several attempts."""
        first = block[0]
        again = [c.repeats for c in block if c.replicate]
        for pause in (*_PAUSES_S, None):
            try:
                return self._workers.ready(first.worker, again)
            except ProfileError as error:
                self._workers.stop()
                self._journal.add("note", text=f"worker {first.worker}: {error.what}")
                if pause is None or self._workers.left_s < 2 * pause:
                    return None
                time.sleep(pause)
        return None

    def _remaining(self, plan: Plan) -> int:
        finished = self._journal.finished
        return sum(c.worker in self._able and c.key not in finished for c in plan.cases)

    def _outcome(self, status: int, plan: Plan, why: str) -> Outcome:
        journal = self._journal
        if status == DONE and not journal.done:
            status, why = FAILED, f"nothing could be measured; {why}"
        with _uninterrupted():
            archive = pack(self._settings.out, journal, plan, why) if journal.done else None
        left = self._remaining(plan)
        if left and why.endswith(_USED_UP):
            why += "; raise --budget"
        return Outcome(status, archive, len(journal.done), len(journal.failed), left, why)


def _kinds(seen: Mapping[str, str], platform: str) -> set[str]:
    """Kinds of workers that measure a platform, by the platform that each framework sees."""
    return {kind for kind, name in WORKERS.items() if seen.get(name) == platform}
