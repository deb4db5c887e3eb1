"""Decide by ceilings, not names, whether two measured descriptions are of the same device.

Virtual machines on different hosts share a name, and the share of a busy host that a guest gets
varies from hour to hour. What was learned under a name holds only for similar ceilings.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ...common.errors import DeviceError
from ...common.types import JsonObject
from .device import DeviceSpec

#: Factors by which two measurements of one device may differ: in the geometric mean over the
#: classes, and in a single class. Over all pairs of readings of the three anchors in each run of
#: ``datagen/datasets/cpu`` (one machine, 98 readings in 42 minutes and 26 in 9), the mean over the
#: anchors differs by up to 1.37 and 1.50 in 95 %, a single anchor by up to 1.93 in 99 %. Repeated
#: probes on a machine busy with other work reach the same: 1.5 and 2.1.
SAME_OVERALL, SAME_CLASS = 1.5, 2.0
#: Keys of ``DeviceSpec.extra``: f32 FLOP/s of one thread, bytes of the last cache, time at which a
#: saved description was measured, and that a model's device was matched to this machine by name
#: only.
SINGLE_THREAD, CACHE_BYTES = "single_thread_flops", "cache_bytes"
MEASURED_AT, BY_NAME = "measured_at", "taken_by_name"
#: Keys of ``DeviceSpec.extra``: microseconds of the anchors measured with the probe, by name, and
#: the present speed relative to then, by class (:func:`with_speed`).
ANCHORS, SPEED = "anchors_us", "present_speed"
#: Key of ``DeviceSpec.extra``: ceilings of the device's earlier measurements relative to the
#: current ones, by class, latest first, and the maximum number kept (:func:`remeasured`).
FORMER, MOST_FORMER = "former_ceilings", 4
#: Smallest reported change of a ceiling: the difference between measurements of an idle machine.
#: Engineering estimate.
REPORTED_CHANGE = 1.05
#: Anchors of each class of work, by the names in ``datagen/profile/anchors.py``.
CLASSES = {"arithmetic": ("gemm", "vector"), "single-thread": ("single",), "bandwidth": ("memory",)}
#: Factor within which anchors at two times may reflect the same speed: in 95 % of all pairs of
#: times in ``datagen/datasets/cpu``, geometric means of six consecutive readings differ by up to
#: 1.22 and 1.38 in a class (42 minutes, 9 minutes).
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
        # Two tests: one class may be far off by noise (a neighbour saturates memory); the mean over
        # all classes is steadier and gets the narrower limit.
        every = [*self.ratios.values(), self.cache]
        near = all(max(r, 1 / r) <= SAME_CLASS for r in every)
        return near and max(self.overall, 1 / self.overall) <= SAME_OVERALL

    @property
    def reach(self) -> tuple[float, float]:
        """Range of factors on a duration that the ratios explain; it contains 1.

        A device that runs at 0.5 x needs up to twice the time: ``(1, 2)``.
        """
        # A kernel is limited by one class at a time, so the extreme ratios bound its change.
        speeds = [1.0, *self.ratios.values()]
        return 1 / max(speeds), 1 / min(speeds)

    @property
    def factor(self) -> float:
        """Largest factor between the two in any class, at least 1."""
        low, high = self.reach
        return max(1 / low, high)

    def __str__(self) -> str:
        """Format as ``0.55 x (arithmetic 0.52 x, bandwidth 0.58 x)``."""
        parts = [f"{name} {ratio:.2f} x" for name, ratio in self.ratios.items()]
        parts += [f"last cache {self.cache:.2f} x"] if self.cache != 1 else []
        return f"{self.overall:.2f} x ({', '.join(parts)})"


def compare_ceilings(now: DeviceSpec, then: DeviceSpec) -> Comparison:
    """Compare two descriptions of a device by the figures that both contain.

    Descriptions that were not measured have nothing to compare.
    """
    if not (is_measured(now) and is_measured(then)):
        return Comparison()
    tables = ((now.peak_flops, then.peak_flops), (now.vector_flops, then.vector_flops))
    # Different versions of the probe measure different dtypes: only common ones are compared.
    rates = [new[d] / old[d] for new, old in tables for d in new if d in old]
    ratios = {"arithmetic": _mean(rates)} if rates else {}
    if single := _extra_ratio(now, then, SINGLE_THREAD):
        ratios["single-thread"] = single
    ratios["bandwidth"] = now.bandwidth / then.bandwidth
    return Comparison(ratios, _extra_ratio(now, then, CACHE_BYTES) or 1.0)


def compare_anchors(now: Mapping[str, float], then: Mapping[str, float]) -> Comparison:
    """Compare anchor times: the speed of a machine relative to an earlier time.

    Args:
        now: Microseconds by anchor.
        then: The same at the earlier time; anchors measured only once are ignored.

    Returns:
        ``then / now`` of the classes that differ by more than readings do; empty if none do.
    """
    ratios = {}
    for name, anchors in CLASSES.items():
        both = [a for a in anchors if now.get(a, 0.0) > 0 and then.get(a, 0.0) > 0]
        if both:
            ratios[name] = _mean(then[a] / now[a] for a in both)
    # A class within the spread of readings is assumed to be unchanged.
    return Comparison({n: r for n, r in ratios.items() if max(r, 1 / r) > SAME_SPEED})


def with_speed(spec: DeviceSpec, speed: Comparison) -> DeviceSpec:
    """Describe a device that now runs at a different speed than when it was measured.

    Ceilings stay as measured, because models are calibrated to them; predictions scale kernels by
    their class of work (``models/adapt/device_correction.py``).
    """
    extra = {name: value for name, value in spec.extra.items() if name != SPEED}
    return replace(spec, extra=extra | ({SPEED: dict(speed.ratios)} if speed.ratios else {}))


def remeasured(now: DeviceSpec, then: DeviceSpec) -> DeviceSpec:
    """Add the ceilings of an earlier measurement to a device, which widen intervals.

    Differences between measurements of one machine are the noise of its ceilings. Those of another
    machine with the name, or of changed hardware (:attr:`Comparison.same`), carry no information.
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
    """Return slowest and fastest speed by class of earlier ceilings, relative to current ones.

    Returns:
        ``None`` if there are none, or all agree with the current ones.
    """
    formers = _formers(spec)
    slow = {n: min(1.0, *(f.get(n, 1.0) for f in formers)) for f in formers for n in f}
    fast = {n: max(1.0, *(f.get(n, 1.0) for f in formers)) for f in formers for n in f}
    bounds = Comparison(slow), Comparison(fast)
    return bounds if max(own.factor for own in bounds) > REPORTED_CHANGE else None


def _formers(spec: DeviceSpec) -> list[dict[str, float]]:
    held = spec.extra.get(FORMER)
    return [_positive(own) for own in held] if isinstance(held, list) else []


def anchors_of(spec: DeviceSpec) -> dict[str, float]:
    """Return the anchors measured with a device's probe; empty if there are none."""
    return _positive(spec.extra.get(ANCHORS))


def speed_of(spec: DeviceSpec) -> Comparison:
    """Return the present speed that :func:`with_speed` recorded; empty if none."""
    return Comparison(_positive(spec.extra.get(SPEED)))


def _positive(found: object) -> dict[str, float]:
    """Return the positive numbers in a value of ``extra``, which files may fill with anything."""
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
    """Strip the suffix that :func:`distinct` adds to a device's name."""
    return name.partition(_MARK)[0]


def distinct(spec: DeviceSpec) -> DeviceSpec:
    """Rename a device after its ceilings, such as ``cpu-amd-epyc-2c~59gf-16gbs``."""
    base = base_name(spec.name)
    rate = spec.matrix_peak("f32") / 1e9
    # Three digits name the machine readably; different machines with equal names would need
    # ceilings within half a per cent, which counts as the same device anyway.
    name = f"{base}{_MARK}{rate:.3g}gf-{spec.bandwidth / 1e9:.3g}gbs"
    return replace(spec, name=name, aliases=tuple(dict.fromkeys((*spec.aliases, base))))


def identified(spec: DeviceSpec, known: Mapping[str, DeviceSpec]) -> DeviceSpec:
    """Name a measured device after the known device that it matches.

    Returns:
        The device with its own name if no device in ``known`` shares it; with the name of the first
        namesake that has its ceilings; else with a :func:`distinct` name.
    """
    others = namesakes(spec, known)
    if not others:
        return spec
    for other in others:
        if compare_ceilings(spec, other).same:
            return spec if other.name == spec.name else replace(spec, name=other.name)
    return distinct(spec)


def unlike(spec: DeviceSpec, known: Mapping[str, DeviceSpec]) -> Comparison | None:
    """Compare a device with its known namesakes; ``None`` if it matches one or there are none."""
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
    """Name the devices of measured runs, distinguishing them by their ceilings.

    The oldest run with a name keeps it. A later run with other ceilings gets the name of the first
    run that it agrees with, or a :func:`distinct` one.

    Args:
        runs: Run records by run id.

    Returns:
        Names by run id, without runs that were not measured.
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
