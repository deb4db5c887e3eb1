"""Board power: idle power, power of running cores, and energy per operation and byte.

A chip's power limit is set such that its matrix unit and memory at full rate together exceed it.
The law is therefore fitted in fractions of the limit: vendors spend a generation's savings in
joules on rates, so that the law transfers to unmeasured chips. On a device (:meth:`PowerLaw.on`),
the fractions of one chip of its architecture give joules per operation and byte and watts per core:
a design with twice the bandwidth pays for twice the bytes per second, in half the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import eq

import numpy as np

from ...common.errors import ModelError
from ...common.files import parse_json
from ...common.types import typed
from ...features.devices.catalogue import device_names, find_device, in_catalogue
from ...features.devices.device import DeviceSpec
from ..core.registry import PRETRAINED

#: Sharpness of the limit: at 8, a demand equal to the limit gives 92 % of it, one of 1.3 times 99
#: %, like boards that regulate to their limit (H200 in the kernel pack: 690 of 700 W).
_SHARP = 8.0
#: Upper bound of each parameter; engineering estimate, not reached by the fit.
_MOST = 3.0
#: Power of the cores over the limit if no family counts a row's work: 0.3 of an H200's limit less
#: idle power. An engineering estimate in the middle, which trees correct.
_UNCOUNTED = 0.24
#: Exponent of the cores' power by clock: frequency times the square of the voltage, which rises
#: with the frequency (Rabaey et al., Digital Integrated Circuits, 2003, section 5.5). H200's
#: products of at least 20 µs at the limit fit an exponent of 2.9, with a median error of 4 %
#: (repeats in the tensor-core pack, times before and while power was measured).
_CLOCK_EXPONENT = 3.0
#: Power of the memory at its full bandwidth, including the path to the cores, over the limit.
#: Kernels do not separate it from cores that wait for bytes: fits with 0 to 0.4 have the same error
#: within 0.5 %. So it is set to the energy of such memories, 5.5 pJ per bit (HBM3's 4.5 and the
#: path, from memory): for an H200's 4.8 TB/s 210 of 700 W.
_MEMORY = 0.3
#: Share of it in the memory itself, whose clock is constant: 3.9 of the 5.5 pJ (HBM2's; from
#: memory).
_OFF_CHIP = 0.7
#: Fraction of the clock below which the voltage is constant, so that power is proportional to the
#: frequency. Engineering estimate; the rows above reach down to 0.8.
_LEAST_VOLTAGE = 0.6
#: Least utilization for the stalling of cores.
_LEAST_RATE = 1e-4
#: Least fraction of the clock; a tenth is below what boards run at (engineering estimate).
_LEAST_CLOCK = 0.1
#: Fraction of the cores' power while a board waits: collective kernels poll on some of them.
#: Engineering estimate; a third is 270 of an H200's 700 W.
_POLLING = 0.3


@dataclass(frozen=True)
class Work:
    """Utilization of units while kernels run, shape ``(n,)`` each.

    Attributes:
        matrix: FLOP/s over the dense matrix peak of the dtype; of a design, over that of the chip
            that it is made like.
        memory: Bytes/s over the bandwidth of main memory.
        busy: Fraction of the time without fixed costs (launch, ramps).
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
        grown: np.ndarray | float = 1.0,
    ) -> Work:
        """Utilizations of kernels that take ``seconds``, including ``fixed`` costs.

        ``grown`` is the peak over that of the chip that a design is made like.
        """
        # Rates above the data sheet's are due to unstated clocks or caches.
        return cls(
            np.clip(flops / (seconds * peak), 0.0, 1.0) * grown,
            np.clip(moved / (seconds * bandwidth), 0.0, 1.0),
            np.clip(1.0 - fixed / seconds, 0.0, 1.0),
            np.asarray(attention, bool),
        )


@dataclass(frozen=True)
class Silicon:
    """The chip whose figures convert the fractions of the law into joules for its architecture.

    Attributes:
        device: A measured chip of the architecture.
        idle: Its power with clocks up but no work, as a fraction of its limit.
    """

    device: str
    idle: float


@dataclass(frozen=True)
class PowerLaw:
    """``idle + active · busy · max(matrix, memory)^stalled + product · matrix + bytes · memory``.

    Soft-limited to the board's limit; all powers are fractions of it.

    Attributes:
        idle: Power of a board with clocks up but no work; the mean of the measured ones.
        active: Power of cores at full rate in ordinary kernels, and in attention.
        matrix: Power of the matrix unit at its peak in ordinary kernels, and in attention.
        memory: Power of main memory at its bandwidth, including the path to the cores.
        stalled: Exponent of the cores' power by utilization.
        uncounted: Power of cores without counted work; an estimate that trees correct.
        silicon: Measured chips by line: an architecture with those that revise it.
        ends: Bounds of the 90 % interval as logarithms, from held-out rows.
        wider: Bandwidth over that of the chip whose joules these are.
    """

    idle: float
    active: tuple[float, float]
    matrix: tuple[float, float]
    memory: float
    stalled: float = 0.0
    uncounted: float = _UNCOUNTED
    silicon: dict[str, Silicon] = field(default_factory=dict)
    ends: tuple[float, float] = (-0.5, 0.5)
    wider: float = 1.0

    def on(self, spec: DeviceSpec) -> PowerLaw:
        """The law of a device, in fractions of its own limit.

        Joules per operation and byte, and watts per core and clock, are those of the measured chip
        of its architecture; a chip of an unmeasured architecture takes fractions of its own limit.
        Without an architecture, joules are those of the newest measured chip. A design takes the
        joules of the chip that it is made like, and idles as its hardware has grown.
        """
        chip = made_like(spec)
        if chip is spec:
            return self._measured_on(spec)
        return self._measured_on(chip)._grown(chip, spec)

    def _grown(self, chip: DeviceSpec, spec: DeviceSpec) -> PowerLaw:
        """The law of a design that is derived from the law of a similar chip.

        Work takes the same joules on more cores. What is idle leaks: idle power is divided over
        cores, matrix units and memory like their power at full rate, and grows with each.
        """
        watts, wider = chip.power_w / spec.power_w, spec.bandwidth / chip.bandwidth
        slower = chip.clock_hz / spec.clock_hz if chip.clock_hz and spec.clock_hz else 1.0
        lanes = spec.vector_peak("f32") / chip.vector_peak("f32") * slower
        arrays = spec.matrix_peak("bf16") / chip.matrix_peak("bf16") * slower
        parts = np.array([self.active[0], self.matrix[0], self.memory])
        hardware = float(parts @ [lanes, arrays, wider] / parts.sum())
        return replace(
            self,
            idle=self.idle * watts * hardware,
            active=(self.active[0] * watts, self.active[1] * watts),
            matrix=(self.matrix[0] * watts, self.matrix[1] * watts),
            memory=self.memory * watts * wider,
            uncounted=self.uncounted * watts,
            wider=wider,
        )

    def _measured_on(self, spec: DeviceSpec) -> PowerLaw:
        """The law of a chip of the catalogue, or of one without architecture."""
        own = self.silicon.get(spec.line)
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
        """Power demand of the units as a fraction of the limit; above 1 the clock is reduced."""
        active, matrix, memory = self._parts(work)
        return np.asarray(self.idle + active + matrix + memory)

    def _parts(self, work: Work) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Power of the cores, of matrix products and of the memory."""
        rate = np.maximum(np.maximum(work.matrix, work.memory * self.wider), _LEAST_RATE)
        active = np.where(work.attention, self.active[1], self.active[0])
        matrix = np.where(work.attention, self.matrix[1], self.matrix[0])
        # Beyond the rates of the measured cores, a design has more of them at work.
        active = active * work.busy * np.where(rate > 1.0, rate, rate**self.stalled)
        return active, matrix * work.matrix, self.memory * work.memory

    def share(self, work: Work) -> np.ndarray:
        """Power of the board as a fraction of its limit, shape ``(n,)``."""
        return held(self.demand(work))

    def clock(self, work: Work, cap: float = 1.0) -> np.ndarray:
        """Fraction of its clock that a board keeps under a cap, shape ``(n,)``.

        Args:
            work: Utilizations at the full clock.
            cap: Sustained power as a fraction of the limit.
        """
        # Power rises with the clock: bisection to 2⁻³⁰ of the clock.
        low, high = np.full(len(work.matrix), _LEAST_CLOCK), np.ones(len(work.matrix))
        for _ in range(30):
            middle = (low + high) / 2
            above = self._drawn(work, middle) > cap
            low, high = np.where(above, low, middle), np.where(above, middle, high)
        return np.where(self.demand(work) <= cap, 1.0, low)

    def _drawn(self, work: Work, clock: np.ndarray) -> np.ndarray:
        """Power as a fraction of the limit at a fraction of the clock.

        A slower kernel spreads the energy of its products and bytes over more time; the energy of
        the clock is spent in every cycle. Energies in the cores scale with the square of their
        voltage, the memory's do not.
        """
        voltage = np.maximum(clock, _LEAST_VOLTAGE) ** (_CLOCK_EXPONENT - 1.0)
        active, matrix, memory = self._parts(work)
        longer = slower(work, clock)
        cores = active * clock + (matrix + (1.0 - _OFF_CHIP) * memory) / longer
        return np.asarray(self.idle + _OFF_CHIP * memory / longer + cores * voltage)

    def slowdown(self, work: Work, cap: float) -> np.ndarray:
        """Times under a cap over those under the board's own limit, shape ``(n,)``, at least 1.

        Memory time does not increase with a lower core clock. Both overlap as in the physics of
        operators: the cube of a time is the sum of its parts' cubes.
        """
        return slower(work, self.clock(work, cap) / self.clock(work))

    def error(self, cap: float) -> tuple[float, float]:
        """Bounds of the law's error in times under a cap, as logarithms.

        Idle power does not depend on the clock, so that an error of the total is a larger relative
        error of the power left to the units; times depend on the clock, a root of that power while
        the voltage falls with it.
        """
        left = cap - self.idle
        root = (
            _CLOCK_EXPONENT if left > (1.0 - self.idle) * _LEAST_VOLTAGE**_CLOCK_EXPONENT else 1.0
        )
        grown = cap / max(left, 0.1 * cap) / root
        return self.ends[0] * grown, self.ends[1] * grown

    @property
    def waiting(self) -> float:
        """Fraction of the limit of a board that waits for others or the network with polling."""
        return float(held(np.array(self.idle + _POLLING * self.active[0])))


def slower(work: Work, clock: np.ndarray) -> np.ndarray:
    """Slowdown at a fraction of the clock, shape ``(n,)``."""
    memory = np.minimum(work.memory, 1.0) ** 3
    return np.asarray((memory + (1 - memory) / clock**3) ** (1 / 3))


def _joules(spec: DeviceSpec) -> float:
    """Power limit over the matrix peak: proportional to the energy per operation."""
    return spec.power_w / spec.matrix_peak("bf16")


def _figures(spec: DeviceSpec) -> tuple[float, ...]:
    """Figures that distinguish chips of one architecture."""
    peak = spec.matrix_peak("bf16")
    sizes = (spec.memory_bytes, spec.cache_bytes, float(spec.core_count), spec.clock_hz)
    return (spec.power_w, peak, spec.bandwidth, *sizes)


def _like(spec: DeviceSpec) -> DeviceSpec | None:
    """The catalogue chip of the same architecture with most figures in common."""
    if not spec.architecture:
        return None
    if in_catalogue(spec.name) and _figures(find_device(spec.name)) == _figures(spec):
        return spec
    rest = map(find_device, device_names())
    chips = [d for d in rest if d.line == spec.line and d.power_w]
    same = [sum(map(eq, _figures(chip), _figures(spec))) for chip in chips]
    return chips[int(np.argmax(same))] if chips else None


def made_like(spec: DeviceSpec) -> DeviceSpec:
    """The catalogue chip whose joules a design takes; other devices themselves."""
    if in_catalogue(spec.name):
        return spec
    chip = find_device(spec.base) if spec.base and in_catalogue(spec.base) else _like(spec)
    return chip if chip is not None and chip.power_w and spec.power_w else spec


def grown_peaks(spec: DeviceSpec, dtypes: Sequence[str]) -> np.ndarray:
    """Matrix peaks over those of the chip that a design is made like; 1 for other devices."""
    like = made_like(spec)
    return np.array([spec.matrix_peak(own) / like.matrix_peak(own) for own in dtypes])


def board_law(spec: DeviceSpec) -> PowerLaw:
    """The shipped law on a device whose power limit is known."""
    return shipped_law().on(spec)


@lru_cache(maxsize=1)
def shipped_law() -> PowerLaw:
    """The shipped law, read once, without the trees next to it.

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
    """Fit the law to measured fractions of the limit, in logarithms with a robust loss.

    Args:
        parts: Devices, and masks of their training rows, bool of shape ``(n,)`` each.
        work: Utilizations, shape ``(n,)``.
        share: Measured power over the limit.
        weight: Weight of each row, so that families with many rows do not dominate.
        silicon: Measured chips by line; their idle power is measured separately, since no
            kernel row is idle.
    """
    # Imported here: SciPy comes with scikit-learn, which only training needs.
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
