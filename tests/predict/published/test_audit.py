"""Rows that cannot be right: made by hand, and those that publishers mark in their tables."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from opcast.cli import app
from opcast.common.errors import DatasetError
from opcast.features.operators.schema import faulty
from opcast.predict.published.audit import audit

from ...support.cases import later

ROOT = Path(__file__).resolve().parents[3]
PACKS = Path(os.environ.get("OPCAST_PUBLISHED_DATA", ROOT.parent / "shared" / "data"))


def products(times: dict[int, float], n: int = 4096, k: int = 4096, **more: object) -> pd.DataFrame:
    """Products of ``m`` tokens on an H100 by their times in microseconds."""
    shape = {"op": "linear", "family": "linear", "dtype": "bf16", "device": "h100-sxm", "b": 1}
    rows = [{**shape, "source": "mine", "m": m, "n": n, "k": k, "latency_us": t, **more}
            for m, t in times.items()]  # fmt: skip
    return pd.DataFrame(rows)


def reasons(table: pd.DataFrame, tmp_path: Path) -> dict[str, list[int]]:
    path = tmp_path / "table.csv"
    table.to_csv(path, index=False)
    found = audit(path).flagged
    return {r: sorted(part["row"]) for r, part in found.groupby("reason")}


def test_sound_rows_raise_no_alarm(tmp_path):
    # 2·m·4096² at 600 TFLOP/s, and the weights at 2.5 TB/s.
    times = {m: max(m * 2 * 4096**2 / 600e6, 33.6 / 2.5) + 3 for m in (1, 16, 256, 1024, 4096)}
    assert reasons(products(times), tmp_path) == {}


def test_more_than_the_peak_is_impossible_and_its_figures_can_be_checked(tmp_path):
    path = tmp_path / "t.csv"
    # 2 · 4096³ operations in 100 µs: 1374 TFLOP/s on a device of 989.
    products({4096: 100.0}).to_csv(path, index=False)
    found = audit(path)
    assert found.impossible == 1
    row = found.flagged.iloc[0]
    assert (row["reason"], row["file"], row["row"]) == ("above the peak", "t.csv", 0)
    assert row["evidence"] == pytest.approx(2 * 4096**3 / 100e-6 / 989.4e12, rel=1e-3)
    assert row["explanation"] == "137.4 GFLOP in 100 µs are 1,374 TFLOP/s; the peak is 989.4"


def test_five_per_cent_over_the_peak_may_be_the_clock(tmp_path):
    seconds = 2 * 4096**3 / 989.4e12 / 1.05
    found = reasons(products({4096: seconds * 1e6}), tmp_path)
    assert found == {"just above the peak": [0]}


def test_bytes_beyond_the_cache_must_come_from_memory(tmp_path):
    # Weights of 1 GiB less the cache of 50 MB in 200 µs: more than 3.35 TB/s by half.
    table = products({1: 200.0, 2: 500.0}, n=32768, k=16384)
    assert reasons(table, tmp_path) == {"above the bandwidth": [0]}


def test_times_that_are_none_and_times_below_a_launch(tmp_path):
    table = products({1: 0.0, 2: -3.0, 4: float("nan"), 8: 0.3}, n=64, k=64)
    assert reasons(table, tmp_path) == {"no time": [0, 1, 2], "below a launch": [3]}


def test_rows_without_a_time_are_left_out_of_comparisons_without_a_warning(tmp_path):
    # The spike is still found beside a zero and a negative time; warnings are errors here.
    table = products({1: 0.0, 2: -3.0, 16: 20.0, 32: 90.0, 64: 21.0, 128: 22.0})
    found = {"no time": [0, 1], "slower than a larger one": [3]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reasons(table, tmp_path) == found


def test_a_spike_is_named_with_the_row_that_contradicts_it(tmp_path):
    table = products({16: 20.0, 32: 90.0, 64: 21.0, 128: 22.0})
    path = tmp_path / "t.csv"
    table.to_csv(path, index=False)
    found = audit(path).flagged
    assert list(found["row"]) == [1]
    assert found["reason"].item() == "slower than a larger one"
    assert "m=32 takes 90 µs, m=64 21 (row 2)" in found["explanation"].item()


def test_milliseconds_among_microseconds(tmp_path):
    times = {m: (max(m * 2 * 4096**2 / 600e6, 33.6 / 2.5) + 3) * 1000 for m in (1, 16, 256, 4096)}
    assert reasons(products(times), tmp_path) == {"another unit": [0, 1, 2, 3]}


def test_equal_rows_and_copied_times(tmp_path):
    twice = pd.concat([products({16: 20.0}), products({16: 60.0})])
    assert reasons(twice, tmp_path) == {"equal rows disagree": [0, 1]}
    times = {1: 20.01, 2: 20.37, 4: 21.02, 8: 22.11}
    copied = pd.concat([products(times), products(times, k=8192), products({1: 19.0}, k=2048)])
    assert reasons(copied, tmp_path) == {"times of other rows": [*range(8)]}


def test_a_library_of_which_many_rows_are_above_the_peak_is_suspect_as_a_whole(tmp_path):
    bad = products({4096: 100.0, 8192: 200.0, 2048: 50.0})
    rest = products({m: 4000.0 + m for m in range(9000, 9020)})
    found = reasons(pd.concat([bad, rest]), tmp_path)
    assert found["above the peak"] == [0, 1, 2]
    assert found["group above the peak"] == [*range(3, 23)]


def test_collectives_faster_than_their_links(tmp_path):
    table = pd.DataFrame({"op": "all_gather", "bytes": [2**30, 2**30], "world_size": [8, 4],
                          "device": "h100-sxm", "latency_us": [1000.0, 2500.0]})  # fmt: skip
    # 7/8 GiB in 1 ms are 939 GB/s over links of 450.
    assert reasons(table, tmp_path) == {"above the bandwidth": [0]}


def test_rows_that_name_no_library_are_a_group_of_their_own(tmp_path):
    table = products({1000.0: 1e5, 2000.0: 2e5, 4000.0: 4e5})
    # A CSV file has nothing where no library is named.
    table["backend"] = ["vllm", None, None]
    assert reasons(table, tmp_path) == {}


def test_rows_that_cannot_be_checked_are_counted_in_a_note(tmp_path):
    path = tmp_path / "t.csv"
    table = products({1: 20.0, 2: 20.0, 4: 0.001})
    table.loc[0, "device"], table.loc[1, "m"] = "abacus", 0
    table.to_csv(path, index=False)
    found = audit(path)
    assert found.rows == 1
    assert any("unknown devices were not checked: abacus" in note for note in found.notes)
    assert any("no valid sizes" in note for note in found.notes)


def test_marks_of_the_publisher_are_compared(tmp_path):
    # Two above the peak, of which one is marked; a marked one that nothing contradicts.
    table = products({4096: 100.0, 2048: 50.0, 64: 20.0, 128: 21.0})
    table["suspect"] = ["above_peak", None, "group", None]
    path = tmp_path / "t.csv"
    table.to_csv(path, index=False)
    found = audit(path)
    assert (found.rows, found.marked, found.found, found.alarms) == (4, 2, 1, 1)
    said = CliRunner().invoke(app, ["audit", str(path)])
    assert said.exit_code == 1
    assert "of 2 rows that the table itself marks as wrong, 1 are flagged" in said.output
    assert "of 2 others, 1 (50.00%)" in said.output


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "latency_us\n1\n"])
def test_tables_of_something_else_are_refused(tmp_path, text):
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(DatasetError, match="the table cannot be checked"):
        audit(path)
    with pytest.raises(DatasetError, match="no such table"):
        audit(tmp_path / "missing.csv")


def marked(name: str, table: pd.DataFrame) -> np.ndarray:
    """Rows that their publisher or the README of the pack says are wrong."""
    if "suspect" in table:
        return table["suspect"].notna().to_numpy()
    if name.endswith("gemm.parquet"):
        fp8 = (table["source"] == "xla") & (table["device"] == "h100-sxm")
        return ((table["above_peak"] == 1) | (fp8 & (table["dtype"] == "fp8"))).to_numpy()
    if "above_peak" in table:
        return (table["above_peak"] == 1).to_numpy()
    if "neusight" in name:
        named = table.assign(device=table["device"].replace({"Tesla P4": "p4"}))
        # Some rows of the sound session are to be learned from, too.
        throttled = table["origin"].astype(str).str.contains("/train/").to_numpy()
        return faulty(named.assign(key="eager/" + table["family"].astype(str)), "wrong") & throttled
    return np.zeros(len(table), bool)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("published-xla/matmul.csv.gz", 1125),
        later("published-kernels/gemm.parquet", 1124),
        ("published-kernels/layers.parquet", 8399),
        later("published-kernels/conv.parquet", 0),
        later("published-latency/ops_neusight.parquet", 6423),
        ("published-latency/ops_vidur.parquet", 0),
    ],
)
def test_marked_rows_are_found_and_others_left_alone(name, known):
    path = PACKS / name
    if not path.is_file():
        pytest.skip(f"{name} is not at {PACKS} (OPCAST_PUBLISHED_DATA)")
    table = pd.read_parquet(path) if name.endswith("parquet") else pd.read_csv(path)
    bad = marked(name, table)
    assert bad.sum() == known
    hit = np.zeros(len(table), bool)
    hit[audit(path).flagged["row"].unique().astype(int)] = True
    assert (hit & bad).sum() >= 0.99 * known
    assert (hit & ~bad).sum() < 0.01 * (~bad).sum()
