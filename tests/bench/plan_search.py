"""Regret of ``opcast plan``: its best plan against the best of all plans of the same space.

For each program all plans are compiled, then the search may compile a few of them; the regret is
how much slower its best one is. ``hand`` are the plans that people make by hand (data parallel,
FSDP, Megatron: feed-forward and heads by ``tensor``).

    python tests/bench/plan_search.py --programs llama,moe --cluster h100-sxm-x4 --out FOLDER
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import numpy as np

from opcast.datagen.zoo.registry import build
from opcast.predict.plan import space
from opcast.predict.plan.case import PlanCase
from opcast.predict.plan.judge import CompiledPlan
from opcast.predict.plan.program import read_planned
from opcast.predict.plan.search import PlanSearch
from opcast.simulate.clusters.catalogue import find_cluster

#: Small enough to compile all plans of each in minutes, large enough to be worth several devices.
PROGRAMS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": (
        "llama",
        {"layers": 2, "dim": 2048, "heads": 16, "kv_heads": 8, "hidden": 5632, "seq": 1024},
    ),
    "gpt": ("bert", {"layers": 2, "dim": 1024, "heads": 16, "hidden": 4096, "seq": 512}),
    "moe": ("moe", {"layers": 2, "dim": 1024, "heads": 16, "hidden": 2816, "seq": 512}),
    "vit": ("vit", {"layers": 2, "dim": 1024, "heads": 16, "hidden": 4096, "batch": 64}),
    "dlrm": ("dlrm", {"tables": 8, "rows": 200000, "batch": 4096, "dtype": "f32"}),
    "unet": (
        "unet",
        {"channels": 128, "levels": 2, "blocks": 1, "attention_levels": 1, "batch": 32},
    ),
    "resnet": ("resnet", {"depth": 18, "batch": 256}),
}


def main() -> None:
    """Print a line for each program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    parser.add_argument("--cluster", default="h100-sxm-x4")
    parser.add_argument("--axes", default="data,fsdp,tensor,expert")
    parser.add_argument("--lowering", default="auto")
    parser.add_argument("--classes", type=int, default=2, help="Dimensions that tensor may cut.")
    parser.add_argument("--compiles", type=int, default=4, help="Plans that the search compiles.")
    parser.add_argument("--budget", type=float, default=float("inf"), help="Seconds of a search.")
    parser.add_argument("--out", type=Path, required=True, help="The same command goes on there.")
    given = parser.parse_args()
    space.MOST_CLASSES = given.classes
    for name in given.programs.split(","):
        family, settings = PROGRAMS[name]
        own = build(family, **{"batch": 8, "dtype": "bf16", **settings, "mode": "train"})
        started, spent = time.monotonic(), _cpu()
        program = read_planned(own.mlir(platform="cuda"))
        cluster = find_cluster(given.cluster)
        axes = tuple(given.axes.split(","))
        case = PlanCase(
            given.cluster,
            axes=axes,
            lowering=given.lowering,
            out=given.out / name,
            budget_s=given.budget,
        )
        search = PlanSearch(program, case)
        search.pipelines = None
        search.screen()
        screening = time.monotonic() - started
        chosen = search.chosen(given.compiles)
        picked = {search.key(plan) for plan in chosen}
        every = [s.plan for s in search.screened if s.plan.devices == cluster.size]
        wanted = list(dict.fromkeys([*chosen, *every]))
        # Of a search that goes on it would be a part.
        fresh = not (given.out / name / "plan.json").exists()
        search.compile(chosen)
        cpu = round(_cpu() - spent, 1) if fresh else None
        rows = search.compile(wanted)
        if search.left:
            print(f"{name}: {len(rows)} of {len(wanted)} plans are compiled", flush=True)
            continue
        made = [row for row in rows if isinstance(row, CompiledPlan)]
        best = min(made, key=_time)
        found = min((row for row in made if row.key in picked), key=_time)
        hand = min((row for row in made if _by_hand(row, program.space)), key=_time)
        screened = [row.screened_us for row in made if row.screened_us is not None]
        line = {
            "program": name,
            "plans": len(rows),
            "failed": len(rows) - len(made),
            "read_and_screen_s": round(screening, 1),
            "search_compile_s": round(sum(r.seconds for r in made if r.key in picked), 1),
            "search_cpu_s": cpu,
            "all_compile_s": round(sum(r.seconds for r in made), 1),
            "best": best.name,
            "best_us": round(_time(best), 1),
            "found": found.name,
            "found_us": round(_time(found), 1),
            "regret": round(_time(found) / _time(best) - 1, 4),
            "hand": hand.name,
            "hand_us": round(_time(hand), 1),
            "rank_correlation": round(_spearman(screened, [_time(row) for row in made]), 3),
        }
        print(json.dumps(line), flush=True)


def _cpu() -> float:
    """Processor seconds of this process and of those that it waited for."""
    sides = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(sum(resource.getrusage(side)[:2]) for side in sides)


def _by_hand(row: CompiledPlan, known: space.Space) -> bool:
    """Data parallel, FSDP, or Megatron inside one of them with everything that it cuts."""
    return "tensor" not in row.plan.sizes or len(row.plan.tensor) == len(known.tensor)


def _time(row: CompiledPlan) -> float:
    return row.latency_us


def _spearman(left: list[float], right: list[float]) -> float:
    ranks = [np.argsort(np.argsort(values)) for values in (left, right)]
    return float(np.corrcoef(*ranks)[0, 1]) if len(left) > 1 else 1.0


if __name__ == "__main__":
    main()
