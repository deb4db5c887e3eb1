"""Fusion of element-wise ATen operators and reductions into kernels, as ``torch.compile`` does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from math import prod

from ...features.cost.formats import ALIASES
from ...features.ir.torch.record import AtenCall, Recording
from .aten_convolutions import lays_channels_last
from .aten_products import multiplies
from .aten_streams import Use
from .aten_traffic import LOOKUPS, NAMES, evaluated, looked_up, selecting
from .aten_work import AtenKernel, moving, used

#: Name prefixes of operators that torch.compile does not generate code for.
_OPAQUE = tuple(NAMES["opaque"])
_CONVOLUTION = "aten.convolution"
#: Dimensions of a batch of images.
_IMAGE = 4
#: Libraries whose operators the compiler generates code for; operators of others are called.
_OWN = ("aten.", "prims.")
#: Inductor's rules (torch/_inductor/config.py: realize_reads_threshold, max_pointwise_cat_inputs,
#: realize_acc_reads_threshold): maximum sources of a value that each of several readers computes
#: again, of one that a single reader computes, and maximum tensors that a reader concatenates.
_REPEATED, _ACCUMULATED, _JOINED = 4, 8, 8


def fused(recording: Recording) -> list[AtenKernel]:
    """Return the kernels of a recording with element-wise operators and reductions fused.

    An operator joins the kernels that produced its operands, unless that would create a cycle. A
    kernel reads each external tensor once, and writes tensors that other kernels read or that
    outlive the program, except those that their readers compute themselves, as they do constants.
    Optimizers are not fused. 2-D image convolutions may run with the channels last, whatever the
    program's layout.
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


#: Operators whose results are always written.
_WRITTEN = frozenset((*LOOKUPS, *NAMES["windows"], "aten.copy_", "aten.im2col", "aten._softmax"))


def _concatenates(call: AtenCall) -> bool:
    """Return whether an operator puts more tensors together than a kernel does that reads them."""
    return call.name == "aten.cat" and len(call.inputs) > _JOINED


#: A value of a program: its memory, and the position of the operator that wrote it (-1: none).
_Value = tuple[int, int]
#: Reads of values: bytes by the value and the position in its storage of the part that is read.
_Reads = dict[tuple[_Value, int], float]


class _Values:
    """Values that element-wise operators make and that are never written to memory.

    Attributes:
        read: Values that each operator reads, in the order of its inputs.
        sources: For each value that its readers compute, what they read instead.
    """

    def __init__(self, recording: Recording) -> None:
        self.read: list[list[_Value]] = []
        self.sources: dict[_Value, _Reads] = {}
        self._size: dict[_Value, int] = {}
        self._biases: dict[_Value, tuple[_Value, int]] = {}
        calls, maker = recording.calls, dict[int, int]()
        readers: dict[_Value, list[AtenCall]] = {}
        sizes: dict[int, set[int]] = {}
        for at, call in enumerate(calls):
            own = [(t.memory, maker.get(t.memory, -1)) for t in call.inputs]
            self.read.append(own)
            for value in set(own):
                readers.setdefault(value, []).append(call)
            for t in call.outputs:
                maker[t.memory] = at
                self._size[t.memory, at] = t.bytes
                sizes.setdefault(t.memory, set()).add(t.bytes)
                if call.name == _CONVOLUTION and len(own) > 2:
                    # Readers of the result add its bias (`convolution` of kernel/conv.py).
                    self._biases[t.memory, at] = own[2], call.inputs[2].bytes
        for at, call in enumerate(calls):
            size = max((prod(t.shape) for t in call.inputs), default=0)
            if is_opaque(call) or call.name in _WRITTEN or _concatenates(call):
                continue
            for t in call.outputs:
                whole = len(sizes[t.memory]) == 1 and t.memory not in recording.kept
                if whole and prod(t.shape) >= size:
                    # Sums over rows, such as a norm's moments, are always written.
                    sums = {((o.memory, at), 0): float(o.bytes) for o in call.outputs if o is not t}
                    sources = self.behind(call, at) | sums
                    if _repeats(sources.values(), readers.get((t.memory, at), [])):
                        self.sources[t.memory, at] = sources

    def behind(self, call: AtenCall, at: int) -> _Reads:
        """Return what an operator reads of the values in memory."""
        found: _Reads = {}
        for place, (t, value) in enumerate(zip(call.inputs, self.read[at], strict=True)):
            # Only looked-up rows of a table are read.
            most = looked_up(call) if call.name in LOOKUPS and not place else t.bytes
            share = min(t.bytes / max(self._size.get(value, 0), 1), 1.0)
            whole = {(value, t.start): float(min(t.bytes, most))}
            for source, size in self.sources.get(value, whole).items():
                part = size if value not in self.sources else share * size
                found[source] = max(found.get(source, 0.0), part)
        biases = [self._biases[value] for value, _ in found if value in self._biases]
        return found | {(bias, 0): float(size) for bias, size in biases}


def _repeats(sources: Iterable[float], readers: Sequence[AtenCall]) -> bool:
    """Return whether the readers of a value compute it themselves, from sources of some bytes."""
    most = _REPEATED if len(readers) > 1 else _ACCUMULATED
    if any(r.name in NAMES["windows"] for r in readers):
        most = 1
    fixed = any(is_opaque(r) or _concatenates(r) for r in readers)
    return bool(readers) and not fixed and sum(size > 0 for size in sources) <= most


class _Fusion:
    def __init__(self, recording: Recording) -> None:
        self._calls, self._kept = recording.calls, recording.kept
        self._values = _Values(recording)
        self._groups: list[_Group] = []
        self._maker: dict[int, int] = {}
        self._readers: dict[int, set[int]] = {}
        self._storage = {t.memory: float(t.storage) for c in self._calls for t in c.inputs}
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
        opaque = opaque or _concatenates(call)
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
        order = self._order()
        reads = {home: self._reads(self._groups[home]) for home in order}
        outside = {value for own in reads.values() for value, _ in own}
        found: list[AtenKernel] = []
        for home in order:
            group = self._groups[home]
            at = group.calls[0]
            if _concatenates(self._calls[at]):
                found += self._copy(at)
            elif group.opaque:
                found += used(self._calls[at])
            else:
                found += self._generated(group, reads[home], outside)
        return found

    def _reads(self, group: _Group) -> _Reads:
        """Return what a kernel reads of the values in memory that it does not make."""
        made = {(t.memory, at) for at in group.calls for t in self._calls[at].outputs}
        found: _Reads = {}
        for at in group.calls:
            for part, size in self._values.behind(self._calls[at], at).items():
                if part[0] not in made:
                    found[part] = max(found.get(part, 0.0), size)
        return found

    def _copy(self, at: int) -> list[AtenKernel]:
        """Return the copies into a concatenated tensor, which generated kernels write directly."""
        call = self._calls[at]
        makers = [self._maker.get(t.memory) for t in call.inputs]
        own = [
            t
            for t, maker in zip(call.inputs, makers, strict=True)
            if maker is None or self._groups[maker].opaque
        ]
        copied = sum(t.bytes for t in own)
        if not copied:
            return []
        uses = [Use(t.memory, t.bytes, False) for t in own]
        uses.append(Use(call.outputs[0].memory, copied, True))
        where = {"phase": call.phase, "place": call.place, "uses": tuple(uses)}
        dtype = ALIASES.get(call.outputs[0].dtype, "f32")
        return [moving("cat", dtype, 2.0 * copied, **where)]

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

    def _generated(self, group: _Group, read: _Reads, outside: Set[_Value]) -> list[AtenKernel]:
        """Return a generated kernel; none if its readers compute all that it would make."""
        calls = [self._calls[at] for at in group.calls]
        made: dict[int, int] = {}
        written: set[int] = set()
        repeated = False
        for at, call in zip(group.calls, calls, strict=True):
            for t in call.outputs:
                made[t.memory] = max(made.get(t.memory, 0), t.bytes)
                if t.memory in self._kept or (t.memory, at) in outside:
                    written.add(t.memory)
                repeated |= (t.memory, at) in self._values.sources
        if not written and repeated:
            return []
        reads = (value for at in group.calls for value in self._values.read[at])
        repeated |= any(value in self._values.sources for value in reads)
        if len(calls) == 1 and not (repeated or "norm" in calls[0].name):
            return used(calls[0])
        parts: dict[int, dict[int, float]] = {}
        for ((memory, _), start), size in read.items():
            own = parts.setdefault(memory, {})
            own[start] = max(own.get(start, 0.0), size)
        # Slices of a tensor may overlap.
        uses = [
            Use(m, min(sum(own.values()), max([*own.values(), self._storage.get(m, 0.0)])), False)
            for m, own in parts.items()
        ]
        sums = {t.memory for c in calls if "norm" in c.name for t in c.outputs[1:]}
        if written - sums:
            uses += [Use(m, size, False) for m, size in _again(calls, made.keys() - written)]
        uses += [Use(m, made[m], True) for m in made if m in written]
        last = calls[-1]
        names = list(dict.fromkeys(c.name.removeprefix("aten.") for c in calls))
        name = "+".join(names[:4]) + (" …" if len(names) > 4 else "")
        dtype = ALIASES.get(last.outputs[0].dtype, "f32")
        where = {"phase": last.phase, "place": last.place, "uses": selecting(uses, calls)}
        return [moving(name, dtype, float(sum(use.bytes for use in uses)), **where)]


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
