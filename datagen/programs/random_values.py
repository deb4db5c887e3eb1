"""The values of a growing random program, and the steps that produced them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from ...common.types import JaxObject
from ...features.ir.program import HLO_NAMES
from .cost import Estimate, estimate
from .draws import FLOATS, Draws, gradient, struct, values
from .source import Arg

#: HLO types of the values that a program may hold; others are not drawn.
HELD = (*FLOATS, "s32", "pred", "c64", "u32", "u8", "s8")


@dataclass(frozen=True)
class Value:
    """A value of the program.

    Attributes:
        index: Position in the pool.
        shape: Dimensions.
        dtype: HLO element type.
    """

    index: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def is_float(self) -> bool:
        """Whether it is real and floating-point."""
        return self.dtype in FLOATS

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """Its type for JAX."""
        return struct(self.shape, self.dtype)


@dataclass(frozen=True)
class Step:
    """A group of ops that is added at once.

    Attributes:
        function: Takes the inputs, then the arguments; returns an array or a tuple of arrays.
        inputs: Values of the pool.
        args: New arguments of the program.
        smooth: Whether its gradient is meaningful.
    """

    function: Callable[..., Any]
    inputs: tuple[Value, ...]
    args: tuple[Arg, ...] = ()
    smooth: bool = True


#: Creates a step that reads a value; None if the value is unsuitable.
Motif = Callable[["Pool", Value], Step | None]
MOTIFS: dict[Motif, float] = {}
"""Every motif with its weight."""


def motif(
    weight: float,
    dtypes: Sequence[str] = FLOATS,
    rank: int = 0,
    most: int | None = None,
    last: int = 1,
) -> Callable[[Motif], Motif]:
    """Register a motif, with the values that it can read.

    Args:
        weight: Share among the motifs, not normalised. Engineering choices: products, convolutions,
            norms, attention, element-wise ops and reductions first, as in real models.
        dtypes: Element types of the values.
        rank: Minimum number of dimensions.
        most: Maximum number of dimensions; None for any number.
        last: Minimum size of the last dimension.
    """

    def declare(make: Motif) -> Motif:
        @wraps(make)
        def own(pool: Pool, x: Value) -> Step | None:
            ranked = rank <= x.rank <= (x.rank if most is None else most)
            wide = not x.rank or x.shape[-1] >= last
            return make(pool, x) if x.dtype in dtypes and ranked and wide else None

        MOTIFS[own] = weight
        return own

    return declare


@dataclass
class Pool:
    """The values of a program by index, and its traced steps in order.

    Attributes:
        draws: Random decisions and limits.
        values: All values, including arguments.
        args: Arguments of the program with the index of their values.
        steps: Traced steps: function, indices of inputs, index of the first result.
        used: Indices of values that some step reads.
    """

    draws: Draws
    values: list[Value] = field(default_factory=list)
    args: list[tuple[int, Arg]] = field(default_factory=list)
    steps: list[tuple[Callable[..., Sequence[jax.Array]], tuple[int, ...], int]] = field(
        default_factory=list
    )
    used: set[int] = field(default_factory=set)
    work: float = 0.0
    n_ops: int = 0

    def argument(self, arg: Arg) -> Value:
        """Add an argument to the program."""
        value = Value(len(self.values), arg.shape, arg.dtype)
        self.values.append(value)
        self.args.append((value.index, arg))
        return value

    def pick(self) -> Value:
        """Draw a value; recent ones and those without a reader are more likely."""
        # Chains rather than stars: weights fall by a tenth per place, to a quarter for values that
        # are already read, and small values (means, scalars) are rarely used.
        recent = self.values[-24:]
        weights = {
            v: (0.25 if v.index in self.used else 1.0)
            * (0.15 if v.size < 64 else 1.0)
            * 1.1 ** (v.index - self.values[-1].index)
            for v in recent
        }
        return self.draws.weighted(weights)

    def like(self, value: Value, make: float = 0.3) -> tuple[tuple[Value, ...], tuple[Arg, ...]]:
        """Another value of the same type, or with probability ``make`` a new argument."""
        same = [
            v
            for v in self.values
            if v.shape == value.shape and v.dtype == value.dtype and v.index != value.index
        ]
        if same and not self.draws.flip(make):
            return (self.draws.choice(same),), ()
        return (), (values(value.shape, value.dtype),)

    def cost(self, step: Step) -> tuple[ClosedJaxpr, Estimate]:
        """The jaxpr and the cost of a step."""
        structs = [v.struct for v in step.inputs]
        structs += [struct(a.shape, a.dtype) for a in step.args]
        # Traced with shapes alone: nothing is computed while a program grows.
        closed = jax.make_jaxpr(step.function)(*structs)
        return closed, estimate(closed)

    def add(self, step: Step) -> tuple[Value, ...]:
        """Append a step and return its values; if it exceeds the limits, return none."""
        closed, cost = self.cost(step)
        # Half of the memory for one step, since other values are alive at the same time.
        over = cost.peak_bytes > self.draws.max_bytes / 2
        if over or self.work + cost.work > self.draws.max_flops:
            return ()
        names = [HLO_NAMES.get(str(a.dtype)) for a in closed.out_avals]
        # Empty results and types that no motif handles would be dead ends.
        if not {*names} <= {*HELD} or any(0 in a.shape for a in closed.out_avals):
            return ()
        inputs = tuple(v.index for v in step.inputs)
        inputs += tuple(self.argument(a).index for a in step.args)
        first = len(self.values)
        for aval, name in zip(closed.out_avals, names, strict=True):
            self.values.append(Value(len(self.values), tuple(aval.shape), str(name)))
        # The traced form: random decisions inside the function are not made twice.
        self.steps.append((jaxpr_as_fun(closed), inputs, first))
        self.used.update(inputs)
        self.work += cost.work
        self.n_ops += cost.n_ops
        return tuple(self.values[first:])

    def leaves(self) -> list[Value]:
        """Results that no step reads."""
        arguments = {index for index, _ in self.args}
        return [v for v in self.values if v.index not in self.used and v.index not in arguments]

    def run(self, arguments: Sequence[jax.Array]) -> dict[int, jax.Array]:
        """All values by index, from the arguments in order."""
        env = {index: x for (index, _), x in zip(self.args, arguments, strict=True)}
        for function, inputs, first in self.steps:
            for offset, result in enumerate(function(*(env[i] for i in inputs))):
                env[first + offset] = result
        return env


def backward(pool: Pool, step: Step) -> Step | None:
    """Gradient of a step by its floating-point operands, for an incoming gradient of the pool."""
    operands: list[Value | Arg] = [*step.inputs, *step.args]
    wanted = tuple(i for i, v in enumerate(operands) if v.dtype in FLOATS)
    structs = [struct(v.shape, v.dtype) for v in operands]
    shape_of: JaxObject = jax.eval_shape
    out = shape_of(step.function, *structs)
    if not wanted or isinstance(out, tuple):
        return None
    name = HLO_NAMES.get(str(out.dtype))
    if name not in FLOATS:
        return None
    # Steps with one floating-point result only. No value of the pool has index -1.
    grad_in, grad_arg = pool.like(Value(-1, tuple(out.shape), name), 0.4)

    product = gradient(step.function, wanted)

    def function(*xs: jax.Array) -> tuple[jax.Array, ...]:
        return product(*(xs if grad_in else (xs[-1], *xs[:-1])))

    return Step(function, (*grad_in, *step.inputs), (*step.args, *grad_arg))
