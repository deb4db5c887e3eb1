"""Factorisations take the steps of their algorithms, within what was published of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from opcast.features.devices.catalogue import find_device
from opcast.features.ir.reader import read_program
from opcast.features.lowering.lower import lower
from opcast.models.gpu.estimator import GpuEstimator


def predicted(function, *shapes, device="h100-sxm"):
    """Milliseconds of all kernels, and both ends of their intervals."""
    args = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    with jax.enable_x64(True):
        text = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    spec = find_device(device)
    kernels = lower(read_program(text), lowering="fused", device=spec).kernels
    found = GpuEstimator().predict(kernels, spec)
    return [float(times.sum()) * 1e3 for times in (found.lo, found.latency, found.hi)]


def eigh(x):
    return jax.lax.linalg.eigh(x, symmetrize_input=False)


def svd(x):
    return jax.lax.linalg.svd(x, full_matrices=False)


def geqrf(x):
    # JAX has no public function of it alone: its qr() forms the factor, too.
    factors = jax.ShapeDtypeStruct((*x.shape[:-2], min(x.shape[-2:])), x.dtype)
    return jax.ffi.ffi_call("cusolver_geqrf_ffi", (jax.typeof(x), factors))(x)


F32, F64 = jnp.float32, jnp.float64
#: Function, matrices, type, device and the milliseconds that were published
#: (models/gpu/library_calls.yaml names where).
PUBLISHED = [
    (jax.lax.linalg.cholesky, (512, 512), F32, "h100-sxm", 0.376),
    (jax.lax.linalg.cholesky, (2048, 2048), F32, "h100-sxm", 1.954),
    (jax.lax.linalg.cholesky, (16, 512, 512), F32, "h100-sxm", 0.835),
    (jax.lax.linalg.cholesky, (64, 512, 512), F32, "h100-sxm", 1.261),
    (jax.lax.linalg.lu, (4096, 4096), F32, "v100-pcie", 41.0),
    (jax.lax.linalg.lu, (4096, 4096), F32, "a100-sxm-40gb", 44.0),
    (jax.lax.linalg.qr, (128, 32), F32, "h100-sxm", 0.189),
    (jax.lax.linalg.qr, (2000, 2000), F32, "a100-sxm-40gb", 6.3),
    (eigh, (1024, 1024), F32, "v100-pcie", 56.0),
    (svd, (256, 256), F64, "a100-pcie-80gb", 12.2),
    (svd, (300, 900, 100), F32, "v100-pcie", 1609.0),
]


#: Of batches that cuBLAS takes at once, on GPUs that their sources do not name.
AT_ONCE = [
    (jax.lax.linalg.lu, (16, 128, 128), F32, "v100-sxm", 0.334),
    (jax.lax.linalg.lu, (1024, 128, 128), F32, "v100-sxm", 22.4),
    (jax.lax.linalg.lu, (256, 256, 256), F64, "v100-sxm", 22.0),
    (jax.lax.linalg.lu, (100_000, 4, 4), F32, "v100-sxm", 0.288),
    (geqrf, (256, 2, 2), F64, "v100-sxm", 0.025),
    (geqrf, (25, 256, 256), F64, "v100-sxm", 82.4),
    (geqrf, (64, 128, 128), F32, "v100-sxm", 9.4),
]


@pytest.mark.parametrize(
    ("function", "shape", "dtype", "device", "published_ms"), PUBLISHED + AT_ONCE
)
def test_published_times_lie_in_the_interval(function, shape, dtype, device, published_ms):
    lo, middle, hi = predicted(function, (shape, dtype), device=device)
    assert lo <= published_ms <= hi
    assert middle / 5 <= published_ms <= middle * 5


def test_a_singular_value_decomposition_takes_tens_of_milliseconds():
    lo, middle, hi = predicted(svd, ((1024, 1024), F32))
    assert 10 < middle < 100
    assert lo < middle / 3 < 3 * middle < hi


def test_a_batch_of_small_matrices_is_factored_at_once():
    # Each of the 128 columns of 4,000 matrices moves two thirds of their 262 MB.
    moved_ms = 128 * 0.67 * 4000 * 128**2 * 4 / 3.35e9
    _, at_once, _ = predicted(jax.lax.linalg.lu, ((4000, 128, 128), F32))
    assert moved_ms < at_once < 1.5 * moved_ms
    # jaxlib has cuBLAS take them at once up to a side of 128 for each matrix, of LU only squares.
    for function, other in [(jax.lax.linalg.lu, (1000, 128, 127)), (geqrf, (2, 258, 258))]:
        one = predicted(function, (other[1:], F32))[1]
        assert predicted(function, (other, F32))[1] > 0.9 * other[0] * one
    assert predicted(geqrf, ((1000, 128, 64), F32))[1] < 50


def test_each_pass_of_a_transform_moves_its_data():
    # 2^10 points fit a kernel's shared memory, 2^16 take two passes: twice the time for the bytes.
    one, two = (predicted(jnp.fft.fft, ((2**26 // n, n), jnp.complex64))[1] for n in (2**10, 2**16))
    assert two == pytest.approx(2 * one, rel=0.01)
    # A prime length needs transforms of at least twice the length, forth and back.
    prime = predicted(jnp.fft.fft, ((2**26 // 1024, 1021), jnp.complex64))[1]
    assert 4 * one < prime < 8 * one


def test_a_triangular_solve_is_no_product():
    lo, middle, hi = predicted(
        lambda a, b: jax.lax.linalg.triangular_solve(a, b, left_side=True),
        ((1024, 1024), F32), ((1024, 64), F32),
    )  # fmt: skip
    # 1,024 steps of 0.4 us.
    assert middle == pytest.approx(0.4, rel=0.2)
    assert lo < middle < hi
