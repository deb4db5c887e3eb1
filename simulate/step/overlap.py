"""Communication beside computation: two streams of one device, each in its own order.

All times are in seconds. Whatever the input, the total is at least the longer of both streams' sums
and at most the sum of both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class Pass(NamedTuple):
    """A pass over layers, in the order in which they run.

    Attributes:
        compute: Seconds of each layer.
        gather: Gather of each layer's parameters before it runs; empty for none.
        scatter: Reduction of each layer's gradients after it has run; empty for none.
    """

    compute: Sequence[float]
    gather: Sequence[float] = ()
    scatter: Sequence[float] = ()


class PassRun(NamedTuple):
    """Ends of passes.

    Attributes:
        ends: End of each pass's computation, in seconds.
        links: End of the last collective, in seconds.
    """

    ends: tuple[float, ...]
    links: float

    @property
    def total(self) -> float:
        """End of everything."""
        return max(self.ends[-1], self.links)


def run_passes(passes: Sequence[Pass], ahead: int = 1) -> PassRun:
    """Run passes one after another, with their collectives beside them on one stream.

    The gather of layer ``i`` may start when layer ``i - 1 - ahead`` has ended, so that at most
    ``1 + ahead`` layers are gathered at a time (Zhao et al., PyTorch FSDP, VLDB 2023); the first
    ones of a pass wait for the previous pass. A layer's gather takes precedence over the reduction
    of the layer before it; reductions continue beside later passes.

    Args:
        passes: Passes in order, at least one.
        ahead: Layers gathered in advance. 1 is FSDP's default prefetch, which also bounds memory.
    """
    # ``device`` and ``links`` are the times at which either stream becomes free.
    device = links = 0.0
    waiting: deque[tuple[float, float]] = deque()
    pass_ends = []
    for compute, gather, scatter in passes:
        begin, ends = device, list[float]()
        for layer, own in enumerate(compute):
            if gather and gather[layer] > 0.0:
                free = ends[layer - 1 - ahead] if layer > ahead else begin
                # Reductions that were ready before this gather could start were issued before it,
                # and a communicator keeps the order in which collectives are issued.
                while waiting and waiting[0][0] <= free:
                    ready, seconds = waiting.popleft()
                    links = max(links, ready) + seconds
                links = max(links, free) + gather[layer]
                device = max(device, links)
            device += own
            ends.append(device)
            if scatter and scatter[layer] > 0.0:
                waiting.append((device, scatter[layer]))
        pass_ends.append(device)
    for ready, seconds in waiting:
        links = max(links, ready) + seconds
    return PassRun(tuple(pass_ends), links)


def exposed(total: float, compute: float) -> float:
    """Return the part of a total that computation does not cover, never negative."""
    return max(0.0, total - compute)


def ring(block: float, send: float, steps: int) -> float:
    """Return the time of ``steps`` blocks of attention that forward their keys while computing.

    The last block sends nothing: ``block + (steps - 1) · max(block, send)`` (Liu et al., Ring
    Attention with Blockwise Transformers, 2023).

    Args:
        block: Computation of one block.
        send: Transfer of one block.
        steps: Ranks of the ring.
    """
    return block + (steps - 1) * max(block, send)
