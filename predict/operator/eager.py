"""Calls of PyTorch timed alone, one between two events: their rows, and their time in a stream.

Such a latency includes the wait for the host's launch: a fixed time on top of the kernel's own. In
a run of a whole model the host launches ahead while the device works, so this time is paid once,
not for each kernel. It is that of a call with almost no work (:data:`PROBE`).
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from ...features.cost.formats import FORMATS
from ...features.operators.op import Op

Times = TypeVar("Times", float, np.ndarray)
#: Shortest time of a kernel in a stream of kernels, in microseconds: its start, and the gap before
#: the next. With NeuSight's measured nodes, subtracting all of the launch but this lowers the mean
#: error of forward passes from 8.0 to 3.4 % and of backward passes from 8.4 to 5.8 %
#: (docs/collectives.md, "Op graphs").
KERNEL_US = 3.0
#: Columns of the tensor that stands for moved data. Engineering choice: the latency of an
#: element-wise op depends on the product of rows and columns.
MOVED_COLS = 1024
#: A call with almost no work: what it takes is the launch.
PROBE = Op("relu", (1, 1024), "f32")
# Names of row-wise operators in the tables.
_NAMES = {"rmsnorm": "ln", "layernorm": "ln", "softmax": "softmax"}
#: Element-wise operators with two operands; each has a tensor-scalar form with the suffix ``u``.
BINARY = ("add", "mul", "div", "pow", "sub")


def kernel_us(time: Times, launch: float, joins: bool = False) -> Times:
    """Estimate times of kernels within a stream of kernels, in microseconds.

    Args:
        time: Latency measured alone, one or several.
        launch: Latency, measured alone, of an operation with almost no work.
        joins: Whether it is part of another kernel, so that it has no floor of its own.
    """
    # Operations shorter than the probe are noise around the launch: they keep the floor alone.
    own: Times = np.maximum(time - launch, 0.0) + (0.0 if joins else np.minimum(KERNEL_US, time))
    return own


def eager_row(op: Op, dtype: str = "fp32") -> dict[str, object]:
    """The row of an operator in the families of calls timed alone.

    Args:
        op: A product, a norm, a softmax, an element-wise operator, or bytes moved.
        dtype: Format, as tables name it.
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
