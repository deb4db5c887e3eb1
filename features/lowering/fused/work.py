"""Time of a fused kernel, roughly: what decides whether fusing pays.

The model has the form of XLA's GPU performance model: bytes at the memory's bandwidth, repeated
reads at the cache's, arithmetic at the vector units' rate, both mostly overlapped, a fixed cost for
each launch, and less of everything if too few blocks run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import NamedTuple

from ...devices.device import DeviceSpec
from ...devices.rules import capability_of, narrow_floats_of
from ...ir.op_table import OPS, UPDATES, OpSpec, ops_with
from ...ir.program import DTYPE_BITS
from .clusters import PRODUCTS, Shape, is_loop_reduction, reduction, source_of
from .graph import Node
from .heroes import turns_minor, turns_tiles

#: Seconds that one more kernel costs: the launch overhead that XLA's GpuPerformanceModel assumes,
#: not what a launch takes on the device (its floor).
LAUNCH_S = 1e-6


#: Types that Triton converts, as the compiler (JAX 0.10) lets products for an A100, L40S, H100 and
#: B200 read them: no unsigned integers, and fp8 of three bits from compute capability 9.0 on.
_CONVERTED = frozenset(("pred", "s4", "s8", "s16", "s32", "bf16", "f16", "f32", "f8e5m2"))
_FROM_HOPPER = frozenset(("f8e4m3fn",))


@dataclass(frozen=True, slots=True)
class Machine:
    """Properties of a GPU that fusion depends on; by default those of an H100 SXM (data sheet).

    Attributes:
        bandwidth: Bytes per second of the memory.
        cache: Bytes of the last-level cache.
        cores: Multiprocessors.
        clock: Hertz.
        lanes: Vector lanes of a multiprocessor.
        tensor_fusion: Whether softmax becomes one kernel (Triton: compute capability 8.0 up).
        bf16_arithmetic: Whether sums and products of bf16 have instructions of their own.
        channels_last: Whether convolutions of any type run with channels innermost.
        half_channels_last: Whether those of images in 16-bit floats do.
        fused_products: Whether products take in what makes their operands and follows them, and
            read and write any order of dimensions, as on TPUs.
        host: Whether it is a CPU, whose libraries take other forms of convolutions and the largest
            elements, and nothing of what follows them.
        converted: Types from which a generated product converts its operands itself; none where
            all products are the libraries'.
        narrow: 8-bit floats that products multiply as they are; ``None`` for all of them.
        capability: Compute capability × 10; 0 of other makers' GPUs.
    """

    bandwidth: float = 3.35e12
    cache: float = 50e6
    cores: int = 132
    clock: float = 1.98e9
    lanes: int = 128
    tensor_fusion: bool = True
    bf16_arithmetic: bool = True
    channels_last: bool = True
    half_channels_last: bool = True
    fused_products: bool = False
    host: bool = False
    converted: frozenset[str] = _CONVERTED | _FROM_HOPPER
    narrow: frozenset[str] | None = frozenset(("f8e4m3fn", "f8e5m2"))
    capability: int = 90


def machine_of(device: DeviceSpec | None) -> Machine:
    """Derive the machine from a device description.

    An H100 stands in for a missing description, for one of another platform, and for figures that
    the description leaves out.
    """
    platform = device.platform if device is not None else "gpu"
    usual = Machine(fused_products=platform == "tpu", host=platform == "cpu")
    if platform != "gpu":
        return replace(usual, converted=frozenset())
    if device is None or not device.levels:
        return usual
    target = str(device.compiler.get("target", ""))
    capability = capability_of(target)
    # Without a target (or on another vendor's GPU) units for bf16 reveal the generation.
    # Triton needs compute capability 8.0. For cuDNN XLA has channels innermost in images of 16 bits
    # from 7.0 on (tensor cores), and in all but volumes from 9.0 on.
    modern = capability >= 80 if capability else "bf16" in device.peak_flops
    cache = device.levels[-2].capacity if len(device.levels) > 1 else usual.cache
    return Machine(
        bandwidth=device.levels[-1].bandwidth,
        cache=cache,
        cores=device.core_count or usual.cores,
        clock=device.clock_hz or usual.clock,
        lanes=device.lanes_per_core or usual.lanes,
        tensor_fusion=modern,
        converted=_converted(capability or 80) if modern else frozenset(),
        narrow=narrow_floats_of(target),
        capability=capability or 0,
        bf16_arithmetic=(capability or 0) >= 90,
        channels_last=capability >= 90 if capability else modern,
        half_channels_last=capability >= 70 if capability else True,
    )


def _converted(capability: int) -> frozenset[str]:
    return _CONVERTED | _FROM_HOPPER if capability >= 90 else _CONVERTED


# The form is that of XLA's GpuPerformanceModel, on which PriorityFusion bases its choice. The times
# only rank fusions against each other; no prediction is made from them.
#: Share of the shorter of memory and compute time that is hidden behind the longer one:
#: kMemoryComputeParallelism in XLA's gpu_performance_model_base.h.
_OVERLAP = 0.95
#: Bandwidth of L2 over the main memory's: kL2CacheSpeedup, same file.
_CACHE_SPEED_UP = 2.5
#: Bandwidth of L1 over L2, and bytes of L1 that count for a core. XLA takes 8 (kL1CacheSpeedup)
#: and 2 KiB; these were chosen to agree with the compiler's choices on an H100 (docs/fused.md).
_L1_SPEED_UP = 11.0
_L1_BYTES = 8192
#: Bytes of a memory transaction, of which an uncoalesced read uses one element.
_SECTOR = 32
#: Elements of a loop kernel's block: 128 threads of four, as XLA's launch dimensions have them.
_ELEMENTS_PER_BLOCK = 512.0
#: Bytes that a block moves in a cycle: an SM issues at most one 32-byte transaction a clock
#: (AdjustBandwidth in XLA's gpu_performance_model_base.cc).
_BYTES_PER_CYCLE = 32.0
_OTHER = OpSpec()
#: Ops of which each reader reads other elements, so that what they need adds up.
_MOVING = ops_with(lambda spec: spec.placed and spec.operands > 0)
#: Ops whose code branches, and how many branches one kernel's code may have
#: (kMaxBasicBlockSplitsPerFusion in XLA's gpu_hlo_cost_analysis.h: each may double the code). Short
#: sums do not count: the compiler puts twelve of them into one concatenation.
_BRANCHING = frozenset(("concatenate", "pad", "reduce-window"))
MAX_BRANCHES = 10


class _Read(NamedTuple):
    """An array that an op reads: for ``count`` elements, ``count × times / per + fixed`` of it.

    Attributes:
        key: ``id`` of the node that makes it.
        times: Elements of the operand that are read for ...
        per: ... so many of the result.
        fixed: Elements that are read whatever the count.
        size: Elements of the array.
        width: Bytes of each.
    """

    key: int
    times: float
    per: float
    fixed: float
    size: float
    width: float


class Each(NamedTuple):
    """What an op does, whichever kernel computes it.

    Attributes:
        cycles: Cycles of an element that goes in.
        factor: Elements that go in for one that comes out.
        branches: Whether its code branches.
        turns: Whether neighbouring results read elements that lie apart.
        moves: Whether each reader reads other elements, so that what they need adds up.
        reads: Arrays that it reads, constants left out.
        in_place: How many of these, from the first on, it writes to instead where it is a root.
    """

    cycles: float
    factor: float
    branches: bool
    turns: bool
    moves: bool
    reads: tuple[_Read, ...]
    in_place: int


def _done_by(node: Node) -> Each:
    """Describe what an op does."""
    opcode = node.opcode
    factor = 1.0
    if opcode == "reduce":
        factor = node.operands[0].size / max(1, node.size)
    elif opcode == "reduce-window":
        factor = float(prod([dim.size for dim in node.attrs.get("window", ())]))
    reads = []
    for position, operand in enumerate(node.operands):
        source = source_of(operand)
        if source.opcode != "constant":
            width = DTYPE_BITS[source.type.dtype] / 8
            needed = _needed(node, position)
            reads.append(_Read(id(source), *needed, float(source.size), width))
    cycles, branches = (
        OPS.get(opcode, _OTHER).cycles,
        opcode in _BRANCHING and not _joins_positions(node),
    )
    updates = opcode == "dynamic-update-slice" and source_of(node.operands[0]).opcode != "constant"
    return Each(
        cycles, factor, branches, turns_minor(node), opcode in _MOVING, tuple(reads), int(updates)
    )


def _joins_positions(node: Node) -> bool:
    """Return whether a concatenation makes the indices of a gather: it is known which is read."""
    if node.opcode != "concatenate" or not node.type.dtype.startswith("s"):
        return False
    along = node.attrs["dimensions"][0]
    return all(operand.type.shape[along] == 1 for operand in node.operands)


def _needed(node: Node, position: int) -> tuple[float, float, float]:
    """Elements of an operand that an op needs: ``times``, ``per`` and ``fixed`` of a read."""
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


#: What a kernel needs of a value: elements as loads of an array outside, elements that readers
#: need in the same order, elements that they need one by one, and paths that lead there; then
#: elements of the value, and bytes of each.
_Need = tuple[float, float, float, float, float, float]


class Work:
    """Work of a kernel: elements that it computes and reads, found from its results backwards.

    Args:
        members: Nodes of the kernel, operands before users.
        roots: Nodes whose values it writes.
        shared: Whether each value is computed once, however often it is read (softmax kernels).
        known: What each op does, by its node's ``id``; it is filled. Nodes may not change between
            kernels that share it.

    Attributes:
        blocks: Thread blocks that it starts.
        cycles: Cycles of all its arithmetic.
        written: Bytes that it writes.
        branches: Branches in the code of one element; code that is emitted twice counts twice.
        needs: What it needs of nodes outside, by their ``id``.
    """

    __slots__ = (
        *("_known", "_members", "_roots", "_shared", "_turns"),
        *("blocks", "branches", "cycles", "needs", "written"),
    )

    def __init__(
        self,
        members: Iterable[Node],
        roots: Sequence[Node],
        shared: bool = False,
        known: dict[int, Each] | None = None,
    ) -> None:
        members = list(members)
        self.blocks = max([1.0, *map(blocks_of, roots)])
        if shared:
            self.blocks = max([self.blocks, *map(blocks_of, _sums(members))])
        self.written = sum(map(_written, roots))
        self.cycles = self.branches = 0.0
        self._shared, self._known = shared, {} if known is None else known
        self._members, self._roots, self._turns = members, roots, False
        self.needs: dict[int, _Need] = {
            id(root): (0.0, float(root.size), 0.0, 0.0, 0.0, 0.0) for root in roots
        }
        self._add(members, frozenset(self.needs))

    def with_producer(self, members: Iterable[Node]) -> Work:
        """Work of a kernel that also computes a value that this one reads.

        Args:
            members: Nodes that make the value, operands before users. This kernel neither computes
                nor reads any other of them, nor do they read what it computes; repeated constants
                do not count, which cost nothing.
        """
        joined, members = Work.__new__(Work), list(members)
        joined._shared, joined._known = self._shared, self._known
        joined._members, joined._roots = [*members, *self._members], self._roots
        joined._turns = self._turns
        joined.blocks, joined.written = self.blocks, self.written
        joined.cycles, joined.branches = self.cycles, self.branches
        joined.needs = self.needs.copy()
        joined._add(members, frozenset())
        return joined

    @property
    def is_ordered(self) -> bool:
        """Whether its loads depend on the order in which its nodes are visited.

        So they do of an array of which some readers share loads and others read their own.
        """
        return any(whole and parts for _, whole, parts, _, _, _ in self.needs.values())

    def _add(self, members: Sequence[Node], roots: frozenset[int]) -> None:
        """Add the work of nodes, and need what they read instead of them."""
        needs, known = self.needs, self._known
        # Users before operands: when a node is visited, everything wanted of it has been added.
        for node in reversed(members):
            need = needs.pop(id(node), None)
            if need is None:
                continue
            _, whole, parts, paths, _, _ = need
            count = whole + parts
            # A softmax kernel keeps rows on the chip: nothing is computed twice.
            if self._shared:
                count = min(count, float(node.size))
            if not count:
                continue
            each = known.get(id(node))
            if each is None:
                each = known[id(node)] = _done_by(node)
            cycles, factor, branches, turns, moves, reads, in_place = each
            if in_place and id(node) in roots:
                reads = reads[in_place:]
            # A node that is computed along several paths has its code emitted once for each.
            paths = paths or 1.0
            if branches:
                self.branches += paths
            self.cycles += cycles * count * factor
            self._turns |= turns
            for key, times, per, fixed, size, width in reads:
                wanted = (count * times / per + fixed) * factor
                if not wanted:
                    continue
                before = needs.get(key)
                # Readers that walk elements in the same order share loads, so the largest need
                # counts; those that move elements read their own.
                if before is None:
                    shared, own = (0.0, wanted) if moves else (wanted, 0.0)
                    needs[key] = (wanted, shared, own, paths, size, width)
                    continue
                loads, shared, own, ways, size, width = before
                if moves:
                    needs[key] = (loads + wanted, shared, own + wanted, ways + paths, size, width)
                else:
                    most = (max(loads, wanted), max(shared, wanted), own, max(ways, paths))
                    needs[key] = (*most, size, width)

    def seconds(self, machine: Machine) -> float:
        """Estimate the time of one execution without its launch."""
        # Too few blocks cannot saturate the memory.
        bandwidth = min(machine.bandwidth, self.blocks * machine.clock * _BYTES_PER_CYCLE)
        memory = self.written / bandwidth
        # XLA counts no read as coalesced where the minor dimension is another one (its
        # IsReadCoalescedHeuristic), unless tiles are turned in shared memory.
        apart = self._turns and not turns_tiles(self._members, self._roots)
        for elements, _, _, _, size, width in self.needs.values():
            total = elements * width
            # The first read of each element comes from main memory, repeated ones from a cache if
            # the array fits.
            whole = size * width
            if total <= whole and not apart:
                memory += total / bandwidth
                continue
            net = min(total, whole)
            # What exceeds the cache is read from memory again.
            speed = _CACHE_SPEED_UP if net < machine.cache else 1.0
            if net < _L1_BYTES * machine.cores:
                speed *= _L1_SPEED_UP
            again = total - net
            if apart:
                # Every element costs a sector; the cache holds what neighbours need.
                again += total * (_SECTOR / width - 1.0)
                speed = min(speed, _CACHE_SPEED_UP)
            memory += net / bandwidth + again / (bandwidth * speed)
        active = min(self.blocks, float(machine.cores)) * machine.lanes
        # Two operations per lane and clock: XLA counts a fused multiply-add as two.
        compute = self.cycles / (active * machine.clock * 2.0)
        # The longer time plus 5 % of the shorter one.
        return memory + compute - _OVERLAP * min(memory, compute)


def _sums(members: Iterable[Node]) -> list[Node]:
    """Reductions of a kernel of rows, which has a block for some rows, whatever it writes."""
    return [node for node in members if node.opcode == "reduce"]


def _written(root: Node) -> float:
    if root.opcode == "dynamic-update-slice":
        return float(root.operands[1].nbytes)
    if root.opcode == "scatter":
        count = (len(root.operands) - 1) // 2
        return float(sum(o.nbytes for o in root.operands[count + 1 :]))
    return float(root.nbytes)


def blocks_of(root: Node) -> float:
    """Thread blocks that a kernel with this root starts.

    XLA's reduction emitters: a block of 1024 threads sums 64 columns over 4096 rows, or 256 threads
    sum as many rows as fit with 16 elements a thread.
    """
    if root.opcode == "reduce" and not is_loop_reduction(root):
        reduced = reduction(root)
        if reduced.shape is Shape.COLUMN:
            return reduced.major * ceil(reduced.minor / 64) * ceil(reduced.length / 4096)
        # Whole warps for a row, 16 elements each, at most a block of 1024; rows share a block of
        # 256.
        lanes = min(1024, ceil(reduced.length / 16 / 32) * 32)
        return root.size / max(1, 256 // lanes)
    size = source_of(root.operands[-1]).size if root.opcode in UPDATES else root.size
    return size / _ELEMENTS_PER_BLOCK
