"""Print whether a run fits the memory of a device."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from ...common.units import likely, size
from ..fit import MemoryFit
from .parts import print_notes

#: Least share of the peak of a part that is told.
_LEAST = 0.001


def print_fit(console: Console, found: MemoryFit) -> None:
    """Print the verdict, the parts of memory, and the change that would fit."""
    verdict = ("fits", "bold green") if found.fits else ("does NOT fit", "bold red")
    peak, needed = found.peak, found.needed
    console.print(
        Text.assemble(
            verdict,
            f"  {found.subject} on {found.device}: out of memory {likely(found.out_of_memory)}",
        )
    )
    console.print(
        f"peak memory {size(peak.value)}  [{size(peak.lo)} – {size(peak.hi)}] of "
        f"{size(found.capacity)} ({found.source})"
    )
    if peak.value - needed.value > _LEAST * peak.value:
        console.print(
            f"  can run in {size(needed.value)}  [{size(needed.lo)} – {size(needed.hi)}]: free "
            "segments are given back first"
        )
    told = {k: v for k, v in found.parts.items() if v > _LEAST * peak.value}
    parts = sorted(told.items(), key=lambda own: -own[1])
    console.print("  " + ", ".join(f"{name} {size(own)}" for name, own in parts))
    if found.beside:
        console.print(f"  {found.beside}")
    if found.change:
        console.print(f"  would fit with {found.change}")
    elif not found.fits:
        console.print("  no small change would fit")
    print_notes(console, found.notes)
