"""Error tables of operator models, and the parts of an accuracy report.

A part is one fit, its test rows and its stored result. Its rows are drawn with a seed that does not
depend on the estimator, so that all estimators use the same training and test rows. The predictions
of a part are stored in a separate file; an interrupted report resumes with the missing ones.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from ...common.types import JsonMapping
from ...features.devices.device import DeviceSpec
from ...features.operators.features import ops_schema_hash
from ...features.operators.schema import faulty
from .model import MIN_ROWS, OpModel, default_settings

#: Columns that figures are grouped by.
BY = ("split", "key", "dtype", "device")
#: Split to learn from; rows of all other splits are tested.
TRAINING = "train"
#: Incremented when the definition of a part changes: files of earlier versions are then recomputed.
VERSION = 1


def predictions(model: OpModel, rows: pd.DataFrame) -> pd.DataFrame:
    """Tabulate predictions beside measurements.

    Args:
        model: The model.
        rows: Rows as of :func:`~opcast.models.operators.rows_of_dataset`; families outside the
            model are left out.

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
    """Figures of the rows of :func:`predictions`, one row per group.

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
    """One figure of :func:`summary`, with a column per estimator.

    Args:
        table: Predictions with the columns of ``by`` and ``across``.
        by: Columns that identify a row.
        figure: ``mape``, ``median_ape``, ``coverage`` …
        across: Column whose values become columns, in the order in which values first appear.

    Returns:
        ``by``, ``n`` (of the column with most rows) and the columns; NaN where a group is empty.
    """
    figures = summary(table, (*by, across))
    wide = figures.pivot(index=list(by), columns=across, values=figure)
    counts = figures.groupby(list(by))["n"].max().reindex(wide.index)
    wide = wide[list(dict.fromkeys(table[across]))]
    wide.columns = pd.Index([str(name) for name in wide.columns])
    wide.insert(0, "n", counts)
    return wide.reset_index()


def only_or_mixed(values: pd.Series) -> str:
    """The common value of all rows, or ``mixed``."""
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
    """Parameters to track with a run: the model's provenance without metrics."""
    return {k: v for k, v in model.info.items() if k != "metrics"}


def metrics_of(manifest: JsonMapping) -> list[JsonMapping]:
    """Metrics in a manifest; for each family those of the last merge that included it."""
    found: list[JsonMapping] = []
    later: set[str] = set()
    for part in (*reversed(manifest.get("added", ())), manifest):
        found = [own for own in part.get("metrics", ()) if own["key"] not in later] + found
        later.update(part.get("families", ()))
    return found


def left_out_table(model: OpModel) -> pd.DataFrame:
    """Errors on devices held out in turn, as measured during training.

    Returns:
        ``key``, ``left_out`` (devices of one chip together), ``n``, ``mape``, ``median_ape``,
        ``coverage`` and ``width_ratio`` of the interval calibrated on the other chips.
    """
    records = [
        {
            "key": key,
            "left_out": devices,
            "n": int(errors["rows"]),
            "mape": errors["mape"],
            "median_ape": errors["median"],
            # Older models lack the coverage by bounds from the other chips.
            "coverage": errors.get("coverage", np.nan),
            "width_ratio": errors.get("width", np.nan),
        }
        for key, family in sorted(model.families.items())
        for devices, errors in family.left_out.items()
    ]
    return pd.DataFrame(records)


@dataclass(frozen=True)
class Part:
    """One fit of one family by one estimator.

    Attributes:
        study: Name of the study it belongs to.
        estimator: Name of the estimator.
        key: Family.
        rows: Most training rows, and most test rows of a split.
        left_out: Devices to leave out of training and to test on; if empty, all devices are tested.
        samples: Numbers of samples of each left-out device, drawn from its training rows, that the
            model is adapted with before further tests.
        seed: Seed of draws and regressors.
        next_version: Whether to learn only from rows marked ``earlier``, and to test on other rows
            of the same libraries.
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
        """Title for progress messages."""
        without = f" without {' and '.join(self.left_out)}" if self.left_out else ""
        return f"{self.study}: {self.estimator}, {self.key}{without}"


@dataclass(frozen=True)
class Draw:
    """Rows of a part.

    Attributes:
        learned: Training rows.
        pool: Rows of left-out devices to draw samples from.
        judged: Test rows.
    """

    learned: pd.DataFrame
    pool: pd.DataFrame
    judged: pd.DataFrame


def draw(part: Part, rows: pd.DataFrame) -> Draw:
    """Draw the rows of a part.

    Rows whose labels do not describe the device are not used for training or adaptation, but they
    are tested: leaving them out would flatter the figures.

    Args:
        part: The part.
        rows: Rows as of :func:`~opcast.models.operators.rows_of_published`, with ``split``.
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
        # A device without training rows uses half of its other rows as the pool.
        spare = training | _half(own, part.seed)
        pool, judged = own[outside & spare & good], own[outside & ~spare]
    sampled = _of_splits(judged, part)
    return Draw(*(f.reset_index(drop=True) for f in (learned, pool, sampled)))


def _next_version(part: Part, rows: pd.DataFrame, earlier: np.ndarray) -> Draw:
    """Learn from earlier versions; test on the next ones of the same libraries and devices."""
    before, after = rows[earlier], rows[~earlier]
    learned = before[(before["split"] == TRAINING).to_numpy() & ~faulty(before, "wrong")]
    both = ["backend", "device"]
    judged = after[pd.MultiIndex.from_frame(after[both]).isin(before[both].apply(tuple, axis=1))]
    learned, judged = _capped(learned, part.rows, part.seed), _of_splits(judged, part)
    frames = (learned, before.iloc[:0], judged)
    return Draw(*(frame.reset_index(drop=True) for frame in frames))


def _of_splits(judged: pd.DataFrame, part: Part) -> pd.DataFrame:
    # The cap applies per split, so that a small split is not crowded out.
    parts = [_capped(p, part.rows, part.seed) for _, p in judged.groupby("split", sort=True)]
    return pd.concat(parts) if parts else judged


def _half(rows: pd.DataFrame, seed: int) -> np.ndarray:
    """Mask of half of the rows of devices without training rows; the other half is tested."""
    trained = set(rows.loc[rows["split"] == TRAINING, "device"])
    drawn = np.random.default_rng(seed).random(len(rows)) < 0.5
    return np.asarray(drawn & ~rows["device"].isin(trained))


def _capped(rows: pd.DataFrame, count: int, seed: int) -> pd.DataFrame:
    return rows if len(rows) <= count else rows.sample(count, random_state=seed)


def possible(drawn: Draw) -> bool:
    """Whether there are enough training rows and any test rows."""
    return len(drawn.learned) >= MIN_ROWS and len(drawn.judged) > 0


def judge(
    part: Part, drawn: Draw, devices: Mapping[str, DeviceSpec], n_jobs: int = 1
) -> pd.DataFrame:
    """Fit a part and predict its test rows.

    Args:
        part: The part.
        drawn: Its rows.
        devices: Descriptions by the values of ``device``, including left-out devices.
        n_jobs: Threads.

    Returns:
        Columns of :func:`predictions`, ``study``, ``estimator``, ``left_out``, ``samples`` (of each
        left-out device) and ``fit_s``.

    Raises:
        ModelError: The estimator is unknown, not installed or does not learn from a table.
    """
    start = time.perf_counter()
    settings = default_settings(part.estimator, n_jobs, part.seed, part.rows)
    model = OpModel().fit(drawn.learned, devices, settings)
    seconds = time.perf_counter() - start
    # Add descriptions of left-out devices; those of fitted devices are kept.
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
    """``count`` random rows of each device that has at least as many."""
    own = [p.sample(count, random_state=seed) for _, p in pool.groupby("device") if len(p) >= count]
    return pd.concat(own, ignore_index=True) if own else pool.iloc[:0]


def kept_path(folder: Path, part: Part, drawn: Draw) -> Path:
    """File of a part's predictions, named by its settings, rows and the schema of its features."""
    known = f"{VERSION}|{sorted(asdict(part).items())}|{ops_schema_hash(part.key)}"
    # The digest includes labels: a corrected table recomputes its parts.
    digest = hashlib.sha256(known.encode())
    for table in (drawn.learned, drawn.pool, drawn.judged):
        labels = table[["id", "latency_us", "device"]].astype({"id": str})
        digest.update(pd.util.hash_pandas_object(labels, index=False).to_numpy().tobytes())
    name = f"{part.study}-{part.key.replace('/', '-')}-{part.estimator}"
    return folder / f"{name}-{digest.hexdigest()[:12]}.parquet"
