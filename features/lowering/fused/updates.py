"""Updates in place in the order of the product that reads them.

XLA's layout assignment gives the operands of a product the layout that it needs, and what leads to
them follows. The array that an update writes to has the layout of its result. An argument and a
result of the program keep their own layouts, so that they are transposed before and behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...ir.op_table import UPDATES
from .clusters import PRODUCTS, Cluster, Clusters, Dependences, owner, source_of, written
from .folding import is_elementwise, splat, spread, transposed
from .graph import Graph, Node, rewrite
from .loops import copy_start

#: Updates whose dimensions can change places.
_TURNED = UPDATES & {"dynamic-update-slice", "scatter"}


def turn_updates(graph: Graph) -> None:
    """Move transposes that products need above the updates that they read.

    Args:
        graph: Products are canonical
            (:func:`opcast.features.lowering.fused.products.canonical_dots`); loops and branches are
            not entered.
    """
    nodes = graph.nodes()
    # The first product decides, as in XLA's GpuLayoutAssignment.
    wanted: dict[int, tuple[int, ...]] = {}
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
            back = sorted(range(len(order)), key=order.__getitem__)
            return transposed(_turned_update(node, order), back, node.source)
        return _turned(node.operands[0], node.attrs["dimensions"]) if id(node) in below else None

    rewrite(graph, rule)


def _is_update(node: Node) -> bool:
    return node.opcode in _TURNED and not node.is_tuple


def _above(node: Node) -> Node | None:
    """The operand that has the layout of an op's result; ``None`` if none has."""
    if node.opcode == "transpose" or is_elementwise(node) or _is_update(node):
        return max(node.operands, key=lambda operand: operand.size, default=None)
    return None


def _made_of(node: Node) -> Node | None:
    """The update that a value is made of by element-wise ops and transposes, if any."""
    found: Node | None = node
    while found is not None and not _is_update(found):
        found = _above(found)
    return found


def _want(operand: Node, wanted: dict[int, tuple[int, ...]]) -> None:
    """Note the order in which a product reads each update that its operand comes from.

    A reshape in front of them keeps its own layout, and so does what is above it.
    """
    node: Node | None = (start := source_of(operand))
    order = tuple(range(len(start.type.shape)))
    while node is not None:
        if node.opcode == "transpose":
            dims = node.attrs["dimensions"]
            order = tuple(dims[d] for d in order)
        elif _is_update(node) and wanted.setdefault(id(node), order) != order:
            return
        node = _above(node)


def _turned(node: Node, order: Sequence[int]) -> Node:
    """Make the transpose of a value, above what it is made by where that is possible."""
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
    """Update the array in another order of its dimensions."""
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
    # The dimensions of an update's window follow those of the array.
    gone = {*node.attrs["inserted_window_dims"], *node.attrs.get("input_batching_dims", ())}
    kept = [d for d in range(len(order)) if d not in gone]
    window = dict(zip(kept, node.attrs["update_window_dims"], strict=True))
    moved = list(range(len(node.operands[2].type.shape)))
    for to, d in zip(kept, [d for d in order if d in window], strict=True):
        moved[window[to]] = window[d]
    operands = [array, node.operands[1], _turned(node.operands[2], moved)]
    return Node(node.opcode, operands, (kind,), attrs, node.called, source=node.source)


def copy_read_later(clusters: Clusters) -> None:
    """Add the copies of arrays that kernels update in place and others read later.

    Readers come before the update where they can. Those whose results only the caller takes come
    last if the program then needs less memory: of the orders that XLA's DefaultMemoryScheduler
    tries, such are the list scheduler's and the depth-first one.

    Args:
        clusters: Kernels of the entry, fused already.
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
    """Places of kernels, by ``id``, if each comes as late as its first reader allows."""
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
    """Most bytes that the results of kernels take at once, updates in place not counted."""
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
    """The node that makes the memory of a value."""
    node = owner(node)
    while node.opcode in UPDATES and not node.is_tuple:
        node = owner(node.operands[0])
    return node
