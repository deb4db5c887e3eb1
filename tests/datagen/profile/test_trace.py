from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opcast.datagen.profile.executions import Durations
from opcast.datagen.profile.trace import durations, trace

FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while"}


def entry_instructions(hlo: str) -> dict[str, str]:
    """Opcode by name of the instructions in ENTRY."""
    found = re.search(r"^ENTRY.*?^}", hlo, re.S | re.M)
    assert found
    body = found[0].splitlines()[1:-1]
    matches = (re.match(r"\s*(?:ROOT )?%(\S+) = \S+ ([\w\-]+)\(", line) for line in body)
    return {m[1]: m[2] for m in matches if m}


def model(w: jax.Array, x: jax.Array) -> jax.Array:
    h = jax.nn.gelu(x @ w)
    return jnp.sort(jax.nn.softmax(h @ w), axis=0).sum(axis=1)


def test_every_instruction_of_entry_has_a_label_per_run() -> None:
    w, x = jnp.ones((128, 128)), jnp.ones((64, 128))
    compiled = jax.jit(model).lower(w, x).compile()
    jax.block_until_ready(compiled(w, x))
    found = trace(lambda: [jax.block_until_ready(compiled(w, x)) for _ in range(5)])
    wanted = {
        n for n, opcode in entry_instructions(compiled.as_text()).items() if opcode not in FREE
    }
    assert wanted
    labels = {op: seconds for (module, op), seconds in found.items() if module == "jit_model"}
    assert wanted <= set(labels)
    assert all(len(labels[name]) == 5 and min(labels[name]) > 0 for name in wanted)


def test_durations_are_those_of_the_wall_clock() -> None:
    n = 512
    a = jnp.ones((n, n))
    compiled = jax.jit(lambda a: a @ a).lower(a).compile()
    jax.block_until_ready(compiled(a))
    walls: list[float] = []

    def run() -> None:
        for _ in range(9):
            start = time.perf_counter()
            jax.block_until_ready(compiled(a))
            walls.append(time.perf_counter() - start)

    (seconds,) = trace(run).values()
    # One kernel: its time is the wall time without the dispatch.
    assert len(seconds) == 9
    assert 0.2 * np.median(walls) < np.median(seconds) < 1.01 * max(walls)


def test_loop_bodies_have_one_label_per_iteration() -> None:
    def loop(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 6, lambda _, c: jnp.tanh(c @ c), x)

    x = jnp.ones((64, 64))
    compiled = jax.jit(loop).lower(x).compile()
    jax.block_until_ready(compiled(x))
    found = trace(lambda: [jax.block_until_ready(compiled(x)) for _ in range(2)])
    counts = {len(seconds) for (_, op), seconds in found.items() if "tanh" in op}
    assert counts == {12}


def test_two_programs_share_a_session() -> None:
    def first(x: jax.Array) -> jax.Array:
        return jnp.tanh(x)

    def second(x: jax.Array) -> jax.Array:
        return jnp.exp(x) * 2

    x = jnp.ones((4096,))
    programs = [jax.jit(f).lower(x).compile() for f in (first, second)]
    for program in programs:
        jax.block_until_ready(program(x))
    found = trace(lambda: [jax.block_until_ready(p(x)) for p in programs for _ in range(3)])
    assert {module: len(s) for (module, _), s in found.items()} == {"jit_first": 3, "jit_second": 3}


@dataclass
class FakeEvent:
    name: str
    start_ns: float
    duration_ns: float
    stats: dict[str, Any] = field(default_factory=dict)


@dataclass
class FakeLine:
    name: str
    events: list[FakeEvent]


@dataclass
class FakePlane:
    name: str
    lines: list[FakeLine]


@dataclass
class FakeData:
    planes: list[FakePlane]


def rounded(found: Durations) -> dict[tuple[str, str], list[int]]:
    """Durations in whole nanoseconds."""
    return {key: [round(1e9 * s) for s in seconds] for key, seconds in found.items()}


def stats(op: str, **more: Any) -> dict[str, Any]:
    return {"hlo_op": op, "hlo_module": "m", **more}


def test_cpu_async_end_and_overlap() -> None:
    one = FakeLine("t1", [
        FakeEvent("dot", 0, 100, stats("dot", run_id=1, _pt=0, _p=7)),
        FakeEvent("add", 200, 50, stats("add", run_id=1, _pt=0, _p=8)),
        FakeEvent("ThreadpoolListener::Record", 0, 0, {"_pt": 15, "_p": 7}),
    ])  # fmt: skip
    two = FakeLine("t2", [
        FakeEvent("end: dot", 180, 2, {"_ct": 0, "_c": 7}),
        FakeEvent("end: add", 240, 2, {"_ct": 15, "_c": 8}),  # another kind of flow
        FakeEvent("add", 220, 60, stats("add", run_id=1, _pt=0, _p=9)),
    ])  # fmt: skip
    data: Any = FakeData([FakePlane("/host:CPU", [one, two])])
    # dot ends where its end event says; add on two threads is one execution, 200 to 280.
    assert rounded(durations(data)) == {("m", "dot"): [180], ("m", "add"): [80]}


def test_cpu_kernels_at_once_share_the_time() -> None:
    one = FakeLine("t1", [
        FakeEvent("dot", 0, 100, stats("dot", run_id=1)),
        FakeEvent("dot", 1000, 100, stats("dot", run_id=2)),
        FakeEvent("copy", 1200, 50, stats("copy", run_id=2)),
        FakeEvent("while", 0, 3000, stats("while", run_id=2)),
    ])  # fmt: skip
    two = FakeLine("t2", [
        FakeEvent("copy", 40, 60, stats("copy", run_id=1)),  # waits for dot: 60 instead of 50
        FakeEvent("add", 1098, 80, stats("add", run_id=2)),  # 2 of 80 ns beside dot: not crowded
    ])  # fmt: skip
    data: Any = FakeData([FakePlane("/host:CPU", [one, two])])
    # The loop is no kernel: it contains the others.
    reads: Any = {("m", "dot"): (), ("m", "copy"): (), ("m", "add"): ()}
    found = rounded(durations(data, reads=reads))
    # The first run has no other execution: half of the 60 ns that the two share is taken off.
    assert found["m", "dot"] == [100 - 30, 100]
    assert found["m", "copy"] == [60 - 30, 50]
    assert found["m", "add"] == [80]
    assert rounded(durations(data))["m", "copy"] == [60, 50]


def test_cpu_kernel_has_ended_when_its_reader_starts() -> None:
    one = FakeLine("t1", [
        FakeEvent("fusion", 0, 10, stats("fusion", run_id=1, _pt=0, _p=7)),
        FakeEvent("dot", 130, 900, stats("dot", run_id=1)),
        FakeEvent("end: fusion", 1030, 1, {"_ct": 0, "_c": 7}),  # after what waited for it
    ])  # fmt: skip
    data: Any = FakeData([FakePlane("/host:CPU", [one])])
    reads: Any = {("m", "fusion"): (), ("m", "dot"): ("fusion",)}
    assert rounded(durations(data)) == {("m", "fusion"): [1030], ("m", "dot"): [900]}
    found = rounded(durations(data, reads=reads))
    assert found == {("m", "fusion"): [130], ("m", "dot"): [900]}


def test_cpu_thunks_of_one_instruction_are_one_execution() -> None:
    events = [
        FakeEvent("sort", at, length, stats("sort", run_id=run))
        for run, base in ((1, 0), (2, 1000))
        for at, length in ((base, 5), (base + 10, 5), (base + 20, 90))  # two copies, then the sort
    ]
    data: Any = FakeData([FakePlane("/host:CPU", [FakeLine("t1", events)])])
    assert rounded(durations(data, {("m", "sort"): 1})) == {("m", "sort"): [100, 100]}
    # In a loop of three iterations these are three executions; two cannot be told apart.
    assert rounded(durations(data, {("m", "sort"): 3}))["m", "sort"] == [5, 5, 90] * 2
    assert rounded(durations(data, {("m", "sort"): 2}))["m", "sort"] == [50, 50]


def test_a_sort_of_several_arrays_takes_as_long_as_the_program() -> None:
    keys = [jnp.asarray(np.random.default_rng(i).normal(size=(8, 4096))) for i in range(3)]

    def order(*arrays: jax.Array) -> Any:
        return jax.lax.sort(arrays, dimension=1, num_keys=1)

    compiled = jax.jit(order).lower(*keys).compile()
    jax.block_until_ready(compiled(*keys))
    walls: list[float] = []

    def run() -> None:
        for _ in range(5):
            start = time.perf_counter()
            jax.block_until_ready(compiled(*keys))
            walls.append(time.perf_counter() - start)

    (name,) = {op for _, op in trace(run) if op.startswith("sort")}
    walls.clear()
    found = trace(run, {("jit_order", name): 1})
    seconds = found["jit_order", name]
    assert len(seconds) == 5
    assert 0.5 * np.median(walls) < np.median(seconds) < 1.01 * max(walls)


def test_gpu_takes_streams_only_and_sums_the_kernels_of_an_instruction() -> None:
    kernels = []
    for run in range(3):
        base = 1000 * run
        kernels += [
            FakeEvent("gemm", base, 10, stats("dot.1")),
            FakeEvent("splitk", base + 20, 5, stats("dot.1")),
            FakeEvent("loop_add", base + 40, 3, stats("add.2")),
        ]
    stream = FakeLine("Stream #13(Compute)", kernels)
    modules = FakeLine("XLA Modules", [FakeEvent("jit_m", 0, 900, stats("jit_m"))])
    ops = FakeLine("XLA Ops", [FakeEvent("dot.1", 0, 999, stats("dot.1"))])
    host = FakePlane("/host:CPU", [FakeLine("x", [FakeEvent("dot.1", 0, 77, stats("dot.1"))])])
    data: Any = FakeData([host, FakePlane("/device:GPU:0", [stream, modules, ops])])
    assert rounded(durations(data)) == {
        ("m", "dot.1"): [15] * 3,
        ("m", "add.2"): [3] * 3,
    }  # fmt: skip


def test_gpu_same_kernel_twice_per_execution_needs_the_count() -> None:
    events = [FakeEvent("pass", 10 * i, 4, stats("sort", run_id=1)) for i in range(6)]
    data: Any = FakeData([FakePlane("/device:GPU:0", [FakeLine("Stream #1", events)])])
    assert durations(data)["m", "sort"] == pytest.approx([4e-9] * 6)
    assert durations(data, {("m", "sort"): 3})["m", "sort"] == pytest.approx([8e-9] * 3)


def test_tpu_ops_take_their_module_from_the_enclosing_span() -> None:
    modules = FakeLine(
        "XLA Modules", [FakeEvent("jit_f(123)", 0, 100), FakeEvent("jit_g(9)", 200, 50)]
    )
    ops = FakeLine("XLA Ops", [
        FakeEvent("%fusion.3 = f32[8]{0} fusion(f32[8] %p)", 10, 20),
        FakeEvent("%fusion.3 = f32[8]{0} fusion(f32[8] %p)", 210, 30),
    ])  # fmt: skip
    data: Any = FakeData([FakePlane("/device:TPU:0", [modules, ops])])
    assert rounded(durations(data)) == {
        ("jit_f", "fusion.3"): [20],
        ("jit_g", "fusion.3"): [30],
    }  # fmt: skip


def test_a_failing_run_ends_the_session() -> None:
    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        trace(fail)
    assert trace(lambda: None) == {}
    assert threading.active_count() < 50
