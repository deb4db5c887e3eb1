"""Engines that spread experts over more than a box, against published figures of DeepSeek-V3."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import pytest

from opcast.common.errors import PlanError
from opcast.features.devices.catalogue import read_device
from opcast.features.operators.op import DISPATCHED, Op
from opcast.models.core.registry import OPERATOR_MODEL
from opcast.predict.cluster.deployment import deployment_of
from opcast.predict.cluster.serving import ServingPredictor
from opcast.predict.cluster.serving_case import (
    EngineOptions,
    FleetCase,
    LoadSpec,
    ModelCase,
    ServingCase,
)
from opcast.predict.cluster.serving_launch import launches
from opcast.predict.operator.serving_operators import ServingLatency, load_serving_operators

from ...support.cases import every


class Published(NamedTuple):
    """A published rate of DeepSeek-V3 or R1: tokens a second and device."""

    what: str
    rate: float
    within: float
    device: str
    plan: str
    prompt: int
    batch: int = 0
    framework: str = "sglang"
    skew: float = 1.0
    overlap: bool | None = None


LMSYS, PROFILE = "LMSYS, 96 H100, May 2025", "github.com/deepseek-ai/profile-data"
#: Prompts alone, 16,384 tokens a device, where there is no batch; else decoding so many a device.
FIGURES = [
    Published(LMSYS, 57674 / 8, 0.2, "h100-sxm", "dp=32", 1024),
    Published(LMSYS, 54543 / 8, 0.2, "h100-sxm", "dp=32", 2048),
    Published(LMSYS, 50302 / 8, 0.2, "h100-sxm", "dp=32", 4096),
    Published(LMSYS, 59337 / 8, 0.15, "h100-sxm", "dp=32", 4096, skew=0.0),
    Published(PROFILE, 62713 / 8, 0.15, "h800-sxm", "dp=32", 4096, skew=0.0),
    Published(LMSYS, 22282 / 8, 0.15, "h100-sxm", "dp=72", 2000, 256),
    Published(LMSYS, 22282 / 8 / 1.255, 0.15, "h100-sxm", "dp=72", 2000, 256, overlap=False),
    Published(LMSYS, 22282 / 8 / 2.54, 0.2, "h100-sxm", "dp=72,redundant=0", 2000, 256),
    Published(PROFILE, 18598 / 8, 0.2, "h800-sxm", "dp=128", 4096, 128, skew=0.0),
    Published("DeepSeek, a day on H800", 14800 / 8, 0.15, "h800-sxm", "dp=144", 4989, 128),
    Published("LMSYS, GB200, September 2025", 9087, 0.25, "gb200", "dp=48", 2000, 768),
    Published("vLLM, H200, December 2025", 2200, 0.45, "h200-sxm", "dp=32", 2000, 256, "vllm"),
]


@cache
def predictor() -> ServingPredictor:
    return ServingPredictor(load_serving_operators(OPERATOR_MODEL))


def rate(one: Published) -> float:
    """Predicted tokens a second and device."""
    ranks = int(one.plan.split(",")[0].removeprefix("dp="))
    fleet = FleetCase(device=one.device, plan=one.plan)
    budget, passes = 16384, 2
    spec = LoadSpec(prompt=str(one.prompt), output="1", count=passes * ranks * budget // one.prompt)
    if one.batch:
        # Prompts run elsewhere, on as many workers as it takes.
        fleet = FleetCase(device=one.device, plan=one.plan, prefill="dp=32", prefill_replicas=200)
        spec = LoadSpec(prompt=str(one.prompt), output="100", batch=one.batch * ranks)
    options = EngineOptions(
        token_budget=budget,
        max_batch=one.batch,
        prefix_cache=False,
        expert_skew=one.skew,
        overlap=one.overlap,
    )
    model = ModelCase(workload="deepseek-v3", framework=one.framework)
    own = deployment_of(ServingCase(model, fleet, options))
    found = predictor().simulate(own, spec)
    if one.batch:
        return one.batch / found.seconds("tpot")
    return float(found.load.prompts.sum()) / found.run.makespan / ranks


@pytest.mark.parametrize(
    "one", every(3, FIGURES), ids=lambda one: f"{one.what}-{one.plan}-{one.prompt}"
)
def test_published_rates(one: Published) -> None:
    assert rate(one) == pytest.approx(one.rate, rel=one.within)


def test_more_ranks_lose_little_for_each() -> None:
    rates = [
        rate(Published("", 0.0, 0.0, "h100-sxm", f"dp={n}", 4096)) for n in (16, 32, 64, 128, 256)
    ]
    assert min(rates) > 0.7 * max(rates)


@pytest.mark.parametrize(
    ("experts", "rows", "tflops"),
    [(4, 8192, (1297, 1099)), (8, 4096, (1288, 1093)), (4, 256, (932, 815))],
)
def test_grouped_products(experts: int, rows: int, tflops: tuple[float, float]) -> None:
    # DeepGEMM on H800: rows of each expert by 7168 x 4096 and by 2048 x 7168.
    products = np.array([2.0 * experts * rows * 7168 * 4096, 2.0 * experts * rows * 2048 * 7168])
    published = float((products / np.array(tflops)).sum() / 1e12)
    shape = (experts * rows, 7168, 2048, 1, experts, 1, 1)
    op = Op("moe", shape, "fp8_block", variant=DISPATCHED)
    found = ServingLatency(read_device("h800-sxm"), None, "sglang")(op)
    assert found == pytest.approx(published, rel=0.2)


def wide(plan: str = "dp=32", **options: float | bool) -> ServingCase:
    return ServingCase(
        ModelCase(workload="deepseek-v3", framework="sglang"),
        FleetCase(device="h100-sxm", plan=plan),
        EngineOptions(**options),  # type: ignore[arg-type]
    )


def test_what_is_assumed_is_said_and_launched() -> None:
    own = deployment_of(wide())
    notes = " ".join(predictor().predict(own, LoadSpec(batch=32, prompt="64", output="2")).notes)
    said = "the busiest of 32 expert ranks gets 1.01 times the mean load, with 32 redundant experts"
    assert said in notes
    assert "--no-overlap" in notes
    command = launches(own)["SGLang"].command
    for flag in ("--enable-eplb", "--ep-num-redundant-experts 32", "--enable-two-batch-overlap"):
        assert flag in command
    plain = launches(deployment_of(wide("dp=32,redundant=0", overlap=False)))["SGLang"].command
    assert "eplb" not in plain and "overlap" not in plain


def test_a_plan_names_the_copies_that_fill_its_ranks() -> None:
    # 256 experts and 5 copies are 16.3 of each of 16 ranks: 17 are 272, with 16 copies.
    for asked, held in (("5", "16"), ("16", "16"), ("0", "0")):
        plan = deployment_of(wide(f"dp=16,redundant={asked}")).engine.plan
        assert plan.text() == f"dp=16,ep=16,redundant={held}"


def test_copies_take_memory() -> None:
    model = deployment_of(wide()).model
    held = [
        model.weight_parts(deployment_of(wide(plan)).engine.plan)["experts"]
        for plan in ("dp=32", "dp=32,redundant=0")
    ]
    assert held[0] / held[1] == pytest.approx(9 / 8)


def test_options_of_wide_engines_are_refused_elsewhere() -> None:
    for options in ({"overlap": False}, {"expert_skew": 0.0}):
        with pytest.raises(PlanError, match="more than 8 ranks"):
            deployment_of(wide("dp=8", **options))
