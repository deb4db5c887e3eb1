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
    """What a command prints: with --json the result alone, else also what it wrote."""
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout if "--json" in arguments else result.output


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


def test_functions_are_programs_of_tables_too(tmp_path):
    source, table = tmp_path / "f.py", tmp_path / "t.csv"
    source.write_text(
        "import jax, jax.numpy as jnp\n"
        "def f(x, w): return x @ w\n"
        "f.example_args = (jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16),\n"
        "                  jax.ShapeDtypeStruct((1024, 256), jnp.bfloat16))\n"
    )
    run("export", "table", f"{source}:f", "--device", "h100-sxm", "--lowering", "op",
        "--out", table)  # fmt: skip
    assert list(pd.read_csv(table)["op"]) == ["dot"]
    products = tmp_path / "p.txtpb"
    run("export", "xla-perf-table", "h100-sxm", "--program", f"{source}:f", "--out", products)
    assert "dimensions: 512 dimensions: 256" in products.read_text()


def test_a_table_has_a_row_for_each_design_of_a_file(tmp_path):
    """What a faster memory brings to a product of few rows, which reads 2 · 4096² bytes."""
    designs, table = tmp_path / "designs.yaml", tmp_path / "t.parquet"
    designs.write_text("name: wide\nbase: h100-sxm\nhbm_bandwidth_gbps: [3350, 6700]\n")
    grid = "linear m=1/8192 n=16384 k=16384 dtype=bf16"
    run("export", "table", "--op", grid, "--device", designs, "--device", "b200",
        "--model", "roofline", "--out", table)  # fmt: skip
    found = pd.read_parquet(table)
    assert len(found) == 6 and found["hbm_bandwidth_gbps"].isna().sum() == 2
    rows = [json.loads(shape)["m"] for shape in found["shape"]]
    times = found.assign(m=rows).set_index(["m", "hbm_bandwidth_gbps"])["latency_us"]
    # 2 · 16384² bytes at 85 % of 3350 GB/s are 189 µs; the fixed cost does not halve.
    assert times[1, 3350] == pytest.approx(189, rel=0.1)
    assert 1.8 < times[1, 3350] / times[1, 6700] < 2.0
    # A product of many rows is bound by the matrix units, which both designs share.
    assert times[8192, 6700] == pytest.approx(times[8192, 3350], rel=0.02)

    run("export", "table", HLO, "--device", designs, "--kernels", "roofline", "--out", table)
    found = pd.read_parquet(table)
    assert sorted(found["hbm_bandwidth_gbps"].unique()) == [3350, 6700]
    assert len(found) == 2 * found["shape"].nunique()


def test_vidur(tmp_path):
    sizes = "layers=2,d_model=512,heads=8,d_ff=1024"
    said = run("export", "vidur", "--workload", "llama", "--set", sizes, "--device", "b200",
               "--tp", 1, "--max-tokens", 64, "--model", "roofline", "--out", tmp_path)  # fmt: skip
    assert "compute/b200/llama/mlp.csv: " in said
    assert (tmp_path / "compute" / "b200" / "llama" / "attention.csv").is_file()
