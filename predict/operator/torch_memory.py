"""Peak memory of a program as PyTorch itself runs it, and whether it fits a device.

device's view = CUDA context + segments that the caching allocator holds
segments      = replay of every storage that the program makes and frees, and of workspaces

Under ``torch.compile``, Inductor writes only tensors that cross kernels, frees them after their
last reader, and lets a generated kernel overwrite a dead operand of the same size. Its partitioner
(``torch._functorch.partitioners``) keeps for the backward pass what products there read, and of the
rest what generated kernels cannot recompute from tensors that are kept anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot
from typing import TYPE_CHECKING, NamedTuple

from ...common.interval import Interval
from ...common.units import size
from ...features.ir.torch.record import BACKWARD, FORWARD, OPTIMIZER, AtenCall, Recording, TensorUse
from ...features.ir.torch.storages import (
    ACTIVATIONS,
    GRADIENTS,
    INPUTS,
    STATES,
    WEIGHTS,
    WORKSPACE,
    Storage,
    StorageLog,
)
from ...simulate.program.caching_allocator import CachingAllocator
from .aten_fusion import fused, is_opaque
from .aten_work import AtenKernel

if TYPE_CHECKING:
    from ...features.devices.device import DeviceSpec
    from ...simulate.program.caching_allocator import Block

MIB = 2**20
#: CUDA context with PyTorch's kernels loaded lazily (CUDA 11.7 and later): bytes, and bytes per
#: multiprocessor for its stacks and local memory. From 11 messages of ``torch.OutOfMemoryError`` in
#: public issues (memory in use less allocated less reserved: 0.13 GiB on a T4, 0.25 on an RTX 3080,
#: 0.49 on an RTX 4090 and on an A100, 0.58 on an RTX 5090), which it matches within 0.1 GiB;
#: earlier releases load all kernels, 0.3 to 1 GiB more.
_CONTEXT, _CONTEXT_PER_CORE = 100 * MIB, 3 * MIB
#: Memory of a Python process that has imported PyTorch: resident set of one that ran a layer of
#: release 2.13 (226 MiB), and what torch.compile imports besides. Engineering estimate.
_PROCESS = 300 * MIB
#: Half-width of the context's interval, from the same messages.
_CONTEXT_ERROR = 150 * MIB
#: Bytes of cuBLAS's workspace, which PyTorch keeps per thread that calls it
#: (``ATen/cuda/CublasHandlePool.cpp``), by the compiler's target; the last one for all others.
_WORKSPACES = (
    *(("sm_90", 32 * MIB), ("sm_10", 32 * MIB), ("gfx94", 128 * MIB), ("gfx95", 128 * MIB)),
    *(("gfx", 32 * MIB), ("", 8 * MIB + 128 * 1024)),
)
#: Half-width of the interval of allocated memory, as a fraction: undocumented scratch of kernels,
#: and other releases' rules of what is saved. Engineering estimate.
ERROR = 0.06
#: The same for a compiled program, where kernels and saved tensors follow opcast's model of
#: Inductor and its partitioner. 18 published runs of Segment Anything's encoder take 1.15 to 1.4
#: times the model's memory, one size of one image 1.8 times.
COMPILED_ERROR = 0.4
#: The upper half-width where the module's stack frames are unknown, as in an export.
_UNFRAMED = 0.25
#: Measures of peak memory: device memory in use, ``torch.cuda.max_memory_allocated`` and
#: ``max_memory_reserved``.
MEASURED = ("memory", "allocated", "reserved")
#: Number of lines to report, of those that hold most memory at the peak.
_HOLDERS = 3
#: Substrings in names of kernels that read an operand more than once, or whose name is truncated.
_TWICE = ("softmax", "norm", "sum", "mean", "amax", "var", "…")


class Holder(NamedTuple):
    """A line of a model with the memory that it holds at the peak.

    Attributes:
        line: ``file:line``.
        name: Operator that allocated most of it.
        bytes: Bytes.
    """

    line: str
    name: str
    bytes: int

    def __str__(self) -> str:
        return f"most at {self.line} ({self.name.removeprefix('aten.')}): {size(self.bytes)}"


@dataclass(frozen=True)
class TorchMemory:
    """Peak memory of a program that PyTorch runs, in bytes; on a CPU that of the host process.

    Attributes:
        peak_bytes: Device memory in use: context and segments; on a CPU the process.
        lo_bytes: Lower bound of its 90 % interval.
        hi_bytes: Upper bound.
        allocated_bytes: As ``torch.cuda.max_memory_allocated`` counts.
        reserved_bytes: As ``torch.cuda.max_memory_reserved`` counts.
        context_bytes: CUDA context, which PyTorch does not count; on a CPU the Python process.
        needed_bytes: Minimum to run in: before failing, the allocator releases free segments.
        device_bytes: Device memory available to a process; 0 if unknown.
        out_of_memory: Probability of running out of memory; ``None`` if that is unknown.
        parts: Bytes by use at the peak of allocated memory.
        holders: Lines that hold most then, largest first.
        change: The smallest change that would fit, if one is known.
        source: ``replay``.
        allocated_error: Half-widths of the interval of allocated memory, down and up.
    """

    peak_bytes: float
    lo_bytes: float
    hi_bytes: float
    allocated_bytes: float
    reserved_bytes: float
    context_bytes: float
    needed_bytes: float
    device_bytes: float
    out_of_memory: float | None
    parts: dict[str, int]
    holders: tuple[Holder, ...]
    change: str = ""
    source: str = "replay"
    allocated_error: tuple[float, float] = (0.0, 0.0)

    def measured_as(self, what: str) -> Interval:
        """Return one measure of the peak, with the 90 % interval.

        Args:
            what: One of :data:`MEASURED`.
        """
        if what == "memory":
            return Interval(self.peak_bytes, self.lo_bytes, self.hi_bytes)
        value = self.allocated_bytes if what == "allocated" else self.reserved_bytes
        return Interval.around(value, self.allocated_error[0], self.allocated_error[1])

    @property
    def needed(self) -> Interval:
        """Minimum memory to run in, with its 90 % interval."""
        return _ends(self.needed_bytes, self.allocated_error, self.parts)

    @property
    def fits(self) -> bool | None:
        """Whether it is more likely than not to fit; ``None`` if the device memory is unknown."""
        return self.needed_bytes <= self.device_bytes if self.device_bytes else None


def _ends(value: float, error: tuple[float, float], parts: Mapping[str, int]) -> Interval:
    """Return an interval from the errors of allocation and context, not below the weights."""
    down, up = (hypot(own, _CONTEXT_ERROR) for own in error)
    found = Interval.around(value, down, up)
    return found._replace(lo=max(found.lo, float(parts.get(WEIGHTS, 0))))


def torch_memory(log: StorageLog, spec: DeviceSpec, error: float = ERROR) -> TorchMemory:
    """Replay the storages of a program on a device.

    Args:
        log: Storages of the program.
        spec: A GPU or CPU.
        error: Half-width of the interval of allocated memory, as a fraction.
    """
    replay = _Replay(log, spec)
    own, cpu = replay.allocator, spec.platform == "cpu"
    context = float(_PROCESS if cpu else _CONTEXT + _CONTEXT_PER_CORE * spec.core_count)
    # Host memory is returned at once: nothing is reserved beyond what is allocated.
    reserved, pinned = (
        (own.peak_allocated, own.peak_allocated) if cpu else (own.peak_reserved, own.peak_pinned)
    )
    capacity = spec.usable_bytes
    upwards = error if log.framed else _UNFRAMED
    errors = (error * own.peak_allocated, upwards * own.peak_allocated)
    needed = context + pinned
    # Near the capacity, the allocator releases free segments.
    seen = min(context + reserved, max(needed, capacity or float("inf")))
    held = [replay.storages[number] for number in replay.held]
    parts: Counter[str] = Counter()
    for storage in held:
        parts[storage.kind] += storage.bytes
    peak = _ends(seen, errors, parts)
    chance = 1.0 - _ends(needed, errors, parts).chance_below(capacity) if capacity else None
    return TorchMemory(
        peak_bytes=peak.value,
        lo_bytes=peak.lo,
        hi_bytes=peak.hi,
        allocated_bytes=float(own.peak_allocated),
        reserved_bytes=float(reserved),
        context_bytes=context,
        needed_bytes=needed,
        device_bytes=capacity,
        out_of_memory=chance,
        parts=dict(parts),
        holders=_holders(held),
        change=_change(log, parts, needed - context, capacity - context) if capacity else "",
        allocated_error=errors,
    )


def _change(log: StorageLog, parts: Mapping[str, int], needed: float, room: float) -> str:
    """Return the smallest change that makes a program fit; empty if it fits or none is known."""
    if needed <= room:
        return ""
    # One-byte instead of four-byte moments, as in bitsandbytes and torchao.
    if needed - 0.75 * parts.get(STATES, 0) <= room:
        return "an optimizer with 8-bit states"
    fixed = sum(parts.get(kind, 0) for kind in (WEIGHTS, GRADIENTS, STATES))
    # Activations scale with the batch; the rest does not.
    batch = int(log.batch * (room - fixed) / (needed - fixed)) if needed > fixed else 0
    if batch < 1:
        return ""
    again = ", or activation checkpointing" if log.train else ""
    return f"a batch of {batch} instead of {log.batch}{again}"


def _holders(held: Iterable[Storage]) -> tuple[Holder, ...]:
    """Return the lines that hold most of the memory that the program itself allocated."""
    sums: dict[str, Counter[str]] = {}
    for own in held:
        if own.line and own.kind in (ACTIVATIONS, WORKSPACE):
            sums.setdefault(own.line, Counter())[own.name] += own.bytes
    found = [Holder(line, n.most_common(1)[0][0], n.total()) for line, n in sums.items()]
    return tuple(sorted(found, key=lambda h: -h.bytes)[:_HOLDERS])


class _Replay:
    """The allocator after a program, and the storages held at the peak."""

    def __init__(self, log: StorageLog, spec: DeviceSpec) -> None:
        self.allocator = CachingAllocator()
        self.storages = [*log.storages]
        target = str(spec.compiler.get("target", ""))
        size = next(size for start, size in _WORKSPACES if target.startswith(start))
        # The backward pass runs in its own thread, which has its own cuBLAS handle.
        count = (1 + log.train) * log.products * (spec.platform == "gpu")
        events = [*log.events]
        at = next((i for i, e in enumerate(events) if self._made(e)), len(events))
        events[at:at] = range(len(self.storages), len(self.storages) + count)
        self.storages += [Storage(size, WORKSPACE, "", "cuBLAS")] * count
        blocks: dict[int, Block] = {}
        most, last = 0, 0
        for place, event in enumerate(events):
            if event >= 0:
                blocks[event] = self.allocator.allocate(self.storages[event].bytes)
            else:
                self.allocator.release(blocks.pop(~event))
            if self.allocator.allocated > most:
                most, last = self.allocator.allocated, place
        self.held: set[int] = set()
        for event in events[: last + 1]:
            self.held ^= {event if event >= 0 else ~event}

    def _made(self, event: int) -> bool:
        return event >= 0 and self.storages[event].kind not in (WEIGHTS, INPUTS)


def compiled_storages(recording: Recording) -> StorageLog | None:
    """Return the storages of a compiled program; ``None`` if the eager program's are unknown.

    Args:
        recording: A forward pass or training step, with its storages.
    """
    eager = recording.storages
    if eager is None:
        return None
    held = [eager.storages[e] for e in eager.events if e >= 0]
    there = [s for s in held if s.kind in (WEIGHTS, INPUTS, STATES)]
    log = StorageLog(
        there, list(range(len(there))), eager.batch, products=eager.products, train=eager.train
    )
    _follow(log, _kernels(recording), recording)
    return log


def _kernels(recording: Recording) -> list[AtenKernel]:
    """Return kernels of the forward pass, backward pass and update, each fused separately."""
    phases = [[c for c in recording.calls if c.phase == p] for p in (FORWARD, BACKWARD, OPTIMIZER)]
    phases[1] = _computed_again(phases[0], phases[1])
    read = {t.memory for call in phases[1] for t in call.inputs}
    found = []
    for calls, later in zip(phases, (read, set[int](), set[int]()), strict=True):
        found += fused(Recording(calls, recording.kept | later))
    return found


def _computed_again(forward: Sequence[AtenCall], backward: Sequence[AtenCall]) -> list[AtenCall]:
    """Return the backward pass, reading the sources of recomputed tensors instead of these."""
    maker = {t.memory: call for call in forward for t in call.outputs}
    saved = {t.memory for call in backward for t in call.inputs if t.memory in maker}
    # Products read their operands from memory.
    fixed = {t.memory for call in backward if is_opaque(call) for t in call.inputs}
    sources: dict[int, tuple[TensorUse, ...]] = {}
    # A tensor can only be recomputed from tensors made before it.
    for call in forward:
        own = {t.memory for t in call.outputs}
        inputs = tuple(t for t in call.inputs if t.memory not in own)
        if is_opaque(call) or len(inputs) < len(call.inputs):
            continue
        for t in call.outputs:
            kept = t.memory in fixed or max((i.bytes for i in inputs), default=0) < t.bytes
            if not kept and all(_at_hand(i.memory, maker, saved, sources) for i in inputs):
                sources[t.memory] = tuple(s for i in inputs for s in sources.get(i.memory, (i,)))

    def resolved(uses: tuple[TensorUse, ...]) -> tuple[TensorUse, ...]:
        return tuple(s for t in uses for s in sources.get(t.memory, (t,)))

    return [replace(call, inputs=resolved(call.inputs)) for call in backward]


def _at_hand(
    memory: int,
    maker: Mapping[int, AtenCall],
    saved: set[int],
    sources: Mapping[int, tuple[TensorUse, ...]],
) -> bool:
    """Return whether the backward pass has a tensor in any case, or can recompute it."""
    return memory not in maker or memory in saved or memory in sources


def _in_place(kernel: AtenKernel) -> bool:
    """Return whether a kernel may overwrite an operand: generated, and reads each one once.

    Reductions and normalizations read theirs twice (``decide_inplace_update`` of
    ``torch._inductor.scheduler``); kernels with truncated names are assumed to as well.
    """
    return kernel.kind == "pass" and not any(word in kernel.name for word in _TWICE)


def _follow(log: StorageLog, kernels: Sequence[AtenKernel], recording: Recording) -> None:
    """Add the storages that kernels make and free to a log."""
    sizes: dict[int, int] = {}
    for call in recording.calls:
        for t in (*call.inputs, *call.outputs):
            sizes[t.memory] = max(sizes.get(t.memory, 0), t.bytes)
    last = {use.memory: at for at, kernel in enumerate(kernels) for use in kernel.uses}
    numbers: dict[int, int] = {}
    seen: set[int] = set()
    for at, kernel in enumerate(kernels):
        read = {u.memory for u in kernel.uses if not u.written}
        made = {u.memory for u in kernel.uses if u.written} - read - seen
        seen |= read | made
        dying = [m for m in numbers if last[m] == at and m not in recording.kept]
        for memory in made:
            kind = GRADIENTS if kernel.phase == BACKWARD and memory in recording.kept else ""
            over = [m for m in dying if sizes[m] == sizes[memory] and m in read]
            if over and _in_place(kernel):
                dying.remove(over[0])
                numbers[memory] = numbers.pop(over[0])
                continue
            line = f"{kernel.place.file}:{kernel.place.line}" if kernel.place.file else ""
            numbers[memory] = len(log.storages)
            log.events.append(len(log.storages))
            log.storages.append(Storage(sizes[memory], kind or ACTIVATIONS, line, kernel.name))
            if last[memory] == at and memory not in recording.kept:
                dying.append(memory)
        for memory in dying:
            log.events.append(~numbers.pop(memory))
