"""Costs of custom calls from other packages."""

from importlib.metadata import EntryPoint

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

import opcast
from opcast.common import plugins
from opcast.common.errors import OpcastError
from opcast.features.cost import library_calls as custom_ops
from opcast.features.devices.catalogue import find_device
from opcast.features.ir.platforms import Platform
from opcast.features.ir.program import Op, TensorType
from opcast.features.ir.reader import read_program
from opcast.features.kernels.extract import kernel_from_ir
from opcast.features.lowering.lower import lower
from opcast.features.table.roofline import roofline

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
def test_a_kernel_of_unknown_cost_is_named_and_takes_time(platform, device, lowering):
    options = {} if platform == "tpu" else {"compiler_params": triton.CompilerParams()}
    p = opcast.predict(of_platform(platform, **options), device=device, lowering=lowering)
    # Its bytes at 3.35 TB/s on an H100, 0.82 TB/s on a TPU v5e, and no less.
    assert sum(k.latency_us for k in p.kernels) > 2e6 / 3.35e6
    (note,) = [n for n in p.notes if n.startswith("no cost is known")]
    if platform == "tpu":
        assert "tpu_custom_call" in note and "cost_estimate=pl.CostEstimate" in note
    else:
        assert "entry point '__gpu$xla.gpu.triton:mine' of opcast.ops" in note


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
