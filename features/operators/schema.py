"""Columns, families and timing methods of operator tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ...common.files import parse_yaml
from ...common.paths import PACKAGE
from ...common.types import JsonObject
from .sources import methods

if TYPE_CHECKING:
    import pandas as pd


def _read() -> JsonObject:
    read = parse_yaml((PACKAGE / "features/operators/families.yaml").read_text(encoding="utf-8"))
    assert isinstance(read, dict)
    return read


def _lists(mapping: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    return {name: tuple(values) for name, values in mapping.items()}


_FILE = _read()
#: Integer parameters by group of families; those that a row may lack, and those that may be zero.
PARAMETERS = _lists(_FILE["parameters"])
OPTIONAL, MAY_BE_ZERO = frozenset(_FILE["optional"]), frozenset(_FILE["may_be_zero"])
#: What a parameter is when it is not given, by group; a name stands for that parameter's value.
DEFAULTS: dict[str, dict[str, int | str]] = _FILE["defaults"]
#: Columns that make a group of rows that are alike, by group of families and by family of blocks.
ALIKE = _lists(_FILE["alike"])
#: Parameters that explanations vary, by group; those of one text together.
VARIED = _lists(_FILE["varied"])
#: Text parameters.
NAMES: tuple[str, ...] = tuple(_FILE["names"])
#: Kind of kernel by group of families.
KERNEL_KINDS: dict[str, str] = _FILE["kernel_kinds"]
#: Group of parameters by ``method/family``.
FAMILIES: dict[str, str] = _FILE["families"]
#: Families that come from users' traces alone.
TRACED: tuple[str, ...] = tuple(_FILE["traced"])
#: Families of several operators, of which one has to be named.
SEVERAL = frozenset(_FILE["several"])
#: Families of whole layers and blocks, with their parameters, any of which may be zero.
BLOCKS = _lists(_FILE["blocks"])
#: Names that are features, one flag each: of formats by group; of backends, kernels and passes; and
#: of blocks by column.
DTYPES = _lists(_FILE["dtypes"])
FLAGS, BLOCK_FLAGS = _lists(_FILE["flags"]), _lists(_FILE["block_flags"])


def parameters_of(family: str) -> tuple[str, ...]:
    """Return the integer parameters of a family.

    Raises:
        KeyError: There is no such family.
    """
    return BLOCKS[family] if family in BLOCKS else PARAMETERS[FAMILIES[family]]


def families_told() -> str:
    """Say for messages which values the columns ``source`` and ``family`` of a table may have."""
    parts = []
    known = methods()
    for method in dict.fromkeys(known.values()):
        named = [source for source, own in known.items() if own == method]
        # As family_keys() reads sources without an entry.
        own_name = " or any name of your own (kernel durations)" if method == "kernel" else ""
        names = [key.split("/")[1] for key in FAMILIES if key.startswith(method + "/")]
        parts.append(f"{', '.join(named)}{own_name}: {', '.join(names)}")
    return "families by source: " + "; ".join(parts)


def family_keys(frame: pd.DataFrame) -> pd.Series:
    """Return ``method/family`` of each row, from its columns ``source`` and ``family``."""
    # Sources without an entry are users' own tables: profilers report kernel durations.
    method = frame["source"].map(methods()).fillna("kernel")
    keys: pd.Series = method.astype(str) + "/" + frame["family"].astype(str)
    return keys
