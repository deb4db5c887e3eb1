"""What a user finds in MLflow: distinct runs, the data, all parameters; and a server that ends."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from opcast import __version__
from opcast.models.tracking.mlflow_store import RunLog, log_run, runs, shown_metrics

pytest.importorskip("mlflow", reason="MLflow is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:.*noload.*deprecated")


def test_runs_are_told_apart_and_name_their_data(tmp_path):
    data = tmp_path / "measured"
    data.mkdir()
    run = RunLog(
        "ridge-random", {"alpha": 1.0}, {"mape": 0.1}, datasets={str(data): "0123456789abcdef"}
    )
    for _ in range(3):
        log_run(run, root=tmp_path / "mlruns")
    table = runs(tmp_path / "mlruns")
    names = ["ridge-random", "ridge-random-2", "ridge-random-3"]
    assert sorted(table["tags.mlflow.runName"]) == names
    assert set(table["tags.opcast_version"]) == {__version__}
    import mlflow

    logged = mlflow.get_run(table["run_id"].iloc[0]).inputs.dataset_inputs[0].dataset
    assert (logged.name, logged.digest) == ("measured", "0123456789abcdef")
    assert str(data) in logged.source


def test_metrics_of_the_whole_come_before_those_of_parts():
    shown = shown_metrics(
        {"mape": 0.1, "kind:gemm/mape": 0.2, "program/mape": 0.3, "bias": float("nan")}
    )
    assert shown == {"mape": 0.1, "parts/kind:gemm/mape": 0.2, "program/mape": 0.3}


@pytest.mark.slow
def test_the_ui_names_the_experiment_and_ends_its_workers(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "OPCAST_MLRUNS": str(tmp_path / "mlruns"), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "opcast.cli", "ui", "--port", str(port)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as ui:
        assert f"http://127.0.0.1:{port}/#/experiments/1" in ui.stdout.readline()
        deadline = time.monotonic() + 120
        while not _answers(port):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        ui.send_signal(signal.SIGTERM)
        assert ui.wait(timeout=30) == 128 + signal.SIGTERM
    deadline = time.monotonic() + 10
    while _answers(port):
        assert time.monotonic() < deadline, "a worker still listens"
        time.sleep(0.1)


def _answers(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
