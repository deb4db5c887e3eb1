"""Layouts of a TPU's arrays, and the copies between them, as in XLA's layout assignment.

A TPU's memory pads the two minor dimensions of an array to tiles. Its compiler gives arguments and
results the dimension order with the least padding, lets every other op keep the order of its
operand, turns transposes and reshapes into bitcasts where that order allows it, and copies
elsewhere. The rules were read off 551 arrays and the kernels of 569 programs compiled for a v5e,
v5p and v6e; they reproduce the orders of all these arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...ir.program import TensorType
from .folding import is_elementwise
from .graph import Graph, Node
from .orders import (
    Order,
    default_order,
    order_of,
    padded_size,
    reshaped,
    row_major,
    spaced,
    turned_before,
)

#: Attribute of a reshape that moves data.
MOVES = "moves"

#: Ops whose result can be made in any order.
_FREE = frozenset(("constant", "iota", "broadcast"))
#: Ops whose result, and whose other operands of the same rank, take the order of the first operand.
_KEEP = frozenset(
    (
        "copy", "pad", "slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "reverse",
        "get-dimension-size", "all-reduce", "all-gather",
        "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast", "map",
    )
)  # fmt: skip
#: Ops on row-major arrays: gathers and scatters of whole rows, and library calls.
_ROWS = frozenset(("gather", "scatter", "custom-call", "fft", "cholesky", "triangular-solve"))


def assign_layouts(graph: Graph) -> None:
    """Assign an order to all values of a graph, its loops and branches, and insert copies.

    Args:
        graph: Changed in place; already simplified, so that every transpose and reshape is needed.
    """
    _Assignment(graph, [default_order(p.type) if _is_array(p) else None for p in graph.parameters])


class _Assignment:
    """Orders of the values of one graph.

    Args:
        graph: Changed in place.
        given: Order of each parameter; ``None`` if it has none.
        wanted: Order of each output; by default the one with the least padding.
    """

    def __init__(
        self, graph: Graph, given: Sequence[Order | None], wanted: Sequence[Order | None] = ()
    ) -> None:
        # None: the order is still open.
        self.order: dict[int, Order | None] = {}
        self.copies: dict[tuple[int, Order], Node] = {}
        # Keeps replaced nodes alive, since the tables are keyed by id().
        self.nodes = graph.nodes()
        self.readers = _readers(self.nodes, graph.outputs)
        for parameter, order in zip(graph.parameters, given, strict=True):
            self._set(parameter, order)
        for node in self.nodes:
            if node.opcode != "parameter":
                self._visit(node)
        for i, node in enumerate(graph.outputs):
            if _is_array(node):
                order = wanted[i] if i < len(wanted) else None
                graph.outputs[i] = self._in(node, order or default_order(node.type))
        for node in self.nodes:
            if id(node) in self.order and self.order[id(node)] is None and _is_array(node):
                self._settle(node, default_order(node.type))

    def _set(self, node: Node, order: Order | None) -> None:
        self.order[id(node)] = order
        if order is not None:
            node.results = (_with(node.type, order), *node.results[1:])

    def _visit(self, node: Node) -> None:
        """Choose the order of a node's result from the orders of its operands."""
        opcode = node.opcode
        if node.graphs:
            self._control(node)
        elif opcode == "get-tuple-element":
            self.order[id(node)] = order_of(node.operands[0].results[int(node.attrs["index"])])
            node.results = (node.operands[0].results[int(node.attrs["index"])],)
        elif opcode == "opt-barrier":
            node.operands = [self._fix(operand) for operand in node.operands]
            node.results = tuple(operand.type for operand in node.operands)
            self.order[id(node)] = order_of(node.type) if _is_array(node) else None
        elif opcode in _FREE:
            for operand in node.operands:
                self._fix(operand)
            self._set(node, None)
        elif is_elementwise(node) or opcode in _KEEP:
            self._alike(node)
        elif opcode in ("transpose", "reshape"):
            self._move(node)
        elif opcode == "reduce":
            self._reduce(node)
        elif opcode in ("reduce-window", "select-and-scatter"):
            self._window(node)
        elif opcode in ("sort", "topk"):
            self._sort(node)
        elif opcode in _ROWS:
            node.operands = [self._in(o, row_major(o.type)) for o in node.operands]
            self._results(node, row_major)
        elif opcode == "convolution":
            node.operands = [self._fix(operand) for operand in node.operands]
            self._set(node, self._turned(node) or _convolved(node))
        elif opcode == "dot":
            node.operands = [self._fix(operand) for operand in node.operands]
            self._set(node, self._turned(node) or default_order(node.type))
        else:
            node.operands = [self._fix(operand) for operand in node.operands]
            self._results(node, default_order)

    def _turned(self, product: Node) -> Order | None:
        """Return the order with which the transpose that alone reads a product is a bitcast.

        A product writes any order, so the gradient of weights is made as the weights are stored.
        Images, of three dimensions or more, keep their features in lanes.
        """
        readers = self.readers.get(id(product), [])
        if len(readers) != 1 or readers[0] is None or readers[0].opcode != "transpose":
            return None
        if product.opcode == "convolution" and len(product.type.shape) > 2:
            return None
        dims = readers[0].attrs["dimensions"]
        return tuple(dims[d] for d in default_order(readers[0].type))

    def _results(self, node: Node, choose: Callable[[TensorType], Order]) -> None:
        node.results = tuple(_with(t, choose(t)) for t in node.results)
        self.order[id(node)] = order_of(node.type) if _is_array(node) else None

    def _alike(self, node: Node) -> None:
        """Give an op and its operands of the same rank the order of the largest operand."""
        rank = len(node.type.shape) if node.results else 0
        alike = [o for o in node.operands if _is_array(o) and len(o.type.shape) == rank]
        settled = [o for o in alike if self.order.get(id(o)) is not None]
        if not settled:
            self._set(node, None)
            if not is_elementwise(node):
                self._settle(node, default_order(node.type))
            return
        first = settled[0] if node.opcode in _KEEP else max(settled, key=lambda o: o.nbytes)
        order = self.order[id(first)]
        assert order is not None
        node.operands = [
            self._in(o, order) if len(o.type.shape) == rank else o for o in node.operands
        ]
        self._results(node, lambda t: order if len(t.shape) == rank else default_order(t))

    def _move(self, node: Node) -> None:
        """Turn a transpose, or a reshape that keeps the tiles, into a bitcast."""
        operand = self._fix(node.operands[0])
        order = self.order[id(operand)] or ()
        if node.opcode == "transpose":
            places = {source: place for place, source in enumerate(node.attrs["dimensions"])}
            derived: Order | None = tuple(places[d] for d in order)
        else:
            derived = reshaped(operand.type.shape, order, node.type.shape)
        turned = None if derived is not None else turned_before(operand.type, order, node.type)
        if turned is not None:
            before, derived = turned
            node.operands = [self._in(operand, before)]
        if derived is None:
            node.attrs[MOVES] = True
            self._set(node, default_order(node.type))
        else:
            node.opcode, node.attrs = "bitcast", {}
            self._set(node, derived)

    def _reduce(self, node: Node) -> None:
        count = len(node.operands) // 2
        first = self._fix(node.operands[0])
        order = self.order[id(first)] or ()
        node.operands = [
            self._in(o, order) if i < count else o for i, o in enumerate(node.operands)
        ]
        gone = set(node.attrs.get("dimensions", ()))
        kept = [d for d in range(len(order)) if d not in gone]
        places = {d: place for place, d in enumerate(kept)}
        derived = tuple(places[d] for d in order if d in places)
        self._results(node, lambda t: derived)

    def _window(self, node: Node) -> None:
        """Choose an order with a dimension in the lanes that the window does not span, if any."""
        first = self._fix(node.operands[0])
        order = self.order[id(first)] or ()
        alone = [d for d, dim in enumerate(node.attrs["window"]) if dim.size == 1]
        if alone and order[0] not in alone:
            order = (alone[-1], *(d for d in reversed(range(len(order))) if d != alone[-1]))
        node.operands = [
            self._in(o, order) if len(o.type.shape) == len(order) else o for o in node.operands
        ]
        self._results(node, lambda t: order)

    def _sort(self, node: Node) -> None:
        """Choose an order with the sorted dimension outside the lanes."""
        first = self._fix(node.operands[0])
        order = self.order[id(first)] or ()
        along = int(node.attrs.get("dimension", len(order) - 1))
        if len(order) > 1 and order[0] == along:
            order = (order[1], order[0], *order[2:])
        node.operands = [self._in(o, order) for o in node.operands]
        self._results(node, lambda t: order)

    def _control(self, node: Node) -> None:
        """Give loops and branches, and the arrays passed to them, one order per array."""
        node.operands = [self._fix(operand) for operand in node.operands]
        shift = 1 if node.opcode == "conditional" else 0
        given = [self.order.get(id(operand)) for operand in node.operands[shift:]]
        loop = node.opcode == "while"
        wanted = given if loop else [default_order(t) if t.shape else None for t in node.results]
        for i, inner in enumerate(node.graphs):
            # The condition of a loop returns a scalar.
            _Assignment(inner, given[: len(inner.parameters)], wanted if not loop or i else ())
        node.results = tuple(
            _with(t, order) if order is not None else t
            for t, order in zip(node.results, wanted, strict=False)
        )
        self.order[id(node)] = None

    def _fix(self, value: Node) -> Node:
        """Give a value whose order is still open the order with the least padding."""
        if _is_array(value) and self.order.get(id(value)) is None:
            self._settle(value, default_order(value.type))
        return value

    def _settle(self, value: Node, order: Order) -> None:
        """Set the order of a value that is still open, and of its open inputs of the same shape."""
        stack = [value]
        while stack:
            node = stack.pop()
            self._set(node, order)
            if node.opcode not in _FREE:
                stack += [
                    o
                    for o in node.operands
                    if o.results
                    and o.type.shape == node.type.shape
                    and self.order.get(id(o), order) is None
                ]

    def _in(self, value: Node, order: Order) -> Node:
        """Return the value in an order, through a copy if it has another one."""
        if not _is_array(value) or len(value.type.shape) < 2:
            return value
        own = self.order.get(id(value))
        if own is None:
            self._settle(value, order)
            return value
        if spaced(value.type.shape, own) == spaced(value.type.shape, order):
            return value
        key = id(value), order
        if key not in self.copies:
            made = Node("copy", [value], (value.type,), source=value.source)
            self._set(made, order)
            self.copies[key] = made
        return self.copies[key]


def _readers(nodes: Sequence[Node], outputs: Sequence[Node]) -> dict[int, list[Node | None]]:
    """Return the readers of every value by its id; ``None`` is the result of the graph."""
    found: dict[int, list[Node | None]] = {}
    for node in nodes:
        for operand in node.operands:
            found.setdefault(id(operand), []).append(node)
    for node in outputs:
        found.setdefault(id(node), []).append(None)
    return found


def _convolved(node: Node) -> Order:
    """Return the order of a convolution's result: features in lanes unless images pad less."""
    out = str(node.attrs.get("dim_labels", "")).rpartition("->")[2]
    if len(out) != len(node.type.shape):
        return default_order(node.type)
    places = out.index("f"), out.index("b")
    outer = tuple(d for d in reversed(range(len(out))) if d not in places)
    orders = ((*places, *outer), (*places[::-1], *outer))
    return min(orders, key=lambda order: padded_size(node.type, order))


def is_strided(node: Node) -> bool:
    """Return whether a slice skips elements within tiles."""
    minor = order_of(node.type)[:2] if node.opcode == "slice" else ()
    return any(node.attrs["slice"][d][2] != 1 for d in minor)


def keeps_lanes(copy: Node) -> bool:
    """Return whether a copy between two orders keeps elements in their lanes."""
    return order_of(copy.type)[:1] == order_of(copy.operands[0].type)[:1]


def _is_array(node: Node) -> bool:
    return len(node.results) == 1 and not node.is_tuple and bool(node.type.shape)


def _with(t: TensorType, order: Order) -> TensorType:
    """Return the type with an order; row-major orders stay implicit, as in the whole program."""
    return t._replace(layout=None if order == row_major(t) else order)
