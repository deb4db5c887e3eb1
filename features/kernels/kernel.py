"""Kernels: instructions of the optimised and scheduled module that the target runs."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..ir.program import Computation, Op, Program, Source

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
