"""Trace kernels back to the user's program and model.

XLA's CPU compiler drops the names of convolutions that it reverses for weight gradients, and of
products that it forms from convolutions. Such a kernel is identified by its neighbours: it writes
what a StableHLO op wrote for its users, or reads what that op read.

Modules and passes are read from the names of MLIR locations. JAX names an op by the scopes in which
it was traced, as in ``jit(train_step)/transpose(jvp(Llama))/Block_0/attention/query/dot_general``:
transformations around modules, the op's own name last. Flax adds a scope per module,
``jax.named_scope`` any other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from ..ir.mlir.locations import MAX_CALLS, SourceOps, function_of
from ..ir.program import Source
from ..ir.reader import SourceProgram
from .kernel import Kernel

if TYPE_CHECKING:
    from jaxlib.mlir.ir import Operation


_VIEWS = frozenset(
    f"stablehlo.{name}"
    for name in ("transpose", "reshape", "convert", "reverse", "broadcast_in_dim", "pad", "slice")
)
#: StableHLO ops that kernels of a kind can come from.
_ORIGINS: dict[str, tuple[str, ...]] = {
    "conv": ("stablehlo.convolution",),
    "gemm": ("stablehlo.dot_general", "stablehlo.convolution"),
    "reduce": ("stablehlo.reduce", "stablehlo.reduce_window", "stablehlo.select_and_scatter"),
    "fusion": ("stablehlo.convolution",),
}
#: Kernels without sources skipped on the way to one with sources. Engineering estimate: XLA puts at
#: most a few copies and transposes between two kernels of the user's ops.
_MAX_STEPS = 6
_Step = Callable[[int], Iterable[int]]


@dataclass(slots=True)
class _Candidate:
    """An op that no kernel names, with the values that it reads and the users of its value."""

    source: int
    name: str
    reads: set[int] = field(default_factory=set)
    readers: set[int] = field(default_factory=set)


def infer_sources(
    kernels: Sequence[Kernel], ops: Sequence[Source], operations: Sequence[Operation]
) -> None:
    """Assign kernels without sources the op that their neighbours indicate.

    Args:
        kernels: In schedule order; ``sources`` is filled in where it is empty.
        ops: Sources by walk index.
        operations: MLIR operations by walk index.
    """
    unattributed = [i for i, k in enumerate(kernels) if not k.sources and k.kind in _ORIGINS]
    if not unattributed:
        return
    # A view of a product's result can carry the product's name into the kernel that reads it.
    named = {
        s.index
        for k in kernels
        if k.kind != "fusion"
        for s in k.sources
        if s.op in _ORIGINS.get(k.kind, ())
    }
    candidates = _candidates(operations, named)
    if not candidates:
        return
    users: dict[int, list[int]] = {}
    for position, kernel in enumerate(kernels):
        for operand in kernel.operands:
            users.setdefault(operand, []).append(position)
    for position in unattributed:
        origin = _match(position, kernels, users, candidates)
        if origin is not None:
            kernels[position].sources = (ops[origin.source],)


def _candidates(operations: Sequence[Operation], named: set[int]) -> list[_Candidate]:
    """Collect ops that a kernel can come from but none names, and their neighbours."""
    wanted = {name for names in _ORIGINS.values() for name in names}
    candidates: dict[int, _Candidate] = {}
    makers: dict[object, int] = {}
    for index, op in enumerate(operations):
        if op.name in wanted and index not in named:
            candidates[index] = _Candidate(index, op.name)
    if not candidates:
        return []
    for index, op in enumerate(operations):
        values = [makers[value] for value in op.operands if value in makers]
        if index in candidates:
            candidates[index].reads.update(values)
        is_view = op.name in _VIEWS and len(values) > 0
        for maker in values:
            if maker in candidates:
                candidates[maker].readers.add(index)
        for result in op.results:
            # A view counts as its operand: the compiler may have folded it.
            makers[result] = values[0] if is_view else index
    return list(candidates.values())


def _match(
    position: int,
    kernels: Sequence[Kernel],
    users: dict[int, list[int]],
    candidates: list[_Candidate],
) -> _Candidate | None:
    """Find the candidate that matches a kernel best: by name, then readers, then inputs."""
    after = _nearest([position], kernels, lambda i: users.get(i, ()))
    before = _nearest([position], kernels, lambda i: kernels[i].operands)
    names = _ORIGINS[kernels[position].kind]
    best, score = None, 0
    for candidate in candidates:
        if candidate.name not in names:
            continue
        # Weights make it lexicographic: a name outweighs readers and inputs together (4 > 2 + 1).
        shared = 4 * (candidate.source in after or candidate.source in before)
        shared += 2 * bool(candidate.readers & after) + bool(candidate.reads & before)
        if shared > score:
            best, score = candidate, shared
    return best


def _nearest(start: list[int], kernels: Sequence[Kernel], step: _Step) -> set[int]:
    """Return the walk indices of the nearest kernels with sources in one direction."""
    origins: set[int] = set()
    front: Iterable[int] = start
    seen = set(start)
    for _ in range(_MAX_STEPS):
        reached = {j for i in front for j in step(i)} - seen
        seen |= reached
        origins.update(s.index for j in reached for s in kernels[j].sources)
        front = [j for j in reached if not kernels[j].sources]
        if not front:
            break
    return origins


FORWARD, BACKWARD, RECOMPUTED = "forward", "backward", "recomputed"
_PHASES = ("", FORWARD, BACKWARD, RECOMPUTED)
#: Scopes that JAX itself adds.
_OWN = re.compile(
    r"(?:while|body|cond|scan|closed_call|core_call|checkpoint|remat\d?|rematted_computation|pjit"
    r"|xla_call|custom_[jv]+p_call\w*|shard_map|branch_\d+_fun|.*->.*|)$"
)
#: A transformation or a function around a scope.
_WRAPPED = re.compile(r"(\w+)\((.*)\)$", re.DOTALL)
#: The traced function, which begins the name of an op with complete scopes.
_ENTRY = re.compile(r"(?:jit|pjit|xla_call)\(")
#: Wrappers that name a traced function rather than a transformation.
_FUNCTIONS = ("jit", "pjit", "xla_call")
_NAME = re.compile(r'"((?:[^"\\]|\\.)*)"')
# What follows a file's name in a location: ``:12:3``.
_POSITION = re.compile(r"\s*:\d+(?::\d+|\s|$)")


class ModulePath(NamedTuple):
    """A position in the user's model.

    Attributes:
        modules: Outermost first, such as ``("Llama", "Block_0", "attention")``; empty outside.
        phase: ``forward``, ``backward`` or ``recomputed``; empty where no gradient is taken.
    """

    modules: tuple[str, ...] = ()
    phase: str = ""


_NOWHERE = ModulePath()


class ModulePaths:
    """Module paths of a program's kernels.

    Args:
        source: The program that the kernels were lowered from.
    """

    def __init__(self, source: SourceProgram) -> None:
        self._ops = SourceOps(source.module, source.origin) if source.kind == "stablehlo" else None
        self._known: dict[int, ModulePath | None] = {}
        self._callers: dict[str, ModulePath] = {}

    def of(self, kernel: Kernel) -> ModulePath:
        """Return the module path of the main op of a kernel, or of the next one with a name."""
        places = (self._place(source) for source in kernel.sources)
        return next((place for place in places if place is not None), _NOWHERE)

    def _place(self, source: Source) -> ModulePath | None:
        if self._ops is None or source.index < 0:
            return parse_scopes(source.op) if "/" in source.op else None
        if source.index not in self._known:
            self._known[source.index] = self._of_op(self._ops.operations[source.index])
        return self._known[source.index]

    def _of_op(self, op: Operation, depth: int = 0) -> ModulePath | None:
        """Locate an op by its own location and, in an outlined function, its calls' locations."""
        name = _location_name(str(op.location.attr))
        place = parse_scopes(name) if name else None
        caller = self._of_calls(function_of(op), depth)
        if caller is None or place is None:
            return place or caller
        # JAX outlines loop bodies and functions that are traced twice: names in them start at the
        # call.
        starts_anew = bool(place.modules) and _ENTRY.match(name) is not None
        modules = place.modules if starts_anew else caller.modules + place.modules
        return ModulePath(modules, max(place.phase, caller.phase, key=_PHASES.index))

    def _of_calls(self, function: str, depth: int) -> ModulePath | None:
        """Return the common module path of all calls of a function, in the pass of the first."""
        calls = self._ops.calls.get(function, []) if self._ops is not None else []
        if not calls or depth > MAX_CALLS:
            return None
        if function not in self._callers:
            # A function that calls itself is in no module.
            self._callers[function] = _NOWHERE
            places = [self._of_op(call, depth + 1) or _NOWHERE for call in calls]
            shared = _common([place.modules for place in places])
            self._callers[function] = ModulePath(shared, places[0].phase)
        return self._callers[function]


def _common(paths: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the common prefix of several paths."""
    first, last = min(paths), max(paths)
    # A common prefix of the smallest and largest path is a prefix of all between them.
    differs = (n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    return first[: next(differs, len(first))]


@cache
def parse_scopes(name: str) -> ModulePath:
    """Parse an op's name into modules and pass, dropping the last part, the op itself."""
    modules = []
    phase = ""
    # Order matters: recomputation happens within the backward pass, and both within jvp.
    if "rematted_computation" in name:
        phase = RECOMPUTED
    elif "transpose(" in name:
        phase = BACKWARD
    elif "jvp(" in name:
        phase = FORWARD
    for part in _parts(name)[:-1]:
        scope = _unwrapped(part)
        if not _OWN.match(scope):
            modules.append(scope)
    return ModulePath(tuple(modules), phase)


def _unwrapped(part: str) -> str:
    """Return the scope inside transformations; empty for a traced function."""
    while wrapped := _WRAPPED.match(part):
        if wrapped[1] in _FUNCTIONS:
            return ""
        part = wrapped[2]
    return part


def _parts(name: str) -> list[str]:
    """Split at the slashes outside parentheses."""
    parts, depth = [""], 0
    for letter in name:
        # A slash inside `jit(f/g)` is part of a function's name.
        depth += (letter == "(") - (letter == ")")
        if letter == "/" and depth <= 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _location_name(location: str) -> str:
    """Return the first name in a printed location that is not a file position, or empty."""
    for match in _NAME.finditer(location):
        if not _POSITION.match(location, match.end()):
            return match[1]
    return ""
