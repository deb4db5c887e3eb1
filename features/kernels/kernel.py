"""Kernels and their kinds: instructions of the optimised, scheduled module that a target runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ..cost.flops import CONTROL
from ..cost.library_calls import by_target, is_annotation, is_host_call
from ..ir.op_table import OPS, named
from ..ir.program import BOOKKEEPING, COLLECTIVES, Computation, Op, Program, Source

#: Kinds of kernel. Library calls such as FFT, Cholesky and unknown targets are ``custom_call``.
KINDS = (
    "gemm",
    "conv",
    "fusion",
    "reduce",
    "copy",
    "gather_scatter",
    "sort",
    "custom_call",
    "collective",
    "control",
)
#: Instructions that the target does not execute: they name parts of buffers, or are constant.
FREE = BOOKKEEPING | named("no_kernel")
_COMMUNICATION = frozenset((*COLLECTIVES, "send", "recv"))
#: Parts of the targets of fused attention.
_ATTENTION = ("fmha", "attention")
#: Kinds by opcode; unlisted opcodes are arithmetic.
_DIRECT = {name: spec.kind for name, spec in OPS.items() if spec.kind}


@dataclass(slots=True)
class Kernel:
    """One kernel.

    Attributes:
        name: Instruction name in the optimised module, as in a profiler's trace.
        kind: One of :data:`KINDS`.
        body: A separate module: the entry has parameters and this instruction as root; called
            computations are included. Canonical: printing it gives :attr:`ir`.
        ir: Canonical HLO text of ``body``; features can be recomputed from it.
        hash: Hex digest of ``ir``.
        flops: Floating-point operations of one execution (multiply and add count as two).
        transcendentals: exp, log, tanh and similar in one execution.
        bytes_in: Bytes read by one execution, counting only what is touched.
        bytes_out: Bytes written by one execution, counting only what is touched.
        multiplicity: Executions per program run (loops multiply).
        operands: Indices, in the same list, of the kernels whose results this one reads.
        sources: StableHLO ops and lines that it came from.
        scope: Names of the enclosing loops and branches, outermost first.
        endless: Whether it is in a loop without a known trip count, which is counted once.
        async_role: ``start``, ``done`` or empty.
        async_peer: Index of the matching done or start; -1 if none.
        cycles: The compiler's estimate of one execution in cycles (TPU); 0 if none.
        row: Cache of the device-independent feature row.
    """

    name: str
    kind: str
    body: Program
    ir: str
    hash: str
    flops: float = 0.0
    transcendentals: float = 0.0
    bytes_in: float = 0.0
    bytes_out: float = 0.0
    multiplicity: float = 1.0
    operands: tuple[int, ...] = ()
    sources: tuple[Source, ...] = ()
    scope: tuple[str, ...] = ()
    endless: bool = False
    async_role: str = ""
    async_peer: int = -1
    cycles: float = 0.0
    row: np.ndarray | None = field(default=None, repr=False, compare=False)

    @property
    def bytes(self) -> float:
        """Bytes read and written by one execution."""
        return self.bytes_in + self.bytes_out

    @property
    def takes_time(self) -> bool:
        """Whether the kernel takes any time.

        Control flow (loops, branches, tuples) does not, since the kernels of its bodies are listed.
        Neither does the done of an asynchronous pair, since the start represents both.
        """
        # A done without a start (in a truncated module) keeps its own cost.
        paired = self.async_role == "done" and self.async_peer >= 0
        return self.kind != "control" and not paired

    @property
    def op(self) -> Op:
        """The instruction itself."""
        return self.body.entry_computation.root_op

    @property
    def inner(self) -> Computation:
        """The fused computation of a fusion (or call), otherwise the entry of ``body``."""
        op = self.op
        if op.opcode in ("fusion", "call") and op.called:
            return self.body.computations[op.called[0]]
        return self.body.entry_computation

    @property
    def opcode(self) -> str:
        """HLO opcode of the instruction."""
        return self.op.opcode

    @property
    def dtype(self) -> str:
        """Element type that the kernel computes in: of its main op's first input, or its result."""
        for op in self.inner.ops:
            if op.opcode in ("dot", "convolution") and op.operands:
                return self.inner.ops[op.operands[0]].type.dtype
        results = self.op.results
        # The largest of several results: indices beside values, or counters, are irrelevant.
        return max(results, key=lambda t: t.nbytes).dtype if results else "token"


@dataclass(slots=True)
class LoweredProgram:
    """A program as the target runs it.

    Attributes:
        kernels: In schedule order; loop bodies inline with their multiplicity.
        lowering: ``xla``, ``fused`` or ``op``.
        target: Name of the target that it was lowered for.
        compiler: Compiler and version.
        peak_memory_bytes: Peak device memory.
        memory_source: ``compiler`` or ``liveness``.
        notes: Remarks for the user (loops without a known trip count …).
        hlo: Optimised module text; empty for ``fused`` and ``op``.
        compile_seconds: Compile time; 0 if unknown.
        entry_bytes: Lower bound on bytes of arguments and results moved per run; 0 if unknown.
        module: The lowered program where no text is kept (``fused`` and ``op``).
    """

    kernels: list[Kernel]
    lowering: str
    target: str
    compiler: str = ""
    peak_memory_bytes: float = 0.0
    memory_source: str = ""
    notes: list[str] = field(default_factory=list)
    hlo: str = ""
    compile_seconds: float = 0.0
    entry_bytes: float = 0.0
    module: Program | None = field(default=None, repr=False, compare=False)


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
