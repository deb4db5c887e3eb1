"""Reader of HLO text, optimised or not, as XLA prints it for CPUs, GPUs and TPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ...common.errors import DynamicShapeError, ProgramError
from .hlo_attributes import (
    ATTRIBUTE,
    DEFAULTS,
    QUOTED,
    Sources,
    read_attribute,
    read_backend_config,
    read_header,
    read_literal,
    read_type,
)
from .mlir.values import split_top
from .program import Computation, Op, Program
from .replica_groups import parse_replica_groups
from .trip_counts import set_trip_counts

# ``ROOT %name = type opcode(``, where the type is one word or a tuple in parentheses.
_INSTRUCTION = re.compile(
    r"\s*(ROOT )?\s*%?([^\s=,(){}%]+) = ([^\s(]\S*|\(.*?\)) ([A-Za-z][\w\-.$]*)\(", re.DOTALL
)
_METADATA = re.compile(r", metadata=\{([^{}]*)\}")
# ``/*index=5*/``, which XLA prints inside long tuples.
_INDEX_COMMENT = re.compile(r"/\*(?:index|i\d+)=\d+\*/")
# ``ENTRY %main (p: f32[2]) -> f32[2] {`` with an optional signature.
_COMPUTATION = re.compile(r"\s*(ENTRY\s+)?%?([^\s=,(){}%]+)\s*(?:\(.*->.*)?\{\s*$")
_OPERAND = re.compile(r"%([^\s=,(){}%]+)")

#: Position in ``Op.called`` of the computation that an attribute names.
_CALLED = {
    "calls": 0,
    "to_apply": 0,
    "condition": 0,
    "body": 1,
    "select": 0,
    "scatter": 1,
    "true_computation": 0,
    "false_computation": 1,
    "branch_computations": 0,
    "called_computations": 0,
}
#: Attributes that affect neither results nor run time.
_DROPPED = frozenset(
    ("operand_layout_constraints", "parameter_replication", "origin", "statistics")
)
_RENAMED = {"custom_call_target": "target"}
#: Ops with a single dimension, which HLO writes as ``dimensions={d}``.
_ONE_DIMENSION = frozenset(
    ("all-gather", "all-gather-start", "reduce-scatter", "all-to-all", "sort")
)
#: Fewest computations that an op has to call.
_CALLS = {"fusion": 1, "call": 1}


def parse_hlo(text: str, origin: str = "") -> Program:
    """Read an HLO module.

    Args:
        text: Module text, starting with ``HloModule``; ``%`` before names is optional.
        origin: File that contained the text, for messages.

    Returns:
        The program. Loops have a ``trip_count`` if it is stated or follows from constants;
        ``Op.source`` has the framework's op name and the innermost line of user code.

    Raises:
        ProgramError: The text is not an HLO module; the message gives the line.
        DynamicShapeError: A dimension has no static size.
    """
    program = _Reader(text, origin).read()
    set_trip_counts(program)
    return program


class _Reader:
    """State of reading one module."""

    def __init__(self, text: str, origin: str) -> None:
        self.lines = text.splitlines()
        self.program = Program(dialect="hlo", origin=origin)
        self.sources = Sources({})
        self.attributes: dict[tuple[str, str], tuple[dict[str, object], tuple[str, ...]]] = {}
        self.number = 0

    def read(self) -> Program:
        """Read the whole module and check its calls."""
        try:
            self._module()
        except ValueError as error:
            dynamic = "static size" in str(error)
            kind = DynamicShapeError if dynamic else ProgramError
            raise self._error(str(error), kind) from error
        if not self.program.computations:
            raise self._error("the module has no computation")
        if not self.program.entry:
            raise self._error("the module has no ENTRY computation; is the text cut off?")
        self._check_calls()
        return self.program

    def _error(self, what: str, kind: type[ProgramError] = ProgramError) -> ProgramError:
        where = f"{self.program.origin or 'HLO text'}:{self.number}"
        return kind(what, where=where, hint="expects the text of an HLO module as XLA prints it")

    def _check_calls(self) -> None:
        known = self.program.computations
        for computation in known.values():
            for op in computation.ops:
                if len(op.called) < _CALLS.get(op.opcode, 0):
                    raise self._error(f"{op.name} does not state which computation it calls")
                for name in op.called:
                    if name not in known:
                        raise self._error(f"{op.name} calls {name}, which is not in the module")

    def _module(self) -> None:
        body, self.sources = read_header(self.lines, self.program)
        lines = enumerate(self.lines[body:], body + 1)
        for self.number, line in lines:
            stripped = line.rstrip()
            if not stripped.endswith("{") or stripped.lstrip().startswith(("HloModule", "//", "#")):
                continue
            match = _COMPUTATION.match(_INDEX_COMMENT.sub("", stripped))
            if match is None:
                raise self._error(f"cannot read {line[:80]!r}")
            computation = self._computation(match[2], lines)
            self.program.computations[match[2]] = computation
            if match[1]:
                self.program.entry = match[2]

    def _computation(self, name: str, lines: Iterator[tuple[int, str]]) -> Computation:
        computation = Computation(name)
        ops = computation.ops
        index: dict[str, int] = {}
        for self.number, line in lines:
            if "/*" in line:
                line = _INDEX_COMMENT.sub("", line)
            match = _INSTRUCTION.match(line)
            # Fast path: nearly all instructions are one line with balanced braces.
            if match is None or line.endswith(",") or line.count("{") != line.count("}"):
                stripped = line.strip()
                if stripped.startswith("}"):
                    break
                if not stripped or stripped.startswith(("//", "#")):
                    continue
                line = self._joined(line, lines)
                match = _INSTRUCTION.match(line)
                if match is None:
                    raise self._error(f"cannot read the instruction {stripped[:80]!r}")
            op = self._op(match, line, index)
            if match[1]:
                computation.root = len(ops)
            index[op.name] = len(ops)
            ops.append(op)
        else:
            raise self._error(f"the text ends within the computation {name}")
        if not ops:
            raise self._error(f"the computation {name} is empty")
        # Without ROOT, the last instruction is returned, as in HLO's own parser.
        if computation.root < 0:
            computation.root = len(ops) - 1
        return computation

    def _joined(self, line: str, lines: Iterator[tuple[int, str]]) -> str:
        """Append lines until brackets balance and no comma is last, since literals span lines."""
        parts = [line]
        depth = _depth(line)
        opened = " = " in line and _INSTRUCTION.match(line) is None
        while depth > 0 or parts[-1].rstrip().endswith(",") or opened:
            following = next(lines, None)
            if following is None or (depth <= 0 and following[1].strip() == "}"):
                raise self._error(f"the instruction {line.strip()[:80]!r} is cut off")
            opened = False
            parts.append(following[1].strip())
            depth += _depth(following[1])
        return " ".join(parts)

    def _op(self, match: re.Match[str], line: str, index: dict[str, int]) -> Op:
        name, type_text, opcode = match.group(2, 3, 4)
        results, is_tuple, nesting = read_type(type_text)
        start = match.end()
        # Operands rarely contain parentheses, so try a plain search before the exact one.
        end = line.find(")", start)
        if end < 0 or line.find("(", start, end) >= 0:
            end = _closing(line, start)
            if end < 0:
                raise self._error(f"unbalanced parentheses in {name}")
        inside = line[start:end]
        op = Op(name, opcode, (), results, {}, (), is_tuple)
        rest = line[end + 1 :].rstrip()
        if rest:
            self._attributes(op, rest)
        if opcode in DEFAULTS:
            op.attrs = DEFAULTS[opcode] | op.attrs
        if nesting:
            op.attrs["nesting"] = nesting
        if opcode == "parameter":
            op.attrs["index"] = int(inside)
        elif opcode == "constant":
            op.attrs["value"] = read_literal(inside, results[0]) if results else None
        elif inside:
            op.operands = self._operands(name, inside, index)
        return op

    def _operands(self, name: str, text: str, index: dict[str, int]) -> tuple[int, ...]:
        # Three notations are tried in turn: %name, plain name, and "type name" of older XLA.
        names = _OPERAND.findall(text) if "%" in text else text.split(", ")
        try:
            return tuple([index[item] for item in names])
        except KeyError:
            pass
        try:
            return tuple([index[item.split()[-1].lstrip("%")] for item in split_top(text)])
        except (KeyError, IndexError) as error:
            raise self._error(f"{name} has the unknown operand {error.args[0]!r}") from error

    def _attributes(self, op: Op, text: str) -> None:
        """Read the text after the operands; equal texts are read once."""
        start = text.find(", metadata={")
        match = _METADATA.match(text, start) if start >= 0 else None
        if match is not None:
            op.source = self.sources.read(match[1])
            text = text[:start] + text[match.end() :]
            if not text:
                return
        known = self.attributes.get((op.opcode, text))
        if known is None:
            self._read_attributes(op, text)
            # Configurations are mutable and often unique, so only the others are shared.
            if "backend_config" not in op.attrs:
                self.attributes[op.opcode, text] = (op.attrs, op.called)
        else:
            op.called = known[1]
            op.attrs = known[0]
        op.attrs = op.attrs.copy()

    def _read_attributes(self, op: Op, text: str) -> None:
        pairs = ATTRIBUTE.findall(text)
        rest = ATTRIBUTE.sub("", text).strip()
        if rest:
            raise self._error(f"cannot read the attributes of {op.name} at {rest[:60]!r}")
        attrs = op.attrs
        called: list[tuple[int, str]] = []
        for key, value in pairs:
            if key == "metadata":
                op.source = self.sources.read(value[1:-1])
            elif key in _CALLED and (
                op.opcode == "select-and-scatter" or key not in ("select", "scatter")
            ):
                names = [n.strip().lstrip("%") for n in value.strip("{}").split(",")]
                called += [(_CALLED[key], n) for n in names if n]
            elif key == "backend_config":
                _backend_config(op, read_backend_config(value.strip()))
            elif key == "replica_groups":
                # All notations become lists because costs and simulation need the members.
                attrs[key] = parse_replica_groups(value, self.program.meshes)
            elif key == "iota_dimension":
                attrs["dimensions"] = (int(value),)
            elif key not in _DROPPED:
                attrs[_RENAMED.get(key, key)] = read_attribute(key, value.strip())
        # Attributes come in any order; Op.called has a fixed one (condition before body).
        called.sort(key=lambda item: item[0])
        op.called = tuple([n for _, n in called])
        if op.opcode in _ONE_DIMENSION and "dimensions" in attrs:
            dims = attrs.pop("dimensions")
            attrs["dimension"] = dims[0] if dims else 0


def _backend_config(op: Op, config: dict[str, object] | str) -> None:
    """Attach a configuration, turning a trip count in it into an attribute."""
    if isinstance(config, dict) and op.opcode == "while":
        known = config.pop("known_trip_count", None)
        if isinstance(known, dict) and "n" in known:
            op.attrs["trip_count"] = int(known["n"])
    if config:
        op.attrs["backend_config"] = config


def _depth(line: str) -> int:
    plain = re.sub(QUOTED, "", line)
    return plain.count("{") + plain.count("(") - plain.count("}") - plain.count(")")


def _closing(line: str, start: int) -> int:
    """Return the index of the parenthesis that closes the one before ``start``, or -1."""
    depth = 1
    for match in re.compile(rf"{QUOTED}|[()]").finditer(line, start):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    return -1
