"""Properties of the fusion rules over the zoo, and single rules on small graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opcast.common.errors import LoweringError
from opcast.datagen.programs.random_program import random_program
from opcast.datagen.zoo.registry import build, suite
from opcast.features.devices.catalogue import find_device
from opcast.features.ir.program import TensorType
from opcast.features.ir.reader import read_program
from opcast.features.kernels.extract import kernel_from_ir
from opcast.features.kernels.kernel import LoweredProgram
from opcast.features.lowering.fused import graph as graphs
from opcast.features.lowering.fused.clusters import (
    Cluster,
    Clusters,
    Shape,
    is_loop,
    is_loop_reduction,
    reduction,
)
from opcast.features.lowering.fused.epilogues import fuse_epilogues
from opcast.features.lowering.fused.graph import Node, build_graph
from opcast.features.lowering.fused.loops import drop_dead_state, merge_counters
from opcast.features.lowering.fused.machine import Machine, machine_of
from opcast.features.lowering.fused.multi_output import MultiOutputFusion
from opcast.features.lowering.fused.priority import PriorityFusion
from opcast.features.lowering.fused.reductions import parts_of
from opcast.features.lowering.fused.rows import fuse_softmax
from opcast.features.lowering.fused.simplify import simplify
from opcast.features.lowering.fused.work import Work
from opcast.features.lowering.lower import Choice, choose_lowering, lower
from opcast.features.lowering.options import AUTO

H100 = find_device("h100-sxm")
ALL_OPS = Path(__file__).parents[2] / "data" / "all_ops.mlir"
QUICK = [(name, tuple(sorted(settings.items()))) for name, settings in suite("quick")]


def graph_of(function, *shapes):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    source = read_program(jax.jit(function).lower(*arguments).as_text())
    graph = build_graph(source.program)
    simplify(graph, source.program)
    return graph


def opcodes(graph):
    return [n.opcode for n in graph.nodes() if n.opcode not in ("parameter", "constant")]


def reduce_node(shape, dims):
    kept = tuple(size for d, size in enumerate(shape) if d not in dims)
    source = Node("parameter", [], (TensorType("f32", shape),), {"index": 0})
    return Node("reduce", [source, source], (TensorType("f32", kept),), {"dimensions": dims})


@pytest.fixture(scope="module", params=QUICK, ids=lambda item: item[0])
def program(request):
    name, settings = request.param
    return read_program(build(name, **dict(settings)).mlir(debug_info=False))


@pytest.fixture(scope="module")
def fused(program):
    return lower(program, "fused", device=H100)


def test_work_is_conserved_and_traffic_falls(program, fused):
    op = lower(program, "op", device=H100)

    def total(lowered, what):
        return sum(k.multiplicity * getattr(k, what) for k in lowered.kernels if k.takes_time)

    # What is computed twice adds a little; the weights of merged products are joined by copies.
    copied = sum(k.multiplicity * k.bytes for k in fused.kernels if k.kind == "copy")
    assert total(fused, "flops") == pytest.approx(total(op, "flops"), rel=0.35)
    assert total(fused, "bytes") - copied <= total(op, "bytes")
    assert len(fused.kernels) <= len(op.kernels)


def test_work_of_every_kind_of_op_is_conserved(monkeypatch):
    """Of the file with all ops, whose results nobody reads: each op counts as an effect."""
    visit = graphs._Builder._visit

    def keep(self, op, values, arguments):
        value = visit(self, op, values, arguments)
        if isinstance(value, Node) and op.opcode != "parameter":
            self.effects.append(value)
        return value

    source = read_program(ALL_OPS)
    before = lower(source, "op")
    monkeypatch.setattr(graphs._Builder, "_visit", keep)
    after = lower(source, "fused", device=H100)
    flops = [sum(k.flops for k in found.kernels) for found in (before, after)]
    assert flops[1] == pytest.approx(flops[0], rel=0.05)
    kinds = [{k.kind for k in found.kernels} for found in (before, after)]
    # The program's loop is empty, so that it goes.
    assert kinds[0] - kinds[1] <= {"copy"}


@pytest.mark.parametrize("seed", range(6))
def test_random_programs_move_less_than_their_ops(seed):
    text = random_program(np.random.default_rng(seed)).mlir
    op, fused = (lower(text, name, device=H100) for name in ("op", "fused"))
    moved = [sum(k.multiplicity * k.bytes for k in found.kernels) for found in (op, fused)]
    flops = [sum(k.multiplicity * k.flops for k in found.kernels) for found in (op, fused)]
    assert moved[1] <= moved[0]
    assert 0.7 * flops[0] <= flops[1] <= 2.0 * flops[0]


def test_a_result_that_nobody_reads_is_not_computed_unless_it_is_a_call():
    text = """
    module @m {
      func.func public @main(%a: tensor<64x64xf32>) -> tensor<64x64xf32> {
        %0 = stablehlo.exponential %a : tensor<64x64xf32>
        %1 = stablehlo.custom_call @mine(%a) : (tensor<64x64xf32>) -> tensor<64x64xf32>
        %2 = stablehlo.add %a, %a : tensor<64x64xf32>
        return %2 : tensor<64x64xf32>
      }
    }"""
    found = lower(text, "fused", device=H100)
    assert sorted(k.kind for k in found.kernels) == ["custom_call", "fusion"]
    assert sum(k.transcendentals for k in found.kernels) == 0


def test_kernels_can_be_made_again_from_their_text(fused):
    for kernel in fused.kernels:
        again = kernel_from_ir(kernel.ir)
        assert (again.hash, again.kind, again.flops, again.bytes) == (
            kernel.hash, kernel.kind, kernel.flops, kernel.bytes,
        )  # fmt: skip


def test_kernels_read_only_what_came_before(fused):
    kernels = fused.kernels
    assert all(max(k.operands, default=-1) < i for i, k in enumerate(kernels))


def test_every_op_is_in_one_kernel_or_may_be_repeated(program):
    graph = build_graph(program.program)
    simplify(graph, program.program)
    clusters = Clusters(graph)
    ops = {id(n): n for c in clusters.all() for n in c.members.values()}
    fuse_epilogues(clusters)
    fuse_softmax(clusters)
    PriorityFusion(clusters, Machine()).run()
    MultiOutputFusion(clusters, Machine()).run()
    seen: dict[int, int] = {}
    for cluster in clusters.all():
        for node in cluster.members.values():
            seen[id(node)] = seen.get(id(node), 0) + 1
    assert set(ops) <= set(seen)
    # Kernels of rows compute a row's sum themselves, each for what it reads.
    rows = {id(n) for c in clusters.all() if c.rows for n in c.members.values()}
    repeated = [key for key, count in seen.items() if count > 1 and key in ops]
    assert all(is_loop(ops[key]) or key in rows for key in repeated)


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (lambda x: x * 1.0 + 0.0, []),
        (lambda x: x.T.T, []),
        (lambda x: jnp.negative(-x), []),
        (lambda x: x / 4.0, ["broadcast", "multiply"]),
        (lambda x: x.reshape(-1).reshape(8, 16), []),
        (lambda x: jnp.concatenate([x, x + 1.0])[:8], []),
        (lambda x: jnp.square(x) - x * x, ["multiply", "subtract"]),
        (lambda x: x**2, ["multiply"]),
        (lambda x: jnp.where(True, x, 0.0), []),
        (lambda x: jnp.pad(x, 0), []),
        (lambda x: x[None].transpose(1, 0, 2).reshape(8, 16), []),
    ],
)
def test_simplification_leaves_what_is_needed(function, left):
    assert opcodes(graph_of(function, (8, 16))) == left


def test_constants_are_computed_beforehand():
    graph = graph_of(lambda x: x * (jnp.float32(2.0) * 3.0 + jnp.sqrt(jnp.float32(9.0))), (8,))
    (constant,) = [n for n in graph.nodes() if n.opcode == "constant"]
    assert constant.attrs["value"] == 9.0


def test_constants_are_one_only_where_their_values_are():
    tables = [np.arange(128, dtype=np.float32) + i for i in (0, 1)]

    def of(first, second):
        return opcodes(graph_of(lambda x: jnp.exp(x + first) * jnp.exp(x + second), (128,)))

    assert of(tables[0], tables[0].copy()).count("exponential") == 1
    assert of(*tables).count("exponential") == 2


def test_what_is_scattered_into_zeros_is_scattered_into_the_sum():
    def both(x, i, y):
        return x + jnp.zeros_like(x).at[i.astype(jnp.int32)].add(y)

    codes = opcodes(graph_of(both, (64, 8), (4,), (4, 8)))
    assert codes.count("scatter") == 1
    assert codes[-1] == "scatter"


@pytest.mark.parametrize("update", ["set", "max", "multiply"])
def test_only_a_scatter_that_adds_goes_into_the_sum(update):
    def both(x, i, y):
        zeros = jnp.zeros_like(x)
        return x + getattr(zeros.at[i.astype(jnp.int32)], update)(y)

    # Written over x, the updates would replace elements of x instead of being added to them.
    assert opcodes(graph_of(both, (64, 8), (4,), (4, 8)))[-1] == "add"


def test_dead_state_and_second_counters_go():
    def loop(x):
        def step(s):
            i, j, dead, y = s
            return i + 1, j + 1, dead * 2.0, y * 1.5 + j

        return jax.lax.while_loop(lambda s: s[0] < 9, step, (0, 0, x, x))[3]

    graph = graph_of(loop, (16,))
    merge_counters(graph)
    drop_dead_state(graph)
    (node,) = [n for n in graph.nodes() if n.opcode == "while"]
    body = node.graphs[1]
    kept = [o is p for o, p in zip(body.outputs, body.parameters, strict=False)]
    assert kept == [False, True, True, False]


@pytest.mark.parametrize(
    ("shape", "dims", "expected"),
    [
        ((64, 32), (1,), (Shape.ROW, 1, 32, 1)),
        ((64, 32), (0,), (Shape.COLUMN, 1, 64, 32)),
        ((4, 64, 32), (0, 1), (Shape.COLUMN, 1, 256, 32)),
        ((4, 64, 32), (1,), (Shape.COLUMN, 4, 64, 32)),
        ((4, 64, 32), (0, 2), (Shape.ROW, 4, 32, 1)),
        ((4, 64, 1), (1,), (Shape.ROW, 1, 64, 1)),
        ((2, 3, 4, 5), (0, 2), (Shape.SCATTERED, 1, 8, 1)),
    ],
)
def test_reductions_are_grouped_by_memory_order(shape, dims, expected):
    assert tuple(reduction(reduce_node(shape, dims))) == expected


@pytest.mark.parametrize(
    ("shape", "dims", "loop"),
    [
        ((64, 10), (1,), True), ((64, 16), (1,), False), ((9, 64), (0,), True),
        ((64, 64), (0,), False), ((64, 0), (1,), True),
    ],
)  # fmt: skip
def test_short_reductions_are_loops(shape, dims, loop):
    assert is_loop_reduction(reduce_node(shape, dims)) is loop


def test_a_sum_of_nothing_writes_its_initial_value():
    x = jax.ShapeDtypeStruct((4, 0), jnp.float32)
    lowered = lower(read_program(jax.jit(lambda x: x.sum(1)).lower(x).as_text()), "fused")
    (kernel,) = [k for k in lowered.kernels if k.takes_time]
    # Four f32 are written, and nothing is read but the initial value, a constant.
    assert kernel.op.result_bytes == 16
    assert (kernel.kind, kernel.flops) == ("reduce", 0.0)


@pytest.mark.parametrize(
    ("length", "parts"),
    [(32_000, (128, 250)), (30_522, (131, 233)), (73_728, (256, 288)), (4_608, (64, 72))],
)
def test_parts_of_long_reductions_are_the_compilers(length, parts):
    assert parts_of(length) == parts


def test_a_machine_is_read_from_its_description():
    v100, h100 = machine_of(find_device("v100-pcie")), machine_of(H100)
    assert (v100.cores, v100.bandwidth, v100.tensor_fusion) == (80, 900e9, False)
    assert (h100.cores, h100.lanes, h100.tensor_fusion) == (132, 128, True)
    assert machine_of(find_device("tpu-v4")) == Machine(fused_products=True, converted=frozenset())
    for name in ("b200", "rtx-pro-6000"):  # sm_100 and sm_120: three digits
        newer = machine_of(find_device(name))
        assert newer.tensor_fusion and newer.channels_last and newer.half_channels_last


def test_without_its_compiler_a_device_gets_fused_and_a_note(tmp_path, monkeypatch):
    monkeypatch.setenv("OPCAST_COMPILERS", str(tmp_path))
    monkeypatch.setattr(
        "opcast.features.lowering.target_compiler.install._versions", lambda folder: {}
    )
    chosen = choose_lowering(AUTO, H100, absent=True)
    assert chosen.lowering == "fused"
    assert "no gpu compiler" in chosen.note
    assert "opcast compilers install gpu" in chosen.note
    text = jax.jit(lambda x: x + 1.0).lower(jax.ShapeDtypeStruct((8,), jnp.float32)).as_text()
    found = lower(text, AUTO, device=H100)
    assert (found.lowering, found.notes[0]) == ("fused", chosen.note)


@pytest.mark.parametrize(
    ("dtype", "device", "lowering"),
    [
        ("float8_e4m3fnuz", "mi300x", "fused"),
        # Neither the chip nor its stand-in multiplies these.
        ("float8_e4m3fn", "mi300x", "xla"),
        ("bfloat16", "mi300x", "xla"),
        ("float8_e4m3fn", "mi355x", "fused"),
        ("float8_e4m3fn", "h100-sxm", "xla"),
    ],
)
def test_formats_that_a_stand_in_lacks_are_lowered_without_it(dtype, device, lowering, monkeypatch):
    compiled = LoweredProgram([], "xla", device)
    monkeypatch.setattr(
        "opcast.features.lowering.absent.lower_absent", lambda *_: replace(compiled, notes=[])
    )
    monkeypatch.setattr(
        "opcast.features.lowering.lower.choose_lowering",
        lambda asked, *_, **__: Choice("xla" if asked == AUTO else asked),
    )
    own = jax.ShapeDtypeStruct((64, 64), jnp.dtype(dtype))
    text = jax.jit(lambda a, b: jax.lax.dot(a, b)).lower(own, own).as_text()
    found = lower(text, AUTO, device=find_device(device))
    assert found.lowering == lowering
    told = lower(text, "xla", device=find_device(device))
    assert (told.lowering, len(told.notes)) == ("xla", int(lowering == "fused"))


def test_the_local_device_keeps_its_compiler():
    assert choose_lowering(AUTO, None, absent=False) == ("xla", "")
    assert choose_lowering("op", H100, absent=True).lowering == "op"


def test_an_unknown_lowering_is_refused_with_the_choices():
    with pytest.raises(LoweringError, match="auto, xla, fused, op"):
        lower("module {}", "fuzed")


def test_a_sum_of_a_transposed_product_may_choose_between_arrays():
    """As clipping by the global norm does; a transpose of that scalar moves no further."""

    def clipped(x, w, p):
        g = jnp.einsum("bsd,dhk->bhsk", x, w)
        return g, jax.lax.select((g * g).sum() > 0, p, 2 * p)

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4, 16, 32), (32, 8, 16), (7,))]
    found = lower(jax.jit(clipped).lower(*shapes).as_text(), "fused", device=H100)
    last = found.kernels[-1]
    # Two arguments of one condition and seven elements each; the sum stays a scalar.
    assert (last.bytes_in, last.bytes_out) == (4 + 7 * 4, 7 * 4)


def test_a_producer_adds_to_a_kernel_what_both_need_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gains are derived step by step; each step must give what counting all members anew gives."""
    steps = []
    step = PriorityFusion._both

    def checked(self: PriorityFusion, producer: Cluster, consumer: Cluster) -> Work:
        found = step(self, producer, consumer)
        members = {**producer.members, **consumer.members}
        whole = self._evaluate(members, consumer.roots, consumer.rows or producer.rows)
        # What both compute already is computed twice, for readers that do not share it.
        shared = bool(set(producer.nodes) & set(consumer.nodes)) or any(
            len(self._emitted.get(c, c.nodes)) > len(c.nodes) for c in (producer, consumer)
        )
        assert found.cycles >= whole.cycles and found.code >= whole.code
        if not shared:
            assert (found.code, found.cycles) == (whole.code, whole.cycles)
            assert found.needs.keys() == whole.needs.keys()
            assert found.ticks() == whole.ticks()
        steps.append(not shared)
        return found

    def block(x: jax.Array, w: jax.Array) -> jax.Array:
        y = jax.nn.softmax(x @ w) * jax.nn.gelu(x) - x.mean(-1, keepdims=True)
        rolled = jnp.concatenate([-y[:, 32:], y[:, :32]], -1)
        return jnp.where(jnp.tril(jnp.ones((128, 64), bool)), rolled * 2.0, -1e9) + x

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return (block(block(x, w), w) ** 2).sum()

    monkeypatch.setattr(PriorityFusion, "_both", checked)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 64), (128, 64))]
    text = jax.jit(jax.grad(loss)).lower(*arrays).as_text()
    lower(text, "fused", device=find_device("h100-sxm"))
    # Most are chains; some repeat an op in both, and are counted anew.
    assert len(steps) > 50 and 0.5 < sum(steps) / len(steps) < 1.0
