"""Measure matrix products alone and in a loop, and compare with the factor that is predicted.

    python tests/bench/loop_products.py

A product alone meets its matrices in main memory, since the profiler rotates arguments past the
last cache; in a loop it finds them in the caches. Prints for each size the microseconds of both,
their ratio, and the factor of ``models/program/context.py``. It takes about a minute.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax

from opcast.datagen.profile.plan import ProfileSettings
from opcast.datagen.profile.profile import profile
from opcast.features.dataset import Dataset
from opcast.features.ir.reader import read_program
from opcast.features.lowering.lower import lower
from opcast.models.program.context import loop_factors
from opcast.predict.api import save
from opcast.predict.program.predictor import load
from opcast.workflows.profile import local_now

#: ``m, k, n`` of ``[m, k] @ [k, n]``: few rows, whose time is that of reading the matrix, to many.
SIZES = (
    (1, 512, 512), (4, 256, 1024), (8, 512, 512), (16, 128, 128), (16, 256, 1024),
    (16, 1536, 1536), (24, 1024, 1024), (32, 64, 256), (32, 320, 640), (64, 512, 512),
    (128, 256, 256),
)  # fmt: skip
#: Iterations of the loops: enough for the first one to count little.
ITERATIONS = 64


def alone(x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply once."""
    return x @ w


def looped(x: jax.Array, w: jax.Array, back: jax.Array) -> jax.Array:
    """Multiply by two matrices in turn."""
    return lax.fori_loop(0, ITERATIONS, lambda _, h: jnp.tanh((h @ w) @ back), x)


def main() -> None:
    """Measure and print."""
    device = local_now(load().devices, print)
    with tempfile.TemporaryDirectory() as folder:
        for m, k, n in SIZES:
            kinds: tuple[tuple[str, Callable[..., jax.Array], tuple[tuple[int, int], ...]], ...] = (
                ("alone", alone, ((m, k), (k, n))),
                ("loop", looped, ((m, k), (k, n), (n, k))),
            )
            for name, function, shapes in kinds:
                arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
                path = Path(folder) / f"{name}-{m}-{k}-{n}.mlir"
                save(function, *arguments, path=path)
        paths = sorted(Path(folder).glob("*.mlir"))
        out = Path(folder) / "data"
        profile(out, ProfileSettings(replicate_share=0.0), sources=paths, device_spec=device)
        frame = Dataset.load(out).frame
        products = frame[frame["kind"] == "gemm"].groupby("program")["latency_us_p50"].mean()
        for m, k, n in SIZES:
            size = f"{m}-{k}-{n}"
            kernels = lower(read_program(Path(folder) / f"loop-{size}.mlir")).kernels
            factors = loop_factors(kernels, device)
            predicted = min(f for f, o in zip(factors, kernels, strict=True) if o.kind == "gemm")
            once, again = (products[f"given-{name}-{size}"] for name in ("alone", "loop"))
            print(
                f"{m:4d} x {k:4d} x {n:4d}: alone {once:6.1f} µs, in a loop {again:6.1f} µs, "
                f"ratio {again / once:.2f}, predicted {predicted:.2f}"
            )


if __name__ == "__main__":
    main()
