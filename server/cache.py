"""A least-recently-used cache of answers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable


class LruCache:
    """Cache that evicts the least recently used entries when full. Not thread-safe.

    Args:
        entries: Most entries; 0 keeps none.

    Attributes:
        hits: Look-ups that had an entry.
        misses: Look-ups that had none.
    """

    def __init__(self, entries: int) -> None:
        self.entries = entries
        self.hits = 0
        self.misses = 0
        self._entries: OrderedDict[Hashable, object] = OrderedDict()

    def __len__(self) -> int:
        """Number of entries."""
        return len(self._entries)

    def get_many(self, keys: Iterable[Hashable]) -> list[object]:
        """Value of each key, or ``None``."""
        values, get, renew = [], self._entries.get, self._entries.move_to_end
        missing = 0
        for key in keys:
            value = get(key)
            if value is None:
                missing += 1
            else:
                renew(key)
            values.append(value)
        self.misses += missing
        self.hits += len(values) - missing
        return values

    def put(self, key: Hashable, value: object) -> None:
        """Remember a value that is not ``None``."""
        self._entries[key] = value
        self._entries.move_to_end(key)
        while len(self._entries) > self.entries:
            self._entries.popitem(last=False)
