"""The zoo: sizes against published models, programs that run, and errors that help."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opcast.common.errors import OpcastError
from opcast.datagen import zoo
from opcast.datagen.zoo.families.decoders import selective_scan
from opcast.datagen.zoo.families.moe import MoE
from opcast.datagen.zoo.families.parts import Precision

from ...support.cases import every, later
from ...support.stablehlo import read_mlir

TRANSFORMER = "batch=2 layers=1 dim=32 heads=4 hidden=64"
DECODER = f"{TRANSFORMER} kv_heads=2 vocab=100"
TINY = {
    "mlp": "batch=8 features=16 width=32 layers=2",
    "resnet": "batch=2 depth=18 width=8 image=32 classes=10 stem=cifar",
    "convnext": "batch=2 size=atto image=32 classes=10",
    "efficientnet": "batch=2 size=mini image=32 classes=10",
    "vit": f"{TRANSFORMER} image=32 patch=8 classes=10",
    "bert": f"{TRANSFORMER} seq=16 vocab=100 masked=3 max_positions=32 dropout=0.1",
    "llama": f"{DECODER} seq=16",
    "llama_decode": f"{DECODER} cache=16",
    "moe": f"{DECODER} seq=16 experts=4",
    "unet": "batch=2 image=8 channels=16 levels=2 blocks=1 attention_levels=1 heads=2",
    "ssm": "batch=2 layers=1 dim=32 seq=16 vocab=100 state=4",
    "lstm": "batch=2 layers=1 dim=32 seq=8 vocab=100",
    "gnn": "batch=2 nodes=32 edges=64 features=8 dim=16 layers=1 conv=gat",
    "dlrm": "batch=8 tables=3 rows=50 dim=8 bottom=16 top=16",
    "convnet_1d": "batch=2 samples=800 channels=16 blocks=1 stem_layers=3",
}
TRAINED = [name for name in TINY if name != "llama_decode"]
FAST = {"mlp", "llama", "llama_decode", "lstm", "gnn", "dlrm"}
"""Families whose train steps lower and compile in a second or two."""
QUICK = {"xla_backend_optimization_level": "0"}
"""XLA options that halve the time to compile; tiny programs need no fast code."""


def tiny(name: str, **settings: Any) -> zoo.Workload:
    return zoo.build(name, **{**zoo.parse_settings(name, TINY[name].split()), **settings})


def run(workload: zoo.Workload, flat: list[Any]) -> Any:
    compiled = workload.lower().compile(compiler_options=QUICK)
    return compiled(*workload.unflatten(flat))


def marked(names: list[str], mark: pytest.MarkDecorator) -> list[Any]:
    """Names, with a mark on those of families that take long."""
    return [n if n in FAST else pytest.param(n, marks=mark) for n in names]


def finite(tree: Any) -> bool:
    # In NumPy, since JAX would compile a program for each shape.
    leaves = [np.asarray(leaf).astype(np.float32) for leaf in jax.tree.leaves(tree)]
    return all(bool(np.isfinite(leaf).all()) for leaf in leaves)


def test_tiny_settings_cover_every_family() -> None:
    assert set(TINY) == set(zoo.all_families())


def test_listing_families_imports_no_jax() -> None:
    code = (
        "import sys; from opcast.datagen import zoo; zoo.all_families(); zoo.suite('full');"
        "sys.exit(any(m in sys.modules for m in ('jax', 'flax', 'optax', 'pandas')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", every(2, TINY))
def test_forward_runs_on_its_arguments(name: str) -> None:
    """They are as many as main has, of the same shapes and dtypes; unused ones are not dropped."""
    workload = tiny(name)
    lowered = workload.lower()
    values = workload.arguments(3)
    expected = jax.tree.leaves(lowered.in_avals)
    assert [(v.shape, v.dtype) for v in values] == [(a.shape, a.dtype) for a in expected]
    again = workload.arguments(3)
    assert all(np.array_equal(a, b) for a, b in zip(values, again, strict=True))
    compiled = lowered.compile(compiler_options=QUICK)
    assert finite(compiled(*workload.unflatten(values)))


@pytest.mark.parametrize("name", marked(TRAINED, pytest.mark.exhaustive))
def test_train_step_runs_and_is_finite(name: str) -> None:
    workload = tiny(name, mode="train", optimizer="sgd")
    flat = workload.arguments(0)
    *updated, loss = run(workload, flat)
    assert loss.shape == () and finite((updated, loss))
    before = workload.unflatten(flat)[:3]
    assert jax.tree.structure(tuple(updated)) == jax.tree.structure(before)
    old, new = (jax.tree.leaves(tree[0]) for tree in (before, updated))
    assert any(np.any(np.asarray(a) != np.asarray(b)) for a, b in zip(old, new, strict=True))


@pytest.mark.parametrize("name", ["resnet", "unet"])
def test_deep_train_steps_lower(name: str) -> None:
    text = tiny(name, mode="train").mlir(debug_info=False)
    assert text.count("stablehlo.convolution(") > 30


def test_integer_arguments_stay_in_range() -> None:
    workload = tiny("gnn", mode="train")
    batch = workload.unflatten(workload.arguments(0))[3]
    for key, high in (("senders", 32), ("receivers", 32), ("labels", 16)):
        assert batch[key].min() >= 0 and batch[key].max() < high


@pytest.mark.parametrize("name", ["mlp", "llama", "gnn"])
def test_bf16_runs(name: str) -> None:
    workload = tiny(name, dtype="bf16")
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(workload.abstract_args[0]))
    out = run(workload, workload.arguments(0))
    assert out.dtype == jnp.bfloat16 and finite(out)
    master = jax.tree.leaves(tiny(name, dtype="bf16", mode="train").abstract_args[0])
    assert all(leaf.dtype == jnp.float32 for leaf in master)


@pytest.mark.parametrize("settings", [{}, later({"target": "value", "optimizer": "sgd"})])
def test_mlp_loss_decreases(settings: dict[str, Any]) -> None:
    workload = tiny("mlp", mode="train", **settings)
    compiled = workload.lower().compile()
    *state, batch = workload.unflatten(workload.arguments(0))
    losses = []
    for _ in range(20):
        *state, loss = compiled(*state, batch)
        losses.append(float(loss))
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("mlp", {"features": 3, "width": 5, "layers": 1, "outputs": 2}, 3 * 5 + 5 + 2 * 5 + 12),
        ("resnet", {"depth": 18}, 11_689_512),
        later("resnet", {"depth": 50}, 25_557_032),
        later("resnet", {"depth": 101}, 44_549_160),
        ("convnext", {"size": "tiny"}, 28_589_128),
        ("efficientnet", {"size": "b0"}, 5_288_548),
        ("vit", {}, 86_567_656),
        # 30522 words, 512 positions, 2 segments, norm; 12 layers; dense, norm and bias of the head
        (
            "bert",
            {},
            (30522 + 512 + 2 + 2) * 768 + 12 * 7_087_872 + 768 * 769 + 2 * 768 + 30522,
        ),
    ],
)
def test_sizes_of_published_models(name: str, settings: dict[str, Any], expected: int) -> None:
    workload = zoo.build(name, **settings)
    assert workload.n_params == expected
    leaves = jax.tree.leaves(workload.abstract_args)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)


@pytest.mark.parametrize("name", ["llama", "llama_decode"])
def test_llama_parameters_by_formula(name: str) -> None:
    vocab, dim, hidden, layers, kv = 1000, 64, 160, 3, 2 * 16
    block = 2 * dim * dim + 2 * dim * kv + 3 * dim * hidden + 2 * dim
    sizes = {"vocab": vocab, "dim": dim, "hidden": hidden, "layers": layers}
    workload = zoo.build(name, heads=4, kv_heads=2, **sizes)
    assert workload.n_params == 2 * vocab * dim + layers * block + dim


def test_llama_flops_by_formula() -> None:
    """2 FLOPs for each parameter in a matrix product and token, and two products of attention."""
    batch, seq, dim, layers, vocab = 2, 256, 512, 2, 4000
    sizes = {"batch": batch, "seq": seq, "dim": dim, "layers": layers, "vocab": vocab}
    workload = zoo.build("llama", heads=8, kv_heads=4, hidden=1024, **sizes)
    used = workload.n_params - vocab * dim  # the embedding is looked up
    expected = 2 * used * batch * seq + layers * 2 * (2 * batch * seq * seq * dim)
    flops = workload.lower().cost_analysis()["flops"]
    assert flops == pytest.approx(expected, rel=0.02)


def test_scanned_layers_have_the_same_parameters_in_a_smaller_program() -> None:
    unrolled = zoo.build("llama", layers=6, dim=64)
    scanned = zoo.build("llama", layers=6, dim=64, scan_layers=True, remat=True)
    assert scanned.n_params == unrolled.n_params
    assert len(scanned.mlir()) < 0.5 * len(unrolled.mlir())
    assert "stablehlo.while" in scanned.mlir()
    kernel = scanned.unflatten(scanned.arguments(0))[0]["stacked"]["attention"]["query"]["kernel"]
    assert kernel.std() == pytest.approx(64**-0.5, rel=0.05)


def test_decoding_step_by_step_equals_the_whole_sequence() -> None:
    whole, step = tiny("llama", seq=5), tiny("llama_decode", cache=5, greedy=False)
    params, _, batch = whole.unflatten(whole.arguments(0))
    logits = jax.jit(whole.function)(params, {}, batch)
    _, _, caches, _ = step.unflatten(step.arguments(1))
    jitted = jax.jit(step.function)
    for position in range(5):
        one = {"ids": batch["ids"][:, position : position + 1], "position": np.int32(position)}
        out, caches = jitted(params, {}, caches, one)
        np.testing.assert_allclose(out[:, 0], logits[:, position], rtol=1e-3, atol=1e-4)


def test_moe_dispatches_agree_when_no_token_is_dropped() -> None:
    x = jnp.array(np.random.default_rng(0).standard_normal((2, 8, 16)), jnp.float32)
    f32 = Precision(jnp.float32, jnp.float32)
    layers = [MoE(4, 2, 32, 4.0, dispatch, f32) for dispatch in ("dense", "einsum", "scatter")]
    variables = jax.jit(layers[0].init)(jax.random.key(0), x)
    dense, einsum, scatter = (jax.jit(layer.apply)(variables, x)[0] for layer in layers)
    np.testing.assert_allclose(einsum, dense, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(scatter, dense, rtol=1e-4, atol=1e-5)


def test_selective_scan_equals_a_loop() -> None:
    rng = np.random.default_rng(0)
    x, delta = rng.standard_normal((2, 1, 6, 3)).astype(np.float32)
    a = -rng.random((3, 4), dtype=np.float32)
    b, c = rng.standard_normal((2, 1, 6, 4)).astype(np.float32)
    delta = np.abs(delta)
    state = np.zeros((3, 4), np.float32)
    expected = []
    for t in range(6):
        state = np.exp(delta[0, t, :, None] * a) * state
        state = state + (delta * x)[0, t, :, None] * b[0, t]
        expected.append(state @ c[0, t])
    out = jax.jit(selective_scan)(x, delta, a, b, c)
    np.testing.assert_allclose(out[0], np.stack(expected), rtol=1e-4, atol=1e-5)


def test_data_parallel_step_reduces_every_gradient_and_statistic() -> None:
    workload = tiny("resnet", mode="train", data_parallel=2)
    text = workload.mlir(debug_info=False)
    params, stats, _, _ = workload.abstract_args
    reduced = len(jax.tree.leaves(params)) + len(jax.tree.leaves(stats)) + 1  # and the loss
    assert text.count('"stablehlo.all_reduce"') == reduced
    assert "num_partitions = 2" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", every(2, TINY))
def test_every_family_lowers_data_parallel(name: str) -> None:
    assert 'axes = [{name = "data", size = 2' in tiny(name, data_parallel=2).mlir()


def test_resnet50_step_for_four_devices() -> None:
    workload = zoo.build("resnet", depth=50, batch=8, mode="train", data_parallel=4)
    text = workload.mlir(debug_info=False)
    # 161 parameters, mean and variance of 53 batch norms, the loss
    assert text.count('"stablehlo.all_reduce"') == 161 + 2 * 53 + 1
    # forward of 53, gradients of 53 kernels and of 52 inputs: the image needs none
    assert text.count("stablehlo.convolution(") == 53 + 53 + 52


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("nosuch", {}, "families: bert"),
        ("mlp", {"colour": 1}, "parameters: batch, mode"),
        ("mlp", {"mode": "backward"}, "allowed: forward, train"),
        ("mlp", {"batch": "many"}, "'many' is not a int"),
        ("mlp", {"batch": True}, "True is not a int"),
        ("mlp", {"batch": float("inf")}, "inf is not a int"),
        ("mlp", {"batch": None}, "None is not a setting"),
        ("mlp", {"batch": 0}, "at least 1"),
        ("bert", {"dropout": "nan"}, "out of range"),
        ("bert", {"dropout": 1.0}, "dropout must be under 1"),
        ("bert", {"seq": 513}, "raise max_positions"),
        ("llama", {"scan_layers": "maybe"}, "'maybe' is not a bool"),
        ("llama", {"heads": 3}, "choose heads that divide dim"),
        ("llama", {"kv_heads": 3}, "choose kv_heads that divide heads"),
        ("llama_decode", {"mode": "train"}, "allowed: forward"),
        ("moe", {"top_k": 9}, "lower top_k"),
        ("unet", {"image": 30}, "use a multiple of 8"),
        ("vit", {"image": 100}, "choose a patch that divides image"),
        ("mlp", {"batch": 7, "data_parallel": 4}, "multiple of data_parallel"),
    ],
)
def test_bad_settings_say_what_is_allowed(name: str, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(OpcastError) as error:
        zoo.build(name, **settings)
    assert says in str(error.value)


def test_settings_are_parsed_to_the_type_of_the_default() -> None:
    parsed = zoo.parse_settings("llama", ["batch=8", "scan_layers=yes", "dtype=bf16"])
    assert parsed == {"batch": 8, "scan_layers": True, "dtype": "bf16"}
    assert zoo.parse_settings("bert", ["dropout=0.1"]) == {"dropout": 0.1}
    with pytest.raises(OpcastError, match="batch is given twice"):
        zoo.parse_settings("llama", ["batch=3,batch=4"])
    with pytest.raises(OpcastError, match="key=value"):
        zoo.parse_settings("llama", ["batch"])


def test_names_tell_what_matters() -> None:
    assert zoo.workload_name("resnet", {"mode": "train"}) == "resnet-depth=50-batch=8-train"
    name = zoo.build("mlp", width=64, dtype="bf16", optimizer="sgd").name
    assert name == "mlp-layers=4-width=64-batch=128-optimizer=sgd-bf16-forward"


@pytest.mark.parametrize(
    "settings", [{"mode": "train"}, later({"mode": "train", "data_parallel": 4})]
)
def test_exports_are_readable(tmp_path: Path, settings: dict[str, Any]) -> None:
    ops = []
    for kind in ("text", "bytecode", "portable"):
        data = zoo.export("mlp", settings, tmp_path / kind, kind).read_bytes()
        program = read_mlir(data.decode() if kind == "text" else data, kind)
        ops.append(sum(op.opcode == "dot" for c in program.computations.values() for op in c.ops))
    # 5 layers forward, gradients of 5 kernels and of 4 inputs
    assert ops == [5 + 5 + 4] * 3
    path = zoo.export("mlp", settings, tmp_path / "exported", "jax-export")
    exported = jax.export.deserialize(bytearray(path.read_bytes()))
    assert exported.nr_devices == settings.get("data_parallel", 1)
    assert len(exported.in_avals) == len(zoo.build("mlp", **settings).draws)
    with pytest.raises(OpcastError, match="unknown format"):
        zoo.export("mlp", settings, tmp_path / "x", "onnx")


def test_suites_are_distinct_programs_of_every_family() -> None:
    standard = zoo.suite("standard")
    names = [zoo.workload_name(*item) for item in standard]
    assert len(set(names)) == len(names) >= 100
    for family in zoo.all_families():
        modes = [zoo.resolve(*item)["mode"] for item in standard if item[0] == family]
        assert len(modes) >= 8
        assert "train" in modes or family == "llama_decode"
    assert len({family for family, _ in zoo.suite("quick")}) >= 6
    assert zoo.suite("full")[: len(zoo.size_grid("mlp"))] == standard[: len(zoo.size_grid("mlp"))]
    with pytest.raises(OpcastError, match="unknown suite"):
        zoo.suite("huge")


def test_document_lists_every_family_as_it_is() -> None:
    document = Path(__file__).parents[3] / "docs" / "zoo.md"
    assert zoo.describe() in document.read_text()


def test_settings_may_have_the_names_of_simulate():
    given = zoo.parse_settings("llama", ["d_model=512,d_ff=1024", "n_layers=2"])
    assert given == {"dim": 512, "hidden": 1024, "layers": 2}
    with pytest.raises(OpcastError, match="'d_model'"):
        zoo.parse_settings("resnet", ["d_model=512"])
