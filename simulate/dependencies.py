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
                self._readers[operand].append(node)
                self._waiting[node] += 1

    def ready(self) -> list[int]:
        """Nodes that wait for nothing, in their order."""
        return [node for node, count in enumerate(self._waiting) if not count]

    def finish(self, node: int) -> list[int]:
        """Count a node as done; the nodes that now wait for nothing, in the order of their use."""
        released = []
        for reader in self._readers[node]:
            self._waiting[reader] -= 1
            if not self._waiting[reader]:
                released.append(reader)
        return released
