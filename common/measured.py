"""What tables state as measured: a time, a rate or a size is a positive, finite number."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from .errors import DatasetError

if TYPE_CHECKING:
    import pandas as pd


def check_measured(
    table: pd.DataFrame, columns: Iterable[str], where: str, *, needed: bool = False, row: str = ""
) -> None:
    """Refuse measured values that are no positive, finite numbers.

    An empty cell says that nothing was measured. A zero, a negative number, an infinity or a word
    is a fault of the table: what was learned from it would be wrong without a sign.

    Args:
        table: The table.
        columns: Of measured values; those that the table lacks are skipped.
        where: What the table is, such as its file.
        needed: Whether an empty cell is refused as well.
        row: Column that names the rows; ``id`` where there is one, else their number from 0.

    Raises:
        DatasetError: A value is none; the message names the table, row, column and value.
    """
    import pandas as pd

    named = table[row or "id"] if (row or "id") in table else pd.Series(range(len(table)))
    for column in (name for name in columns if name in table):
        cells = table[column]
        values = pd.to_numeric(cells, errors="coerce").to_numpy(np.float64, na_value=np.nan)
        empty = (cells.isna() | (cells.astype(str).str.strip() == "")).to_numpy(bool)
        bad = np.flatnonzero(~((values > 0) & np.isfinite(values)) & (needed | ~empty))
        if len(bad):
            first, more = int(bad[0]), f", and {len(bad) - 1} more" if len(bad) > 1 else ""
            said = "nothing" if empty[first] else str(cells.iloc[first])
            raise DatasetError(
                f"{column} is {said}{more}, but what is measured is a positive, finite number",
                where=f"{where}: {row or 'row'} {named.iloc[first]}",
                hint="correct or drop the row"
                + ("" if needed else "; leave the cell empty if nothing was measured"),
            )
