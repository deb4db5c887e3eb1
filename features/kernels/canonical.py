"""Canonical modules of single instructions, and facts that follow from them, cached by their text.

They lack anything that does not affect their cost.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..cost.flops import Cost, kernel_cost
from ..ir.hlo_printer import print_hlo
from ..ir.hlo_reader import parse_hlo
from ..ir.op_table import NAMES, named
from ..ir.program import Computation, Op, Program, TensorType, read_work, write_work
from .kernel import is_collective, kernel_kind
from .library_form import plain_form

#: Attributes about where, when or for whom an instruction runs, not about what it does.
_DROPPED = named("placing_attributes")
#: Parts of a backend configuration that determine what is computed. Tiles, algorithm numbers,
#: queues and the compiler's estimates are dropped: without the device they are placeholders.
_KEPT = {section: frozenset(kept) for section, kept in NAMES["kept_configuration"].items()}
#: Entries kept unchanged: how XLA:CPU splits a loop, and how often a loop runs.
_PLAIN = frozenset(("outer_dimension_partitions", "known_trip_count"))
#: Texts longer than this are whole programs (Mosaic, Triton) and are replaced by a digest.
_LONG_TEXT = 256
#: Entries per cache: bounds the memory of long runs over many programs.
_MEMORY = 20_000
_FREE = Cost()
#: Types written as text: containers are unhashable, NaN and -0.0 compare wrongly, 1 == 1.0 == True.
_WRITTEN = (dict, list, set, float, bool)


def canonical_body(op: Op, operands: Iterable[Op], program: Program) -> Program:
    """Make a module whose entry has parameters ``p0 …`` and one instruction ``r``.

    Args:
        op: The instruction.
        operands: The ops whose values it reads, in order; repeated ones share a parameter.
        program: The program with the computations that it calls.

    Returns:
        The module, with canonical names and attributes: equal work gives an equal module.
    """
    body = Program(name="kernel", entry="main", dialect="hlo")
    op, operands, added = plain_form(op, list(operands), program)
    calls = _Calls(program, body, added)
    names = tuple(calls.add(name) for name in op.called)
    entry = Computation("main")
    # By identity: x · x reads one parameter, two equal but separate values read two.
    positions: dict[int, int] = {}
    places = []
    for operand in operands:
        place = positions.get(id(operand))
        if place is None:
            place = positions[id(operand)] = len(entry.ops)
            entry.ops.append(_parameter(place, operand))
        places.append(place)
    entry.root = len(entry.ops)
    attrs = canonical_attrs(op)
    # An empty list means all devices, but the kernel alone does not contain their number.
    if "replica_groups" in attrs and not attrs["replica_groups"]:
        attrs["replica_groups"] = _all_devices(op, program)
    entry.ops.append(Op("r", op.opcode, tuple(places), op.results, attrs, names, op.is_tuple))
    body.computations["main"] = entry
    return body


def control_body(opcode: str) -> Program:
    """Make the body of a loop or branch itself, without its state, which moves no bytes."""
    flag = TensorType("pred")
    entry = Computation("main", [Op("p0", "parameter", (), (flag,), {"index": 0})], 1)
    entry.ops.append(Op("r", opcode, (0,), (flag,)))
    return Program({"main": entry}, "main", name="kernel")


def canonical_attrs(op: Op) -> dict[str, object]:
    """Return the attributes that determine what an instruction does."""
    attrs = op.attrs
    if not attrs:
        return {}
    kept = {k: v for k, v in attrs.items() if k not in _DROPPED}
    work = read_work(attrs.get("frontend_attributes"))
    if work:
        kept["frontend_attributes"] = write_work(work)
    if "channel_id" in attrs:
        # The presence of a channel matters; its number is arbitrary.
        kept["channel_id"] = None
    if "use_global_device_ids" in attrs:
        kept["use_global_device_ids"] = False
    if "backend_config" in kept:
        config = _reduced(kept.pop("backend_config"))
        if config:
            kept["backend_config"] = config
    return kept


def _all_devices(op: Op, program: Program) -> tuple[tuple[int, ...], ...]:
    """Return the group that an empty list means: all replicas, with a channel also partitions."""
    count = program.num_replicas
    if op.attrs.get("channel_id") is not None:
        count *= program.num_partitions
    return (tuple(range(count)),)


def _reduced(config: dict[str, object] | str) -> dict[str, object] | str:
    if isinstance(config, str):
        return _short(config)
    kept: dict[str, object] = {}
    for key, value in config.items():
        if key in _KEPT and isinstance(value, dict):
            part = {k: v for k, v in value.items() if k in _KEPT[key]}
            if part:
                kept[key] = part
        elif key in _PLAIN and value:
            kept[key] = value
        # Mosaic kernels (Pallas) are whole programs in this text.
        elif key == "custom_call_config":
            kept[key] = _mosaic(value)
    return kept


def _mosaic(config: object) -> object:
    """Return a kernel's program as a digest, with the cost that it states."""
    stated = config.get("cost_estimate") if isinstance(config, dict) else None
    if not isinstance(config, dict) or not isinstance(stated, dict):
        return _short(str(config))
    rest = {key: value for key, value in config.items() if key != "cost_estimate"}
    return {"body": _short(str(rest)), "cost_estimate": dict(sorted(stated.items()))}


def _short(text: str) -> str:
    if len(text) <= _LONG_TEXT:
        return text
    digest = "sha256-" + hashlib.sha256(text.encode()).hexdigest()[:16]
    # A rule may recognise it by its name (features/cost/library_calls.py).
    named = re.search(r'\bname = "[^"\\]+"', text)
    return f"{digest} {named[0]}" if named else digest


def _parameter(number: int, like: Op) -> Op:
    attrs: dict[str, object] = {"index": number}
    if "nesting" in like.attrs:
        # Tuple operands keep their structure, which get-tuple-element refers to.
        attrs["nesting"] = like.attrs["nesting"]
    return Op(f"p{number}", "parameter", (), like.results, attrs, (), like.is_tuple)


class _Calls:
    """Copies called computations under canonical names, callees first."""

    def __init__(self, program: Program, body: Program, added: Computation | None = None) -> None:
        self.program = program
        self.added = added
        self.body = body
        self.names: dict[str, str] = {}
        self.count = 0

    def add(self, name: str) -> str:
        """Copy computation ``name`` and its callees; return its new name."""
        if name in self.names:
            return self.names[name]
        is_added = self.added is not None and self.added.name == name
        source = self.added if is_added and self.added else self.program.computations[name]
        # Parameters come first and in order, since their position in the text has no meaning.
        order = _parameters_first(source.ops)
        place = {old: new for new, old in enumerate(order)}
        ops = []
        for old in order:
            op = source.ops[old]
            called = tuple([self.add(n) for n in op.called]) if op.called else ()
            operands = tuple([place[i] for i in op.operands])
            attrs = canonical_attrs(op)
            results = _anywhere(op.results)
            ops.append(Op("", op.opcode, operands, results, attrs, called, op.is_tuple))
        return self._store(name, Computation("", ops, place[source.root]))

    def _store(self, name: str, computation: Computation) -> str:
        """Keep a copy, or find an equal one that already exists."""
        for other in self.body.computations.values():
            # The same reducer occurs many times under different names.
            if _equal(other, computation):
                self.names[name] = other.name
                return other.name
        computation.name = self.names[name] = f"c{len(self.body.computations)}"
        for op in computation.ops:
            op.name = f"v{self.count}"
            self.count += 1
        self.body.computations[computation.name] = computation
        return computation.name


def _anywhere(types: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    """Drop memory spaces: inside a kernel they only repeat its operands' spaces."""
    if not any(t.memory_space for t in types):
        return types
    return tuple(t._replace(memory_space=0) for t in types)


def _parameters_first(ops: list[Op]) -> list[int]:
    parameters = [i for i, op in enumerate(ops) if op.opcode == "parameter"]
    parameters.sort(key=lambda i: int(ops[i].attrs["index"]))
    return parameters + [i for i, op in enumerate(ops) if op.opcode != "parameter"]


def _equal(first: Computation, second: Computation) -> bool:
    """Return whether two computations do the same, whatever the names of their ops."""
    if len(first.ops) != len(second.ops) or first.root != second.root:
        return False
    return all(
        a.opcode == b.opcode
        and a.operands == b.operands
        and a.results == b.results
        and a.called == b.called
        and a.attrs == b.attrs
        for a, b in zip(first.ops, second.ops, strict=True)
    )


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


def _frozen(attrs: dict[str, object]) -> tuple[object, ...]:
    return tuple([(k, repr(v) if type(v) in _WRITTEN else v) for k, v in attrs.items()])
