"""The operator model that comes with the package."""

import numpy as np
import pandas as pd
import pytest

from opcast.features.devices.catalogue import device_names, find_device
from opcast.features.operators import FAMILIES
from opcast.features.operators.schema import TRACED
from opcast.models.operators import OpModel
from opcast.predict.locate import find_model


@pytest.fixture(scope="module")
def model():
    return OpModel.load(find_model("gpu-operators"))


def gemm(device, m=4096, dtype="bf16", **changes):
    row = {
        "id": "x", "key": "graph/linear", "op": "linear", "family": "linear", "dtype": dtype,
        "backend": "vllm", "kernel": "torch.nn.functional.linear", "device": device, "b": 1,
        "m": m, "n": 4096, "k": 4096,
    }  # fmt: skip
    return row | changes


def test_it_has_every_family_and_says_where_it_comes_from(model):
    assert set(model.families) == set(FAMILIES) - set(TRACED)
    assert {"h100-sxm", "a100-sxm-80gb", "rtx-pro-6000", "v100-pcie", "mi100"} <= set(model.devices)
    assert model.info["rows"] > 3_000_000
    assert model.info["metrics"], "figures of the same model, trained on the training rows alone"


def test_a_large_product_runs_near_the_peak(model):
    found = model.predict(pd.DataFrame([gemm("h100-sxm", 8192)]))
    work = 2 * 8192 * 4096 * 4096
    share = work / find_device("h100-sxm").matrix_peak("bf16") / found.latency[0]
    assert 0.55 < share < 0.95
    assert found.scope[0] == "known"
    assert found.lo[0] < found.latency[0] < found.hi[0]


def test_more_work_takes_longer(model):
    rows = pd.DataFrame([gemm("h200-sxm", m) for m in (16, 256, 1024, 4096, 16384)])
    assert (np.diff(model.predict(rows).latency) > 0).all()


def test_unseen_gpus_get_wider_intervals(model):
    names = ("b200", "gb300", "h100-sxm", "l40s", "h20")
    found = model.predict(pd.DataFrame([gemm(name) for name in names]))
    assert list(found.scope) == ["known", "sibling", "known", "unseen", "unseen"]
    width = found.hi / found.lo
    assert width[3] > 1.5 * width[2] and width[4] > 1.5 * width[2] and width[1] > width[0]
    # B200 has 2.3 times H100's bf16 peak, L40S 0.37 times, H20 0.15 times.
    assert found.latency[0] < found.latency[2] < found.latency[3] < found.latency[4]


def test_every_gpu_of_the_catalogue_can_be_predicted(model):
    gpus = [n for n in device_names() if find_device(n).platform == "gpu"]
    found = model.predict(pd.DataFrame([gemm(name, dtype="fp16") for name in gpus]))
    assert np.isfinite(found.latency).all() and (found.latency > 1e-5).all()


def test_a_vendors_own_library_is_not_new_on_its_next_chip():
    """Experts of aiter, which other chips of the vendor ran: the ends of an unseen chip."""
    model = OpModel.load(find_model("blocks"), only=["layer/experts"])
    row = {
        "key": "layer/experts", "op": "fused_moe", "dtype": "bf16", "backend": "aiter",
        "device": "mi250x", "tokens": 512, "hidden": 4096, "inter": 1536, "topk": 8,
        "experts": 128, "ep": 1, "routed": 4096,
    }  # fmt: skip
    rows = pd.DataFrame([row, {**row, "backend": "torch_xla"}])
    found = model.predict(rows)
    lo, hi = model.families["layer/experts"].intervals.ends.ends["*", 0]
    assert np.log(found.hi / found.lo)[0] == pytest.approx(hi - lo)
    assert np.log(found.hi / found.lo)[1] == pytest.approx(2 * (hi - lo))


@pytest.mark.parametrize("device", ["h100-sxm", "h200-sxm", "h800-sxm"])
def test_profiled_products_of_a_new_layer_have_ends_of_their_own(model, device):
    """Those of layers left out held 78 % of them as single rows' ends, and hold 92 % now."""
    row = gemm(device, key="profiled/linear", dtype="fp8", kernel="", backend="")
    rows = pd.DataFrame(
        [
            row | {"n": n, "trans_a": 0, "trans_b": 1, "preshuffled": 0, "rotated": 1}
            for n in (4096, 4672)
        ]
    )
    found = model.predict(rows)
    width = found.hi / found.lo
    assert f"{device}|1|4096|4096" in model.families["profiled/linear"].groups
    assert width[1] > 1.02 * width[0]
    assert width[1] < 1.3


@pytest.mark.parametrize(
    ("dtype", "width"), [("bf16", 2.0), ("fp8", 1.0), ("int8_wo", 1.0), ("int4_wo", 0.5)]
)
def test_no_interval_reaches_below_the_bytes_that_no_cache_holds(model, dtype, width):
    gpus = [n for n in device_names() if find_device(n).platform == "gpu"]
    rows = [gemm(name, 16, dtype, n=28672, k=16384, backend="", kernel="") for name in gpus]
    found = model.predict(pd.DataFrame(rows))
    weights = 28672 * 16384 * width
    for name, lo in zip(gpus, found.lo, strict=True):
        device = find_device(name)
        if weights >= 2 * device.cache_bytes:
            assert lo >= 0.999 * weights / device.bandwidth, name
