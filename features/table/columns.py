"""Columns of the device-independent row of a kernel (see :mod:`opcast.features.table.row`).

``columns.toml`` lists them by what the feature table makes of them.
"""

from __future__ import annotations

import tomllib

from ...common.paths import PACKAGE
from ..kernels.kernel import KINDS

_READ = tomllib.loads((PACKAGE / "features" / "table" / "columns.toml").read_text("utf-8"))
#: Quantities with a unit, or codes of dtypes; the table divides them by each other and by the
#: device's.
AMOUNTS: tuple[str, ...] = tuple(_READ["amounts"])
#: Choices by column; the column holds the position plus one, or 0 for none of them.
CODES: dict[str, tuple[str, ...]] = {
    "kind": KINDS,
    **{column: tuple(choices) for column, choices in _READ["codes"].items()},
}
#: Code by column and choice.
CODE = {
    column: {choice: float(i + 1) for i, choice in enumerate(choices)}
    for column, choices in CODES.items()
}
CODE_FLAGS = tuple(f"{column}_{choice}" for column, choices in CODES.items() for choice in choices)
#: Counts and lengths that most kernels have; the table takes ``log2(1 + x)``.
COMMON_COUNTS: tuple[str, ...] = tuple(_READ["common_counts"])
#: Yes or no, and small numbers, that most kernels have.
COMMON_FLAGS: tuple[str, ...] = tuple(_READ["common_flags"])
#: Details of reductions, products, convolutions, indexed accesses, sorts and loops.
RARE_COUNTS: tuple[str, ...] = tuple(_READ["rare_counts"])
RARE_FLAGS: tuple[str, ...] = tuple(_READ["rare_flags"])

COMMON = (*AMOUNTS, *CODES, *COMMON_COUNTS, *COMMON_FLAGS)
RARE = (*RARE_COUNTS, *RARE_FLAGS)
COLUMNS = (*COMMON, *RARE)
INDEX = {name: i for i, name in enumerate(COLUMNS)}
