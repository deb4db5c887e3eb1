"""Estimate the time of a fused kernel, which decides whether a fusion pays off.

The model has the form of XLA's GPU performance model: bytes at memory bandwidth, repeated reads at
cache bandwidth, arithmetic at the rate of the vector units, both mostly overlapped, a fixed cost
per launch, and lower rates if too few blocks run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, gcd, prod
from typing import NamedTuple

from ....common.files import own_data
from ...ir.op_table import PLACED, UPDATES, ops_with
from ...ir.program import DTYPE_BITS, Program, TensorType
from .clusters import FOLDS, PRODUCTS, Cluster, Shape, is_loop_reduction, reduction, source_of
from .graph import Node
from .heroes import hero_of, turns_minor, turns_tiles
from .machine import Machine

#: Ticks per second in which XLA measures time (absl::Duration); smaller differences are ignored.
_TICKS = 4e9
#: Ticks of an additional kernel: the microsecond that XLA's GpuPerformanceModel assumes per launch,
#: not the launch overhead of the device.
LAUNCH = 4000

# The form is that of XLA's GpuPerformanceModel, on which PriorityFusion bases its decisions. The
# times only rank fusions against each other; no prediction is made from them.
#: Fraction of the shorter of memory and compute time that overlaps with the longer one:
#: kMemoryComputeParallelism in XLA's gpu_performance_model_base.h.
_OVERLAP = 0.95
#: Ratio of L2 to main memory bandwidth: kL2CacheSpeedup, same file.
_CACHE_SPEED_UP = 2.5
#: Ratio of L1 to L2 bandwidth, and bytes of L1 per core: kL1CacheSpeedup and kL1CacheSizePerSM,
#: same file.
_L1_SPEED_UP = 8.0
_L1_BYTES = 2048
#: Bytes of a memory transaction, of which an uncoalesced read uses a single element
#: (kDRAMToL2TransactionSizeBytes).
_SECTOR = 64
#: Threads per block of a loop kernel, and most elements per thread; threads per multiprocessor,
#: below which each thread computes one element (ComputeLoopFusionConfig in XLA's gpu_fusible.cc).
_THREADS, _UNROLLED, _HELD = 128, 4, 2048
#: Bytes that a block moves per cycle: an SM issues at most one 32-byte transaction per clock
#: (AdjustBandwidth in XLA's gpu_performance_model_base.cc).
_BYTES_PER_CYCLE = 32.0
#: Cycles of elementwise ops by compute capability, the capability used for others, and the cycles
#: of unlisted ops or types (GetFlopsForElementwiseOp).
_CYCLES = own_data("features/lowering/fused/cycles.toml")
_USUAL_CAPABILITY, _CYCLES_OF_OTHERS = "86", 3.0
_PROFILED = frozenset(("f16", "f32", "f64"))
_IDLE = frozenset(("constant", "copy", "dynamic-update-slice", "parameter", "tuple"))
#: Ops that apply a computation.
_CALLING = FOLDS | {"map"}
#: Ops whose readers each read different elements, so that the elements they need add up.
_MOVING = ops_with(lambda spec: spec.placed and spec.operands > 0)
#: Most ops in the code of one kernel, duplicates included (kMaxIRSize in XLA's
#: gpu_hlo_cost_analysis.h).
MAX_CODE = 10_000
#: Cycles per element of a concatenation, without and with warps that cross from one operand to the
#: next; threads per warp (HandleConcatenate in XLA's gpu_hlo_cost_analysis.cc).
_JOIN_CYCLES, _CROSSING_CYCLES, _WARP = 6.0, 400.0, 32


class _Read(NamedTuple):
    """Read of an operand: ``count × times / per + fixed`` elements for ``count`` results.

    Attributes:
        key: ``id`` of the node that makes it.
        times: Elements of the operand that are read for ...
        per: ... this many elements of the result.
        fixed: Elements that are read independently of the count.
        size: Number of elements of the array.
        width: Bytes per element.
        apart: Whether it shares no loads with the reads of other ops, so that they add up.
    """

    key: int
    times: float
    per: float
    fixed: float
    size: float
    width: float
    apart: bool


class Each(NamedTuple):
    """Work of an op, independent of the kernel that computes it.

    Attributes:
        cycles: Cycles per input element.
        factor: Input elements per output element.
        turns: Whether adjacent results read elements that are not adjacent.
        reads: Reads of its operands.
        in_place: Number of leading operands that it overwrites instead of reading if it is a root.
    """

    cycles: float
    factor: float
    turns: bool
    reads: tuple[_Read, ...]
    in_place: int


def done_by_called(nodes: Iterable[Node], machine: Machine, program: Program) -> dict[int, Each]:
    """Describe the work of ops that call computations of a program, by ``id`` of their nodes."""
    costs: dict[str, float] = {}
    found = {}
    for node in nodes:
        if node.opcode in _CALLING and node.called:
            name = node.called[0]
            if name not in costs:
                inner = program.computations[name].ops
                costs[name] = sum([_cycles(op.opcode, op.results[0], machine) for op in inner])
            found[id(node)] = _done_by(node, machine, costs[name])
    return found


def _done_by(node: Node, machine: Machine, called: float | None = None) -> Each:
    """Describe the work of an op; ``called`` is the cycle count of the computation it applies."""
    opcode = node.opcode
    factor = 1.0
    if opcode == "reduce":
        factor = node.operands[0].size / max(1, node.size)
    elif opcode == "reduce-window":
        factor = float(prod([dim.size for dim in node.attrs.get("window", ())]))
    reads = []
    for position, operand in enumerate(node.operands):
        source = source_of(operand)
        width = DTYPE_BITS[source.type.dtype] / 8
        # Each reader has a separate copy of a splat constant, which XLA reads for each element.
        apart = opcode in _MOVING or _is_splat(source)
        needed = _needed(node, position)
        if opcode in FOLDS and 2 * position >= len(node.operands):
            needed = 0.0, 1.0, 1.0 / max(factor, 1.0)  # where it starts is read once
        reads.append(_Read(id(source), *needed, float(source.size), width, apart))
    updates = opcode == "dynamic-update-slice" and source_of(node.operands[0]).opcode != "constant"
    if opcode == "concatenate":
        cycles = _CROSSING_CYCLES if _crosses(node) else _JOIN_CYCLES
    else:
        cycles = _cycles(opcode, node.type, machine) if called is None else called
    if opcode in FOLDS:
        cycles *= max(factor - 1.0, 0.0) / max(factor, 1.0)  # a sum of n has n - 1 additions
    return Each(cycles, factor, turns_minor(node), tuple(reads), int(updates))


def _cycles(opcode: str, kind: TensorType, machine: Machine) -> float:
    """Return the cycles per input element of an op; for a reduction, those of an addition."""
    if opcode in PLACED or opcode in _IDLE:
        return 0.0
    if opcode in FOLDS:
        opcode = "add"
    if opcode == "divide" and kind.dtype[0] in "su":
        opcode = "integer"
    elif kind.dtype not in _PROFILED:
        return _CYCLES_OF_OTHERS
    profile = _CYCLES.get(str(machine.capability), _CYCLES[_USUAL_CAPABILITY])
    return float(profile.get(opcode, _CYCLES_OF_OTHERS))


def _is_splat(node: Node) -> bool:
    """Return whether a node broadcasts a constant."""
    return node.opcode == "broadcast" and source_of(node.operands[0]).opcode == "constant"


def _crosses(joined: Node) -> bool:
    """Return whether warps cross the boundary between two concatenated arrays."""
    along = joined.attrs["dimensions"][0]
    return along > 0 and any(o.type.shape[along] % _WARP for o in joined.operands)


def _needed(node: Node, position: int) -> tuple[float, float, float]:
    """Return ``times``, ``per`` and ``fixed`` of the read of an operand (:class:`_Read`)."""
    size = node.operands[position].size
    if node.opcode in ("concatenate", "pad"):
        return size, max(1, node.size), 0.0
    if node.opcode == "dynamic-update-slice" and position < 2:
        return size, max(1, node.size), 0.0
    if node.opcode in UPDATES:
        return 0.0, 1.0, float(size) if position else 0.0
    if node.opcode in PRODUCTS or (position and node.opcode in ("gather", "dynamic-slice")):
        return 0.0, 1.0, float(size)
    return 1.0, 1.0, 0.0


#: Demand of a kernel for a value, by the walk that reads it: elements, and how often their code is
#: emitted. Readers in one walk, from the results or from a value whose elements are moved, share
#: loads and code (``elementwise_use_roots_`` in XLA's gpu_hlo_cost_analysis.cc).
_Walks = dict[int, tuple[float, float]]
#: Demand by walk, number of elements of the value, and bytes per element.
_Need = tuple[_Walks, float, float]
#: The walk from the results.
_RESULTS = 0


class Work:
    """Work of a kernel: elements that it computes and reads, traced back from its results.

    Args:
        members: Nodes of the kernel, operands before users; a node whose code is emitted twice, for
            readers that do not share it, is listed twice.
        roots: Nodes whose values the kernel writes.
        machine: The machine that runs it.
        shared: Whether each value is computed once, however often it is read (softmax kernels).
        known: Cache of the work of each op by its node's ``id``, filled here. Nodes must not change
            between kernels that share it.

    Attributes:
        blocks: Number of thread blocks.
        cycles: Total arithmetic cycles.
        written: Bytes written.
        needs: Demand for the values of outside nodes, by their ``id``.
    """

    __slots__ = (
        *("_code", "_known", "_machine", "_members", "_roots", "_shared", "_turns"),
        *("blocks", "cycles", "needs", "written"),
    )

    def __init__(
        self,
        members: Iterable[Node],
        roots: Sequence[Node],
        machine: Machine,
        shared: bool = False,
        known: dict[int, Each] | None = None,
    ) -> None:
        members = list(members)
        self._machine = machine
        # A row kernel has one block per group of rows, whatever it writes.
        rows = [node for node in members if node.opcode == "reduce"] if shared else []
        self.blocks = self._blocks([*roots, *rows] if shared else _sums(members, roots) or roots)
        self.written = sum(map(_written, roots))
        self.cycles = self._code = 0.0
        self._shared, self._known = shared, {} if known is None else known
        self._members, self._roots, self._turns = members, roots, False
        self.needs: dict[int, _Need] = {
            id(root): ({_RESULTS: (float(root.size), 1.0)}, 0.0, 0.0) for root in roots
        }
        self._add(members, frozenset(self.needs))

    def with_producer(self, members: Iterable[Node]) -> Work:
        """Compute the work of this kernel with the producer of one of its inputs fused into it.

        Args:
            members: Nodes that compute the value, operands before users. Nodes that this kernel
                computes as well are computed again.
        """
        joined, members = Work.__new__(Work), list(members)
        joined._machine, joined._shared, joined._known = self._machine, self._shared, self._known
        joined._members, joined._roots = [*members, *self._members], self._roots
        joined._turns = self._turns
        # A sum on which this kernel continues determines how the kernel runs.
        sums = _sums(members, members[-1:])
        joined.blocks = self._blocks(sums) if sums and not self._shared else self.blocks
        joined.written = self.written
        joined.cycles, joined._code = self.cycles, self._code
        joined.needs = self.needs.copy()
        joined._add(members, frozenset())
        return joined

    def _blocks(self, nodes: Iterable[Node]) -> int:
        return max([1, *[blocks_of(node, self._machine) for node in nodes]])

    def _add(self, members: Sequence[Node], roots: frozenset[int]) -> None:
        """Add the work of nodes, and replace demand for them by demand for their operands."""
        needs, known = self.needs, self._known
        # Users before operands: when a node is visited, its demand is complete.
        for node in reversed(members):
            need = needs.pop(id(node), None)
            if need is None:
                continue
            walks = need[0]
            count, paths = map(sum, zip(*walks.values(), strict=True))
            # A softmax kernel keeps rows on chip: nothing is computed twice.
            if self._shared and count > node.size:
                count = node.size
                walks = {_RESULTS: (float(count), paths)}
            if not count:
                continue
            each = known.get(id(node))
            if each is None:
                each = known[id(node)] = _done_by(node, self._machine)
            cycles, factor, turns, reads, in_place = each
            if in_place and id(node) in roots:
                reads = reads[in_place:]
            self._code += paths
            self.cycles += cycles * count * factor
            self._turns |= turns
            for key, times, per, fixed, size, width, apart in reads:
                own = needs[key][0].copy() if key in needs else {}
                for walk, (elements, ways) in ((key, (count, paths)),) if apart else walks.items():
                    wanted = (elements * times / per + fixed) * factor
                    if not wanted:
                        continue
                    loads, copies = own.get(walk, (0.0, 0.0))
                    if apart:
                        own[walk] = (loads + wanted, copies + ways)
                    else:
                        own[walk] = (max(loads, wanted), max(copies, ways))
                if own:
                    needs[key] = (own, size, width)

    @property
    def code(self) -> float:
        """Count the ops in its code, including inputs; duplicated code counts twice."""
        inputs = [copies for walks, _, _ in self.needs.values() for _, copies in walks.values()]
        return self._code + sum(inputs)

    def ticks(self) -> int:
        """Estimate the time of one execution without its launch, in quarters of a nanosecond."""
        machine = self._machine
        # Too few blocks cannot saturate memory or caches.
        most = self.blocks * machine.clock * _BYTES_PER_CYCLE
        memory = round(self.written / machine.bandwidth * _TICKS)
        # XLA treats no read as coalesced if the minor dimension changes (IsReadCoalescedHeuristic),
        # unless tiles are transposed in shared memory.
        apart = self._turns and not turns_tiles(self._members, self._roots)
        for walks, size, width in self.needs.values():
            total = sum([elements for elements, _ in walks.values()]) * width
            # The first read of each element comes from main memory, repeated ones from a cache if
            # the array fits. Uncoalesced reads use one element per sector.
            net = min(total, size * width)
            bandwidth = machine.bandwidth * width / _SECTOR if apart else machine.bandwidth
            memory += round(net / min(bandwidth, most) * _TICKS)
            if total > net:
                if net < machine.cache:
                    bandwidth = machine.bandwidth * _CACHE_SPEED_UP
                    if net < _L1_BYTES * machine.cores:
                        bandwidth *= _L1_SPEED_UP
                memory += round((total - net) / min(bandwidth, most) * _TICKS)
        active = min(self.blocks, machine.cores) * machine.lanes
        # Two operations per lane and clock: XLA counts a fused multiply-add as two.
        compute = round(4.0 * self.cycles / int(active * machine.clock * 2e-9))
        # The longer time plus 5 % of the shorter one.
        return memory + compute - int(_OVERLAP * min(memory, compute) + 0.5)


def _sums(members: Iterable[Node], roots: Iterable[Node]) -> list[Node]:
    """List the reductions that determine how a kernel runs: those its results continue on."""
    inside = {id(node) for node in members}
    heroes = [hero_of(root, inside) for root in roots]
    return [node for node in heroes if node.opcode == "reduce" and not is_loop_reduction(node)]


def _written(root: Node) -> float:
    if root.opcode == "dynamic-update-slice":
        return float(root.operands[1].nbytes)
    if root.opcode == "scatter":
        count = (len(root.operands) - 1) // 2
        return float(sum(o.nbytes for o in root.operands[count + 1 :]))
    return float(root.nbytes)


def blocks_of(root: Node, machine: Machine) -> int:
    """Return the number of thread blocks that a kernel with this root starts.

    XLA's reduction emitters: a block of 1024 threads sums 64 columns over 4096 rows, or 256 threads
    sum as many rows as fit with 16 elements a thread.
    """
    if root.opcode == "reduce" and not is_loop_reduction(root):
        reduced = reduction(root)
        if reduced.shape is Shape.COLUMN:
            return reduced.major * ceil(reduced.minor / 64) * ceil(reduced.length / 4096)
        # Whole warps per row, 16 elements per thread, at most 1024 threads; rows share a block of
        # 256.
        lanes = min(1024, ceil(reduced.length / 16 / 32) * 32)
        return ceil(root.size / max(1, 256 // lanes))
    size = source_of(root.operands[-1]).size if root.opcode in UPDATES else root.size
    if root.opcode == "concatenate":
        size = max([operand.size for operand in root.operands])
    unrolled = gcd(size, _UNROLLED) if size >= _HELD * machine.cores else 1
    return ceil(size / (_THREADS * unrolled))


def narrow_reduction(cluster: Cluster, machine: Machine) -> Node | None:
    """Find a column reduction in a cluster that starts fewer blocks than there are cores.

    The compiler does not give such a reduction a second large array to read.
    """
    if "reduce" not in cluster.opcodes:
        return None
    inside = set(map(id, cluster.nodes))
    for hero in [hero_of(root, inside) for root in cluster.roots]:
        if hero.opcode == "reduce" and not hero.is_tuple and not is_loop_reduction(hero):
            column = reduction(hero).shape is Shape.COLUMN
            if column and blocks_of(hero, machine) < machine.cores:
                return hero
    return None
