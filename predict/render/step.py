"""Output of predictions on clusters: training steps, partitioned programs and plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...common.units import duration, energy, per_second, plain, quantity, size
from ...models.power.energy import cost_of
from ..cluster.step import StepPrediction, breakdown
from .parts import plain_table, print_notes, timed_headline, unfit

if TYPE_CHECKING:
    from ..cluster.partitioned import PartitionedPrediction
    from ..plan.answer import PlanAnswer

#: Number of operators to list, for the width of a table.
TOP = 8


def print_step(console: Console, prediction: StepPrediction) -> None:
    """Print a step's time, its parts, the memory of the devices, and notes."""
    s, n = prediction.step, prediction.plan.devices
    span = prediction.interval
    console.print(
        timed_headline(
            s.total * 1e6, span.lo * 1e6, span.hi * 1e6, f"on {n} × {prediction.device}", " a step"
        )
        + _fit_remark(prediction)
    )
    mfu = prediction.flops_per_device / prediction.peak_flops
    tokens = prediction.workload.batch * prediction.workload.seq / s.total
    work = prediction.workload
    trained = f", of which {work.trained_parameters / 1e6:.1f} million are trained"
    console.print(
        f"{quantity(prediction.flops_per_device, 'FLOP/s')} a device ({mfu:.1%} of its "
        f"{prediction.peak_format} peak), "
        f"{per_second(tokens)} tokens/s; "
        f"{work.parameters / 1e9:.2f} billion parameters{trained if work.lora_rank else ''}"
    )
    if prediction.joules is not None or prediction.price is not None:
        console.print(_energy(prediction))
    by = prediction.framework or "an average framework"
    console.print(f"plan {prediction.plan.text()} on {prediction.cluster}, by {by}")
    console.print(_terms(prediction) if prediction.terms else _times(prediction))
    console.print(_memory(prediction))
    if prediction.run is not None:
        for line in prediction.run.lines():
            console.print(line)
    if prediction.spread is not None:
        parts = prediction.spread.to_dict()
        # Without the suffix ``_us``, since ``duration`` prints the unit.
        listed = ", ".join(f"{k[:-3]} {duration(v)}" for k, v in parts.items())
        console.print(f"with jitter: {listed}")
    print_notes(console, prediction.notes())


def _fit_remark(prediction: StepPrediction) -> Text:
    """Return the headline's remark on a plan that does not fit, or not by the estimate alone."""
    if prediction.may_fit:
        return Text(", may not fit", style="bold yellow")
    fit = prediction.fit
    return (
        unfit(fit.worst.total, fit.capacity)
        if fit.host_fits
        else unfit(fit.offloaded, fit.host.capacity)
    )


def _energy(prediction: StepPrediction) -> str:
    """Return energy and cost of the step, with intervals."""
    total, n = prediction.interval, prediction.plan.devices
    tokens = prediction.workload.batch * prediction.workload.seq
    said = []
    if (joules := prediction.joules) is not None:
        watts = joules.value / total.value / n
        said.append(
            f"{energy(joules.value)} a step  [{energy(joules.lo)} – {energy(joules.hi)}], "
            f"{watts:.0f} W a device, {quantity(joules.value / tokens, 'J')} a token"
        )
    if prediction.price is not None:
        cost = cost_of(prediction.price, total, n)
        said.append(
            f"cost {plain(cost.value, 4)}  [{plain(cost.lo, 4)} – {plain(cost.hi, 4)}] a step, "
            f"{plain(cost.value / tokens * 1e6, 4)} a million tokens"
        )
    return "; ".join(said)


def print_front(console: Console, front: pd.DataFrame, judged: int, fitting: int, top: int) -> None:
    """Print the Pareto front of a sweep, fastest first.

    Args:
        console: Console to print to.
        front: Rows of :func:`~opcast.predict.sweep.run.pareto`.
        judged: Number of evaluated plans.
        fitting: Number of those that fit into memory.
        top: Number of rows to print.
    """
    console.print(f"{judged} plans, {fitting} fit the memory, {len(front)} on the Pareto front")
    if front.empty:
        return
    priced = ("cost",) if "cost" in front else ()
    table = _table("step", "memory", "MFU", "energy", *priced, "batch", "cluster", "plan")
    for row in front.head(top).to_dict("records"):
        joules = row["energy_j"]
        table.add_row(
            duration(row["step_us"]),
            size(row["memory_bytes_per_device"]),
            f"{row['mfu']:.1%}",
            # NaN where the device's power limit is unknown.
            "" if joules != joules else energy(joules),
            # NaN where the device has no price.
            *("" if row[name] != row[name] else plain(row[name], 4) for name in priced),
            str(row["batch"]),
            Text(str(row["cluster"])),
            Text(str(row["plan"])),
        )
    console.print(table)


def print_clusters(console: Console, rows: pd.DataFrame) -> None:
    """Print the fastest plan of each cluster and batch of a sweep, or why there is none.

    Args:
        console: Console to print to.
        rows: Results of :meth:`~opcast.predict.sweep.run.Sweep.run`.
    """
    names = ("cluster", "batch", "plans", "fit", "fastest", "memory", "plan, or why none")
    table = plain_table(*names, right=names[2:6], fold=(names[0], names[-1]))
    for (cluster, batch), own in rows.groupby(["cluster", "batch"], sort=False):
        made = own[own["error"] == ""]
        fitting = made[made["fits"]]
        if len(fitting):
            best = fitting.sort_values("step_us").iloc[0]
            told = str(best["plan"])
        elif len(made):
            best = made.sort_values("memory_bytes_per_device").iloc[0]
            told = f"none fits the memory; least is needed by {best['plan']}"
        else:
            best, told = None, str(own.iloc[0]["error"])
        table.add_row(
            Text(str(cluster)),
            str(batch),
            str(int((own["plan"] != "").sum())),
            str(len(fitting)),
            "" if best is None else duration(best["step_us"]),
            "" if best is None else size(best["memory_bytes_per_device"]),
            Text(told),
        )
    console.print("by cluster and batch:")
    console.print(table)


def _times(prediction: StepPrediction) -> Table:
    table = _table("part", "time", "share", "most of it")
    operators = list(prediction.operators.items())[:TOP]
    parts = sorted(prediction.step.communication.items(), key=lambda part: -part[1])
    most = {
        "computation": ", ".join(f"{k} {duration(v * 1e6)}" for k, v in operators),
        "exposed communication": "of "
        + (", ".join(f"{k} {duration(v * 1e6)}" for k, v in parts) or "none"),
        "bubble": f"{prediction.plan.pp} stages, {prediction.plan.microbatches} micro-batches",
        "host": "launches that take longer than the kernels",
    }
    for name, value in breakdown(prediction):
        share = f"{value / prediction.step.total:.1%}"
        table.add_row(name, duration(value * 1e6), share, Text(most[name]))
    return table


def _terms(prediction: StepPrediction) -> Table:
    """Return a table of the step's terms, with the step's time at each term's bounds."""
    table = _table("term", "time", "share", "step if at its ends", "learned factors")
    total = prediction.step.total
    for term in prediction.terms:
        ends = f"{duration(term.lo * 1e6)} to {duration(term.hi * 1e6)}"
        share = f"{term.seconds / total:.1%}"
        lessons = Text(_lessons(term.lessons))
        table.add_row(term.name, duration(term.seconds * 1e6), share, ends, lessons)
    table.add_row("whole step", duration(total * 1e6), "", "", Text(_lessons(prediction.whole)))
    return table


def _lessons(lessons: Sequence[tuple[str, float]]) -> str:
    # Changes below half a per cent are not visible in the time.
    said = [f"{name} {factor - 1.0:+.0%}" for name, factor in lessons if abs(factor - 1.0) > 5e-3]
    return ", ".join(said)


def _memory(prediction: StepPrediction) -> Table:
    worst = prediction.fit.worst
    table = _table("memory", "bytes", "share", "")
    for name, value in worst.to_dict().items():
        says = f"of {size(prediction.fit.capacity)}" if name == "total" else ""
        share = f"{value / prediction.fit.capacity:.1%}"
        table.add_row(name, size(value), share, says)
    fit = prediction.fit
    if fit.offloaded:
        share = f"{fit.offloaded / fit.host.capacity:.1%}"
        says = f"of {size(fit.host.capacity)} of a box of {fit.host.box}"
        table.add_row("host", size(fit.offloaded), share, says)
    return table


def _table(*names: str) -> Table:
    # Figures are not wrapped, plans and names are.
    return plain_table(*names, right=names[1:3], fold=names[3:])


def print_plan(console: Console, answer: PlanAnswer, top: int = 10) -> None:
    """Print the best plan, the Pareto front, and the reasons."""
    best = answer.best
    held = size(best.memory_bytes_per_device)
    console.print(
        timed_headline(
            best.latency_us, best.lo_us, best.hi_us, f"on {answer.cluster}, memory {held} a device"
        )
    )
    console.print(Text(f"best plan: {best.name}"))
    print_notes(console, answer.notes, loud=True)
    names = ("time", "memory", "devices", "energy", "plan")
    table = plain_table(*names, fold=names)
    for row in answer.front[:top]:
        table.add_row(
            duration(row.latency_us),
            size(row.memory_bytes_per_device),
            str(row.devices),
            "" if row.energy_j is None else energy(row.energy_j),
            Text(row.name),
        )
    failed = [row for row in answer.rows if row.error]
    if answer.front:
        made = len(answer.rows) - len(failed)
        console.print(f"front of {made} compiled of {answer.screened} screened plans:")
        console.print(table)
    for line in answer.reasons:
        console.print(line)
    if failed:
        one = failed[0]
        console.print(f"{len(failed)} could not be compiled, such as {one.name}: {one.error}")
    print_notes(console, answer.notes, loud=False)


def print_partitioned(console: Console, prediction: PartitionedPrediction, top: int = 10) -> None:
    """Print the time, the collectives, and the longest nodes of the critical path."""
    r, span = prediction.run, prediction.interval
    capacity = f" of {size(prediction.capacity_bytes)}" if prediction.capacity_bytes else ""
    console.print(
        timed_headline(span.value * 1e6, span.lo * 1e6, span.hi * 1e6, f"on {prediction.cluster}")
        + unfit(prediction.peak_memory_bytes, prediction.capacity_bytes)
    )
    console.print(
        f"computation {duration(r.compute * 1e6)}; collectives "
        f"{duration(float(prediction.transfer.sum()) * 1e6)} alone, of which "
        f"{duration(r.exposed * 1e6)} exposed; memory {size(prediction.peak_memory_bytes)}"
        f"{capacity}; lowering {prediction.lowering}"
    )
    print_notes(console, prediction.notes, loud=True)
    table = plain_table("collective", "runs", "bytes put in", "alone")
    for kind, (count, total, seconds) in prediction.by_collective().items():
        table.add_row(kind, f"{count:.0f}", size(total), duration(seconds * 1e6))
    if prediction.by_collective():
        console.print(table)
    console.print(_critical(prediction, top))
    print_notes(console, prediction.notes, loud=False)


def _critical(prediction: PartitionedPrediction, top: int) -> Table:
    run = prediction.run
    # Longest first (the key is a negative duration); then printed in the order of execution.
    spans = sorted(run.critical, key=lambda p: run.start[p] - run.end[p])[:top]
    names = ("share", "time", "on the critical path")
    table = plain_table(*names, fold=names[2:])
    for place in sorted(spans):
        length = float(run.end[place] - run.start[place])
        node = prediction.nodes[place]
        # As text: names come from the program and may hold markup.
        name = Text(node.name[:60] + (" (collective)" if node.collective else ""))
        share = f"{length / (run.makespan or 1.0):.1%}"
        table.add_row(share, duration(length * 1e6), name)
    return table
