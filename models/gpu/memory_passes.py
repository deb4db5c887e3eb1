"""Time of a pass over memory (fusion, reduction, copy) and of a depthwise convolution on a GPU.

    time = launch + softmax(penalty · moved / bandwidth(footprint), vector · work / vector rate)

The constants are fitted to published kernels by :mod:`.memory_passes_fit` (docs/gpu.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import numpy as np

from ...common.types import JsonMapping
from ...features.devices.device import DeviceSpec
from ..core.registry import GPU_MODEL, PRETRAINED
from ..core.store import read_manifest
from ..trust.calibrator import Ends

#: Half-width in octaves of the transition from cache to main memory as the footprint grows. Real
#: caches lose hits gradually because replacement is not exact LRU. Half an octave is an engineering
#: estimate; the centre of the transition (``edge``) is fitted.
SPILL = 0.5
#: Power of the soft maximum of overlapping times: equal times give 2^(1/4) = 1.19 of either, since
#: memory and arithmetic of one kernel do not overlap perfectly. Engineering estimate; not fitted.
POWER = 4.0
#: Clock in Hz of a device whose file gives none; data-centre GPUs boost to 1.4 to 2 GHz.
#: Engineering estimate; it scales nothing but the launch.
CLOCK = 1.5e9

#: Bytes that an element of a reduction over the slow dimension costs on top of those moved: each
#: thread loads one element at a time, so few bytes are in flight. Batch-norm statistics of 16-bit
#: arrays take 1.9 times (A100) a stream's time in the forward pass, which reads one array, and 1.5
#: times in the backward pass, which reads two (published-regions pack; left out, the H100's: 2.4
#: and 1.5).
COLUMN_BYTES = 2.0
#: Loads that a core starts in a clock: lanes of the load units of a multiprocessor of NVIDIA's
#: (CUDA C++ Programming Guide and white papers, Volta to Hopper), and of a compute unit of AMD's,
#: whose L1 answers 16 lanes, 64 bytes, a clock (CDNA 2 white paper).
LOAD_LANES, LOAD_LANES_ELSEWHERE = 32.0, 16.0
#: Loads of a product. MIOpen's filter gradients reach 2.3 to 4.9 products a clock of a compute unit
#: where the other directions reach 6 to 9 (published-kernels pack, MI60 to MI250X), so that their
#: two loads count double.
LOADS, FILTER_LOADS = 2.0, 4.0
#: Log distances of the ends of the 90 % interval. On those four chips, measured times are 0.8 (5 %)
#: to 3.1 (85 %) times the estimate; where a library lacks a kernel for a size, ten times.
LOWER, UPPER = float(np.log(1.6)), float(np.log(4.0))


@dataclass(slots=True)
class Traffic:
    """``n`` passes over memory; arrays of shape ``(n,)``.

    Attributes:
        moved: Bytes read and written.
        again: Bytes that later steps of the kernel read again, where the cache has lost them.
        work: Vector operations.
        penalty: Factor on the time of memory: 1 for streams, more for transposes and the like.
    """

    moved: np.ndarray
    again: np.ndarray
    work: np.ndarray
    penalty: np.ndarray

    def __len__(self) -> int:
        """Number of passes."""
        return len(self.moved)

    def take(self, rows: np.ndarray) -> Traffic:
        """The given rows, by position or mask."""
        return Traffic(self.moved[rows], self.again[rows], self.work[rows], self.penalty[rows])


@dataclass(frozen=True)
class MemoryParams:
    """Fitted constants of :func:`pass_seconds`; all but ``launch_cycles`` are dimensionless.

    The defaults are rough values for use without the shipped model, whose fitted ones are in
    docs/gpu.md.

    Attributes:
        hbm: Share of the data-sheet bandwidth that long streams reach.
        cache: Share of the described cache bandwidth.
        edge: Footprint over cache capacity at which half of it still hits.
        launch_cycles: Cycles of a kernel without work, from one graph-replayed kernel to the next.
        vector: Vector instructions for a unit of work.
        device_log: Log factor on the time of main memory by device; 0 for others.
    """

    hbm: float = 0.85
    cache: float = 0.8
    edge: float = 0.8
    launch_cycles: float = 2600.0
    vector: float = 1.0
    device_log: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class PassTimes:
    """Parts of the time of ``n`` passes, in seconds, shape ``(n,)`` each."""

    launch: np.ndarray
    memory: np.ndarray
    vector: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """Launch plus the soft maximum of memory and arithmetic, which overlap."""
        return np.asarray(self.launch + soft_maximum(self.memory, self.vector))


def soft_maximum(*limits: np.ndarray) -> np.ndarray:
    """``(Σ tᵖ)^(1/p)``: time of activities that overlap but compete, monotone in each of them."""
    return np.asarray(sum(limit**POWER for limit in limits) ** (1 / POWER))


def launch_seconds(device: DeviceSpec, params: MemoryParams) -> float:
    """Time of an empty kernel in seconds, from one graph-replayed kernel to the next.

    The cycles were fitted to NVIDIA's chips; another vendor's launch is scaled by its floor.
    """
    return params.launch_cycles / (device.clock_hz or CLOCK) * launch_factor(device)


def launch_factor(device: DeviceSpec) -> float:
    """How many times longer than on NVIDIA's chips a device's launches are, at least 1."""
    # The rows that determine the fitted cycles are all of NVIDIA's chips. Elsewhere the launch is
    # longer in proportion to the described floor over 2 µs, never shorter (engineering estimate);
    # an unnamed vendor counts as NVIDIA.
    return 1.0 if device.runs_cuda else max(device.floor / 2e-6, 1.0)


def pass_seconds(traffic: Traffic, device: DeviceSpec, params: MemoryParams) -> PassTimes:
    """Time of passes over memory on a device.

    ``memory = penalty · moved / bandwidth(footprint)``, where the bandwidth goes over from the
    cache's to main memory's as the footprint outgrows the cache; ``vector = work / vector rate``.
    Every term grows with the size of a tensor. The number of thread blocks plays no part: a limit
    on the bandwidth of one core was tried, and the fit drove it to zero.

    Args:
        traffic: ``n`` passes.
        device: Device they run on.
        params: Fitted constants.
    """
    main = np.exp(params.device_log.get(device.name, 0.0)) / (device.bandwidth * params.hbm)
    # A cache slower than main memory is an artefact of a rough description: it would make small
    # kernels slower than large ones.
    cache = min(1.0 / (device.levels[0].bandwidth * params.cache), float(main))
    # The guards (one byte moved, a cache of one byte) keep the logarithm finite for empty kernels
    # and devices without a described cache.
    footprint = np.maximum(traffic.moved, 1.0) / max(device.cache_bytes * params.edge, 1.0)
    # Share of the traffic that misses: a ramp over the logarithm of the footprint, one octave wide.
    outside = np.clip(np.log2(footprint) / (2 * SPILL) + 0.5, 0.0, 1.0)
    moved = traffic.moved + traffic.again * outside
    stream = moved * (cache + outside * (main - cache))
    # Work counts at the f32 rate whatever the type; ``routes.traffic`` doubles it for 64 bits.
    vector = params.vector * traffic.work / device.vector_peak("f32")
    launch = np.full(len(traffic), launch_seconds(device, params))
    return PassTimes(launch, traffic.penalty * stream, vector)


def depthwise_seconds(
    moved: np.ndarray,
    elements: np.ndarray,
    multiplied: np.ndarray,
    filters: np.ndarray,
    device: DeviceSpec,
    params: MemoryParams,
) -> np.ndarray:
    """Time of depthwise convolutions without their launch, seconds, shape ``(n,)``.

    They run by direct kernels, in which each output multiplies its own window:

        time = launch + softmax(moved / bandwidth, loads / loads that cores start in a second)

    Such a convolution is no product of matrices, so it runs on the vector units, which wait for
    loads: a product of forward passes and input gradients loads an element and a weight from L1,
    one of filter gradients two elements at positions of their own.

    Args:
        moved: Bytes of the tensors read and written, shape ``(n,)``.
        elements: Elements of them, shape ``(n,)``.
        multiplied: Products: outputs of the forward pass times taps, shape ``(n,)``.
        filters: Whether the gradient of a filter is computed, bool, shape ``(n,)``.
        device: Device they run on.
        params: Constants of passes over memory.
    """
    # A thread reads one element at a time, as column reductions do; gradients of filters read
    # along rows.
    zero = np.zeros(len(moved))
    extra = np.where(filters, 0.0, COLUMN_BYTES * elements)
    passes = Traffic(moved + extra, zero, zero, np.ones(len(moved)))
    memory = pass_seconds(passes, device, params).memory
    loads = np.where(filters, FILTER_LOADS, LOADS) * multiplied
    return soft_maximum(memory, loads / _load_rate(device))


def _load_rate(device: DeviceSpec) -> float:
    """Loads of all cores in a second."""
    lanes = LOAD_LANES if device.runs_cuda else LOAD_LANES_ELSEWHERE
    if device.core_count <= 1:
        # The description gives no cores. A core has four times as many lanes that multiply and
        # add as lanes that load (64 to 16 on CDNA, 128 to 32 on Hopper).
        return device.vector_peak("f32") / 8.0
    return lanes * device.core_count * (device.clock_hz or CLOCK)


_SHIPPED = PRETRAINED / GPU_MODEL / "estimator"


@dataclass(frozen=True)
class Constants:
    """Constants and errors fitted to published passes over memory.

    The defaults are wide guesses for use without the shipped model (engineering estimates).

    Attributes:
        memory: Constants of the times.
        known: Interval ends of the log-ratio of measured to predicted on fitted devices.
        unseen: The same on devices left out of the fit.
        correlation: Correlation of the log errors of two kernels of a program.
    """

    memory: MemoryParams = field(default_factory=MemoryParams)
    known: Ends = (-0.3, 0.3)
    unseen: Ends = (-0.8, 0.8)
    correlation: float = 1.0

    def to_dict(self) -> dict[str, object]:
        """Plain data for a manifest."""
        ends = {"known_log": list(self.known), "unseen_log": list(self.unseen)}
        return {"memory": asdict(self.memory), **ends, "correlation": self.correlation}

    @classmethod
    def from_dict(cls, data: JsonMapping) -> Constants:
        """Read :meth:`to_dict`'s data.

        Raises:
            KeyError: An entry is missing.
            TypeError: A constant is unknown.
        """
        (low, high), (least, most) = data["known_log"], data["unseen_log"]
        memory = MemoryParams(**data["memory"])
        known, unseen = (float(low), float(high)), (float(least), float(most))
        return cls(memory, known, unseen, float(data["correlation"]))


def shipped_constants() -> Constants:
    """Constants of the shipped model; rough defaults if the package comes without it."""
    if not (_SHIPPED / "manifest.json").is_file():
        return Constants()
    return Constants.from_dict(read_manifest(_SHIPPED)["constants"])
