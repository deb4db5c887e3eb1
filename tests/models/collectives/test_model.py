import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from opcast.common.errors import DatasetError, DeviceError, ModelError
from opcast.models.collectives.curve import START, curve_us
from opcast.models.collectives.links import Links
from opcast.models.collectives.model import CollectiveModel, fit_collectives, leave_one_out
from opcast.models.collectives.study import held_out_rows, naive_ring_us, study, summary
from opcast.models.collectives.table import collective_table, device_rows

from ...support.cases import later

DEVICES = {
    "fast": Links(link=400e9, host=32e9, inter_node=25e9, memory=2e12, architecture="A"),
    "faster": Links(link=800e9, host=64e9, inter_node=50e9, memory=4e12, architecture="B"),
    "slow": Links(link=32e9, host=32e9, inter_node=25e9, memory=1e12, architecture="C"),
}


def find(name):
    if name not in DEVICES:
        raise DeviceError(f"no links are known for {name!r}")
    return DEVICES[name]


def frame(op="all_reduce", device="fast", world=(2, 4, 8), **columns):
    sizes = 2.0 ** np.arange(9, 30)
    rows = [{"op": op, "bytes": s, "world_size": w, "device": device} for w in world for s in sizes]
    return pd.DataFrame(rows).assign(**columns)


@pytest.fixture(scope="module")
def measured():
    """Two fast machines that follow START with other efficiencies, and 3 % of noise."""
    rng = np.random.default_rng(0)
    parts = []
    for device, factor in (("fast", 1.0), ("faster", 1.2)):
        rows = pd.concat([frame(op, device) for op in ("all_reduce", "all_gather")])
        ideal = curve_us(START, collective_table(rows, find).points)
        noise = np.exp(0.03 * rng.standard_normal(len(rows)))
        parts.append(rows.assign(latency_us=factor * ideal * noise))
    return pd.concat(parts, ignore_index=True)


@pytest.fixture(scope="module")
def model(measured):
    return fit_collectives(measured, find, {"sources": ["made up"]})


def error(model, rows):
    found = model.predict(rows, find)["latency_s"].to_numpy() * 1e6
    return np.abs(found / rows["latency_us"].to_numpy() - 1)


def test_known_machines_are_met_within_the_noise(model, measured):
    assert np.median(error(model, measured)) < 0.03
    assert set(model.predict(measured, find)["scope"]) == {"known"}


def test_intervals_of_known_machines_cover_nine_in_ten(model, measured):
    found = model.predict(measured, find)
    inside = measured["latency_us"].between(found["lo_s"] * 1e6, found["hi_s"] * 1e6)
    assert 0.85 <= inside.mean() <= 1.0


def test_scope_tells_new_machines_and_foreign_libraries(model, monkeypatch):
    monkeypatch.setitem(DEVICES, "next", Links(link=600e9, host=64e9, inter_node=50e9))
    new = model.predict(frame(device="next"), find)
    foreign = model.predict(frame("alltoall", device="slow"), find)
    assert set(new["scope"]) == {"new"} and set(foreign["scope"]) == {"foreign"}
    known = model.predict(frame(), find)
    width = (new["hi_s"] / new["lo_s"]).median()
    assert width > (known["hi_s"] / known["lo_s"]).median()
    assert (foreign["hi_s"] >= 2.99 * foreign["latency_s"]).all()


def test_calibration_meets_a_machine_that_is_slower_than_its_data_sheet(model, monkeypatch):
    monkeypatch.setitem(DEVICES, "tired", Links(link=600e9, host=64e9, inter_node=50e9))
    rows = frame(device="tired")
    truth = 1.6 * model.predict(rows, find)["latency_s"].to_numpy() * 1e6
    rows = rows.assign(latency_us=truth)
    own = model.calibrated(rows.iloc[::3], find)
    assert np.median(error(model, rows)) > 0.3
    assert np.median(error(own, rows)) < 0.08
    assert set(own.predict(rows, find)["scope"]) == {"calibrated"}
    assert set(model.predict(rows, find)["scope"]) == {"new"}


def test_leaving_out_an_architecture_uses_the_other_one(measured):
    table = collective_table(measured, find)
    latency = measured["latency_us"].to_numpy()
    predicted, related = leave_one_out(table, latency)
    assert related.all()
    fast = (measured["device"] == "fast").to_numpy()
    assert np.median(predicted[fast] / latency[fast]) == pytest.approx(1.2, rel=0.1)
    alone, _ = leave_one_out(table.take(fast), latency[fast])
    assert np.isnan(alone).all()


def test_save_and_load_predict_the_same(model, measured, tmp_path):
    path = tmp_path / "collectives.json"
    model.save(path)
    again = CollectiveModel.load(path)
    assert again.provenance == {"sources": ["made up"]}
    pd.testing.assert_frame_equal(
        again.predict(measured, find), model.predict(measured, find), rtol=1e-3
    )


@pytest.mark.parametrize("text", ["{", '{"format": 99, "parameters": []}', "[]"])
def test_damaged_files_are_named(tmp_path, text):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ModelError, match=r"broken\.json"):
        CollectiveModel.load(path)


def test_the_shipped_parameters_rank_libraries_and_sizes_sensibly():
    shipped = CollectiveModel.find()
    nccl = shipped.predict(frame(backend="nccl"), find)["latency_s"].to_numpy().reshape(3, -1)
    custom = shipped.predict(frame(backend="vllm"), find)["latency_s"].to_numpy().reshape(3, -1)
    assert (nccl[:, -1] > 20 * nccl[:, 0]).all()
    assert (custom[:, 0] < nccl[:, 0]).all()
    ring = 2 * 7 / 8 * 2.0**29 / 400e9
    assert ring < nccl[2, -1] < 2 * ring


def test_conventions_of_backends_and_kernels():
    rows = frame("all_gather", world=(4,)).iloc[:1]
    one = collective_table(rows.assign(backend="nccl"), find)
    shards = collective_table(rows.assign(backend="oneccl"), find)
    assert shards.points.wire[0] == 4 * one.points.wire[0]
    named = rows.assign(op="all_reduce", backend="vllm", kernel="vLLM_custom_eager", dtype="int8")
    table = collective_table(named, find)
    assert table.backend[0] == "vllm_eager" and table.op[0] == "all_reduce_int8"
    assert table.points.eager[0] == 1.0
    own = collective_table(rows.assign(op="all_reduce", backend="vllm"), find)
    assert own.points.wire_low[0] == 3 * 512  # every device sends its whole buffer to three others
    assert collective_table(rows.assign(source="vidur"), find).backend[0] == "torch"


def test_platforms_say_more_than_their_device():
    table = pd.DataFrame(
        {"device": ["NVIDIA A100-SXM4-80GB (vidur a100)"], "link_gbs_unidir": [300.0]}
    )
    rows = (
        frame(world=(4,))
        .drop(columns="device")
        .assign(platform="a100_pairwise_nvlink", devices_per_node=4)
    )
    assert set(collective_table(rows, device_rows(table)).fabric) == {"host"}
    plain = collective_table(rows.assign(platform="a100_dgx"), device_rows(table))
    assert set(plain.fabric) == {"scale_up"}
    with pytest.raises(DeviceError, match="nothing"):
        device_rows(table)("nothing")


def test_bad_rows_are_refused():
    with pytest.raises(DatasetError, match="world_size"):
        collective_table(frame().drop(columns="world_size"), find)
    with pytest.raises(DatasetError, match="two devices"):
        collective_table(frame(world=(1,)), find)
    with pytest.raises(DatasetError, match="latency_us"):
        fit_collectives(frame(), find)


def test_naive_ring_is_volume_over_bandwidth_and_3_us_a_step():
    table = collective_table(frame(world=(4,)).iloc[-1:], find)
    expected = 3 * 3.0 + 2 * 3 / 4 * 2.0**29 / 400e3
    assert naive_ring_us(table)[0] == pytest.approx(expected)


def test_report_groups_validation_and_left_out_errors(measured):
    rows = measured.assign(source="made up", split="train")
    assert held_out_rows(rows).sum() == len(rows) // 5
    table = summary(study(rows, find), ("op", "architecture"), ("fitted", "left_out"))
    assert len(table) == 4 and table["rows"].sum() == len(rows)
    assert (table["fitted median"] < 5).all()
    assert (table["left_out median"] > table["fitted median"]).all()


def published():
    beside = Path(__file__).resolve().parents[4] / "shared" / "data"
    return Path(os.environ.get("OPCAST_PUBLISHED_DATA", beside))


@pytest.mark.slow
@pytest.mark.parametrize("unseen", [False, later(True)])
def test_published_collectives_beat_the_plain_ring(unseen):
    folder = published()
    if not (folder / "published-tensor-core").is_dir():
        pytest.skip(f"no published data in {folder}")
    tables = ("published-latency/devices.csv", "published-tensor-core/devices2.csv")
    links = device_rows(*(pd.read_csv(folder / t) for t in tables))
    rows = pd.read_csv(folder / "published-tensor-core" / "collectives_tc.csv.gz")
    errors = study(rows, links, unseen=unseen)
    assert errors["fitted"].median() < 5.0
    if not unseen:
        return
    nvlink = errors[errors["fabric"] == "scale_up"]
    assert nvlink["left_out"].median() < 0.6 * nvlink["ring"].median()
