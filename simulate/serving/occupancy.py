"""Contents of an engine's KV cache between passes: running requests and prefix-cache blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from heapq import heappop, heappush

from .memory import CacheLayout
from .policies import Policy


class Occupancy:
    """Cache tokens held by running requests.

    A request grows by the tokens of each pass, less those reserved for it at admission; its part
    within a sliding window grows until the window is full.

    Args:
        cache: Capacity and layout of the cache.
        policy: Scheduling rules of the engine.
        accepted: Tokens that a decoding pass yields for each sequence.
    """

    def __init__(self, cache: CacheLayout, policy: Policy, accepted: float) -> None:
        self.cache, self.plain, self.room = cache, cache.plain, cache.tokens
        #: Tokens that a pass adds for each sequence.
        self.pace = (1.0 - policy.reserve) * accepted
        self.most = 1.0 - policy.watermark
        #: Tokens of the window, including the partly filled blocks at its ends.
        self.window = cache.window + (policy.block - 1) / 2.0 if cache.window else 0.0
        self.step = 0
        #: Tokens of all requests, and those within their windows.
        self.held = self.recent = 0.0
        #: Tokens of each request at admission, and the step at which it began to grow.
        self._sizes: dict[int, float] = {}
        self._since: dict[int, int] = {}
        #: Steps at which requests that have not yet filled their window will do so.
        self._fills: dict[int, float] = {}
        self._order: list[tuple[float, int]] = []

    @property
    def used(self) -> float:
        """Occupied tokens; with several pools, the occupancy of the fullest times all tokens."""
        if self.plain:
            return self.held
        share = self.cache.share(self.held, self.recent, len(self._sizes))
        return share * self.cache.tokens

    @property
    def left(self) -> float:
        """Free tokens."""
        return self.room - self.used

    def fits(self, need: float) -> bool:
        """Whether a request that needs ``need`` tokens may be admitted."""
        if self.plain:
            return self.held + need <= self.room * self.most
        recent = self.recent + min(need, self.window)
        return self.cache.share(self.held + need, recent, len(self._sizes) + 1) <= self.most

    def admit(self, index: int, need: float) -> None:
        """Allocate the tokens of a request."""
        self._sizes[index] = need
        self.held += need
        if self.window:
            self.recent += min(need, self.window)

    def start(self, index: int) -> None:
        """Let a request begin to grow."""
        self._since[index] = self.step
        if not self.window:
            return
        below = self.window - self._sizes[index]
        if below > 0.0 and self.pace > 0.0:
            self._fills[index] = self.step + below / self.pace
            heappush(self._order, (self._fills[index], index))

    def grow(self, batch: int, steps: int) -> None:
        """Grow all ``batch`` requests over ``steps`` passes."""
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
        """Free everything that a request holds."""
        size = self._sizes.pop(index)
        size += self.pace * (self.step - self._since.pop(index, self.step))
        self.held -= size
        if self.window:
            self._fills.pop(index, None)
            self.recent -= min(size, self.window)

    def most_steps(self, batch: int, steps: int) -> int:
        """Passes, at least 1 and at most ``steps``, before the cache may overflow."""
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
        """Reset to an empty cache."""
        self.held = self.recent = 0.0


class PrefixCache:
    """Keeps blocks of earlier prompts while there is room, and evicts the least recently used.

    As in vLLM (automatic prefix caching) and SGLang (RadixAttention; Zheng et al., 2024). A block
    matches only if all blocks before it match.

    Args:
        block_tokens: Tokens per block.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._kept: OrderedDict[int, None] = OrderedDict()

    def match(self, blocks: Sequence[int]) -> int:
        """Tokens at the start of a prompt that are cached."""
        found = 0
        for block in blocks:
            if block not in self._kept:
                break
            found += 1
        return found * self.block_tokens

    def add(self, blocks: Sequence[int], room: float) -> None:
        """Keep the blocks of a prompt, and evict old ones beyond the room.

        Args:
            blocks: Block identifiers of the prompt.
            room: Cache tokens that no running request needs.
        """
        # Last block first, so that the end of a prompt is evicted before its start.
        for block in reversed(blocks):
            self._kept[block] = None
            self._kept.move_to_end(block)
        most = max(0, int(room // self.block_tokens))
        while len(self._kept) > most:
            self._kept.popitem(last=False)
