"""What a campaign would measure in its time, told before it begins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from .plan import Case, Plan, load_plan
from .settings import CampaignSettings

#: Part of the budget that a stage gets in one go, since a change of worker costs seconds.
TURN_PART = 1 / 8
#: Seconds until a worker measures, and those that finding the device takes: guesses.
_START_S, _FIND_S = 15.0, 25.0


def forecast(plan: Plan, budget_s: float) -> Iterator[tuple[float, list[Case]]]:
    """Yield the blocks that would be measured, each with the second at which it begins.

    Seconds are the plan's estimates; a campaign goes on with those that it sees.
    """
    now, since, stage, worker = _FIND_S, _FIND_S, "", ""
    done: set[str] = set()
    here: set[str] = set()
    spent = dict.fromkeys(plan.shares, 0.0)
    able = {case.worker for case in plan.cases}
    while True:
        prefer = stage if now - since < budget_s * TURN_PART else ""
        block = plan.next_block(done, spent, able, {}, budget_s - now, prefer, worker, here)
        if not block:
            return
        first, begin = block[0], now
        if first.worker != worker or any(c.replicate and c.repeats in here for c in block):
            now, worker, here = now + _START_S, first.worker, set()
        if now + plan.seconds(first, {}) > budget_s:
            return
        if first.stage != stage:
            stage, since = first.stage, begin
        yield now, block
        now += sum(plan.seconds(case, {}) for case in block)
        spent[stage] += now - begin
        done |= {case.key for case in block}
        here |= {case.key for case in block}


def told(settings: CampaignSettings) -> list[str]:
    """Lines on what a campaign would measure: every block, then how many of each kind."""
    platform = settings.device if settings.device != "auto" else "gpu"
    plan = load_plan(platform, settings.programs, settings.budget_s)
    lines = [f"plan for a {platform}, {settings.budget_s / 60:g} minutes, by guessed times"]
    counts: Counter[tuple[str, str]] = Counter()
    for start, block in forecast(plan, settings.budget_s):
        first = block[0]
        counts.update((case.stage, case.kind) for case in block)
        more = f" and {len(block) - 1} like it" if len(block) > 1 else ""
        lines.append(f"{start / 60:6.1f} min  {first.worker:5}  {first.key}{more}")
    planned = Counter((case.stage, case.kind) for case in plan.cases)
    lines += [f"{s} ({k}): {counts[s, k]} of {number}" for (s, k), number in planned.items()]
    return lines
