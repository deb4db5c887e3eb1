"""Rules for figures that a device file leaves out, on made-up figures."""

from __future__ import annotations

import pytest

from opcast.features.devices.rules import (
    GENERIC,
    MATRIX_TYPES,
    VECTOR_TYPES,
    Architecture,
    capability_of,
    fill,
    generations,
    matrix_rates,
    rules_of,
    vector_rates,
)

#: 100 cores of 64 lanes at 1000 MHz: 2 × 64 × 100 × 1e9 = 12.8 TFLOP/s.
CHIP = {
    "core_count": 100.0,
    "lanes_per_core": 64.0,
    "boost_mhz": 1000.0,
    "hbm_bandwidth_gbps": 1000.0,
    "pcie_gbps": 32.0,
}


def test_vector_rates_follow_from_lanes_cores_and_clock():
    values, why = fill(CHIP, Architecture(half=4.0, brain=2.0, integer=0.5, double=0.25))
    assert values["vector_tflops.f32"] == pytest.approx(2 * 64 * 100 * 1000e6 / 1e12)
    assert values["vector_tflops.f16"] == pytest.approx(4 * 12.8)
    assert values["vector_tflops.bf16"] == pytest.approx(2 * 12.8)
    assert values["vector_tflops.s32"] == pytest.approx(0.5 * 12.8)
    assert values["peak_tflops.f64"] == pytest.approx(0.25 * 12.8)
    assert why["vector_tflops.f32"] == "2 × lanes_per_core × core_count × boost_mhz"
    assert "core_count" not in why and "power_w" not in values


def test_types_without_a_unit_run_as_the_type_they_are_converted_to():
    values, why = fill({**CHIP, "peak_tflops.bf16": 100.0}, GENERIC)
    assert values["peak_tflops.f16"] == 100.0
    assert values["peak_tflops.f8e4m3fn"] == values["peak_tflops.f8e5m2"] == 100.0
    assert values["peak_tflops.tf32"] == values["peak_tflops.f32"] == pytest.approx(12.8)
    assert why["peak_tflops.f8e4m3fn"].startswith("as peak_tflops.")
    faster, _ = fill({**CHIP, "peak_tflops.bf16": 100.0, "peak_tflops.f16": 200.0}, GENERIC)
    assert faster["peak_tflops.f8e4m3fn"] == 200.0


@pytest.mark.parametrize(
    ("given", "rate", "gbps"),
    [
        # 40 bytes × 100 cores × 1e9 clocks/s = 4000 GB/s.
        ({**CHIP, "l2_mb": 40.0}, 40.0, 4000.0),
        # 10 bytes a clock is 1000 GB/s, below 1.5 × HBM.
        ({**CHIP, "l2_mb": 40.0}, 10.0, 1500.0),
        # Neither cores nor clock: 4 × HBM.
        ({"hbm_bandwidth_gbps": 500.0, "l2_mb": 40.0, "peak_tflops.f32": 1.0}, 40.0, 2000.0),
    ],
)
def test_bandwidth_of_the_second_level_cache(given, rate, gbps):
    values, _ = fill(given, Architecture(l2_bytes_per_clock=rate))
    assert values["l2_bandwidth_gbps"] == pytest.approx(gbps)


def test_a_chip_without_a_cache_gets_no_bandwidth_of_one():
    assert "l2_bandwidth_gbps" not in fill(CHIP, GENERIC)[0]


def test_links_fall_back_to_the_slot():
    values, why = fill(CHIP, GENERIC)
    assert (values["link_gbps"], why["link_gbps"]) == (32.0, "as pcie_gbps: no scale-up link")
    assert values["inter_node_gbps"] == pytest.approx(0.78 * 32.0)
    assert "link_gbps" not in fill({"peak_tflops.f32": 1.0}, GENERIC)[0]


def test_figures_of_the_file_are_never_replaced():
    given = {**CHIP, "vector_tflops.f16": 1.0, "launch_floor_us": 9.0}
    values, why = fill(given, GENERIC)
    assert values["vector_tflops.f16"] == 1.0 and values["launch_floor_us"] == 9.0
    assert not set(given) & set(why)


def test_rules_of_unlisted_architectures_are_those_of_the_platform():
    assert rules_of("hopper", "gpu") is generations().architectures["hopper"]
    assert rules_of("v9", "tpu") is generations().architectures["tpu"]
    assert rules_of("unheard-of", "gpu") is GENERIC


def test_matrix_rates_of_types_that_no_file_lists():
    listed = {name: float(i + 1) for i, name in enumerate(MATRIX_TYPES)} | {"s32": 40.0}
    rates = matrix_rates(listed)
    assert rates["f8e4m3b11fnuz"] == listed["f8e4m3fn"]
    assert rates["f8e5m2fnuz"] == listed["f8e5m2"]
    assert rates["u8"] == rates["pred"] == listed["s8"]
    assert rates["u4"] == rates["s2"] == listed["s4"]
    assert rates["s16"] == rates["u32"] == 40.0 and rates["s64"] == 10.0
    assert (rates["c64"], rates["c128"]) == (listed["f32"], listed["f64"])
    assert "token" not in rates


def test_vector_rates_of_types_that_no_file_lists():
    listed = {name: float(i + 1) for i, name in enumerate(VECTOR_TYPES)}
    rates = vector_rates(listed)
    assert rates["f8e4m3fn"] == rates["f6e2m3fn"] == listed["f16"]
    assert rates["s8"] == rates["pred"] == listed["s32"]
    assert rates["u64"] == listed["s32"] / 4


def test_capabilities():
    assert capability_of("sm_90") == 90 and capability_of("sm_120") == 120
    assert capability_of("gfx90a") is None and capability_of("sm_90a") is None
    # H100: 227 of 228 KB of shared memory may be asked for by one block, 1 KB is the system's.
    assert generations().capabilities[90]["shared_kb_per_block_optin"] == 227.0
    assert {row["registers_per_core"] for row in generations().capabilities.values()} == {65536.0}
