"""The shipped GPU model: routes, physics, order of devices, correction by measured kernels."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import opcast
from opcast.common.errors import DatasetError, ModelError
from opcast.features.dataset import Dataset
from opcast.features.devices.catalogue import find_device
from opcast.features.devices.device import DeviceSpec
from opcast.features.ir.reader import read_program
from opcast.features.kernels.extract import kernel_from_ir
from opcast.features.kernels.kernel import Kernel, LoweredProgram
from opcast.features.lowering.lower import lower
from opcast.features.operators.query import parse_op
from opcast.features.table.columns import INDEX
from opcast.features.table.roofline import roofline
from opcast.models.core.base import Estimator
from opcast.models.cost_model import CostModel
from opcast.models.gpu.attention import BACKWARD
from opcast.models.gpu.estimator import GpuEstimator
from opcast.models.gpu.products import CUBLAS, Products, _chains
from opcast.models.gpu.routes import attention_of, describe, products
from opcast.predict.locate import find_model
from opcast.workflows.reports.accuracy import COMMITTED

from ...support.cases import later

KERNELS = Path(__file__).parents[1] / "data" / "gpu" / "kernels.hlo"
ATTENTION_STEP = KERNELS.with_name("attention_step.hlo")
GPUS = ("h100-sxm", "a100-sxm-80gb", "v100-sxm", "l4", "t4", "b200", "mi210")


@pytest.fixture(scope="module")
def model() -> CostModel:
    return CostModel.load(find_model("gpu-xla"))


@pytest.fixture(scope="module")
def program() -> LoweredProgram:
    return lower(read_program(KERNELS), "xla")


@pytest.fixture(scope="module")
def by_name(program: LoweredProgram) -> dict[str, Kernel]:
    return {kernel.name: kernel for kernel in program.kernels}


def latencies(model: CostModel, kernels: list[Kernel], device: str) -> np.ndarray:
    return model.predict_kernels(kernels, find_device(device)).latency


def test_is_an_estimator(model: CostModel) -> None:
    assert isinstance(model.estimator, Estimator)


def test_each_kernel_takes_its_route(model: CostModel, program: LoweredProgram) -> None:
    found = model.predict_kernels(program.kernels, find_device("h100-sxm"))
    source = dict(zip([k.name for k in program.kernels], found.source, strict=True))
    assert source == {
        "tf32_gemm": "learned:xla/linear",
        "f32_gemm": "learned:eager/linear",
        "triton_gemm": "learned:xla/linear",
        "f8_gemm": "learned:graph/linear",
        "conv": "learned:graph/linear (implicit)",
        "fmha": "learned:graph/context_attention",
        "gelu": "learned:memory-bound",
        "transposed": "learned:memory-bound",
        "reduced": "learned:memory-bound",
        "sorted": "roofline",
        "mystery": "roofline",
        "out": "learned:memory-bound",
    }


def test_f32_products_run_as_tf32_unless_told_otherwise(
    model: CostModel, by_name: dict[str, Kernel]
) -> None:
    pair = [by_name["tf32_gemm"], by_name["f32_gemm"]]
    tf32, f32 = latencies(model, pair, "a100-sxm-80gb")
    assert 4 < f32 / tf32 < 8  # 156 against 19.5 TFLOPS
    tf32, f32 = latencies(model, pair, "v100-sxm")
    assert tf32 == f32  # no such unit


def test_a_tf32_product_is_a_bf16_product_of_twice_the_depth(
    model: CostModel, by_name: dict[str, Kernel]
) -> None:
    device = find_device("a100-sxm-80gb")
    assert isinstance(model.estimator, GpuEstimator)
    ask = Products(model.estimator.operators, device, model.estimator.memory)
    rows = products(describe([by_name["tf32_gemm"]], device), np.array([0]))
    assert rows[["b", "m", "n", "k"]].iloc[0].tolist() == [1, 4096, 4096, 1024]
    deep = rows.assign(rate="bf16", width=2.0, k=2048)
    np.testing.assert_allclose(ask.products(rows).latency, ask.products(deep).latency, rtol=0.05)


@pytest.mark.parametrize("name", ["h100-sxm", "a100-sxm-80gb", "l4"])
def test_a_product_in_a_program_is_the_operator_that_stands_in_for_it(
    model: CostModel, name: str
) -> None:
    """Beyond XLA's table, and where it has none, ``--op`` of PyTorch's product gives the time."""
    device = find_device(name)
    assert isinstance(model.estimator, GpuEstimator)
    ask = Products(model.estimator.operators, device, model.estimator.memory)
    sizes = {"b": [1], "m": 8192, "n": 8192, "k": 8192, "rate": "bf16", "width": 2.0}
    library = " ".join(f"{key}={value}" for key, value in CUBLAS["linear"].items())
    row = parse_op(f"linear m=8192 n=8192 k=8192 dtype=bf16 {library}")
    alone = ask.operators.predict("graph/linear", pd.DataFrame([row]), device)
    found = ask._as_bf16("linear", "bf16", pd.DataFrame(sizes))
    assert found.latency == pytest.approx(alone.latency, rel=1e-12)
    assert (found.lo < alone.lo).all() and (alone.hi < found.hi).all()


@pytest.mark.parametrize(("narrow", "bits", "dtype"), [("int8", 8, "int8_wo"), ("int4", 4, "")])
def test_narrow_weights_take_the_time_of_their_bytes(
    model: CostModel, narrow: str, bits: int, dtype: str
) -> None:
    """Of few rows, whose product reads its weights and hardly multiplies; a deeper one is split."""
    device = find_device("l40s")

    def product(name: str) -> Kernel:
        of = jax.ShapeDtypeStruct((8192, 65536), jnp.dtype(name))
        rows = jax.ShapeDtypeStruct((16, 8192), jnp.bfloat16)
        traced = jax.jit(lambda a, b: a @ b.astype(jnp.bfloat16)).lower(rows, of)
        (kernel,) = lower(traced, "fused", device=device).kernels
        return kernel

    found = model.predict_kernels([product("bfloat16"), product(narrow)], device)
    assert found.latency[1] / found.latency[0] == pytest.approx(bits / 16, rel=0.15)
    # 864 GB/s.
    assert (found.lo >= 8192 * 65536 * np.array([16, bits]) / 8 / 864e9).all()
    assert found.hi[1] / found.latency[1] > found.hi[0] / found.latency[0]
    if dtype:
        assert isinstance(model.estimator, GpuEstimator)
        row = parse_op(f"linear m=16 n=65536 k=8192 dtype={dtype} backend=trtllm")
        operators = model.estimator.operators
        alone = operators.predict("graph/linear", pd.DataFrame([row]), device)
        assert alone.latency[0] == pytest.approx(found.latency[1], rel=0.15)


def test_a_batch_of_products_is_a_product_of_all_their_rows(model: CostModel) -> None:
    device = find_device("h100-sxm")
    assert isinstance(model.estimator, GpuEstimator)
    ask = Products(model.estimator.operators, device, model.estimator.memory)
    sizes = {"m": [1024, 4096], "n": 4096, "k": 512, "b": [4, 1], "rate": "bf16", "width": 2.0}
    batched, plain = ask.products(pd.DataFrame(sizes)).latency
    # XLA on an H100 takes 31.6 µs for either, within 3 % (published-xla pack); the two are learned
    # apart.
    assert batched == pytest.approx(plain, rel=0.08)
    assert batched * 1e6 == pytest.approx(31.6, rel=0.15)


def test_small_matrices_take_longer_than_one_product_of_their_rows(model: CostModel) -> None:
    assert isinstance(model.estimator, GpuEstimator)
    # On chips with and without a table of XLA's products: 100,000 of 8 x 8 x 8.
    known, other = (
        Products(model.estimator.operators, find_device(name), model.estimator.memory)
        for name in ("h100-sxm", "a100-sxm-80gb")
    )
    sizes = {"b": [100_000, 1], "m": [8, 800_000], "n": [8, 8], "k": [8, 8]}
    asked = pd.DataFrame({**sizes, "rate": "bf16", "width": 2.0, "stored": 1.0})
    (own, _), (many, one) = known.products(asked).latency, other.products(asked).latency
    assert many > 2.0 * one and many > own


@pytest.mark.parametrize("name", ["mi300x", "mi355x", "mi350x"])
def test_a_product_on_amd_is_that_of_the_operator_query(model: CostModel, name: str) -> None:
    """One where XLA measured the chip itself; else both intervals hold a common time."""
    device = find_device(name)
    assert isinstance(model.estimator, GpuEstimator)
    ask = Products(model.estimator.operators, device, model.estimator.memory)
    sizes = {"m": [4096, 2048, 1024], "n": [4096, 14336, 2048], "k": [4096, 4096, 2048]}
    rows = pd.DataFrame({**sizes, "b": 1, "rate": "bf16", "width": 2.0})
    found = ask.products(rows)
    named = pd.DataFrame({**sizes, "b": 1, "op": "linear", "dtype": "bf16"})
    alone = ask.operators.predict("xla/linear", named, device)
    assert (np.maximum(found.lo, alone.lo) < np.minimum(found.hi, alone.hi)).all()
    if name != "mi350x":
        # The start of a replayed graph instead of a cold one is all that differs.
        assert found.latency == pytest.approx(alone.latency, rel=0.25)


@pytest.mark.parametrize("name", ["mi300x", "mi355x", "h100-sxm"])
def test_a_convolution_does_not_more_a_second_than_the_best_product(
    model: CostModel, name: str
) -> None:
    assert isinstance(model.estimator, GpuEstimator)
    ask = Products(model.estimator.operators, find_device(name), model.estimator.memory)
    # 3 x 3 taps of 640 and 1280 channels in 64 images of 64 x 64.
    sizes = {"m": [64 * 64 * 64] * 2, "n": [640, 1280], "k": [9 * 640, 9 * 1280]}
    own = {"rate": "bf16", "width": 2.0, "times": 1.0, "dense": 1.0, "extra": 0.0, "moved": 1e9}
    convs = pd.DataFrame({**sizes, "b": 1, "run": 640.0, **own})
    large = ask.products(convs.assign(m=8192, n=8192, k=8192)).latency / 8192**3
    rate = ask.convs(convs).latency / convs[["m", "n", "k"]].prod(axis=1)
    assert (rate >= large).all()


def test_an_image_is_gathered_element_by_element(model: CostModel) -> None:
    device = find_device("a100-sxm-40gb")
    assert isinstance(model.estimator, GpuEstimator)
    ask = Products(model.estimator.operators, device, model.estimator.memory)
    # ResNet-50's stem for 256 images: 147 elements for each of 256 · 112 · 112 outputs.
    stem = {"b": 1, "m": 3211264, "n": 64, "k": 147, "rate": "bf16", "width": 2.0, "times": 1.0}
    stem |= {"dense": 1.0, "extra": 0.0, "moved": 488e6}
    few, many = ask.convs(pd.DataFrame([stem | {"run": 3.0}, stem | {"run": 8.0}])).latency
    cycles = 3211264 * 147 / (1.2 * 108)
    assert few >= cycles / device.clock_hz > 2 * many


def test_an_fp8_product_has_no_quantisation_in_it(
    model: CostModel, by_name: dict[str, Kernel]
) -> None:
    # 4 times the arithmetic of the bf16 product, at twice the rate.
    f8, bf16 = latencies(model, [by_name["f8_gemm"], by_name["triton_gemm"]], "h100-sxm")
    assert 1.2 < f8 / bf16 < 2.5


def test_attention_is_read_off_the_call(by_name: dict[str, Kernel]) -> None:
    found = attention_of(by_name["fmha"])
    assert found is not None
    assert {k: found[k] for k in ("batch", "q_heads", "kv_heads", "head_dim", "q_len", "kv_len")} \
        == {"batch": 4, "q_heads": 16, "kv_heads": 16, "head_dim": 64, "q_len": 2048,
            "kv_len": 2048}  # fmt: skip
    assert found["causal"] == 1 and not found["backward"]
    # 2 products over 4 · 16 · (2048 · 2049 / 2) visible pairs of 64 numbers.
    assert by_name["fmha"].flops == pytest.approx(2 * 2 * 64 * 4 * 16 * 2048 * 2049 / 2)
    assert attention_of(by_name["conv"]) is None


@pytest.mark.parametrize("device", ["h100-sxm", "a100-sxm-80gb"])
def test_attention_backward_takes_longer_than_forward(model: CostModel, device: str) -> None:
    forward, backward = lower(read_program(ATTENTION_STEP), "xla").kernels[-2:]
    found = attention_of(backward)
    assert found is not None and found["backward"]
    assert {k: found[k] for k in ("batch", "q_heads", "kv_heads", "head_dim", "q_len", "kv_len")} \
        == {"batch": 8, "q_heads": 12, "kv_heads": 4, "head_dim": 64, "q_len": 1024,
            "kv_len": 2048}  # fmt: skip
    # Five products instead of two.
    assert backward.flops == pytest.approx(2.5 * forward.flops)
    row = describe([forward, backward], find_device(device)).row
    for size in ("gemm_batch", "gemm_m", "gemm_n", "gemm_k"):
        assert row[0, INDEX[size]] == row[1, INDEX[size]]
    assert row[:, INDEX["dense_flops"]].tolist() == [forward.flops, backward.flops]
    answer = model.predict_kernels([forward, backward], find_device(device))
    assert answer.latency[1] == pytest.approx(BACKWARD * answer.latency[0])
    assert list(answer.source) == ["learned:graph/context_attention"] * 2
    assert answer.hi[1] / answer.lo[1] > answer.hi[0] / answer.lo[0]


@pytest.mark.parametrize("device", GPUS)
def test_nothing_is_faster_than_the_roofline(
    model: CostModel, program: LoweredProgram, device: str
) -> None:
    spec = find_device(device)
    found = model.predict_kernels(program.kernels, spec)
    least = roofline(program.kernels, spec).latency_s
    assert (found.latency >= least * (1 - 1e-9)).all()
    assert (found.lo <= found.latency).all() and (found.latency <= found.hi).all()
    assert (found.latency > 0.5e-6).all()


def test_devices_come_in_the_order_of_their_data_sheets(
    model: CostModel, by_name: dict[str, Kernel]
) -> None:
    products = {d: latencies(model, [by_name["triton_gemm"]], d)[0] for d in GPUS}
    order = ["b200", "h100-sxm", "a100-sxm-80gb", "l4", "t4"]  # bf16: 2250 989 312 121 8 TFLOPS
    assert sorted(order, key=lambda d: products[d]) == order
    passes = {d: latencies(model, [by_name["out"]], d)[0] for d in GPUS}
    order = ["b200", "h100-sxm", "a100-sxm-80gb", "v100-sxm", "t4", "l4"]  # 8 3.4 2 0.9 0.32 0.3
    assert sorted(order, key=lambda d: passes[d]) == order


def test_a_chip_of_ones_own_is_predicted(model: CostModel, by_name: dict[str, Kernel]) -> None:
    h100 = find_device("h100-sxm")
    main = replace(h100.levels[-1], bandwidth=2 * h100.bandwidth)
    fast = replace(h100, name="fast", levels=(h100.levels[0], main))
    kernels = [by_name["out"]]
    before, after = (model.predict_kernels(kernels, d) for d in (h100, fast))
    assert 0.4 < after.latency[0] / before.latency[0] < 0.7
    width = [p.hi[0] / p.lo[0] for p in (before, after)]
    assert width[1] > width[0]  # no samples of it


def test_a_device_under_the_name_that_jax_gives_it(
    model: CostModel, by_name: dict[str, Kernel]
) -> None:
    listed = find_device("h100-sxm")
    measured = replace(listed, name="nvidia-h100-80gb-hbm3", architecture="", lanes_per_core=0)
    kernels = [by_name["triton_gemm"], by_name["gelu"]]
    ours, theirs = (model.predict_kernels(kernels, d) for d in (listed, measured))
    np.testing.assert_allclose(theirs.latency, ours.latency)
    np.testing.assert_allclose(theirs.hi, ours.hi)


def test_unknown_devices_have_wider_intervals(model: CostModel, by_name: dict[str, Kernel]) -> None:
    kernels = [by_name["triton_gemm"], by_name["gelu"]]
    known, unseen = (model.predict_kernels(kernels, find_device(d)) for d in ("h100-sxm", "l40s"))
    assert (unseen.hi / unseen.lo > known.hi / known.lo).all()


def test_notes_say_what_limits_trust(model: CostModel, program: LoweredProgram) -> None:
    assert isinstance(model.estimator, GpuEstimator)
    text = " ".join(model.estimator.notes(program.kernels, find_device("l4")))
    assert "no published rows of l4" in text and "TF32" in text
    assert "TF32" not in " ".join(model.estimator.notes(program.kernels, find_device("v100-sxm")))


def test_slow_passes_over_long_rows_are_explained(model: CostModel) -> None:
    text = (
        "HloModule m\nadd {{\n  x = f32[] parameter(0)\n  y = f32[] parameter(1)\n"
        "  ROOT z = f32[] add(x, y)\n}}\nf {{\n  a = bf16[4096,{0}] parameter(0)\n"
        "  c = bf16[4096,{0}] exponential(a)\n  d = f32[4096,{0}] convert(c)\n"
        "  i = f32[] constant(0)\n"
        "  ROOT e = f32[4096] reduce(d, i), dimensions={{1}}, to_apply=add\n}}\nENTRY m {{\n"
        "  p = bf16[4096,{0}] parameter(0)\n"
        "  ROOT r = f32[4096] fusion(p), kind=kInput, calls=f\n}}\n"
    )
    device = find_device("h100-sxm")
    assert isinstance(model.estimator, GpuEstimator)
    long, short = ([kernel_from_ir(text.format(n))] for n in (50304, 128))
    assert any("long rows" in note for note in model.estimator.notes(long, device))
    assert not any("long rows" in note for note in model.estimator.notes(short, device))
    # They may stream: 2 bytes an element at 3.35 TB/s.
    streamed = 2 * 4096 * 50304 / 3.35e12
    found = model.predict_kernels(long, device)
    # Or take as long for their bytes as rows of scores did in whole steps.
    assert found.lo[0] < 1.25 * streamed < found.latency[0] < 2.3 * streamed < found.hi[0]


def test_chains_halve_every_dimension() -> None:
    import pandas as pd

    rows = pd.DataFrame({"b": [1], "m": [4], "n": [2], "k": [1]})
    table, owner = _chains(rows)
    assert table[["b", "m", "n", "k"]].to_numpy().tolist() == [
        [1, 4, 2, 1], [1, 4, 1, 1], [1, 2, 2, 1], [1, 2, 1, 1], [1, 1, 2, 1], [1, 1, 1, 1],
    ]  # fmt: skip
    assert owner.tolist() == [0] * 6
    large, _ = _chains(rows.assign(m=2**20, n=2**10, k=1))
    assert len(large) == 1 + 20 + 10  # one dimension at a time
    batched, _ = _chains(pd.DataFrame({"b": [4], "m": [1], "n": [1], "k": [1]}))
    assert batched["b"].tolist() == [4, 2]  # a batched product stays one


def test_a_product_is_never_faster_than_half_of_it(model: CostModel) -> None:
    import pandas as pd

    assert isinstance(model.estimator, GpuEstimator)
    sizes = 2 ** np.arange(0, 15)
    rows = pd.DataFrame({"b": 1, "m": sizes, "n": 3072, "k": 768, "rate": "bf16", "width": 2.0})
    for device in ("h100-sxm", "l4"):
        ask = Products(model.estimator.operators, find_device(device), model.estimator.memory)
        # Equal but for rounding where the half decides.
        assert (np.diff(ask.products(rows).latency) >= -1e-18).all()


SMALL = {name: ["layers=2"] for name in ("bert", "llama", "vit")}


def step(batch: int, tmp_path: Path, family: str) -> LoweredProgram:
    from opcast.datagen.zoo import export, parse_settings

    path = tmp_path / f"{family}-{batch}.mlir"
    settings = parse_settings(family, [f"batch={batch}", "mode=train", *SMALL.get(family, ())])
    export(family, settings, path, format="text")
    return lower(read_program(path), "op")


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    ["mlp", "llama", *map(later, ("dlrm", "bert", "vit", "convnext"))],
)
def test_a_larger_batch_is_never_faster(family: str, tmp_path: Path) -> None:
    predictor = opcast.load()
    programs = [step(batch, tmp_path, family) for batch in (4, 8)]
    for device in ("h100-sxm", "v100-pcie"):
        times = [predictor.predict_lowered(p, find_device(device)).latency_us for p in programs]
        assert times == sorted(times)


@pytest.mark.slow
def test_programs_rank_devices_as_their_data_sheets(tmp_path: Path) -> None:
    predictor = opcast.load()
    for family in ("bert", "dlrm"):
        program = step(32, tmp_path, family)
        order = ["b200", "h100-sxm", "a100-sxm-80gb", "v100-pcie", "t4"]
        times = [predictor.predict_lowered(program, find_device(d)).latency_us for d in order]
        assert times == sorted(times)


def test_the_program_adds_gaps_and_errors(model: CostModel, program: LoweredProgram) -> None:
    device = find_device("h100-sxm")
    kernels = model.predict_kernels(program.kernels, device)
    found = model.predict_program(program, device, kernels)
    total = kernels.latency.sum()
    # 12 kernels with half a gap of 1 µs between them, and 20 µs of dispatch.
    assert found.latency == pytest.approx(total + 12 * 0.5e-6 + 20e-6)
    together = found.latency - (total - kernels.lo.sum()) - 12 * 0.5e-6
    assert together < found.lo < found.latency  # errors are not all of one cause
    assert found.latency < found.hi < found.latency + kernels.hi.sum()


def test_the_default_model_depends_on_the_device(tmp_path: Path) -> None:
    predictor = opcast.load()
    assert predictor.model_for(find_device("h100-sxm")).name == "gpu-xla"
    cpu = next(iter(predictor.model.devices.values()))
    assert predictor.model_for(cpu) is predictor.model
    assert predictor.model_for(find_device("tpu-v4")).name == "tpu-xgboost"
    known = KERNELS.read_text().replace("someone_elses_kernel", "PadToStatic")
    found = predictor.predict(known, device="h100-sxm", lowering="xla")
    assert found.model == "gpu-xla"


def test_round_trip(model: CostModel, program: LoweredProgram, tmp_path: Path) -> None:
    model.save(tmp_path / "m")
    again = CostModel.load(tmp_path / "m")
    device = find_device("a40")
    before, after = (m.predict_kernels(program.kernels, device) for m in (model, again))
    np.testing.assert_array_equal(before.latency, after.latency)
    np.testing.assert_array_equal(before.hi, after.hi)
    assert again.program_model.overheads == model.program_model.overheads


def test_a_damaged_folder_is_refused(model: CostModel, tmp_path: Path) -> None:
    model.save(tmp_path / "m")
    path = tmp_path / "m" / "estimator" / "manifest.json"
    stored = json.loads(path.read_text())
    del stored["constants"]
    path.write_text(json.dumps(stored))
    with pytest.raises(ModelError, match=r"digest|incomplete"):
        CostModel.load(tmp_path / "m")
    with pytest.raises(ModelError, match="not 'gpu-xla'"):
        GpuEstimator.load(find_model("cpu-xgboost") / "estimator")


@pytest.fixture(scope="module")
def measured(model: CostModel) -> Dataset:
    """Kernels of the committed dataset as if measured on an H100: 1.5 times what is predicted."""
    frame = Dataset.load(COMMITTED).frame
    frame = frame[frame["level"].isin(["op", "kernel"])]
    frame = frame[frame["kind"].isin(["gemm", "fusion", "reduce"])].head(900)
    device = find_device("h100-sxm")
    runs = {"gpu": {"device": asdict(device)}}
    frame = frame.assign(run_id="gpu", device=device.name).reset_index(drop=True)
    from opcast.features.kernels.extract import kernels_from_irs

    kernels = kernels_from_irs(frame["kernel_ir"])
    noise = np.exp(np.random.default_rng(0).normal(0, 0.05, len(frame)))
    label = model.predict_kernels(kernels, device).latency * 1.5e6 * noise
    for column in ("latency_us_p10", "latency_us_p50", "latency_us_p90"):
        frame[column] = label
    return Dataset(frame, runs)


def test_measured_kernels_teach_a_correction(measured: Dataset, tmp_path: Path) -> None:
    estimator = GpuEstimator(rounds=60).fit(measured)
    assert estimator.correction is not None
    from opcast.features.kernels.extract import kernels_from_irs

    kernels = kernels_from_irs(measured.frame["kernel_ir"])
    label = measured.frame["latency_us_p50"].to_numpy() * 1e-6
    device = find_device("h100-sxm")
    found = estimator.predict(kernels, device)
    assert np.median(np.abs(found.latency / label - 1)) < 0.1
    assert set(found.source) == {"learned:xla"}
    assert np.mean((found.lo <= label) & (label <= found.hi)) > 0.85
    estimator.save(tmp_path / "e")
    again = GpuEstimator.load(tmp_path / "e").predict(kernels, device)
    np.testing.assert_allclose(again.latency, found.latency, rtol=1e-6)
    assert not estimator.notes(kernels, device)


def test_kernels_of_a_cpu_teach_nothing() -> None:
    data = Dataset.load(COMMITTED)
    data = data.select(data.frame["level"] == "op")
    with pytest.raises(DatasetError, match="GPU"):
        GpuEstimator().fit(data.select(np.arange(len(data)) < 200))


@pytest.fixture(scope="module")
def round_kernel(by_name: dict[str, Kernel]) -> Kernel:
    return by_name["out"]


def test_a_device_without_a_name_in_the_catalogue(
    model: CostModel, round_kernel: Kernel, round_gpu: Callable[..., DeviceSpec]
) -> None:
    found = model.predict_kernels([round_kernel], round_gpu())
    # 134 MB at 1 TB/s is 134 µs at least.
    assert 134e-6 <= found.latency[0] < 200e-6


def test_products_beyond_xlas_table_run_at_clocks_that_the_power_sustains(
    model: CostModel,
) -> None:
    short, long = (
        kernel_from_ir(
            f"HloModule m\nENTRY e {{\n  a = bf16[{n},{n}] parameter(0)\n"
            f"  b = bf16[{n},{n}] parameter(1)\n  ROOT r = bf16[{n},{n}] dot(a, b),"
            " lhs_contracting_dims={1}, rhs_contracting_dims={0}\n}\n"
        )
        for n in (4096, 16384)
    )
    found = model.predict_kernels([short, long], find_device("h100-sxm"))
    assert list(found.source) == ["learned:xla/linear", "learned:graph/linear"]
    # 80 % of PyTorch's 96 measured products with sides of 8192 and more reach 699 to 868 TFLOP/s
    # (published-tensor-core pack); 989 is the peak.
    assert 699e12 < 2 * 16384**3 / found.latency[1] < 868e12


def test_device_files_are_priced_as_their_base(model: CostModel, tmp_path: Path) -> None:
    long = kernel_from_ir(
        "HloModule m\nENTRY e {\n  a = bf16[8192,8192] parameter(0)\n"
        "  b = bf16[8192,8192] parameter(1)\n"
        "  ROOT d = bf16[8192,8192] dot(a, b), lhs_contracting_dims={1}, "
        "rhs_contracting_dims={0}\n}"
    )

    def priced(**figures: float) -> tuple[float, float, str]:
        lines = "\n".join(f"{key}: {value}" for key, value in figures.items())
        (tmp_path / "own.yaml").write_text(f"name: own\nbase: h100-sxm\n{lines}\n")
        found = model.predict_kernels([long], DeviceSpec.from_file(str(tmp_path / "own.yaml")))
        return float(found.latency[0]), float(found.hi[0]), str(found.source[0])

    base = model.predict_kernels([long], find_device("h100-sxm"))
    same = priced()
    assert same == (base.latency[0], base.hi[0], base.source[0])
    # A little more memory bandwidth does not move it to another table, as its name once did.
    latency, hi, source = priced(hbm_bandwidth_gbps=3360)
    assert source == base.source[0] and latency == pytest.approx(base.latency[0], rel=0.05)
    assert hi / latency >= base.hi[0] / base.latency[0]
