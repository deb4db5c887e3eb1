"""Kernels of real compiled programs, and of hand-written GPU-style HLO."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opcast.features.ir.hlo_printer import print_hlo
from opcast.features.ir.hlo_reader import parse_hlo
from opcast.features.ir.program import Program
from opcast.features.kernels.extract import extract_kernels, kernel_from_ir, kernels_from_irs
from opcast.features.kernels.kernel import KINDS, Kernel

F32 = jnp.float32
GPU = Path(__file__).parents[1] / "data" / "gpu_schedule.hlo"
FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")


def spec(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def mlp_step(weights, x, y):
    def loss(weights):
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return ((h - y) ** 2).mean()

    grads = jax.grad(loss)(weights)
    return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)]


def conv_step(k1, k2, x):
    def conv(x, k, stride):
        return jax.lax.conv_general_dilated(
            x, k, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def loss(k1, k2):
        return conv(jax.nn.relu(conv(x, k1, 1)), k2, 2).mean()

    return jax.grad(loss, argnums=(0, 1))(k1, k2)


def scan_step(x, w):
    def body(carry, _):
        carry = jnp.tanh(carry @ w)
        return carry, carry.sum()

    return jax.lax.scan(body, x, None, length=7)


def embed(table, ids):
    return table[ids].sum(axis=1)


def update(cache, row, i):
    return jax.lax.dynamic_update_slice(cache, row * 2, (i, 0))


PROGRAMS = {
    "mlp": (mlp_step, ([spec(64, 64)] * 3, spec(32, 64), spec(32, 64))),
    "conv": (conv_step, (spec(3, 3, 8, 16), spec(3, 3, 16, 16), spec(2, 16, 16, 8))),
    "scan": (scan_step, (spec(64, 128), spec(128, 128))),
    "sort": (lambda x: jnp.sort(x, axis=1), (spec(64, 300),)),
    "embed": (embed, (spec(1000, 64), spec(32, 16, dtype=jnp.int32))),
    "update": (update, (spec(512, 64), spec(8, 64), spec(dtype=jnp.int32))),
    "attention": (
        lambda q, k, v: jax.nn.softmax(q @ k.swapaxes(-1, -2)) @ v,
        (spec(2, 64, 32), spec(2, 64, 32), spec(2, 64, 32)),
    ),
    "reduce": (lambda x: (x.max(0), jnp.exp(x).sum(1)), (spec(200, 300),)),
}


@pytest.fixture(scope="module")
def compiled():
    return {name: jax.jit(f).lower(*args).compile() for name, (f, args) in PROGRAMS.items()}


def kernels_of(executable) -> list[Kernel]:
    return extract_kernels(parse_hlo(executable.as_text()))[0]


@pytest.mark.parametrize("name", PROGRAMS)
def test_entry_instructions_are_kernels_in_order(compiled, name):
    text = compiled[name].as_text()
    entry = text[text.index("\nENTRY ") :]
    listed = re.findall(r"^\s+(?:ROOT )?%(\S+) = (?:\(.*?\)|\S+) ([\w-]+)\(", entry, re.MULTILINE)
    expected = [n for n, opcode in listed if opcode not in FREE]
    found = [k.name for k in kernels_of(compiled[name]) if not k.scope]
    assert found == expected
    assert len(found) > 0


@pytest.mark.parametrize("name", PROGRAMS)
def test_flops_are_those_of_xla(compiled, name):
    # XLA's cost analysis counts loop bodies (and conditions) once.
    once = sum(k.flops for k in kernels_of(compiled[name]))
    stated = compiled[name].cost_analysis().get("flops", 0.0)
    assert once == pytest.approx(stated, rel=0.01, abs=4)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_kernel_is_rebuilt_from_its_text(compiled, name):
    for kernel in kernels_of(compiled[name]):
        again = kernel_from_ir(kernel.ir)
        assert print_hlo(parse_hlo(kernel.ir)) == kernel.ir
        assert again.hash == kernel.hash and len(again.hash) == 16
        assert again.kind == kernel.kind in KINDS
        assert (again.flops, again.transcendentals) == (kernel.flops, kernel.transcendentals)
        assert (again.bytes_in, again.bytes_out) == (kernel.bytes_in, kernel.bytes_out)
        assert again.dtype == kernel.dtype


def by_kind(executable) -> dict[str, list[Kernel]]:
    found: dict[str, list[Kernel]] = {}
    for kernel in kernels_of(executable):
        found.setdefault(kernel.kind, []).append(kernel)
    return found


def test_kinds(compiled):
    # Forward: 3 products. Backward: 3 for the weights, 2 for the activations.
    assert len(by_kind(compiled["mlp"])["gemm"]) == 8
    # Forward 1 (nobody needs the second's value), backward 2 for the kernels, 1 for the activation.
    assert len(by_kind(compiled["conv"])["conv"]) == 4
    assert "sort" in by_kind(compiled["sort"])
    assert "gather_scatter" in by_kind(compiled["embed"])
    assert "reduce" in by_kind(compiled["reduce"])
    assert "control" in by_kind(compiled["scan"])


def test_gemm_flops_and_bytes(compiled):
    gemm = by_kind(compiled["attention"])["gemm"][0]
    # 2 · batch · M · N · K
    assert gemm.flops == pytest.approx(2 * 2 * 64 * 64 * 32, rel=0.1)


def test_loop_bodies_multiply(compiled):
    kernels = kernels_of(compiled["scan"])
    control = next(k for k in kernels if k.kind == "control")
    inside = [k for k in kernels if k.scope]
    assert control.multiplicity == 7 and control.flops == 0 == control.bytes
    assert inside and {k.multiplicity for k in inside} == {7.0}
    assert {k.scope for k in inside} == {(control.name,)}
    gemm = next(k for k in inside if k.kind == "gemm")
    assert gemm.flops == pytest.approx(2 * 64 * 128 * 128)


def test_dynamic_update_in_place_touches_only_the_rows():
    # Donated, so that no copy of the cache is needed: reads and writes 8 · 64 floats each.
    low = jax.jit(update, donate_argnums=0).lower(*PROGRAMS["update"][1])
    found = [k for k in kernels_of(low.compile()) if k.kind != "copy"]
    assert sum(k.bytes for k in found) < 4 * (8 * 64 * 4)


def test_operands_name_earlier_producers(compiled):
    for executable in compiled.values():
        kernels = kernels_of(executable)
        for position, kernel in enumerate(kernels):
            assert all(0 <= o < position for o in kernel.operands)
    kernels = kernels_of(compiled["mlp"])
    forward = [k for k in kernels if k.kind == "gemm"][1]
    feeding = {kernels[o].kind for o in forward.operands}
    assert "fusion" in feeding or "gemm" in feeding


def test_equal_layers_have_equal_hashes():
    def layers(x, ws):
        for w in ws:
            x = jnp.tanh(x @ w)
        return x

    compiled = jax.jit(layers).lower(spec(256, 256), [spec(256, 256)] * 4).compile()
    gemms = [k for k in kernels_of(compiled) if k.kind == "gemm"]
    assert len(gemms) == 4
    assert len({k.hash for k in gemms}) == 1
    assert len({k.name for k in gemms}) == 4
    unique = kernels_from_irs([k.ir for k in gemms])
    assert all(kernel is unique[0] for kernel in unique)


@pytest.fixture(scope="module")
def gpu() -> dict[str, Kernel]:
    return {k.name: k for k in extract_kernels(parse_hlo(GPU.read_text()))[0]}


def test_gpu_kinds(gpu):
    assert {name: k.kind for name, k in gpu.items()} == {
        "ar.start": "collective",
        "gemm_fusion_dot.1": "gemm",
        "ar.done": "collective",
        "async.start": "copy",
        "cublas": "gemm",
        "fused_slice": "gemm",
        "conv": "conv",
        "async.done": "copy",
        "all-reduce.2": "collective",
        "gemm_fusion_dot.2": "gemm",
    }


def test_async_pairs(gpu):
    names = list(gpu)
    for start, done in (("ar.start", "ar.done"), ("async.start", "async.done")):
        assert gpu[start].async_role == "start" and gpu[done].async_role == "done"
        assert names[gpu[start].async_peer] == done
        assert names[gpu[done].async_peer] == start
        assert gpu[done].flops == 0 == gpu[done].bytes
    # One addition for each element; the start carries the cost.
    assert gpu["ar.start"].flops == 1024
    assert gpu["all-reduce.2"].async_role == "" and gpu["all-reduce.2"].async_peer == -1


def test_control_and_the_ends_of_pairs_take_no_time(gpu):
    assert gpu["ar.start"].takes_time and not gpu["ar.done"].takes_time
    assert gpu["all-reduce.2"].takes_time
    loop = Kernel("loop", "control", Program(), "", "")
    alone = Kernel("done", "copy", Program(), "", "", async_role="done")  # nothing stands for it
    assert not loop.takes_time and alone.takes_time


def test_tiles_queues_and_channels_do_not_count(gpu):
    assert gpu["gemm_fusion_dot.1"].hash == gpu["gemm_fusion_dot.2"].hash
    for secret in ("block_m", "operation_queue_id", "selected_algorithm", "algo_id", "channel_id"):
        assert all(secret not in k.ir for k in gpu.values())
    # Triton or cuBLAS is decided by timing on the device.
    assert gpu["gemm_fusion_dot.1"].hash == gpu["cublas"].hash
    assert gpu["cublas"].opcode == "dot"
    assert "replica_groups={{0,1},{2,3}}" in gpu["all-reduce.2"].ir


def test_gpu_flops(gpu):
    product = 2 * 512 * 128 * 256
    for name in ("gemm_fusion_dot.1", "cublas", "fused_slice"):
        assert gpu[name].flops == product
    assert gpu["gemm_fusion_dot.1"].dtype == "bf16"


def test_unknown_loops_are_noted_and_counted_once():
    def f(x):
        return jax.lax.while_loop(lambda c: c.sum() < 1e9, lambda c: jnp.sin(c) * 2, x)

    text = jax.jit(f).lower(spec(64, 128)).compile().as_text()
    kernels, notes = extract_kernels(parse_hlo(text))
    assert len(notes) == 1 and "trip_counts" in notes[0] and "test_extract.py" in notes[0]
    control = next(k for k in kernels if k.kind == "control")
    # The condition runs once more than the body.
    assert {k.multiplicity for k in kernels if k.scope} == {1.0, 2.0}
    program = parse_hlo(text)
    for computation in program.computations.values():
        for op in computation.ops:
            if op.opcode == "while":
                op.attrs["trip_count"] = 5
    kernels, notes = extract_kernels(program)
    assert notes == []
    assert {k.multiplicity for k in kernels if k.scope} == {5.0, 6.0}
    assert next(k for k in kernels if k.name == control.name).multiplicity == 5


def test_conditionals_take_the_costliest_branch():
    def f(p, x):
        return jax.lax.cond(p, lambda x: jnp.tanh(x @ x), lambda x: x + 1, x)

    text = jax.jit(f).lower(spec(dtype=jnp.bool_), spec(256, 256)).compile().as_text()
    if "conditional(" not in text:
        pytest.skip("the compiler turned the conditional into a select")
    kernels, notes = extract_kernels(parse_hlo(text))
    assert any("conditional" in note for note in notes)
    control = next(k for k in kernels if k.kind == "control")
    assert [k.kind for k in kernels if k.scope == (control.name,)].count("gemm") == 1


def test_names_are_those_of_the_trace(tmp_path):
    """Every labelled instruction of a real trace is a kernel, and the other way round."""
    compiled = jax.jit(scan_step).lower(spec(64, 128), spec(128, 128)).compile()
    args = (np.ones((64, 128), np.float32), np.ones((128, 128), np.float32))
    jax.block_until_ready(compiled(*args))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    jax.profiler.start_trace(str(tmp_path), profiler_options=options)
    jax.block_until_ready(compiled(*args))
    jax.profiler.stop_trace()
    counts: dict[str, int] = {}
    data = jax.profiler.ProfileData.from_file(str(next(tmp_path.rglob("*.xplane.pb"))))
    for plane in data.planes:
        for line in plane.lines:
            for event in line.events:
                name = dict(event.stats).get("hlo_op")
                if name and not event.name.startswith("end: "):
                    counts[name] = counts.get(name, 0) + 1
    kernels = kernels_of(compiled)
    assert set(counts) == {k.name for k in kernels}
    plain = {k.name: k.multiplicity for k in kernels if k.kind != "control"}
    assert {name: n for name, n in counts.items() if name in plain} == plain
