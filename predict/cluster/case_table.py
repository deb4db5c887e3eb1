"""Tables of measured cases: their files, the cells of a row, and what sources say in words.

A row is a case, such as a training step or an engine under a load, with what was measured of it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from ...common.errors import DatasetError, OpcastError
from ...common.files import own_data
from ...common.parquet import check_measured
from ...simulate.step.workload import Workload

logger = logging.getLogger(__name__)

#: What a rule of opcast may raise on sizes that it was not made for.
FAULTS = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, AssertionError)
#: How alike (of 1) a column is to the one that it may be a misspelling of; the default of
#: ``difflib``, 0.6, takes ``isl`` for ``osl``, 0.8 a ``network_note`` for ``network_scope``.
_CLOSE = 0.82
#: Columns of models' sizes: fields of a workload that are numbers or flags.
SIZES = {f.name: str(f.type) for f in fields(Workload) if f.type != "str" and f.name != "batch"}

Row = TypeVar("Row")


def case_data() -> Any:
    """What ``cases.yaml`` holds."""
    return own_data("predict/cluster/cases.yaml")


def read_cases(path: str | Path | Sequence[Path], what: str) -> pd.DataFrame:
    """A table of cases from CSV or parquet.

    Args:
        path: The file, or several whose rows are put together.
        what: What the cases are: ``steps`` or ``serving``.

    Raises:
        DatasetError: A file cannot be read, lacks columns, names two rows alike, or states
            something as measured that is no positive number.
    """
    if not isinstance(path, str | Path):
        # Columns that a table lacks are of any type, not of its own.
        tables = [read_cases(own, what).astype(object) for own in path]
        return pd.concat(tables, ignore_index=True)
    file = Path(path)
    try:
        if file.suffix == ".parquet":
            table = pd.read_parquet(file)
        else:
            table = pd.read_csv(file, low_memory=False)
    except (OSError, ValueError) as error:
        raise DatasetError(f"the table cannot be read: {error}", where=str(file)) from None
    lacking = [name for name in case_data()["needed"][what] if name not in table]
    missing = [name for name in lacking if not _mended(table, name)]
    if missing:
        raise DatasetError(
            f"no columns {', '.join(missing)}",
            where=str(file),
            hint=f"docs/{what}.md lists the columns of a table of {what}",
        )
    if "id" not in table:
        table.insert(0, "id", [f"row{number}" for number in range(len(table))])
    if len(again := table["id"][table["id"].notna() & table["id"].duplicated()]):
        raise DatasetError(
            f"the id {again.iloc[0]!r} names several rows",
            where=str(file),
            hint="give each row its own, or leave the column out; one run in two rows counts twice",
        )
    check_measured(table, case_data()["measured"][what], str(file))
    return table


def _mended(table: pd.DataFrame, column: str) -> bool:
    """Whether ``cases.yaml`` gives a column that a table lacks to any of its rows."""
    for rule in case_data()["mended"]:
        if column in rule["cells"] and set(rule["rows"]) <= set(table):
            cells = table[list(rule["rows"])].astype(object).fillna("").astype(str)
            patterns = list(rule["rows"].values())
            if any(all(map(re.search, patterns, own)) for own in cells.to_numpy()):
                return True
    return False


def read_rows(
    table: pd.DataFrame, read: Callable[[Mapping[str, object]], Row]
) -> tuple[list[Row | None], list[str]]:
    """Rows of a table, and for each that cannot be expressed why; empty for the others.

    Args:
        table: From :func:`read_cases`.
        read: Reads one row.
    """
    rows: list[Row | None] = []
    reasons = []
    asked: set[str] = set()
    for record in table.to_dict("records"):
        try:
            rows.append(read(_Record({str(k): v for k, v in record.items()}, asked)))
            reasons.append("")
        except (OpcastError, *FAULTS) as error:
            rows.append(None)
            reasons.append(reason_of(error))
    warn_misspelt(map(str, table), asked)
    return rows, reasons


class _Record(dict[str, object]):
    """A row that notes which columns are asked for."""

    def __init__(self, cells: Mapping[str, object], asked: set[str]) -> None:
        super().__init__(cells)
        self._asked = asked

    def get(self, name: str, default: object = None) -> object:
        """The cell of a column, or the default."""
        self._asked.add(name)
        return super().get(name, default)


def warn_misspelt(columns: Iterable[str], asked: Collection[str]) -> None:
    """Warn of columns that nothing asked for, but are close to one that was asked for in vain."""
    own = set(columns)
    lacking = sorted(set(asked) - own)
    for name in sorted(own - set(asked)):
        for meant in get_close_matches(name, lacking, 1, _CLOSE):
            logger.warning("column %r is not read: is it %r, which the table lacks?", name, meant)


def reason_of(error: Exception) -> str:
    """Why a row has no prediction; one row that opcast fails on does not cost the others."""
    if isinstance(error, OpcastError):
        return str(error)
    return f"opcast fails on this row, please report it: {type(error).__name__}: {error}"


class Cells:
    """Cells of a row by type; an empty cell, or no such column, is the default.

    Cells that are known to say something else are read as ``cases.yaml`` mends them.
    """

    def __init__(self, row: Mapping[str, object]) -> None:
        self._row, self._mended = row, dict[str, object]()
        for fault in case_data()["mended"]:
            if all(re.search(own, self.text(name)) for name, own in fault["rows"].items()):
                self._mended |= {k: self._meant(v) for k, v in fault["cells"].items()}

    def _meant(self, cell: object) -> object:
        """What stands for a cell: itself, or the cell of the column that it names."""
        named = isinstance(cell, str) and cell.startswith("=")
        return self._value(str(cell)[1:]) if named else cell

    def _value(self, name: str) -> object | None:
        value = self._mended.get(name, self._row.get(name))
        return None if value is None or value != value or value == "" else value

    def text(self, name: str) -> str:
        """Text of a cell."""
        value = self._value(name)
        return "" if value is None else str(value)

    def number(self, name: str, default: float = float("nan")) -> float:
        """Number of a cell.

        Raises:
            DatasetError: It is none.
        """
        value = self._value(name)
        try:
            return default if value is None else float(str(value))
        except ValueError:
            raise DatasetError(f"{name}={value!r} is not a number", where=self.text("id")) from None

    def count(self, name: str, default: int) -> int:
        """Whole number of a cell."""
        return round(self.number(name, default))

    def flag(self, name: str, default: bool) -> bool:
        """Whether a cell says yes."""
        text = self.text(name).lower()
        return text in ("true", "1", "1.0", "yes") if text else default

    def sizes(self) -> dict[str, int | float | bool]:
        """Sizes of a model, as far as the cells say them."""
        read: dict[str, Callable[[str], int | float | bool]] = {
            "int": lambda name: self.count(name, 0),
            "float": self.number,
            "bool": lambda name: self.flag(name, False),
        }
        return {name: read[kind](name) for name, kind in SIZES.items() if self.text(name)}

    def meant(self, name: str) -> Any:
        """What the words of a cell mean, by the patterns of ``cases.yaml`` under its name."""
        return meaning(name, self.text(name).lower())


def meaning(name: str, words: str) -> Any:
    """What words mean by the patterns under a name of ``cases.yaml``: the first that they have."""
    return next(own for pattern, own in case_data()[name].items() if re.search(pattern, words))


def noted_sizes(note: str, *, latent: bool = False) -> dict[str, int]:
    """Sizes of a model that a note gives, fields of a workload.

    Args:
        note: The note.
        latent: Whether attention is latent, even if the note does not say it.
    """
    found, usual = dict[str, int](), case_data()["latent"]
    for name, patterns in case_data()["numbers"].items():
        hits = (re.search(pattern, note, re.IGNORECASE) for pattern in patterns)
        if hit := next(filter(None, hits), None):
            found[name] = int(hit[1] or 1)
    if "kv_lora" in found:
        return {**usual, "q_lora": 0, **found}
    return {**usual, **found} if latent else {k: v for k, v in found.items() if k not in usual}


def noted_share(name: str, note: str) -> float | None:
    """Share of a model's layers that a note gives; ``None`` if it does not.

    Args:
        name: Of the share in ``cases.yaml``.
        note: The note.
    """
    for rule in case_data()["shares"][name]:
        hit = re.search(rule["pattern"], note, re.IGNORECASE)
        if hit is None:
            continue
        numbers = [int(text) for text in hit.groups()]
        part, whole = {0: (1, 1), 1: (1, *numbers)}.get(len(numbers), numbers)
        share = min(1.0, part / max(whole, 1)) * float(rule.get("share", 1.0))
        return 1.0 - share if rule.get("rest") else share
    return None
