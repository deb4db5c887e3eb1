"""Ratios of amounts to each other and to a device, computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from opcast.features.devices.device import DeviceSpec, MemoryLevel
from opcast.features.table.columns import CODE, COLUMNS, INDEX
from opcast.features.table.table import DeviceFacts, derived_features, log_ratio, real_share

DEVICE = DeviceSpec(
    "d",
    "gpu",
    {"f32": 8e12, "bf16": 64e12},
    {"f32": 4e12},
    (MemoryLevel(2.0**20, 4e12), MemoryLevel(2.0**24, 2e12), MemoryLevel(2.0**34, 1e12)),
    floor=2e-6,
    launch_gap=1e-6,
    core_count=8,
    clock_hz=1e9,
)


def features(**amounts: float) -> dict[str, float]:
    row = np.zeros((1, len(COLUMNS)))
    for name, value in amounts.items():
        row[0, INDEX[name]] = value
    derived = derived_features(row, DeviceFacts.of(DEVICE), DEVICE)
    return {name: float(values[0]) for name, values in derived.items()}


@pytest.mark.parametrize(
    ("a", "b", "octaves"), [(8.0, 2.0, 2.0), (0.0, 0.0, 0.0), (1.0, 0.0, 30.0), (0.0, 1.0, -30.0)]
)
def test_log_ratio(a, b, octaves):
    assert log_ratio(a, b) == pytest.approx(octaves)


@pytest.mark.parametrize(
    ("size", "tile", "share"), [(64, 64, 1.0), (65, 64, 65 / 128), (1, 8, 1 / 8), (0, 8, 1.0)]
)
def test_share_of_a_tile_that_is_real(size, tile, share):
    assert real_share(np.array([size]), tile)[0] == pytest.approx(share)


def test_facts_of_a_device():
    facts = DeviceFacts.of(DEVICE)
    assert (facts.first, facts.middle, facts.last) == (2.0**20, 2.0**24, 2.0**24)
    own = facts.features
    assert own["device_matrix_over_vector"] == pytest.approx(1.0)  # 8 over 4 TFLOP/s
    assert own["device_bf16_over_f32"] == pytest.approx(3.0)  # 64 over 8
    assert own["device_balance_f32"] == pytest.approx(3.0)  # 8 FLOPs a byte
    assert own["device_cache_growth"] == pytest.approx(4.0)
    assert own["device_flops_per_cycle_core"] == pytest.approx(np.log2(4e12 / (1e9 * 8)))
    assert own["device_floor_cycles"] == pytest.approx(np.log2(2000))
    assert own["device_gap_over_floor"] == 0.5 and own["device_levels"] == 3
    assert (own["device_cpu"], own["device_gpu"], own["device_tpu"]) == (0, 1, 0)


def test_tiles_and_waves_of_a_product():
    own = features(gemm_m=100, gemm_n=32, gemm_k=16, gemm_batch=2)
    assert own["fill_m64"] == pytest.approx(100 / 128)
    assert own["fill_n64"] == 0.5 and own["fill_k16"] == 1.0
    assert own["fill_mn128"] == pytest.approx(100 / 128 * 32 / 128)
    # Tiles of 32: 4 × 1 × batch 2 = 8, one for each of 8 cores.
    assert own["waves_32"] == pytest.approx(np.log2(1 + 2**-8)) and own["last_wave_32"] == 1.0
    # Tiles of 128: 1 × 1 × 2 on 8 cores.
    assert own["last_wave_128"] == 0.25


def test_shares_of_work():
    own = features(
        work_basic=300, work_move=100, flops=400, matmul_flops=100, dense_flops=200, out_elements=1
    )
    assert own["share_basic"] == 0.75 and own["share_move"] == 0.25
    assert own["share_matmul"] == 0.25 and own["share_useful"] == 0.5


def test_only_a_cpu_needs_partitions_to_use_all_cores():
    assert features(elements_max=1e6)["cores_used"] == 1.0
    assert features(partitions=2)["cores_used"] == 0.25
    row = np.zeros((1, len(COLUMNS)))
    cpu = DeviceSpec("c", "cpu", {"f32": 1e9}, {}, DEVICE.levels, 1e-6, core_count=8)
    plain = derived_features(row, DeviceFacts.of(cpu), cpu)
    assert plain["cores_used"][0] == 1 / 8
    row[0, INDEX["fusion"]] = CODE["fusion"]["kCustom"]  # a library
    assert derived_features(row, DeviceFacts.of(cpu), cpu)["cores_used"][0] == 1.0
