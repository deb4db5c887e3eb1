"""Programs of about 12,000 StableHLO ops: read, analysed, and predicted with rules of our own.

CPU time, since a busy machine says little about wall time: of a warm process, and of a command.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import jax
import jax.numpy as jnp

import opcast
from common import best, resnet50, show
from opcast.features.ir.reader import read_program
from opcast.predict.program.predictor import Predictor
from opcast.tests.support.costs import program_cost

WARM_S, COMMAND_S = 1.5, 3.0
REPEATS = 3
HEADS, WIDTH, ROWS = 16, 1024, (4, 512)
#: Layers that make 12,000 ops, by whether a gradient is taken.
LAYERS = {"forward": 58, "gradient": 26}
#: Programs, and the devices that each is predicted for.
CASES = {
    ("forward", "equal", "mlir"): ("h100-sxm", "tpu-v5e"),
    ("forward", "distinct", "mlirbc"): ("h100-sxm",),
    ("gradient", "equal", "mlirbc"): ("h100-sxm",),
    ("gradient", "distinct", "mlir"): ("h100-sxm", "tpu-v5e", "cpu"),
}


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        analyse(resnet50(Path(scratch)))
        predictor = opcast.load()
        for (what, layers, suffix), devices in CASES.items():
            path = write(Path(scratch) / f"{what}-{layers}.{suffix}")
            for device in devices:
                timed(predictor, path, device)


def analyse(path: Path) -> None:
    """Reading and counting of a ResNet-50 data-parallel train step."""
    text = path.read_text()
    parse = best(lambda: read_program(text).module)
    read = best(lambda: read_program(text).program)
    program = read_program(text).program
    cost = best(lambda: program_cost(program))
    whole = best(lambda: program_cost(read_program(text).program))
    count = sum(len(own.ops) for own in program.computations.values())
    print(f"{count} ops, {len(text) / 1e6:.1f} MB of text")
    show("parse and analyse", whole, 2.0, f"{whole / parse:.1f} times MLIR's parser alone")
    print(f"     MLIR parser {parse:.3f} s, reader {read - parse:.3f} s, cost {cost:.3f} s")


def timed(predictor: Predictor, path: Path, device: str) -> None:
    """CPU time of a prediction in this process, and of the command."""
    known = predictor.devices.values()
    name = next((d.name for d in known if d.platform == device), device)
    kernels = len(predictor.predict(path, device=name, lowering="fused").kernels)
    warm = least(lambda: predictor.predict(path, device=name, lowering="fused"), own_seconds)
    show(f"{path.name} on {device}, warm", warm, WARM_S, f"{kernels} kernels")
    command = [sys.executable, "-m", "opcast", "predict", str(path)]
    command += ["--device", name, "--lowering", "fused"]

    def run() -> None:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    show(f"{path.name} on {device}, command", least(run, child_seconds), COMMAND_S)


def least(run: Callable[[], object], clock: Callable[[], float]) -> float:
    """Fewest CPU seconds of some runs."""
    times = []
    for _ in range(REPEATS):
        start = clock()
        run()
        times.append(clock() - start)
    return min(times)


own_seconds = time.process_time


def child_seconds() -> float:
    """CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def write(path: Path) -> Path:
    """Write a decoder whose layers are equal, or of other widths each; its name says which."""
    what, layers = path.stem.split("-")
    lowered = decoder(LAYERS[what], layers == "distinct", what == "gradient")
    if path.suffix == ".mlir":
        path.write_text(lowered.as_text(debug_info=True))
    else:
        with path.open("wb") as file:
            lowered.compiler_ir().operation.write_bytecode(file)
    return path


def decoder(layers: int, distinct: bool, gradient: bool) -> jax.stages.Lowered:
    """Lower a decoder of unrolled layers."""

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    weights = []
    for place in range(layers):
        more = place if distinct else 0
        inner, hidden = WIDTH + 4 * HEADS * more, 2816 + 64 * more
        wide, narrow = array(WIDTH, inner), array(WIDTH, hidden)
        weights.append(
            {"scale": array(WIDTH), "q": wide, "k": wide, "v": wide, "out": array(inner, WIDTH),
             "scale_2": array(WIDTH), "gate": narrow, "up": narrow, "down": array(hidden, WIDTH)}
        )  # fmt: skip

    def loss(weights: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
        for own in weights:
            x = layer(own, x)
        return jnp.sum(x.astype(jnp.float32))

    run = jax.value_and_grad(loss) if gradient else loss
    return jax.jit(run).lower(weights, array(*ROWS, WIDTH))


def layer(own: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Attention with rotary positions, and a gated feed-forward part."""
    batch, length, _ = x.shape
    y = normed(x, own["scale"])
    q, k, v = ((y @ own[name]).reshape(batch, length, HEADS, -1) for name in "qkv")
    q, k = rotated(q), rotated(k)
    scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    shares = jax.nn.softmax(scores, -1).astype(x.dtype)
    x = x + jnp.einsum("bhts,bshd->bthd", shares, v).reshape(batch, length, -1) @ own["out"]
    y = normed(x, own["scale_2"])
    return x + (jax.nn.silu(y @ own["gate"]) * (y @ own["up"])) @ own["down"]


def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMS norm in 32-bit floats."""
    wide = x.astype(jnp.float32)
    norm = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * norm).astype(x.dtype) * scale


def rotated(x: jax.Array) -> jax.Array:
    """Rotary positions."""
    _, length, _, size = x.shape
    angle = jnp.arange(length)[:, None] * 1e4 ** (-jnp.arange(0, size, 2) / size)
    cos, sin = (turn(angle)[None, :, None].astype(x.dtype) for turn in (jnp.cos, jnp.sin))
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


if __name__ == "__main__":
    main()
