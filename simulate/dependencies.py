"""Dependencies of an event simulation: which nodes may run once others are done."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Dependencies:
    """Counts what each node still waits for (the bookkeeping of Kahn, CACM 5, 1962).

    Args:
        operands: For each node, the nodes that it needs; one named twice counts twice.
    """

    def __init__(self, operands: Sequence[Iterable[int]]) -> None:
        self._waiting = [0] * len(operands)
        self._readers: list[list[int]] = [[] for _ in operands]
        for node, needed in enumerate(operands):
            for operand in needed:
                # One entry and one count per use, so that an operand read twice still balances.
                self._readers[operand].append(node)
                self._waiting[node] += 1

    def ready(self) -> list[int]:
        """Return the nodes that wait for nothing, in program order."""
        return [node for node, count in enumerate(self._waiting) if not count]

    def finish(self, node: int) -> list[int]:
        """Mark a node as done and return the nodes it releases, in the order they read it."""
        released = []
        for reader in self._readers[node]:
            self._waiting[reader] -= 1
            if not self._waiting[reader]:
                released.append(reader)
        return released
