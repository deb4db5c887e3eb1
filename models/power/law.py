"""Board power: what idles, what cores take while they run, and joules for operations and bytes.

A chip's limit is set so that its matrix unit and its memory at full rate together exceed it. The
law is thus fitted in shares of the limit: what a generation saves in joules, its vendor spends on
rates, so that it carries over to chips that nobody measured. On a device (:meth:`PowerLaw.on`) the
shares of one chip of its architecture give joules for an operation and for a byte and watts for a
core: a design with twice the bandwidth pays for twice the bytes a second, in half the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import eq

import numpy as np

from ...common.errors import DeviceError, ModelError
from ...common.files import parse_json
from ...common.types import typed
from ...features.devices.catalogue import device_names, find_device, in_catalogue
from ...features.devices.device import DeviceSpec
from ..core.registry import PRETRAINED
from ..trust.calibrator import with_error

#: Sharpness of the limit: at 8 a demand equal to the limit reads 92 % of it, one of 1.3 times 99 %,
#: as boards read that regulate to their limit (H200 in the kernel pack: 690 of 700 W).
_SHARP = 8.0
#: Bounds of each parameter; engineering estimates, none is reached by the fit.
_MOST = 3.0
#: Power of the cores where no family counts a row's work, over the limit: 0.3 of what idling leaves
#: of an H200's. An engineering estimate, a middle that trees correct.
_UNCOUNTED = 0.24
#: Power of the cores by their clock: frequency times the square of the voltage, which rises with
#: the frequency (Rabaey et al., Digital Integrated Circuits, 2003, section 5.5). H200's products of
#: 20 µs and more that reach the limit run as if the exponent were 2.9, with a median error of 4 %
#: (repeats of the tensor-core pack, times before and while power was measured).
_CLOCK_EXPONENT = 3.0
#: Power of the memory at its bandwidth, with the way to the cores, over the limit. Kernels do not
#: tell it from that of cores that wait for bytes: fits with 0 to 0.4 err alike, within 0.5 %. So it
#: is taken from what such memories need, 5.5 pJ a bit (HBM3's 4.5 and the way, from memory): of an
#: H200's 4.8 TB/s 210 of 700 W.
_MEMORY = 0.3
#: Share of it in the memory itself, whose clock stays: 3.9 of the 5.5 pJ (HBM2's; from memory).
_OFF_CHIP = 0.7
#: Share of the clock below which the voltage falls no further, so that power falls with the
#: frequency alone. Engineering estimate; the rows above reach down to 0.8.
_LEAST_VOLTAGE = 0.6
#: Least utilisation that tells apart how far cores wait.
_LEAST_RATE = 1e-4
#: A tenth of the clock is below what boards run at (engineering estimate).
_LEAST_CLOCK = 0.1
#: Least cap, as a share of the limit: drivers allow 100 of an A100's 400 W and 200 of an H100's 700
#: (from memory).
LEAST_CAP = 0.25
#: Share of the cores' power while a board waits: collectives' kernels poll on some of them.
#: Engineering estimate; a third is 270 of an H200's 700 W.
_POLLING = 0.3


@dataclass(frozen=True)
class Work:
    """How busy units are while kernels run, shape ``(n,)`` each.

    Attributes:
        matrix: FLOP/s over the dense matrix peak of the dtype.
        memory: Bytes/s over the bandwidth of main memory.
        busy: Share of the time that is no fixed cost (launch, ramps).
        attention: Whether the kernel is fused attention, whose matrix unit waits for exponentials.
    """

    matrix: np.ndarray
    memory: np.ndarray
    busy: np.ndarray
    attention: np.ndarray

    def take(self, rows: np.ndarray) -> Work:
        """Select kernels by mask or position."""
        return Work(self.matrix[rows], self.memory[rows], self.busy[rows], self.attention[rows])

    @classmethod
    def of(
        cls,
        flops: np.ndarray,
        moved: np.ndarray,
        seconds: np.ndarray,
        fixed: np.ndarray,
        peak: np.ndarray | float,
        bandwidth: np.ndarray | float,
        attention: np.ndarray,
    ) -> Work:
        """Utilisations of kernels that take ``seconds``, ``fixed`` of them whatever their size."""
        # Rates above the data sheet's are clocks or caches that it does not state.
        return cls(
            np.clip(flops / (seconds * peak), 0.0, 1.0),
            np.clip(moved / (seconds * bandwidth), 0.0, 1.0),
            np.clip(1.0 - fixed / seconds, 0.0, 1.0),
            np.asarray(attention, bool),
        )


@dataclass(frozen=True)
class Silicon:
    """The chip whose figures turn the shares of the law into joules for its architecture.

    Attributes:
        device: A chip of the architecture whose power was measured.
        idle: Power of it that runs nothing with its clocks up, as a share of its limit.
    """

    device: str
    idle: float


@dataclass(frozen=True)
class PowerLaw:
    """``idle + active · busy · max(matrix, memory)^stalled + product · matrix + bytes · memory``.

    Held below the limit.

    Attributes:
        idle: Power of a board that runs nothing with its clocks up, as a share of the limit; the
            mean of those that were measured.
        active: Of cores that run a kernel at full rate; and of those that run attention.
        matrix: Of the matrix unit at its peak; and in attention.
        memory: Of main memory at its bandwidth, with the way to the cores.
        stalled: How the power of cores falls where they wait.
        uncounted: Of cores that do what no family counts; a middle, which trees correct.
        silicon: Measured chips by architecture.
        ends: Ends of the 90 % interval as logarithms, from what was left out.
    """

    idle: float
    active: tuple[float, float]
    matrix: tuple[float, float]
    memory: float
    stalled: float = 0.0
    uncounted: float = _UNCOUNTED
    silicon: dict[str, Silicon] = field(default_factory=dict)
    ends: tuple[float, float] = (-0.5, 0.5)

    def on(self, spec: DeviceSpec) -> PowerLaw:
        """The law of a device, in shares of its own limit.

        Joules for an operation and a byte, and watts for a core and its clock, are those of the
        measured chip of its architecture; of an architecture that nobody measured those of the chip
        of the catalogue that it is or is like. Of a chip without an architecture the joules are
        those of the newest measured chip, idle power and cores take their shares of its own limit.
        """
        own = self.silicon.get(spec.architecture)
        base = find_device(own.device) if own else _like(spec)
        idle = own.idle if own else self.idle
        measured = [find_device(chip.device) for chip in self.silicon.values()]
        joules = base or min(measured, key=_joules, default=spec)
        matrix = _joules(joules) / _joules(spec)
        memory = joules.power_w / joules.bandwidth / (spec.power_w / spec.bandwidth)
        cores = clock = 1.0
        if base is not None:
            cores = base.power_w / spec.power_w * (spec.core_count / base.core_count)
            clock = spec.clock_hz / base.clock_hz if spec.clock_hz and base.clock_hz else 1.0
        return replace(
            self,
            idle=idle * cores,
            active=(self.active[0] * cores * clock, self.active[1] * cores * clock),
            matrix=(self.matrix[0] * matrix, self.matrix[1] * matrix),
            memory=self.memory * memory,
            uncounted=self.uncounted * cores * clock,
        )

    def demand(self, work: Work) -> np.ndarray:
        """Power that the units ask for, as a share of the limit; above 1 the clock falls."""
        active, matrix, memory = self._parts(work)
        return np.asarray(self.idle + active + matrix + memory)

    def _parts(self, work: Work) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Power of the cores, of products and of the memory."""
        rate = np.maximum(np.maximum(work.matrix, work.memory), _LEAST_RATE)
        active = np.where(work.attention, self.active[1], self.active[0])
        matrix = np.where(work.attention, self.matrix[1], self.matrix[0])
        active = active * work.busy * rate**self.stalled
        return active, matrix * work.matrix, self.memory * work.memory

    def share(self, work: Work) -> np.ndarray:
        """Power that the board draws, as a share of its limit, shape ``(n,)``."""
        return held(self.demand(work))

    def clock(self, work: Work, cap: float = 1.0) -> np.ndarray:
        """Share of its clock that a board keeps under a cap, shape ``(n,)``.

        Args:
            work: Utilisations at the full clock.
            cap: Sustained power as a share of the limit.
        """
        # Power rises with the clock, so that halving brackets it: 2⁻³⁰ of the clock is exact.
        low, high = np.full(len(work.matrix), _LEAST_CLOCK), np.ones(len(work.matrix))
        for _ in range(30):
            middle = (low + high) / 2
            above = self._drawn(work, middle) > cap
            low, high = np.where(above, low, middle), np.where(above, middle, high)
        return np.where(self.demand(work) <= cap, 1.0, low)

    def _drawn(self, work: Work, clock: np.ndarray) -> np.ndarray:
        """Power as a share of the limit at a share of the clock.

        A kernel that takes longer spreads the energy of its products and bytes over more time; that
        of the clock itself is spent in every cycle. Energies in the cores go with the square of
        their voltage, the memory's own stays.
        """
        voltage = np.maximum(clock, _LEAST_VOLTAGE) ** (_CLOCK_EXPONENT - 1.0)
        active, matrix, memory = self._parts(work)
        longer = slower(work, clock)
        cores = active * clock + (matrix + (1.0 - _OFF_CHIP) * memory) / longer
        return np.asarray(self.idle + _OFF_CHIP * memory / longer + cores * voltage)

    def slowdown(self, work: Work, cap: float) -> np.ndarray:
        """Times under a cap over those under the board's own limit, shape ``(n,)``, at least 1.

        What a kernel needs of the memory does not slow down with the cores. Both overlap as in the
        physics of operators: the cube of a time is the sum of its parts' cubes.
        """
        return slower(work, self.clock(work, cap) / self.clock(work))

    def error(self, cap: float) -> tuple[float, float]:
        """Ends of the law's error in times under a cap, as logarithms.

        What idles is spent whatever the clock, so that an error of the whole is a larger one of
        what is left to the units; times go with the clock, a root of that as long as the voltage
        falls with it.
        """
        left = cap - self.idle
        root = (
            _CLOCK_EXPONENT if left > (1.0 - self.idle) * _LEAST_VOLTAGE**_CLOCK_EXPONENT else 1.0
        )
        grown = cap / max(left, 0.1 * cap) / root
        return self.ends[0] * grown, self.ends[1] * grown

    @property
    def waiting(self) -> float:
        """Share of a board that waits for others or for the network, whose cores poll."""
        return float(held(np.array(self.idle + _POLLING * self.active[0])))


def slower(work: Work, clock: np.ndarray) -> np.ndarray:
    """Times at a share of the clock over those at the full one, shape ``(n,)``."""
    memory = np.minimum(work.memory, 1.0) ** 3
    return np.asarray((memory + (1 - memory) / clock**3) ** (1 / 3))


def _joules(spec: DeviceSpec) -> float:
    """Power limit over the matrix peak: joules for an operation, to a factor of all chips."""
    return spec.power_w / spec.matrix_peak("bf16")


def _figures(spec: DeviceSpec) -> tuple[float, ...]:
    """What tells chips of one architecture apart."""
    peak = spec.matrix_peak("bf16")
    sizes = (spec.memory_bytes, spec.cache_bytes, float(spec.core_count), spec.clock_hz)
    return (spec.power_w, peak, spec.bandwidth, *sizes)


def _like(spec: DeviceSpec) -> DeviceSpec | None:
    """The chip of the catalogue that shares most figures with one of the same architecture."""
    if not spec.architecture:
        return None
    if in_catalogue(spec.name) and _figures(find_device(spec.name)) == _figures(spec):
        return spec
    rest = map(find_device, device_names())
    chips = [d for d in rest if d.architecture == spec.architecture and d.power_w]
    same = [sum(map(eq, _figures(chip), _figures(spec))) for chip in chips]
    return chips[int(np.argmax(same))] if chips else None


def board_law(spec: DeviceSpec) -> PowerLaw:
    """The shipped law on a device whose power limit is known."""
    return shipped_law().on(spec)


@lru_cache(maxsize=1)
def shipped_law() -> PowerLaw:
    """The law that ships with the package, read once, without the trees beside it.

    Raises:
        ModelError: The file is damaged.
    """
    file = PRETRAINED / "power.json"
    try:
        return typed(PowerLaw, parse_json(file.read_text(encoding="utf-8"))["law"], "law")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"the law of power cannot be read: {error}", where=str(file)) from None


def held(demand: np.ndarray) -> np.ndarray:
    """The soft minimum of a demand and the limit, ``(d⁻⁸ + 1)^(-1/8)``."""
    return np.asarray((np.maximum(demand, 1e-3) ** -_SHARP + 1.0) ** (-1.0 / _SHARP))


def fit_law(
    parts: Sequence[tuple[DeviceSpec, np.ndarray]],
    work: Work,
    share: np.ndarray,
    weight: np.ndarray,
    silicon: dict[str, Silicon],
) -> PowerLaw:
    """Fit the law to measured shares of the limit, on logarithms with a robust loss.

    Args:
        parts: Devices, and which rows to learn from are theirs, bool of shape ``(n,)`` each.
        work: Utilisations, shape ``(n,)``.
        share: Measured power over the limit.
        weight: Of each row, so that families with many rows do not drown the others.
        silicon: Measured chips by architecture; their idle power is measured apart, since no row of
            kernels is idle.
    """
    # SciPy comes with scikit-learn, which training needs anyway.
    from scipy.optimize import least_squares

    idle = float(np.mean([own.idle for own in silicon.values()]))
    own = [(spec, work.take(at), np.log(share[at]), weight[at]) for spec, at in parts]

    def law(values: np.ndarray) -> PowerLaw:
        a, b, c, d, stalled = map(float, values)
        return PowerLaw(idle, (a, b), (c, d), _MEMORY, stalled, silicon=silicon)

    def left(values: np.ndarray) -> np.ndarray:
        made = law(values)
        return np.concatenate([(np.log(made.on(s).share(u)) - y) * w for s, u, y, w in own])

    start = np.array([0.4, 0.3, 0.6, 0.6, 0.3])
    found = least_squares(left, start, bounds=(0.0, _MOST), loss="soft_l1", f_scale=0.05)
    return law(found.x)


def cap_share(watts: float | None, spec: DeviceSpec) -> float:
    """A power cap as a share of a device's limit; 1 without a cap.

    Raises:
        DeviceError: The limit is unknown, or the cap lies outside what boards allow.
    """
    if watts is None:
        return 1.0
    if not spec.power_w:
        raise DeviceError(
            "a power cap needs the device's power limit",
            where=spec.name,
            hint="give power_w in a device file",
        )
    least = LEAST_CAP * spec.power_w
    if not least <= watts <= spec.power_w:
        raise DeviceError(
            f"a power cap of {watts:g} W is outside {least:g} to {spec.power_w:g} W",
            where=spec.name,
            hint="its limit, and a quarter of it",
        )
    return watts / spec.power_w


def capped(times: np.ndarray, work: Work, cap: float, law: PowerLaw) -> np.ndarray:
    """Times and ends of their intervals under a cap, shape ``(n, 3)``.

    The error of the law widens intervals where the clock falls (:meth:`PowerLaw.error`).

    Args:
        times: Seconds and both ends without a cap, shape ``(n, 3)``.
        work: Utilisations.
        cap: Share of the limit.
        law: The law of the device.
    """
    slower = law.slowdown(work, cap)
    made = times * slower[:, None]
    ratios = made[:, 1:] / made[:, :1]
    wide = np.stack([under_cap(low, high, cap, law) for low, high in ratios])
    made[:, 1:] = made[:, :1] * np.where(slower[:, None] > 1.0, wide, ratios)
    # A cap makes nothing faster: lower ends stay above what holds without one.
    made[:, 1] = np.maximum(made[:, 1], times[:, 1])
    return np.asarray(made)


def under_cap(low: float, high: float, cap: float, law: PowerLaw) -> tuple[float, float]:
    """Ends of an interval over its middle, with the law's error under a cap as well."""
    below, above = with_error((np.log(low), np.log(high)), law.error(cap))
    return float(np.exp(below)), float(np.exp(above))
