"""Lowering by the local compiler and op by op: provenance, memory, caching, errors."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opcast.common.errors import LoweringError, ProgramError
from opcast.features.devices.device import DeviceSpec, MemoryLevel, local_device_name
from opcast.features.ir.reader import read_program
from opcast.features.lowering.cache import LoweringCache
from opcast.features.lowering.lower import lower
from opcast.features.lowering.xla import compile_native

from ...support.costs import program_cost

F32 = jnp.float32


def spec(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def product(x, w):
    y = x @ w  # the line that a kernel must point to
    return jnp.tanh(y) + 1.0


PRODUCT_LINE = product.__code__.co_firstlineno + 1
ARGS = (spec(64, 128), spec(128, 32))


def lowered_text(f, *args, **options):
    return jax.jit(f, **options).lower(*args).as_text(debug_info=True)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("OPCAST_CACHE", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("lowering", ["xla", "op"])
def test_a_product_points_to_its_op_and_line(lowering):
    found = lower(lowered_text(product, *ARGS), lowering)
    gemm = next(k for k in found.kernels if k.kind == "gemm")
    source = gemm.sources[0]
    assert source.op == "stablehlo.dot_general"
    assert source.file.endswith("test_lower.py")
    assert source.line == PRODUCT_LINE
    assert source.index > 0
    assert gemm.flops == 2 * 64 * 128 * 32
    assert found.lowering == lowering


def test_xla_lowering_states_target_compiler_and_memory():
    text = lowered_text(product, *ARGS)
    found = lower(text)
    stats = jax.jit(product).lower(*ARGS).compile().memory_analysis()
    expected = (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        + stats.temp_size_in_bytes
        - stats.alias_size_in_bytes
    )
    assert found.memory_source == "compiler"
    assert found.peak_memory_bytes == expected
    assert found.target == local_device_name()
    assert "xla" in found.compiler and found.hlo.startswith("HloModule")
    assert found.notes == []


def test_merged_and_called_ops_are_all_listed():
    def f(x):
        return jax.nn.silu(x * 2.0) + jnp.tanh(x)

    found = lower(lowered_text(f, spec(256, 256)))
    names = {s.op for k in found.kernels for s in k.sources}
    assert {"stablehlo.multiply", "stablehlo.tanh", "stablehlo.add"} <= names


def test_op_lowering_multiplies_loops_and_skips_regions():
    def f(x, w):
        def body(c, _):
            return jnp.tanh(c @ w), c.sum()

        return jax.lax.scan(body, x, None, length=7)

    source = read_program(lowered_text(f, spec(64, 64), spec(64, 64)))
    found = lower(source, "op")
    gemm = [k for k in found.kernels if k.kind == "gemm"]
    assert len(gemm) == 1 and gemm[0].multiplicity == 7
    assert found.memory_source == "liveness"
    # The arguments, and the carry's and results' own buffers on top.
    assert found.peak_memory_bytes >= 3 * 64 * 64 * 4
    # One kernel for the reduction, none for the addition within it.
    sums = [k for k in found.kernels if k.kind == "reduce"]
    assert len(sums) == 1
    total = sum(k.flops * k.multiplicity for k in found.kernels)
    assert total == pytest.approx(program_cost(source.program).flops, rel=0.01)


def test_op_lowering_inlines_functions_at_every_call():
    text = """
func.func @main(%x: tensor<8x8xf32>) -> tensor<8x8xf32> {
  %0 = call @twice(%x) : (tensor<8x8xf32>) -> tensor<8x8xf32>
  %1 = call @twice(%0) : (tensor<8x8xf32>) -> tensor<8x8xf32>
  return %1 : tensor<8x8xf32>
}
func.func private @twice(%x: tensor<8x8xf32>) -> tensor<8x8xf32> {
  %0 = stablehlo.add %x, %x : tensor<8x8xf32>
  return %0 : tensor<8x8xf32>
}
"""
    found = lower(text, "op")
    assert [k.opcode for k in found.kernels] == ["add", "add"]
    assert found.kernels[0].hash == found.kernels[1].hash
    assert found.kernels[1].operands == (0,)
    # XLA counts an operand as often as it is read: two reads, one write.
    assert found.kernels[0].bytes == 3 * 8 * 8 * 4


def counter_loop(n, x):
    return jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, jnp.sin(c[1]) * 2), (0, x))


@pytest.mark.parametrize("lowering", ["xla", "op"])
def test_trip_counts_of_the_user_fill_unknown_loops(lowering):
    text = lowered_text(counter_loop, spec(dtype=jnp.int32), spec(64, 64))
    unknown = lower(text, lowering)
    assert len(unknown.notes) == 1 and "--trip-count" in unknown.notes[0]
    known = lower(text, lowering, trip_counts=11)
    assert known.notes == []
    assert next(k for k in known.kernels if k.kind == "control").multiplicity == 11
    place = unknown.notes[0].split("--trip-count ")[1].removesuffix("=N")
    named = lower(text, lowering, trip_counts={place: 5})
    assert next(k for k in named.kernels if k.kind == "control").multiplicity == 5


def test_counts_that_only_the_reader_knows_reach_the_compiled_loop():
    text = lowered_text(counter_loop, spec(dtype=jnp.int32), spec(64, 64))
    source = read_program(text, trip_counts=13)
    assert next(k for k in lower(source).kernels if k.kind == "control").multiplicity == 13


def test_trip_counts_can_be_given_with_a_program_that_was_read_before():
    source = read_program(lowered_text(counter_loop, spec(dtype=jnp.int32), spec(64, 64)))
    for count in (3, 8):
        for lowering in ("xla", "op"):
            found = lower(source, lowering, trip_counts=count)
            assert next(k for k in found.kernels if k.kind == "control").multiplicity == count
    assert len(lower(source).notes) == 1


def test_rewritten_convolutions_keep_their_op():
    """The CPU compiler turns weight gradients round and drops their names."""

    def conv(x, k):
        return jax.lax.conv_general_dilated(
            x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def step(k1, k2, x):
        def loss(k1, k2):
            return (conv(jax.nn.relu(conv(x, k1)), k2) ** 2).mean()

        grads = jax.grad(loss, argnums=(0, 1))(k1, k2)
        return k1 - 0.1 * grads[0], k2 - 0.1 * grads[1]

    text = lowered_text(step, spec(3, 3, 16, 32), spec(3, 3, 32, 64), spec(4, 16, 16, 16))
    convs = [k for k in lower(text).kernels if k.kind == "conv"]
    flops = {k.sources[0].index: k.flops for k in lower(text, "op").kernels if k.kind == "conv"}
    assert len(convs) == len(flops) == 5  # 2 forward, 2 for the weights, 1 for the activation
    for kernel in convs:
        assert kernel.sources[0].op == "stablehlo.convolution"
        assert kernel.flops == pytest.approx(flops.pop(kernel.sources[0].index), rel=0.02)
    assert not flops, "two kernels claim the same op"


def test_scheduled_hlo_is_taken_as_it_is():
    hlo = jax.jit(product).lower(*ARGS).compile().as_text()
    found = lower(hlo)
    assert found.hlo == hlo and found.memory_source == "liveness"
    assert {k.kind for k in found.kernels} >= {"gemm"}
    assert any(s.line == PRODUCT_LINE for k in found.kernels for s in k.sources)


def test_unoptimised_hlo_is_compiled():
    hlo = jax.jit(product).lower(*ARGS).as_text(dialect="hlo")
    assert "is_scheduled" not in hlo
    found = lower(hlo)
    assert "is_scheduled=true" in found.hlo
    assert next(k for k in found.kernels if k.kind == "gemm").flops == 2 * 64 * 128 * 32


def test_warm_lowering_does_not_compile(monkeypatch, tmp_path):
    from opcast.features.ir import jax_compat as _jax_compat

    cache = LoweringCache(tmp_path / "cache")
    text = lowered_text(product, *ARGS)
    first = lower(text, cache=cache)

    def refuse(*_):
        raise AssertionError("compiled again")

    monkeypatch.setattr(_jax_compat, "compile_module", refuse)
    again = lower(text, cache=cache)
    assert [k.hash for k in again.kernels] == [k.hash for k in first.kernels]
    assert [k.sources for k in again.kernels] == [k.sources for k in first.kernels]
    assert again.peak_memory_bytes == first.peak_memory_bytes
    assert again.compiler == first.compiler and again.hlo == first.hlo
    fields = ("name", "kind", "operands", "multiplicity", "scope", "flops", "bytes")
    for kernel, before in zip(again.kernels, first.kernels, strict=True):
        assert [getattr(kernel, f) for f in fields] == [getattr(before, f) for f in fields]
    with pytest.raises(LoweringError, match="compiled again"):
        lower(lowered_text(lambda x: x * 3, spec(4)), cache=cache)


@pytest.mark.parametrize("change", [{"version": -1}, {"names": []}, {"sources": "?"}])
def test_kernels_of_another_version_are_extracted_again(tmp_path, change):
    cache = LoweringCache(tmp_path)
    text = lowered_text(product, *ARGS)
    first = lower(text, cache=cache)
    key = next(tmp_path.rglob("*.json.gz")).name.removesuffix(".json.gz")
    hlo, meta = cache.get(key)
    cache.put(key, hlo, {**meta, "kernels": {**meta["kernels"], **change}})
    again = lower(text, cache=cache)
    assert [(k.name, k.hash) for k in again.kernels] == [(k.name, k.hash) for k in first.kernels]


def test_a_warm_loop_takes_other_trip_counts(tmp_path):
    cache = LoweringCache(tmp_path)
    text = lowered_text(counter_loop, spec(dtype=jnp.int32), spec(64, 64))
    for count in (4, 9):
        found = lower(text, cache=cache, trip_counts=count)
        assert next(k for k in found.kernels if k.kind == "control").multiplicity == count
    assert len(lower(text, cache=cache).notes) == 1


def test_a_damaged_entry_is_compiled_again(tmp_path, caplog):
    cache = LoweringCache(tmp_path / "cache")
    text = lowered_text(product, *ARGS)
    first = lower(text, cache=cache)
    entry = next((tmp_path / "cache").rglob("*.json.gz"))
    entry.write_bytes(entry.read_bytes()[:100])
    with caplog.at_level(logging.WARNING):
        again = lower(text, cache=cache)
    assert "damaged" in caplog.text
    assert [k.hash for k in again.kernels] == [k.hash for k in first.kernels]
    assert cache.get(entry.name.removesuffix(".json.gz")) is not None


def test_too_few_devices_is_an_error_that_says_so():
    text = """
module attributes {mhlo.num_partitions = 64 : i32} {
  func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {
    return %x : tensor<8xf32>
  }
}
"""
    with pytest.raises(LoweringError, match="64 devices"):
        lower(text, cache=False)


def test_what_the_compiler_refuses_is_a_lowering_error():
    text = """
func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {
  %0 = stablehlo.custom_call @no_such_target(%x) : (tensor<8xf32>) -> tensor<8xf32>
  return %0 : tensor<8xf32>
}
"""
    with pytest.raises(LoweringError, match="compiler refuses") as caught:
        lower(text, cache=False)
    assert "lowering='op'" in caught.value.hint
    assert [k.kind for k in lower(text, "op").kernels] == ["custom_call"]


def test_no_backend_is_a_lowering_error(monkeypatch):
    def fail():
        raise RuntimeError("Unable to initialize backend 'cuda'\nmore")

    monkeypatch.setattr(jax, "devices", fail)
    with pytest.raises(LoweringError, match="no device to compile for: Unable") as caught:
        lower(lowered_text(product, *ARGS))
    assert "JAX_PLATFORMS" in caught.value.hint


def test_unknown_lowering():
    with pytest.raises(LoweringError, match="fusd"):
        lower(lowered_text(product, *ARGS), "fusd")


def test_another_platform_is_noted():
    gpu = DeviceSpec(
        "h100", "nonesuch", {"f32": 1e12}, {"f32": 1e12}, (MemoryLevel(1e9, 1e12),), 1e-6
    )
    found = lower(lowered_text(product, *ARGS), device=gpu)
    assert any("h100" in note for note in found.notes)


def test_native_executable_runs_and_lowers_from_one_compilation():
    def step(w, x):
        return w - 0.5 * x, (w * x).sum()

    source = read_program(lowered_text(step, spec(4, 4), spec(4, 4), donate_argnums=0))
    native = compile_native(source, name="probe_17")
    w, x = np.full((4, 4), 3.0, np.float32), np.full((4, 4), 2.0, np.float32)
    held = jax.device_put(w)
    new, total = native.run([held, x])
    np.testing.assert_allclose(new, np.full((4, 4), 2.0))
    assert float(total) == 16 * 6
    assert native.aliases == ((0, 0),) and held.is_deleted()
    assert native.hlo.startswith("HloModule probe_17")
    assert [str(t) for t in native.input_types] == ["f32[4,4]", "f32[4,4]"]
    names = {op.name for c in native.program.computations.values() for op in c.ops}
    assert {k.name for k in native.lowered().kernels} <= names


SEVERAL = """
import os
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from opcast.features.lowering.lower import lower
from opcast.features.lowering.xla import compile_native
from opcast.features.ir.reader import read_program
mesh = Mesh(np.array(jax.devices()), ("x",))
rows = NamedSharding(mesh, P("x"))
f = jax.jit(lambda x, w: (x @ w).sum(), in_shardings=(rows, None))
lowered = f.lower(jax.ShapeDtypeStruct((8, 4), "float32"), jax.ShapeDtypeStruct((4, 2), "float32"))
native = compile_native(read_program(lowered))
found = native.lowered()
assert any(k.kind == "collective" for k in found.kernels), found.kernels
gemm = [k for k in found.kernels if k.kind == "gemm"]
assert sum(k.flops for k in found.kernels) < 2 * 8 * 4 * 2, "each device has a quarter"
out = native.run([np.ones((8, 4), np.float32), np.ones((4, 2), np.float32)])
assert float(out[0]) == 8 * 4 * 2, out
"""


def test_several_partitions():
    flags = "--xla_force_host_platform_device_count=4"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


WARM = """
import sys
from opcast.features.lowering.lower import lower
from opcast.features.ir.jax_compat import backends_started
assert len(lower(sys.argv[1]).kernels) > 0
print(backends_started())
"""


def test_a_warm_process_does_not_start_the_backend(tmp_path):
    path = tmp_path / "program.mlir"
    path.write_text(lowered_text(product, *ARGS))
    started = [
        subprocess.run(
            [sys.executable, "-c", WARM, str(path)], capture_output=True, text=True, timeout=60
        ).stdout.strip()
        for _ in range(2)
    ]
    assert started == ["True", "False"]


def doubling(levels: int) -> str:
    """A program of few lines whose functions each call the next one twice."""
    kind = "tensor<8xf32>"
    function = (
        "func.func private @f{0}(%a: {2}) -> {2} {{ %0 = func.call @f{1}(%a) : ({2}) -> {2}\n"
        "%1 = func.call @f{1}(%0) : ({2}) -> {2}\nreturn %1 : {2} }}\n"
    )
    body = "".join(function.format(i, i + 1, kind) for i in range(levels))
    leaf = f"%0 = stablehlo.tanh %a : {kind}\nreturn %0 : {kind} }}\n"
    entry = f"%0 = func.call @f0(%a) : ({kind}) -> {kind}\nreturn %0 : {kind} }}\n"
    return (
        f"module {{ {body} func.func private @f{levels}(%a: {kind}) -> {kind} {{ {leaf}"
        f"func.func public @main(%a: {kind}) -> {kind} {{ {entry} }}"
    )


@pytest.mark.parametrize("lowering", ["op", "fused"])
def test_calls_that_multiply_are_refused_before_they_are_inlined(lowering: str) -> None:
    few = read_program(doubling(3))
    # 8 leaves with a parameter and an op; 4, 2 and 1 functions, and the entry, of 3, 3, 3 and 2.
    assert few.program.inlined_op_count == 8 * 2 + 7 * 3 + 2
    assert sum(k.multiplicity for k in lower(few, "op").kernels) == 8
    with pytest.raises(ProgramError, match=r"5\.5e\+12 ops"):
        lower(doubling(40), lowering, device="h100-sxm")
