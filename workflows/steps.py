"""Predict tables of training steps, evaluate the predictions, and adapt to a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ..common.errors import DatasetError
from ..common.progress import counting, wrote
from ..common.tables_text import in_percent, print_frame
from ..common.units import size
from ..features.devices.catalogue import find_device
from ..models.effects import CLUSTER
from ..models.steps.effects import OWN, slopes_at
from ..models.steps.memory import interval_of
from ..models.steps.model import StepModel
from ..predict.cluster.case_table import read_cases, read_rows
from ..predict.cluster.next_run import next_run
from ..predict.cluster.step import StepPrediction
from ..predict.cluster.step_table import StepRow, StepRuns, floor_seconds, step_row
from ..predict.operator.step_operators import load_step_model
from .judging import (
    FIGURES,
    WIDTHS,
    Judged,
    choice,
    choice_figures,
    keep_judged,
    measured_rows,
    predicted_frame,
    print_judged,
    to_learn,
    write_predictions,
)
from .measured.calibration_samples import check_unseen, mean_error, plausible

if TYPE_CHECKING:
    from rich.console import Console

    from ..models.operators import OpModel
    from .settings import TableSettings

#: Smallest effect of a cluster to report; repeated runs differ by as much.
_WORTH = 0.02
#: Descriptions of the effects of a cluster, formatted with the inverse factor and the factor.
_WORDS = {
    "between": "the scale-out network reaches {0:.0%} of its expected rate",
    "launch": "launching a kernel takes {1:.2f} times as long as expected",
    "whole": "everything takes {1:.2f} times as long as expected",
}
#: Parts of a step in µs, which add up to ``latency_us``.
PARTS = ("compute_us", "exposed_communication_us", "bubble_us", "host_us", "update_us")
#: Bounds of the 90 % interval of ``memory_bytes``.
MEMORY_ENDS = ("memory_lo_bytes", "memory_hi_bytes")
#: Columns of predictions: times in µs, sizes in bytes, and the measurements of the table.
COLUMNS = (
    *("id", "latency_us", "lo_us", "hi_us", "memory_bytes", *MEMORY_ENDS, *PARTS),
    *("known", "source", "device", "measured_us", "measured_memory_bytes", "reason"),
)
#: Columns in which compared plans agree.
SAME = ("source", "model", "device", "n_devices", "seq", "global_batch", "dtype")


def possible_steps(
    rows: Sequence[StepRow | None], tell: Callable[[str], None]
) -> list[StepRow | None]:
    """Remove times below the floor of the arithmetic, and memory peaks above the capacity.

    Args:
        rows: Rows of a table; ``None`` for those that cannot be read.
        tell: Called with a message for each measurement that is removed.
    """
    found: list[StepRow | None] = []
    for row in rows:
        if row is not None and row.measured_s < (floor := floor_seconds(row)):
            tell(
                f"{row.id}: not used: {row.measured_s:g} s is below the floor of {floor:.3g} s, "
                f"its matrix products at the dense peak of {row.cluster.size} {row.cluster.device}"
            )
            row = replace(row, measured_s=np.nan)
        if row is not None and row.memory_bytes > (most := _memory(row)):
            tell(
                f"{row.id}: not used: a peak of {size(row.memory_bytes)} exceeds the {size(most)} "
                f"of a {row.cluster.device}; memory_gib is per device, in GiB"
            )
            row = replace(row, memory_bytes=np.nan)
        found.append(row)
    return found


def _memory(row: StepRow) -> float:
    """Total memory of a row's device in bytes; infinite if unknown."""
    return find_device(row.cluster.device).memory_bytes or np.inf


def adapt_steps(model: StepModel, runs: StepRuns, measured: np.ndarray) -> StepModel:
    """Adapt a model to clusters, given measured steps on them."""
    slopes = slopes_at(runs.simulate, model.table, len(runs.rows))
    return replace(model, table=slopes.linear(runs.contexts, measured).adapted())


def _record(row: StepRow, found: StepPrediction, model: StepModel) -> dict[str, object]:
    step, scale = found.step, row.share * 1e6
    update = step.stages[step.worst].update.compute
    parts = (step.compute - update, step.exposed, step.bubble, step.host, update)
    # Rounding of the bubble; added to the computation, so that the parts add up.
    rest = step.total - sum(parts)
    memory = interval_of(model.memory, row.framework, found.fit.worst.total)
    return {
        "latency_us": step.total * scale,
        "lo_us": found.interval.lo * scale,
        "hi_us": found.interval.hi * scale,
        "memory_bytes": memory.value,
        **dict(zip(MEMORY_ENDS, memory[1:], strict=True)),
        **dict(zip(PARTS, (value * scale for value in (parts[0] + rest, *parts[1:])), strict=True)),
        "known": found.known,
        "source": row.source,
        "device": row.cluster.device,
        "measured_us": row.measured_s * 1e6,
        "measured_memory_bytes": row.memory_bytes,
    }


def judge_memory(frame: pd.DataFrame) -> pd.DataFrame:
    """Compute errors of measured peak memory by source and device.

    Args:
        frame: From :func:`evaluate_steps`.
    """
    own = measured_rows(frame, "memory_bytes", "measured_memory_bytes", MEMORY_ENDS)
    return own.groupby(["source", "device"], dropna=False).agg(**WIDTHS).reset_index()


def judge(frame: pd.DataFrame, table: pd.DataFrame) -> Judged:
    """Compute errors of the predictions of measured steps.

    Args:
        frame: From :func:`evaluate_steps`.
        table: The table, whose models and clusters define the sets of plans to compare.
    """
    own = measured_rows(frame)
    by_group = own.groupby(["source", "device"], dropna=False).agg(**FIGURES).reset_index()
    plans = choice(table, SAME, own["latency_us"], own["measured_us"])
    means = by_group[["mape", "median_ape", "coverage"]].astype(float).mean()
    overall = {
        "rows": float(len(frame)),
        "expressed": float(frame["latency_us"].notna().mean()),
        **{str(name): float(value) for name, value in means.items()},
        "memory_mape": float(judge_memory(frame)["mape"].mean()),
        **choice_figures(plans),
    }
    return Judged(by_group, overall, plans)


def evaluate_steps(
    table: pd.DataFrame,
    model: StepModel,
    operators: OpModel | None,
    *,
    calibrate: bool = False,
    show: Callable[[int, int], None] = lambda done, of: None,
    tell: Callable[[str], None] = lambda text: None,
) -> tuple[pd.DataFrame, Judged, StepModel]:
    """Predict every row of a table of steps, and compute the errors of the measured ones.

    Args:
        table: Table from :func:`~opcast.predict.cluster.case_table.read_cases`.
        model: Step model.
        operators: Operator model; ``None`` for rooflines.
        calibrate: Whether to adapt to the measured rows of ``calib_*`` splits.
        show: Called with the progress.
        tell: Called with a message for each impossible measurement, which is not used.

    Returns:
        The predictions, their errors, and the step model, adapted if ``calibrate`` is set.
    """
    read, reasons = read_rows(table, step_row)
    rows = possible_steps(read, tell)
    runs = StepRuns([row for row in rows if row is not None], operators, show)
    known = to_learn(table)
    if calibrate:
        timed = [row is not None and np.isfinite(row.measured_s) for row in rows]
        known = known & np.array(timed)
        learn = [row for row, own in zip(rows, known, strict=True) if own and row]
        if not learn:
            raise DatasetError(
                "no row to calibrate on",
                hint="give rows that have step_s a split that begins with calib",
            )
        model = adapt_steps(model, runs.part(learn), np.log([row.measured_s for row in learn]))
    answers = (
        answer if isinstance(answer, str) else _record(row, answer, model)
        for row, answer in zip(runs.rows, runs.predict(model), strict=True)
    )
    frame = predicted_frame(table["id"], reasons, answers, COLUMNS)
    return frame, judge(frame[~known] if calibrate else frame, table), model


def run_evaluate_steps(console: Console, settings: TableSettings) -> Judged:
    """Predict every row of a table of steps, and print the errors of the measured ones."""
    table = read_cases(settings.table, "steps")
    model = StepModel.find(settings.model)
    with counting("steps") as show:
        frame, judged, model = evaluate_steps(
            table,
            model,
            load_step_model(),
            calibrate=settings.calibrate,
            show=show,
            tell=partial(console.print, highlight=False, soft_wrap=True),
        )
    write_predictions(console, frame, settings.out, "rows")
    if settings.calibrate:
        for line in learned_lines(model, table):
            console.print(line, highlight=False)
    if len(judged.by_group):
        memory = in_percent(judge_memory(frame))
        if len(memory):
            print_frame(console, memory, "measured peak memory, errors in %")
        print_judged(console, judged, "measured steps", [_sentence(judged)])
    wrote(settings.out, f"{len(frame)} rows")
    known = measured_rows(frame)
    if len(known) and (settings.page or settings.track):
        keep_judged(console, settings, judged, known, "steps", "source")
    return judged


def run_calibrate_steps(console: Console, settings: TableSettings) -> StepModel:
    """Adapt a step model to the clusters of a table of measured steps, and print the effects.

    Raises:
        DatasetError: No step of the table has a time.
        WorseModelError: The adapted model is worse on held-out steps.
    """
    table = read_cases(settings.table, "steps")
    # Rows without a source are taken to be of the same cluster.
    table["source"] = table["source"].fillna(OWN) if "source" in table else OWN
    tell = partial(console.print, highlight=False, soft_wrap=True)
    read, reasons = read_rows(table, step_row)
    for name, reason in zip(table["id"], reasons, strict=True):
        if reason:
            tell(f"{name}: not used: {reason}")
    base = StepModel.find(settings.model)
    runs, before = _near(base, possible_steps(read, tell), tell)
    own = runs.rows
    if not own:
        raise DatasetError(
            "no step to calibrate on", where=str(settings.table), hint="give step_s in seconds"
        )
    measured = np.log([row.measured_s for row in own])
    model = adapt_steps(base, runs, measured)
    after = _ratios(runs, model)
    errors = [100.0 * float(np.abs(ratios - 1.0).mean()) for ratios in (before, after)]
    for name, error in zip(("before", "after"), errors, strict=True):
        tell(f"error of these {len(own)} steps {name} calibration: {error:.1f} %")
    for line in learned_lines(model, table):
        console.print(line, highlight=False)
    following = next_run(base, runs, measured)
    if following is not None:
        console.print(following.text(), highlight=False, soft_wrap=True)
    if len(own) > 1:
        linear = slopes_at(runs.simulate, base.table, len(own)).linear(runs.contexts, measured)
        plain, unseen = linear.errors(base.table), linear.left_out(np.arange(len(own)))
        check_unseen(console, f"{len(own)} steps", mean_error(plain), mean_error(unseen))
    model.save(settings.out)
    wrote(settings.out, "use it with simulate --steps or evaluate --steps --model")
    return model


def _near(
    model: StepModel, rows: Sequence[StepRow | None], tell: Callable[[str], None]
) -> tuple[StepRuns, np.ndarray]:
    """Steps whose times are plausible, and their ratios of predicted to measured time."""
    own = [row for row in rows if row is not None and np.isfinite(row.measured_s)]
    runs = StepRuns(own, load_step_model())
    ratios = _ratios(runs, model)
    near = plausible([f"{row.id}: {row.measured_s:g} s" for row in own], -np.log(ratios), tell)
    return runs.part(list(compress(own, near))), ratios[near]


def _ratios(runs: StepRuns, model: StepModel) -> np.ndarray:
    """Ratios of predicted to measured seconds of steps; NaN if one cannot be predicted."""
    return np.array(
        [
            found.step.total * row.share / row.measured_s
            if isinstance(found, StepPrediction)
            else np.nan
            for found, row in zip(runs.predict(model), runs.rows, strict=True)
        ]
    )


def learned_lines(model: StepModel, table: pd.DataFrame) -> list[str]:
    """Describe the learned effects of each cluster."""
    lines = []
    for source in sorted({str(s).split("@")[0] for s in table.get("source", ())}):
        for key, value in sorted(model.table.values.items()):
            cost, level, cluster = key.split("/", 2)
            if level == CLUSTER and cluster.startswith(f"{source}|") and abs(value) > _WORTH:
                lines.append(f"{cluster}: {_WORDS[cost].format(np.exp(-value), np.exp(value))}")
    return lines


def _sentence(judged: Judged) -> str:
    o = judged.overall
    parts = [
        f"{len(judged.by_group)} groups of source and device: mean error {100 * o['mape']:.1f} %, "
        f"{100 * o['coverage']:.0f} % inside the 90 % interval",
    ]
    if np.isfinite(o["memory_mape"]):
        parts.append(f"memory {100 * o['memory_mape']:.1f} %")
    which = f"plan choice over {len(judged.choice)} models on clusters"
    parts += judged.choice_sentence(which)
    return "; ".join(parts)
