"""Compare pipelines of a decoder over two boxes: screened, compiled stages, ``opcast simulate``.

    python tests/bench/plan_pipelines.py --out FOLDER

The decoder has four layers (width 2048, 1024 positions, batch 64, bf16, Adam), and is compiled by
XLA's compiler for H100. Compiled plans are kept in the folder.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from opcast.datagen.zoo.registry import build
from opcast.models.steps.model import StepModel
from opcast.predict.cluster.step import StepPredictor
from opcast.predict.locate import OPERATOR_MODEL
from opcast.predict.operator.step_operators import load_step_model
from opcast.predict.plan.case import PlanCase
from opcast.predict.plan.judge import CompiledPlan
from opcast.predict.plan.program import read_planned
from opcast.predict.plan.search import PlanSearch
from opcast.predict.plan.space import Change
from opcast.simulate.clusters.catalogue import find_cluster
from opcast.simulate.step.named_workloads import read_workload
from opcast.simulate.step.plan import parse_plan

CLUSTER = "dgx-h100-x16"
SIZES = {
    "layers": 4, "dim": 2048, "heads": 16, "kv_heads": 8, "hidden": 5632, "seq": 1024, "batch": 64,
}  # fmt: skip
STEP = [
    "layers=4", "d_model=2048", "heads=16", "kv_heads=8", "d_ff=5632", "seq=1024", "batch=64",
    "vocab=32000", "attention=naive",
]  # fmt: skip
#: Meshes and micro-batches, and the plans that ``simulate`` knows them by.
PLANS = {
    ((("fsdp", 16),), 1): "dp=16,zero=3",
    ((("data", 16),), 1): "dp=16",
    ((("data", 2), ("tensor", 8)), 1): "tp=8,dp=2",
    ((("pipeline", 2), ("data", 8)), 4): "pp=2,dp=8,microbatches=4",
    ((("pipeline", 2), ("tensor", 8)), 4): "pp=2,tp=8,microbatches=4",
}


def main() -> None:
    """Print a row for each plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of compiled plans")
    parser.add_argument("--lowering", default="auto")
    given = parser.parse_args()
    cluster = find_cluster(CLUSTER)
    program = read_planned(
        build("llama", dtype="bf16", mode="train", **SIZES).mlir(platform="cuda")
    )
    search = PlanSearch(program, PlanCase(CLUSTER, lowering=given.lowering, out=given.out))
    search.pipelines = True
    started = time.process_time()
    search.screen()
    staged = sum(own.plan.stages > 1 for own in search.screened)
    seconds = time.process_time() - started
    print(f"{len(search.screened)} plans, {staged} of them pipelines, screened in {seconds:.0f} s")
    known = {own.plan: own.seconds for own in search.screened}
    predictor = StepPredictor(
        cluster,
        load_step_model(OPERATOR_MODEL),
        framework="jax",
        compiled=True,
        learned=StepModel.find(),
    )
    work = read_workload("llama", STEP)
    print("plan | screened ms | compiled ms | simulate ms | memory GiB")
    for (mesh, micro), text in PLANS.items():
        cut = program.space.tensor if "tensor" in dict(mesh) else ()
        # In the order in which the search has classes.
        plan = next(
            own
            for own in known
            if (own.mesh, own.change, set(own.tensor)) == (mesh, Change(0, micro), set(cut))
        )
        (row,) = search.compile([plan])
        if not isinstance(row, CompiledPlan):
            print(f"{row.name} | {row.error}")
            continue
        held = row.memory_bytes_per_device / 2**30
        simulated = predictor.predict(work, parse_plan(text)).step.total
        times = (known[plan] * 1e3, row.latency_us / 1e3, simulated * 1e3)
        print(" | ".join([row.name, *(f"{ms:.1f}" for ms in times), f"{held:.1f}"]))


if __name__ == "__main__":
    main()
