"""Fuse producers into consumers in order of the time saved (XLA's PriorityFusion)."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable
from typing import NamedTuple

from ...ir.op_table import UPDATES, ops_with
from ...ir.program import Program
from .clusters import (
    MAX_OPERANDS,
    Cluster,
    Clusters,
    is_loop_reduction,
    is_view,
    source_of,
    written,
)
from .folding import is_elementwise, splat, squeezed
from .graph import Node
from .heroes import hero_of
from .machine import Machine
from .rows import count_of, is_read_by_rows, works_by_rows
from .work import LAUNCH, MAX_CODE, Each, Work, done_by_called, narrow_reduction

#: Ops too expensive to recompute for each element of overlapping windows.
_EXPENSIVE = ops_with(lambda spec: spec.expensive)
#: Ops that expand to dozens of others, many of which read the operand: a producer fused into them
#: would be recomputed for each of these reads.
_MANY_READS = frozenset(("chlo.erfc", "chlo.lgamma", "chlo.digamma", "chlo.erf_inv"))
#: These ops, and windows, which would recompute an expensive producer for each element they cover.
_READ_AGAIN = _MANY_READS | {"reduce-window"}


class _Pair(NamedTuple):
    """A reader, and the same reader with a producer fused into it.

    Attributes:
        version: Version of the reader for which the pair was evaluated.
        apart: Ticks of the reader without the producer.
        joined: Ticks of the fused kernel without its launch; ``None`` if it is impossible.
        form: Form of the fused kernel.
        work: Its work, if it is the first kernel of this form.
    """

    version: int
    apart: int
    joined: int | None
    form: int
    work: Work | None


class PriorityFusion:
    """Fuse producers into consumers until no fusion saves time.

    Args:
        clusters: Changed in place.
        machine: Determines whether a fusion pays off.
        program: Contains the computations that reductions apply; without it they are additions.
    """

    def __init__(
        self, clusters: Clusters, machine: Machine, program: Program | None = None
    ) -> None:
        self.clusters = clusters
        self.machine = machine
        self._each: dict[int, Each] = {}
        if program is not None:
            self._each = done_by_called(clusters.nodes, machine, program)
        self._works: dict[Cluster, tuple[int, Work]] = {}
        # The nodes that each cluster computes, operands first. A node that two of its readers fused
        # separately is listed twice, as in XLA's fusions.
        self._emitted: dict[Cluster, list[Node]] = {}
        # Layers of a model repeat the same kernels: each form is evaluated once.
        self._numbers: dict[Hashable, int] = {}
        self._forms: dict[Cluster, tuple[int, int]] = {}
        self._ticks: dict[int, int] = {}  # of a form, without its launch
        self._fitting: dict[int, int | None] = {}  # the same; None if no kernel has the form
        # Pairs are cached by producer and version, so that only changed ones are evaluated again.
        self._pairs: dict[Cluster, tuple[int, dict[Cluster, _Pair]]] = {}
        self._queue: list[tuple[int, int, int, Cluster]] = []
        self._latest: dict[Cluster, int] = {}
        self._count = 0
        # Creation order of clusters: among equal gains the last one comes first.
        self._order: dict[Cluster, int] = {}

    def run(self) -> None:
        """Fuse until no fusion saves time."""
        # XLA fuses views first, from the last one on, which re-creates their readers.
        plain: list[Cluster] = []
        viewing: list[Cluster] = []
        for cluster in self.clusters.all():
            views = any(is_view(o) for node in cluster.nodes for o in node.operands)
            (viewing if views else plain).append(cluster)
        self._order = {cluster: i for i, cluster in enumerate([*plain, *viewing[::-1]])}
        for cluster in plain + viewing:
            self._push(cluster)
        while self._queue:
            # Heap entries cannot be removed: entries replaced by later ones are skipped.
            _, _, count, cluster = heapq.heappop(self._queue)
            if self._latest.get(cluster) != count:
                continue
            users, consumers = self.clusters.users(cluster), self._consumers(cluster)
            # A gain depends on the cluster and its readers, so it changes for neighbours on both
            # sides and for other producers of the consumers.
            touched = dict.fromkeys((*consumers, *self.clusters.producers(cluster)))
            _, known = self._pairs[cluster]
            pairs = [known[consumer] for consumer in consumers]
            emitted = [self._emitted.get(consumer, consumer.nodes) for consumer in consumers]
            for consumer in consumers:
                consumer.rows |= cluster.rows
            self.clusters.absorb(cluster, consumers, keep=len(consumers) < len(users))
            taken = self._emitted.pop(cluster, cluster.nodes)
            for consumer, own, pair in zip(consumers, emitted, pairs, strict=True):
                if consumer not in self._emitted:
                    self._order[consumer] = len(self._order) + self._count
                self._emitted[consumer] = [*taken, *own]
                self._forms[consumer] = (consumer.version, pair.form)
                if pair.joined is not None:
                    self._ticks[pair.form] = pair.joined
                if pair.work is not None:
                    self._works[consumer] = (consumer.version, pair.work)
            del self._latest[cluster]
            for consumer in consumers:
                touched.update(dict.fromkeys(self.clusters.producers(consumer)))
            for other in touched:
                self._push(other)
        if not self.clusters.fused_products:
            for cluster in self.clusters.all():
                if cluster.rows and id(cluster.root) in self.clusters.by_root:
                    self._close(cluster)

    def _close(self, rows: Cluster) -> None:
        """Fuse a row kernel with all kernels that work on its rows, if the group has one result.

        Fusing only one of them may not pay off, since each would recompute the rows.
        """
        clusters = self.clusters
        group = {id(rows): rows}
        for cluster in (todo := [rows]):
            for user in clusters.users(cluster):
                if id(user) not in group and self._continues(rows, user):
                    group[id(user)] = user
                    todo.append(user)
        ends = [
            c
            for c in todo
            if id(c.root) in clusters.kept or any(id(u) not in group for u in clusters.users(c))
        ]
        if len(todo) == 1 or len(ends) != 1 or ends[0].last < max(c.last for c in todo):
            return
        members = {place: node for c in todo for place, node in c.members.items()}
        inputs = {id(node) for c in todo for node in c.inputs} - {id(c.root) for c in todo}
        apart = sum(self._alone(c) + LAUNCH for c in todo)
        together = self._evaluate(members, ends[0].roots, True).ticks() + LAUNCH
        if together < apart and len(inputs) < MAX_OPERANDS:
            for cluster in todo:
                clusters.remove(cluster)
            clusters.add(Cluster(ends[0].roots, members, rows=True))

    def _continues(self, rows: Cluster, user: Cluster) -> bool:
        """Return whether a reader can continue on the rows that a kernel holds.

        Rows of 16-bit types and their conversions are not fused, as compiled for an A100.
        """
        count = count_of(rows)
        return (
            user.consumes
            and len(user.roots) == 1
            and rows.root.type.dtype == "f32"
            and all(works_by_rows(node, count) for node in user.members.values())
        )

    def _push(self, cluster: Cluster) -> None:
        """Queue a producer if fusing it pays off."""
        self._count += 1
        self._latest[cluster] = self._count
        gain = self._gain(cluster)
        if gain is not None and gain > 0:
            heapq.heappush(self._queue, (-gain, -self._order[cluster], self._count, cluster))

    def _gain(self, producer: Cluster) -> int | None:
        """Estimate the ticks saved by fusing into all readers; ``None`` if impossible."""
        clusters = self.clusters
        root = producer.root
        if producer.library or len(producer.roots) > 1 or id(root) in clusters.kept:
            return None
        # Only values that one thread can compute per element can be fused into another kernel.
        rows = producer.rows and self._extends(producer)
        consumers = self._consumers(producer)
        if not consumers or not (
            producer.loops
            or rows
            or self._followed(producer, consumers)
            or self._finished(producer, consumers)
        ):
            return None
        if clusters.fused_products and _is_parted(root, consumers):
            return None
        # All consumers or none, as in XLA: one remaining reader of the array would keep its kernel.
        for consumer in consumers:
            if not consumer.consumes:
                return None
        version, pairs = self._pairs.get(producer, (-1, {}))
        if version != producer.version:
            pairs = {}
            self._pairs[producer] = (producer.version, pairs)
        apart = self._alone(producer) + LAUNCH * (1 + len(consumers))
        together = LAUNCH * len(consumers)
        for consumer in consumers:
            pair = pairs.get(consumer)
            if pair is None or pair.version != consumer.version:
                pairs[consumer] = pair = self._joined(producer, consumer)
            if pair.joined is None:
                return None
            apart += pair.apart
            together += pair.joined
        # The TPU compiler ignores recomputation, and its products read and write any order.
        if clusters.fused_products and "reduce" not in producer.opcodes:
            return max(apart - together, 1)
        return apart - together

    def _consumers(self, producer: Cluster) -> list[Cluster]:
        """List the readers that count; for an update, library calls that read views of it do not.

        XLA ignores bitcasts once it has fused those of all other readers. Bitcasts of other ops may
        have been moved up before that, which :mod:`simplify` does only in part.
        """
        users = self.clusters.users(producer)
        if producer.root.opcode not in UPDATES:
            return users
        return [user for user in users if user.consumes or not _views(user, producer.root)]

    def _alone(self, cluster: Cluster) -> int:
        """Return the ticks of a cluster without fusion."""
        form = self._form(cluster)
        ticks = self._ticks.get(form)
        if ticks is None:
            self._ticks[form] = ticks = self._work(cluster).ticks()
        return ticks

    def _form(self, cluster: Cluster) -> int:
        """Return the number of a cluster's form, shared by all clusters that do the same work."""
        version, form = self._forms.get(cluster, (-1, 0))
        if version != cluster.version:
            form = self._number(_form_of(cluster))
            self._forms[cluster] = (cluster.version, form)
        return form

    def _number(self, form: Hashable) -> int:
        """Number a form; the form of a fused kernel refers to its two parts by their numbers."""
        return self._numbers.setdefault(form, len(self._numbers))

    def _work(self, cluster: Cluster) -> Work:
        """Return the work of a cluster without fusion, cached until the cluster changes."""
        version, work = self._works.get(cluster, (-1, None))
        if work is None or version != cluster.version:
            nodes = self._emitted.get(cluster, cluster.nodes)
            work = Work(nodes, cluster.roots, self.machine, cluster.rows, self._each)
            self._works[cluster] = (cluster.version, work)
        return work

    def _evaluate(self, members: dict[float, Node], roots: list[Node], rows: bool) -> Work:
        return Work([members[i] for i in sorted(members)], roots, self.machine, rows, self._each)

    def _joined(self, producer: Cluster, consumer: Cluster) -> _Pair:
        """Evaluate a consumer alone and with a producer fused into it."""
        places = {node: i for i, node in enumerate((*consumer.inputs, *consumer.nodes))}
        wiring = tuple(map(places.get, (*producer.roots, *producer.inputs, *producer.nodes)))
        form = self._number((self._form(producer), self._form(consumer), wiring))
        work = None
        if form not in self._fitting:
            work = self._both(producer, consumer) if self._fits(producer, consumer) else None
            possible = work if work and work.code <= MAX_CODE else None
            self._fitting[form] = possible.ticks() if possible else None
        return _Pair(consumer.version, self._alone(consumer), self._fitting[form], form, work)

    def _both(self, producer: Cluster, consumer: Cluster) -> Work:
        """Compute the work of the consumer with the producer fused into it."""
        rows = consumer.rows or producer.rows
        if rows == consumer.rows:
            nodes = self._emitted.get(producer, producer.nodes)
            return self._work(consumer).with_producer(nodes)
        return self._evaluate({**producer.members, **consumer.members}, consumer.roots, rows)

    def _extends(self, rows: Cluster) -> bool:
        """Return whether all readers of a row kernel can continue on the rows that it holds."""
        count = count_of(rows)
        return all(
            works_by_rows(node, count)
            for user in self.clusters.users(rows)
            for node in user.members.values()
        )

    def _followed(self, producer: Cluster, consumers: list[Cluster]) -> bool:
        """Return whether a product's only reader can process its elements as they are computed."""
        if not (self.clusters.fused_products and producer.multiplies and producer.consumes):
            return False
        (reader, *others), size = consumers, producer.root.size
        if others or reader.multiplies:
            return False
        if reader.rows:
            return True
        # No op from the product to the result may read an element more than once.
        way = {id(producer.root)}
        for node in reader.nodes:
            if any(id(source_of(o)) in way for o in node.operands):
                if node.is_tuple or node.size > size or not _keeps(node):
                    return False
                way.add(id(node))
        return True

    def _finished(self, producer: Cluster, consumers: list[Cluster]) -> bool:
        """Return whether all readers of a reduction continue elementwise on its result."""
        if not producer.consumes or producer.rows or self.clusters.fused_products:
            return False
        inside = {id(node) for node in producer.nodes}
        hero = hero_of(producer.root, inside)
        if hero.opcode != "reduce" or hero.is_tuple or is_loop_reduction(hero):
            return False
        return all(
            reader.loops and hero_of(reader.root, {*inside, *map(id, reader.nodes)}) is hero
            for reader in consumers
        )

    def _fits(self, producer: Cluster, consumer: Cluster) -> bool:
        """Return whether the consumer's kernel can compute the producer."""
        root = producer.root
        by_triton = consumer.rows and not self.clusters.fused_products
        if by_triton and not all(map(is_read_by_rows, producer.members.values())):
            return False
        # The array that an update writes to must already exist in memory.
        filled = self.clusters.fused_products and splat(root) is not None
        into = [source_of(node.operands[i]) for node in consumer.roots for i in written(node)]
        if not filled and any(array is root for array in into):
            return False
        apart = _MANY_READS if _EXPENSIVE.isdisjoint(producer.opcodes) else _READ_AGAIN
        if not apart.isdisjoint(consumer.opcodes):
            for node in consumer.members.values():
                if node.opcode in apart and source_of(node.operands[0]) is root:
                    return False
        inputs = {*producer.inputs, *consumer.inputs} - {root}
        if len(inputs) > MAX_OPERANDS:
            return False
        # One input at least half as large as the reduced array is allowed: the array itself.
        narrow = narrow_reduction(consumer, self.machine)
        if narrow is None:
            return True
        size = narrow.operands[0].size
        return sum(2 * node.size >= size for node in inputs) <= 1


def _is_parted(root: Node, readers: Iterable[Cluster]) -> bool:
    """Return whether a TPU's kernels read a value in slices or in another shape, or pad it.

    The compiler fuses nothing into the kernel of a pad and nothing that is read through a reshape,
    and computes only once what several slices read.
    """
    slices, own = 0, sorted(squeezed(root.type.shape))
    for node in (node for reader in readers for node in reader.nodes):
        for operand in node.operands:
            if source_of(operand) is root:
                # A transpose does not change the sizes.
                if node.opcode == "pad" or sorted(squeezed(operand.type.shape)) != own:
                    return True
                slices += node.opcode == "slice"
    return slices > 1


def _views(reader: Cluster, root: Node) -> bool:
    """Return whether a kernel reads a value only through views."""
    return not any(operand is root for node in reader.nodes for operand in node.operands)


def _form_of(cluster: Cluster) -> Hashable:
    """Describe what a cluster computes, independently of its inputs."""
    names: dict[Node, object] = {node: i for i, node in enumerate(cluster.nodes)}
    names.update((node, (i, node.results)) for i, node in enumerate(cluster.inputs))
    ops = []
    for node in cluster.nodes:
        read = [(names.get(source_of(o)), o.type) for o in node.operands]
        attrs = tuple([(k, repr(v)) for k, v in node.attrs.items()]) if node.attrs else ()
        ops.append((node.opcode, node.results, attrs, node.called, tuple(read)))
    roots = tuple([names[root] for root in cluster.roots])
    return tuple(ops), roots, cluster.rows, cluster.library


def _keeps(node: Node) -> bool:
    """Return whether an op reads each element once."""
    return is_elementwise(node) or node.opcode in ("transpose", "slice")
