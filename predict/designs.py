"""Explore chip designs: elasticities of times with respect to rates, and designs against a base."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from ..features.devices.catalogue import Design, base_of, device_of, in_catalogue
from ..features.devices.device import DeviceSpec, MemoryLevel
from ..features.devices.sheet import MODELLED, sheet_of
from ..models.trust.designs import drift

#: Half of the relative step of a derivative, and the factor in both directions over which its
#: interval extends, for the uncertainty of the fraction of a rate that libraries reach.
STEP, REACH = 0.01, 1.5
#: Name of a modified device and of its file.
CHANGED = "what-if"
#: Function that multiplies one of a device's rates by a factor.
Scale = Callable[[DeviceSpec, float], DeviceSpec]


def _level(place: int) -> Scale:
    def scale(device: DeviceSpec, factor: float) -> DeviceSpec:
        levels = list(device.levels)
        levels[place] = MemoryLevel(levels[place].capacity, levels[place].bandwidth * factor)
        return replace(device, levels=tuple(levels))

    return scale


#: Rates that determine kernel times; all types of a unit change together. The clock affects what
#: is counted in cycles; the rates of the units are held.
RATES: dict[str, Scale] = {
    "peak_tflops": lambda d, f: replace(d, peak_flops=_times(d.peak_flops, f)),
    "vector_tflops": lambda d, f: replace(d, vector_flops=_times(d.vector_flops, f)),
    "boost_mhz": lambda d, f: replace(d, clock_hz=d.clock_hz * f),
    "hbm_bandwidth_gbps": _level(-1),
    "l2_bandwidth_gbps": _level(0),
    "power_w": lambda d, f: replace(d, power_w=d.power_w * f),
}


class Timed(Protocol):
    """A prediction of a program or an operator."""

    @property
    def latency_us(self) -> float:
        """Return the predicted time in microseconds."""
        ...


#: Function that predicts one subject on a device.
Price = Callable[[DeviceSpec], Timed]


@dataclass(frozen=True)
class Elasticity:
    """Percentage change of a time per percent increase of a rate.

    Attributes:
        rate: Key of the device file.
        value: d log time / d log rate.
        lo: The most negative value between rates :data:`REACH` times lower and higher.
        hi: The least negative value.
    """

    rate: str
    value: float
    lo: float
    hi: float


@dataclass(frozen=True)
class Sensitivity:
    """Elasticities of a time.

    Attributes:
        subject: The program or operator.
        device: Name of the device.
        latency_us: Predicted time on it.
        elasticities: Elasticities of the device's rates, the most negative first.
    """

    subject: str
    device: str
    latency_us: float
    elasticities: tuple[Elasticity, ...]

    def to_dict(self) -> dict[str, object]:
        """Return JSON data."""
        return asdict(self)


def sensitivity(price: Price, device: DeviceSpec, subject: str) -> Sensitivity:
    """Compute the elasticities of a time with respect to each rate of a device.

    Args:
        price: Function that predicts the time.
        device: The device, which is varied as a design based on itself.
        subject: Description of what is predicted.
    """
    start = device
    if not base_of(device) and in_catalogue(device.name):
        start = replace(device, name=f"{device.name} varied", aliases=(), base=device.name)
    latency = price(start).latency_us
    at = np.log([1 / REACH, 1 - STEP, 1 + STEP, REACH])
    found = []
    for rate, scale in rates_of(start).items():
        times = np.log([price(scale(start, float(np.exp(x)))).latency_us for x in at])
        below, here, above = np.diff(times) / np.diff(at)
        low, _, high = sorted((below, here, above))
        found.append(Elasticity(rate, float(here), float(low), float(high)))
    found.sort(key=lambda e: e.value)
    return Sensitivity(subject, device.name, latency, tuple(found))


@dataclass(frozen=True)
class Compared:
    """A design compared with its base.

    Attributes:
        device: Name of the design.
        figures: Values of the ranges in the file.
        latency_us: Predicted time.
        ratio: Time relative to the base.
        ratio_lo: Lower bound of the ratio's 90 % interval, in which common errors cancel.
        ratio_hi: Upper bound.
        energy_j: Energy in joules, if predicted.
        modelled: Area and price, if the file declares models of them.
        efficient: Whether no other design is as good in all of these and better in one.
    """

    device: str
    figures: Mapping[str, float]
    latency_us: float
    ratio: float
    ratio_lo: float
    ratio_hi: float
    energy_j: float | None
    modelled: Mapping[str, float]
    efficient: bool = False

    @property
    def costs(self) -> tuple[float, ...]:
        """Return the quantities to minimise, in the same order for all designs of a file."""
        energy = () if self.energy_j is None else (self.energy_j,)
        return (self.latency_us, *energy, *self.modelled.values())


@dataclass(frozen=True)
class Comparison:
    """Designs of a file compared with their base.

    Attributes:
        subject: The program or operator.
        base: Name of the base.
        designs: The base, followed by the designs.
    """

    subject: str
    base: str
    designs: tuple[Compared, ...]

    def to_dict(self) -> dict[str, object]:
        """Return JSON data."""
        return asdict(self)


def compare_designs(
    price: Price, base: DeviceSpec, designs: Sequence[Design], subject: str
) -> Comparison:
    """Compare designs with their base and find those on the Pareto front.

    Args:
        price: Function that predicts the time of the subject.
        base: The base, including values from the file's models.
        designs: Designs of one file.
        subject: Description of what is predicted.
    """
    rows: list[Compared] = []
    first = price(base).latency_us
    for figures, device in ((dict[str, float](), base), *designs):
        found = price(device)
        ratio = found.latency_us / first
        half = float(drift(np.array([ratio]))[0])
        energy = getattr(found, "energy", None)
        rows.append(
            Compared(
                device.name,
                figures,
                found.latency_us,
                ratio,
                ratio * float(np.exp(-half)),
                ratio * float(np.exp(half)),
                None if energy is None else float(energy.value),
                {name: float(device.extra[name]) for name in MODELLED if name in device.extra},
            )
        )
    known = all(row.energy_j is not None for row in rows)
    costs = np.array([r.costs if known else replace(r, energy_j=None).costs for r in rows])
    # Equal designs are all kept.
    no_worse = (costs[:, None] <= costs[None]).all(axis=2)
    better = (costs[:, None] < costs[None]).any(axis=2)
    beaten = np.flatnonzero((no_worse & better).any(axis=0)).tolist()
    return Comparison(
        subject,
        base.name,
        tuple(replace(row, efficient=at not in beaten) for at, row in enumerate(rows)),
    )


def _times(rates: dict[str, float], factor: float) -> dict[str, float]:
    return {name: rate * factor for name, rate in rates.items()}


def rates_of(device: DeviceSpec) -> dict[str, Scale]:
    """Return the rates that a device has; a device without a cache has no cache bandwidth."""
    lacking = {
        "boost_mhz": not device.clock_hz,
        "l2_bandwidth_gbps": len(device.levels) < 2,
        "power_w": not device.power_w,
    }
    return {name: scale for name, scale in RATES.items() if not lacking.get(name)}


def changed_device(base: str, figures: Mapping[str, float]) -> DeviceSpec:
    """Return a device of the catalogue with some figures changed.

    Args:
        base: Name of the catalogue's device.
        figures: Figures by keys of a device file, in its units, such as ``hbm_bandwidth_gbps``.

    Raises:
        DeviceError: A key is unknown, or a figure is wrong.
    """
    file = Path(f"{CHANGED}.yaml")
    return device_of(sheet_of({"name": CHANGED, "base": base, **figures}, file))
