"""Tables of whole PyTorch models, by models of a module of this test."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import opcast
from opcast.cli import app
from opcast.common.errors import ProgramError
from opcast.features.devices.catalogue import find_device
from opcast.features.ir.torch.libraries import ModelCase, build
from opcast.features.ir.torch.presets import presets
from opcast.models.program.pytorch import (
    COSTS,
    UNSEEN,
    CpuTorchModel,
    Measured,
    TorchEffects,
    TorchModel,
    torch_context,
)
from opcast.predict.cluster.case_table import read_cases, read_rows
from opcast.predict.operator.torch_framework import TorchPredictor
from opcast.workflows.judging import left_out_rows
from opcast.workflows.torch_models.evaluate import (
    as_run,
    choices,
    errors_left_out,
    judge_models,
    log_factors,
)
from opcast.workflows.torch_models.rows import ModelRow, model_row
from opcast.workflows.torch_models.train import drawn, left_out_figures, train_models

from ..support.cases import later

torch = pytest.importorskip("torch")

MODELS = """
import torch

def small():
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 3, padding=1), torch.nn.BatchNorm2d(32), torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(32, 10),
    )

def wide():
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 256, 3, padding=1), torch.nn.Conv2d(256, 256, 3, padding=1),
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(256, 10),
    )
"""
ROW = {
    "source": "mine", "library": "models_of_a_test", "model": "small", "device": "rtx-4090",
    "framework": "torch-eager", "batch": 64, "img_size": 64, "mode": "infer", "layout": "nchw",
    "dtype": "amp-fp16", "torch": "2.4.0",
}  # fmt: skip
#: Columns that are fields of a case.
CASE = ("library", "model", "batch", "img_size", "mode", "dtype", "layout", "torch")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models_of_a_test.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))


def written(path: Path, *changes: dict[str, object]) -> Path:
    rows = [{"id": f"r{i}", **ROW, **change} for i, change in enumerate(changes)]
    pd.DataFrame(rows).to_parquet(path)
    return path


def evaluated(table: Path, *options: str) -> str:
    done = CliRunner().invoke(app, ["evaluate", "--models", str(table), "--no-track", *options])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.usefixtures("library")
def test_rows_are_predicted_as_the_module_is(tmp_path: Path) -> None:
    changes = (
        {"latency_ms": 1.0},
        {"framework": "torch-compiled"},
        {"device": "a100-sxm-40gb", "mode": "train", "layout": "nhwc"},
        {"model": "none"},
        {"device": "tpu-v5e"},
    )
    table, out = written(tmp_path / "models.parquet", *changes), tmp_path / "out.parquet"
    said = evaluated(table, "--out", str(out))
    found = pd.read_parquet(out).set_index("id")
    for name, change in zip(("r0", "r1", "r2"), changes, strict=False):
        row = {**ROW, **change}
        program = build(ModelCase(**{key: row[key] for key in CASE}))
        alone = opcast.predict(program, device=row["device"], framework=f"{row['framework']}@2.4.0")
        own = found.loc[name]
        assert (own["latency_us"], own["lo_us"], own["hi_us"]) == (
            alone.latency_us,
            alone.lo_us,
            alone.hi_us,
        )
    assert "has no attribute 'none'" in found.loc["r3", "reason"]
    assert "tpu" in found.loc["r4", "reason"]
    assert "1 rows not predicted" in said and "1 rows: mean error" in said


@pytest.mark.usefixtures("library")
def test_a_table_of_which_no_row_is_predicted_fails(tmp_path: Path) -> None:
    table, out = written(tmp_path / "models.parquet", {"model": "none"}), tmp_path / "out.parquet"
    command = ["evaluate", "--models", str(table), "--no-track", "--out", str(out)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1 and "1 rows not predicted" in done.output
    assert "none of the rows could be predicted" in str(done.exception or done.output)
    assert "has no attribute" in pd.read_parquet(out)["reason"][0]


@pytest.mark.usefixtures("library")
def test_a_stopped_evaluation_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, out = written(tmp_path / "models.parquet", {}, {"model": "wide"}), tmp_path / "o.csv"
    import opcast.workflows.torch_models.rows as rows

    whole, asked = rows.answers_of, []

    def once(model: str, own: list[rows.ModelRow]) -> list[rows.Answer]:
        asked.append(own[0].case.model)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return whole(model, own)

    monkeypatch.setattr(rows, "answers_of", once)
    stopped = CliRunner().invoke(
        app, ["evaluate", "--models", str(table), "--no-track", "--out", str(out)]
    )
    assert stopped.exit_code != 0 and not out.exists()
    kept = tmp_path / "o-parts.jsonl"
    assert [json.loads(line)["id"] for line in kept.read_text().splitlines()] == ["r0"]
    with kept.open("a") as file:
        file.write('{"identity": "cut off by a ki')
    evaluated(table, "--out", str(out))
    assert asked == ["small", "wide", "wide"]
    assert pd.read_csv(out)["latency_us"].gt(0.0).all() and not kept.exists()


def test_models_batches_and_layouts_are_compared_by_the_time_of_a_sample() -> None:
    rows = [("a", 64, "nchw"), ("b", 64, "nchw"), ("c", 64, "nchw"), ("a", 64, "nhwc")]
    table = pd.DataFrame(
        [{**ROW, "model": m, "batch": b, "layout": layout} for m, b, layout in rows]
    )
    frame = pd.DataFrame(
        {
            "latency_us": [1.0, 3.0, 2.0, 0.5],
            "lo_us": 0.4,
            "hi_us": 4.0,
            "measured_us": [10.0, 20.0, 30.0, 12.0],
        }
    )
    found = choices(frame, table).set_index("choice")
    # a before b and a before c, but b after c: two of three pairs agree.
    assert found.loc["models", "tau"] == pytest.approx(1 / 3)
    # Channels last is predicted faster and takes 12 for 10.
    assert found.loc["layouts", "regret"] == pytest.approx(0.2)
    assert "batches" not in found.index
    judged = judge_models(frame.assign(id="x", reason=""), table)
    assert judged.overall["mape"] == pytest.approx(np.mean([0.9, 0.85, 28 / 30, 11.5 / 12]))
    assert judged.overall["width"] == pytest.approx(10.0)


def test_effects_are_found_again_and_left_out_rows_are_predicted() -> None:
    rng = np.random.default_rng(0)
    device, n = find_device("rtx-4090"), 200
    seconds = np.zeros((n, len(COSTS)))
    for cost in ("conv", "pass", "product"):
        seconds[:, COSTS.index(cost)] = rng.uniform(0.1, 1.0, n)
    # Convolutions take twice, passes half of what is expected.
    factors = np.ones(len(COSTS))
    factors[COSTS.index("conv")], factors[COSTS.index("pass")] = 2.0, 0.5
    contexts = [torch_context(device, "torch-eager") for _ in range(n)]
    names = np.array([f"m{i}" for i in range(n)])
    data = Measured(
        seconds, contexts, np.log(seconds @ factors), names, np.zeros(seconds.shape, bool)
    )
    cases = [ModelCase("timm", name) for name in names]
    rows = [ModelRow(c.model, c, device.name, "torch-eager", 1.0) for c in cases]
    model, left = train_models(data, rows, list(names))
    assert model.factors(["conv", "pass"], contexts[0]) == pytest.approx([2.0, 0.5], rel=0.1)
    assert np.abs(left["family"][:, 0]).max() < 0.05
    # Intervals of four fifths of the families hold about 90 % of the others.
    error, lo, hi = left["family"].T
    assert 0.8 < np.mean((lo <= error) & (error <= hi)) < 0.97
    # No other chip, mode, layout or release is there to learn from.
    assert all(np.isnan(left[way]).all() for way in ("chip", "mode", "layout", "release"))
    found = model.interval({"conv": 1.0, "pass": 0.1}, contexts[0], False, True)
    assert found is not None and -0.05 < found[0] <= 0.0 <= found[1] < 0.05
    # Softmax was never seen, nor a program of products alone.
    assert model.interval({"conv": 1.0, "softmax": 0.1}, contexts[0], False, True) is None
    # Programs of products alone are unlike, as are all on chips whose products are faster yet.
    unlike = model.interval({"product": 1.0}, contexts[0], False, True)
    assert unlike == pytest.approx((-0.35, 0.35), abs=0.01)
    for name in ("a10", "v100-sxm-16gb", "t4", "a100-sxm-40gb"):
        leading = torch_context(find_device(name), "torch-eager")
        wide = model.interval({"conv": 1.0, "pass": 0.1}, leading, False, True)
        assert wide is not None and wide[0] <= -0.35 and wide[1] >= 0.35
    # Nor one of f32.
    assert model.interval({"conv": 1.0, "pass": 0.1}, contexts[0], False, False) is None
    assert TorchModel.from_dict(model.to_dict()).ends.keys() == model.ends.keys()


def test_chips_with_leading_products_have_effects_and_ends_of_their_own() -> None:
    rng = np.random.default_rng(0)
    names = ("rtx-3090", "rtx-4090", "a100-sxm-40gb", "v100-sxm-16gb")
    chips, n = np.repeat(names, 60), 240
    seconds = np.zeros((n, len(COSTS)))
    for cost in ("conv", "pass", "product"):
        seconds[:, COSTS.index(cost)] = rng.uniform(0.1, 1.0, n)
    # What a chip does beside products takes half as long again where these are fast.
    leading = np.isin(chips, names[2:])
    logs = np.log(seconds.sum(axis=1)) + np.log(1.5) * leading
    # The V100 is slower than all others by a tenth beyond that.
    logs = logs + 0.1 * (chips == names[3]) + rng.normal(0.0, 0.02, n)
    contexts = [torch_context(find_device(chip), "torch-eager") for chip in chips]
    assert [context["leading"] for context in contexts] == [
        "yes" if own else "no" for own in leading
    ]
    models = np.array([f"m{i % 60}" for i in range(n)])
    cases = [ModelCase("timm", model) for model in models]
    rows = [
        ModelRow(str(i), case, str(chip), "torch-eager", 1.0)
        for i, (case, chip) in enumerate(zip(cases, chips, strict=True))
    ]
    data = Measured(seconds, contexts, logs, models, np.zeros(seconds.shape, bool))
    model, left = train_models(data, rows, list(models))
    # Learned from the other such chip: without it, the A100 would be off by 0.4.
    a100 = left["chip"][chips == names[2], 0]
    assert abs(np.median(a100)) < 0.15
    # A new chip may be like any of the four, which count the same, and differs from their mean by
    # the deviation of one and by that of the mean of four.
    expected = (1.0 + 1.0 / 4.0) ** 0.5 * np.quantile(left["chip"][:, 0], 0.95)
    assert model.ends["new"][1] == pytest.approx(expected, abs=0.01)
    assert model.ends["known"][1] < 0.15
    # Where the V100 runs one family alone, it is new without that, and its errors are not those of
    # known chips. The A100 alone says nothing of how other such chips differ.
    families = np.where(chips == names[3], "own", models)
    data = replace(data, logs=logs + 0.6 * (chips == names[3]), groups=families)
    apart, _ = train_models(data, rows, list(families))
    assert apart.ends["known"][1] < 0.15
    fewer = chips != names[3]
    alone = [row for row, own in zip(rows, fewer, strict=True) if own]
    data = Measured(
        seconds[fewer],
        [own for own, is_one in zip(contexts, fewer, strict=True) if is_one],
        logs[fewer],
        models[fewer],
        np.zeros((180, len(COSTS)), bool),
    )
    single, _ = train_models(data, alone, list(models[fewer]))
    assert single.ends["new/leading"][1] == pytest.approx(np.hypot(single.ends["new"][1], UNSEEN))
    for known in ("known", "new"):
        (plain, own) = (model.ends[key] for key in (known, f"{known}/leading"))
        assert own[0] <= plain[0] and own[1] >= plain[1]
    # Such chips are no longer unlike all that was learned from.
    alike = {"conv": 1.0, "pass": 1.0, "product": 1.0}
    assert (
        model.interval(alike, contexts[-1], False, True)
        == model.ends["known/leading/torch-eager/infer"]
    )
    # Figures are of each table.
    known = pd.DataFrame({"table": np.where(leading, "first", "second"), "measured": np.exp(logs)})
    figures = left_out_figures(left_out_rows(known, left)).set_index(["table", "left_out"])
    assert figures.loc[("first", "chip"), "rows"] == 120
    apes = np.abs(np.expm1(-left["chip"][leading, 0]))
    assert figures.loc[("first", "chip"), "mape"] == pytest.approx(apes.mean())
    known = figures.xs("family", level="left_out")
    assert (known["coverage"] > 0.8).all() and known["width"].between(1.0, 1.3).all()


@pytest.mark.usefixtures("library")
def test_tables_teach_one_model(tmp_path: Path) -> None:
    paths = [
        written(
            tmp_path / f"{name}.parquet",
            *[
                {
                    "model": model,
                    "device": chip,
                    "batch": 256,
                    "latency_ms": 25.6,
                    "id": f"{name}{model}",
                }
                for model in ("small", "wide")
            ],
        )
        for name, chip in (("first", "rtx-4090"), ("second", "a100-sxm-40gb"))
    ]
    out = tmp_path / "own.json"
    command = ["train", "--out", str(out), "--no-track"]
    for path in paths:
        command += ["--models", str(path)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "first" in done.output and "second" in done.output
    assert TorchModel.load(out).devices == ["a100-sxm-40gb", "rtx-4090"]
    # Finished rows are kept by their ids.
    done = CliRunner().invoke(app, [*command[:-1], str(paths[0])])
    assert done.exit_code != 0 and "several rows have the same id" in str(done.exception)


@pytest.mark.usefixtures("library")
def test_a_table_teaches_a_model(tmp_path: Path) -> None:
    changes = [
        {"model": model, "batch": batch, "latency_ms": 0.1 * batch, "family": model}
        for model in ("small", "wide")
        for batch in (256, 512)
    ]
    table, out = written(tmp_path / "t.parquet", *changes), tmp_path / "own.json"
    command = ["train", "--models", str(table), "--out", str(out), "--no-track"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert TorchModel.load(out).provenance["models"] == 2
    assert (tmp_path / "own-seconds.jsonl").is_file()


def test_a_draw_has_each_family_and_each_way_of_running_once() -> None:
    def of(family: str, models: int, **own: object) -> list[dict[str, object]]:
        ran = [
            {"layout": layout, "torch": t} for layout in ("nchw", "nhwc") for t in ("2.1", "2.4")
        ]
        named = [{"family": family, "model": f"{family}{i}", "param_m": i} for i in range(models)]
        return [
            {"device": "rtx-4090", "batch": 64, **row, **r, **own} for row in named for r in ran
        ]

    once = {"family": "small", "model": "once", "param_m": 0, "layout": "nchw", "batch": 64}
    cpu = of("small", 2, device="cpu-i9-10940x", batch=1)
    table = pd.DataFrame([*of("small", 3), {**once, "device": "rtx-4090"}, *of("large", 12), *cpu])
    found = drawn(table, samples=2)
    assert list(found) == list(table) and found.index.is_monotonic_increasing
    gpu = found[found["device"] == "rtx-4090"]
    # A second model of a family of twelve; none that ran in fewer ways, or is larger than most.
    assert gpu.groupby("family")["model"].nunique().to_dict() == {"large": 2, "small": 1}
    assert gpu.groupby("model")["layout"].apply(sorted).tolist() == [["nchw", "nhwc"]] * 3
    assert "once" not in set(found["model"]) and gpu["param_m"].max() <= 5
    assert len(found) - len(gpu) == 2
    pd.testing.assert_frame_equal(found, drawn(table, samples=2))
    assert set(drawn(table, samples=1)["model"]) < set(table["model"])


@pytest.mark.usefixtures("library")
def test_processors_of_a_table_teach_a_model_of_their_own(tmp_path: Path) -> None:
    run = {"device": "cpu-i9-10940x", "framework": "torch-compiled", "dtype": "fp32"}
    changes = [
        {"model": model, "batch": batch, "latency_ms": batch, "family": model, **own}
        for model in ("small", "wide")
        for batch in (256, 512)
        for own in ({}, run)
    ]
    absent = {"model": "absent", "latency_ms": 1.0, "family": "absent"}
    table, out = written(tmp_path / "t.parquet", *changes, absent), tmp_path / "own.json"
    command = ["train", "--models", str(table), "--out", str(out), "--no-track"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    # What cannot be recorded is said, and tried again the next time.
    assert "1 rows not used:" in done.output
    assert len((tmp_path / "own-seconds.jsonl").read_text().splitlines()) == len(changes)
    gpu, cpu = TorchModel.load(out), CpuTorchModel.load(tmp_path / "own-cpu.json")
    assert gpu.devices == ["rtx-4090"] and cpu.devices == ["cpu-i9-10940x"]
    # One chip says nothing of another.
    known, new = cpu.ends["known"], cpu.ends["new"]
    assert new == pytest.approx((-np.hypot(known[0], UNSEEN), np.hypot(known[1], UNSEEN)), abs=1e-3)
    # The table of processors alone leaves no model of GPUs.
    written(table, *[change for change in changes if "device" in change])
    alone = tmp_path / "alone.json"
    done = CliRunner().invoke(app, [*command[:4], str(alone), "--no-track"])
    assert done.exit_code == 0, done.output
    assert not alone.exists() and (tmp_path / "alone-cpu.json").is_file()


def test_what_no_processor_ran_has_a_wider_interval() -> None:
    effects = TorchEffects({"conv/device/cpu-i9-10940x": 0.1})
    ends = {"known/torch-compiled/infer": (-0.2, 0.3), "known": (-0.3, 0.4), "new": (-0.5, 0.6)}
    model = CpuTorchModel(effects, ends, {"conv": 1.0, "pass": 0.1}, {"vendors": ["cpu"]})
    known, new = (find_device(name) for name in ("cpu-i9-10940x", "cpu-i7-12700h"))

    def asked(device=known, framework="torch-compiled", train=False, narrow=False, passes=0.1):
        seconds = {"conv": 1.0, "pass": passes}
        return model.interval(seconds, torch_context(device, framework), train, narrow)

    assert asked() == (-0.2, 0.3)
    # 0.7 besides: eager and training, which have no rows; 16 bits; passes that take more than ever.
    of_all = pytest.approx((-np.hypot(0.3, 0.7), np.hypot(0.4, 0.7)))
    assert asked(framework="torch-eager") == asked(train=True) == of_all
    special = pytest.approx((-np.hypot(0.2, 0.7), np.hypot(0.3, 0.7)))
    assert asked(narrow=True) == asked(passes=1.0) == special
    assert asked(new) == pytest.approx((-np.hypot(0.5, 0.7), np.hypot(0.6, 0.7)))


def test_releases_whose_kernels_are_older_have_effects_of_their_own() -> None:
    for device, release, own in (
        ("rtx-4090", "1.12.1", "1.12.1"), ("rtx-4090", "2.2.1", ""), ("rtx-4090", "", ""),
        ("cpu-i9-10940x", "2.2.1", "2.2.1"), ("cpu-i9-10940x", "2.10.0", ""),
    ):  # fmt: skip
        assert torch_context(find_device(device), "torch-compiled", release)["release"] == own


def test_a_release_is_a_part_of_the_framework() -> None:
    assert TorchPredictor("torch-eager@1.12", "roofline").release == "1.12"
    with pytest.raises(ProgramError, match="no PyTorch framework"):
        TorchPredictor("torch-eager@old", "roofline")


def test_a_name_that_now_builds_another_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = torch.nn.Linear(999, 1000)
    set_to = dict[str, bool]()
    layers = SimpleNamespace(
        set_fused_attn=lambda on: None,
        is_fast_norm=lambda: False,
        set_fast_norm=lambda on: set_to.update(fast=set_to.get("fast", False) or on),
    )
    utils = SimpleNamespace(reparameterize_model=lambda model: model)
    timm = SimpleNamespace(create_model=lambda *_, **__: layer, layers=layers, utils=utils)
    monkeypatch.setitem(sys.modules, "timm", timm)
    assert build(ModelCase("timm", "own", parameters_m=1.02)).source is layer
    with pytest.raises(ProgramError, match=r"has 1 million parameters here, not 8\.8"):
        build(ModelCase("timm", "own", parameters_m=8.8))
    assert not set_to["fast"]
    build(ModelCase("timm", "own", fast_norm=True))
    assert set_to["fast"]


def test_norms_of_timm_s_later_benchmarks_run_in_the_format_of_autocast() -> None:
    base = {"library": "timm", "model": "own", "device": "rtx-3090", "mode": "infer"}
    rows = [{"timm_version": "0.8.9dev0"}, {"timm_version": "1.0.24"}, {"fast_norm": "true"}]
    assert all(model_row({**base, **row}).case.fast_norm for row in rows)
    rows = [{"timm_version": "0.6.6"}, {}, {"timm_version": "1.0.24", "mode": "train"}]
    assert not any(model_row({**base, **row}).case.fast_norm for row in rows)


def test_words_that_are_not_known_are_refused(tmp_path: Path) -> None:
    for change in ({"mode": "tune"}, {"dtype": "fp12"}, {"layout": "ncwh"}, {"batch": 0}):
        with pytest.raises(ProgramError):
            ModelCase(**{"library": "timm", "model": "resnet18", **change})
    with pytest.raises(ProgramError, match="needs the Python package no_such_library"):
        build(ModelCase("no_such_library", "model"))
    table = written(tmp_path / "t.parquet", {})
    pd.read_parquet(table).drop(columns="library").to_parquet(table)
    with pytest.raises(opcast.OpcastError, match="library"):
        read_cases(table, "models")


@pytest.mark.usefixtures("library")
def test_peak_memory_is_judged_as_it_was_measured(tmp_path: Path) -> None:
    changes = (
        {"allocated_mib": 100.0},
        {"reserved_mib": 100.0},
        {"memory_gib": 0.5},
        {"fits": False, "batch": 8},
    )
    out = tmp_path / "out.csv"
    said = evaluated(written(tmp_path / "t.parquet", *changes), "--out", str(out))
    found = pd.read_csv(out).set_index("id")
    program = build(ModelCase(**{key: ROW[key] for key in CASE}))
    own = opcast.predict(program, device="rtx-4090", framework="torch-eager@2.4.0").memory
    expected = (own.allocated_bytes, own.reserved_bytes, own.peak_bytes)
    assert tuple(found["memory_bytes"][:3]) == pytest.approx(expected)
    assert (found["memory_lo_bytes"] < found["memory_bytes"]).all()
    assert tuple(found["measured_memory_bytes"][:3]) == (100 * 2**20, 100 * 2**20, 2**29)
    assert "peak memory, errors in %" in said
    assert "3 of 3 rows that ran are predicted to fit" in said
    assert "1 of 1 rows that ran out of memory are predicted to fit" in said


@pytest.mark.usefixtures("library")
def test_models_that_run_one_after_the_other_add_up(tmp_path: Path) -> None:
    table, out = tmp_path / "t.parquet", tmp_path / "out.csv"
    evaluated(written(table, {}, {"model": "wide"}, {"model": "small + 3*wide"}), "--out", str(out))
    found = pd.read_csv(out)
    for name in ("latency_us", "lo_us", "hi_us"):
        small, wide, both = found[name]
        assert both == pytest.approx(small + 3 * wide)
    # The weights of the small one are there while the wide one runs.
    assert 0 < found["memory_bytes"][2] - found["memory_bytes"][1] < 8192


def test_tables_of_other_columns_are_read_as_data_says() -> None:
    sam = {
        "id": "s", "technique": "SDPA", "sam_model_type": "vit_h", "batch_size": 8.0,
        "memory(MiB)": 7947.0, "dtype": "see technique", "device": "a100-sxm-80gb / a100-sxm-40gb",
    }  # fmt: skip
    diffusion = {
        "id": "d", "source": "huggingface/diffusers docs", "library": "diffusers", "device": "a100",
        "device_note": "a100 (not stated)", "framework": "torch-compiled", "torch": "nightly",
        "model": "SD - controlnet", "batch": 4, "dtype": "fp16, UNet channels-last",
        "latency_ms": 98.0, "mode": "infer",
    }  # fmt: skip
    example = {
        "id": "n", "source": "NVIDIA/DeepLearningExamples", "library": "nvidia-examples",
        "model": "resnet50v1.5", "device": "v100-sxm", "framework": "torch-eager", "batch": 8,
        "kind": "throughput", "value": 400.0, "cell": "400 img/s", "dtype": "amp-fp16",
    }  # fmt: skip
    table = pd.DataFrame([sam, diffusion, example, {**example, "id": "f", "model": "FastPitch"}])
    rows, reasons = read_rows(table, model_row)
    assert reasons[:3] == ["", "", ""] and "no library builds" in reasons[3]
    one, two, three = rows[:3]
    assert one and two and three
    assert one.case == ModelCase("transformers", "sam-vit-h-encoder", 8, 1024, "infer", "bf16",
                                 torch="2.2")  # fmt: skip
    assert (one.device, one.framework) == ("a100-sxm-40gb", "torch-compiled@2.2")
    assert (one.memory_is, one.memory_bytes) == ("allocated", 7947 * 2**20)
    assert [case.model for case, _ in two.parts] == ["sd-1.5/controlnet", "sd-1.5/unet-controlled"]
    assert two.framework == "torch-compiled@2.1"
    assert (two.case.layout, two.case.dtype) == ("nhwc", "fp16")
    assert two.measured_s == pytest.approx(0.098)
    assert (three.case.library, three.case.layout) == ("torchvision", "nhwc")
    assert three.measured_s == pytest.approx(8 / 400)
    assert list(as_run(table, rows)["model"])[:2] == ["sam-vit-h-encoder", two.case.model]


def test_a_chip_s_measured_rows_scale_its_other_models() -> None:
    keys = {"device": "d", "framework": "torch-eager", "mode": "infer", "layout": "nchw"}
    table = pd.DataFrame([{**keys, "model": f"m{n}"} for n in range(12)])
    table.loc[8:, "framework"] = "torch-compiled"
    logs, learn = np.full(12, np.log(2.0)), np.arange(12) < 8
    found = np.exp(log_factors(table, logs, learn))
    # Nearly all of the factor of 2 on what runs alike, the chip's share of it on what does not.
    assert found[:8] == pytest.approx(2.0, rel=0.01)
    chip = np.log(2.0) * 8 / 8.6
    assert np.log(found[8:]) == pytest.approx(chip)
    assert np.abs(errors_left_out(table, logs, learn)).max() < 0.02


@pytest.mark.usefixtures("library")
def test_calibration_scales_the_rows_that_it_did_not_learn_from(tmp_path: Path) -> None:
    table, plain, out = (tmp_path / name for name in ("t.parquet", "plain.csv", "out.csv"))
    models = [{"model": m, "batch": b} for m in ("small", "wide") for b in (64, 128)]
    evaluated(written(table, *models), "--out", str(plain))
    before = pd.read_csv(plain)["latency_us"]
    for row, predicted in zip(models, before, strict=True):
        row |= {"latency_ms": predicted * 3e-3, "split": "calib_own"}
    models[3] |= {"split": "test"}
    said = evaluated(written(table, *models), "--out", str(out), "--calibrate")
    ratios = pd.read_csv(out)["latency_us"] / before
    assert 2.2 < ratios[3] < 3.0 and "1 rows: mean error" in said
    models[3] |= {"split": "calib_own"}
    for row in models:
        del row["latency_ms"]
    command = ["evaluate", "--models", str(written(table, *models)), "--out", str(out)]
    done = CliRunner().invoke(app, [*command, "--no-track", "--calibrate"])
    assert done.exit_code != 0 and "no row to calibrate on" in str(done.exception)


def test_inputs_of_presets_follow_batch_and_size() -> None:
    with torch.device("meta"):
        own = presets()["sd-1.5/unet-inpaint"].made(3, 768)
        packed = presets()["flux-1-dev"].made(2, 512)
    # Twice the samples, with and without the prompt.
    assert own["sample"].shape == (6, 9, 96, 96) and own["timestep"].dtype == torch.int64
    assert packed["hidden_states"].shape == (2, 32 * 32, 64)
    whole = presets()["detr-resnet-101"]
    assert (whole.size, whole.width, whole.config["backbone"]) == (800, 1066, "resnet101")


def test_a_preset_that_is_not_known_is_named() -> None:
    with pytest.raises(ProgramError, match="no preset of diffusers has the name 'sd-9'"):
        build(ModelCase("diffusers", "sd-9"))


@pytest.mark.parametrize(
    ("name", "millions"), [("sd-1.5/unet", 859.52), later("sdxl/unet", 2567.46)]
)
def test_presets_have_the_parameters_of_their_checkpoints(name: str, millions: float) -> None:
    pytest.importorskip("diffusers")
    program = build(ModelCase("diffusers", name, dtype="fp16"))
    count = sum(p.numel() for p in program.source.parameters())
    assert count / 1e6 == pytest.approx(millions, abs=0.01)
