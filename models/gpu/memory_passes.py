"""Time of a pass over memory (fusion, reduction, copy) on a GPU.

    time = launch + softmax(penalty · moved / bandwidth(footprint), vector · work / vector rate)

The constants are fitted to published kernels by :mod:`.memory_passes_fit` (docs/gpu.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ...common.types import JsonMapping
from ...features.devices.device import DeviceSpec
from ..core.registry import GPU_MODEL, PRETRAINED
from ..core.store import read_manifest
from ..trust.conformal import Ends

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

    def to_dict(self) -> dict[str, object]:
        """Plain data for a manifest."""
        plain = {
            name: getattr(self, name)
            for name in ("hbm", "cache", "edge", "launch_cycles", "vector")
        }
        return {**plain, "device_log": dict(self.device_log)}

    @classmethod
    def from_dict(cls, data: JsonMapping) -> MemoryParams:
        """Read :meth:`to_dict`'s data.

        Raises:
            TypeError: A key is unknown.
        """
        return cls(**data)


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
    # The rows that determine the fitted cycles are all of NVIDIA's chips. Elsewhere the launch is
    # longer in proportion to the described floor over 2 µs, never shorter (engineering estimate);
    # an unnamed vendor counts as NVIDIA.
    slow = 1.0 if device.runs_cuda else device.floor / 2e-6
    return params.launch_cycles / (device.clock_hz or CLOCK) * max(slow, 1.0)


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
        return {"memory": self.memory.to_dict(), **ends, "correlation": self.correlation}

    @classmethod
    def from_dict(cls, data: JsonMapping) -> Constants:
        """Read :meth:`to_dict`'s data.

        Raises:
            KeyError: An entry is missing.
            TypeError: A constant is unknown.
        """
        (low, high), (least, most) = data["known_log"], data["unseen_log"]
        memory = MemoryParams.from_dict(data["memory"])
        known, unseen = (float(low), float(high)), (float(least), float(most))
        return cls(memory, known, unseen, float(data["correlation"]))


def shipped_constants() -> Constants:
    """Constants of the shipped model; rough defaults if the package comes without it."""
    if not (_SHIPPED / "manifest.json").is_file():
        return Constants()
    return Constants.from_dict(read_manifest(_SHIPPED)["constants"])
