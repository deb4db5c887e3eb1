"""Pipelines: what they take and need, when they are searched, and what the answer says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from opcast.cli import app
from opcast.common.errors import PlanError
from opcast.features.ir.jax_compat import compile_module, execute
from opcast.features.ir.mlir.bindings import module_counts, parse_module
from opcast.predict.api import loaded
from opcast.predict.plan.answer import plan
from opcast.predict.plan.case import PlanCase
from opcast.predict.plan.pipeline import Sends, StageSeconds, compose
from opcast.predict.plan.program import read_planned
from opcast.predict.plan.search import PlanSearch
from opcast.predict.plan.space import Change, Plan
from opcast.predict.plan.stages import staged_program
from opcast.simulate.clusters.catalogue import find_cluster
from opcast.tests.support.plans import BATCH, LAYERS, WIDTH, compiled, judge_by, layered, lowered_of

OPTIONS = {"cluster": "h100-sxm-x4", "model": "roofline"}
#: Two stages over two devices each, four micro-batches.
PLAN = Plan((("pipeline", 2), ("data", 2)), (), Change(0, 4))


def layer(y, p):
    return jnp.tanh(y @ p["up"]) @ p["down"]


@pytest.fixture(scope="module")
def lowered():
    return lowered_of(layered(layer))


@pytest.fixture(scope="module")
def staged(lowered):
    return staged_program(read_planned(lowered), 2, Change(0, 4))


@pytest.fixture
def judge(monkeypatch):
    """A compiler by which a stage's program takes 100 µs and 1 GiB; returns what it was given."""
    asked = {}

    def judged(job, key, program):
        asked[key] = program, job.cluster
        ends = {"lo_us": 90.0, "hi_us": 120.0}
        return compiled(key, 100.0, **ends, memory_bytes_per_device=2.0**30)

    judge_by(monkeypatch, judged)
    return asked


def test_a_pipeline_by_hand():
    equal = [StageSeconds(1.0, 2.0, 0.5)] * 2
    # 1F1B: (m + p - 1) times a micro-batch, then the optimiser.
    made = compose(equal, Sends(0.0, 0.0), 4)
    assert made.total == pytest.approx((4 + 2 - 1) * 3.0 + 0.5)
    assert (made.compute, made.sends) == (4 * 3.0 + 0.5, 0.0)
    assert made.bubble == pytest.approx(3.0)
    # One micro-batch goes there and back; single numbers are sent once.
    one = compose(equal, Sends(0.25, 0.125), 1)
    assert one.total == pytest.approx(1.0 + 0.25 + 1.0 + 2.0 + 0.25 + 2.0 + 0.5 + 0.125)
    assert one.sends == pytest.approx(0.625)
    # The slower stage decides: it waits for one forward pass, and then for one backward pass.
    slow = compose([StageSeconds(1.0, 1.0, 0.0), StageSeconds(2.0, 2.0, 0.0)], Sends(0.0, 0.0), 8)
    assert slow.total == pytest.approx(1.0 + 8 * 4.0 + 1.0)
    assert slow.worst == 1


def test_what_is_sent_and_kept(staged):
    # A device has 512 rows / 4 micro-batches / 2 devices.
    rows = BATCH // 4 // 2
    each, once = staged.sent_bytes(PLAN)
    assert dict(each) == {(0, 1): 4 * rows * WIDTH, (1, 0): 4 * rows * WIDTH}
    assert not once
    # The first stage has one micro-batch more in flight. Of each layer JAX keeps tanh(u) and
    # 1 - tanh(u) of 4 · WIDTH, and the second layer's input; the first one's is an argument.
    # Gradients of both layers' parameters are summed up.
    gradients = 2 * 2 * 4 * WIDTH * WIDTH * 4
    assert staged.more_memory(0, PLAN) == (8 + 1 + 8) * WIDTH * rows * 4 + gradients
    assert staged.more_memory(1, PLAN) == gradients


def test_a_shared_embedding_is_sent_once():
    words = 96

    def tied(params, table, x, target):
        def loss(params, table):
            y = table[x]
            for p in params:
                y = y + layer(y, p)
            return jnp.mean((y @ table.T - target) ** 2)

        grads = jax.grad(loss, (0, 1))(params, table)
        return jax.tree.map(lambda p, g: p - 0.1 * g, (params, table), grads)

    up = jax.ShapeDtypeStruct((WIDTH, 4 * WIDTH), jnp.float32)
    down = jax.ShapeDtypeStruct((4 * WIDTH, WIDTH), jnp.float32)
    table = jax.ShapeDtypeStruct((words, WIDTH), jnp.float32)
    x = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    target = jax.ShapeDtypeStruct((BATCH, words), jnp.float32)
    lowered = jax.jit(tied, donate_argnums=(0, 1)).lower(
        [{"up": up, "down": down}] * LAYERS, table, x, target
    )
    staged = staged_program(read_planned(lowered), 2, Change(0, 4))
    each, once = staged.sent_bytes(PLAN)
    assert dict(each) == dict.fromkeys(((0, 1), (1, 0)), 4 * BATCH // 4 // 2 * WIDTH)
    # Its gradient from the head to the first stage, which sends the updated one back.
    assert dict(once) == dict.fromkeys(((0, 1), (1, 0)), 4 * words * WIDTH)


def test_a_micro_batch_is_the_step_for_fewer_rows():
    """Of a sum over rows: JAX's own step for a quarter of the batch."""

    summed = layered(layer, lambda y: jnp.sum(y * y), rate=1e-4)
    rng = np.random.default_rng(0)
    shapes = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    params = [
        {name: rng.normal(size=shape).astype(np.float32) / 16 for name, shape in shapes.items()}
        for _ in range(LAYERS)
    ]
    x = rng.normal(size=(BATCH // 4, WIDTH)).astype(np.float32)
    part = read_planned(lowered_of(summed)).micro_batch(4)
    flat = [*jax.tree.leaves(params), x]
    found = execute(compile_module(part.source.module, 1, 1), flat, 1)
    for one, other in zip(found, jax.tree.leaves(summed(params, x)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_stages_are_programs_for_their_devices(staged):
    made = staged.annotated(PLAN)
    modules = [parse_module(own.data) for own in made]
    assert [module_counts(own) for own in modules] == [(1, 2), (1, 2)]
    assert all(f"tensor<{BATCH // 4}x{WIDTH}xf32>" in str(own) for own in modules)
    alone = staged.annotated(Plan((("pipeline", 2),), (), Change(0, 4)))
    assert [own.several for own in alone] == [False, False]


def test_screening_adds_stages_up(staged):
    """Equal stages take half of the step each; two micro-batches of half its rows take as long."""
    from opcast.predict.plan.pipeline import screen_pipeline, stage_sheets

    cluster = find_cluster("h100-sxm-x4")
    sheet = staged.program.sheet(cluster, loaded("roofline"))
    sheets = stage_sheets(staged, sheet)
    alone = Plan((("pipeline", 2),), (), Change(0, 4))
    whole = sheet.cost(Plan())
    parts = sum(own.cost(Plan()).compute for own in sheets.values())
    assert parts == pytest.approx(whole.compute)
    found = screen_pipeline(staged, sheets, alone, cluster)
    assert whole.compute < found.seconds < 5 * whole.compute


def test_pipelines_are_searched_where_they_are_named(lowered, judge, tmp_path):
    found = plan(lowered, **OPTIONS, axes=("pipeline", "data"), out=tmp_path / "plans")
    staged = [row for row in found.rows if "pipeline" in row.plan.sizes]
    # At most a third of twelve.
    assert 1 <= len(staged) <= 4
    row = next(row for row in staged if row.plan.sizes == {"pipeline": 2, "data": 2})
    micro = row.plan.change.micro
    assert row.name == f"pipeline=2,data=2,micro={micro}"
    assert [own.layers for own in row.stages] == [2, 2]
    for own in row.stages:
        assert own.forward_us + own.backward_us + own.once_us == pytest.approx(100.0)
    assert row.lo_us < row.latency_us < row.hi_us
    # Programs of stages over one device are for a cluster of one.
    assert {cluster.size for _, cluster in judge.values()} == {1, 4}
    before = len(judge)
    again = plan(lowered, **OPTIONS, axes=("pipeline", "data"), out=tmp_path / "plans")
    assert len(judge) == before and again.to_dict() == found.to_dict()


@pytest.mark.parametrize(
    ("cluster", "memory", "searched"),
    [("h100-sxm-x4", 0.0, False), ("h100-sxm-x4", 1000.0, True), ("dgx-h100-x16", 0.0, True)],
)
def test_pipelines_are_searched_over_boxes_and_where_nothing_fits(
    lowered, cluster, memory, searched, tmp_path
):
    case = PlanCase(cluster, model="roofline", memory=memory, out=tmp_path)
    search = PlanSearch(read_planned(lowered), case)
    search.screen()
    staged = [own.plan for own in search.screened if own.plan.stages > 1]
    assert bool(staged) == searched
    assert sum(own.stages > 1 for own in search.chosen(12)) <= 4
    # Each micro-batch's rows are what the other axes divide.
    assert all(BATCH // own.change.micro % own.sizes.get("data", 1) == 0 for own in staged)


def test_the_answer_of_a_pipeline(lowered, judge, tmp_path):
    found = plan(lowered, **OPTIONS, axes=("pipeline",), micro_batches=8)
    assert found.best.name == "pipeline=4,micro=8"
    assert "stage 3: layers 3 to 3 of 4, starting at" in found.code
    assert "its stages have 1, 1, 1, 1 layers" in found.reasons[0]
    first = found.save(tmp_path / "best.mlir")
    assert first == tmp_path / "best.stage0.mlir"
    names = [f"best.stage{n}.mlir" for n in range(4)]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    # Both stages in the middle are the same program.
    assert len(judge) == 3


def test_a_stage_is_predicted(lowered, judge, tmp_path):
    found = plan(lowered, **OPTIONS, axes=("pipeline",), micro_batches=8)
    found.save(tmp_path / "best.mlir")
    words = ["predict", str(tmp_path / "best.stage1.mlir"), "--device", "h100-sxm"]
    result = CliRunner().invoke(app, [*words, "--model", "roofline", "--lowering", "fused"])
    assert result.exit_code == 0, result.output


def scanned(params, x):
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)

    def loss(stacked):
        found, _ = jax.lax.scan(lambda y, p: (y + layer(y, p), None), x, stacked)
        return jnp.mean(found**2)

    grads = jax.grad(loss)(stacked)
    return [
        jax.tree.map(lambda p, g, n=n: p - 0.1 * g[n], own, grads) for n, own in enumerate(params)
    ]


normalised = layered(lambda y, p: layer(y - y.mean(0), p))


@pytest.mark.parametrize(
    ("own", "reason"),
    [(scanned, "no pipeline of 2 stages: no equal layers"), (normalised, "rows of the batch")],
)
def test_why_there_is_no_pipeline(own, reason, judge):
    found = plan(lowered_of(own), **OPTIONS, axes=("pipeline", "data"), batch_dims={"x": 0})
    assert any(reason in note for note in found.notes)
    with pytest.raises(PlanError, match=reason):
        plan(lowered_of(own), **OPTIONS, axes=("pipeline",), batch_dims={"x": 0})
