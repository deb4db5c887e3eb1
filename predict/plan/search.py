"""The search: screen all plans, compile the best ones, and store the results.

Compiled plans are rows of ``plan.json`` in the results folder, and compiled modules are in the
lowering cache, so that an interrupted search can be resumed.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from math import inf, prod

from ...common.errors import DatasetError, PlanError
from ...common.files import read_json, write_text
from ...common.tasks import run_pieces
from ...features.ir.partitioning import header_counts
from ...simulate.clusters.catalogue import find_cluster
from ...simulate.clusters.topology import Cluster
from ..api import loaded
from .case import PlanCase
from .cost import Screened, Sheet
from .judge import (
    Annotated,
    CompiledPlan,
    PlanJob,
    PlanRow,
    alone,
    axes_of,
    chosen,
    judge_alone,
    judge_plans,
)
from .pipeline import Pipelines, pipeline_row
from .program import PlannedProgram
from .space import Change, Plan

#: Minimum seconds for the first compilation, without which there is no answer.
_LEAST_S = 30.0
#: Maximum micro-batches to search. Engineering choice: a plan that needs more is better off with
#: more devices; ``--micro-batches`` takes any number.
_MOST_MICRO = 16
_PLANS = "plan.json"
#: Name of the row of a program with its own shardings.
AS_GIVEN = "as given"
#: Name of the row of the program on a single device.
ONE_DEVICE = "one device"


@dataclass
class PlanSearch:
    """A search and the folder of its results.

    Attributes:
        program: The program.
        case: Settings of the search.
        cluster: The cluster.
        pipelines: Whether to search pipelines; ``None`` to do so with several nodes or if nothing
            else may fit.
        memory: Bytes that may be used per device; 0 before the screening for the device's own.
        screened: All plans with screened costs, the fastest first.
        rows: Compiled plans, by key.
        stages: Compiled stages of pipelines, by key.
        left: Chosen plans that were not compiled, of ``wanted``.
        stopped: Whether Ctrl-C ended the search.
        refused: Reasons why the program cannot be changed in some way.
        missing: Mesh axes that occur in screened plans, but in no compiled one.
        started: Start of the search on the clock of ``time.monotonic``.
    """

    program: PlannedProgram
    case: PlanCase
    cluster: Cluster = field(init=False)
    pipelines: bool | None = field(init=False)
    memory: float = field(init=False)
    screened: list[Screened] = field(default_factory=list)
    rows: dict[str, PlanRow] = field(default_factory=dict)
    stages: dict[str, PlanRow] = field(default_factory=dict)
    left: int = 0
    wanted: int = 0
    stopped: bool = False
    refused: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    _longest_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        """Initialize the fields that depend on the settings."""
        self.cluster = find_cluster(self.case.cluster)
        self.memory = self.case.memory
        self.pipelines = self.case.pipelines

    def screen(self) -> Sheet:
        """Screen all plans over the cluster's devices and over fewer of them.

        Rematerialization and micro-batches cost time, so they are only considered if the fastest
        plan without them may not fit.

        Returns:
            The sheet that plans of the first change (without a request: none) were screened with.

        Raises:
            PlanError: No mesh of two devices divides the program's sizes, or the program cannot be
                changed as requested.
        """
        remat = self.case.layers or 0
        if remat < 0:
            # Without equal layers use 1: the refusal gives the reason.
            remat = self.program.layers.count if self.program.layers else 1
        first = Change(remat, self.case.parts or 1)
        sheet = self._screen(first)
        if not self._fits(self.screened):
            self._screen_changes(first)
        if self.pipelines is None:
            self.pipelines = bool(self.cluster.box) or not self._fits(self.screened)
        if self.pipelines:
            self._screen_pipelines(first.remat)
        if not self.screened:
            raise self._nothing()
        return sheet

    def _screen_pipelines(self, remat: int) -> None:
        """Screen pipelines, with ever smaller micro-batches."""
        own = self.pipelines_of
        try:
            self._add(own.screened(remat, self.case.parts, self.case.used_axes))
            layers = self.program.layers
            if layers and self.case.layers is None and not self._fits(self.screened):
                self._add(own.screened(layers.count, self.case.parts, self.case.used_axes))
        except PlanError as error:
            self.refused.append(str(error))

    def _add(self, made: Iterable[Screened]) -> None:
        self.screened = sorted([*self.screened, *made], key=lambda s: s.seconds)

    @cached_property
    def pipelines_of(self) -> Pipelines:
        """The program split into stages."""
        return Pipelines(self.program, self.cluster, loaded(self.case.model))

    def planned(self, plan: Plan) -> PlannedProgram:
        """Return the program that a plan's other axes shard; for a pipeline one micro-batch."""
        if plan.stages > 1:
            return self.pipelines_of.of(plan)[0].program
        return self.program.changed(plan.change)

    def _screen_changes(self, first: Change) -> None:
        """Screen changes that need less memory: rematerialization, then ever more micro-batches."""
        remats = [first.remat]
        if self.case.layers is None:
            layers = self.program.layers
            remats += sorted({layers.count // 2, layers.count} - {0}) if layers else []
            if not layers:
                self.refused.append("no equal layers to rematerialise were found")
        micro = first.micro
        while True:
            for remat in remats:
                change = Change(remat, micro)
                if change != first:
                    before = len(self.screened)
                    try:
                        self._screen(change)
                    except PlanError as error:
                        if change.micro <= 2:
                            self.refused.append(str(error))
                        return
                    if len(self.screened) == before:
                        return
            own = [s for s in self.screened if s.plan.change.micro == micro]
            if self.case.parts is not None or self._fits(own) or micro >= _MOST_MICRO:
                return
            micro *= 2

    def _fits(self, screened: Sequence[Screened]) -> bool:
        """Return whether the fastest plan over all devices fits by the screening."""
        full = [s for s in screened if s.plan.devices == self.cluster.size] or list(screened)
        return not full or min(full, key=lambda s: s.seconds).memory <= self.memory

    def _screen(self, change: Change) -> Sheet:
        program = self.program.changed(change)
        plain = self.program.changed(Change(0, change.micro)) if change.remat else None
        sheet = program.sheet(self.cluster, loaded(self.case.model), plain)
        self.memory = self.memory or sheet.device.usable_bytes
        inside = self.cluster.box or self.cluster.size
        plans: list[Plan] = []
        count = self.cluster.size
        while count > 1:
            plans += program.space.plans(count, self.case.used_axes, inside)
            # Halves: nodes have a power of two of devices, or a small odd number.
            count = count // 2 if count % 2 == 0 else 1
        if not plans and not self.screened and self.pipelines is False:
            raise self._nothing()
        self._add(sheet.cost(replace(plan, change=change)) for plan in plans)
        return sheet

    def _nothing(self) -> PlanError:
        known = ", ".join(self.program.space.axes())
        told = "".join(f"; {reason}" for reason in self.refused)
        return PlanError(
            f"no mesh of {self.cluster.size} devices divides the program's sizes{told}",
            where=self.program.source.origin,
            hint=f"its axes are {known}; try a larger batch, fewer devices or other --axes",
        )

    def chosen(self, most: int) -> list[Plan]:
        """Return the plans worth compiling, in order."""
        return chosen(self.screened, most, self.cluster.size, self.memory)

    def key(self, plan: Plan | str) -> str:
        """Return the key of a plan's results: a digest of program, plan and settings."""
        return self._named(f"{self.program.source.content_hash} {plan}")

    def _named(self, text: str) -> str:
        own = f"{text} {self.cluster} {self.case.model} {self.case.lowering}"
        return hashlib.sha256(own.encode()).hexdigest()[:16]

    @property
    def left_s(self) -> float:
        """Remaining seconds of the budget."""
        return self.case.budget_s - (time.monotonic() - self.started)

    def _has_time(self) -> bool:
        """Return whether a compilation would finish in time, judging by earlier ones."""
        if self.stopped or self.case.budget_s <= 0:
            return False
        # The first plan is compiled in any case: without it there is no answer.
        return not self._longest_s or self.left_s > self._longest_s

    def compile_alone(self) -> CompiledPlan | None:
        """Return the row of the program on one device; ``None`` if it does not fit there.

        Raises:
            DatasetError: The folder's results cannot be read.
        """
        held = sum(own.type.nbytes for own in self.program.arguments)
        if self.memory and held > self.memory:
            return None
        self._load()
        key = self.key(ONE_DEVICE)
        if key not in self.rows and self._has_time():
            try:
                made = judge_alone(self._job(several=True), self.program.plain)
            except KeyboardInterrupt:
                self.stopped = True
                return None
            # The row has an empty plan: the unchanged program is the reference.
            self.rows[key] = replace(made, name=ONE_DEVICE, key=key)
            self._save()
        row = self.rows.get(key)
        if not isinstance(row, CompiledPlan):
            return None
        row = row.within(self.memory)
        return row if row.fits else None

    def compile(
        self, plans: Sequence[Plan], progress: Callable[[int, int], None] | None = None
    ) -> list[PlanRow]:
        """Compile plans without a row, as many as the budget allows; return all rows.

        Ctrl-C ends it early and keeps the results so far; ``left`` counts the missing plans.

        Raises:
            DatasetError: The folder's results cannot be read.
        """
        self._load()
        given = self.program.given
        # A plan without a mesh represents the program's own shardings.
        every = [*plans, Plan()] if given is not None else plans
        by_key = {self.key(plan): plan for plan in every}
        left = {key: plan for key, plan in by_key.items() if key not in self.rows}
        screened = {s.plan: s.seconds * 1e6 for s in self.screened}
        try:
            for count, row in enumerate(self._made(left), len(by_key) - len(left) + 1):
                plan = by_key[row.key]
                self.rows[row.key] = replace(
                    row,
                    name=plan.text(self.planned(plan).space.labels) if plan.mesh else AS_GIVEN,
                    plan=plan,
                    devices=plan.devices if plan.mesh or not given else prod(header_counts(given)),
                    screened_us=screened.get(plan),
                )
                self._save()
                if progress is not None:
                    progress(count, len(by_key))
        except KeyboardInterrupt:
            self.stopped = True
        rows = [self.rows[key] for key in by_key if key in self.rows]
        self.wanted, self.left = len(by_key), len(by_key) - len(rows)
        made = [row.plan for row in rows if isinstance(row, CompiledPlan)]
        self.missing = [
            axis for axis in axes_of(self.screened) if not any(axis in p.sizes for p in made)
        ]
        return rows

    @property
    def _limit_s(self) -> float:
        """Time limit in seconds of a compilation started now."""
        return max(self.left_s, 0.0 if self._longest_s else _LEAST_S)

    def _job(self, *, several: bool) -> PlanJob:
        cluster = self.cluster if several else self._alone
        return PlanJob(self.case, cluster, min(self._limit_s, 3600.0))

    @cached_property
    def _alone(self) -> Cluster:
        return alone(self.cluster)

    def _made(self, plans: Mapping[str, Plan]) -> Iterator[PlanRow]:
        """Yield rows of plans as they are ready; a pipeline's when all its stages are."""
        waiting: dict[str, list[str]] = {}
        for row in self._judged(self._programs(plans, waiting)):
            if row.key in plans:
                yield row
            else:
                self.stages[row.key] = row
            yield from self._staged(plans, waiting)
        yield from self._staged(plans, waiting)

    def _programs(
        self, plans: Mapping[str, Plan], waiting: dict[str, list[str]]
    ) -> Iterator[tuple[bool, Annotated]]:
        """Yield programs to compile, and whether each is for several devices, in plan order.

        They are made lazily, as the budget allows. Stages that a pipeline's row needs are added to
        ``waiting``; equal stages, also of other plans, are compiled once.
        """
        given = {name for names in waiting.values() for name in names}
        for key, plan in plans.items():
            if plan.stages == 1:
                yield True, (key, self._annotated(plan))
                continue
            parts = self.pipelines_of.of(plan)[0].annotated(plan)
            waiting[key] = [self._named(own.key) for own in parts]
            for name, own in zip(waiting[key], parts, strict=True):
                if name not in self.stages and name not in given:
                    given.add(name)
                    # Programs of stages on one device need a cluster of one device.
                    yield bool(own.several), (name, own.data)

    def _staged(
        self, plans: Mapping[str, Plan], waiting: dict[str, list[str]]
    ) -> Iterator[PlanRow]:
        """Yield rows of pipelines with all stages compiled, and remove them from ``waiting``."""
        ready = [key for key, names in waiting.items() if all(n in self.stages for n in names)]
        for key in ready:
            plan = plans[key]
            own, sheets = self.pipelines_of.of(plan)
            rows = [self.stages[name] for name in waiting.pop(key)]
            made = pipeline_row(own, sheets, plan, self.cluster, rows, self.memory)
            yield replace(made, key=key, seconds=sum(row.seconds for row in rows))

    def _annotated(self, plan: Plan) -> bytes:
        given = self.program.given
        if given and not plan.mesh:
            return given.raw
        return self.program.changed(plan.change).annotated(plan)

    def _judged(self, programs: Iterator[tuple[bool, Annotated]]) -> Iterator[PlanRow]:
        """Yield rows as they are ready; programs are handed out while there is time."""
        workers, ray = self.case.workers, self.case.ray
        size = None if ray or self.case.budget_s == inf else max(workers, 1)
        while self._has_time():
            begun = time.monotonic()
            chunk = list(islice(programs, size))
            for several in dict.fromkeys(several for several, _ in chunk):
                job = self._job(several=several)
                pieces = [[own] for kind, own in chunk if kind is several]
                for _, rows in run_pieces(judge_plans, job, pieces, workers, ray, self._limit_s):
                    yield from rows
            if not chunk:
                return
            self._longest_s = max(self._longest_s, time.monotonic() - begun)

    def _load(self) -> None:
        if self.case.out is None or not (path := self.case.out / _PLANS).is_file():
            return
        data = read_json(path)
        for name, known in (("rows", self.rows), ("stages", self.stages)):
            # Failed plans are tried again: the reason may have been a time limit.
            told = {k: row for k, row in data.get(name, {}).items() if not row["error"]}
            if told and data["program"] != self.program.source.content_hash:
                raise DatasetError(
                    "the folder holds plans of another program",
                    where=str(path),
                    hint="use another folder",
                )
            known |= {key: CompiledPlan.from_dict(row) for key, row in told.items()}

    def _save(self) -> None:
        if self.case.out is None:
            return
        data: dict[str, object] = {"program": self.program.source.content_hash}
        for name, known in (("rows", self.rows), ("stages", self.stages)):
            if known or name == "rows":
                data[name] = {key: row.to_dict() for key, row in known.items()}
        write_text(self.case.out / _PLANS, json.dumps(data, indent=1))
