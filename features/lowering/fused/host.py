"""A CPU's fusions: what its library reduces, and into how many parts its compiler splits loops."""

from __future__ import annotations

from math import ceil, prod, sqrt

from ...cost.flops import op_cost
from ...ir.op_table import ELEMENTWISE
from ...ir.program import Computation, Op, Program

#: What the library's reductions combine by, and their types; beside them it has element-wise ops.
_REDUCERS, _TYPES = frozenset(("add", "maximum", "minimum")), frozenset(("f32", "f16", "bf16"))
_BESIDE = frozenset(("parameter", "constant", "broadcast", "reduce", "bitcast"))
#: Element-wise ops that it lacks.
_LACKED = frozenset(("select", "compare", "is-finite", "clamp"))
#: Bytes, or units of work, that a part of a loop has at least, and what a transcendental and a byte
#: count (ParallelCostModel in XLA's cpu/parallel_task_assignment.cc; ten loops are split for two
#: cores from the sizes on that they give, by JAX 0.10.2).
_PART_BYTES, _PART_WORK = 256 << 10, 100_000
_TRANSCENDENTAL_WORK, _BYTE_WORK = 2, 10


def as_on_host(program: Program, cores: int) -> None:
    """Give fusions the kind and the parts that XLA:CPU would.

    Args:
        program: What GPUs' rules have fused; changed in place.
        cores: Of the CPU.
    """
    for computation in [*program.computations.values()]:
        for op in computation.ops:
            if op.opcode != "fusion":
                continue
            if _by_library(program.computations[op.called[0]], program):
                config = {"fusion_config": {"kind": "__ynn_fusion"}}
                op.attrs |= {"kind": "kCustom", "backend_config": config}
                continue
            op.attrs["kind"] = "kLoop"
            parts = _parts(op, computation, program, cores)
            if parts > 1:
                op.attrs["backend_config"] = {"outer_dimension_partitions": [str(parts)]}


def _by_library(inner: Computation, program: Program) -> bool:
    reductions = [op for op in inner.ops if op.opcode == "reduce"]
    if not reductions or any(op.is_tuple for op in reductions):
        return False
    reducers = {program.computations[op.called[0]].root_op.opcode for op in reductions}
    others = {op.opcode for op in inner.ops} - _BESIDE
    typed = all(op.type.dtype in _TYPES for op in reductions)
    return typed and reducers <= _REDUCERS and others <= ELEMENTWISE - _LACKED


def _parts(op: Op, computation: Computation, program: Program, cores: int) -> int:
    """Parts of a loop: by its bytes where it moves more than it computes, else by all its work."""
    cost = op_cost(op, computation, program)
    if cost.flops <= cost.bytes:
        most, parts = ceil(sqrt(cores)), int(cost.bytes) // _PART_BYTES
    else:
        work = cost.flops + _TRANSCENDENTAL_WORK * cost.transcendentals + _BYTE_WORK * cost.bytes
        most, parts = cores, int(work) // _PART_WORK
    return max(min(most, parts, prod(op.type.shape)), 1)
