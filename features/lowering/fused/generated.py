"""Fuse producers and elementwise consumers into products whose kernels are generated.

The rules are those of XLA's GemmFusion (JAX 0.10, read off modules compiled for an L40S, an A100
and an H100). A product fuses conversions of an operand, unary functions, and arithmetic with an
argument that is broadcast along whole dimensions (the scale of a column or a row, a zero point),
but not with one value per group within a dimension, a matrix, or the result of another kernel.
Fused ops read no more than the operand itself, so they are fused even if other kernels read the
operand, too. So are concatenations along a free dimension. Elementwise ops on the result are fused
as long as it has no other reader and does not get wider.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import prod

from ...ir.program import DTYPE_BITS
from .clusters import Cluster, Clusters, source_of
from .folding import is_elementwise, splat
from .graph import Node

#: Type whose arithmetic some GPUs lack, and the type in which those compute it, between conversions
#: (:func:`opcast.features.lowering.fused.lower.widen`).
_NARROW, _WIDE = "bf16", "f32"
#: Attribute of the conversion inserted after such an op; the program's own conversions lack it.
WIDENED = "widened"
#: Unary ops that Triton's product kernels compute (triton_support_legacy.cc in XLA).
_UNARY = frozenset(
    ("abs", "cbrt", "ceil", "cosine", "exponential", "exponential-minus-one", "floor", "log")
) | {"log-plus-one", "negate", "not", "rsqrt", "sine", "sqrt", "tan", "tanh", "chlo.erf"}
_BINARY = frozenset(
    ("add", "atan2", "compare", "divide", "maximum", "minimum", "multiply", "power", "remainder")
) | {"subtract"}

#: Concatenated arrays must have a multiple of this many elements along the joined dimension:
#: kMinConcatFragmentSize in XLA's triton_tiling_propagation.cc.
_TILE = 64


def fuse_generated(clusters: Clusters, converted: Collection[str], *, is_entry: bool) -> None:
    """Make one cluster of each product and the ops that its kernel computes, if there are any.

    Other readers of the fused values compute them in their own kernels.

    Args:
        clusters: One op each; changed in place.
        converted: Types from which the kernel can convert its operands.
        is_entry: Whether parameters are arguments of the program, not elements of loop state.
    """
    known = ("parameter", "constant") if is_entry else ("constant",)
    for node in clusters.nodes:
        if node.opcode == "dot":
            _Generated(clusters, clusters.by_root[id(node)], converted, known).run()


@dataclass(frozen=True, slots=True)
class _Generated:
    """The cluster of a product, types that it converts from, and values that it may recompute."""

    clusters: Clusters
    call: Cluster
    converted: Collection[str]
    known: tuple[str, ...]

    def run(self) -> None:
        """Fuse the producers of the operands, and the ops after the product."""
        root = self.call.root
        taken = list[Node]()
        for place, operand in enumerate(root.operands):
            node = source_of(operand)
            joined = node.opcode == "concatenate" and self._joins_tiles(node, place)
            taken += [node] if joined else self._made(node, operand.type.shape, wide=False)
        if taken:
            self._take(root, taken)
        self._follow()

    def _made(self, node: Node, shape: tuple[int, ...], *, wide: bool) -> list[Node]:
        """List the nodes behind an operand that the product computes, users before operands.

        Args:
            node: Computes a value that leads to the operand.
            shape: Shape in which the product reads the operand.
            wide: Whether the value belongs to bf16 arithmetic that runs in f32.
        """
        own = self.clusters.by_root.get(id(node))
        # Values fused into another product are not in memory.
        if own is None or len(own.members) > 1 or not node.operands:
            return []
        inner = source_of(node.operands[0])
        if node.opcode == "convert" and (wide or WIDENED in node.attrs):
            closes = node.operands[0].type.dtype == _NARROW
            rest = self._made(inner, shape, wide=not closes)
            return [node, *rest] if rest or closes else []
        if node.opcode in _UNARY or self._is_conversion(node):
            rest = self._made(inner, shape, wide=wide)
            return [node, *rest] if rest or not wide else []
        if node.opcode in _BINARY:
            for value, factor in (node.operands, node.operands[::-1]):
                scale = self._repeated(factor, shape, wide=wide)
                rest = self._made(source_of(value), shape, wide=wide) if scale else []
                if scale and (rest or not wide):
                    return [node, *scale, *rest]
        fills = node.opcode == "broadcast" and _fills_dimensions(node, shape)
        return [node] if fills and not wide else []

    def _is_conversion(self, node: Node) -> bool:
        if node.opcode != "convert" or node.operands[0].type.dtype not in self.converted:
            return False
        before, after = (DTYPE_BITS[n.type.dtype] for n in (node.operands[0], node))
        value = source_of(node.operands[0])
        # Each of several readers may widen a value itself; only an argument with a single reader
        # may be narrowed.
        return before <= after or (value.opcode in self.known and self._alone(value, node))

    def _alone(self, *nodes: Node) -> bool:
        return all(len(self.clusters.readers.get(id(node), {})) == 1 for node in nodes)

    def _joins_tiles(self, node: Node, place: int) -> bool:
        """Return whether arrays are joined along the operand's free dimension, in whole tiles."""
        dot, along = self.call.root, node.attrs["dimensions"][0]
        side = ("lhs", "rhs")[place]
        own = node.type.shape == dot.operands[place].type.shape and not any(
            along in dot.attrs.get(f"{side}_{role}_dims", ()) for role in ("batch", "contracting")
        )
        return own and all(o.type.shape[along] % _TILE == 0 for o in node.operands)

    def _repeated(self, value: Node, shape: tuple[int, ...], *, wide: bool) -> list[Node]:
        """List the nodes that broadcast an argument or constant; none for other values."""
        node, outside = _narrow(source_of(value), wide=wide)
        if node.opcode != "broadcast":
            return []
        if splat(node) is not None:
            return [*outside, node]
        # The conversion may come before or after the broadcast; it is cheaper before.
        wide = wide and not outside
        inner, inside = _narrow(source_of(node.operands[0]), wide=wide)
        fits = inner.opcode in self.known and _fills_dimensions(node, shape)
        return [*outside, node, *inside] if fits and (inside or not wide) else []

    def _matrix(self, value: Node, shape: tuple[int, ...], *, wide: bool) -> list[Node]:
        """List an argument of the result's size and its conversion; none for other values."""
        node, nodes = _narrow(source_of(value), wide=wide)
        fits = node.opcode in self.known and node.size == prod(shape)
        return [*nodes, node] if fits else []

    def _take(self, root: Node, nodes: list[Node]) -> None:
        """Fuse nodes into the product's kernel, and remove kernels that nothing else reads."""
        clusters, call = self.clusters, self.call
        clusters.remove(call)
        if root not in call.roots:
            clusters.remove(clusters.by_root[id(root)])
        call.library = True
        call.members.update({clusters.position[id(own)]: own for own in nodes})
        call.roots = [root]
        clusters.add(call)
        # Readers first, so that nodes that only they read are removed, too.
        for own in reversed(call.nodes):
            kernel = clusters.by_root.get(id(own), call)
            if kernel is call or id(own) in clusters.kept or clusters.readers.get(id(own)):
                continue
            clusters.remove(kernel)

    def _follow(self) -> None:
        """Fuse the elementwise ops after the product, up to the last with a result no wider."""
        node, taken = self.call.root, list[Node]()
        width, shape = DTYPE_BITS[node.type.dtype], node.type.shape
        while (reader := self._only_reader(node)) is not None:
            # Without native bf16 arithmetic each op is enclosed in conversions.
            wide = DTYPE_BITS[node.type.dtype] > width
            others = [o for o in reader.operands if source_of(o) is not node]
            extra = [
                self._repeated(o, shape, wide=wide) or self._matrix(o, shape, wide=wide)
                for o in others
            ]
            # A square, which reads the product twice, is not fused.
            single = len(others) == len(reader.operands) - 1 <= 1
            if not (is_elementwise(reader) and single and all(extra)):
                return
            taken += [reader, *(n for own in extra for n in own if n.opcode != "parameter")]
            node = reader
            if DTYPE_BITS[node.type.dtype] <= width:
                self._take(node, taken)
                taken = []

    def _only_reader(self, node: Node) -> Node | None:
        readers = list(self.clusters.readers.get(id(node), {}).values())
        if id(node) in self.clusters.kept or len(readers) != 1 or len(readers[0].members) != 1:
            return None
        return readers[0].root


def _narrow(node: Node, *, wide: bool) -> tuple[Node, list[Node]]:
    """Look through a conversion from bf16 if ``wide``; return what it reads, and the conversion."""
    if wide and node.opcode == "convert" and node.operands[0].type.dtype == _NARROW:
        return source_of(node.operands[0]), [node]
    return node, []


def _fills_dimensions(broadcast: Node, shape: tuple[int, ...]) -> bool:
    """Return whether a broadcast repeats only whole dimensions of ``shape``, not groups."""
    kept = broadcast.attrs.get("dimensions", ())
    ends = iter(size for size in shape if size != 1)
    left, right, roles = 1, 1, set[bool]()
    for d, size in enumerate(broadcast.type.shape):
        if size == 1:
            continue
        left *= size
        roles.add(d in kept)
        # Both shapes have the same number of elements: dimensions match where their products agree.
        while right < left:
            right *= next(ends)
        if len(roles) > 1:
            return False
        if left == right:
            roles.clear()
    return True
