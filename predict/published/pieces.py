"""Predict long tables piece by piece, here or on a Ray cluster; finished pieces outlive a stop.

Of each finished piece a folder keeps its predictions, its judged rows and its notes. A run that is
repeated after its process died predicts only what is missing, with the same results to the bit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd

from ...common.errors import DatasetError
from ...common.files import parse_json, write_text
from ...common.parquet import read_table, write_table
from ...common.ray_tasks import run_tasks
from ...models.operators import OpModel
from .judged import PublishedPredictions

#: A table, or some of its rows, and the file that they are of.
Piece = tuple[Path, pd.DataFrame]
#: Rows predicted at a time, so that features of millions of rows never exist at once, and what a
#: run that is stopped loses at most: about seven seconds of one core.
_ROWS = 200_000


@dataclass(frozen=True)
class Pieces:
    """How tables are predicted in pieces.

    Attributes:
        ray: Address of a Ray cluster; empty for this process.
        kept: Folder of finished pieces, read and written; ``None`` keeps none.
        identity: What besides its rows decides a piece's predictions: digests of models and of
            the rows that they were calibrated on.
        progress: Called with the numbers of finished and of all rows.
    """

    ray: str = ""
    kept: Path | None = None
    identity: tuple[str, ...] = ()
    progress: Callable[[int, int], None] = field(default=lambda done, total: None)

    def calibrated_on(self, rows: pd.DataFrame) -> Pieces:
        """The same of a model that was calibrated on some rows."""
        return replace(self, identity=(*self.identity, _digest(rows)))

    def predict(
        self,
        work: Callable[[OpModel, Piece], PublishedPredictions],
        model: OpModel,
        tables: Sequence[Piece],
    ) -> Iterator[PublishedPredictions]:
        """Predict tables; yields their pieces in order, wherever they were predicted.

        Args:
            work: Predicts one piece; must be importable by workers.
            model: The model.
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
        total, done = sum(len(rows) for _, rows in pieces), 0
        for place in found:
            done += len(pieces[place][1])
        self.progress(done, total)
        left = [place for place in range(len(pieces)) if place not in found]
        for place, own in self._made(work, model, pieces, left):
            self._write(names[place], own)
            found[place] = own
            done += len(pieces[place][1])
            self.progress(done, total)
        yield from (found[place] for place in range(len(pieces)))

    def _made(
        self,
        work: Callable[[OpModel, Piece], PublishedPredictions],
        model: OpModel,
        pieces: Sequence[Piece],
        left: Sequence[int],
    ) -> Iterator[tuple[int, PublishedPredictions]]:
        """Predict the pieces at some places; yields them as they are finished."""
        if not self.ray:
            for place in left:
                yield place, work(model, pieces[place])
        elif left:
            for at, own in run_tasks(work, model, [pieces[place] for place in left], self.ray):
                yield left[at], own

    def _name(self, work: str, piece: Piece) -> str:
        """Name of a piece's files; empty if none are kept."""
        if self.kept is None:
            return ""
        path, rows = piece
        text = "\n".join((*self.identity, work, path.name, _digest(rows)))
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def _read(self, name: str) -> PublishedPredictions | None:
        # The notes are written last: with them a piece is whole.
        if self.kept is None or not (path := self.kept / f"{name}.json").is_file():
            return None
        try:
            notes = [str(note) for note in parse_json(path.read_text(encoding="utf-8"))["notes"]]
        except (KeyError, TypeError, ValueError) as error:
            raise DatasetError(
                f"no notes of a finished piece: {error}",
                where=str(path),
                hint="delete its folder to predict all pieces again",
            ) from None
        frame, judged = (read_table(path.with_suffix(end)) for end in _TABLES)
        return PublishedPredictions(frame, judged, notes=notes)

    def _write(self, name: str, own: PublishedPredictions) -> None:
        if self.kept is None:
            return
        self.kept.mkdir(parents=True, exist_ok=True)
        path = self.kept / f"{name}.json"
        for table, end in zip((own.frame, own.judged), _TABLES, strict=True):
            write_table(table, path.with_suffix(end))
        write_text(path, json.dumps({"notes": own.notes}, indent=1))


#: Suffixes of a piece's predictions and of its judged rows.
_TABLES = (".parquet", ".judged.parquet")


def _digest(rows: pd.DataFrame) -> str:
    """Digest of a table's columns and values; row labels do not matter."""
    digest = hashlib.sha256("\n".join(map(str, rows.columns)).encode())
    for name in rows.columns:
        digest.update(pd.util.hash_pandas_object(rows[name], index=False).to_numpy().tobytes())
    return digest.hexdigest()[:16]
