"""Roles of a program's arguments: parameters, optimizer state, batch, and others."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ...common.errors import PlanError, ProgramError
from ...features.ir.program import Program, TensorType
from .dimensions import PRODUCTS, Dimensions, Place, Step

Role = Literal["parameter", "state", "batch", "other"]
Value = tuple[Place, int]
#: Ops that combine a parameter with activations, and the operands that may be the parameter.
_USES = {"dot": (0, 1), "convolution": (0, 1), "gather": (0,), "broadcast": (0,)}
#: Types of random keys: Threefry's and RBG's (jax/_src/prng.py). They have no batch.
_KEYS = (("u32", (2,)), ("u32", (4,)))


class Use(NamedTuple):
    """A place where a program combines a parameter with activations.

    Attributes:
        step: The op.
        operand: Number of the operand that is the parameter.
    """

    step: Step
    operand: int


@dataclass(frozen=True)
class Argument:
    """An argument of a program.

    Attributes:
        name: Path in the function's arguments, or ``argument 3``.
        type: Type of the argument.
        role: Role of the argument.
        classes: Class of each dimension.
        batch: The batch dimension; -1 for none.
        uses: Where a parameter is read.
        output: Number of the result that replaces it; -1 if it is not donated.
    """

    name: str
    type: TensorType
    role: Role
    classes: tuple[int, ...]
    batch: int = -1
    uses: tuple[Use, ...] = ()
    output: int = -1

    @property
    def is_key(self) -> bool:
        """Whether it looks like the data of a random key."""
        return self.role == "other" and self.type[:2] in _KEYS


def arguments_of(
    program: Program, found: Dimensions, names: Mapping[int, str], given: Mapping[str, int] | None
) -> list[Argument]:
    """Determine the roles of a program's arguments.

    Parameters are arguments that are donated and read by products, arguments that products read as
    their second operand, and arguments with the same first name. Batch dimensions are those that
    other operands contribute to the results of products with parameters; arguments that start with
    one are batches. State is everything else that is donated or has only dimensions of parameters.

    Args:
        program: The program.
        found: Dimensions of the program.
        names: Paths of the arguments, as far as known.
        given: Batch dimension by name or number of an argument; ``None`` to detect it.

    Raises:
        PlanError: ``given`` refers to an unknown argument or dimension.
        ProgramError: There is no batch.
    """
    places = program.entry_computation.parameter_places
    types = {n: program.entry_computation.ops[p].type for n, p in sorted(places.items())}
    labels = {n: names.get(n) or f"argument {n}" for n in types}
    batch = _given(given, labels, types) if given is not None else None
    uses = _uses(found, {((program.entry, p), 0): n for n, p in places.items()})
    colours = {n: found.colours[(program.entry, p), 0] for n, p in places.items()}
    donated = {number: output for output, number in program.aliases}
    paths = {n: labels[n] for n in types if n in names}
    evidence = _evidence(found, uses, colours, paths, donated, batch)
    made = []
    for n, own in types.items():
        role = evidence.role(n, own, colours[n])
        made.append(
            Argument(
                labels[n],
                own,
                role,
                found.value_classes(((program.entry, places[n]), 0)),
                (batch or {}).get(n, 0) if role == "batch" else -1,
                tuple(uses[n]) if role == "parameter" else (),
                donated.get(n, -1),
            )
        )
    if not any(a.role == "batch" for a in made):
        raise ProgramError(
            "no argument of the program looks like a batch",
            where=program.origin,
            hint="name the batch's dimensions: --batch-dims 3:0,4:0 (argument:dimension)",
        )
    return made


class _Evidence(NamedTuple):
    """What the roles of arguments are determined from. Sets of numbers are arguments'.

    Attributes:
        donated: Arguments that a result replaces.
        read: Arguments that products or look-ups read.
        weights: Arguments that products read as their second operand.
        named: Arguments in the same tree as weights, such as biases in ``params``.
        rows: Colours of batch dimensions.
        held: Colours of the dimensions of parameters.
        batch: Batches that the caller named; ``None`` to detect them.
    """

    donated: set[int]
    read: set[int]
    weights: set[int]
    named: set[int]
    rows: set[int]
    held: set[int]
    batch: set[int] | None

    def role(self, number: int, kind: TensorType, colours: Sequence[int]) -> Role:
        """Return the role of an argument of a type whose dimensions have given colours."""
        met, donated = set(colours) - {0}, number in self.donated
        sought, told_apart = self.batch is None, bool(self.rows or not self.donated)
        if number in (self.batch or ()):
            return "batch"
        if donated:
            return "parameter" if number in self.read and not met & self.rows else "state"
        if number in self.named and told_apart:
            return "parameter"
        if sought and not self.rows.isdisjoint(colours[:1]):
            return "batch"
        if number in self.weights and told_apart and not met & self.rows:
            return "parameter"
        if self.rows and met and met <= self.held:
            return "state"
        # Without evidence from products: anything except random keys.
        if sought and not self.rows and kind.shape[:1] > (1,) and kind[:2] not in _KEYS:
            return "batch"
        return "other"


def _evidence(
    found: Dimensions,
    uses: Mapping[int, Sequence[Use]],
    colours: Mapping[int, Sequence[int]],
    paths: Mapping[int, str],
    donated: Collection[int],
    batch: Mapping[int, int] | None,
) -> _Evidence:
    # An input is also read as a second operand, where its gradient is computed.
    first, second = ({n for n, own in uses.items() if _side(own, k)} for k in (0, 1))
    weights = second - first or second
    trees = {_first(paths[n]) for n in weights - set(batch or ()) if n in paths}
    named = {n for n, path in paths.items() if _first(path) in trees}
    # Arguments that are donated and read by products are trained, if there are any.
    sure = set(donated) & weights or weights
    rows = _rows(found, uses, sure) - {c for n in sure for c in colours[n]}
    held = {c for n in named | weights for c in colours[n]} - rows
    if batch is None:
        rows &= {own[0] for n, own in colours.items() if own and n not in named | set(donated)}
    else:
        rows = {colours[n][d] for n, d in batch.items()}
    read = {n for n, own in uses.items() if own}
    given = None if batch is None else set(batch)
    return _Evidence(set(donated), read, weights, named, rows, held, given)


def _uses(found: Dimensions, numbers: Mapping[Value, int]) -> dict[int, list[Use]]:
    """Return where arguments are combined with activations, by number of the argument."""
    uses: dict[int, list[Use]] = defaultdict(list)
    for step in found.steps:
        for k in _USES.get(step.op.opcode, ()):
            number = numbers.get(found.root(step.operands[k]))
            if number is not None:
                uses[number].append(Use(step, k))
    return uses


def _side(uses: Sequence[Use], side: int) -> bool:
    """Return whether products read an argument as a given operand; a look-up's index is second."""
    return any(
        own.operand == side
        if own.step.op.opcode in PRODUCTS
        else own.step.op.opcode == "gather" and side == 1
        for own in uses
    )


def _rows(
    found: Dimensions, uses: Mapping[int, Sequence[Use]], weights: Collection[int]
) -> set[int]:
    """Return the colours that other operands of weights' products pass to the results."""
    rows: set[int] = set()
    for number in weights:
        for step, operand in uses[number]:
            if step.op.opcode in PRODUCTS and operand == 1:
                other = 0
            elif step.op.opcode == "gather":
                other = 1
            else:
                continue
            own = found.colours.get(step.operands[other], ())
            for axis in step.axes:
                if axis.results and {k for k, _ in axis.operands} == {other}:
                    rows |= {own[d] for k, d in axis.operands if k == other}
    return rows - {0}


def parse_batch_dims(text: str) -> dict[str, int]:
    """Parse ``3:0,batch['x']:1`` into dimensions by argument.

    Raises:
        PlanError: A part is not an argument with a dimension.
    """
    found = {}
    for part in filter(None, text.split(",")):
        name, _, dimension = part.rpartition(":")
        if not name or not dimension.isdigit():
            raise PlanError(
                f"{part!r} is not an argument with its batch dimension",
                where="--batch-dims",
                hint="write argument:dimension, as 3:0,4:0 or batch['x']:0",
            )
        found[name.strip()] = int(dimension)
    return found


def _given(
    given: Mapping[str, int], names: Mapping[int, str], kinds: Mapping[int, TensorType]
) -> dict[int, int]:
    found = {}
    for name, dimension in given.items():
        own = [n for n, known in names.items() if name in (str(n), known)]
        if not own:
            raise PlanError(
                f"there is no argument {name!r}",
                where="--batch-dims",
                hint=f"arguments are {', '.join(list(names.values())[-4:])} or numbers from 0 to "
                f"{len(kinds) - 1}",
            )
        if dimension >= len(kinds[own[0]].shape):
            raise PlanError(
                f"{names[own[0]]} is {kinds[own[0]]}: it has no dimension {dimension}",
                where="--batch-dims",
                hint="dimensions are numbered from 0",
            )
        found[own[0]] = dimension
    return found


def _first(name: str) -> str:
    return re.split(r"[\[.]", name, maxsplit=1)[0]
