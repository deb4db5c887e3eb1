"""What is known of a kernel from its canonical module alone, remembered by its text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ._canonical import canonical_body, control_body
from ._kinds import is_collective, kernel_kind
from ._signature import Signatures
from .cost import Cost, kernel_cost
from .hlo import parse_hlo
from .hlo_print import print_hlo
from .ir import Op, Program

_MEMORY = 20_000
_FREE = Cost()


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """A kernel without its place in a program.

    Attributes:
        body: Canonical module.
        ir: Its text.
        hash: First 16 hex digits of the text's SHA-256.
        kind: Kind of kernel.
        cost: Work of one execution.
    """

    body: Program
    ir: str
    hash: str
    kind: str
    cost: Cost


_known: dict[str, KernelFacts] = {}
_by_signature: dict[Any, KernelFacts] = {}
_computations: dict[Any, int] = {}


class ProgramFacts:
    """Facts of a program's instructions.

    Args:
        program: The program.
    """

    def __init__(self, program: Program) -> None:
        if max(len(_by_signature), len(_computations)) > _MEMORY:
            _by_signature.clear()
            _computations.clear()
        self._program = program
        self._signatures = Signatures(program, _computations)

    def of(self, op: Op, operands: Sequence[Op]) -> KernelFacts:
        """Facts of an instruction that reads ``operands``."""
        key = self._signatures.of(op, operands)
        found = _by_signature.get(key)
        if found is None:
            body = canonical_body(op, operands, self._program)
            ir = print_hlo(body)
            found = _by_signature[key] = _known.get(ir) or _remember(body, ir)
        return found


def facts_of_ir(ir: str) -> KernelFacts:
    """Facts of a kernel's text.

    Raises:
        ProgramError: The text is no HLO module.
    """
    return _known.get(ir) or _remember(parse_hlo(ir, "kernel"), ir)


@lru_cache(maxsize=4)
def control_facts(opcode: str) -> KernelFacts:
    """Facts of a loop or conditional itself, without what it runs."""
    body = control_body(opcode)
    return _remember(body, print_hlo(body))


def _remember(body: Program, ir: str) -> KernelFacts:
    op = body.entry_computation.root_op
    kind = kernel_kind(op, body)
    waits = kind == "control" or (is_collective(op.opcode) and op.opcode.endswith("-done"))
    cost = _FREE if waits else kernel_cost(body)
    facts = KernelFacts(body, ir, hashlib.sha256(ir.encode()).hexdigest()[:16], kind, cost)
    if len(_known) >= _MEMORY:
        _known.clear()
    _known[ir] = facts
    return facts
