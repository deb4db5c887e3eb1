"""Finds operator tables in clones of their publishers' repositories.

A clone is known by its paths: NeuSight has ``dataset*/train/collect/<op>/<version>/<device>.csv``
and merged ``dataset*/test/*.csv``, Vidur ``profiling/compute/<device>/<model>/mlp.csv``,
aiconfigurator ``systems/data/<system>/…/<backend>/<version>/<table>_perf.txt`` (or ``.csv``,
``.parquet``). Everything else in a clone is left alone.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from ...common.errors import DatasetError
from ...common.parquet import read_table
from .clone_columns import NEUSIGHT_OPS, TABLES, neusight_rows, perf_rows, vidur_rows

logger = logging.getLogger(__name__)

#: Part of the shapes that are held out as ``val``, the same ones for every device; the share of the
#: packs' own splits.
HELD_OUT = 0.05
# Paths of tables inside a clone, as the module's docstring lists them.
_NEUSIGHT = re.compile(r"dataset\w*/(train|test)/(?:collect/(\w+)/[^/]+/([^/]+)|(\w+))\.csv$")
_VIDUR = re.compile(r"profiling/compute/([^/]+)/(.+)/mlp\.csv$")
_PERF = re.compile(
    r"systems/data/([^/]+)/(?:[^/]+/)?(sglang|trtllm|vllm)/([^/]+)/(\w+)_perf\.(txt|csv|parquet)$"
)
#: Systems of aiconfigurator by the catalogue's names.
SYSTEMS = {
    "a100_pcie": "a100-pcie-80gb",
    "a100_sxm": "a100-sxm-80gb",
    "a30": "a30",
    "b200_sxm": "b200",
    "b300_sxm": "b300",
    "b60": "arc-b60",
    "gb200": "gb200",
    "gb300": "gb300",
    "h100_pcie": "h100-pcie",
    "h100_sxm": "h100-sxm",
    "h200_sxm": "h200-sxm",
    "l4": "l4",
    "l40s": "l40s",
    "rtx_pro_6000_server": "rtx-pro-6000",
}
#: Devices of Vidur by the catalogue's names.
VIDUR_DEVICES = {"a100": "a100-sxm-80gb", "a40": "a40", "h100": "h100-sxm"}


@dataclass(frozen=True)
class CloneFile:
    """A table in a clone.

    Attributes:
        path: Path of the table.
        name: Name that is unique among all tables of the import.
        read: Returns its rows in the packs' schema.
    """

    path: Path
    name: str
    read: Callable[[], pd.DataFrame]


def clone_files(folder: Path) -> list[CloneFile]:
    """List the operator tables of a clone, in a fixed order; empty if the clone is unknown.

    Of the versions of a framework that a system was measured with, the newest is taken.
    """
    files = sorted(p for p in folder.rglob("*") if p.suffix in (".csv", ".txt", ".parquet"))
    known: list[CloneFile] = []
    newest: dict[tuple[str, ...], tuple[tuple[int, ...], CloneFile]] = {}
    for path in files:
        place = path.relative_to(folder.parent).as_posix()
        if match := _VIDUR.search(place):
            known.append(_file("ops_vidur", folder, path, _vidur(path, *match.groups())))
        elif match := _NEUSIGHT.search(place):
            part, op, device, merged = match.groups()
            # "vec" is the merged table of all element-wise operators.
            if (op or merged) in (*NEUSIGHT_OPS, "vec"):
                known.append(_file("ops_neusight", folder, path, _neusight(path, part, op, device)))
        elif match := _PERF.search(place):
            system, backend, version, table, suffix = match.groups()
            if table in TABLES and system in SYSTEMS:
                read = _perf(path, SYSTEMS[system], backend, version, table)
                # Parquet wins over text of the same version: it keeps the types of columns.
                rank = (*version_numbers(version), suffix == "parquet")
                key = (system, backend, table)
                if key not in newest or newest[key][0] < rank:
                    newest[key] = (rank, _file("ops_tc", folder, path, read))
    return [*known, *(file for _, file in newest.values())]


def _file(stem: str, folder: Path, path: Path, read: Callable[[], pd.DataFrame]) -> CloneFile:
    origin = path.relative_to(folder).as_posix()
    # Names of shards and rows come from the path, so that an import resumes and ids are stable.
    digest = hashlib.sha256(origin.encode()).hexdigest()[:8]

    def rows() -> pd.DataFrame:
        try:
            table = read()
        except KeyError as error:
            raise DatasetError(f"column {error.args[0]!r} is missing", where=str(path)) from None
        ids = [f"{stem[4].upper()}{digest}-{n}" for n in range(len(table))]
        return table.assign(id=ids, origin=origin)

    return CloneFile(path, f"{stem}-{digest}", rows)


def _table(path: Path) -> pd.DataFrame:
    try:
        return read_table(path) if path.suffix == ".parquet" else pd.read_csv(path)
    except (OSError, ValueError) as error:  # what pandas and pyarrow raise for a damaged table
        raise DatasetError(f"cannot be read as a table: {error}", where=str(path)) from None


def _neusight(
    path: Path, part: str, op: str | None, device: str | None
) -> Callable[[], pd.DataFrame]:
    def read() -> pd.DataFrame:
        rows = neusight_rows(_table(path), op, device)
        return with_split(rows) if part == "train" else rows.assign(split="test")

    return read


def _vidur(path: Path, device: str, model: str) -> Callable[[], pd.DataFrame]:
    def read() -> pd.DataFrame:
        if device not in VIDUR_DEVICES:
            raise DatasetError(
                f"no device {device!r} of Vidur",
                where=str(path),
                hint="known: " + ", ".join(VIDUR_DEVICES),
            )
        rows = vidur_rows(_table(path))
        return with_split(rows.assign(device=VIDUR_DEVICES[device], model=model))

    return read


def _perf(
    path: Path, device: str, backend: str, version: str, table: str
) -> Callable[[], pd.DataFrame]:
    def read() -> pd.DataFrame:
        rows, unknown = perf_rows(_table(path), table)
        if unknown:
            logger.warning("%s: %d rows of other dtypes left out", path, unknown)
        return with_split(rows.assign(device=device, backend=backend, version=version))

    return read


def with_split(rows: pd.DataFrame) -> pd.DataFrame:
    """Mark a fixed part of the shapes as ``val`` and the others as ``train``."""
    # By a hash of the shape's numbers: equal shapes fall on one side on every device, which keeps
    # a held-out shape unseen.
    shape = rows.select_dtypes("number").drop(columns=[c for c in rows if "latency" in str(c)])
    digest = pd.util.hash_pandas_object(shape.astype(np.float64), index=False).to_numpy()
    held = digest / 2.0**64 < HELD_OUT
    return rows.assign(split=np.where(held, "val", "train"))


def version_numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a version, such as ``1.3.0rc10``, in whose order versions come.

    A release candidate comes before its release.
    """
    # A release counts as a candidate with a number that no real one reaches.
    main, _, candidate = text.partition("rc")
    numbers = [int(n) for n in re.findall(r"\d+", main)][:4]
    return (*numbers, *([0] * (4 - len(numbers))), int(candidate or 10**6))
