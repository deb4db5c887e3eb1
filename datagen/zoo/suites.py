"""Sizes to profile: for each family a grid from a millisecond to seconds on two CPU cores.

Small and medium programs dominate, since a device is learned from many shapes, not from long runs.
"""

from __future__ import annotations

from ...common.errors import OpcastError
from .catalog import FAMILIES, Setting
from .grids import GRIDS
from .registry import family, parse_settings

BUDGETS = ("quick", "standard", "full")
"""Suites by growing cost: "full" is "standard" and the sizes of a large accelerator."""


def size_grid(name: str, budget: str = "standard") -> list[dict[str, Setting]]:
    """List settings of a family that together span its sizes.

    Args:
        name: Name of the family.
        budget: "quick" (tiny, for a smoke test; empty for some families), "standard" (a small CPU
            machine) or "full" (standard, and more for a large accelerator).

    Raises:
        OpcastError: The family or the budget is unknown.
    """
    if budget not in BUDGETS:
        raise OpcastError(f"unknown suite {budget!r}", hint="suites: " + ", ".join(BUDGETS))
    grid = GRIDS[family(name).name]
    # "quick" is not part of the others: it is a smoke test.
    tiers = ("standard", "full") if budget == "full" else (budget,)
    return [
        parse_settings(name, line.split())
        for tier in tiers
        for line in grid.get(tier, "").strip().splitlines()
    ]


def suite(name: str = "standard") -> list[tuple[str, dict[str, Setting]]]:
    """List the programs of a suite as pairs of family and settings.

    Args:
        name: "quick", "standard" or "full" (see ``size_grid``).

    Raises:
        OpcastError: The suite is unknown.
    """
    return [(item, settings) for item in FAMILIES for settings in size_grid(item, name)]
