"""Plans of programs: what may be cut, what it costs, and what the answer says."""

import inspect
import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from opcast.common.errors import DatasetError, FileError, LoweringError, PlanError, ProgramError
from opcast.features.ir.mlir.bindings import parse_module, walk_ops
from opcast.predict.api import loaded
from opcast.predict.plan.answer import plan
from opcast.predict.plan.arguments import parse_batch_dims
from opcast.predict.plan.case import PlanCase
from opcast.predict.plan.cost import Screened
from opcast.predict.plan.judge import CompiledPlan, PlanRow, Wait, chosen
from opcast.predict.plan.program import read_planned
from opcast.predict.plan.search import PlanSearch
from opcast.predict.plan.space import Plan, assign
from opcast.simulate.clusters.catalogue import find_cluster

F32 = jnp.float32
BATCH, WIDTH, HIDDEN, OUT = 128, 256, 512, 64


def struct(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def train(weights, x, y):
    def loss(weights):
        hidden = jnp.tanh(x @ weights["up"])
        return jnp.mean((hidden @ weights["down"] - y) ** 2)

    grads = jax.grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)


WEIGHTS = {"up": struct(WIDTH, HIDDEN), "down": struct(HIDDEN, OUT)}
X, Y = struct(BATCH, WIDTH), struct(BATCH, OUT)


@pytest.fixture(scope="module")
def lowered():
    return jax.jit(train, donate_argnums=0).lower(WEIGHTS, X, Y)


@pytest.fixture(scope="module")
def program(lowered):
    return read_planned(lowered)


@pytest.fixture(scope="module")
def sheet(program):
    return program.sheet(find_cluster("h100-sxm-x4"), loaded("roofline"))


def label(program, size):
    """Class of the dimensions of a size."""
    (found,) = {c for c, extent in program.space.class_sizes.items() if extent == size}
    return found


def events(sheet, *mesh, tensor=()):
    found = {}
    for event, times in sheet.events(Plan(mesh, tensor)).items():
        key = (event.kind, event.axes, event.hidden)
        found[key] = found.get(key, 0) + event.size * times
    return found


def test_arguments_are_told_apart(program):
    found = [(a.name, a.role) for a in program.arguments]
    assert found == [
        ("weights['down']", "parameter"),
        ("weights['up']", "parameter"),
        ("x", "batch"),
        ("y", "batch"),
    ]
    assert [a.output for a in program.arguments] == [0, 1, -1, -1]


def test_roles_do_not_need_donation():
    """State of an optimiser, frozen weights with adapters, and a cache have their own roles."""

    def loss(weights, x, y):
        return jnp.mean((jnp.tanh(x @ weights["up"]) @ weights["down"] - y) ** 2)

    def momentum(weights, moments, x, y):
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, jax.grad(loss)(weights, x, y))
        return jax.tree.map(lambda w, m: w - 0.1 * m, weights, moments), moments

    def roles(lowered):
        return {a.name: a.role for a in read_planned(lowered).arguments}

    found = roles(jax.jit(momentum).lower(WEIGHTS, WEIGHTS, X, Y))
    assert found == {
        "weights['down']": "parameter",
        "weights['up']": "parameter",
        "moments['down']": "state",
        "moments['up']": "state",
        "x": "batch",
        "y": "batch",
    }

    def adapted(adapter, frozen, x, y):
        def own(adapter):
            return jnp.mean((x @ frozen + (x @ adapter["a"]) @ adapter["b"] - y) ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, adapter, jax.grad(own)(adapter))

    adapter = {"a": struct(WIDTH, 8), "b": struct(8, OUT)}
    found = roles(jax.jit(adapted, donate_argnums=0).lower(adapter, struct(WIDTH, OUT), X, Y))
    assert found == {
        "adapter['a']": "parameter",
        "adapter['b']": "parameter",
        "frozen": "parameter",
        "x": "batch",
        "y": "batch",
    }

    def decode(params, cache, x, position):
        kept = jax.lax.dynamic_update_slice(cache, (x @ params["k"])[:, None], (0, position, 0))
        scores = jax.nn.softmax(jnp.einsum("bd,bsd->bs", x @ params["q"], kept))
        return kept, jnp.einsum("bs,bsd->bd", scores, kept) @ params["v"]

    params = {name: struct(WIDTH, WIDTH) for name in "kqv"}
    args = (params, struct(BATCH, 96, WIDTH), X, struct(dtype=jnp.int32))
    found = roles(jax.jit(decode, donate_argnums=1).lower(*args))
    assert {name: found[name] for name in ("cache", "x", "position")} == {
        "cache": "state",
        "x": "batch",
        "position": "other",
    }
    assert {found[f"params['{name}']"] for name in "kqv"} == {"parameter"}


def test_an_argument_with_the_batch_is_not_cut_twice():
    """A cache that lies along the batch keeps one cut by ``fsdp``."""

    def read(w, cache, x):
        return cache + x @ w

    args = (struct(WIDTH, OUT), struct(BATCH, OUT), X)
    found = read_planned(jax.jit(read, donate_argnums=1).lower(*args))
    plan = Plan((("fsdp", 4),))
    cache = next(own for own in found.arguments if own.name == "cache")
    assert cache.role == "state"
    assert found.argument_spec(cache, plan) == (("fsdp",), ())


def test_dimensions_that_are_cut_together(program):
    down, up, x, y = (a.classes for a in program.arguments)
    # The hidden dimension of both weights, the batch of inputs and labels, the output's.
    assert (up[1], up[0], x[0], y[1]) == (down[0], x[1], y[0], down[1])
    assert len({*up, *down, *x, *y}) == 4
    assert program.space.batch == {x[0]}
    assert set(program.space.tensor) == {label(program, n) for n in (WIDTH, HIDDEN, OUT)}


def test_gradients_are_reduced_and_parameters_gathered(sheet):
    weights = 4 * (WIDTH * HIDDEN + HIDDEN * OUT)
    loss = {("all_reduce", ("data",), True)}
    assert events(sheet, ("data", 4))["all_reduce", ("data",), True] == weights
    assert set(events(sheet, ("data", 4))) == loss
    found = events(sheet, ("fsdp", 4))
    assert found["reduce_scatter", ("fsdp",), True] == weights
    # The first weight is read forward only, for no gradient of the input is wanted.
    assert found["all_gather", ("fsdp",), True] == weights / 4 + 4 * HIDDEN * OUT / 4


def test_megatron_reduces_the_second_product(program, sheet):
    hidden = label(program, HIDDEN)
    found = events(sheet, ("tensor", 4), tensor=(hidden,))
    assert found == {("all_reduce", ("tensor",), False): 4 * BATCH * OUT}
    both = events(sheet, ("data", 2), ("tensor", 2), tensor=(hidden,))
    # Each device has half of the batch, and half of each gradient.
    assert both["all_reduce", ("tensor",), False] == 4 * BATCH / 2 * OUT
    assert both["all_reduce", ("data",), True] == 4 * (WIDTH * HIDDEN + HIDDEN * OUT) / 2


def test_memory_of_parameters_is_shared(sheet):
    """And that of their gradients and what they are summed from, if in use at the peak."""
    whole = sheet.memory(Plan((("data", 4),)))
    cut = sheet.memory(Plan((("fsdp", 4),)))
    parameters = 0.75 * 4 * (WIDTH * HIDDEN + HIDDEN * OUT)
    assert parameters < whole - cut <= 3 * parameters


def test_an_axis_cuts_one_dimension():
    cuts = {1: ("data", "expert"), 2: ("expert",), 3: ("sequence",)}
    assert assign((1, 2, 0), cuts) == (("data",), ("expert",), ())
    # Scores of attention: queries' positions are cut, so keys' are whole.
    assert assign((3, 3), cuts) == (("sequence",), ())
    assert assign((3, 3), cuts, first=0) == (("sequence",), ())


def test_plans_divide_the_sizes(program):
    found = list(program.space.plans(4, ("data", "fsdp", "tensor"), 2))
    meshes = {p.mesh for p in found}
    assert (("data", 4),) in meshes and (("fsdp", 2), ("tensor", 2)) in meshes
    assert (("tensor", 4),) not in meshes  # beyond a box
    assert all(p.devices == 4 for p in found)
    assert not list(program.space.plans(3, ("data",), 8))


def test_the_program_says_how_it_is_cut(program):
    module = parse_module(program.annotated(Plan((("data", 2), ("fsdp", 2)))))
    (main,) = [op for op in walk_ops(module) if op.name == "func.func"][:1]
    told = [str(own["mhlo.sharding"]) for own in main.attributes["arg_attrs"]]
    assert told == [
        '"{devices=[2,1,2]<=[2,2]T(1,0) last_tile_dim_replicate}"',
        '"{devices=[1,2,2]<=[2,2]T(1,0) last_tile_dim_replicate}"',
        '"{devices=[4,1]<=[4]}"',
        '"{devices=[4,1]<=[4]}"',
    ]
    calls = [op for op in walk_ops(module) if op.name == "stablehlo.custom_call"]
    assert {str(op.attributes["mhlo.sharding"]) for op in calls} == {
        '"{replicated}"',
        '"{devices=[4,1]<=[4]}"',
    }


def test_results_lie_as_their_dimensions_do():
    """Updated weights as they came, though they are not donated; a forward pass's rows cut."""
    found = read_planned(jax.jit(train).lower(WEIGHTS, X, Y))
    both = Plan((("data", 2), ("fsdp", 2)))
    specs = {a.name: found.argument_spec(a, both) for a in found.arguments}
    text = str(parse_module(found.annotated(both)))
    (head,) = [line for line in text.splitlines() if "func.func public @main" in line]
    arguments, _, results = head.partition("->")
    assert specs["weights['down']"] == (("fsdp",), ())
    told = '"{devices=[2,1,2]<=[2,2]T(1,0) last_tile_dim_replicate}"'
    assert arguments.count(told) == 1 and results.count(told) == 1
    weights = 4 * (WIDTH * HIDDEN + HIDDEN * OUT)
    assert found.kept_twice == weights
    forward = read_planned(jax.jit(lambda w, x: x @ w["up"] @ w["down"]).lower(WEIGHTS, X))
    (head,) = [
        line
        for line in str(parse_module(forward.annotated(Plan((("data", 4),))))).splitlines()
        if "func.func public @main" in line
    ]
    assert '"{devices=[4,1]<=[4]}"' in head.partition("->")[2]
    assert forward.kept_twice == 0


def test_the_first_layer_is_cut_as_the_others():
    """It has no gradient of its input, which is the program's."""

    def loss(layers, x):
        for w in layers:
            x = jnp.tanh(x @ w["up"]) @ w["down"]
        return jnp.mean(x * x)

    layer = {"up": struct(64, 256), "down": struct(256, 64)}
    args = ([layer] * 3, struct(8, 64))
    found = read_planned(jax.jit(jax.grad(loss)).lower(*args))
    hidden = {a.classes[0] for a in found.arguments if a.name.endswith("['down']")}
    assert len(hidden) == 1


def test_layers_are_cut_alike():
    def model(layers, x):
        for up, down in layers:
            x = x + jnp.tanh(x @ up) @ down
        return x

    layers = [(struct(64, 256), struct(256, 64)) for _ in range(3)]
    found = read_planned(jax.jit(model).lower(layers, struct(8, 64)))
    hidden = {a.classes[n % 2 == 0] for n, a in enumerate(found.arguments[:6])}
    assert len(hidden) == 1
    assert [a.role for a in found.arguments] == ["parameter"] * 6 + ["batch"]
    # The residual stream, which every product would have to sum up, comes last.
    assert found.space.tensor[:1] == tuple(hidden) and len(found.space.tensor) == 2


def test_loops_over_layers_count_their_trips():
    def model(stacked, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stacked)[0]

    found = read_planned(jax.jit(model).lower(struct(5, 64, 64), struct(8, 64)))
    sheet = found.sheet(find_cluster("h100-sxm-x4"), loaded("roofline"))
    assert [a.role for a in found.arguments] == ["parameter", "batch"]
    gathered = events(sheet, ("fsdp", 2))["all_gather", ("fsdp",), True]
    assert gathered == 5 * 4 * 64 * 64 / 2


def test_experts_and_positions_are_found():
    def model(table, experts, tokens):
        x = table[tokens]
        y = jnp.einsum("bsd,edf->bsef", x, experts)
        return jnp.einsum("bsef,bsef->bse", y, y)

    def batched(experts, x):
        return jnp.einsum("etd,edf->etf", x, experts)

    args = (struct(100, 32), struct(4, 32, 64), struct(8, 16, dtype=jnp.int32))
    found = read_planned(jax.jit(model).lower(*args))
    assert found.space.class_sizes[found.space.sequence] == 16
    assert found.space.expert == 0
    given = read_planned(jax.jit(batched).lower(struct(4, 32, 64), struct(4, 16, 32)), {"x": 1})
    assert given.space.class_sizes[given.space.expert] == 4
    assert "expert" in given.space.axes()


def test_what_cannot_be_planned(lowered, program):
    with pytest.raises(ProgramError, match="batch"):
        read_planned(jax.jit(lambda w: w @ w).lower(struct(8, 8)))
    with pytest.raises(PlanError, match="no argument 'z'"):
        read_planned(lowered, {"z": 0})
    with pytest.raises(PlanError, match="no dimension 5"):
        read_planned(lowered, {"x": 5})
    with pytest.raises(PlanError, match="not an argument with its batch"):
        parse_batch_dims("x=3")
    assert parse_batch_dims("3:0,x['a']:1") == {"3": 0, "x['a']": 1}
    mesh = jax.sharding.AbstractMesh((4,), ("d",))
    mapped = jax.shard_map(jnp.tanh, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    with pytest.raises(ProgramError, match="shard_map"):
        read_planned(jax.jit(mapped).trace(struct(8, 8)).lower(lowering_platforms=("cuda",)))
    with pytest.raises(PlanError, match="single device"):
        plan(lowered, cluster="h100-sxm-x1")
    with pytest.raises(PlanError, match="'pipe' is not an axis"):
        plan(lowered, cluster="h100-sxm-x4", axes=("data", "pipe"))
    odd = jax.jit(train, donate_argnums=0).lower(
        {"up": struct(5, 7), "down": struct(7, 3)}, struct(9, 5), struct(9, 3)
    )
    with pytest.raises(PlanError, match="divides"):
        plan(odd, cluster="h100-sxm-x4", model="roofline")


def test_the_dozen_has_several_meshes(program, tmp_path):
    search = PlanSearch(program, PlanCase("h100-sxm-x8", model="roofline", out=tmp_path))
    search.screen()
    chosen = search.chosen(6)
    assert len(chosen) == len(set(chosen)) == 6
    assert {p.devices for p in chosen} > {8}
    assert max(sum(p.mesh == q.mesh for p in chosen) for q in chosen) <= 3
    assert [s.seconds for s in search.screened] == sorted(s.seconds for s in search.screened)


def made(us, gib, joules=1.0, exposed=1.0, error=""):
    """A row as if its plan had been compiled."""
    if error:
        return PlanRow(error=error)
    return CompiledPlan(
        latency_us=us,
        lo_us=0.9 * us,
        hi_us=1.1 * us,
        compute_us=us - exposed,
        communication_us=exposed,
        exposed_communication_us=exposed,
        memory_bytes_per_device=gib * 2**30,
        fits=True,
        lowering="fused",
        collectives={},
        moved_bytes=1e6,
        energy_j=joules,
        waits=[Wait("all_reduce", "f.py:3", exposed, 1e6)],
        notes=[],
    )


@pytest.fixture
def judged(monkeypatch):
    """Rows to give out in place of compilations, the first plan's first."""
    rows = []

    def judge(job, programs):
        if not rows:
            raise KeyboardInterrupt
        return [replace(rows.pop(0), key=key, seconds=1.0) for key, _ in programs]

    monkeypatch.setattr("opcast.predict.plan.search.judge_plans", judge)
    monkeypatch.setattr("opcast.predict.plan.search.judge_alone", lambda *_: made(300.0, 12))
    return rows


OPTIONS = {"cluster": "h100-sxm-x4", "model": "roofline", "axes": ("data", "fsdp")}


def test_the_best_plan_and_why(lowered, judged):
    judged += [made(90.0, 3), made(70.0, 9), made(100.0, 1, exposed=40.0), made(95.0, 4)]
    found = plan(lowered, **OPTIONS, compiles=4)
    assert [row.latency_us for row in found.rows] == [70.0, 90.0, 95.0, 100.0]
    assert found.best is found.rows[0]
    # The third has more time and more memory than the second, over as many or more devices.
    assert {70.0, 90.0, 100.0} <= {row.latency_us for row in found.front}
    last = found.reasons[-1]
    assert "43% slower: 39 µs more waiting for collectives, 9 µs less computation" in last
    assert "all_reduce at f.py:3 (40 µs, 976.6 KiB)" in last
    # Half a MiB of parameters, of which a megabyte is twice: nothing to say.
    assert not found.notes


def test_one_device_is_the_baseline(lowered, judged, monkeypatch, tmp_path):
    alone = [made(60.0, 12, joules=0.5)]
    monkeypatch.setattr("opcast.predict.plan.search.judge_alone", lambda *_: alone.pop())
    judged += [made(90.0, 3), made(70.0, 9)]
    found = plan(lowered, **OPTIONS, compiles=2, out=tmp_path)
    # The best is still a plan, but it is said that it is no gain.
    assert found.best.latency_us == 70.0
    assert found.to_dict()["one_device"]["latency_us"] == 60.0
    assert next((row.name, row.devices) for row in found.front) == ("one device", 1)
    assert found.notes[0].startswith("warning: one device takes 60 µs, less than the best plan")
    # It is kept as plans are, and left out where it does not fit.
    assert plan(lowered, **OPTIONS, compiles=2, out=tmp_path).alone == found.alone
    small = plan(lowered, **OPTIONS, compiles=2, out=tmp_path, memory=10 * 2**30)
    assert small.alone is None and "one device" not in {row.name for row in small.front}
    assert not any("one device" in note for note in small.notes)
    # Arguments of half a MiB and more: nothing is compiled that cannot fit.
    assert plan(lowered, **OPTIONS, compiles=2, memory=2**19, out=tmp_path).alone is None


def test_data_parallelism_is_always_compiled(program, tmp_path):
    search = PlanSearch(program, PlanCase("h100-sxm-x8", model="roofline", out=tmp_path))
    search.screen()
    for count in (2, 4, 12):
        assert Plan((("data", 8),)) in search.chosen(count)


def test_plans_that_do_not_fit_are_not_best(lowered, judged):
    judged += [made(90.0, 3), made(70.0, 9)]
    assert plan(lowered, **OPTIONS, compiles=2, memory=4 * 2**30).best.latency_us == 90.0
    judged += [made(90.0, 3), made(70.0, 9)]
    found = plan(lowered, **OPTIONS, compiles=2, memory=2 * 2**30)
    assert found.best.latency_us == 90.0 and not found.front
    assert "needs 3.00 GiB of 2.00 GiB, 1.00 GiB too much" in found.notes[0]


def test_what_is_known_is_kept(lowered, judged, tmp_path):
    judged += [made(90.0, 3), made(0.0, 0, error="the compiler crashed")]
    found = plan(lowered, **OPTIONS, compiles=4, out=tmp_path)
    # One was compiled, one failed.
    assert found.notes == (
        "warning: only 2 of 4 chosen plans were compiled, none with data, since the search "
        "was stopped; others may be better; the same command with the same results folder "
        "continues it",
    )
    assert [row.error for row in found.rows] == ["", "the compiler crashed"]
    assert found.stopped
    # The failed plan is tried again, the one that is known is not.
    judged += [made(80.0, 3), made(81.0, 3), made(82.0, 3)]
    assert sorted(
        row.latency_us for row in plan(lowered, **OPTIONS, compiles=4, out=tmp_path).rows
    ) == [
        80.0,
        81.0,
        82.0,
        90.0,
    ]
    with pytest.raises(LoweringError, match="there was no time"):
        plan(lowered, **OPTIONS, compiles=2, budget_s=0.0)


def test_a_search_keeps_its_budget(lowered, monkeypatch):
    """What would not end in time, as far as plans before tell, is not begun."""
    clock = [0.0]
    begun = []
    ticks = SimpleNamespace(monotonic=lambda: clock[0])
    for module in ("search", "answer"):
        monkeypatch.setattr(f"opcast.predict.plan.{module}.time", ticks)

    def judge(job, programs):
        begun.append(job.timeout_s)
        clock[0] += 30.0
        return [replace(made(90.0, 3), key=key) for key, _ in programs]

    def judge_alone(job, _):
        begun.append(job.timeout_s)
        clock[0] += 10.0
        return made(300.0, 12)

    monkeypatch.setattr("opcast.predict.plan.search.judge_plans", judge)
    monkeypatch.setattr("opcast.predict.plan.search.judge_alone", judge_alone)
    reading = PlanSearch.screen

    def screen(search):
        clock[0] += 20.0
        return reading(search)

    monkeypatch.setattr(PlanSearch, "screen", screen)
    found = plan(lowered, **OPTIONS, compiles=6, budget_s=100.0)
    # 20 s of reading, a plan, one device, a plan: 10 s are left, and a plan takes 30.
    assert clock[0] == 90.0
    assert begun == [80.0, 50.0, 40.0]
    assert len(found.rows) == 2
    (note,) = (note for note in found.notes if "chosen plans" in note)
    assert note.startswith("only 2 of 4") and "the budget of time ended" in note
    # One is compiled, however short the budget; the two kinds come first.
    clock[0], begun[:] = 0.0, []
    found = plan(lowered, **OPTIONS, compiles=6, budget_s=1.0)
    assert begun == [30.0] and len(found.rows) == 1
    assert found.alone is None


def test_each_kind_of_plan_is_compiled_before_a_second(tmp_path):
    """Of experts and sequences as well, which are seldom the fastest."""
    kinds = {"data", "fsdp", "sequence", "expert", "tensor", "pipeline"}
    fast = [Plan((("fsdp", 8 // n), ("data", n))) for n in (2, 4)]
    slow = [Plan(((kind, 2), ("fsdp", 4))) for kind in sorted(kinds - {"fsdp", "data"})]
    rows = [Screened(plan, 1.0 + n, 1.0, 0.0, 0.0, 1.0) for n, plan in enumerate([*fast, *slow])]
    found = chosen(rows, 8, 8, 80e9)
    assert {axis for plan in found[:5] for axis in plan.sizes} == kinds
    # As few as are asked for, the fastest first.
    assert chosen(rows, 2, 8, 80e9)[0] == fast[0]


def test_a_missing_figure_is_no_zero(lowered, judged, tmp_path):
    judged += [made(90.0, 3)]
    plan(lowered, **OPTIONS, compiles=1, out=tmp_path)
    data = json.loads((tmp_path / "plan.json").read_text())
    for row in data["rows"].values():
        del row["latency_us"]
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(DatasetError, match=r"the row of .* has no latency_us"):
        plan(lowered, **OPTIONS, compiles=1, out=tmp_path)
    (tmp_path / "plan.json").write_text("")
    with pytest.raises(FileError, match=r"plan\.json.* is not JSON"):
        plan(lowered, **OPTIONS, compiles=1, out=tmp_path)


def test_activations_that_move_are_explained(lowered, judged):
    judged += [replace(made(90.0, 3), moved_bytes=1e8)]
    lacks, note = plan(lowered, **OPTIONS, compiles=1).notes
    assert lacks == "no plan with data was compiled: increase --compiles"
    assert "153 times the parameters: activations are moved, by all_reduce at f.py:3" in note


@pytest.mark.slow
def test_a_search_is_compiled_and_resumed(lowered, tmp_path, monkeypatch):
    options = {"cluster": "h100-sxm-x4", "lowering": "fused", "model": "roofline"}
    small = {"axes": ("data", "fsdp", "tensor"), "compiles": 2, "out": tmp_path / "plans"}
    first = plan(lowered, **options, **small)
    assert first.best.name in {row.name for row in first.front}
    assert first.best.latency_us == min(row.latency_us for row in first.rows)
    assert not [row for row in first.rows if row.error]
    assert json.loads(json.dumps(first.to_dict()))["screened"] == first.screened
    # A second search reads what the first one found.
    monkeypatch.setattr("opcast.predict.plan.search.judge_plans", None)
    again = plan(lowered, **options, **small)
    assert again.to_dict() == first.to_dict()
    with pytest.raises(DatasetError, match="another program"):
        read = jax.jit(lambda w, x: x @ w).lower(struct(64, 64), struct(64, 64))
        plan(read, **options, **small)
    # The annotated program is one that the other commands take, and the code runs.
    saved = first.save(tmp_path / "annotated.mlir")
    from opcast.predict.cluster.partitioned import predict_partitioned

    found = predict_partitioned(saved, find_cluster("h100-sxm-x4"), loaded("roofline"))
    assert found.devices == first.best.devices
    assert not any("donate" in note for note in first.notes)
    (jitted,) = [line for line in first.code.splitlines() if line.startswith("# jax.jit(step, ")]
    call = jitted[2:].partition(", donate_argnums")[0] + ")"
    script = f"""{first.code}
import jax.numpy as jnp
{inspect.getsource(train)}
keys = iter(jax.random.split(jax.random.key(0), 4))
weights = {{
    "up": jax.random.normal(next(keys), ({WIDTH}, {HIDDEN})) / 16,
    "down": jax.random.normal(next(keys), ({HIDDEN}, {OUT})) / 16,
}}
x = jax.random.normal(next(keys), ({BATCH}, {WIDTH}))
y = jax.random.normal(next(keys), ({BATCH}, {OUT}))
step = train
there = {call}(weights, x, y)
here = jax.jit(step)(weights, x, y)
for one, other in zip(jax.tree.leaves(there), jax.tree.leaves(here), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
print(len(there["up"].sharding.device_set))
"""
    made = subprocess.run(
        [sys.executable, "-c", script],
        env={"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    assert int(made.stdout) == first.best.devices


@pytest.mark.slow
def test_a_forward_pass_needs_no_collective():
    """Its batch is cut, and nothing is exchanged."""
    lowered = jax.jit(lambda w, x: jnp.tanh(x @ w["up"]) @ w["down"]).lower(WEIGHTS, X)
    options = {"cluster": "h100-sxm-x4", "lowering": "fused", "model": "roofline"}
    found = plan(lowered, **options, axes=("data",), compiles=1)
    assert found.best.name == "data=4" and not found.best.collectives
    assert found.best.moved_bytes == 0 and found.best.exposed_communication_us == 0
