"""Tables of any origin: read within the machine's memory, checked, written by file suffix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .errors import DatasetError
from .files import replacing, write_text
from .worker_process import memory_bytes

if TYPE_CHECKING:
    import pandas as pd

#: Fraction of the machine's memory that a table may take. Engineering choice: computing on it needs
#: about as much again.
MEMORY_SHARE = 0.5
#: Bytes of a value in memory. A run of equal values takes none in the file (run-length encoding).
_VALUE_BYTES = 8
#: File suffixes that :func:`write_table` supports.
TABLES = (".parquet", ".csv", ".json")


def read_table(
    path: Path, columns: Sequence[str] | None = None, filters: Any | None = None
) -> pd.DataFrame:
    """Read a table into a frame: CSV if the file is named so, else parquet.

    Args:
        path: The file; a CSV may be compressed (``.csv.gz``).
        columns: Columns to read; all by default.
        filters: Rows to read, as for :func:`pandas.read_parquet`; ignored for CSV.

    Raises:
        DatasetError: It is missing, not a table, damaged, lacks a column, or does not fit into
            memory: a file of a few kilobytes can expand to a table of any size.
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
    """Write a table atomically as parquet, CSV or JSON, by the file's suffix.

    Args:
        frame: The table.
        path: The file; its folder is created.
        compression: Compression of parquet.

    Raises:
        DatasetError: The suffix is not in :data:`TABLES`.
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
            # Page checksums make a damaged shard an error instead of wrong numbers (docs/trust.md).
            frame.to_parquet(
                partial, index=False, compression=compression, write_page_checksum=True
            )


def kept_table(path: Path, make: Callable[[], pd.DataFrame]) -> pd.DataFrame:
    """Read a table that an earlier run finished; otherwise make it, and write it for later ones.

    Raises:
        DatasetError: The file is damaged.
        FileError: The file cannot be written.
    """
    if not path.is_file():
        write_table(make(), path)
    try:
        return read_table(path)
    except DatasetError as error:
        raise DatasetError(error.what, where=error.where, hint="delete it") from None


def json_text(frame: pd.DataFrame) -> str:
    """A table as a JSON array of its rows, with null for missing values."""
    # The default of ten decimal places would truncate the cost of a short run.
    return str(frame.to_json(orient="records", double_precision=15))


def is_csv(path: Path) -> bool:
    """Whether a file is named as CSV, compressed or not."""
    return path.name.endswith((".csv", ".csv.gz"))


def _read_csv(path: Path, columns: Sequence[str] | None) -> pd.DataFrame:
    import pandas as pd

    wanted = None if columns is None else list(columns)
    try:
        # Otherwise the column types of a long table are guessed piece by piece.
        return pd.read_csv(path, usecols=wanted, low_memory=False)
    except FileNotFoundError:
        raise DatasetError("no such file", where=str(path)) from None
    except (OSError, ValueError, EOFError) as error:  # the parser's errors are ValueErrors
        raise DatasetError(f"cannot be read as CSV: {error}", where=str(path)) from None


def _check_size(metadata: Any, path: Path) -> None:
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    values = metadata.num_rows * metadata.num_columns * _VALUE_BYTES
    # Both are claims of the file's footer, and either may be far too low.
    need = max(values, sum(g.total_byte_size for g in groups))
    # Without known memory, assume a small workstation.
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
    """Reject measured values that are not positive, finite numbers.

    An empty cell means that nothing was measured. A zero, a negative number, an infinity or a word
    is a fault of the table, which would silently corrupt what is learned from it.

    Args:
        table: The table.
        columns: Columns of measured values; missing ones are skipped.
        where: Description of the table, such as its file.
        needed: Whether to reject empty cells as well.
        row: Column that names the rows; by default ``id`` if there is one, else the row number.

    Raises:
        DatasetError: A value is invalid; the message names the table, row, column and value.
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
