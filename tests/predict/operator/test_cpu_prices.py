"""PyTorch on CPUs: prices by hand, what is unlike all measurements, and rows that were measured."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import opcast
from opcast.common.errors import DeviceError
from opcast.features.devices.catalogue import find_device, load_device_file
from opcast.features.devices.device import DeviceSpec, MemoryLevel
from opcast.features.ir.torch.program import TorchProgram
from opcast.features.ir.torch.runs import record
from opcast.features.operators.op import Op
from opcast.features.operators.physics import fitted
from opcast.predict.operator.aten_streams import Use
from opcast.predict.operator.aten_work import AtenKernel, moving, works
from opcast.predict.operator.cpu_prices import CpuPrices

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[3]
PACK = Path(os.environ.get("OPCAST_PUBLISHED_DATA", ROOT.parent / "shared" / "data"))
FIT = fitted("cpu")
#: Eight cores of 16 lanes at 1 GHz: 256 GFLOP/s; caches of 16 MB at 400 GB/s, memory at 50 GB/s.
ROUND = DeviceSpec(
    "round", "cpu", {"f32": 256e9}, {"f32": 256e9},
    (MemoryLevel(16e6, 400e9), MemoryLevel(64e9, 50e9)), 1e-6,
    core_count=8, clock_hz=1e9, lanes_per_core=16, memory_bytes=64e9,
)  # fmt: skip
I9 = "cpu-i9-10940x"


def seconds(work: AtenKernel, spec: DeviceSpec = ROUND) -> float:
    return float(CpuPrices(spec)([work])[0][0, 0])


def convolution(channels: int, out: int, taps: int, groups: int = 1) -> AtenKernel:
    side = int(taps**0.5)
    sizes = {"c": channels, "k": out, "groups": groups, "kd": 1, "kh": side, "kw": side}
    shape = (groups, 1024, out // groups, channels // groups * taps)
    moved = 4.0 * (1024 * (channels + out) + out * channels // groups * taps)
    return AtenKernel(Op("conv", shape, "f32", name="convolution", traffic=moved), conv=sizes)


def test_a_product_multiplies_packs_its_weights_and_moves_the_rest() -> None:
    work = AtenKernel(Op("bmm", (1, 512, 512, 1024), "f32", name="addmm"))
    weights, others = 4 * 512 * 1024, 4 * (512 * 1024 + 512 * 512)
    assert seconds(work) == pytest.approx(
        (FIT.call + FIT.library) * 1e-6
        + 2 * 512 * 512 * 1024 / (FIT.products * 256e9)
        + FIT.pack * weights / 50e9
        + others / (FIT.memory * 50e9)
    )


def test_filters_of_several_taps_are_copied_element_by_element() -> None:
    one, nine = convolution(64, 64, 1), convolution(64, 64, 9)
    packed = FIT.pack_filters * 4 * 64 * 64 * 8 / 50e9
    copied = FIT.gather * 64 * 64 * 9 / 1e9
    multiplied = 2 * 1024 * 64 * 64 * 8 / (FIT.products * 256e9)
    assert seconds(nine) - seconds(one) == pytest.approx(packed + copied + multiplied)


def test_lanes_without_a_channel_do_nothing() -> None:
    least = (FIT.call + FIT.library) * 1e-6
    images = 4 * 1024 * 128 / (FIT.memory * 50e9)
    # A vector of eight lanes with four channels of a group is half empty.
    for groups, empty in ((16, 2), (8, 1)):
        multiplied = empty * 2 * 1024 * 64 * 64 / groups / (FIT.products * 256e9)
        packed = FIT.pack_filters * 4 * 64 * 64 / groups / 50e9
        work = convolution(64, 64, 1, groups=groups)
        assert seconds(work) == pytest.approx(least + images + multiplied + packed)
    # A depthwise one is bound by its loads.
    deep = convolution(64, 64, 9, groups=64)
    assert seconds(deep) > least + 2 * 1024 * 64 * 9 / (FIT.depthwise * 256e9)


def test_passes_go_at_the_rate_of_what_holds_their_tensors() -> None:
    size = 4e6
    near = moving("add", "f32", size, uses=(Use(1, size, True),))
    # Read at once by the next one.
    after = moving("add", "f32", size, uses=(Use(1, size, False),))
    found = CpuPrices(ROUND)([near, after], kept=())[0][:, 0]
    cached = size / (FIT.cache * 400e9)
    assert found[1] == pytest.approx(FIT.call * 1e-6 + cached, rel=0.1)
    far = moving("add", "f32", 1e9, uses=(Use(1, 1e9, False),))
    assert seconds(far) == pytest.approx(1e9 / (FIT.memory * 50e9), rel=0.02)
    # Gathering loops take cycles of cores, functions lanes.
    assert seconds(moving("cat", "f32", 1e9)) - seconds(moving("add", "f32", 1e9)) == (
        pytest.approx(FIT.gather * 1e9 / 8 / 1e9)
    )
    assert seconds(moving("gelu", "f32", 1e9)) - seconds(moving("add", "f32", 1e9)) == (
        pytest.approx(FIT.function * 1e9 / 8 / 128e9)
    )


def test_cores_of_two_kinds_lie_between_equal_and_fair_shares() -> None:
    work = AtenKernel(Op("bmm", (1, 2048, 2048, 2048), "f32", name="mm"))
    # Half of the cores with half of the lanes: 192 GFLOP/s; at the slowest one's pace 128.
    both = {"efficient_cores": 4.0, "efficient_lanes_per_core": 8.0, "efficient_hz": 1e9}
    hybrid = replace(ROUND, extra=both, peak_flops={"f32": 192e9}, vector_flops={"f32": 192e9})
    flops = 2 * 2048**3 / FIT.products
    rest = seconds(work) - flops / 256e9
    assert seconds(work, hybrid) == pytest.approx(rest + flops / (192e9 * 128e9) ** 0.5)


@pytest.fixture(scope="module")
def net() -> tuple[torch.nn.Module, torch.Tensor]:
    sizes = ((3, 64), *[(64, 64)] * 16)
    parts = [torch.nn.Sequential(torch.nn.Conv2d(*s, 3), torch.nn.ReLU()) for s in sizes]
    head = [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, 10)]
    return torch.nn.Sequential(*parts, *head).eval(), torch.zeros(1, 3, 64, 64)


def test_less_known_ways_of_running_have_wider_intervals(net) -> None:
    def asked(device=I9, framework="torch-compiled", **more):
        found = opcast.predict(net[0], net[1], device=device, framework=framework, **more)
        assert found.lo_us < found.latency_us < found.hi_us
        return found.hi_us / found.lo_us, " ".join(found.notes)

    known, said = asked()
    assert "never measured" not in said and "alone" not in said
    other, said = asked("cpu-i7-12700h")
    assert other > 1.3 * known and "is predicted from its data sheet" in said
    eager, said = asked(framework="torch-eager")
    assert eager > 1.5 * known and "eager PyTorch on a CPU was never measured" in said
    step, said = asked(train="sgd", loss="sum")
    assert step > 1.5 * known and "training on a CPU was never measured" in said


def test_peak_memory_is_that_of_the_host(net) -> None:
    found = opcast.predict(net[0], net[1], device=I9, framework="torch-eager")
    own = found.memory
    assert own.reserved_bytes == own.allocated_bytes < own.peak_bytes
    # No library's workspace: weights, the image, what a block is given, its convolution and ReLU.
    made = 4 * 64 * (62**2 + 2 * 60**2)
    held = found.parameter_bytes + 4 * 3 * 64**2 + made
    assert own.allocated_bytes == pytest.approx(held, rel=1e-2)
    assert own.device_bytes == 256 * 2**30 and found.fits


def test_a_processor_of_a_file_is_predicted(net, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: mine\nplatform: cpu\ncore_count: 64\nlanes_per_core: 32\nboost_mhz: 2500\n"
        "l2_mb: 256\nhbm_bandwidth_gbps: 460\nmemory_gb: 768\n"
    )
    assert load_device_file(path).matrix_peak("f32") == pytest.approx(64 * 64 * 2.5e9)
    found = opcast.predict(net[0], net[1], device=str(path), framework="torch-compiled")
    assert found.latency_us > 0 and found.device == "mine"
    with pytest.raises(DeviceError, match="supported on GPUs"):
        opcast.predict(net[0], net[1], device="tpu-v5e", framework="torch-compiled")


def test_measured_models_lie_within_their_intervals() -> None:
    pytest.importorskip("timm")
    path = PACK / "published-torch" / "timm.parquet"
    if not path.is_file():
        pytest.skip(f"no measured models: {path}")
    from opcast.workflows.torch_models.rows import answers_of, model_row

    table = pd.read_parquet(path)
    names = ["resnet50", "mobilenetv2_100", "vit_small_patch16_224", "convnext_tiny"]
    table = table[
        (table["device"] == I9) & (table["torch"] == "2.4.0") & (table["img_size"] == 224)
    ]
    rows = [model_row(r) for r in table[table["model"].isin(names)].to_dict("records")]
    assert len(rows) >= 3
    answers = [answers_of("default", [row])[0] for row in rows]
    logs = []
    for row, own in zip(rows, answers, strict=True):
        assert own["lo_us"] <= row.measured_s * 1e6 <= own["hi_us"], row.case.model
        logs.append(np.log(own["latency_us"] * 1e-6 / row.measured_s))
    assert np.abs(logs).mean() < 0.2


def test_figures_of_the_catalogue_reach_the_prices() -> None:
    work = AtenKernel(Op("bmm", (1, 2048, 2048, 2048), "f32", name="mm"))
    i9, i7 = (seconds(work, find_device(name)) for name in (I9, "cpu-i7-12700h"))
    # A third of the lanes' rate, shared unevenly.
    assert 3.0 < i7 / i9 < 6.0


N = 1 << 24
#: Milliseconds of PyTorch 2.13 on two cores of an AMD EPYC without AVX-512, a busy virtual machine.
LOOPS = {
    "sort": (torch.sort, [(N,)], 3428.0),
    "normal": (torch.randn_like, [(N,)], 217.0),
    "dropout": (torch.nn.functional.dropout, [(N,)], 524.0),
    "scan": (lambda x: x.cumsum(0), [(N,)], 73.0),
    "integers": (torch.mm, [(512, 512, torch.int32)] * 2, 26.0),
    "half": (torch.mm, [(1024, 1024, torch.float16)] * 2, 4172.0),
    "grid": (torch.nn.functional.grid_sample, [(2, 64, 256, 256), (2, 256, 256, 2)], 274.0),
    "columns": (torch.nn.functional.conv3d, [(1, 16, 16, 56, 56), (32, 16, 3, 3, 3)], 179.0),
    "add": (
        lambda x, at, y: x.index_add(0, at, y),
        [(100000, 64), (1000000, torch.int64), (1000000, 64)],
        230.0,
    ),
    "scatter": (
        lambda x, at, y: x.scatter_add(0, at[:, None].expand(-1, 64), y),
        [(100000, 64), (1000000, torch.int64), (1000000, 64)],
        196.0,
    ),
}


def tensors(shapes):
    own = [s if isinstance(s[-1], torch.dtype) else (*s, torch.float32) for s in shapes]
    return [torch.empty(shape, dtype=dtype, device="meta") for *shape, dtype in own]


@pytest.mark.parametrize("kind", LOOPS)
def test_loops_on_few_threads_take_their_cycles(kind) -> None:
    function, shapes, measured_ms = LOOPS[kind]
    found = opcast.predict(function, *tensors(shapes), device=I9, framework="torch-eager")
    assert found.lo_us < measured_ms * 1e3 < found.hi_us


def test_rows_of_loops_are_divided_among_cores() -> None:
    def sorted_us(*shape):
        given = tensors([shape])
        return opcast.predict(torch.sort, *given, device=I9, framework="torch-eager").latency_us

    # Sixty-four values have 6 levels, 16 million 24; rows are divided among 14 cores.
    assert sorted_us(1 << 18, 64) == pytest.approx(sorted_us(N) * 6 / 24 / 14, rel=0.2)


def test_halves_with_units_for_them_have_a_library() -> None:
    with torch.device("meta"):
        x = torch.empty(1024, 1024, dtype=torch.float16)
    recording = record(TorchProgram(torch.mm, (x, x)))
    (work,) = works(recording.calls)
    own = find_device(I9)
    amx = replace(own, peak_flops={**own.peak_flops, "f16": 16 * own.matrix_peak("f32")})
    assert seconds(work, own) > 1000 * seconds(work, amx)


def test_quantized_layers_are_products_of_int8() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(4096, 4096))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        narrow = torch.ao.quantization.quantize_dynamic(layer, {torch.nn.Linear}, dtype=torch.qint8)
    found = opcast.predict(narrow, torch.empty(1024, 4096), device=I9, framework="torch-eager")
    (own,) = found.operators
    assert (own.kind, own.shape, own.dtype) == ("product", (1, 1024, 4096, 4096), "int8")
    # Input and result in f32, weights in a byte; no faster than the units are.
    assert own.bytes == 2 * 4 * 1024 * 4096 + 4096**2
    assert own.lo_us * 1e-6 >= 2 * 1024 * 4096**2 / find_device(I9).matrix_peak("s8")
