"""Reads tables of matrix products that no clone of a library holds: XLA's, and the kernel pack's.

XLA's ``matmul`` table lists dots that XLA autotuned; the ``gemm`` table of the kernel pack holds
the same measurements of more devices (``source`` ``xla``) beside libraries of other publishers.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from ...common.errors import DatasetError
from ...common.parquet import read_table
from ...features.devices.catalogue import find_device
from ...features.operators.schema import METHODS

#: Columns by which the tables are known.
MATMUL = frozenset(("device", "dtype_lhs", "dtype_rhs", "b", "m", "n", "k"))
GEMM = frozenset(("device", "source", "method", "dtype", "dtype_detail", "b", "m", "n", "k"))
#: Files that an import reads besides operator tables.
FILES = ("matmul.csv.gz", "gemm.parquet")
#: Operator tables' formats by XLA's type. f32 is TF32 (README of the XLA pack).
_FORMATS = {"bf16": "bf16", "f16": "fp16", "f32": "tf32"}
#: Family of a source's products, whatever their batch; the others' is by batch.
_FAMILIES = {"aiter": "linear", "pipeweave": "linear", "rocBLAS": "bmm"}
#: Source whose benchmark rotates operands beyond the caches (README of the kernel pack).
_ROTATING = "aiter"
#: Columns that make a product of a source.
_SHAPE = (
    *("source", "device", "dtype", "b", "m", "n", "k"),
    *("trans_a", "trans_b", "preshuffled"),
)
#: Reason for leaving a row out of fits and judgements; see :func:`product_rows`.
SUSPECT = "suspect"
#: XLA's fp8 rows of H100 reach 1.3 times the data sheet's peak, most likely the median over two
#: kernels of a call; the whole group is marked in the XLA pack, and the kernel pack repeats it.
_SUSPECT_GROUP = ("xla", "h100-sxm", "fp8")


def read_products(path: Path) -> pd.DataFrame:
    """Read a table of products, CSV or parquet, as its publisher wrote it.

    Raises:
        DatasetError: It cannot be read.
    """
    try:
        return read_table(path) if path.suffix == ".parquet" else pd.read_csv(path)
    except (OSError, ValueError, EOFError) as error:
        raise DatasetError(f"cannot be read as a table: {error}", where=str(path)) from None


def is_products(columns: Iterable[object]) -> bool:
    """Whether columns are those of a table of products."""
    return bool(set(columns) >= MATMUL or set(columns) >= GEMM)


def product_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Bring a table of products into the schema of operator tables.

    Args:
        table: Rows of XLA's ``matmul`` table or of the kernel pack's ``gemm`` table.

    Returns:
        ``id`` (the number of the row where the table has none), ``source``, ``op``, ``family``,
        ``dtype``, ``device``, ``b m n k``, ``split`` and ``latency_us`` where given, and
        ``suspect``, whether the publishers doubt the row.
    """
    xla = set(table.columns) >= MATMUL
    rows = pd.DataFrame({c: table[c].to_numpy() for c in ("device", "b", "m", "n", "k")})
    rows["id"] = table["id"].astype(str).to_numpy() if "id" in table else _numbers(table)
    rows["source"] = "xla" if xla else table["source"].astype(str).to_numpy()
    rows["dtype"] = _formats(table) if xla else table["dtype"].astype(str).to_numpy()
    # A batch of one is a plain product to XLA and to libraries.
    rows["family"] = np.where(rows["b"] > 1, "bmm", "linear")
    if not xla:
        # Tables of other libraries hold one kind each.
        rows["family"] = rows["source"].map(_FAMILIES).fillna(rows["family"])
        rows = _with_layout(rows, table)
    rows["op"] = rows["family"]
    for column in ("split", "latency_us"):
        if column in table:
            rows[column] = table[column].to_numpy()
    rows["suspect"] = _suspect(table, rows)
    return rows


def _with_layout(rows: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """Add how operands lie, as the group ``tuned_gemm`` has it."""
    layout = table["layout"].astype(str).to_numpy(object) if "layout" in table else ""
    given = pd.Series(layout, index=rows.index)
    # Other libraries than rocBLAS store weights by rows of their outputs.
    transposed = given.where(given.isin(("nn", "nt", "tn", "tt")), "nt")
    return rows.assign(
        trans_a=(transposed.str[0] == "t").astype(int),
        trans_b=(transposed.str[1] == "t").astype(int),
        preshuffled=(given == "preshuffled").astype(int),
        rotated=(rows["source"] == _ROTATING).astype(int),
    )


def _numbers(table: pd.DataFrame) -> np.ndarray:
    return np.arange(len(table)).astype(str).astype(object)


def _formats(table: pd.DataFrame) -> np.ndarray:
    left, right = (table[c].astype(str) for c in ("dtype_lhs", "dtype_rhs"))
    # Both 8-bit formats run at one rate, mixed or not.
    narrow = left.str.startswith("f8") & right.str.startswith("f8")
    same = left.where(left == right, left + " x " + right)
    return np.where(narrow, "fp8", same.map(lambda name: _FORMATS.get(name, name))).astype(object)


def _suspect(table: pd.DataFrame, rows: pd.DataFrame) -> np.ndarray:
    doubted = np.zeros(len(rows), bool)
    if "suspect" in table:
        doubted |= table["suspect"].notna().to_numpy()
    if "above_peak" in table:
        doubted |= table["above_peak"].to_numpy(np.float64, na_value=0.0) > 0
    group = zip(rows["source"], rows["device"], rows["dtype"], strict=True)
    return np.asarray(doubted | [each == _SUSPECT_GROUP for each in group], bool)


def training_rows(paths: Iterable[Path]) -> dict[Path, pd.DataFrame]:
    """Rows of products that a model may learn from, by file.

    Suspect rows are left out, and XLA's rows in the kernel pack on devices of XLA's own table,
    which they repeat with other splits. Sources without a method are not learned from.

    Raises:
        DatasetError: A file cannot be read, or is no table of products.
    """
    found: dict[Path, pd.DataFrame] = {}
    own: set[str] = set()
    for path in sorted(paths, key=lambda p: FILES.index(p.name)):
        table = read_products(path)
        if not is_products(table.columns):
            raise DatasetError("is no table of products", where=str(path))
        rows = product_rows(table)
        # f32 results of bf16 operands have no parameter of their own.
        wide = table["out_dtype"].eq("fp32") if "out_dtype" in table else rows["suspect"] & False
        wide &= rows["dtype"].eq("bf16") & rows["source"].eq("xla")
        rows = rows[rows["source"].isin(list(METHODS)) & ~rows["suspect"] & ~wide]
        rows = rows.assign(device=rows["device"].map(lambda name: find_device(str(name)).name))
        if path.name == FILES[0]:
            rows = rows.assign(id="X" + rows["id"])
            own |= set(rows["device"])
        else:
            rows = rows[~(rows["source"].eq("xla") & rows["device"].isin(own))]
        found[path] = _merged(rows.drop(columns="suspect"))
    return found


def _merged(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a product: its median over versions of the table.

    Repeats on both sides of a split would make intervals too narrow.
    """
    shape = [c for c in _SHAPE if c in rows]
    median = rows.groupby(shape)["latency_us"].transform("median")
    return rows.assign(latency_us=median).drop_duplicates(shape).reset_index(drop=True)
