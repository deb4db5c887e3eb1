import os
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from opcast.common.errors import DatasetError
from opcast.common.interval import combined_spread
from opcast.models.operators import OpModel
from opcast.predict.operator.prices import KERNEL_US, kernel_us
from opcast.predict.published.composition import (
    BUCKET_BYTES,
    RUN_ERROR,
    compose,
)
from opcast.predict.published.graph_program import node_repeats
from opcast.predict.published.opgraph import node_kernels

LAUNCH, LINEAR, VECTOR, LINK = 10.0, 110.0, 30.0, 50.0


def graph(desc, extra=()):
    """A prologue, one layer (a linear and an addition) and an epilogue."""
    nodes = [
        ("wte", "misc", "[]", "[]"),
        ("transformer_h_0_ln_1", "Linear", "[['Linear', (64, 32, 16)]]",
         "[['Linear', (64, 16, 32)], ['Linear', (16, 64, 32)]]"),
        *extra,
        ("add_15", "VECadd", "[['VECadd', (64, 16)]]", "[['MEM', ((64, 16),)]]"),
        ("lm_head", "Linear", "[['Linear', (64, 16, 999)]]", "[]"),
    ]  # fmt: skip
    frame = pd.DataFrame(nodes, columns=["Name", "OpName", "FwOps", "BwOps"])
    shapes = {"InputShapes": "[(64, 16), (64, 16)]", "OutputShape": "(64, 16)", "AccOps": "[]"}
    return frame.assign(desc=desc, **shapes)


def label(desc="g", mode="inf", variant=None, n_layer=2, **columns):
    row = {"desc": desc, "device": "d", "model": "gpt2_large", "mode": mode, "n_layer": n_layer}
    return pd.DataFrame([{**row, "variant": variant, **columns}])


def answer(times, low=0.8, high=1.5):
    times = np.asarray(times, dtype=float)
    return pd.DataFrame({"latency_us": times, "lo_us": low * times, "hi_us": high * times})


def op_latency(table):
    probe = (table["op"] == "relu") & (table["rows"] == 1) | (table["op"] == "bmm")
    linear = np.where(table["family"] == "linear", LINEAR, VECTOR)
    return answer(np.where(probe, LAUNCH, linear))


def exact(table):
    times = op_latency(table)
    return times.assign(lo_us=times["latency_us"], hi_us=times["latency_us"])


def answer_of(time, low, high, table):
    return answer(np.full(len(table), time), low, high)


def link_latency(table):
    return answer(np.full(len(table), LINK))


#: One linear and one addition in a stream of kernels, in microseconds.
G, V = LINEAR - LAUNCH + KERNEL_US, VECTOR - LAUNCH + KERNEL_US


def test_two_layers_and_an_epilogue():
    found = compose(label(), graph("g"), op_latency, link_latency).iloc[0]
    assert found["latency_ms"] == pytest.approx((2 * (G + V) + G) / 1e3)
    assert found["fw_ms"] == found["latency_ms"] and found["bw_ms"] == 0.0
    assert found["lo_ms"] < found["latency_ms"] < found["hi_ms"]


def test_products_whose_launch_is_shorter_lose_no_more_than_it():
    def latency(table):
        return answer(np.where(table["op"] == "bmm", LAUNCH - 4, op_latency(table)["latency_us"]))

    found = compose(label(), graph("g"), latency, link_latency).iloc[0]
    assert found["latency_ms"] == pytest.approx((2 * (G + 4 + V) + G + 4) / 1e3)


def test_training_adds_the_backward_pass():
    found = compose(label(mode="train"), graph("g"), op_latency, link_latency).iloc[0]
    assert found["bw_ms"] == pytest.approx(2 * 2 * G / 1e3)
    assert found["latency_ms"] == pytest.approx((2 * (G + V) + G + 4 * G) / 1e3)


def test_the_estimator_is_asked_once_for_each_operation():
    asked = []

    def latency(table):
        asked.append(table)
        return op_latency(table)

    compose(pd.concat([label(), label()]), graph("g"), latency, link_latency)
    # The probes, two linears of different shape and the addition.
    assert len(asked) == 1 and len(asked[0]) == 5
    assert set(asked[0]["device"]) == {"d"}
    assert asked[0]["m"].dtype == "Int64"


def test_tensor_parallel_all_reduces_add_up():
    node = ("reduce", "allreduce", "[['ALLREDUCE', (1024,)]]", "[['ALLREDUCE', (1024,)]]")
    asked = []

    def latency(table):
        asked.append(table)
        return link_latency(table)

    found = compose(label(mode="train", variant="tp4"), graph("g", [node]), op_latency, latency)
    assert found["communication_ms"].iloc[0] == pytest.approx(2 * 2 * LINK / 1e3)
    row = asked[0].iloc[0]
    assert (row["op"], row["bytes"], row["world_size"]) == ("all_reduce", 4096, 4)


@pytest.mark.parametrize("slow", [False, True])
def test_gradients_hide_behind_the_backward_pass(slow):
    elements = 4 * BUCKET_BYTES // 4
    node = ("x_grad", "allreduce", "[]", f"[['ALLREDUCE_ASYNC', ({elements},)]]")
    time = 1000.0 if slow else 100.0

    def latency(table):
        return answer(np.full(len(table), time))

    found = compose(label(mode="train", variant="dp4"), graph("g", [node]), op_latency, latency)
    backward = 4 * G
    # Two layers send 4 buckets each: the last of 8 buckets is exposed, or all that exceeds.
    expected = 2 * time - backward if slow else 2 * time / 8
    assert found["communication_ms"].iloc[0] == pytest.approx(expected / 1e3)


def test_what_reductions_expose_is_as_uncertain_as_they_are():
    elements = 4 * BUCKET_BYTES // 4
    node = ("x_grad", "allreduce", "[]", f"[['ALLREDUCE_ASYNC', ({elements},)]]")

    def ends(low, high):
        links = partial(answer_of, 1000.0, low, high)
        # Operators that are known exactly leave the links and the composition itself.
        found = compose(label(mode="train", variant="dp4"), graph("g", [node]), exact, links)
        return found.iloc[0] * 1e3

    sure, unsure = ends(1.0, 1.0), ends(0.5, 2.0)
    own = RUN_ERROR * sure["latency_ms"]
    backward = 4 * G
    assert unsure["latency_ms"] == pytest.approx(sure["latency_ms"])
    # Two reductions of 1000 each behind the backward pass, of half and of twice the time.
    assert sure["hi_ms"] - sure["latency_ms"] == pytest.approx(own)
    assert unsure["hi_ms"] - unsure["latency_ms"] == pytest.approx(np.hypot(2000.0, own))
    exposed, least = 2000.0 - backward, 1000.0 - backward
    assert unsure["latency_ms"] - unsure["lo_ms"] == pytest.approx(np.hypot(exposed - least, own))


@pytest.mark.parametrize(("variant", "share", "hops"), [("pp4_1", 1.0, 3), ("pp4_4", 7 / 4, 6)])
def test_pipelines(variant, share, hops):
    node = ("sendrecv", "sendrecv", "[['SENDRECV', (8,)]]", "[['SENDRECV', (8,)]]")
    frame = graph("g", [node])
    found = compose(label(mode="train", variant=variant), frame, op_latency, link_latency).iloc[0]
    compute = 2 * (G + V) + G + 4 * G
    assert found["communication_ms"] == pytest.approx(2 * hops * LINK / 1e3)
    assert found["latency_ms"] == pytest.approx((share * compute + 2 * hops * LINK) / 1e3)


def test_kernels_lose_the_launch_and_keep_a_floor():
    assert kernel_us(110.0, 10.0) == 100.0 + KERNEL_US
    assert kernel_us(9.0, 10.0) == KERNEL_US
    assert kernel_us(1.0, 10.0) == 1.0
    assert kernel_us(30.0, 10.0, joins=True) == 20.0


def test_spread_of_a_sum_lies_between_independent_and_common():
    ends = np.array([[3.0, 6.0], [4.0, 8.0]])
    assert combined_spread(ends, 0.0) == (5.0, 10.0)
    assert combined_spread(ends, 1.0) == (7.0, 14.0)
    assert combined_spread(ends, 0.5) == pytest.approx((np.sqrt(37.0), np.sqrt(148.0)))


def test_bad_input_is_named():
    with pytest.raises(DatasetError, match="desc"):
        compose(label().drop(columns="desc"), graph("g"), op_latency, link_latency)
    with pytest.raises(DatasetError, match="other"):
        compose(label("other"), graph("g"), op_latency, link_latency)
    with pytest.raises(DatasetError, match="returned a latency that is not positive"):
        compose(label(), graph("g"), lambda t: answer(np.zeros(len(t))), link_latency)
    with pytest.raises(DatasetError, match="every row"):
        compose(label(), graph("g"), lambda t: op_latency(t).head(1), link_latency)


def published():
    beside = Path(__file__).resolve().parents[4] / "shared" / "data"
    return Path(os.environ.get("OPCAST_PUBLISHED_DATA", beside)) / "published-latency"


def test_measured_nodes_reproduce_measured_forward_passes():
    """Without launches and views, sums of measured nodes meet runs within 4 % on average."""
    if not published().is_dir():
        pytest.skip(f"no published data in {published()}")
    nodes = pd.read_parquet(published() / "e2e_nodes.parquet")
    labels = pd.read_csv(published() / "e2e_labels.csv").set_index(["device", "desc"])
    errors, plain = [], []
    for key, part in nodes.groupby(["device", "desc"]):
        if "A100" in key[0]:  # measured in another clock state than the runs
            continue
        run = labels.loc[key]
        repeats = node_repeats(list(part["Name"]), run["model"], int(run["n_layer"]))
        total = bare = 0.0
        for row, times in zip(part.to_dict("records"), repeats, strict=True):
            kernels = node_kernels(row, "fw", run["mode"])
            alone = 1e3 * row["fw_ms"]
            bare += times * alone / 1e3
            # 20 us: the nodes with next to no work take 18 to 28 us on these hosts.
            total += times * kernel_us(alone, 20.0) / 1e3 if kernels else 0.0
        errors.append(abs(total / run["fw_ms"] - 1))
        plain.append(abs(bare / run["fw_ms"] - 1))
    assert np.mean(errors) < 0.04 < 0.07 < np.mean(plain)


@pytest.mark.slow
def test_whole_models_are_the_sum_of_their_operators():
    """By the shipped model: within 9 % on every chip whose calls were those of its runs."""
    if not published().is_dir():
        pytest.skip(f"no published data in {published()}")
    from opcast.models.collectives.model import CollectiveModel
    from opcast.predict.locate import find_model
    from opcast.predict.published.tables import _Job

    labels = pd.read_csv(published() / "e2e_labels.csv")
    model = OpModel.load(find_model("gpu-operators"))
    job = _Job(published(), model, CollectiveModel.find(), False, None, None)
    graphs = pd.read_parquet(published() / "opgraphs.parquet")
    # Nothing of other vendors' or later chips depends on what was measured as a whole.
    kin = labels[labels["device"].str.contains("MI100")].assign(device="mi210")
    asked = pd.concat([labels, kin], ignore_index=True)
    found = compose(asked, graphs, job._op_latency, job._collective_latency)
    asked["error"] = found["latency_ms"] / asked["e2e_ms"] - 1
    bias = asked.groupby("device")["error"].mean()
    # P4 and A100 of 80 GB ran their models at other clocks than their calls.
    assert bias.drop(["mi210", "Tesla P4", "NVIDIA A100 80GB PCIe"]).abs().max() < 0.09
    # MI210's products are MI100's, its memory a third faster: no fourth off the run of MI100.
    assert -0.15 < bias["mi210"] < 0.0
