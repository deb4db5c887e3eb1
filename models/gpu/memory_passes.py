"""Time of a pass over memory (fusion, reduction, copy) and of a depthwise convolution on a GPU.

    time = launch + softmax(penalty · moved / bandwidth(footprint), vector · work / vector rate)

The constants are fitted to published kernels by :mod:`.memory_passes_fit` (docs/gpu.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields

import numpy as np

from ...common.types import JsonMapping
from ...features.devices.catalogue import find_device, in_catalogue
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
#: Default clock in Hz; data-centre GPUs boost to 1.4 to 2 GHz. Engineering estimate; it only scales
#: the launch.
CLOCK = 1.5e9

#: Extra bytes per element of a reduction over the slow dimension: each thread loads one element at
#: a time, so few bytes are in flight. Batch-norm statistics of 16-bit arrays take 1.9 times (A100)
#: the time of a stream in the forward pass, which reads one array, and 1.5 times in the backward
#: pass, which reads two (published-regions pack; on the held-out H100: 2.4 and 1.5).
COLUMN_BYTES = 2.0
#: Loads that a core starts per clock: load lanes of an NVIDIA multiprocessor (CUDA C++ Programming
#: Guide and white papers, Volta to Hopper), and of an AMD compute unit, whose L1 serves 16 lanes,
#: 64 bytes, per clock (CDNA 2 white paper).
LOAD_LANES, LOAD_LANES_ELSEWHERE = 32.0, 16.0
#: Loads per multiplication. MIOpen's filter gradients reach 2.3 to 4.9 multiplications per clock
#: and compute unit where the other directions reach 6 to 9 (published-kernels pack, MI60 to
#: MI250X), so that their two loads count double.
LOADS, FILTER_LOADS = 2.0, 4.0
#: Instructions of an integer operation relative to one of floats: a round of threefry, the bulk of
#: integer work, is five operations (an addition, two shifts and two logical ones) in three
#: instructions. With rates of integers at half those of floats it counts like floats.
INTEGERS = 0.5
#: Log half-widths of the 90 % interval of depthwise convolutions. On those four chips, measured
#: times are 0.8 (5 %) to 3.1 (85 %) times the estimate; ten times where a library lacks a kernel
#: for a size.
LOWER, UPPER = float(np.log(1.6)), float(np.log(4.0))
_SHIPPED = PRETRAINED / GPU_MODEL / "estimator"


@dataclass(slots=True)
class Traffic:
    """``n`` passes over memory; arrays of shape ``(n,)``.

    Attributes:
        moved: Bytes read and written.
        again: Bytes that later steps of the kernel read again if the cache has evicted them.
        work: Vector operations.
        integers: Those of them on integers.
        penalty: Factor on memory time: 1 for streams, more for transposes etc.
        queued: Mean atomic updates of one address, which follow one another.
    """

    moved: np.ndarray
    again: np.ndarray
    work: np.ndarray
    integers: np.ndarray
    penalty: np.ndarray
    queued: np.ndarray

    @classmethod
    def stream(cls, moved: np.ndarray) -> Traffic:
        """Plain streams of ``moved`` bytes."""
        zero = np.zeros(len(moved))
        return cls(moved, zero, zero, zero, np.ones(len(moved)), zero)

    def __len__(self) -> int:
        """Number of passes."""
        return len(self.moved)

    def take(self, rows: np.ndarray) -> Traffic:
        """The given rows, by position or mask."""
        return Traffic(*(getattr(self, own.name)[rows] for own in fields(self)))


@dataclass(frozen=True)
class MemoryParams:
    """Fitted constants of :func:`pass_seconds`; all but ``launch_cycles`` are dimensionless.

    The defaults are rough values for use without the shipped model, whose fitted ones are in
    docs/gpu.md.

    Attributes:
        hbm: Fraction of the data-sheet bandwidth that long streams reach.
        cache: Fraction of the described cache bandwidth.
        edge: Footprint over cache capacity at which half of it still hits.
        launch_cycles: Cycles of an empty kernel, from one graph-replayed kernel to the next.
        vector: Vector instructions per unit of work.
        device_log: Log factor on main memory time by device; 0 for others.
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
    """``(Σ tᵖ)^(1/p)``: time of overlapping but competing activities, monotone in each."""
    return np.asarray(sum(limit**POWER for limit in limits) ** (1 / POWER))


def launch_seconds(device: DeviceSpec, params: MemoryParams) -> float:
    """Time of an empty kernel in seconds, from one graph-replayed kernel to the next.

    The cycles were fitted to NVIDIA's chips; another vendor's launch is scaled by its floor.
    """
    return params.launch_cycles / (device.clock_hz or CLOCK) * launch_factor(device)


def launch_factor(device: DeviceSpec) -> float:
    """Ratio of a device's launch time to that of NVIDIA's chips.

    At least 1, except for a design, whose launch is its base's times the ratio of their floors.
    """
    if in_catalogue(device.base):
        base = find_device(device.base)
        return launch_factor(base) * device.floor / base.floor
    # All rows behind the fitted cycles are of NVIDIA's chips. On others, the launch is scaled by
    # the described floor over 2 µs (engineering estimate); an unnamed vendor counts as NVIDIA.
    return 1.0 if device.runs_cuda else max(device.floor / 2e-6, 1.0)


def pass_seconds(traffic: Traffic, device: DeviceSpec, params: MemoryParams) -> PassTimes:
    """Time of passes over memory on a device.

    ``memory = penalty · moved / bandwidth(footprint)``, where the bandwidth changes from the
    cache's to main memory's as the footprint outgrows the cache; ``vector = work / vector rate``.
    Every term grows with the size of a tensor. The number of thread blocks does not matter: a limit
    on the bandwidth of one core was tried, and the fit drove it to zero.

    Args:
        traffic: ``n`` passes.
        device: Device they run on.
        params: Fitted constants.
    """
    main = np.exp(params.device_log.get(device.name, 0.0)) / (device.bandwidth * params.hbm)
    # A cache slower than main memory is an artefact of a rough description, and would make small
    # kernels slower than large ones.
    cache = min(1.0 / (device.levels[0].bandwidth * params.cache), float(main))
    # The guards (one byte moved, a cache of one byte) keep the logarithm finite for empty kernels
    # and devices without a described cache.
    footprint = np.maximum(traffic.moved, 1.0) / max(device.cache_bytes * params.edge, 1.0)
    # Share of the traffic that misses: a ramp over the logarithm of the footprint, one octave wide.
    outside = np.clip(np.log2(footprint) / (2 * SPILL) + 0.5, 0.0, 1.0)
    moved = traffic.moved + traffic.again * outside
    stream = moved * (cache + outside * (main - cache))
    # Work on floats counts at the f32 rate for any type; ``routes.traffic`` doubles it for 64 bits.
    rated = (traffic.work - traffic.integers) / device.vector_peak("f32")
    vector = params.vector * (rated + INTEGERS * traffic.integers / device.vector_peak("s32"))
    launch = np.full(len(traffic), launch_seconds(device, params))
    # Atomics on one address: one per clock (NVIDIA, Kepler GK110 white paper, 2012).
    memory = np.maximum(traffic.penalty * stream, traffic.queued / (device.clock_hz or np.inf))
    return PassTimes(launch, memory, vector)


def depthwise_seconds(
    moved: np.ndarray,
    elements: np.ndarray,
    multiplied: np.ndarray,
    filters: np.ndarray,
    device: DeviceSpec,
    params: MemoryParams,
) -> np.ndarray:
    """Time of depthwise convolutions without their launch, seconds, shape ``(n,)``.

    They run as direct kernels, in which each output multiplies its own window:

        time = launch + softmax(moved / bandwidth, loads / load rate of the cores)

    This is no matrix product, so it runs on the vector units, limited by loads: a multiplication
    of forward passes and input gradients loads an element and a weight from L1, one of filter
    gradients two elements at unrelated positions.

    Args:
        moved: Bytes of the tensors read and written, shape ``(n,)``.
        elements: Their elements, shape ``(n,)``.
        multiplied: Multiplications: outputs of the forward pass times taps, shape ``(n,)``.
        filters: Mask of filter gradients, shape ``(n,)``.
        device: Device they run on.
        params: Constants of passes over memory.
    """
    # A thread reads one element at a time, like column reductions; filter gradients read along
    # rows.
    extra = np.where(filters, 0.0, COLUMN_BYTES * elements)
    memory = pass_seconds(Traffic.stream(moved + extra), device, params).memory
    loads = np.where(filters, FILTER_LOADS, LOADS) * multiplied
    return soft_maximum(memory, loads / _load_rate(device))


def _load_rate(device: DeviceSpec) -> float:
    """Loads of all cores per second."""
    lanes = LOAD_LANES if device.runs_cuda else LOAD_LANES_ELSEWHERE
    if device.core_count <= 1:
        # The description has no cores. A core has four times as many multiply-add lanes as load
        # lanes (64 and 16 on CDNA, 128 and 32 on Hopper).
        return device.vector_peak("f32") / 8.0
    return lanes * device.core_count * (device.clock_hz or CLOCK)


@dataclass(frozen=True)
class Constants:
    """Constants and errors fitted to published passes over memory.

    The defaults are wide guesses for use without the shipped model (engineering estimates).

    Attributes:
        memory: Constants of the times.
        known: Interval bounds of the log-ratio of measured to predicted on fitted devices.
        unseen: The same on devices held out of the fit.
        correlation: Correlation of the log errors of two kernels of a program.
    """

    memory: MemoryParams = field(default_factory=MemoryParams)
    known: Ends = (-0.3, 0.3)
    unseen: Ends = (-0.8, 0.8)
    correlation: float = 1.0

    def to_dict(self) -> dict[str, object]:
        """Convert to plain data for a manifest."""
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
