"""What ``opcast plan`` makes of a program against the same program as JAX traces it.

Layers computed again are compared with ``jax.checkpoint`` around each of them, micro-batches
with a ``lax.scan`` around the gradient: time and the compiler's peak memory on one device.

    python tests/bench/plan_changes.py --programs remat-llama,micro-mlp --device h100-sxm
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from unittest.mock import patch

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import opcast
from opcast.datagen.zoo import programs
from opcast.datagen.zoo.families import encoders
from opcast.datagen.zoo.registry import build
from opcast.datagen.zoo.workload import PyTree
from opcast.features.ir.mlir.bindings import write_bytecode
from opcast.predict.plan.program import read_planned
from opcast.predict.plan.space import Change

PARTS = 4
LAYERS: dict[str, object] = {"layers": 4, "dim": 1024, "heads": 16}
LLAMA: dict[str, object] = {"kv_heads": 8, "hidden": 2816, "seq": 1024}
#: Family and sizes; all layers are computed again, or the batch is cut into :data:`PARTS`.
PROGRAMS: dict[str, tuple[str, dict[str, object]]] = {
    "remat-llama": ("llama", {**LAYERS, **LLAMA, "batch": 8}),
    "remat-gpt": ("bert", {**LAYERS, "hidden": 4096, "seq": 512, "batch": 8}),
    "remat-vit": ("vit", {**LAYERS, "hidden": 4096, "batch": 32}),
    "micro-llama": ("llama", {**LAYERS, **LLAMA, "layers": 2, "batch": 16}),
    "micro-vit": ("vit", {**LAYERS, "layers": 2, "hidden": 4096, "batch": 64}),
    "micro-mlp": ("mlp", {"width": 4096, "batch": 4096}),
}


def main() -> None:
    """Print a line for each program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    parser.add_argument("--device", default="h100-sxm")
    parser.add_argument("--plain", action="store_true", help="The unchanged program, too.")
    given = parser.parse_args()
    for name in given.programs.split(","):
        family, settings = PROGRAMS[name]
        settings = {**settings, "dtype": "bf16", "mode": "train"}
        own = read_planned(build(family, **settings).mlir(platform="cuda"))
        made = {"plain": own} if given.plain else {}
        change = Change(0, PARTS)
        if name.startswith("remat"):
            assert own.layers is not None
            change = Change(own.layers.count)
        made["plan"] = own.changed(change)
        made["traced"] = read_planned(_traced(name, family, settings))
        line: dict[str, object] = {"program": name}
        for kind, program in made.items():
            found = opcast.predict(write_bytecode(program.source.module), device=given.device)
            line[f"{kind}_us"] = round(found.latency_us, 1)
            line[f"{kind}_mib"] = round(found.peak_memory_bytes / 2**20, 1)
        print(json.dumps(line), flush=True)


def _traced(name: str, family: str, settings: Mapping[str, object]) -> str:
    """StableHLO of the same program with JAX's own transformations, in place while it is traced."""
    if name.startswith("micro"):
        with patch.object(programs, "_train_step", _scanned):
            return build(family, **settings).mlir(platform="cuda")
    if family == "llama":
        return build(family, **settings, remat=True).mlir(platform="cuda")
    # The argument behind ``self`` and two arrays is a flag.
    block, flags = ("PostNormBlock", (3,)) if family == "bert" else ("Block", ())
    remat = nn.remat(getattr(encoders, block), static_argnums=flags)
    with patch.object(encoders, block, remat):
        return build(family, **settings).mlir(platform="cuda")


def _scanned(
    model: programs.Model, tx: optax.GradientTransformation, axis: str | None
) -> Callable[..., PyTree]:
    """The zoo's training step with its gradient in a loop over micro-batches."""

    def step(params: PyTree, variables: PyTree, opt_state: PyTree, batch: PyTree) -> PyTree:
        def objective(params: PyTree, part: PyTree) -> jax.Array:
            inputs = (part[name] for name in model.inputs)
            out, _ = model.module.apply({"params": params}, *inputs, train=True, mutable=[])
            assert model.loss is not None
            return model.loss(out, part)

        def add(total: PyTree, part: PyTree) -> tuple[PyTree, None]:
            own = jax.value_and_grad(objective)(params, part)
            return jax.tree.map(jnp.add, total, own), None

        split = jax.tree.map(
            lambda x: x.reshape(x.shape[0] // PARTS, PARTS, *x.shape[1:]).swapaxes(0, 1), batch
        )
        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        (loss, grads), _ = jax.lax.scan(add, zeros, split)
        grads = jax.tree.map(lambda g: g / PARTS, grads)
        steps, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, steps), variables, opt_state, loss / PARTS

    return step


if __name__ == "__main__":
    main()
