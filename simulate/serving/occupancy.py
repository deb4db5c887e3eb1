"""What an engine's cache holds between passes: running requests, and blocks of earlier prompts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from heapq import heappop, heappush

from .memory import CacheLayout
from .policies import Policy


class Occupancy:
    """Tokens that running requests take.

    A request grows by what a pass yields, less what was set aside for it; the part of it that lies
    within a window grows until the window is full.

    Args:
        cache: What there is.
        policy: Rules of the engine.
        accepted: Tokens of each sequence that a decoding pass yields.
    """

    def __init__(self, cache: CacheLayout, policy: Policy, accepted: float) -> None:
        self.cache, self.plain, self.room = cache, cache.plain, cache.tokens
        #: Tokens that a pass adds to each sequence.
        self.pace = (1.0 - policy.reserve) * accepted
        self.most = 1.0 - policy.watermark
        #: Tokens of the window, with the blocks at its ends.
        self.window = cache.window + (policy.block - 1) / 2.0 if cache.window else 0.0
        self.step = 0
        #: Tokens of all requests, and those within their windows.
        self.held = self.recent = 0.0
        #: Tokens of each request when it was admitted, and the step since when it grows.
        self._sizes: dict[int, float] = {}
        self._since: dict[int, int] = {}
        #: Steps at which requests fill their windows, of those that have not.
        self._fills: dict[int, float] = {}
        self._order: list[tuple[float, int]] = []

    @property
    def used(self) -> float:
        """Tokens that are taken; of several pools, the share of the fullest of all tokens."""
        if self.plain:
            return self.held
        share = self.cache.share(self.held, self.recent, len(self._sizes))
        return share * self.cache.tokens

    @property
    def left(self) -> float:
        """Tokens that nobody takes."""
        return self.room - self.used

    def fits(self, need: float) -> bool:
        """Whether a request of so many tokens may be admitted."""
        if self.plain:
            return self.held + need <= self.room * self.most
        recent = self.recent + min(need, self.window)
        return self.cache.share(self.held + need, recent, len(self._sizes) + 1) <= self.most

    def admit(self, index: int, need: float) -> None:
        """Give a request its tokens."""
        self._sizes[index] = need
        self.held += need
        if self.window:
            self.recent += min(need, self.window)

    def start(self, index: int) -> None:
        """A request begins to grow."""
        self._since[index] = self.step
        if not self.window:
            return
        below = self.window - self._sizes[index]
        if below > 0.0 and self.pace > 0.0:
            self._fills[index] = self.step + below / self.pace
            heappush(self._order, (self._fills[index], index))

    def grow(self, batch: int, steps: int) -> None:
        """All of ``batch`` requests grow over so many passes."""
        self.step += steps
        self.held += self.pace * batch * steps
        if not self._fills:
            return
        self.recent += self.pace * len(self._fills) * steps
        while self._order and self._order[0][0] <= self.step:
            at, index = heappop(self._order)
            if self._fills.get(index) == at:
                del self._fills[index]
                self.recent -= self.pace * (self.step - at)

    def release(self, index: int) -> None:
        """A request leaves with all that it has."""
        size = self._sizes.pop(index)
        size += self.pace * (self.step - self._since.pop(index, self.step))
        self.held -= size
        if self.window:
            self._fills.pop(index, None)
            self.recent -= min(size, self.window)

    def most_steps(self, batch: int, steps: int) -> int:
        """Passes, up to ``steps``, before requests may take more than there is; 1 at least."""
        grown = self.pace * batch
        if grown <= 0.0:
            return steps
        if self.plain:
            return max(1, min(steps, int((self.room - self.held) / grown)))
        filling, count = self.pace * len(self._fills), len(self._sizes)
        for pool in self.cache.pools:
            rate = pool.every * grown + pool.recent * filling
            if rate > 0.0:
                taken = pool.every * self.held + pool.recent * self.recent + pool.fixed * count
                steps = max(1, min(steps, int((pool.room - taken) / rate)))
        return steps

    def clear(self) -> None:
        """Nobody takes anything."""
        self.held = self.recent = 0.0


class PrefixCache:
    """Keeps blocks until room is short; the least recently used go first.

    vLLM (automatic prefix caching) and SGLang (RadixAttention; Zheng et al., 2024) do so. A block
    is found only after all before it were.

    Args:
        block_tokens: Tokens of a block.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._kept: OrderedDict[int, None] = OrderedDict()

    def match(self, blocks: Sequence[int]) -> int:
        """Tokens at the start of a prompt that are kept."""
        found = 0
        for block in blocks:
            if block not in self._kept:
                break
            found += 1
        return found * self.block_tokens

    def add(self, blocks: Sequence[int], room: float) -> None:
        """Keep the blocks of a prompt, and forget old ones beyond the room.

        Args:
            blocks: Of the prompt.
            room: Tokens of the cache that no running request needs.
        """
        # From the last to the first, so that of one prompt the end is forgotten first.
        for block in reversed(blocks):
            self._kept[block] = None
            self._kept.move_to_end(block)
        most = max(0, int(room // self.block_tokens))
        while len(self._kept) > most:
            self._kept.popitem(last=False)
