"""Communication beside computation: two streams of one device, each in its own order.

All times are in seconds. The bounds always hold: the total is at least the longer of both sums, and
at most both together.
"""

from __future__ import annotations

from collections.abc import Sequence


def prefetched(compute: Sequence[float], gather: Sequence[float], ahead: int = 1) -> float:
    """Time of layers whose parameters are gathered before they run.

    The gather of layer ``i`` may start when layer ``i - 1 - ahead`` has ended, so that at most
    ``1 + ahead`` layers lie gathered at a time (Zhao et al., PyTorch FSDP, VLDB 2023).

    Args:
        compute: Of each layer in the order in which they run.
        gather: Of each layer's parameters.
        ahead: Layers that are gathered ahead.
    """
    return _gathered(compute, gather, [0.0] * len(compute), ahead)


def scattered(
    compute: Sequence[float], scatter: Sequence[float], gather: Sequence[float] | None = None,
    ahead: int = 1,
) -> float:  # fmt: skip
    """Time of a backward pass whose gradients are reduced as they are made.

    Args:
        compute: Of each layer in the order of the backward pass.
        scatter: Reduction of each layer's gradients, after it has run.
        gather: Gather of each layer's parameters, before it runs; on the same links.
        ahead: As for :func:`prefetched`.
    """
    return _gathered(compute, gather or [0.0] * len(compute), scatter, ahead)


def _gathered(
    compute: Sequence[float], gather: Sequence[float], scatter: Sequence[float], ahead: int
) -> float:
    """Two streams; of what waits for the links, a gather goes first."""
    ends: list[float] = []
    links = device = 0.0
    waiting = 0
    for layer, own in enumerate(compute):
        if gather[layer] > 0.0:
            free = ends[layer - 1 - ahead] if layer > ahead else 0.0
            while waiting < layer and scatter[waiting] > 0.0 and ends[waiting] <= max(links, free):
                links = max(links, ends[waiting]) + scatter[waiting]
                waiting += 1
            links = max(links, free) + gather[layer]
            device = max(device, links)
        device += own
        ends.append(device)
    for layer in range(waiting, len(compute)):
        if scatter[layer] > 0.0:
            links = max(links, ends[layer]) + scatter[layer]
    return max(device, links)


def exposed(total: float, compute: float) -> float:
    """Part of a total that computation does not cover, never negative."""
    return max(0.0, total - compute)


def ring(block: float, send: float, steps: int) -> float:
    """Time of ``steps`` blocks of attention, each sending its keys on while it computes.

    The last block sends nothing: ``block + (steps - 1) · max(block, send)`` (Liu et al., Ring
    Attention with Blockwise Transformers, 2023).

    Args:
        block: Computation of one block.
        send: Transfer of one block.
        steps: Ranks of the ring.
    """
    return block + (steps - 1) * max(block, send)
