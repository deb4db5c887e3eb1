"""Detect drift of an operator model on rows of newer libraries, and repair it with a few samples.

The test bets against the coverage of the intervals (Shafer, Journal of the Royal Statistical
Society A 184, 2021; Waudby-Smith and Ramdas, Journal of the Royal Statistical Society B 86, 2024):
a stake grows when rows fall outside their intervals and shrinks otherwise, at odds that are fair if
the coverage holds. The stake then ever exceeds ``1 / a`` with a probability of at most ``a``
(Ville's inequality), so rows can be tested as they arrive, like in a control chart with a known
rate of false alarms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ...common.errors import DatasetError
from ...common.parquet import check_measured, read_table
from ...common.progress import stages, wrote
from ...common.tables_text import in_percent, print_frame
from ...datagen.published.clones import version_numbers
from ...datagen.published.packs import BLOCK_TABLES, kind_of
from ...features.operators import family_keys
from ...features.operators.columns import texts_of
from ...features.operators.query import with_defaults
from ...features.operators.schema import families_hint
from ...models.adapt.active import choose
from ...models.operators import OpModel
from ...models.operators.report import predictions
from ...models.operators.rows import group_draw
from ...models.trust.calibrator import COVERAGE
from ...predict.locate import BLOCK_MODEL, OPERATOR_MODEL, find_model
from ...predict.published.answers import read_blocks
from ...predict.published.tables import with_source
from ..train_operators import described_devices

if TYPE_CHECKING:
    from rich.console import Console

    from ..settings import DriftSettings

#: Columns that define the cells, the groups of rows that are tested together.
CELL = ("backend", "version", "key", "device")
#: Required columns of operator tables.
NEEDED = frozenset(("op", "family", "dtype", "device", "latency_us"))
#: Maximum rows to choose samples from (the cost is quadratic in them), and to test a repair on.
CANDIDATES, JUDGED = 1200, 4000
#: ``result`` of a cell whose coverage is restored.
REPAIRED = "repaired"
#: ``result`` of a cell whose repair is discarded, because it made the other rows worse.
NO_BETTER = "no better"
#: Fraction of rows outside their intervals from which a cell counts as drifted: 5 percentage points
#: above the nominal one, because errors on unseen layers may be slightly larger than on those that
#: the intervals come from. Engineering estimate.
TOLERATED = 1.0 - COVERAGE + 0.05
#: Fractions of the stake that are bet in parallel, since the size of a drift is unknown.
_BETS = np.array((0.02, 0.05, 0.1, 0.2, 0.4, 0.8))


def run_drift(console: Console, settings: DriftSettings) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Test new rows for drift by library, version, family and device, and repair the model.

    Args:
        console: Console to print to.
        settings: The rows, the model, and the number of samples for repairs.

    Returns:
        The results of :func:`staleness` and :func:`repair`, the latter empty if nothing has
        drifted.

    Raises:
        DatasetError: No row has a time, or a family of the model.
        DeviceError: A device is unknown.
        ModelError: There is no such model.
    """
    with stages("reading the rows") as tell:
        return _run(console, settings, tell)


def _run(
    console: Console, settings: DriftSettings, tell: Callable[[str], None]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    described = described_devices(settings.devices)
    rows = read_rows(settings.data)
    name = settings.model
    if name == "default":
        name = BLOCK_MODEL if rows["block"].all() else OPERATOR_MODEL
    tell(f"{len(rows)} rows read; loading the model")
    model = OpModel.load(find_model(name))
    model.described = described
    names = {name: model.spec(str(name)).name for name in rows["device"].unique()}
    rows = rows.assign(device=rows["device"].map(names))
    known = rows["key"].isin(list(model.families))
    for key, count in rows["key"][~known].value_counts().items():
        console.print(f"{count} rows skipped: the model has no family {key}", highlight=False)
    rows = rows[known].reset_index(drop=True)
    if not len(rows):
        hint = "it has: " + ", ".join(sorted(model.families)) + "; " + families_hint()
        raise DatasetError("no row has a family of the model", hint=hint)
    tell("predicting the rows")
    found = staleness(model, rows, settings.false_alarms)
    print_frame(
        console,
        in_percent(found.assign(drift=np.where(found["alarm"] > 0, found["alarm"], "no"))).drop(
            columns="alarm"
        ),
        "new rows, in %; drift: number of groups of rows until the alarm",
    )
    stale = found[found["alarm"] > 0]
    console.print(
        f"{len(stale)} of {len(found)} have drifted; probability of any false alarm: "
        f"{settings.false_alarms:g}",
        highlight=False,
    )
    if len(stale):
        tell("repairing the model")
    repaired = repair(model, rows, stale, settings.samples, settings.seed)
    name = "unchanged"
    if len(repaired):
        title = f"repaired with {settings.samples} samples each, tested on the others, in %"
        print_frame(console, in_percent(repaired), title)
        name = "repaired" if (repaired["result"] == REPAIRED).all() else "adapted"
        if (repaired["result"] == NO_BETTER).all():
            name = "unchanged"
    for line in _not_repaired(stale, repaired, settings.samples):
        console.print(line, highlight=False)
    if settings.out is not None:
        tell("saving the model")
        model.save(settings.out)
        settings.save(settings.out)
        wrote(settings.out, f"{name} model; predict with it: --model {settings.out}")
    elif name == "unchanged" and len(repaired):
        console.print("the model is unchanged: the repairs made the other rows worse")
    elif len(repaired):
        console.print(f"the {name} model is not saved: give --out to save it", highlight=False)
    return found, repaired


def _not_repaired(stale: pd.DataFrame, repaired: pd.DataFrame, samples: int) -> Iterator[str]:
    """Explain for each cell that is not repaired why, and what may help."""
    results = {tuple(row[c] for c in CELL): row for _, row in repaired.iterrows()}
    for _, cell in stale.iterrows():
        what = " ".join(filter(None, (str(cell[c]) for c in CELL)))
        found = results.get(tuple(cell[c] for c in CELL))
        if found is None:
            why = "it has no more rows than --samples, or a newer version has drifted"
            yield f"{what}: not repaired: {why}"
        elif found["result"] != REPAIRED:
            yield (
                f"{what}: {found['result']}: the coverage is {found['covered_after']:.0%}, below "
                f"the tolerated {1.0 - TOLERATED:.0%}; give more than {samples} --samples, or "
                "train on the rows"
            )


def read_rows(data: Path) -> pd.DataFrame:
    """Read the measured operators of a table, or of all tables in a folder.

    Returns:
        Columns of :func:`~opcast.models.operators.rows_of_published`, with ``backend`` and
        ``version`` (empty if unknown), ``block`` for families of blocks, and ``device`` as named in
        the tables.

    Raises:
        DatasetError: There is no such table, or no row with a time.
    """
    if not data.exists():
        raise DatasetError("no such folder or table", where=str(data))
    paths = [data] if data.is_file() else sorted(p for p in data.rglob("*") if _is_table(p))
    parts = [part for path in paths for part in _read(path)]
    if not parts:
        wanted = "expected tables with source, " + ", ".join(sorted(NEEDED))
        wanted += "; " + families_hint()
        raise DatasetError("no rows of operators with a time", where=str(data), hint=wanted)
    rows = pd.concat(parts, ignore_index=True)
    for column in ("backend", "version"):
        rows[column] = texts_of(rows[column]).astype(str) if column in rows else ""
    return rows


def _is_table(path: Path) -> bool:
    return path.name.endswith((".parquet", ".csv", ".csv.gz"))


def _read(path: Path) -> Iterator[pd.DataFrame]:
    table = read_table(path)
    if "latency_us" not in table:
        return
    block = kind_of(table.columns) in BLOCK_TABLES
    if not block and not set(table.columns) >= NEEDED:
        return
    check_measured(table, ["latency_us"], str(path))
    table = table.dropna(subset=["latency_us"]).reset_index(drop=True)
    if not len(table):
        return
    if block:
        yield read_blocks(table, path).assign(version=table.get("version", ""), block=True)
        return
    table = with_source(path, table)
    keys = family_keys(table)
    yield with_defaults(table.assign(key=keys, block=False), keys)


def staleness(model: OpModel, rows: pd.DataFrame, false_alarms: float) -> pd.DataFrame:
    """Test the coverage of the intervals for known versions on new measurements.

    Args:
        model: The model.
        rows: From :func:`read_rows`, in the order of measurement.
        false_alarms: Probability of at least one false alarm among all cells.

    Returns:
        One row per cell (:data:`CELL`): ``n``, ``groups``, ``mape``, ``bias`` (median relative
        error), ``coverage`` of the intervals for known versions, ``unseen`` (coverage of the
        intervals for an unknown version) and ``alarm`` (number of groups until the alarm, 0 if
        there was none).
    """
    # Without the version, so that the intervals are those for known versions.
    plain = predictions(model, rows.drop(columns="version"))
    aged = predictions(model, rows)
    plain = plain.assign(version=rows["version"], inside=_inside(aged))
    groups = pd.Series(0.0, index=rows.index)
    for key, own in rows.groupby("key"):
        groups[own.index] = group_draw(own, str(key))
    cells = list(plain.groupby(list(CELL), sort=True, dropna=False))
    records = []
    for name, own in cells:
        stakes = evidence(
            own["measured_us"].to_numpy(),
            own["lo_us"].to_numpy(),
            own["hi_us"].to_numpy(),
            groups[own.index].to_numpy(),
        )
        error = own["predicted_us"] / own["measured_us"] - 1
        records.append(
            {
                **dict(zip(CELL, name, strict=True)),
                "n": len(own),
                "groups": len(stakes),
                "mape": float(error.abs().mean()),
                "bias": float(error.median()),
                "coverage": float(_inside(own).mean()),
                "unseen": float(own["inside"].mean()),
                # Bonferroni correction over the cells.
                "alarm": alarm_after(stakes, false_alarms / len(cells)),
            }
        )
    return pd.DataFrame(records)


def repair(
    model: OpModel, rows: pd.DataFrame, stale: pd.DataFrame, samples: int, seed: int
) -> pd.DataFrame:
    """Adapt a model in place to drifted cells; of several versions, to the newest.

    The samples are chosen for their information about the other rows, without using their times.

    Args:
        model: The model.
        rows: From :func:`read_rows`.
        stale: Rows of :func:`staleness` to repair.
        samples: Number of samples per cell.
        seed: Random seed for drawing candidates.

    Returns:
        One row for each cell with more rows than ``samples``: :data:`CELL`, the number ``n`` of
        held-out rows, their error and coverage before and after, and ``result``:
        :data:`REPAIRED` if the coverage is tolerable, ``improved`` if neither error nor coverage is
        worse than before, else :data:`NO_BETTER`.
    """
    records = []
    rng = np.random.default_rng(seed)
    for _, versions in stale.groupby(["backend", "key", "device"], sort=True):
        newest = max(versions["version"], key=lambda text: version_numbers(str(text)))
        cell = versions[versions["version"] == newest].iloc[0]
        own = rows[(rows[list(CELL)] == cell[list(CELL)]).all(axis=1)].reset_index(drop=True)
        if len(own) <= samples:
            continue
        family, device = model.families[str(cell["key"])], str(cell["device"])
        spec = {device: model.spec(device)}
        pool = rng.permutation(len(own))[:CANDIDATES]
        sites, _, _ = family.site_errors(own.iloc[pool], spec)
        chosen = pool[choose(sites, family.fitted.errors.params, samples)[0]]
        rest = np.setdiff1d(np.arange(len(own)), chosen)
        rest = own.iloc[rng.permutation(rest)[:JUDGED]].reset_index(drop=True)
        before = predictions(model, rest.drop(columns="version"))
        taken = own.iloc[chosen]
        learned = family.fitted.errors
        corrections, known = dict(learned.corrections), model.versions
        family.calibrate(device, taken, spec, library=str(cell["backend"]))
        model.devices[device] = spec[device]
        model.learn_versions(taken, device, str(cell["key"]))
        after = predictions(model, rest)
        errors, covered = (
            [float(of(table)) for table in (before, after)]
            for of in (_error, lambda table: _inside(table).mean())
        )
        neither_worse = covered[1] >= covered[0] and errors[1] <= errors[0]
        result = (
            REPAIRED
            if covered[1] >= 1.0 - TOLERATED
            else "improved"
            if neither_worse
            else NO_BETTER
        )
        if result == NO_BETTER:
            learned.corrections, model.versions = corrections, known
        records.append(
            {
                **{c: cell[c] for c in CELL},
                "n": len(rest),
                "error_before": errors[0],
                "error_after": errors[1],
                "covered_before": covered[0],
                "covered_after": covered[1],
                "result": result,
            }
        )
    return pd.DataFrame(records)


def _inside(table: pd.DataFrame) -> pd.Series:
    return (table["measured_us"] >= table["lo_us"]) & (table["measured_us"] <= table["hi_us"])


def _error(table: pd.DataFrame) -> float:
    return float((table["predicted_us"] / table["measured_us"] - 1).abs().mean())


def evidence(
    measured: np.ndarray, lo: np.ndarray, hi: np.ndarray, groups: np.ndarray
) -> np.ndarray:
    """Compute the stake after each group of rows, starting from 1: evidence against the intervals.

    Args:
        measured: Measurements in the order in which they were made, shape ``(n,)``.
        lo: Lower bounds of 90 % intervals.
        hi: Upper bounds.
        groups: Group of each row. Rows with correlated errors, such as those of a layer, share a
            group, which counts once: the mean of fair bets is fair whatever their dependence.

    Returns:
        Mean stake over all bets (too slow, too fast, either) after each group, in the order in
        which groups first appear; at least ``1 / a`` is an alarm at rate ``a``.
    """
    names, first, code = np.unique(groups.astype(str), return_index=True, return_inverse=True)
    count = np.bincount(code, minlength=len(names))
    above, below = measured > hi, measured < lo
    order = np.argsort(first)
    logs = []
    # Each side has half of the tolerated rate.
    for outside, share in ((above, 0.5), (below, 0.5), (above | below, 1.0)):
        rate = np.bincount(code, outside, minlength=len(names))[order] / count[order]
        odds = rate / (share * TOLERATED) - 1.0
        logs.append(np.cumsum(np.log1p(np.outer(odds, _BETS)), axis=0))
    total = np.concatenate(logs, axis=1)
    top = total.max(axis=1, keepdims=True)
    # The mean in log space, to avoid overflow.
    mean = top[:, 0] + np.log(np.exp(total - top).mean(axis=1))
    return np.asarray(np.exp(np.minimum(mean, 700.0)))


def alarm_after(stakes: np.ndarray, rate: float) -> int:
    """Number of groups until the stakes raise an alarm; 0 if they never do.

    Args:
        stakes: From :func:`evidence`.
        rate: Probability of a false alarm.
    """
    over = np.flatnonzero(stakes >= 1.0 / rate)
    return int(over[0]) + 1 if len(over) else 0
