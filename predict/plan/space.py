"""Plans: a mesh of devices, and the dimensions of a program that each axis shards.

Axes are named by what they shard: ``data`` the batch; ``fsdp`` the batch and, between uses,
parameters and state; ``sequence`` positions; ``expert`` the experts of a mixture; ``tensor``
dimensions of products. ``pipeline`` shards no dimension: its stages are separate programs
(``pipeline.py``), each with the other axes. Only meshes and shardings that divide the sizes are
valid plans.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations
from math import gcd, prod
from typing import NamedTuple

import numpy as np

from ...common.errors import PlanError
from .arguments import Argument
from .case import AXES, PIPELINE
from .dimensions import Dimensions

#: Maximum number of classes that ``tensor`` may shard, in all combinations. Engineering choice: a
#: decoder has heads, feed-forward, embedding and the projection to the vocabulary.
MOST_CLASSES = 4

Cuts = dict[int, tuple[str, ...]]


class Change(NamedTuple):
    """Changes to a program that reduce its memory.

    Attributes:
        remat: Number of layers, from the first on, that are recomputed in the backward pass.
        micro: Number of micro-batches whose gradients are accumulated.
    """

    remat: int = 0
    micro: int = 1

    def text(self) -> str:
        """Return text such as ``, 4 layers rematerialised, 2 micro-batches``."""
        layers = f", {self.remat} layers rematerialised" if self.remat else ""
        return layers + (f", {self.micro} micro-batches" if self.micro > 1 else "")


UNCHANGED = Change()


@dataclass(frozen=True)
class Plan:
    """A mesh, the classes that its ``tensor`` axis shards, and changes that save memory.

    Attributes:
        mesh: Axes with their sizes, outermost first; none has size 1.
        tensor: Classes that ``tensor`` shards.
        change: Changes to the program.
    """

    mesh: tuple[tuple[str, int], ...] = ()
    tensor: tuple[int, ...] = ()
    change: Change = UNCHANGED

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the axes."""
        return dict(self.mesh)

    @property
    def devices(self) -> int:
        """Number of devices."""
        return prod(size for _, size in self.mesh)

    @property
    def stages(self) -> int:
        """Number of pipeline stages; 1 for none."""
        return self.sizes.get(PIPELINE, 1)

    @property
    def inside(self) -> Plan:
        """The plan inside one pipeline stage, for one micro-batch."""
        mesh = tuple(own for own in self.mesh if own[0] != PIPELINE)
        return Plan(mesh, self.tensor, Change(self.change.remat))

    def text(self, labels: Mapping[int, str] | None = None) -> str:
        """Return text such as ``data=2,tensor=4 (ff, heads)``."""
        axes = ",".join(f"{axis}={size}" for axis, size in self.mesh) or "one device"
        if self.stages > 1:
            axes += f",micro={self.change.micro}"
            own = ", ".join((labels or {}).get(c, str(c)) for c in self.tensor)
            return (f"{axes} ({own})" if own else axes) + Change(self.change.remat).text()
        cut = ", ".join((labels or {}).get(c, str(c)) for c in self.tensor)
        return (f"{axes} ({cut})" if cut else axes) + self.change.text()


@dataclass
class Space:
    """Dimensions of a program that the axes of a mesh may shard.

    Attributes:
        batch: Classes of the batch.
        sequence: Class of the positions; 0 for none.
        expert: Class of the experts; 0 for none.
        tensor: Classes that ``tensor`` may shard, the most valuable first.
        class_sizes: Sizes that the number of shards of each class must divide.
        labels: Names of classes, from a parameter that has them.
    """

    batch: frozenset[int]
    sequence: int
    expert: int
    tensor: tuple[int, ...]
    class_sizes: dict[int, int]
    labels: dict[int, str] = field(default_factory=dict)

    def cuts(self, plan: Plan) -> Cuts:
        """Return the axes that shard each class under a plan."""
        names = [axis for axis, _ in plan.mesh]
        batch = tuple(axis for axis in ("data", "fsdp") if axis in names)
        found: Cuts = dict.fromkeys(self.batch, batch) if batch else {}
        if "sequence" in names:
            found[self.sequence] = ("sequence",)
        if "expert" in names:
            found[self.expert] = ("expert",)
        return found | dict.fromkeys(plan.tensor, ("tensor",))

    def axes(self) -> tuple[str, ...]:
        """Return the axes that the program has."""
        known = {"sequence": self.sequence, "expert": self.expert, "tensor": self.tensor}
        return tuple(axis for axis in AXES if known.get(axis, True))

    def plans(self, devices: int, axes: Sequence[str], most_tensor: int) -> Iterator[Plan]:
        """Yield all plans over a number of devices.

        Args:
            devices: Number of devices.
            axes: Axes to use, of :data:`AXES`.
            most_tensor: Maximum size of ``tensor``: beyond a node, sums of activations would cross
                the slow network in every layer.
        """
        used = [axis for axis in self.axes() if axis in axes]
        batch = gcd(*(self.class_sizes[c] for c in self.batch))
        for sizes in _factors(devices, len(used)):
            mesh = {axis: n for axis, n in zip(used, sizes, strict=True) if n > 1}
            if batch % prod(mesh.get(axis, 1) for axis in ("data", "fsdp")):
                continue
            if self.class_sizes.get(self.sequence, 1) % mesh.get("sequence", 1):
                continue
            if self.class_sizes.get(self.expert, 1) % mesh.get("expert", 1):
                continue
            tensor = mesh.get("tensor", 1)
            if tensor == 1:
                yield Plan(tuple(mesh.items()))
            elif tensor <= most_tensor:
                taken = self.expert if "expert" in mesh else 0
                fit = [c for c in self.tensor if self.class_sizes[c] % tensor == 0 and c != taken]
                for count in range(1, len(fit) + 1):
                    for own in combinations(fit, count):
                        yield Plan(tuple(mesh.items()), own)


def space_of(found: Dimensions, arguments: Sequence[Argument]) -> Space:
    """Find the shardable dimensions of a program.

    The batch's are those of batch arguments; positions are the second dimension of integer batches;
    experts are a dimension of parameters along which products are batched. ``tensor`` may shard
    the other dimensions of parameters in products; those with most work and most bytes of
    parameters are considered (:data:`MOST_CLASSES`).

    Raises:
        PlanError: No batch dimension takes part in a product.
    """
    batch = {a.classes[a.batch] for a in arguments if a.role == "batch"} - {0}
    if not batch:
        raise PlanError(
            "the batch dimensions take part in no product that could be sharded",
            where="--batch-dims",
            hint="name the right dimensions, as 3:0,4:0 (argument:dimension)",
        )
    sizes = {c: found.class_size(c) for c in set(found.classes.values())}
    positions = (
        {
            a.classes[1]
            for a in arguments
            if a.role == "batch" and a.type.dtype[0] in "su" and len(a.classes) > 1 and a.batch == 0
        }
        - batch
        - {0}
    )
    sequence = next(iter(positions)) if len(positions) == 1 else 0
    # Sharding positions must be worthwhile: products must have them as a dimension.
    sequence = sequence if found.work.get(sequence) else 0
    experts: Counter[int] = Counter()
    total = sum(found.work.values()) or 1.0
    held: Counter[int] = Counter()
    labels: dict[int, str] = {}
    state = sum(a.type.nbytes for a in arguments if a.role == "parameter") or 1
    for own in sorted(arguments, key=lambda a: -a.type.nbytes):
        if own.role != "parameter":
            continue
        for use in own.uses:
            if use.step.op.opcode == "dot" and own.type.size > 1:
                side = ("lhs", "rhs")[use.operand]
                value = use.step.operands[use.operand]
                for d in use.step.op.attrs[f"{side}_batch_dims"]:
                    experts[found.value_classes(value)[d]] += own.type.nbytes
        for d, c in enumerate(own.classes):
            held[c] += own.type.nbytes
            if c:
                labels.setdefault(c, _label(own.name, d))
    experts = Counter({c: n for c, n in experts.items() if c and c not in batch})
    expert = experts.most_common(1)[0][0] if experts else 0
    worth = {
        c: found.work[c] / total + n / state
        for c, n in held.items()
        if c and c not in batch and c not in (sequence, expert) and sizes[c] > 1
    }
    # A dimension that every layer adds to (a residual stream) would need a reduction in most
    # products if it were sharded, so it comes last.
    most = max(found.work.values(), default=0.0)
    stream = {c for c in worth if held[c] > 0.9 * state and found.work[c] > 0.5 * most}
    ordered = sorted(worth, key=lambda c: (c in stream, -worth[c], c))
    return Space(frozenset(batch), sequence, expert, tuple(ordered[:MOST_CLASSES]), sizes, labels)


def _label(name: str, dimension: int) -> str:
    """Return ``params['Block_0']['down']['kernel']`` as ``Block_0.down.kernel:0``."""
    words = re.findall(r"\w+", name)
    return f"{'.'.join(words[1:] or words)}:{dimension}"


def _factors(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 0:
        if number == 1:
            yield ()
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _factors(number // first, parts - 1):
                yield (first, *rest)


def assign(
    classes: Sequence[int], cuts: Mapping[int, tuple[str, ...]], first: int | None = None
) -> tuple[tuple[str, ...], ...]:
    """Return the axes that shard each dimension of a value or of an op's loop nest.

    An axis shards one dimension: if several are possible, the one with fewest axes, then the first.

    Args:
        classes: Class of each dimension.
        cuts: Axes by class.
        first: Number of leading dimensions that take precedence; ``None`` for all.
    """
    return _assigned(tuple([cuts.get(c, ()) for c in classes]), first)


# A search calls this a million times, with a few hundred different arguments.
@lru_cache(maxsize=4096)
def _assigned(known: tuple[tuple[str, ...], ...], first: int | None) -> tuple[tuple[str, ...], ...]:
    taken: set[str] = set()
    found: list[tuple[str, ...]] = [()] * len(known)
    edge = len(known) if first is None else first
    for n in sorted(range(len(known)), key=lambda n: (n >= edge, len(known[n]))):
        own = tuple(axis for axis in known[n] if axis not in taken)
        found[n] = own
        taken.update(own)
    return tuple(found)


def fsdp_dimension(own: Argument, cuts: Cuts, sizes: dict[str, int]) -> int:
    """Return the dimension of a parameter or state that ``fsdp`` shards in addition; -1 for none.

    By convention it is the largest divisible dimension without another axis, or else with one.
    """
    parts = sizes.get("fsdp", 1)
    if parts == 1 or own.role not in ("parameter", "state"):
        return -1
    cut = assign(own.classes, cuts)
    if any("fsdp" in axes for axes in cut):
        return -1  # already sharded along the batch
    left = [e // prod(sizes[a] for a in axes) for e, axes in zip(own.type.shape, cut, strict=True)]
    fit = [d for d, extent in enumerate(left) if extent % parts == 0]
    return max(fit, key=lambda d: (not cut[d], left[d]), default=-1)


def cut_parts(cut: Sequence[Sequence[str]], sizes: Mapping[str, int]) -> int:
    """Return the number of shards, from the axes of each dimension."""
    return prod(sizes[axis] for axes in cut for axis in axes)


def group_ranks(axes: Sequence[str], mesh: tuple[tuple[str, int], ...]) -> tuple[int, ...]:
    """Return the ranks of the first group over some axes; devices are in row-major mesh order."""
    shape = [size for _, size in mesh]
    grid = np.arange(prod(shape)).reshape(shape)
    own = tuple(slice(None) if axis in axes else slice(1) for axis, _ in mesh)
    return tuple(int(r) for r in grid[own].ravel())
