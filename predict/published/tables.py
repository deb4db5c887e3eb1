"""Predict folders of published latencies: operators, collectives and whole programs.

A folder holds tables of queries (``queries_ops_*.parquet``, ``queries_collectives*.csv.gz``,
``queries_matmul*.csv.gz``, ``queries_gemm*.parquet``, ``queries_conv*.parquet``,
``queries_attention_moe*.parquet``,
``queries_layers*.parquet``, ``queries_new_attention*.parquet``, ``queries_e2e.csv`` with
``opgraphs.parquet``) or the answered tables of a published pack; a single table may be given
instead. Every row gets a prediction or a reason; rows whose latency is given are judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from ...common.errors import DatasetError
from ...common.parquet import read_table
from ...common.ray_tasks import run_tasks
from ...datagen.published.block_tables import is_blocks
from ...datagen.published.conv_tables import is_convs
from ...datagen.published.product_tables import is_products, read_products
from ...features.devices.catalogue import find_device
from ...features.operators.schema import families_told
from ...models.collectives.links import Links
from ...models.collectives.measurements import XLA_COLUMNS
from ...models.collectives.model import CollectiveModel
from ...models.operators import OpModel, rows_of_published
from ...models.operators.report import only_or_mixed
from ...models.power.model import shipped_power
from ...models.tiles.model import shipped_tiles
from ..locate import BLOCK_MODEL, find_model
from .block_answers import predict_blocks, read_blocks
from .composition import compose
from .pack_tables import TIMES, predict_convs, predict_products, predict_xla_collectives
from .power_table import WATTS, is_power, power_note, predict_power
from .tile_table import is_tiles, predict_tiles, rank_note

#: File patterns by content. Queries come before answered tables: a folder that has both asks for
#: the queries, and the first pattern with a match counts.
OPERATORS = ("queries_ops_*.parquet", "ops_*.parquet")
COLLECTIVES = ("queries_collectives*.csv.gz", "collectives*.csv.gz")
MATMUL = ("queries_matmul*.csv*", "matmul*.csv*")
GEMM = ("queries_gemm*.parquet", "gemm*.parquet")
CONV = ("queries_conv*.parquet", "conv*.parquet")
POWER = ("queries_power*.parquet", "power.parquet")
TILES = ("queries_tpu*.parquet", "tpu.parquet")
BLOCKS = tuple(
    (f"queries_{name}*.parquet", f"{name}*.parquet")
    for name in ("attention_moe", "layers", "new_attention")
)
PROGRAMS = ("queries_e2e.csv", "e2e_labels.csv")
GRAPHS = "opgraphs.parquet"
#: Prefix of the splits whose rows may be learned from.
CALIBRATION = "calib"
#: Sources by the first letter of an operator's id, for query tables without a source column.
SOURCES = {"N": "neusight", "V": "vidur", "T": "aiconfigurator"}
# Rows predicted at a time, so that features of millions of rows never exist at once.
_ROWS = 200_000


@dataclass
class PublishedPredictions:
    """Predictions of a folder.

    Attributes:
        frame: ``id`` (the number of a row where its table has none), ``latency_us``, ``lo_us`` and
            ``hi_us`` of every row, ``power_w`` with its ends of rows of power tables, and ``table``
            and ``reason`` (why a row has no prediction) for rows of tables other than operators,
            collectives and programs.
        judged: Rows with a known latency: ``table``, ``family``, ``device``, ``split``,
            ``scope``, ``error`` (predicted / measured - 1), ``covered``, ``calibration`` (whether
            the row was learned from).
        calibrated: Number of rows learned from, by what they adapted.
        notes: What was left out of predictions or of the judgement, and why.
    """

    frame: pd.DataFrame
    judged: pd.DataFrame
    calibrated: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def summary(self) -> pd.DataFrame:
        """Summarise judged rows by table, family, device and split, and over whole tables."""
        if not len(self.judged):
            return pd.DataFrame()
        # Rows that were learned from would flatter the figures.
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


def predict_published(
    folder: Path,
    model: OpModel,
    collectives: CollectiveModel | None = None,
    calibrate: bool = False,
    limit: int | None = None,
    blocks: OpModel | None = None,
    ray: str = "",
) -> PublishedPredictions:
    """Predict every row of a folder.

    Args:
        folder: Holds at least one of the tables, or is one.
        model: Model of operators; calibrated in place if ``calibrate`` is set.
        collectives: Model of collectives; the shipped one by default.
        calibrate: Whether to learn from rows of ``calib_*`` splits whose latency is given.
        limit: Maximum rows of each operator table, drawn at random.
        blocks: Model of layers, batches and new attention; the shipped one by default, read only
            if there is such a table. Calibrated like ``model``.
        ray: Address of a Ray cluster that predicts the tables of operators, convolutions and
            blocks, with the same results; empty for this process.

    Raises:
        DatasetError: The folder has no such table, or a table lacks a column.
        DeviceError: A device is not in the catalogue.
    """
    if not folder.exists():
        raise DatasetError("no such folder or table", where=str(folder))
    links = collectives or CollectiveModel.load()
    job = _Job(folder, model, links, calibrate, limit, blocks, ray)
    parts = [
        *job.operators(),
        *job.collective_tables(),
        *job.products(),
        *job.convs(),
        *job.powers(),
        *job.tiles(),
        *job.block_tables(),
        *job.programs(),
    ]
    if not parts:
        every = (OPERATORS, COLLECTIVES, MATMUL, GEMM, CONV, POWER, TILES, *BLOCKS, PROGRAMS)
        wanted = ", ".join(name for patterns in every for name in patterns)
        raise DatasetError("no table to predict", where=str(folder), hint=f"expected {wanted}")
    frame = pd.concat([part.frame for part in parts], ignore_index=True)
    judged = pd.concat([part.judged for part in parts], ignore_index=True)
    notes = [note for part in parts for note in part.notes]
    return PublishedPredictions(frame, judged, job.calibrated, notes)


@dataclass
class _Job:
    folder: Path
    model: OpModel
    links: CollectiveModel
    calibrate: bool
    limit: int | None
    blocks: OpModel | None
    ray: str = ""
    calibrated: dict[str, int] = field(default_factory=dict)

    def operators(self) -> Iterator[PublishedPredictions]:
        read = [(p, with_source(p, read_table(p))) for p in _files(self.folder, OPERATORS)]
        tables = [(p, t if "id" in t else t.assign(id=np.arange(len(t)))) for p, t in read]
        # All tables first: a family's calibration rows may be spread over several files.
        if self.calibrate:
            given = [frame[_given(frame)] for _, frame in tables]
            known = [part for part in given if len(part)]
            if known:
                rows = rows_of_published(pd.concat(known, ignore_index=True), find_device)
                self.calibrated |= self.model.calibrate(rows)
        drawn = [(path, self._drawn(whole)) for path, whole in tables]
        yield from self._each(_operator_part, self.model, drawn)

    def _each(
        self,
        work: Callable[[OpModel, tuple[Path, pd.DataFrame]], PublishedPredictions],
        model: OpModel,
        tables: Sequence[tuple[Path, pd.DataFrame]],
    ) -> Iterator[PublishedPredictions]:
        """Predict tables in pieces, here or on the Ray cluster; in order either way."""
        pieces = [
            (path, table.iloc[start : start + _ROWS].reset_index(drop=True))
            for path, table in tables
            for start in range(0, len(table), _ROWS)
        ]
        if not self.ray:
            for piece in pieces:
                yield work(model, piece)
            return
        found = dict(run_tasks(work, model, pieces, self.ray))
        yield from (found[place] for place in range(len(pieces)))

    def collective_tables(self) -> Iterator[PublishedPredictions]:
        tables = [(p, pd.read_csv(p)) for p in _files(self.folder, COLLECTIVES)]
        own = [(path, frame) for path, frame in tables if set(frame.columns) >= XLA_COLUMNS]
        for path, frame in own:
            yield _judged_pack(path, predict_xla_collectives(frame, path, self.links))
        tables = [(path, frame) for path, frame in tables if not set(frame.columns) >= XLA_COLUMNS]
        known = [frame[_given(frame)] for _, frame in tables if _given(frame).any()]
        if self.calibrate and known:
            rows = pd.concat(known, ignore_index=True)
            self.links = self.links.calibrated(rows, _links)
            self.calibrated["collectives"] = len(rows)
        for path, frame in tables:
            prediction = self.links.predict(frame, _links)
            latency, lo, hi = (prediction[c].to_numpy() for c in ("latency_s", "lo_s", "hi_s"))
            yield _part(path, frame, frame["op"], latency, lo, hi, prediction["scope"])

    def _drawn(self, table: pd.DataFrame) -> pd.DataFrame:
        """The rows to predict: all, or as many as the limit allows."""
        if self.limit is None or len(table) <= self.limit:
            return table
        # A fixed draw, so that two models are compared on the same rows.
        return table.sample(self.limit, random_state=0)

    def products(self) -> Iterator[PublishedPredictions]:
        """Predict tables of matrix products."""
        for path in [p for patterns in (MATMUL, GEMM) for p in _files(self.folder, patterns)]:
            table = read_products(path)
            if not is_products(table.columns):
                # Another table whose name begins alike.
                continue
            yield _judged_pack(path, predict_products(self._drawn(table), path, self.model))

    def convs(self) -> Iterator[PublishedPredictions]:
        """Predict tables of convolutions."""
        for path in _files(self.folder, CONV):
            table = read_table(path)
            if not is_convs(table.columns):
                continue
            yield from self._each(_conv_part, self.model, [(path, self._drawn(table))])

    def powers(self) -> Iterator[PublishedPredictions]:
        """Predict tables of board power, whose rows get watts beside their latency."""
        for path in _files(self.folder, POWER):
            table = self._drawn(read_table(path))
            rows = predict_power(table, path, self.model, shipped_power())
            part = _judged_pack(path, rows)
            part.frame[list(WATTS)] = rows[list(WATTS)].to_numpy()
            part.notes += power_note(rows)
            yield part

    def tiles(self) -> Iterator[PublishedPredictions]:
        """Predict tables of kernels with tile configurations."""
        for path in _files(self.folder, TILES):
            table = read_table(path)
            if not is_tiles(set(table.columns)):
                continue
            rows = predict_tiles(self._drawn(table), path, shipped_tiles())
            part = _judged_pack(path, rows)
            part.notes += rank_note(rows)
            yield part

    def block_tables(self) -> Iterator[PublishedPredictions]:
        """Predict tables of attention and experts, of layers, and of new attention."""
        tables = [
            (path, read_table(path))
            for patterns in BLOCKS
            for path in _files(self.folder, patterns)
        ]
        # Other tables' names may begin alike.
        read = [(path, read_blocks(t, path)) for path, t in tables if is_blocks(t.columns)]
        if not read:
            return
        if self.blocks is None:
            self.blocks = OpModel.load(find_model(BLOCK_MODEL))
        # All tables first, as for operators.
        given = [rows[_given(rows)] for _, rows in read]
        known = pd.concat(given, ignore_index=True)
        if self.calibrate and len(known):
            known["device"] = [find_device(name).name for name in known["device"]]
            self.calibrated |= self.blocks.calibrate(known)
        for path, whole in read:
            yield from self._each(_block_part, self.blocks, [(path, self._drawn(whole))])

    def programs(self) -> Iterator[PublishedPredictions]:
        for path in _files(self.folder, PROGRAMS):
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
            latency, lo, hi = (
                composed[f"{c}_ms"].to_numpy() * 1e-3 for c in ("latency", "lo", "hi")
            )
            scope = pd.Series("composed", index=labels.index, dtype=object)
            if "e2e_ms" in labels:
                labels = labels.assign(latency_us=labels["e2e_ms"] * 1e3)
            yield _part(path, labels, labels["mode"], latency, lo, hi, scope)

    def _op_latency(self, ops: pd.DataFrame) -> pd.DataFrame:
        """Operators as the op tables time them: alone, called from the host."""
        # The graphs were published with NeuSight's tables, whose method (one call between two
        # events, launch included) is what the composition expects.
        rows = rows_of_published(ops.assign(source="neusight"), find_device)
        prediction = self.model.predict(rows)
        return _microseconds(prediction.latency, prediction.lo, prediction.hi)

    def _collective_latency(self, calls: pd.DataFrame) -> pd.DataFrame:
        prediction = self.links.predict(calls, _links)
        return _microseconds(*(prediction[c].to_numpy() for c in ("latency_s", "lo_s", "hi_s")))


def _operator_part(model: OpModel, piece: tuple[Path, pd.DataFrame]) -> PublishedPredictions:
    path, frame = piece
    rows = rows_of_published(frame, find_device)
    found = model.predict(rows)
    scope = pd.Series(found.scope, dtype=object)
    return _part(path, rows, rows["key"], found.latency, found.lo, found.hi, scope)


def _conv_part(model: OpModel, piece: tuple[Path, pd.DataFrame]) -> PublishedPredictions:
    path, table = piece
    return _judged_pack(path, predict_convs(table, path, model))


def _block_part(model: OpModel, piece: tuple[Path, pd.DataFrame]) -> PublishedPredictions:
    path, rows = piece
    return _judged_pack(path, predict_blocks(rows, model))


def _links(name: str) -> Links:
    return Links.from_spec(find_device(name))


def _microseconds(latency: np.ndarray, lo: np.ndarray, hi: np.ndarray) -> pd.DataFrame:
    return pd.DataFrame({"latency_us": latency * 1e6, "lo_us": lo * 1e6, "hi_us": hi * 1e6})


def _files(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """Files of the first pattern that has any, below the folder; the folder itself if a file."""
    if folder.is_file():
        return [folder] if _kind(folder) is patterns else []
    for pattern in patterns:
        files = sorted(folder.rglob(pattern))
        if files:
            return files
    return []


def _kind(path: Path) -> Sequence[str]:
    """The patterns of the tables that a file is one of, by its columns."""
    if path.name in PROGRAMS:
        return PROGRAMS
    columns = set(read_products(path).columns)
    if is_power(path, columns):
        return POWER
    if is_tiles(columns):
        return TILES
    if is_blocks(columns):
        # One file is answered once, whatever it is called.
        return BLOCKS[0]
    if is_products(columns):
        return GEMM if path.suffix == ".parquet" else MATMUL
    if is_convs(columns):
        return CONV
    if columns >= XLA_COLUMNS or {"bytes", "world_size"} <= columns:
        return COLLECTIVES
    return OPERATORS if {"op", "family"} <= columns else ()


def _judged_pack(path: Path, rows: pd.DataFrame) -> PublishedPredictions:
    """Judge the rows of a pack's table that its publishers do not doubt."""
    name = path.name.split(".")[0]
    latency, lo, hi = (rows[c].to_numpy() for c in TIMES)
    part = _part(path, rows, rows["family"], latency, lo, hi, rows["scope"])
    keep = ~rows["suspect"].to_numpy(bool) & (rows["reason"] == "").to_numpy()
    label = np.full(len(rows), np.nan)
    if "latency_us" in rows:
        label = rows["latency_us"].to_numpy(np.float64, na_value=np.nan)
    part.judged = part.judged[keep[label > 0]].reset_index(drop=True)
    part.frame["table"], part.frame["reason"] = name, rows["reason"].to_numpy()
    counts = rows["reason"].value_counts()
    part.notes = [f"{name}: {n} rows not predicted: {why}" for why, n in counts.items() if why]
    doubted = int((rows["suspect"].to_numpy(bool) & (label > 0)).sum())
    if doubted:
        part.notes.append(f"{name}: {doubted} rows that their publisher doubts are not judged")
    return part


def with_source(path: Path, frame: pd.DataFrame) -> pd.DataFrame:
    """Ensure a column ``source``, taken from the first letter of ids where it is missing.

    Raises:
        DatasetError: It is missing, and ids do not tell it.
    """
    if "source" in frame:
        return frame
    ids = frame["id"] if "id" in frame else pd.Series("", index=frame.index)
    source = ids.astype(str).str[:1].map(SOURCES)
    if "id" not in frame or source.isna().any():
        raise DatasetError(
            "column 'source' is missing",
            where=str(path),
            hint="say who measured each row; " + families_told(),
        )
    return frame.assign(source=source)


def _given(frame: pd.DataFrame) -> np.ndarray:
    """Rows that may be learned from."""
    if "split" not in frame or "latency_us" not in frame:
        return np.zeros(len(frame), bool)
    # NaN compares false, so rows without a label are left out as well.
    known = frame["latency_us"].to_numpy(np.float64, na_value=np.nan) > 0
    return np.asarray(frame["split"].astype(str).str.startswith(CALIBRATION) & known)


def _part(
    path: Path,
    frame: pd.DataFrame,
    family: pd.Series,
    latency: np.ndarray,
    lo: np.ndarray,
    hi: np.ndarray,
    scope: pd.Series,
) -> PublishedPredictions:
    """Predictions of one table, in seconds, beside the latencies that it gives."""
    if "id" not in frame:
        raise DatasetError("column 'id' is missing", where=str(path))
    times = _microseconds(latency, lo, hi)
    times.insert(0, "id", frame["id"].astype(str).to_numpy())
    label = np.full(len(frame), np.nan)
    if "latency_us" in frame:
        label = frame["latency_us"].to_numpy(np.float64, na_value=np.nan)
    judged = pd.DataFrame(
        {
            "id": times["id"],
            "table": path.name.split(".")[0],
            "family": family.astype(str).to_numpy(),
            "device": frame["device" if "device" in frame else "platform"].astype(str).to_numpy(),
            "split": frame["split"].astype(str).to_numpy() if "split" in frame else "",
            "scope": scope.to_numpy(),
            # Where there is no label, error and coverage are NaN and False; the filter below drops
            # the rows.
            "error": times["latency_us"] / label - 1,
            "covered": (label >= times["lo_us"]) & (label <= times["hi_us"]),
            "calibration": _given(frame.assign(latency_us=label)),
        }
    )
    return PublishedPredictions(times, judged[label > 0].reset_index(drop=True))
