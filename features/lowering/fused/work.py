"""Time of a fused kernel, roughly: what decides whether fusing pays.

The model has the form of XLA's GPU performance model: bytes at the memory's bandwidth, repeated
reads at the cache's, arithmetic at the vector units' rate, both mostly overlapped, a fixed cost for
each launch, and less of everything if too few blocks run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, prod

from ...devices.device import DeviceSpec
from ...devices.rules import capability_of
from ...ir.op_table import OPS, UPDATES, OpSpec, ops_with
from ...ir.program import DTYPE_BITS
from .clusters import Shape, is_loop_reduction, reduction, source_of
from .graph import Node

#: Seconds that one more kernel costs: the launch overhead that XLA's GpuPerformanceModel assumes,
#: not what a launch takes on the device (its floor).
LAUNCH_S = 1e-6


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
        channels_last: Whether convolutions in 32-bit floats run with channels innermost.
        half_channels_last: The same for 16-bit floats.
    """

    bandwidth: float = 3.35e12
    cache: float = 50e6
    cores: int = 132
    clock: float = 1.98e9
    lanes: int = 128
    tensor_fusion: bool = True
    channels_last: bool = True
    half_channels_last: bool = True


def machine_of(device: DeviceSpec | None) -> Machine:
    """Derive the machine from a device description.

    An H100 stands in for a missing description, for one of another platform, and for figures that
    the description leaves out.
    """
    usual = Machine()
    if device is None or device.platform != "gpu" or not device.levels:
        return usual
    capability = capability_of(str(device.compiler.get("target", "")))
    # Without a target (or on another vendor's GPU) units for bf16 reveal the generation.
    # Triton needs compute capability 8.0; cuDNN prefers NHWC for TF32, which came with it, and for
    # f16 since tensor cores (7.0).
    modern = capability >= 80 if capability else "bf16" in device.peak_flops
    cache = device.levels[-2].capacity if len(device.levels) > 1 else usual.cache
    return Machine(
        bandwidth=device.levels[-1].bandwidth,
        cache=cache,
        cores=device.core_count or usual.cores,
        clock=device.clock_hz or usual.clock,
        lanes=device.lanes_per_core or usual.lanes,
        tensor_fusion=modern,
        channels_last=modern,
        half_channels_last=capability >= 70 if capability else True,
    )


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


class Work:
    """Work of a kernel: elements that it computes and reads, found from its results backwards.

    Args:
        members: Nodes of the kernel, operands before users.
        roots: Nodes whose values it writes.
        shared: Whether each value is computed once, however often it is read (softmax kernels).

    Attributes:
        blocks: Thread blocks that it starts.
        cycles: Cycles of all its arithmetic.
        written: Bytes that it writes.
        branches: Branches in the code of one element; code that is emitted twice counts twice.
        reads: By the id of a node outside: elements read, its elements, and bytes of each.
        strided: Nodes outside whose neighbouring elements are not read together.
    """

    __slots__ = (
        "_inside",
        "_parts",
        "_paths",
        "_turned",
        "_whole",
        "blocks",
        "branches",
        "cycles",
        "reads",
        "strided",
        "written",
    )

    def __init__(
        self, members: Iterable[Node], roots: Iterable[Node], shared: bool = False
    ) -> None:
        ordered = list(members)
        self.blocks = 1.0
        self.cycles = self.written = self.branches = 0.0
        self.reads: dict[int, list[float]] = {}
        self.strided: set[int] = set()
        self._inside = {id(node) for node in ordered}
        self._whole: dict[int, float] = {}
        self._parts: dict[int, float] = {}
        self._paths: dict[int, float] = {}
        self._turned: set[int] = set()
        heads = set()
        for root in roots:
            heads.add(id(root))
            self._whole[id(root)] = float(root.size)
            self.written += _written(root)
            self.blocks = max(self.blocks, blocks_of(root))
        # Users before operands: when a node is visited, everything wanted of it has been added.
        for node in reversed(ordered):
            count = self._whole.get(id(node), 0.0) + self._parts.get(id(node), 0.0)
            # A softmax kernel keeps rows on the chip: nothing is computed twice.
            if shared:
                count = min(count, float(node.size))
            if count:
                self._visit(node, count, id(node) in heads)

    def _visit(self, node: Node, count: float, is_head: bool) -> None:
        """Add the work of ``count`` elements of a node, and hand on what it needs."""
        opcode = node.opcode
        paths = self._paths.get(id(node), 1.0)
        # A node that is computed along several paths has its code emitted once for each.
        if opcode in _BRANCHING:
            self.branches += paths
        factor = 1.0
        if opcode == "reduce":
            factor = node.operands[0].size / max(1, node.size)
        elif opcode == "reduce-window":
            factor = float(prod([dim.size for dim in node.attrs.get("window", ())]))
        self.cycles += OPS.get(opcode, _OTHER).cycles * count * factor
        # A transpose inside a kernel turns the access order of everything above it; as the root it
        # is written through shared memory, which keeps reads coalesced.
        turned = id(node) in self._turned or (not is_head and _turns(node))
        for position, operand in enumerate(node.operands):
            source = source_of(operand)
            if source.opcode != "constant":
                wanted = _wanted(node, position, count) * factor
                if wanted:
                    self._need(source, wanted, opcode in _MOVING, paths, turned)

    def _need(self, node: Node, wanted: float, adds: bool, paths: float, turned: bool) -> None:
        """Note that ``wanted`` elements of a node are needed once more, or as before."""
        key = id(node)
        if key not in self._inside:
            known = self.reads.get(key)
            if known is None:
                width = DTYPE_BITS[node.type.dtype] / 8
                self.reads[key] = [wanted, float(node.size), width]
            else:
                # Readers that walk elements in the same order share loads, so the largest need
                # counts; those that move elements read their own.
                known[0] = known[0] + wanted if adds else max(known[0], wanted)
            if turned:
                self.strided.add(key)
            return
        before = self._paths.get(key, 0.0)
        self._paths[key] = before + paths if adds else max(before, paths)
        if adds:
            self._parts[key] = self._parts.get(key, 0.0) + wanted
        elif wanted > self._whole.get(key, 0.0):
            self._whole[key] = wanted
        if turned:
            self._turned.add(key)

    def seconds(self, machine: Machine) -> float:
        """Estimate the time of one execution without its launch."""
        # Too few blocks cannot saturate the memory.
        bandwidth = min(machine.bandwidth, self.blocks * machine.clock * _BYTES_PER_CYCLE)
        memory = self.written / bandwidth
        for key, (elements, size, width) in self.reads.items():
            total = elements * width
            # The first read of each element comes from main memory, repeated ones from a cache if
            # the array fits.
            net = min(total, size * width)
            # What exceeds the cache is read from memory again.
            speed = _CACHE_SPEED_UP if net < machine.cache else 1.0
            if net < _L1_BYTES * machine.cores:
                speed *= _L1_SPEED_UP
            again = total - net
            if key in self.strided:
                # Every element costs a sector; the cache holds what neighbours need.
                again += total * (_SECTOR / width - 1.0)
                speed = min(speed, _CACHE_SPEED_UP)
            memory += net / bandwidth + again / (bandwidth * speed)
        active = min(self.blocks, float(machine.cores)) * machine.lanes
        # Two operations per lane and clock: XLA counts a fused multiply-add as two.
        compute = self.cycles / (active * machine.clock * 2.0)
        # The longer time plus 5 % of the shorter one.
        return memory + compute - _OVERLAP * min(memory, compute)


def _turns(node: Node) -> bool:
    """Return whether a transpose makes neighbouring results read elements that lie apart."""
    if node.opcode != "transpose":
        return False
    order = node.attrs["dimensions"]
    # The minor dimension comes from another one, and has more than one element.
    return bool(order[-1] != len(order) - 1 and node.type.shape[-1] > 1)


def _wanted(node: Node, position: int, count: float) -> float:
    """Count the elements of an operand that ``count`` elements of a node need, without factor."""
    opcode = node.opcode
    operand = node.operands[position]
    if opcode in ("concatenate", "pad"):
        return count * operand.size / max(1, node.size)
    if opcode in UPDATES:
        return float(operand.size) if position else 0.0
    if position and opcode in ("gather", "dynamic-slice"):
        return float(operand.size)
    return count


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
