"""Rewrite loops and branches.

Loop state that nobody reads is dropped (XLA's WhileLoopSimplifier), and state that is permuted is
copied (CopyInsertion). A conditional without loops or library calls computes both branches and
selects the result, as XLA's ConditionalSimplifier does if both branches are cheap.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from dataclasses import replace

from ...ir.op_table import UPDATES, ops_with
from ...ir.program import TensorType
from .clusters import (
    FREE,
    MAX_OPERANDS,
    PRODUCTS,
    Cluster,
    Clusters,
    Dependences,
    owner,
    source_of,
    written,
)
from .folding import is_elementwise, splat, splat_node, spread
from .graph import Graph, Node, rewrite, topological


def drop_dead_state(graph: Graph) -> None:
    """Remove the updates of loop state that is read only by its own next value."""
    nodes = graph.nodes()
    used: dict[int, set[int]] = {}
    for node in nodes:
        if node.opcode == "get-tuple-element":
            used.setdefault(id(node.operands[0]), set()).add(int(node.attrs["index"]))
    for node in nodes:
        if node.opcode == "while" and len(node.graphs) == 2:
            _drop(node.graphs, set(used.get(id(node), set())))
        for inner in node.graphs:
            drop_dead_state(inner)


def _drop(graphs: list[Graph], live: set[int]) -> None:
    condition, body = graphs
    places = {id(node): i for i, node in enumerate(body.parameters)}
    # State that the condition reads determines the trip count, so it is live.
    tested = {id(node) for node in topological(condition.outputs)}
    live |= {i for i, node in enumerate(condition.parameters) if id(node) in tested}
    # Backwards from the live elements: an element is live if the next value of a live one needs it.
    waiting = list(live)
    while waiting:
        index = waiting.pop()
        if index >= len(body.outputs):
            continue
        for node in topological([body.outputs[index]]):
            place = places.get(id(node))
            if place is not None and place not in live:
                live.add(place)
                waiting.append(place)
    for index in range(len(body.outputs)):
        if index not in live:
            # Passing the element through costs nothing and keeps the shape of the state.
            body.outputs[index] = body.parameters[index]


def merge_counters(graph: Graph) -> None:
    """Merge loop counters: elements of the state with equal start and step become one."""
    nodes = graph.nodes()
    loops = [node for node in nodes if node.opcode == "while" and len(node.graphs) == 2]
    for loop in loops:
        same = _equal_counters(loop)
        for inner in loop.graphs:
            replaced = {id(inner.parameters[j]): inner.parameters[i] for j, i in same.items()}
            for node in topological(inner.outputs):
                node.operands = [replaced.get(id(o), o) for o in node.operands]
            merge_counters(inner)
        for node in nodes:
            if node.opcode == "get-tuple-element" and node.operands[0] is loop:
                index = int(node.attrs["index"])
                node.attrs["index"] = same.get(index, index)


def _equal_counters(loop: Node) -> dict[int, int]:
    """Map each element of the state that equals an earlier one to that one, by index."""
    body = loop.graphs[1]
    known: dict[object, int] = {}
    same: dict[int, int] = {}
    for i, output in enumerate(body.outputs):
        parameter = body.parameters[i]
        if output.opcode != "add" or parameter not in output.operands:
            continue
        steps = [splat(o) for o in output.operands if o is not parameter]
        start = splat(loop.operands[i])
        if parameter.type.shape or len(steps) != 1 or steps[0] is None or start is None:
            continue
        # Same start, same step, same type: equal in every iteration.
        first = known.setdefault((parameter.type, steps[0], start), i)
        if first != i:
            same[i] = first
    return same


def copy_loop_state(graph: Graph, donated: Collection[int] = ()) -> None:
    """Insert the copies with which loops keep their state in place.

    Values that move within the state need copies: one more than there are values in each cycle. A
    start value that is an argument, a constant or read by others is copied, too.

    Args:
        graph: Changed in place.
        donated: See :func:`copy_overwritten`.
    """
    nodes = graph.nodes()
    free = _donated(graph, donated)
    readers: dict[int, int] = {}
    for node in nodes:
        for operand in node.operands:
            key = id(source_of(operand))
            readers[key] = readers.get(key, 0) + 1
    for node in nodes:
        if node.opcode == "while" and len(node.graphs) == 2:
            body = node.graphs[1]
            _copy_exchanges(body)
            for i, output in enumerate(body.outputs):
                start = node.operands[i]
                source = source_of(start)
                # A loop overwrites its state, so the state must not share memory with other values.
                given = _is_given(source) and id(source) not in free
                shared = given or readers[id(source)] > 1
                if shared and output is not body.parameters[i]:
                    node.operands[i] = _own_start(start, node)


def copy_overwritten(clusters: Clusters, donated: Collection[int] = ()) -> None:
    """Insert copies of entry arguments that kernels update in place.

    The caller keeps its arguments, so an update of one starts from a copy. Updates inside kernels
    that compute another result from them need none.

    Args:
        clusters: Kernels of the entry after fusion.
        donated: Positions of parameters whose memory a result reuses: these may be overwritten.
    """
    free = _donated(clusters.graph, donated)
    written_once: set[int] = set()
    for cluster in clusters.all():
        for node in cluster.roots:
            for i in written(node):
                source = source_of(node.operands[i])
                # A second update of an array would see what the first one wrote.
                taken = id(source) in written_once and splat(source) is None
                if taken or (_is_given(source) and id(source) not in free):
                    copy_start(clusters, cluster, node, i)
                written_once.add(id(source))


def copy_start(clusters: Clusters, cluster: Cluster, node: Node, place: int) -> None:
    """Make an in-place update start from a copy of an operand."""
    start = _own_start(node.operands[place], node)
    clusters.remove(cluster)
    clusters.insert(start, before=node)
    node.operands[place] = start
    clusters.add(cluster)


def copy_results(graph: Graph, donated: Collection[int] = ()) -> None:
    """Copy entry arguments that are also results; ``donated`` as in :func:`copy_overwritten`."""
    free = _donated(graph, donated)
    results: set[int] = set()
    for i, node in enumerate(graph.outputs):
        source = source_of(node)
        kept = _is_given(source) and (id(source) not in free or id(source) in results)
        if kept and source.opcode != "constant":
            graph.outputs[i] = Node("copy", [node], node.results, source=node.source)
        results.add(id(source))


def _donated(graph: Graph, donated: Collection[int]) -> set[int]:
    return {id(node) for i, node in enumerate(graph.parameters) if i in donated}


def _is_given(node: Node) -> bool:
    """Return whether a value is an argument, an element of one, or a constant."""
    while node.opcode == "get-tuple-element":
        node = node.operands[0]
    return node.opcode in ("parameter", "constant")


def _own_start(start: Node, loop: Node) -> Node:
    """Make a separate start value for a loop: a copy, or the constant written again."""
    # Filling an array is cheaper than copying one, and fills can be fused.
    if splat(start) is not None and start.type.shape:
        return splat_node(splat(start), start.type, loop.source)
    return Node("copy", [start], start.results, source=loop.source)


def _copy_exchanges(body: Graph) -> None:
    places = {id(node): i for i, node in enumerate(body.parameters)}
    moves = {
        i: places[id(output)]
        for i, output in enumerate(body.outputs)
        if id(output) in places and places[id(output)] != i
    }
    closing = {max(cycle) for cycle in _cycles(moves)}
    for i in moves:
        value = body.outputs[i]
        # Exchanging buffers takes one extra buffer per cycle.
        for _ in range(2 if i in closing else 1):
            value = Node("copy", [value], value.results)
        body.outputs[i] = value


def _cycles(moves: dict[int, int]) -> list[list[int]]:
    """Find the cycles of a partial permutation."""
    cycles = []
    seen: set[int] = set()
    for start in moves:
        path: list[int] = []
        place = start
        while place in moves and place not in seen:
            seen.add(place)
            path.append(place)
            place = moves[place]
        if place in path:
            cycles.append(path[path.index(place) :])
    return cycles


def copy_carried(clusters: Clusters) -> None:
    """Insert the copies of next values that a loop body cannot write over its state in place.

    As in XLA's CopyInsertion, the next value of an element overwrites its current value unless its
    kernel reads that value at other positions, or must run before another reader of it.

    Args:
        clusters: Kernels of the loop body.
    """
    graph = clusters.graph
    order = Dependences(clusters)
    taken: set[int] = set()
    for i, (parameter, output) in enumerate(zip(graph.parameters, graph.outputs, strict=False)):
        maker = clusters.by_root.get(id(owner(output)))
        if maker is None:  # passed through
            continue
        readers = list(clusters.readers.get(id(parameter), {}).values())
        others = [reader for reader in readers if reader is not maker]
        if (
            id(source_of(output)) in taken
            or (len(others) < len(readers) and not _overwrites(maker, parameter))
            or any(order.reaches(reader, maker) for reader in others)
        ):
            graph.outputs[i] = Node("copy", [output], output.results, source=output.source)
            clusters.append(graph.outputs[i])
            continue
        taken.add(id(source_of(output)))
        for reader in others:
            order.put_before(reader, maker)


#: Ops that read elements at other positions than they write.
_ELSEWHERE = ops_with(lambda spec: spec.placed and spec.operands > 0) | PRODUCTS | {"reduce"}


def _overwrites(kernel: Cluster, value: Node) -> bool:
    """Return whether a kernel can overwrite a value: it reads each element where it writes it."""
    reached, slices = {id(value)}, list[Node]()
    for node in kernel.nodes:
        read = [k for k, operand in enumerate(node.operands) if id(source_of(operand)) in reached]
        if not read:
            continue
        if node.opcode == "dynamic-slice":
            slices.append(node)
        elif node.opcode in UPDATES:
            # The slice read from the array is the slice that is overwritten.
            slices = [s for s in slices if s.operands[1:] != node.operands[2:]]
            reached.add(id(node))
        elif node.opcode in _ELSEWHERE:
            # A reduction that is itself a root reads each element once.
            if node.opcode != "reduce" or node not in kernel.roots:
                return False
        else:
            reached.add(id(node))
    return not slices


_CHEAP = FREE | {"broadcast", "reshape", "slice", "transpose", "iota"}


def inline_branches(graph: Graph) -> None:
    """Replace conditionals with two cheap branches by selects, in loops and branches too."""
    made: dict[int, list[Node]] = {}

    def rule(node: Node) -> Node | None:
        for inner in node.graphs:
            inline_branches(inner)
        if node.opcode == "conditional" and _is_cheap(node):
            made[id(node)] = _selected(node)
        if node.opcode == "get-tuple-element" and id(node.operands[0]) in made:
            return made[id(node.operands[0])][int(node.attrs["index"])]
        return None

    rewrite(graph, rule)


def _is_cheap(node: Node) -> bool:
    """Return whether both branches contain only ops that can be fused into their readers."""
    return len(node.graphs) == 2 and all(
        not branch.effects
        and all(is_elementwise(own) or own.opcode in _CHEAP for own in branch.nodes())
        for branch in node.graphs
    )


def _selected(node: Node) -> list[Node]:
    """Compute both branches of a conditional and select their results by its first operand."""
    test, *given = node.operands
    first, second = (_inlined(branch, given) for branch in node.graphs)
    if test.type.dtype != "pred":
        # The selector is a number: 0 selects the first branch, anything else the last.
        zero = splat_node(0, test.type)
        attrs = {"direction": "EQ"}
        test = Node("compare", [test, zero], (TensorType("pred", test.type.shape),), attrs)
    return [
        Node("select", [spread(test, [], one.type.shape, node.source), one, other], one.results)
        for one, other in zip(first, second, strict=True)
    ]


def _inlined(branch: Graph, given: list[Node]) -> list[Node]:
    """Copy the nodes of a branch, with its parameters replaced by ``given``."""
    copies = {id(own): value for own, value in zip(branch.parameters, given, strict=True)}
    for node in branch.nodes():
        if id(node) not in copies:
            copies[id(node)] = replace(node, operands=[copies[id(o)] for o in node.operands])
    return [copies[id(node)] for node in branch.outputs]


def own_fills(graph: Graph) -> None:
    """Give each in-place update a separate fill where several would write to the same one."""
    writes: dict[int, list[tuple[Node, int]]] = {}
    for node in graph.nodes():
        for i in written(node):
            source = source_of(node.operands[i])
            if source.opcode == "broadcast" and splat(source) is not None:
                writes.setdefault(id(source), []).append((node, i))
    for places in writes.values():
        # The first update keeps the shared fill; XLA's CopyInsertion makes copies for the others.
        for node, i in places[1:]:
            like = node.operands[i]
            node.operands[i] = splat_node(splat(like), like.type, source_of(like).source)


def join_fills(clusters: Clusters) -> None:
    """Merge equal fills that in-place updates start from, and the fills that start one loop."""
    known: dict[Hashable, Cluster] = {}
    for key, fill in _fills(clusters):
        own = clusters.by_root.get(id(fill))
        # Other ops were fused into it, so it is no longer a plain fill.
        if own is None or own.inputs or fill.opcode != "broadcast":
            continue
        first = known.setdefault(key, own)
        if first is not own:
            if len(first.roots) + len(own.roots) <= MAX_OPERANDS:
                known[key] = clusters.merge(first, own)
            else:
                known[key] = own


def _fills(clusters: Clusters) -> Iterator[tuple[Hashable, Node]]:
    """Yield arrays that a loop starts from or an update writes to, with their key for merging."""
    for node in clusters.nodes:
        if node.opcode == "while":
            for operand in dict.fromkeys(map(source_of, node.operands)):
                yield (id(node), operand.type.shape), operand
    for node in clusters.nodes:
        for i in written(node):
            fill = source_of(node.operands[i])
            yield (repr(splat(fill)), fill.type.dtype, fill.size), fill
