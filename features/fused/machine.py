"""Time of a fused kernel, roughly: what decides whether fusing pays.

The model has the form of XLA's GPU performance model: bytes at the memory's bandwidth, repeated
reads at the cache's, arithmetic at the vector units' rate, both mostly overlapped, a fixed cost for
each launch, and less of everything if too few blocks run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from ..device import DeviceSpec
from ..ir import DTYPE_BITS
from .classify import IN_PLACE, Shape, is_loop_reduction, reduction, source_of
from .graph import Node

#: Seconds that one more kernel costs, as the compiler assumes.
LAUNCH_S = 1e-6
_OVERLAP = 0.95
_CACHE_SPEED_UP = 2.5
_L1_SPEED_UP = 11.0
_L1_BYTES = 8192
#: Bytes of a memory transaction, of which an uncoalesced read uses one element.
_SECTOR = 32
_ELEMENTS_PER_BLOCK = 512.0
_CYCLES: dict[str, float] = {
    "divide": 48.0, "power": 3000.0, "exponential": 72.0, "exponential-minus-one": 120.0, "log": 108.0,
    "log-plus-one": 144.0, "tanh": 108.0, "logistic": 120.0, "sine": 200.0, "cosine": 200.0,
    "tan": 300.0, "sqrt": 60.0, "rsqrt": 48.0, "cbrt": 120.0, "erf": 120.0, "atan2": 180.0,
    "remainder": 90.0,
    "broadcast": 0.0, "reshape": 0.0, "slice": 0.0, "transpose": 0.0, "iota": 1.0,
    "concatenate": 2.0, "pad": 3.0, "gather": 4.0, "constant": 0.0, "parameter": 0.0,
    "reverse": 1.0, "dynamic-slice": 2.0, "bitcast-convert": 0.0,
}  # fmt: skip
_OPAQUE = frozenset(("broadcast", "slice", "concatenate", "pad", "gather", "transpose", "reverse",
                     "dynamic-slice"))  # fmt: skip
#: Ops whose code branches, and how many branches one kernel's code may have (XLA's limit).
_BRANCHING = frozenset(("concatenate", "pad", "reduce", "reduce-window"))
MAX_BRANCHES = 10


@dataclass(frozen=True, slots=True)
class Machine:
    """What of a GPU decides about fusion.

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
    """The machine of a device description; an H100 if there is none or it is no GPU.

    What the description leaves out is that of an H100.
    """
    usual = Machine()
    if device is None or device.platform != "gpu" or not device.levels:
        return usual
    target = str(device.compiler.get("target", ""))
    capability = int(target[3:5]) if target.startswith("sm_") and target[3:5].isdigit() else 0
    # Without a target (or on another vendor's GPU) units for bf16 tell the generation.
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


class Work:
    """Elements that a kernel computes and reads, from its members in reverse order.

    Args:
        members: Nodes of the kernel, operands before users.
        roots: Nodes whose values it writes.
        shared: Whether each value is computed once, however often it is read (softmax kernels).
    """

    __slots__ = ("blocks", "branches", "cycles", "paths", "reads", "strided", "written")

    def __init__(
        self, members: Iterable[Node], roots: Iterable[Node], shared: bool = False
    ) -> None:
        self.cycles = 0.0
        self.reads: dict[int, list[float]] = {}
        self.written = 0.0
        self.blocks = 1.0
        self.strided: set[int] = set()
        #: Branches in the code of one element, those of values computed twice counted twice.
        self.branches = 0.0
        self.paths: dict[int, float] = {}
        ordered = list(members)
        inside = {id(node) for node in ordered}
        whole: dict[int, float] = {}
        parts: dict[int, float] = {}
        turned: dict[int, bool] = {}
        for root in roots:
            whole[id(root)] = float(root.size)
            self.written += _written(root)
            self.blocks = max(self.blocks, blocks_of(root))
        heads = {id(root) for root in roots}
        for node in reversed(ordered):
            count = whole.get(id(node), 0.0) + parts.get(id(node), 0.0)
            if shared:
                count = min(count, float(node.size))
            if count:
                self._visit(node, count, inside, whole, parts, turned, heads)

    def _visit(
        self,
        node: Node,
        count: float,
        inside: set[int],
        whole: dict[int, float],
        parts: dict[int, float],
        turned: dict[int, bool],
        heads: set[int],
    ) -> None:
        opcode = node.opcode
        per_element = _CYCLES.get(opcode, 3.0)
        operands = node.operands
        if opcode in ("reduce", "reduce-window"):
            factor = operands[0].size / max(1, node.size)
            if opcode == "reduce-window":
                factor = 1.0
                for dim in node.attrs.get("window", ()):
                    factor *= dim.size
            self.cycles += 3.0 * count * factor
        else:
            factor = 1.0
            self.cycles += per_element * count
        adds = opcode in _OPAQUE
        paths = self.paths.get(id(node), 1.0)
        if opcode in _BRANCHING:
            self.branches += paths * (len(operands) - 1 if opcode == "concatenate" else 1)
        turn = turned.get(id(node), False)
        if opcode == "transpose" and id(node) not in heads:
            order = node.attrs["dimensions"]
            turn = turn or (order[-1] != len(order) - 1 and node.type.shape[-1] > 1)
        in_place = opcode in IN_PLACE
        for position, operand in enumerate(operands):
            source = operand
            while source.opcode == "reshape":
                source = source.operands[0]
            if source.opcode == "constant":
                continue
            wanted = count * factor
            if opcode in ("concatenate", "pad"):
                wanted = count * (operand.size / max(1, node.size)) if position == 0 or adds else 0.0
            elif in_place:
                if position == 0:
                    continue
                wanted = float(operand.size)
            elif opcode in ("gather", "dynamic-slice") and position:
                wanted = float(operand.size)
            key = id(source)
            if key in inside:
                known_paths = self.paths.get(key)
                if known_paths is None:
                    self.paths[key] = paths
                else:
                    self.paths[key] = known_paths + paths if adds else max(known_paths, paths)
                if adds:
                    parts[key] = parts.get(key, 0.0) + wanted
                elif wanted > whole.get(key, 0.0):
                    whole[key] = wanted
                if turn:
                    turned[key] = True
                continue
            known = self.reads.get(key)
            bits = DTYPE_BITS[source.type.dtype] / 8
            if known is None:
                self.reads[key] = [wanted, float(source.size), bits]
            elif adds:
                known[0] += wanted
            else:
                known[0] = max(known[0], wanted)
            if turn:
                self.strided.add(key)

    def seconds(self, machine: Machine) -> float:
        """Time of one execution without its launch."""
        blocks = self.blocks
        bandwidth = min(machine.bandwidth, blocks * machine.clock * 32.0)
        memory = self.written / bandwidth
        for key, (elements, size, width) in self.reads.items():
            total = elements * width
            net = min(total, size * width)
            speed = _CACHE_SPEED_UP if net < machine.cache else 1.0
            if net < _L1_BYTES * machine.cores:
                speed *= _L1_SPEED_UP
            rest = total - net
            if key in self.strided:
                # Every element costs a sector; the cache holds what neighbours need.
                rest += total * (_SECTOR / width - 1.0)
                speed = min(speed, _CACHE_SPEED_UP)
            memory += net / bandwidth + rest / (bandwidth * speed)
        active = min(blocks, float(machine.cores)) * machine.lanes
        compute = self.cycles / (active * machine.clock * 2.0)
        return memory + compute - _OVERLAP * min(memory, compute)


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
        found = reduction(root)
        if found.shape is Shape.COLUMN:
            return found.major * ceil(found.minor / 64) * ceil(found.length / 4096)
        lanes = min(1024, ceil(found.length / 16 / 32) * 32)
        return root.size / max(1, 256 // lanes)
    size = source_of(root.operands[-1]).size if root.opcode in IN_PLACE else root.size
    return size / _ELEMENTS_PER_BLOCK
