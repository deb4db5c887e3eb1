"""Tables of any origin: read within the machine's memory, checked, written as a file is called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .errors import DatasetError
from .files import replacing, write_text
from .worker_process import memory_bytes

if TYPE_CHECKING:
    import pandas as pd

#: Share of the machine's memory that a table may take. Chosen by judgement: computing on it needs
#: about as much again.
MEMORY_SHARE = 0.5
#: Bytes of a value in memory. A run of equal values takes none in the file (run-length encoding).
_VALUE_BYTES = 8
#: Suffixes of files that :func:`write_table` writes.
TABLES = (".parquet", ".csv", ".json")


def read_table(
    path: Path, columns: Sequence[str] | None = None, filters: Any | None = None
) -> pd.DataFrame:
    """Read a table into a frame: parquet, or CSV where the file is called so.

    Args:
        path: The file; a CSV may be compressed (``.csv.gz``).
        columns: Columns to read; all by default.
        filters: Rows to read, as :func:`pandas.read_parquet` takes them; not of CSV.

    Raises:
        DatasetError: It is missing, no table, damaged, lacks a column, or would not fit into
            memory: a file of a few kilobytes can stand for a table of any size.
    """
    import pandas as pd
    import pyarrow.parquet as pq

    if is_csv(path):
        return _read_csv(path, columns)
    try:
        with pq.ParquetFile(path) as file:
            _check_size(file.metadata, path)
        wanted = None if columns is None else list(columns)
        return pd.read_parquet(
            path, columns=wanted, filters=filters, page_checksum_verification=True
        )
    except DatasetError:
        raise
    except FileNotFoundError:
        raise DatasetError("no such file", where=str(path)) from None
    except Exception as error:  # pyarrow raises many types for a damaged file
        raise DatasetError(f"cannot be read as parquet: {error}", where=str(path)) from None


def write_table(
    frame: pd.DataFrame, path: Path, compression: Literal["snappy", "zstd"] = "snappy"
) -> None:
    """Write a table, whole or not at all, as what its file is called: parquet, CSV or JSON.

    Args:
        frame: The table.
        path: The file; its folder is made.
        compression: Of parquet.

    Raises:
        DatasetError: The suffix is none of :data:`TABLES`.
        FileError: The file cannot be written.
    """
    suffix = path.suffix.lower()
    if suffix not in TABLES:
        raise DatasetError(
            "is not called as a table", where=str(path), hint=f"name it {', '.join(TABLES)}"
        )
    if suffix == ".csv":
        write_text(path, frame.to_csv(index=False))
    elif suffix == ".json":
        write_text(path, json_text(frame))
    else:
        with replacing(path) as partial:
            # Checksums of pages make a damaged shard an error instead of wrong numbers
            # (docs/trust.md).
            frame.to_parquet(
                partial, index=False, compression=compression, write_page_checksum=True
            )


def json_text(frame: pd.DataFrame) -> str:
    """A table as a JSON array of its rows, with null for what is missing."""
    # The ten decimal places of the default would cut the cost of a short run.
    return str(frame.to_json(orient="records", double_precision=15))


def is_csv(path: Path) -> bool:
    """Whether a file is called CSV, compressed or not."""
    return path.name.endswith((".csv", ".csv.gz"))


def _read_csv(path: Path, columns: Sequence[str] | None) -> pd.DataFrame:
    import pandas as pd

    wanted = None if columns is None else list(columns)
    try:
        # Without this, the types of a long table's columns are guessed piece by piece.
        return pd.read_csv(path, usecols=wanted, low_memory=False)
    except FileNotFoundError:
        raise DatasetError("no such file", where=str(path)) from None
    except (OSError, ValueError, EOFError) as error:  # the parser's errors are ValueErrors
        raise DatasetError(f"cannot be read as CSV: {error}", where=str(path)) from None


def _check_size(metadata: Any, path: Path) -> None:
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    values = metadata.num_rows * metadata.num_columns * _VALUE_BYTES
    # Both are claims of the file's footer: either may be far below what the other demands.
    need = max(values, sum(g.total_byte_size for g in groups))
    # Where the system does not say how much it has: a small workstation.
    have = MEMORY_SHARE * (memory_bytes() or 16 * 2.0**30)
    if need > have:
        raise DatasetError(
            f"a table of {metadata.num_rows} rows and {need / 2**30:.0f} GiB does not fit into "
            "this machine's memory",
            where=str(path),
            hint="split it, or read it on a larger machine",
        )


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
    import numpy as np
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
