"""Board power from how busy a chip's units are, as shares of its power limit.

A chip's limit is set so that its matrix unit and its memory at full rate together exceed it.
Energies for an operation or a byte are thus taken as shares of the limit: what a generation saves
in joules, its vendor spends on rates. So the law needs no figure of a process, and carries over to
chips that nobody measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ...common.errors import DeviceError, ModelError
from ...common.files import parse_json
from ...common.types import typed
from ...features.devices.device import DeviceSpec
from ..core.registry import PRETRAINED
from ..trust.calibrator import with_error

#: Sharpness of the limit: at 8 a demand equal to the limit reads 92 % of it, one of 1.3 times 99 %,
#: as boards read that regulate to their limit (H200 in the kernel pack: 690 of 700 W).
_SHARP = 8.0
#: Bounds of each parameter but the idle share; engineering estimates, none is reached by the fit.
_MOST = 3.0
#: Power of the cores by their clock: frequency times the square of the voltage, which rises with
#: the frequency (Rabaey et al., Digital Integrated Circuits, 2003, section 5.5). H200's products of
#: 20 µs and more that reach the limit run as if the exponent were 2.9, with a median error of 4 %
#: (repeats of the tensor-core pack, times before and while power was measured).
_CLOCK_EXPONENT = 3.0
#: Share of the memory's power in the memory itself, whose clock stays: 4.5 pJ a bit of HBM3 (from
#: memory) at 3.35 TB/s are 120 of the 278 W that the law gives an H100's; the rest is the way to
#: the cores, at their voltage.
_OFF_CHIP = 0.43
#: Share of the clock below which the voltage falls no further, so that power falls with the
#: frequency alone. Engineering estimate; the rows above reach down to 0.8.
_LEAST_VOLTAGE = 0.6
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
class PowerLaw:
    """``demand = idle + active · busy + product · matrix + bytes · memory``, held below the limit.

    Attributes:
        idle: Power of a board that runs nothing with its clocks up, as a share of the limit.
        active: Of cores that run a kernel; and of those that run attention.
        matrix: Of the matrix unit at its peak; and in attention.
        memory: Of main memory at its bandwidth, with the way to the cores.
        ends: Ends of the 90 % interval as logarithms, from classes of kernels left out.
    """

    idle: float
    active: tuple[float, float]
    matrix: tuple[float, float]
    memory: float
    ends: tuple[float, float] = (-0.5, 0.5)

    def demand(self, work: Work) -> np.ndarray:
        """Power that the units ask for, as a share of the limit; above 1 the clock falls."""
        active = np.where(work.attention, self.active[1], self.active[0])
        matrix = np.where(work.attention, self.matrix[1], self.matrix[0])
        return np.asarray(
            self.idle + active * work.busy + matrix * work.matrix + self.memory * work.memory
        )

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
        active = np.where(work.attention, self.active[1], self.active[0]) * work.busy * clock
        matrix = np.where(work.attention, self.matrix[1], self.matrix[0]) * work.matrix
        memory = self.memory * work.memory
        slower = _slower(work, clock)
        cores = active + (matrix + (1.0 - _OFF_CHIP) * memory) / slower
        return np.asarray(self.idle + _OFF_CHIP * memory / slower + cores * voltage)

    def slowdown(self, work: Work, cap: float) -> np.ndarray:
        """Times under a cap over those under the board's own limit, shape ``(n,)``, at least 1.

        What a kernel needs of the memory does not slow down with the cores. Both overlap as in the
        physics of operators: the cube of a time is the sum of its parts' cubes.
        """
        return _slower(work, self.clock(work, cap) / self.clock(work))

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


def _slower(work: Work, clock: np.ndarray) -> np.ndarray:
    """Times at a share of the clock over those at the full one, shape ``(n,)``."""
    memory = np.minimum(work.memory, 1.0) ** 3
    return np.asarray((memory + (1 - memory) / clock**3) ** (1 / 3))


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
    work: Work, share: np.ndarray, weight: np.ndarray, idle: float, rows: np.ndarray
) -> PowerLaw:
    """Fit the law to measured shares of the limit, on logarithms with a robust loss.

    Args:
        work: Utilisations, shape ``(n,)``.
        share: Measured power over the limit.
        weight: Of each row, so that families with many rows do not drown the others.
        idle: Idle share; measured apart, since no row of kernels is idle.
        rows: Rows to learn from, bool.
    """
    # SciPy comes with scikit-learn, which training needs anyway.
    from scipy.optimize import least_squares

    log = np.log(share)

    def left(values: np.ndarray) -> np.ndarray:
        law = _law(idle, values)
        return np.asarray(((np.log(law.share(work)) - log) * weight)[rows])

    start = np.array([0.4, 0.3, 0.6, 0.6, 0.5])
    found = least_squares(left, start, bounds=(0.0, _MOST), loss="soft_l1", f_scale=0.05)
    return _law(idle, found.x)


def _law(idle: float, values: Sequence[float] | np.ndarray) -> PowerLaw:
    a, b, c, d, e = map(float, values)
    return PowerLaw(idle, (a, b), (c, d), e)


def left_out_errors(
    fit: Callable[[np.ndarray], PowerLaw], work: Work, share: np.ndarray, group: np.ndarray
) -> np.ndarray:
    """Logarithm of measured over predicted power of each row by a law that lacks its group.

    Args:
        fit: Fits a law to the rows of a mask.
        work: Utilisations.
        share: Measured shares.
        group: Group of each row, such as its family.
    """
    errors = np.zeros(len(share))
    for name in np.unique(group):
        out = group == name
        law = fit(~out)
        errors[out] = (np.log(share) - np.log(law.share(work)))[out]
    return errors


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


def capped(times: np.ndarray, work: Work, cap: float, law: PowerLaw | None = None) -> np.ndarray:
    """Times and ends of their intervals under a cap, shape ``(n, 3)``.

    The error of the law widens intervals where the clock falls (:meth:`PowerLaw.error`).

    Args:
        times: Seconds and both ends without a cap, shape ``(n, 3)``.
        work: Utilisations.
        cap: Share of the limit.
        law: The law; the shipped one by default.
    """
    law = law or shipped_law()
    slower = law.slowdown(work, cap)
    made = times * slower[:, None]
    ratios = made[:, 1:] / made[:, :1]
    wide = np.stack([under_cap(low, high, cap, law) for low, high in ratios])
    made[:, 1:] = made[:, :1] * np.where(slower[:, None] > 1.0, wide, ratios)
    return np.asarray(made)


def under_cap(
    low: float, high: float, cap: float, law: PowerLaw | None = None
) -> tuple[float, float]:
    """Ends of an interval over its middle, with the law's error under a cap as well."""
    below, above = with_error((np.log(low), np.log(high)), (law or shipped_law()).error(cap))
    return float(np.exp(below)), float(np.exp(above))
