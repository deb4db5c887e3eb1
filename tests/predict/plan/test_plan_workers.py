"""Plans compiled in processes, on Ray and after Ctrl-C are those of one process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from opcast.predict.plan import search
from opcast.predict.plan.answer import plan

#: A layer with its gradient; the batch is 128, the hidden dimension 512.
STEP = """
import jax, jax.numpy as jnp

def step(w, x, y):
    def loss(w):
        return jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"] - y) ** 2)
    return jax.tree.map(lambda a, g: a - 0.1 * g, w, jax.grad(loss)(w))

def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)

w = {"up": struct(256, 512), "down": struct(512, 64)}
text = jax.jit(step, donate_argnums=0).lower(w, struct(128, 256), struct(128, 64)).as_text()
"""
OPTIONS = {
    "cluster": "h100-sxm-x4",
    "lowering": "fused",
    "model": "roofline",
    "axes": ("data", "fsdp", "tensor"),
    "compiles": 3,
}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def program():
    made: dict[str, str] = {}
    exec(STEP, made)
    return made["text"]


@pytest.fixture(scope="module")
def here(program):
    return plan(program, **OPTIONS)


def content(answer):
    """All but how long it took."""
    data = answer.to_dict()
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in data["rows"]]
    front = [row["key"] for row in data["front"]]
    alone = data["one_device"]["latency_us"]
    return {**data, "best": data["best"]["key"], "rows": rows, "front": front, "one_device": alone}


@pytest.mark.exhaustive  # two processes that start
def test_processes_give_the_same_plans(program, here):
    assert content(plan(program, **OPTIONS, workers=2)) == content(here)


def test_ray_gives_the_same_plans_even_if_a_worker_dies(program, here, tmp_path, monkeypatch):
    ray = pytest.importorskip("ray", reason="the extra 'scale' is not installed")
    flag = tmp_path / "died"
    monkeypatch.setattr(search, "judge_plans", dying(str(flag)))
    try:
        found = plan(program, **OPTIONS, ray="local")
    finally:
        ray.shutdown()
    assert flag.exists()
    assert content(found) == content(here)


def dying(flag):
    """``judge_plans``, in a worker that dies in its first piece."""

    def judge_or_die(job, programs):
        from opcast.predict.plan.judge import judge_plans

        if not Path(flag).exists():
            Path(flag).touch()
            os._exit(1)
        return judge_plans(job, programs)

    return judge_or_die


def rows_of(path):
    return json.loads(path.read_text())["rows"] if path.exists() else {}


def command_of(folder, program, *more):
    """A search of three plans whose results are in a folder."""
    (folder / "step.mlir").write_text(program)
    return [
        sys.executable, "-m", "opcast", "plan", str(folder / "step.mlir"), "--json",
        "--cluster", "h100-sxm-x4", "--lowering", "fused", "--model", "roofline",
        "--axes", "data,fsdp,tensor", "--compiles", "3", "--out", str(folder / "plans"), *more,
    ]  # fmt: skip


#: The command line, where the search waits for ever in its second plan, once it has touched a file.
HOLDS = """
import sys, time
from pathlib import Path
from opcast import cli
from opcast.predict.plan import search

judge, begun, held = search.judge_plans, *map(Path, sys.argv[1:3])

def hold(job, programs):
    if begun.exists():
        held.touch()
        while True:
            time.sleep(1)
    begun.touch()
    return judge(job, programs)

search.judge_plans = hold
sys.argv = ["opcast", *sys.argv[3:]]
cli.main()
"""


def stopped(command, folder, stop):
    """Send a search a signal while it compiles its second plan; returns its exit status."""
    known, held = folder / "plans" / "plan.json", folder / "held"
    holding = [sys.executable, "-c", HOLDS, str(folder / "begun"), str(held), *command[3:]]
    with (folder / "first.json").open("w") as out:
        running = subprocess.Popen(holding, stdout=out, start_new_session=True)
        # One row is that of one device.
        while not held.exists() or len(rows_of(known)) < 2:
            assert running.poll() is None
            time.sleep(0.01)
        # To all of its processes, as a terminal sends it.
        os.killpg(running.pid, stop)
        return running.wait(120)


def goes_on(command, folder, here):
    """The same command compiles the plans that are left, and those alone; the rows known before."""
    kept = rows_of(folder / "plans" / "plan.json")
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    second = json.loads(again.stdout)
    # To the last bit: with the time that compiling took then.
    assert all(row == kept[row["key"]] for row in second["rows"] if row["key"] in kept)
    times = [(row["key"], row["latency_us"]) for row in second["rows"]]
    assert times == [(row.key, row.latency_us) for row in here.rows]
    return kept


@pytest.mark.exhaustive  # compiles in three processes
def test_ctrl_c_keeps_what_is_compiled(program, here, tmp_path):
    command = command_of(tmp_path, program)
    assert stopped(command, tmp_path, signal.SIGINT) == 130
    first = json.loads((tmp_path / "first.json").read_text())
    assert len(first["rows"]) == 1
    assert any("the search was stopped" in note for note in first["notes"])
    kept = goes_on(command, tmp_path, here)
    assert set(kept) == {row["key"] for row in [*first["rows"], first["one_device"]]}


# Ray's own processes are other programs, which JAX's warning of forks does not concern.
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_a_search_on_ray_goes_on_after_its_driver_died(program, here, tmp_path, ray_cluster):
    command = command_of(tmp_path, program, "--ray", ray_cluster.address)
    assert stopped(command, tmp_path, signal.SIGKILL) == -signal.SIGKILL
    assert len(goes_on(command, tmp_path, here)) == 2
