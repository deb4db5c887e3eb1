"""FLOPs of operators of transformers, for tables of operators and for the calls of a step alike.

An addition counts as one and a multiplication as another, so a product of ``m × k`` by ``k × n`` is
``2 m n k``. Sizes may be numbers or arrays. Terms are multiplied from left to right as written:
products of whole numbers are exact below ``2**53``, so that a step and a table agree to the bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np

Size = TypeVar("Size", float, "np.ndarray")


def causal_pairs(q_len: float, kv_len: float) -> float:
    """Count the (query, key) pairs of causal attention over the last ``q_len`` positions.

    Query ``i`` sees ``kv_len - q_len + 1 + i`` keys, which sum to an arithmetic series. With a
    window see :func:`.attention.visible_pairs`.
    """
    return q_len * (kv_len - (q_len - 1) / 2)


def attention_flops(batch: Size, heads: Size, pairs: Size, width: Size) -> Size:
    """Return the FLOPs of the two products of attention, ``2 · batch · heads · pairs · width``.

    Softmax is left out: its exponentials run on special-function units.

    Args:
        batch: Sequences.
        heads: Query heads.
        pairs: (query, key) pairs of a head that are computed.
        width: Elements of a key and of a value together.
    """
    # Whole numbers from left to right, see the module: the order of factors is part of the
    # contract.
    flops: Size = 2 * batch * heads * pairs * width
    return flops


def expert_flops(
    tokens: Size, topk: Size, ep: Size, hidden: Size, inner: Size, per_weight: float
) -> Size:
    """Return the FLOPs of the experts of one rank: its share of the chosen (token, expert) pairs.

    Args:
        tokens: Of all ranks.
        topk: Experts that each token is sent to.
        ep: Ranks that the experts are spread over.
        hidden: Width of the model.
        inner: Width of an expert.
        per_weight: FLOPs for each of the ``hidden · inner`` entries of an expert's matrices
            together: 2 a matrix, of which a gated expert has three.
    """
    # Division by ep after the exact product of whole numbers, for the same reason.
    flops: Size = per_weight * tokens * topk / ep * hidden * inner
    return flops
