"""Which kernels need which, known at once however far apart they are."""

from __future__ import annotations

from .clusters import Cluster, Clusters


class Dependences:
    """All kernels that each one needs, as bits of an integer, kept up while kernels are merged.

    Args:
        clusters: Those of a graph; from here on they change by :meth:`merge` alone.
    """

    def __init__(self, clusters: Clusters) -> None:
        self._clusters = clusters
        # By id of a cluster, all of which are alive: its own bits, and those of what it needs.
        self._own = {id(cluster): 1 << i for i, cluster in enumerate(clusters.all())}
        self._needed: dict[int, int] = {}
        for cluster in clusters.all():
            self._find(cluster)

    def _find(self, start: Cluster) -> None:
        # With an explicit stack: chains of kernels are longer than Python's recursion limit.
        stack = [start]
        while stack:
            cluster = stack[-1]
            if id(cluster) in self._needed:
                stack.pop()
                continue
            makers = [p for p in self._clusters.producers(cluster) if p is not cluster]
            missing = [p for p in makers if id(p) not in self._needed]
            if missing:
                stack += missing
                continue
            needed = 0
            for producer in makers:
                needed |= self._needed[id(producer)] | self._own[id(producer)]
            self._needed[id(cluster)] = needed

    def reaches(self, start: Cluster, target: Cluster) -> bool:
        """Return whether ``start`` needs a result of ``target``, directly or not."""
        return bool(self._needed[id(start)] & self._own[id(target)])

    def merge(self, first: Cluster, second: Cluster) -> Cluster:
        """Merge two clusters, whose readers then need what both needed."""
        made = self._clusters.merge(first, second)
        own = self._own.pop(id(first)) | self._own.pop(id(second))
        needed = (self._needed.pop(id(first)) | self._needed.pop(id(second))) & ~own
        for key, known in self._needed.items():
            if known & own:
                self._needed[key] = known | needed | own
        self._own[id(made)], self._needed[id(made)] = own, needed
        return made
