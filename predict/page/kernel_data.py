"""Columns of a prediction's kernels for a page: times, work, origin, position in the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...common.types import JsonObject
from ...features.devices.device import DeviceSpec
from ...features.ir.hlo_reader import parse_hlo
from ...features.kernels.kernel import LoweredProgram
from ...features.kernels.memory import memory_over_time
from ...features.kernels.provenance import ModulePath, ModulePaths
from ...features.table.roofline import roofline
from ...models.program.schedule_cost import durations, timeline
from ..program.predictor import Prediction
from .assemble import rounded, short

#: Maximum kernels of a page, to bound the size of the file; the most expensive ones are kept, in
#: schedule order. Engineering estimate.
MOST_KERNELS = 20_000
#: Maximum points of the memory curve, about a screen's resolution; the largest per slot are kept.
MOST_POINTS = 3000
_EXTRAPOLATED = "layers were compiled once and extrapolated, so memory over time is unknown"
_NO_MODULE = "no lowered module with buffer lifetimes is available"


@dataclass(frozen=True)
class Schedule:
    """Schedule of kernels in microseconds; arrays have shape ``(n_kernels,)``.

    Attributes:
        start: Start of each kernel.
        end: End of each kernel, including all executions and their gaps.
        busy: Time of all executions, without gaps.
        stream: Worker that it runs on; ``workers`` for the asynchronous channel, -1 for none.
        workers: Number of the device's workers.
        stretch: Factor on the kernels' times if the predicted total is below their makespan.
    """

    start: np.ndarray
    end: np.ndarray
    busy: np.ndarray
    stream: np.ndarray
    workers: int
    stretch: float

    @property
    def names(self) -> list[str]:
        """Return the names of the streams."""
        compute = [f"worker {i}" for i in range(self.workers)] if self.workers > 1 else ["compute"]
        return [*compute, "asynchronous"]


def schedule_of(prediction: Prediction, lowered: LoweredProgram, device: DeviceSpec) -> Schedule:
    """List-schedule the predicted kernels so that they fill the program's predicted time.

    Time beyond the kernels (gaps, dispatch) is spread evenly over the executions of kernels that
    are not asynchronous. If the program takes less time than the schedule, kernels overlap
    more than it shows, and all are shortened by one factor.
    """
    kernels = lowered.kernels
    counts = np.array([k.multiplicity for k in kernels], np.float64)
    one = np.array([k.latency_us for k in prediction.kernels], np.float64)
    times = durations(one, kernels) * counts
    plan = timeline(times, kernels, device)
    beyond = prediction.latency_us - plan.makespan
    stretch = min(1.0, prediction.latency_us / plan.makespan) if plan.makespan > 0 else 1.0
    # Asynchronous copies have no gap: they do not occupy the compute stream.
    runs = np.where((times > 0) & (plan.worker < plan.workers), counts, 0.0)
    gap = max(beyond, 0.0) / max(float(runs.sum()), 1.0)
    # A launch precedes its kernel: the first execution waits for one, and the last kernel ends with
    # the program. The first gap of a kernel lies before it, the others inside it.
    shift = gap * np.cumsum(runs)
    first = gap * (runs > 0)
    start = plan.start * stretch + shift - gap * runs + first
    end = plan.end * stretch + shift
    return Schedule(start, end, times * stretch, plan.worker, plan.workers, stretch)


def kernel_columns(
    prediction: Prediction,
    lowered: LoweredProgram,
    device: DeviceSpec,
    schedule: Schedule,
    paths: ModulePaths,
) -> JsonObject:
    """Collect columns of all kernels that take time, in schedule order.

    Returns:
        ``columns`` (lists of one length), ``names``, the words that columns of codes index,
        ``left_out``, the omitted kernels and their time, and ``position``, the row of each kernel.
    """
    kept = _kept(schedule.busy)
    # Both bounds of the roofline: the page's sliders recompute the larger one from changed peaks.
    roofs = roofline(lowered.kernels, device)
    own = [prediction.kernels[i] for i in kept]
    below = [lowered.kernels[i] for i in kept]
    places = [paths.of(kernel) for kernel in below]
    words = _Words()
    columns: dict[str, object] = {
        "name": [k.name for k in own],
        "kind": words.codes("kind", [k.kind for k in own]),
        "bound": words.codes("bound", [k.bound for k in own]),
        "source": words.codes("source", [k.source for k in own]),
        "dtype": words.codes("dtype", [k.dtype for k in below]),
        "opcode": words.codes("opcode", [k.opcode for k in below]),
        "op": words.codes("op", [k.source_op.removeprefix("stablehlo.") for k in own]),
        "line": words.codes("line", [k.source_line for k in own]),
        "module": words.codes("module", [_joined(place) for place in places]),
        "phase": words.codes("phase", [place.phase for place in places]),
        "inside": [int(k.in_domain) for k in own],
        "one": rounded([k.latency_us for k in own]),
        "lo": rounded([k.lo_us for k in own]),
        "hi": rounded([k.hi_us for k in own]),
        "runs": rounded([k.multiplicity for k in own]),
        "busy": rounded(schedule.busy[kept].tolist()),
        "flops": rounded([k.flops for k in own]),
        "bytes": rounded([k.bytes for k in own]),
        "compute": rounded((roofs.compute_s[kept] * 1e6).tolist()),
        "memory": rounded((roofs.memory_s[kept] * 1e6).tolist()),
        # More digits than a duration: neighbouring spans of a long timeline must not overlap.
        "start": rounded(schedule.start[kept].tolist(), 7),
        "end": rounded(schedule.end[kept].tolist(), 7),
        "stream": schedule.stream[kept].tolist(),
    }
    missing = np.ones(len(schedule.busy), bool)
    missing[kept] = False
    return {
        "columns": columns,
        "names": words.lists,
        "left_out": {
            "count": int((missing & (schedule.busy > 0)).sum()),
            "us": short(float(schedule.busy[missing].sum())),
        },
        "position": {int(place): row for row, place in enumerate(kept)},
    }


def peak_lines(columns: JsonObject, device: DeviceSpec) -> list[dict[str, object]]:
    """Return the peaks of a program's kernels: ``name`` and ``flops``, in FLOP/s.

    One for each dtype of products and convolutions, and the f32 peak of the vector unit.

    Args:
        columns: Result of :func:`kernel_columns`.
        device: Device that the kernels run on.
    """
    names, codes = columns["names"]["dtype"], columns["columns"]["dtype"]
    kinds, kind = columns["names"]["kind"], columns["columns"]["kind"]
    used = {names[d] for d, k in zip(codes, kind, strict=True) if kinds[k] in ("gemm", "conv")}
    # Products run on the matrix unit at a rate per dtype, everything else on the vector unit.
    matrix = [(f"{d} matrix", _product_peak(device, d)) for d in sorted(used)]
    lines = [*matrix, ("f32 vector", device.vector_peak("f32"))]
    return [{"name": name, "flops": short(peak)} for name, peak in lines]


def _product_peak(device: DeviceSpec, dtype: str) -> float:
    """Return the peak of products; XLA rounds f32 operands to TF32 by default if that is faster."""
    peak = device.matrix_peak(dtype)
    return max(peak, device.matrix_peak("tf32")) if dtype == "f32" else peak


def _kept(busy: np.ndarray) -> list[int]:
    costly = np.flatnonzero(busy > 0)
    if len(costly) > MOST_KERNELS:
        # Selected by time, shown in the order of the schedule.
        costly = np.sort(costly[np.argsort(-busy[costly], kind="stable")[:MOST_KERNELS]])
    return [int(i) for i in costly]


def _joined(place: ModulePath) -> str:
    return "/".join(place.modules)


class _Words:
    """Dictionary encoding: columns hold codes, and words are stored once per column."""

    def __init__(self) -> None:
        self.lists: dict[str, list[str]] = {}

    def codes(self, column: str, values: Sequence[str]) -> list[int]:
        known: dict[str, int] = {}
        places = [known.setdefault(value, len(known)) for value in values]
        self.lists[column] = list(known)
        return places


def memory_data(
    prediction: Prediction, lowered: LoweredProgram, schedule: Schedule
) -> dict[str, object]:
    """Return the peak, the capacity, and the bytes in use over time from lifetimes of buffers.

    Returns:
        ``peak_bytes``, ``source``, ``device_bytes``, ``fits``, ``resident_bytes`` (arguments and
        results), ``us`` and ``bytes`` of the curve, and ``why_not`` if there is none.
    """
    data: dict[str, object] = {
        "peak_bytes": short(prediction.peak_memory_bytes),
        "source": prediction.memory_source,
        "device_bytes": short(prediction.device_memory_bytes),
        "fits": prediction.fits,
        "why_not": "",
    }
    # Kernels that run several times outside any loop represent repeated layers, whose buffers are
    # not in the module.
    if any(k.multiplicity != 1 and not k.scope for k in lowered.kernels):
        return {**data, "why_not": _EXTRAPOLATED}
    module = lowered.module or (parse_hlo(lowered.hlo) if lowered.hlo else None)
    if module is None:
        return {**data, "why_not": _NO_MODULE}
    profile = memory_over_time(module)
    starts = _starts(lowered, schedule)
    known = [starts.get(name, 0.0) for name in profile.names]
    # Buffers are in schedule order; ops that take no time get the time of the last kernel.
    us = np.maximum.accumulate(np.array(known, np.float64)) if known else np.zeros(0)
    us, used = _thinned(us, np.array(profile.bytes, np.float64))
    return {
        **data,
        "resident_bytes": short(profile.resident),
        "us": rounded(us.tolist(), 7),
        "bytes": rounded(used.tolist()),
    }


def _starts(lowered: LoweredProgram, schedule: Schedule) -> dict[str, float]:
    """Return the start time of each kernel by name; a loop starts with its first kernel."""
    starts: dict[str, float] = {}
    for kernel, start, busy in zip(
        lowered.kernels, schedule.start.tolist(), schedule.busy.tolist(), strict=True
    ):
        if busy > 0:
            starts.setdefault(kernel.scope[0] if kernel.scope else kernel.name, start)
    return starts


def _thinned(us: np.ndarray, used: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Reduce a curve to the largest values of at most :data:`MOST_POINTS` slots."""
    if not len(us):
        return us, used
    width = us[-1] / MOST_POINTS if len(us) > MOST_POINTS else 0.0
    slot = np.floor(us / width) if width > 0 else us
    first = np.flatnonzero(np.diff(slot, prepend=-1.0) != 0)
    # The largest of each slot, so that the peak is kept.
    return us[first], np.maximum.reduceat(used, first)
