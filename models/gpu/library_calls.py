"""Time of factorizations and Fourier transforms of GPU libraries.

Factorizations process their columns sequentially, each in a few small kernels:

    steps = matrices^batch · sweeps · columns
    time = launch + steps · (step + passes · bytes / bandwidth) + FLOPs / peak

If a library processes all matrices of a batch at once, each takes one core with its share of the
bandwidth, in rounds of as many matrices as the cores hold.

A Fourier transform is a few passes over memory. No data pack has these calls; the constants are in
``library_calls.yaml``, with the published times that they were set to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil, log2, prod
from typing import NamedTuple

import numpy as np

from ...common.files import own_data
from ...common.types import JsonMapping
from ...features.cost.library_calls import routine_of
from ...features.devices.device import DeviceSpec
from ...features.ir.program import PARTS
from ...features.kernels.kernel import Kernel
from ...features.table.roofline import memory_seconds
from ..core.base import KernelPrediction
from .memory_passes import (
    CLOCK,
    MemoryParams,
    Traffic,
    launch_factor,
    launch_seconds,
    pass_seconds,
)


@dataclass(frozen=True)
class Transforms:
    """Passes of Fourier transforms over memory; see ``library_calls.yaml``."""

    points_log2: float
    prime: int
    bluestein: int
    within: float


@dataclass(frozen=True)
class Together:
    """Parameters of a routine that processes a batch at once; see ``library_calls.yaml``."""

    step_us: float
    passes: float
    square: bool = False

    def takes(self, call: Call, side: int) -> bool:
        """Whether the library processes all matrices of a call at once.

        Args:
            call: The matrices.
            side: Largest side divided by their number.
        """
        fits = call.matrices > 1 and call.rows // call.matrices <= side
        return fits and not (self.square and call.rows != call.columns)


@dataclass(frozen=True)
class Routine:
    """Parameters of a routine on a single matrix; see ``library_calls.yaml``."""

    routines: tuple[str, ...]
    step_us: float
    within: float
    passes: float = 0.0
    sweeps: float = 1.0
    batch: float = 1.0
    small: int = 0
    together: Together | None = None

    def seconds(self, call: Call, device: DeviceSpec, clock: float, slow: float) -> float:
        """Seconds of one call, without its launch.

        Args:
            call: The matrices.
            device: Device that it runs on.
            clock: Clock in Hz at which the steps were measured.
            slow: Ratio of the device's launch time to NVIDIA's.
        """
        scale = 1e-6 * clock / (device.clock_hz or CLOCK) * slow
        rules, cores = _tables().at_once, max(device.core_count, 1)
        if self.together is not None and self.together.takes(call, rules["side"]):
            # A core only moves the bytes of its own matrix, however few matrices there are.
            moved = self.together.passes * max(call.matrices, cores) * call.bytes
            rounds = max(call.matrices / (cores * rules["blocks"]), 1.0)
            steps, step = call.columns, rounds * self.together.step_us * scale
        else:
            moved = self.passes * call.bytes
            power = 0.0 if call.columns <= self.small else self.batch
            steps = call.matrices**power * self.sweeps * call.columns
            step = self.step_us * scale
        own = steps * (step + float(memory_seconds(np.array(moved), device)))
        return float(own + call.flops / device.vector_peak(call.dtype))


@dataclass(frozen=True, slots=True)
class Call:
    """Sizes of a library call.

    Attributes:
        routine: Index of its entry; -1 for a Fourier transform.
        matrices: Number of matrices or transforms.
        columns: Smaller side of a matrix; for a transform the number of passes over memory.
        rows: Larger side of a matrix.
        bytes: Bytes of one matrix; for a transform the bytes read and written by a pass.
        flops: FLOPs of the call.
        dtype: Element type.
    """

    routine: int
    matrices: int
    columns: int
    rows: int
    bytes: float
    flops: float
    dtype: str


class _Tables(NamedTuple):
    """Contents of ``library_calls.yaml``; the clock in Hz."""

    entries: tuple[Routine, ...]
    transforms: Transforms
    at_once: Mapping[str, int]
    clock: float


@cache
def _tables() -> _Tables:
    data = own_data("models/gpu/library_calls.yaml")
    entries = tuple(map(_routine, data["entries"]))
    clock = float(data["clock_ghz"]) * 1e9
    return _Tables(entries, Transforms(**data["fft"]), data["together"], clock)


def _routine(entry: JsonMapping) -> Routine:
    at_once = Together(**entry["together"]) if "together" in entry else None
    return Routine(**{**entry, "routines": tuple(entry["routines"]), "together": at_once})


def call_of(kernel: Kernel) -> Call | None:
    """Describe a factorization, solve or Fourier transform; ``None`` for other kernels."""
    op, entry = kernel.op, kernel.body.entry_computation.ops
    operands = [entry[i].results[0] for i in op.operands if entry[i].results]
    if kernel.kind != "custom_call" or not operands:
        return None
    first = operands[0]
    if op.opcode == "fft":
        lengths = op.attrs.get("fft_length", ())
        lengths = (lengths,) if isinstance(lengths, int) else tuple(lengths)
        passes = sum(_passes(n) for n in lengths)
        count = first.size // max(prod(lengths), 1)
        return Call(-1, count, passes, 0, kernel.bytes, kernel.flops, "f32")
    if len(first.shape) < 2:
        return None
    name = routine_of(str(op.attrs.get("target", op.opcode)))
    found = next((i for i, entry in enumerate(_tables().entries) if name in entry.routines), -1)
    if found < 0:
        return None
    *batch, rows, columns = first.shape
    own = first.nbytes / max(prod(batch), 1)
    real = PARTS.get(first.dtype, first.dtype)
    short, long = sorted((rows, columns))
    return Call(found, prod(batch), short, long, own, kernel.flops, real)


def _passes(length: int) -> int:
    """Passes over memory of transforms of one length."""
    rules = _tables().transforms
    rest, factor = length, 2
    while factor <= rules.prime and rest > 1:
        while rest % factor == 0:
            rest //= factor
        factor += 1
    passes = max(ceil(log2(max(length, 2)) / rules.points_log2), 1)
    return passes if rest == 1 else rules.bluestein * passes


def library_answer(
    calls: Sequence[Call], least: np.ndarray, device: DeviceSpec, params: MemoryParams, source: str
) -> KernelPrediction:
    """Predict library calls.

    Args:
        calls: ``n`` calls.
        least: Seconds of their rooflines, shape ``(n,)``.
        device: Device that they run on.
        params: Constants of passes over memory.
        source: Source of the predictions.
    """
    entries, transforms, _, clock = _tables()
    launch = launch_seconds(device, params)
    slow = launch_factor(device)
    seconds, reach = np.empty(len(calls)), np.empty(len(calls))
    for i, call in enumerate(calls):
        if call.routine < 0:
            one = pass_seconds(Traffic.stream(np.array([call.bytes])), device, params)
            seconds[i] = call.columns * float(one.total[0]) - launch
            reach[i] = transforms.within
        else:
            entry = entries[call.routine]
            seconds[i] = entry.seconds(call, device, clock, slow)
            reach[i] = entry.within
    ends = np.log(reach)
    latency = launch + np.maximum(seconds, least)
    inside = np.zeros(len(calls), bool)
    return KernelPrediction.around(latency, (-ends, ends), source, inside)


def call_notes(kernels: Mapping[int, Call]) -> tuple[str, ...]:
    """A note that factorizations rest on single published times; none without any."""
    if not any(call.routine >= 0 for call in kernels.values()):
        return ()
    return (
        "factorisations are predicted by the steps that their columns take one after the other, "
        "set to single published times (docs/gpu.md): wide intervals",
    )
