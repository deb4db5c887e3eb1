"""Reads the table of convolutions of the kernel pack, which MIOpen's tuning gave."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from ...common.errors import DatasetError
from ...common.parquet import read_table
from ...features.devices.catalogue import find_device
from ...features.operators.schema import PARAMETERS

#: Columns by which the table is known.
CONV = frozenset(("device", "direction", "dtype", "layout", "ndim", "groups", "kh", "stride_h"))
#: File that an import reads.
FILE = "conv.parquet"
#: Whether channels are innermost, by layout.
LAYOUTS = {"NCHW": 0, "NCDHW": 0, "NCW": 0, "NHWC": 1, "NDHWC": 1, "NWC": 1}
#: Its sizes: all parameters but the last, which the layout gives.
SIZES = PARAMETERS["conv_nd"][:-1]


def is_convs(columns: Iterable[object]) -> bool:
    """Whether columns are those of a table of convolutions."""
    return set(columns) >= CONV


def conv_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Bring a table of convolutions into the schema of operator tables.

    The solver, its algorithm and its workspace are known after tuning only and are left out.

    Args:
        table: Rows of the ``conv`` table of the kernel pack, or queries with its columns.

    Returns:
        ``id`` (the number of the row where the table has none), ``source``, ``op`` (the direction),
        ``family``, ``dtype``, ``device``, the parameters (a layout that is unknown is missing), and
        ``split`` and ``latency_us`` where given.
    """
    rows = pd.DataFrame({c: table[c].to_numpy() for c in ("device", "dtype", *SIZES)})
    numbers = np.arange(len(table)).astype(str).astype(object)
    rows["id"] = table["id"].astype(str).to_numpy() if "id" in table else numbers
    source = table["source"].astype(str).to_numpy() if "source" in table else "MIOpen"
    rows["source"] = source
    rows["op"] = table["direction"].astype(str).to_numpy()
    rows["family"] = "conv"
    rows["channels_last"] = table["layout"].astype(str).map(LAYOUTS).to_numpy()
    for column in ("split", "latency_us"):
        if column in table:
            rows[column] = table[column].to_numpy()
    return rows


def training_rows(path: Path) -> pd.DataFrame:
    """Rows that a model may learn from.

    Raises:
        DatasetError: The file cannot be read, or is no table of convolutions.
    """
    table = read_table(path)
    if not is_convs(table.columns):
        raise DatasetError("is no table of convolutions", where=str(path))
    rows = conv_rows(table)
    names = {name: find_device(str(name)).name for name in rows["device"].unique()}
    return rows.assign(device=rows["device"].map(names))
