"""Ops that XLA's expanders rewrite: random bits, max-pooling gradients and row scatters."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ....common.types import JsonObject
from ...ir.program import DTYPE_BITS, Computation, Op, Program, TensorType
from .folding import reshape, splat, splat_node, spread
from .graph import Node, element

#: Multipliers and key increments of Philox4x32-10 (Salmon et al., SC 2011, table 2, section 4.3).
_FACTORS, _STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
#: Rounds after which XLA's GPU compiler (JAX 0.10) starts a second kernel because the code gets
#: too long. Found by compiling for an H100 and an A100; independent of the array's length.
_FIRST = 4
#: Words in the block of one counter.
_WORDS = 4
#: Type of array indices.
INDEX = "s32"


def philox(node: Node) -> Node | None:
    """Expand a random bit generator; return ``None`` for other algorithms and states.

    Args:
        node: An ``rng-bit-generator`` that returns its next state and the bits.
    """
    state, bits = node.operands[0], node.results[-1]
    algorithm = str(node.attrs.get("algorithm", "")).lower().removeprefix("rng_")
    plain = state.type.dtype == "u64" and len(state.type.shape) == 1 and state.type.shape[0] >= 2
    if not plain or algorithm not in ("default", "philox") or len(node.results) != 2:
        return None
    per_word = max(32, DTYPE_BITS[bits.dtype]) // 32
    count = -(-bits.size * per_word // _WORDS)
    made = _Philox(node, count)
    words = made.words()
    flat = _put_together(words, count, node)
    if per_word == 2:
        wide = TensorType("u64", (count * _WORDS // 2,))
        flat = Node("bitcast-convert", [flat], (wide,), source=node.source)
    whole = TensorType(flat.type.dtype, (bits.size,))
    if whole.shape != flat.type.shape:
        flat = Node("slice", [flat], (whole,), {"slice": ((0, bits.size, 1),)}, source=node.source)
    result = reshape(flat, bits.shape)
    if result.type.dtype != bits.dtype:
        result = Node("convert", [result], (bits,), source=node.source)
    step = splat_node(count, state.type)
    after = Node("add", [state, step], state.results, source=node.source)
    return Node("tuple", [after, result], node.results, is_tuple=True, source=node.source)


def _put_together(words: list[Node], count: int, like: Node) -> Node:
    """Interleave the words of all blocks."""
    parts = [reshape(word, (count, 1)) for word in words]
    kind = (TensorType("u32", (count, _WORDS)),)
    whole = Node("concatenate", parts, kind, {"dimensions": (1,)}, source=like.source)
    return reshape(whole, (count * _WORDS,))


@dataclass(frozen=True)
class _Philox:
    """Arithmetic on one word of each block.

    Attributes:
        node: The generator.
        count: Number of four-word blocks.
    """

    node: Node
    count: int

    def words(self) -> list[Node]:
        """Return the four random words of each block."""
        key, base = (self._scalar(i) for i in range(2))
        keys = [self._narrow(key), self._narrow(self._high(key))]
        start = spread(base, (), (self.count,), self.node.source)
        place = Node("iota", [], (TensorType("u64", (self.count,)),), {"dimensions": (0,)})
        counter = self._op("add", start, place)
        flags = TensorType("pred", (self.count,))
        carried = Node("compare", [counter, start], (flags,), {"direction": "LT"})
        upper = Node(
            "select", [carried, *(splat_node(i, start.type) for i in (1, 0))], start.results
        )
        block = [
            self._narrow(part) for word in (counter, upper) for part in (word, self._high(word))
        ]
        for i in range(_ROUNDS):
            if i == _FIRST:
                block = self._kept(block)
            block = self._round(block, keys)
            keys = [
                self._op("add", k, splat_node(step, k.type))
                for k, step in zip(keys, _STEPS, strict=True)
            ]
        return block

    def _round(self, block: list[Node], keys: list[Node]) -> list[Node]:
        first, second = (
            self._op("multiply", self._wide(block[2 * i]), splat_node(factor, self._kind("u64")))
            for i, factor in enumerate(_FACTORS)
        )
        mixed = [
            self._op(
                "xor",
                self._op("xor", self._narrow(self._high(product)), other),
                spread(key, (), (self.count,), self.node.source),
            )
            for product, other, key in ((second, block[1], keys[0]), (first, block[3], keys[1]))
        ]
        return [mixed[0], self._narrow(second), mixed[1], self._narrow(first)]

    def _kept(self, block: list[Node]) -> list[Node]:
        """Write the words to memory and read them back."""
        parts = [reshape(word, (1, self.count)) for word in block]
        kind = (TensorType("u32", (_WORDS, self.count)),)
        whole = Node("concatenate", parts, kind, {"dimensions": (0,)}, source=self.node.source)
        # The consumer's kernel cannot recompute a value behind a barrier.
        kept = Node("opt-barrier", [whole], kind, source=self.node.source)
        row = (TensorType("u32", (1, self.count)),)
        rows = [
            Node("slice", [kept], row, {"slice": ((i, i + 1, 1), (0, self.count, 1))})
            for i in range(_WORDS)
        ]
        return [reshape(part, (self.count,)) for part in rows]

    def _scalar(self, place: int) -> Node:
        limits = ((place, place + 1, 1),)
        part = Node("slice", [self.node.operands[0]], (TensorType("u64", (1,)),), {"slice": limits})
        return reshape(part, ())

    def _high(self, word: Node) -> Node:
        return self._op("shift-right-logical", word, splat_node(32, word.type))

    def _narrow(self, word: Node) -> Node:
        return Node("convert", [word], (TensorType("u32", word.type.shape),))

    def _wide(self, word: Node) -> Node:
        return Node("convert", [word], (TensorType("u64", word.type.shape),))

    def _kind(self, dtype: str) -> TensorType:
        return TensorType(dtype, (self.count,))

    def _op(self, opcode: str, *operands: Node) -> Node:
        return Node(opcode, list(operands), operands[0].results, source=self.node.source)


def scattered(node: Node, program: Program) -> Node:
    """Expand a max-pooling gradient: find each window's maximum, then scatter to its position."""
    operand, source, start = node.operands
    shape, windows = operand.type.shape, source.type.shape
    rank = len(shape)
    whole = TensorType(INDEX, shape)
    places = [Node("iota", [], (whole,), {"dimensions": (d,)}) for d in range(rank)]
    # Position -1 marks a window that has not seen an element yet.
    none = splat_node(-1, TensorType(INDEX))
    kinds = (TensorType(operand.type.dtype, windows), *[TensorType(INDEX, windows)] * rank)
    search = Node(
        "reduce-window",
        [operand, *places, start, *[none] * rank],
        kinds,
        {"window": node.attrs["window"]},
        (_chooser(program, operand.type.dtype, rank),),
        [],
        True,
        node.source,
    )
    column = TensorType(INDEX, (source.type.size, 1))
    columns = [
        Node("reshape", [element(search, d + 1)], (column,), source=node.source)
        for d in range(rank)
    ]
    kind = TensorType(INDEX, (source.type.size, rank))
    indices = Node("concatenate", columns, (kind,), {"dimensions": (1,)}, source=node.source)
    flat = TensorType(source.type.dtype, (source.type.size,))
    updates = Node("reshape", [source], (flat,), source=node.source)
    zeros = Node("broadcast", [start], node.results, {"dimensions": ()}, source=node.source)
    every = tuple(range(rank))
    attrs = {
        "update_window_dims": (),
        "inserted_window_dims": every,
        "scatter_dims_to_operand_dims": every,
        "index_vector_dim": 1,
        "indices_are_sorted": False,
        "unique_indices": False,
    }
    called = (node.called[1],)
    return Node(
        "scatter", [zeros, indices, updates], node.results, attrs, called, source=node.source
    )


def cropped(node: Node) -> Node | None:
    """Scatter single elements directly into the slice that is read: those outside are dropped."""
    made = node.operands[0]
    limits = node.attrs.get("slice", ())
    if made.opcode != "scatter" or made.attrs.get("update_window_dims") or made.is_tuple:
        return None
    if splat(made.operands[0]) is None or any((low, step) != (0, 1) for low, _, step in limits):
        return None
    zeros = splat_node(splat(made.operands[0]), node.type, node.source)
    operands = [zeros, *made.operands[1:]]
    return Node("scatter", operands, node.results, made.attrs, made.called, source=made.source)


def one_per_row(node: Node) -> Node | None:
    """Turn a scatter of one update per row into a splat into a select by position.

    The gradient of one element per row, as in a cross-entropy loss, has this form; the TPU compiler
    fuses the select into the kernel that reads it.
    """
    if node.is_tuple or len(node.operands) != 3 or node.attrs.get("update_window_dims"):
        return None
    array, indices, updates = node.operands
    shape, batch = array.type.shape, tuple(node.attrs.get("input_batching_dims", ()))
    along = [d for d in range(len(shape)) if d not in batch]
    rows = tuple(shape[d] for d in batch)
    if splat(array) is None or len(along) != 1 or not indices.size == updates.size == prod(rows):
        return None
    kinds = indices.type._replace(shape=shape), TensorType("pred", shape)
    place = Node("iota", [], kinds[:1], {"dimensions": tuple(along)}, source=node.source)
    index = spread(reshape(indices, rows), batch, shape, node.source)
    equal = Node("compare", [place, index], kinds[1:], {"direction": "EQ"}, source=node.source)
    update = spread(reshape(updates, rows), batch, shape, node.source)
    return Node("select", [equal, update, array], node.results, source=node.source)


def _chooser(program: Program, dtype: str, rank: int) -> str:
    """Make a computation that returns the larger of two values and its position."""
    name = f"opcast.larger.{dtype}.{rank}"
    if name in program.computations:
        return name
    types = [TensorType(dtype), *[TensorType(INDEX)] * rank]
    ops = [Op(f"{name}.p{i}", "parameter", (), (t,), {"index": i}) for i, t in enumerate(types * 2)]
    count = len(types)
    # Position -1: no element seen yet, so the other one replaces it.
    ops.append(Op(f"{name}.n", "constant", (), (TensorType(INDEX),), {"value": -1}))
    steps: tuple[tuple[str, tuple[int, ...], JsonObject], ...] = (
        ("compare", (0, count), {"direction": "GE"}),
        ("compare", (1, 2 * count), {"direction": "NE"}),
        ("compare", (count + 1, 2 * count), {"direction": "NE"}),
        ("not", (2 * count + 3,), {}),
        ("and", (2 * count + 1, 2 * count + 2), {}),
        ("or", (2 * count + 5, 2 * count + 4), {}),
    )
    for i, (opcode, read, attrs) in enumerate(steps):
        ops.append(Op(f"{name}.c{i}", opcode, read, (TensorType("pred"),), attrs))
    test, chosen = len(ops) - 1, []
    for i, t in enumerate(types):
        # The value and its position are selected together.
        chosen.append(len(ops))
        ops.append(Op(f"{name}.s{i}", "select", (test, i, count + i), (t,)))
    ops.append(Op(f"{name}.t", "tuple", tuple(chosen), tuple(types), is_tuple=True))
    program.computations[name] = Computation(name, ops, len(ops) - 1)
    return name
