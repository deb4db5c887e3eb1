"""Predictions for folders of published latencies: operators, collectives and whole programs.

A folder holds query tables (``queries_ops_*.parquet``, ``queries_collectives*.csv.gz``,
``queries_matmul*.csv.gz``, ``queries_gemm*.parquet``, ``queries_conv*.parquet``,
``queries_attention_moe*.parquet``, ``queries_layers*.parquet``, ``queries_new_attention*.parquet``,
``queries_e2e.csv`` with ``opgraphs.parquet``) or the tables of a published pack; a single table may
be given instead. Every row gets a prediction or a reason; rows with a given latency are evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from ...common.errors import DatasetError
from ...common.parquet import check_measured, read_table
from ...datagen.published.packs import BLOCK_TABLES, PRODUCTS, files_of, kind_of, kinds
from ...features.devices.catalogue import find_device
from ...features.operators.schema import families_hint, sources
from ...models.collectives.links import Links
from ...models.collectives.model import CollectiveModel
from ...models.operators import OpModel, rows_of_published
from ...models.power.model import PowerModel
from ...models.tiles import TileModel
from ..cluster.case_table import warn_misspelt
from ..locate import BLOCK_MODEL, find_model
from .answers import (
    SECONDS,
    TIMES,
    WATTS,
    power_note,
    predict_blocks,
    predict_convs,
    predict_power,
    predict_products,
    predict_xla_collectives,
    read_blocks,
)
from .composition import compose
from .judged import Piece, Pieces, PublishedPredictions, given_rows, judged, microseconds
from .tile_table import predict_tiles, rank_note

#: Graphs of a folder's programs.
GRAPHS = "opgraphs.parquet"


def predict_published(
    folder: Path,
    model: OpModel,
    calibrate: bool = False,
    limit: int | None = None,
    blocks: OpModel | None = None,
    pieces: Pieces | None = None,
) -> PublishedPredictions:
    """Predict every row of a folder.

    Args:
        folder: Folder with at least one of the tables, or a single table.
        model: Operator model; calibrated in place if ``calibrate`` is set.
        calibrate: Whether to learn from rows of ``calib_*`` splits with a latency.
        limit: Maximum rows of each operator table, sampled at random.
        blocks: Model of layers, batches and new attention; by default the shipped one, loaded only
            if there is such a table. Calibrated like ``model``.
        pieces: Where tables of operators, convolutions and blocks are predicted, and where results
            are kept; by default in this process, without keeping them.

    Raises:
        DatasetError: The folder has no such table, or a table lacks a column or has a latency that
            is not a positive number.
        DeviceError: A device is not in the catalogue.
    """
    if not folder.exists():
        raise DatasetError("no such folder or table", where=str(folder))
    links = CollectiveModel.find()
    job = _Job(folder, model, links, calibrate, limit, blocks, pieces or Pieces())
    parts = [
        *job.operators(),
        *job.pack(["xla_collectives"], partial(predict_xla_collectives, links=links)),
        *job.collectives(),
        *job.pack(PRODUCTS, partial(predict_products, model=model)),
        *job.convs(),
        *job.pack(
            ["power"], lambda *of: predict_power(of[0], of[1], model, PowerModel.find()), power_note
        ),
        *job.pack(["tiles"], lambda *of: predict_tiles(of[0], of[1], TileModel.find()), rank_note),
        *job.blocks_of_models(),
        *job.programs(),
    ]
    if not parts:
        wanted = ", ".join(dict.fromkeys(name for own in kinds().values() for name in own.files))
        raise DatasetError("no table to predict", where=str(folder), hint=f"expected {wanted}")
    frame = pd.concat([part.frame for part in parts], ignore_index=True)
    figures = pd.concat([part.judged for part in parts], ignore_index=True)
    notes = [note for part in parts for note in part.notes]
    return PublishedPredictions(frame, figures, job.calibrated, notes)


@dataclass
class _Job:
    folder: Path
    model: OpModel
    links: CollectiveModel
    calibrate: bool
    limit: int | None
    blocks: OpModel | None
    pieces: Pieces = field(default_factory=Pieces)
    calibrated: dict[str, int] = field(default_factory=dict)

    def operators(self) -> Iterator[PublishedPredictions]:
        pieces = self.pieces
        read = [(p, with_source(p, t)) for p, t in self._tables("operators")]
        tables = [(p, t if "id" in t else t.assign(id=np.arange(len(t)))) for p, t in read]
        # All tables first, since a family's calibration rows may be spread over several files.
        if self.calibrate:
            given = [frame[given_rows(frame)] for _, frame in tables]
            known = [part for part in given if len(part)]
            if known:
                rows = rows_of_published(pd.concat(known, ignore_index=True), self.model.spec)
                self.calibrated |= self.model.calibrate(rows)
                pieces = pieces.calibrated_on(rows)
        drawn = []
        for path, whole in tables:
            learned, others = self._told_apart(self._drawn(whole))
            if len(others):
                yield _unknown_part(path, others)
            drawn.append((path, learned))
        yield from pieces.predict(_operator_part, self.model, drawn)

    def _told_apart(self, table: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Return the rows of the model's families, and the others, unless no row is covered."""
        rows = rows_of_published(table, self.model.spec)
        known = rows["key"].isin(list(self.model.families)).to_numpy()
        return (table[known], rows[~known]) if known.any() else (table, rows[:0])

    def collectives(self) -> Iterator[PublishedPredictions]:
        tables = list(self._tables("collectives"))
        known = [frame[given_rows(frame)] for _, frame in tables if given_rows(frame).any()]
        if self.calibrate and known:
            rows = pd.concat(known, ignore_index=True)
            self.links = self.links.calibrated(rows, _links)
            self.calibrated["collectives"] = len(rows)
        for path, frame in tables:
            found = self.links.predict(frame, _links).rename(columns=SECONDS)
            told = {c: found[c].to_numpy() for c in (*TIMES, "scope")}
            yield judged(path, frame.assign(family=frame["op"], **told))

    def pack(
        self,
        kinds: Sequence[str],
        predict: Callable[[pd.DataFrame, Path], pd.DataFrame],
        note: Callable[[pd.DataFrame], list[str]] = lambda rows: [],
    ) -> Iterator[PublishedPredictions]:
        """Predict the packs' tables of some kinds; power tables also get watts."""
        for path, table in self._tables(*kinds):
            rows = predict(self._drawn(table), path)
            part = judged(path, rows)
            for column in filter(rows.__contains__, WATTS):
                part.frame[column] = rows[column].to_numpy()
            part.notes += note(rows)
            yield part

    def _tables(self, *wanted: str) -> Iterator[tuple[Path, pd.DataFrame]]:
        """Yield the tables of some kinds, checked by their columns as names may be ambiguous."""
        for kind in wanted:
            for path in files_of(self.folder, kind):
                table = read_table(path)
                if kind_of(table.columns, path.name) == kind:
                    check_measured(table, ["latency_us", "power_w"], str(path))
                    warn_misspelt(map(str, table), ["latency_us"])
                    yield path, table

    def _drawn(self, table: pd.DataFrame) -> pd.DataFrame:
        """Return the rows to predict: all, or a sample of the limit's size."""
        if self.limit is None or len(table) <= self.limit:
            return table
        # A fixed seed, so that two models are compared on the same rows.
        return table.sample(self.limit, random_state=0)

    def convs(self) -> Iterator[PublishedPredictions]:
        for path, table in self._tables("conv"):
            yield from self.pieces.predict(_conv_part, self.model, [(path, self._drawn(table))])

    def blocks_of_models(self) -> Iterator[PublishedPredictions]:
        """Predict tables of attention and experts, of layers, and of new attention."""
        read = [(path, read_blocks(table, path)) for path, table in self._tables(*BLOCK_TABLES)]
        if not read:
            return
        if self.blocks is None:
            self.blocks = OpModel.load(find_model(BLOCK_MODEL))
        # The model of blocks accepts the same devices as the operator model.
        self.blocks.described = {**self.model.devices, **self.model.described}
        pieces = self.pieces
        # All tables first, as for operators.
        known = pd.concat([rows[given_rows(rows)] for _, rows in read], ignore_index=True)
        if self.calibrate and len(known):
            known["device"] = [self.blocks.spec(str(name)).name for name in known["device"]]
            self.calibrated |= self.blocks.calibrate(known)
            pieces = pieces.calibrated_on(known)
        for path, whole in read:
            yield from pieces.predict(_block_part, self.blocks, [(path, self._drawn(whole))])

    def programs(self) -> Iterator[PublishedPredictions]:
        for path in files_of(self.folder, "programs"):
            graphs = path.parent / GRAPHS
            if not graphs.is_file():
                raise DatasetError(
                    "the graphs of the programs are missing",
                    where=str(graphs),
                    hint=f"put {GRAPHS} beside {path.name}",
                )
            labels = pd.read_csv(path)
            composed = compose(
                labels, read_table(graphs), self._op_latency, self._collective_latency
            )
            told = {c: composed[f"{c}_ms"].to_numpy() * 1e-3 for c in TIMES}
            if "e2e_ms" in labels:
                labels = labels.assign(latency_us=labels["e2e_ms"] * 1e3)
            rows = labels.assign(family=labels["mode"], scope="composed", **told)
            yield judged(path, rows)

    def _op_latency(self, ops: pd.DataFrame) -> pd.DataFrame:
        """Return operator latencies as in the op tables: timed alone, called from the host."""
        # The graphs were published with NeuSight's tables, whose method (one call between two
        # events, launch included) the composition expects.
        rows = rows_of_published(ops.assign(source="neusight"), self.model.spec)
        prediction = self.model.predict(rows)
        return microseconds(prediction.latency, prediction.lo, prediction.hi)

    def _collective_latency(self, calls: pd.DataFrame) -> pd.DataFrame:
        prediction = self.links.predict(calls, _links)
        return microseconds(*(prediction[c].to_numpy() for c in SECONDS))


def _operator_part(model: OpModel, piece: Piece) -> PublishedPredictions:
    path, frame = piece
    rows = rows_of_published(frame, model.spec)
    found = model.predict(rows)
    told = {column: getattr(found, column) for column in (*TIMES, "scope")}
    return judged(path, rows.assign(family=rows["key"], **told))


def _unknown_part(path: Path, rows: pd.DataFrame) -> PublishedPredictions:
    """Return rows of families without a model, each with a reason."""
    reason = [f"the model has no operators {key!r}" for key in rows["key"]]
    rows = rows.assign(family=rows["key"], scope=rows["key"], suspect=False, reason=reason)
    return judged(path, rows.assign(**dict.fromkeys(TIMES, np.nan)))


def _conv_part(model: OpModel, piece: Piece) -> PublishedPredictions:
    path, table = piece
    return judged(path, predict_convs(table, path, model))


def _block_part(model: OpModel, piece: Piece) -> PublishedPredictions:
    path, rows = piece
    return judged(path, predict_blocks(rows, model))


def _links(name: str) -> Links:
    return Links.from_spec(find_device(name))


def with_source(path: Path, frame: pd.DataFrame) -> pd.DataFrame:
    """Ensure a column ``source``; if missing, it is derived from the first letter of ids.

    Raises:
        DatasetError: It is missing, and cannot be derived from ids.
    """
    if "source" in frame:
        return frame
    ids = frame["id"] if "id" in frame else pd.Series("", index=frame.index)
    source = (
        ids.astype(str).str[:1].map({own.ids: name for name, own in sources().items() if own.ids})
    )
    if "id" not in frame or source.isna().any():
        raise DatasetError(
            "column 'source' is missing",
            where=str(path),
            hint="add who measured each row; " + families_hint(),
        )
    return frame.assign(source=source)
