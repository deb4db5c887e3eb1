"""Fusion of element-wise ATen operators and reductions into kernels, as ``torch.compile`` does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from math import prod

from ...features.cost.formats import ALIASES
from ...features.ir.torch.record import FORWARD, AtenCall, Recording
from .aten_products import multiplies
from .aten_traffic import LOOKUPS, NAMES, Use, evaluated
from .aten_work import AtenKernel, moving, used

#: Name prefixes of operators that torch.compile does not generate code for.
_OPAQUE = tuple(NAMES["opaque"])
_CONVOLUTION = "aten.convolution"
#: Dimensions of a batch of images.
_IMAGE = 4
#: Libraries whose operators the compiler generates code for; operators of others are called.
_OWN = ("aten.", "prims.")
#: Inductor's heuristics: relative time of convolutions with the channels last, by kind.
_LONGER = {"grouped": 1.358, "small": 0.783, "narrowing": 0.725, "other": 0.823}
#: Maximum channels of a small convolution, and the number of operators per convolution from which
#: the layout is not worth changing.
_SMALL, _FEW = 64, 300


def fused(recording: Recording) -> list[AtenKernel]:
    """Return the kernels of a recording with element-wise operators and reductions fused.

    An operator joins the kernels that produced its operands, unless that would create a cycle. A
    kernel reads each external tensor once, and writes tensors that other kernels read or that
    outlive the program. Constants computed without inputs are recomputed by each reader. Optimizers
    are not fused. 2-D image convolutions may run with the channels last, whatever the program's
    layout.
    """
    calls = _without_constants(recording)
    if lays_channels_last(recording.calls):
        calls = [_laid_last(c) if c.name.startswith(_CONVOLUTION) else c for c in calls]
    return _Fusion(Recording(calls, recording.kept)).works()


def is_opaque(call: AtenCall) -> bool:
    """Return whether an operator has its own kernels, with which nothing is fused."""
    # The compiler generates no code for complex numbers; these stay PyTorch's operators.
    hollow = any(t.dtype.startswith("complex") for t in (*call.inputs, *call.outputs))
    opaque = hollow or call.phase == "optimizer" or call.name.startswith(_OPAQUE)
    return opaque or multiplies(call.name) or not call.name.startswith(_OWN)


def _without_constants(recording: Recording) -> list[AtenCall]:
    """Return the calls without those that only create constants, such as positions and masks.

    Constants cost their readers no traffic. They stay in memory if others change them, if they
    outlive the program, or if an operator with its own kernels reads them.
    """
    written = Counter(t.memory for call in recording.calls for t in call.outputs)
    held = {t.memory for call in recording.calls if is_opaque(call) for t in call.inputs}
    held |= recording.kept | {memory for memory, times in written.items() if times > 1}
    constant: set[int] = set()
    found = []
    for call in recording.calls:
        own = {t.memory for t in call.outputs}
        fixed = constant.issuperset(t.memory for t in call.inputs)
        if fixed and not own & held and not is_opaque(call) and "rand" not in call.name:
            constant |= own
            continue
        inputs = (replace(t, bytes=0) if t.memory in constant else t for t in call.inputs)
        found.append(replace(call, inputs=tuple(inputs)))
    return found


def _laid_last(call: AtenCall) -> AtenCall:
    """Return a convolution with its 2-D images laid out with the channels last."""
    inputs = (replace(t, channels_last=len(t.shape) == _IMAGE) for t in call.inputs)
    return replace(call, inputs=tuple(inputs))


@dataclass
class _Group:
    """Operators of one kernel.

    Attributes:
        calls: Positions in the program, in order; empty once merged into another group.
        size: Maximum elements that an operator reads or writes.
        reduces: Whether an operator writes fewer elements than it reads.
        made: Element counts of the results.
        before: Bit mask of the groups that run before.
        opaque: Whether nothing may join.
    """

    calls: list[int]
    size: int
    reduces: bool = False
    made: set[int] = field(default_factory=set)
    before: int = 0
    opaque: bool = False

    def takes(self, call: AtenCall, size: int) -> bool:
        """Return whether an operator of some size can join."""
        # A reduction of another reduction's sums has to wait for all of them.
        fits = size == self.size or (size in self.made and not _reduces(call, size))
        joint = call.name in NAMES["joints"] and size > self.size and not self.reduces
        return (fits or joint) and not self.opaque


def _reduces(call: AtenCall, size: int) -> bool:
    return all(prod(t.shape) < size for t in call.outputs)


class _Fusion:
    def __init__(self, recording: Recording) -> None:
        self._calls, self._kept = recording.calls, recording.kept
        self._groups: list[_Group] = []
        self._maker: dict[int, int] = {}
        self._readers: dict[int, set[int]] = {}
        for at, call in enumerate(recording.calls):
            self._add(at, call)

    def _add(self, at: int, call: AtenCall) -> None:
        opaque = is_opaque(call)
        # Only looked-up rows of a table are read: as much as is written.
        read = call.inputs[1:] if call.name in LOOKUPS else call.inputs
        size = max(prod(t.shape) for t in (*read, *call.outputs))
        makers = {self._maker[t.memory] for t in call.inputs if t.memory in self._maker}
        # An overwritten tensor must have been read and written before.
        earlier = {r for t in call.outputs for r in self._readers.get(t.memory, ())}
        earlier |= {self._maker[t.memory] for t in call.outputs if t.memory in self._maker}
        alone = opaque or call.name in NAMES["windows"]
        homes = [] if alone else self._homes(makers, makers | earlier, call, size)
        if not homes:
            homes = [len(self._groups)]
            self._groups.append(_Group([], size, opaque=opaque))
        home = homes[0]
        group = self._groups[home]
        group.calls.append(at)
        group.made |= {prod(t.shape) for t in call.outputs}
        group.reduces |= _reduces(call, size)
        group.size = max(group.size, size)
        self._follow(home, (makers | earlier) - {home})
        for t in call.inputs:
            self._readers.setdefault(t.memory, set()).add(home)
        for t in call.outputs:
            self._maker[t.memory] = home
        for other in homes[1:]:
            own = self._groups[other]
            alike = own.size == group.size or not (own.reduces and group.reduces)
            if alike and not self._between(home, other):
                self._merge(home, other)

    def _homes(self, makers: set[int], needed: set[int], call: AtenCall, size: int) -> list[int]:
        """Return the kernels that an operator can join, the latest first."""
        found: list[int] = []
        for home in sorted(makers, reverse=True):
            circle = any(self._groups[o].before >> home & 1 for o in needed - {home})
            if self._groups[home].takes(call, size) and not (circle and not found):
                found.append(home)
        return found

    def _follow(self, home: int, others: Iterable[int]) -> None:
        """Order a kernel, and all that come after it, behind others."""
        group, mask = self._groups[home], 0
        for other in others:
            mask |= 1 << other | self._groups[other].before
        if mask & ~group.before:
            group.before |= mask
            for own in self._groups:
                if own.before >> home & 1:
                    own.before |= group.before

    def _between(self, one: int, other: int) -> bool:
        """Return whether a third kernel has to run between two kernels."""
        for a, b in ((one, other), (other, one)):
            ahead = self._groups[b].before & ~(1 << a)
            if any(ahead >> g & own.before >> a & 1 for g, own in enumerate(self._groups)):
                return True
        return False

    def _merge(self, home: int, other: int) -> None:
        """Move the operators of another kernel into this one."""
        into, gone = self._groups[home], self._groups[other]
        into.calls = sorted(gone.calls + into.calls)
        into.size, into.reduces = max(into.size, gone.size), into.reduces or gone.reduces
        into.made |= gone.made
        into.before = (into.before | gone.before) & ~(1 << other | 1 << home)
        gone.calls, gone.opaque = [], True
        for own in self._groups:
            if own.before >> other & 1:
                own.before |= 1 << home
            if own.before >> home & 1:
                own.before = (own.before | into.before) & ~(1 << other)
        for memory, maker in self._maker.items():
            if maker == other:
                self._maker[memory] = home
        for readers in self._readers.values():
            if other in readers:
                readers.remove(other)
                readers.add(home)

    def works(self) -> list[AtenKernel]:
        found: list[AtenKernel] = []
        for home in self._order():
            group = self._groups[home]
            calls = [self._calls[at] for at in group.calls]
            if group.opaque or len(calls) == 1:
                found += [work for call in calls for work in used(call)]
            else:
                found.append(self._pass(home, calls))
        return found

    def _order(self) -> list[int]:
        """Return kernels in the order of their last operators, after the kernels that they need.

        Operators recomputed by checkpointing wait until something reads them
        (``reordering_to_mimic_autograd_engine`` of ``torch._functorch.partitioners``).
        """
        found: list[int] = []
        done = 0
        alive = [home for home, group in enumerate(self._groups) if group.calls]
        for home in sorted(alive, key=self._turn):
            wanted = (self._groups[home].before | 1 << home) & ~done
            done |= wanted
            own = [g for g in range(wanted.bit_length()) if wanted >> g & 1]
            found += sorted(own, key=lambda g: self._groups[g].before.bit_count())
        return found

    def _turn(self, home: int) -> tuple[bool, int]:
        own = self._groups[home].calls
        return all(self._calls[at].again for at in own), own[-1]

    def _pass(self, home: int, calls: Sequence[AtenCall]) -> AtenKernel:
        made: dict[int, int] = {}
        read: dict[int, int] = {}
        for call in calls:
            for t in call.inputs:
                if t.memory not in made:
                    read[t.memory] = max(read.get(t.memory, 0), t.bytes)
            for t in call.outputs:
                made[t.memory] = max(made.get(t.memory, 0), t.bytes)
        # Only looked-up rows of a table are read.
        tables = {c.inputs[0].memory: c.outputs[0].bytes for c in calls if c.name in LOOKUPS}
        uses = [Use(m, min(size, tables.get(m, size)), False) for m, size in read.items()]
        written = {m for m in made if m in self._kept or self._readers.get(m, set()) - {home}}
        uses += [Use(m, size, False) for m, size in _again(calls, made.keys() - written)]
        uses += [Use(m, made[m], True) for m in made if m in written]
        total = float(sum(use.bytes for use in uses))
        last = calls[-1]
        names = list(dict.fromkeys(c.name.removeprefix("aten.") for c in calls))
        name = "+".join(names[:4]) + (" …" if len(names) > 4 else "")
        dtype = ALIASES.get(last.outputs[0].dtype, "f32")
        where = {"phase": last.phase, "place": last.place, "uses": tuple(uses)}
        return moving(name, dtype, total, **where)


def _again(calls: Sequence[AtenCall], held: Set[int]) -> list[tuple[int, int]]:
    """Return the memory that norms in a kernel read a second time, with bytes.

    Args:
        calls: Operators of the kernel.
        held: Memory made in the kernel and never written: its sources are read again instead.
    """
    sources: dict[int, dict[int, int]] = {}
    found: list[tuple[int, int]] = []
    for call in calls:
        reads: dict[int, int] = {}
        for at, t in enumerate(call.inputs):
            own = sources[t.memory] if t.memory in held & sources.keys() else {t.memory: t.bytes}
            reads |= own
            if at < NAMES["long_rows"].get(call.name, 0) and not evaluated(call):
                found += own.items()
        sources |= {t.memory: reads for t in call.outputs}
    return found


def lays_channels_last(calls: Sequence[AtenCall]) -> bool:
    """Return whether a compiled program's convolutions run with the channels last.

    Args:
        calls: Operators of the forward pass and, in training, of the backward pass.
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
    """Return whether a filter of several taps has at most half as many outputs as inputs."""
    outputs, inputs, *sides = call.inputs[1].shape
    return outputs * 2 <= inputs and sides[0] > 1
