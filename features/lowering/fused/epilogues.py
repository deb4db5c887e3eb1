"""Kernels that are fixed before loops are fused: library calls with epilogues, and softmax.

Library calls take in bias, residual and activation (cublasLt, cuDNN), as XLA:GPU has it in
GemmRewriter and CudnnFusedConvRewriter. Normalisations of rows (reduce, broadcast, combine) are one
kernel, as in SoftmaxRewriterTriton.
"""

from __future__ import annotations

from collections.abc import Callable

from .clusters import PRODUCTS, Cluster, Clusters, Shape, reduction, source_of
from .convolutions import REVERSED
from .folding import is_elementwise, is_splat, reshape, splat
from .graph import Node

#: Ops of the tanh approximation of GELU, which cublasLt has as an epilogue.
_GELU = frozenset(("multiply", "add", "tanh", "power"))


def fuse_epilogues(clusters: Clusters, *, is_entry: bool = True) -> None:
    """Make each product or convolution one cluster with the epilogue that its library has.

    Args:
        clusters: One op each; changed in place.
        is_entry: Whether parameters are arguments; those of a loop are elements of its state.
    """
    for node in clusters.nodes:
        call = clusters.by_root.get(id(node))
        # A generated product has taken in what follows it already (generated.py).
        if call is None or call.library:
            continue
        if node.opcode in PRODUCTS and not clusters.fused_products:
            _Epilogue(clusters, call, is_entry=is_entry).run()
        elif node.opcode == "sort":
            _take_positions(clusters, call)


def _take_positions(clusters: Clusters, call: Cluster) -> None:
    """Let a sort count the positions itself that it carries along."""
    own = [source_of(o) for o in call.root.operands]
    counted = {id(n): n for n in own if n.opcode == "iota" and _single(clusters, n)}
    for node in counted.values():
        clusters.absorb(clusters.by_root[id(node)], [call])
    call.library = bool(counted)


class _Epilogue:
    def __init__(self, clusters: Clusters, call: Cluster, *, is_entry: bool) -> None:
        self.clusters = clusters
        self.call = call
        self.is_entry = is_entry
        self.is_dot = call.root.opcode == "dot"
        self.call.library = True

    def run(self) -> None:
        """Fuse a factor; or a bias, then either a residual or an activation."""
        if self.is_dot:
            self._factor()
        biased = self._add(self._bias)
        # cuBLAS computes alpha · A·B + beta · C (+ bias): a residual takes C. A product with one
        # gets no activation.
        if (self.is_dot or self._is_forward()) and self._add(self._residual) and self.is_dot:
            return
        if biased:
            self._relu()
            if self.is_dot:
                self._gelu()

    def _is_forward(self) -> bool:
        """Return whether the library runs a convolution forwards and can add a second input."""
        conv = next(n for n in self.call.members.values() if n.opcode == "convolution")
        dilated = any(w.lhs_dilation != 1 for w in conv.attrs.get("window", ()))
        # Labels that start with the feature mean filter gradients
        # (convolutions.py).
        turned = str(conv.attrs.get("dim_labels", "")).startswith("f")
        return not (dilated or turned or conv.attrs.get(REVERSED, False))

    def _reader(self) -> Cluster | None:
        """Find the only cluster that reads the result, if it is one op that took nothing in."""
        root = self.call.root
        if id(root) in self.clusters.kept:
            return None
        users = self.clusters.users(self.call)
        if len(users) != 1 or len(users[0].members) != 1 or users[0].library:
            return None
        return users[0]

    def _take(self, cluster: Cluster, *extra: Node) -> None:
        """Fuse a reader, and copies of the broadcasts that it needs."""
        position = self.clusters.position
        self.clusters.remove(self.call)
        self.clusters.remove(cluster)
        self.call.members.update(cluster.members)
        for node in extra:
            self.call.members[position[id(node)]] = node
            own = self.clusters.by_root.get(id(node))
            readers = self.clusters.readers.get(id(node), {})
            if own is not None and not readers and id(node) not in self.clusters.kept:
                self.clusters.remove(own)
        self.call.roots = [cluster.root]
        self.clusters.add(self.call)

    def _add(self, rule: Callable[[Cluster, Node], bool]) -> bool:
        cluster = self._reader()
        if cluster is None or cluster.root.opcode != "add":
            return False
        root = self.call.root
        lhs, rhs = cluster.root.operands
        if source_of(lhs) is source_of(rhs):
            return False
        other = rhs if source_of(lhs) is root else lhs
        return rule(cluster, other)

    def _factor(self) -> None:
        """Fuse a constant factor of the product, if nothing else reads the product."""
        cluster = self._reader()
        if cluster is None or cluster.root.opcode != "multiply":
            return
        if any(splat(operand) is not None for operand in cluster.root.operands):
            self._take(cluster, *self._splats(cluster.root))

    def _bias(self, cluster: Cluster, other: Node) -> bool:
        """Fuse a vector along the last dimension; of a convolution, along its features."""
        source = source_of(other)
        if source.opcode != "broadcast" or splat(source) is not None:
            return False
        vector = source.operands[0]
        dims = source.attrs.get("dimensions", ())
        # cublasLt's bias is one value for each column, cuDNN's one for each feature.
        sizes = [size for size in vector.type.shape if size != 1]
        if len(sizes) != 1 or dims[-1] != len(source.type.shape) - 1:
            return False
        self._take(cluster, source)
        return True

    def _residual(self, cluster: Cluster, other: Node) -> bool:
        """Fuse a matrix of the result's size, which the product is added to."""
        source = source_of(other)
        if splat(other) is not None or source.opcode == "broadcast":
            return False
        if source.type.dtype != self.call.root.type.dtype:
            return False
        self._take(cluster)
        if self.is_dot and self._read_later(source):
            self._copy(cluster.root, source)
        return True

    def _read_later(self, source: Node) -> bool:
        """Whether the library, which adds in place, would destroy a value that is still read."""
        clusters = self.clusters
        given = source.opcode in ("parameter", "constant") and not self._is_next(source)
        if given or id(source) in clusters.kept:
            return True
        # Readers that come later in the order would find the sum instead of the residual.
        start = clusters.position[id(self.call.root)]
        readers = clusters.readers.get(id(source), {}).values()
        return any(clusters.position[id(c.roots[-1])] > start for c in readers)

    def _is_next(self, source: Node) -> bool:
        """Whether the result takes the place of an element of a loop's state."""
        if self.is_entry or source.opcode != "parameter":
            return False
        graph = self.clusters.graph
        place = graph.parameters.index(source)
        return place < len(graph.outputs) and source_of(graph.outputs[place]) is self.call.root

    def _copy(self, add: Node, source: Node) -> None:
        """Give the library a copy of the residual to add to."""
        clusters = self.clusters
        copy = Node("copy", [source], source.results, source=source.source)
        clusters.insert(copy, before=add)
        clusters.remove(self.call)
        add.operands = [
            reshape(copy, o.type.shape) if source_of(o) is source else o for o in add.operands
        ]
        clusters.add(self.call)

    def _relu(self) -> None:
        cluster = self._reader()
        if cluster is not None and cluster.root.opcode == "maximum":
            lhs, rhs = cluster.root.operands
            if is_splat(rhs, 0) or is_splat(lhs, 0):
                self._take(cluster, *self._splats(cluster.root))

    def _gelu(self) -> None:
        """Fuse the tanh form of GELU, if nothing else reads the result."""
        root = self.call.root
        if id(root) in self.clusters.kept:
            return
        closure = self._closure(root)
        if closure is None:
            return
        for cluster in closure:
            self._take(cluster, *self._splats(cluster.root))

    def _closure(self, root: Node) -> list[Cluster] | None:
        """Collect the clusters of GELU of ``root``, in order; ``None`` if others read them."""
        inside: dict[int, Node] = {id(root): root}
        chain: list[Cluster] = []
        front = list(self.clusters.users(self.call))
        # GELU's tanh form has eight or nine ops; twelve steps bound the search.
        for _ in range(12):
            ready = [c for c in front if self._ready(c, inside)]
            if len(ready) != len(front) and not ready:
                return None
            for cluster in ready:
                if id(cluster.root) not in inside:
                    inside[id(cluster.root)] = cluster.root
                    chain.append(cluster)
            waiting = [c for c in front if c not in ready]
            follow = [u for c in ready for u in self.clusters.users(c)]
            front = list(
                {id(c): c for c in (*waiting, *follow) if id(c.root) not in inside}.values()
            )
            if self._is_complete(root, chain, inside):
                return chain
        return None

    def _is_complete(self, root: Node, chain: list[Cluster], inside: dict[int, Node]) -> bool:
        """Return whether a chain has one tanh, and one result that others read."""
        codes = [c.root.opcode for c in chain]
        # x/2 · (1 + tanh(…)) ends in a product.
        if codes.count("tanh") != 1 or codes[-1] != "multiply":
            return False
        readers = {id(c): self.clusters.users(c) for c in chain}
        readers[0] = list(self.clusters.readers.get(id(root), {}).values())
        read_outside = [
            key
            for key, users in readers.items()
            if not users or any(id(u.root) not in inside for u in users)
        ]
        return read_outside == [id(chain[-1])]

    def _ready(self, cluster: Cluster, inside: dict[int, Node]) -> bool:
        node = cluster.root
        if len(cluster.members) != 1 or not is_elementwise(node) or node.opcode not in _GELU:
            return False
        return all(
            id(source_of(operand)) in inside or splat(operand) is not None
            for operand in node.operands
        )

    def _splats(self, node: Node) -> list[Node]:
        """Return the broadcast constants that an op reads."""
        sources = []
        for operand in node.operands:
            source = source_of(operand)
            if source.opcode == "broadcast" and splat(source) is not None:
                sources.append(source)
        return sources


def fuse_softmax(clusters: Clusters) -> None:
    """Make clusters of chains of diamonds: ``f(x, broadcast(g(reduce(x))))`` along rows.

    Args:
        clusters: One op each; changed in place.
    """
    diamonds: dict[int, tuple[Node, list[Node]]] = {}
    for node in clusters.nodes:
        diamond = _diamond(clusters, node)
        if diamond is None:
            continue
        top, members = diamond
        # Softmax is two diamonds, a maximum and a sum: the second begins where the first ends.
        above, chain = _climb(clusters, top, diamonds)
        if above is not None:
            # Chained diamonds become one kernel, under the last one's root.
            first, earlier = diamonds.pop(id(above))
            diamonds[id(node)] = (first, [*earlier, *chain, *members])
        else:
            diamonds[id(node)] = (top, members)
    for root_id, (_, members) in diamonds.items():
        _join(clusters, root_id, members)


def _join(clusters: Clusters, root_id: int, members: list[Node]) -> None:
    position = clusters.position
    for node in members:
        own = clusters.by_root.get(id(node))
        if own is not None:
            clusters.remove(own)
    root = next(node for node in members if id(node) == root_id)
    made = Cluster([root], {position[id(n)]: n for n in members})
    made.rows = True
    clusters.add(made)


def _single(clusters: Clusters, node: Node) -> bool:
    """Return whether only one op reads a node's value."""
    return id(node) not in clusters.kept and len(clusters.readers.get(id(node), {})) == 1


def _diamond(clusters: Clusters, node: Node) -> tuple[Node, list[Node]] | None:
    """Find the top and members of the diamond that ends in ``node``."""
    if len(node.operands) != 2 or not is_elementwise(node) or node.called:
        return None
    for side in (0, 1):
        wide, narrow = source_of(node.operands[side]), source_of(node.operands[1 - side])
        if narrow.opcode != "broadcast" or splat(narrow) is not None:
            continue
        shape = narrow.type.shape
        # Only a broadcast along the last dimension undoes a reduction of rows; dimensions of size
        # one take no memory.
        dims = [d for d in narrow.attrs.get("dimensions", ()) if shape[d] != 1]
        outer = [d for d, size in enumerate(shape[:-1]) if size != 1]
        if dims != outer or not _single(clusters, narrow):
            continue
        chain = [node, narrow]
        inner = source_of(narrow.operands[0])
        # Between reduction and broadcast: scale, epsilon, square root of a norm.
        while is_elementwise(inner) and _single(clusters, inner) and len(inner.operands) <= 2:
            chain.append(inner)
            following = [source_of(o) for o in inner.operands if splat(o) is None]
            if len(following) != 1:
                break
            inner = following[0]
        if inner.opcode != "reduce" or not _single(clusters, inner) or len(inner.operands) != 2:
            continue
        # Triton's kernel keeps one row in a block: it must be contiguous.
        if reduction(inner).shape is not Shape.ROW or len(inner.attrs["dimensions"]) != 1:
            continue
        # Either may work on what the two have in common: without bf16 arithmetic the combining op
        # stands between conversions, the reduction need not.
        beside, above = _path(clusters, wide), _path(clusters, source_of(inner.operands[0]))
        inside = {id(n) for n in beside}
        upwards = next((i for i, n in enumerate(above) if id(n) in inside), None)
        if upwards is not None:
            top = above[upwards]
            chain += [inner, *above[:upwards], *beside[: beside.index(top)]]
            return top, [*chain, *_constants(clusters, chain)]
    return None


def _path(clusters: Clusters, node: Node) -> list[Node]:
    """Climb through ops on one value that only their reader needs; the first is ``node``."""
    path = [node]
    while is_elementwise(node) and _single(clusters, node):
        following = {id(source_of(o)): source_of(o) for o in node.operands if splat(o) is None}
        if len(following) != 1:
            break
        node = next(iter(following.values()))
        path.append(node)
    return path


def _two_users(clusters: Clusters, node: Node) -> bool:
    return id(node) not in clusters.kept and len(clusters.readers.get(id(node), {})) == 2


def _constants(clusters: Clusters, nodes: list[Node]) -> list[Node]:
    """Return the broadcast constants that only these nodes read."""
    constants: dict[int, Node] = {}
    for node in nodes:
        for operand in node.operands:
            source = source_of(operand)
            filled = source.opcode == "broadcast" and splat(source) is not None
            if filled and _single(clusters, source):
                constants[id(source)] = source
    return list(constants.values())


def _climb(
    clusters: Clusters, top: Node, diamonds: dict[int, tuple[Node, list[Node]]]
) -> tuple[Node | None, list[Node]]:
    """Find the end of an earlier diamond above ``top``, and the ops between."""
    chain: list[Node] = []
    node = top
    # A reader beside the reduction and the combining op would need the value in memory.
    if not _two_users(clusters, top):
        return None, []
    while id(node) not in diamonds:
        following = [source_of(o) for o in node.operands if splat(o) is None]
        if not is_elementwise(node) or len(following) != 1:
            return None, []
        chain.append(node)
        node = following[0]
        if id(node) not in diamonds and not _single(clusters, node):
            return None, []
    if node is not top and not _single(clusters, node):
        return None, []
    return node, chain
