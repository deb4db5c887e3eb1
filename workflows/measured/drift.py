"""Judges how stale an operator model is on rows of newer libraries, and repairs it with a few.

The test is a game against the intervals' promise (Shafer, Journal of the Royal Statistical Society
A 184, 2021; Waudby-Smith and Ramdas, Journal of the Royal Statistical Society B 86, 2024): a stake
grows when rows fall outside their intervals and shrinks when they do not, at odds that are fair if
the promise holds. It then exceeds ``1 / a`` at any time with a probability of at most ``a``
(Ville's inequality), so that rows may be judged as they come in, like a control chart with a known
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
from ...features.operators.schema import families_told
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

#: What is judged together.
CELL = ("backend", "version", "key", "device")
#: Columns of operator tables that are judged.
NEEDED = frozenset(("op", "family", "dtype", "device", "latency_us"))
#: Most rows that samples are chosen among, and most that a repair is judged on: a choice costs the
#: square of the former.
CANDIDATES, JUDGED = 1200, 4000
#: ``result`` of a cell whose intervals hold again.
REPAIRED = "repaired"
#: ``result`` of a cell that is left as it was, since what was learned made its other rows worse.
NO_BETTER = "no better"


def run_drift(console: Console, settings: DriftSettings) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Judge new rows by library, version, family and device; repair what has drifted.

    Args:
        console: Console to print to.
        settings: The rows, the model, and with how many samples it is repaired.

    Returns:
        Staleness, and repairs (empty if nothing has drifted); see :func:`staleness` and
        :func:`repair`.

    Raises:
        DatasetError: There are no rows with a time, or of no family that the model has.
        DeviceError: A device is neither described, nor the model's, nor in the catalogue.
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
        console.print(f"{count} rows left out: the model has no operators {key}", highlight=False)
    rows = rows[known].reset_index(drop=True)
    if not len(rows):
        hint = "it has: " + ", ".join(sorted(model.families)) + "; " + families_told()
        raise DatasetError("no row has a family that the model knows", hint=hint)
    tell("predicting the rows")
    found = staleness(model, rows, settings.false_alarms)
    print_frame(
        console,
        in_percent(found.assign(drift=np.where(found["alarm"] > 0, found["alarm"], "no"))).drop(
            columns="alarm"
        ),
        "new rows, in %; drift: groups of rows after which the alarm rose",
    )
    stale = found[found["alarm"] > 0]
    told = f"{len(stale)} of {len(found)} have drifted"
    console.print(
        f"{told}; chance of one or more false alarms: {settings.false_alarms:g}", highlight=False
    )
    if len(stale):
        tell("repairing what has drifted")
    repaired = repair(model, rows, stale, settings.samples, settings.seed)
    name = "unchanged"
    if len(repaired):
        title = f"learned {settings.samples} samples of each, others judged, in %"
        print_frame(console, in_percent(repaired), title)
        name = "repaired" if (repaired["result"] == REPAIRED).all() else "adapted"
        if (repaired["result"] == NO_BETTER).all():
            name = "unchanged"
    for told in _not_repaired(stale, repaired, settings.samples):
        console.print(told, highlight=False)
    if settings.out is not None:
        tell("saving the model")
        model.save(settings.out)
        settings.save(settings.out)
        wrote(settings.out, f"{name} model; predict with it: --model {settings.out}")
    elif name == "unchanged" and len(repaired):
        console.print("the model stays as it is: what was learned made its other rows worse")
    elif len(repaired):
        console.print(f"the {name} model is not kept: give --out to save it", highlight=False)
    return found, repaired


def _not_repaired(stale: pd.DataFrame, repaired: pd.DataFrame, samples: int) -> Iterator[str]:
    """Explain for each cell whose intervals still do not hold why, and what may help."""
    results = {tuple(row[c] for c in CELL): row for _, row in repaired.iterrows()}
    for _, cell in stale.iterrows():
        what = " ".join(filter(None, (str(cell[c]) for c in CELL)))
        found = results.get(tuple(cell[c] for c in CELL))
        if found is None:
            why = "no more rows than --samples, or a newer version has drifted"
            yield f"{what}: not repaired: {why}"
        elif found["result"] != REPAIRED:
            yield (
                f"{what}: {found['result']}: {found['covered_after']:.0%} of its rows are covered, "
                f"and below {1.0 - TOLERATED:.0%} they count as drifted; give more than {samples} "
                "--samples, or train on them"
            )


def read_rows(data: Path) -> pd.DataFrame:
    """Rows of operators with a time, of a table or of all tables of a folder.

    Returns:
        Columns as :func:`~opcast.models.operators.rows_of_published` gives them, with ``backend``
        and ``version`` (empty where unknown), and ``block`` for families of blocks;
        ``device`` as the tables name it.

    Raises:
        DatasetError: There is no such table, or no row with a time.
    """
    if not data.exists():
        raise DatasetError("no such folder or table", where=str(data))
    paths = [data] if data.is_file() else sorted(p for p in data.rglob("*") if _is_table(p))
    parts = [part for path in paths for part in _read(path)]
    if not parts:
        wanted = "expected tables with source, " + ", ".join(sorted(NEEDED))
        wanted += "; " + families_told()
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
    """Compare what was measured with what intervals of the known versions promise.

    Args:
        model: The model.
        rows: From :func:`read_rows`, in the order in which they were measured.
        false_alarms: Probability of one or more false alarms among all cells together.

    Returns:
        One row for each of :data:`CELL`: ``n``, ``groups``, ``mape``, ``bias`` (median of the
        relative error), ``coverage`` of the intervals of known versions, ``unseen`` (coverage of
        the intervals that the model gives to an unknown version) and ``alarm`` (groups after
        which the alarm rose, 0 if it did not).
    """
    # The question is whether the known versions' promise still holds, so the new one is not named.
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
                # Bonferroni: each cell has its share of the rate of false alarms.
                "alarm": alarm_after(stakes, false_alarms / len(cells)),
            }
        )
    return pd.DataFrame(records)


def repair(
    model: OpModel, rows: pd.DataFrame, stale: pd.DataFrame, samples: int, seed: int
) -> pd.DataFrame:
    """Adapt a model, in place, to cells that have drifted; of several versions, to the newest.

    The samples are chosen by what they reveal about the others, without looking at their times.

    Args:
        model: The model.
        rows: From :func:`read_rows`.
        stale: Rows of :func:`staleness` to repair.
        samples: Samples of each.
        seed: Of the draw of candidates from many rows.

    Returns:
        One row for each cell with more rows than ``samples``: :data:`CELL`, ``n`` rows that were
        not learned from, their error and coverage before and after, and ``result``:
        :data:`REPAIRED` if the coverage is back at what is tolerated, else ``improved`` if
        neither is worse than before, or :data:`NO_BETTER`.
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
            # What was learned is worse than nothing, so it is not kept.
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


#: Share of rows outside their intervals from which a model counts as stale. Five in a hundred more
#: than promised: on layers that it never saw a model may err a little more often than on those that
#: its intervals come from. Engineering estimate.
TOLERATED = 1.0 - COVERAGE + 0.05
#: Shares of the stake that are bet, side by side, since the size of a drift is unknown before.
_BETS = np.array((0.02, 0.05, 0.1, 0.2, 0.4, 0.8))


def evidence(
    measured: np.ndarray, lo: np.ndarray, hi: np.ndarray, groups: np.ndarray
) -> np.ndarray:
    """The stake after each group of rows, starting from 1: evidence against the intervals.

    Args:
        measured: Measurements in the order in which they were made, shape ``(n,)``.
        lo: Lower ends of 90 % intervals.
        hi: Upper ends.
        groups: Rows that err together, such as rows of one layer, have the same name; they count
            once, because a mean of fair bets is fair, however they depend on each other.

    Returns:
        Mean stake of all bets (too slow, too fast, either), one a group, in the order in which
        groups first appear; at least ``1 / a`` is an alarm at the rate ``a``.
    """
    names, first, code = np.unique(groups.astype(str), return_index=True, return_inverse=True)
    count = np.bincount(code, minlength=len(names))
    above, below = measured > hi, measured < lo
    order = np.argsort(first)
    logs = []
    # Each side has half of what is tolerated.
    for outside, share in ((above, 0.5), (below, 0.5), (above | below, 1.0)):
        rate = np.bincount(code, outside, minlength=len(names))[order] / count[order]
        odds = rate / (share * TOLERATED) - 1.0
        logs.append(np.cumsum(np.log1p(np.outer(odds, _BETS)), axis=0))
    total = np.concatenate(logs, axis=1)
    top = total.max(axis=1, keepdims=True)
    # The logarithm of the mean, without overflow of single stakes.
    mean = top[:, 0] + np.log(np.exp(total - top).mean(axis=1))
    return np.asarray(np.exp(np.minimum(mean, 700.0)))


def alarm_after(stakes: np.ndarray, rate: float) -> int:
    """Number of groups after which the stakes raise an alarm; 0 if they never do.

    Args:
        stakes: From :func:`evidence`.
        rate: Probability of a false alarm.
    """
    over = np.flatnonzero(stakes >= 1.0 / rate)
    return int(over[0]) + 1 if len(over) else 0
