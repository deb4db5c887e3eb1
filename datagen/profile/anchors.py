"""Fixed programs measured throughout a run, to separate noise from signal."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ...common.files import own_data
from .plan import Item

if TYPE_CHECKING:
    from .measure import Limits, Prepared
    from .runner import Pulse

#: Length of a chain of dependent multiplications and additions for one core, on so few elements
#: that XLA's CPU backend keeps them on one thread.
_STEPS = 256
#: Slow-down of the anchors relative to their best recent values that reveals another process: above
#: their usual spread on a quiet host, below the factor of two of a shared core (engineering
#: estimate; not fitted).
DISTURBED = 1.35
#: Number of recent values: ten minutes at one check per half minute, so that a slow drift of the
#: clock with temperature does not count as a disturbance.
_RECENT = 20
#: Number of readings whose geometric mean is the machine's speed at a time: the two speeds of a
#: processor that is shared with a neighbour alternate within seconds.
READINGS = 6


def _single() -> str:
    chain = "".join(
        f"    %y{i} = stablehlo.multiply %x{i}, %b : tensor<1024xf32>\n"
        f"    %x{i + 1} = stablehlo.add %y{i}, %b : tensor<1024xf32>\n"
        for i in range(_STEPS)
    )
    return (
        "module @anchor_single {\n"
        "  func.func public @main(%a: tensor<1024xf32>, %b: tensor<1024xf32>) -> tensor<1024xf32> "
        "{\n"
        f"    %x0 = stablehlo.add %a, %b : tensor<1024xf32>\n{chain}"
        f"    return %x{_STEPS} : tensor<1024xf32>\n  }}\n}}\n"
    )


#: Anchors by name.
ANCHORS: dict[str, str] = own_data("datagen/profile/anchors.toml") | {"single": _single()}


def anchor_items() -> list[Item]:
    """Anchors as items of a plan."""
    return [
        Item("given", i, name=f"anchor-{name}", family="anchor", text=text)
        for i, (name, text) in enumerate(ANCHORS.items())
    ]


def read_anchors(
    prepared: Sequence[Prepared], limits: Limits, pulse: Pulse | None = None
) -> dict[str, float]:
    """Measure compiled anchors once; returns median microseconds by name, if they have events."""
    from .measure import measure

    for anchor in prepared:
        anchor.durations.clear()
    measure(prepared, limits, walls=False, sessions=1, pulse=pulse)
    totals = {
        anchor.item.name.removeprefix("anchor-"): sum(
            float(np.median(s)) for s in anchor.durations.values() if s
        )
        for anchor in prepared
    }
    return {name: s * 1e6 for name, s in totals.items() if s > 0}


def present_anchors(readings: int = READINGS) -> dict[str, float]:
    """Measure the anchors on JAX's default device; geometric means over readings, microseconds.

    A reading takes about half a second, compilation a second.
    """
    from .measure import Limits, prepare

    limits = Limits()
    prepared = [prepare(item, limits) for item in anchor_items()]
    return typical([read_anchors(prepared, limits) for _ in range(readings)])


def typical(readings: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Geometric mean of each anchor over readings."""
    names = {name for reading in readings for name in reading}
    return {
        name: statistics.geometric_mean(r[name] for r in readings if name in r)
        for name in sorted(names)
    }


@dataclass
class AnchorLog:
    """Values of the anchors over a run.

    Attributes:
        times_s: Seconds since the start of the run, one per measurement.
        values_us: Median microseconds by anchor, one per measurement.
    """

    times_s: list[float] = field(default_factory=list)
    values_us: dict[str, list[float]] = field(default_factory=dict)

    def add(self, time_s: float, values_us: Mapping[str, float]) -> float:
        """Add a measurement; return how much slower it is than the best recent one (1: not).

        The geometric mean over the anchors is compared, so that one odd value does not decide.
        """
        self.times_s.append(time_s)
        ratios = []
        for name, value in values_us.items():
            series = self.values_us.setdefault(name, [])
            series.append(value)
            ratios.append(value / min(series[-_RECENT:]))
        return statistics.geometric_mean(ratios) if ratios else 1.0

    def spread(self) -> dict[str, float]:
        """(p90 − p10) / median of each anchor over the run; 0 below two measurements."""
        spreads = {}
        for name, series in self.values_us.items():
            cuts = statistics.quantiles(series, n=10) if len(series) > 1 else [0.0] * 9
            spreads[name] = (cuts[8] - cuts[0]) / statistics.median(series)
        return spreads

    def record(self) -> dict[str, object]:
        """Plain data for the run record."""
        return {
            "times_s": [round(t, 1) for t in self.times_s],
            "values_us": {n: [round(v, 2) for v in s] for n, s in self.values_us.items()},
            "relative_spread": {n: round(v, 4) for n, v in self.spread().items()},
        }
