"""Chains of element-wise ATen operators fused into kernels, as ``torch.compile`` generates them."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from math import prod

from ...features.cost.formats import ALIASES
from ...features.ir.torch.record import FORWARD, AtenCall, Recording
from .aten_products import multiplies
from .aten_traffic import LOOKUPS, Use, evaluated
from .aten_work import CONVOLUTION, AtenKernel, moving, used

#: Operators that torch.compile makes no kernels of its own for.
_OPAQUE = (
    *("aten.convolution", "aten._scaled_dot_product", "aten.sort", "aten.topk"),
    *("aten._foreach", "aten.embedding_dense_backward", "aten.cumsum", "aten.index_put"),
    *("aten.scatter", "aten._unsafe_index_put", "aten.index_add", "aten._fused", "aten._fft"),
    *("aten.index_reduce", "aten.index_copy", "aten.index_fill", "aten.masked_scatter", "aten.put"),
    *("aten.max_pool2d_with_indices_backward", "aten._embedding_bag"),
)
#: Operators that read each element of an operand for several results: the operand is written first
#: (``realize_hint`` of torch/_inductor/lowering.py).
_WINDOWS = ("aten.avg_pool2d", "aten.avg_pool3d", "aten.max_pool2d_with_indices")
#: Norms over more elements than a block holds: sums over them come first, and what makes the result
#: reads as many of the operands again.
_LONG_ROWS = {
    "aten.native_group_norm": 1,
    "aten.native_group_norm_backward": 2,
    "aten.native_batch_norm": 1,
    "aten.native_batch_norm_backward": 2,
}
#: Whose operators the compiler generates code for; those of other libraries are called.
_OWN = ("aten.", "prims.")


def fused(recording: Recording) -> list[AtenKernel]:
    """What the operators cost with chains of element-wise operators and reductions fused.

    An operator joins the kernel that made one of its operands, unless that would turn the order of
    kernels into a circle. A kernel reads each tensor that it did not make once, and writes those
    that others read or that outlive the program. Optimisers stay as they are. Convolutions may run
    with the channels last whatever the program's layout.
    """
    found = _Fusion(recording).works()
    if not lays_channels_last(recording.calls):
        return found
    return [replace(w, channels_last=True) if w.kind == CONVOLUTION else w for w in found]


def is_opaque(call: AtenCall) -> bool:
    """Whether an operator has kernels of its own, which nothing joins."""
    # The compiler generates nothing for complex numbers, which stay PyTorch's operators.
    hollow = any(t.dtype.startswith("complex") for t in (*call.inputs, *call.outputs))
    opaque = hollow or call.phase == "optimizer" or call.name.startswith(_OPAQUE)
    return opaque or multiplies(call.name) or not call.name.startswith(_OWN)


@dataclass
class _Group:
    calls: list[AtenCall]
    size: int
    last: int = 0
    before: int = 0
    opaque: bool = False


class _Fusion:
    def __init__(self, recording: Recording) -> None:
        self._kept = recording.kept
        self._groups: list[_Group] = []
        self._maker: dict[int, int] = {}
        self._readers: dict[int, set[int]] = {}
        for at, call in enumerate(recording.calls):
            self._add(at, call)

    def _add(self, at: int, call: AtenCall) -> None:
        opaque = is_opaque(call)
        size = max(prod(t.shape) for t in (*call.inputs, *call.outputs))
        makers = {self._maker[t.memory] for t in call.inputs if t.memory in self._maker}
        # What is overwritten must have been read before.
        earlier = {r for t in call.outputs for r in self._readers.get(t.memory, ())}
        alone = opaque or call.name in _WINDOWS
        home = None if alone else self._home(makers, makers | earlier, size)
        if home is None:
            home = len(self._groups)
            self._groups.append(_Group([], size, opaque=opaque))
        group = self._groups[home]
        group.calls.append(call)
        group.last = at
        mask = 0
        for other in (makers | earlier) - {home}:
            mask |= 1 << other | self._groups[other].before
        if mask & ~group.before:
            group.before |= mask
            for own in self._groups:
                if own.before >> home & 1:
                    own.before |= group.before
        for t in call.inputs:
            self._readers.setdefault(t.memory, set()).add(home)
        for t in call.outputs:
            self._maker[t.memory] = home

    def _home(self, makers: set[int], needed: set[int], size: int) -> int | None:
        """The latest kernel of the same size that an operator can join."""
        for home in sorted(makers, reverse=True):
            group = self._groups[home]
            circle = any(self._groups[o].before >> home & 1 for o in needed - {home})
            if not group.opaque and group.size == size and not circle:
                return home
        return None

    def works(self) -> list[AtenKernel]:
        found: list[AtenKernel] = []
        for home in self._order():
            group = self._groups[home]
            if group.opaque or len(group.calls) == 1:
                found += [work for call in group.calls for work in used(call)]
            else:
                found.append(self._pass(home, group))
        return found

    def _order(self) -> list[int]:
        """Kernels in the order of their last operators, each after those that it reads from.

        What checkpointing computes again waits until something reads it
        (``reordering_to_mimic_autograd_engine`` of ``torch._functorch.partitioners``).
        """
        found: list[int] = []
        done = 0
        for home in sorted(range(len(self._groups)), key=self._turn):
            wanted = (self._groups[home].before | 1 << home) & ~done
            done |= wanted
            own = [g for g in range(wanted.bit_length()) if wanted >> g & 1]
            found += sorted(own, key=lambda g: self._groups[g].before.bit_count())
        return found

    def _turn(self, home: int) -> tuple[bool, int]:
        group = self._groups[home]
        return all(call.again for call in group.calls), group.last

    def _pass(self, home: int, group: _Group) -> AtenKernel:
        made: dict[int, int] = {}
        read: dict[int, int] = {}
        for call in group.calls:
            for t in call.inputs:
                if t.memory not in made:
                    read[t.memory] = max(read.get(t.memory, 0), t.bytes)
            for t in call.outputs:
                made[t.memory] = max(made.get(t.memory, 0), t.bytes)
        # A table is read as far as it is looked up.
        tables = {c.inputs[0].memory: c.outputs[0].bytes for c in group.calls if c.name in LOOKUPS}
        uses = [Use(m, min(size, tables.get(m, size)), False) for m, size in read.items()]
        written = {m for m in made if m in self._kept or self._readers.get(m, set()) - {home}}
        uses += [Use(m, size, False) for m, size in _again(group.calls, made.keys() - written)]
        uses += [Use(m, made[m], True) for m in made if m in written]
        total = float(sum(use.bytes for use in uses))
        last = group.calls[-1]
        names = list(dict.fromkeys(c.name.removeprefix("aten.") for c in group.calls))
        name = "+".join(names[:4]) + (" …" if len(names) > 4 else "")
        dtype = ALIASES.get(last.outputs[0].dtype, "f32")
        where = {"phase": last.phase, "place": last.place, "uses": tuple(uses)}
        return moving(name, dtype, total, **where)


def _again(calls: Sequence[AtenCall], held: Set[int]) -> list[tuple[int, int]]:
    """Memory that norms of a kernel read a second time, and bytes of it.

    Args:
        calls: Of the kernel.
        held: What it makes and never writes: its own operands are read again for it.
    """
    sources: dict[int, dict[int, int]] = {}
    found: list[tuple[int, int]] = []
    for call in calls:
        reads: dict[int, int] = {}
        for at, t in enumerate(call.inputs):
            own = sources[t.memory] if t.memory in held & sources.keys() else {t.memory: t.bytes}
            reads |= own
            if at < _LONG_ROWS.get(call.name, 0) and not evaluated(call):
                found += own.items()
        sources |= {t.memory: reads for t in call.outputs}
    return found


#: Inductor's own figures: how much longer convolutions take with the channels last, by kind.
_LONGER = {"grouped": 1.358, "small": 0.783, "narrowing": 0.725, "other": 0.823}
#: Most channels of a small convolution, and operators for each convolution from which on few
#: convolutions are not worth it.
_SMALL, _FEW = 64, 300


def lays_channels_last(calls: Sequence[AtenCall]) -> bool:
    """Whether the convolutions of a program run with the channels last when it is compiled.

    Args:
        calls: Operators of its forward pass, and of its backward pass in training.
    """
    forward = [call for call in calls if call.phase == FORWARD]
    found = [call for call in forward if call.name == "aten.convolution"]
    if not found or len(forward) >= _FEW * len(found):
        return False
    kinds = [_kind(call) for call in found]
    if len(forward) < len(calls):
        risky = "grouped" in kinds or any(map(_narrows, found))
        return not risky and set(kinds) != {"small"}
    flops = [prod(c.outputs[0].shape) * prod(c.inputs[1].shape[1:]) for c in found]
    longer = sum(f * _LONGER[kind] for f, kind in zip(flops, kinds, strict=True))
    return longer <= sum(flops)


def _kind(call: AtenCall) -> str:
    outputs, inputs = call.inputs[1].shape[:2]
    if call.whole(-1) > 1 and inputs > 1:
        return "grouped"
    if max(outputs, inputs) <= _SMALL:
        return "small"
    return "narrowing" if _narrows(call) else "other"


def _narrows(call: AtenCall) -> bool:
    """Whether a filter of several taps has at most half as many outputs as inputs."""
    outputs, inputs, *sides = call.inputs[1].shape
    return outputs * 2 <= inputs and sides[0] > 1
