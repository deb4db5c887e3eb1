"""Give in-place updates the dimension order of the product that reads them.

XLA's layout assignment gives the operands of a product the layout that it needs, and propagates it
to the ops that compute them. The array that an update writes to has the layout of its result.
Program arguments and results keep their layouts, so they are transposed before and after.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from ...ir.op_table import UPDATES
from .clusters import PRODUCTS, Cluster, Clusters, Dependences, owner, source_of, written
from .folding import inverse, is_elementwise, reshape, splat, spread, transposed
from .graph import Graph, Node, rewrite
from .loops import copy_start

#: Updates whose dimensions can be permuted.
_TURNED = UPDATES & {"dynamic-update-slice", "scatter"}
#: Ops, besides those of :func:`_above`, whose operand has the order of the result in a loop.
_SEEN_THROUGH = frozenset(("dynamic-slice", "reshape"))

#: Dimensions, outermost first.
Order = tuple[int, ...]


def turn_updates(graph: Graph) -> None:
    """Move transposes that products need above the updates that the products read.

    Args:
        graph: Products are canonical
            (:func:`opcast.features.lowering.fused.products.canonical_dots`); loops and branches are
            not entered.
    """
    nodes = graph.nodes()
    # The first product determines the order, as in XLA's GpuLayoutAssignment.
    wanted: dict[int, Order] = {}
    for node in nodes:
        if node.opcode in PRODUCTS:
            for operand in node.operands:
                _want(operand, wanted)
    for node in nodes:  # an update of an update has its order
        if _is_update(node) and id(node.operands[0]) in wanted:
            wanted.setdefault(id(node), wanted[id(node.operands[0])])
    wanted = {key: order for key, order in wanted.items() if list(order) != sorted(order)}
    below = {id(n) for n in nodes if n.opcode == "transpose" and id(_made_of(n)) in wanted}

    def rule(node: Node) -> Node | None:
        order = wanted.get(id(node))
        if order is not None:
            return transposed(_turned_update(node, order), inverse(order), node.source)
        return _turned(node.operands[0], node.attrs["dimensions"]) if id(node) in below else None

    rewrite(graph, rule)


def turn_loop_state(graph: Graph) -> None:
    """Give arrays that loops update in place the order of the products that read them.

    Caches stacked by layer are transposed once before and once after the loop: unlike the layout of
    arguments and results, XLA can choose the layout of loop state.

    Args:
        graph: The entry; its products may have any dimension order. Nested loops are left
            unchanged.
    """
    nodes = graph.nodes()
    for loop in nodes:
        if loop.opcode != "while" or len(loop.graphs) != 2:
            continue
        body, results = loop.graphs[1], list(loop.results)
        for i, order in _state_orders(body).items():
            for inner in loop.graphs:
                _read_turned(inner, inner.parameters[i], order)
            body.outputs[i] = transposed(body.outputs[i], order)
            loop.operands[i] = transposed(loop.operands[i], order, loop.source)
            results[i] = body.parameters[i].type
            for node in nodes:
                is_element = node.opcode == "get-tuple-element" and node.operands[0] is loop
                if is_element and node.attrs["index"] == i:
                    _read_turned(graph, node, order)
        loop.results = tuple(results)
        rewrite(body, _above_transpose)


def _state_orders(body: Graph) -> dict[int, Order]:
    """Find the orders in which products read updated loop state, by its index."""
    places = {id(node): i for i, node in enumerate(body.parameters)}
    orders: dict[int, Order] = {}
    reached: dict[int, Order] = {}
    for dot in [node for node in body.nodes() if node.opcode == "dot"]:
        for side in range(2):
            updated = False
            for node, order in _way_up(dot.operands[side], _read_order(dot, side), _SEEN_THROUGH):
                if id(node) in reached:
                    break
                reached[id(node)] = order
                i = places.get(id(node), -1)
                if i >= 0 and (updated or body.outputs[i] is not node):
                    orders[i] = order
                updated |= _is_update(node)
    for i, output in enumerate(body.outputs):
        # Arrays of which each iteration writes a slice, such as the new cache of a layer.
        if _is_update(output) and output.operands[0] is body.parameters[i] and i not in orders:
            part = output.operands[1]
            if id(source_of(part)) in reached:
                whole = source_of(part)
                orders[i] = _without_ones(reached[id(whole)], whole.type.shape, part.type.shape)
    return {i: order for i, order in orders.items() if list(order) != sorted(order)}


def _read_order(dot: Node, side: int) -> Order:
    """Return the order in which a product reads an operand: batch dimensions first.

    A matrix multiplied by a vector is summed along its rows, as in XLA's
    NormalizeDotOperandToBatchMajorAndContractingMinor.
    """
    keys = ("lhs", "rhs")
    batch, summed = (
        [dot.attrs.get(f"{key}_{kind}_dims", ()) for key in keys]
        for kind in ("batch", "contracting")
    )
    shape = dot.operands[1 - side].type.shape
    taken = (*batch[1 - side], *summed[1 - side])
    vector = all(size == 1 for d, size in enumerate(shape) if d not in taken)
    inner = [d for d in range(len(dot.operands[side].type.shape)) if d not in batch[side]]
    if vector:
        inner = [*(d for d in inner if d not in summed[side]), *summed[side]]
    return (*batch[side], *inner)


def _without_ones(order: Order, shape: Sequence[int], before: Sequence[int]) -> Order:
    """Return the order across a reshape that only adds or drops ones; empty for other reshapes."""
    kept, left = ([d for d, size in enumerate(s) if size != 1] for s in (shape, before))
    if [shape[d] for d in kept] != [before[d] for d in left]:
        return ()
    ones = [d for d, size in enumerate(before) if size == 1]
    return (*ones, *(left[kept.index(d)] for d in order if d in kept))


def _read_turned(graph: Graph, node: Node, order: Order) -> None:
    """Permute the dimensions of a value, and give its readers a transpose back."""
    back = {"dimensions": inverse(order)}
    view = Node("transpose", [node], node.results, back, source=node.source)
    for user in graph.nodes():
        user.operands = [view if operand is node else operand for operand in user.operands]
    graph.outputs = [view if output is node else output for output in graph.outputs]
    node.results = (node.type._replace(shape=tuple(node.type.shape[d] for d in order)),)


def _above_transpose(node: Node) -> Node | None:
    """Move an update, a slice, or a reshape that drops ones above the transpose of its operand."""
    first = node.operands[0] if node.operands else node
    if first.opcode != "transpose":
        return None
    order = inverse(first.attrs["dimensions"])
    if _is_update(node):
        return transposed(_turned_update(node, order), inverse(order), node.source)
    if node.opcode == "reshape":
        order = _without_ones(order, first.type.shape, node.type.shape)
    elif node.opcode != "dynamic-slice":
        return None
    if not order:
        return None
    shape = tuple(node.type.shape[d] for d in order)
    if node.opcode == "reshape":
        return transposed(reshape(first.operands[0], shape, node), inverse(order), node.source)
    starts = [node.operands[1 + d] for d in order]
    kind = node.type._replace(shape=shape)
    attrs = {**node.attrs, "dynamic_slice_sizes": shape}
    made = Node(node.opcode, [first.operands[0], *starts], (kind,), attrs, source=node.source)
    return transposed(made, inverse(order), node.source)


def _is_update(node: Node) -> bool:
    return node.opcode in _TURNED and not node.is_tuple


def _above(node: Node) -> Node | None:
    """Return the operand whose layout determines an op's layout; ``None`` if there is none."""
    if node.opcode == "transpose" or is_elementwise(node) or _is_update(node):
        return max(node.operands, key=lambda operand: operand.size, default=None)
    return None


def _made_of(node: Node) -> Node | None:
    """Return the update that leads to a value by elementwise ops and transposes, if any."""
    found: Node | None = node
    while found is not None and not _is_update(found):
        found = _above(found)
    return found


def _way_up(
    node: Node, order: Order, through: Collection[str] = ()
) -> Iterator[tuple[Node, Order]]:
    """Yield a value and the values it derives from, each with its corresponding dimension order.

    Args:
        node: The value, which comes first.
        order: The dimension order of the value.
        through: Ops, besides those of :func:`_above`, whose operand has the order of the result.
    """
    found: Node | None = node
    while found is not None:
        yield found, order
        if found.opcode == "transpose":
            order = tuple(found.attrs["dimensions"][d] for d in order)
        elif found.opcode == "reshape" and "reshape" in through:
            order = _without_ones(order, found.type.shape, found.operands[0].type.shape)
        seen_through = order and found.opcode in through
        found = found.operands[0] if seen_through else _above(found)


def _want(operand: Node, wanted: dict[int, Order]) -> None:
    """Record the order in which a product reads each update that its operand derives from.

    A reshape in between keeps its layout, and so do the values above it.
    """
    start = source_of(operand)
    for node, order in _way_up(start, tuple(range(len(start.type.shape)))):
        if _is_update(node) and wanted.setdefault(id(node), order) != order:
            return


def _turned(node: Node, order: Sequence[int]) -> Node:
    """Transpose a value, if possible above the ops that compute it."""
    if node.opcode == "transpose":
        dims = node.attrs["dimensions"]
        return transposed(node.operands[0], [dims[d] for d in order], node.source)
    shape = tuple(node.type.shape[d] for d in order)
    if node.opcode == "broadcast":
        dims = [list(order).index(d) for d in node.attrs["dimensions"]]
        return spread(node.operands[0], dims, shape, node.source)
    if is_elementwise(node) and not node.called:
        operands = [_turned(o, order) if o.type.shape else o for o in node.operands]
        kind = node.type._replace(shape=shape)
        return Node(node.opcode, operands, (kind,), dict(node.attrs), source=node.source)
    return transposed(node, order)


def _turned_update(node: Node, order: Sequence[int]) -> Node:
    """Apply an update to the array with its dimensions permuted."""
    kind = node.type._replace(shape=tuple(node.type.shape[d] for d in order))
    array = _turned(node.operands[0], order)
    if node.opcode == "dynamic-update-slice":
        part, *starts = node.operands[1:]
        operands = [array, _turned(part, order), *(starts[d] for d in order)]
        return Node(node.opcode, operands, (kind,), dict(node.attrs), source=node.source)
    place = {d: new for new, d in enumerate(order)}
    attrs = dict(node.attrs)
    names = ("inserted_window_dims", "scatter_dims_to_operand_dims", "input_batching_dims")
    for name in names:
        if name in attrs:
            attrs[name] = tuple(place[d] for d in attrs[name])
    attrs["inserted_window_dims"] = tuple(sorted(attrs["inserted_window_dims"]))
    # The window dimensions of an update are in the order of the array's dimensions.
    gone = {*node.attrs["inserted_window_dims"], *node.attrs.get("input_batching_dims", ())}
    kept = [d for d in range(len(order)) if d not in gone]
    window = dict(zip(kept, node.attrs["update_window_dims"], strict=True))
    moved = list(range(len(node.operands[2].type.shape)))
    for to, d in zip(kept, [d for d in order if d in window], strict=True):
        moved[window[to]] = window[d]
    operands = [array, node.operands[1], _turned(node.operands[2], moved)]
    return Node(node.opcode, operands, (kind,), attrs, node.called, source=node.source)


def copy_read_later(clusters: Clusters) -> None:
    """Insert copies of arrays that kernels update in place but others read later.

    Readers run before the update if possible. Readers whose results only the caller uses run last
    if the program then needs less memory: of the orders that XLA's DefaultMemoryScheduler tries,
    the list scheduler's and the depth-first one do this.

    Args:
        clusters: Kernels of the entry after fusion.
    """
    needs = Dependences(clusters)
    open_: list[tuple[Cluster, Node, list[Cluster]]] = []
    read_later: list[tuple[Cluster, Node]] = []
    for cluster in clusters.all():
        for node in cluster.roots:
            for source in [source_of(node.operands[i]) for i in written(node)]:
                readers = clusters.readers.get(id(source), {}).values()
                others = [r for r in readers if r is not cluster and not needs.reaches(cluster, r)]
                later = any(needs.reaches(r, cluster) for r in others)
                if splat(source) is None and (later or id(source) in clusters.kept):
                    read_later.append((cluster, node))
                elif others and not any(map(clusters.users, others)):
                    open_.append((cluster, node, others))
    if open_:
        order = _depth_first(clusters)
        early, late = dict(order), dict(order)
        for cluster, _, others in open_:
            for i, other in enumerate(others):
                early[id(other)] = order[id(cluster)] - 0.5
                late[id(other)] = len(order) + i
        if _peak(clusters, late) < _peak(clusters, early):
            read_later += [(cluster, node) for cluster, node, _ in open_]
    for cluster, node in read_later:
        for i in written(node):
            copy_start(clusters, cluster, node, i)


def _depth_first(clusters: Clusters) -> dict[int, float]:
    """Number the kernels, by ``id``, with each as late as its first reader allows."""
    order: dict[int, float] = {}
    for end in [c for c in clusters.all() if not clusters.users(c)]:
        stack = [end]
        while stack:
            missing = [c for c in clusters.producers(stack[-1]) if id(c) not in order]
            if missing:
                stack += missing[::-1]
            else:
                order.setdefault(id(stack.pop()), float(len(order)))
    return order


def _peak(clusters: Clusters, order: Mapping[int, float]) -> int:
    """Return the peak bytes of kernel results; in-place updates are not counted."""
    kernels = sorted(clusters.all(), key=lambda c: order[id(c)])
    kept = {id(_array(node)) for node in clusters.graph.outputs}
    last: dict[int, int] = {}
    for i, cluster in enumerate(kernels):
        for node in cluster.inputs:
            last[id(_array(node))] = i
    freed: dict[int, int] = {}
    peak = now = 0
    for i, cluster in enumerate(kernels):
        for node in cluster.roots:
            if _array(node) is node:
                now += node.nbytes
                if id(node) not in kept and id(node) in last:
                    freed[last[id(node)]] = freed.get(last[id(node)], 0) + node.nbytes
        peak = max(peak, now)
        now -= freed.get(i, 0)
    return peak


def _array(node: Node) -> Node:
    """Return the node that allocates the memory of a value."""
    node = owner(node)
    while node.opcode in UPDATES and not node.is_tuple:
        node = owner(node.operands[0])
    return node
