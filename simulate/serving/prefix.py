"""Blocks of prompts that an engine keeps for later prompts that begin alike."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


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
