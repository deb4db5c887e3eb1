"""Columns, families and timing methods of operator tables, and the publishers of their rows.

How each publisher timed its operators, and known faults of its rows, are in ``sources.yaml``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from ...common.files import own_data
from ...common.types import JsonMapping

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Fault:
    """Rows with a known defect.

    Attributes:
        kind: ``wrong``, ``local`` or ``doubted``, explained in ``sources.yaml``.
        rows: Values of the columns that identify the rows.
        why: Reason.
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
    calls: str = "nccl"
    as_one: Mapping[str, str] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    clone: JsonMapping = field(default_factory=dict)


@cache
def sources() -> dict[str, Source]:
    """Return the publishers by name."""
    return {
        name: Source(**{**own, "faults": tuple(Fault(**each) for each in own.get("faults", ()))})
        for name, own in own_data("features/operators/sources.yaml").items()
    }


@cache
def methods() -> dict[str, str]:
    """Return the timing method by name, for publishers whose operators models learn from."""
    return {name: source.method for name, source in sources().items() if source.method}


def faulty(rows: pd.DataFrame, kind: str) -> np.ndarray:
    """Return which rows have a known fault of a kind, bool, shape ``(n,)``.

    Args:
        rows: ``n`` rows; without a column ``source``, they match any publisher's faults.
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


def _lists(mapping: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    return {name: tuple(values) for name, values in mapping.items()}


_FILE = own_data("features/operators/families.yaml")
#: Integer parameters by group of families; the optional ones; those that may be zero.
PARAMETERS = _lists(_FILE["parameters"])
OPTIONAL, MAY_BE_ZERO = frozenset(_FILE["optional"]), frozenset(_FILE["may_be_zero"])
#: Default values of parameters by group; a name stands for that parameter's value.
DEFAULTS: dict[str, dict[str, int | str]] = _FILE["defaults"]
#: Columns that define a group of similar rows, by group of families and by family of blocks.
ALIKE = _lists(_FILE["alike"])
#: Parameters that explanations vary, by group; those in one text are varied together.
VARIED = _lists(_FILE["varied"])
#: Text parameters.
NAMES: tuple[str, ...] = tuple(_FILE["names"])
#: Kind of kernel by group of families.
KERNEL_KINDS: dict[str, str] = _FILE["kernel_kinds"]
#: Group of parameters by ``method/family``.
FAMILIES: dict[str, str] = _FILE["families"]
#: Families that occur only in users' traces.
TRACED: tuple[str, ...] = tuple(_FILE["traced"])
#: Families of several operators, which require ``op``.
SEVERAL = frozenset(_FILE["several"])
#: Families of whole layers and blocks, with their parameters, any of which may be zero.
BLOCKS = _lists(_FILE["blocks"])
#: Parameters that a row of a family of blocks must have.
BLOCK_SIZES = _lists(_FILE["block_sizes"])
#: Names that become one flag each: formats by group; backends, kernels and passes; and words by
#: column for blocks.
DTYPES = _lists(_FILE["dtypes"])
FLAGS, BLOCK_FLAGS = _lists(_FILE["flags"]), _lists(_FILE["block_flags"])


def parameters_of(family: str) -> tuple[str, ...]:
    """Return the integer parameters of a family.

    Raises:
        KeyError: The family is unknown.
    """
    return BLOCKS[family] if family in BLOCKS else PARAMETERS[FAMILIES[family]]


def families_hint() -> str:
    """Return a hint for messages: the allowed values of a table's ``source`` and ``family``."""
    parts = []
    known = methods()
    for method in dict.fromkeys(known.values()):
        named = [source for source, own in known.items() if own == method]
        # Consistent with family_keys() for sources without an entry.
        own_name = " or any name of your own (kernel durations)" if method == "kernel" else ""
        names = [key.split("/")[1] for key in FAMILIES if key.startswith(method + "/")]
        parts.append(f"{', '.join(named)}{own_name}: {', '.join(names)}")
    return "families by source: " + "; ".join(parts)


def family_keys(frame: pd.DataFrame) -> pd.Series:
    """Return ``method/family`` of each row, from its columns ``source`` and ``family``."""
    # Sources without an entry are users' tables: profilers report kernel durations.
    method = frame["source"].map(methods()).fillna("kernel")
    keys: pd.Series = method.astype(str) + "/" + frame["family"].astype(str)
    return keys
