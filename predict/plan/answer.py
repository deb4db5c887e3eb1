"""What a search found: the best plan and why, the front, and code that runs it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any

from ...common.errors import WARNING, LoweringError, PlanError
from ...common.files import write_bytes
from ...common.units import duration, size
from ...features.ir.platforms import platform_of
from ...simulate.clusters.catalogue import find_cluster
from ..devices import cluster_device
from ..sweep.space import undominated
from .case import PlanCase
from .code import code_of, pipeline_code
from .judge import CompiledPlan, PlanRow
from .program import read_planned
from .search import AS_GIVEN, PlanSearch
from .space import UNCHANGED, Plan

#: What the front minimises.
OBJECTIVES = ("latency_us", "memory_bytes_per_device", "devices", "energy_j")
#: Times that a step moves its parameters, above which activations are moved, too: FSDP gathers
#: them twice and reduces their gradients once.
_MOST_MOVED = 4.0


@dataclass(frozen=True)
class PlanAnswer:
    """Plans of a program on a cluster.

    Attributes:
        best: The fastest plan that fits; the one that needs least memory if none does.
        rows: All compiled plans, the fastest first; those with an ``error`` at the end.
        front: Rows that no other one beats in time, memory, devices and energy.
        screened: Number of plans that were screened.
        code: The best plan as code of JAX.
        program: The program with the best plan's shardings, as MLIR bytecode; of a pipeline the
            first stage's.
        reasons: Why the best plan is ahead of the others.
        notes: What should be known about the answer.
        cluster: Name of the cluster.
        stopped: Whether Ctrl-C ended the search before its end.
        alone: Row of the program as it is on one device; ``None`` if it does not fit there.
        stages: The program of each stage, if the best plan is a pipeline.
    """

    best: CompiledPlan
    rows: list[PlanRow]
    front: list[CompiledPlan]
    screened: int
    code: str
    program: bytes
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    cluster: str
    stopped: bool = False
    alone: CompiledPlan | None = None
    stages: tuple[bytes, ...] = ()

    def __repr__(self) -> str:
        """Plan and time; the fields would fill pages."""
        return f"PlanAnswer({self.best.name}: {duration(self.best.latency_us)} on {self.cluster})"

    def save(self, path: str | Path) -> Path:
        """Write the program with the best plan's shardings: text for ``.mlir``, else bytecode.

        ``opcast predict --cluster`` and ``opcast partition`` take it. A pipeline is a file for each
        stage, ``best.stage0.mlir`` and so on, for one micro-batch and the optimiser.

        Returns:
            The file, of a pipeline that of its first stage.
        """
        from ...features.ir.mlir.bindings import parse_module

        target = Path(path)
        named = [(target, self.program)]
        if self.stages:
            named = [
                (target.with_suffix(f".stage{n}{target.suffix}"), data)
                for n, data in enumerate(self.stages)
            ]
        for file, data in named:
            if file.suffix in (".mlir", ".txt"):
                module = parse_module(data)
                data = str(module.operation.get_asm(enable_debug_info=True)).encode()
            write_bytes(file, data)
        return named[0][0]

    def to_dict(self) -> dict[str, object]:
        """Plain data, as ``opcast plan --json`` prints it."""
        return {
            "best": self.best.to_dict(),
            "front": [row.to_dict() for row in self.front],
            "one_device": self.alone.to_dict() if self.alone else None,
            "rows": [row.to_dict() for row in self.rows],
            "screened": self.screened,
            "reasons": list(self.reasons),
            "code": self.code,
            "cluster": self.cluster,
            "notes": list(self.notes),
        }


def plan(
    program: object,
    *args: object,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> PlanAnswer:
    """Search for the best way to run a program on a cluster.

    Args:
        program: A function, jitted or not, followed by its example arguments; or a path, text or
            bytes of StableHLO for one device or with shardings, or an exported or lowered function.
            Its batch is the global one.
        args: Example arguments of a function.
        progress: Called with the numbers of compiled and of all plans.
        options: Fields of :class:`~opcast.predict.plan.case.PlanCase`: ``cluster``, and others such
            as ``memory`` and ``axes``; without ``budget_s`` the search takes its time, and without
            ``out`` no results are kept. The rest are keyword arguments of a function.

    Raises:
        PlanError: Nothing can be cut, or an option is wrong.
        LoweringError: No plan could be compiled.
        OpcastError: The program, cluster or model is not usable.
    """
    from ..api import _call

    asked = {f.name: options.pop(f.name) for f in fields(PlanCase) if f.name in options}
    case = PlanCase(**{"budget_s": float("inf"), "out": None} | asked)
    return find_plan(_call(program, args, options), case, progress)


def find_plan(
    program: object, case: PlanCase, progress: Callable[[int, int], None] | None = None
) -> PlanAnswer:
    """Search as :func:`plan` does, for a program or a function with its arguments."""
    from ..api import loaded

    # The budget is the whole search's: reading and screening a large program take their part.
    started = time.monotonic()
    where = find_cluster(case.cluster)
    if where.size < 2:
        raise PlanError(f"{where.name} is a single device", hint="opcast predict --device")
    spec = cluster_device(where, loaded(case.model).devices)
    program = read_planned(program, case.batch_dims, platform_of(spec))
    search = PlanSearch(program, case, started=started)
    search.screen()
    plans = search.chosen(case.compiles)
    # A plan comes first: without any there is no answer.
    search.compile(plans[:1])
    alone = search.compile_alone()
    rows = search.compile(plans, progress)
    return answer_of(search, rows, alone)


def answer_of(
    search: PlanSearch, rows: Sequence[PlanRow], alone: CompiledPlan | None = None
) -> PlanAnswer:
    """Put the compiled plans of a search in order.

    Args:
        search: The search.
        rows: Its compiled plans.
        alone: The program on one device, if it fits there.

    Raises:
        LoweringError: None could be compiled.
    """
    made = [row.within(search.memory) for row in rows if isinstance(row, CompiledPlan)]
    made.sort(key=attrgetter("latency_us"))
    own = [row for row in made if row.name != AS_GIVEN]
    if not own:
        said = next((row.error for row in rows if row.error), "there was no time")
        raise LoweringError(
            f"no plan could be compiled: {said}",
            where=search.program.source.origin,
            hint="a larger --budget, or another --lowering",
        )
    fitting = [row for row in own if row.fits]
    best = fitting[0] if fitting else min(own, key=lambda r: r.memory_bytes_per_device)
    code, programs = _written(search, best.plan)
    return PlanAnswer(
        best,
        [*made, *(row for row in rows if row.error)],
        _front(sorted([*fitting, *([alone] if alone else [])], key=attrgetter("latency_us"))),
        len(search.screened),
        code,
        programs[0],
        (
            *_why_changed(search, best),
            *_why_staged(best),
            *_reasons(best, [r for r in fitting if r is not best]),
        ),
        tuple(_notes(search, best, fitting, alone)),
        search.cluster.name,
        search.stopped,
        alone,
        tuple(programs) if best.stages else (),
    )


def _written(search: PlanSearch, plan: Plan) -> tuple[str, list[bytes]]:
    """A plan as code, and the program with its shardings: of a pipeline those of its stages."""
    if plan.stages > 1:
        own, _ = search.pipelines_of.of(plan)
        return pipeline_code(own, plan), [one.data for one in own.annotated(plan)]
    program = search.program.changed(plan.change)
    return code_of(program, plan), [program.annotated(plan)]


def _front(rows: Sequence[CompiledPlan]) -> list[CompiledPlan]:
    """Rows that no other one beats; an objective that a row lacks orders none."""
    used = [o for o in OBJECTIVES if all(getattr(row, o) is not None for row in rows)]
    points = [tuple(getattr(row, o) for o in used) for row in rows]

    keep = undominated(points)
    return [row for row, kept in zip(rows, keep, strict=True) if kept]


def _unfinished(search: PlanSearch) -> str:
    """Say how much of the search is not done, and which kinds of plans were not looked at."""
    done = search.wanted - search.left
    why = "the search was stopped" if search.stopped else "the budget of time ended"
    lacks = f", none that uses {' or '.join(search.missing)}" if search.missing else ""
    on = ""
    if search.case.out is not None:
        on = "; the same command again (with the same folder of results) continues"
    # With most of them known the best is likely to be among them.
    warns = WARNING if search.missing or 2 * done < search.wanted else ""
    return (
        f"{warns}only {done} of {search.wanted} chosen plans were compiled{lacks}, since {why}: a "
        f"better one may be among the others{on}"
    )


def _why_changed(search: PlanSearch, best: CompiledPlan) -> list[str]:
    """Say what the best plan would need if its program were not changed."""
    plan = best.plan
    if plan.change == UNCHANGED or plan.stages > 1:
        return []
    made = [
        (row.plan, row.memory_bytes_per_device, row.latency_us, "")
        for row in search.rows.values()
        if isinstance(row, CompiledPlan)
    ]
    made += [(s.plan, s.memory, s.seconds * 1e6, " (screened)") for s in search.screened]
    for own, held, us, how in made:
        if own.mesh == plan.mesh and own.change == UNCHANGED:
            return [
                f"without {plan.change.text()[2:]} the same mesh needs {size(held)} of "
                f"{size(search.memory)} a device and takes {duration(us)}{how}"
            ]
    return []


def _why_staged(best: CompiledPlan) -> list[str]:
    """Say what the best plan loses to being a pipeline."""
    if not best.stages:
        return []
    counts = ", ".join(str(stage.layers) for stage in best.stages)
    idle = best.bubble_us / max(best.latency_us, 1e-9)
    return [
        f"its stages have {counts} layers; waiting for one another takes {idle:.0%} of the time "
        f"({duration(best.bubble_us)}), transfers between them "
        f"{duration(best.sends_us)}"
    ]


def _reasons(best: CompiledPlan, others: Sequence[CompiledPlan]) -> list[str]:
    """Say what the next plans lose their time with, beside the best one."""
    found = []
    by_mesh: dict[object, CompiledPlan] = {}
    for row in others:
        by_mesh.setdefault(row.plan.mesh, row)
    for row in islice(by_mesh.values(), 3):
        more = {
            "waiting for collectives": row.exposed_communication_us - best.exposed_communication_us,
            "computing": row.compute_us - best.compute_us,
            "waiting for other stages": row.bubble_us - best.bubble_us,
        }
        parts = [
            f"{duration(abs(us))} {'more' if us > 0 else 'less'} {what}"
            for what, us in sorted(more.items(), key=lambda item: -item[1])
            if abs(us) > 0.01 * best.latency_us
        ]
        ratio = row.latency_us / best.latency_us - 1.0
        text = f"{row.name} is {ratio:.0%} slower: {', '.join(parts) or 'a little of each'}"
        if row.waits and more["waiting for collectives"] > 0:
            one = row.waits[0]
            text += (
                f", most of it for {one.collective} at {one.where} "
                f"({duration(one.us)}, {size(one.bytes)})"
            )
        found.append(text)
    return found


def _notes(
    search: PlanSearch,
    best: CompiledPlan,
    fitting: Sequence[CompiledPlan],
    alone: CompiledPlan | None,
) -> list[str]:
    notes = []
    if alone and fitting and alone.latency_us < best.latency_us:
        notes.append(
            f"{WARNING}one device takes {duration(alone.latency_us)}, less than the best plan over "
            f"{best.devices} devices ({duration(best.latency_us)}): a larger batch shares the work "
            "better"
        )
    if search.left:
        notes.append(_unfinished(search))
    elif search.missing:
        notes.append(
            f"no plan that uses {' or '.join(search.missing)} was compiled: more --compiles would"
        )
    if not fitting:
        held = best.memory_bytes_per_device
        notes.append(
            f"{WARNING}no plan fits: the one shown needs {size(held)} of {size(search.memory)}, "
            f"{size(held - search.memory)} too much; more devices, a smaller batch, or "
            "jax.checkpoint around parts of the model reduce it"
        )
    notes += search.refused
    parameters = sum(a.type.nbytes for a in search.program.arguments if a.role == "parameter")
    moved = best.moved_bytes
    if parameters and moved > _MOST_MOVED * parameters:
        lines = ", ".join(f"{w.collective} at {w.where} ({size(w.bytes)})" for w in best.waits[:3])
        notes.append(
            f"its collectives move {size(moved)} a run, {moved / parameters:.0f} times the "
            f"parameters: activations are moved, by {lines or 'collectives beside computation'}"
        )
    given = next((row for row in search.rows.values() if row.name == AS_GIVEN), None)
    if isinstance(given, CompiledPlan):
        ratio = given.latency_us / best.latency_us
        notes.append(
            f"with its own shardings it takes {duration(given.latency_us)}, {ratio:.2f} times as "
            "long"
        )
    twice = search.program.kept_twice
    if parameters and twice > parameters / 2:
        notes.append(
            f"nothing is donated, so {size(twice)} of parameters and state are there twice in a "
            "step: donate_argnums of jax.jit frees them"
        )
    if search.program.note:
        notes.append(search.program.note)
    return [*notes, *best.notes]
