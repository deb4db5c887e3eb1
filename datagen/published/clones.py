"""Finds and reads operator tables in clones of their publishers' repositories.

Paths, columns, units and names of devices are data, under ``clone`` in
``features/operators/sources.yaml``. Everything else in a clone is ignored.
"""

from __future__ import annotations

import ast
import hashlib
import logging
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ...common.errors import DatasetError
from ...common.parquet import read_table
from ...common.types import JsonMapping
from ...features.operators.schema import sources

logger = logging.getLogger(__name__)

#: Fraction of the shapes that are held out as ``val``, the same ones for every device; as in the
#: packs' own splits.
HELD_OUT = 0.05
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}

#: How a source's clone is read: the content of ``clone`` in its entry.
Layout = JsonMapping


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
    """Operator tables of a clone, in a fixed order; empty if the clone is unknown."""
    paths = sorted(p for p in folder.rglob("*") if p.suffix in (".csv", ".txt", ".parquet"))
    known: list[CloneFile] = []
    newest: dict[tuple[str, ...], tuple[tuple[int, ...], CloneFile]] = {}
    layouts = [(name, own) for name, own in sources().items() if own.clone]
    patterns = [(name, own, _pattern(own.clone)) for name, own in layouts]
    for path in paths:
        place = path.relative_to(folder.parent).as_posix()
        for name, source, pattern in patterns:
            if not (match := pattern.search(place)):
                continue
            named = {key: text for key, text in match.groupdict().items() if text is not None}
            read = partial(clone_rows, path, name, source.clone, named)
            file = _file(source.table, source.ids, path, path.relative_to(folder).as_posix(), read)
            if not source.clone.get("newest"):
                known.append(file)
                continue
            # Parquet takes precedence over text of the same version: it keeps the column types.
            rank = (*version_numbers(named["version"]), path.suffix == ".parquet")
            key = tuple(named[part] for part in ("device", "backend", "table"))
            if key not in newest or newest[key][0] < rank:
                newest[key] = (rank, file)
    return [*known, *(file for _, file in newest.values())]


def _pattern(layout: Layout) -> re.Pattern[str]:
    names = {key: "|".join(layout.get(key, ())) for key in ("tables", "devices")}
    path: str = layout["path"]
    for key, choice in names.items():
        path = path.replace("{" + key + "}", choice)
    return re.compile(path)


def digest_of(origin: str) -> str:
    """Part of the names of a table's shards and rows, from its path: stable in resumed imports."""
    return hashlib.sha256(origin.encode()).hexdigest()[:8]


def _file(
    stem: str, letter: str, path: Path, origin: str, read: Callable[[], pd.DataFrame]
) -> CloneFile:
    digest = digest_of(origin)

    def rows() -> pd.DataFrame:
        try:
            table = read()
        except KeyError as error:
            raise DatasetError(f"column {error.args[0]!r} is missing", where=str(path)) from None
        ids = [f"{letter}{digest}-{n}" for n in range(len(table))]
        return table.assign(id=ids, origin=origin)

    return CloneFile(path, f"{stem}-{digest}", rows)


def clone_rows(path: Path, source: str, layout: Layout, named: Mapping[str, str]) -> pd.DataFrame:
    """Rows of a table of a clone in the packs' schema.

    Args:
        path: The table.
        source: Name of its publisher.
        layout: How it is read.
        named: Parts of its path: ``table``, ``device``, ``part`` …

    Raises:
        DatasetError: It cannot be read, or its device is unknown.
        KeyError: A column is missing.
    """
    told = {key: named[key] for key in ("device", "backend", "version", "model") if key in named}
    devices = layout.get("devices")
    if devices and "device" in told:
        if told["device"] not in devices:
            raise DatasetError(
                f"no device {told['device']!r} of {layout['name']}",
                where=str(path),
                hint="known: " + ", ".join(devices),
            )
        told["device"] = devices[told["device"]]
    parts = list(_parts(_table(path), layout, named.get("table", "")))
    rows = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame({"latency_us": []})
    # A latency of zero is not a measurement.
    rows = rows[rows["latency_us"] > 0]
    if "dtypes" in layout:
        unknown = ~rows["dtype"].isin(list(layout["dtypes"]))
        if unknown.any():
            logger.warning("%s: %d rows of other dtypes left out", path, int(unknown.sum()))
        formats = [column for column in ("dtype", "kv_dtype") if column in rows]
        rows = rows[~unknown]
        rows = rows.assign(**{c: rows[c].map(layout["dtypes"]) for c in formats})
    if layout.get("merged"):
        keys = [column for column in rows if column != "latency_us"]
        # ``dropna=False``: rows without a value in an optional column are shapes as well.
        grouped = rows.groupby(keys, sort=False, dropna=False)["latency_us"]
        rows = grouped.median().reset_index()
    rows = rows.assign(source=source, **told)
    part = named.get("part", "train")
    return with_split(rows) if part == "train" else rows.assign(split=part)


def _parts(table: pd.DataFrame, layout: Layout, named: str) -> Iterator[pd.DataFrame]:
    """Rows by table of the layout.

    Raises:
        KeyError: A column is missing.
    """
    if named:
        yield _converted(table, layout, named)
    elif "by" in layout:
        names: pd.Series = table[str(layout["by"])].astype(str)
        for name in names.unique():
            if name in layout["tables"]:
                yield _converted(table[names == name].reset_index(drop=True), layout, name)
    else:
        # A file need not hold all tables, but those it holds must be complete.
        timed = [name for name in layout["tables"] if _is_timed(table, layout, name)]
        for name in timed or list(layout["tables"])[:1]:
            yield _converted(table, layout, name)


def _is_timed(table: pd.DataFrame, layout: Layout, name: str) -> bool:
    try:
        _Columns(table, {}).value(layout["columns"]["latency_us"].replace("{table}", name))
    except KeyError:
        return False
    return True


def _converted(table: pd.DataFrame, layout: Layout, name: str) -> pd.DataFrame:
    """Rows of one table of the layout."""
    own = layout["tables"][name]
    known = _Columns(table, layout.get("let", {}))
    rows = pd.DataFrame(index=table.index)
    columns: dict[str, object] = {**own["columns"], **layout["columns"]}
    for column, formula in columns.items():
        try:
            rows[column] = known.value(str(formula).replace("{table}", name))
        except KeyError:
            if column not in layout.get("optional", ()):
                raise
    for column in ("dtype", "kv_dtype", "device", "distribution", "kernel"):
        if column in rows:
            rows[column] = rows[column].astype(str).str.strip()
    rows["family"] = own["family"]
    return rows if "op" in rows else rows.assign(op=own.get("op", own["family"]))


class _Columns:
    """Columns of a table, and formulas over them by name."""

    def __init__(self, table: pd.DataFrame, formulas: Mapping[str, str]) -> None:
        self.table = table
        self.formulas = formulas

    def value(self, formula: str) -> Any:
        """Value of a formula: a column, or a number or text for all rows.

        Raises:
            KeyError: A column is missing.
        """
        return self._of(ast.parse(formula, mode="eval").body)

    def _of(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name() | ast.Attribute():  # names of columns have dots
                name = ast.unparse(node)
                own = self.formulas.get(name)
                return self.table[name] if own is None else self.value(own)
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                try:
                    return self._of(left)
                except KeyError:
                    return self._of(right)
            case ast.BinOp(left=left, op=op, right=right):
                return _ARITHMETIC[type(op)](self._of(left), self._of(right))
            case ast.IfExp(test=test, body=body, orelse=other):
                return np.where(self._of(test), self._of(body), self._of(other))
            case ast.Compare(left=left, ops=[ast.Gt()], comparators=[right]):
                return self._of(left) > self._of(right)
            case ast.Compare(left=left, ops=[ast.In()], comparators=[right]):
                return self._of(left).astype(str).str.lower().isin(ast.literal_eval(right))
        raise DatasetError(f"{ast.unparse(node)!r} is no formula of columns")


def _table(path: Path) -> pd.DataFrame:
    try:
        return read_table(path) if path.suffix == ".parquet" else pd.read_csv(path)
    except (OSError, ValueError) as error:  # what pandas and pyarrow raise for a damaged table
        raise DatasetError(f"cannot be read as a table: {error}", where=str(path)) from None


def with_split(rows: pd.DataFrame) -> pd.DataFrame:
    """Mark a fixed part of the shapes as ``val`` and the others as ``train``."""
    # By a hash of the shape's numbers: equal shapes fall on the same side on every device, which
    # keeps a held-out shape unseen.
    shape = rows.select_dtypes("number").drop(columns=[c for c in rows if "latency" in str(c)])
    digest = pd.util.hash_pandas_object(shape.astype(np.float64), index=False).to_numpy()
    held = digest / 2.0**64 < HELD_OUT
    return rows.assign(split=np.where(held, "val", "train"))


def version_numbers(text: str) -> tuple[int, ...]:
    """Numbers of a version such as ``1.3.0rc10``, which compare in the order of versions.

    A release candidate precedes its release.
    """
    # A release counts as a candidate with a number that no real one reaches.
    main, _, candidate = text.partition("rc")
    numbers = [int(n) for n in re.findall(r"\d+", main)][:4]
    return (*numbers, *([0] * (4 - len(numbers))), int(candidate or 10**6))
