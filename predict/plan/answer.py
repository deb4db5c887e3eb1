"""Result of a search: the best plan and why, the Pareto front, and code that applies the plan."""

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

#: Objectives that the front minimizes.
OBJECTIVES = ("latency_us", "memory_bytes_per_device", "devices", "energy_j")
#: Bytes communicated over bytes of parameters above which activations must be moved, too: FSDP
#: gathers parameters twice and reduces their gradients once.
_MOST_MOVED = 4.0


@dataclass(frozen=True)
class PlanAnswer:
    """Plans of a program on a cluster.

    Attributes:
        best: The fastest plan that fits, or the plan that needs least memory if none fits.
        rows: All compiled plans, the fastest first; those with an ``error`` last.
        front: Rows that no other row dominates in time, memory, devices and energy.
        screened: Number of screened plans.
        code: The best plan as JAX code.
        program: The program with the best plan's shardings, as MLIR bytecode; for a pipeline that
            of the first stage.
        reasons: Why the best plan beats the others.
        notes: Limits of the answer.
        cluster: Name of the cluster.
        stopped: Whether Ctrl-C ended the search early.
        alone: Row of the program on one device; ``None`` if it does not fit there.
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
        """Return a summary: plan, time and cluster."""
        return f"PlanAnswer({self.best.name}: {duration(self.best.latency_us)} on {self.cluster})"

    def save(self, path: str | Path) -> Path:
        """Write the program with the best plan's shardings: text for ``.mlir``, else bytecode.

        ``opcast predict --cluster`` and ``opcast partition`` accept it. For a pipeline there is one
        file per stage, ``best.stage0.mlir`` and so on, for one micro-batch and the optimizer.

        Returns:
            The file; for a pipeline that of its first stage.
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
        """Return JSON data, as ``opcast plan --json`` prints it."""
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
            bytes of StableHLO for one device or with shardings; or an exported or lowered function.
            Its batch is the global batch.
        args: Example arguments of a function.
        progress: Called with the numbers of compiled and of all plans.
        options: Fields of :class:`~opcast.predict.plan.case.PlanCase`: ``cluster``, and others such
            as ``memory`` and ``axes``; without ``budget_s`` the time is unlimited, and without
            ``out`` no results are kept. All others are keyword arguments of a function.

    Raises:
        PlanError: Nothing can be sharded, or an option is wrong.
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
    """Search like :func:`plan`, for a program or a function with its arguments."""
    from ..api import loaded

    # The budget covers the whole search, including reading and screening a large program.
    started = time.monotonic()
    where = find_cluster(case.cluster)
    if where.size < 2:
        raise PlanError(f"{where.name} is a single device", hint="opcast predict --device")
    spec = cluster_device(where, loaded(case.model).devices)
    program = read_planned(program, case.batch_dims, platform_of(spec))
    search = PlanSearch(program, case, started=started)
    search.screen()
    plans = search.chosen(case.compiles)
    # Compile one plan first: without any there is no answer.
    search.compile(plans[:1])
    alone = search.compile_alone()
    rows = search.compile(plans, progress)
    return answer_of(search, rows, alone)


def answer_of(
    search: PlanSearch, rows: Sequence[PlanRow], alone: CompiledPlan | None = None
) -> PlanAnswer:
    """Rank the compiled plans of a search.

    Args:
        search: The search.
        rows: Compiled plans.
        alone: The program on one device, if it fits there.

    Raises:
        LoweringError: No plan could be compiled.
    """
    made = [row.within(search.memory) for row in rows if isinstance(row, CompiledPlan)]
    made.sort(key=attrgetter("latency_us"))
    own = [row for row in made if row.name != AS_GIVEN]
    if not own:
        said = next((row.error for row in rows if row.error), "there was no time")
        raise LoweringError(
            f"no plan could be compiled: {said}",
            where=search.program.source.origin,
            hint="use a larger --budget, or another --lowering",
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
    """Return a plan as code, and the program with its shardings (one per stage of a pipeline)."""
    if plan.stages > 1:
        own, _ = search.pipelines_of.of(plan)
        return pipeline_code(own, plan), [one.data for one in own.annotated(plan)]
    program = search.program.changed(plan.change)
    return code_of(program, plan), [program.annotated(plan)]


def _front(rows: Sequence[CompiledPlan]) -> list[CompiledPlan]:
    """Return the rows that are not dominated; an objective that a row lacks is ignored."""
    used = [o for o in OBJECTIVES if all(getattr(row, o) is not None for row in rows)]
    points = [tuple(getattr(row, o) for o in used) for row in rows]

    keep = undominated(points)
    return [row for row, kept in zip(rows, keep, strict=True) if kept]


def _unfinished(search: PlanSearch) -> str:
    """Describe how much of the search is missing, and which kinds of plans were not compiled."""
    done = search.wanted - search.left
    why = "the search was stopped" if search.stopped else "the budget of time ended"
    lacks = f", none with {' or '.join(search.missing)}" if search.missing else ""
    on = ""
    if search.case.out is not None:
        on = "; the same command with the same results folder continues it"
        # If most plans were compiled, the best is likely among them.
    warns = WARNING if search.missing or 2 * done < search.wanted else ""
    return (
        f"{warns}only {done} of {search.wanted} chosen plans were compiled{lacks}, since {why}; "
        f"others may be better{on}"
    )


def _why_changed(search: PlanSearch, best: CompiledPlan) -> list[str]:
    """Describe what the best plan would need without rematerialization and micro-batches."""
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
                f"{size(search.memory)} per device and takes {duration(us)}{how}"
            ]
    return []


def _why_staged(best: CompiledPlan) -> list[str]:
    """Describe the pipeline losses of the best plan."""
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
    """Describe where the next plans lose time compared with the best one."""
    found = []
    by_mesh: dict[object, CompiledPlan] = {}
    for row in others:
        by_mesh.setdefault(row.plan.mesh, row)
    for row in islice(by_mesh.values(), 3):
        more = {
            "waiting for collectives": row.exposed_communication_us - best.exposed_communication_us,
            "computation": row.compute_us - best.compute_us,
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
            f"no plan with {' or '.join(search.missing)} was compiled: increase --compiles"
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
            f"its collectives move {size(moved)} per run, {moved / parameters:.0f} times the "
            f"parameters: activations are moved, by {lines or 'overlapped collectives'}"
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
            f"nothing is donated, so {size(twice)} of parameters and state are stored twice during "
            "a step: use donate_argnums of jax.jit"
        )
    if search.program.note:
        notes.append(search.program.note)
    return [*notes, *best.notes]
