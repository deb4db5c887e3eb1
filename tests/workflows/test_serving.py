"""Learning from tables of serving, predicting and judging them."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from typer.testing import CliRunner

from opcast.cli import app
from opcast.common.errors import DatasetError
from opcast.models.serving.model import ServingModel, own_ends
from opcast.models.trust.calibrator import STANDARD
from opcast.predict.cluster.case_table import read_cases, read_rows
from opcast.predict.cluster.deployment import Workers
from opcast.predict.cluster.serving import ServingPredictor
from opcast.predict.cluster.serving_case import EngineOptions
from opcast.predict.cluster.serving_engine import engine_memory
from opcast.predict.cluster.serving_run import drifted
from opcast.predict.cluster.serving_table import (
    ServingRow,
    serving_row,
    serving_rows,
)
from opcast.predict.locate import OPERATOR_MODEL
from opcast.predict.operator.serving_operators import load_serving_operators
from opcast.workflows.serving.calibrate import calibrate_serving
from opcast.workflows.serving.evaluate import (
    configuration_choice,
    evaluate_serving,
    judged_rows,
)
from opcast.workflows.serving.rows import busy_share, settled_rows
from opcast.workflows.serving.train import (
    left_out_serving,
    left_outs,
    train_serving,
)

from ..support.cases import later

PACK = Path(os.environ.get("OPCAST_PUBLISHED_DATA", Path(__file__).parents[3] / "shared/data"))
TABLE = PACK / "published-serving" / "serving.csv.gz"
published = pytest.mark.skipif(not TABLE.is_file(), reason=f"no published serving at {TABLE}")

ROW = {
    "source": "mine", "device": "h100-sxm", "framework": "vllm", "framework_version": "0.11",
    "model": "small", "arch": "llama", "layers": 16, "d_model": 2048, "heads": 16, "kv_heads": 8,
    "head_dim": 128, "d_ff": 8192, "vocab": 32000, "weight_dtype": "bf16", "load": "closed",
    "isl": 512, "osl": 64,
}  # fmt: skip
PLANS = [{"tp": tp, "n_gpus": tp, "concurrency": c} for tp in (1, 2) for c in (1, 4, 16)]


def table(**columns: object) -> pd.DataFrame:
    rows = [{"id": f"r{i}", **ROW, **plan} for i, plan in enumerate(PLANS)]
    return pd.DataFrame(rows).assign(**columns)


@pytest.fixture(scope="module")
def plain() -> pd.DataFrame:
    """Predictions without effects and without a model of operators."""
    return evaluate_serving(table(), ServingModel(), None)[0]


def test_a_frame_has_every_row_with_intervals(plain: pd.DataFrame) -> None:
    assert plain["id"].tolist() == [f"r{i}" for i in range(6)]
    assert (plain["reason"] == "").all()
    for name in ("ttft_ms", "tpot_ms", "out_tok_s", "out_tok_s_per_gpu"):
        assert (plain[f"{name}_lo"] < plain[name]).all()
        assert (plain[name] < plain[f"{name}_hi"]).all()
    assert plain["out_tok_s_per_gpu"].tolist() == pytest.approx(
        (plain["out_tok_s"] / plain["n_gpus"]).tolist()
    )


def test_more_requests_in_flight_take_longer_and_give_more(plain: pd.DataFrame) -> None:
    one = plain.iloc[:3]
    assert one["tpot_ms"].is_monotonic_increasing and one["ttft_ms"].is_monotonic_increasing
    assert one["out_tok_s"].is_monotonic_increasing
    # In flight over the time of one: 64 tokens in the first and 63 further ones.
    seconds = (one["ttft_ms"] + 63 * one["tpot_ms"]) / 1e3
    assert one["out_tok_s"].tolist() == pytest.approx((64 * one_concurrency() / seconds).tolist())


def one_concurrency() -> np.ndarray:
    return np.array([1.0, 4.0, 16.0])


def test_a_token_takes_no_less_than_reading_the_weights(plain: pd.DataFrame) -> None:
    layer = 2048 * (2048 + 2 * 1024) + 2048 * 2048 + 3 * 2048 * 8192
    weights = 2.0 * (16 * layer + 2048 * 32000)
    assert plain["tpot_ms"].iloc[0] > weights / 3.35e12 * 1e3


def test_rows_that_cannot_be_expressed_say_why() -> None:
    asked = table()
    asked.loc[1, "load"] = "bursty"
    asked.loc[2, "device"] = "abacus"
    frame, judged, _ = evaluate_serving(asked, ServingModel(), None)
    assert "bursty" in frame["reason"][1] and "abacus" in frame["reason"][2]
    assert frame["tpot_ms"].isna().tolist() == [False, True, True, False, False, False]
    assert judged.overall["expressed"] == pytest.approx(4 / 6)


def test_weights_that_do_not_fit_are_a_reason() -> None:
    frame, _, _ = evaluate_serving(table(layers=2000).iloc[:1], ServingModel(), None)
    assert "do not fit" in frame["reason"][0]


def test_errors_by_hand(plain: pd.DataFrame) -> None:
    asked = table(tpot_ms=plain["tpot_ms"] * 1.25)
    frame, judged, _ = evaluate_serving(asked, ServingModel(), None)
    assert judged.overall["tpot_ms/median_ape"] == pytest.approx(0.2)
    assert judged.overall["tpot_ms/coverage"] == 1.0
    assert set(judged_rows(frame)["metric"]) == {"tpot_ms"}


def test_errors_of_energy_by_hand(plain: pd.DataFrame) -> None:
    """Joules of a token are power over tokens a second; the board of 700 W is never above it."""
    asked = table(j_per_tok=plain["j_per_tok"] / 1.1, power_w=plain["power_w"] * 1.25)
    frame, judged, _ = evaluate_serving(asked, ServingModel(), None)
    rate = frame["out_tok_s_per_gpu"] * frame["n_gpus"]
    assert frame["power_w"].to_numpy() == pytest.approx((frame["j_per_tok"] * rate).to_numpy())
    assert (frame["power_w"] / frame["n_gpus"]).between(0.15 * 700, 700).all()
    assert judged.overall["j_per_tok/mape"] == pytest.approx(0.1)
    assert judged.overall["power_w/mape"] == pytest.approx(0.2)


def test_the_choice_among_configurations_by_hand() -> None:
    frame = pd.DataFrame(
        {
            "id": ["a", "b", "c"],
            "n_gpus": [1, 2, 4],
            "out_tok_s_per_gpu": [10.0, 20.0, 30.0],
            "measured_out_tok_s": [12.0, 60.0, 80.0],
            "measured_ttft_ms": np.nan,
            "measured_tpot_ms": np.nan,
        }
    )
    asked = pd.DataFrame({"id": ["a", "b", "c"], **{k: [ROW[k]] * 3 for k in ("model", "device")}})
    found = configuration_choice(frame, asked).iloc[0]
    # By GPU they give 12, 30 and 20: the one predicted best gives 20 where the best gives 30.
    assert found["regret"] == pytest.approx(0.5)
    assert found["tau"] == pytest.approx(1 / 3)


def test_calibration_learns_of_ones_own_runs(plain: pd.DataFrame) -> None:
    asked = table(tpot_ms=plain["tpot_ms"] * 1.5, split=["calib_a"] * 4 + ["test"] * 2)
    before = evaluate_serving(asked, ServingModel(), None)[1]
    frame, after, _ = evaluate_serving(asked, ServingModel(), None, calibrate=True)
    assert after.overall["rows"] == 2 and len(frame) == 6
    assert after.overall["tpot_ms/mape"] < 0.4 * before.overall["tpot_ms/mape"]


def test_a_stack_of_ones_own_is_learned_with_its_memory(plain: pd.DataFrame) -> None:
    # What the engine of a tp=1 row would log if it used 70 % of the memory.
    rows, _ = read_rows(table(), serving_row)
    row = rows[0]
    assert row is not None
    own = row.deployment
    memory = engine_memory(replace(own, options=EngineOptions(memory=0.7)), own.engine)
    tokens = memory.cache / own.model.token_bytes(own.engine.plan)
    asked = table(tpot_ms=plain["tpot_ms"] * 1.4, source=None, kv_cache_tokens=np.nan)
    asked.loc[asked["tp"] == 1, "kv_cache_tokens"] = tokens
    model, figures = calibrate_serving(asked, None, ServingModel(), Path())
    one = figures.set_index("metric").loc["tpot"]
    assert one["before"] == pytest.approx(1.0 - 1.0 / 1.4, abs=0.01)
    assert one["after"] < 0.4 * one["before"] and one["unseen"] < 0.6 * one["before"]
    source, share = model.own_stack("h100-sxm")
    assert source == "own" and share == pytest.approx(0.7, abs=1e-3)
    # Its runs are of a known model, with intervals that are no narrower than its errors.
    context = ServingPredictor(None, model).context(replace(own, source="own"))
    assert ServingModel().tier(context) == "new" and model.tier(context) == "model"
    assert model.group_of(own.model.shape()) == "small"
    assert model.tier({**context, "cluster": "own|h200-sxm"}) == "new"
    sure = own_ends(ServingModel(ends={"tpot": (-0.1, 0.1)}), {"tpot": [-0.3, 0.05]})
    assert sure["tpot"] == (-0.3, 0.1) and sure["ttft"] == STANDARD
    with pytest.raises(DatasetError, match="no row to calibrate on"):
        calibrate_serving(table(), None, ServingModel(), Path())
    with pytest.raises(DatasetError, match="several sources"):
        mixed = table(tpot_ms=plain["tpot_ms"], source=["a", "b"] * 3)
        calibrate_serving(mixed, None, ServingModel(), Path())


def test_training_finds_a_slow_host(plain: pd.DataFrame) -> None:
    other = table(framework="sglang", tpot_ms=plain["tpot_ms"], id=[f"s{i}" for i in range(6)])
    slow = table(tpot_ms=plain["tpot_ms"] + 2.0)
    asked = pd.concat([slow, other], ignore_index=True)
    model, left = train_serving({Path(): asked}, None, lambda _: None)
    predictor = ServingPredictor(None, model)
    rows = [row for row in read_rows(asked, serving_row)[0] if row is not None]
    contexts = [predictor.context(rows[at].deployment) for at in (0, -1)]
    logs = [model.effects.log_factors(context)["host"] for context in contexts]
    assert logs[0] > logs[1] + 0.2
    before = np.log((plain["tpot_ms"] + 2.0) / plain["tpot_ms"]).to_numpy(float)
    fit = left.loc[left["left_out"] == "fit", "log"]
    assert np.abs(fit[:6]).mean() < 0.6 * before.mean()
    figures = left_out_serving(left)
    # All rows are of one device, source and model: without those, there are none to learn from.
    assert set(figures["left_out"]) == {"fit", "row", "set", "framework"}
    assert figures.loc[figures["left_out"] == "row", "coverage"].between(0.0, 1.0).all()


def test_what_is_left_out_in_turn() -> None:
    """A device is left out with every run of the framework, on whatever device."""
    asked = table(device=["h100-sxm"] * 4 + ["h200-sxm"] * 2, framework=["vllm", "sglang"] * 3)
    rows = [row for row in read_rows(asked, serving_row)[0] if row is not None]
    predictor = ServingPredictor(None, ServingModel())
    contexts = [predictor.context(row.deployment) for row in rows]
    parts = {
        (part.name, part.value): part for part in left_outs(contexts, [row.id for row in rows])
    }
    both = parts["device and framework", "h200-sxm vllm"]
    assert both.judge.tolist() == [False, False, False, False, True, False]
    assert both.learn.tolist() == [False, True, False, True, False, False]
    assert ("device and source", "h100-sxm mine") in parts
    # The runs of a model under one framework on one device are judged together.
    sets = [part.judge for (name, _), part in parts.items() if name == "set"]
    assert sum(sets).tolist() == [1] * 6 and all(
        own[0] == own[2] and own[1] == own[3] for own in sets
    )
    device = parts["device", "h200-sxm"]
    assert (device.judge == ~device.learn).all() and device.judge.sum() == 2


def test_first_tokens_with_set_up_are_not_learned_from() -> None:
    split = {
        "prefill_tp": 1, "decode_tp": 1, "prefill_workers": 1, "decode_workers": 1,
        "tp": None, "n_gpus": None, "ttft_ms": 1.0, "tpot_ms": 5.0,
    }  # fmt: skip
    asked = table(**split).assign(concurrency=2)
    predictor = ServingPredictor(None, ServingModel())
    own = evaluate_serving(asked, predictor.model, None)[0]["ttft_ms"]
    asked["ttft_ms"] = own * [2.0, 4.0, 1.0, 4.0, 1.0, 1.0]
    asked.loc[3, ["prefill_tp", "decode_tp", "tp"]] = [None, None, 2]
    rows = [row for row in read_rows(asked, serving_row)[0] if row is not None]
    said: list[str] = []
    kept = settled_rows(predictor, rows, said.append)
    # Two requests do not wait four times what one takes; of engines that do both nothing is left.
    has = ["ttft_ms" in row.measured for row in kept]
    assert has == [True, False, True, True, True, True]
    assert all("tpot_ms" in row.measured for row in kept) and said[0].endswith(": 1")
    assert settled_rows(predictor, kept[3:4], said.append) == kept[3:4]


def test_faulty_rows_are_not_learned_from(plain: pd.DataFrame) -> None:
    asked = table(tpot_ms=plain["tpot_ms"], flags=["impossible: x"] * 2 + [None] * 4)
    _, left = train_serving({Path(): asked}, None, lambda _: None)
    assert set(left["id"]) == {"r2", "r3", "r4", "r5"}


def test_runs_that_no_device_can_have_done_are_not_learned_from(plain: pd.DataFrame) -> None:
    fast = table(ttft_ms=0.1, tpot_ms=0.01)
    asked = table(ttft_ms=plain["ttft_ms"], tpot_ms=plain["tpot_ms"])
    # 16 requests of 512 + 64 tokens in 0.1 + 63 * 0.01 ms, of a model of 16 layers, each of
    # 2048 (2 * 2048 + 2 * 1024) + 3 * 2048 * 8192 weights, at 989 TFLOP/s: 100 times the peak.
    rows = [row for row in read_rows(fast, serving_row)[0] if row is not None]
    work = 2 * 16 * (2048 * (2 * 2048 + 2 * 1024) + 3 * 2048 * 8192) * 576
    peak = 16 / 0.73e-3 * work / 989e12
    assert busy_share(rows[2]) == pytest.approx(peak, rel=0.1)
    # One row of six is more than one in twenty: the others of its set are left out with it.
    mixed = asked.assign(
        ttft_ms=[0.1, *asked["ttft_ms"][1:]], tpot_ms=[0.01, *asked["tpot_ms"][1:]]
    )
    other = mixed.iloc[1:].assign(source="other", id=[f"o{i}" for i in range(5)])
    said: list[str] = []
    _, left = train_serving({Path("mixed.csv"): mixed, Path("other.csv"): other}, None, said.append)
    assert set(left["id"]) == {f"o{i}" for i in range(5)}
    assert any("mine, small, vllm, h100-sxm" in line for line in said)


def test_answers_below_their_floor_or_far_off_teach_nothing(plain: pd.DataFrame) -> None:
    """A token reads 16 layers of 60.8 M weights and the head, in 16 bits, at 3.35 TB/s."""
    asked = table(tpot_ms=plain["tpot_ms"])
    least = 2 * 16 * (2048 * (2 * 2048 + 2 * 1024) + 3 * 2048 * 8192) / 3.35e12 * 1e3
    asked.loc[0, "tpot_ms"] = 0.9 * least
    asked.loc[1, "tpot_ms"] *= 1000.0
    said: list[str] = []
    _, found = calibrate_serving(asked, None, ServingModel(), Path(), said.append)
    assert found["runs"].tolist() == [4] and found["before"][0] == pytest.approx(0.0, abs=0.01)
    assert "is below its floor of" in said[0] and said[0].startswith(
        f"{asked['id'][0]}: not used: tpot_ms"
    )
    assert "1,000 times as long as predicted" in said[1] and len(said) == 2
    # Neither do they where a table is judged after its own splits were learned from.
    told: list[str] = []
    asked["split"] = ["calib"] * 4 + ["test"] * 2
    _, judged, _ = evaluate_serving(asked, ServingModel(), None, calibrate=True, tell=told.append)
    assert told == said and judged.overall["tpot_ms/mape"] == pytest.approx(0.0, abs=0.01)


def test_commands(tmp_path: Path, plain: pd.DataFrame) -> None:
    asked = tmp_path / "runs.csv"
    table(tpot_ms=plain["tpot_ms"] * 1.1).to_csv(asked, index=False)
    runner = CliRunner()
    trained = runner.invoke(
        app, ["train", "--serving", str(asked), "--out", str(tmp_path / "m.json"), "--no-track"]
    )
    assert trained.exit_code == 0, trained.output
    again = runner.invoke(
        app,
        ["train", "--serving", str(asked), "--out", str(tmp_path / "n.json"), "--no-track",
         "--from", str(tmp_path / "m.json"), "--left-out", str(tmp_path / "left.csv")],
    )  # fmt: skip
    assert again.exit_code == 0, again.output
    left = pd.read_csv(tmp_path / "left.csv")
    assert set(left["left_out"]) == {"row"} and set(left["metric"]) == {"tpot"}
    seconds = plain["tpot_ms"].to_numpy(float) * 1.1e-3
    assert left["measured"].to_numpy() == pytest.approx(seconds)
    assert "round 0" in again.output and "round 3" not in again.output
    none = runner.invoke(app, ["train", "--serving", str(asked), "--from", str(tmp_path / "x")])
    assert none.exit_code != 0 and "x" in str(none.exception or none.output)
    out = tmp_path / "p.parquet"
    said = runner.invoke(
        app,
        ["evaluate", "--serving", str(asked), "--out", str(out), "--model",
         str(tmp_path / "m.json"), "--no-track"],
    )  # fmt: skip
    assert said.exit_code == 0, said.output
    assert "100.0 % of 6 rows can be predicted" in said.output
    assert len(pd.read_parquet(out)) == 6
    adapted, slow = tmp_path / "own.json", tmp_path / "slow.csv"
    table(tpot_ms=plain["tpot_ms"] * 2.0).to_csv(slow, index=False)
    said = runner.invoke(
        app, ["calibrate", "--serving", str(slow), "--out", str(adapted)], catch_exceptions=False
    )
    assert "median errors" in said.output and ServingModel.load(adapted).own_stack("h100-sxm")[0]
    page = runner.invoke(
        app, ["evaluate", "--serving", str(asked), "--out", str(out), "--page", "p.html"]
    )
    assert page.exit_code != 0 and "--page" in page.output


def typed(row: ServingRow, cells: pd.Series, folder: Path, model: str) -> list[str]:
    """The command that asks for a row of a table."""
    own, spec = row.deployment, row.spec
    sizes = folder / "workload.yaml"
    sizes.write_text(yaml.safe_dump({"family": "llama", **asdict(own.model.workload)}))

    def plan(workers: Workers) -> str:
        of = workers.plan
        return f"tp={of.tp},pp={of.pp}" + (
            f",dp={of.dp},ep={of.ep}" if of.ranks > of.tp or own.model.workload.experts else ""
        )

    said = {
        "workload": sizes, "device": own.device, "plan": plan(own.engine),
        "replicas": own.engine.count, "model": model, "source": own.source,
        "framework": f"{own.framework}@{own.version}" if own.version else own.framework,
        "weights": cells.get("weight_dtype"), "kv-cache": own.model.cache,
        "linear-layers": own.model.linear_layers, "prompt": spec.prompt, "output": spec.output,
        "requests": spec.requests, "concurrency": spec.concurrency, "batch": spec.batch,
        "rate": spec.rate, "count": 0 if spec.batch else spec.count,
        "max-batch": own.options.max_batch, "token-budget": own.options.token_budget,
        "recv-interval": own.options.recv_interval,
        "batch-wait-iters": own.options.batch_wait_iters,
        "batch-wait-ratio": own.options.batch_wait_ratio,
        "drafts": own.options.drafts, "accepted": own.options.accepted if own.options.drafts else 0,
    }  # fmt: skip
    if own.prefill is not None:
        said |= {
            "prefill": plan(own.prefill), "prefill-replicas": own.prefill.count,
            "prefill-batch": own.prefill.batch,
        }  # fmt: skip
    asked = ["simulate-serving", "--json", "--no-prefix-cache"]
    asked += [] if spec.concurrency or spec.batch or spec.rate or spec.requests else ["--offline"]
    if own.options.chunked is not None:
        asked.append("--chunked" if own.options.chunked else "--whole-prompts")
    if own.options.async_scheduling is not None:
        asked.append(
            "--async-scheduling" if own.options.async_scheduling else "--no-async-scheduling"
        )
    for name, value in said.items():
        if (
            value == value
            and value
            and not (spec.requests and name in ("prompt", "output", "count"))
        ):
            asked += [f"--{name}", str(value)]
    return asked


def compare_with_commands(asked: pd.DataFrame, folder: Path, model: str) -> None:
    """Assert that tables and commands give one answer, to the last digit."""
    operators = load_serving_operators(model)
    frame = evaluate_serving(asked, ServingModel.find(), operators, folder=TABLE.parent)[0]
    rows = serving_rows(asked, TABLE.parent)[0]
    for said, row, (_, cells) in zip(frame.to_dict("records"), rows, asked.iterrows(), strict=True):
        assert row is not None and not said["reason"], said
        result = CliRunner().invoke(app, typed(row, cells, folder, model))
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        for end in ("", "_lo", "_hi"):
            for metric in ("ttft", "tpot"):
                ours = said[f"{metric}_ms{end}"]
                # Equal but for rounding: commands keep histories, which adds up steps one by one.
                told = pytest.approx(found[f"mean_{metric}_ms{end}"], rel=1e-14, abs=0.0)
                assert ours != ours or ours == told, (row.id, metric)
            told = pytest.approx(found[f"output_throughput{end}"], rel=1e-14, abs=0.0)
            assert said[f"out_tok_s{end}"] == told, row.id
        assert found["known"] == said["known"]
        assert found["queued_share"] == pytest.approx(said["queued_share"], rel=1e-9, abs=1e-15)


def test_the_command_gives_the_number_of_a_table(tmp_path: Path) -> None:
    apart = {"prefill_tp": 2, "prefill_workers": 1, "decode_tp": 1, "decode_workers": 2}
    kinds = [
        {"source": "LLM-Inference-Bench", "load": "static-batch", "framework_version": None},
        {"source": "aiconfigurator/inferencex", "length_dist": "uniform 0.8..1.0 x nominal"},
        {"framework": "SGLang", "load": "open-poisson", "request_rate": 20.0, "n_requests": 60},
        {"framework": "TensorRT-LLM", "load": "offline", "n_requests": 40, "tp": None, **apart},
        {"weight_dtype": "fp8", "spec_decode": "NEXTN", "device": "b200"},
    ]
    asked = pd.concat([table(id=str(i), **kind).iloc[[1]] for i, kind in enumerate(kinds)])
    compare_with_commands(asked, tmp_path, "roofline")


@published
@pytest.mark.parametrize("count", [8, later(24)])
def test_the_command_gives_the_number_of_published_rows(tmp_path: Path, count: int) -> None:
    asked = read_cases(TABLE, "serving").sample(count, random_state=0).reset_index(drop=True)
    rows = read_rows(asked, partial(serving_row, folder=TABLE.parent))[0]
    # Sizes of recurrent states have no option: they come with a model's name or config.json.
    plain = [row is not None and row.deployment.model.recurrence is None for row in rows]
    assert sum(plain) > 0.6 * count
    compare_with_commands(asked[plain].reset_index(drop=True), tmp_path, OPERATOR_MODEL)


@published
def test_benchmarks_with_equal_lengths_stay_in_lock_step() -> None:
    """Requests wait for each other's prompts, which loads of varying lengths hardly do."""
    own = read_cases(TABLE, "serving").set_index("id", drop=False)
    rows = read_rows(own.loc[["aicd-00050", "aicd-00065", "aicd-00271"]], serving_row)[0]
    predictor = ServingPredictor(load_serving_operators(), ServingModel.find())
    for row in rows:
        assert row is not None
        fixed = predictor.simulate(row.deployment, row.spec)
        spread = drifted(fixed.load, row.spec.seed)
        assert spread is not None
        loose = predictor.simulate(row.deployment, row.spec, spread[1])
        waits = [found.seen.figure("ttft", "mean") * 1e3 for found in (fixed, loose)]
        measured = row.measured["ttft_ms"]
        assert waits[0] == pytest.approx(measured, rel=0.2) and waits[1] < 0.75 * measured, row.id


@published
@pytest.mark.parametrize("every", [240, later(60)])
def test_the_shipped_model_on_published_runs(every: int) -> None:
    own = read_cases(TABLE, "serving").iloc[::every].reset_index(drop=True)
    frame, judged, _ = evaluate_serving(
        own, ServingModel.find(), load_serving_operators(), folder=TABLE.parent
    )
    assert judged.overall["expressed"] > 0.85
    assert judged.overall["tpot_ms/median_ape"] < 0.2
    assert judged.overall["out_tok_s/median_ape"] < 0.15
    # Of some 40 rows of many sources: 90 % of all rows that are left out are inside.
    assert judged.overall["tpot_ms/coverage"] >= 0.75
    assert len(frame) == len(own)
