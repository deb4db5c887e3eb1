"""What a campaign measures, in order of value: entries of ``plan.toml`` or ``rehearsal.toml``.

Time goes to the stage that is furthest behind its share, so that a campaign that ends early has
some results of each; within a stage the order is that of the file.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

from ...common.errors import ProfileError
from ...common.options import Option, duration_text, folder, seconds_of
from ...common.types import JsonMapping, JsonObject
from ..profile.plan import REPLICATE

#: Specification of a case: sizes and words by name.
Spec = Mapping[str, object]
#: Plan files by platform; any other platform uses the plan for accelerators.
_FILES = {"cpu": "rehearsal.toml"}
#: Maximum fraction of the budget for which a case runs back to back.
_LONG_PART = 1 / 50
#: Suffixes of given programs.
_PROGRAMS = (".mlir", ".mlir.gz", ".hlo", ".hlo.gz", ".stablehlo", ".mlirbc")
#: Fraction of the budget that a stage gets in one go, since a change of worker costs seconds.
TURN_PART = 1 / 8
#: Guessed seconds until a worker measures, and for finding the device.
_START_S, _FIND_S = 15.0, 25.0
#: Selectable platforms; ``auto`` is the accelerator that a framework finds, otherwise the CPU.
DEVICES = ("auto", "gpu", "tpu", "cpu")


@dataclass(frozen=True)
class CampaignSettings:
    """Settings of ``opcast campaign``."""

    out: Annotated[Path, Option("Folder to write; the same one again goes on.", check=folder)] = (
        Path("campaign")
    )
    budget_s: Annotated[
        float,
        Option(
            "Time of all slices together.",
            ("--budget",),
            parse=seconds_of,
            shown=duration_text,
        ),
    ] = 1500.0
    slice_s: Annotated[
        float | None,
        Option("Time of this call; by default all.", ("--slice",), parse=seconds_of),
    ] = None
    device: Annotated[str, Option("auto, gpu, tpu, or cpu for a rehearsal.")] = "auto"
    programs: Annotated[
        Path | None, Option("Folder of StableHLO or HLO programs to measure, too.")
    ] = None
    plan: Annotated[
        bool, Option("Tell what would be measured, and measure nothing.", ("--plan",))
    ] = False


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Attributes:
        key: Identifies it in the journal and in all tables.
        stage: Stage of the plan.
        kind: How it is measured, a kind of the worker's tasks.
        worker: Kind of process that measures it, a key of ``client.WORKERS``.
        spec: Sizes and words by name.
        timeout_s: Seconds without a reply after which it counts as stuck.
    """

    key: str
    stage: str
    kind: str
    worker: str
    spec: Spec = field(hash=False)
    timeout_s: float = 120.0

    @property
    def replicate(self) -> bool:
        """Whether it is a second measurement."""
        return REPLICATE in self.key

    @property
    def repeats(self) -> str:
        """Key of the case that it repeats; its own if it is not a repetition."""
        return self.key.partition(REPLICATE)[0]


@dataclass(frozen=True)
class Entry:
    """Cases that are measured in the same way.

    Attributes:
        cases: Cases in order of value.
        block: Maximum number of cases that one request measures together.
    """

    cases: tuple[Case, ...]
    block: int = 1


@dataclass
class Plan:
    """Entries by stage.

    Attributes:
        entries: Entries in order of value.
        shares: Share of the time by stage.
        estimates: Estimated seconds per case, except back-to-back runs, by stage and kind.
    """

    entries: Sequence[Entry]
    shares: Mapping[str, float]
    estimates: Mapping[tuple[str, str], float] = field(default_factory=dict)

    @property
    def cases(self) -> list[Case]:
        """All cases, in the order of the file."""
        return [case for entry in self.entries for case in entry.cases]

    def next_block(
        self,
        done: Iterable[str],
        spent: Mapping[str, float],
        workers: Iterable[str],
        fits: Mapping[tuple[str, str], float],
        left_s: float,
        prefer: str = "",
        worker: str = "",
        here: Collection[str] = (),
    ) -> list[Case]:
        """The next cases to measure; empty when nothing is left that may end in time.

        Args:
            done: Keys of finished cases.
            spent: Seconds by stage.
            workers: Kinds of workers that run on this host.
            fits: Measured seconds per case so far, by stage and kind.
            left_s: Seconds until the end.
            prefer: Stage to stay with, if it has cases left.
            worker: Kind of the current worker: among the stages that are behind their share, one
                that it can measure comes first.
            here: Keys that the current worker has measured. Their replicates wait for another
                worker as long as there is anything else.
        """
        finished, able = set(done), set(workers)
        found: dict[str, list[Case]] = {}
        later: dict[str, list[Case]] = {}
        for entry in self.entries:
            left = [c for c in entry.cases if c.key not in finished and c.worker in able]
            waits = [c for c in left if c.replicate and c.repeats in here]
            for chosen, place in (([c for c in left if c not in waits], found), (waits, later)):
                if not chosen or chosen[0].stage in place:
                    continue
                first = chosen[0]
                each = self.seconds(first, fits)
                count = entry.block if each <= 0 else min(entry.block, int(left_s / each))
                if count > 0:
                    # Replicates are measured by a different process than the original.
                    alike = itertools.takewhile(partial(_alike, first), chosen)
                    place[first.stage] = list(itertools.islice(alike, count))
        found = found or later
        if not found:
            return []
        if prefer in found:
            return found[prefer]
        behind = {s: spent.get(s, 0.0) / self.shares[s] for s in found}
        mean = sum(spent.values()) / sum(self.shares.values())

        def order(stage: str) -> tuple[bool, bool, float]:
            # A change of worker costs seconds.
            change = bool(worker) and found[stage][0].worker != worker
            return behind[stage] > mean, change, behind[stage]

        return found[min(found, key=order)]

    def seconds(self, case: Case, fits: Mapping[tuple[str, str], float]) -> float:
        """Measured or estimated duration of a case like this; 0 if unknown."""
        # The spec of a long run contains its minimum duration.
        least = float(str(case.spec.get("seconds", 0.0)))
        what = (case.stage, case.kind)
        return max(fits[what], least) if what in fits else self.estimates.get(what, 0.0) + least


def _alike(one: Case, other: Case) -> bool:
    """Whether one request can measure both."""
    return (one.worker, one.kind, one.replicate) == (other.worker, other.kind, other.replicate)


def load_plan(platform: str, programs: Path | None = None, budget_s: float = math.inf) -> Plan:
    """Read the plan of a platform.

    Args:
        platform: ``gpu``, ``tpu`` or ``cpu``.
        programs: Folder of the user's programs, measured along with those of the first stage.
        budget_s: Seconds of the campaign, which limit long runs.

    Raises:
        ProfileError: The folder contains no program.
    """
    path = Path(__file__).with_name(_FILES.get(platform, "plan.toml"))
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    entries = [
        made
        for entry in data["entry"]
        if platform in entry.get("on", (platform,))
        for made in [_entry(entry, _given(programs) if entry.get("given") else [], budget_s)]
        if made.cases
    ]
    shares = {str(k): float(v) for k, v in data["shares"].items()}
    estimates = {
        (stage, kind): float(seconds)
        for stage, own in data.get("estimates", {}).items()
        for kind, seconds in own.items()
    }
    return Plan(entries, shares, estimates)


def _given(folder: Path | None) -> list[JsonObject]:
    if folder is None:
        return []
    files = [p for p in sorted(folder.rglob("*")) if p.name.endswith(_PROGRAMS)]
    if not files:
        raise ProfileError(
            "no program in this folder",
            where=str(folder),
            hint=f"expected files that end in {', '.join(_PROGRAMS)}",
        )
    # File names may reveal more than their owner wants.
    return [
        {"program": f"given-{hashlib.sha256(p.read_bytes()).hexdigest()[:12]}", "file": str(p)}
        for p in files
    ]


def _entry(data: JsonMapping, given: Sequence[JsonObject], budget_s: float) -> Entry:
    """Create the cases of an entry: listed ones, the product of a grid, and given programs."""
    specs = list(data.get("cases", []))
    for grid in data.get("grids", []):
        values = [v if isinstance(v, list) else [v] for v in grid.values()]
        specs += [dict(zip(grid, chosen, strict=True)) for chosen in itertools.product(*values)]
    specs = [data.get("all", {}) | spec for spec in (*specs, *given)]
    block, runs = data.get("block", 1), data["runs"]
    for run in runs:
        if "seconds" in run:
            run["seconds"] = min(float(run["seconds"]), budget_s * _LONG_PART)
    cases: list[Case] = []
    for start in range(0, len(specs), block):
        # Blocks of several kinds alternate, so that an early end has the first ones of all kinds.
        for run in runs:
            cases += [_case(data, run, spec) for spec in specs[start : start + block]]
    again = data.get("replicates", 0)
    # Spread over the entry, since its first cases are alike.
    step = max(1, math.ceil(len(specs) / again)) if again else 1
    for run in runs if again else ():
        # Only times are compared: a long run is not repeated.
        run.pop("seconds", None)
        cases += [_case(data, run, spec, f"{REPLICATE}1") for spec in specs[::step]]
    return Entry(tuple(cases), block)


def _case(data: JsonMapping, run: JsonMapping, spec: JsonObject, mark: str = "") -> Case:
    own = spec | {k: v for k, v in run.items() if k not in ("kind", "worker", "timeout_s")}
    # A given program's path stays on this machine, and another budget has different seconds.
    words = "-".join(_word(n, value) for n, value in own.items() if n not in ("file", "seconds"))
    stage, kind = data["stage"], run["kind"]
    key = f"{stage}/{kind}/{words}{mark}"
    return Case(key, stage, kind, run["worker"], own, float(run.get("timeout_s", 120.0)))


def _word(name: str, value: object) -> str:
    if isinstance(value, list):
        value = "x".join(map(str, value))
    return str(value) if isinstance(value, str) else f"{name}{value}"


def forecast(plan: Plan, budget_s: float) -> Iterator[tuple[float, list[Case]]]:
    """Yield the blocks that would be measured, each with its start time in seconds.

    Times are the plan's estimates; a campaign replaces them by measured ones.
    """
    now, since, stage, worker = _FIND_S, _FIND_S, "", ""
    done: set[str] = set()
    here: set[str] = set()
    spent = dict.fromkeys(plan.shares, 0.0)
    able = {case.worker for case in plan.cases}
    while True:
        prefer = stage if now - since < budget_s * TURN_PART else ""
        block = plan.next_block(done, spent, able, {}, budget_s - now, prefer, worker, here)
        if not block:
            return
        first, begin = block[0], now
        if first.worker != worker or any(c.replicate and c.repeats in here for c in block):
            now, worker, here = now + _START_S, first.worker, set()
        if now + plan.seconds(first, {}) > budget_s:
            return
        if first.stage != stage:
            stage, since = first.stage, begin
        yield now, block
        now += sum(plan.seconds(case, {}) for case in block)
        spent[stage] += now - begin
        done |= {case.key for case in block}
        here |= {case.key for case in block}


def outline(settings: CampaignSettings) -> list[str]:
    """Description of what a campaign would measure: every block, then the number of each kind."""
    platform = settings.device if settings.device != "auto" else "gpu"
    plan = load_plan(platform, settings.programs, settings.budget_s)
    lines = [f"plan for a {platform}, {settings.budget_s / 60:g} minutes, by guessed times"]
    counts: Counter[tuple[str, str]] = Counter()
    for start, block in forecast(plan, settings.budget_s):
        first = block[0]
        counts.update((case.stage, case.kind) for case in block)
        more = f" and {len(block) - 1} like it" if len(block) > 1 else ""
        lines.append(f"{start / 60:6.1f} min  {first.worker:5}  {first.key}{more}")
    planned = Counter((case.stage, case.kind) for case in plan.cases)
    lines += [f"{s} ({k}): {counts[s, k]} of {number}" for (s, k), number in planned.items()]
    return lines
