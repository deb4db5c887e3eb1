"""Predictions of published tables, evaluated against the latencies in the tables.

Long tables are predicted in pieces, here or on a Ray cluster. Finished pieces are stored in a
folder with predictions, evaluated rows and notes, so that a run repeated after a crash predicts
only what is missing, with bit-identical results.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd

from ...common.errors import DatasetError
from ...common.files import parse_json, write_text
from ...common.parquet import read_table, write_table
from ...common.tasks import run_pieces
from ...models.operators import OpModel
from ...models.operators.report import only_or_mixed
from .answers import TIMES

#: Prefix of the splits whose rows may be learned from.
CALIBRATION = "calib"


@dataclass
class PublishedPredictions:
    """Predictions of a folder.

    Attributes:
        frame: ``id`` (row number if the table has none), ``latency_us``, ``lo_us`` and ``hi_us`` of
            every row, ``power_w`` with its bounds for power tables, and ``table`` and ``reason``
            (why a row has no prediction) for tables other than operators, collectives and programs.
        judged: Rows with a known latency: ``table``, ``family``, ``device``, ``split``, ``scope``,
            ``error`` (predicted / measured - 1), ``covered``, ``calibration`` (whether the row was
            used for calibration).
        calibrated: Number of calibration rows, by what they adapted.
        notes: What was not predicted or not evaluated, and why.
    """

    frame: pd.DataFrame
    judged: pd.DataFrame
    calibrated: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def summary(self) -> pd.DataFrame:
        """Summarize evaluated rows by table, family, device and split, and over whole tables."""
        if not len(self.judged):
            return pd.DataFrame()
        # Calibration rows would bias the figures.
        judged = self.judged[~self.judged["calibration"]]
        judged = judged.assign(size=judged["error"].abs())
        whole = judged.assign(family="all", device="all", split="all", scope="")
        grouped = pd.concat([judged, whole]).groupby(["table", "family", "device", "split"])
        return grouped.agg(
            n=("size", "size"),
            mape=("size", "mean"),
            median_ape=("size", "median"),
            largest=("size", "max"),
            bias=("error", "median"),
            coverage=("covered", "mean"),
            scope=("scope", only_or_mixed),
        ).reset_index()


def judged(path: Path, rows: pd.DataFrame) -> PublishedPredictions:
    """Return predictions of one table with their errors.

    Args:
        path: File of the table.
        rows: ``id``, ``family``, ``device`` (or ``platform``), :data:`~.answers.TIMES` in seconds
            and ``scope``; ``split`` and ``latency_us`` if given; for tables of the packs also
            ``suspect`` and ``reason``: suspect rows, and rows without a prediction, are not
            evaluated.

    Raises:
        DatasetError: The rows have no ``id``.
    """
    if "id" not in rows:
        raise DatasetError("column 'id' is missing", where=str(path))
    name = path.name.split(".")[0]
    times = microseconds(*(rows[c].to_numpy() for c in TIMES))
    times.insert(0, "id", rows["id"].astype(str).to_numpy())
    given = rows["latency_us"] if "latency_us" in rows else pd.Series(np.nan, rows.index)
    label = given.to_numpy(np.float64, na_value=np.nan)
    figures = pd.DataFrame(
        {
            "id": times["id"],
            "table": name,
            "family": rows["family"].astype(str).to_numpy(),
            "device": rows["device" if "device" in rows else "platform"].astype(str).to_numpy(),
            "split": rows["split"].astype(str).to_numpy() if "split" in rows else "",
            "scope": rows["scope"].to_numpy(),
            # Without a label, error and coverage are NaN and False; such rows are dropped below.
            "error": times["latency_us"] / label - 1,
            "covered": (label >= times["lo_us"]) & (label <= times["hi_us"]),
            "calibration": given_rows(rows.assign(latency_us=label)),
        }
    )
    keep, notes = label > 0, []
    if "reason" in rows:
        doubted, reason = rows["suspect"].to_numpy(bool) & keep, rows["reason"].to_numpy()
        keep &= ~doubted & (reason == "")
        times["table"], times["reason"] = name, reason
        counts = rows["reason"].value_counts()
        notes = [f"{name}: {n} rows not predicted: {why}" for why, n in counts.items() if why]
        if doubted.any():
            notes.append(f"{name}: {int(doubted.sum())} rows marked as suspect are not judged")
    return PublishedPredictions(times, figures[keep].reset_index(drop=True), notes=notes)


def given_rows(frame: pd.DataFrame) -> np.ndarray:
    """Return a mask of calibration rows with a latency, shape ``(n,)``."""
    if "split" not in frame or "latency_us" not in frame:
        return np.zeros(len(frame), bool)
    # NaN compares false, so rows without a label are excluded.
    known = frame["latency_us"].to_numpy(np.float64, na_value=np.nan) > 0
    return np.asarray(frame["split"].astype(str).str.startswith(CALIBRATION) & known)


def microseconds(latency: np.ndarray, lo: np.ndarray, hi: np.ndarray) -> pd.DataFrame:
    """Convert latencies and bounds in seconds, shape ``(n,)`` each, to columns in microseconds."""
    return pd.DataFrame({"latency_us": latency * 1e6, "lo_us": lo * 1e6, "hi_us": hi * 1e6})


#: A table, or a part of its rows, with its file.
Piece = tuple[Path, pd.DataFrame]
#: Rows per piece: limits the memory for features, and the work that an interrupted run loses to
#: about seven seconds on one core.
_ROWS = 200_000
#: Suffixes of the files with a piece's predictions and its evaluated rows.
_TABLES = (".parquet", ".judged.parquet")


@dataclass(frozen=True)
class Pieces:
    """Prediction of tables in pieces.

    Attributes:
        ray: Address of a Ray cluster; empty for this process.
        kept: Folder of finished pieces, read and written; ``None`` to keep none.
        identity: Digests that determine a piece's predictions besides its rows: of models, and of
            calibration rows.
        progress: Called with the numbers of finished and of all rows.
    """

    ray: str = ""
    kept: Path | None = None
    identity: tuple[str, ...] = ()
    progress: Callable[[int, int], None] = field(default=lambda done, total: None)

    def calibrated_on(self, rows: pd.DataFrame) -> Pieces:
        """Return the settings for a model calibrated on some rows."""
        return replace(self, identity=(*self.identity, _digest(rows)))

    def predict(
        self,
        work: Callable[[OpModel, Piece], PublishedPredictions],
        model: OpModel,
        tables: Sequence[Piece],
    ) -> Iterator[PublishedPredictions]:
        """Predict tables; yield their pieces in order, wherever they were predicted.

        Args:
            work: Predicts one piece; must be importable by workers.
            model: The operator model.
            tables: Tables with their files.

        Raises:
            DatasetError: A kept piece is damaged.
            OpcastError: There is no such Ray cluster; or what ``work`` raises.
        """
        pieces = [
            (path, table.iloc[start : start + _ROWS].reset_index(drop=True))
            for path, table in tables
            for start in range(0, len(table), _ROWS)
        ]
        names = [self._name(work.__name__, piece) for piece in pieces]
        found = {i: own for i, name in enumerate(names) if (own := self._read(name)) is not None}
        sizes = [len(rows) for _, rows in pieces]
        total, done = sum(sizes), sum(sizes[place] for place in found)
        self.progress(done, total)
        left = [place for place in range(len(pieces)) if place not in found]
        for at, own in run_pieces(work, model, [pieces[place] for place in left], ray=self.ray):
            place = left[at]
            self._write(names[place], own)
            found[place] = own
            done += sizes[place]
            self.progress(done, total)
        yield from (found[place] for place in range(len(pieces)))

    def _name(self, work: str, piece: Piece) -> str:
        """Return the name of a piece's files; empty if none are kept."""
        if self.kept is None:
            return ""
        path, rows = piece
        text = "\n".join((*self.identity, work, path.name, _digest(rows)))
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def _read(self, name: str) -> PublishedPredictions | None:
        # The notes are written last: if they exist, the piece is complete.
        if self.kept is None or not (path := self.kept / f"{name}.json").is_file():
            return None
        try:
            notes = [str(note) for note in parse_json(path.read_text(encoding="utf-8"))["notes"]]
        except (KeyError, TypeError, ValueError) as error:
            raise DatasetError(
                f"the notes of a finished piece cannot be read: {error}",
                where=str(path),
                hint="delete its folder to predict all pieces again",
            ) from None
        frame, judged = (read_table(path.with_suffix(end)) for end in _TABLES)
        return PublishedPredictions(frame, judged, notes=notes)

    def _write(self, name: str, own: PublishedPredictions) -> None:
        if self.kept is None:
            return
        path = self.kept / f"{name}.json"
        for table, end in zip((own.frame, own.judged), _TABLES, strict=True):
            write_table(table, path.with_suffix(end))
        write_text(path, json.dumps({"notes": own.notes}, indent=1))


def _digest(rows: pd.DataFrame) -> str:
    """Return a digest of a table's columns and values, independent of row labels."""
    digest = hashlib.sha256("\n".join(map(str, rows.columns)).encode())
    for name in rows.columns:
        digest.update(pd.util.hash_pandas_object(rows[name], index=False).to_numpy().tobytes())
    return digest.hexdigest()[:16]
