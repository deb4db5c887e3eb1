"""Predictions of a family of operators and the calibration of their intervals.

Bounds depend on device and size inside the domain, and on the errors on held-out devices outside
it; an unknown version of a library widens them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ...common.types import JsonMapping
from ...features.cost.formats import TABLE_FORMATS
from ...features.devices.device import DeviceSpec
from ...features.operators import FAMILIES, OpFeatures
from ...features.operators.columns import OpRows, by_name, distinct
from ...features.operators.op import moving_s
from ..trust.calibrator import (
    LEAST_SETS,
    MIN_SCORES,
    UNKNOWN,
    Calibrator,
    Ends,
    ends,
    grouped_ends,
    including_zero,
    size_bins,
    widest,
    with_error,
)
from .family_tables import constants

if TYPE_CHECKING:
    import pandas as pd

#: Groups of families that run entirely on the matrix unit. Excludes convolutions: Winograd and
#: Fourier transforms save multiplications (1 % of the ``tuned/conv`` rows of an MI60 are below).
_MULTIPLIED = frozenset(("gemm", "tuned_gemm", "attention", "moe"))
#: Most size bins of a device; each needs :data:`MIN_SCORES` scores. Engineering estimate.
BINS = 4
#: Names that stand for devices without samples: of the majority vendor, and of other vendors.
UNSEEN, FOREIGN = "", "*"
#: Name that stands for unseen layers and head configurations; as a prefix of a device's name, for
#: those unseen on it.
NEW_GROUP = "+"
#: Separator between a device and a format with separate bounds.
WITHIN = "|"
#: Separator in the key of versions that are known for one family on one device only: library,
#: device, family.
SEPARATOR = "@"


@dataclass(slots=True)
class FamilyPrediction:
    """Latencies in seconds with 90 % intervals, shape ``(n,)`` each.

    Attributes:
        latency: Predicted latencies.
        lo: Lower bounds of the interval.
        hi: Upper bounds of the interval.
        roofline: Lower limits from FLOPs and bytes.
        bound: Limiting term of the analytical estimate.
        scope: ``known``, ``calibrated``, ``sibling`` (another device with the same chip is known)
            or ``unseen``.
        in_domain: Whether there are training rows nearby.
    """

    latency: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    roofline: np.ndarray
    bound: np.ndarray
    scope: np.ndarray
    in_domain: np.ndarray

    def hold_above(self, least: np.ndarray) -> None:
        """Raise all times to at least ``least``, in seconds, shape ``(n,)``."""
        for times in (self.latency, self.lo, self.hi):
            np.maximum(times, least, out=times)

    def take(self, rows: np.ndarray) -> FamilyPrediction:
        """The given rows, by position or mask."""
        return FamilyPrediction(*(getattr(self, name)[rows] for name in self.__slots__))


def least_s(
    family: str, rows: OpRows, features: OpFeatures, devices: Mapping[str, DeviceSpec]
) -> np.ndarray:
    """Physical lower limit of each row in seconds, shape ``(n,)``; 0 where unknown.

    From the bytes of all operators but experts, whose routing is an estimate, and from the
    arithmetic of compute-bound rows on chips with a sourced peak: none of the 132,370 f32 products
    of the published-latency pack is faster.

    Args:
        family: Family of the rows.
        rows: The rows.
        features: Features of the rows.
        devices: Descriptions by the values of ``device``.
    """
    least = np.zeros(len(rows))
    group = FAMILIES.get(family)
    device, names = rows.codes("device")
    if group is not None and group != "moe":
        for place, name in enumerate(names):
            at = device == place
            # The times of several kernels are means per kernel.
            least[at] = moving_s(features.moved[at], devices[name]) / features.kernels[at]
    if group not in _MULTIPLIED:
        return least
    bound = features.bound == "compute"
    dtype, formats = rows.codes("dtype")
    sourced = np.array([[_has_source(devices[n], f) for f in formats] for n in names], bool)
    arithmetic = np.where(bound & sourced[device, dtype], features.roofline_s, 0.0)
    return np.asarray(np.maximum(least, arithmetic))


def _has_source(device: DeviceSpec, dtype: str) -> bool:
    known = TABLE_FORMATS.get(dtype)
    return known is not None and f"peak_tflops.{known.rate}" not in device.defaulted


def joined(count: int, parts: Iterable[tuple[np.ndarray, FamilyPrediction]]) -> FamilyPrediction:
    """Combine predictions of parts of ``count`` rows.

    Args:
        count: Number of rows.
        parts: Positions of the rows of each part, and their predictions.
    """
    kinds = (float, float, float, float, object, object, bool)
    whole = FamilyPrediction(*(np.empty(count, kind) for kind in kinds))
    for at, part in parts:
        for name in FamilyPrediction.__slots__:
            getattr(whole, name)[at] = getattr(part, name)
    return whole


@dataclass
class DeviceIntervals:
    """Split-conformal bounds of the log-ratio of measured to predicted, by device and size.

    Attributes:
        edges: Log predictions (s) between the size bins, by device.
        ends: Bounds by device and bin; :data:`UNSEEN` and :data:`FOREIGN` have one bin.
    """

    edges: dict[str, list[float]] = field(default_factory=dict)
    ends: Calibrator[tuple[str, int]] = field(default_factory=Calibrator)

    def fit_device(self, device: str, scores: np.ndarray, predicted_s: np.ndarray) -> None:
        """Calibrate a device.

        Args:
            device: Name of the device.
            scores: ``log(measured / predicted)`` of rows that the model was not fitted to.
            predicted_s: Their predictions.
        """
        bins = int(np.clip(len(scores) // MIN_SCORES, 1, BINS))
        # By prediction: a measurement is not available when an interval is computed.
        edges, place = size_bins(np.log(predicted_s), bins)
        self.edges[device] = edges.tolist()
        every = including_zero(ends(scores))
        self.ends.ends |= dict.fromkeys(self._bins(device), every)
        self.ends.pool(scores, [(device, own) for own in place.tolist()])

    def fit_devices(
        self,
        device: np.ndarray,
        dtype: np.ndarray,
        scores: np.ndarray,
        predicted_s: np.ndarray,
        least: int,
    ) -> None:
        """Calibrate each device, and each format on it.

        Args:
            device: Devices, shape ``(n,)``; one with fewer than ``least`` scores gets no bounds.
            dtype: Formats of the operators, shape ``(n,)``; one with fewer than :data:`MIN_SCORES`
                scores on a device gets no separate bounds.
            scores: As for :meth:`fit_device`, shape ``(n,)``.
            predicted_s: Predictions of the scored rows.
            least: Fewest scores of a device.
        """
        for names, fewest in ((device, least), (_within(device, dtype), MIN_SCORES)):
            for name, own in by_name(names):
                if len(own) >= fewest:
                    self.fit_device(name, scores[own], predicted_s[own])

    def fit_unseen(
        self,
        scores: Mapping[str, np.ndarray],
        foreign: Sequence[str] = (),
        widened: bool = False,
    ) -> None:
        """Calibrate for a device without samples, leave-one-device-out.

        The bounds are the widest over the held-out devices: a new device is another draw of a
        device, not of a row, and few devices have been drawn.

        Args:
            scores: Scores of each held-out device by a model fitted without it.
            foreign: Devices of a minority vendor; they only count for :data:`FOREIGN`.
            widened: Whether to widen the bounds by :func:`moved_out`.
        """
        own = [values for name, values in scores.items() if name not in foreign]
        # A single chip is no sample of chips: constants may derive from it. For foreign devices all
        # chips count, including the larger errors on those of minority vendors.
        kinds = {UNSEEN: own if len(own) > 1 else scores.values(), FOREIGN: scores.values()}
        for kind, values in kinds.items():
            found = widest(values) or UNKNOWN
            self.ends.ends[kind, 0] = moved_out(found) if widened else found

    def fit_groups(self, scores: np.ndarray, group: np.ndarray, device: np.ndarray) -> None:
        """Calibrate for groups without samples, on each device with many groups and on others.

        As for devices, a new group is another draw of a group, not of a row.

        Args:
            scores: Scores by models fitted without a row's group, shape ``(n,)``.
            group: Names of groups, shape ``(n,)``.
            device: Devices, shape ``(n,)``.
        """
        self.ends.ends[NEW_GROUP, 0] = grouped_ends(scores, group) or UNKNOWN
        for name, own in by_name(device):
            if len(set(group[own])) >= LEAST_SETS:
                key, found = f"{NEW_GROUP}{name}", grouped_ends(scores[own], group[own])
                self.edges[key], self.ends.ends[key, 0] = [], found or UNKNOWN

    def of_new_groups(
        self, device: np.ndarray, predicted_s: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Bounds in seconds for rows of groups unseen on their devices, shape ``(n,)`` each.

        Args:
            device: Devices, shape ``(n,)``.
            predicted_s: Predictions, shape ``(n,)``.
        """
        code, names = distinct(device)
        keys = ([(f"{NEW_GROUP}{name}", 0), (NEW_GROUP, 0)] for name in names)
        logs = np.array([self.ends.of(key, UNKNOWN) for key in keys]).reshape(-1, 2)
        lower, upper = np.exp(logs)[code].T
        return predicted_s * lower, predicted_s * upper

    def of(self, device: str, predicted_s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Bounds of the interval in seconds for rows of one device.

        Args:
            device: A calibrated device; any other name counts as an unseen one, and
                :data:`FOREIGN` as one of another vendor.
            predicted_s: Predictions, shape ``(n,)``.
        """
        place = np.searchsorted(self.edges.get(device, []), np.log(predicted_s), side="right")
        logs = [self.ends.of((key, (UNSEEN, 0)), UNKNOWN) for key in self._bins(device)]
        lower, upper = np.exp(np.array(logs))[place].T
        return predicted_s * lower, predicted_s * upper

    def around(
        self,
        latency: np.ndarray,
        device: np.ndarray,
        dtype: np.ndarray,
        scope: np.ndarray,
        foreign: Collection[str],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Bounds of the intervals in seconds for rows with stand-in devices.

        The bounds of a sibling, and of a format with too few rows on the device, are halfway
        (geometric mean) between those of the known device and those of an unseen one, and never
        inside the former; the lower bound moves by at most half of its distance.

        Args:
            latency: Predictions in seconds, shape ``(n,)``.
            device: Known device that stands in for each row's device.
            dtype: Formats of the operators.
            scope: ``known``, ``sibling`` or ``unseen``, by device.
            foreign: Devices of a minority vendor.
        """
        lo, hi = np.empty(len(latency)), np.empty(len(latency))
        code, names = distinct(_within(_within(device, dtype), scope))
        for place in range(len(names)):
            at = np.flatnonzero(code == place)
            own, known, middle = str(device[at[0]]), str(scope[at[0]]), latency[at]
            if known == "unseen":
                own = FOREIGN if own in foreign else UNSEEN
            elif (special := str(_within(device[at[:1]], dtype[at[:1]])[0])) in self.edges:
                own = special
            elif any(name.startswith(own + WITHIN) for name in self.edges):
                # The device's bounds are dominated by other formats.
                known = "sibling"
            low, high = self.of(own, middle)
            if known == "sibling":
                wide_lo, wide_hi = self.of(UNSEEN, middle)
                # Bounds of an unseen device are pooled over sizes: at some size those of the known
                # device may be wider.
                low = np.sqrt(low * np.clip(wide_lo, low**2 / middle, low))
                high = np.sqrt(high * np.maximum(high, wide_hi))
            lo[at], hi[at] = low, high
        return lo, hi

    def _bins(self, device: str) -> list[tuple[str, int]]:
        return [(device, own) for own in range(len(self.edges.get(device, [])) + 1)]

    def to_dict(self) -> dict[str, object]:
        """Convert to plain data for the manifest."""
        logs = {name: [self.ends.ends[key] for key in self._bins(name)] for name in self.edges}
        return {
            "edges_log_s": self.edges,
            "lower_log": {name: [lo for lo, _ in own] for name, own in logs.items()},
            "upper_log": {name: [hi for _, hi in own] for name, own in logs.items()},
            "unseen_log": list(self.ends.of([(UNSEEN, 0)], UNKNOWN)),
            "foreign_log": list(self.ends.of([(FOREIGN, 0)], UNKNOWN)),
            **({"group_log": list(own)} if (own := self.ends.ends.get((NEW_GROUP, 0))) else {}),
        }

    @classmethod
    def from_dict(cls, data: JsonMapping) -> DeviceIntervals:
        """Read :meth:`to_dict`'s data."""
        found = cls({name: list(edges) for name, edges in data["edges_log_s"].items()})
        for name, lower in data["lower_log"].items():
            each = zip(lower, data["upper_log"][name], strict=True)
            found.ends.ends |= {(name, place): own for place, own in enumerate(each)}
        logs = ((UNSEEN, "unseen_log"), (FOREIGN, "foreign_log"), (NEW_GROUP, "group_log"))
        for name, key in logs:
            # Only families with few groups, and no model of the first release, have this entry.
            if key in data or name != NEW_GROUP:
                lo, hi = data[key]
                found.ends.ends[name, 0] = float(lo), float(hi)
        return found


def _within(outer: np.ndarray, inner: np.ndarray) -> np.ndarray:
    """Combined names, shape ``(n,)``."""
    return np.asarray(outer.astype(object) + WITHIN + inner.astype(object))


def moved_out(ends: Ends) -> Ends:
    """Bounds widened for one further chip (``wider`` and ``least_end`` in ``constants.yaml``)."""
    wider, least = constants()["wider"], constants()["least_end"]
    lo, hi = wider * ends[0], wider * ends[1]
    return min(lo, -least * hi), max(hi, -least * lo)


def widen_unknown(
    prediction: FamilyPrediction, rows: pd.DataFrame | OpRows, known: Mapping[str, Collection[str]]
) -> None:
    """Widen, in place, the intervals of rows with an unknown library version.

    Model errors and changes between versions count as independent. Libraries without a known
    version, and rows without a version, keep their intervals.

    Args:
        prediction: Predictions of ``n`` rows.
        rows: The rows, with ``key``, ``device``, and ``backend`` and ``version`` if known.
        known: Versions by library, or by library, device and family joined by :data:`SEPARATOR`.
    """
    rows = OpRows.of(rows)
    if not known or "version" not in rows or "backend" not in rows:
        return
    other = rows.where("version", bool) & rows.where("backend", known.__contains__)
    for name, versions in known.items() if other.any() else ():
        own = other.copy()
        texts = name.split(SEPARATOR, 2)
        for column, text in zip(("backend", "device", "key"), texts, strict=False):
            own &= rows.where(column, text.__eq__)
        other &= ~(own & rows.where("version", versions.__contains__))
    if not other.any():
        return
    release = np.full(len(other), constants()["release"])
    for family, own_release in constants()["releases"].items():
        release[rows.where("key", family.__eq__)] = own_release
    release = release[other]
    latency = prediction.latency[other]
    now = np.log(prediction.lo[other] / latency), np.log(prediction.hi[other] / latency)
    below, above = with_error(now, (release, release))
    prediction.lo[other], prediction.hi[other] = latency * np.exp(below), latency * np.exp(above)
