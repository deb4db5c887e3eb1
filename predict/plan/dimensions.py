"""Dimensions of a program's values that are sharded together.

Every op is a loop nest: each of its dimensions corresponds to dimensions of operands and results,
or is summed over. Dimensions of values that meet in one dimension of an op are sharded together or
cause communication, so they get the same *colour*, throughout the program (as in TOAST, Alabed et
al., 2025, and GSPMD, Xu et al., 2021). Colours with similar products, such as the hidden dimension
of each layer's feed-forward part, form a *class* and are sharded alike.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import gcd

from ...features.ir.program import NESTING, Computation, Op, Program, TensorType, reached
from .op_axes import Axis, op_axes

#: Ops whose dimensions dominate the time; a class is defined by those that it takes part in.
PRODUCTS = frozenset(("dot", "convolution"))
_INDEXED = frozenset(("gather", "scatter"))
#: Ops that only change the form of a value, as in ``features/ir/mlir/shardings.py``.
_FORMS = frozenset(
    (
        "bitcast-convert",
        "convert",
        "dynamic-slice",
        "reduce-precision",
        "reshape",
        "slice",
        "transpose",
    )
)
#: Ops that return each operand as the result with the same number, as tuples do.
BARRIERS = frozenset(("opt-barrier", "optimization-barrier"))
_TUPLES = BARRIERS | {"tuple"}

Place = tuple[str, int]


@dataclass(slots=True)
class Step:
    """An op with its loop dimensions.

    Attributes:
        op: The op.
        place: Computation of the op, and position there.
        times: Executions per run.
        axes: Dimensions of the loop nest. Operand dimensions in none of them are read as a whole.
        operands: Place and leaf of each operand, except tuples.
    """

    op: Op
    place: Place
    times: float
    axes: list[Axis]
    operands: list[tuple[Place, int]]


@dataclass
class Dimensions:
    """Dimensions of all values of a program, by colour and class.

    Attributes:
        steps: All ops, in order; bodies of loops after their loop.
        colours: Colours of each value's dimensions, by place and leaf; 0 for dimensions of size 1.
        types: Types of the values.
        origins: The value that a value is a form or alias of.
        sizes: Greatest common divisor of the dimensions of each colour, which shards must divide.
        classes: Class of each colour that takes part in products.
        work: FLOPs of products in which each class takes part.
    """

    steps: list[Step] = field(default_factory=list)
    colours: dict[tuple[Place, int], tuple[int, ...]] = field(default_factory=dict)
    types: dict[tuple[Place, int], TensorType] = field(default_factory=dict)
    origins: dict[tuple[Place, int], tuple[Place, int]] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    classes: dict[int, int] = field(default_factory=dict)
    work: dict[int, float] = field(default_factory=dict)

    def class_size(self, number: int) -> int:
        """Return the greatest common divisor over the colours of a class."""
        return gcd(*(self.sizes[c] for c, own in self.classes.items() if own == number))

    def value_classes(self, value: tuple[Place, int]) -> tuple[int, ...]:
        """Return the class of each dimension of a value; 0 for none."""
        return tuple(self.classes.get(c, 0) for c in self.colours.get(value, ()))

    def axis_class(self, step: Step, axis: Axis) -> int:
        """Return the class of a dimension of an op; 0 for none."""
        return self.classes.get(_colour(self, step, axis), 0)

    def root(self, value: tuple[Place, int]) -> tuple[Place, int]:
        """Return the value that a value is a form of, such as the argument that a product reads."""
        while value in self.origins:
            value = self.origins[value]
        return value

    def tails(self, classes: Collection[int]) -> set[Place]:
        """Return the ops after which no value has a dimension of some classes.

        Args:
            classes: Classes of the batch, to find gradients and parameter updates.
        """
        makers: dict[tuple[Place, int], list[tuple[Place, int]]] = defaultdict(list)
        for step in self.steps:
            for leaf in range(len(step.op.results)):
                makers[step.place, leaf] += step.operands
        # Also through calls, loops and tuples, which are not steps. Loop results without the batch,
        # such as sums of gradients, do not lead to it.
        for value, origin in self.origins.items():
            makers[value].append(origin)
        # Any value that leads to a value with the batch is not a tail.
        batched = (v for v in self.colours if not set(classes).isdisjoint(self.value_classes(v)))
        seen = reached(batched, lambda value: makers[value])
        return {
            step.place
            for step in self.steps
            if not any((step.place, leaf) in seen for leaf in range(len(step.op.results)))
        }


def dimensions_of(program: Program) -> Dimensions:
    """Find the colours and classes of a program's dimensions.

    Args:
        program: StableHLO, with or without inlined calls; loops count by their trip count.
    """
    reader = _Reader(program)
    reader.visit(program.entry, 1.0)
    return reader.finish()


class _Reader:
    """State of the walk through a program: a union-find over the dimensions of all values."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.parents: list[int] = [0]
        self.extents: list[int] = [1]
        self.ids: dict[tuple[Place, int], tuple[int, ...]] = {}
        self.types: dict[tuple[Place, int], TensorType] = {}
        self.steps: list[Step] = []
        self.visits: Counter[str] = Counter()
        self.origins: dict[tuple[Place, int], tuple[Place, int]] = {}

    def visit(self, name: str, times: float) -> str:
        """Walk a computation; return the name of this visit (the computation's for the first)."""
        own = self.program.computations[name]
        # A function called again processes other values, so it is walked once per call.
        self.visits[name] += 1
        visit = name if self.visits[name] == 1 else f"{name}#{self.visits[name]}"
        for position, op in enumerate(own.ops):
            for leaf, kind in enumerate(op.results):
                self.types[(visit, position), leaf] = kind
                self.ids[(visit, position), leaf] = tuple(map(self._new, kind.shape))
        for position, op in enumerate(own.ops):
            self._step(own, visit, position, op, times)
        return visit

    def _new(self, extent: int) -> int:
        # Dimensions of size 1 are never sharded, and would connect everything that is broadcast.
        if extent == 1:
            return 0
        self.parents.append(len(self.parents))
        self.extents.append(extent)
        return len(self.parents) - 1

    def _find(self, number: int) -> int:
        root = number
        while self.parents[root] != root:
            root = self.parents[root]
        while self.parents[number] != root:
            self.parents[number], number = root, self.parents[number]
        return root

    def _join(self, left: int, right: int) -> None:
        if left and right:
            self.parents[self._find(left)] = self._find(right)

    def join_values(
        self, left: tuple[Place, int], right: tuple[Place, int], *, same: bool = True
    ) -> None:
        """Join the dimensions of two values; with ``same``, left is an alias of right."""
        if same:
            self.origins[left] = right
        for one, other in zip(self.ids.get(left, ()), self.ids.get(right, ()), strict=False):
            self._join(one, other)

    def _step(self, own: Computation, visit: str, position: int, op: Op, times: float) -> None:
        place = (visit, position)
        if op.opcode in NESTING:
            self._control(visit, position, op, times)
            return
        if op.opcode == "get-tuple-element":
            self.join_values((place, 0), ((visit, op.operands[0]), int(op.attrs["index"])))
            return
        if op.opcode in _TUPLES:
            leaf = 0
            for number in op.operands:
                for inner in range(len(own.ops[number].results)):
                    self.join_values((place, leaf), ((visit, number), inner))
                    leaf += 1
            return
        operands = [((visit, number), 0) for number in op.operands]
        axes = op_axes(op, [self.types[o] for o in operands if o in self.types])
        step = Step(op, place, times, axes, operands)
        for axis in axes:
            met = [self.ids[place, leaf][d] for leaf, d in axis.results]
            met += [self.ids[operands[k]][d] for k, d in axis.operands]
            for one in met[1:]:
                self._join(met[0], one)
        self.steps.append(step)
        if op.opcode in _FORMS and operands:
            self.origins[place, 0] = operands[0]

    def _control(self, visit: str, position: int, op: Op, times: float) -> None:
        place = (visit, position)
        trips = op.attrs.get("trip_count") if op.opcode == "while" else 1
        # Branches are assumed equally likely.
        share = 1.0 / len(op.called) if op.opcode == "conditional" else 1.0
        for number, name in enumerate(op.called):
            body = self.visit(name, times * float(trips or 1) * share)
            inner = self.program.computations[name]
            parameters = [(p, o) for p, o in enumerate(inner.ops) if o.opcode == "parameter"]
            # A branch's only parameters are captured values, after the predicate.
            first = len(op.operands) - len(parameters)
            for p, parameter in parameters:
                where = (visit, op.operands[first + int(parameter.attrs["index"])])
                for leaf in range(len(parameter.results)):
                    self.join_values(((body, p), leaf), (where, leaf))
            if op.opcode == "while" and number == 0:
                continue  # the condition, whose result is a flag
            root = inner.root_op
            parts = root.operands if root.opcode == "tuple" else (inner.root,)
            for leaf, part in enumerate(parts[: len(op.results)]):
                loops = op.opcode == "while"
                self.join_values((place, leaf), ((body, part), 0), same=not loops)
                if loops:
                    carried = ((visit, op.operands[leaf]), 0)
                    self.join_values((place, leaf), carried, same=False)

    def finish(self) -> Dimensions:
        found = Dimensions(self.steps, types=self.types, origins=self.origins)
        for value, ids in self.ids.items():
            own = tuple(self._find(n) if n else 0 for n in ids)
            found.colours[value] = own
            for colour, extent in zip(own, self.types[value].shape, strict=True):
                if colour:
                    found.sizes[colour] = gcd(found.sizes.get(colour, 0), extent)
        self._classify(found)
        return found

    def _classify(self, found: Dimensions) -> None:
        """Group colours whose products have the same shapes in the same places."""
        looks: dict[int, set[tuple[object, ...]]] = defaultdict(set)
        work: dict[int, float] = defaultdict(float)
        for step in found.steps:
            if step.op.opcode not in PRODUCTS | _INDEXED:
                continue
            kinds = [self.types[o].shape for o in step.operands]
            flops = product_flops(step, kinds) if step.op.opcode in PRODUCTS else 0.0
            for axis in step.axes:
                colour = _colour(found, step, axis)
                if colour:
                    looks[colour].add((step.op.opcode, *kinds, axis.operands, axis.results))
                    work[colour] += flops
        numbers: dict[frozenset[tuple[object, ...]], int] = {}
        kinds_of = dict.fromkeys(frozenset(own) for own in looks.values())
        # The first layer has no gradient of its input, but otherwise looks like the others.
        wholes = {
            own: min(
                (o for o in kinds_of if own < o and len(o) < 2 * len(own)), key=len, default=own
            )
            for own in kinds_of
        }
        for colour, some in looks.items():
            own = wholes[frozenset(some)]
            number = numbers.setdefault(own, len(numbers) + 1)
            found.classes[colour] = number
            found.work[number] = found.work.get(number, 0.0) + work[colour]


def _colour(found: Dimensions, step: Step, axis: Axis) -> int:
    for leaf, dimension in axis.results:
        return found.colours[step.place, leaf][dimension]
    for number, dimension in axis.operands:
        return found.colours[step.operands[number]][dimension]
    return 0


def product_flops(step: Step, kinds: Sequence[Sequence[int]]) -> float:
    """Return the FLOPs of a product per run: two per point of its loop nest.

    A convolution's loop nest includes its kernel's spatial dimensions.
    """
    flops = 2.0 * step.times * step.op.type.size
    if step.op.opcode == "convolution":
        labels = step.op.attrs["dim_labels"].split("_")[1].split("->")[0]
        for label, extent in zip(labels, kinds[1], strict=True):
            flops *= extent if label != "o" else 1
        return flops
    for axis in step.axes:
        if axis.summed:
            number, dimension = axis.operands[0]
            flops *= kinds[number][dimension]
    return flops
