from __future__ import annotations

import csv
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from opcast.common.errors import DeviceError
from opcast.features.devices.catalogue import (
    closest_names,
    device_file,
    device_names,
    find_device,
    in_catalogue,
    load_designs,
    load_device_file,
    typed_name,
)
from opcast.features.devices.device import DeviceSpec, device_slug
from opcast.features.devices.sheet import NUMBERS, RATES, read_sheet
from opcast.features.ir.program import DTYPE_BITS
from opcast.features.table.roofline import memory_seconds

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "features" / "devices"
PUBLISHED = Path(os.environ.get("OPCAST_PUBLISHED_DATA", ROOT.parent / "shared" / "data"))
EXPECTED = {
    "v100-pcie", "v100-sxm", "a100-pcie-40gb", "a100-sxm-40gb", "a100-pcie-80gb", "a100-sxm-80gb",
    "a40", "a30", "t4", "l4", "l40s", "h100-pcie", "h100-sxm", "h200-sxm", "b200", "b300", "gb200",
    "gb300", "rtx-pro-6000", "arc-b60", "p4", "p100", "mi100", "mi210", "mi250", "tpu-v3", "tpu-v4",
    "tpu-v5e", "tpu-v5p", "tpu-v6e", "rtx-3090", "rtx-4090", "rtx-5090", "rtx-6000-ada",
    "rtx-a6000", "a10", "a10g", "l20", "l40", "h20", "h800-sxm", "a800-sxm-80gb", "gh200",
    "gh200-144gb", "mi300x", "mi308x", "mi325x", "mi350x", "mi355x", "rx-6800-xt",
    "rtx-3090-ti", "rtx-pro-6000-max-q", "cpu-i9-10940x", "cpu-i7-12700h", "rtx-2080-ti",
}  # fmt: skip
#: The least that a file must say.
BARE = """\
name: chip
platform: gpu
hbm_bandwidth_gbps: 1000
memory_gb: 16
vector_tflops: {f32: 10}
"""


@pytest.fixture(params=device_names())
def spec(request: pytest.FixtureRequest) -> DeviceSpec:
    return find_device(request.param)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "chip.yaml"
    path.write_text(text)
    return path


def test_all_devices_are_there() -> None:
    assert set(device_names()) >= EXPECTED


def test_every_figure_of_the_catalogue_has_a_source() -> None:
    for path in FOLDER.glob("*.yaml"):
        sheet = read_sheet(path)
        assert sheet.name == path.stem
        assert sheet.unsourced == (), path.name


def test_figures_are_physical(spec: DeviceSpec) -> None:
    matrix, vector = spec.peak_flops, spec.vector_flops
    assert matrix["bf16"] >= matrix["f32"]
    assert matrix["f16"] >= matrix["bf16"]
    assert matrix["tf32"] >= matrix["f32"]
    assert matrix["f8e4m3fn"] >= matrix["bf16"]
    assert matrix["f4e2m1fn"] >= matrix["f8e4m3fn"]
    assert matrix["f64"] <= 1.001 * matrix["f32"]  # as printed, 19.5 and 19.49 on A100
    assert vector["f16"] >= vector["f32"] >= vector["f64"]
    rates = [level.bandwidth for level in spec.levels]
    assert rates == sorted(rates, reverse=True)
    assert spec.levels[-1].capacity == spec.memory_bytes
    assert (len(spec.levels) == 2) == (spec.platform != "tpu")
    # The GH200's host is as near as its neighbours: NVLink-C2C has NVLink's bandwidth.
    assert spec.link_bandwidth >= spec.host_bandwidth or spec.name in ("arc-b60", "mi250")
    assert 0.2e-6 <= spec.floor <= 5e-6
    if spec.lanes_per_core:
        own = [spec.extra.get(f"efficient_{what}", 0) for what in ("cores", "lanes_per_core", "hz")]
        cores = spec.core_count - own[0]
        lanes = 2 * (spec.lanes_per_core * cores * spec.clock_hz + math.prod(own))
        assert vector["f32"] == pytest.approx(lanes, rel=0.1)


def test_every_type_has_a_rate(spec: DeviceSpec) -> None:
    types = {name for name, bits in DTYPE_BITS.items() if bits}
    assert set(spec.peak_flops) == types | {"tf32"}
    assert set(spec.vector_flops) == types


def test_every_figure_says_where_it_comes_from(spec: DeviceSpec) -> None:
    assert set(spec.defaulted) <= set(spec.provenance)
    assert all(spec.provenance[key].startswith("default: ") for key in spec.defaulted)
    given = set(spec.provenance) - set(spec.defaulted)
    assert not [key for key in given if spec.provenance[key].startswith("default: ")]


def test_round_trip(spec: DeviceSpec) -> None:
    assert DeviceSpec.from_dict(json.loads(spec.to_json())) == spec


def test_figures_of_one_device_in_si_units() -> None:
    h100 = find_device("h100-sxm")
    assert h100.peak_flops["bf16"] == pytest.approx(989.4e12)
    assert h100.peak_flops["f32"] == pytest.approx(66.9e12)  # true FP32
    assert h100.matrix_peak("tf32") == pytest.approx(494.7e12)
    assert h100.bandwidth == 3350e9
    assert h100.cache_bytes == 50 * 2**20
    assert h100.memory_bytes == 80 * 2**30
    assert (h100.core_count, h100.clock_hz, h100.lanes_per_core) == (132, 1.98e9, 128)
    assert (h100.link_bandwidth, h100.host_bandwidth) == (450e9, 64e9)
    assert h100.shared_bytes_per_core == 228 * 1024


def test_a_processor_has_the_rates_of_its_cores_and_channels() -> None:
    own = find_device("cpu-i9-10940x")
    # 14 cores, two units of 16 lanes, a multiply-add in each, at 3.3 GHz.
    assert own.matrix_peak("f32") == own.vector_peak("f32") == pytest.approx(14 * 64 * 3.3e9)
    assert own.matrix_peak("bf16") == own.matrix_peak("f16") == own.matrix_peak("f32")
    assert own.vector_peak("f64") == own.vector_peak("f32") / 2
    assert own.bandwidth == pytest.approx(4 * 8 * 2933e6, rel=1e-3)
    assert own.cache_bytes == (19.25 + 14) * 2**20
    two = find_device("cpu-i7-12700h")
    # 6 cores with two units of 8 lanes, 8 with two of 4.
    assert two.vector_peak("f32") == pytest.approx(6 * 32 * 3.288e9 + 8 * 16 * 2.439e9)
    assert two.bandwidth == pytest.approx(2 * 8 * 4800e6, rel=1e-3)


def test_two_kinds_of_cores_need_all_their_figures(tmp_path: Path) -> None:
    text = BARE.replace("gpu", "cpu").replace("vector_tflops: {f32: 10}", "efficient_cores: 4")
    lanes = "core_count: 8\nlanes_per_core: 16\nboost_mhz: 4000\n"
    with pytest.raises(DeviceError, match="no rate of f32"):
        load_device_file(write(tmp_path, text))
    with pytest.raises(DeviceError, match="not efficient_lanes_per_core"):
        load_device_file(write(tmp_path, text + lanes))
    text += lanes + "efficient_lanes_per_core: 8\nefficient_mhz: 3000\n"
    spec = load_device_file(write(tmp_path, text))
    assert spec.vector_peak("f32") == pytest.approx(4 * 32 * 4e9 + 4 * 16 * 3e9)
    with pytest.raises(DeviceError, match="efficient_cores 9 is more than core_count 8"):
        load_device_file(write(tmp_path, text.replace("efficient_cores: 4", "efficient_cores: 9")))


def test_types_without_a_unit_run_as_the_type_that_they_are_converted_to() -> None:
    a100, v100, b300 = (find_device(n) for n in ("a100-sxm-80gb", "v100-sxm", "b300"))
    assert a100.matrix_peak("f8e4m3fn") == a100.matrix_peak("bf16")  # and not the rate of s8
    assert v100.matrix_peak("bf16") == v100.matrix_peak("f32")  # f16 lacks the range
    assert v100.matrix_peak("f8e5m2") == v100.matrix_peak("f16")
    assert b300.matrix_peak("s8") == b300.matrix_peak("u8") == b300.matrix_peak("s4") == 153.5e12
    assert b300.matrix_peak("c64") == b300.matrix_peak("f32")
    assert b300.vector_peak("pred") == b300.vector_peak("s32") == b300.vector_peak("u8")


def test_an_l2_resident_set_runs_at_the_bandwidth_of_l2() -> None:
    h100 = find_device("h100-sxm")
    l2, hbm = h100.levels
    small, large = 20 * 2**20, 4 * 2**30
    seconds = memory_seconds(np.array([small, large], float), h100)
    assert seconds == pytest.approx([small / l2.bandwidth, large / hbm.bandwidth])


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("h100-sxm", "h100-sxm"),
        ("H100-SXM", "h100-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("nvidia h100 80gb hbm3", "h100-sxm"),
        ("nvidia-h100-80gb-hbm3", "h100-sxm"),
        ("NVIDIA A40 (vidur a40)", "a40"),
        ("Intel(R) Arc(TM) Pro B60 Graphics", "arc-b60"),
        ("TPU v5 lite", "tpu-v5e"),
        ("TPU v5", "tpu-v5p"),
        ("tpu-v6-lite", "tpu-v6e"),
        ("Tesla V100-SXM2-16GB", "v100-sxm-16gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("rtx 5090", "rtx-5090"),
        ("3090", "rtx-3090"),
        ("A6000", "rtx-a6000"),
        ("RTX 6000 Ada", "rtx-6000-ada"),
        ("NVIDIA A10G", "a10g"),
        ("H800", "h800-sxm"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("AMD Instinct MI325X", "mi325x"),
        ("MI350", "mi350x"),
    ],
)
def test_names_and_aliases(name: str, canonical: str) -> None:
    assert in_catalogue(name)
    assert find_device(name).name == canonical


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("v5e", "tpu-v5e"),
        ("v5p", "tpu-v5p"),
        ("v6e", "tpu-v6e"),
        ("v7x", "tpu-v7x"),
        ("TPUv5e", "tpu-v5e"),
        ("mi300", "mi300x"),
        ("MI300X", "mi300x"),
        ("4090", "rtx-4090"),
        ("rtx4090", "rtx-4090"),
        ("RTX_4090", "rtx-4090"),
        ("H100 SXM5", "h100-sxm"),
        ("h100nvl", "h100-nvl"),
        ("a100-pcie-80g", "a100-pcie-80gb"),
        # What runtimes and tables call a device stays its name.
        ("TPU v5", "tpu-v5p"),
        ("NVIDIA H100", "h100-sxm"),
        ("l4", "l4"),
        ("no-such-chip", None),
        ("sxm", None),
        ("80gb", None),
    ],
)
def test_short_names_that_people_type(name: str, canonical: str | None) -> None:
    assert typed_name(name) == canonical


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("h100", "h100-nvl, h100-pcie, h100-sxm"),
        ("A100", "a100-pcie-40gb, a100-pcie-80gb, a100-sxm-40gb, a100-sxm-80gb"),
        ("a100-80gb", "a100-pcie-80gb, a100-sxm-80gb"),
        ("v5", "tpu-v5e, tpu-v5p"),
        ("rtx-6000", "rtx-6000-ada, rtx-pro-6000, rtx-pro-6000-max-q"),
    ],
)
def test_a_short_name_of_several_devices_lists_them(name: str, choices: str) -> None:
    with pytest.raises(DeviceError, match=rf"may be any of \d devices \(name one: {choices}\)"):
        typed_name(name)


def test_unknown_name_lists_the_closest() -> None:
    assert not in_catalogue("abacus")
    with pytest.raises(DeviceError, match=r"'h100-sxn' is not in the catalogue.*h100-sxm"):
        find_device("h100-sxn")
    assert closest_names("nvidia a100 sxm")[0].startswith("a100-")
    assert [name[:4] for name in closest_names("cpu-amd-epyc-2c")[:2]] == ["cpu-", "cpu-"]
    assert all(name.startswith("tpu-") for name in closest_names("tpu-v9"))
    # A path is no name.
    assert not in_catalogue("../devices/h100-sxm")


#: Dense products in one clock of an SM or compute unit: an Ampere GA10x tensor core makes 128 f16
#: multiply-adds, four of them in an SM, and half as many when GeForce accumulates in FP32; Ada the
#: same; Hopper 1024 a core; CDNA 3 2048 and CDNA 4 4096 FLOP a unit (white papers). A sparse peak
#: would be twice that.
PER_CLOCK = {
    "rtx-a6000": 1024,
    "a10": 1024,
    "rtx-3090": 512,
    "rtx-3090-ti": 512,
    "rtx-2080-ti": 512,
    "a10g": 512,
    "rtx-4090": 512,
    "rtx-5090": 512,
    "rtx-6000-ada": 1024,
    "l40": 512,
    "l20": 512,
    "mi300x": 2048,
    "mi308x": 2048,
    "mi325x": 2048,
    "mi350x": 4096,
    "mi355x": 4096,
}


@pytest.mark.parametrize(("name", "flops"), PER_CLOCK.items())
def test_matrix_peaks_are_dense(name: str, flops: int) -> None:
    spec = find_device(name)
    per_clock = spec.peak_flops["f16"] / (spec.core_count * spec.clock_hz)
    assert per_clock == pytest.approx(flops, rel=0.03)
    assert spec.peak_flops["f8e4m3fn"] / spec.peak_flops["f16"] in (
        pytest.approx(1.0),  # no unit of its own: converted
        pytest.approx(2.0, rel=0.01),
    )


def test_matrix_units_of_amd_by_type() -> None:
    mi300, mi350, rdna = (find_device(name) for name in ("mi300x", "mi350x", "rx-6800-xt"))
    # XF32 at half of bf16 on CDNA 3; CDNA 4 has none, and FP64 at half of CDNA 3's per unit.
    assert mi300.peak_flops["tf32"] == pytest.approx(mi300.peak_flops["bf16"] / 2, rel=0.001)
    assert mi350.peak_flops["tf32"] == mi350.peak_flops["f32"]
    assert mi300.peak_flops["f4e2m1fn"] == mi300.peak_flops["f8e4m3fn"]  # no fp4 unit
    assert mi350.peak_flops["f4e2m1fn"] == pytest.approx(2 * mi350.peak_flops["f8e4m3fn"], rel=1e-3)
    # No matrix unit: packed f16 on the vector unit, bf16 converted to f32.
    assert rdna.peak_flops["f16"] == pytest.approx(2 * rdna.vector_flops["f32"], rel=0.01)
    assert rdna.peak_flops["bf16"] == rdna.peak_flops["f32"]


#: JAX devices of a chip, axes of the slice's grid, and GB/s of one link in one direction: ICI of
#: Google's documentation, 656, 400 and 800 Gbit/s a link (from memory), and of TPU7x 1200 GB/s both
#: ways over six links.
TPUS = {
    "tpu-v3": (2, 2, 82.0),
    "tpu-v4": (1, 3, 50.0),
    "tpu-v5e": (1, 2, 50.0),
    "tpu-v5p": (1, 3, 100.0),
    "tpu-v6e": (1, 2, 100.0),
    "tpu-v7x": (2, 3, 100.0),
}


def test_tpus_obey_the_physics_of_their_units_and_links() -> None:
    assert {name for name in device_names() if find_device(name).platform == "tpu"} == set(TPUS)
    for name, (devices, axes, link) in TPUS.items():
        spec = find_device(name)
        # Two links along each axis, which the devices of a chip share.
        assert spec.link_bandwidth == pytest.approx(2 * axes * link * 1e9 / devices, rel=0.01), name
        assert spec.inter_node_bandwidth == spec.link_bandwidth
        cells = spec.array_rows * spec.array_columns * spec.arrays_per_core * spec.core_count
        # A multiply-add of each cell of each array in each cycle.
        made = 2 * cells * spec.clock_hz
        assert spec.matrix_peak("bf16") == pytest.approx(made, rel=0.01), name
        assert spec.matrix_peak("tf32") == spec.matrix_peak("bf16")
        assert spec.matrix_peak("f32") == pytest.approx(spec.matrix_peak("bf16") / 6, rel=0.01)
        assert spec.vector_flops["f32"] < 0.1 * spec.matrix_peak("bf16")
        # All links of a chip are slower than its memory.
        assert spec.link_bandwidth < 0.5 * spec.bandwidth
        # FLOPs a byte at which products are no longer bound by the memory.
        assert 100 < spec.matrix_peak("bf16") / spec.bandwidth < 600, name


def test_dies_and_waves_of_amd() -> None:
    dies = {"mi300x": 8, "mi308x": 4, "mi325x": 8, "mi350x": 8, "mi355x": 8}
    for name, count in dies.items():
        spec = find_device(name)
        assert spec.core_count / spec.extra["cores_per_die"] == count
        assert spec.extra["threads_per_wave"] == 64
        assert spec.cache_bytes == 256 * 2**20  # the Infinity Cache
    assert find_device("rx-6800-xt").extra["threads_per_wave"] == 32


def test_variants_differ_from_their_chip_in_what_their_name_says() -> None:
    def figures(name: str) -> dict[str, float]:
        spec = find_device(name)
        return {"flops": spec.peak_flops["bf16"], "memory": spec.bandwidth,
                "links": spec.link_bandwidth, "bytes": spec.memory_bytes}  # fmt: skip

    def changed(one: str, other: str) -> set[str]:
        a, b = figures(one), figures(other)
        return {key for key in a if a[key] != b[key]}

    assert changed("h800-sxm", "h100-sxm") == {"links"}
    assert changed("a800-sxm-80gb", "a100-sxm-80gb") == {"links"}
    assert changed("mi325x", "mi300x") == {"memory", "bytes"}
    assert changed("gh200-144gb", "gh200") == {"memory", "bytes"}
    assert changed("mi350x", "mi355x") == {"flops"}


def test_order_of_ridges() -> None:
    # FLOP per byte at which bf16 products stop being bound by memory. H20 has a Hopper's memory
    # and a seventh of its arithmetic.
    ridge = {
        name: find_device(name).peak_flops["bf16"] / find_device(name).bandwidth
        for name in ("h20", "a10g", "rtx-3090", "h200-sxm", "mi325x", "mi300x", "h800-sxm")
    }
    assert ridge["h20"] == pytest.approx(148e12 / 4000e9)
    assert ridge["h20"] < ridge["rtx-3090"] < ridge["a10g"] < ridge["h200-sxm"]
    assert ridge["h200-sxm"] < ridge["mi325x"] < ridge["mi300x"] < ridge["h800-sxm"]


def test_cores_must_fill_whole_dies(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="core_count 300 is not a multiple of cores_per_die 38"):
        load_device_file(write(tmp_path, "name: chip\nbase: mi300x\ncore_count: 300\n"))


#: Devices of the kernel pack without public figures, and those that the catalogue has not.
WITHOUT_SHEET = ("gfx1250-256cu", "gfx1250-96cu")


def test_devices_of_the_published_kernels() -> None:
    path = PUBLISHED / "published-kernels" / "devices3.csv"
    if not path.is_file():
        pytest.skip(f"devices3.csv is not at {PUBLISHED} (OPCAST_PUBLISHED_DATA)")
    with path.open() as lines:
        rows = [r for r in csv.DictReader(lines) if in_catalogue(r["device"])]
    assert len(rows) >= 26
    assert not {row["device"] for row in rows} & set(WITHOUT_SHEET)
    for row in rows:
        found = find_device(row["device"])
        assert found.core_count == int(row["cores"])
        assert found.bandwidth == pytest.approx(1e9 * float(row["hbm_gbs"]), rel=0.13)
        assert found.matrix_peak("bf16") <= 1.001 * found.matrix_peak("f16")
        if row["fp16_tflops"]:
            assert found.matrix_peak("f16") == pytest.approx(
                1e12 * float(row["fp16_tflops"]), rel=0.02
            )


@pytest.mark.parametrize(
    "table", ["published-latency/devices.csv", "published-tensor-core/devices2.csv"]
)
def test_devices_of_the_published_tables(table: str) -> None:
    path = PUBLISHED / table
    if not path.is_file():
        pytest.skip(f"{table} is not at {PUBLISHED} (OPCAST_PUBLISHED_DATA)")
    with path.open() as lines:
        for row in csv.DictReader(lines):
            found = find_device(row["device"])
            assert find_device(device_slug(row["device"])) is found
            assert found.vector_flops["f32"] == pytest.approx(
                1e12 * float(row["fp32_vector_tflops"]), rel=0.02
            )
            assert found.core_count == int(row["sm"])
            assert found.cache_bytes == float(row["l2_mb"]) * 2**20
            if found.name != "rtx-pro-6000":  # the table has another edition's memory
                assert found.bandwidth == pytest.approx(1e9 * float(row["hbm_gbs"]), rel=0.01)


def test_hypothetical_chip_scales_what_it_does_not_say(tmp_path: Path) -> None:
    chip = load_device_file(
        write(
            tmp_path,
            "name: chip\nbase: h100-sxm\ncore_count: 264\nhbm_bandwidth_gbps: 8000\n"
            "peak_tflops: {bf16: 2500}\n",
        )
    )
    h100 = find_device("h100-sxm")
    assert chip.name == "chip"
    assert chip.aliases == ()
    assert chip.bandwidth == 8000e9
    assert chip.peak_flops["bf16"] == 2500e12
    assert chip.peak_flops["f8e4m3fn"] == pytest.approx(2 * h100.peak_flops["f8e4m3fn"])
    assert chip.vector_flops["f32"] == pytest.approx(2 * h100.vector_flops["f32"])
    assert chip.memory_bytes == h100.memory_bytes
    assert chip.provenance["hbm_bandwidth_gbps"] == "chip.yaml"
    assert chip.provenance["peak_tflops.s8"] == "estimate: 2 × h100-sxm, as core_count"
    assert "(h100-sxm)" in chip.provenance["memory_gb"]


def test_example_of_the_document(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "devices.md").read_text()
    example, _, ranges = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "ranges.yaml").write_text(ranges)
    assert len(load_designs(tmp_path / "ranges.yaml")) == 4 * 2
    chip = load_device_file(write(tmp_path, example))
    assert chip.peak_flops["bf16"] == pytest.approx(2 * 989.4e12)
    assert chip.provenance["memory_gb"] == "our plan for 2027"
    for key in (*NUMBERS, *RATES):
        assert f"`{key}`" in text


def test_lanes_scale_the_vector_unit_alone(tmp_path: Path) -> None:
    chip = load_device_file(write(tmp_path, "name: chip\nbase: a40\nlanes_per_core: 256\n"))
    a40 = find_device("a40")
    assert chip.vector_flops["f32"] == pytest.approx(2 * a40.vector_flops["f32"])
    assert chip.peak_flops["bf16"] == a40.peak_flops["bf16"]


def test_what_a_bare_file_gets(tmp_path: Path) -> None:
    chip = load_device_file(write(tmp_path, BARE))
    assert len(chip.levels) == 1
    assert chip.peak_flops["f32"] == chip.peak_flops["bf16"] == 10e12
    assert chip.vector_flops["f16"] == 20e12  # a GPU of unknown generation has packed f16
    assert chip.floor == 2e-6
    assert chip.core_count == 26  # 10 TFLOP/s of f32 on 128 lanes at 1.5 GHz
    assert chip.power_w == 0.0
    assert {"launch_floor_us", "peak_tflops.bf16", "core_count"} <= set(chip.defaulted)
    assert "power_w" not in chip.provenance


def test_cores_of_a_bare_file_are_those_of_its_rates(tmp_path: Path) -> None:
    """H100's own and MI300X's from their rates of f32; a TPU's core is no multiprocessor."""
    text = "name: chip\nplatform: gpu\nhbm_bandwidth_gbps: 3350\nmemory_gb: 80\n"
    h100 = "peak_tflops: {f32: 66.9, bf16: 989.4}\nboost_mhz: 1980\n"
    assert load_device_file(write(tmp_path, text + h100)).core_count == 132
    mi300 = "peak_tflops: {f32: 163.4, bf16: 1307.4}\nboost_mhz: 2100\n"
    assert load_device_file(write(tmp_path, text + mi300)).core_count == 304
    # Matrix units beside few lanes: 1200 TFLOP/s at 8192 a clock.
    narrow = "peak_tflops: {f32: 5, bf16: 1200}\nboost_mhz: 1500\n"
    assert load_device_file(write(tmp_path, text + narrow)).core_count == 98
    tpu = text.replace("platform: gpu", "platform: tpu") + h100
    assert load_device_file(write(tmp_path, tpu)).core_count == 1


def test_rate_of_l2_from_cores_and_clock(tmp_path: Path) -> None:
    lanes = "core_count: 100\nlanes_per_core: 32\nboost_mhz: 1500\nl2_mb: 40\n"
    chip = load_device_file(write(tmp_path, BARE.replace("f32: 10", "f32: 9.6") + lanes))
    # 20 bytes × 100 cores × 1.5 GHz
    assert chip.levels[0].bandwidth == pytest.approx(3e12)
    slow = load_device_file(write(tmp_path, BARE + "l2_mb: 40\n"))
    assert slow.levels[0].bandwidth == 4000e9  # four times main memory's


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    first = load_device_file(write(tmp_path, BARE))
    second = load_device_file(write(tmp_path, BARE + "power_w: 123\n"))
    assert second == replace(
        first, power_w=123.0, provenance={**first.provenance, "power_w": "chip.yaml"}
    )


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (BARE + "colour: red\n", r"chip.yaml:6: unknown key 'colour'"),
        (BARE + "hbm_bandwith_gbps: 9\n", r"chip.yaml:6: .*did you mean hbm_bandwidth_gbps\?"),
        (BARE + "power_w: much\n", r"chip.yaml:6: 'power_w' must be a number, not 'much'"),
        (BARE + "power_w: yes\n", r"'power_w' must be a number, not True"),
        (BARE + "power_w: -3\n", r"'power_w' must be above zero"),
        (BARE + "power_w: .nan\n", r"'power_w' must be above zero"),
        # A clock in hertz, and bytes where gigabytes are asked for.
        (BARE + "boost_mhz: 1.98\n", r"6: 'boost_mhz' must be at least 10, not 1[.]98 .see its"),
        (BARE + "boost_mhz: 1.7e+9\n", r"'boost_mhz' must be at most 100000, not 1700000000"),
        (BARE + "l2_bandwidth_gbps: 5.5e+12\n", r"'l2_bandwidth_gbps' must be at most 1e\+09"),
        (BARE + "core_count: 1.5\n", r"'core_count' must be a whole number"),
        (BARE + "peak_tflops: 3\n", r"'peak_tflops' must map dtypes to numbers"),
        (BARE + "peak_tflops: {fp16: 3}\n", r"chip.yaml:6: unknown dtype 'fp16'.*bf16"),
        (BARE + "aliases: chip\n", r"'aliases' must be a list"),
        (BARE + "vendor: 3\n", r"'vendor' must be a text"),
        (BARE + "memory_gb: 3\n", r"chip.yaml:6: key 'memory_gb' is repeated"),
        (BARE + "sources: {guess: [l2_mb]}\n", r"source of 'l2_mb', which has no figure"),
        (BARE + "sources: {a: [memory_gb], b: [memory_gb]}\n", r"'memory_gb' has two sources"),
        (BARE.replace("name: chip", ""), r"chip.yaml: key 'name' is missing"),
        (BARE.replace("platform: gpu", ""), r"key 'platform' is missing"),
        (BARE.replace("platform: gpu", "platform: npu"), r"chip.yaml:2: platform must be one of"),
        (BARE.replace("memory_gb: 16", ""), r"key 'memory_gb' is missing"),
        (BARE.replace("vector_tflops: {f32: 10}", ""), r"no rate of f32"),
        (
            BARE + "core_count: 10\nlanes_per_core: 64\nboost_mhz: 1000\n",
            r"vector_tflops.f32 is 10, but .* is 1.28",
        ),
        ("name: chip\nbase: [h100\n", r"chip.yaml: not YAML"),
        ("- name", r"a device file is a mapping"),
        ("", r"a device file is a mapping"),
        (
            "name: chip\nbase: h100-sxm\nhbm_bandwidth_gbps: 3.35\n",
            r"'hbm_bandwidth_gbps' is 3.35, 1,000 times below 3350 of h100-sxm .see its unit",
        ),
        (
            "name: chip\nbase: h100-sxm\npeak_tflops: {bf16: 0.989}\n",
            r"'peak_tflops.bf16' is 0.989, 1,000 times below 989.4 of h100-sxm",
        ),
        (
            "name: chip\nbase: h100\n",
            r"chip.yaml: base: 'h100' may be any of 3 devices \(name one: .*h100-sxm",
        ),
        ("name: chip\nbase: h100-sxn\n", r"base 'h100-sxn' is not in the catalogue.*h100-sxm"),
        (
            "name: chip\nbase: cpu-amd-epyc-2c\n",
            r"to it: cpu-i.*; devices of models alone are no bases: .*device NAME --json",
        ),
    ],
)
def test_bad_files_name_file_and_key(text: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=what):
        load_device_file(write(tmp_path, text))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"none.yaml: no such device file"):
        load_device_file(tmp_path / "none.yaml")


def test_importing_needs_no_yaml() -> None:
    code = "import sys, opcast.features.devices.catalogue; print('yaml' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_programs_have_what_the_driver_tells() -> None:
    # GiB that messages of torch.OutOfMemoryError, and of XLA for TPUs, tell of these devices.
    told = {"t4": 14.66, "rtx-4090": 23.65, "a100-sxm-40gb": 39.5, "l40": 44.4, "h100-sxm": 79.18}
    told |= {"h200-sxm": 139.8, "b200": 178.35, "tpu-v3": 15.48, "tpu-v4": 30.75}
    for name, gib in told.items():
        spec = find_device(name)
        assert spec.usable_bytes / 2**30 == pytest.approx(gib, abs=0.3), name
        again = spec.with_usable(spec.usable_bytes)
        assert again.memory_bytes == pytest.approx(spec.memory_bytes)
    assert find_device("mi300x").usable_bytes == 192 * 2**30
    assert replace(find_device("t4"), memory_bytes=0.0).usable_bytes == 0.0


def test_a_file_cannot_have_the_name_of_another_chip(tmp_path):
    """What was measured on a chip goes by its name; only a probe may say other figures of it."""
    file = tmp_path / "own.yaml"
    file.write_text("name: h100-sxm\nbase: h100-sxm\nhbm_bandwidth_gbps: 100\n")
    for read in (device_file, load_designs):
        with pytest.raises(DeviceError, match="'h100-sxm' is that of a device of the catalogue"):
            read(file)
    file.write_text("name: slow-h100\nbase: h100-sxm\nhbm_bandwidth_gbps: 100\n")
    assert device_file(file).bandwidth == 1e11
    file.write_text("name: h100-sxm\nbase: h100-sxm\n")
    assert device_file(file).levels == find_device("h100-sxm").levels
    probed = tmp_path / "probed.json"
    probed.write_text(replace(find_device("h100-sxm"), floor=1e-3, source="measured").to_json())
    assert device_file(probed).floor == 1e-3


@pytest.mark.parametrize("name", ["mi50", "mi100", "mi210", "mi250x", "mi300x", "mi308x", "mi350x"])
def test_amds_vector_units_do_integers_on_64_lanes(name):
    """A multiply-add of each lane a clock counts as two; packed instructions are for floats."""
    chip = find_device(name)
    lanes = 64 * chip.core_count * chip.clock_hz
    assert chip.vector_peak("s32") == chip.vector_peak("u32") == pytest.approx(2 * lanes, rel=0.01)
