"""The predictions of a model of one family of operators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from ...features.cost.formats import TABLE_FORMATS
from ...features.devices.device import DeviceSpec
from ...features.operators import FAMILIES, OpFeatures
from ...features.operators.columns import OpRows
from ...features.operators.op import moving_s

#: Groups of families whose every operation runs at the matrix unit. Not convolutions: Winograd's
#: and Fourier transforms save multiplications (tuned/conv: 1 % of the rows of an MI60 are below).
_MULTIPLIED = frozenset(("gemm", "tuned_gemm", "attention", "moe"))


@dataclass(slots=True)
class FamilyPrediction:
    """Latencies in seconds with 90 % intervals, shape ``(n,)`` each.

    Attributes:
        latency: Predicted latencies.
        lo: Lower ends.
        hi: Upper ends.
        roofline: Lower bounds from FLOPs and bytes.
        bound: Limiting term of the analytical estimate.
        scope: ``known``, ``calibrated``, ``sibling`` (another device with the same chip is known)
            or ``unseen``.
        in_domain: Whether training rows are near.
    """

    latency: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    roofline: np.ndarray
    bound: np.ndarray
    scope: np.ndarray
    in_domain: np.ndarray

    def hold_above(self, least: np.ndarray) -> None:
        """Raise what is below the least time of each row, in seconds, shape ``(n,)``."""
        for times in (self.latency, self.lo, self.hi):
            np.maximum(times, least, out=times)

    def take(self, rows: np.ndarray) -> FamilyPrediction:
        """The given rows, by position or mask."""
        return FamilyPrediction(*(getattr(self, name)[rows] for name in self.__slots__))


def least_s(
    family: str, rows: OpRows, features: OpFeatures, devices: Mapping[str, DeviceSpec]
) -> np.ndarray:
    """Seconds below which no row falls, shape ``(n,)``; 0 where nothing is known.

    The bytes of all but experts, whose draw is an estimate; and the arithmetic of rows whose
    roofline it is, on chips whose peak has a source: none of the 132,370 f32 products of the
    published-latency pack lies below.

    Args:
        family: Of the rows.
        rows: The rows.
        features: Theirs.
        devices: Descriptions by the values of ``device``.
    """
    least = np.zeros(len(rows))
    group = FAMILIES.get(family)
    device, names = rows.codes("device")
    if group is not None and group != "moe":
        for place, name in enumerate(names):
            at = device == place
            # Of several kernels times are the mean.
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
    """Put predictions of parts of ``count`` rows together.

    Args:
        count: Number of rows.
        parts: Positions of the rows of each part, and their predictions.
    """
    whole = FamilyPrediction(
        np.empty(count),
        np.empty(count),
        np.empty(count),
        np.empty(count),
        np.empty(count, object),
        np.empty(count, object),
        np.empty(count, bool),
    )
    for at, part in parts:
        for name in FamilyPrediction.__slots__:
            getattr(whole, name)[at] = getattr(part, name)
    return whole
