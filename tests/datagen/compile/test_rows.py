"""Labels from the TPU compiler's estimates, read from HLO that it wrote."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from opcast.common.errors import DeviceError
from opcast.datagen.compile.plan import CompileItem
from opcast.datagen.compile.run import SOURCE, estimated_rows, without_doubles
from opcast.features.devices.catalogue import find_device

DATA = Path(__file__).parents[2] / "features" / "data" / "absent"
ITEM = CompileItem("op-0-000000", "op:linear", "", True)
V5E = find_device("tpu-v5e")


@pytest.mark.parametrize("name", ["v5e_bias", "v5e_bmm", "v5e_pool", "v5e_gather"])
def test_latencies_are_the_cycles_of_the_text_over_the_clock(name: str) -> None:
    hlo = (DATA / f"{name}.hlo").read_text()
    rows = estimated_rows(hlo, [ITEM], V5E)
    found = sorted(row["latency_us_p50"] * 1500 for row in rows)  # 1.5 GHz: cycles of a µs
    entry = hlo[hlo.index("\nENTRY") :]
    known = {float(c) for c in re.findall(r'"estimated_cycles":"(\d+)"', entry)}
    known -= {c for c in known if c >= 2**62}
    assert found
    assert {round(f) for f in found} == {round(c) for c in known if c}
    assert {row["source"] for row in rows} == {SOURCE}
    assert {row["level"] for row in rows} == {"op"}


def test_kernels_without_an_estimate_are_no_labels() -> None:
    hlo = (DATA / "v5e_bias.hlo").read_text()
    silent = re.sub(r'"estimated_cycles":"\d+"', '"estimated_cycles":"9223372036854775807"', hlo)
    assert silent != hlo
    assert estimated_rows(silent, [ITEM], V5E) == []


def test_a_device_without_a_clock_is_refused() -> None:
    hlo = (DATA / "v5e_bias.hlo").read_text()
    with pytest.raises(DeviceError, match="boost_mhz"):
        estimated_rows(hlo, [ITEM], replace(V5E, clock_hz=0.0))


def test_doubles_become_quantiles_and_go_to_the_model_family() -> None:
    common = {"kernel_hash": "a", "device": "d", "repeats": 1}
    frame = pd.DataFrame([
        {**common, "family": "op:add", "latency_us_p50": 1.0},
        {**common, "family": "bert", "latency_us_p50": 2.0},
        {**common, "family": "random", "latency_us_p50": 3.0},
        {**common, "family": "random", "latency_us_p50": 9.0, "device": "other"},
    ])  # fmt: skip
    frame = frame.assign(latency_us_p10=frame.latency_us_p50, latency_us_p90=frame.latency_us_p50)
    found = without_doubles(frame).set_index("device")
    assert found.loc["d", "family"] == "bert"
    assert found.loc["d", "repeats"] == 3
    # Linear quantiles of 1, 2, 3: 1 + 0.1 · 2, the middle, 1 + 0.9 · 2.
    assert found.loc["d", "latency_us_p10"] == pytest.approx(1.2)
    assert found.loc["d", "latency_us_p50"] == pytest.approx(2.0)
    assert found.loc["d", "latency_us_p90"] == pytest.approx(2.8)
    assert found.loc["other", "latency_us_p50"] == pytest.approx(9.0)


def test_merging_again_changes_nothing() -> None:
    frame = pd.DataFrame({
        "device": ["d"] * 3, "kernel_hash": ["k"] * 3, "family": ["random"] * 3,
        "latency_us_p10": [1.0, 2.0, 3.0], "latency_us_p50": [1.0, 2.0, 3.0],
        "latency_us_p90": [1.0, 2.0, 3.0], "repeats": [1] * 3,
    })  # fmt: skip
    once = without_doubles(frame)
    pd.testing.assert_frame_equal(without_doubles(once), once)
    again = without_doubles(pd.concat([once, frame.head(1)]))
    assert again["repeats"].tolist() == [4]
