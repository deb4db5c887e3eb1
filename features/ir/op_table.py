"""Facts of each op by HLO opcode: class, kind, FLOPs, operands, and how it reads and fuses.

Costs, kinds, checks, plans and fusion rules derive their own lists from this table, a row of
``ops.toml`` for each op. If its attributes, FLOPs, features or loop nest do not follow from its
result, the op is ``like`` one that has such rules, or gets its own rules; arithmetic has cycles of
its own as well (ARCHITECTURE.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, TypeVar

from ...common.files import own_data
from ...common.types import JsonObject

T = TypeVar("T")
#: Lists of names without a column in the table.
NAMES = own_data("features/ir/op_names.toml")


class OpSpec(NamedTuple):
    """Facts of an op.

    Attributes:
        column: Column of the feature table that counts such ops; empty for ``n_other``.
        work: Column that sums their work.
        weight: Work per element in units of a vector addition (rough throughput ratios of vector
            units and vector math libraries, which the learned part corrects).
        kind: Kind of a kernel of such an op; empty for arithmetic.
        flops: FLOPs per element of the first result, as XLA counts them; ``None`` if a rule in
            ``features/cost/flops.py`` counts them.
        transcendentals: Transcendentals per element of the first result.
        operands: Fewest operands.
        called: Fewest called computations.
        reads: What part of its operands is read for a part of its result: the same ``share``; as
            many elements of the first as the ``result`` has; all but the first, which is
            ``update``d in place; ``all`` of each; or a ``grown`` share, since the result is larger.
        elementwise: Whether operands and result have one shape, and each element depends on one
            element of each operand.
        placed: Whether each element is read from a computed index, so that the op fuses like
            elementwise ones.
        expensive: Whether it is too costly to repeat for each element of an overlapping window,
            after XLA's IsExpensive (instruction_fusion.cc).
        in_place: Whether its result may reuse the buffer of an operand that is not read
            afterwards, as in XLA's buffer assignment.
        root: What the op as a fusion's root implies about the emitter that a compiler chooses;
            empty for arithmetic.
        like: Op whose rules apply where the op has none of its own (:func:`by_op`): attributes,
            FLOPs, details of a row, dimensions that a plan may split. Graph networks, whose list
            of opcodes is fixed, see that op instead.
        stablehlo: StableHLO names, separated by spaces, that differ from the opcode with
            underscores; CHLO names include their dialect.
    """

    column: str = ""
    work: str = "work_move"
    weight: float = 0.0
    kind: str = ""
    flops: float | None = 1.0
    transcendentals: float = 0.0
    operands: int = 0
    called: int = 0
    reads: Literal["share", "result", "update", "all", "grown"] = "share"
    elementwise: bool = False
    placed: bool = False
    expensive: bool = False
    in_place: bool = True
    root: str = ""
    like: str = ""
    stablehlo: str = ""


def _read() -> dict[str, OpSpec]:
    """Read the specs by opcode, in the order of ``ops.toml``."""
    data = own_data("features/ir/ops.toml")
    kinds: dict[str, JsonObject] = {}

    def whole(own: JsonObject) -> JsonObject:
        """Merge an entry with the one that it refines."""
        return {**kinds[own["of"]], **own} if "of" in own else own

    def spec(own: JsonObject) -> OpSpec:
        fields = {key: value for key, value in whole(own).items() if key != "of"}
        return OpSpec(**fields | ({"flops": None} if fields.get("flops") == "rule" else {}))

    for name, own in data["kinds"].items():
        kinds[name] = whole(own)
    return {name: spec(own) for names, own in data["ops"].items() for name in names.split()}


OPS = _read()


def ops_with(has: Callable[[OpSpec], bool]) -> frozenset[str]:
    """Return the opcodes whose specs satisfy a condition."""
    return frozenset(name for name, spec in OPS.items() if has(spec))


def named(key: str) -> frozenset[str]:
    """Return a list of ``op_names.toml``."""
    return frozenset(NAMES[key])


def by_op(rules: Mapping[str, T]) -> dict[str, T]:
    """Extend a table of rules to the ops that are ``like`` one with a rule."""
    likened = {name: rules[s.like] for name, s in OPS.items() if s.like in rules}
    return likened | dict(rules)


#: Ops on single elements, whose operands and result have one shape.
ELEMENTWISE = ops_with(lambda spec: spec.elementwise)
#: Ops that read each element from a computed index and fuse like elementwise ones.
PLACED = ops_with(lambda spec: spec.placed)
#: Ops that write part of their first operand in place.
UPDATES = ops_with(lambda spec: spec.reads == "update")
