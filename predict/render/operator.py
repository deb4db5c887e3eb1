"""Print predictions of library operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...common.units import duration
from ..operator.predict import OpEstimate
from .parts import factor_table, print_notes, timed_headline

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from ...models.operators.explain import OpExplanation


#: Number of reasons for being outside the training domain to print.
SHOWN_REASONS = 4


def print_op(console: Console, estimate: OpEstimate) -> None:
    """Print a prediction in two lines."""
    console.print(_headline(estimate, estimate.family))
    console.print(
        f"  roofline {duration(estimate.roofline_us)} [{estimate.bound}]; {_trust(estimate)}",
        highlight=False,
        markup=False,
    )
    for reason in estimate.outside[:SHOWN_REASONS]:
        console.print(f"  outside: {reason}", highlight=False, markup=False)
    if len(estimate.outside) > SHOWN_REASONS:
        rest = len(estimate.outside) - SHOWN_REASONS
        console.print(f"  outside: {rest} more reasons (--json)", highlight=False)


def print_op_explanation(console: Console, estimate: OpExplanation) -> None:
    """Print what a prediction is made of."""
    console.print(_headline(estimate, estimate.family))
    console.print(
        f"  {duration(estimate.latency_us)} = analytical estimate {duration(estimate.base_us)} "
        f"[{estimate.bound}] × {estimate.factor:.2f}; roofline {duration(estimate.roofline_us)}",
        highlight=False,
        markup=False,
    )
    terms = ", ".join(f"{name} {duration(us)}" for name, us in _known(estimate.terms).items())
    console.print(f"  estimate of {terms}; what overlaps does not add up", highlight=False)
    parts = [("in other sizes", estimate.baseline)]
    parts += [(c.group, c.log_ratio) for c in estimate.contributions]
    rows = [*parts, ("together", estimate.log_ratio)]
    console.print(factor_table("learned on top, by group", rows))
    console.print(f"  {_trust(estimate)}", highlight=False)
    for near in estimate.neighbours:
        console.print(
            f"  measured {duration(near.measured_us)} at distance {near.distance:.2f}: "
            f"{near.label}",
            highlight=False,
            markup=False,
        )
    print_notes(console, estimate.notes)


def _headline(estimate: OpEstimate | OpExplanation, what: str) -> Text:
    rest = f"{what} on {estimate.device}"
    return timed_headline(estimate.latency_us, estimate.lo_us, estimate.hi_us, rest)


def _trust(estimate: OpEstimate | OpExplanation) -> str:
    side = "inside" if estimate.in_domain else "outside"
    return f"device {estimate.scope}, {side} the training domain"


def _known(terms: Mapping[str, float]) -> dict[str, float]:
    return {name: us for name, us in terms.items() if us > 0}
