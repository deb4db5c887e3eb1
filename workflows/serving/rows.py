"""Rows of a table of serving runs: simulation, and selection of plausible measurements."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import log
from typing import TypeVar

import numpy as np

from ...common.errors import DatasetError, OpcastError
from ...models.serving.effects import Observe, Observed, ServingEffects
from ...models.serving.ends import SATURATED
from ...models.serving.model import METRICS
from ...predict.cluster.case_table import FAULTS, reason_of
from ...predict.cluster.serving import ServingPredictor
from ...predict.cluster.serving_engine import request_floors
from ...predict.cluster.serving_load import draw
from ...predict.cluster.serving_table import ServingRow
from ...simulate.serving.latencies import EngineFloor

Asked = TypeVar("Asked")
Tell = Callable[[str], None]

#: Words in ``flags`` of rows that are not used, because their sources or physics contradict them.
FAULTY = (
    "impossible|suspicious|beyond the context|prefix_reuse|parallelism_unreliable|ttft_mean_spoiled"
)
#: Largest plausible fraction of the dense peak in a run of requests. A power-capped fp8 matrix
#: product reaches about two thirds; the busiest published runs reach 0.61 (whole batches on A100).
MOST_BUSY = 0.7
#: Fraction of implausible rows from which a whole set of runs is not used.
WRONG = 0.05
#: Maximum rows of a source, model, framework and device to learn from; the others are only tested.
#: Learning from all is 0.5 to 2 points worse with sources held out: large sets would dominate.
MOST_ROWS = 25
#: Minimum number of runs to separate host time from efficiency: the number of effects of a cluster.
FEWEST = 5
#: Largest plausible ratio of the measured to the simulated time to first token with prefill
#: workers and little waiting. Published ratios are below 2.1 or above 4.7.
SETUP = 3.0


def measured_seconds(row: ServingRow, metric: str) -> float:
    """Measured value of a metric in seconds; NaN if it was not measured."""
    answers = row.measured
    if metric == "per_token":
        return 1.0 / answers["out_tok_s"] if "out_tok_s" in answers else float("nan")
    own = answers.get(f"{metric}_ms", float("nan"))
    if metric == "tpot" and own != own:
        # ITL equals TPOT if every chunk is a token.
        own = answers.get("itl_ms", float("nan"))
    return own * 1e-3


def ask_rows(
    rows: Sequence[ServingRow],
    ask: Callable[[ServingRow], Asked],
    show: Callable[[int, int], None] = lambda done, of: None,
) -> list[Asked | str]:
    """Apply a function to every row; return its results, or the reasons of failures.

    Rows of the same configuration are processed consecutively, because cost tables are cached.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, row in enumerate(rows):
        own = row.deployment
        key = (own.device, own.framework, own.model, own.engine, own.prefill)
        groups.setdefault(key, []).append(index)
    found: dict[int, Asked | str] = {}
    for index in (index for group in groups.values() for index in group):
        try:
            found[index] = ask(rows[index])
        except (OpcastError, *FAULTS) as error:
            found[index] = reason_of(error)
        show(len(found), len(rows))
    return [found[index] for index in range(len(rows))]


def observer(predictor: ServingPredictor, rows: Sequence[ServingRow]) -> Observe:
    """Make the function that training calls to simulate all measured latencies."""

    def observe(effects: ServingEffects) -> Observed:
        predictor.model = replace(predictor.model, effects=effects)
        runs = ask_rows(rows, lambda row: predictor.simulate(row.deployment, row.spec))
        found: list[tuple[int, str, float, float, np.ndarray, float]] = []
        for index, (row, run) in enumerate(zip(rows, runs, strict=True)):
            if isinstance(run, str):
                continue
            for metric in METRICS:
                measured, simulated = measured_seconds(row, metric), run.seconds(metric)
                if np.isfinite(measured) and simulated > 0.0:
                    logs = (float(np.log(measured)), float(np.log(simulated)))
                    found.append((index, metric, *logs, run.shares(metric), run.queued))
        if not found:
            raise DatasetError("no row with a measured latency can be simulated")
        columns = [np.array(column) for column in zip(*found, strict=True)]
        return Observed(*columns)

    return observe


def set_of(row: ServingRow) -> tuple[str, str, str, str]:
    """Key of the set of runs that a row belongs to: source, model group, framework, device."""
    own = row.deployment
    return own.source, row.group, own.framework, own.device


def possible_rows(rows: Sequence[ServingRow], tell: Tell) -> list[ServingRow]:
    """Select rows whose throughput the devices can reach.

    If more than :data:`WRONG` of a set of runs are implausible, for example because prompts were
    cached or the load differs from the table, the whole set is suspect and not used.
    """
    wrong = [busy_share(row) > MOST_BUSY for row in rows]
    keys = list(map(set_of, rows))
    total, faulty = Counter(keys), Counter(itertools.compress(keys, wrong))
    sets = {key for key, count in faulty.items() if count > WRONG * total[key]}
    if sets:
        names = "; ".join(sorted(", ".join(key) for key in sets))
        tell(f"not used, because devices cannot process prompts that fast: {names}")
    kept = [not bad and key not in sets for key, bad in zip(keys, wrong, strict=True)]
    return [row for row, good in zip(rows, kept, strict=True) if good]


def above_floor(rows: Sequence[ServingRow], tell: Tell) -> list[ServingRow]:
    """Remove measurements that are faster than the devices' data sheets allow.

    No row of the published table has a latency below its floor.

    Args:
        rows: Rows of the table.
        tell: Called with a message for each measurement that is removed.
    """
    kept = []
    for row in rows:
        load = draw(row.spec)
        least = request_floors(row.deployment, load, np.zeros(len(load.prompts)))
        floors = {"ttft_ms": least.ttft, "tpot_ms": least.tpot, "itl_ms": least.tpot}
        good = dict(row.measured)
        for name, floor in floors.items():
            value, lowest = row.measured.get(name, np.inf), float(floor.mean()) * 1e3
            if value < lowest:
                tell(
                    f"{row.id}: not used: {name} {value:g} is below its floor of {lowest:.3g} "
                    "(weights and cache read once, prompts processed at the dense peak)"
                )
                del good[name]
        if "out_tok_s" in good and (busy := busy_share(replace(row, measured=good))) > 1.0:
            tell(
                f"{row.id}: not used: {good['out_tok_s']:g} out_tok_s require {busy:.1f} times the "
                "dense peak of the devices"
            )
            del good["out_tok_s"]
        kept.append(replace(row, measured=good))
    return kept


def busy_share(row: ServingRow) -> float:
    """Lower bound of the utilization of the devices' dense peak by prompts and outputs.

    Computed from the throughput, or from latencies and concurrency by Little's law; 0 if neither is
    measured. Data-parallel attention ranks are counted as if they shared all work.
    """
    own, load = row.deployment, draw(row.spec)
    workers, outputs = own.prefill or own.engine, load.outputs.mean()
    first, later, each = (measured_seconds(row, metric) for metric in METRICS)
    seconds = first + later * (outputs - 1.0)
    closed = row.spec.concurrency > 0 and seconds > 0.0
    rate = row.spec.concurrency / seconds if closed else 1.0 / (each * outputs)
    floor = EngineFloor(own.model, workers.plan, own.spec)
    tokens = np.array([load.prompts.mean() + (0.0 if own.prefill else outputs)])
    least = float(floor.first_token(tokens, np.zeros(1))[0])
    if not np.isfinite(rate) or least <= floor.reading:
        return 0.0
    return float(rate * least / (workers.count * workers.plan.dp))


def settled_rows(
    predictor: ServingPredictor, rows: Sequence[ServingRow], tell: Tell
) -> list[ServingRow]:
    """Remove times to first token with prefill workers that include unexplained set-up time.

    If a few requests in flight take seconds that neither prefill, nor the cache transfer, nor
    waiting explains, they are due to the set-up of the run or limits of its engines.

    Args:
        predictor: Predictor with the effects that training starts from.
        rows: Rows of the table.
        tell: Called with the number of removed measurements.
    """
    apart = [at for at, row in enumerate(rows) if row.deployment.prefill and row.measured]
    kept = list(rows)
    if not apart:
        return kept
    seen = observer(predictor, [rows[at] for at in apart])(predictor.model.effects)
    slow = (seen.metrics == "ttft") & (seen.queued <= SATURATED)
    slow &= seen.measured - seen.simulated > log(SETUP)
    for place in seen.rows[slow].tolist():
        row = rows[apart[place]]
        others = {name: value for name, value in row.measured.items() if name != "ttft_ms"}
        kept[apart[place]] = replace(row, measured=others)
    tell(f"times to first token that include set-up, not used: {int(slow.sum())}")
    return kept
