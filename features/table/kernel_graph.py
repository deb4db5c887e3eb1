"""Kernels as graphs: a node per op of the fused computation, an edge per use of its value."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from math import log2

import numpy as np

from ..ir.op_table import OPS, OpSpec, by_op
from ..ir.program import FAMILIES, Op
from ..kernels.kernel import Kernel
from .columns import (
    AMOUNTS,
    CODE_FLAGS,
    COMMON_COUNTS,
    COMMON_FLAGS,
    FREE,
    GRAPH_OPCODES,
    INDEX,
    NO_FACTS,
    RARE_COUNTS,
    RARE_FLAGS,
    type_facts,
)
from .row import code_flags, rows
from .row_movement import HANDLERS
from .row_products import Row

#: Incremented whenever the meaning of a node or kernel feature changes.
GRAPH_VERSION = 1

_OTHER = OpSpec()
#: Opcodes by id; the last stands for unknown ones.
OPCODES = (*GRAPH_OPCODES, "<unknown>")
OPCODE_ID = by_op({name: i for i, name in enumerate(OPCODES)})
#: Id of opcodes that are neither listed nor equivalent to one that is.
UNKNOWN = len(OPCODES) - 1

#: Dimensions listed per node, minor first; further ones only show in the node's size.
MAX_DIMS = 6
NODE_FEATURES = (
    "log_size",
    "log_bytes",
    "log_work",
    "log_bits",
    "rank",
    "is_tuple",
    "is_root",
    "is_input",
    "is_constant",
    *(f"dtype_{family}" for family in FAMILIES),
    "n_operands",
    "n_users",
    "depth",
    *(f"log_dim_{i}" for i in range(MAX_DIMS)),
)
# Dtype codes are not amounts: their logarithm would be meaningless.
_LOGGED = tuple(name for name in AMOUNTS if name not in ("matrix_dtype", "vector_dtype"))
_COUNTS = (*_LOGGED, *COMMON_COUNTS, *RARE_COUNTS)
_FLAGS = (*COMMON_FLAGS, *RARE_FLAGS)
KERNEL_FEATURES = (*(f"log_{name}" for name in _COUNTS), *_FLAGS, *CODE_FLAGS)
_COUNTS_AT = np.array([INDEX[name] for name in _COUNTS])
_FLAGS_AT = np.array([INDEX[name] for name in _FLAGS])


@dataclass(slots=True)
class KernelGraph:
    """A kernel as a device-independent graph of ``n`` nodes and ``m`` edges.

    Attributes:
        node_opcode: Indices into :data:`OPCODES`, int32, shape ``(n,)``.
        node_features: As in :data:`NODE_FEATURES`, float32, shape ``(n, f)``; dimensions are
            listed minor first, as in memory.
        edges: Producer (row 0) and user (row 1) of every use, int32, shape ``(2, m)``.
        kernel_features: As in :data:`KERNEL_FEATURES`, float32, shape ``(k,)``.
    """

    node_opcode: np.ndarray
    node_features: np.ndarray
    edges: np.ndarray
    kernel_features: np.ndarray


def kernel_graph(kernel: Kernel) -> KernelGraph:
    """Build the graph of the fused computation, or of the instruction with its parameters.

    Nodes keep the order of the computation, so edges point from lower to higher indices.
    """
    ops = kernel.inner.ops
    # A root of -1 means the last op.
    root = kernel.inner.root % len(ops)
    edges = [(source, i) for i, op in enumerate(ops) for source in op.operands]
    work = _work(kernel)
    users, depth = _users_and_depth(ops)
    nodes = [_describe(op, work[i], i == root, users[i], depth[i]) for i, op in enumerate(ops)]
    row = rows([kernel])
    one_hot = [hot[0] for hot in code_flags(row)]
    summary = np.concatenate([np.log2(1.0 + row[0, _COUNTS_AT]), row[0, _FLAGS_AT], *one_hot])
    return KernelGraph(
        node_opcode=np.array([OPCODE_ID.get(op.opcode, UNKNOWN) for op in ops], np.int32),
        node_features=np.array(nodes, np.float32).reshape(-1, len(NODE_FEATURES)),
        edges=np.array(edges, np.int32).reshape(-1, 2).T,
        kernel_features=summary.astype(np.float32),
    )


def _describe(op: Op, work: float, is_root: bool, users: int, depth: int) -> list[float]:
    """Return the features of one node, in the order of :data:`NODE_FEATURES`."""
    facts = type_facts(op.type) if op.results else NO_FACTS
    families = [0.0] * len(FAMILIES)
    # Tokens and opaque values have the family NONE, which has its own flag.
    families[facts.family] = float(bool(op.results))
    dims = [log2(1 + op.type.shape[d]) for d in facts.order[:MAX_DIMS]]
    dims += [0.0] * (MAX_DIMS - len(dims))
    return [
        log2(1 + facts.size),
        log2(1 + op.result_bytes),
        log2(1 + work),
        log2(1 + facts.bits),
        len(facts.order),
        op.is_tuple,
        is_root,
        op.opcode == "parameter",
        op.opcode == "constant",
        *families,
        len(op.operands),
        users,
        depth,
        *dims,
    ]


def _work(kernel: Kernel) -> list[float]:
    """Return the work of each op: FLOPs of a dot or convolution, else weighted elements."""
    work = []
    ops = kernel.inner.ops
    for op in ops:
        weight = OPS.get(op.opcode, _OTHER).weight
        if op.opcode in FREE or not op.results:
            work.append(0.0)
            continue
        handler = HANDLERS.get(op.opcode)
        # Handlers write details into a row; only the product's FLOPs are used here.
        scratch: Row = defaultdict(float)
        size = handler(scratch, op, ops, kernel.body) if handler else type_facts(op.type).size
        work.append(scratch["dense_flops"] + weight * size)
    return work


def _users_and_depth(ops: list[Op]) -> tuple[list[int], list[int]]:
    users, depth = [0] * len(ops), [0] * len(ops)
    for i, op in enumerate(ops):
        for source in op.operands:
            users[source] += 1
        # Free ops add no depth: a chain of tuples takes no time.
        below = max((depth[source] for source in op.operands), default=0)
        depth[i] = below + (op.opcode not in FREE)
    return users, depth


@cache
def graph_schema_hash() -> str:
    """Return a digest of version, opcodes and feature names; models store it and reject others."""
    text = "\n".join((str(GRAPH_VERSION), *OPCODES, *NODE_FEATURES, *KERNEL_FEATURES))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
