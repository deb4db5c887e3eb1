"""Loops of PyTorch's CPU kernels that are neither vectorised nor divided among all cores.

Which they are, and their cycles, is data (section ``cpu`` of ``aten.yaml``).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log2, prod
from typing import NamedTuple

from ...features.ir.torch.record import AtenCall
from .aten_products import MATRICES
from .aten_traffic import NAMES, row_of

_CPU = NAMES["cpu"]
_LOOPS: Mapping[str, Mapping[str, float]] = _CPU["loops"]


class Loop(NamedTuple):
    """A loop on a CPU.

    Attributes:
        cycles: Cycles of one core for all of it.
        parts: Most cores that it is divided among.
        format: Format of a product that has the loop only where no units multiply it; else empty.
    """

    cycles: float
    parts: int = 1
    format: str = ""


def loop_of(call: AtenCall) -> Loop | None:
    """Return the loop of an operator; ``None`` if it is vectorised and divided, or a library's."""
    name = call.name.removeprefix("aten.").removesuffix("_")
    if name in MATRICES:
        return _product(call, MATRICES[name])
    if name == "convolution":
        return _columns(call)
    kind = next((kind for kind, own in _LOOPS.items() if name in own), "")
    if not kind:
        return None
    cycles, tensors = _LOOPS[kind][name], (*call.inputs, *call.outputs)
    count = max(prod(t.shape) for t in tensors)
    if kind == "one":
        # What is added or copied by index, not what it is added to.
        table = bool(call.inputs) and call.name.startswith(("aten.index", "aten.scatter"))
        return Loop(cycles * (prod(call.inputs[-1].shape) if table else count))
    if kind == "images":
        made = call.outputs[0].shape
        return Loop(cycles * prod(made), made[0])
    row = row_of(call)
    levels = log2(max(row, 2)) if kind == "sorts" else 1.0
    return Loop(cycles * count * levels, max(count // max(row, 1), 1))


def _product(call: AtenCall, at: int) -> Loop | None:
    first, second = call.inputs[at : at + 2]
    turned = not second.contiguous and first.dtype in _CPU["transposed"]
    cycles = _CPU["transposed" if turned else "products"].get(first.dtype)
    if cycles is None or call.name.startswith("aten._"):
        return None
    made = prod(call.outputs[0].shape)
    parts = max(prod(first.shape[:-1]), 1) if turned else 1
    narrow = "f16" if first.dtype == "float16" else ""
    return Loop(cycles * made * first.shape[-1], parts, narrow)


def _columns(call: AtenCall) -> Loop | None:
    given, weight = call.inputs[0].shape, call.inputs[1].shape
    small = prod(given[:4]) <= _CPU["columns"]["most"] and min(weight[-2:]) <= 3
    if len(given) != 5 or given[0] > 1 or call.whole(-1) > 1 or call.numbers[-3] or not small:
        return None
    positions = prod(call.outputs[0].shape[2:])
    return Loop(_CPU["columns"]["cycles"] * prod(weight[1:]) * positions)
