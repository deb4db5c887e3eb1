"""Print explanations of a program's kernels."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...common.units import duration, plain
from ...models.explain.kernel import TREESHAP, KernelExplanation, Outside
from ...models.trust.neighbours import Neighbour
from ..program.explain import ExplainedKernel, ProgramExplanation
from .parts import factor_table, headline, plain_table, print_notes

#: Number of contributions to print; the others are summed into one row.
_SHOWN = 6
#: A factor this close to one would print as 1.00 or 1.01, so it is left out.
_SAME = 0.005


def print_explanation(console: Console, explanation: ProgramExplanation) -> None:
    """Print the total and, for each kernel, what its prediction is made of."""
    p = explanation.prediction
    console.print(
        headline(duration(p.latency_us), f" on {p.device}, model {p.model}, lowering {p.lowering}")
    )
    for kernel in explanation.kernels:
        console.print()
        _print_kernel(console, kernel)
    notes = dict.fromkeys(
        [*p.notes, *(n for k in explanation.kernels for n in k.explanation.notes)]
    )
    print_notes(console, notes)


def _print_kernel(console: Console, kernel: ExplainedKernel) -> None:
    e = kernel.explanation
    title = Text(kernel.name, style="bold")
    title.append(
        f"  {e.kind}, {kernel.share:.1%} of the kernel time, {kernel.executions:.0f} executions",
        style="not bold",
    )
    if kernel.origin:
        title.append(f", from {kernel.origin}", style="not bold")
    console.print(title)
    console.print(
        f"  {duration(e.latency_us)} = (roofline {duration(e.roofline_us)} [{e.bound}] + floor "
        f"{duration(e.floor_us)}) × {e.factor:.2f} ({e.source})"
    )
    # How the program around it changes the kernel's time, such as operands left in a cache.
    place = kernel.in_program_us / e.latency_us if e.latency_us > 0 else 1.0
    if abs(place - 1.0) >= _SAME:
        console.print(
            f"  in this program {duration(kernel.in_program_us)}: × {place:.2f} for its place "
            "(what caches hold of its operands, loops, kernels beside it)"
        )
    if e.contributions:
        console.print(_contributions(e))
    console.print(Text(f"  {_domain_text(e)}"))
    if e.neighbours:
        console.print(_neighbours(e.neighbours))


def _contributions(e: KernelExplanation) -> Table:
    # Both start from a reference: SHAP values from the mean over the training data (Lundberg et
    # al., Nature Machine Intelligence 2020), ablation from the median kernel of the kind.
    how = "TreeSHAP" if e.method == TREESHAP else "ablation to the training median"
    start = "mean of training" if e.method == TREESHAP else "median kernel of its kind"
    rows = [(start, e.baseline), *((c.group, c.log_ratio) for c in e.contributions[:_SHOWN])]
    rest = e.contributions[_SHOWN:]
    if rest:
        rows.append((f"{len(rest)} other groups", sum(c.log_ratio for c in rest)))
    return factor_table(f"learned factor by group ({how})", [*rows, ("together", e.log_ratio)])


def _domain_text(e: KernelExplanation) -> str:
    if e.domain_score is None or e.domain_threshold is None:
        return "in the domain of the model" if e.in_domain else "outside the domain of the model"
    figures = f"score {e.domain_score:.2f}, threshold {e.domain_threshold:.2f}"
    side = "in" if e.in_domain else "outside"
    text = f"{side} the training domain ({figures})"
    # Features beyond their range explain more than a score; else only the combination is unusual.
    beyond = [o for o in e.outside if o.beyond]
    if beyond:
        return text + ": " + "; ".join(map(_beyond_text, beyond))
    if e.in_domain:
        return text
    names = ", ".join(o.feature for o in e.outside[:3])
    return f"{text}: no training kernel near it combines {names}"


def _beyond_text(o: Outside) -> str:
    side = "below" if o.value < o.low else "above"
    return f"{o.feature} = {plain(o.value)} is {side} the trained {plain(o.low)} to {plain(o.high)}"


def _neighbours(neighbours: tuple[Neighbour, ...]) -> Table:
    figures = ("label", "predicted unseen", "distance")
    names = ("  nearest kernels of the dataset", "kind", "device", *figures)
    table = plain_table(*names, right=figures, fold=names, indented=True)
    for n in neighbours:
        table.add_row(
            f"  {n.label}",
            n.kind,
            n.device,
            duration(n.measured_us),
            duration(n.predicted_us),
            f"{n.distance:.2f}",
        )
    return table
