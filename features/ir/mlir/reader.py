"""Conversion of a parsed MLIR module into the IR in one pass over its functions and regions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ....common.errors import DynamicShapeError, ProgramError
from ....common.types import MlirObject
from ..program import MAX_CONSTANT_SIZE, Computation, Op, Program, Source, TensorType
from ..replica_groups import Groups, expand_lists, parse_replica_groups
from .attributes import ALWAYS_NORMALISED, Attrs, normalise
from .bindings import attribute_text, walk_ops
from .locations import Line, user_line
from .opcodes import OpKind, op_kind
from .values import DynamicDimensionError, Raw, Symbol, read_literal, read_types, read_value

if TYPE_CHECKING:
    from jaxlib.mlir import ir

_SYMBOL_ATTRIBUTES = ("callee", "decomposition", "called_computations", "called_computation")
_STATIC_HINT = "give all shapes as static sizes when lowering or exporting the program"
_FLOW_HINT = "use structured control flow: stablehlo.while, case and if"
# For an argument that is not a tuple; the index is empty if the program has a single result.
_HEADER_ALIAS = re.compile(
    r"parameter_index = array<i64>, parameter_number = (\d+) : i64\}, "
    r"output_index = array<i64(?:: (\d+))?>"
)

Types = tuple[tuple[TensorType, ...], bool]


class _Scope:
    """State of reading one computation.

    ``values`` maps MLIR values to ops. ``parts`` maps results of multi-result ops to (op, number)
    until they are read. ``captured`` maps values from outside to the parameters made for them.
    """

    def __init__(self, name: str) -> None:
        self.computation = Computation(name)
        self.values: dict[object, int] = {}
        self.parts: dict[object, tuple[int, int]] = {}
        self.captured: dict[ir.Value[ir.Type], int] = {}

    def add(self, op: Op) -> int:
        """Append an op and return its position."""
        self.computation.ops.append(op)
        return len(self.computation.ops) - 1


class ModuleReader:
    """State of reading one module."""

    def __init__(self, module: ir.Module, origin: str) -> None:
        self.module = module
        self.program = Program(dialect="stablehlo", origin=origin)
        self.origin = origin
        self.index = 0
        self.starts: dict[str, tuple[ir.Operation, int]] = {}
        self.names: dict[str, str] = {}
        self.open: set[str] = set()
        self.device_ids: dict[str, tuple[int, ...]] = {}
        self.types: dict[object, Types] = {}
        self.attributes: dict[object, Any] = {}
        self.literals: dict[object, Attrs] = {}
        self.normalised: dict[object, Attrs] = {}
        self.lines: dict[object, Line] = {}
        self.callers: list[Line] = []
        self.counter = 0

    def read(self) -> Program:
        """Read everything that is reachable from the entry function."""
        attrs = self._attributes(self.module.operation)
        self.program.name = str(attrs.get("sym_name", ""))
        self.program.num_replicas = int(attrs.get("mhlo.num_replicas", 1))
        self.program.num_partitions = int(attrs.get("mhlo.num_partitions", 1))
        # Functions are read where they are called, but Source.index numbers the ops of the whole
        # module, so the start of each function is recorded first.
        for index, op in enumerate(walk_ops(self.module)):
            if op.name == "func.func":
                self.starts[self._symbol(op)] = (op, index)
            elif op.name == "sdy.mesh":
                self._mesh(op)
        entry = self._entry()
        self.program.entry = self._function(entry)
        self._aliases(self.starts[entry][0])
        return self.program

    def _symbol(self, op: ir.Operation) -> str:
        return str(self._attributes(op)["sym_name"])

    def _entry(self) -> str:
        if "main" in self.starts:
            return "main"
        public = [
            name
            for name, (op, _) in self.starts.items()
            if self._attributes(op).get("sym_visibility", "public") == "public"
        ]
        # Exports of other frameworks may name their entry differently, but a single public
        # function is unambiguous.
        if len(public) == 1:
            return public[0]
        raise ProgramError(
            "the module has no function @main" if self.starts else "the module has no function",
            where=self.origin,
            hint=f"its public functions are: {', '.join(public) or 'none'}",
        )

    def _mesh(self, op: ir.Operation) -> None:
        text = str(op.attributes["mesh"])
        name = self._symbol(op)
        axes = re.findall(r'"([^"]+)"=(\d+)', text)
        self.program.meshes[name] = {axis: int(size) for axis, size in axes}
        if match := re.search(r"device_ids=\[([\d,\s]*)\]", text):
            self.device_ids[name] = tuple(map(int, match[1].split(",")))

    def _aliases(self, function: ir.Operation) -> None:
        arguments = self._attributes(function).get("arg_attrs") or ()
        pairs = {
            (attrs["tf.aliasing_output"], number)
            for number, attrs in enumerate(arguments)
            if isinstance(attrs, dict) and "tf.aliasing_output" in attrs
        }
        # The form in which XLA's converter stores the aliases of an HLO header.
        text = str(self.module.operation.attributes.get("mhlo.input_output_alias", ""))
        pairs |= {(int(output or 0), int(number)) for number, output in _HEADER_ALIAS.findall(text)}
        self.program.aliases = tuple(sorted(pairs))

    def _attributes(self, op: ir.Operation) -> Attrs:
        values: Attrs = {}
        cache = self.attributes
        for name, attribute in op.attributes.items():
            # Printing is slow, but equal attributes are one object and are printed once.
            if attribute not in cache:
                cache[attribute] = read_value(str(attribute))
            values[name] = cache[attribute]
        return values

    def _function(self, name: str) -> str:
        """Read a function once and return the name of its computation."""
        if name in self.names:
            return self.names[name]
        # `open` contains the functions being read, because HLO has no recursion.
        if name in self.open or name not in self.starts:
            what = "calls itself" if name in self.open else "is called but not defined"
            raise ProgramError(f"function @{name} {what}", where=self.origin)
        self.open.add(name)
        function, start = self.starts[name]
        # The walk's counter jumps to the position of the function and back.
        outer, self.index = self.index, start + 1
        region = function.regions[0]
        if not len(region.blocks):
            raise ProgramError(f"function @{name} has no body", where=self.origin)
        computation = self._unique(name)
        scope = self._region(region, computation)
        self._finish(scope, ())
        self.index = outer
        self.open.discard(name)
        self.names[name] = computation
        return computation

    def _unique(self, name: str) -> str:
        clean = re.sub(r"[^\w.\-]", "_", name) or "_"
        taken = self.program.computations
        return clean if clean not in taken else f"{clean}.{len(taken)}"

    def _region(self, region: ir.Region, name: str) -> _Scope:
        scope = _Scope(name)
        blocks = list(region.blocks)
        if len(blocks) > 1:
            raise ProgramError(
                f"region {name} has several blocks", where=self.origin, hint=_FLOW_HINT
            )
        for block in blocks:
            for number, argument in enumerate(block.arguments):
                types, is_tuple = self._types(argument.type, f"argument {number} of {name}")
                scope.values[argument] = self._parameter(scope, types, is_tuple, number)
            for view in block.operations:
                self._operation(view.operation, scope)
        return scope

    def _parameter(
        self, scope: _Scope, types: tuple[TensorType, ...], is_tuple: bool, number: int
    ) -> int:
        attrs = {"index": number}
        return scope.add(Op(self._name("parameter"), "parameter", (), types, attrs, (), is_tuple))

    def _finish(self, scope: _Scope, captured: tuple[ir.Value[ir.Type], ...]) -> None:
        """Number the captured parameters and add the computation to the program."""
        ops = scope.computation.ops
        # Captured values follow the region's own arguments, in the same order for all regions.
        formal = sum(op.opcode == "parameter" for op in ops) - len(scope.captured)
        for offset, value in enumerate(captured):
            position = scope.captured.get(value)
            if position is None:
                position = self._capture(scope, value)
            ops[position].attrs["index"] = formal + offset
        # HLO needs a root even for an empty region or a function without a return.
        if scope.computation.root < 0:
            scope.computation.root = scope.add(Op(self._name("tuple"), "tuple", is_tuple=True))
        self.program.computations[scope.computation.name] = scope.computation

    def _capture(self, scope: _Scope, value: ir.Value[ir.Type]) -> int:
        types, is_tuple = self._types(value.type, "captured value")
        position = self._parameter(scope, types, is_tuple, -1)
        scope.captured[value] = position
        scope.values[value] = position
        return position

    def _name(self, opcode: str) -> str:
        self.counter += 1
        return f"{opcode}.{self.counter}"

    def _types(self, kind: object, where: str) -> Types:
        types = self.types.get(kind)
        if types is None:
            try:
                types = self.types[kind] = read_types(str(kind))
            except DynamicDimensionError as error:
                what = f"{where} has the dynamic shape {error}"
                raise DynamicShapeError(what, where=self.origin, hint=_STATIC_HINT) from None
        return types

    def _source(self, op: ir.Operation, name: str) -> Source:
        location = op.location.attr
        line = self.lines.get(location)
        if line is None:
            line = self.lines[location] = user_line(str(location), self.origin)
        if not line.own and self.callers:
            # JAX records the user's line only at the call of a library function.
            line = self.callers[-1]
        return Source(name, line.file, line.line, self.index)

    def _operand(self, scope: _Scope, value: ir.Value[ir.Type]) -> int:
        position = scope.values.get(value)
        if position is not None:
            return position
        part = scope.parts.get(value)
        if part is None:
            return self._capture(scope, value)
        whole, number = part
        types, is_tuple = self._types(value.type, "result")
        opcode = "get-tuple-element"
        source = scope.computation.ops[whole].source
        attrs = {"index": number}
        element = Op(self._name(opcode), opcode, (whole,), types, attrs, (), is_tuple, source)
        scope.values[value] = position = scope.add(element)
        return position

    def _return(self, scope: _Scope, operands: tuple[int, ...]) -> None:
        ops = scope.computation.ops
        if len(operands) == 1:
            scope.computation.root = operands[0]
            return
        leaves = tuple(kind for i in operands for kind in ops[i].results)
        root = Op(self._name("tuple"), "tuple", operands, leaves, is_tuple=True)
        scope.computation.root = scope.add(root)

    def _operation(self, op: ir.Operation, scope: _Scope) -> None:
        kind = op_kind(op.name)
        values = scope.values
        operands = []
        for value in op.operands:
            known = values.get(value)
            operands.append(self._operand(scope, value) if known is None else known)
        if kind.is_terminator:
            self.index += 1
            self._return(scope, tuple(operands))
            return
        source = self._source(op, kind.name)
        self.index += 1
        if kind.is_unstructured or kind.is_dynamic:
            raise _refusal(kind, source)
        opcode = kind.opcode
        results = list(op.results)
        types, is_tuple = self._results(results, source)
        own = Op(self._name(opcode), opcode, tuple(operands), types, {}, (), is_tuple, source)
        attributes = op.attributes
        if kind.may_call and len(attributes):
            own.called = self._called_symbols(attributes, source)
        if len(op.regions):
            own.called += self._regions(op, own, scope)
        own.attrs = self._normalised(op, attributes, own, scope)
        position = scope.add(own)
        if len(results) == 1:
            values[results[0]] = position
        else:
            # get-tuple-element ops are made on first use, so unused results have none.
            scope.parts.update((r, (position, number)) for number, r in enumerate(results))

    def _results(self, results: Sequence[ir.Value[ir.Type]], source: Source) -> Types:
        try:
            kinds = [self.types.get(r.type) or self._types(r.type, source.op) for r in results]
        except DynamicShapeError as error:
            raise DynamicShapeError(error.what, where=_place(source), hint=_STATIC_HINT) from None
        if len(kinds) == 1:
            return kinds[0]
        return tuple(kind for types, _ in kinds for kind in types), True

    def _called_symbols(self, attributes: ir.OpAttributeMap, source: Source) -> tuple[str, ...]:
        called: list[str] = []
        if source.line:
            self.callers.append(Line(source.file, source.line, True))
        for key in _SYMBOL_ATTRIBUTES:
            if key in attributes:
                value = read_value(str(attributes[key]))
                names = value if isinstance(value, tuple) else (value,)
                called += [self._function(name) for name in names if isinstance(name, Symbol)]
        if source.line:
            self.callers.pop()
        return tuple(called)

    def _regions(self, op: ir.Operation, own: Op, scope: _Scope) -> tuple[str, ...]:
        """Read the regions; captured values become operands of the op."""
        prefix = f"{scope.computation.name}.{own.name}"
        scopes = [
            self._region(region, self._unique(f"{prefix}.{number}"))
            for number, region in enumerate(op.regions)
            if len(region.blocks)
        ]
        # Ordered by first use, the same for all regions of the op (docs/ir.md, Rules).
        captured = tuple(dict.fromkeys(value for inner in scopes for value in inner.captured))
        own.operands += tuple(self._operand(scope, value) for value in captured)
        for inner in scopes:
            self._finish(inner, captured)
        return tuple(inner.computation.name for inner in scopes)

    def _normalised(
        self, op: ir.Operation, attributes: ir.OpAttributeMap, own: Op, scope: _Scope
    ) -> Attrs:
        if own.opcode == "constant":
            return dict(self._literal(op, attributes, own))
        if not len(attributes) and own.opcode not in ALWAYS_NORMALISED:
            return {}
        ops = scope.computation.ops
        kinds = tuple([kind for i in own.operands for kind in ops[i].results])
        # MLIR attributes are unique objects of their context, hence cheap keys; layers repeat them.
        key = (own.opcode, tuple(attributes.items()), kinds, own.results)
        attrs = self.normalised.get(key)
        if attrs is None:
            attrs = self.normalised[key] = self._normalise(op, kinds, own)
        return dict(attrs)

    def _normalise(self, op: ir.Operation, kinds: Sequence[TensorType], own: Op) -> Attrs:
        try:
            attrs = normalise(own.opcode, self._attributes(op), kinds, own.results)
            if "replica_groups" in attrs:
                attrs["replica_groups"] = self._groups(attrs["replica_groups"])
        except (KeyError, ValueError, IndexError, TypeError, AttributeError) as error:
            name = own.source.op if own.source else own.opcode
            raise ProgramError(
                f"cannot read the attributes of {name}: {error!r}",
                where=_place(own.source),
                hint="check the op against the StableHLO specification",
            ) from error
        return attrs

    def _literal(self, op: ir.Operation, attributes: ir.OpAttributeMap, own: Op) -> Attrs:
        try:
            attribute = attributes["value"]
        except KeyError:
            return {"value": None}
        except TypeError:  # the bindings have no class for complex elements
            text = attribute_text(op, "value", MAX_CONSTANT_SIZE)
            return {"value": read_literal(text, own.type)}
        if attribute not in self.literals:
            # Large constants get a number that distinguishes them, since printing one would take
            # longer than the whole conversion.
            small = own.type.size <= MAX_CONSTANT_SIZE or getattr(attribute, "is_splat", False)
            value = read_literal(str(attribute), own.type) if small else None
            number = {} if small else {"number": len(self.literals)}
            self.literals[attribute] = {"value": value, **number}
        return self.literals[attribute]

    def _groups(self, value: MlirObject) -> Groups:
        if isinstance(value, tuple) and not isinstance(value, Raw):
            # An empty list means all devices; with one device it stays empty, as printed by XLA.
            total = self.program.num_replicas * self.program.num_partitions
            return expand_lists(value, total if total > 1 else 0)
        text = value.text if isinstance(value, Raw) else str(value)
        return parse_replica_groups(text, self.program.meshes, device_ids=self.device_ids)


def _place(source: Source | None) -> str:
    if source is None:
        return ""
    return f"{source.file}:{source.line}" if source.line else source.file


def _refusal(kind: OpKind, source: Source) -> ProgramError:
    if kind.is_unstructured:
        what = f"{kind.name} is unstructured control flow"
        return ProgramError(what, where=_place(source), hint=_FLOW_HINT)
    what = f"{kind.name} has a shape that is only known when the program runs"
    return DynamicShapeError(what, where=_place(source), hint=_STATIC_HINT)
