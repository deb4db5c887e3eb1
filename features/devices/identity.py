"""Decide whether two measured descriptions mean one device: by its ceilings, not by its name.

Virtual machines on different hosts share a name, and a busy host gives a guest more or less of
itself from hour to hour. What was learned under a name holds only where the ceilings are alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ...common.errors import DeviceError
from ...common.types import JsonObject
from .device import DeviceSpec

#: Factors by which two measurements of one device may differ: in the geometric mean over the
#: classes, and in a single class. Of all pairs of readings of the three anchors in each run of
#: ``datagen/datasets/cpu`` (one machine, 98 readings in 42 minutes and 26 in 9), the mean over the
#: anchors differs by up to 1.37 and 1.50 in 95 %, a single anchor by up to 1.93 in 99 %. Probes
#: repeated on a machine that is busy with other work reach the same: 1.5 and 2.1.
SAME_OVERALL, SAME_CLASS = 1.5, 2.0
#: Keys of ``DeviceSpec.extra``: FLOP/s in f32 of one thread, bytes of the last cache, when a saved
#: description was measured, and that a model's device was taken for this machine unmeasured.
SINGLE_THREAD, CACHE_BYTES = "single_thread_flops", "cache_bytes"
MEASURED_AT, BY_NAME = "measured_at", "taken_by_name"
#: Keys of ``DeviceSpec.extra``: microseconds of the anchors beside the probe, by name, and the
#: present speed relative to then, by class (:func:`with_speed`).
ANCHORS, SPEED = "anchors_us", "present_speed"
#: Key of ``DeviceSpec.extra``: ceilings of the device's earlier measurements relative to those that
#: it has, by class, the latest first, and the most that are kept (:func:`remeasured`).
FORMER, MOST_FORMER = "former_ceilings", 4
#: Change of a ceiling that is told: what repeated measurements of an idle machine differ by.
#: Engineering estimate.
TOLD_CHANGE = 1.05
#: Anchors of each class of work, by the names of ``datagen/profile/anchors.py``.
CLASSES = {"arithmetic": ("gemm", "vector"), "single-thread": ("single",), "bandwidth": ("memory",)}
#: Factor up to which the anchors of two times may show one speed: in 95 % of all pairs of times in
#: ``datagen/datasets/cpu``, geometric means of six consecutive readings differ by up to 1.22 and
#: 1.38 in a class (42 minutes, 9 minutes).
SAME_SPEED = 1.4
#: ``DeviceSpec.source`` of a probe.
MEASURED = "measured"
#: Separates a name from the ceilings that :func:`distinct` appends; no vendor uses it in a name.
_MARK = "~"


@dataclass(frozen=True)
class Comparison:
    """Speed of a device relative to another description of it.

    Attributes:
        ratios: ``now / then`` of the figures in both: ``arithmetic`` (geometric mean over matrix
            and vector rates by dtype), ``single-thread`` and ``bandwidth`` of main memory.
        cache: Ratio of the last cache's capacity; 1 if either lacks it.
    """

    ratios: Mapping[str, float] = field(default_factory=dict)
    cache: float = 1.0

    @property
    def overall(self) -> float:
        """Geometric mean over the classes; 1 if there are none."""
        return _mean(self.ratios.values())

    @property
    def same(self) -> bool:
        """Whether both may be one device, within the repeatability of measurements."""
        # Two tests: one class may be far off by noise (a neighbour saturates memory), the mean over
        # all classes is steadier and gets the narrower limit.
        every = [*self.ratios.values(), self.cache]
        near = all(max(r, 1 / r) <= SAME_CLASS for r in every)
        return near and max(self.overall, 1 / self.overall) <= SAME_OVERALL

    @property
    def reach(self) -> tuple[float, float]:
        """Range of factors on a duration that the ratios explain; it contains 1.

        A device that runs at 0.5 x needs up to twice the time: ``(1, 2)``.
        """
        # A kernel is limited by one class at a time: the extreme ratios bound its change.
        speeds = [1.0, *self.ratios.values()]
        return 1 / max(speeds), 1 / min(speeds)

    @property
    def factor(self) -> float:
        """Greatest factor between both in any class, at least 1."""
        low, high = self.reach
        return max(1 / low, high)

    def __str__(self) -> str:
        """Format as ``0.55 x (arithmetic 0.52 x, bandwidth 0.58 x)``."""
        parts = [f"{name} {ratio:.2f} x" for name, ratio in self.ratios.items()]
        parts += [f"last cache {self.cache:.2f} x"] if self.cache != 1 else []
        return f"{self.overall:.2f} x ({', '.join(parts)})"


def compare_ceilings(now: DeviceSpec, then: DeviceSpec) -> Comparison:
    """Compare two descriptions of a device by what both list.

    Descriptions that are not measured have nothing to compare with a machine.
    """
    if not (is_measured(now) and is_measured(then)):
        return Comparison()
    tables = ((now.peak_flops, then.peak_flops), (now.vector_flops, then.vector_flops))
    # Probes of different versions measure different dtypes: only common ones are compared.
    rates = [new[d] / old[d] for new, old in tables for d in new if d in old]
    ratios = {"arithmetic": _mean(rates)} if rates else {}
    if single := _extra_ratio(now, then, SINGLE_THREAD):
        ratios["single-thread"] = single
    ratios["bandwidth"] = now.bandwidth / then.bandwidth
    return Comparison(ratios, _extra_ratio(now, then, CACHE_BYTES) or 1.0)


def compare_anchors(now: Mapping[str, float], then: Mapping[str, float]) -> Comparison:
    """Compare times of the anchors: how fast a machine runs relative to an earlier time.

    Args:
        now: Microseconds by anchor.
        then: The same at the earlier time; anchors of one time alone do not count.

    Returns:
        ``then / now`` of the classes that differ by more than readings do; empty if none do.
    """
    ratios = {}
    for name, anchors in CLASSES.items():
        both = [a for a in anchors if now.get(a, 0.0) > 0 and then.get(a, 0.0) > 0]
        if both:
            ratios[name] = _mean(then[a] / now[a] for a in both)
    # A class within the spread of readings is taken to run as it did.
    return Comparison({n: r for n, r in ratios.items() if max(r, 1 / r) > SAME_SPEED})


def with_speed(spec: DeviceSpec, speed: Comparison) -> DeviceSpec:
    """Describe a device that now runs at another speed than when it was measured.

    Ceilings stay as measured, because models are calibrated to them; predictions scale
    kernels by the class of their work (``models/adapt/device_correction.py``).
    """
    extra = {name: value for name, value in spec.extra.items() if name != SPEED}
    return replace(spec, extra=extra | ({SPEED: dict(speed.ratios)} if speed.ratios else {}))


def remeasured(now: DeviceSpec, then: DeviceSpec) -> DeviceSpec:
    """Describe a device that was measured again: intervals hold its earlier ceilings, too.

    What differs from one measurement to the next is the noise of ceilings. Those of another machine
    of the name, or of what the machine no longer is (:attr:`Comparison.same`), tell nothing.
    """
    change = compare_ceilings(then, now)
    if not change.ratios or not change.same:
        return now
    own = change.ratios
    older = [
        {name: ratio * own[name] for name, ratio in former.items() if name in own}
        for former in _formers(then)
    ]
    return replace(now, extra={**now.extra, FORMER: [dict(own), *older][:MOST_FORMER]})


def former_speeds(spec: DeviceSpec) -> tuple[Comparison, Comparison] | None:
    """Slowest and fastest speed by class of a device's earlier ceilings, relative to its own.

    Returns:
        ``None`` if none is known, or all are as it has them.
    """
    formers = _formers(spec)
    slow = {n: min(1.0, *(f.get(n, 1.0) for f in formers)) for f in formers for n in f}
    fast = {n: max(1.0, *(f.get(n, 1.0) for f in formers)) for f in formers for n in f}
    ends = Comparison(slow), Comparison(fast)
    return ends if max(own.factor for own in ends) > TOLD_CHANGE else None


def _formers(spec: DeviceSpec) -> list[dict[str, float]]:
    held = spec.extra.get(FORMER)
    return [_positive(own) for own in held] if isinstance(held, list) else []


def anchors_of(spec: DeviceSpec) -> dict[str, float]:
    """Return the anchors measured beside a device's probe; empty if there are none."""
    return _figures(spec, ANCHORS)


def speed_of(spec: DeviceSpec) -> Comparison:
    """Return the present speed that :func:`with_speed` stated; empty if none."""
    return Comparison(_figures(spec, SPEED))


def _figures(spec: DeviceSpec, key: str) -> dict[str, float]:
    """Positive numbers under a key of ``extra``, which device files may fill with anything."""
    return _positive(spec.extra.get(key))


def _positive(found: object) -> dict[str, float]:
    if not isinstance(found, dict):
        return {}
    return {
        str(name): float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and 0 < value < math.inf
    }


def is_measured(spec: DeviceSpec) -> bool:
    """Return whether a description was measured by a probe."""
    return spec.source == MEASURED


def base_name(name: str) -> str:
    """Strip what :func:`distinct` added to a device's name."""
    return name.partition(_MARK)[0]


def distinct(spec: DeviceSpec) -> DeviceSpec:
    """Rename a device after its ceilings, such as ``cpu-amd-epyc-2c~59gf-16gbs``."""
    base = base_name(spec.name)
    rate = spec.matrix_peak("f32") / 1e9
    # Three digits name the machine readably; equal names of unlike machines would need ceilings
    # within half a per cent, which counts as the same device anyway.
    name = f"{base}{_MARK}{rate:.3g}gf-{spec.bandwidth / 1e9:.3g}gbs"
    return replace(spec, name=name, aliases=tuple(dict.fromkeys((*spec.aliases, base))))


def identified(spec: DeviceSpec, known: Mapping[str, DeviceSpec]) -> DeviceSpec:
    """Give a measured device the name of the known device that it is.

    Returns:
        The device under its own name if none of ``known`` is called so; under the name of the
        first of those that have its ceilings; else under a :func:`distinct` name.
    """
    others = namesakes(spec, known)
    if not others:
        return spec
    for other in others:
        if compare_ceilings(spec, other).same:
            return spec if other.name == spec.name else replace(spec, name=other.name)
    return distinct(spec)


def unlike(spec: DeviceSpec, known: Mapping[str, DeviceSpec]) -> Comparison | None:
    """Compare a device with the known devices of its name; ``None`` if it is one of them.

    It is also ``None`` where no known device has the name.
    """
    if known.get(spec.name) is spec:
        return None
    compared = [compare_ceilings(spec, other) for other in namesakes(spec, known)]
    if not compared or any(c.same for c in compared):
        return None
    return min(compared, key=lambda c: c.factor)


def namesakes(spec: DeviceSpec, known: Mapping[str, DeviceSpec]) -> list[DeviceSpec]:
    """List known devices that share a device's base name, the exact name first."""
    base = base_name(spec.name)
    own = [other for name, other in known.items() if base_name(name) == base]
    return sorted(own, key=lambda other: (other.name != spec.name, other.name))


def distinct_runs(runs: Mapping[str, JsonObject]) -> dict[str, str]:
    """Name the devices of measured runs, telling them apart by their ceilings.

    The oldest run of a name keeps it. A later run with other ceilings gets the name of the first
    run that it agrees with, or a :func:`distinct` one.

    Args:
        runs: Run records by run id.

    Returns:
        Names by run id; a run that was not measured has none.
    """
    # By date, then id: adding a newer run to a dataset never renames the devices of older ones.
    ordered = sorted(runs, key=lambda run_id: (str(runs[run_id].get("date", "")), run_id))
    known: dict[str, DeviceSpec] = {}
    names: dict[str, str] = {}
    for run_id in ordered:
        data = runs[run_id]["device"]
        if data.get("source") != MEASURED:
            continue
        try:
            spec = DeviceSpec.from_dict(data, where=run_id)
        except DeviceError:
            continue  # reported when the description is read
        own = identified(spec, known)
        known.setdefault(own.name, own)
        names[run_id] = own.name
    return names


def _extra_ratio(now: DeviceSpec, then: DeviceSpec, key: str) -> float:
    """Return the ratio of a figure in ``extra``; 0 if either description lacks it."""
    new, old = now.extra.get(key), then.extra.get(key)
    if not isinstance(new, int | float) or not isinstance(old, int | float):
        return 0.0
    known = 0 < new < math.inf and 0 < old < math.inf
    return new / old if known else 0.0


def _mean(ratios: Iterable[float]) -> float:
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else 1.0
