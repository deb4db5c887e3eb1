"""Fleets of a file: answers, agreement with whole simulated runs, errors that say where."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import StringIO
from math import ceil
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from opcast.cli import app
from opcast.common.errors import OpcastError, PlanError
from opcast.predict.cluster import fleet_curves
from opcast.predict.cluster.deployment import deployment_of
from opcast.predict.cluster.fleet_file import ENGINE_START_S, parse_fleet, read_fleet
from opcast.predict.cluster.serving import ServingPredictor
from opcast.predict.cluster.serving_case import FleetCase, LoadSpec, ModelCase, ServingCase
from opcast.predict.cluster.serving_fleet import attained, predict_fleet
from opcast.predict.cluster.serving_load import parse_slo
from opcast.predict.render.serving import print_fleet
from opcast.server.cluster_tasks import simulate_serving
from opcast.server.tasks import Task
from opcast.simulate.serving.load import Load

FLEET = """
slo: ttft=2s,tpot=60ms
hours: 24
devices: {h100-sxm: 8}
models:
  chat:
    workload: llama-3.1-8b
    weights: fp8
    rate: [5, 5, 5, 5, 5, 5, 5, 5, 20, 40, 40, 40, 40, 40, 40, 40, 40, 30, 20, 10, 5, 5, 5, 5]
    prompt: lognormal:1024:0.6
    output: "200"
pools:
  own:
    model: chat
    device: h100-sxm
    replicas: [1, 4]
    price: 2
    scaling: {metric: utilisation, target: 0.7, up_s: 60}
    startup: {storage_gbps: 2}
  rented:
    model: chat
    device: l40s
    replicas: [1, 8]
    price: 1
    scaling: {metric: concurrency, target: 40}
    startup: {seconds: 90, provision_s: 60}
    spot: {rate_per_h: 0.2, notice_s: 30, replacement_s: 120}
"""


#: Of 300 requests of a run the first hundred are not counted.
COUNT, SETTLED = 300, slice(100, None)


@pytest.fixture(scope="module")
def predictor() -> Iterator[ServingPredictor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet_curves, "COUNT", COUNT)
        patch.setattr(fleet_curves, "SETTLED", SETTLED)
        yield ServingPredictor(None)


def test_a_day_of_two_chips(predictor: ServingPredictor) -> None:
    found = predict_fleet(predictor, parse_fleet(FLEET))
    data = found.to_dict()
    # Linear between hours, and back to the first: as many as the hours' rates in sum.
    assert data["requests"] == pytest.approx(460 * 3600)
    assert data["served"] + data["waiting_at_end"] == pytest.approx(data["requests"])
    assert data["slo_attainment_lo"] <= data["slo_attainment"] <= data["slo_attainment_hi"]
    assert data["slo_attainment"] > 0.9
    # 7 to 7.5 GB of weights in fp8, and tables of words in 16 bits of 1 to 2 GB, at 2 GB/s.
    own, rented = data["pools"]
    assert ENGINE_START_S + 4.0 < own["startup_s"] < ENGINE_START_S + 5.0
    assert rented["startup_s"] == 90.0
    assert data["cost"] == pytest.approx(2 * own["device_hours"] + rented["device_hours"])
    assert data["dollars_per_million_tokens"] == pytest.approx(
        data["cost"] / (data["served"] * 200 / 1e6)
    )
    assert sum(hour["cost"] for hour in data["by_hour"]) == pytest.approx(data["cost"])
    # Without scaling the busiest hours decide, of which a third of the day has none.
    assert data["static"]["slo_attainment"] >= data["slo_attainment"]
    assert 0.1 < data["static"]["saved_cost"] < 0.7
    assert data["energy_lo_j"] < data["energy_j"] < data["energy_hi_j"]
    text = StringIO()
    print_fleet(Console(file=text, width=100), found)
    assert "keep the SLO" in text.getvalue()
    assert "scaling saves" in text.getvalue()


def test_recommended_replicas_keep_the_slo_when_played(predictor: ServingPredictor) -> None:
    peak = "slo: ttft=2s,tpot=60ms\nhours: 4\n{more}\n" + (
        "models: {{m: {{workload: llama-3.1-8b, rate: [10, 30, 60, 20]}}}}\n"
        "pools: {{all: {{model: m, device: h100-sxm, replicas: {count}, price: 2}}}}\n"
    )
    # One replica is overloaded by the second hour: of what waits no token is there, which is paid
    # for. A second one has no device.
    text = peak.format(count=2, more="devices: {h100-sxm: 1}\nstep_s: 1700")
    found = predict_fleet(predictor, parse_fleet(text))
    data = found.to_dict()
    assert data["served"] < 0.8 * data["requests"]
    assert data["dollars_per_million_tokens"] == pytest.approx(8e6 / (data["served"] * 256), 0.1)
    assert data["dollars_per_million_tokens_lo"] < data["dollars_per_million_tokens_hi"]
    assert any("too few devices to start 1 of the replicas" in note for note in data["notes"])
    # Hours hold the steps whose middle lies in them, all of them once.
    assert sum(hour["cost"] for hour in data["by_hour"]) == pytest.approx(data["cost"])
    # Sixty requests a second at the busiest step, not the 45 of the hour's mean; twenty at the end.
    text = peak.format(count=1, more="")
    pool = predict_fleet(predictor, parse_fleet(text)).to_dict()["pools"][0]
    each = pool["requests_per_s_within_slo"]
    assert pool["recommended"] == [ceil(20 / each), ceil(60 / each)]
    for fewer, keeps in ((0, True), (1, False)):
        text = peak.format(count=ceil(60 / each) - fewer, more="")
        hours = predict_fleet(predictor, parse_fleet(text)).to_dict()["by_hour"]
        assert (min(hour["slo_attainment"] for hour in hours) >= 0.99) is keeps


def test_hours_agree_with_whole_runs(predictor: ServingPredictor, tmp_path: Path) -> None:
    # 100 s each at a third to 1.3 of what two replicas serve, and the queue that is left.
    rng = np.random.default_rng(1)
    case = ServingCase(
        ModelCase("llama-3.1-70b", weights="fp8"), FleetCase("h100-sxm-x4", "", "tp=2")
    )
    most, span = 7.7, 120.0
    shares = [0.35, 0.6, 0.7, 1.3, 0.3]
    times = np.concatenate(
        [
            np.sort(rng.uniform(i * span, (i + 1) * span, rng.poisson(most * share * span)))
            for i, share in enumerate(shares)
        ]
    )
    load = Load(rng.integers(500, 3000, len(times)), rng.integers(100, 500, len(times)), times)
    rows = zip(times, load.prompts, load.outputs, strict=True)
    lines = ["arrival_s,prompt,output", *(f"{a},{p},{o}" for a, p, o in rows)]
    (tmp_path / "trace.csv").write_text("\n".join(lines))
    (tmp_path / "fleet.yaml").write_text(
        "slo: ttft=2s,tpot=60ms\nrequests: trace.csv\nstep_s: 10\n"
        "models: {m: {workload: llama-3.1-70b, weights: fp8}}\n"
        "pools: {all: {model: m, device: h100-sxm, plan: tp=2, replicas: 2}}\n"
    )
    found = predict_fleet(predictor, read_fleet(tmp_path / "fleet.yaml"))
    assert found.static is None
    seen = predictor.simulate(deployment_of(case), LoadSpec(rate=1.0), load).seen
    slo = parse_slo("ttft=2s,tpot=60ms")
    kept = (seen.ttft <= slo.ttft) & (seen.tpot <= slo.tpot)
    for i in range(len(shares)):
        fluid = attained(found.played[0], slice(i * 12, (i + 1) * 12))
        whole = kept[(times >= i * span) & (times < (i + 1) * span)].mean()
        if fluid >= 0.99:
            assert whole >= 0.98, (i, fluid, whole)
        assert fluid == pytest.approx(whole, abs=0.3)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("storage_gbps: 2", "storage: 2", "startup has no key 'storage'"),
        ("startup: {storage_gbps: 2}", "initial: 1", "the start-up time of a replica is unknown"),
        ("replicas: [1, 4]", "replicas: [4, 1]", r"replicas=\[4, 1\]"),
        ("metric: utilisation", "metric: cpu", "metric='cpu'"),
        ("model: chat", "model: talk", "model='talk' is not a model of the file"),
        ("price: 2", "prize: 2", "unknown key 'prize'"),
        ("plan: tp=1", "memory: 2", "memory=2"),
        ("rate: [5,", "rate: [-5,", "rate="),
        ("slo: ttft=2s,tpot=60ms", "seed: 1", "the model has no SLO"),
        ("weights: fp8", "weights: 8", "weights: 8 is not of the type"),
        ("hours: 24", "hours: 1e9", "at most 500,000 steps"),
        ("hours: 24", "step_s: 7200", "at most 3600"),
        ("replicas: [1, 4]", "replicas: 4", "a pool of exactly 4 replicas cannot scale"),
        ("{h100-sxm: 8}", "{h100-sxm: few}", "'few' h100-sxm"),
        ("hours: 24", "requests: trace.csv", "files of the server are not read"),
        ("device: l40s", "device: mine.yaml", "files of the server are not read"),
    ],
)
def test_errors_say_where(old: str, new: str, said: str) -> None:
    text = FLEET.replace("    price: 2\n", "    price: 2\n    plan: tp=1\n")
    assert old in text
    with pytest.raises(OpcastError, match=said) as error:
        parse_fleet(text.replace(old, new, 1), "fleet.yaml")
    assert "fleet.yaml" in str(error.value)


def test_server_answers_the_text_of_a_file(predictor: ServingPredictor) -> None:
    text = FLEET[: FLEET.index("  rented:")]
    task = Task(kind="simulate-serving", model="roofline")
    found = simulate_serving({}, task, json.dumps({"fleet": text}).encode())
    assert found == predict_fleet(predictor, parse_fleet(text)).to_dict()
    with pytest.raises(PlanError, match="device does not apply to a fleet"):
        simulate_serving({}, task, json.dumps({"fleet": text, "device": "l4"}).encode())


def test_command_refuses_what_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET)
    found = CliRunner().invoke(app, ["simulate-serving", "--fleet", str(path), "--rate", "3"])
    assert found.exit_code == 2
    assert "--rate does not apply to a fleet" in " ".join(found.stderr.split())
