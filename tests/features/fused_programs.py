"""Small programs whose kernels the real compiler made: ``data/fused/<name>.hlo``, for an H100.

To make the files again: ``python tests/features/fused_programs.py`` with the compiler installed.
"""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp

DATA = Path(__file__).parent / "data" / "fused"
F32, BF16 = jnp.float32, jnp.bfloat16


def spec(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def norm(x, scale):
    mean = x.mean(-1, keepdims=True)
    variance = (x * x).mean(-1, keepdims=True) - mean * mean
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * scale


def mlp(x, w, b, scale, v):
    return jax.nn.gelu(norm(x @ w + b, scale)) @ v


def mlp_step(x, y, params):
    def loss(p):
        return ((mlp(x, *p) - y) ** 2).mean()

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def attention(x, q, k, v, o):
    def heads(w):
        return (x @ w).reshape(x.shape[0], x.shape[1], 8, 64)

    scores = jnp.einsum("bqhd,bkhd->bhqk", heads(q), heads(k)) / 8.0
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), heads(v))
    return x + mixed.reshape(x.shape) @ o


def residual_block(x, w, v, scale, bias):
    def conv(a, b):
        return jax.lax.conv_general_dilated(
            a, b, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    y = conv(jnp.maximum(conv(x, w) * scale + bias, 0.0), v)
    return jnp.maximum(x + y * scale + bias, 0.0)


def recurrence(x, w, u):
    def step(h, t):
        h = jnp.tanh(t @ w + h @ u)
        return h, h

    return jax.lax.scan(step, jnp.zeros(x.shape[1:], x.dtype), x)


def loss_of_tokens(x, table, labels):
    logits = x @ table.T
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], -1).mean()


_PARAMS = (spec(256, 512), spec(512), spec(512), spec(512, 64))
PROGRAMS = {
    "mlp_forward": (mlp, (spec(128, 256), *_PARAMS)),
    "mlp_step": (mlp_step, (spec(128, 256), spec(128, 64), _PARAMS)),
    "attention": (attention, (spec(4, 256, 512), *[spec(512, 512)] * 4)),
    "residual_block": (
        residual_block,
        (spec(8, 28, 28, 64), *[spec(3, 3, 64, 64)] * 2, spec(64), spec(64)),
    ),
    "recurrence": (recurrence, (spec(16, 32, 128), spec(128, 128), spec(128, 128))),
    "loss": (
        loss_of_tokens,
        (spec(512, 256), spec(32_000, 256), spec(512, dtype=jnp.int32)),
    ),
}


def text_of(name: str) -> str:
    """StableHLO of a program."""
    function, arguments = PROGRAMS[name]
    return jax.jit(function).lower(*arguments).as_text()


def _plain(hlo: str) -> str:
    """HLO without what says where an instruction came from."""
    hlo = re.sub(r", metadata=\{[^{}]*\}", "", hlo)
    return re.sub(r"\n(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:.+\n)*", "\n", hlo)


def main() -> None:
    from opcast.features.devices.catalogue import find_device
    from opcast.features.lowering.lower import lower
    from opcast.features.lowering.target_compiler.process import CompileSettings

    settings = CompileSettings(flags={"xla_gpu_enable_triton_gemm": False})
    for name in PROGRAMS:
        device = find_device("h100-sxm")
        found = lower(text_of(name), "xla", device=device, cache=False, settings=settings)
        (DATA / f"{name}.hlo").write_text(_plain(found.hlo))


if __name__ == "__main__":
    main()
