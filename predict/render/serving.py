"""Output of serving predictions, comparisons of deployments, and fleets over hours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...common.interval import Interval
from ...common.types import JsonMapping
from ...common.units import duration, per_second, plain, quantity, size
from ...simulate.serving.checkpoints import UNKNOWN, Checkpoint
from ...simulate.serving.latencies import FREE, LEVELS, METRICS, Slo
from ..cluster.deployment import Deployment
from ..cluster.serving import LIKELY
from ..cluster.serving_prediction import ServingPrediction
from ..plan.serving_answer import PERCENTILE, SURE, Planned, ServingPlans
from .parts import headline, plain_table, print_notes

if TYPE_CHECKING:
    from ..cluster.serving_fleet import FleetPrediction

_NAMES = {
    "ttft": "time to first token",
    "tpot": "time per further token",
    "itl": "time between tokens",
    "e2e": "whole request",
}


#: How closely measured runs resemble the deployment, by :data:`~opcast.models.serving.ends.TIERS`.
_KNOWN = {
    "model": "this model was measured under this framework and in this format on this chip",
    "framework": "this framework was measured in this format on this chip, but not this model",
    "device": "this chip was measured, but not under this framework in this format",
    "architecture": "chips of this generation were measured, but not this one",
    "new": "no chip of this generation was measured",
    "vendor": "no chip of this vendor was measured",
}
#: Ratio of upper to lower bound up to which a rate is printed as a single number.
_SAME = 1.005
#: Addition for separate prefill workers.
_APART = "; few runs had separate prefill workers"
_OF = {
    "request": "a request",
    "output_token": "an output token",
    "million_tokens": "a million output tokens",
}
#: Maximum hours to print; --json has all.
_HOURS = 24


def print_serving(console: Console, prediction: ServingPrediction, price: float = 0.0) -> None:
    """Print throughput, latencies, cost, states and memory.

    Args:
        console: Console to print to.
        prediction: The prediction.
        price: Dollars per device hour; 0 if unknown.
    """
    own = prediction.deployment
    rate, tokens, what = prediction.requests_per_s, prediction.tokens_per_s, ""
    single = prediction.load.outputs.max() == 1
    if single:
        # A load without outputs is characterized by its input tokens.
        each = prediction.load.prompts @ prediction.load.counts / prediction.load.count
        tokens, what = rate.times(each), "input "
    console.print(
        headline(
            f"{per_second(tokens.value)} {what}tokens/s",
            f"  ({_span(tokens)})  {per_second(tokens.value / own.devices)} a device, "
            f"{plain(rate.value)} requests/s",
        )
    )
    console.print(
        f"{own.text()} on {own.devices} x {own.spec.name}, {own.framework}; {_formats(own)}"
    )
    names = ("mean", *(f"p{level}" for level in LEVELS))
    table = _table("latency, 90 % interval", *names)
    for metric in METRICS:
        if single and metric in ("tpot", "itl"):
            # There are no tokens after the first.
            continue
        values = [prediction.figures[f"{metric}/{name}"] for name in names]
        table.add_row(_NAMES[metric], *(duration(v.value * 1e6) for v in values))
        table.add_row("", *(Text(_ends(v), style="dim") for v in values))
    console.print(table)
    if prediction.slo != FREE:
        good = prediction.good
        console.print(
            f"{good.value:.1%} of the requests keep the SLO ({good.lo:.0%} to {good.hi:.0%}): "
            f"goodput {plain(rate.value * good.value)} requests/s"
        )
    if prediction.overload > LIKELY:
        console.print(_overload(prediction), style="yellow")
    apart = "" if own.prefill is None else _APART
    # Intervals are stated as a factor, since the tier alone does not tell their width. An open load
    # that is sustained is served at its own rate.
    factor = prediction.tokens_per_s.hi / prediction.tokens_per_s.lo
    digits = 2 if factor > 1.05 else 3
    same = factor <= _SAME
    rate_of = "those of the load" if same else f"within a factor of {factor:.{digits}g}"
    console.print(f"interval: {_KNOWN[prediction.known]}{apart}; tokens a second {rate_of}")
    _print_costs(console, prediction, price)
    if prediction.states:
        s = prediction.states
        console.print(
            f"cache {s['kv_occupancy_mean']:.0%} full on average, {s['kv_occupancy_max']:.0%} at "
            f"most; batch {plain(s['batch_mean'])}; queue {plain(s['queue_mean'])}, at most "
            f"{s['queue_max']:.0f}; {prediction.run.evicted} evictions"
        )
    memory = _table("memory of a device", "bytes", "share")
    capacity = sum(prediction.memory.values())
    for name, value in prediction.memory.items():
        memory.add_row(Text(name), size(value), f"{value / capacity:.1%}")
    console.print(memory)
    print_notes(console, prediction.notes)


def _overload(prediction: ServingPrediction) -> str:
    """Describe the probability of overload, and what the upper bounds then mean."""
    if prediction.overload >= 1.0:
        return "the load exceeds the maximum throughput: queues and latencies grow without limit"
    said = f"the load may saturate the engines: {prediction.overload:.0%} likely"
    return f"{said}; queues then grow without limit, and upper bounds assume stable engines"


def _print_costs(console: Console, prediction: ServingPrediction, price: float) -> None:
    """Print energy if power is known, and dollars if there is a price."""
    for name, joules in prediction.joules().items():
        console.print(
            f"{quantity(joules.value, 'J')} {_OF[name]} ({quantity(joules.lo, 'J')} to "
            f"{quantity(joules.hi, 'J')})"
        )
    for name, dollars in prediction.dollars(price).items():
        console.print(
            f"{plain(dollars.value)} $ {_OF[name]} ({plain(dollars.lo)} to {plain(dollars.hi)})"
        )


def print_plans(
    console: Console, plans: ServingPlans, model: Checkpoint, top: int = 10, price: float = 0.0
) -> None:
    """Print the best deployment, why it wins, its launch commands, and the Pareto front.

    Args:
        console: Console to print to.
        plans: Compared deployments.
        model: Checkpoint for the commands.
        top: Maximum deployments of the front.
        price: Dollars per device hour; 0 if unknown.
    """
    best = plans.best
    if best is None:
        least = f": it takes at least {plans.fewest} devices" if plans.fewest else ""
        said = f"nothing fits{least}" if plans.nothing_fits else "no deployment keeps the SLO"
        console.print(Text(said, style="bold red"))
        for line in plans.misses():
            console.print(line)
    else:
        rate, own = best.tokens_per_s_per_device, best.deployment
        console.print(headline(best.text(), f"  {per_second(rate)} tokens/s a device"))
        spare = f" of {plans.devices}" if own.devices < plans.devices else ""
        console.print(
            f"on {own.devices}{spare} x {own.spec.name}, {own.framework}; {_formats(own)}"
        )
        _print_surety(console, plans, best, price)
        for line in plans.reasons():
            console.print(f"because {line}")
        _print_costs(console, best.prediction, price)
        for framework, launch in plans.launches(model).items():
            console.print(f"{framework}: {launch.command}", soft_wrap=True)
            flags = _table("flag", "value", "why", numbers=False)
            for flag in launch.flags:
                flags.add_row(flag.name, flag.value, flag.why)
            console.print(Padding(flags, (0, 0, 0, 2)))
        if model == UNKNOWN:
            console.print(f"{UNKNOWN.name} stands for your checkpoint")
    console.print(
        f"{len(plans.judged)} deployments simulated ({plans.screened} of them without intervals, "
        f"since they cannot win by estimate), {len(plans.refused)} do not fit, {plans.pruned} were "
        "skipped"
    )
    alike: dict[str, list[str]] = {}
    for text, why in plans.refused.items():
        alike.setdefault(why, []).append(text)
    for why, (first, *others) in list(alike.items())[:top]:
        more = f" (nor do {len(others)} more)" if others else ""
        console.print(f"{first} does not fit{more}: {why}", soft_wrap=True)
    if left := sum(len(own) for own in list(alike.values())[top:]):
        console.print(f"{left} more do not fit (--top, --json)")
    if plans.judged:
        rate_of = "$/M tokens" if price else "tokens/s/dev"
        names = (rate_of, f"TTFT p{PERCENTILE}", f"TPOT p{PERCENTILE}", "in SLO", "sure")
        table = _table(*names)
        table.add_column("deployment")
        for one in plans.front()[:top]:
            for cells in _rows(one, plans.slo, price):
                table.add_row(*cells)
        console.print(table)
        console.print(
            "in SLO: share of the requests; sure: probability that the latencies shown meet it; in "
            "grey: 90 % intervals"
        )
    if best is not None:
        print_notes(console, best.prediction.notes)


def _formats(own: Deployment) -> str:
    """Return text such as ``weights in bf16, experts in mxfp4, cache in bf16``."""
    return ", ".join(f"{name} in {text}" for name, text in own.model.formats().items())


def _print_surety(console: Console, plans: ServingPlans, best: Planned, price: float) -> None:
    """Print the probability that the best meets the SLO, and a surer one if that is low."""
    if plans.slo == FREE:
        return
    sure = best.sure
    if sure >= SURE:
        console.print(f"keeps the SLO: {sure:.0%} sure")
        return
    console.print(
        f"keeps the SLO by its estimate only: {sure:.0%} sure, since intervals reach beyond it",
        style="yellow",
    )
    surest = plans.surest
    if surest is None:
        console.print("no deployment that was tried is clearly surer")
        return
    more = best.tokens_per_s_per_device / surest.tokens_per_s_per_device
    cost = f"{more:.2g} times the price of a token"
    if price:
        cost = f"{plain(_token_price(surest, price).value)} $ a million output tokens"
    console.print(
        f"surer: {surest.text()} on {surest.deployment.devices}, {surest.sure:.0%}, at {cost}"
    )


def _token_price(one: Planned, price: float) -> Interval:
    return one.prediction.dollars(price)["million_tokens"]


def _rows(one: Planned, slo: Slo, price: float) -> Sequence[Sequence[str | Text]]:
    """Return two rows of the table: estimates, and below them their 90 % intervals."""
    ttft, tpot, good = one.figure("ttft"), one.figure("tpot"), one.prediction.good
    rate = one.prediction.tokens_per_s
    count = one.deployment.devices
    per = [end / count for end in rate]
    texts = [per_second(value) for value in per]
    if price:
        texts = [plain(dollars) for dollars in _token_price(one, price)]
    sure = "" if slo == FREE else f"{one.sure:.0%}"
    named = f"{one.text()} on {count}"
    # A queue that grows without limit has no latency.
    grows = not one.keeps_up
    first = (
        texts[0],
        "grows" if grows else duration(ttft.value * 1e6),
        duration(tpot.value * 1e6),
        f"{good.value:.1%}",
        sure,
    )
    second = (
        f"{texts[1]}\u2013{texts[2]}",
        "" if grows else _ends(ttft),
        _ends(tpot),
        f"{100 * good.lo:.0f}\u2013{good.hi:.0%}",
    )
    return (*first, named), tuple(Text(text, style="dim") for text in second)


def _ends(seconds: Interval) -> str:
    """Return both bounds, with a single unit if it is the same."""
    low, high = duration(seconds.lo * 1e6), duration(seconds.hi * 1e6)
    number, _, unit = low.partition(" ")
    return f"{number}\u2013{high}" if high.endswith(f" {unit}") else f"{low}\u2013{high}"


def _span(interval: Interval) -> str:
    return f"90 % interval {per_second(interval.lo)} to {per_second(interval.hi)}"


def _table(*names: str, numbers: bool = True) -> Table:
    """Return a table whose first column, and others without numbers, are left-aligned."""
    return plain_table(*names, right=names[1:] if numbers else (), fold=names)


def print_fleet(console: Console, prediction: FleetPrediction) -> None:
    """Print totals, pools, the worst hours, and the alternative of a static fleet."""
    data: JsonMapping = prediction.to_dict()
    cost = (
        f"{plain(data['cost'])} $"
        if "cost" in data
        else f"{plain(data['device_hours'])} device hours"
    )
    console.print(
        headline(
            f"{_share(data['slo_attainment'])} of {data['requests']:,.0f} requests keep the SLO",
            f"  ({_share(data['slo_attainment_lo'])} to {_share(data['slo_attainment_hi'])})  "
            f"{cost} in {plain(data['hours'])} h",
        )
    )
    if len(data["slo_attainment_by_model"]) > 1:
        each = (
            f"{name} {_share(share)}" for name, share in data["slo_attainment_by_model"].items()
        )
        console.print("of these: " + ", ".join(each))
    for key, text in (
        ("device_hours", "device hours"),
        ("cost", "$"),
        ("dollars_per_million_tokens", "$ a million output tokens"),
    ):
        if key in data:
            console.print(f"{_figure_span(data, key)} {text}")
    if "energy_j" in data:
        low, high = (quantity(data[f"energy_{end}_j"], "J") for end in ("lo", "hi"))
        console.print(f"{quantity(data['energy_j'], 'J')} ({low} to {high})")
    _print_pools(console, data)
    _print_hours(console, data)
    if "static" in data:
        own = data["static"]
        sizes = ", ".join(f"{count} {name}" for name, count in own["replicas"].items())
        what = "cost" if "saved_cost" in own else "device_hours"
        console.print(
            f"without scaling {sizes} keep it as often ({_share(own['slo_attainment'])}) for "
            f"{plain(own[what])} {'$' if what == 'cost' else 'device hours'}: scaling saves "
            f"{own[f'saved_{what}']:.0%}"
        )
    print_notes(console, data["notes"])


def _share(kept: float) -> str:
    """Return a share of requests, never 100 %: no prediction is that sure."""
    return f"{kept:.2%}" if kept < 0.99995 else "> 99.99%"


def _figure_span(data: JsonMapping, key: str) -> str:
    return f"{plain(data[key])} ({plain(data[f'{key}_lo'])} to {plain(data[f'{key}_hi'])})"


def _print_pools(console: Console, data: JsonMapping) -> None:
    names = ("pool", "replicas", "of", "requests/s", "in SLO", "start", "keep the SLO")
    table = plain_table(*names, right=names[1:], indented=True)
    for pool in data["pools"]:
        own = pool["recommended"]
        table.add_row(
            pool["name"],
            f"{pool['replicas_mean']:.1f}, at most {pool['replicas_max']:.0f}",
            f"{pool['devices']} x {pool['device']}",
            plain(pool["requests_per_s"]),
            plain(pool["requests_per_s_within_slo"]),
            duration(pool["startup_s"] * 1e6),
            f"{own[0]} to {own[1]} replicas" if own else "no number",
        )
    console.print(table)


def _print_hours(console: Console, data: JsonMapping) -> None:
    """Print the hours with the lowest SLO attainment, in order of time."""
    worst = sorted(data["by_hour"], key=lambda hour: hour["slo_attainment"])[:_HOURS]
    names = ("hour", "requests", "keep SLO", "device h", "replicas", "waiting")
    table = plain_table(*names, right=names, indented=True)
    for hour in sorted(worst, key=lambda hour: hour["hour"]):
        table.add_row(
            str(hour["hour"]),
            f"{hour['requests']:,.0f}",
            _share(hour["slo_attainment"]),
            plain(hour["device_hours"]),
            " + ".join(f"{count:.1f}" for count in hour["replicas"].values()),
            plain(hour["backlog_max"]),
        )
    if len(worst) < len(data["by_hour"]):
        console.print(f"the {_HOURS} worst of {len(data['by_hour'])} hours:")
    console.print(table)
