"""What the arguments of a program are: parameters, state of an optimiser, batch, the rest."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ...common.errors import PlanError, ProgramError
from ...features.ir.program import Program, TensorType
from .dimensions import Dimensions, Step

Role = Literal["parameter", "state", "batch", "other"]
#: Ops that use a parameter together with activations, and the operand that is it.
_USES = {"dot": (0, 1), "convolution": (0, 1), "gather": (0,), "broadcast": (0,)}
#: Data of a key of random numbers: Threefry's and RBG's (jax/_src/prng.py). It has no batch.
_KEYS = (("u32", (2,)), ("u32", (4,)))


class Use(NamedTuple):
    """A place where a program reads a parameter beside activations.

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
        name: Its path in the function's arguments, or ``argument 3``.
        type: Its type.
        role: What it is.
        classes: Class of each dimension.
        batch: The dimension that is the batch; -1 for none.
        uses: Where a parameter is read.
        output: Number of the result that takes its place; -1 if it is not donated.
    """

    name: str
    type: TensorType
    role: Role
    classes: tuple[int, ...]
    batch: int = -1
    uses: tuple[Use, ...] = ()
    output: int = -1


def arguments_of(
    program: Program, found: Dimensions, names: Mapping[int, str], given: Mapping[str, int] | None
) -> list[Argument]:
    """Tell the arguments of a program apart.

    Donated arguments are state, and parameters if products read them; what is neither and has a
    first dimension is the batch. Without donation, parameters are what products read as their
    second operand and what has the same first name.

    Args:
        program: The program.
        found: Its dimensions.
        names: Paths of the arguments, as far as known.
        given: The batch dimension by name or number of an argument; ``None`` to find it.

    Raises:
        PlanError: ``given`` names no argument, or a dimension that it has not.
        ProgramError: There is no batch.
    """
    entry = program.entry_computation
    places = {int(o.attrs["index"]): p for p, o in enumerate(entry.ops) if o.opcode == "parameter"}
    numbers = {((program.entry, p), 0): n for n, p in places.items()}
    uses: dict[int, list[Use]] = defaultdict(list)
    sides: tuple[set[int], set[int]] = (set(), set())
    for step in found.steps:
        for k in _USES.get(step.op.opcode, ()):
            number = numbers.get(found.root(step.operands[k]))
            if number is not None:
                uses[number].append(Use(step, k))
                if step.op.opcode in ("dot", "convolution"):
                    sides[k].add(number)
                elif step.op.opcode == "gather":
                    sides[1].add(number)
    # An input is the second operand too where a gradient is made of it.
    weights = sides[1] - sides[0] or sides[1]
    donated = {number: output for output, number in program.aliases}
    kinds = {n: entry.ops[p].type for n, p in sorted(places.items())}
    told = {n: names.get(n) or f"argument {n}" for n in kinds}
    batch = _given(given, told, kinds) if given is not None else None
    # Arguments of the tree that holds weights, such as biases of the same ``params``.
    trees = {_first(told[n]) for n in weights - set(batch or ()) if n in names}
    made = []
    for n, kind in kinds.items():
        value = ((program.entry, places[n]), 0)
        role: Role
        own = -1
        if batch is not None and n in batch:
            role, own = "batch", batch[n]
        elif n in donated:
            role = "parameter" if uses[n] else "state"
        elif not donated and (n in weights or _first(told[n]) in trees):
            role = "parameter"
        elif batch is None and kind.shape and kind.shape[0] > 1 and (kind[:2] not in _KEYS):
            role, own = "batch", 0
        else:
            role = "other"
        made.append(
            Argument(
                told[n],
                kind,
                role,
                found.value_classes(value),
                own,
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


def parse_batch_dims(text: str) -> dict[str, int]:
    """Read ``3:0,batch['x']:1`` into dimensions by argument.

    Raises:
        PlanError: A part is no argument with a dimension.
    """
    found = {}
    for part in filter(None, text.split(",")):
        name, _, dimension = part.rpartition(":")
        if not name or not dimension.isdigit():
            raise PlanError(
                f"{part!r} is no argument with its batch dimension",
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
