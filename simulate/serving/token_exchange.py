"""Times of sending tokens to the ranks of their experts and back, by DeepEP's kernels.

Those of high throughput send a token once to each box that it has experts in, where it is forwarded
over the links inside; those of low latency send each token to each of its experts. Fitted to the
bandwidths and latencies that DeepEP publishes of H800 (github.com/deepseek-ai/DeepEP,
docs/legacy.md: 8 to 64 and 8 to 256 ranks), which they give within 12 %.
"""

from __future__ import annotations

from typing import NamedTuple

#: Fixed seconds of a kernel.
_START_S = 40e-6
#: Share of the links that a kernel of low latency reaches, inside a box as between boxes.
_DIRECT = 0.95
#: Of one of high throughput: of the network, and of the links inside a box.
_BETWEEN, _INSIDE = 0.88, 0.77
#: Multiprocessors that kernels of high throughput take away from others; those of low latency take
#: none while tokens are on their way (DeepEP's ``set_num_sms(24)``).
EXCHANGE_CORES = 24
#: Shares of an exchange that the kernels of another half of the batch hide, of those of high
#: throughput and of low latency, whose sending and receiving keep all cores busy: two-batch overlap
#: brings 27 to 35 % of throughput in prefill and 25 % in decode of 256 sequences a rank (LMSYS,
#: Large-scale Expert Parallelism on 96 H100, 2025), which these give.
HIDDEN, HIDDEN_DIRECT = 0.77, 0.55
#: Bytes of a scale for each element of a row in 8 bits or fewer: one of 32 bits for 128.
_SCALE = 4.0 / 128.0


class Links(NamedTuple):
    """What ranks send tokens over.

    Attributes:
        box: Ranks that the links inside a box join.
        inside: Bytes a second of a rank to others of its box, one way.
        between: To those of other boxes.
    """

    box: int
    inside: float
    between: float


def row_bytes(width: int, activation_bits: float) -> tuple[float, float]:
    """Bytes of a token on its way to an expert, and back, where results stay in 16 bits.

    Args:
        width: Of the model.
        activation_bits: Of what experts multiply; operands of 4 bits are sent in 8.
    """
    sent = 1.0 + _SCALE if activation_bits <= 8 else 2.0
    return width * sent, width * 2.0


def exchange_seconds(
    links: Links, ranks: int, sent: float, top_k: int, most_boxes: int, *, direct: bool
) -> float:
    """Seconds of one dispatch or combine.

    Args:
        links: Of the cluster.
        ranks: Of expert parallelism.
        sent: Bytes of a rank's tokens, each once.
        top_k: Experts of a token.
        most_boxes: Boxes that the experts of a token lie in at most; 0 for no limit.
        direct: Whether by the kernels of low latency.
    """
    boxes = -(-ranks // links.box)
    away = 1.0 - 1.0 / boxes
    if direct:
        over, inside = sent * top_k * away, sent * top_k / boxes
        return _START_S + max(over / links.between, inside / links.inside) / _DIRECT
    reached = _distinct(boxes, top_k)
    reached = min(reached, most_boxes) if most_boxes else reached
    over, inside = sent * reached * away, sent * _distinct(ranks, top_k)
    return _START_S + max(over / (_BETWEEN * links.between), inside / (_INSIDE * links.inside))


def _distinct(places: int, draws: int) -> float:
    """Expected number of places that as many even draws reach."""
    return float(places * (1.0 - (1.0 - 1.0 / places) ** draws))
