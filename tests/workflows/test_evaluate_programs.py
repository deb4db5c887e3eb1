"""Folders of programs with published times."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from opcast.cli import app
from opcast.common.errors import DatasetError
from opcast.features.devices.catalogue import find_device, in_catalogue
from opcast.predict.program.case import program_text
from opcast.predict.program.predictor import load_for_programs
from opcast.workflows.evaluate_programs import judge_programs, predict_programs, read_table

from ..support.cases import later

PACK = Path(os.environ.get("OPCAST_PUBLISHED_DATA", Path(__file__).parents[3] / "shared/data"))
PROGRAMS, REGIONS = PACK / "published-programs", PACK / "published-regions"
HLO = """HloModule m, num_partitions={partitions}, replica_count=1

ENTRY main {{
  x = bf16[8192,8192] parameter(0)
  y = bf16[8192,8192] parameter(1), sharding={{devices=[2,1]<=[2]}}
  ROOT z = bf16[8192,8192] dot(x, y), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "one.hlo").write_text(HLO.format(partitions=1))
    (tmp_path / "two.hlo.gz").write_bytes(gzip.compress(HLO.format(partitions=2).encode()))
    rows = [
        {"id": "a", "file": "one.hlo", "device": "h100-sxm", "latency_us": 10.0, "trust": "clean"},
        {"id": "b", "file": "two.hlo.gz", "device": "h100-sxm", "latency_us": 10.0, "trust": "x"},
        {"id": "c", "file": "none.hlo", "device": "h100-sxm", "latency_us": 10.0, "trust": "x"},
        {"id": "d", "file": "one.hlo", "device": "mine", "latency_us": np.nan, "trust": "clean"},
    ]
    pd.DataFrame(rows).to_csv(tmp_path / "programs.csv", index=False)
    (tmp_path / "mine.yaml").write_text("name: mine\nbase: h100-sxm\nhbm_bandwidth_gbps: 20\n")
    return tmp_path


def test_programs_of_one_and_of_several_devices_run_whole(folder: Path) -> None:
    frame = predict_programs(folder, load_for_programs("default"), "fused").set_index("id")
    assert frame.loc["b", "latency_us"] == frame.loc["a", "latency_us"] > 1.0
    assert "none.hlo" in frame.loc["c", "reason"] and np.isnan(frame.loc["c", "latency_us"])
    # A device file of the folder, with a hundredth of the bandwidth.
    assert frame.loc["d", "latency_us"] > frame.loc["a", "latency_us"]
    figures = judge_programs(frame.reset_index())
    assert figures["rows"].tolist() == [1, 1]


MLIR = """module @m attributes {{mhlo.num_partitions = {} : i32, mhlo.num_replicas = 1 : i32}} {{
  func.func public @main(%x: tensor<64x64xf32>) -> tensor<64x64xf32> {{
    %0 = stablehlo.add %x, %x : tensor<64x64xf32>
    return %0 : tensor<64x64xf32>
  }}
}}
"""


def test_one_device_runs_all_of_stablehlo_for_several(tmp_path: Path) -> None:
    for count in (1, 4):
        (tmp_path / f"{count}.mlir").write_text(MLIR.format(count))
    assert program_text(tmp_path / "4.mlir", whole=True) == MLIR.format(1).encode()
    flags = ("--lowering", "fused")
    one, four = (_by_command(tmp_path, f"{n}.mlir", "l4", *flags) for n in (1, 4))
    assert one == four
    asked = ["predict", str(tmp_path / "1.mlir"), "--device", "l4", *flags]
    said = CliRunner().invoke(app, [*asked, "--whole", "--json"])
    assert "no effect on programs for one device" in said.stderr and "1.mlir" in said.stderr
    # Lines of the program are known by its file, as without the option.
    assert json.loads(said.stdout) == json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)


def test_whole_says_that_it_leaves_functions_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import jax\ndef double(x):\n    return x + x\n"
        "double.example_args = (jax.ShapeDtypeStruct((64, 64), 'float32'),)\n"
    )
    asked = ["predict", f"{tmp_path / 'own.py'}:double", "--device", "l4", "--lowering", "fused"]
    said = CliRunner().invoke(app, [*asked, "--whole"], catch_exceptions=False)
    assert said.exit_code == 0
    assert "only the headers of files" in said.stderr and "own.py:double" in said.stderr


def test_a_program_is_unpacked_without_its_partitions(folder: Path, tmp_path: Path) -> None:
    assert program_text(folder / "two.hlo.gz", whole=True) == HLO.format(partitions=1).encode()
    broken = tmp_path / "broken.gz"
    broken.write_bytes(b"\x1f\x8b no gzip")
    with pytest.raises(DatasetError, match="cannot be read"):
        program_text(broken, whole=True)


def test_the_command_prints_errors_and_writes_predictions(folder: Path) -> None:
    out = folder / "out" / "said.parquet"
    arguments = ["evaluate", "--programs", folder, "--lowering", "op", "--out", out, "--no-track"]
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "1 programs not predicted" in result.output and "all 2: mean error" in result.output
    assert len(pd.read_parquet(out)) == 4 and "doubtful" not in result.output
    # A table that doubts some of its times gets a line without them.
    table = pd.read_csv(folder / "programs.csv")
    table.loc[1, "trust"] = "doubtful"
    table.to_csv(folder / "programs.csv", index=False)
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert "the 1 that are not doubtful: mean error" in result.output


def test_a_folder_without_a_table_says_so(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="0 tables with the columns file, device"):
        predict_programs(tmp_path, load_for_programs("default"), "op")


SCRIPT = """import argparse, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("out"), parser.add_argument("size"), parser.add_argument("--devices")
args = parser.parse_args()
pathlib.Path(args.out).mkdir(parents=True, exist_ok=True)
text = pathlib.Path(__file__).with_name("step.hlo").read_text()
pathlib.Path(args.out, f"tiny-{args.size}-x{args.devices}.mlir").write_text(text)
"""
STEP = """HloModule m, num_partitions=4, replica_count=1

s {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}

ENTRY main {
  x = f32[4096,4096] parameter(0)
  y = f32[4096,4096] dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT z = f32[4096,4096] all-reduce(y), channel_id=1, replica_groups={{0,1,2,3}},
    use_global_device_ids=true, to_apply=s
}
"""


def test_steps_are_exported_and_predicted_on_their_cluster(tmp_path: Path) -> None:
    folder = tmp_path / "steps"
    folder.mkdir()
    (folder / "step.hlo").write_text(STEP)
    (folder / "export_tiny.py").write_text(SCRIPT)
    table = "device,n_devices,workload,measured_ms\n"
    (folder / "steps.csv").write_text(f"{table}h100-sxm,4,tiny-1b,1\nh100-sxm,0,tiny-1b,1\n")
    out = tmp_path / "said.parquet"
    arguments = ["evaluate", "--programs", folder, "--lowering", "op", "--out", out, "--no-track"]
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "said-programs" / "tiny-1b-x4.mlir").is_file()
    assert "1 programs not predicted" in result.output and "steps, errors in %" in result.output
    first = pd.read_parquet(out).iloc[0]
    # 137 GFLOP at no more than 495 TFLOP/s, and 1.5 times 64 MiB over 450 GB/s.
    assert first["latency_us"] > 2 * 4096**3 / 495e12 * 1e6 + 1.5 * 2**26 / 450e9 * 1e6
    assert first["lo_us"] < first["latency_us"] < first["hi_us"] and first["measured_us"] == 1000.0


def test_steps_without_a_script_say_where_the_program_belongs(tmp_path: Path) -> None:
    table = "device,n_devices,workload,measured_ms\nh100-sxm,4,tiny-1b,1\n"
    (tmp_path / "steps.csv").write_text(table)
    frame = predict_programs(tmp_path, load_for_programs("default"), "op")
    assert "tiny-1b-x4.mlir does not exist" in frame["reason"].iloc[0]
    (tmp_path / "export_bad.py").write_text("raise SystemExit('no such size')")
    frame = predict_programs(tmp_path, load_for_programs("default"), "op")
    assert "no such size" in frame["reason"].iloc[0]


def test_regions_leave_out_the_call_of_the_host(folder: Path) -> None:
    predictor = load_for_programs("default")
    whole, stream = (
        predict_programs(folder, predictor, "op", on_stream=on)["latency_us"][0]
        for on in (False, True)
    )
    device = find_device("h100-sxm")
    assert whole - stream == pytest.approx(1e6 * (device.dispatch - device.floor))


def part(table: pd.DataFrame, pack: Path, folder: Path) -> None:
    """Make a folder of some rows of a published table."""
    for name in {*table["device"]}:
        if (pack / f"{name}.yaml").is_file():
            (folder / f"{name}.yaml").write_text((pack / f"{name}.yaml").read_text())
    for file in {*table["file"]}:
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).symlink_to(pack / file)
    table.to_csv(folder / "table.csv", index=False)


@pytest.mark.skipif(not REGIONS.is_dir(), reason=f"no published regions at {REGIONS}")
@pytest.mark.slow
@pytest.mark.parametrize("every", [5, later(1)])
def test_published_regions_are_within_a_ninth(every: int, tmp_path: Path) -> None:
    part(read_table(REGIONS).iloc[::every], REGIONS, tmp_path)
    frame = predict_programs(tmp_path, load_for_programs("default"), "fused", on_stream=True)
    assert (frame["reason"] == "").all()
    error = (frame["latency_us"] / frame["measured_us"] - 1).abs()
    assert error.mean() < 0.11
    # The median moves with the rows: that of all is the figure.
    assert every > 1 or error.median() < 0.08
    assert frame["measured_us"].between(frame["lo_us"], frame["hi_us"]).mean() > 0.8


def _by_command(folder: Path, file: str, device: str, *flags: str) -> list[float]:
    """Time and ends that a user gets for a program of a table."""
    own = folder / f"{device}.yaml"
    # Tables take the catalogue's description first.
    device = str(own) if own.is_file() and not in_catalogue(device) else device
    arguments = ["predict", folder / file, "--device", device, "--whole", *flags, "--json"]
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    return [said[name] for name in ("latency_us", "lo_us", "hi_us")]


@pytest.mark.parametrize("on_stream", [False, True])
def test_a_user_gets_the_numbers_of_the_table(folder: Path, on_stream: bool) -> None:
    frame = predict_programs(folder, load_for_programs("default"), "fused", on_stream=on_stream)
    flags = ["--lowering", "fused", *(["--on-stream"] if on_stream else [])]
    for row in frame[frame["reason"] == ""].itertuples():
        file = {"a": "one.hlo", "b": "two.hlo.gz", "d": "one.hlo"}[row.id]
        said = _by_command(folder, file, row.device, *flags)
        assert said == [row.latency_us, row.lo_us, row.hi_us]


@pytest.mark.slow
@pytest.mark.parametrize("every", [40, later(10)])
@pytest.mark.parametrize(("pack", "flags"), [(PROGRAMS, []), (REGIONS, ["--on-stream"])])
def test_a_user_gets_the_numbers_of_published_tables(
    pack: Path, flags: list[str], every: int, tmp_path: Path
) -> None:
    if not pack.is_dir():
        pytest.skip(f"no {pack}")
    table = read_table(pack)
    # Each of another program.
    table = table.drop_duplicates("file").iloc[::every].reset_index(drop=True)
    part(table, pack, tmp_path)
    predictor = load_for_programs("default")
    frame = predict_programs(tmp_path, predictor, "fused", on_stream=bool(flags))
    for file, row in zip(table["file"], frame.itertuples(), strict=True):
        said = _by_command(tmp_path, file, row.device, "--lowering", "fused", *flags)
        assert said == [row.latency_us, row.lo_us, row.hi_us], file
