"""Plans that are silent: recipes of frameworks, and one answer wherever they are asked."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from io import StringIO

import pandas as pd
import pytest
from rich.console import Console

from opcast.common.errors import PlanError
from opcast.models.steps.model import StepModel
from opcast.predict.cluster.recipes import as_run, interleaved, may_fit
from opcast.predict.cluster.step_case import StepCase
from opcast.predict.render.step import print_step
from opcast.server import agent
from opcast.server.cluster_schemas import SimulateQuery
from opcast.simulate.step.fitting import Fit
from opcast.simulate.step.memory import StageMemory
from opcast.simulate.step.named_workloads import make_workload, read_workload
from opcast.simulate.step.plan import idle_setting, parse_plan, resolved
from opcast.simulate.step.presets import preset_names

from ...support.commands import opcast

LLAMA = {
    "layers": 32, "d_model": 4096, "heads": 32, "kv_heads": 8, "d_ff": 14336, "vocab": 128256,
    "seq": 8192, "batch": 256,
}  # fmt: skip
LLAMA_405B = {
    "layers": 126, "d_model": 16384, "heads": 128, "kv_heads": 8, "d_ff": 53248, "vocab": 128256,
    "seq": 16384, "batch": 256,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "sizes", "plan", "virtual"),
    [
        ("llama", "layers=8,batch=64", "tp=4,pp=2,dp=2", 2),
        # 79 GiB of 80 as 1F1B, and 91 in chunks, which the error of the estimate allows.
        ("llama-3-8b", "batch=16,seq=65536", "tp=4,pp=4", 4),
        # 79 GiB, and 106 in chunks, which it does not.
        ("llama-3-8b", "batch=16,seq=32000", "tp=2,pp=8", 1),
    ],
)
def test_every_way_to_ask_takes_the_same_plan(model, sizes, plan, virtual, tmp_path):
    cluster = "dgx-h100-x16"

    def asked(*command, plan=plan):
        words = ("--workload", model, "--set", sizes, "--cluster", cluster, "--plan", plan)
        return json.loads(opcast(*command, *words, "--json").stdout)

    step = asked("simulate")
    assert parse_plan(step["plan"]).virtual == virtual
    (fit,) = asked("fit")["results"]
    assert fit["needed_bytes"] == step["memory_bytes_per_device"]
    assert step["plan"] in fit["subject"]
    (note,) = [note for note in step["notes"] if "interleaved" in note]
    assert [own.split(" it needs ")[0] for own in fit["notes"]] == [note.split(" it takes ")[0]]
    exported = asked("export", "chakra", "--out", str(tmp_path / "traces"))
    line = {"workload": model, "set": sizes, "cluster": cluster, "plan": plan}
    lines = tmp_path / "plans.jsonl"
    lines.write_text(json.dumps(line))
    screened = json.loads(opcast("screen", lines).stdout)
    settings = dict(pair.split("=") for pair in sizes.split(","))
    query = SimulateQuery(workload=model, settings=settings, cluster=cluster, plan=plan)
    served = agent.predict_step(query)
    for other in (exported, screened, served):
        assert other["latency_us"] == step["latency_us"]
    assert [screened[k] for k in ("lo_us", "hi_us")] == [step[k] for k in ("lo_us", "hi_us")]
    # What is printed is no longer silent, and answers the same.
    pasted = asked("simulate", plan=step["plan"])
    assert (pasted["latency_us"], pasted["plan"]) == (step["latency_us"], step["plan"])


def test_plans_of_sweeps_answer_alike_when_pasted(tmp_path):
    words = ("--workload", "llama-3-8b", "--set", "batch=64,seq=4096", "--cluster", "dgx-h100-x16")
    grid = "tp=4,pp=2,data=dp,recompute=none,split=1"
    opcast("sweep", *words, "--grid", grid, "--out", tmp_path / "plans")
    rows = pd.read_parquet(tmp_path / "plans" / "sweep.parquet")
    assert set(rows["schedule"]) == {"1f1b", "interleaved", "zero-bubble"}
    for plan, step_us in zip(rows["plan"], rows["step_us"], strict=True):
        done = opcast("simulate", *words, "--plan", plan, "--json")
        assert json.loads(done.stdout)["step_us"] == step_us


def test_a_pipeline_of_which_nothing_is_said_is_as_in_recipes():
    def asked(plan):
        case = StepCase(cluster="dgx-h100-x64", framework="nemo", plan=plan, model="roofline")
        return case.predict(make_workload("llama", LLAMA), None)

    found, plain = asked("tp=4,pp=4,dp=4"), asked("tp=4,pp=4,dp=4,schedule=1f1b")
    # 32 layers in 4 stages, chunks of two.
    assert found.plan.virtual == 4 and found.step.total < plain.step.total
    assert found.interval.hi >= plain.step.total
    (note,) = [note for note in found.notes() if "interleaved" in note]
    assert "virtual=4" in note and "nemo" in note
    assert not [note for note in plain.notes() if "interleaved" in note]


@pytest.mark.parametrize(
    ("recompute", "fits"),
    # Activations of 1F1B and of three chunks: with the rest 86 and 106 GiB a device of 80, 68 and
    # 81 GiB without the matrices of attention, 34 and 35 GiB with those of a layer at a time.
    [("none", (False, False)), ("selective", (True, False)), ("full", (True, True))],
)
def test_a_pipeline_is_interleaved_where_that_fits(recompute, fits):
    def asked(schedule):
        plan = f"tp=8,pp=16,dp=4,zero=1,recompute={recompute}{schedule}"
        case = StepCase(cluster="dgx-h100-x512", plan=plan, model="roofline")
        return case.predict(make_workload("llama", {**LLAMA_405B, "batch": 256, "seq": 8192}), None)

    plain, chunks = asked(",schedule=1f1b"), asked(",schedule=interleaved,virtual=3")
    assert (plain.fit.fits, chunks.fit.fits) == fits
    # 81 GiB are within the error of the estimate; where neither fits, nothing speaks for 1F1B.
    found = asked("")
    assert found.plan == chunks.plan and found.step.total == chunks.step.total
    assert found.interval.lo == min(plain.interval.lo, chunks.interval.lo)
    assert found.interval.hi == max(plain.interval.hi, chunks.interval.hi)
    # By the lower end, exp(-0.2) of the count, 81 GiB are 66 of 79, and 106 are 87.
    assert found.may_fit == (fits == (True, False))
    printed = StringIO()
    print_step(Console(file=printed, width=120), found)
    said = ", may not fit" if found.may_fit else "" if found.fit.fits else ", does NOT fit"
    assert printed.getvalue().splitlines()[0].endswith(f"h100-sxm{said}")
    (note,) = [note for note in found.notes() if "interleaved" in note]
    assert ("error of the estimated memory" in note) == (fits == (True, False))


@pytest.mark.parametrize(("gib", "may"), [(79, True), (97, True), (98, False)])
def test_chunks_are_given_up_where_the_error_of_the_memory_does_not_allow_them(gib, may):
    stage = StageMemory(0.0, 0.0, 0.0, gib * 2.0**30, 0.0, 0.0, 0.0)
    # The lower end is exp(-0.2) of the count: 80 GiB of 97.7.
    assert may_fit(StepModel(), "", Fit((stage,), 80 * 2.0**30)) == may


@pytest.mark.parametrize("framework", ["", *StepModel.find().frameworks])
@pytest.mark.parametrize("mode", ["train", "forward"])
@pytest.mark.parametrize("products", ["", "fp8"])
def test_printed_plans_can_be_pasted(framework, mode, products):
    for name in preset_names():
        sizes = {"batch": 64, "mode": mode, **({"products": products} if products else {})}
        work = read_workload(name, sizes)
        for text in ("dp=8", "fsdp=8", "dp=8,zero=1", "pp=2,dp=4", "pp=2,dp=2,cp=2,zero=1"):
            if idle_setting(work, parse_plan(text)):
                continue
            with suppress(PlanError):
                plan = interleaved(parse_plan(text), work, 8, framework)
                found = resolved(work, as_run(work, plan, framework), 8)
                assert parse_plan(found.text()) == found
                assert not idle_setting(work, found), (name, found)


def test_recipes_say_nothing_that_does_not_act():
    work = read_workload("llama-3-8b", {"batch": 64})
    assert as_run(work, parse_plan("fsdp=8"), "nemo").text() == "fsdp=8,reduce=bf16"
    eight = replace(work, products="fp8")
    found = as_run(eight, parse_plan("fsdp=8"), "nemo").text()
    assert found == "fsdp=8,reduce=bf16,quantized_weights=true"
    # Nothing is gathered in replicas.
    assert as_run(eight, parse_plan("dp=8"), "megatron-bridge").text() == "dp=8"


@pytest.mark.parametrize(
    ("devices", "batch", "seq", "plan", "tflops"),
    [
        # Table 4 of "The Llama 3 Herd of Models" (arXiv:2407.21783): bf16, interleaved (3.3.2).
        (8192, 2048, 8192, "tp=8,pp=16,dp=64", 430),
        (16384, 2048, 8192, "tp=8,pp=16,dp=128", 400),
        (16384, 128, 131072, "tp=8,cp=16,pp=16,dp=8", 380),
    ],
)
def test_metas_run_lies_in_the_interval_of_a_plan_that_says_no_schedule(
    devices, batch, seq, plan, tflops
):
    case = StepCase(cluster=f"dgx-h100-x{devices}", plan=f"{plan},zero=1")
    work = make_workload("llama", {**LLAMA_405B, "batch": batch, "seq": seq})
    found = case.predict(work, None)
    seconds = work.model_flops() / devices / (tflops * 1e12)
    assert found.interval.lo < seconds < found.interval.hi
    assert [note for note in found.notes() if "interleaved" in note]
