"""How much engines can serve where requests never run out, against what a load offers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .fleet import Station, run_fleet
from .load import Load

#: Times that the largest batch of an engine is filled; engineering choice.
_FILLS = 4


def capacity(load: Load, station: Station, prefill: Station | None = None) -> float:
    """Requests a second that engines serve at most, in requests such as those of a load.

    Equal engines behind a router serve so many times what one serves, and of two kinds in a row the
    slower decides.

    Args:
        load: The requests.
        station: Engines that decode, and run prompts as well unless ``prefill`` does.
        prefill: Engines that run prompts alone.
    """
    if prefill is None:
        return _of_one(load, station) * station.count
    ahead = replace(load, outputs=np.ones_like(load.outputs))
    behind = replace(load, ready=True, blocks=())
    return min(
        _of_one(ahead, prefill) * prefill.count,
        _of_one(behind, station) * station.count,
    )


def _of_one(load: Load, station: Station) -> float:
    """Requests a second of one engine that has them all at once."""
    asked = len(load.prompts)
    # Costs are known for batches of at most all requests.
    batch = min(station.policy.max_batch, asked)
    count = _FILLS * batch
    if load.blocks:
        # The more requests, the more of them find what others left: none is dropped.
        count = max(count, asked)
    at = np.arange(count) % asked
    many = replace(
        load,
        prompts=load.prompts[at],
        outputs=load.outputs[at],
        arrivals=np.zeros(count),
        concurrency=0,
        hits=None if load.hits is None else load.hits[at],
        blocks=_repeated(load.blocks, count),
    )
    one = replace(station, count=1, policy=replace(station.policy, max_batch=batch))
    # While the last batch runs empty there is no other request waiting.
    full = max(1, count - batch)
    return full / float(np.sort(run_fleet(many, one).finished)[full - 1])


def _repeated(blocks: Sequence[Sequence[int]], count: int) -> list[tuple[int, ...]]:
    """Blocks of a load that is repeated: those of each repetition have names of their own.

    Prompts share what they share in the load itself, and find nothing of the repetition before:
    that a request comes twice is no property of the load.
    """
    names = {block for own in blocks for block in own}
    step = max(names, default=0) - min(names, default=0) + 1
    return [
        tuple(block + step * (at // len(blocks)) for block in blocks[at % len(blocks)])
        for at in range(count if blocks else 0)
    ]
