"""Facts about kernels that follow from their canonical module, cached by its text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..cost.flops import Cost, kernel_cost
from ..ir.hlo_printer import print_hlo
from ..ir.hlo_reader import parse_hlo
from ..ir.program import Op, Program
from .canonical import canonical_body, control_body
from .kernel import is_collective, kernel_kind

#: Entries per cache: bounds the memory of long runs over many programs.
_MEMORY = 20_000
_FREE = Cost()


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """Position-independent properties of a kernel.

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


# Facts by text, by an instruction's signature (cheaper than its text), and numbers of computations
# by content, from which signatures are built.
_known: dict[str, KernelFacts] = {}
_by_signature: dict[object, KernelFacts] = {}
_computations: dict[object, int] = {}


class ProgramFacts:
    """Facts of a program's instructions.

    Args:
        program: The program.
    """

    def __init__(self, program: Program) -> None:
        # Only between programs: a program's signatures refer to the numbers of its computations.
        if max(len(_by_signature), len(_computations)) > _MEMORY:
            _by_signature.clear()
            _computations.clear()
        self._program = program
        self._signatures = Signatures(program, _computations)

    def of(self, op: Op, operands: Sequence[Op]) -> KernelFacts:
        """Return the facts of an instruction that reads ``operands``."""
        key = self._signatures.of(op, operands)
        facts = _by_signature.get(key)
        if facts is None:
            body = canonical_body(op, operands, self._program)
            ir = print_hlo(body)
            # Instructions with different signatures may share a canonical text and so their facts.
            facts = _by_signature[key] = _known.get(ir) or _remember(body, ir)
        return facts


def facts_of_ir(ir: str) -> KernelFacts:
    """Return the facts of a kernel's text.

    Raises:
        ProgramError: The text is not an HLO module.
    """
    return _known.get(ir) or _remember(parse_hlo(ir, "kernel"), ir)


@lru_cache(maxsize=4)
def control_facts(opcode: str) -> KernelFacts:
    """Return the facts of a loop or conditional itself, without what it runs."""
    body = control_body(opcode)
    return _remember(body, print_hlo(body))


def _remember(body: Program, ir: str) -> KernelFacts:
    op = body.entry_computation.root_op
    kind = kernel_kind(op, body)
    # The start of a pair carries the cost, and loop bodies are separate kernels.
    waits = kind == "control" or (is_collective(op.opcode) and op.opcode.endswith("-done"))
    cost = _FREE if waits else kernel_cost(body)
    facts = KernelFacts(body, ir, hashlib.sha256(ir.encode()).hexdigest()[:16], kind, cost)
    # Dropping everything is simpler than tracking use; what is needed is recomputed.
    if len(_known) >= _MEMORY:
        _known.clear()
    _known[ir] = facts
    return facts


class Signatures:
    """Name-independent keys of a program's instructions and computations.

    Args:
        program: The program.
        ids: Numbers of computations by content, shared between programs.
    """

    def __init__(self, program: Program, ids: dict[object, int]) -> None:
        self._program = program
        self._ids = ids
        self._known: dict[str, int] = {}

    def of(self, op: Op, operands: Sequence[Op]) -> tuple[object, ...]:
        """Return the key of an instruction and the ops that it reads; repeated operands are one."""
        # Repeated operands get equal indices, which distinguishes a square from other products.
        places = {id(operand): i for i, operand in enumerate(operands)}
        reads = [(o.results, o.is_tuple, o.attrs.get("nesting"), places[id(o)]) for o in operands]
        return (
            *self._own(op),
            tuple(reads),
            self._program.num_replicas,
            self._program.num_partitions,
        )

    def _own(self, op: Op) -> tuple[object, ...]:
        called = tuple([self._computation(name) for name in op.called]) if op.called else ()
        attrs = _frozen(op.attrs) if op.attrs else ()
        return op.opcode, op.results, op.is_tuple, called, attrs

    def _computation(self, name: str) -> int:
        number = self._known.get(name)
        if number is None:
            comp = self._program.computations[name]
            key = (comp.root, *[(*self._own(op), op.operands) for op in comp.ops])
            number = self._known[name] = self._ids.setdefault(key, len(self._ids))
        return number


#: Types written as text: containers are unhashable, NaN and -0.0 compare wrongly, 1 == 1.0 == True.
_WRITTEN = (dict, list, set, float, bool)


def _frozen(attrs: dict[str, object]) -> tuple[object, ...]:
    return tuple([(k, repr(v) if type(v) in _WRITTEN else v) for k, v in attrs.items()])
