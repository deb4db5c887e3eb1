"""Plans that change the program so that it fits: layers computed again, micro-batches."""

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from opcast.cli import app
from opcast.common.errors import PlanError
from opcast.features.ir.mlir.bindings import parse_module, walk_ops
from opcast.predict.plan.answer import plan
from opcast.tests.support.plans import BATCH, LAYERS, WIDTH, compiled, judge_by, layered, lowered_of

GIB = 2**30
OPTIONS = {"cluster": "h100-sxm-x4", "model": "roofline", "axes": ("data", "fsdp")}


@pytest.fixture(scope="module")
def lowered():
    return lowered_of(layered(lambda y, p: jax.nn.gelu(y @ p["up"]) @ p["down"]))


def counts(program):
    """Layers that are computed again and loops in a program."""
    module = parse_module(program)  # which holds its ops
    names = [op.name for op in walk_ops(module)]
    return names.count("stablehlo.optimization_barrier"), names.count("stablehlo.while")


@pytest.fixture
def judge(monkeypatch):
    """A compiler by which a program needs 8 GiB, an eighth less for each layer, half in a loop.

    Both cost 10 µs on 100. Returns the keys that it was asked for.
    """
    asked = []

    def judged(job, key, program):
        asked.append(key)
        layers, loops = counts(program)
        memory = (8 - layers) * GIB / (1 + loops)
        return compiled(key, 100.0 + 10.0 * (layers + loops), memory_bytes_per_device=memory)

    judge_by(monkeypatch, judged)
    return asked


def changes(answer):
    return {(row.plan.change.remat, row.plan.change.micro) for row in answer.rows}


def test_what_fits_is_not_changed(lowered, judge):
    found = plan(lowered, **OPTIONS)
    assert changes(found) == {(0, 1)}
    assert "rematerialised" not in str(found.to_dict())


def screened_peak(lowered):
    """What the screening thinks that the fastest plan needs."""
    from opcast.predict.plan.case import PlanCase
    from opcast.predict.plan.program import read_planned
    from opcast.predict.plan.search import PlanSearch

    case = PlanCase("h100-sxm-x4", model="roofline", axes=("data", "fsdp"), out=None)
    search = PlanSearch(read_planned(lowered), case)
    search.screen()
    return search.screened[0].memory


def test_memory_makes_changed_plans_win(lowered, judge, monkeypatch, tmp_path):
    # The screening's bytes are real ones, those of the judge are not: the limit is the screening's,
    # and the judge's programs need a share of it.
    limit = 0.9 * screened_peak(lowered)
    monkeypatch.setattr(f"{__name__}.GIB", limit / 6)
    found = plan(lowered, **OPTIONS, memory=limit, out=tmp_path)
    # Plain needs 8 of 6; with two of the layers it is 6 of 6 at 120 µs, in a loop 4 of 6 at 110 µs.
    assert (found.best.plan.change.remat, found.best.plan.change.micro) == (0, 2)
    assert found.best.name.endswith(", 2 micro-batches")
    assert {(0, 1), (2, 1), (0, 2)} <= changes(found)
    assert found.reasons[0].startswith("without 2 micro-batches the same mesh needs")
    assert counts(found.program) == (0, 1)
    assert "def in_micro_batches(gradients, params, batch, parts=2):" in found.code
    # The same search resumes from what it kept.
    before = len(judge)
    again = plan(lowered, **OPTIONS, memory=limit, out=tmp_path)
    assert len(judge) == before and again.to_dict() == found.to_dict()


def test_changes_are_forbidden_and_asked_for(lowered, judge):
    none = plan(lowered, **OPTIONS, memory=1.0, remat=0, micro_batches=1)
    assert changes(none) == {(0, 1)}
    assert "no plan fits" in none.notes[0]
    all_layers = plan(lowered, **OPTIONS, remat="all", micro_batches="auto")
    assert changes(all_layers) == {(LAYERS, 1)}
    assert f"around each of the first {LAYERS} equal layers, starting at" in all_layers.code
    assert counts(all_layers.program) == (LAYERS, 0)
    both = plan(lowered, **OPTIONS, remat=3, micro_batches=4)
    assert changes(both) == {(3, 4)}
    assert both.best.name.endswith(", 3 layers rematerialised, 4 micro-batches")
    assert counts(both.program) == (3, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"remat": "some"}, "--remat: 'some' is not understood .auto, all or a number from 0"),
        ({"remat": -1}, "'-1' is not understood"),
        ({"micro_batches": 0}, "--micro-batches: '0' is not understood"),
        ({"remat": 5}, "5 layers cannot be rematerialised: 4 equal layers"),
        ({"micro_batches": 3}, "3 micro-batches do not divide a batch of 512"),
    ],
)
def test_what_cannot_be_asked_for(lowered, options, message):
    with pytest.raises(PlanError, match=message):
        plan(lowered, **OPTIONS, **options)


def test_why_nothing_could_be_changed(judge):
    def unequal(w, x):
        def loss(w):
            y = x @ w
            return jnp.mean((y - y.mean(0)) ** 2 * jnp.exp(y.mean(0)))

        return w - jax.grad(loss)(w)

    w = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    x = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    found = plan(jax.jit(unequal, donate_argnums=0).lower(w, x), **OPTIONS, memory=1.0)
    told = "\n".join(found.notes)
    assert "no equal layers to rematerialise were found" in told
    assert "rows of the batch depend on each other" in told


def test_the_status_says_that_nothing_fits(judge, tmp_path):
    lowered = jax.jit(lambda w, x: x @ w).lower(
        jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32),
    )
    (tmp_path / "step.mlir").write_text(lowered.as_text())
    words = ["plan", tmp_path / "step.mlir", "--cluster", "h100-sxm-x4", "--model", "roofline"]
    words += ["--axes", "data", "--out", tmp_path / "plans"]
    for memory, status in (("9GiB", 0), ("1MiB", 1)):
        result = CliRunner().invoke(app, list(map(str, [*words, "--memory", memory])))
        assert result.exit_code == status
        assert ("no plan fits" in result.output) == bool(status)
