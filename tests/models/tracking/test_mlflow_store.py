"""What a user finds in MLflow: distinct runs, the data, all parameters; and a server that ends."""

import os
import signal
import socket
import subprocess
import sys
import time

import pandas as pd
import pytest

from opcast import __version__
from opcast.common.errors import OpcastError
from opcast.features.devices.catalogue import find_device
from opcast.features.kernels.extract import kernel_from_ir
from opcast.models.cost_model import CostModel
from opcast.models.tracking.mlflow_store import RunLog, log_run, shown_metrics
from opcast.models.tracking.tracked_runs import runs
from opcast.predict.locate import OPERATOR_MODEL, find_model
from opcast.predict.operator.case import OperatorCase
from opcast.predict.operator.predict import predict_op

pytest.importorskip("mlflow", reason="MLflow is not installed")
pytestmark = [
    # Importing mlflow.pyfunc gives it.
    pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType"),
]


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
        {"mape": 0.1, "kind:gemm/mape": 0.2, "program/mape": 0.3, "bias": float("nan"),
         "device:cpu-2c~130gf/mape": 0.4}
    )  # fmt: skip
    assert shown == {
        "mape": 0.1,
        "parts/kind:gemm/mape": 0.2,
        "program/mape": 0.3,
        "parts/device:cpu-2c_130gf/mape": 0.4,
    }


def test_figures_of_a_machine_that_was_measured_are_logged(tmp_path):
    name = "device:cpu-amd-epyc-2c~130gf-28.4gbs/n"
    log_run(RunLog("run", {}, {name: 3.0}), root=tmp_path / "mlruns")
    (table,) = [runs(root=tmp_path / "mlruns")]
    assert table["metrics.parts/device:cpu-amd-epyc-2c_130gf-28.4gbs/n"].tolist() == [3.0]


def registered(tmp_path, folder):
    """The model as a user of MLflow loads it."""
    import mlflow

    root = tmp_path / "mlruns"
    log_run(RunLog("run", {}, {}, model_dir=folder), register="mine", root=root)
    loaded = mlflow.pyfunc.load_model("models:/mine/1")
    assert loaded.metadata.get_output_schema().input_names() == OUTPUTS
    return loaded, loaded.metadata.get_input_schema().input_names()


OUTPUTS = ["latency_us", "lo_us", "hi_us", "in_domain"]
KERNEL = (
    "HloModule k\nENTRY e {\n  a = f32[64,256]{1,0} parameter(0)\n"
    "  ROOT r = f32[64,256]{1,0} tanh(a)\n}\n"
)


def test_a_registered_model_of_kernels_is_loaded_by_mlflow(tmp_path):
    folder = tmp_path / "model"
    CostModel.untrained("roofline").save(folder)
    loaded, columns = registered(tmp_path, folder)
    assert columns == ["kernel_ir", "device"]
    rows = pd.DataFrame(
        {"kernel_ir": [KERNEL] * 2, "device": ["h100-sxm", "tpu-v5e"]}, index=[7, 3]
    )
    found = loaded.predict(rows)
    assert list(found) == OUTPUTS and list(found.index) == [7, 3]
    own = CostModel.load(folder)
    for place, name in zip((7, 3), rows["device"], strict=True):
        expected = own.predict_kernels([kernel_from_ir(KERNEL)], find_device(name))
        assert found["latency_us"][place] == pytest.approx(1e6 * expected.latency[0])
        assert found["lo_us"][place] < found["latency_us"][place] < found["hi_us"][place]
    for wrong, what in ((rows.assign(kernel_ir="x"), "row 0"), (rows.assign(device="x"), "'x'")):
        with pytest.raises(OpcastError, match=what):
            loaded.predict(wrong)
    with pytest.raises(Exception, match="missing inputs"):
        loaded.predict(rows[["device"]])


def test_a_registered_model_of_operators_is_loaded_by_mlflow(tmp_path):
    loaded, columns = registered(tmp_path, find_model(OPERATOR_MODEL))
    assert columns == ["op", "device"]
    text = "linear m=64 n=4096 k=4096 dtype=bf16 backend=vllm"
    rows = pd.DataFrame({"op": [text] * 2, "device": ["h100-sxm", "b200"]})
    found = loaded.predict(rows)
    for place, name in enumerate(rows["device"]):
        expected = predict_op(OperatorCase(text, name))
        assert found["latency_us"][place] == pytest.approx(expected.latency_us, rel=1e-6)
        assert found["hi_us"][place] == pytest.approx(expected.hi_us, rel=1e-6)
        assert found["in_domain"][place] == expected.in_domain
    with pytest.raises(OpcastError, match="row 1"):
        loaded.predict(rows.assign(op=[text, "linear m=1"]))


@pytest.mark.slow
@pytest.mark.exhaustive  # half a minute until MLflow serves
def test_the_ui_names_the_experiment_and_ends_its_workers(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "OPCAST_MLRUNS": str(tmp_path / "mlruns"), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "opcast", "ui", "--port", str(port)]
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
