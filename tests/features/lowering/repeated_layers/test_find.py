"""Programs with fewer layers: the same as the framework writes for a model with fewer layers."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from opcast.common.errors import CompilerError
from opcast.datagen.zoo.registry import build
from opcast.features.devices.catalogue import find_device
from opcast.features.ir.mlir.bindings import tag_locations, write_bytecode
from opcast.features.ir.reader import SourceProgram, read_program
from opcast.features.kernels.kernel import LoweredProgram
from opcast.features.lowering.lower import lower
from opcast.features.lowering.repeated_layers.lower import extrapolate, find_repeats, shorten
from opcast.features.lowering.repeated_layers.mlir_excise import main_function, read_table
from opcast.features.lowering.repeated_layers.runs import OpTable, Run, excise
from opcast.features.lowering.target_compiler.install import find_compiler
from opcast.features.lowering.target_compiler.process import CompileSettings

from ....support.cases import later
from ....support.costs import program_cost

WIDTH, BATCH = 64, 32


def forward(params, x):
    """Layers by name, as frameworks keep them: sorted, layer_10 comes before layer_2."""
    for i in range(len(params)):
        p = params[f"layer_{i}"]
        x = x + jax.nn.silu(x @ p["up"]) @ p["down"]
        x = x - x.mean(-1, keepdims=True)
    return x


def train(params, moments, x):
    loss, grads = jax.value_and_grad(lambda p: (forward(p, x) ** 2).mean())(params)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g / (1 + norm), grads)
    moments = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments, grads)
    params = jax.tree.map(lambda p, m: p - 0.01 * m, params, moments)
    return params, moments, loss


def params_of(layers: int):
    up = jax.ShapeDtypeStruct((WIDTH, 2 * WIDTH), jnp.float32)
    down = jax.ShapeDtypeStruct((2 * WIDTH, WIDTH), jnp.float32)
    return {f"layer_{i}": {"up": up, "down": down} for i in range(layers)}


def program(layers: int, step=train) -> SourceProgram:
    x = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    params = params_of(layers)
    if step is forward:
        return read_program(jax.jit(forward).lower(params, x).as_text())
    jitted = jax.jit(train, donate_argnums=(0, 1))
    return read_program(jitted.lower(params, params, x).as_text(debug_info=True))


def short(source: SourceProgram, number: int) -> SourceProgram:
    found = shorten(source.module, tag_locations(source.module), 7)
    assert found is not None
    return read_program(write_bytecode(found.modules[number]))


@pytest.mark.parametrize("step", [forward, train])
@pytest.mark.parametrize("layers", [8, 13])
def test_a_shortened_program_is_that_of_a_smaller_model(step, layers: int) -> None:
    source = program(layers, step)
    for number, kept in enumerate((4, 2)):
        mine, theirs = short(source, number), program(kept, step)
        cost, wanted = program_cost(mine.program), program_cost(theirs.program)
        assert (cost.flops, cost.bytes) == (wanted.flops, wanted.bytes)
        opcodes = [
            Counter(op.opcode for op in s.program.entry_computation.ops) for s in (mine, theirs)
        ]
        assert opcodes[0] == opcodes[1]
        # Donated arguments still find the results that take their place.
        assert sorted(mine.program.aliases) == sorted(theirs.program.aliases)


@pytest.mark.slow
def test_shortened_programs_compute_what_the_smaller_model_does() -> None:
    """Run on the CPU with equal layers: nothing is wired to a wrong place."""
    from opcast.features.lowering.xla import compile_native

    source = program(13)
    key = jax.random.key(0)
    one = {
        "up": jax.random.normal(key, (WIDTH, 2 * WIDTH)) / 8,
        "down": jax.random.normal(key, (2 * WIDTH, WIDTH)) / 11,
    }
    x = jax.random.normal(key, (BATCH, WIDTH))
    for number, kept in enumerate((4, 2)):
        params = {f"layer_{i}": one for i in range(kept)}
        moments = jax.tree.map(jnp.zeros_like, params)
        expected = jax.tree.leaves(train(params, moments, x))
        given = [jnp.array(a) for a in jax.tree.leaves((params, moments, x))]
        found = compile_native(short(source, number)).run(given)
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert jnp.allclose(jnp.asarray(a), b, rtol=1e-4, atol=1e-6)


def totals(lowered: LoweredProgram) -> tuple[float, float]:
    kernels = [k for k in lowered.kernels if k.takes_time]
    return (
        sum(k.flops * k.multiplicity for k in kernels),
        sum(k.bytes * k.multiplicity for k in kernels),
    )


@pytest.mark.slow
def test_extrapolated_kernels_are_those_of_the_whole() -> None:
    source = program(13)
    full, half = (lower(short(source, number), cache=False) for number in (0, 1))
    found, whole = extrapolate(full, half, 13), lower(source, cache=False)
    assert totals(found) == pytest.approx(totals(whole), rel=0.01)
    gemms = [sum(k.multiplicity for k in p.kernels if k.kind == "gemm") for p in (found, whole)]
    assert gemms[0] == gemms[1]
    assert found.peak_memory_bytes == pytest.approx(whole.peak_memory_bytes, rel=0.02)
    assert any("13 equal runs of ops" in note for note in found.notes)


def test_programs_without_equal_layers_are_left_alone() -> None:
    def different(x):
        for i in range(20):
            x = jnp.tanh(x @ jnp.ones((x.shape[-1], 8 + i)))
        return x

    x = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    source = read_program(jax.jit(different).lower(x).as_text())
    assert shorten(source.module, tag_locations(source.module), 7) is None
    few = program(5)
    assert shorten(few.module, tag_locations(few.module), 7) is None


def capturing(layers: int) -> SourceProgram:
    """Layers of a loop and an addition: the loop reads the layer before in its body alone."""
    layer = """
  %z{n} = stablehlo.constant dense<0.0> : tensor<8xf32>
  %i{n} = stablehlo.constant dense<0> : tensor<i32>
  %w{n}:2 = stablehlo.while(%k = %i{n}, %v = %z{n}) : tensor<i32>, tensor<8xf32>
    cond {{
      %c = stablehlo.constant dense<3> : tensor<i32>
      %l = stablehlo.compare LT, %k, %c : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %l : tensor<i1>
    }} do {{
      %o = stablehlo.constant dense<1> : tensor<i32>
      %m = stablehlo.add %k, %o : tensor<i32>
      %s = stablehlo.add %v, %x{b} : tensor<8xf32>
      stablehlo.return %m, %s : tensor<i32>, tensor<8xf32>
    }}
  %x{n} = stablehlo.multiply %w{n}#1, %p{n} : tensor<8xf32>"""
    names = ["x0", *(f"p{n}" for n in range(1, layers + 1))]
    args = ", ".join(f"%{name} : tensor<8xf32>" for name in names)
    body = "".join(layer.format(n=n, b=n - 1) for n in range(1, layers + 1))
    return read_program(
        f"func.func public @main({args}) -> tensor<8xf32> {{{body}\n"
        f"  return %x{layers} : tensor<8xf32>\n}}"
    )


@pytest.mark.parametrize("family", ["llama", later("bert"), later("vit")])
def test_layers_of_real_models_are_found(family: str) -> None:
    """Also where squares of gradients repeat with other periods, and passes begin in a layer."""
    sizes = {"layers": 12, "dim": 64, "heads": 4, "hidden": 128, "batch": 4}
    sizes |= {"image": 32, "patch": 16} if family == "vit" else {"seq": 32, "vocab": 96}
    sizes |= {"kv_heads": 2} if family == "llama" else {}
    source = read_program(build(family, mode="train", **sizes).mlir(platform="cuda"))
    main = main_function(source.module)
    assert main is not None
    table = read_table(main)
    found = find_repeats(table)
    assert found is not None and found.layers == 12
    layers = sum(run.stop - run.start for run in found.runs)
    assert layers > 0.9 * len(table.reads)


def test_values_that_regions_capture_are_read() -> None:
    source = capturing(14)
    main = main_function(source.module)
    assert main is not None
    table = read_table(main)
    # Ops 0 to 3 of a layer: two constants, the loop, the product. The loop of the second layer
    # reads its constants, 5 and 4, and in its body the product of the first layer, 3.
    assert list(table.reads[6]) == [(5, 0), (4, 0), (3, 0)]
    for number, kept in enumerate((4, 2)):
        cost, wanted = (program_cost(s.program) for s in (short(source, number), capturing(kept)))
        # A layer: three times 8 additions, one of the counter and a comparison; 8 products.
        assert cost.flops == kept * (3 * (8 + 1 + 1) + 8)
        assert cost.bytes == wanted.bytes


def test_layers_that_read_from_far_away_are_left_alone() -> None:
    # Eight blocks of three ops; a later op reads the middle of the fifth block.
    signatures = [*"abc" * 8, "end"]
    reads = [[(i - 1, 0)] if i else [] for i in range(24)]
    chained = OpTable(signatures, [*reads, [(23, 0)]])
    repeats = find_repeats(chained)
    assert repeats is not None and repeats.runs == (Run(0, 3, 8),)
    excision = excise(chained, repeats, 4)
    # Blocks 2 to 5 go, so that op 18 reads op 5 instead of op 17.
    assert excision is not None and excision.removed == frozenset(range(6, 18))
    assert excision.rewired == {(18, 0): (5, 0)}
    far = OpTable(signatures, [*reads, [(13, 0)]])
    assert find_repeats(far) is None and excise(far, repeats, 4) is None


def test_signatures_see_types_attributes_and_bodies() -> None:
    text = """
func.func @main(%x: tensor<8xf32>, %i: tensor<f32>) -> tensor<f32> {
  %0 = stablehlo.slice %x [0:4] : (tensor<8xf32>) -> tensor<4xf32>
  %1 = stablehlo.slice %x [4:8] : (tensor<8xf32>) -> tensor<4xf32>
  %2 = stablehlo.reduce(%0 init: %i) applies stablehlo.add across dimensions = [0]
    : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
  %3 = stablehlo.reduce(%1 init: %i) applies stablehlo.add across dimensions = [0]
    : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
  %4 = stablehlo.reduce(%1 init: %i) applies stablehlo.maximum across dimensions = [0]
    : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
  return %4 : tensor<f32>
}
"""
    source = read_program(text)
    table = read_table(main_function(source.module))
    first, second, third, fourth, fifth = table.signatures
    assert first != second and third == fourth != fifth
    assert table.reads == [[(-1, 0)], [(-1, 0)], [(0, 0), (-1, 1)], [(1, 0), (-1, 1)],
                           [(1, 0), (-1, 1)]]  # fmt: skip


@pytest.mark.slow
@pytest.mark.exhaustive  # two compilations
def test_real_compiler_by_layers_and_whole() -> None:
    try:
        find_compiler("gpu")
    except CompilerError as error:
        pytest.skip(str(error))
    device = find_device("a100-sxm-80gb")
    source = program(14)
    found = lower(source, device=device, cache=False)
    whole = lower(source, device=device, cache=False, settings=CompileSettings(repeats=False))
    assert len(found.kernels) < len(whole.kernels) / 2
    assert totals(found) == pytest.approx(totals(whole), rel=0.02)
    assert found.peak_memory_bytes == pytest.approx(whole.peak_memory_bytes, rel=0.05)
    assert any("14 equal runs of ops" in note for note in found.notes) and whole.notes == []
