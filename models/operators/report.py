"""Errors of operator models: tables of them, and the parts of a report.

A part is one fit, the rows it is judged on, and its stored result. It draws its rows by a seed that
does not depend on the estimator, so that all estimators learn from the same rows and are judged on
the same ones. The predictions of a part are a file of its own; a report that was stopped resumes
with the missing ones.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from ...common.errors import DatasetError
from ...common.parquet import read_table, write_table
from ...common.types import JsonMapping
from ...features.devices.device import DeviceSpec
from ...features.operators.features import ops_schema_hash
from ...features.operators.schema import faulty
from .model import MIN_ROWS, OpModel, default_settings

#: Columns by which figures are grouped.
BY = ("split", "key", "dtype", "device")


def predictions(model: OpModel, rows: pd.DataFrame) -> pd.DataFrame:
    """Tabulate predictions beside measurements.

    Args:
        model: The model.
        rows: As :func:`~opcast.models.operators.rows_of_dataset` gives them; families that the
            model does not know are left out.

    Returns:
        ``id``, ``split``, ``key``, ``dtype``, ``device``, ``backend``, ``measured_us``,
        ``predicted_us``, ``lo_us``, ``hi_us``, ``scope`` and ``in_domain``.
    """
    known = rows[rows["key"].isin(list(model.families))].reset_index(drop=True)
    prediction = model.predict(known)
    columns = [c for c in ("id", "split", "key", "dtype", "device", "backend") if c in known]
    return known[columns].assign(
        measured_us=known["latency_us"].to_numpy(np.float64),
        predicted_us=prediction.latency * 1e6,
        lo_us=prediction.lo * 1e6,
        hi_us=prediction.hi * 1e6,
        scope=prediction.scope,
        in_domain=prediction.in_domain,
    )


def summary(rows: pd.DataFrame, by: Sequence[str] = BY) -> pd.DataFrame:
    """Figures of the rows of :func:`predictions`, one row a group.

    Returns:
        ``by``, ``n``, ``mape``, ``median_ape``, ``bias`` (median relative error), ``coverage``,
        ``width_ratio`` (median of ``hi / lo``), share ``in_domain``, and ``scope``.
    """
    measured, predicted = rows["measured_us"], rows["predicted_us"]
    table = rows.assign(
        error=predicted / measured - 1,
        ape=(predicted / measured - 1).abs(),
        covered=(measured >= rows["lo_us"]) & (measured <= rows["hi_us"]),
        width=rows["hi_us"] / rows["lo_us"],
    )
    return (
        table.groupby(list(by), sort=True)
        .agg(
            n=("ape", "size"),
            mape=("ape", "mean"),
            median_ape=("ape", "median"),
            bias=("error", "median"),
            coverage=("covered", "mean"),
            width_ratio=("width", "median"),
            in_domain=("in_domain", "mean"),
            scope=("scope", only_or_mixed),
        )
        .reset_index()
    )


def side_by_side(
    table: pd.DataFrame, by: Sequence[str], figure: str, across: str = "estimator"
) -> pd.DataFrame:
    """One figure of :func:`summary`, a column for each estimator.

    Args:
        table: Predictions with the columns of ``by`` and ``across``.
        by: Columns whose values make a row.
        figure: ``mape``, ``median_ape``, ``coverage`` …
        across: Column whose values become columns, in the order in which values first appear.

    Returns:
        ``by``, ``n`` (of the column with most rows) and the columns, nan where a group has no rows.
    """
    figures = summary(table, (*by, across))
    wide = figures.pivot(index=list(by), columns=across, values=figure)
    counts = figures.groupby(list(by))["n"].max().reindex(wide.index)
    wide = wide[list(dict.fromkeys(table[across]))]
    wide.columns = pd.Index([str(name) for name in wide.columns])
    wide.insert(0, "n", counts)
    return wide.reset_index()


def only_or_mixed(values: pd.Series) -> str:
    """The value that all rows have, or ``mixed``."""
    return str(values.iloc[0]) if values.nunique() == 1 else "mixed"


def flat(metrics: pd.DataFrame) -> dict[str, float]:
    """Figures by name, ``split/family/dtype/device/figure``, for tracking."""
    figures = {}
    for row in metrics.to_dict("records"):
        prefix = "/".join(str(row[c]) for c in BY if c in row)
        for name in ("mape", "median_ape", "coverage"):
            figures[f"{prefix}/{name}"] = float(row[name])
    return figures


def settings_of(model: OpModel) -> dict[str, object]:
    """Parameters with which a run is tracked: all of the model's provenance but its metrics."""
    return {k: v for k, v in model.info.items() if k != "metrics"}


def metrics_of(manifest: JsonMapping) -> list[JsonMapping]:
    """Metrics in a manifest: of each family, those that came with it when it was last joined."""
    found: list[JsonMapping] = []
    later: set[str] = set()
    for part in (*reversed(manifest.get("added", ())), manifest):
        found = [own for own in part.get("metrics", ()) if own["key"] not in later] + found
        later.update(part.get("families", ()))
    return found


def left_out_table(model: OpModel) -> pd.DataFrame:
    """Errors on devices that were left out of training in turn, as measured while it was trained.

    Returns:
        ``key``, ``left_out`` (devices of one chip together), ``n``, ``mape``, ``median_ape``,
        ``coverage`` and ``width_ratio`` of the interval by the other chips.
    """
    records = [
        {
            "key": key,
            "left_out": devices,
            "n": int(errors["rows"]),
            "mape": errors["mape"],
            "median_ape": errors["median"],
            # Models of before do not say how far the other chips' ends hold.
            "coverage": errors.get("coverage", np.nan),
            "width_ratio": errors.get("width", np.nan),
        }
        for key, family in sorted(model.families.items())
        for devices, errors in family.left_out.items()
    ]
    return pd.DataFrame(records)


#: Split that is learned from; rows of all others are judged.
TRAINING = "train"
#: Raised when what a part means changes: files of earlier versions are then made anew.
VERSION = 1


@dataclass(frozen=True)
class Part:
    """One fit of one family by one estimator.

    Attributes:
        study: Study that it belongs to.
        estimator: Name of the estimator.
        key: Family.
        rows: Most rows to learn from, and most rows of a split to be judged on.
        left_out: Devices that are not learned from, and judged alone; none judges all devices.
        samples: Numbers of samples of each left-out device, drawn from its training rows, with
            which the model is adapted before it is judged again.
        seed: Seed of draws and regressors.
        next_version: Whether to learn from rows that are marked ``earlier`` alone, and to be judged
            on the same libraries' others.
    """

    study: str
    estimator: str
    key: str
    rows: int
    left_out: tuple[str, ...] = ()
    samples: tuple[int, ...] = (0,)
    seed: int = 0
    next_version: bool = False

    @property
    def title(self) -> str:
        """One line for a person."""
        without = f" without {' and '.join(self.left_out)}" if self.left_out else ""
        return f"{self.study}: {self.estimator}, {self.key}{without}"


@dataclass(frozen=True)
class Draw:
    """Rows of a part.

    Attributes:
        learned: Rows to learn from.
        pool: Rows of left-out devices to draw samples from.
        judged: Rows to judge on.
    """

    learned: pd.DataFrame
    pool: pd.DataFrame
    judged: pd.DataFrame


def draw(part: Part, rows: pd.DataFrame) -> Draw:
    """The rows of a part.

    Rows whose labels do not describe the device are neither learned from nor used to adapt, but
    they are judged: leaving them out would flatter the figures.

    Args:
        part: The part.
        rows: As :func:`~opcast.models.operators.rows_of_published` gives them, with ``split``.
    """
    own = rows[rows["key"] == part.key]
    earlier = np.zeros(len(own), bool)
    if "earlier" in own:
        earlier = own["earlier"].to_numpy(bool)
    if part.next_version:
        return _next_version(part, own, earlier)
    own = own[~earlier]
    outside = own["device"].isin(part.left_out)
    training = own["split"] == TRAINING
    good = ~faulty(own, "wrong")
    learned = _capped(own[training & ~outside & good], part.rows, part.seed)
    if not part.left_out:
        judged = own[~training]
        pool = own.iloc[:0]
    else:
        # A device without training rows gives half of its others for samples.
        spare = training | _half(own, part.seed)
        pool, judged = own[outside & spare & good], own[outside & ~spare]
    sampled = _of_splits(judged, part)
    return Draw(*(f.reset_index(drop=True) for f in (learned, pool, sampled)))


def _next_version(part: Part, rows: pd.DataFrame, earlier: np.ndarray) -> Draw:
    """Learn from earlier versions, and judge on the next ones of the same libraries on a device."""
    before, after = rows[earlier], rows[~earlier]
    learned = before[(before["split"] == TRAINING).to_numpy() & ~faulty(before, "wrong")]
    both = ["backend", "device"]
    judged = after[pd.MultiIndex.from_frame(after[both]).isin(before[both].apply(tuple, axis=1))]
    learned, judged = _capped(learned, part.rows, part.seed), _of_splits(judged, part)
    frames = (learned, before.iloc[:0], judged)
    return Draw(*(frame.reset_index(drop=True) for frame in frames))


def _of_splits(judged: pd.DataFrame, part: Part) -> pd.DataFrame:
    # The cap holds for each split, so that a small one is not crowded out.
    parts = [_capped(p, part.rows, part.seed) for _, p in judged.groupby("split", sort=True)]
    return pd.concat(parts) if parts else judged


def _half(rows: pd.DataFrame, seed: int) -> np.ndarray:
    """Mask of half of the rows of devices without training rows; the other half is judged."""
    trained = set(rows.loc[rows["split"] == TRAINING, "device"])
    drawn = np.random.default_rng(seed).random(len(rows)) < 0.5
    return np.asarray(drawn & ~rows["device"].isin(trained))


def _capped(rows: pd.DataFrame, count: int, seed: int) -> pd.DataFrame:
    return rows if len(rows) <= count else rows.sample(count, random_state=seed)


def possible(drawn: Draw) -> bool:
    """Whether there is enough to learn from and something to judge."""
    return len(drawn.learned) >= MIN_ROWS and len(drawn.judged) > 0


def judge(
    part: Part, drawn: Draw, devices: Mapping[str, DeviceSpec], n_jobs: int = 1
) -> pd.DataFrame:
    """Fit a part and predict the rows that it is judged on.

    Args:
        part: The part.
        drawn: Its rows.
        devices: Descriptions by the values of ``device``, of left-out devices, too.
        n_jobs: Threads.

    Returns:
        Columns of :func:`~opcast.models.operators.report.predictions`, ``study``, ``estimator``,
        ``left_out``, ``samples`` (of each left-out device) and ``fit_s``.

    Raises:
        ModelError: The estimator is unknown, not installed or does not learn from a table.
    """
    start = time.perf_counter()
    settings = default_settings(part.estimator, n_jobs, part.seed, part.rows)
    model = OpModel().fit(drawn.learned, devices, settings)
    seconds = time.perf_counter() - start
    # Left-out devices need descriptions, too; those that were fitted to keep their own.
    model.devices = {**devices, **model.devices}
    tables = []
    for count in part.samples:
        judged = drawn.judged
        if count:
            measured = _samples(drawn.pool, count, part.seed)
            model.calibrate(measured)
            judged = judged[judged["device"].isin(measured["device"])]
        if len(judged):
            tables.append(predictions(model, judged).assign(samples=count))
    return pd.concat(tables, ignore_index=True).assign(
        study=part.study, estimator=part.estimator, left_out="+".join(part.left_out), fit_s=seconds
    )


def _samples(pool: pd.DataFrame, count: int, seed: int) -> pd.DataFrame:
    """``count`` random rows of each device that has as many."""
    own = [p.sample(count, random_state=seed) for _, p in pool.groupby("device") if len(p) >= count]
    return pd.concat(own, ignore_index=True) if own else pool.iloc[:0]


@dataclass(frozen=True)
class PartStore:
    """A folder with the predictions of parts, one file a part.

    Attributes:
        folder: Made when the first part is kept.
    """

    folder: Path

    def path(self, part: Part, drawn: Draw) -> Path:
        """File of a part; named by its settings, its rows and the schema of its features."""
        known = f"{VERSION}|{sorted(asdict(part).items())}|{ops_schema_hash(part.key)}"
        # Labels are in the digest: a corrected table makes its parts anew.
        digest = hashlib.sha256(known.encode())
        for table in (drawn.learned, drawn.pool, drawn.judged):
            labels = table[["id", "latency_us", "device"]].astype({"id": str})
            digest.update(pd.util.hash_pandas_object(labels, index=False).to_numpy().tobytes())
        name = f"{part.study}-{part.key.replace('/', '-')}-{part.estimator}"
        return self.folder / f"{name}-{digest.hexdigest()[:12]}.parquet"

    def read(self, path: Path) -> pd.DataFrame | None:
        """Read the predictions of a part; ``None`` if the file does not exist.

        Raises:
            DatasetError: The file is damaged.
        """
        if not path.is_file():
            return None
        try:
            return read_table(path)
        except DatasetError as error:
            raise DatasetError(error.what, where=error.where, hint="delete it") from None

    def keep(self, path: Path, table: pd.DataFrame) -> None:
        """Write a part's predictions through a temporary file and a rename."""
        write_table(table, path)
