"""Versions of libraries: those that a model learned from, and what an unknown one may change."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import pandas as pd

from ...features.operators.columns import texts_of
from .prediction import FamilyPrediction

#: Half-width, as a logarithm, of the 90 % interval of a time in another version of a library over
#: that in a known one. From 172,821 operators in two versions each of SGLang, TensorRT-LLM and vLLM
#: (``repeats_tc`` of the tensor-core pack), 28 sets of a family, device and library that count
#: alike; each two of the libraries alone give 0.31 to 0.40.
RELEASE = 0.36
#: Between library, device and family in the name of versions that are known of one family on one
#: device alone.
SEPARATOR = "@"


def versions_of(rows: pd.DataFrame) -> dict[str, list[str]]:
    """Versions by library; none where rows do not name them.

    Args:
        rows: Rows of operators, with ``backend`` and ``version`` where they are known.
    """
    if "version" not in rows or "backend" not in rows:
        return {}
    named = pd.DataFrame({"library": texts_of(rows["backend"]), "it": texts_of(rows["version"])})
    named = named[(named["library"] != "") & (named["it"] != "")].drop_duplicates().astype(str)
    return {str(k): sorted(part["it"]) for k, part in named.groupby("library")}


def joined_versions(
    first: Mapping[str, Collection[str]], second: Mapping[str, Collection[str]]
) -> dict[str, list[str]]:
    """Versions by library of two sets together."""
    return {
        name: sorted({*first.get(name, ()), *second.get(name, ())}) for name in {**first, **second}
    }


def widen_unknown(
    prediction: FamilyPrediction, rows: pd.DataFrame, known: Mapping[str, Collection[str]]
) -> None:
    """Widen, in place, the intervals of rows that name another version than those learned from.

    Errors of the model and changes between versions count as independent. Libraries without a known
    version, and rows that name none, keep their intervals.

    Args:
        prediction: Of ``n`` rows.
        rows: The rows, with ``key``, ``device``, and ``backend`` and ``version`` where they are
            known.
        known: Versions by library, or by library, device and family joined by :data:`SEPARATOR`.
    """
    if not known or "version" not in rows or "backend" not in rows:
        return
    library, version = texts_of(rows["backend"]), texts_of(rows["version"])
    other = (version != "") & np.isin(library, list(known))
    for name, versions in known.items():
        which, *place = name.split(SEPARATOR, 2)
        own = other & (library == which) & np.isin(version, list(versions))
        for column, value in zip(("device", "key"), place, strict=False):
            own &= (rows[column] == value).to_numpy(bool)
        other &= ~own
    if not other.any():
        return
    latency = prediction.latency[other]
    below, above = (np.log(end[other] / latency) for end in (prediction.lo, prediction.hi))
    prediction.lo[other] = latency * np.exp(-np.hypot(below, RELEASE))
    prediction.hi[other] = latency * np.exp(np.hypot(above, RELEASE))
