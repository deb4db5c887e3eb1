"""Tasks on two Ray nodes of one machine: the same results, whatever process or node dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from opcast.cli import app
from opcast.common import tasks
from opcast.common.errors import DatasetError, OpcastError
from opcast.common.tasks import run_tasks
from opcast.models.operators import OpModel
from opcast.predict.locate import OPERATOR_MODEL, find_model
from opcast.predict.published import judged, tables
from opcast.predict.published.judged import Pieces
from opcast.predict.sweep import run as sweep_run

ITEMS = list(range(12))


def _work(shared, item):
    """A task that takes a while; which one kills its worker, the shared folder says."""
    folder, slow = shared
    flag = Path(folder) / "died"
    if item == 3 and not flag.exists():
        flag.touch()
        os._exit(1)
    time.sleep(slow)
    return float(np.sin(item + 0.1))


@pytest.mark.slow
def test_tasks_survive_the_death_of_a_worker_and_of_a_node(tmp_path, ray_cluster):
    second = ray_cluster.add_node(num_cpus=1)
    ray_cluster.wait_for_nodes()
    found = {}
    for place, result in run_tasks(_work, (str(tmp_path), 0.5), ITEMS, ray_cluster.address):
        found[place] = result
        if len(found) == 3:
            ray_cluster.remove_node(second)
    assert (tmp_path / "died").exists()
    # To the bit, and in the places of their items.
    assert [found[i] for i in ITEMS] == [float(np.sin(i + 0.1)) for i in ITEMS]


def _refuse(shared, item):
    raise DatasetError("no such row", where=f"item {item}")


@pytest.mark.slow
def test_errors_of_tasks_are_those_of_opcast(ray_cluster):
    with pytest.raises(DatasetError, match="item 0: no such row"):
        list(run_tasks(_refuse, None, [0], ray_cluster.address))


def write_rows(folder):
    """Sixteen measured products on two chips."""
    rows = [
        {"id": f"T{i}", "op": "linear", "family": "linear", "dtype": "bf16", "device": device,
         "source": "aiconfigurator", "backend": "vllm", "b": 1, "m": 2**i, "n": 4096, "k": 4096,
         "latency_us": 10.0 + i, "split": "val"}
        for i in range(8) for device in ("h100-sxm", "b200")
    ]  # fmt: skip
    folder.mkdir(exist_ok=True)
    pd.DataFrame(rows).to_parquet(folder / "ops_mine.parquet")
    return folder


@pytest.mark.slow
def test_tables_are_predicted_as_here_though_a_node_dies(tmp_path, ray_cluster, monkeypatch):
    monkeypatch.setattr(judged, "_ROWS", 5)
    write_rows(tmp_path)
    model = OpModel.load(find_model(OPERATOR_MODEL))
    here = tables.predict_published(tmp_path, model)
    second = ray_cluster.add_node(num_cpus=1)
    ray_cluster.wait_for_nodes()

    def losing_a_node(*arguments):
        for place, found in enumerate(run_tasks(*arguments)):
            yield found
            if place == 0:
                ray_cluster.remove_node(second)

    monkeypatch.setattr(tasks, "run_tasks", losing_a_node)
    there = tables.predict_published(tmp_path, model, pieces=Pieces(ray_cluster.address))
    pd.testing.assert_frame_equal(here.frame, there.frame, check_exact=True)
    pd.testing.assert_frame_equal(here.judged, there.judged, check_exact=True)


#: A command whose process is killed once it has written a number of pieces.
KILLED = """
import os, signal, sys
from opcast.cli import app
from opcast.predict.published import judged
from opcast.predict.sweep import run

left = [int(sys.argv[1])]

def dying(write):
    def written(*arguments):
        write(*arguments)
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
    return written

judged._ROWS, run.PIECE = 2, 4
judged.Pieces._write = dying(judged.Pieces._write)
run.Sweep._write = dying(run.Sweep._write)
app(sys.argv[2:])
"""


def killed_after(count, *command):
    """Run a command in a process that is killed after a number of pieces."""
    words = [sys.executable, "-c", KILLED, str(count), *map(str, command)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr


def ran(*command):
    done = CliRunner().invoke(app, list(map(str, command)))
    assert done.exit_code == 0, done.output
    return done.output


def counting_tasks(monkeypatch):
    """Count the tasks that are sent to Ray."""
    sent = []

    def counted(work, shared, items, *others):
        sent.extend(items)
        return run_tasks(work, shared, items, *others)

    monkeypatch.setattr(tasks, "run_tasks", counted)
    return sent


@pytest.mark.slow
def test_an_evaluation_goes_on_after_its_process_died(tmp_path, ray_cluster, monkeypatch):
    monkeypatch.setattr(judged, "_ROWS", 2)
    folder = write_rows(tmp_path / "tables")
    here, there = tmp_path / "here.parquet", tmp_path / "there.parquet"
    ran("evaluate", "--published", folder, "--out", here)
    on_ray = ("evaluate", "--published", folder, "--out", there, "--ray", ray_cluster.address)
    killed_after(3, *on_ray)
    kept = tmp_path / "there-parts"
    assert not there.exists() and len(list(kept.glob("*.json"))) == 3
    sent = counting_tasks(monkeypatch)
    assert "goes on" in ran(*on_ray)
    # Eight pieces of two rows, three of which were there; to the bit, and nothing is left over.
    assert len(sent) == 5
    assert there.read_bytes() == here.read_bytes()
    assert not kept.exists()


@pytest.mark.slow
def test_a_sweep_goes_on_after_its_process_died(tmp_path, ray_cluster, monkeypatch):
    monkeypatch.setattr(sweep_run, "PIECE", 4)
    sizes = "layers=8,d_model=1024,heads=8,kv_heads=8,d_ff=4096,vocab=8192,seq=1024,batch=32"
    command = (
        *("sweep", "--workload", "llama", "--set", sizes, "--cluster", "tpu-v5e-x8", "--model"),
        *("roofline", "--grid", "tp=1/2,pp=1/2,recompute=none/full,schedule=1f1b,split=1", "--out"),
    )
    here, there = tmp_path / "here", tmp_path / "there"
    ran(*command, here)
    killed_after(2, *command, there, "--ray", ray_cluster.address)
    assert len(list((there / "parts").iterdir())) == 2
    sent = counting_tasks(monkeypatch)
    ran(*command, there, "--ray", ray_cluster.address)
    # Twenty-four plans in pieces of four.
    assert len(sent) == 4
    whole, resumed = (pd.read_parquet(folder / "sweep.parquet") for folder in (here, there))
    pd.testing.assert_frame_equal(whole, resumed, check_exact=True)


def test_kept_pieces_are_those_of_the_same_rows_and_model(tmp_path, monkeypatch):
    monkeypatch.setattr(judged, "_ROWS", 5)
    folder = write_rows(tmp_path / "tables")
    model = OpModel.load(find_model(OPERATOR_MODEL))
    asked = []

    def counted(model, piece):
        asked.append(piece)
        return predicted(model, piece)

    predicted = tables._operator_part
    monkeypatch.setattr(tables, "_operator_part", counted)
    steps = []
    own = Pieces(
        kept=tmp_path / "kept", identity=("m",), progress=lambda *state: steps.append(state)
    )
    first = tables.predict_published(folder, model, pieces=own)
    assert len(asked) == 4 and steps == [(0, 16), (5, 16), (10, 16), (15, 16), (16, 16)]
    again = tables.predict_published(folder, model, pieces=own)
    assert len(asked) == 4
    pd.testing.assert_frame_equal(first.frame, again.frame, check_exact=True)
    pd.testing.assert_frame_equal(first.judged, again.judged, check_exact=True)
    # One row has another size: its piece alone is predicted again. Another model: all are.
    table = pd.read_parquet(folder / "ops_mine.parquet")
    table.loc[7, "m"] = 17
    table.to_parquet(folder / "ops_mine.parquet")
    tables.predict_published(folder, model, pieces=own)
    assert len(asked) == 5
    tables.predict_published(folder, model, pieces=Pieces(kept=own.kept, identity=("other",)))
    assert len(asked) == 9
    next(own.kept.glob("*.json")).write_text("{}")
    with pytest.raises(DatasetError, match="the notes of a finished piece"):
        tables.predict_published(folder, model, pieces=own)


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(OpcastError, match="Ray is not installed") as refused:
        list(run_tasks(_work, None, [1], "local"))
    assert "scale" in str(refused.value)
