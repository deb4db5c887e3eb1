"""Expand ops that have no XLA:GPU kernel, as XLA's expanders do.

Scans become trees of short scans (ReduceWindowRewriter), top-k selections become sorts
(TopkDecomposer, unless TopkSpecializer has a kernel), stable sorts carry positions along
(StableSortExpander), max-pooling gradients become searches and scatters (SelectAndScatterExpander),
a scatter of one update becomes a dynamic-update-slice (ScatterExpander), and ragged products
multiply all rows for every group, with the rows of other groups set to zero (RaggedDotRewriter).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from ...cost.flops import SCAN, TPU_SCAN, scan_dimension
from ...ir.program import PARTS, Computation, Op, Program, TensorType, WindowDim
from .expanders import INDEX, cropped, one_per_row, philox, scattered
from .folding import padded, reshape, splat_node, spread
from .fourier import fourier
from .graph import Graph, Node, element, rewrite_all
from .reductions import adder, combiner

#: Largest k, shortest rows and types that TopkSpecializer's kernel accepts (found by compiling for
#: an H100 with JAX 0.10).
TOP, FROM, TOP_TYPES = 16, 1024, ("f32", "bf16")
#: Largest k of a TPU's kernel, and shortest row for each further element of it: found by compiling
#: 45 matrices for a v5e with JAX 0.10, of which two are slightly shorter. Other arrays are sorted.
TPU_TOP, TPU_FROM = 128, 100
#: Functions that are single HLO ops with GPU library versions: not expanded to polynomials.
_LIBRARY_FUNCTIONS = ("acos", "acosh", "asin", "asinh", "atanh", "cosh", "sinh")


def expand_ops(
    graph: Graph,
    program: Program,
    platform: str = "gpu",
    only: frozenset[str] = frozenset(),
) -> None:
    """Expand ops that the compiler has no kernel for.

    Args:
        graph: Changed in place, including its loops and branches.
        program: Receives the computations that the new ops call.
        platform: The target's platform. TPUs have kernels for ragged rows.
        only: Ops to expand; all of them if empty.
    """
    on_tpu = platform == "tpu"

    def rule(node: Node) -> Node | None:
        opcode = node.opcode
        if opcode == "get-tuple-element" and node.operands[0].opcode == "tuple":
            return node.operands[0].operands[int(node.attrs["index"])]
        if only and opcode not in only:
            return None
        if opcode == "select-and-scatter" and len(node.called) == 2 and not on_tpu:
            return scattered(node, program)
        if opcode == "scatter":
            chosen = one_per_row(node) if on_tpu else None
            return chosen or _single_update(node, program)
        if opcode == "slice":
            return cropped(node)
        if opcode == "reduce-window":
            return _scan(node, program, TPU_SCAN if on_tpu else SCAN)
        if opcode == "exponential" and node.type.dtype in PARTS:
            return _complex_exponential(node)
        if opcode == "ragged-dot":
            return _ragged(node, program, on_tpu)
        if opcode == "fft" and on_tpu:
            return fourier(node)
        if opcode == "topk":
            return _selected(node, program, platform)
        if not on_tpu:
            if opcode.removeprefix("chlo.") in _LIBRARY_FUNCTIONS:
                return replace(node, opcode=opcode.removeprefix("chlo."))
            if opcode == "bitcast-convert" and node.size == node.operands[0].size:
                return replace(node, opcode="bitcast")
            if opcode == "rng-bit-generator":
                return philox(node)
            if opcode == "custom-call" and node.attrs.get("target") == "ApproxTopK":
                return _approximate(node, program, platform)
        if opcode == "sort":
            return _stable(node, program, platform)
        return None

    rewrite_all(graph, rule)
    # The effects would still run the calls that were expanded.
    graph.effects = [n for n in graph.effects if n.attrs.get("target") != "ApproxTopK"]


def _single_update(node: Node, program: Program) -> Node | None:
    """Turn a scatter that overwrites a single slice into a dynamic-update-slice."""
    if node.is_tuple or len(node.operands) != 3 or node.attrs.get("input_batching_dims"):
        return None
    array, indices, updates = node.operands
    places = node.attrs["scatter_dims_to_operand_dims"]
    root = program.computations[node.called[0]].root_op
    overwrites = root.opcode == "parameter" and root.attrs["index"] == 1
    if not overwrites or not places or indices.size != len(places):
        return None
    start = {place: _scalar(indices, i) for i, place in enumerate(places)}
    inserted = node.attrs["inserted_window_dims"]
    sizes = iter([updates.type.shape[d] for d in node.attrs["update_window_dims"]])
    shape = tuple(1 if d in inserted else next(sizes) for d in range(len(array.type.shape)))
    zero = splat_node(0, TensorType(indices.type.dtype))
    starts = [start.get(d, zero) for d in range(len(shape))]
    attrs = {"dynamic_slice_sizes": shape}
    kind = (array.type._replace(shape=shape),)
    before = Node("dynamic-slice", [array, *starts], kind, attrs, source=node.source)
    inside = spread(_in_bounds(starts, program), (), shape, node.source)
    chosen = Node("select", [inside, reshape(updates, shape), before], kind, source=node.source)
    operands = [array, chosen, *starts]
    return Node("dynamic-update-slice", operands, node.results, source=node.source)


def _in_bounds(starts: list[Node], program: Program) -> Node:
    """Test whether an update is in bounds (if not, it is dropped): one small kernel."""
    columns = [reshape(start, (1,)) for start in starts]
    kind = TensorType(starts[0].type.dtype, (len(starts),))
    place = Node("concatenate", columns, (kind,), {"dimensions": (0,)})
    flags = (TensorType("pred", kind.shape),)
    # The actual limits of each dimension do not affect the cost.
    limits = ((splat_node(0, kind), "GE"), (splat_node(1, kind), "LE"))
    sides = [
        Node("compare", [place, limit], flags, {"direction": direction})
        for limit, direction in limits
    ]
    both = [Node("and", sides, flags), splat_node(True, TensorType("pred"))]
    dims = {"dimensions": (0,)}
    return Node("reduce", both, (TensorType("pred"),), dims, (combiner(program, "and", "pred"),))


def _scalar(indices: Node, i: int) -> Node:
    """Return one element of an index vector as a scalar."""
    flat = reshape(indices, (indices.size,))
    return reshape(_cut(flat, 0, i, i + 1), ())


def _complex_exponential(node: Node) -> Node:
    """Expand a complex exponential into real functions by Euler's formula, for each element."""
    kind = (TensorType(PARTS[node.type.dtype], node.type.shape),)
    real, angle = (Node(part, list(node.operands), kind) for part in ("real", "imag"))
    scale = Node("exponential", [real], kind)
    turned = [Node(part, [angle], kind) for part in ("cosine", "sine")]
    parts = [Node("multiply", [scale, one], kind) for one in turned]
    return Node("complex", parts, node.results, source=node.source)


def _scan(node: Node, program: Program, base: int = SCAN) -> Node | None:
    """Turn a cumulative sum, product or maximum over more than ``base`` elements into a tree."""
    window: tuple[WindowDim, ...] = node.attrs.get("window", ())
    if node.is_tuple or len(node.operands) != 2 or not node.called:
        return None
    along = scan_dimension(window, node.operands[0].type)
    if along is None or window[along].size <= base:
        return None
    return _Scan(node, along, window[along].pad_high > 0, program, base).of(node.operands[0])


class _Scan:
    """Build the tree of one scan.

    Args:
        node: The reduce-window over all elements before (after) each element.
        along: The scanned dimension.
        reverse: Whether the scan runs from the end.
        program: Contains the computation that combines two elements.
        base: Number of elements that one window combines.
    """

    def __init__(self, node: Node, along: int, reverse: bool, program: Program, base: int) -> None:
        self.node, self.along, self.reverse, self.program = node, along, reverse, program
        self.base = base

    def of(self, value: Node) -> Node:
        """Scan a value along the dimension."""
        shape, d, base = value.type.shape, self.along, self.base
        rows = -(-shape[d] // base)
        full = _at(shape, d, rows * base)
        parts = reshape(self._pad(value, 0, rows * base - shape[d]), _at(full, d, rows, base))
        inner = self._window(parts, d + 1, base, base - 1)
        last = 0 if self.reverse else base - 1
        ends = reshape(_cut(inner, d + 1, last, last + 1), _at(shape, d, rows))
        if rows <= base:
            before = self._window(ends, d, rows, rows)
        else:
            before = self._pad(self.of(ends), *((0, 1) if self.reverse else (1, 0)))
        start = 1 if self.reverse else 0
        before = _cut(before, d, start, start + rows)
        others = [i for i in range(len(inner.type.shape)) if i != d + 1]
        offset = spread(before, others, inner.type.shape, self.node.source)
        joined = applied(self.program, self.node.called[0], offset, inner)
        return _cut(reshape(joined, full), d, 0, shape[d])

    def _pad(self, value: Node, low: int, high: int) -> Node:
        config = [(0, 0, 0)] * len(value.type.shape)
        config[self.along] = (low, high, 0)
        return padded(value, config, self.node.operands[1], self.node.source)

    def _window(self, value: Node, d: int, size: int, pad: int) -> Node:
        low, high = (0, pad) if self.reverse else (pad, 0)
        window = [WindowDim(1)] * len(value.type.shape)
        window[d] = WindowDim(size, pad_low=low, pad_high=high)
        shape = _at(value.type.shape, d, value.type.shape[d] + 1 + pad - size)
        return Node(
            "reduce-window",
            [value, self.node.operands[1]],
            (TensorType(value.type.dtype, shape),),
            {"window": tuple(window)},
            self.node.called,
            source=self.node.source,
        )


def _at(shape: tuple[int, ...], d: int, *sizes: int) -> tuple[int, ...]:
    """Replace one dimension of a shape."""
    return (*shape[:d], *sizes, *shape[d + 1 :])


def _cut(value: Node, d: int, start: int, stop: int) -> Node:
    shape = value.type.shape
    if (start, stop) == (0, shape[d]):
        return value
    limits = [(0, size, 1) for size in shape]
    limits[d] = (start, stop, 1)
    kind = TensorType(value.type.dtype, _at(shape, d, stop - start))
    return Node("slice", [value], (kind,), {"slice": tuple(limits)}, source=value.source)


def applied(program: Program, name: str, *arguments: Node) -> Node:
    """Apply a computation on scalars elementwise to arrays of one shape."""
    values: list[Node] = []
    shape = arguments[0].type.shape
    computation = program.computations[name]
    for op in computation.ops:
        kinds = tuple(TensorType(t.dtype, shape) for t in op.results)
        inputs = [values[i] for i in op.operands]
        if op.opcode == "parameter":
            values.append(arguments[int(op.attrs["index"])])
        elif op.opcode == "constant":
            values.append(splat_node(op.attrs.get("value"), kinds[0], op.source))
        elif op.opcode in ("broadcast", "reshape"):
            values.append(inputs[0])
        elif op.opcode == "call":
            values.append(applied(program, op.called[0], *inputs))
        else:
            values.append(Node(op.opcode, inputs, kinds, dict(op.attrs), source=op.source))
    return values[computation.root]


def _selected(node: Node, program: Program, platform: str) -> Node | None:
    """Call the target's top-k kernel, or sort the rows; ``None`` for a TPU's own kernel."""
    values, count = node.operands[0], node.type.shape[-1]
    shape, dtype = values.type.shape, values.type.dtype
    if platform == "tpu":
        fast = len(shape) == 2 and dtype in TOP_TYPES and count <= TPU_TOP
        if fast and shape[-1] >= TPU_FROM * (count - 1):
            return None
        fast = False
    elif platform == "cpu":
        # XLA:CPU's TopkRewriter.
        fast, target = dtype == "f32", "TopK"
    else:
        fast = count <= TOP and shape[-1] >= FROM and dtype in TOP_TYPES
        target = "__gpu$TopK"
    if not fast:
        return _largest(node, program, platform)
    return replace(node, opcode="custom-call", attrs={"target": target}, is_tuple=True)


def _largest(node: Node, program: Program, platform: str, along: int = -1, count: int = 0) -> Node:
    """Find the largest elements of each row by sorting the rows."""
    values = node.operands[0]
    shape, dtype = values.type.shape, values.type.dtype
    along %= len(shape)
    count = count or node.type.shape[along]
    kind = TensorType(INDEX, shape)
    places = Node("iota", [], (kind,), {"dimensions": (along,)}, source=node.source)
    ordered = Node(
        "sort",
        [values, places],
        (values.type, kind),
        {"dimension": along, "is_stable": True},
        (_comparator(program, (dtype, INDEX)),),
        is_tuple=True,
        source=node.source,
    )
    ordered = _stable(ordered, program, platform) or ordered
    parts = [_cut(element(ordered, i), along, 0, count) for i in range(2)]
    return Node("tuple", parts, node.results, is_tuple=True, source=node.source)


_TOP_K = re.compile(r"\btop_k = (\d+)")
_ALONG = re.compile(r"\breduction_dim = (\d+)")


def _approximate(node: Node, program: Program, platform: str) -> Node | None:
    """Expand an approximate top-k into a sort if the target lacks it (``is_fallback``)."""
    config = str(node.attrs.get("backend_config", ""))
    count, along = _TOP_K.search(config), _ALONG.search(config)
    if count is None or along is None or len(node.operands) < 2:
        return None
    return _largest(node, program, platform, int(along[1]), int(count[1]))


def _stable(node: Node, program: Program, platform: str) -> Node | None:
    """Make a sort stable by also sorting positions, which break ties."""
    along = int(node.attrs.get("dimension", 0))
    if not node.attrs.get("is_stable"):
        return None
    kind = TensorType(INDEX, node.operands[0].type.shape)
    # Positions that are sorted anyway, as for argsort, are not sorted twice.
    tie = next((i for i, o in enumerate(node.operands) if _counts(o, along)), len(node.operands))
    operands, results = list(node.operands), list(node.results)
    if tie == len(operands):
        attrs = {"dimensions": (along,)}
        operands.append(Node("iota", [], (kind,), attrs, source=node.source))
        results.append(kind)
    made = Node(
        "sort",
        operands,
        tuple(results),
        {**node.attrs, "is_stable": False},
        _spelled_out(program, node.called, tie) if platform == "tpu" else node.called,
        is_tuple=len(results) > 1,
        source=node.source,
    )
    return made if node.is_tuple else element(made, 0)


def _counts(node: Node, along: int) -> bool:
    """Return whether a node is an iota of 32-bit positions along a dimension."""
    return (
        node.opcode == "iota"
        and node.attrs.get("dimensions") == (along,)
        and (node.type.dtype == INDEX)
    )


def _comparator(program: Program, dtypes: Iterable[str]) -> str:
    """Make a computation that returns whether the first of two values is larger."""
    kinds = [TensorType(dtype) for dtype in dtypes for _ in range(2)]
    name = f"opcast.greater.{'.'.join(t.dtype for t in kinds[::2])}"
    ops = [Op(f"{name}.p{i}", "parameter", (), (t,), {"index": i}) for i, t in enumerate(kinds)]
    order = {"direction": "GT", "type": "TOTALORDER"}
    ops.append(Op(f"{name}.c", "compare", (0, 1), (TensorType("pred"),), order))
    program.computations.setdefault(name, Computation(name, ops, len(kinds)))
    return name


def _spelled_out(program: Program, called: tuple[str, ...], tie: int) -> tuple[str, ...]:
    """Return a comparator of TPUs: total orders of floats as integers, ties by an operand.

    Args:
        program: Receives it.
        called: The comparator.
        tie: Number of the operand of positions, which may be a new one.
    """
    if not called:
        return called
    own = program.computations[called[0]]
    name = f"{own.name}.ties{tie}"
    ops: list[Op] = []

    def add(opcode: str, dtype: str, *operands: int, **attrs: object) -> int:
        ops.append(Op(f"{name}.{len(ops)}", opcode, operands, (TensorType(dtype),), attrs))
        return len(ops) - 1

    def as_integer(value: int) -> int:
        bits = add("bitcast-convert", INDEX, value)
        negative = add("compare", "pred", bits, add("constant", INDEX, value=0), direction="LT")
        mask = add("constant", INDEX, value=2**31 - 1)
        return add("select", INDEX, negative, add("xor", INDEX, mask, bits), bits)

    places: list[int] = []
    for op in own.ops:
        operands = tuple(places[i] for i in op.operands)
        if op.attrs.get("type") == "TOTALORDER" and ops[operands[0]].type.dtype.startswith(
            ("f", "b")
        ):
            operands = tuple(as_integer(i) for i in operands)
        ops.append(replace(op, operands=operands))
        places.append(len(ops) - 1)
    root = places[own.root]
    known = {int(o.attrs["index"]): i for i, o in enumerate(ops) if o.opcode == "parameter"}
    numbers = (2 * tie, 2 * tie + 1)
    sides = [known[n] if n in known else add("parameter", INDEX, index=n) for n in numbers]
    first = add("compare", "pred", *sides, direction="LT")
    swapped = replace(ops[root], name=f"{name}.swapped", operands=ops[root].operands[::-1])
    ops.append(swapped)
    equal = add("compare", "pred", root, len(ops) - 1, direction="EQ")
    last = add("select", "pred", equal, first, root)
    program.computations.setdefault(name, Computation(name, ops, last))
    return (name,)


def _ragged(node: Node, program: Program, on_tpu: bool) -> Node | None:
    """Multiply the rows of each group by the group's weights, with all other rows set to zero."""
    lhs, rhs, sizes = node.operands
    get = node.attrs.get
    contracted = {side: tuple(get(f"{side}_contracting_dims", ())) for side in ("lhs", "rhs")}
    batch = {side: tuple(get(f"{side}_batch_dims", ())) for side in ("lhs", "rhs")}
    (rows,) = get("lhs_ragged_dims") or (0,)
    kept = {k: v for k, v in node.attrs.items() if not k.endswith("_dims")}
    if rows in batch["lhs"]:
        names = {f"{s}_contracting_dims": contracted[s] for s in contracted}
        names |= {f"{s}_batch_dims": batch[s] for s in batch}
        return Node("dot", [lhs, rhs], node.results, {**kept, **names}, source=node.source)
    # Group sizes of batched ragged products have batch dimensions: not expanded.
    if len(sizes.type.shape) != 1 or (on_tpu and rows not in contracted["lhs"]):
        return None
    bounds = _bounds(sizes, program)
    moved = {side: tuple(d + 1 for d in contracted[side]) for side in contracted}
    shifted = {side: tuple(d + 1 for d in batch[side]) for side in batch}
    wide = _masked(lhs, rows, bounds)
    if rows in contracted["lhs"]:
        other = contracted["rhs"][contracted["lhs"].index(rows)]
        operands = [wide, _masked(rhs, other, bounds)]
        for side in ("lhs", "rhs"):
            shifted[side] = (0, *shifted[side])
    else:
        (group,) = get("rhs_group_dims") or (0,)
        operands = [wide, rhs]
        # Group dimension first, so that weights with a leading group dimension stay in place.
        moved = {
            "lhs": (0, *moved["lhs"]),
            "rhs": (group, *contracted["rhs"]),
        }
        shifted["rhs"] = batch["rhs"]
    names = {f"{s}_contracting_dims": moved[s] for s in moved}
    names |= {f"{s}_batch_dims": shifted[s] for s in shifted}
    return Node("dot", operands, node.results, {**kept, **names}, source=node.source)


def _bounds(sizes: Node, program: Program) -> tuple[Node, Node]:
    """Return the first row of each group, and the first row of the next group."""
    count = sizes.type.shape[0]
    dtype = sizes.type.dtype
    zero = splat_node(0, TensorType(dtype))
    window = (WindowDim(count, pad_low=count - 1),)
    ends = Node(
        "reduce-window", [sizes, zero], sizes.results, {"window": window}, (adder(program, dtype),)
    )
    ends = _scan(ends, program) or ends
    return _cut(padded(ends, [(1, 0, 0)], zero, None), 0, 0, count), ends


def _masked(value: Node, rows: int, bounds: tuple[Node, Node]) -> Node:
    """Repeat a value for each group, with the rows of other groups set to zero."""
    shape = (*bounds[0].type.shape, *value.type.shape)
    whole = TensorType(bounds[0].type.dtype, shape)
    flags = TensorType("pred", shape)
    place = Node("iota", [], (whole,), {"dimensions": (rows + 1,)})
    first, last = (spread(bound, (0,), shape, value.source) for bound in bounds)
    inside = Node(
        "and",
        [
            Node("compare", [first, place], (flags,), {"direction": "LE"}),
            Node("compare", [place, last], (flags,), {"direction": "LT"}),
        ],
        (flags,),
    )
    kind = TensorType(value.type.dtype, shape)
    wide = spread(value, tuple(range(1, len(shape))), shape, value.source)
    return Node("select", [inside, wide, splat_node(0, kind)], (kind,), source=value.source)
