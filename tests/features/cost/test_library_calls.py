"""Costs of custom calls from other packages."""

import re
from importlib.metadata import EntryPoint

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxlib import lapack

import opcast
from opcast.common import plugins
from opcast.common.errors import OpcastError, UnknownCallError
from opcast.features.cost import library_calls as custom_ops
from opcast.features.devices.catalogue import find_device
from opcast.features.ir.platforms import Platform
from opcast.features.ir.program import Computation, Op, Program, TensorType
from opcast.features.ir.reader import read_program
from opcast.features.kernels.extract import kernel_from_ir
from opcast.features.lowering.lower import lower
from opcast.features.table.roofline import roofline
from opcast.predict.api import loaded
from opcast.predict.cluster.program_seconds import program_seconds
from opcast.predict.export.latency_table import kernel_table
from opcast.predict.plan.program import read_planned
from opcast.simulate.clusters.catalogue import find_cluster

PROGRAM = """func.func public @main(%x: tensor<8xNxf32>) -> tensor<8xNxf32> {
  %0 = stablehlo.custom_call @my_scan(%x) : (tensor<8xNxf32>) -> tensor<8xNxf32>
  return %0 : tensor<8xNxf32>
}"""


def lowered(width: int):
    """The only kernel, of a width of its own: costs of equal kernels are remembered."""
    source = read_program(PROGRAM.replace("N", str(width)))
    (kernel,) = lower(source, "op", cache=False).kernels
    return kernel


def scan(operands, results):
    assert results[0].shape == (8, 16)
    return 2 * operands[0].size, operands[0].size


def wrong(operands, results):
    return -1


@pytest.fixture
def package(monkeypatch):
    """Installs a rule for ``my_scan``."""

    def install(name: str) -> None:
        point = EntryPoint("my_scan", f"{__name__}:{name}", custom_ops.GROUP)
        monkeypatch.setattr(plugins, "found", lambda group: {"my_scan": point})
        monkeypatch.setattr(plugins, "load", lambda own: globals()[name])
        custom_ops._rule.cache_clear()

    yield install
    custom_ops._rule.cache_clear()


def test_a_rule_gives_flops_and_types_give_bytes(package):
    assert lowered(32).flops == 0
    package("scan")
    kernel = lowered(16)
    assert kernel.flops == 2 * 8 * 16
    assert kernel.bytes == 2 * 8 * 16 * 4  # one in, one out


def test_a_rule_that_returns_no_counts_is_named(package):
    package("wrong")
    with pytest.raises(OpcastError, match=r"opcast\.ops: my_scan: returned -1"):
        _ = lowered(48).flops


@pytest.mark.parametrize(
    ("target", "flops"),
    [
        # 2 n² (m - n / 3) for a QR, 9 n³ for eigenvalues; m = 12, n = 6.
        ("Qr", 2 * 6**2 * (12 - 6 / 3)),
        ("lapack_sgeqrf_ffi", 2 * 6**2 * (12 - 6 / 3)),
        ("Eigh", 9 * 6**3),
        # No routine of linear algebra, though their names have the letters of one.
        ("my_sqrt", 0.0),
        ("rsqrt_scaled", 0.0),
        ("weighted_sum", 0.0),
        ("neighbours", 0.0),
    ],
)
def test_routines_are_found_by_their_names_alone(target, flops):
    matrix = TensorType("f32", (12, 6))
    op = Op("", "custom-call", (0,), (matrix,), {"target": target})
    assert custom_ops.custom_call_flops(op, [matrix]) == (flops, 0.0)


def known(target):
    matrix = TensorType("f32", (64, 64))
    op = Op("", "custom-call", (0,), (matrix,), {"target": target})
    entry = Computation("main", [Op("", "parameter", (), (matrix,), {"index": 0}), op])
    return custom_ops.unknown_calls(Program({"main": entry}, "main")) == []


def test_what_jax_itself_calls_is_known():
    """Its own calls of libraries, as far as they have no data of unknown extent (sparse)."""
    targets = {name for name, *_ in lapack.registrations()["cpu"]}
    assert len(targets) > 40
    on_tpu = {"LuDecomposition", "Qr", "Eigh", "PartialReduce", "InspectSharding"}
    on_gpu = {
        "cuhybrid_eig_real",
        "cuhybrid_geqp3",
        "cusolver_syrk_ffi",
        "cu_lu_pivots_to_permutation",
    }
    assert [t for t in sorted(targets | on_tpu | on_gpu) if not known(t)] == []
    assert not known("cusparse_csr_matvec_ffi") and not known("te_norm")


def product(x_ref, y_ref, o_ref):
    o_ref[...] = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)


def of_platform(platform, size=512, **options):
    """A Pallas kernel called ``mine``: a product of bf16 matrices, in f32."""
    x = jax.ShapeDtypeStruct((size, size), jnp.bfloat16)
    out = jax.ShapeDtypeStruct((size, size), jnp.float32)
    call = pl.pallas_call(product, out_shape=out, name="mine", **options)
    return read_program(lambda x, y: call(x, y), x, x, platform=Platform(platform, 90))


def estimate(**changes):
    stated = {"flops": 2 * 512**3, "transcendentals": 7, "bytes_accessed": 2**21} | changes
    return {"cost_estimate": pl.CostEstimate(**stated)}


def test_a_mosaic_kernel_counts_by_its_own_estimate():
    (kernel,) = lower(of_platform("tpu", **estimate()), "op", cache=False).kernels
    assert (kernel.flops, kernel.transcendentals, kernel.bytes) == (2 * 512**3, 7, 2**21)
    # At the matrix rate: 197 TFLOP/s of bf16.
    line = roofline([kernel], find_device("tpu-v5e"))
    assert line.compute_s[0] == pytest.approx(2 * 512**3 / 197e12, rel=0.01)
    # Its text alone says so, too, as datasets keep it; the program in it is a digest.
    again = kernel_from_ir(kernel.ir)
    assert (again.flops, again.bytes) == (kernel.flops, kernel.bytes) and len(kernel.ir) < 1000


def test_what_the_compiler_writes_says_the_same():
    text = """HloModule m, is_scheduled=true
ENTRY main {
  p0 = bf16[512,512]{1,0} parameter(0)
  ROOT r = f32[512,512]{1,0} custom-call(p0, p0), custom_call_target="tpu_custom_call",
    backend_config={"custom_call_config":{"body":"TUw=","cost_estimate":{"flops":"268435456",
    "transcendentals":"0","bytes_accessed":"-1"}}}
}"""
    (kernel,) = lower(text, "xla", cache=False).kernels
    assert kernel.flops == 268435456
    # Not known (-1): one bf16 matrix read twice, one f32 matrix written.
    assert kernel.bytes == 512 * 512 * (2 + 2 + 4)


@pytest.mark.parametrize("lowering", ["op", "fused"])
@pytest.mark.parametrize(("platform", "device"), [("tpu", "tpu-v5e"), ("cuda", "h100-sxm")])
def test_a_kernel_of_unknown_cost_has_no_time(platform, device, lowering):
    options = {} if platform == "tpu" else {"compiler_params": triton.CompilerParams()}
    # As a file of another tool, that does not state what was counted.
    counted = str(of_platform(platform, **options).module)
    source = counted.replace("opcast_work", "other")
    assert source != counted
    with pytest.raises(UnknownCallError) as refused:
        opcast.predict(source, device=device, lowering=lowering)
    hint = "cost_estimate=pl.CostEstimate"
    if platform == "cuda":
        hint = "entry point '__gpu$xla.gpu.triton:mine' of opcast.ops"
    assert hint in refused.value.hint
    assert "outside what opcast knows" in refused.value.what
    # Beside it there is nothing that takes a time, least of all its own bytes'.
    assert "all else" not in refused.value.what
    # Its kernels are listed all the same, with a note.
    listed = lower(source, lowering, cache=False)
    assert listed.kernels[0].bytes == 512 * 512 * (2 + 2 + 4)
    assert [n for n in listed.notes if n.startswith("no cost is known") and hint in n]


def test_a_stated_cost_without_a_figure_above_zero_is_named():
    stated = estimate(flops=-5, transcendentals=0, bytes_accessed=-1)
    source = str(of_platform("tpu", **stated).module).replace("opcast_work", "other")
    with pytest.raises(UnknownCallError, match="cost_estimate of flops=-5, transc") as refused:
        opcast.predict(source, device="tpu-v5e", lowering="fused")
    assert "has no figure above zero" in refused.value.what


#: A product of 2 · 2048³ FLOPs beside a call.
BESIDE = """func.func public @main(%x: tensor<2048x2048xbf16>) -> tensor<2048x2048xbf16> {
  %0 = stablehlo.dot_general %x, %x, contracting_dims = [1] x [0]
    : (tensor<2048x2048xbf16>, tensor<2048x2048xbf16>) -> tensor<2048x2048xbf16>
  %1 = stablehlo.custom_call @TARGET(%0) : (tensor<2048x2048xbf16>) -> tensor<2048x2048xbf16>
  return %1 : tensor<2048x2048xbf16>
}"""


@pytest.mark.parametrize("lowering", ["op", "fused"])
@pytest.mark.parametrize(
    "target",
    # Names with the letters of attention and products have no more of a rule than others.
    ["te_layernorm_forward_ffi", "flash_attention_fwd", "rotary_dot", "cudnn_rnnforward_ffi"],
)
def test_what_is_known_beside_an_unknown_call_is_told(target, lowering):
    source = BESIDE.replace("TARGET", target)
    with pytest.raises(UnknownCallError, match=re.escape(target)) as refused:
        opcast.predict(source, device="h100-sxm", lowering=lowering)
    alone = opcast.predict(
        source.replace(f"custom_call @{target}(%0)", "negate %0"), device="h100-sxm", lowering="op"
    )
    value, unit = re.search(r"all else takes ([\d.]+) (µs)", refused.value.what).groups()
    # 17 GFLOP at 989 TFLOP/s, and no more than the product beside another pass.
    assert 17.4 < float(value) < alone.latency_us and unit == "µs"


@pytest.mark.parametrize(
    "target",
    [
        *("cu_threefry2x32_ffi", "PadToStatic", "__onednn$softmax", "X64Combine", "Sharding"),
        "GatherScatterIndicesBitpacked",
    ],
)
def test_calls_that_only_move_their_arrays_are_known(target):
    p = opcast.predict(BESIDE.replace("TARGET", target), device="h100-sxm", lowering="op")
    assert p.latency_us > 17.4


def test_plans_tables_and_clusters_rest_on_no_unknown_call():
    w, x = (jax.ShapeDtypeStruct((n, 512), jnp.bfloat16) for n in (512, 64))
    step = jax.jit(lambda w, x: jax.ffi.ffi_call("mystery", x)(jnp.tanh(x @ w)).sum())
    planned = read_planned(step.lower(w, x))
    cluster, predictor = find_cluster("h100-sxm-x4"), loaded("roofline")
    device = find_device("h100-sxm")
    lowered = lower(BESIDE.replace("TARGET", "mystery"), "op", cache=False)
    for asked in (
        lambda: planned.sheet(cluster, predictor),
        lambda: program_seconds(lowered, device, predictor.model),
        lambda: kernel_table(lowered, device, predictor.model),
        lambda: predictor.latencies_us(lowered.kernels, device),
    ):
        with pytest.raises(UnknownCallError, match="mystery"):
            asked()


def test_a_rule_for_one_triton_kernel(monkeypatch):
    target = "__gpu$xla.gpu.triton:mine"
    point = EntryPoint(target, "mine:rule", custom_ops.GROUP)
    monkeypatch.setattr(plugins, "found", lambda group: {target: point})
    monkeypatch.setattr(plugins, "load", lambda own: lambda operands, results: (2 * 512**3, 0))
    custom_ops._rule.cache_clear()
    try:
        # Of a size of its own: costs of equal kernels are remembered.
        source = of_platform("cuda", 256, compiler_params=triton.CompilerParams())
        (kernel,) = lower(source, "op", cache=False).kernels
        assert kernel.flops == 2 * 512**3 and kernel_from_ir(kernel.ir).flops == kernel.flops
    finally:
        custom_ops._rule.cache_clear()


def test_attention_backward_is_made_of_products():
    q = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)

    def loss(q):
        out = jax.nn.dot_product_attention(q, q, q, implementation="cudnn")
        return jnp.sum(out.astype(jnp.float32))

    source = read_program(jax.grad(loss), q, platform=Platform("cuda", 90))
    calls = [k for k in lower(source, "op", cache=False).kernels if "Backward" in k.ir]
    # Five products of 2·b·h·q·k·d, at the 989 TFLOP/s of dense bf16.
    (backward,) = calls
    assert backward.flops == 5 * 2 * 2 * 4 * 256 * 256 * 64
    line = roofline(calls, find_device("h100-sxm"))
    assert line.compute_s[0] < 1.5 * backward.flops / 989e12
