"""Published op graphs: from textual lists of operations to kernels with execution counts.

A graph has nodes (calls of the framework) with lists of operations for the forward pass, the
backward pass and the accumulation of gradients: ``Linear`` (rows, reduced, columns), ``BMM``
(batch, rows, reduced, columns), ``VECop`` (rows, cols), ``MEM`` (shapes moved), ``ALLREDUCE``,
``ALLREDUCE_ASYNC`` and ``SENDRECV`` (elements). The lists approximate what the framework launches.
Where the actual kernels are known to differ, these are used instead:

- A view, an index by one number, a dropout in inference and the gradient of an addition launch
  nothing.
- An element-wise op whose second operand is a scalar or broadcast reads one tensor, not two; the
  gradient of a division by a scalar is one such op.
- A layer norm's backward pass reads its tensors twice: for the input's gradient and the weights'.
- The gradient of GELU reads two tensors. That of a softmax is a product of two tensors and a pass
  that again reads two.
- A product of four-dimensional operands (PyTorch's ``matmul``) runs as a batch of matrices. Heads
  are views of (batch, positions, heads · size), whose batch and heads are not a single dimension
  of memory: with more than one sequence, queries, keys and values are copied first.
- Dropout reads a tensor, and writes one and a byte mask; its backward pass converts, scales and
  applies the mask in three kernels, with six tensors and the byte mask in total.
- A fused chain is one kernel that reads the node's inputs and writes its output; with a softmax or
  a layer norm inside, it is that op plus the remaining traffic.

Data movement is expressed as ``relu`` on a tensor of the same traffic, so that any estimator of
element-wise ops also provides the device's effective bandwidth.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ...common.errors import DatasetError
from ...features.cost.formats import FORMATS
from ...features.operators.op import Op
from ..operator.prices import BINARY, eager_row

#: Columns of the published op schema that graphs need.
OP_COLUMNS = ("op", "family", "dtype", "b", "m", "n", "k", "rows", "cols", "n_in")
#: Parts of a step: forward, backward, accumulation of gradients.
PHASES = {"fw": "FwOps", "bw": "BwOps", "acc": "AccOps"}
#: Operations that use links between devices.
COLLECTIVES = ("ALLREDUCE", "ALLREDUCE_ASYNC", "SENDRECV")
#: Nodes of a traced graph that launch no kernel, whatever their lists contain.
_VIEWS = ("getitem", "misc", "output", "Weight")


def element_width(dtype: str) -> int:
    """Return the bytes of an element by dtype of a graph; f32 unless known."""
    return int(FORMATS.get(dtype, FORMATS["f32"]).element_bytes)


@dataclass(frozen=True)
class GraphOp:
    """One operation of a node.

    Attributes:
        kind: Name in the list, such as ``Linear`` or ``VECadd``; ``MOVE`` for memory traffic.
        shape: Numbers of its shape; ``(bytes,)`` for ``MOVE``.
    """

    kind: str
    shape: tuple[Any, ...]


def parse_ops(text: str, where: str = "") -> list[GraphOp]:
    """Parse a list of operations such as ``[['Linear', (64, 32, 16)]]``.

    Raises:
        DatasetError: The text is not a list of pairs of a name and numbers.
    """
    try:
        return [GraphOp(str(kind), _numbers(shape)) for kind, shape in _literal(text)]
    except (ValueError, TypeError) as error:
        raise DatasetError(
            f"operations cannot be read: {error}",
            where=where or text[:60],
            hint="give a list of [name, shape] pairs of plain numbers",
        ) from None


def parse_shapes(text: str) -> list[tuple[int, ...]]:
    """Parse shapes such as ``[(2, 3), (1,)]`` or ``(2, 3)``; empty if there are none."""
    try:
        value = _literal(text)
        if isinstance(value, tuple):
            return [tuple(int(d) for d in value)]
        return [tuple(int(d) for d in shape) for shape in value]
    except (ValueError, TypeError, OverflowError) as error:
        raise DatasetError(f"shapes cannot be read: {error}", where=text[:60]) from None


def _numbers(shape: Any) -> tuple[Any, ...]:
    """Check that a shape consists of plain numbers or lists of them.

    Raises:
        ValueError: The shape holds something else.
    """
    numbers = tuple(shape)
    plain = (n for part in numbers for n in (part if isinstance(part, list | tuple) else (part,)))
    # Neither NaN nor beyond int64, into which sizes are converted later.
    if not all(isinstance(n, int | float) and n == n and abs(n) < 2**63 for n in plain):
        raise ValueError(f"{numbers!r} is not a shape")
    return numbers


def _literal(text: str) -> Any:
    """Evaluate Python literals.

    Raises:
        ValueError: The text is not a literal, or too deeply nested.
    """
    try:
        # Literals only: the tables are untrusted, and ``eval`` would execute them.
        return ast.literal_eval(text)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(str(error) or "too deeply nested") from None


def node_kernels(node: dict[str, object], phase: str, mode: str, width: int = 4) -> list[GraphOp]:
    """Return the kernels and collectives that a node launches in one phase.

    Args:
        node: ``OpName``, the three lists, ``InputShapes`` and ``OutputShape``.
        phase: A key of :data:`PHASES`.
        mode: ``inf`` or ``train``.
        width: Bytes of an element.
    """
    name = str(node["OpName"])
    listed = parse_ops(str(node[PHASES[phase]]), where=str(node.get("Name", "")))
    if not listed or name in _VIEWS or (name == "dropout" and mode == "inf"):
        return [op for op in listed if op.kind in COLLECTIVES]
    if name == "fused":
        return _fused(listed, node, width)
    if name == "dropout":
        # The mask has one byte per element. Forward: read, write, write the mask. Backward: convert
        # the mask (a byte and a tensor), scale it (2 tensors), multiply the gradient by it (3).
        tensors = 2 if phase == "fw" else 6
        return [_move((tensors * width + 1) * _elements(listed[0].shape[0]))]
    if phase == "bw":
        return _backward(name, listed, node, width)
    copies = [_move(2.0 * width * size) for size in _permuted(listed, node)]
    return copies + [_forward(op, node, width) for op in listed if _moves(op)]


def _permuted(listed: list[GraphOp], node: dict[str, object]) -> list[int]:
    """Return the elements of the operands that a batched product of heads copies first."""
    products = [op for op in listed if op.kind == "BMM" and len(op.shape) == 4]
    if not products:
        return []
    _, _, depth, columns = products[0].shape
    operands = [s for s in parse_shapes(str(node.get("InputShapes", "[]"))) if len(s) == 4]
    # The head size is the depth of the scores' product and the width of the values'. The scores do
    # not have this dimension: the framework created them contiguously.
    size = min(depth, columns)
    return [_elements(s) for s in operands if min(s[0], s[1]) > 1 and size in s[2:]]


def _moves(op: GraphOp) -> bool:
    return op.kind != "MEM" or max(_elements(shape) for shape in op.shape) > 1


def _forward(op: GraphOp, node: dict[str, object], width: int) -> GraphOp:
    if op.kind == "MEM":
        return _move(width * sum(_elements(shape) for shape in op.shape))
    if op.kind.startswith("VEC") and op.kind[3:] in BINARY and _broadcasts(node):
        return GraphOp(op.kind + "u", op.shape)
    return op


def _backward(
    name: str, listed: list[GraphOp], node: dict[str, object], width: int
) -> list[GraphOp]:
    if name in ("VECadd", "VECaddu", "VECsub", "contiguous"):
        return []
    # PyTorch's native layer norm has two backward kernels, and each reads the input and the
    # gradient.
    if name == "VECln":
        return [op for op in listed for _ in range(2)]
    if name == "VECgelu":
        return [GraphOp("VECmul", op.shape) for op in listed]
    # PyTorch multiplies gradient and result, then reads product and result again.
    if name == "VECsoftmax":
        return [GraphOp("VECmul", op.shape) for op in listed]
    if name == "VECdiv" and _broadcasts(node):
        return [GraphOp("VECdivu", listed[0].shape)]
    return [_forward(op, {}, width) for op in listed if _moves(op)]


def _fused(listed: list[GraphOp], node: dict[str, object], width: int) -> list[GraphOp]:
    shapes = parse_shapes(str(node["InputShapes"])) + parse_shapes(str(node["OutputShape"]))
    traffic = float(width * sum(_elements(shape) for shape in shapes))
    heavy = [op for op in listed if op.kind not in ("MEM", *COLLECTIVES) and not _light(op)]
    # A row-wise op reads its tensor and writes one; only the rest of the traffic is added.
    rest = traffic - sum(2.0 * width * _elements(op.shape) for op in heavy if _row_wise(op))
    others = [op for op in listed if op.kind in COLLECTIVES]
    # With a heavier kernel the traffic is fused into it; alone it is a separate kernel.
    moved = [GraphOp("JOIN" if heavy else "MOVE", (rest,))] if rest > 0 else []
    return heavy + moved + others


def _light(op: GraphOp) -> bool:
    return op.kind.startswith("VEC") and not _row_wise(op)


def _row_wise(op: GraphOp) -> bool:
    return op.kind in ("VECsoftmax", "VECln")


def _broadcasts(node: dict[str, object]) -> bool:
    shapes = parse_shapes(str(node.get("InputShapes", "[]")))
    # An operand of less than an eighth is read from cache by all rows, so its traffic is
    # negligible; the threshold is an engineering estimate.
    return len(shapes) > 1 and 8 * _elements(shapes[1]) < _elements(shapes[0])


def _move(traffic: float) -> GraphOp:
    return GraphOp("MOVE", (float(traffic),))


def _elements(shape: Iterable[int]) -> int:
    return int(np.prod([int(d) for d in shape], dtype=np.int64))


def op_rows(op: GraphOp, dtype: str) -> dict[str, object]:
    """Return an operation in the published op schema: :data:`OP_COLUMNS`, unused ones ``None``.

    Raises:
        DatasetError: The kind is unknown.
    """
    lengths = {"Linear": 3, "BMM": 4, "MOVE": 1, "JOIN": 1}
    wanted = lengths.get(op.kind, 2 if op.kind.startswith("VEC") else len(op.shape))
    if len(op.shape) != wanted or not all(isinstance(n, int | float) for n in op.shape):
        raise DatasetError(f"{op.kind} of shape {op.shape} does not have {wanted} numbers")
    if op.kind in ("Linear", "BMM"):
        # The graphs list the reduced dimension before the output's columns.
        *first, k, n = op.shape
        own = Op("linear" if op.kind == "Linear" else "bmm", (*first, n, k))
    elif op.kind in ("MOVE", "JOIN"):
        own = Op("move", op.shape)
    elif op.kind.startswith("VEC"):
        own = Op(op.kind[3:], (int(op.shape[0]), int(op.shape[1])))
    else:
        raise DatasetError(
            f"operation {op.kind!r} is not known", hint="Linear, BMM, VEC…, MEM and collectives are"
        )
    row = eager_row(own, dtype)
    return {name: row.get(name) for name in OP_COLUMNS}


def graph_ops(
    graph: pd.DataFrame, mode: str, repeats: np.ndarray, width: int
) -> Iterator[tuple[str, GraphOp, float]]:
    """Yield phase, operation and number of executions of everything that a graph launches.

    Args:
        graph: Nodes of one graph.
        mode: ``inf`` (forward only) or ``train``.
        repeats: Executions of each node, shape ``(nodes,)``.
        width: Bytes of an element.
    """
    phases = ("fw",) if mode == "inf" else tuple(PHASES)
    for node, repeat in zip(graph.to_dict("records"), repeats, strict=True):
        plain = {str(key): value for key, value in node.items()}
        for phase in phases:
            for op in node_kernels(plain, phase, mode, width):
                yield phase, op, float(repeat)
