"""A cache of answers that evicts the least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable


class LruCache:
    """Cache that evicts the least recently used entries when full. Not thread-safe.

    Args:
        capacity: Maximum sum of the entries' weights; 0 disables the cache.

    Attributes:
        hits: Look-ups that found an entry.
        misses: Look-ups that found none.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.hits = 0
        self.misses = 0
        self._weight = 0
        self._entries: OrderedDict[Hashable, tuple[object, int]] = OrderedDict()

    def __len__(self) -> int:
        """Number of entries."""
        return len(self._entries)

    def get_many(self, keys: Iterable[Hashable]) -> list[object]:
        """Value of each key, or ``None``."""
        values: list[object] = []
        get, renew = self._entries.get, self._entries.move_to_end
        missing = 0
        for key in keys:
            entry = get(key)
            if entry is None:
                missing += 1
                values.append(None)
            else:
                renew(key)
                values.append(entry[0])
        self.misses += missing
        self.hits += len(values) - missing
        return values

    def put(self, key: Hashable, value: object, weight: int = 1) -> None:
        """Store a value that is not ``None``.

        Args:
            key: Key.
            value: Value.
            weight: Part of the capacity that it uses.
        """
        before = self._entries.pop(key, None)
        self._weight += weight - (before[1] if before else 0)
        self._entries[key] = value, weight
        while self._weight > self.capacity:
            self._weight -= self._entries.popitem(last=False)[1][1]
