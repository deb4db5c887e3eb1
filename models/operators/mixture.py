"""Operators without a named library: a mixture of predictions over the measured libraries.

The library of an operator matters as much as the chip. If a row does not name it, every library
known for its format is predicted; frameworks get equal weights, the kernels of a framework weights
by their rows. The prediction is the median of the mixture, its interval covers all members with
their own intervals, so that it holds for any of these libraries. A named library is a single
member.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...features.devices.device import DeviceSpec
from ...features.operators.columns import OpRows, texts_of
from ...features.operators.op import NO_GATE, UNGATED
from ..trust.calibrator import NORMAL_90
from .family_tables import constants
from .prediction import FamilyPrediction, joined

if TYPE_CHECKING:
    import pandas as pd

#: Columns that name a library, and columns that define the formats it is known for.
LIBRARY = ("backend", "kernel")
FORMAT = ("op", "dtype", "kv_dtype")
#: Kernels with a smaller share of a framework's rows are left out: rare fallbacks that cost as much
#: prediction time as common kernels. Engineering estimate.
LEAST_SHARE = 0.02
#: Bisections for a quantile: a factor of 10^12 is narrowed to less than 0.01 %.
_HALVINGS = 20


@dataclass(frozen=True)
class Choice:
    """A library that ran operators of a format.

    Attributes:
        formats: Values of :data:`FORMAT`.
        names: Values of :data:`LIBRARY`.
        devices: Devices on which it was measured.
        share: Its share of the rows of its framework in that format.
    """

    formats: tuple[str, ...]
    names: tuple[str, ...]
    devices: tuple[str, ...]
    share: float


@dataclass(frozen=True)
class Member:
    """A library in the mixture of one operator.

    Attributes:
        backend: Framework.
        kernel: Kernel of the framework.
        weight: Weight in the mixture.
        latency_us: Prediction with this library.
        lo_us: Lower bound of its interval.
        hi_us: Upper bound of its interval.
    """

    backend: str
    kernel: str
    weight: float
    latency_us: float
    lo_us: float
    hi_us: float


class Menu:
    """The libraries of a family.

    Args:
        choices: One per format and library.
    """

    def __init__(self, choices: Sequence[Choice] = ()) -> None:
        self.choices = tuple(choices)

    @classmethod
    def of(cls, rows: pd.DataFrame) -> Menu:
        """Collect the libraries of measured rows; none if no row names one."""
        import pandas as pd

        columns = [c for c in LIBRARY if c in rows]
        if not columns:
            return cls()
        names = pd.DataFrame(
            {c: texts_of(rows[c]) if c in rows else "" for c in (*FORMAT, *LIBRARY)}
        )
        names["device"] = rows["device"].to_numpy()
        names = names[(names[columns] != "").all(axis=1)]
        choices = []
        for _, framework in names.groupby([*FORMAT, "backend"], sort=True):
            for _, own in framework.groupby("kernel", sort=True):
                share = len(own) / len(framework)
                if share >= LEAST_SHARE:
                    devices = tuple(sorted(set(own["device"])))
                    formats, library = (
                        tuple(map(str, own[list(c)].iloc[0])) for c in (FORMAT, LIBRARY)
                    )
                    choices.append(Choice(formats, library, devices, share))
        return cls(choices)

    def open(self, rows: pd.DataFrame | OpRows, named: Sequence[str]) -> np.ndarray:
        """Mask of rows without a named library for which the menu has some, shape ``(n,)``.

        Args:
            rows: ``n`` operators.
            named: Columns that every row of the training data fills in.
        """
        rows = OpRows.of(rows)
        lacking = np.zeros(len(rows), bool)
        for column in LIBRARY if self.choices else ():
            if column in named:
                lacking |= rows.where(column, lambda name: not name)
        # Skip the lookup in the common case that every row names its library.
        if lacking.any():
            code, names = _distinct(rows, ())
            known = np.array([bool(self.of_row(own, "")) for own in names])
            lacking &= known[code]
        return lacking

    def of_row(self, row: Mapping[str, str], device: str) -> list[tuple[Choice, float]]:
        """Libraries that fit a row, with weights that sum to 1.

        Args:
            row: Names of an operator; absent or empty ones match any. ``vendor`` may name the
                vendor of the requested device; ``gated`` is non-empty for gated experts.
            device: Device whose libraries are preferred, if it has any for the format.
        """
        asked = {c: row.get(c, "") for c in (*FORMAT, *LIBRARY)}
        found = [
            choice
            for choice in self.choices
            if all(asked[c] in ("", v) for c, v in zip(FORMAT, choice.formats, strict=True))
            and all(asked[c] in ("", v) for c, v in zip(LIBRARY, choice.names, strict=True))
        ]
        own = [choice for choice in found if device in choice.devices]
        found = own or found
        vendor = row.get("vendor", "")
        found = [choice for choice in found if not has_none(vendor, choice.names[0])] or found
        if row.get("gated"):
            # Kernels of experts without a gate compute two matrices instead of three.
            found = [choice for choice in found if NO_GATE not in choice.names[1]] or found
        if not found:
            return []
        weights = np.array([choice.share for choice in found])
        frameworks = np.array([choice.names[0] for choice in found])
        for framework in np.unique(frameworks):
            weights[frameworks == framework] /= weights[frameworks == framework].sum()
        return list(zip(found, weights / weights.sum(), strict=True))

    def expanded(
        self, rows: pd.DataFrame | OpRows, like: np.ndarray, vendors: np.ndarray
    ) -> tuple[OpRows, np.ndarray, np.ndarray]:
        """Expand each row to one row per library.

        Args:
            rows: ``n`` rows without a named library.
            like: Known stand-ins for their devices, shape ``(n,)``.
            vendors: Vendors of their devices, shape ``(n,)``.

        Returns:
            The rows, the index of each one's origin and its weight.
        """
        rows = OpRows.of(rows)
        places = {"device": like, "vendor": vendors, "gated": _gated(rows)}
        code, names = _distinct(rows.with_texts(places), tuple(places))
        found = [self.of_row(own, own["device"]) for own in names]
        sizes = np.array([len(own) for own in found], np.intp)
        origin = np.repeat(np.arange(len(rows)), sizes[code])
        # The members of a row are contiguous, as are those of a code among all members.
        place = np.arange(len(origin)) - np.repeat(
            np.cumsum(sizes[code]) - sizes[code], sizes[code]
        )
        member = (np.cumsum(sizes) - sizes)[code[origin]] + place
        every = [one for own in found for one in own]
        weight = np.array([share for _, share in every])[member]
        filled = {
            column: np.array([choice.names[at] for choice, _ in every], object)[member]
            for at, column in enumerate(LIBRARY)
        }
        return rows.take(origin).with_texts(filled), origin, weight

    def to_list(self) -> list[list[object]]:
        """Convert to plain data for the manifest."""
        return [
            [*c.formats, *c.names, list(c.devices), round(float(c.share), 4)] for c in self.choices
        ]

    @classmethod
    def from_list(cls, data: Sequence[Sequence[Any]]) -> Menu:
        """Read :meth:`to_list`'s data."""
        first, last = len(FORMAT), len(FORMAT) + len(LIBRARY)
        return cls(
            [
                Choice(tuple(c[:first]), tuple(c[first:last]), tuple(c[-2]), float(c[-1]))
                for c in data
            ]
        )


def _gated(rows: OpRows) -> np.ndarray:
    """``yes`` for experts that may have a gate, shape ``(n,)``."""
    sizes = [rows.numbers(column) for column in ("inter", "topk", "experts")]
    bare = np.zeros(len(rows), bool)
    for known in UNGATED:
        bare |= np.all([own == value for own, value in zip(sizes, known, strict=True)], axis=0)
    return np.where(np.isfinite(sizes[0]) & ~bare, "yes", "").astype(object)


def has_none(vendor: str, framework: str) -> bool:
    """Whether a framework has no build for a vendor's devices; false for an unknown vendor."""
    return vendor not in ("", constants()["only_on"].get(framework, vendor))


def foreign(rows: OpRows, devices: Mapping[str, DeviceSpec]) -> np.ndarray:
    """Mask of rows whose framework has no build for their device's vendor, shape ``(n,)``."""
    foreign = np.zeros(len(rows), bool)
    for name in constants()["only_on"]:
        lacking = {device for device, spec in devices.items() if has_none(spec.vendor, name)}
        foreign |= rows.where("backend", name.__eq__) & rows.where("device", lacking.__contains__)
    return foreign


def members_of(table: OpRows, weight: np.ndarray, prediction: FamilyPrediction) -> list[Member]:
    """Libraries in the mixture of one row, fastest first.

    Args:
        table: The row with each library.
        weight: Weights of the libraries.
        prediction: Predictions of the rows of the table.
    """
    found = prediction
    times = np.stack([found.latency, found.lo, found.hi], axis=1) * 1e6
    names = zip(*(table.texts(column) for column in LIBRARY), strict=True)
    members = [
        Member(str(backend), str(kernel), float(share), *map(float, own))
        for (backend, kernel), share, own in zip(names, weight, times, strict=True)
    ]
    return sorted(members, key=lambda member: member.latency_us)


def mixed(
    members: FamilyPrediction, origin: np.ndarray, weight: np.ndarray, count: int
) -> FamilyPrediction:
    """Combine the predictions of members.

    Args:
        members: Predictions of ``n`` members.
        origin: Row that each belongs to, ascending, shape ``(n,)``.
        weight: Weights that sum to 1 for each row, shape ``(n,)``.
        count: Number of rows, each with at least one member.

    Returns:
        Median of each mixture, and its 5 % and 95 % quantiles; members are log-normal on either
        side of their prediction. A single member is returned unchanged.
    """
    alone = np.bincount(origin, minlength=count) == 1
    if alone.all():
        return members
    if alone.any():
        several, single = ~alone[origin], np.flatnonzero(alone)
        others = np.flatnonzero(~alone)
        place = (np.cumsum(~alone) - 1)[origin[several]]
        rest = mixed(members.take(several), place, weight[several], len(others))
        return joined(count, ((single, members.take(~several)), (others, rest)))
    first = np.searchsorted(origin, np.arange(count))
    middle, lo, hi = (
        _quantile(members, origin, weight, count, level) for level in (0.5, 0.05, 0.95)
    )
    inside = np.logical_and.reduceat(members.in_domain, first)
    return FamilyPrediction(
        middle,
        lo,
        hi,
        np.minimum.reduceat(members.roofline, first),
        members.bound[first],
        members.scope[first],
        inside,
    )


def _quantile(
    members: FamilyPrediction, origin: np.ndarray, weight: np.ndarray, count: int, level: float
) -> np.ndarray:
    from scipy.special import ndtr

    middle = np.log(members.latency)
    below = np.maximum((middle - np.log(members.lo)) / NORMAL_90, 1e-6)
    above = np.maximum((np.log(members.hi) - middle) / NORMAL_90, 1e-6)
    first = np.searchsorted(origin, np.arange(count))
    # Four standard deviations from the outermost member, the mixture has no mass left.
    low = np.minimum.reduceat(middle - 4 * below, first)
    high = np.maximum.reduceat(middle + 4 * above, first)
    for _ in range(_HALVINGS):
        at = (low + high) / 2
        gap = at[origin] - middle
        share = np.add.reduceat(weight * ndtr(gap / np.where(gap < 0, below, above)), first)
        low, high = np.where(share < level, at, low), np.where(share < level, high, at)
    return np.asarray(np.exp((low + high) / 2))


def _distinct(rows: OpRows, places: Sequence[str]) -> tuple[np.ndarray, list[dict[str, str]]]:
    """Distinct formats, libraries and ``places`` of rows, and the index of each row's."""
    columns = [c for c in (*FORMAT, *LIBRARY, *places) if c in rows]
    code, found = rows.combined(columns)
    return code, [dict(zip(columns, own, strict=True)) for own in found]
