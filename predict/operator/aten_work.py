"""Kernels of ATen operators: products, attention, norms and memory passes, with their sizes.

Element-wise operators are memory passes, one per operator as eager PyTorch launches them
(:func:`works`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from ...features.cost.formats import ALIASES, FORMATS
from ...features.ir.torch.eager import Place
from ...features.ir.torch.record import BACKENDS, AtenCall
from ...features.operators.op import QUANTIZED, Op
from ...models.gpu.attention import backward_ratio
from .aten_launches import (
    is_over_lists,
    is_recurrent,
    list_launches,
    list_length,
    recurrent_ops,
)
from .aten_loops import Loop, loop_of
from .aten_products import product_of
from .aten_streams import Use
from .aten_traffic import (
    BAGS,
    LOOKUPS,
    NAMES,
    SORTS,
    channel_blocks,
    evaluated,
    looked_up,
    queued_updates,
    read_traffic,
    scan_steps,
    selecting,
    selection,
    sort_traffic,
    transform_traffic,
    write_traffic,
)

PRODUCT, CONVOLUTION, ATTENTION = "product", "convolution", "attention"
NORM, SOFTMAX, PASS = "norm", "softmax", "pass"
#: Distances between all pairs of two lists of points, and the position of the first list.
_DISTANCES = {"aten._cdist_forward": 0, "aten._cdist_backward": 1}
#: Kinds shown to users, by family of :class:`~opcast.features.operators.op.Op`.
_KINDS = {
    "bmm": PRODUCT,
    "conv": CONVOLUTION,
    "attention": ATTENTION,
    "layernorm": NORM,
    "rmsnorm": NORM,
    "softmax": SOFTMAX,
}


@dataclass(frozen=True, slots=True)
class AtenKernel:
    """A kernel, or several kernels of one operator.

    Attributes:
        op: The computation; its name is that of the operator, or of fused operators joined by plus
            signs, and its traffic that of its own tensors.
        launches: Host launches.
        phase: ``forward``, ``backward`` or ``optimizer``.
        place: Location in the model.
        conv: For a convolution, its direction (``op``) and sizes as in operator tables (``conv_nd``
            of features/operators/schema.py); ``None`` for transposed ones.
        uses: Memory that the kernel reads and writes.
        masked: Whether attention reads a mask.
        allowed: Backends that the program allows for attention.
        channels_last: Whether an input image has its channels last.
        serial: Dependent loads of each thread, if there are many.
        queued: Mean atomic additions to one address, which take turns.
        blocks: Number of thread blocks where they may be too few to fill a chip; else 0.
        swept: Bytes that GPU blocks read repeatedly from caches.
        loop: On CPUs, its loop that is neither vectorised nor divided; ``None`` if it has none.
    """

    op: Op
    launches: int = 1
    phase: str = "forward"
    place: Place = field(default_factory=Place)
    conv: Mapping[str, object] | None = None
    uses: tuple[Use, ...] = ()
    masked: bool = False
    allowed: tuple[str, ...] = BACKENDS
    channels_last: bool = False
    serial: int = 0
    queued: float = 0.0
    blocks: int = 0
    swept: int = 0
    loop: Loop | None = None

    @property
    def name(self) -> str:
        """Name of the operator, or of the fused operators."""
        return self.op.name

    @property
    def dtype(self) -> str:
        """Format of the computation; for products that of their operands."""
        return self.op.dtype

    @property
    def kind(self) -> str:
        """``product``, ``convolution``, ``attention``, ``norm``, ``softmax`` or ``pass``."""
        return _KINDS.get(self.op.family, PASS)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes; empty for a pass.

        Batch, rows, columns and depth of products and convolutions; batch, heads, groups, head
        size, queries, keys and causal of attention; rows and columns of norms and softmax.
        """
        if self.kind == PASS:
            return ()
        own = self.op.shape
        return (*own[:4], *own[5:]) if self.kind == ATTENTION else own

    def conv_size(self, name: str) -> int:
        """Return a size of a convolution that is not transposed."""
        value = self.conv[name] if self.conv is not None else None
        assert isinstance(value, int), (self.name, name)
        return value

    @property
    def taps(self) -> int:
        """Filter taps of a convolution that is not transposed."""
        return prod(self.conv_size(side) for side in ("kd", "kh", "kw"))

    @property
    def is_depthwise(self) -> bool:
        """Whether this is a convolution with one input channel per group."""
        return self.conv is not None and self.conv["groups"] == self.conv["c"] and self.shape[0] > 1

    @property
    def bytes(self) -> float:
        """Memory traffic in bytes."""
        return self.op.moved()

    def but(self, **changes: Any) -> AtenKernel:
        """Return the kernel with fields of its :class:`Op` changed."""
        return replace(self, op=self.op._replace(**changes))


def moving(name: str, dtype: str, moved: float, **where: Any) -> AtenKernel:
    """Return a memory pass of some bytes."""
    op = Op("move", (max(1, round(moved)),), dtype, name=name, traffic=moved)
    return AtenKernel(op, **where)


def works(calls: Sequence[AtenCall]) -> list[AtenKernel]:
    """Return the kernels of eager operators, in order."""
    found = []
    for call in calls:
        # Only eager kernels are limited so: generated code scans and reduces in parallel.
        serial, blocks = scan_steps(call), channel_blocks(call)
        own = used(call)
        if serial or blocks:
            own = [replace(w, serial=serial, blocks=blocks) for w in own]
        found += [*_copies(call), *own]
    return found


def used(call: AtenCall) -> list[AtenKernel]:
    """Return the kernels of an operator, with the memory that they use."""
    if call.outputs and not any(t.bytes for t in call.outputs):
        # PyTorch launches nothing for a result without elements.
        return []
    # An empty product or norm only fills its result; attention's last size is a flag, not a length.
    found = [
        moving(w.name, w.dtype, _traffic(call), phase=w.phase, place=w.place)
        if 0 in w.shape[:6]
        else w
        for w in _works(call)
    ]
    # The split of traffic among several kernels of an operator is unknown.
    known = float(len(found) == 1)
    several = is_over_lists(call.name)
    # Other tensors of its list come between one and its next use.
    near = float(sum(t.bytes for t in call.inputs[: list_length(call)])) if several else 0.0
    uses = []
    for at, t in enumerate(call.inputs):
        # Only looked-up rows of a table are read.
        size = looked_up(call) if call.name in (*LOOKUPS, *BAGS) and not at else t.bytes
        uses.append(Use(t.memory, known * size, False, t.start, between=near))
    uses += [Use(t.memory, known * t.bytes, True, t.start, between=near) for t in call.outputs]
    placed = [replace(work, uses=tuple(uses)) for work in found]
    if not placed:
        return placed
    # The last kernel is the one that goes by the indices.
    turns, loop = queued_updates(call), loop_of(call)
    last = replace(placed[-1], uses=selecting(uses, [call]), queued=turns, loop=loop)
    return [*placed[:-1], last]


def _copies(call: AtenCall) -> list[AtenKernel]:
    """Return the copies of operands that norm kernels need contiguous, such as permuted views.

    PyTorch's ``expect_contiguous`` (layer_norm_kernel.cu); generated code reads them in place.
    """
    if not _is_norm(call):
        return []
    dtype = ALIASES.get(call.outputs[0].dtype, "f32")
    return [
        moving("contiguous", dtype, 2.0 * t.bytes, phase=call.phase, place=call.place)
        for t in call.inputs[: 2 if call.name.endswith("backward") else 1]
        if not t.contiguous
    ]


def _works(call: AtenCall) -> list[AtenKernel]:
    dtype = ALIASES.get(call.outputs[0].dtype, "f32")
    name = call.name.removeprefix("aten.")
    where = {"phase": call.phase, "place": call.place}
    last = any(t.channels_last for t in call.inputs[:2])
    base = moving(name, dtype, _traffic(call), channels_last=last, **where)
    if is_recurrent(call.name):
        return [replace(base, op=op) for op in recurrent_ops(call)]
    product = product_of(call)
    if product is not None:
        traffic = (base.bytes - product.unread) / product.times
        narrow = FORMATS[product.dtype].activation_bits < 16
        multiplied = base.but(
            family="bmm",
            shape=product.shape,
            dtype=product.dtype,
            scale=float(product.times),
            variant=QUANTIZED if narrow else "",
            traffic=traffic,
        )
        return [replace(multiplied, launches=product.launches)]
    if call.name == "aten.convolution":
        own = base.but(family="conv", shape=_convolution(call))
        return [replace(own, conv=_conv_sizes(call, "fwd"))]
    if call.name == "aten.convolution_backward":
        return _convolution_backward(call, base)
    if "scaled_dot_product" in call.name:
        return [_attention(call, base)]
    if _is_norm(call):
        cols = _row(call)
        rows = prod(call.inputs[0].shape) // cols
        # Gradients take one pass for the input's, one for the weights' (as in published op graphs,
        # predict/published/opgraph.py).
        kinds = {t.shape == call.inputs[0].shape for t in call.outputs}
        times = len(kinds) if call.name.endswith("backward") else 1
        norm = base.but(
            # PyTorch's own RMS norm is an instance of its layer norm (layer_norm_kernel.cu).
            family="rmsnorm" if "rms" in name and name == call.name else "layernorm",
            shape=(rows, cols),
            scale=float(times),
            traffic=base.bytes / times,
        )
        return [replace(norm, launches=times)]
    if call.name in ("aten._softmax", "aten._log_softmax", "aten._safe_softmax"):
        shape = call.inputs[0].shape
        cols = shape[-1] if shape else 1
        return [base.but(family="softmax", shape=(prod(shape) // max(cols, 1), cols))]
    if call.name == "aten.native_dropout_backward":
        # Three kernels: convert the mask, scale it, multiply the gradient by it. They move two, two
        # and three tensors except for the mask's bytes (native_dropout_backward of PyTorch).
        wide = call.outputs[0].bytes
        return [_moves(base, float(6 * wide + call.inputs[1].bytes), 3)]
    if call.name.startswith("aten._fft"):
        return [_moves(base, *transform_traffic(call))]
    if call.name == "aten.nll_loss_backward":
        # Fills the gradient with zeros, then writes one value per row (NLLLoss2d.cu and Loss.cu of
        # PyTorch); the values of the forward pass are not read.
        return [_moves(base, base.bytes - call.inputs[1].bytes, 2)]
    if call.name in SORTS:
        return [replace(_moves(base, *sort_traffic(call)), **selection(call))]
    kernels = write_traffic(call)
    if kernels is not None:
        return [_moves(base, moved) for moved in kernels]
    if is_over_lists(call.name):
        return [replace(base, launches=list_launches(call))]
    return [base]


def _moves(base: AtenKernel, moved: float, launches: int = 1) -> AtenKernel:
    """Return a pass with another traffic and number of launches."""
    return replace(base.but(shape=(max(1, round(moved)),), traffic=moved), launches=launches)


def _traffic(call: AtenCall) -> float:
    looked_up = read_traffic(call)
    if looked_up is not None:
        return looked_up
    if call.name in _DISTANCES:
        # One block per pair of rows, served by caches (DistanceKernel.cu).
        a, b = (t.shape for t in call.inputs[_DISTANCES[call.name] :][:2])
        width = call.inputs[0].bytes / max(prod(call.inputs[0].shape), 1)
        return 2.0 * width * prod(a) * b[-2]
    read = [t.bytes for t in call.inputs]
    if {t.shape for t in call.inputs} == {t.shape for t in call.outputs}:
        # Threads that take an element of each read a tensor that is given twice once.
        read = list({(t.memory, t.start): t.bytes for t in call.inputs}.values())
    whole = float(sum(t.bytes for t in call.outputs) + sum(read))
    return whole * (1.0 if evaluated(call) else NAMES["again"].get(call.name, 1.0))


def _convolution(call: AtenCall) -> tuple[int, ...]:
    """Return a convolution as a product: positions × output channels × (input channels · taps)."""
    weight, out = call.inputs[1].shape, call.outputs[0].shape
    groups = call.whole(-1)
    if call.numbers[-3]:
        # Transposed: every input position is multiplied by every tap.
        positions = prod(call.inputs[0].shape) // call.inputs[0].shape[1]
        return groups, positions, weight[1] * prod(weight[2:]), weight[0] // groups
    positions = prod(out) // out[1]
    return groups, positions, out[1] // groups, weight[1] * prod(weight[2:])


def _convolution_backward(call: AtenCall, base: AtenKernel) -> list[AtenKernel]:
    """Return two products of the forward pass's size: for the input and for the weights."""
    gradient, given, weight = call.inputs[:3]
    forward = AtenCall(
        "aten.convolution", (given, weight), (gradient,), call.numbers[:-1], "", base.place
    )
    groups, m, n, k = _convolution(forward)
    wanted = call.numbers[-1] if isinstance(call.numbers[-1], list | tuple) else (True, True, True)
    both = (("bwd_data", (groups, m, k, n)), ("bwd_weights", (groups, n, k, m)))
    # Each product reads two of the three tensors, and writes one as large as the third.
    moved = float(gradient.bytes + given.bytes + weight.bytes)
    return [
        replace(
            base.but(family="conv", shape=shape, traffic=moved), conv=_conv_sizes(forward, name)
        )
        for (name, shape), own in zip(both, wanted[:2], strict=True)
        if own
    ]


def _conv_sizes(call: AtenCall, direction: str) -> dict[str, object] | None:
    """Return a convolution's sizes as in operator tables; ``None`` for a transposed one."""
    given, weight = call.inputs[0].shape, call.inputs[1].shape
    stride, padding, dilation = (call.sizes(at) for at in (-6, -5, -4))
    groups = call.whole(-1)
    space = len(weight) - 2
    if call.numbers[-3] or space > 3:
        return None

    def sides(prefix: str, values: Sequence[int], absent: int) -> dict[str, int]:
        full = [absent] * (3 - space) + list(values) * (space if len(values) == 1 else 1)
        return dict(zip((f"{prefix}{d}" for d in "dhw"), full, strict=True))

    return {
        "op": direction,
        "ndim": space,
        "n": given[0] if len(given) == len(weight) else 1,
        "c": weight[1] * groups,
        "k": weight[0],
        "groups": groups,
        "channels_last": 0,
        **sides("", given[-space:], 1),
        **sides("k", weight[2:], 1),
        **sides("stride_", stride, 1),
        **sides("pad_", padding, 0),
        **sides("dil_", dilation, 1),
    }


def _attention(call: AtenCall, base: AtenKernel) -> AtenKernel:
    backward = call.name.endswith("backward")
    # The backward call has the output gradient before queries, keys and values.
    q, k, v = (t.shape for t in call.inputs[int(backward) : int(backward) + 3])
    causal = any(n is True for n in call.numbers)
    shape = (prod(q[:-3]), q[-3], k[-3], q[-1], v[-1], q[-2], k[-2], int(causal))
    scale = float(backward_ratio(np.array([q[-1]]))[0]) if backward else 1.0
    # The recording was made on the CPU; GPU kernels have other names.
    name = "scaled_dot_product_attention" + "_backward" * backward
    # The backward call also has the output and the log-sum-exp of its rows.
    masked = len(call.inputs) > (6 if backward else 3)
    own = base.but(
        name=name, family="attention", shape=shape, scale=scale, traffic=base.bytes / scale
    )
    return replace(own, masked=masked, allowed=call.allowed)


def _is_norm(call: AtenCall) -> bool:
    return "layer_norm" in call.name or "rms_norm" in call.name


def _row(call: AtenCall) -> int:
    """Return the elements that a norm reduces over: its weight's, else the last dimension."""
    size = call.inputs[0].shape
    shapes = [t.shape for t in call.inputs[1:] if 0 < len(t.shape) < len(size)]
    own = [shape for shape in shapes if size[-len(shape) :] == shape]
    return max(1, prod(own[0]) if own else size[-1])
