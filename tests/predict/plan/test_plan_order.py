"""``plan`` and ``simulate`` put the plans of one decoder in the same order."""

import pytest

from opcast.datagen.zoo.registry import build
from opcast.models.steps.model import StepModel
from opcast.predict.cluster.step import StepPredictor
from opcast.predict.locate import OPERATOR_MODEL
from opcast.predict.operator.step_operators import load_step_model
from opcast.predict.plan.case import PlanCase
from opcast.predict.plan.program import read_planned
from opcast.predict.plan.search import PlanSearch
from opcast.predict.plan.space import Plan
from opcast.simulate.clusters.catalogue import find_cluster
from opcast.simulate.step.named_workloads import read_workload
from opcast.simulate.step.plan import parse_plan

#: The same layers in the names of the zoo and of ``simulate``.
ZOO = {
    "layers": 2,
    "dim": 2048,
    "heads": 16,
    "kv_heads": 8,
    "hidden": 5632,
    "seq": 1024,
    "batch": 8,
}
STEP = [
    "layers=2", "d_model=2048", "heads=16", "kv_heads=8", "d_ff=5632", "seq=1024", "batch=8",
    "vocab=32000", "attention=naive",
]  # fmt: skip
#: Meshes with the plans that ``simulate`` knows them by.
MESHES = {
    (("fsdp", 4), ("tensor", 2)): "tp=2,dp=4,zero=3",
    (("fsdp", 8),): "dp=8,zero=3",
    (("tensor", 8),): "tp=8",
    (("data", 8),): "dp=8",
}


def assert_ordered_as_simulated(screened, plans, cluster, work, apart, count):
    """Plans that ``simulate`` finds ``apart``, ``count`` pairs, are screened in that order."""
    predictor = StepPredictor(
        find_cluster(cluster),
        load_step_model(OPERATOR_MODEL),
        framework="jax",
        compiled=True,
        learned=StepModel.find(),
    )
    own = read_workload("llama", work)
    simulated = {
        key: predictor.predict(own, parse_plan(text)).step.total for key, text in plans.items()
    }
    told = [
        (one, other)
        for one in plans
        for other in plans
        if simulated[one] > apart * simulated[other]
    ]
    assert len(told) == count
    # Nor are plans ordered that the screening finds alike.
    wrong = [(one, other) for one, other in told if screened[one] <= 0.95 * screened[other]]
    assert wrong == []
    assert sum(screened[one] > screened[other] for one, other in told) >= 4


@pytest.mark.slow
def test_the_order_of_plans_is_that_of_simulate(tmp_path):
    program = read_planned(build("llama", dtype="bf16", mode="train", **ZOO).mlir(platform="cuda"))
    sheet = PlanSearch(program, PlanCase("h100-sxm-x8", out=tmp_path)).screen()
    # Megatron's cuts: feed-forward, heads and both ends of the vocabulary.
    tensor = program.space.tensor
    screened = {
        mesh: sheet.cost(Plan(mesh, tensor if "tensor" in dict(mesh) else ())).seconds
        for mesh in MESHES
    }
    # Closer than their errors, two plans have no order.
    assert_ordered_as_simulated(screened, MESHES, "h100-sxm-x8", STEP, 1.05, 5)


@pytest.mark.slow
@pytest.mark.exhaustive  # half a minute: eight plans are compiled
def test_plans_that_people_make_by_hand_are_found_or_beaten(tmp_path):
    sizes = {**ZOO, "dim": 512, "heads": 8, "kv_heads": 4, "hidden": 1408, "seq": 512}
    program = read_planned(
        build("llama", dtype="bf16", mode="train", **sizes).mlir(platform="cuda")
    )
    search = PlanSearch(program, PlanCase("h100-sxm-x4", lowering="fused", out=tmp_path))
    search.screen()
    # Data parallel, FSDP, Megatron, and Megatron inside of FSDP.
    cut = program.space.tensor
    by_hand = [
        Plan((("data", 4),)),
        Plan((("fsdp", 4),)),
        Plan((("tensor", 4),), cut),
        Plan((("fsdp", 2), ("tensor", 2)), cut),
    ]
    found = min(row.latency_us for row in search.compile(search.chosen(4)))
    assert [found <= row.latency_us for row in search.compile(by_hand)] == [True] * 4


#: Meshes over two boxes, and the micro-batches, with the plans that ``simulate`` knows them by.
STAGED = {
    ((("data", 16),), 1): "dp=16",
    ((("fsdp", 16),), 1): "dp=16,zero=3",
    ((("data", 2), ("tensor", 8)), 1): "tp=8,dp=2",
    ((("pipeline", 2), ("data", 8)), 2): "pp=2,dp=8,microbatches=2",
    ((("pipeline", 2), ("data", 8)), 4): "pp=2,dp=8,microbatches=4",
    ((("pipeline", 2), ("tensor", 8)), 2): "pp=2,tp=8,microbatches=2",
    ((("pipeline", 2), ("tensor", 8)), 8): "pp=2,tp=8,microbatches=8",
    ((("pipeline", 4), ("data", 4)), 4): "pp=4,dp=4,microbatches=4",
    ((("pipeline", 4), ("data", 4)), 8): "pp=4,dp=4,microbatches=8",
}


@pytest.mark.exhaustive  # half a minute: nine ways are screened
def test_the_order_of_pipelines_is_that_of_simulate(tmp_path):
    sizes = {**ZOO, "layers": 4, "batch": 64}
    program = read_planned(
        build("llama", dtype="bf16", mode="train", **sizes).mlir(platform="cuda")
    )
    axes = ("pipeline", "data", "fsdp", "tensor")
    search = PlanSearch(program, PlanCase("dgx-h100-x16", axes=axes, out=tmp_path))
    search.screen()
    cut = set(program.space.tensor)
    screened = {
        (own.plan.mesh, own.plan.change.micro): own.seconds
        for own in search.screened
        if set(own.plan.tensor) in (set(), cut)
    }
    work = [*STEP[1:6], "layers=4", "batch=64", *STEP[7:]]
    # Steps that were left out err by 13 to 17 %.
    assert_ordered_as_simulated(screened, STAGED, "dgx-h100-x16", work, 1.07, 34)
