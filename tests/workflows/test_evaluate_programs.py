"""Folders of programs with published times."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from opcast.cli import app
from opcast.common.errors import DatasetError
from opcast.predict.program.predictor import load_for_programs
from opcast.workflows.evaluate_programs import judge_programs, predict_programs, program_text

PACK = Path(os.environ.get("OPCAST_PUBLISHED_DATA", Path(__file__).parents[3] / "shared/data"))
REGIONS = PACK / "published-regions"
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


def test_a_program_is_unpacked_without_its_partitions(folder: Path, tmp_path: Path) -> None:
    assert program_text(folder / "two.hlo.gz") == HLO.format(partitions=1).encode()
    broken = tmp_path / "broken.gz"
    broken.write_bytes(b"\x1f\x8b no gzip")
    with pytest.raises(DatasetError, match="cannot be read"):
        program_text(broken)


def test_the_command_prints_errors_and_writes_predictions(folder: Path) -> None:
    out = folder / "out" / "said.parquet"
    arguments = ["evaluate", "--programs", folder, "--lowering", "op", "--out", out, "--no-track"]
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "1 programs not predicted" in result.output and "all 2: mean error" in result.output
    assert len(pd.read_parquet(out)) == 4


def test_a_folder_without_a_table_says_so(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="0 tables with the columns file, device"):
        predict_programs(tmp_path, load_for_programs("default"), "op")


@pytest.mark.skipif(not REGIONS.is_dir(), reason=f"no published regions at {REGIONS}")
@pytest.mark.slow
def test_published_regions_are_within_a_sixth() -> None:
    frame = predict_programs(REGIONS, load_for_programs("default"), "fused")
    assert (frame["reason"] == "").all()
    error = (frame["latency_us"] / frame["measured_us"] - 1).abs()
    assert error.mean() < 0.165 and error.median() < 0.11
    assert frame["measured_us"].between(frame["lo_us"], frame["hi_us"]).mean() > 0.8
