"""Library versions in the training data, and wider intervals for others."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np

from ...features.operators.columns import OpRows, texts_of
from ..trust.calibrator import with_error
from .family_tables import constants
from .prediction import FamilyPrediction

if TYPE_CHECKING:
    import pandas as pd

#: Separator in the key of versions that are known for one family on one device only: library,
#: device, family.
SEPARATOR = "@"


def versions_of(rows: pd.DataFrame) -> dict[str, list[str]]:
    """Versions by library; empty if rows do not name them.

    Args:
        rows: Rows of operators, with ``backend`` and ``version`` if known.
    """
    import pandas as pd

    if "version" not in rows or "backend" not in rows:
        return {}
    named = pd.DataFrame({"library": texts_of(rows["backend"]), "it": texts_of(rows["version"])})
    named = named[(named["library"] != "") & (named["it"] != "")].drop_duplicates().astype(str)
    return {str(k): sorted(part["it"]) for k, part in named.groupby("library")}


def joined_versions(
    first: Mapping[str, Collection[str]], second: Mapping[str, Collection[str]]
) -> dict[str, list[str]]:
    """Union of two sets of versions by library."""
    return {
        name: sorted({*first.get(name, ()), *second.get(name, ())}) for name in {**first, **second}
    }


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
