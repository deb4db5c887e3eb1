"""The TPU model: the roofline where its compiler says nothing, and never zero."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from math import exp
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opcast.common.errors import ModelError
from opcast.datagen.compile.plan import CompileItem
from opcast.datagen.compile.run import estimated_rows
from opcast.features.cost.bytes import array_traffic, on_chip_bytes
from opcast.features.dataset import Dataset, sample_frame
from opcast.features.devices.catalogue import find_device
from opcast.features.devices.device import DeviceSpec
from opcast.features.ir.hlo_reader import parse_hlo
from opcast.features.kernels.extract import extract_kernels
from opcast.features.kernels.kernel import Kernel, LoweredProgram
from opcast.features.lowering.lower import lower
from opcast.features.table.roofline import least_seconds, roofline
from opcast.features.table.row import rows as kernel_rows
from opcast.features.table.table import feature_names, schema_hash
from opcast.features.table.tpu import grouped_seconds, sort_seconds, spread_seconds
from opcast.models.core.base import KernelPrediction
from opcast.models.core.kernel_table import concatenate, kernel_table
from opcast.models.estimators.tpu import MEASURED, TpuEstimator, by_compiler, is_estimated
from opcast.models.program.fused_error import op_ends, shipped_op
from opcast.models.program.schedule_cost import Overhead, schedule_cost
from opcast.models.trust.calibrator import UNCALIBRATED
from opcast.predict.program.predictor import load

DATA = Path(__file__).parents[2] / "features" / "data" / "absent"
V5E = find_device("tpu-v5e")


def kernels(name: str) -> list[Kernel]:
    return extract_kernels(parse_hlo((DATA / f"{name}.hlo").read_text()))[0]


@pytest.fixture(scope="module")
def model() -> TpuEstimator:
    """Fitted to copies of what the compiler says of three small programs, slowed by a factor."""
    rows = []
    for name in ("v5e_bias", "v5e_bmm", "v5e_pool"):
        item = CompileItem(name, "random", "", True)
        for row in estimated_rows((DATA / f"{name}.hlo").read_text(), [item], V5E):
            for copy in range(12):
                rows.append({
                    **row, "kernel_hash": f"{row['kernel_hash']}{copy}",
                    "sample_id": f"{name}{row['kernel_hash']}{copy}", "device": V5E.name,
                    "run_id": "r",
                })  # fmt: skip
    dataset = Dataset(sample_frame(rows), {"r": {"device": asdict(V5E)}})
    return TpuEstimator(rounds=5, stop_rounds=0).fit(dataset)


def test_select_and_scatter_takes_its_roofline(model: TpuEstimator) -> None:
    own = kernels("v5e_pool")
    found = model.predict(own, V5E)
    silent = [i for i, k in enumerate(own) if k.opcode == "select-and-scatter"]
    assert silent
    expected = roofline([own[i] for i in silent], V5E).latency_s + V5E.floor
    np.testing.assert_allclose(found.latency[silent], expected)
    assert set(found.source[silent]) == {"roofline"}
    assert not found.in_domain[silent].any()
    assert (found.lo[silent] < found.latency[silent]).all()
    assert (found.hi[silent] > found.latency[silent]).all()


def test_kernels_left_to_a_roofline_have_its_errors(model: TpuEstimator) -> None:
    """The base of the trees counts passes over registers that the plain roofline does not."""
    own = [k for k in kernels("v5e_bmm") if k.cycles]
    table = kernel_table(own, V5E)
    table.line_s = table.base_s / 20
    estimator = TpuEstimator(rounds=1, stop_rounds=0)
    estimator.calibrate(table, 1.1 * table.base_s, table.base_s)
    assert estimator.fallback == pytest.approx((-UNCALIBRATED, np.log(1.1 * 20)))
    table.line_s = 20 * table.base_s
    estimator.calibrate(table, 1.1 * table.base_s, table.base_s)
    assert estimator.fallback == pytest.approx((np.log(1.1 / 20), UNCALIBRATED))


def test_no_kernel_is_free(model: TpuEstimator) -> None:
    for name in ("v5e_bias", "v5e_bmm", "v5e_pool", "v5e_gather"):
        own = [k for k in kernels(name) if k.takes_time]
        assert (model.predict(own, V5E).latency > 0).all()


def test_asynchronous_copies_are_not_estimated() -> None:
    own = [k for k in kernels("v5e_bias") if k.takes_time]
    assert {k.opcode: is_estimated(k) for k in own} == {"copy-start": False, "fusion": True}
    assert [k.cycles > 0 for k in own] == [is_estimated(k) for k in own]


def unasked(others: Sequence[Kernel], device: DeviceSpec) -> KernelPrediction:
    raise AssertionError(others)


def test_estimates_that_were_not_compared_reach_down_to_the_roofline(model: TpuEstimator) -> None:
    """A sum of 1 GiB that the compiler puts at 3.8 ms, where v6e moves 1,640 GB a second."""
    total = jax.jit(lambda x: x.sum()).lower(jax.ShapeDtypeStruct((2**28,), jnp.float32))
    (kernel,) = lower(total, "op").kernels
    v6e = find_device("tpu-v6e")
    own = [replace(kernel, cycles=3.78e-3 * v6e.clock_hz)]
    found = by_compiler(model.predict(own, v6e), own, v6e, unasked)
    least = (2**30 - v6e.core_count * v6e.shared_bytes_per_core) / v6e.bandwidth
    assert found.lo[0] == pytest.approx(least, rel=0.01)
    assert found.hi[0] / found.latency[0] > 1.44
    assert not found.in_domain[0]


def test_a_product_of_f32_is_not_faster_than_one_of_bf16(model: TpuEstimator) -> None:
    def product(dtype: str) -> Kernel:
        own = jax.ShapeDtypeStruct((4096, 4096), jnp.dtype(dtype))
        (kernel,) = lower(jax.jit(jnp.matmul).lower(own, own), "fused", device=V5E).kernels
        return kernel

    def priced(latency: float, kernels: Sequence[Kernel]) -> KernelPrediction:
        most = roofline(kernels, V5E).latency_s * latency
        return KernelPrediction.around(most, (-0.1, 0.1), "learned")

    wide = [product("float32")]
    asked: list[str] = []

    def predict(others: Sequence[Kernel], device: DeviceSpec) -> KernelPrediction:
        asked.extend(k.dtype for k in others)
        return priced(1.4, others)

    found = by_compiler(priced(1.1, wide), wide, V5E, predict)
    assert asked == ["bf16"]
    assert found.latency == pytest.approx(priced(1.4, [product("bfloat16")]).latency)
    assert found.hi / found.latency == pytest.approx(np.exp(0.1))


def test_lower_bounds_of_another_lowering_are_no_closer_than_the_compilers() -> None:
    """2^28 f32 beyond 128 MiB of VMEM at 819 GB/s; a product at exp(-0.25) of its estimate."""
    numbers = jax.ShapeDtypeStruct((1 << 28,), jnp.float32)
    square = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    summed = lower(jax.jit(jnp.sum).lower(numbers), "fused", device=V5E).kernels
    product = lower(jax.jit(jnp.matmul).lower(square, square), "fused", device=V5E).kernels
    own = [*(k for k in summed if k.takes_time), *product]
    latency = 1.4 * roofline(own, V5E).latency_s
    found = by_compiler(KernelPrediction.around(latency, (-0.1, 0.1), "learned"), own, V5E, unasked)
    assert found.lo[0] == pytest.approx((2**30 - 2**27) / 819e9, rel=1e-3)
    assert found.lo[-1] == pytest.approx(latency[-1] * np.exp(-0.25))
    np.testing.assert_array_equal(found.hi, latency * np.exp(0.1))


def test_what_the_compiler_says_comes_before_the_trees(model: TpuEstimator) -> None:
    own = [k for k in kernels("v5e_bias") if k.takes_time]
    learned = model.predict(own, V5E)
    found = by_compiler(learned, own, V5E, unasked)
    stated = np.array([k.cycles > 0 for k in own])
    cycles = np.array([k.cycles for k in own])
    np.testing.assert_allclose(found.latency[stated], cycles[stated] / V5E.clock_hz)
    np.testing.assert_array_equal(found.latency[~stated], learned.latency[~stated])
    assert set(found.source[stated]) == {"compiler"}
    assert (found.lo < found.latency).all() and (found.latency < found.hi).all()
    # Steps were measured on v3 alone.
    v3 = find_device("tpu-v3")
    measured = by_compiler(learned, own, v3, unasked)
    expected = MEASURED["tpu-v3"] * cycles / v3.clock_hz
    np.testing.assert_allclose(measured.latency[stated], expected[stated])
    assert by_compiler(learned, own, find_device("h100-sxm"), unasked) is learned


def test_kernels_of_another_lowering_stay_near_their_roofline(model: TpuEstimator) -> None:
    own = [replace(k, cycles=0.0) for k in kernels("v5e_bias") if k.takes_time]
    learned = model.predict(own, V5E)
    base = roofline(own, V5E).latency_s + V5E.floor
    far = replace(learned, latency=base * 90, lo=base * 60, hi=base * 200)
    found = by_compiler(far, own, V5E, unasked)
    held = far.source == "learned"
    assert held.any()
    most = base * np.where([k.kind == "gemm" for k in own], 1.5, 4.0)
    np.testing.assert_allclose(found.latency[held], most[held])
    np.testing.assert_allclose(found.lo[held], base[held])
    np.testing.assert_allclose(found.hi[held], 4 * most[held])
    assert not found.in_domain[held].any()
    # What is near already stays as it is.
    near = replace(learned, latency=base * 1.4, lo=base, hi=base * 3)
    found = by_compiler(near, own, V5E, unasked)
    np.testing.assert_array_equal(found.latency, near.latency)
    np.testing.assert_array_equal(found.hi, near.hi)
    assert not found.in_domain[held].any()
    assert any("estimated none" in note for note in model.notes(own, V5E))
    assert not any("estimated none" in note for note in model.notes(kernels("v5e_bias"), V5E))


def test_what_stays_on_the_chip_passes_through_registers() -> None:
    """4096 × 4096 f32 in and out of VMEM: 2 × 16384 registers of eight cycles, 4 × 1024 bytes each.

    The vector units pass four bytes in the time of an f32 operation.
    """
    text = """HloModule m, is_scheduled=true
ENTRY main {
  x = f32[4096,4096]{1,0:S(1)} parameter(0)
  ROOT y = f32[4096,4096]{1,0:S(1)} tanh(x)
}"""
    own = extract_kernels(parse_hlo(text))[0]
    far = KernelPrediction.around(np.array([1.0]), (-0.1, 0.1), "learned")
    found = by_compiler(far, own, V5E, unasked)
    seconds = 2 * 16384 * 8 * 4096 / (4 * V5E.vector_peak("f32"))
    assert found.latency[0] == pytest.approx(4 * (seconds + V5E.floor))


def test_kernels_with_an_estimate_are_learned(model: TpuEstimator) -> None:
    own = [k for k in kernels("v5e_bias") if k.cycles]
    found = model.predict(own, V5E)
    assert set(found.source) == {"learned"}


def test_asynchronous_copies_run_beside_the_rest() -> None:
    own = kernels("v5e_bias")
    cost = schedule_cost(np.full(len(own), 1e-6), LoweredProgram(own, "xla", V5E.name), V5E)
    cost = replace(cost, total=7e-6, makespan=5e-6, gaps=3e-6, dispatch=1e-6)
    # 7 + 0.5 · 3 + 1, 5 + 0.5 · 3 + 1, and the mean of 7 and 5 without gaps.
    assert Overhead().wall(cost) == pytest.approx(9.5e-6)
    assert Overhead(overlap=1.0).wall(cost) == pytest.approx(7.5e-6)
    assert Overhead(gap=0.0, overlap=0.5).wall(cost) == pytest.approx(7e-6)
    assert TpuEstimator.overheads["tpu"].wall(cost) == pytest.approx(6e-6)


def test_it_says_that_nothing_was_measured(model: TpuEstimator) -> None:
    notes = model.notes(kernels("v5e_pool"), V5E)
    assert "not from measurements" in notes[0]
    assert "roofline" in notes[1]
    other = model.notes([], replace(V5E, name="my-tpu"))
    assert "not for my-tpu" in other[1]


def test_it_comes_back_from_its_folder(model: TpuEstimator, tmp_path: Path) -> None:
    model.save(tmp_path / "m")
    own = [k for k in kernels("v5e_bmm") if k.takes_time]
    again = TpuEstimator.load(tmp_path / "m").predict(own, V5E)
    # Compact trees keep fewer digits.
    np.testing.assert_allclose(again.latency, model.predict(own, V5E).latency, rtol=1e-5)


def test_nothing_is_faster_than_physics_allows(model: TpuEstimator) -> None:
    slow = replace(
        V5E,
        peak_flops=dict.fromkeys(V5E.peak_flops, 1e9),
        levels=(replace(V5E.levels[0], bandwidth=1e6),),
        shared_bytes_per_core=1e4,
    )
    own = [k for k in kernels("v5e_bmm") if k.takes_time]
    found = model.predict(own, slow)
    least = least_seconds(own, slow)
    for k, seconds in zip(own, least, strict=True):
        # Besides what the compiler puts on the chip 10 kB may lie there; the rest comes at 1 MB/s.
        entry = k.body.entry_computation
        near = sum(on_chip_bytes(side) for side in array_traffic(k.op, entry, k.body))
        assert seconds >= max((k.bytes - near - 1e4) / 1e6, 0.0) * (1 - 1e-9)
    assert least.max() > 1.0
    assert (found.latency >= least).all() and (found.lo >= least).all()
    assert (found.hi >= found.latency).all()


def test_on_chip_memory_of_a_tpu_is_no_traffic() -> None:
    own = [k for k in kernels("v5e_bmm") if k.takes_time]
    assert (least_seconds(own, V5E) < roofline(own, V5E).latency_s).any()
    gpu = find_device("a100-sxm-80gb")
    np.testing.assert_array_equal(least_seconds(own, gpu), roofline(own, gpu).latency_s)


def test_a_model_without_tpus_own_features_is_refused(model: TpuEstimator, tmp_path: Path) -> None:
    model.save(tmp_path / "m")
    file = tmp_path / "m" / "manifest.json"
    manifest = json.loads(file.read_text())
    names = feature_names()
    manifest |= {"feature_names": list(names), "schema_hash": schema_hash(names)}
    file.write_text(json.dumps(manifest))
    with pytest.raises(ModelError, match="without their own features"):
        TpuEstimator.load(tmp_path / "m")


def test_tables_of_several_platforms_go_together(model: TpuEstimator) -> None:
    own = [k for k in kernels("v5e_bmm") if k.takes_time]
    here, there = kernel_table(own, V5E), kernel_table(own, find_device("a100-sxm-80gb"))
    both = concatenate([there, here])
    assert both.names == here.names
    assert both.schema == here.schema
    n, width = len(own), len(there.names)
    np.testing.assert_array_equal(both.X[n:], here.X)
    np.testing.assert_array_equal(both.X[:n, :width], there.X)
    assert not both.X[:n, width:].any()
    np.testing.assert_array_equal(here.with_names(there.names).X, here.X[:, :width])
    # A table of another platform is brought to what the model was fitted to.
    assert model.predict_table(there).latency.shape == (n,)
    assert here.with_names(("else",)) is here


SORT = """HloModule m

less {
  a = s32[] parameter(0)
  b = s32[] parameter(1)
  ROOT c = pred[] compare(a, b), direction=LT
}

ENTRY main {
  p = s32[SHAPE] parameter(0)
  ROOT r = s32[SHAPE] sort(p), dimensions={DIMENSION}, to_apply=less
}
"""


def sort_of(shape: str, dimension: int) -> list[Kernel]:
    text = SORT.replace("SHAPE", shape).replace("DIMENSION", str(dimension))
    return extract_kernels(parse_hlo(text))[0]


@pytest.mark.parametrize(
    ("device", "compiler_us"), [("tpu-v5e", 106.5), ("tpu-v5p", 44.8), ("tpu-v6e", 88.1)]
)
def test_a_depthwise_convolution_takes_blocks_of_lanes(device: str, compiler_us: float) -> None:
    """192 channels are two blocks of 128 × 128, of which v6e's arrays of 256 × 256 hold one.

    Beside libtpu's estimates of the kernel.
    """
    text = """HloModule m, is_scheduled=true
ENTRY main {
  x = bf16[8,28,28,192]{3,2,1,0} parameter(0)
  w = bf16[7,7,1,192]{3,2,1,0} parameter(1)
  ROOT y = bf16[8,28,28,192]{3,2,1,0} convolution(x, w), window={size=7x7 pad=3_3x3_3},
    dim_labels=b01f_01io->b01f, feature_group_count=192
}"""
    spec = find_device(device)
    own = extract_kernels(parse_hlo(text))[0]
    flops = 2 * 8 * 28**2 * 49 * 2 * 128 * 128
    seconds = flops / spec.matrix_peak("bf16") * (4 if device == "tpu-v6e" else 1)
    assert grouped_seconds(kernel_rows(own), spec) == pytest.approx([seconds])
    assert seconds * 1e6 == pytest.approx(compiler_us, rel=0.05)
    fast = KernelPrediction.around(np.array([seconds / 5]), (-0.1, 0.1), "learned")
    found = by_compiler(fast, own, spec, unasked)
    assert found.latency == pytest.approx([seconds])
    assert found.lo[0] <= seconds / 5 and found.hi == pytest.approx(seconds * exp(0.1))


@pytest.mark.parametrize(("device", "compiler_us"), [("tpu-v5e", 246.1), ("tpu-v6e", 196.6)])
def test_rows_are_copied_to_sublanes_one_by_one(device: str, compiler_us: float) -> None:
    """An image doubled along its width, beside libtpu's estimates of the kernel."""
    text = """HloModule m, is_scheduled=true
ENTRY main {
  x = bf16[4,64,32,256]{3,2,1,0} parameter(0)
  ROOT y = bf16[4,64,32,OUT]{4,3,2,1,0} broadcast(x), dimensions={0,1,2,4}
}"""
    spec = find_device(device)
    own = extract_kernels(parse_hlo(text.replace("OUT", "2,256")))[0]
    # 8,192 rows of two registers, 22 cycles each.
    seconds = 4 * 64 * 32 * 2 * 22 / spec.clock_hz
    assert spread_seconds(own, spec) == pytest.approx([seconds])
    assert seconds * 1e6 == pytest.approx(compiler_us, rel=0.06)
    fast = KernelPrediction.around(np.array([seconds / 5]), (-0.1, 0.1), "learned")
    assert by_compiler(fast, own, spec, unasked).latency == pytest.approx([seconds])
    # Whole tiles are repeated as they are, and one row stays in its registers.
    plain = text.replace("32,OUT]{4,3,2,1,0}", "32,2,256]{4,2,3,1,0}")
    assert spread_seconds(extract_kernels(parse_hlo(plain))[0], spec) == [0.0]


def test_a_sort_takes_the_passes_of_its_network(model: TpuEstimator) -> None:
    """2^27 keys of 4 bytes, 2^24 of which fit into 128 MiB with their results."""
    large = sort_of("134217728", 0)
    # One pass for the blocks, then merges of 2, 3 and 4 passes over 2^30 bytes.
    seconds = 10 * 2**30 / 819e9
    assert sort_seconds(kernel_rows(large), V5E) == pytest.approx([seconds])
    # Rows fit: one pass, hidden by 78 stages of half a comparison and a selection for each key.
    rows = sort_of("4096,4096", 1)
    assert sort_seconds(kernel_rows(rows), V5E) == pytest.approx([78 * 2**24 * 1.5 / 6.1e12])
    found = model.predict(large, V5E)
    assert found.latency == pytest.approx([seconds + V5E.floor])
    assert found.lo == pytest.approx(found.latency / 4)
    assert found.hi == pytest.approx(found.latency * 4)


def test_a_program_op_by_op_reaches_to_what_its_joined_kernels_may_take() -> None:
    text = """module @m { func.func public @main(%x: tensor<2048x1024xbf16>,
        %w: tensor<1024x4096xbf16>) -> tensor<2048x4096xbf16> {
      %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
        : (tensor<2048x1024xbf16>, tensor<1024x4096xbf16>) -> tensor<2048x4096xbf16>
      %1 = stablehlo.tanh %0 : tensor<2048x4096xbf16>
      return %1 : tensor<2048x4096xbf16> } }"""
    predictor = load()
    op, fused = (predictor.predict(text, device="tpu-v5e", lowering=own) for own in ("op", "fused"))
    # Of 4 + 8 + 16 MiB and twice 16 MiB, the product's result is written and read between them.
    product, tanh = (kernel.latency_us for kernel in op.kernels)
    left = 1 - tanh / (product + tanh) * 32 / 60
    low, high = shipped_op("tpu")
    assert op.hi_us == pytest.approx(op.latency_us * left * exp(high), rel=1e-3)
    # Not below the product at the peak of 197 TFLOP/s.
    peak = 2 * 2048 * 1024 * 4096 / 197e12 * 1e6
    assert op.lo_us == pytest.approx(max(op.latency_us * left * exp(low), peak), rel=0.1)
    assert op.lo_us <= fused.latency_us <= op.hi_us
    assert any("op by op" in note for note in op.notes)


def test_ends_of_a_time_op_by_op_hold_it() -> None:
    assert op_ends(1.0, (-1.0, 2.0)) == (-1.0, 2.0)
    assert op_ends(exp(-1.5), (-1.0, 2.0)) == pytest.approx((-2.5, 0.5))
    assert op_ends(exp(-3.0), (-1.0, 2.0)) == pytest.approx((-4.0, 0.0))
    assert op_ends(1.0, (0.5, 2.0)) == (0.0, 2.0)
    assert shipped_op("gpu") is None
