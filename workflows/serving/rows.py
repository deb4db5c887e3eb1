"""Rows of a table of serving: asking the simulator about them, and which are learned from."""

from __future__ import annotations

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
from ...simulate.serving.floor import EngineFloor

Asked = TypeVar("Asked")


def measured_seconds(row: ServingRow, metric: str) -> float:
    """What a row measured, in seconds; NaN if it did not."""
    answers = row.measured
    if metric == "per_token":
        return 1.0 / answers["out_tok_s"] if "out_tok_s" in answers else float("nan")
    own = answers.get(f"{metric}_ms", float("nan"))
    if metric == "tpot" and own != own:
        # The mean gap between chunks is that of tokens where chunks are tokens.
        own = answers.get("itl_ms", float("nan"))
    return own * 1e-3


def ask_rows(
    rows: Sequence[ServingRow],
    ask: Callable[[ServingRow], Asked],
    show: Callable[[int, int], None] = lambda done, of: None,
) -> list[Asked | str]:
    """Ask something of every row; where that fails, the reason why.

    Rows of one configuration follow each other, since only so many tables of costs are kept.
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
    """The simulator as learning asks it: measured latencies beside simulated ones."""

    def observe(effects: ServingEffects) -> Observed:
        predictor.model = replace(predictor.model, effects=effects)
        said = ask_rows(rows, lambda row: predictor.simulate(row.deployment, row.spec))
        found: list[tuple[int, str, float, float, np.ndarray, float]] = []
        for index, (row, run) in enumerate(zip(rows, said, strict=True)):
            if isinstance(run, str):
                continue
            for metric in METRICS:
                measured, simulated = measured_seconds(row, metric), run.seconds(metric)
                if np.isfinite(measured) and simulated > 0.0:
                    logs = (float(np.log(measured)), float(np.log(simulated)))
                    found.append((index, metric, *logs, run.shares(metric), run.queued))
        if not found:
            raise DatasetError("no row with a measured latency can be expressed")
        columns = [np.array(column) for column in zip(*found, strict=True)]
        return Observed(*columns)

    return observe


#: Words in ``flags`` of rows that are not learned from: their sources or physics contradict them.
FAULTY = (
    "impossible|suspicious|beyond the context|prefix_reuse|parallelism_unreliable|ttft_mean_spoiled"
)
#: Largest share of the dense peak that a run of requests can multiply at. A power-capped product in
#: fp8 holds about two thirds of it; the busiest published runs are at 0.61 (whole batches on A100).
MOST_BUSY = 0.7
#: Share of a set's rows from which, if they are beyond that, none of the set is learned from.
WRONG = 0.05
#: Most rows of a source, model, framework and device that are learned from.
MOST_ROWS = 25

#: Fewest runs that tell host time and efficiency apart: as many as effects of a cluster.
FEWEST = 5

#: Most times that a first token on workers of its own takes what it costs there, where it hardly
#: waits for others. Published ones are within 2.1, but for those from 4.7 on.
SETUP = 3.0

Tell = Callable[[str], None]


def set_of(row: ServingRow) -> tuple[str, str, str, str]:
    """Whose runs of what on what a row is one of."""
    own = row.deployment
    return own.source, row.group, own.framework, own.device


def possible_rows(rows: Sequence[ServingRow], tell: Tell) -> list[ServingRow]:
    """Rows that devices can have run as fast as they say.

    Those of a set of runs were measured alike: where more than one in twenty had its prompts in a
    cache, or another load than it says, all of the set may have had.
    """
    wrong = [busy_share(row) > MOST_BUSY for row in rows]
    keys = list(map(set_of, rows))
    all_rows, faulty = (
        Counter(keys),
        Counter(key for key, bad in zip(keys, wrong, strict=True) if bad),
    )
    sets = {key for key, count in faulty.items() if count > WRONG * all_rows[key]}
    if sets:
        names = "; ".join(sorted(", ".join(key) for key in sets))
        tell(f"not learned from, since no device runs prompts as fast as these say: {names}")
    kept = [not bad and key not in sets for key, bad in zip(keys, wrong, strict=True)]
    return [row for row, good in zip(rows, kept, strict=True) if good]


def above_floor(rows: Sequence[ServingRow], tell: Tell) -> list[ServingRow]:
    """Rows without the answers that lie below what the devices' data sheets allow.

    No row of the published table has a latency below its floor.

    Args:
        rows: Of the table.
        tell: Told of every such answer, with the floor.
    """
    kept = []
    for row in rows:
        load = draw(row.spec)
        least = request_floors(row.deployment, load, np.zeros(len(load.prompts)))
        floors = {"ttft_ms": least.ttft, "tpot_ms": least.tpot, "itl_ms": least.tpot}
        good = dict(row.measured)
        for name, floor in floors.items():
            said, lowest = row.measured.get(name, np.inf), float(floor.mean()) * 1e3
            if said < lowest:
                tell(
                    f"{row.id}: {name} {said:g} is below its floor of {lowest:.3g} (weights and "
                    "cache read once, prompts multiplied at the dense peak): not learned from"
                )
                del good[name]
        if "out_tok_s" in good and (busy := busy_share(replace(row, measured=good))) > 1.0:
            tell(
                f"{row.id}: {good['out_tok_s']:g} out_tok_s take {busy:.1f} times the dense peak "
                "of its devices: not learned from"
            )
            del good["out_tok_s"]
        kept.append(replace(row, measured=good))
    return kept


def busy_share(row: ServingRow) -> float:
    """Share of a row's time that its prompts and outputs take at the dense peak of its devices.

    By its own throughput, or by Little's law of its latencies; 0 where neither tells. Ranks that
    attend to requests of their own count as if they shared all work, so that it is a least one.
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
    """Rows without the times to first tokens of prompts apart that hold what no column says.

    Where a handful of requests in flight takes seconds that neither prompts, nor their caches' way,
    nor other requests take, the run's set-up or a limit of its engines did: that is no cost.

    Args:
        predictor: With the effects that the fit starts from.
        rows: Of the table.
        tell: Told how many are left out.
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
    tell(f"times to first tokens with set-up, not learned from: {int(slow.sum())}")
    return kept
