"""Prices of operators: learned kernels of libraries where available, else the roofline.

    time = max(lower bound, learned time of the kernel that stands for it · scale)

Steps, serving and PyTorch programs specify which measured kernel stands for an operator (a row of
the operator model), and what a vendor's kernels reach if there is none. No time and no bound of an
interval falls below the operator's FLOPs at the peak of its format, or its bytes at the rates of
main memory and of the cache.

PyTorch calls timed one by one between two events include the wait for the host's launch: a fixed
time on top of the kernel's own. In a run of a whole model the host launches ahead while the device
works, so this time is paid once, not per kernel. It is estimated by a call with almost no work
(:data:`PROBE`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import pandas as pd

from ...features.cost.formats import FORMATS
from ...features.devices.device import DeviceSpec
from ...features.operators.machine import format_rate
from ...features.operators.op import Op, least_seconds
from ...features.operators.physics import fitted
from ...models.operators import OpModel
from ...models.power.law import Work, grown_peaks

#: Input of the operator model: the columns of one operator's row.
Row = Mapping[str, object]
#: Source of estimates without a learned kernel.
ROOFLINE = "roofline"
#: Fractions of the matrix peak and of the memory bandwidth assumed by the roofline where nothing
#: was learned. Engineering estimates; not fitted.
MATRIX_SHARE, MEMORY_SHARE = 0.7, 0.85
#: Half-width of the roofline's interval, as a factor either way, for operators and convolutions;
#: engineering estimate, not fitted. NeuSight's f32 convolutions take 0.5 to 6 times the roofline on
#: five chips (5 to 95 %); the slow ones take few microseconds and include the launch.
ROOFLINE_FACTOR, _CONV_FACTOR = 1.6, 2.5


Times = TypeVar("Times", float, np.ndarray)
#: Minimum time of a kernel in a stream of kernels, in microseconds: its start, and the gap before
#: the next. With NeuSight's measured nodes, subtracting the launch except for this lowers the mean
#: error of forward passes from 8.0 to 3.4 % and of backward passes from 8.4 to 5.8 %
#: (docs/collectives.md, "Op graphs").
KERNEL_US = 3.0
#: Columns of the tensor that represents moved bytes. Engineering choice: the latency of an
#: element-wise op depends on the product of rows and columns.
MOVED_COLS = 1024
#: A call with almost no work, whose time is the launch.
PROBE = Op("relu", (1, 1024), "f32")
# Names of row-wise operators in the tables.
_NAMES = {"rmsnorm": "ln", "layernorm": "ln", "softmax": "softmax"}
#: Element-wise operators with two operands; each has a tensor-scalar form with the suffix ``u``.
BINARY = ("add", "mul", "div", "pow", "sub")


class Reach(NamedTuple):
    """What kernels reach where there is no learned one.

    Attributes:
        gap: Fixed seconds of a kernel.
        matrix: Fraction of the matrix peak.
        memory: Fraction of the memory bandwidth.
        beside: Whether arithmetic and memory traffic overlap; otherwise their times add up.
    """

    gap: float
    matrix: float = MATRIX_SHARE
    memory: float = MEMORY_SHARE
    beside: bool = True


class VendorReach(NamedTuple):
    """What a vendor's products reach, with separate values for experts and block-scaled formats."""

    product: Reach
    experts_gap: float
    scaled: float

    def of(self, op: Op) -> Reach:
        """Return what an operator reaches."""
        own = self.product
        if op.family == "moe":
            own = own._replace(gap=self.experts_gap)
        return own._replace(matrix=self.scaled) if op.dtype in _SCALED else own


#: Formats with a scale per block of operands.
_SCALED = ("fp8_block", "nvfp4", "mxfp4")
#: What kernels reach by vendor.
REACH = {
    vendor: VendorReach(Reach(gap, matrix, memory, beside=False), experts, scaled)
    for vendor, (gap, experts, matrix, scaled, memory) in fitted("reach").tables["vendors"].items()
}


class Prices(NamedTuple):
    """Times of ``n`` operators.

    Attributes:
        times: Seconds with both bounds of the 90 % interval, shape ``(n, 3)``.
        keys: Family of the learned kernel of each, or ``roofline``.
        scopes: Scope of the model (``known``, ``unseen`` …), or ``roofline``.
    """

    times: np.ndarray
    keys: list[str]
    scopes: list[str]


def price(
    ops: Sequence[Op],
    rows: Sequence[Row | None],
    reaches: Sequence[Reach],
    spec: DeviceSpec,
    model: OpModel | None,
    factors: np.ndarray | None = None,
) -> Prices:
    """Price operators on a device, as kernels in a stream of others.

    Args:
        ops: ``n`` operators.
        rows: Row of the kernel that stands for each; ``None`` for the roofline.
        reaches: Assumptions of the roofline for each.
        spec: The device.
        model: Operator model; needed where there is a row.
        factors: Time of each over that of its row, shape ``(n,)``; 1 by default.
    """
    n = len(ops)
    factors = np.ones(n) if factors is None else factors
    middle = roofline_seconds(ops, reaches, spec)
    wide = np.array([_CONV_FACTOR if op.family == "conv" else ROOFLINE_FACTOR for op in ops])
    times = np.stack([middle, middle / wide, middle * wide], axis=1).reshape(n, 3)
    keys, scopes = [ROOFLINE] * n, [ROOFLINE] * n
    at = [i for i, row in enumerate(rows) if row is not None]
    if model is not None and at:
        asked = [row for row in rows if row is not None]
        eager = np.array([str(row["key"]).startswith("eager/") for row in asked])
        # The last row has almost no work: its time is the launch.
        asked += [eager_row(PROBE)] if eager.any() else []
        if spec.name not in model.devices:
            model.devices[spec.name] = spec
        said = model.predict(pd.DataFrame(asked).assign(device=spec.name))
        own = np.stack([said.latency, said.lo, said.hi], axis=1)
        launch, own = own[-1, 0], own[: len(at)]
        # The time left after the launch has the same relative error as the call timed alone.
        left = np.where(eager, kernel_us(own[:, 0] * 1e6, launch * 1e6) * 1e-6, own[:, 0])
        # ``scale`` prices a backward pass as a multiple of the forward kernel that was measured.
        scale = factors[at] * [ops[i].scale for i in at]
        times[at] = own / own[:, :1] * (left * scale)[:, None]
        for i, row, scope in zip(at, asked, said.scope, strict=False):
            keys[i], scopes[i] = str(row["key"]), str(scope)
    return Prices(held(times, ops, spec), keys, scopes)


def held(times: np.ndarray, ops: Sequence[Op], spec: DeviceSpec) -> np.ndarray:
    """Limit times of shape ``(n, 3)`` from below by the minimum time of each operator."""
    return np.asarray(np.maximum(times, least_seconds(ops, spec)[:, None]))


def roofline_seconds(ops: Sequence[Op], reaches: Sequence[Reach], spec: DeviceSpec) -> np.ndarray:
    """Estimate operators by the roofline; seconds, shape ``(n,)``."""
    shares = np.array([(r.gap, r.matrix, r.memory) for r in reaches]).reshape(-1, 3)
    gap, matrix, memory = shares.T
    work = np.array([op.flops() / matrix_rate(op, spec) for op in ops]) / matrix
    stream = np.array([op.moved() for op in ops]) / (spec.bandwidth * memory)
    beside = np.array([r.beside for r in reaches], bool)
    # The fixed cost is added, not a third bound: the launch precedes the work.
    return np.asarray(np.where(beside, np.maximum(work, stream), work + stream) + gap)


def arithmetic_share(op: Op, spec: DeviceSpec) -> float:
    """Return the share of arithmetic in the roofline of an operator; the rest is its traffic."""
    compute = op.flops() / matrix_rate(op, spec)
    return compute / (compute + op.moved() / spec.bandwidth)


def matrix_rate(op: Op, spec: DeviceSpec) -> float:
    """Return the FLOP/s at which a device multiplies an operator's format."""
    return spec.matrix_peak(format_rate(FORMATS[op.dtype], spec))


def weight_only(dtype: str, spec: DeviceSpec) -> bool:
    """Return whether a device widens 4-bit float weights to 16 bits for lack of units for them."""
    return format_rate(FORMATS[dtype], spec) != FORMATS[dtype].rate


def work_of(ops: Sequence[Op], seconds: np.ndarray, spec: DeviceSpec) -> Work:
    """Return how busy operators keep a device's units.

    Args:
        ops: ``n`` operators.
        seconds: Time of one execution of each, shape ``(n,)``.
        spec: The device.
    """
    return Work.of(
        np.array([op.flops() for op in ops]),
        np.array([op.moved() for op in ops]),
        seconds,
        np.full(len(ops), spec.floor),
        np.array([spec.matrix_peak(op.format.rate) for op in ops]),
        spec.bandwidth,
        np.array([op.kind == "attention" for op in ops], bool),
        grown_peaks(spec, [op.format.rate for op in ops]),
    )


def kernel_us(time: Times, launch: float, joins: bool = False) -> Times:
    """Estimate times of kernels within a stream of kernels, in microseconds.

    Args:
        time: Latency measured alone, one or several.
        launch: Latency, measured alone, of an operation with almost no work.
        joins: Whether the operation is fused into another kernel and has no minimum of its own.
    """
    # Operations shorter than the probe are noise around the launch: only the minimum remains.
    own: Times = np.maximum(time - launch, 0.0) + (0.0 if joins else np.minimum(KERNEL_US, time))
    return own


def eager_row(op: Op, dtype: str = "fp32") -> dict[str, object]:
    """Return the row of an operator in the families of calls timed alone.

    Args:
        op: A product, norm, softmax, element-wise operator or memory pass.
        dtype: Format, as named in tables.
    """
    if op.family in ("linear", "bmm"):
        return {**_named(op.family, op.family, dtype), "b": 1, **op.sizes()}
    if op.family == "move":
        # A relu reads and writes each element once.
        width = int(FORMATS.get(dtype, FORMATS["fp32"]).element_bytes)
        rows = max(1, round(op.moved() / op.scale / (2 * width * MOVED_COLS)))
        return eager_row(Op("relu", (rows, MOVED_COLS)), dtype)
    name = _NAMES.get(op.family, op.family)
    rows, cols = op.shape
    family = name if name in ("softmax", "ln") else "elementwise"
    sizes = {"rows": rows, "cols": cols, "n_in": 2 if name in BINARY else 1}
    return _named(family, name, dtype) | sizes


def _named(family: str, op: str, dtype: str) -> dict[str, object]:
    return {"key": f"eager/{family}", "family": family, "op": op, "dtype": dtype}
