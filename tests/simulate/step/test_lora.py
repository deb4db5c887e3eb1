"""Steps that train adapters beside frozen weights: work, bytes and memory by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from opcast.common.errors import PlanError
from opcast.simulate.step.blocks import Stage, step_stages
from opcast.simulate.step.fitting import memory_of
from opcast.simulate.step.memory import layer_activations
from opcast.simulate.step.named_workloads import make_workload, read_workload
from opcast.simulate.step.plan import Plan, parse_plan, resolved
from opcast.simulate.step.workload import Workload

SIZES = {"layers": 4, "d_model": 512, "heads": 8, "kv_heads": 4, "d_ff": 1024, "vocab": 1024,
         "seq": 512, "batch": 16}  # fmt: skip
TOKENS = 16 * 512
#: Weights of a layer: queries, keys and values, output, and three matrices of the feed-forward.
QKV, OUT, FED = (512, 1024), (512, 512), (512, 3 * 1024)
FROZEN = 4 * sum(a * b for a, b in (QKV, OUT, FED)) + 1024 * 512
#: Adapters of rank 8 in four layers: of attention, and of gate and up as one product and down.
ADAPTERS = 4 * 8 * (512 + 1024 + 512 + 512)
MORE = 4 * 8 * (512 + 2048 + 1024 + 512)


def lora(**sizes: object) -> Workload:
    return make_workload("llama", {**SIZES, "lora_rank": 8, **sizes})


def own_stage(work: Workload, text: str = "dp=1,microbatches=1") -> Stage:
    return step_stages(work, planned(work, text))[0]


def planned(work: Workload, text: str) -> Plan:
    plan = parse_plan(text)
    return resolved(work, plan, plan.devices)


@pytest.mark.parametrize(
    ("targets", "adapters"), [("attention", ADAPTERS), ("all-linear", ADAPTERS + MORE)]
)
def test_frozen_weights_have_no_gradients(targets: str, adapters: int) -> None:
    work = lora(lora_targets=targets)
    assert work.trained_parameters == adapters
    full = replace(work, lora_rank=0)
    assert work.parameters - full.parameters == adapters
    counts = own_stage(work).counts()
    products = sum(c.flops() * n for c, n in counts.items() if c.kind == "product")
    # Two passes over frozen weights, three over adapters, two FLOPs a weight and token.
    assert products == 2 * TOKENS * (2 * FROZEN + 3 * adapters)
    attention = full.model_flops() - 6.0 * TOKENS * FROZEN
    assert work.model_flops() == pytest.approx(products + attention, rel=1e-12)
    # The optimiser reads 16 and writes 14 bytes of each trained parameter.
    (update,) = own_stage(work).update
    assert update.shape == (30 * adapters,)
    names = {call.name for call in counts if call.name.endswith("_dw")}
    assert all("_lora_" in name for name in names)
    assert ("up_lora_a_dw" in names) == (targets == "all-linear")


def test_only_adapters_are_reduced_and_have_state() -> None:
    work = lora()
    for text, gathers in (("dp=4", 0), ("fsdp=4", 2)):
        stage = own_stage(work, f"{text},microbatches=1")
        sent = [call for unit in stage.units for call in (*unit.scatters, *unit.once)]
        kind = "reduce_scatter" if gathers else "all_reduce"
        assert sum(call.size for call in sent if call.kind == kind) == 2 * ADAPTERS
        gathered = sum(call.size for unit in stage.units for call in unit.gathers)
        tables_and_norms = 2 * 1024 * 512 + 4 * 2 * 512
        held = FROZEN - 1024 * 512 + ADAPTERS + tables_and_norms
        assert gathered == (2 * held if gathers else 0)
        memory = memory_of(work, planned(work, f"{text},microbatches=1"))[0]
        share = 4 if gathers else 1
        assert memory.parameters == 2 * held / share
        assert memory.gradients == 2 * ADAPTERS / share
        assert memory.optimizer == 12 * ADAPTERS / share


def test_inputs_of_frozen_products_are_not_kept() -> None:
    full = replace(lora(), lora_rank=0)
    plan = planned(full, "dp=1,microbatches=16")
    residual, inner = 512 * 512, 512 * 1024
    # Of attention's products the adapters need the input, which is the first norm's result.
    saved = layer_activations(full, plan) - layer_activations(lora(), plan)
    assert saved == 2 * (residual + inner)
    everywhere = lora(lora_targets="all-linear")
    assert layer_activations(everywhere, plan) == layer_activations(full, plan)


def test_frozen_weights_are_quantised_once_and_kept_so_if_asked() -> None:
    work = lora(dtype="fp8")
    counts = own_stage(work, "dp=1,microbatches=2").counts()
    moved = {c.name: c.shape[0] * n for c, n in counts.items() if "quantize" in c.name}
    # Inputs and gradients are read in two bytes and written in one each, plain and transposed.
    assert moved["qkv_quantize"] == 4 * 4 * TOKENS * 512
    assert moved["qkv_dquantize"] == 4 * 4 * TOKENS * 1024
    plans = [
        planned(work, f"dp=1,microbatches=2{text}") for text in ("", ",quantized_weights=true")
    ]
    kept, narrow = (memory_of(work, plan, 1)[0].parameters for plan in plans)
    layers = FROZEN - 1024 * 512 + ADAPTERS + 4 * 2 * 512
    assert kept - narrow == 2 * layers


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"lora_rank": -1}, "lora_rank=-1"),
        ({"lora_targets": "experts"}, "attention, all-linear"),
        ({"experts": 8, "top_k": 2, "lora_targets": "all-linear"}, "adapters of experts"),
    ],
)
def test_adapters_that_cannot_be_are_refused(sizes: dict[str, object], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        lora(**sizes)
    with pytest.raises(PlanError, match="no effect without lora_rank"):
        read_workload("llama-3-8b", ["lora_targets=all-linear"])


def test_experts_are_frozen_whole() -> None:
    work = lora(experts=8, top_k=2)
    names = {call.name for call in own_stage(work).counts()}
    assert "experts_dx" in names and not names & {"experts_dw", "router_dw", "head_dw"}
