"""Measures a batch of programs: compile, warm up, trace, and convert the durations to rows."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ...common.errors import OpcastError, ProfileError
from ...common.types import JsonObject
from ...features.ir.program import Program
from ...features.kernels.kernel import Kernel, LoweredProgram
from ..dataset_folder import sample_rows
from ..programs.source import random_arguments
from .executions import Durations
from .plan import Item, LoadedItem, load_item
from .runner import (
    LONG_SECONDS,
    PROGRAM_SECONDS,
    SHARED_BYTES,
    STEADY,
    WALL_SECONDS,
    MakeArguments,
    Pulse,
    Runner,
    first_runs,
    module_name,
    rotation,
    wall_runs,
)
from .trace import expected, trace

if TYPE_CHECKING:
    from ...features.lowering.xla import NativeExecutable

#: Width of the median's 95 % interval, relative to the median, that is narrow enough.
_NARROW = 0.1
#: Trace sessions of a program: a second one for programs that the first left noisy.
_SESSIONS = 2
#: Attempts to measure without disturbance; long programs have only one.
_TRIES = 3


@dataclass
class Prepared:
    """A compiled program with the state of its measurement.

    Attributes:
        item: Item of the plan.
        loaded: The program.
        lowered: Its kernels.
        native: The executable (:class:`opcast.features.lowering.xla.NativeExecutable`).
        module: HLO module name, unique within the batch.
        make_arguments: Draws arguments from a seed.
        bytes: Bytes of one set of arguments.
        runner: Executes it; set while it is being measured.
        seconds: Estimated time of one execution.
        durations: Seconds of every execution by instruction.
        wall: Seconds of whole executions, without a trace.
        disturbed: Whether the machine was disturbed in every attempt.
    """

    item: Item
    loaded: LoadedItem
    lowered: LoweredProgram
    native: NativeExecutable
    module: str
    make_arguments: MakeArguments
    bytes: int
    runner: Runner | None = None
    seconds: float = 0.0
    durations: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    wall: list[float] = field(default_factory=list)
    disturbed: bool = False

    @property
    def labelled(self) -> list[Kernel]:
        """Kernels for which a trace gives a duration."""
        return [k for k in self.lowered.kernels if k.takes_time]


@dataclass(frozen=True)
class Limits:
    """Bounds of a measurement.

    Attributes:
        memory: Bytes that a program may need.
        cache: Bytes of the last-level cache, which rotated arguments exceed.
        wall_s: Seconds of whole executions of each program.
    """

    memory: float = math.inf
    cache: float = 32e6
    wall_s: float = WALL_SECONDS


def prepare(item: Item, limits: Limits) -> Prepared:
    """Load and compile one program.

    Raises:
        OpcastError: The program is malformed, does not compile, or does not fit into memory.
    """
    from ...features.ir.reader import read_program
    from ...features.lowering.xla import compile_native

    # Memory is checked as early as each figure is known: before parsing, before compiling (which
    # may need as much again), and with XLA's own peak.
    loaded = load_item(item)
    check_memory(loaded.est_bytes, limits.memory, loaded.name)
    source = read_program(loaded.mlir)
    if not loaded.est_bytes:
        check_memory(_argument_bytes(source.program), limits.memory, loaded.name)
    native = compile_native(source, name=_identifier(item.key))
    lowered = native.lowered()
    check_memory(lowered.peak_memory_bytes, limits.memory, loaded.name)
    types = native.input_types
    return Prepared(
        item=item,
        loaded=loaded,
        lowered=lowered,
        native=native,
        module=module_name(native.hlo),
        make_arguments=loaded.arguments or (lambda seed: random_arguments(types, seed)),
        bytes=sum(t.nbytes for t in types),
    )


def _argument_bytes(program: Program) -> int:
    return sum(op.result_bytes for op in program.entry_computation.parameters)


def check_memory(needed: float, limit: float, name: str) -> None:
    """Reject a program that needs more memory than the limit.

    Raises:
        ProfileError: It does.
    """
    if needed > limit:
        raise ProfileError(
            f"needs {needed / 1e9:.3g} GB of memory, the limit is {limit / 1e9:.3g} GB",
            where=name,
            hint="raise max_memory",
        )


def measure(
    programs: Iterable[Prepared],
    limits: Limits,
    *,
    walls: bool = True,
    sessions: int = _SESSIONS,
    pulse: Pulse | None = None,
) -> None:
    """Execute programs and collect durations, small ones together in one trace session.

    Programs in a session share its fixed cost.

    Args:
        programs: Programs to measure; durations are added to existing ones.
        limits: Bounds of the measurement.
        walls: Whether to time whole executions too, except those of single ops.
        sessions: Maximum number of trace sessions; those after the first are for noisy programs.
        pulse: Shows when the machine is disturbed; what was measured then is measured again.
    """
    group: list[Prepared] = []

    def flush() -> None:
        if group:
            _measure_group(group, limits, walls, sessions, pulse)
            group.clear()

    for program in programs:
        alone = program.bytes > SHARED_BYTES
        # Events of a trace name their module: two with one name could not be distinguished.
        clash = any(p.module == program.module for p in group)
        if alone or clash:
            flush()
        group.append(program)
        if alone:
            flush()
    flush()


def _measure_group(
    group: list[Prepared], limits: Limits, walls: bool, sessions: int, pulse: Pulse | None
) -> None:
    for program in group:
        _warm_up(program, limits)
    pending = {id(p): first_runs(p.seconds) for p in group}
    for _ in range(sessions):
        _trace_steadily([p for p in group if pending[id(p)]], pending, pulse)
        pending = {id(p): more_runs(p) for p in group}
        if not any(pending.values()):
            break
    # The wall time of a single op is its dispatch and does not depend on the op.
    timed = [p for p in group if walls and not p.loaded.family.startswith("op:")]
    # Round by round, so that short disturbances affect all programs alike. Several rounds measure
    # the typical speed, a single round the undisturbed one.
    rounds = max(1, round(limits.wall_s / WALL_SECONDS))
    for _ in range(rounds):
        for program in timed:
            tries = _TRIES if rounds == 1 and program.seconds < LONG_SECONDS else 1
            program.wall += _wall_steadily(program, pulse, tries)
    for program in group:
        # Frees the arguments on the device.
        program.runner = None


def _warm_up(program: Prepared, limits: Limits) -> None:
    program.runner = Runner(
        program.native.run,
        program.make_arguments,
        program.native.aliases,
        rotation(program.bytes, limits.cache),
    )
    # The first execution loads code and allocates; slow programs are warm after one more.
    first = _step(program)
    again = [_step(program) for _ in range(1 if first > 0.3 else 3)]
    program.seconds = min(first, *again)


def _step(program: Prepared) -> float:
    assert program.runner is not None
    return program.runner.step()


def _ratio(pulse: Pulse | None, *, traced: bool = False) -> float:
    return pulse.ratio(traced=traced) if pulse is not None else 1.0


def _wall_steadily(program: Prepared, pulse: Pulse | None, tries: int) -> list[float]:
    """Time whole executions; the least disturbed attempt counts."""
    best: tuple[float, list[float]] = (math.inf, [])
    for _ in range(tries):
        # Before and after: a disturbance may begin in between.
        before = _ratio(pulse)
        seconds = [_step(program) for _ in range(wall_runs(program.seconds))]
        slowest = max(before, _ratio(pulse))
        best = min(best, (slowest, seconds))
        if best[0] <= STEADY:
            break
    return best[1]


def _trace_steadily(group: list[Prepared], pending: dict[int, int], pulse: Pulse | None) -> None:
    """Trace until each program had an undisturbed session; else its least disturbed one counts."""
    best: dict[int, tuple[float, dict[str, list[float]]]] = {}
    left = list(group)
    for _ in range(_TRIES):
        for program, (ratio, durations) in zip(left, _session(left, pending, pulse), strict=True):
            if ratio < best.get(id(program), (math.inf,))[0]:
                best[id(program)] = (ratio, durations)
        left = [p for p in left if best[id(p)][0] > STEADY and p.seconds < LONG_SECONDS]
        if not left:
            break
    for program in group:
        ratio, durations = best[id(program)]
        program.disturbed = program.disturbed or ratio > STEADY
        for name, seconds in durations.items():
            program.durations[name] += seconds


def _session(
    group: list[Prepared], pending: dict[int, int], pulse: Pulse | None
) -> list[tuple[float, dict[str, list[float]]]]:
    """Run one trace session; return for each program the machine's slow-down and kernel seconds.

    Each program's runs are spread over three rounds, so that a short disturbance hits only some.
    """
    readings: dict[int, list[float]] = {id(p): [] for p in group}

    def run() -> None:
        for part in range(3):
            for program in group:
                readings[id(program)].append(_ratio(pulse, traced=True))
                # A third of the runs in each round, the remainder in the first ones.
                for _ in range((pending[id(program)] + 2 - part) // 3):
                    _step(program)

    known = [expected(p.module, p.lowered) for p in group]
    executions = {key: count for own, _ in known for key, count in own.items()}
    reads = {key: names for _, own in known for key, names in own.items()}
    durations: Durations = trace(run, executions, reads)
    return [
        (
            float(np.median(readings[id(p)])),
            {
                name: [s for s in durations.get((p.module, name), []) if s > 0]
                for name in {k.name for k in p.labelled}
            },
        )
        for p in group
    ]


def more_runs(program: Prepared) -> int:
    """Further executions that noisy kernels require, within the time budget; 0 for none."""
    samples = list(program.durations.values())
    done = max((len(s) for s in samples), default=0)
    if not done:
        return 0
    spent = sum(map(sum, samples))
    total = sum(float(np.median(s)) for s in samples if s)
    noisy = sum(float(np.median(s)) for s in samples if s and median_width(s) > _NARROW)
    # Noise in kernels that make up less than a tenth of the program is not worth a session.
    if noisy < 0.1 * total or spent > PROGRAM_SECONDS:
        return 0
    affordable = int((PROGRAM_SECONDS - spent) / max(program.seconds, 1e-6))
    return min(first_runs(program.seconds), affordable)


def median_width(samples: Sequence[float]) -> float:
    """Width of the median's 95 % interval relative to the median.

    From order statistics: ranks n/2 ± 0.98 √n, which is 1.96 standard deviations of the binomial
    distribution with p = 1/2 in its normal approximation.
    """
    ordered = np.sort(np.asarray(samples, float))
    n = len(ordered)
    half = 0.98 * math.sqrt(n)
    low = max(0, math.floor(n / 2 - half))
    high = min(n - 1, math.ceil(n / 2 + half))
    return float((ordered[high] - ordered[low]) / max(float(np.median(ordered)), 1e-12))


def rows_of(program: Prepared) -> tuple[list[JsonObject], int]:
    """Rows of the measured kernels and the program, and the number of kernels without a label."""
    rows = sample_rows(
        program.lowered,
        program.durations,
        program.wall,
        family=program.loaded.family,
        program=program.item.key,
    )
    return rows, sum(not program.durations.get(k.name) for k in program.labelled)


def reason_of(error: BaseException) -> str:
    """One line on why a program failed."""
    # XLA's messages may quote whole modules; 500 characters contain the cause.
    text = str(error) if isinstance(error, OpcastError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:500]


def _identifier(key: str) -> str:
    """Module name for an item's key."""
    return "".join(c if c.isalnum() else "_" for c in key)
