"""``opcast.predict`` and ``opcast.save``: from a function to an answer or a file in one call."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import opcast
from opcast.common.errors import DeviceError, ModelError, ProgramError
from opcast.features.devices.device import DeviceSpec
from opcast.features.ir.reader import read_program
from opcast.simulate.clusters.catalogue import find_cluster

CHIP = """
name: my-chip
base: h100-sxm
hbm_bandwidth_gbps: 5000
"""
X = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
tx = optax.adamw(1e-3)


def step(params, state, key, x, *, train=False):
    """A step with an optimiser's state, a key and a keyword that chooses."""

    def loss(p):
        y = jnp.tanh(x @ p["w"])
        return jnp.mean(y * jax.random.bernoulli(key, 0.9, y.shape) if train else y)

    value, grads = jax.value_and_grad(loss)(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


@pytest.fixture(scope="module")
def arguments():
    params = {"w": jax.ShapeDtypeStruct((512, 512), jnp.float32)}
    key = jax.eval_shape(lambda: jax.random.key(0))
    return params, jax.eval_shape(tx.init, params), key, X


def predicted(*args, **options):
    return opcast.predict(*args, lowering="fused", model="roofline", **options)


def test_a_function_is_one_call_away(arguments):
    here = predicted(step, *arguments, train=True, device="h100-sxm")
    assert 0 < here.lo_us <= here.latency_us <= here.hi_us and here.device == "h100-sxm"
    # The same as lowered beside the device, where threefry is no loop.
    there = jax.jit(step, static_argnames="train").trace(*arguments, train=True)
    beside = predicted(there.lower(lowering_platforms=("cuda",)), device="h100-sxm")
    assert beside.latency_us == pytest.approx(here.latency_us, rel=1e-9)
    assert not any(note.startswith("warning") for note in (*here.notes, *beside.notes))


def test_where_you_sit_is_said_if_it_matters(arguments):
    lowered = jax.jit(step, static_argnames="train").lower(*arguments, train=True)
    here = predicted(lowered, device="h100-sxm")
    (note,) = [n for n in here.notes if n.startswith("warning")]
    assert "lowered for cpu, but h100-sxm needs cuda" in note
    assert "opcast.save(function, *arguments, path=…, device='h100-sxm')" in note


def test_the_module_is_the_function_too():
    import opcast.predict.cluster

    assert opcast.predict.cluster is not None and callable(opcast.predict)
    assert "predict" in dir(opcast) and "save" in dir(opcast)


def test_devices_by_name_file_and_description(tmp_path: Path):
    path = tmp_path / "chip.yaml"
    path.write_text(CHIP)
    spec = DeviceSpec.from_file(path)
    assert (spec.name, spec.bandwidth) == ("my-chip", 5e12)
    json = tmp_path / "chip.json"
    json.write_text(spec.to_json())
    assert DeviceSpec.from_file(json) == spec
    found = {predicted(jnp.tanh, X, device=d).latency_us for d in (path, str(path), json, spec)}
    assert len(found) == 1


def test_clusters_by_name_file_and_description():
    mesh = AbstractMesh((4,), ("x",))
    x = jax.ShapeDtypeStruct((4, 2**18), jnp.float32, sharding=NamedSharding(mesh, P("x")))

    # An all-reduce of 1 MiB over four devices that need not be here.
    @jax.jit
    def total(x):
        parts = {"mesh": mesh, "in_specs": P("x"), "out_specs": P(), "check_vma": False}
        return jax.shard_map(lambda x: jax.lax.psum(x, "x"), **parts)(x)

    by_name = predicted(total, x, cluster="h100-sxm-x4")
    by_description = predicted(total, x, cluster=find_cluster("h100-sxm-x4"))
    assert by_name.latency_us == by_description.latency_us
    assert 0 < by_name.lo_us <= by_name.latency_us <= by_name.hi_us
    assert by_name.by_collective()["all_reduce"][:2] == (1, 2**20)


def test_a_place_must_be_one():
    with pytest.raises(DeviceError, match="both a device and a cluster"):
        predicted(jnp.tanh, X, device="h100-sxm", cluster="h100-sxm-x4")
    with pytest.raises(ProgramError, match="misspelt"):
        predicted("model.mlir", devcie="h100-sxm")


@pytest.mark.parametrize("name", ["step.mlir", "step.mlirbc"])
def test_saved_functions_keep_lines_donation_and_platform(tmp_path: Path, arguments, name):
    jitted = jax.jit(step, static_argnames="train", donate_argnums=(0, 1))
    path = opcast.save(jitted, *arguments, train=True, path=tmp_path / name, device="tpu-v5e")
    source = read_program(path)
    assert source.platforms == ("tpu",)
    ops = [op for c in source.program.computations.values() for op in c.ops]
    (product,) = [op for op in ops if op.opcode == "dot" and op.type.shape == (512, 512)][:1]
    line = 1 + Path(__file__).read_text().splitlines().index('        y = jnp.tanh(x @ p["w"])')
    assert (Path(product.source.file).name, product.source.line) == (Path(__file__).name, line)
    # Parameters and both moments of AdamW, and its count.
    assert len(source.program.aliases) == 4
    direct = predicted(jitted, *arguments, train=True, device="tpu-v5e")
    assert predicted(path, device="tpu-v5e").latency_us == pytest.approx(direct.latency_us)
    assert any("lowered for tpu" in n for n in predicted(path, device="h100-sxm").notes)


def test_a_device_that_only_models_know_can_be_saved_for(tmp_path: Path):
    path = opcast.save(jnp.tanh, X, path=tmp_path / "tanh.mlir", device="cpu-amd-epyc-2c")
    assert read_program(path).platforms == ("cpu",)


def test_saving_a_file_is_refused(tmp_path: Path):
    with pytest.raises(ProgramError, match="only a function can be saved"):
        opcast.save("model.mlir", path=tmp_path / "x")


def test_lowered_programs_take_names_of_devices():
    lowered = opcast.lower(read_program(jnp.tanh, jnp.ones((8, 8))), "op", device="l4")
    p = opcast.load("roofline").predict_lowered(lowered, "l4")
    assert p.device == "l4" and np.isfinite(p.latency_us)


def test_steps_take_names_of_clusters():
    from opcast.predict.cluster.step import StepPredictor

    assert StepPredictor("h100-sxm-x4", None, "h200-sxm").spec.name == "h200-sxm"


def test_a_machine_that_was_never_measured_is_not_taken_for_another(tmp_path, monkeypatch):
    monkeypatch.setenv("OPCAST_CACHE", str(tmp_path / "home"))
    for device in ({}, {"device": "local"}):
        with pytest.raises(DeviceError, match="has not been measured") as told:
            predicted(jnp.tanh, X, **device)
        assert "opcast device --save" in told.value.hint
    # Saving needs its platform alone.
    path = opcast.save(jnp.tanh, X, path=tmp_path / "tanh.mlir")
    assert read_program(path).platforms == ("cpu",)


def test_modules_and_exports_of_pytorch_are_programs():
    torch = pytest.importorskip("torch")
    module, x = torch.nn.Linear(64, 32, bias=False), torch.ones(8, 64)
    export = torch.export.export(module, (x,))
    whole = predicted(module, x, device="h100-sxm")
    (product,) = [k for k in whole.kernels if k.kind == "gemm"]
    assert product.flops == 2 * 8 * 64 * 32
    assert predicted(export, device="h100-sxm").latency_us == whole.latency_us
    with pytest.raises(ProgramError, match="needs its example inputs"):
        predicted(module, device="h100-sxm")
    # An export takes inputs, too, of the sizes that it has.
    assert predicted(export, x, device="h100-sxm").latency_us == whole.latency_us
    with pytest.raises(ProgramError, match="does not take these inputs"):
        predicted(export, torch.ones(9, 64), device="h100-sxm")


def test_what_is_no_name_is_refused_in_words() -> None:
    program = (
        "module { func.func @main(%a: tensor<8xf32>) -> tensor<8xf32> {return %a: tensor<8xf32>}}"
    )
    operator = "linear m=8 n=8 k=8 dtype=bf16"
    for device in 3, b"l4", {"a": 1}, ["l4", 3]:
        with pytest.raises(DeviceError, match=r"a device is given by (int|bytes|dict) "):
            opcast.predict(program, device=device, lowering="op")
    with pytest.raises(ModelError, match="a model is given by int 3"):
        opcast.load(3)
    with pytest.raises(ProgramError, match="m is given twice"):
        opcast.latency(f"{operator} m=9", device="l4")
