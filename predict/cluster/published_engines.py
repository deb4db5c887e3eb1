"""Engines of published runs with prefill workers, whose tables lack their number."""

from __future__ import annotations

import re
from functools import cache
from math import prod

from ...common.files import own_data
from .case_table import Cells

#: Cells that identify the runs of a group of engines, in ``disaggregated.yaml``.
_KEYS = ("framework", "device", "model_group", "weight_dtype", "isl", "osl")
#: The engines of a run: prefill and decode workers, batch limit of a decode rank, and drafts.
_Engines = tuple[str, str, int | str, int | str]


def published_engines(cell: Cells) -> dict[str, object]:
    """Return cells with the engines of a run, in the columns of a serving table.

    Args:
        cell: A row of a serving table.

    Returns:
        Workers, plans, batch limit and drafts; empty if no published engines, or several, fit.
    """
    match = own_data("predict/cluster/disaggregated.yaml")["match"]
    if not all(re.search(pattern, cell.text(name)) for name, pattern in match.items()):
        return {}
    known = _runs().get(tuple(cell.text(name).removesuffix(".0") for name in _KEYS), {})
    fit = [own for own in known.get(cell.count("concurrency", 0), ()) if _fits(own, cell)]
    # Runs without drafts are named so where they were told apart from their twins with drafts.
    plain = cell.text("spec_decode").startswith("no")
    drafting = [] if plain else [own for own in fit if own[3]]
    fit = drafting or [own for own in fit if not own[3]]
    if len(fit) > 1:
        # Plans of tables are those of all devices of a worker, but show whether experts are whole.
        whole = cell.count("decode_ep", 1) > 1
        fit = [own for own in fit if ("e" in _parts(own[1])[1]) is whole]
    if len(fit) != 1:
        return {}
    prefill, decode, batch, drafts = fit[0]
    found = _workers("prefill_", prefill) | _workers("decode_", decode)
    return found | {"decode_max_num_seqs": batch, "drafts": drafts}


@cache
def _runs() -> dict[tuple[str, ...], dict[int, list[_Engines]]]:
    """Return the engines by the cells of a run, and by its requests in flight."""
    runs: dict[tuple[str, ...], dict[int, list[_Engines]]] = {}
    for group in own_data("predict/cluster/disaggregated.yaml")["runs"]:
        loads = runs.setdefault(tuple(str(group["cells"][name]) for name in _KEYS), {})
        for flights, *engines in group["engines"]:
            for flight in flights:
                loads.setdefault(flight, []).append(tuple(engines))
    return runs


def _fits(engines: _Engines, cell: Cells) -> bool:
    """Return whether a row gives no other number of workers or of their devices."""
    for prefix, own in zip(("prefill_", "decode_"), engines[:2], strict=True):
        count, _, devices = _parts(own)
        if cell.count(f"{prefix}workers", count) != count:
            return False
        ranks = [cell.count(f"{prefix}{name}", 0) for name in ("tp", "pp", "dp")]
        if all(ranks) and prod(ranks) != devices:
            return False
    return True


def _workers(prefix: str, text: str) -> dict[str, object]:
    """Return the cells of workers, see :func:`_parts`."""
    count, kind, devices = _parts(text)
    tp, dp = (1, devices) if kind.startswith("d") else (devices, 1)
    cells = {"workers": count, "tp": tp, "pp": 1, "dp": dp, "ep": devices if "e" in kind else 1}
    return {f"{prefix}{name}": value for name, value in cells.items()} | {f"{prefix}moe_tp": ""}


def _parts(text: str) -> tuple[int, str, int]:
    """Return number, kind of plan and devices of workers written as ``2 dep8``."""
    count, plan = text.split()
    kind = plan.rstrip("0123456789")
    return int(count), kind, int(plan.removeprefix(kind))
