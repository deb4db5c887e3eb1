"""A cache of answers that forgets those that were not asked for longest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Any


class LruCache:
    """Least recently used entries go when it is full. For one thread.

    Args:
        entries: Most entries; 0 keeps none.

    Attributes:
        hits: Look-ups that found something.
        misses: Look-ups that did not.
    """

    def __init__(self, entries: int) -> None:
        self.entries = entries
        self.hits = 0
        self.misses = 0
        self._found: OrderedDict[Hashable, Any] = OrderedDict()

    def __len__(self) -> int:
        """Number of entries."""
        return len(self._found)

    def get_many(self, keys: Iterable[Hashable]) -> list[Any]:
        """Value of each key, ``None`` where there is none."""
        found, get, renew = [], self._found.get, self._found.move_to_end
        missing = 0
        for key in keys:
            value = get(key)
            if value is None:
                missing += 1
            else:
                renew(key)
            found.append(value)
        self.misses += missing
        self.hits += len(found) - missing
        return found

    def put(self, key: Hashable, value: Any) -> None:
        """Remember a value that is not ``None``."""
        self._found[key] = value
        self._found.move_to_end(key)
        while len(self._found) > self.entries:
            self._found.popitem(last=False)
