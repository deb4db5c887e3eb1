"""Ask the simulator of serving about measured rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from ...common.errors import DatasetError, OpcastError
from ...models.serving.effects import Observe, Observed, ServingEffects
from ...models.serving.model import METRICS
from ...predict.cluster.case_table import FAULTS, reason_of
from ...predict.cluster.serving import ServingPredictor
from ...predict.cluster.serving_table import ServingRow

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
