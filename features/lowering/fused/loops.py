"""Rewrite loops and branches.

Of the state of loops, what nobody reads is dropped (XLA's WhileLoopSimplifier) and what changes
places is copied (CopyInsertion). Of branches without loops or library calls both are computed, and
a select takes the result, as XLA's ConditionalSimplifier does where both are cheap.
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
    """Stop loops from computing state that only feeds itself."""
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
    # What the condition reads decides how often the loop runs, so it is live.
    tested = {id(node) for node in topological(condition.outputs)}
    live |= {i for i, node in enumerate(condition.parameters) if id(node) in tested}
    # Backwards from what is read: an element is live if a live element's next value needs it.
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
            # Handed on unchanged, it costs nothing; the state keeps its shape.
            body.outputs[index] = body.parameters[index]


def merge_counters(graph: Graph) -> None:
    """Let loops count once: elements that start and step alike become one."""
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
    """Find the elements that equal an earlier one, by their index."""
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
    """Add the copies that loops need to keep their state in place.

    Values that change places within the state go through copies, one more than there are in each
    cycle; so does a start that is an argument, a constant or read by others.

    Args:
        graph: Changed in place.
        donated: As for :func:`copy_overwritten`.
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
                # A loop overwrites its state, so the state must not be anyone else's value.
                given = _is_given(source) and id(source) not in free
                shared = given or readers[id(source)] > 1
                if shared and output is not body.parameters[i]:
                    node.operands[i] = _own_start(start, node)


def copy_overwritten(clusters: Clusters, donated: Collection[int] = ()) -> None:
    """Add the copies of arguments of the entry that kernels update in place.

    A caller keeps its arguments, so an update of one starts from a copy. Updates inside of kernels
    that make something else of them need none.

    Args:
        clusters: Kernels of the entry, fused already.
        donated: Positions of parameters whose memory a result takes: these may be overwritten.
    """
    free = _donated(clusters.graph, donated)
    written_once: set[int] = set()
    for cluster in clusters.all():
        for node in cluster.roots:
            for i in written(node):
                source = source_of(node.operands[i])
                # The second update of an array would find what the first has written.
                taken = id(source) in written_once and splat(source) is None
                if taken or (_is_given(source) and id(source) not in free):
                    copy_start(clusters, cluster, node, i)
                written_once.add(id(source))


def copy_start(clusters: Clusters, cluster: Cluster, node: Node, place: int) -> None:
    """Let an update in place start from a copy of an operand."""
    start = _own_start(node.operands[place], node)
    clusters.remove(cluster)
    clusters.insert(start, before=node)
    node.operands[place] = start
    clusters.add(cluster)


def copy_results(graph: Graph, donated: Collection[int] = ()) -> None:
    """Copy arguments of the entry that are results; as :func:`copy_overwritten`."""
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
    """Give a loop its own copy of a start value; a constant is written again instead."""
    # Filling an array is cheaper than copying one, and can join other fills.
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
        # Exchanging two buffers takes a third one, once for each cycle.
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
    """Add the copies of what a loop's body cannot write over its own state.

    As XLA's CopyInsertion leaves them: an element's next value takes the place of the last one
    unless its kernel reads other elements of that, or must run before another reader of it.

    Args:
        clusters: Kernels of the body.
    """
    graph = clusters.graph
    order = Dependences(clusters)
    taken: set[int] = set()
    for i, (parameter, output) in enumerate(zip(graph.parameters, graph.outputs, strict=False)):
        maker = clusters.by_root.get(id(owner(output)))
        if maker is None:  # handed on
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


#: Ops that read other elements than those that they write.
_ELSEWHERE = ops_with(lambda spec: spec.placed and spec.operands > 0) | PRODUCTS | {"reduce"}


def _overwrites(kernel: Cluster, value: Node) -> bool:
    """Return whether a kernel may write over a value: it reads the element that it writes."""
    reached, slices = {id(value)}, list[Node]()
    for node in kernel.nodes:
        read = [k for k, operand in enumerate(node.operands) if id(source_of(operand)) in reached]
        if not read:
            continue
        if node.opcode == "dynamic-slice":
            slices.append(node)
        elif node.opcode in UPDATES:
            # What is read of the array is what it writes to.
            slices = [s for s in slices if s.operands[1:] != node.operands[2:]]
            reached.add(id(node))
        elif node.opcode in _ELSEWHERE:
            # A sum beside what is written takes each element once.
            if node.opcode != "reduce" or node not in kernel.roots:
                return False
        else:
            reached.add(id(node))
    return not slices


_CHEAP = FREE | {"broadcast", "reshape", "slice", "transpose", "iota"}


def inline_branches(graph: Graph) -> None:
    """Replace conditionals of two cheap branches, in loops and branches too."""
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
    """Whether both branches have only ops that fuse with whatever reads them."""
    return len(node.graphs) == 2 and all(
        not branch.effects
        and all(is_elementwise(own) or own.opcode in _CHEAP for own in branch.nodes())
        for branch in node.graphs
    )


def _selected(node: Node) -> list[Node]:
    """Results of a conditional: of both branches, chosen by its first operand."""
    test, *given = node.operands
    first, second = (_inlined(branch, given) for branch in node.graphs)
    if test.type.dtype != "pred":
        # A number chooses: 0 the first branch, anything else the last.
        zero = splat_node(0, test.type)
        attrs = {"direction": "EQ"}
        test = Node("compare", [test, zero], (TensorType("pred", test.type.shape),), attrs)
    return [
        Node("select", [spread(test, [], one.type.shape, node.source), one, other], one.results)
        for one, other in zip(first, second, strict=True)
    ]


def _inlined(branch: Graph, given: list[Node]) -> list[Node]:
    """Copy a branch's nodes, with what it is given in the place of its parameters."""
    copies = {id(own): value for own, value in zip(branch.parameters, given, strict=True)}
    for node in branch.nodes():
        if id(node) not in copies:
            copies[id(node)] = replace(node, operands=[copies[id(o)] for o in node.operands])
    return [copies[id(node)] for node in branch.outputs]


def own_fills(graph: Graph) -> None:
    """Give each update in place its own array, where several would write to one fill."""
    writes: dict[int, list[tuple[Node, int]]] = {}
    for node in graph.nodes():
        for i in written(node):
            source = source_of(node.operands[i])
            if source.opcode == "broadcast" and splat(source) is not None:
                writes.setdefault(id(source), []).append((node, i))
    for places in writes.values():
        # The first keeps the shared fill; XLA's CopyInsertion copies for the others.
        for node, i in places[1:]:
            like = node.operands[i]
            node.operands[i] = splat_node(splat(like), like.type, source_of(like).source)


def join_fills(clusters: Clusters) -> None:
    """Merge the fills that updates of one array start from, and the fills that start one loop."""
    known: dict[Hashable, Cluster] = {}
    for key, fill in _fills(clusters):
        own = clusters.by_root.get(id(fill))
        # Something was fused into it, so it is no plain fill any more.
        if own is None or own.inputs or fill.opcode != "broadcast":
            continue
        first = known.setdefault(key, own)
        if first is not own:
            if len(first.roots) + len(own.roots) <= MAX_OPERANDS:
                known[key] = clusters.merge(first, own)
            else:
                known[key] = own


def _fills(clusters: Clusters) -> Iterator[tuple[Hashable, Node]]:
    """Yield arrays that a loop starts from or an update writes to, with what they must share."""
    for node in clusters.nodes:
        if node.opcode == "while":
            for operand in dict.fromkeys(map(source_of, node.operands)):
                yield (id(node), operand.type.shape), operand
    for node in clusters.nodes:
        for i in written(node):
            fill = source_of(node.operands[i])
            yield (repr(splat(fill)), fill.type.dtype, fill.size), fill
