import numpy as np
import pytest

import opcast
from opcast.common.errors import DeviceError, ModelError, ProgramError
from opcast.features.devices.catalogue import find_device
from opcast.features.operators import op_features
from opcast.models.operators import OpModel
from opcast.models.operators.model import default_settings
from opcast.predict.operator.predict import explain_operator, predict_op

LINEAR = "linear m=64 n=4096 k=4096 dtype=bf16 backend=vllm"


@pytest.fixture(scope="module")
def predictor(op_rows, tmp_path_factory):
    """A model of products that take twice their analytical estimate."""
    device = find_device("h100-sxm")
    rows = op_rows("graph/linear", 400).assign(device=device.name)
    base = op_features(rows, "graph/linear", {device.name: device}).base_s
    folder = tmp_path_factory.mktemp("models") / "ops"
    model = OpModel().fit(
        rows.assign(latency_us=2e6 * base), {device.name: device}, default_settings("ridge")
    )
    model.save(folder)
    return opcast.load(folder)


def test_operators_and_kernels_may_be_asked_together(predictor):
    found = predictor.latencies_us([LINEAR, LINEAR.replace("m=64", "m=8192")], "h100-sxm")
    # Never below the bytes of the weights, or the arithmetic, at the peak.
    assert found[0] > 4096 * 4096 * 2 / 3.35e12 * 1e6
    assert found[1] > 2 * 8192 * 4096 * 4096 / 989.4e12 * 1e6
    assert predictor.latency_us(LINEAR, "h100-sxm") == pytest.approx(found[0])
    assert predictor.latency_us(LINEAR, "h100-sxm") == predictor.latency_us(LINEAR, "h100-sxm")
    assert np.all(np.isfinite(found))


def test_what_is_no_operator_or_not_known_is_named(predictor):
    with pytest.raises(ProgramError, match="no operator"):
        predictor.latency_us("conversion m=1 dtype=bf16", "h100-sxm")
    with pytest.raises(ModelError, match="knows no operators"):
        predictor.latency_us("bmm b=2 m=8 n=8 k=8 dtype=bf16", "h100-sxm")


@pytest.mark.parametrize("ask", [predict_op, explain_operator])
def test_the_machine_at_hand_is_no_device_of_operators(ask):
    # Before a model is looked for: the device is refused whatever the model.
    with pytest.raises(DeviceError, match="an operator needs a device"):
        ask(LINEAR, "local", model="/nowhere")
