"""Which tensors a program has in memory as ``torch.compile`` runs it.

Inductor writes only what its kernels hand to others, frees it after its last reader, and lets a
generated kernel write over an operand of the same size that nobody reads later. Its partitioner
(``torch._functorch.partitioners``) keeps for the backward pass what products there read, and of
the rest what generated kernels cannot compute again from what is kept anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...features.ir.torch.record import BACKWARD, FORWARD, OPTIMIZER, AtenCall, Recording, TensorUse
from ...features.ir.torch.storages import (
    ACTIVATIONS,
    GRADIENTS,
    INPUTS,
    STATES,
    WEIGHTS,
    Storage,
    StorageLog,
)
from .aten_fusion import fused, is_opaque
from .aten_work import AtenKernel

#: In names of kernels that read an operand more than once, or that have no names for all they do.
_TWICE = ("softmax", "norm", "sum", "mean", "amax", "var", "…")


def compiled_storages(recording: Recording) -> StorageLog | None:
    """Follow the storages of a compiled program; ``None`` where the eager one's are not known.

    Args:
        recording: Of a forward pass or a training step, with its storages.
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
    """Kernels of the forward pass, of the backward pass and of the update, each fused by itself."""
    phases = [[c for c in recording.calls if c.phase == p] for p in (FORWARD, BACKWARD, OPTIMIZER)]
    phases[1] = _computed_again(phases[0], phases[1])
    read = {t.memory for call in phases[1] for t in call.inputs}
    found = []
    for calls, later in zip(phases, (read, set[int](), set[int]()), strict=True):
        found += fused(Recording(calls, recording.kept | later))
    return found


def _computed_again(forward: Sequence[AtenCall], backward: Sequence[AtenCall]) -> list[AtenCall]:
    """Let the backward pass read what it computes from instead of what it computes again."""
    maker = {t.memory: call for call in forward for t in call.outputs}
    saved = {t.memory for call in backward for t in call.inputs if t.memory in maker}
    # Products read what is in memory.
    fixed = {t.memory for call in backward if is_opaque(call) for t in call.inputs}
    sources: dict[int, tuple[TensorUse, ...]] = {}
    # What is kept may be computed from what was made before it, never the other way round.
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
    """Whether the backward pass has a tensor, or what it computes it from, in any case."""
    return memory not in maker or memory in saved or memory in sources


def _in_place(kernel: AtenKernel) -> bool:
    """Whether a kernel may write over an operand: it is generated, and reads each of them once.

    Reductions and what normalises by them read theirs twice (``decide_inplace_update`` of
    ``torch._inductor.scheduler``); names beyond those that a kernel has are taken for such.
    """
    return kernel.kind == "pass" and not any(word in kernel.name for word in _TWICE)


def _follow(log: StorageLog, kernels: Sequence[AtenKernel], recording: Recording) -> None:
    """Add what kernels make and free to a log."""
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
