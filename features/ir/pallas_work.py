"""Work of Pallas kernels, counted by walking their jaxprs over the grid.

Scalar integers derived from grid indices are computed for all points at once, so that loops run and
branches are taken as often as in reality (causal attention skips half of its blocks). For branches
that depend on data the costliest side counts. A kernel with a loop whose length depends on data is
not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple, TypeGuard

import numpy as np

from ...common.types import JaxObject
from .op_table import named
from .program import STATED

#: Points walked in a larger grid, drawn at random, and trips walked of a loop whose body depends on
#: the trip, evenly spread. Engineering estimates: counts of causal attention are within 1 %.
_POINTS, _TRIPS = 4096, 8
#: Largest grid whose steps are all compared to find blocks that do not move.
_STEPS = 1 << 20
_READS = frozenset(("get", "masked_load", "load"))
_WRITES = frozenset(("swap", "masked_swap", "store", "addupdate"))
#: Operations on scalars; JAX divides integers towards zero.
_SCALAR: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "div": lambda a, b: np.trunc(a / np.where(b == 0, 1, b)).astype(np.int64),
    "rem": lambda a, b: np.fmod(a, np.where(b == 0, 1, b)),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.invert,
    "select_n": lambda which, *cases: np.choose(which.astype(int), cases),
    "clamp": lambda low, x, high: np.clip(x, low, high),
    **dict.fromkeys(("convert_element_type", "reshape", "squeeze", "multiple_of"), lambda a: a),
}
#: Distance of a loop's counter from its end, by the comparison for which the loop continues.
_COMPARED: dict[str, Callable[..., np.ndarray]] = {
    "lt": lambda a, b: b - a,
    "le": lambda a, b: b - a + 1,
    "gt": lambda a, b: a - b,
    "ge": lambda a, b: a - b + 1,
    "ne": lambda a, b: np.abs(b - a),
}
#: Parameters of calls that hold the called jaxpr.
_CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr")


class KernelWork(NamedTuple):
    """Work of one run of a kernel.

    Attributes:
        flops: Floating-point operations; a multiply-add counts as two.
        transcendentals: exp, log, tanh and the like.
        bytes: Bytes moved between the device's memory and the kernel.
    """

    flops: float
    transcendentals: float
    bytes: float


class _Unknown(Exception):
    """The work of the kernel depends on data."""


@dataclass(frozen=True)
class _Ref:
    """A reference to a kernel's operand or result by its number, or -1 for other references."""

    number: int


@dataclass
class _Count:
    """Work at each point; shape ``(n,)`` or scalar."""

    flops: np.ndarray | float = 0.0
    transcendentals: np.ndarray | float = 0.0
    touched: dict[int, np.ndarray | float] = field(default_factory=dict)

    def add(self, other: _Count, times: np.ndarray | float = 1.0) -> None:
        """Add the work of a part that runs ``times`` times at each point."""
        self.flops = self.flops + times * other.flops
        self.transcendentals = self.transcendentals + times * other.transcendentals
        for number, size in other.touched.items():
            self.touched[number] = self.touched.get(number, 0.0) + times * size


def kernel_work(params: Mapping[str, JaxObject], *, streams: bool) -> KernelWork | None:
    """Count the work of a ``pallas_call``.

    Args:
        params: Parameters of its equation.
        streams: Whether blocks are moved in each step (TPUs) instead of being cached.

    Returns:
        The figures that the kernel declares (``cost_estimate``), and counts for the others;
        ``None`` if the work depends on data.
    """
    mapping, jaxpr = params["grid_mapping"], params["jaxpr"]
    grid = tuple(mapping.grid)
    stated = params.get("cost_estimate")
    known = [float(getattr(stated, key, 0) or 0) for key in STATED]
    try:
        if not all(isinstance(size, int) for size in grid):
            raise _Unknown
        counted: Sequence[float] = _walked(jaxpr, mapping, grid, streams=streams)
    # A JAX version with other primitives or parameters gives no count rather than a wrong one.
    except (_Unknown, AttributeError, IndexError, KeyError, TypeError, ValueError):
        if not any(own > 0 for own in known[:2]):
            return None
        counted = (0.0, 0.0, 0.0)
    return KernelWork(*(own if own > 0 else n for own, n in zip(known, counted, strict=True)))


def _walked(
    jaxpr: JaxObject, mapping: JaxObject, grid: tuple[int, ...], *, streams: bool
) -> KernelWork:
    total = prod(grid)
    if total > _POINTS:
        steps = np.sort(np.random.default_rng(0).choice(total, _POINTS, replace=False))
    else:
        steps = np.arange(total)
    ids = _indices(steps, grid)
    first = mapping.num_index_operands
    count = len(mapping.block_mappings)
    refs = [_Ref(n - first if first <= n < first + count else -1) for n in range(len(jaxpr.invars))]
    found = _Walk(grid, ids).visit(jaxpr, refs)[0]
    points = max(1, len(steps))

    def summed(own: np.ndarray | float) -> float:
        return float(np.broadcast_to(own, (points,)).sum()) * total / points

    moved = 0.0
    for number, block in enumerate(mapping.block_mappings):
        touched, whole = summed(found.touched.get(number, 0.0)), _nbytes(_array(block))
        # Caches keep what is read again. Of memory that is read explicitly, only reads count.
        moved += (_fetched(block, grid) if streams else 0.0) or min(touched, whole)
    return KernelWork(summed(found.flops), summed(found.transcendentals), moved)


class _Walk:
    """Walks a kernel's jaxpr at some points of its grid.

    Args:
        grid: Grid sizes.
        ids: Indices of the points for each grid dimension, shape ``(n,)``.
    """

    def __init__(self, grid: tuple[int, ...], ids: Sequence[np.ndarray]) -> None:
        self.grid, self.ids = grid, ids

    def visit(
        self, jaxpr: JaxObject, args: Sequence[object], consts: Sequence[object] = ()
    ) -> tuple[_Count, list[object]]:
        """Count the work of a jaxpr and evaluate its results.

        Args:
            jaxpr: An open or closed jaxpr.
            args: Scalars at all points, references, or ``None`` for unknown values.
            consts: The same for captured values.

        Raises:
            _Unknown: The length of a loop depends on data.
        """
        closed = [_scalar(value) for value in getattr(jaxpr, "consts", ())]
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        env: dict[object, object] = dict(zip(jaxpr.invars, args, strict=True))
        env.update(zip(jaxpr.constvars, [*closed, *consts], strict=False))
        done = _Count()

        def read(var: JaxObject) -> object:
            return _scalar(var.val) if hasattr(var, "val") else env.get(var)

        for eqn in jaxpr.eqns:
            inputs = [read(v) for v in eqn.invars]
            own, values = self._equation(eqn, inputs)
            done.add(own)
            env.update(zip(eqn.outvars, values, strict=False))
        return done, [read(v) for v in jaxpr.outvars]

    def _equation(self, eqn: JaxObject, inputs: list[object]) -> tuple[_Count, list[object]]:
        name, params = eqn.primitive.name, eqn.params
        unknown: list[object] = [None] * len(eqn.outvars)
        if name == "program_id":
            return _Count(), [self.ids[params["axis"]]]
        if name == "num_programs":
            return _Count(), [np.asarray(self.grid[params["axis"]])]
        if name == "cond":
            return self._branches(params["branches"], inputs)
        if name == "while":
            return self._while(params, inputs), unknown
        if name == "scan":
            return self._scan(params, inputs), unknown
        if name == "run_scoped":
            # Captured values are constants of this jaxpr, which has no constants itself.
            inner = params["jaxpr"]
            return self.visit(inner, [_Ref(-1)] * len(inner.invars), inputs)[0], unknown
        called = next((params[k] for k in _CALLED if hasattr(params.get(k), "eqns")), None)
        if called is not None:
            count = len(getattr(called, "jaxpr", called).invars)
            return self.visit(called, inputs[len(inputs) - count :])
        values = unknown
        if name in _SCALAR and all(isinstance(i, np.ndarray) for i in inputs):
            if eqn.outvars[0].aval.shape == () and eqn.outvars[0].aval.dtype.kind in "iub":
                values = [np.asarray(_SCALAR[name](*inputs))]
        elif inputs and isinstance(inputs[0], _Ref) and name not in (*_READS, *_WRITES):
            # Views of a reference.
            values = [inputs[0]] * len(unknown)
        return _own_work(eqn, inputs), values

    def _branches(
        self, branches: Sequence[JaxObject], inputs: list[object]
    ) -> tuple[_Count, list[object]]:
        which, *args = inputs
        ran = [self.visit(b, args) for b in branches]
        done = _Count()
        if isinstance(which, np.ndarray):
            index = np.clip(which.astype(int), 0, len(branches) - 1)
            for n, (own, _) in enumerate(ran):
                done.add(own, (index == n).astype(float))
            values = [
                np.choose(index, np.broadcast_arrays(*own)) if _all_arrays(own) else own[0]
                for own in zip(*(values for _, values in ran), strict=True)
            ]
            return done, values
        done.flops = _most([own.flops for own, _ in ran])
        done.transcendentals = _most([own.transcendentals for own, _ in ran])
        for number in {n for own, _ in ran for n in own.touched}:
            done.touched[number] = _most([own.touched.get(number, 0.0) for own, _ in ran])
        return done, [None] * len(ran[0][1])

    def _while(self, params: Mapping[str, JaxObject], inputs: list[object]) -> _Count:
        before, inside = params["cond_nconsts"], params["body_nconsts"]
        steps = _steps(params["body_jaxpr"].jaxpr, inside)
        state = inputs[before + inside :]
        cond, body = params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr
        env = dict(zip(cond.invars, [*inputs[:before], *state], strict=True))
        places = {var: n - before for n, var in enumerate(cond.invars)}
        # Captured values do not change.
        steps |= dict.fromkeys(range(-before, 0), 0)
        test = cond.eqns[-1] if cond.eqns else None
        if test is None or test.primitive.name not in _COMPARED:
            raise _Unknown
        sides = [_scalar(v.val) if hasattr(v, "val") else env.get(v) for v in test.invars]
        if not _all_arrays(sides):
            raise _Unknown
        # One side changes and the other one does not.
        moved = [0 if hasattr(v, "val") else steps.get(places[v]) for v in test.invars]
        if None in moved or moved.count(0) != 1 or len(cond.eqns) != 1:
            raise _Unknown
        away = _COMPARED[test.primitive.name](*sides)
        trips = np.maximum(0, np.ceil(away / abs(sum(own for own in moved if own))))
        return self._loop(body, inputs[before : before + inside], state, steps, trips)

    def _scan(self, params: Mapping[str, JaxObject], inputs: list[object]) -> _Count:
        body, consts, carry = params["jaxpr"].jaxpr, params["num_consts"], params["num_carry"]
        steps = _steps(body, consts)
        state = [*inputs[consts : consts + carry], *[None] * (len(inputs) - consts - carry)]
        trips = np.asarray(float(params["length"]))
        return self._loop(body, inputs[:consts], state, steps, trips)

    def _loop(
        self,
        body: JaxObject,
        consts: list[object],
        state: list[object],
        steps: Mapping[int, int],
        trips: np.ndarray,
    ) -> _Count:
        parts = _TRIPS if _has_branches(body) else 1
        done = _Count()
        for part in range(parts):
            trip = np.floor((part + 0.5) / parts * trips).astype(np.int64)
            now = [
                np.asarray(value + steps[n] * trip)
                if n in steps and isinstance(value, np.ndarray)
                else value
                if isinstance(value, _Ref)
                else None
                for n, value in enumerate(state)
            ]
            done.add(self.visit(body, [*consts, *now])[0], trips / parts)
        return done


def _own_work(eqn: JaxObject, inputs: Sequence[object]) -> _Count:
    """Count the work of one equation per point; scalar arithmetic is free."""
    name = eqn.primitive.name
    result: JaxObject = eqn.outvars[0].aval if eqn.outvars else None
    if name in _READS or name in _WRITES:
        # A swap returns the previous value of the same shape; an in-place sum returns nothing.
        number = inputs[0].number if inputs and isinstance(inputs[0], _Ref) else -1
        return _Count(touched={number: _nbytes(eqn.invars[1].aval if result is None else result)})
    if name == "dma_start":
        sizes = [_nbytes(v.aval) for v in eqn.invars if getattr(v.aval, "shape", ())]
        own = [i.number for i in inputs if isinstance(i, _Ref) and i.number >= 0]
        return _Count(touched=dict.fromkeys(own, min(sizes, default=0.0)))
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        depth = prod(eqn.invars[0].aval.shape[d] for d in contracted)
        return _Count(2.0 * prod(result.shape) * depth)
    if name.startswith(("reduce_", "arg", "cum")):
        return _Count(float(prod(eqn.invars[0].aval.shape)))
    size = float(prod(shape)) if (shape := getattr(result, "shape", ())) else 0.0
    arithmetic = name in named("kernel_arithmetic")
    return _Count(size * arithmetic, size * (name in named("kernel_transcendentals")))


def _steps(body: JaxObject, consts: int) -> dict[int, int]:
    """Return the increment per trip of each counter, by its position in the loop's state."""
    made = {eqn.outvars[0]: eqn for eqn in body.eqns if eqn.primitive.name in ("add", "sub")}
    found = {}
    for place, (start, end) in enumerate(zip(body.invars[consts:], body.outvars, strict=False)):
        eqn = None if hasattr(end, "val") else made.get(end)
        if eqn is not None and eqn.invars[0] is start and hasattr(eqn.invars[1], "val"):
            step = int(eqn.invars[1].val)
            found[place] = step if eqn.primitive.name == "add" else -step
        elif end is start:
            found[place] = 0
    return found


def _has_branches(jaxpr: JaxObject) -> bool:
    """Return whether a jaxpr has branches or loops at any depth."""
    opened: JaxObject = getattr(jaxpr, "jaxpr", jaxpr)
    eqns = list(opened.eqns) if opened is not None else []
    inner = [eqn.params[key] for eqn in eqns for key in _CALLED if key in eqn.params]
    return any(eqn.primitive.name in ("cond", "while") for eqn in eqns) or any(
        _has_branches(own) for own in inner if own is not None and hasattr(own, "eqns")
    )


def _fetched(block: JaxObject, grid: tuple[int, ...]) -> float:
    """Return the bytes of an operand's or result's blocks, moved whenever the block changes."""
    space = str(getattr(getattr(block, "transformed_block_aval", None), "memory_space", "")).lower()
    if any(word in space for word in ("any", "hbm", "semaphore", "smem")):
        return 0.0
    sizes = [
        own if isinstance(own, int) else getattr(own, "block_size", 1) for own in block.block_shape
    ]
    size = prod(n for n in sizes if n) * _array(block).dtype.itemsize
    total = prod(grid)
    if total > _STEPS:
        return float(size * total)
    ids = _indices(np.arange(total), grid)
    index = block.index_map_jaxpr
    count = len(getattr(index, "jaxpr", index).invars) - len(ids)
    _, places = _Walk(grid, ids).visit(index, [*ids, *[None] * count])
    if not _all_arrays(places):
        return float(size * total)
    path = np.stack([np.broadcast_to(own, (total,)) for own in places]) if places else None
    moves = 1 if path is None else 1 + int((path[:, 1:] != path[:, :-1]).any(axis=0).sum())
    return float(size * moves)


def _indices(steps: np.ndarray, grid: tuple[int, ...]) -> list[np.ndarray]:
    return [np.asarray(i, np.int64) for i in np.unravel_index(steps, grid)] if grid else []


def _array(block: JaxObject) -> JaxObject:
    """Return the array that a block is part of; its name depends on the JAX version."""
    return getattr(block, "array_aval", None) or block.array_shape_dtype


def _nbytes(of: JaxObject) -> float:
    dtype = getattr(of, "dtype", None)
    return float(prod(of.shape) * getattr(dtype, "itemsize", 4)) if dtype is not None else 0.0


def _scalar(value: object) -> np.ndarray | None:
    return np.asarray(value) if np.ndim(value) == 0 else None  # type: ignore[arg-type]


def _most(values: Sequence[np.ndarray | float]) -> np.ndarray:
    most: np.ndarray = np.max(np.stack(np.broadcast_arrays(*values)), axis=0)
    return most


def _all_arrays(values: Sequence[object]) -> TypeGuard[Sequence[np.ndarray]]:
    return all(isinstance(own, np.ndarray) for own in values)
