"""The command line, as a user calls it."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from opcast import load
from opcast.cli.main import _main
from opcast.features.devices.device import local_device_name

from ..support.commands import opcast

DEVICE = "cpu-amd-epyc-2c"


def in_a_process(*args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "opcast", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "mlp.mlir"
    done = opcast("zoo", "export", "mlp", "--set", "batch=8", "--set", "mode=train", "--out", path)
    assert done.returncode == 0, done.stderr
    return path


@pytest.mark.parametrize("run", [opcast, in_a_process], ids=["here", "process"])
def test_predict_prints_json(program, run):
    done = run("predict", program, "--device", DEVICE, "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["device"] == DEVICE
    assert data["lo_us"] <= data["latency_us"] <= data["hi_us"]


def test_predict_prints_a_screen_and_a_trace(program, tmp_path):
    trace = tmp_path / "trace.json"
    done = opcast("predict", program, "--device", DEVICE, "--top", "3", "--timeline", trace)
    assert done.returncode == 0, done.stderr
    assert "90 % interval" in done.stdout
    assert json.loads(trace.read_text())["traceEvents"]


def test_no_command_ends_in_a_traceback(monkeypatch, capsys):
    def broken(*args, **kwargs):
        raise KeyError("a rule that is missing")

    monkeypatch.setattr("opcast.models.estimators.xgboost_import.own_process", lambda: None)
    monkeypatch.setattr("opcast.predict.cluster.step.find_cluster", broken)
    command = ["opcast", "simulate", "--workload", "llama", "--cluster", "h100-sxm-x4"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as end:
        _main()
    assert end.value.code == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert said.count("\n") == 1
    assert "a fault of opcast: KeyError: 'a rule that is missing' at " in said


@pytest.mark.slow
def test_an_unknown_machine_is_measured_once(program, tmp_path, monkeypatch):
    monkeypatch.setenv("OPCAST_CACHE", str(tmp_path / "cache"))
    model = load().model
    spec = model.devices[DEVICE]
    model.devices = {"elsewhere": replace(spec, name="elsewhere")}
    model.save(tmp_path / "model")
    first, second = (
        opcast("predict", program, "--model", tmp_path / "model", "--json") for _ in range(2)
    )
    assert first.returncode == second.returncode == 0, first.stderr
    assert "measuring this machine" in first.stderr
    assert second.stderr == ""
    assert json.loads(second.stdout)["device"] == local_device_name()
    assert "elsewhere" in json.loads(second.stdout)["notes"][0]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--device", "abacus"), "abacus"),
        (("--model", "no-such-model"), "no-such-model"),
        (("--device", DEVICE, "--lowering", "magic"), "magic"),
    ],
)
def test_bad_choices_give_one_line_and_fail(program, args, text):
    done = opcast("predict", program, *args)
    assert done.returncode != 0
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stderr.startswith("opcast: error: ")
    assert text in done.stderr


def test_predict_for_a_gpu_of_the_catalogue_asks_the_gpu_model(program):
    done = opcast("predict", program, "--device", "l4", "--lowering", "op", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert (data["device"], data["model"]) == ("l4", "gpu-xla")
    assert {k["source"].split(":")[0] for k in data["kernels"]} == {"learned"}
    assert 0 < data["lo_us"] < data["latency_us"] < data["hi_us"]
    assert any("no published rows of l4" in note for note in data["notes"])


def test_predict_for_a_tpu_of_the_catalogue_says_whose_estimates_it_learned(program):
    done = opcast("predict", program, "--device", "tpu-v4", "--lowering", "op", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["device"] == "tpu-v4"
    assert data["model"] == "tpu-xgboost"
    assert {k["source"] for k in data["kernels"]} <= {"learned", "roofline"}
    assert all(k["latency_us"] > 0 for k in data["kernels"] if k["kind"] != "control")
    assert 0 < data["lo_us"] < data["latency_us"] < data["hi_us"]
    assert any("not from measurements" in note for note in data["notes"])


def test_models_lists_what_ships_and_prints_a_card():
    rows = {row["name"]: row for row in json.loads(opcast("models", "--json").stdout)}
    assert {"cpu-xgboost", "gpu-operators", "gpu-xla", "tpu-xgboost"} <= set(rows)
    assert rows["gpu-xla"]["default for"] == "gpu"
    assert rows["tpu-xgboost"]["default for"] == "tpu"
    for name in ("cpu-xgboost", "gpu-operators", "gpu-xla", "tpu-xgboost"):
        done = opcast("models", name)
        assert done.returncode == 0, done.stderr
        for heading in ("## Data", "## Splits", "## Errors", "## Known gaps"):
            assert heading in done.stdout, name
        assert "left out" in done.stdout or "unseen_family" in done.stdout
    assert max(map(len, opcast("models").stdout.splitlines())) <= 120
    both = opcast("models", "gpu-operators", "--against", "blocks")
    assert both.returncode == 0 and "mean, was" in both.stdout
    assert opcast("models", "--against", "blocks").returncode == 2
    missing = opcast("models", "no-such-model")
    assert missing.returncode == 1 and "no-such-model" in missing.stderr


def test_device_prints_a_device_with_sources_and_marks_defaults():
    done = opcast("device", "NVIDIA H200")
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line.split()}
    assert "4800" in lines["hbm_bandwidth_gbps"]
    assert "data sheet, from memory" in lines["hbm_bandwidth_gbps"]
    assert "default" in lines["launch_floor_us"]
    assert "default" not in lines["peak_tflops.bf16"]


def test_device_lists_the_catalogue(tmp_path):
    done = opcast("device", "--list")
    assert done.returncode == 0, done.stderr
    assert {"h100-sxm", "tpu-v5e", "mi250"} <= {x.split()[0] for x in done.stdout.splitlines()}
    assert max(map(len, done.stdout.splitlines())) <= 120
    names = [d["name"] for d in json.loads(opcast("device", "--list", "--json").stdout)]
    # The catalogue, then what only models know, such as the CPU of README's example.
    assert names[-1] == "cpu-amd-epyc-2c" and names[:-1] == sorted(names[:-1])


def test_device_refuses_a_name_and_another_choice():
    done = opcast("device", "h100-sxm", "--list")
    assert done.returncode != 0
    assert "--list" in done.stderr


def test_a_process_ends_with_one_line_and_its_status(program):
    """What :func:`opcast.cli.main` makes of an error, of wrong usage, and of none."""
    done = in_a_process("predict", program, "--device", "abacus")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("opcast: error: ") and "abacus" in done.stderr
    assert in_a_process("predict").returncode == 2
    assert in_a_process("zoo", "list").returncode == 0


@pytest.mark.parametrize("content", ["", "hello", "module { func.func @main(", "HloModule x\n!!"])
def test_bad_programs_give_one_line_and_fail(content, tmp_path):
    path = tmp_path / "bad.mlir"
    path.write_text(content)
    done = opcast("predict", path, "--device", DEVICE)
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert "bad.mlir" in done.stderr


def test_missing_file_fails(tmp_path):
    done = opcast("predict", tmp_path / "none.mlir", "--device", DEVICE)
    assert done.returncode == 1
    assert "none.mlir" in done.stderr


def test_zoo_list_names_families_and_settings():
    done = opcast("zoo", "list")
    assert done.returncode == 0
    for family in ("mlp", "resnet", "bert", "llama", "llama_decode", "moe", "vit", "unet", "dlrm"):
        assert family in done.stdout
    assert "batch=" in done.stdout


def test_zoo_refuses_unknown_settings(tmp_path):
    done = opcast("zoo", "export", "mlp", "--set", "colour=red", "--out", tmp_path / "x.mlir")
    assert done.returncode == 1
    assert "colour" in done.stderr
    assert not (tmp_path / "x.mlir").exists()


@pytest.mark.parametrize("bad", ["ops", "ops=x", "poetry=1"])
def test_profile_refuses_a_bad_mix(bad, tmp_path):
    done = opcast("profile", "--out", tmp_path, "--budget", "1s", "--mix", bad)
    assert done.returncode == 1
    assert "mix" in done.stderr


def test_compare_without_a_store_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("OPCAST_MLRUNS", str(tmp_path / "none"))
    done = opcast("compare", cwd=tmp_path)
    assert done.returncode == 1
    assert "opcast train" in done.stderr
