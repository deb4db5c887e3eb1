"""Compare a trace with the prediction of the program that ran."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...common.errors import DatasetError
from ...features.cost.formats import FORMATS, format_name
from .importing import device_of, lowered_programs, read_one, refuse_program
from .waterfall import ClassTime, KernelPair, TraceCheck, by_class, common_factor, waterfall

if TYPE_CHECKING:
    from rich.console import Console

    from ...datagen.traces.aten import Row, TracedOperator
    from ...datagen.traces.trace import RunTime, Trace
    from ...features.devices.device import DeviceSpec
    from ...features.ir.jax_function import FunctionCall
    from ...features.kernels.kernel import LoweredProgram
    from ...predict.operator.aten_work import AtenKernel
    from ...predict.program.predictor import Prediction

#: Class of collectives among XLA kernels, and among PyTorch operators.
_COLLECTIVE, _COMMUNICATION = "collective", "communication"
#: Matched share of the kernels' time below which a note is added. Engineering estimate.
_MATCHED = 0.9
#: Logarithm of a common factor from which it is reported; shared machines and clocks drift by less
#: between runs. Engineering estimate.
_COMMON = 0.1


@dataclass(frozen=True)
class CheckOptions:
    """Options of a comparison.

    Attributes:
        device: Name, file or ``local``; by default the trace's device, and for a CPU this machine.
        model: Name or folder of the model.
        index: Index of the device in a trace of several.
    """

    device: str | None = None
    model: str = "default"
    index: int | None = None


def check_trace(
    path: Path,
    program: Path | FunctionCall | None,
    options: CheckOptions,
    tell: Callable[[str], None] = lambda what: None,
) -> TraceCheck:
    """Predict the program of a trace, and compare.

    Args:
        path: The trace.
        program: The program; by default the module in the trace that took most time.
        options: The device and the model.
        tell: Called with a message about assumptions.

    Raises:
        OpcastError: The trace cannot be read, or its program or device is unknown.
    """
    trace = read_one(path)
    refuse_program(trace, program is not None)
    spec = device_of(trace, options.device, tell)
    if trace.of_xla or program is not None:
        return _check_program(trace, program, spec, options)
    return _check_operators(trace, spec, options)


def _check_program(
    trace: Trace, program: Path | FunctionCall | None, spec: DeviceSpec, options: CheckOptions
) -> TraceCheck:
    from ...datagen.traces.xla import traced_programs
    from ...predict.program.predictor import load_for_programs

    given = lowered_programs([program] if program else [], spec)
    traced = traced_programs(trace, given, options.index)
    own = traced[0]
    # A given program is predicted as it is lowered here; its kernels are matched by name.
    lowered = given[0] if given else own.lowered
    if given:
        names = _names(lowered)
        own = max(traced, key=lambda t: len(names & t.durations.keys()))
        if not names & own.durations.keys():
            raise DatasetError(
                "no kernel of the program occurs in the trace by name",
                where=trace.path,
                hint="leave PROGRAM out to predict the module in the trace, or give the compiled "
                "program that ran: compiled.as_text()",
            )
    predictor = load_for_programs(options.model)
    prediction = predictor.predict_lowered(lowered, spec)
    pairs = _pairs(lowered, prediction, own.durations)
    named = {p.name for p in pairs}
    count = max(len(own.runs), 1)
    spent = {n: sum(s) for n, s in own.durations.items() if n not in named}
    spent = {n: s * 1e6 / count for n, s in {**own.unmatched, **spent}.items()}
    notes = [*trace.notes, *prediction.notes]
    if len(traced) > 1:
        others = ", ".join(t.module for t in traced if t is not own)
        notes.append(f"this covers {own.module}; the trace also contains {others[:200]}")
    absent = _names(lowered) - named
    if absent:
        notes.append(
            f"{len(absent)} predicted kernels do not occur in the trace by name and count as 0"
            + "; they may be among the kernels that are not predicted" * bool(spent)
        )
        pairs += _pairs(lowered, prediction, {name: [0.0] for name in absent})
    latency = (prediction.latency_us, prediction.lo_us, prediction.hi_us)
    return _compared(trace, spec, pairs, spent, own.runs, latency, _COLLECTIVE, notes)


def _names(lowered: LoweredProgram) -> set[str]:
    return {k.name for k in lowered.kernels if k.takes_time}


def _pairs(
    lowered: LoweredProgram, prediction: Prediction, durations: Mapping[str, list[float]]
) -> list[KernelPair]:
    return [
        KernelPair.of(
            k.name, k.kind, k.multiplicity, (p.latency_us, p.lo_us, p.hi_us), durations[k.name]
        )
        for k, p in zip(lowered.kernels, prediction.kernels, strict=True)
        if k.takes_time and durations.get(k.name)
    ]


def _compared(
    trace: Trace,
    spec: DeviceSpec,
    pairs: list[KernelPair],
    unmatched: Mapping[str, float],
    runs: Sequence[RunTime],
    latency: tuple[float, float, float],
    collective: str,
    notes: list[str],
) -> TraceCheck:
    from ...datagen.traces.trace import host_seconds, typical

    run = typical(runs) if runs else None
    classes = by_class(pairs)
    factor = common_factor(
        [p for p in pairs if p.kind != collective and p.traced_us > 0 and p.predicted_us > 0]
    )
    lost = sum(unmatched.values())
    labelled = sum(c.traced_us for c in classes)
    if run is None:
        # Without start times only the kernels can be compared.
        scale = sum(c.predicted_us for c in classes) / latency[0]
        latency = (latency[0] * scale, latency[1] * scale, latency[2] * scale)
        notes.append("sums of kernels are compared, not times of a run")
    matched = labelled / ((labelled + lost) or 1.0)
    if matched < _MATCHED:
        notes.append(f"only {matched:.0%} of the kernels' time is predicted")
    if abs(np.log(factor)) > _COMMON:
        notes.append(
            f"three quarters of the kernels' time took {factor:.2f} x of the prediction or "
            f"{'more' if factor > 1 else 'less'}: a different clock, a shared machine, or a device "
            "without training data; opcast calibrate --data with the imported trace corrects it"
        )
    return TraceCheck(
        trace=trace.path,
        format=trace.format,
        device=spec.name,
        predicted_us=latency[0],
        lo_us=latency[1],
        hi_us=latency[2],
        traced_us=run.span * 1e6 if run else labelled + lost,
        runs=len(runs),
        host_us=host_seconds(runs) * 1e6,
        matched=matched,
        factor=factor,
        classes=classes,
        waterfall=waterfall(latency[0], classes, factor, run, lost, collective),
        kernels=pairs,
        unmatched=sorted(unmatched.items(), key=lambda u: -u[1]),
        notes=notes,
    )


def _check_operators(trace: Trace, spec: DeviceSpec, options: CheckOptions) -> TraceCheck:
    from ...common.errors import DeviceError
    from ...datagen.traces.aten import traced_operators
    from ...datagen.traces.importer import is_collective
    from ...datagen.traces.trace import by_run, chosen, run_time
    from ...features.ir.torch.record import Recording
    from ...predict.operator.aten_prices import as_set
    from ...predict.operator.torch_framework import operator_bundle
    from ...predict.operator.torch_price import price_works

    if spec.platform != "gpu":
        raise DeviceError(
            f"PyTorch operators are predicted only on GPUs, and {spec.name} is a {spec.platform}",
            hint="give the device of the trace with --device",
        )
    devices = chosen(trace, options.index)
    parts = [(own.index, run) for own in devices for run in by_run(own.executed.events)]
    operators = traced_operators(e for _, run in parts for e in run)
    count = len(parts) if trace.ordered else 1
    known = [(o, w) for o in operators if (w := _work(o)) is not None]
    if not known:
        raise DatasetError(
            "no operator of the trace can be predicted",
            where=trace.path,
            hint="record with record_shapes=True; for XLA kernels give the PROGRAM that ran",
        )
    # Every call counts, because the host launches each of them.
    calls = [max(1, round(len(o.seconds) / count)) for o, _ in known]
    own = [as_set(w, Recording().tf32, spec) for _, w in known]
    works = [w for w, n in zip(own, calls, strict=True) for _ in range(n)]
    priced = price_works(works, spec, "torch-eager", operator_bundle(options.model))
    pairs = [
        KernelPair.of(_title(o), o.kind, len(o.seconds) / count, times * 1e6, o.seconds)
        for (o, _), times in zip(known, priced.times[np.cumsum([0, *calls])[:-1]], strict=True)
    ]
    sent = [o for o in operators if o.collective is not None]
    pairs += [
        KernelPair.of(_title(o), o.kind, len(o.seconds) / count, (0.0, 0.0, 0.0), o.seconds)
        for o in sent
    ]
    used = {id(o) for o, _ in known} | {id(o) for o in sent}
    spent: dict[str, float] = defaultdict(float)
    for operator in operators:
        if id(operator) not in used:
            spent[operator.name] += operator.total * 1e6 / count
    runs = [run_time(run, is_collective, i) for i, run in parts] if trace.ordered else []
    notes = [*trace.notes, "operators are predicted to run one by one, as in eager PyTorch"]
    if sent:
        notes.append("collectives are not predicted here; see opcast cluster for their times")
    latency = (priced.seconds * 1e6, priced.lo * 1e6, priced.hi * 1e6)
    return _compared(trace, spec, pairs, spent, runs, latency, _COMMUNICATION, notes)


def _title(operator: TracedOperator) -> str:
    if operator.collective is not None:
        return f"{operator.name} {operator.collective.bytes} bytes"
    sizes = " ".join(f"{n}={v}" for n, v in operator.row.items() if isinstance(v, int))
    return f"{operator.name} {sizes}"


def _work(operator: TracedOperator) -> AtenKernel | None:
    """Convert a traced operator to a kernel of a PyTorch program; ``None`` if not possible."""
    from ...features.operators.op import Op
    from ...predict.operator.aten_work import AtenKernel, moving

    row = operator.row
    if not row:
        return None
    dtype = format_name(str(row["dtype"]))
    dtype = dtype if dtype in ("bf16", "f16", "fp8") else "f32"
    width = FORMATS[dtype].element_bytes
    family, shape, elements = _shape(row)
    name, moved = operator.name.removeprefix("aten::"), float(elements * width)
    if family == "move":
        return moving(name, dtype, moved)
    return AtenKernel(Op(family, shape, dtype, name=name, traffic=moved))


def _shape(row: Row) -> tuple[str, tuple[int, ...], int]:
    """Family and shape of an operator, and the number of elements that it reads and writes."""
    from ...features.operators.op import OP_FAMILIES

    size = {n: v for n, v in row.items() if isinstance(v, int)}
    family = row["family"]
    if family in ("linear", "bmm"):
        b, m, n, k = (size[c] for c in ("b", "m", "n", "k"))
        return "bmm", (b, m, n, k), b * (m * k + k * n + m * n)
    if family == "context_attention":
        wide = {**size, "v_head_dim": size["head_dim"]}
        return "attention", tuple(wide[c] for c in OP_FAMILIES["attention"].sizes), 0
    if family == "conv":
        taps = prod(size[f"k{a}"] for a in "dhw")
        out = [
            (size[a] + 2 * size[f"pad_{a}"] - size[f"dil_{a}"] * (size[f"k{a}"] - 1) - 1)
            // size[f"stride_{a}"] + 1
            for a in "dhw"
        ]  # fmt: skip
        positions, groups = size["n"] * prod(out), size["groups"]
        depth = size["c"] // groups * taps
        given = size["n"] * size["c"] * size["d"] * size["h"] * size["w"]
        moved = given + size["k"] * depth + positions * size["k"]
        return "conv", (groups, positions, size["k"] // groups, depth), moved
    whole = size["rows"] * size["cols"]
    if family in ("norm", "softmax"):
        own = {"softmax": "softmax"}.get(str(family), str(row.get("op", "layernorm")))
        return own, (size["rows"], size["cols"]), 2 * whole
    return "move", (), (size.get("n_in", 1) + 1) * whole


def print_trace_check(console: Console, result: TraceCheck, top: int) -> None:
    """Print the classes, the waterfall, and the kernels with the largest differences."""
    from rich.text import Text

    from ...common.units import duration
    from ...predict.render.difference import signed
    from ...predict.render.parts import (
        Column,
        Compared,
        compared_table,
        compared_total,
        fitted_table,
        print_notes,
    )

    console.print(Text.assemble((Path(result.trace).name, "bold"), f" on {result.device}"))
    classes: tuple[Column[ClassTime], ...] = (
        Column("predicted", lambda c: duration(c.predicted_us)),
        Column("traced", lambda c: duration(c.traced_us)),
        Column("ratio", lambda c: f"{c.predicted_us / c.traced_us:.2f}" if c.traced_us else ""),
        Column("kernels", lambda c: str(c.count), 1),
        Column("class", lambda c: c.kind, justify="left", least=20),
    )
    console.print(fitted_table(console.width, classes, result.classes))
    console.print()
    steps = [("predicted", duration(result.predicted_us))]
    steps += [(p.what, signed(p.us)) for p in result.waterfall if abs(p.us) >= 0.0005]
    steps.append(("traced", duration(result.traced_us)))
    explained: tuple[Column[tuple[str, str]], ...] = (
        Column("what explains the difference", lambda s: s[0], justify="left", least=20),
        Column("time", lambda s: s[1]),
    )
    console.print(fitted_table(console.width, explained, steps))
    console.print()
    differing = sorted(result.kernels, key=lambda k: -abs(k.traced_us - k.predicted_us) * k.runs)[
        :top
    ]
    pairs = [
        Compared(k.predicted_us, k.lo_us, k.hi_us, k.traced_us, k.runs, k.kind, k.name)
        for k in differing
    ]
    console.print(compared_table(console.width, pairs, "traced", "kernel that differs"))
    for name, us in result.unmatched[:5]:
        console.print(f"not predicted: {duration(us)} {name[:80]}")
    if len(result.unmatched) > 5:
        rest = sum(us for _, us in result.unmatched[5:])
        console.print(f"and {len(result.unmatched) - 5} others: {duration(rest)}")
    whole = Compared(result.predicted_us, result.lo_us, result.hi_us, result.traced_us)
    total = compared_total(whole, "traced")
    console.print(total + f"; between runs {duration(result.host_us)}")
    print_notes(console, result.notes)
