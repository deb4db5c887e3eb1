"""Learning from tables of steps, predicting and judging them."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from typer.testing import CliRunner

from opcast.cli import app
from opcast.common.errors import DatasetError, DeviceError, WorseModelError
from opcast.models.steps.model import StepModel
from opcast.predict.cluster import step as steps
from opcast.predict.cluster.case_table import read_cases, read_rows
from opcast.predict.cluster.step_table import StepRow, StepRuns, floor_seconds, step_row
from opcast.predict.locate import OPERATOR_MODEL
from opcast.predict.operator.step_operators import load_step_model
from opcast.simulate.clusters.catalogue import find_cluster
from opcast.simulate.step.plan import idle_setting
from opcast.workflows.judging import choice
from opcast.workflows.steps import PARTS, SAME, evaluate_steps, judge, judge_memory
from opcast.workflows.train_steps import train_steps

from ..support.cases import later

PACK = Path(os.environ.get("OPCAST_PUBLISHED_DATA", Path(__file__).parents[3] / "shared/data"))
TABLE = PACK / "published-steps" / "steps.csv.gz"
published = pytest.mark.skipif(not TABLE.is_file(), reason=f"no published steps at {TABLE}")

RUN = {
    "source": "mine", "framework": "megatron-lm", "device": "a100-sxm-80gb", "n_devices": 8,
    "devices_per_node": 8, "dtype": "bf16", "model": "small", "layers": 8, "d_model": 2048,
    "heads": 16, "kv_heads": 16, "d_ff": 8192, "gated": False, "vocab": 32000, "seq": 2048,
    "global_batch": 64, "position": "rope",
}  # fmt: skip
PLANS = [
    {"dp": 8, "micro_batch": 1, "grad_accum": 8},
    {"dp": 4, "tp": 2, "micro_batch": 2, "grad_accum": 8},
    {"dp": 2, "tp": 4, "micro_batch": 4, "grad_accum": 8},
    {"dp": 4, "pp": 2, "micro_batch": 1, "grad_accum": 16},
    {"dp": 1, "tp": 8, "micro_batch": 8, "grad_accum": 8},
    {"dp": 2, "tp": 2, "pp": 2, "micro_batch": 2, "grad_accum": 16},
]


def table(**columns: object) -> pd.DataFrame:
    rows = [{"id": f"r{i}", **RUN, **plan} for i, plan in enumerate(PLANS)]
    return pd.DataFrame(rows).assign(**columns)


def test_regret_and_rank_correlation_by_hand() -> None:
    own = pd.DataFrame(
        {"id": ["a", "b", "c"], "latency_us": [1.0, 2.0, 3.0], "measured_us": [12.0, 10.0, 30.0]}
    )
    asked = pd.DataFrame({"id": ["a", "b", "c"], "model": "m", "device": "d", "source": "s"})
    found = choice(asked, SAME, own["latency_us"], own["measured_us"]).iloc[0]
    # The plan predicted fastest takes 12 where the fastest takes 10; two of three pairs agree.
    assert found["regret"] == pytest.approx(0.2)
    assert found["tau"] == pytest.approx(1 / 3)
    assert found["plans"] == 3


def test_groups_count_the_same_whatever_their_size() -> None:
    frame = pd.DataFrame(
        {
            "id": [str(i) for i in range(4)],
            "source": ["s", "s", "s", "t"],
            "device": "d",
            "latency_us": [11.0, 11.0, 11.0, 15.0],
            "lo_us": 9.0,
            "hi_us": 12.0,
            "measured_us": 10.0,
            "memory_bytes": [8.0, 8.0, 8.0, 10.0],
            "memory_lo_bytes": [7.0, 7.0, 7.0, 9.0],
            "memory_hi_bytes": [14.0, 14.0, 9.0, 11.0],
            "measured_memory_bytes": [10.0, 10.0, 10.0, np.nan],
        }
    )
    (memory,) = judge_memory(frame).to_dict("records")
    assert memory["rows"] == 3 and memory["coverage"] == pytest.approx(2 / 3)
    assert memory["bias"] == pytest.approx(-0.2) and memory["width"] == pytest.approx(2.0)
    overall = judge(frame, pd.DataFrame({"id": frame["id"]})).overall
    assert overall["mape"] == pytest.approx((0.1 + 0.5) / 2)
    assert overall["coverage"] == 1.0
    assert overall["memory_mape"] == pytest.approx(0.2)


def test_parts_add_up_and_rows_that_cannot_be_expressed_stay() -> None:
    asked = table()
    asked.loc[2, "dtype"] = "int3"
    frame, judged, _ = evaluate_steps(asked, StepModel(), None)
    assert list(frame["id"]) == list(asked["id"])
    assert "int3" in frame.loc[2, "reason"] and np.isnan(frame.loc[2, "latency_us"])
    rest = frame.drop(2)
    assert rest[list(PARTS)].sum(axis=1).to_numpy() == pytest.approx(rest["latency_us"].to_numpy())
    assert (rest["lo_us"] < rest["latency_us"]).all() and (rest["memory_bytes"] > 2**30).all()
    assert judged.overall["expressed"] == pytest.approx(5 / 6)


def test_a_row_that_opcast_fails_on_does_not_cost_the_others(monkeypatch) -> None:
    real = steps.step_time

    def fails(workload, plan, *rest, **named):
        if plan.tp == 4:
            raise ZeroDivisionError("no layers")
        return real(workload, plan, *rest, **named)

    monkeypatch.setattr(steps, "step_time", fails)
    frame, judged, _ = evaluate_steps(table(), StepModel(), None)
    failed = frame["latency_us"].isna()
    assert failed.tolist() == [False, False, True, False, False, False]
    assert "please report it: ZeroDivisionError: no layers" in frame.loc[2, "reason"]
    assert judged.overall["expressed"] == pytest.approx(5 / 6)


def test_calibration_learns_from_calib_rows_and_judges_the_others() -> None:
    asked = table(split=["calib_a"] * 3 + ["test"] * 3)
    plain, _, _ = evaluate_steps(asked, StepModel(), None)
    asked["step_s"] = plain["latency_us"] * 1e-6 * 1.4
    before = evaluate_steps(asked, StepModel(), None)[1].overall["mape"]
    _, judged, model = evaluate_steps(asked, StepModel(), None, calibrate=True)
    assert before == pytest.approx(0.4 / 1.4)
    assert judged.overall["mape"] < 0.6 * before
    assert judged.by_group["rows"].sum() == 3
    assert any("cluster/mine|a100-sxm-80gb" in key for key in model.table.values)


def test_training_learns_a_slow_framework() -> None:
    asked = pd.concat([table(), table(framework="slow", source="theirs")], ignore_index=True)
    asked["id"] = [f"r{i}" for i in range(len(asked))]
    plain, _, _ = evaluate_steps(asked, StepModel(), None)
    slow = np.where(asked["framework"] == "slow", 1.5, 1.0)
    asked["step_s"] = plain["latency_us"] * 1e-6 * slow
    model, study = train_steps(asked, None, lambda _: None)
    left, curve = study.left, study.curve
    _, judged, _ = evaluate_steps(asked, model, None)
    # Six runs of each are shrunk towards one another: half of the difference is left.
    assert judged.overall["mape"] < 0.15
    # All steps are of one chip: without it, there are none to learn from.
    assert set(left["left_out"]) == {"row", "cluster", "source"}
    # With its source left out, nothing tells that a framework is slow.
    theirs = left["group"].str.startswith("theirs") & (left["left_out"] == "source")
    assert left.loc[theirs, "log"].mean() < -0.2
    # The factor on whole steps is what tells the frameworks apart.
    gains = study.gains.set_index("without")["row"]
    assert gains["whole"] > gains["–"]
    # Five of its six runs tell most of it.
    slow_runs = curve[curve["source"] == "theirs"].set_index("runs")
    assert slow_runs["mape"][5] < 0.6 * slow_runs["mape"][0]
    # Whichever five are chosen: they share the factor.
    assert slow_runs["chosen"][5] < 0.6 * slow_runs["chosen"][0]


def test_training_leaves_rows_of_split_test_alone() -> None:
    asked = table(split=["pack"] * 6, step_s=1.0)
    kept = asked.assign(split="test", step_s=100.0, id=[f"kept{i}" for i in range(6)])
    model, _ = train_steps(pd.concat([asked, kept]), None, lambda _: None)
    assert model.provenance["rows"] == 6
    assert model.to_dict() == train_steps(asked, None, lambda _: None)[0].to_dict()


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_commands_train_calibrate_and_evaluate(tmp_path: Path) -> None:
    runs = tmp_path / "runs.csv"
    asked = table()
    asked["step_s"] = np.linspace(1.0, 2.0, len(asked))
    asked.to_csv(runs, index=False)
    adapted = run("calibrate", "--steps", runs, "--out", tmp_path / "mine.json")
    assert "error of these 6 steps before" in adapted and "mine|a100-sxm-80gb: " in adapted
    out, page = tmp_path / "said.parquet", tmp_path / "page.html"
    said = run(
        "evaluate", "--steps", runs, "--out", out, "--model", tmp_path / "mine.json",
        "--page", page, "--no-track",
    )  # fmt: skip
    assert "measured steps, errors in %" in said and "Kendall's tau" in said
    assert len(pd.read_parquet(out)) == 6 and "Accuracy" in page.read_text()
    trained = run(
        "train", "--steps", runs, "--out", tmp_path / "own.json", "--no-track",
        "--left-out", tmp_path / "left.parquet",
    )  # fmt: skip
    assert "left out" in trained and StepModel.load(tmp_path / "own.json").provenance["rows"] == 6
    left = pd.read_parquet(tmp_path / "left.parquet")
    # All runs are of one cluster: without it, or its chip, there are none to learn from.
    assert set(left["left_out"]) == {"row"} and set(left["metric"]) == {"step"}
    assert left["measured"].to_list() == pytest.approx(asked["step_s"].to_list())
    assert (left["predicted"] > 0.0).all()


def test_steps_that_teach_nothing_of_each_other_are_not_saved(tmp_path: Path) -> None:
    """One step is half as long as predicted and one twice: each is worse after the other."""
    base, asked = StepModel.find(), table().head(2).assign(step_s=1.0)
    runs = StepRuns([row for row in read_rows(asked, step_row)[0] if row], load_step_model())
    seconds = [found.step.total for found in runs.predict(base)]
    asked["step_s"] = [seconds[0] / 2, seconds[1] * 2]
    asked.to_csv(tmp_path / "runs.csv", index=False)
    words = ["calibrate", "--steps", str(tmp_path / "runs.csv"), "--out", str(tmp_path / "m.json")]
    with pytest.raises(WorseModelError, match="worse on 2 steps held out of the calibration"):
        CliRunner().invoke(app, words, catch_exceptions=False)
    assert not (tmp_path / "m.json").exists()
    # Twice as long each: what the one says holds for the other.
    asked["step_s"] = [2 * own for own in seconds]
    asked.to_csv(tmp_path / "runs.csv", index=False)
    assert "error on 2 steps, each held out of the calibration: 100.0% before" in run(*words)


def test_steps_whose_times_follow_nothing_are_not_saved(tmp_path: Path) -> None:
    """All are slower, so that learning helps a little, but by nothing that the rows say."""
    base, asked = StepModel.find(), table().assign(step_s=1.0)
    runs = StepRuns([row for row in read_rows(asked, step_row)[0] if row], load_step_model())
    times = [found.step.total for found in runs.predict(base)]
    factors = [25.0, 1.5, 1.2, 28.0, 1.1, 22.0]
    asked["step_s"] = [own * factor for own, factor in zip(times, factors, strict=True)]
    asked.to_csv(tmp_path / "runs.csv", index=False)
    words = ["calibrate", "--steps", str(tmp_path / "runs.csv"), "--out", str(tmp_path / "m.json")]
    with pytest.raises(WorseModelError, match=r"of no use on .* error .*% before, .*% after"):
        CliRunner().invoke(app, words, catch_exceptions=False)
    assert not (tmp_path / "m.json").exists()


@pytest.mark.parametrize("seconds", [-7.6, 0.0, np.inf])
def test_steps_that_are_no_measurement_teach_nothing(tmp_path: Path, seconds: float) -> None:
    asked = table(step_s=1.5)
    asked.loc[2, "step_s"] = seconds
    asked.to_csv(tmp_path / "runs.csv", index=False)
    for words in (
        ("calibrate", "--steps", tmp_path / "runs.csv", "--out", tmp_path / "m.json"),
        ("train", "--steps", tmp_path / "runs.csv", "--out", tmp_path / "m.json", "--no-track"),
    ):
        with pytest.raises(DatasetError, match=rf"runs.csv: row r2: step_s is {seconds},"):
            CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False)
    assert not (tmp_path / "m.json").exists()


def test_steps_below_their_floor_or_far_off_teach_nothing(tmp_path: Path) -> None:
    """A 65 B token, 8 x A100: 6 x 403 M parameters x 131,072 tokens / (8 x 312 TFLOP/s)."""
    good = table().head(4)
    runs = StepRuns([row for row in read_rows(good, step_row)[0] if row], load_step_model())
    good["step_s"] = [2 * found.step.total for found in runs.predict(StepModel.find())]
    good.to_csv(tmp_path / "good.csv", index=False)
    more = table().tail(2).assign(step_s=[0.05, 1500.0], memory_gib=[np.nan, 66000.0])
    pd.concat([good, more]).to_csv(tmp_path / "all.csv", index=False)
    said = run("calibrate", "--steps", tmp_path / "all.csv", "--out", tmp_path / "all.json")
    run("calibrate", "--steps", tmp_path / "good.csv", "--out", tmp_path / "good.json")
    least = floor_seconds(runs.rows[0])
    sizes = 8 * (4 * 2048**2 + 2 * 2048 * 8192) + 2048 * 32000
    assert least >= 6 * sizes * 64 * 2048 / (8 * 312e12)
    assert "r4: not used: 0.05 s is below the floor of 0." in said and "of 8 a100-sxm-80gb" in said
    assert "r5: not used: a peak of 66000.00 GiB exceeds the 80.00 GiB of a a100-sxm-80gb" in said
    assert "r5: 1500 s is" in said and "times as long as predicted" in said
    own, without = (StepModel.load(tmp_path / f"{name}.json") for name in ("all", "good"))
    assert own.table.values == without.table.values
    frame, judged, _ = evaluate_steps(more, StepModel.find(), load_step_model())
    assert frame["measured_us"].notna().tolist() == [False, True] and len(judged.by_group) == 1


def test_one_run_is_not_taken_for_two(tmp_path: Path) -> None:
    file = tmp_path / "runs.csv"
    pd.concat([table(), table().tail(1)]).assign(step_s=1.0).to_csv(file, index=False)
    with pytest.raises(DatasetError, match="the id 'r5' is used by several rows"):
        read_cases(file, "steps")


def test_a_table_names_devices_as_a_command_does() -> None:
    (_,), (reason,) = read_rows(table(device="h100").head(1), step_row)
    assert "'h100' may be any of 3 devices" in reason


def test_a_tracked_training_names_its_table(tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("mlflow", reason="MLflow is not installed")
    monkeypatch.setenv("OPCAST_MLRUNS", str(tmp_path / "mlruns"))
    asked = table()
    asked["step_s"] = np.linspace(1.0, 2.0, len(asked))
    asked.to_csv(tmp_path / "runs.csv", index=False)
    run("train", "--steps", tmp_path / "runs.csv", "--out", tmp_path / "own.json")
    import mlflow

    (logged,) = mlflow.search_runs(experiment_names=["opcast"], output_format="list")
    (dataset,) = logged.inputs.dataset_inputs
    digest = hashlib.sha256(b"." + (tmp_path / "runs.csv").read_bytes()).hexdigest()[:16]
    assert (dataset.dataset.name, dataset.dataset.digest) == ("runs.csv", digest)


def test_runs_without_a_source_are_one_s_own_and_the_next_one_is_named(tmp_path: Path) -> None:
    runs = tmp_path / "runs.csv"
    asked = table().drop(columns="source")
    asked["step_s"] = np.linspace(1.0, 2.0, len(asked))
    asked.to_csv(runs, index=False)
    said = run("calibrate", "--steps", runs, "--out", tmp_path / "mine.json")
    assert "own|a100-sxm-80gb: " in said
    own = StepModel.load(tmp_path / "mine.json")
    assert any(key.endswith("cluster/own|a100-sxm-80gb") for key in own.table.values)
    line = next(line for line in said.splitlines() if line.startswith("measure next: "))
    assert "8 layers of 2048 on 8 × a100-sxm-80gb" in line
    sizes = "layers=8,d_model=2048,heads=16,d_ff=8192,vocab=32000,seq=2048,batch=64,gated=false"
    step = ("simulate", "--workload", "llama", "--set", sizes, "--cluster", "a100-sxm-80gb-x8")
    totals = [
        json.loads(run(*step, "--framework", "megatron-lm", "--json", *more))["step_us"]
        for more in ((), ("--steps", tmp_path / "mine.json"))
    ]
    assert totals[1] != totals[0]


def test_options_of_other_tables_are_refused(tmp_path: Path) -> None:
    for arguments in (
        ["evaluate", "--steps", "x.csv", "--published", "y", "--out", "z.csv"],
        ["evaluate", "--out", "z.csv"],
        ["evaluate", "--steps", "x.csv", "--limit", "3", "--out", "z.csv"],
        ["evaluate", "--published", "x", "--page", "p.html", "--out", "z.csv"],
        ["train", "--steps", "x.csv", "--model", "gnn"],
        ["train"],
        ["calibrate", "--steps", "x.csv", "--device", "h100-sxm"],
        ["calibrate"],
    ):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2, arguments


@published
@pytest.mark.slow
@pytest.mark.parametrize("every", [40, later(10)])
def test_every_published_step_is_expressed_and_most_are_inside(every: int) -> None:
    asked = read_cases(TABLE, "steps")
    # So many of each source, and one of the small ones.
    asked = asked[asked.groupby(asked["source"].str.split("@").str[0]).cumcount() % every == 0]
    _, judged, _ = evaluate_steps(asked, StepModel.find(), load_step_model("gpu-operators"))
    assert judged.overall["expressed"] == 1.0
    # These rows were learned from; without any learning the mean over groups is 33 %.
    assert judged.overall["mape"] < 0.16
    assert judged.overall["coverage"] > 0.8


def typed(row: StepRow, folder: Path, model: str) -> list[str]:
    """The command that asks for a row of a table."""
    sizes = folder / "workload.yaml"
    sizes.write_text(yaml.safe_dump({"family": "llama", **asdict(row.workload)}))
    asked = ["simulate", "--workload", str(sizes), "--cluster", row.cluster.name]
    plan = row.plan
    # What a framework's recipe sets on all plans is refused where someone types it in vain.
    if idle_setting(row.workload, plan).startswith("quantized_weights"):
        plan = plan.changed(quantized_weights=None)
    asked += ["--plan", plan.text(), "--model", model, "--json"]
    asked += ["--framework", row.framework, "--source", row.source]
    return asked if row.launched else [*asked, "--compiled"]


def can_be_typed(row: StepRow) -> bool:
    """Whether a row's cluster has a name, and all of its micro-batches are of one size."""
    try:
        return row.share == 1.0 and find_cluster(row.cluster.name) == row.cluster
    except DeviceError:
        return False


def compare_with_commands(asked: pd.DataFrame, folder: Path, model: str) -> None:
    """Assert that tables and commands give one answer, to the last digit."""
    operators = load_step_model(model)
    frame = evaluate_steps(asked, StepModel.find(), operators)[0]
    for said, row in zip(frame.to_dict("records"), read_rows(asked, step_row)[0], strict=True):
        assert row is not None
        result = CliRunner().invoke(app, typed(row, folder, model))
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        for name in ("latency_us", "lo_us", "hi_us", "host_us", "bubble_us"):
            assert found[name] == said[name], (row, name)
        assert found["memory_bytes_per_device"] == said["memory_bytes"]
        assert found["known"] == said["known"]


def test_the_command_gives_the_number_of_a_table(tmp_path: Path) -> None:
    kinds = [
        {},
        {"framework": "nanotron", "source": "vinjn/nanotron-ultrascale-playbook"},
        {"compile": True, "device": "h100-sxm"},
        {"framework": "megatron-bridge", "device": "b200", "experts": 8, "top_k": 2, "ep": 2},
        {"framework": "maxtext", "device": "tpu-v6e", "source": "AI-Hypercomputer/tpu-recipes"},
    ]
    asked = pd.concat([table(**kind) for kind in kinds], ignore_index=True)
    asked["ep"] = asked["ep"].where(asked["dp"] > 1)
    compare_with_commands(asked, tmp_path, "roofline")


@published
@pytest.mark.parametrize("count", [10, later(30)])
def test_the_command_gives_the_number_of_published_rows(tmp_path: Path, count: int) -> None:
    asked = read_cases(TABLE, "steps").sample(count, random_state=0).reset_index(drop=True)
    plain = [row is not None and can_be_typed(row) for row in read_rows(asked, step_row)[0]]
    assert sum(plain) >= 0.4 * count
    compare_with_commands(asked[plain].reset_index(drop=True), tmp_path, OPERATOR_MODEL)
