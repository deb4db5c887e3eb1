"""Print what a deployment does under a load, and the deployments that were compared."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...common.interval import Interval
from ...common.units import duration, size
from ..cluster.deployment import FREE
from ..cluster.serving import LEVELS, METRICS, ServingPrediction
from ..cluster.serving_plan import Planned, ServingPlans
from .parts import headline, print_notes

_NAMES = {
    "ttft": "time to first token",
    "tpot": "time per further token",
    "itl": "time between tokens",
    "e2e": "whole request",
}


def print_serving(console: Console, prediction: ServingPrediction) -> None:
    """Print throughput, latencies, states and memory."""
    own = prediction.deployment
    rate, tokens = prediction.requests_per_s, prediction.tokens_per_s
    console.print(
        headline(
            f"{tokens.value:,.0f} tokens/s",
            f"  ({_span(tokens)})  {tokens.value / own.devices:,.0f} a device, "
            f"{rate.value:.3g} requests/s",
        )
    )
    console.print(f"{own.text()} on {own.devices} x {own.device}, {own.framework}", highlight=False)
    table = _table("latency", "mean", *(f"p{level}" for level in LEVELS), "90 % of the mean")
    for metric in METRICS:
        keys = [f"{metric}/{name}" for name in ("mean", *(f"p{level}" for level in LEVELS))]
        values = [prediction.figures[key] for key in keys]
        mean = values[0]
        ends = f"{duration(mean.lo * 1e6)} to {duration(mean.hi * 1e6)}"
        table.add_row(_NAMES[metric], *(duration(v.value * 1e6) for v in values), ends)
    console.print(table)
    if prediction.slo != FREE:
        good = prediction.good
        console.print(
            f"{good.value:.1%} of the requests keep the SLO ({good.lo:.0%} to {good.hi:.0%}): "
            f"goodput {rate.value * good.value:.3g} requests/s",
            highlight=False,
        )
    if prediction.states:
        s = prediction.states
        console.print(
            f"cache {s['kv_occupancy_mean']:.0%} full on average, {s['kv_occupancy_max']:.0%} at "
            f"most; batch {s['batch_mean']:.3g}; queue {s['queue_mean']:.3g}, at most "
            f"{s['queue_max']:.0f}; {prediction.run.evicted} evictions",
            highlight=False,
        )
    if prediction.joules is not None:
        count, outputs = len(prediction.load.prompts), float(prediction.load.outputs.sum())
        low, high = prediction.joules.lo / outputs, prediction.joules.hi / outputs
        console.print(
            f"{prediction.joules.value / outputs:.3g} J an output token ({low:.3g} to {high:.3g}), "
            f"{prediction.joules.value / count:.3g} J a request",
            highlight=False,
        )
    memory = _table("memory of a device", "bytes", "share")
    capacity = sum(prediction.memory.values())
    for name, value in prediction.memory.items():
        memory.add_row(Text(name), size(value), f"{value / capacity:.1%}")
    console.print(memory)
    print_notes(console, prediction.notes)


def print_plans(console: Console, plans: ServingPlans, model: str, top: int = 10) -> None:
    """Print the best deployment, why it wins, its launch commands, and the Pareto front."""
    best = plans.best
    if best is None:
        console.print(Text("no deployment keeps the SLO", style="bold red"))
        for line in plans.nearest():
            console.print(line, highlight=False)
    else:
        rate = best.tokens_per_s_per_device
        console.print(headline(_named(best), f"  {rate:,.0f} tokens/s a device"))
        for line in plans.reasons():
            console.print(f"because {line}", highlight=False)
        for framework, command in plans.commands(model).items():
            console.print(f"{framework}: {command}", highlight=False, soft_wrap=True)
    console.print(
        f"{len(plans.judged)} deployments simulated, {len(plans.refused)} do not fit, "
        f"{plans.pruned} were left out",
        highlight=False,
    )
    table = _table("tokens/s a device", "TTFT", "TPOT", "keep the SLO", "deployment")
    for one in plans.front()[:top]:
        table.add_row(*_cells(one))
    console.print(table)


def _cells(one: Planned) -> Sequence[str]:
    return (
        f"{one.tokens_per_s_per_device:,.0f}",
        duration(one.ttft * 1e6),
        duration(one.tpot * 1e6),
        f"{one.good:.1%}",
        _named(one),
    )


def _named(one: Planned) -> str:
    limit = one.deployment.max_batch
    return one.deployment.text() + (f", {limit} sequences" if limit else "")


def _span(interval: Interval) -> str:
    return f"90 % interval {interval.lo:,.0f} to {interval.hi:,.0f}"


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, name in enumerate(names):
        table.add_column(name, justify="left" if place in (0, len(names)) else "right")
    return table
