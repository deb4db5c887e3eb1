"""Publishers of measured operators: how each took its labels, and what is wrong with its rows.

All of it is data, in ``sources.yaml``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...common.files import parse_yaml

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Fault:
    """Rows that are not what they seem.

    Attributes:
        kind: ``wrong``, ``local`` or ``doubted``; ``sources.yaml`` tells what they mean.
        rows: What their columns hold.
        why: What is known of it.
    """

    kind: str
    rows: Mapping[str, str | Collection[str]]
    why: str


@dataclass(frozen=True)
class Source:
    """A publisher; ``sources.yaml`` explains the fields."""

    method: str = ""
    repeats: int = 1
    ids: str = ""
    table: str = ""
    products: str = ""
    rotates: bool = False
    watts: bool = False
    faults: tuple[Fault, ...] = ()
    clone: Mapping[str, Any] = field(default_factory=dict)


@cache
def sources() -> dict[str, Source]:
    """The publishers by name."""
    data: Any = parse_yaml((Path(__file__).parent / "sources.yaml").read_text(encoding="utf-8"))
    return {
        name: Source(**{**own, "faults": tuple(Fault(**each) for each in own.get("faults", ()))})
        for name, own in data.items()
    }


@cache
def methods() -> dict[str, str]:
    """How labels were taken, by the names of publishers whose operators are learned from."""
    return {name: source.method for name, source in sources().items() if source.method}


def faulty(rows: pd.DataFrame, kind: str) -> np.ndarray:
    """Rows with a known fault of some kind, bool, shape ``(n,)``.

    Args:
        rows: ``n`` rows; where they name no ``source``, any may be theirs.
        kind: See :class:`Fault`.
    """
    found = np.zeros(len(rows), bool)
    for name, source in sources().items():
        own = (rows["source"] == name).to_numpy(bool) if "source" in rows else True
        for fault in source.faults:
            if fault.kind == kind:
                found |= _holding(rows, fault.rows) & own
    return found


def _holding(rows: pd.DataFrame, wanted: Mapping[str, str | Collection[str]]) -> np.ndarray:
    holds = np.ones(len(rows), bool)
    for column, value in wanted.items():
        if column not in rows:
            holds &= _is_one(None, value)
            continue
        code, distinct = rows[column].factorize(use_na_sentinel=False)
        holds &= np.array([_is_one(each, value) for each in distinct], bool)[code]
    return holds


def _is_one(value: str | float | None, wanted: str | Collection[str]) -> bool:
    import pandas as pd

    missing = bool(pd.isna(value))
    if not isinstance(wanted, str):
        return ("" if missing else str(value)) in wanted
    if wanted.startswith(">"):
        return not missing and float(str(value)) > float(wanted[1:])
    if wanted.endswith("*"):
        return not missing and str(value).startswith(wanted[:-1])
    return not missing and str(value) == wanted
