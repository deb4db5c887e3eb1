"""One profile run: measure a plan of programs for a given time, safely, and record its quality.

Measuring happens in a worker process that may die. A run can be stopped at any moment and resumed
with the same folder; a program counts as done once its rows are on disk. Rows are written only
after the anchors (fixed programs) have shown that the machine was not disturbed meanwhile.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from ...common.errors import ProfileError
from ...common.files import write_text
from ...common.progress import Progress
from ...common.types import JsonMapping, JsonObject
from ...features.devices.device import DeviceSpec
from ...features.devices.identity import compare_ceilings, is_measured
from ..dataset_folder import RunWriter, done_programs, run_records
from .anchors import DISTURBED, AnchorLog
from .plan import Item, Plan, ProfileResult, ProfileSettings
from .worker import has_nvidia_gpu
from .worker_client import Measurer

logger = logging.getLogger(__name__)

#: Progress for people and dashboards; opcast does not read it.
PROGRESS = "progress.json"
#: Remedy if JAX finds a platform other than the requested one.
_INSTALL = {
    "gpu": 'pip install "jax[cuda13]" on a machine with an NVIDIA GPU',
    "tpu": 'pip install "jax[tpu]" on a TPU machine',
    "cpu": "set JAX_PLATFORMS=cpu",
}
#: Seconds that a probe of all sizes and types takes on a slow machine.
_PROBE_S = 35.0
#: Pauses in seconds between checks of the anchors while the machine is disturbed: most disturbances
#: are short.
_PAUSES_S = (2.0, 5.0, 10.0, 20.0)
#: Failures without any success after which a run gives up: the installation is at fault then, not
#: the programs.
_BROKEN = 20


class ProfileRun:
    """One run: from starting the worker to the final record.

    Args:
        folder: The dataset's folder, which exists.
        settings: Settings of the run.
        given: Given programs.
        device_spec: The device, if it is not to be probed.
    """

    def __init__(
        self,
        folder: Path,
        settings: ProfileSettings,
        given: Sequence[Item],
        device_spec: DeviceSpec | None,
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._start = time.monotonic()
        # Seconds after the start at which the first program begins and the last one ends.
        self._setup_s: float | None = None
        self._measured_s: float | None = None
        self._plan = Plan(settings.mix, settings.seed, settings.suite, given)
        self._done: set[str] = set()
        # The id sorts by time; the random part separates two runs within one second.
        now = datetime.datetime.now(datetime.UTC)
        self._run_id = f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
        self._run = RunWriter(folder, self._run_id)
        self._run.record["date"] = now.isoformat()
        self._earlier = run_records(folder)
        self._device_spec = device_spec
        # Compiling the next batch takes a core or two: with four cores or fewer it would disturb
        # measurements on the CPU itself.
        overlap = (os.cpu_count() or 1) > 4 or has_nvidia_gpu()
        worker = {
            "memory": settings.max_memory or 0,
            "overlap": overlap,
            "wall_s": settings.wall_s,
        }
        self._overlap = overlap
        self._measurer = Measurer(worker, settings.timeout_s)
        self._anchors = AnchorLog()
        self._measured: list[Item] = []
        self._replicated: set[str] = set()
        self._failed = 0
        self._last_reason = ""
        self._missing = 0
        self._disturbed = 0
        self._waited_s = 0.0
        self._spent: dict[str, float] = {}
        self._disturbances: list[dict[str, object]] = []
        budget = settings.budget_s
        self._budget_s = budget
        # A fresh worker bounds leaks and gives replicates another process: about four times in a
        # short run, every four minutes in a long one.
        self._recycle_s = settings.recycle_every_s or max(20.0, min(240.0, (budget or 600.0) / 4))

    def _resume(self, device: DeviceSpec) -> None:
        """Account for earlier runs on the device: their programs, and their share of the budget.

        Measurements of other devices in the folder do not count.
        """
        own = {
            run: record
            for run, record in self._earlier.items()
            if "device" in record and DeviceSpec.from_dict(record["device"]) == device
        }
        self._done = done_programs(self._folder, own)
        for record in own.values():
            if record.get("plan") != self._plan.record():
                continue
            if self._budget_s is not None:
                self._budget_s -= float(record.get("elapsed_s", 0.0))
            for stream, seconds in record.get("spent_s", {}).items():
                self._plan.spent[stream] = self._plan.spent.get(stream, 0.0) + float(seconds)

    def execute(self, progress: bool = True) -> ProfileResult:
        """Measure until the budget or the plan ends, or Ctrl-C."""
        try:
            host = self._measurer.client.ask("hello")["host"]
            _check_device(self._settings.device, host)
            device = self._device_spec or self._known_device(host["device_name"])
            if device is None:
                # A run of seconds does not probe for longer than it measures.
                seconds = min(_PROBE_S, self._budget_s or _PROBE_S)
                probe = self._measurer.client.ask("probe", seconds=seconds)
                device = DeviceSpec.from_dict(probe["device"])
            self._resume(device)
            # Earlier runs may have used up the budget; the probe alone does not, so that a short
            # run measures something.
            if self._budget_s is not None and self._budget_s <= 0.0:
                return self._result("budget")
            if self._plan.mix.get("zoo"):
                suite = self._measurer.client.ask("suite", name=self._settings.suite)
                self._plan.zoo_size = int(suite["size"])
            batch = self._plan.next_batch(self._done)
            if not batch:
                return self._result("done")
            self._begin(host, device)
            self._setup_s = time.monotonic() - self._start
            stopped = self._loop(batch, progress)
            self._measured_s = time.monotonic() - self._start
            return self._finish(stopped)
        finally:
            self._measurer.restart()

    def _begin(self, host: JsonObject, device: DeviceSpec) -> None:
        self._run.record |= {
            "device": asdict(device),
            "host": host,
            "plan": self._plan.record(),
            "settings": asdict(self._settings),
        }
        for _ in range(3):  # the first ones still warm up
            self._check_anchors()
        self._write_record("running")

    def _known_device(self, name: str) -> DeviceSpec | None:
        """The description from an earlier run in the folder that still fits the machine, if any.

        A dataset thus has one description per machine, even if two machines have the same name.
        """
        records = [r["device"] for r in self._earlier.values() if r["device"]["name"] == name]
        # The newest description first.
        specs = [DeviceSpec.from_dict(record) for record in reversed(records)]
        # Descriptions from the catalogue have no measured ceilings to compare with.
        if not any(map(is_measured, specs)):
            return next(iter(specs), None)
        now = DeviceSpec.from_dict(self._measurer.client.ask("ceilings")["device"])
        compared = [compare_ceilings(now, spec) for spec in specs]
        for spec, speed in zip(specs, compared, strict=True):
            if speed.same:
                return spec
        logger.warning(
            "this machine runs at %s of the %s of the last run in %s: it is measured anew, and "
            "its samples count as another device's",
            compared[0],
            name,
            self._folder,
        )
        return None

    def _loop(self, batch: list[Item], progress: bool) -> str:
        budget = self._budget_s
        total = budget if budget is not None else float(len(self._plan.given))
        unit = "s" if budget is not None else "programs"
        checked = recycled = time.monotonic()
        try:
            with Progress(total, unit, progress) as bar:
                while batch:
                    due = time.monotonic() - checked > self._settings.check_every_s
                    ahead = self._plan.next_batch(self._done | {i.key for i in batch})
                    # No compiling ahead of a checkpoint: the worker is asked for anchors next.
                    self._measure(batch, ahead if self._overlap and not due else [])
                    self._check_not_broken()
                    last, batch = batch, ahead
                    self._show(bar, unit)
                    # A batch that was sent ahead has to be measured before anything else.
                    sent_ahead = self._overlap and not due and bool(batch)
                    if not sent_ahead and (due or not batch or self._out_of_time()):
                        self._checkpoint(last, bar)
                        checked = time.monotonic()
                    if not sent_ahead and self._out_of_time():
                        return "budget"
                    # Only after a checkpoint, when no batch is in progress.
                    if due and time.monotonic() - recycled > self._recycle_s:
                        self._measurer.restart()
                        self._replicate()
                        recycled = time.monotonic()
                return "done"
        except KeyboardInterrupt:
            logger.info("interrupted; what was measured is kept")
            return "interrupted"

    def _measure(self, batch: list[Item], ahead: list[Item]) -> None:
        begin = time.monotonic()
        for item, reply in zip(batch, self._measurer.measure(batch, ahead), strict=True):
            self._done.add(item.key)
            if "rows" in reply:
                self._run.add_rows(reply["rows"], self._run.record["device"]["name"])
                self._missing += int(reply["missing"])
                self._disturbed += int(reply["disturbed"])
                self._measured.append(item)
            else:
                logger.info("%s failed: %s", item.key, reply["failed"])
                self._last_reason = str(reply["failed"])
                self._run.add_failure(item.key, self._last_reason)
                self._failed += 1
        # Compiling counts as well: shares of the mix are shares of wall time.
        stream, seconds = batch[0].stream, time.monotonic() - begin
        for spent in (self._spent, self._plan.spent):
            spent[stream] = spent.get(stream, 0.0) + seconds

    def _check_not_broken(self) -> None:
        """Stop, and count nothing as done, if the programs are evidently not at fault.

        Raises:
            ProfileError: Many generated programs failed and none succeeded.
        """
        if not self._measured and self._failed >= _BROKEN and set(self._plan.mix) != {"given"}:
            raise ProfileError(
                f"the first {self._failed} programs all failed, the last one with: "
                f"{self._last_reason}",
                hint="is the installation complete?",
            )

    def _check_anchors(self) -> float:
        reply = self._measurer.client.ask("anchors")
        self._measurer.settings["pulse_s"] = reply["pulse_s"]
        return self._anchors.add(time.monotonic() - self._start, reply["values_us"])

    def _checkpoint(self, last: list[Item], bar: Progress) -> None:
        """Write the measurements after a check of the anchors; wait if the machine is disturbed.

        The last batch is then measured again. Earlier ones followed soon after a good check of the
        anchors, and their medians tolerate a disturbance of less than half their time.
        """
        ratio = self._check_anchors()
        # A run without a budget (given programs alone) counts as one of ten minutes.
        patience = self._settings.patience * (self._settings.budget_s or 600.0)
        if ratio > DISTURBED and self._waited_s < patience:
            event = {"time_s": round(time.monotonic() - self._start, 1), "ratio": round(ratio, 3)}
            begin = time.monotonic()
            for pause in _PAUSES_S:
                self._show(bar, "", f"anchors {ratio:.2f} times slower, waiting")
                time.sleep(pause)
                ratio = self._check_anchors()
                if ratio <= DISTURBED or time.monotonic() - begin + self._waited_s > patience:
                    break
            self._waited_s += time.monotonic() - begin
            again = [item for item in last if item in self._measured]
            self._disturbances.append(
                event
                | {
                    "waited_s": round(time.monotonic() - begin, 1),
                    "ratio_after": round(ratio, 3),
                    "measured_again": [item.key for item in again],
                }
            )
            if again:
                self._run.drop_rows([item.key for item in again])
                self._measured = [item for item in self._measured if item not in again]
                self._measure(again, [])
        elif ratio > DISTURBED:
            self._disturbances.append(
                {"time_s": round(time.monotonic() - self._start, 1), "ratio": round(ratio, 3)}
            )
        self._run.flush()
        self._write_record("running")

    def _replicate(self) -> None:
        """Measure a few random earlier programs again, in the current worker."""
        fresh = [i for i in self._measured if i.key not in self._replicated and not i.replicate]
        share = self._settings.replicate_share
        count = round(share * sum(not i.replicate for i in self._measured)) - len(self._replicated)
        # Short runs get at least one replicate per worker, so that there is a noise floor.
        if share > 0 and len(fresh) >= 5:
            count = max(count, 1)
        if count <= 0 or not fresh:
            return
        rng = np.random.default_rng([self._settings.seed, len(self._measured)])
        chosen = [fresh[i] for i in rng.permutation(len(fresh))[:count]]
        self._replicated.update(item.key for item in chosen)
        for item in chosen:
            self._measure([replace(item, replicate=1)], [])

    def _finish(self, stopped: str) -> ProfileResult:
        # A user who interrupts a run does not want to wait for replicates.
        if stopped != "interrupted":
            try:
                self._measurer.restart()
                self._replicate()
                self._check_anchors()
            except KeyboardInterrupt:
                stopped = "interrupted"
            except ProfileError as error:
                logger.warning("no final check: %s", error)
        self._run.flush()
        self._write_record(stopped)
        return self._result(stopped)

    def _out_of_time(self) -> bool:
        return self._budget_s is not None and time.monotonic() - self._start >= self._budget_s

    def _show(self, bar: Progress, unit: str, note: str = "") -> None:
        programs = len(self._measured)
        done = time.monotonic() - self._start if unit != "programs" else programs + self._failed
        bar.update(float(done), self._run.samples, programs, self._failed, note)

    def _write_record(self, state: str) -> None:
        counts = {
            "samples": self._run.samples,
            "programs": len(self._measured),
            "failed": self._failed,
            "kernels_without_label": self._missing,
            "programs_while_disturbed": self._disturbed,
            "worker_starts": self._measurer.starts,
        }
        self._run.record |= {
            "state": state,
            "elapsed_s": round(time.monotonic() - self._start, 2),
            "spent_s": {s: round(v, 2) for s, v in self._spent.items()},
            "counts": counts,
            "anchors": self._anchors.record(),
            "noise_floor": self._anchors.spread(),
            "replicated": sorted(self._replicated),
            "disturbances": self._disturbances,
        }
        self._run.save_record()
        progress = {
            "state": state,
            "run_id": self._run_id,
            "elapsed_s": self._run.record["elapsed_s"],
            "done_programs": len(self._done),
            **counts,
        }
        write_text(self._folder / PROGRESS, json.dumps(progress, indent=1, sort_keys=True))

    def _result(self, stopped: str) -> ProfileResult:
        elapsed = time.monotonic() - self._start
        return ProfileResult(
            folder=self._folder,
            run_id=self._run_id if "device" in self._run.record else "",
            samples=self._run.samples,
            programs=len(self._measured),
            failed=self._failed,
            elapsed_s=elapsed,
            stopped=stopped,
            # A run without remaining work consists of set-up only.
            setup_s=elapsed if self._setup_s is None else self._setup_s,
            check_s=0.0 if self._measured_s is None else elapsed - self._measured_s,
        )


def _check_device(wanted: str, host: JsonMapping) -> None:
    """Refuse to measure on a kind of device other than the requested one.

    Raises:
        ProfileError: JAX finds another platform.
    """
    if wanted not in ("local", host["platform"]):
        raise ProfileError(
            f"JAX sees a {host['platform']} ({host['device_kind']}), not a {wanted}",
            hint=_INSTALL[wanted],
        )
