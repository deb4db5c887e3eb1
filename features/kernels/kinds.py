"""Classify kernels by an instruction's opcode, target and fused ops."""

from __future__ import annotations

from collections.abc import Iterator

from ..cost.flops import CONTROL
from ..cost.library_calls import by_target, is_annotation, is_host_call
from ..ir.op_table import OPS, named
from ..ir.program import BOOKKEEPING, COLLECTIVES, Computation, Op, Program

#: Instructions that the target does not execute: they name parts of buffers, or are constant.
FREE = BOOKKEEPING | named("no_kernel")
_COMMUNICATION = frozenset((*COLLECTIVES, "send", "recv"))
#: Parts of the targets of fused attention.
_ATTENTION = ("fmha", "attention")
#: Kinds by opcode; unlisted opcodes are arithmetic.
_DIRECT = {name: spec.kind for name, spec in OPS.items() if spec.kind}


def is_free(op: Op) -> bool:
    """Return whether the target does nothing for this instruction."""
    return op.opcode in FREE or (op.opcode == "custom-call" and is_annotation(op))


def is_collective(opcode: str) -> bool:
    """Return whether an opcode is a collective, or the start or end of one."""
    return _synchronous(opcode) in _COMMUNICATION


def _synchronous(opcode: str) -> str:
    return opcode.removesuffix("-start").removesuffix("-done")


def kernel_kind(op: Op, program: Program) -> str:
    """Classify a kernel as one of :data:`opcast.features.kernels.kernel.KINDS`.

    A fusion or call is a matrix product, convolution, sort or reduction if it contains one (in this
    order), ``gather_scatter`` if its indexed accesses outweigh its arithmetic, ``copy`` if it only
    moves data, and ``fusion`` otherwise.

    Args:
        op: The instruction.
        program: The program with the computations that it calls.
    """
    opcode = op.opcode
    # The device waits for the host, whose time is unknown.
    if is_host_call(op):
        return "control"
    if is_collective(opcode):
        return "collective"
    if opcode == "custom-call":
        return target_kind(str(op.attrs.get("target", "")))
    if opcode in CONTROL and op.called and opcode not in _DIRECT:
        return _fused_kind(op, program)
    opcode = _plain(op)
    # An asynchronous slice, update or gather has the same kind as the synchronous one.
    return _DIRECT.get(opcode) or _DIRECT.get(_synchronous(opcode), "fusion")


def target_kind(target: str) -> str:
    """Classify a custom call by its target."""
    return by_target(target, "kinds_of_targets", "custom_call")


def is_attention(op: Op) -> bool:
    """Return whether an instruction calls a library's fused attention.

    Its kind is ``gemm``, as which models of kernels were trained on it; it is shown to users as
    ``attention``.
    """
    target = str(op.attrs.get("target", "")).lower()
    return op.opcode == "custom-call" and any(mark in target for mark in _ATTENTION)


def main_opcodes(kind: str) -> frozenset[str]:
    """Return the opcodes that make a fusion be of a kind; empty if none does."""
    return frozenset(code for code, k in _DIRECT.items() if k == kind)


def _fused_kind(op: Op, program: Program) -> str:
    codes: set[str] = set()
    targets: set[str] = set()
    made = accessed = sliced = 0
    for comp in containers(op, program):
        ops = comp.ops
        for inner in ops:
            code = inner.opcode
            codes.add(_plain(inner))
            if code == "custom-call":
                if not is_annotation(inner):
                    targets.add(kernel_kind(inner, program))
            elif code in ("gather", "scatter"):
                # A scatter determines the kind whatever its size: its updates collide or have to be
                # ordered.
                accessed = max(accessed, inner.type.size if code == "gather" else 1 << 62)
            elif code in ("dynamic-slice", "dynamic-update-slice"):
                moved = inner if code == "dynamic-slice" else ops[inner.operands[1]]
                sliced = max(sliced, moved.type.size)
            elif _is_arithmetic(inner):
                made = max(made, inner.type.size)
    if any(is_collective(code) for code in codes):
        return "collective"
    kinds = {_DIRECT[code] for code in codes if code in _DIRECT and code != "custom-call"}
    # In the order in which they dominate a kernel that contains several of them.
    for kind in ("gemm", "conv", "sort", "reduce", "custom_call"):
        if kind in kinds or kind in targets:
            return kind
    if (accessed and accessed >= made) or sliced > made:
        return "gather_scatter"
    # Without arithmetic it only moves data.
    return "fusion" if made else "copy"


def _plain(op: Op) -> str:
    """Return the opcode; ``dot`` for a convolution without spatial dimensions (TPU products)."""
    if op.opcode == "convolution" and len(str(op.attrs.get("dim_labels", "")).split("_")[0]) == 2:
        return "dot"
    return op.opcode


def containers(op: Op, program: Program) -> Iterator[Computation]:
    """Yield the computations inside a fusion, call or async start, without (scalar) reducers."""
    if op.opcode not in CONTROL:
        return
    for comp in [program.computations[name] for name in op.called]:
        yield comp
        for inner in comp.ops:
            yield from containers(inner, program)


def _is_arithmetic(op: Op) -> bool:
    return op.opcode not in FREE and op.opcode not in CONTROL and op.opcode not in _DIRECT
