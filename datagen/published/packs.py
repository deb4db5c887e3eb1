"""The published packs: kinds of tables, as listed in ``packs.yaml``, and rows of some of them.

XLA's ``matmul`` table lists dots that XLA autotuned; the ``gemm`` table of the kernel pack holds
the same measurements for more devices (``source`` ``xla``) along with libraries of other
publishers. Its ``conv`` table comes from MIOpen's tuning.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ...common.errors import DatasetError
from ...common.files import own_data
from ...common.parquet import read_table
from ...features.devices.catalogue import find_device
from ...features.operators.schema import PARAMETERS, faulty, methods, sources

#: Kinds whose rows are matrix products, and kinds of layers or blocks of models.
PRODUCTS = ("matmul", "gemm")
BLOCK_TABLES = ("attention_moe", "layers", "new_attention")
#: Files that an import reads besides operator tables: of products, and of convolutions.
PRODUCT_FILES, CONV_FILE = ("matmul.csv.gz", "gemm.parquet"), "conv.parquet"
#: Columns that identify a product of a source.
_SHAPE = (
    *("source", "device", "dtype", "b", "m", "n", "k"),
    *("trans_a", "trans_b", "preshuffled"),
)
#: Sizes of convolutions: all parameters but the last, which the layout gives.
CONV_SIZES = PARAMETERS["conv_nd"][:-1]


@dataclass(frozen=True)
class Kind:
    """A kind of table; ``packs.yaml`` explains the fields."""

    files: tuple[str, ...]
    names: tuple[str, ...] = ()
    columns: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()

    def has(self, name: str, columns: Collection[str]) -> bool:
        """Whether a table with this name and these columns is of the kind."""
        if any(fnmatchcase(name, pattern) for pattern in self.names):
            return True
        return bool(self.columns) and self.columns <= set(columns) and not self.without & {*columns}


def pack_data() -> Any:
    """Content of ``packs.yaml``."""
    return own_data("datagen/published/packs.yaml")


@cache
def kinds() -> dict[str, Kind]:
    """Kinds of tables by name, in the order in which a table is compared with them."""
    return {
        name: Kind(
            tuple(own["files"]),
            tuple(own.get("names", ())),
            frozenset(own.get("columns", ())),
            frozenset(own.get("without", ())),
        )
        for name, own in pack_data()["kinds"].items()
    }


def kind_of(columns: Iterable[object], name: str = "") -> str:
    """Kind of a table; empty if there is none.

    Args:
        columns: Columns of the table.
        name: Name of its file; if empty, only the columns are compared.
    """
    known = {str(column) for column in columns}
    return next((kind for kind, own in kinds().items() if own.has(name, known)), "")


def files_of(folder: Path, kind: str) -> list[Path]:
    """Files of a kind below a folder, by its first pattern with matches; or the file itself."""
    if folder.is_file():
        return [folder] if kind_of(read_table(folder).columns, folder.name) == kind else []
    for pattern in kinds()[kind].files:
        files = sorted(folder.rglob(pattern))
        if files:
            return files
    return []


def product_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Convert a table of products to the schema of operator tables.

    Args:
        table: Rows of XLA's ``matmul`` table or of the kernel pack's ``gemm`` table.

    Returns:
        ``id`` (by default the row number), ``source``, ``op``, ``family``, ``dtype``, ``device``,
        ``b m n k``, ``split`` and ``latency_us`` if present, and ``suspect``, whether the
        publishers doubt the row.
    """
    xla = kind_of(table.columns) == "matmul"
    rows = _named(table, ("device", "b", "m", "n", "k"))
    rows["source"] = "xla" if xla else table["source"].astype(str).to_numpy()
    rows["dtype"] = _formats(table) if xla else table["dtype"].astype(str).to_numpy()
    # A batch of one is a plain product to XLA and to libraries.
    rows["family"] = np.where(rows["b"] > 1, "bmm", "linear")
    if not xla:
        # Tables of other libraries hold one kind each.
        only = {name: own.products for name, own in sources().items() if own.products}
        rows["family"] = rows["source"].map(only).fillna(rows["family"])
        rows = _with_layout(rows, table)
    rows["op"] = rows["family"]
    rows["suspect"] = doubted(table) | faulty(rows, "doubted")
    return rows


def conv_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Convert a table of convolutions to the schema of operator tables.

    The solver, its algorithm and its workspace are known only after tuning and are left out.

    Args:
        table: Rows of the ``conv`` table of the kernel pack, or queries with its columns.

    Returns:
        ``id`` (by default the row number), ``source``, ``op`` (the direction), ``family``,
        ``dtype``, ``device``, the parameters (an unknown layout is missing), and ``split`` and
        ``latency_us`` if present.
    """
    rows = _named(table, ("device", "dtype", *CONV_SIZES))
    rows["source"] = table["source"].astype(str).to_numpy() if "source" in table else "MIOpen"
    rows["op"] = table["direction"].astype(str).to_numpy()
    rows["family"] = "conv"
    rows["channels_last"] = table["layout"].astype(str).map(pack_data()["channels_last"]).to_numpy()
    return rows


def numbers(table: pd.DataFrame, column: str, default: float = 0.0) -> np.ndarray:
    """A column's numbers, float64, with ``default`` for missing values and a missing column."""
    if column not in table:
        return np.full(len(table), default)
    return pd.to_numeric(table[column]).to_numpy(np.float64, na_value=default)


def _named(table: pd.DataFrame, columns: Iterable[str]) -> pd.DataFrame:
    """The given columns, and ``id``, ``split`` and ``latency_us`` as far as present."""
    rows = pd.DataFrame({c: table[c].to_numpy() for c in columns})
    numbers = np.arange(len(table)).astype(str).astype(object)
    rows["id"] = table["id"].astype(str).to_numpy() if "id" in table else numbers
    for column in ("split", "latency_us"):
        if column in table:
            rows[column] = table[column].to_numpy()
    return rows


def _with_layout(rows: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """Add the operand layout, as in the group ``tuned_gemm``."""
    layout = table["layout"].astype(str).to_numpy(object) if "layout" in table else ""
    given = pd.Series(layout, index=rows.index)
    # Libraries other than rocBLAS store weights by rows of their outputs.
    transposed = given.where(given.isin(("nn", "nt", "tn", "tt")), "nt")
    rotating = [name for name, own in sources().items() if own.rotates]
    return rows.assign(
        trans_a=(transposed.str[0] == "t").astype(int),
        trans_b=(transposed.str[1] == "t").astype(int),
        preshuffled=(given == "preshuffled").astype(int),
        rotated=rows["source"].isin(rotating).astype(int),
    )


def _formats(table: pd.DataFrame) -> np.ndarray:
    names = pack_data()["xla_formats"]
    left, right = (table[c].astype(str) for c in ("dtype_lhs", "dtype_rhs"))
    # Both 8-bit formats run at one rate, mixed or not.
    narrow = left.str.startswith("f8") & right.str.startswith("f8")
    same = left.where(left == right, left + " x " + right)
    return np.where(narrow, "fp8", same.map(lambda name: names.get(name, name))).astype(object)


def doubted(table: pd.DataFrame) -> np.ndarray:
    """Rows that their publisher marks as wrong, bool, shape ``(n,)``."""
    marked = np.zeros(len(table), bool)
    if "suspect" in table:
        marked |= (table["suspect"].astype(object).fillna("").astype(str) != "").to_numpy()
    if "above_peak" in table:
        marked |= (pd.to_numeric(table["above_peak"], errors="coerce") > 0).to_numpy()
    return marked


def training_products(paths: Iterable[Path]) -> dict[Path, pd.DataFrame]:
    """Rows of products that a model may learn from, by file.

    Suspect rows are left out, as are XLA's rows in the kernel pack for devices of XLA's own table,
    which they repeat with different splits. Sources without a method are not used.

    Raises:
        DatasetError: A file cannot be read, or is no table of products.
    """
    found: dict[Path, pd.DataFrame] = {}
    own: set[str] = set()
    for path in sorted(paths, key=lambda p: PRODUCT_FILES.index(p.name)):
        table = read_table(path)
        if kind_of(table.columns) not in PRODUCTS:
            raise DatasetError("is no table of products", where=str(path))
        rows = product_rows(table)
        # f32 results of bf16 operands are not a parameter of the model.
        wide = table["out_dtype"].eq("fp32") if "out_dtype" in table else rows["suspect"] & False
        wide &= rows["dtype"].eq("bf16") & rows["source"].eq("xla")
        rows = rows[rows["source"].isin(list(methods())) & ~rows["suspect"] & ~wide]
        rows = _of_catalogue(rows)
        if path.name == PRODUCT_FILES[0]:
            rows = rows.assign(id="X" + rows["id"])
            own |= set(rows["device"])
        else:
            rows = rows[~(rows["source"].eq("xla") & rows["device"].isin(own))]
        found[path] = _merged(rows.drop(columns="suspect"))
    return found


def training_convs(path: Path) -> pd.DataFrame:
    """Rows of convolutions that a model may learn from.

    Raises:
        DatasetError: The file cannot be read, or is no table of convolutions.
    """
    table = read_table(path)
    if kind_of(table.columns) != "conv":
        raise DatasetError("is no table of convolutions", where=str(path))
    return _of_catalogue(conv_rows(table))


def _of_catalogue(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with the catalogue names of their devices."""
    names = {name: find_device(str(name)).name for name in rows["device"].unique()}
    return rows.assign(device=rows["device"].map(names))


def _merged(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per product: its median over versions of the table.

    Repeats on both sides of a split would make intervals too narrow.
    """
    shape = [c for c in _SHAPE if c in rows]
    median = rows.groupby(shape)["latency_us"].transform("median")
    return rows.assign(latency_us=median).drop_duplicates(shape).reset_index(drop=True)
