import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from opcast.common.errors import DatasetError, PlanError
from opcast.common.parquet import write_table
from opcast.features.devices.catalogue import find_device
from opcast.predict.cluster.step import StepPredictor
from opcast.predict.render.step import print_clusters
from opcast.predict.sweep import run as sweep_run
from opcast.predict.sweep.job import SweepJob, judge
from opcast.predict.sweep.plots import best_by_size, plot, plot_scaling
from opcast.predict.sweep.reasons import reasons, runner_up
from opcast.predict.sweep.run import Sweep, grid, pareto, search
from opcast.predict.sweep.space import Candidate, axis_values, candidates, chunks, parse_grid
from opcast.simulate.clusters.catalogue import find_cluster
from opcast.simulate.clusters.files import save_cluster
from opcast.simulate.step.named_workloads import make_workload
from opcast.simulate.step.plan import Plan
from opcast.tests.support import killed_once

from ...support.cases import every

WORK = make_workload(
    "llama",
    {"layers": 8, "d_model": 1024, "heads": 8, "kv_heads": 8, "d_ff": 4096, "vocab": 8192,
     "seq": 1024, "batch": 32},
)  # fmt: skip
CLUSTERS = ["tpu-v5e-x8"]
GRID = parse_grid("tp=1/2,pp=1/2,recompute=none/full,schedule=1f1b,split=1")
JOB = SweepJob(WORK, model="roofline")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return grid(Sweep(JOB, tmp_path_factory.mktemp("whole")), CLUSTERS, [32], GRID)


def test_prices_give_a_cost_with_its_interval(tmp_path):
    tpu = find_cluster(CLUSTERS[0]).device
    found = grid(Sweep(JOB, tmp_path, prices={tpu: 3.6}), CLUSTERS, [32], GRID)
    # 8 devices at 3.6 an hour are 0.008 a second.
    for cost, latency in (("cost", "step_us"), ("cost_lo", "lo_us"), ("cost_hi", "hi_us")):
        assert found[cost].to_numpy() == pytest.approx(0.008 * found[latency].to_numpy() * 1e-6)
    assert (found["cost_lo"] < found["cost"]).all() and (found["cost"] < found["cost_hi"]).all()


def test_candidates_are_valid_and_distinct():
    clusters = {name: find_cluster(name) for name in CLUSTERS}
    found = candidates(WORK, clusters, [32, 64], GRID)
    # Two of tp, pp and recompute each, three uses of the rest, two batches; all valid.
    assert len(found) == 2 * 2 * 2 * 3 * 2
    assert len({item.key for item in found}) == len(found)
    assert all(item.plan.devices == 8 for item in found)
    assert sum(len(piece) for piece in chunks(found, 7)) == len(found)


def test_default_axes_stay_within_a_box_and_the_model():
    values = axis_values(WORK, find_cluster("dgx-h100-x64"), {})
    assert values["tp"] == ["1", "2", "4", "8"]
    assert values["pp"] == ["1", "2", "4", "8"]
    assert values["ep"] == ["1"]


@pytest.mark.parametrize(
    ("text", "said"),
    [("zz=1", "no axis"), ("tp=two", "not a positive integer"), ("data=ddp", "ddp"),
     ("schedule=fast", "fast"), ("tp=3", "no combination")],
)  # fmt: skip
def test_bad_grids(tmp_path, text, said):
    with pytest.raises(PlanError, match=said):
        grid(Sweep(JOB, tmp_path), CLUSTERS, [32], parse_grid(text))


def test_a_search_without_a_valid_plan_says_so(tmp_path):
    # Three stages do not divide eight devices, so every trial is pruned.
    with pytest.raises(PlanError, match="no combination"):
        search(Sweep(JOB, tmp_path), CLUSTERS, [32], {"pp": ["3"]}, trials=2, seed=0)
    with pytest.raises(PlanError, match="no combination"):
        Sweep(JOB, tmp_path / "empty").run([])


def test_every_cluster_is_listed_with_its_plans_or_the_reason(tmp_path, capsys):
    """Of three clusters the one without a valid plan is not dropped."""
    names = ["tpu-v5e-x8", "tpu-v5e-x16", "h100-sxm-x8"]
    values = {"tp": ["1"], "pp": ["1"], "data": ["dp"], "recompute": ["none"], "split": ["1"]}
    for way in (grid, partial(search, trials=4, seed=0)):
        found = way(Sweep(JOB, tmp_path / str(way)), names, [8], values)
        by_cluster = dict(iter(found.groupby("cluster")))
        assert set(by_cluster) == set(names)
        (lost,) = by_cluster["tpu-v5e-x16"].to_dict("records")
        assert lost["error"].startswith("no valid plan: ") and "16" in lost["error"]
        assert lost["plan"] == "" and lost["devices"] == 16 and not lost["fits"]
        assert np.isnan(lost["step_us"])
        # Settings keep their types: they are printed.
        assert found["tp"].dtype.kind == "i" and (found["tp"] == 1).sum() == len(found) - 1
        assert pareto(found)["plan"].ne("").all()
        assert found.attrs["left"] == 0
    print_clusters(Console(width=200), found)
    said = capsys.readouterr().out
    assert "no valid plan" in said and all(name in said for name in names)
    with pytest.raises(PlanError, match="tpu-v5e-x16, batch 8: no valid plan: "):
        grid(Sweep(JOB, tmp_path / "none"), names[1:2], [8], values)


def test_an_interrupted_sweep_keeps_what_is_done(tmp_path, monkeypatch):
    own, begun = sweep_run.judge, []

    def stop(job, items):
        begun.append(items)
        if len(begun) > 1:
            raise KeyboardInterrupt
        return own(job, items)

    monkeypatch.setattr(sweep_run, "judge", stop)
    monkeypatch.setattr(sweep_run, "PIECE", 7)
    found = grid(Sweep(JOB, tmp_path), CLUSTERS, [32], GRID)
    assert len(found) == 7 and found.attrs["left"] == 2 * 2 * 2 * 3 - 7


def test_rows_hold_settings_and_figures(whole):
    assert len(whole) == 24
    assert whole["step_us"].is_monotonic_increasing
    assert (whole["latency_us"] == whole["step_us"]).all()
    assert (whole["lo_us"] < whole["latency_us"]).all()
    assert (whole["latency_us"] < whole["hi_us"]).all()
    row = whole.iloc[0]
    assert (row["devices"], row["batch"], row["device"]) == (8, 32, "tpu-v5e")
    full, kept = whole[whole["recompute"] == "full"], whole[whole["recompute"] == "none"]
    assert full["memory_bytes_per_device"].mean() < kept["memory_bytes_per_device"].mean()
    assert full["step_us"].mean() > kept["step_us"].mean()


def test_parts_without_the_newer_name_of_the_time_are_completed(tmp_path, whole):
    sweep, items = Sweep(JOB, tmp_path), [Candidate("tpu-v5e-x8", 32, Plan(fsdp=8))]
    row = sweep.run(items).iloc[[0]]
    for part in (tmp_path / "parts").iterdir():
        write_table(row.drop(columns="latency_us"), part)
    assert Sweep(JOB, tmp_path).run(items)["latency_us"].tolist() == row["step_us"].tolist()


def test_a_sweep_goes_on_where_it_was_stopped(tmp_path, whole, monkeypatch):
    clusters = {name: find_cluster(name) for name in CLUSTERS}
    items = candidates(WORK, clusters, [32], GRID)
    sweep = Sweep(JOB, tmp_path)
    sweep.run(items[:10])
    judged = []
    monkeypatch.setattr(
        sweep_run, "judge", lambda job, piece: judged.extend(piece) or judge(job, piece)
    )
    found = sweep.run(items)
    assert {item.key for item in judged} == {item.key for item in items[10:]}
    pd.testing.assert_frame_equal(found, whole)
    with pytest.raises(DatasetError, match="another"):
        Sweep(SweepJob(WORK, model="gpu-operators"), tmp_path).run(items)


def test_what_changed_since_is_not_resumed_from(tmp_path):
    """A cluster's file that was edited gave the results of the links that it had before."""
    box, file = find_cluster("tpu-v5e-x8"), tmp_path / "mine.yaml"
    one = {"tp": ["1"], "pp": ["1"], "data": ["dp"], "recompute": ["none"], "split": ["1"]}
    save_cluster(replace(box, name="mine"), file)
    sweep = Sweep(JOB, tmp_path / "out")
    grid(sweep, [str(file)], [32], one)
    grid(sweep, CLUSTERS, [32], one)
    dims = tuple(replace(dim, bandwidth=dim.bandwidth / 8) for dim in box.topology.dims)
    save_cluster(replace(box, name="mine", topology=replace(box.topology, dims=dims)), file)
    for way in (grid, partial(search, trials=1, seed=0)):
        with pytest.raises(DatasetError, match=r"changed since: the cluster .*mine.yaml"):
            way(sweep, [str(file)], [32], one)
    # The others of the folder are what they were.
    assert len(grid(sweep, CLUSTERS, [32], one)) == 1


def test_the_search_finds_the_best_plan_that_fits(tmp_path, whole):
    pytest.importorskip("optuna")
    found = search(Sweep(JOB, tmp_path), CLUSTERS, [32], GRID, trials=16, seed=0)
    best = whole[whole["fits"]]["step_us"].min()
    assert found[found["fits"]]["step_us"].min() < 1.2 * best


@pytest.mark.parametrize(
    "clusters", every(2, [["tpu-v5e-x1", "tpu-v5e-x8"], ["tpu-v5e-x8", "tpu-v5e-x1"]])
)
def test_a_search_tries_what_any_of_its_clusters_allows(tmp_path, clusters):
    pytest.importorskip("optuna")
    chosen = {"recompute": ["none"], "schedule": ["1f1b"], "split": ["1"], "data": ["dp"]}
    found = search(Sweep(JOB, tmp_path), clusters, [32], chosen, trials=32, seed=0)
    assert set(found["cluster"]) == set(clusters)
    large = found[found["cluster"] == "tpu-v5e-x8"]
    # One device has no second stage and no second part of a layer; eight have.
    assert (large["tp"] * large["pp"]).max() > 1
    small = found[(found["cluster"] == "tpu-v5e-x1") & (found["tp"] > 0)]
    assert len(small) and (small[["tp", "pp"]] == 1).all(axis=None)


def test_pareto_by_hand(tmp_path):
    frame = pd.DataFrame({
        "step_us": [1.0, 2.0, 3.0, 0.5, 2.0],
        "memory_bytes_per_device": [9.0, 4.0, 5.0, 1.0, 4.0],
        "devices": [8, 8, 8, 8, 8],
        "batch": [8, 8, 8, 8, 8],
        "energy_j": [np.nan] * 5,
        "fits": [True, True, True, False, True],
    })  # fmt: skip
    # The third loses to the second, the fourth does not fit, the last equals the second.
    assert pareto(frame)["step_us"].tolist() == [1.0, 2.0, 2.0]
    # A step of twice the batch that takes less than twice as long is the fastest, as for reasons().
    larger = pd.DataFrame({
        "step_us": [1.0, 1.8], "memory_bytes_per_device": [9.0, 9.0], "devices": [8, 8],
        "batch": [8, 16], "energy_j": [5.0, 10.0], "fits": [True, True],
    })  # fmt: skip
    assert pareto(larger)["batch"].tolist() == [16]
    assert pareto(frame.assign(fits=False)).empty
    pytest.importorskip("matplotlib")
    plot(frame, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_reasons_by_hand():
    gib = 2.0**30
    frame = pd.DataFrame({
        "tp": [1, 2, 4, 4], "pp": [1, 1, 1, 2], "recompute": ["none", "none", "full", "full"],
        "microbatches": [8, 4, 8, 8], "batch": [8, 8, 8, 8],
        "step_us": [100.0, 120.0, 150.0, 200.0], "compute_us": [90.0, 90.0, 130.0, 130.0],
        "exposed_communication_us": [10.0, 30.0, 20.0, 20.0], "bubble_us": [0.0, 0.0, 0.0, 50.0],
        "host_us": [0.0] * 4,
        "memory_bytes_per_device": [4 * gib, 3 * gib, gib, gib],
        "fits": [True, True, True, True],
    })  # fmt: skip
    # tp=2 is a change of its own (its micro-batches follow from it); full was only tried with
    # tp=4, and two stages only with both, which is said.
    assert reasons(frame) == [
        "pipeline stages 1: 2 and tp=4 and recompute=full is 100.0% slower (computation +40.0%, "
        "exposed communication +10.0%, bubble +50.0% of the step), memory -3.0 GiB",
        "recomputation none: full and tp=4 is 50.0% slower (computation +40.0%, exposed "
        "communication +10.0% of the step), memory -3.0 GiB",
        "tensor parallelism 1: 2 is 20.0% slower (exposed communication +20.0% of the step), "
        "memory -1.0 GiB",
    ]
    alone = frame[:3].assign(fits=[False, False, True])
    assert reasons(alone)[0] == (
        "tensor parallelism 4: 2 and recompute=none does not fit, it needs 3.0 GiB"
    )
    assert reasons(frame.assign(fits=False)) == []


def test_reasons_of_a_sweep_name_each_plan_once(whole):
    told = reasons(whole)
    assert len(told) == 4  # tp, pp, data, recompute
    assert len({line.split(": ", 1)[1] for line in told}) == len(told)
    # The grid has every single change, so none comes with another.
    assert not any(" and " in line for line in told)


def test_a_plan_that_cannot_be_evaluated_costs_only_itself(tmp_path, whole, monkeypatch):
    predict = StepPredictor.predict

    def predict_or_fail(self, workload, plan, *args, **kwargs):
        if plan.tp == 2 and plan.pp == 2:
            raise KeyError("a rule that is missing")
        return predict(self, workload, plan, *args, **kwargs)

    monkeypatch.setattr(StepPredictor, "predict", predict_or_fail)
    found = grid(Sweep(JOB, tmp_path), CLUSTERS, [32], GRID)
    failed = found[found["error"] != ""]
    assert len(found) == len(whole)
    assert {(row.tp, row.pp) for row in failed.itertuples()} == {(2, 2)}
    assert "KeyError: 'a rule that is missing'" in failed.iloc[0]["error"]
    assert not failed["fits"].any()
    # The others are as they were, and the front has only those.
    kept = found[found["error"] == ""].set_index("key")["step_us"]
    assert kept.to_dict() == whole.set_index("key")["step_us"].loc[kept.index].to_dict()
    assert pareto(found)["error"].eq("").all()


def test_the_moe_with_uneven_stages_that_ended_a_sweep(tmp_path):
    work = make_workload(
        "moe",
        {"layers": 61, "d_model": 7168, "heads": 128, "kv_heads": 128, "d_ff": 2048,
         "vocab": 129280, "seq": 4096, "batch": 1024, "experts": 256, "top_k": 8},
    )  # fmt: skip
    plan = Plan(fsdp=16, tp=4, pp=4, ep=16, microbatches=64)
    rows = judge(SweepJob(work, model="gpu-operators"), [Candidate("dgx-h100-x256", 1024, plan)])
    assert rows[0]["error"] == ""
    assert rows[0]["step_us"] > 1e6


def test_scaling_by_hand(tmp_path):
    frame = pd.DataFrame({
        "devices": [8, 8, 16, 16, 16], "batch": [32, 32, 32, 64, 64], "plan": list("abcde"),
        "step_us": [100.0, 90.0, 60.0, 100.0, 50.0], "fits": [True, True, True, True, False],
    })  # fmt: skip
    found = best_by_size(frame)
    assert found["plan"].tolist() == ["b", "c", "d"]
    # Twice the devices: 90 us become 60 for the same batch, 100 for twice the batch.
    assert found["strong"].tolist() == [1.0, pytest.approx(90 / 60 / 2), 1.0]
    assert found["weak"].tolist() == [1.0, 1.0, pytest.approx(90 / 100)]
    pytest.importorskip("matplotlib")
    plot_scaling(frame, tmp_path / "s.png")
    assert (tmp_path / "s.png").stat().st_size > 1000
    with pytest.raises(DatasetError, match="two sizes"):
        plot_scaling(frame[:2], tmp_path / "t.png")


@pytest.mark.slow
def test_a_killed_worker_costs_nothing_but_time(tmp_path, whole, monkeypatch):
    monkeypatch.setattr("opcast.predict.sweep.run.PIECE", 4)
    monkeypatch.setattr(sweep_run, "judge", killed_once.judge)
    monkeypatch.setenv(killed_once.FLAG, str(tmp_path / "killed"))
    found = grid(Sweep(JOB, tmp_path / "out", workers=2), CLUSTERS, [32], GRID)
    assert (tmp_path / "killed").exists()
    pd.testing.assert_frame_equal(found, whole)


@pytest.mark.slow
def test_ray_gives_the_same_results_even_if_a_worker_dies(tmp_path, whole, monkeypatch):
    ray = pytest.importorskip("ray", reason="the extra 'scale' is not installed")
    monkeypatch.setattr("opcast.predict.sweep.run.PIECE", 4)
    flag = tmp_path / "died"
    monkeypatch.setattr(sweep_run, "judge", _dying(str(flag)))
    try:
        found = grid(Sweep(JOB, tmp_path / "out", ray="local"), CLUSTERS, [32], GRID)
    finally:
        ray.shutdown()
    assert flag.exists()
    pd.testing.assert_frame_equal(found, whole)


def _dying(flag):
    """``judge``, in a worker that dies in its first piece."""

    def judge_or_die(job, piece):
        from opcast.predict.sweep.job import judge

        if not Path(flag).exists():
            Path(flag).touch()
            os._exit(1)
        return judge(job, piece)

    return judge_or_die


def test_a_hypothetical_device_in_a_sweep_takes_the_time_of_its_figures(tmp_path):
    plain = find_device("tpu-v5e")
    figures = {
        "bf16": plain.peak_flops["bf16"] / 1e12, "hbm": plain.bandwidth / 1e9,
        "floor": plain.floor * 1e6,
    }  # fmt: skip
    chip = tmp_path / "twice.yaml"
    chip.write_text(
        f"name: twice-v5e\nbase: tpu-v5e\npeak_tflops: {{bf16: {2 * figures['bf16']}}}\n"
        f"hbm_bandwidth_gbps: {2 * figures['hbm']}\nlaunch_floor_us: {figures['floor'] / 2}\n"
    )
    box = find_cluster("tpu-v5e-x8")
    save_cluster(replace(box, name="mine", device=str(chip)), tmp_path / "mine.yaml")
    values = parse_grid("tp=1,pp=1,data=dp,recompute=none,schedule=1f1b,split=1")
    names = ["tpu-v5e-x8", str(tmp_path / "mine.yaml")]
    found = grid(Sweep(JOB, tmp_path / "out"), names, [32], values).set_index("device")
    assert set(found.index) == {"tpu-v5e", "twice-v5e"}
    # The roofline knows nothing but these figures, so every operator takes half its time.
    half = found.loc["tpu-v5e", "compute_us"] / 2
    assert found.loc["twice-v5e", "compute_us"] == pytest.approx(half, rel=1e-6)


def test_parameters_sharded_in_a_pipeline_are_told_as_the_plan_has_them():
    parts = ("compute_us", "exposed_communication_us", "bubble_us", "host_us")
    frame = pd.DataFrame({
        "plan": ["dp=16,zero=1", "fsdp=16,zero=3"], "batch": [8, 8], "fsdp": [1, 16],
        "zero": [1, 3], "pp": [4, 4], "step_us": [100.0, 180.0],
        **{part: [50.0, 90.0] if part == "compute_us" else [0.0, 0.0] for part in parts},
        "memory_bytes_per_device": [1.0, 1.0], "fits": [True, True],
    })  # fmt: skip
    # fsdp=16 alone shards there as zero=1 does.
    assert reasons(frame)[0].startswith("data parallelism zero1: fsdp,zero=3 is 80.0% slower")


def test_what_holds_the_second_best_back():
    frame = pd.DataFrame({
        "plan": ["fsdp=8", "tp=2,fsdp=4", "tp=4"], "batch": [8, 8, 8],
        "step_us": [100.0, 110.0, 90.0], "compute_us": [90.0, 95.0, 80.0],
        "exposed_communication_us": [10.0, 15.0, 10.0], "bubble_us": [0.0, 0.0, 0.0],
        "host_us": [0.0, 0.0, 0.0],
        "memory_bytes_per_device": [1.0, 1.0, 1.0], "fits": [True, True, False],
    })  # fmt: skip
    assert runner_up(frame) == [
        "second, tp=2,fsdp=4: 10.0% slower than fsdp=8 (computation +5.0%, exposed communication "
        "+5.0%)"
    ]
    assert runner_up(frame[:1]) == []
