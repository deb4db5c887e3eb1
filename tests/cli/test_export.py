"""Commands for other tools, as they are typed."""

import json
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from opcast.cli import app
from opcast.common.errors import DatasetError

HLO = Path(__file__).parent.parent / "features" / "data" / "gpu_schedule.hlo"


def run(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_chakra_there_and_back(tmp_path):
    out = tmp_path / "traces"
    options = ("--cluster", "h100-sxm-x4", "--model", "roofline", "--out", out)
    written = json.loads(run("export", "chakra", HLO, *options, "--json"))
    read = json.loads(run("import", "chakra", out, "--timeline", tmp_path / "t.json", "--json"))
    # Two all-reduces of 1024 numbers of four bytes in the program.
    assert written["collectives"] == {"all_reduce": {"count": 2, "bytes": 8192}}
    for key in ("ranks", "nodes", "kernels", "compute_us", "collectives"):
        assert read[key] == written[key]
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert sum(e["ph"] == "X" for e in events) == read["nodes"]
    assert "all_reduce: 2, 8,192 bytes" in run("import", "chakra", out)


def test_tables(tmp_path):
    table = tmp_path / "t.parquet"
    grid = "linear m=1/64/4096 n=4096 k=4096 dtype=bf16"
    said = run("export", "table", "--op", grid, "--device", "h100-sxm", "--device", "b200",
               "--model", "roofline", "--out", table)  # fmt: skip
    assert "6 rows" in said
    assert len(pd.read_parquet(table)) == 6
    with pytest.raises(DatasetError, match="nothing to tabulate"):
        run("export", "table", "--device", "h100-sxm", "--out", table)


def test_vidur(tmp_path):
    sizes = "layers=2,d_model=512,heads=8,d_ff=1024"
    said = run("export", "vidur", "--workload", "llama", "--set", sizes, "--device", "b200",
               "--tp", 1, "--max-tokens", 64, "--model", "roofline", "--out", tmp_path)  # fmt: skip
    assert "compute/b200/llama/mlp.csv: " in said
    assert (tmp_path / "compute" / "b200" / "llama" / "attention.csv").is_file()
