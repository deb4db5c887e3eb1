"""Print what a fleet does over its hours."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from ...common.units import duration, plain, quantity
from ..cluster.serving_fleet import FleetPrediction
from .parts import headline, plain_table, print_notes

#: Hours that are printed at most; --json has all.
_HOURS = 24


def print_fleet(console: Console, prediction: FleetPrediction) -> None:
    """Print totals, pools, the worst hours and what a fleet without scaling would take."""
    data: Any = prediction.to_dict()
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
            console.print(f"{_span(data, key)} {text}")
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
    """A share of requests, never all of them: no prediction is that sure."""
    return f"{kept:.2%}" if kept < 0.99995 else "> 99.99%"


def _span(data: Any, key: str) -> str:
    return f"{plain(data[key])} ({plain(data[f'{key}_lo'])} to {plain(data[f'{key}_hi'])})"


def _print_pools(console: Console, data: Any) -> None:
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


def _print_hours(console: Console, data: Any) -> None:
    """The hours in which the fewest requests keep the SLO, in order of time."""
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
