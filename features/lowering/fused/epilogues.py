"""Fuse epilogues into library calls, before loops are fused.

Libraries (cublasLt, cuDNN) apply bias, residual and activation, which XLA:GPU fuses in GemmRewriter
and CudnnFusedConvRewriter.
"""

from __future__ import annotations

from collections.abc import Callable

from .clusters import PRODUCTS, Cluster, Clusters, source_of
from .convolutions import REVERSED
from .folding import is_elementwise, is_splat, reshape, splat
from .graph import Node
from .rows import is_single

#: Ops of the tanh approximation of GELU, a cublasLt epilogue.
_GELU = frozenset(("multiply", "add", "tanh", "power"))


def fuse_epilogues(clusters: Clusters, *, is_entry: bool = True) -> None:
    """Make one cluster of each product or convolution and the epilogue that its library supports.

    Args:
        clusters: One op each; changed in place.
        is_entry: Whether parameters are arguments of the program, not elements of loop state.
    """
    for node in clusters.nodes:
        call = clusters.by_root.get(id(node))
        # Generated products already include the ops that follow them (generated.py).
        # TPUs have no libraries.
        if call is None or call.library or clusters.fused_products:
            continue
        if node.opcode in PRODUCTS:
            _Epilogue(clusters, call, is_entry=is_entry).run()
        elif node.opcode == "sort":
            _take_positions(clusters, call)


def _take_positions(clusters: Clusters, call: Cluster) -> None:
    """Fuse the iotas that a sort carries along into the sort, which then generates them."""
    own = [source_of(o) for o in call.root.operands]
    counted = {id(n): n for n in own if n.opcode == "iota" and is_single(clusters, n)}
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
        """Fuse a scale factor; or a bias, and then either a residual or an activation."""
        if self.is_dot:
            self._factor()
        biased = self._add(self._bias)
        # cuBLAS computes alpha · A·B + beta · C (+ bias), with the residual as C. A product with a
        # residual gets no activation.
        if (self.is_dot or self._is_forward()) and self._add(self._residual) and self.is_dot:
            return
        if biased:
            self._relu()
            if self.is_dot:
                self._gelu()

    def _is_forward(self) -> bool:
        """Return whether this is a forward convolution, to whose result cuDNN can add an input."""
        conv = next(n for n in self.call.members.values() if n.opcode == "convolution")
        dilated = any(w.lhs_dilation != 1 for w in conv.attrs.get("window", ()))
        # Labels that start with the feature dimension mark filter gradients (convolutions.py).
        turned = str(conv.attrs.get("dim_labels", "")).startswith("f")
        return not (dilated or turned or conv.attrs.get(REVERSED, False))

    def _reader(self) -> Cluster | None:
        """Find the cluster that reads the result, if it is the only one and a single unfused op."""
        root = self.call.root
        if id(root) in self.clusters.kept:
            return None
        users = self.clusters.users(self.call)
        if len(users) != 1 or len(users[0].members) != 1 or users[0].library:
            return None
        return users[0]

    def _take(self, cluster: Cluster, *extra: Node) -> None:
        """Fuse a reader, and copies of the broadcasts that it reads."""
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
        """Fuse a constant factor of the product if it has no other readers."""
        cluster = self._reader()
        if cluster is None or cluster.root.opcode != "multiply":
            return
        if any(splat(operand) is not None for operand in cluster.root.operands):
            self._take(cluster, *self._splats(cluster.root))

    def _bias(self, cluster: Cluster, other: Node) -> bool:
        """Fuse a vector along the last dimension, or along the features of a convolution."""
        source = source_of(other)
        if source.opcode != "broadcast" or splat(source) is not None:
            return False
        vector = source.operands[0]
        dims = source.attrs.get("dimensions", ())
        # cublasLt adds one bias per column, cuDNN one per feature.
        sizes = [size for size in vector.type.shape if size != 1]
        if len(sizes) != 1 or dims[-1] != len(source.type.shape) - 1:
            return False
        self._take(cluster, source)
        return True

    def _residual(self, cluster: Cluster, other: Node) -> bool:
        """Fuse the addition of a matrix with the shape of the result."""
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
        """Return whether the library's in-place addition would overwrite a value still needed."""
        clusters = self.clusters
        given = source.opcode in ("parameter", "constant") and not self._is_next(source)
        if given or id(source) in clusters.kept:
            return True
        # Readers that come later in the order would see the sum instead of the residual.
        start = clusters.position[id(self.call.root)]
        readers = clusters.readers.get(id(source), {}).values()
        return any(clusters.position[id(c.roots[-1])] > start for c in readers)

    def _is_next(self, source: Node) -> bool:
        """Return whether the result is the next value of ``source``, an element of loop state."""
        if self.is_entry or source.opcode != "parameter":
            return False
        graph = self.clusters.graph
        place = graph.parameters.index(source)
        return place < len(graph.outputs) and source_of(graph.outputs[place]) is self.call.root

    def _copy(self, add: Node, source: Node) -> None:
        """Insert a copy of the residual for the library to add to in place."""
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
        """Fuse the tanh form of GELU if its input has no other readers."""
        root = self.call.root
        if id(root) in self.clusters.kept:
            return
        closure = self._closure(root)
        if closure is None:
            return
        for cluster in closure:
            self._take(cluster, *self._splats(cluster.root))

    def _closure(self, root: Node) -> list[Cluster] | None:
        """List the clusters of the GELU that ends in ``root``; ``None`` if others read them."""
        inside: dict[int, Node] = {id(root): root}
        chain: list[Cluster] = []
        front = list(self.clusters.users(self.call))
        # The tanh form of GELU has eight or nine ops; twelve steps bound the search.
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
        """Return whether a chain has exactly one tanh and one result that other kernels read."""
        codes = [c.root.opcode for c in chain]
        # x/2 · (1 + tanh(…)) ends in a multiply.
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
