"""Tables of measured cases: reading files, typed access to cells, and parsing of free text.

A row is a case, such as a training step or an engine under a load, with its measurements. Tables of
published runs with prefill workers lack the number of the engines, which is looked up.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from ...common.errors import DatasetError, OpcastError
from ...common.files import own_data
from ...common.parquet import check_measured
from ...simulate.step.workload import Workload

logger = logging.getLogger(__name__)

#: Exceptions that opcast's rules may raise on sizes that they were not made for.
FAULTS = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, AssertionError)
#: Similarity (0 to 1) from which a column counts as a misspelling of another; the default of
#: ``difflib``, 0.6, confuses ``isl`` with ``osl``, and 0.8 ``network_note`` with ``network_scope``.
_CLOSE = 0.82
#: Columns of model sizes: workload fields that are numbers or flags.
SIZES = {f.name: str(f.type) for f in fields(Workload) if f.type != "str" and f.name != "batch"}

Row = TypeVar("Row")
#: Default of a flag: whether it holds, or ``None`` if an empty cell decides nothing.
Default = TypeVar("Default", bool, None)
#: Cells that identify the runs of a group of engines, in ``disaggregated.yaml``.
_KEYS = ("framework", "device", "model_group", "weight_dtype", "isl", "osl")
#: The engines of a run: prefill and decode workers, batch limit of a decode rank, and drafts.
_Engines = tuple[str, str, int | str, int | str]


def case_data() -> Any:
    """Return the contents of ``cases.yaml``."""
    return own_data("predict/cluster/cases.yaml")


def read_cases(path: str | Path | Sequence[Path], what: str) -> pd.DataFrame:
    """Read a table of cases from CSV or parquet.

    Args:
        path: The file, or several files to concatenate.
        what: Kind of cases: ``steps`` or ``serving``.

    Raises:
        DatasetError: A file cannot be read, lacks columns, has duplicate ids, or has a measured
            value that is not a positive number.
    """
    if not isinstance(path, str | Path):
        # As objects, so that columns missing in one table do not change type.
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
            f"the id {again.iloc[0]!r} is used by several rows",
            where=str(file),
            hint="give each row its own id, or omit the column; a duplicated run counts twice",
        )
    check_measured(table, case_data()["measured"][what], str(file))
    return table


def _mended(table: pd.DataFrame, column: str) -> bool:
    """Return whether a rule of ``cases.yaml`` supplies a missing column for any row."""
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
    """Convert the rows of a table, with the reason for each that fails; empty for the others.

    Args:
        table: Result of :func:`read_cases`.
        read: Converts one row.
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
    """A row that records which columns are accessed."""

    def __init__(self, cells: Mapping[str, object], asked: set[str]) -> None:
        super().__init__(cells)
        self._asked = asked

    def get(self, name: str, default: object = None) -> object:
        """Return the cell of a column, or the default."""
        self._asked.add(name)
        return super().get(name, default)


def warn_misspelt(columns: Iterable[str], asked: Collection[str]) -> None:
    """Warn of unread columns whose names are close to a column that was looked up in vain."""
    own = set(columns)
    lacking = sorted(set(asked) - own)
    for name in sorted(own - set(asked)):
        for meant in get_close_matches(name, lacking, 1, _CLOSE):
            logger.warning("column %r is not read: is it %r, which the table lacks?", name, meant)


def reason_of(error: Exception) -> str:
    """Return why a row has no prediction, including internal errors of opcast."""
    if isinstance(error, OpcastError):
        return str(error)
    return f"opcast fails on this row, please report it: {type(error).__name__}: {error}"


class Cells:
    """Typed access to the cells of a row; an empty or missing cell gives the default.

    Known faults of sources are corrected by the rules ``mended`` of ``cases.yaml``.
    """

    def __init__(self, row: Mapping[str, object]) -> None:
        self._row, self._mended = row, dict[str, object]()
        for fault in case_data()["mended"]:
            if all(re.search(own, self.text(name)) for name, own in fault["rows"].items()):
                self._mended |= {k: self._meant(v) for k, v in fault["cells"].items()}

    def _meant(self, cell: object) -> object:
        """Return a corrected value: a constant, or for ``=name`` the cell of that column."""
        named = isinstance(cell, str) and cell.startswith("=")
        return self._value(str(cell)[1:]) if named else cell

    def _value(self, name: str) -> object | None:
        value = self._mended.get(name, self._row.get(name))
        return None if value is None or value != value or value == "" else value

    def fill(self, cells: Mapping[str, object]) -> None:
        """Set cells that the table lacks and another source of the same run gives."""
        self._mended |= cells

    def text(self, name: str) -> str:
        """Return a cell as text."""
        value = self._value(name)
        return "" if value is None else str(value)

    def number(
        self, name: str, default: float = float("nan"), least: float = float("-inf")
    ) -> float:
        """Return a cell as a number of at least ``least``; a default may be less.

        Raises:
            DatasetError: The cell is not a number, or is below ``least``.
        """
        value = self._value(name)
        try:
            found = default if value is None else float(str(value))
        except ValueError:
            raise DatasetError(f"{name}={value!r} is not a number", where=self.text("id")) from None
        if value is not None and found < least:
            raise DatasetError(f"{name}={found:g} is below {least:g}", where=self.text("id"))
        return found

    def count(self, name: str, default: int, least: int = 0) -> int:
        """Return a cell as an integer of at least ``least``; a default may be less.

        Raises:
            DatasetError: The cell is not a number, or is below ``least``.
        """
        value = round(self.number(name, default))
        if value < least and value != default:
            raise DatasetError(f"{name}={value} is below {least}", where=self.text("id"))
        return value

    def flag(self, name: str, default: Default) -> bool | Default:
        """Return a cell as a flag; the default if it is empty."""
        text = self.text(name).lower()
        return text in ("true", "1", "1.0", "yes") if text else default

    def sizes(self) -> dict[str, int | float | bool]:
        """Return the model sizes that the row gives."""
        read: dict[str, Callable[[str], int | float | bool]] = {
            "int": lambda name: self.count(name, 0),
            "float": self.number,
            "bool": lambda name: self.flag(name, False),
        }
        return {name: read[kind](name) for name, kind in SIZES.items() if self.text(name)}

    def meant(self, name: str) -> Any:
        """Return the meaning of a cell's text, see :func:`meaning`."""
        return meaning(name, self.text(name).lower())


def meaning(name: str, words: str) -> Any:
    """Return the value of the first pattern under a name of ``cases.yaml`` that matches."""
    return next(own for pattern, own in case_data()[name].items() if re.search(pattern, words))


def noted_sizes(note: str, *, latent: bool = False) -> dict[str, int]:
    """Return the model sizes in a note, as fields of a workload.

    Args:
        note: The note.
        latent: Whether attention is latent even if the note does not mention it.
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
    """Return a share of a model's layers from a note; ``None`` if the note has none.

    Args:
        name: Name of the share in ``cases.yaml``.
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


def published_engines(cell: Cells) -> dict[str, object]:
    """Return cells with the engines of a run, in the columns of a serving table.

    Args:
        cell: A row of a serving table.

    Returns:
        Workers, plans, batch limit and drafts; empty if no published engines, or several, fit.
    """
    match = own_data("predict/cluster/disaggregated.yaml")["match"]
    if not all(re.search(pattern, cell.text(name)) for name, pattern in match.items()):
        return {}
    known = _runs().get(tuple(cell.text(name).removesuffix(".0") for name in _KEYS), {})
    fit = [own for own in known.get(cell.count("concurrency", 0), ()) if _fits(own, cell)]
    # Runs without drafts are named so where they were told apart from their twins with drafts.
    plain = cell.text("spec_decode").startswith("no")
    drafting = [] if plain else [own for own in fit if own[3]]
    fit = drafting or [own for own in fit if not own[3]]
    if len(fit) > 1:
        # Plans of tables are those of all devices of a worker, but show whether experts are whole.
        whole = cell.count("decode_ep", 1) > 1
        fit = [own for own in fit if ("e" in _parts(own[1])[1]) is whole]
    if len(fit) != 1:
        return {}
    prefill, decode, batch, drafts = fit[0]
    found = _workers("prefill_", prefill) | _workers("decode_", decode)
    return found | {"decode_max_num_seqs": batch, "drafts": drafts}


@cache
def _runs() -> dict[tuple[str, ...], dict[int, list[_Engines]]]:
    """Return the engines by the cells of a run, and by its requests in flight."""
    runs: dict[tuple[str, ...], dict[int, list[_Engines]]] = {}
    for group in own_data("predict/cluster/disaggregated.yaml")["runs"]:
        loads = runs.setdefault(tuple(str(group["cells"][name]) for name in _KEYS), {})
        for flights, *engines in group["engines"]:
            for flight in flights:
                loads.setdefault(flight, []).append(tuple(engines))
    return runs


def _fits(engines: _Engines, cell: Cells) -> bool:
    """Return whether a row gives no other number of workers or of their devices."""
    for prefix, own in zip(("prefill_", "decode_"), engines[:2], strict=True):
        count, _, devices = _parts(own)
        if cell.count(f"{prefix}workers", count) != count:
            return False
        ranks = [cell.count(f"{prefix}{name}", 0) for name in ("tp", "pp", "dp")]
        if all(ranks) and prod(ranks) != devices:
            return False
    return True


def _workers(prefix: str, text: str) -> dict[str, object]:
    """Return the cells of workers, see :func:`_parts`."""
    count, kind, devices = _parts(text)
    tp, dp = (1, devices) if kind.startswith("d") else (devices, 1)
    cells = {"workers": count, "tp": tp, "pp": 1, "dp": dp, "ep": devices if "e" in kind else 1}
    return {f"{prefix}{name}": value for name, value in cells.items()} | {f"{prefix}moe_tp": ""}


def _parts(text: str) -> tuple[int, str, int]:
    """Return number, kind of plan and devices of workers written as ``2 dep8``."""
    count, plan = text.split()
    kind = plan.rstrip("0123456789")
    return int(count), kind, int(plan.removeprefix(kind))
