import json

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from opcast.cli import app
from opcast.common.errors import DatasetError, DeviceError, WorseModelError
from opcast.models.collectives.model import CollectiveModel
from opcast.models.collectives.on_cluster import ClusterCollectives
from opcast.simulate.clusters.catalogue import find_cluster
from opcast.simulate.clusters.files import load_cluster

runner = CliRunner()


def run(*words):
    result = runner.invoke(app, [str(w) for w in words])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_cluster_shows_dimensions_times_and_sources():
    text = run("cluster", "dgx-h100-x128")
    assert "128 × h100-sxm" in text and "infiniband" in text and "all_reduce" in text
    assert "nvlink.bandwidth_gbps: link_gbps of h100-sxm" in text


def test_cluster_as_json_and_list():
    found = json.loads(run("cluster", "tpu-v3-x8", "--json"))
    assert found["devices"] == 8 and found["dimensions"][1]["shape"] == [2, 2]
    assert "h100-sxm-x4" in json.loads(run("cluster", "--list", "--json"))
    assert "b200-x4" in run("cluster", "--list").split()


def test_cluster_writes_files(tmp_path):
    run(
        "cluster", "h100-sxm-x4", "--save", tmp_path / "a.yaml", "--astra", tmp_path / "network.yml"
    )
    assert load_cluster(tmp_path / "a.yaml") == find_cluster("h100-sxm-x4")
    assert "npus_count: [ 4 ]" in (tmp_path / "network.yml").read_text()
    assert "network" in run("cluster", tmp_path / "network.yml")


def test_cluster_of_a_file_names_its_device_and_what_its_links_reach(tmp_path):
    device = tmp_path / "mine.yaml"
    device.write_text("base: h100-sxm\nname: mine\n")
    links = "{name: fabric, kind: switch, size: 16, bandwidth_gbps: 50"
    pod = tmp_path / "pod.yaml"
    pod.write_text(f"device: {device}\ndimensions:\n  - {links}}}\n")
    text = run("cluster", pod)
    assert "16 × mine" in text and "mine.yaml" not in text
    assert "fabric: the efficiency is 1" in text
    # As the note says of the catalogue.
    joined = {d.name: d.efficiency for d in find_cluster("dgx-h100-x16").topology.dims}
    assert joined["infiniband"] == 0.8 and joined["nvlink"] == 0.69
    pod.write_text(f"device: {device}\ndimensions:\n  - {links}, efficiency: 0.8}}\n")
    assert "the efficiency is 1" not in run("cluster", pod)


def test_an_unknown_device_of_a_file_is_refused_before_anything_is_written(tmp_path):
    pod = tmp_path / "pod.yaml"
    dims = "[{kind: switch, size: 2, bandwidth_gbps: 5e1}]"
    pod.write_text(f"device: h100-smx\ndimensions: {dims}\n")
    with pytest.raises(DeviceError, match="h100-sxm"):
        run("cluster", pod, "--json", "--save", tmp_path / "out.yaml")
    assert not (tmp_path / "out.yaml").exists()


def test_cluster_without_a_name():
    with pytest.raises(DeviceError, match="--list"):
        run("cluster")


def own_collectives(path):
    return ClusterCollectives(CollectiveModel.load(path))


@pytest.fixture
def rows(tmp_path):
    """An imagined box whose all-reduces take 40 % longer than the shipped model says."""
    sizes = 2.0 ** np.arange(12, 29)
    frame = pd.DataFrame({"op": "all_reduce", "bytes": sizes, "world_size": 4, "device": "h20"})
    shipped, box = ClusterCollectives(), find_cluster("h20-x4")
    found = [shipped.estimate("all_reduce", s, 4, box) for s in sizes]
    frame["latency_us"] = [1.4e6 * own.latency for own in found]
    frame.to_csv(tmp_path / "mine.csv", index=False)
    return tmp_path / "mine.csv"


def test_calibrated_collectives_are_used_on_the_cluster(rows, tmp_path):
    text = run("calibrate-collectives", rows, "--out", tmp_path / "own.json")
    assert "h20" in text and "efficiency" in text
    # 1 - 1 / 1.4 before, as an absolute logarithm; what is left out shows it.
    assert "error on 17 collectives, each held out of the calibration: 40.0% before" in text
    own, box = own_collectives(tmp_path / "own.json"), find_cluster("h20-x4")
    found = [c.estimate("all_reduce", 2**24, 4, box) for c in (own, ClusterCollectives())]
    assert found[0].latency / found[1].latency == pytest.approx(1.4, rel=0.05)
    assert own.estimate("all_reduce", 2**24, 4, box).detail == "calibrated"


def test_collectives_that_contradict_each_other_are_not_saved(rows, tmp_path):
    """Noise of a factor of three either way: the shipped parameters predict the others better."""
    frame = pd.read_csv(rows)
    frame["latency_us"] *= np.where(np.arange(len(frame)) % 4 < 2, 3.0, 1 / 3.0) / 1.4
    frame.to_csv(rows, index=False)
    with pytest.raises(WorseModelError, match="worse on 17 collectives"):
        run("calibrate-collectives", rows, "--out", tmp_path / "own.json")
    assert not (tmp_path / "own.json").exists()


def test_collectives_in_another_unit_are_refused(rows, tmp_path):
    frame = pd.read_csv(rows)
    frame["latency_us"] *= 1e-3
    frame.to_csv(rows, index=False)
    with pytest.raises(DatasetError, match=r"latency_us is .* at the rate of the links of h20"):
        run("calibrate-collectives", rows, "--out", tmp_path / "own.json")
    assert not (tmp_path / "own.json").exists()


def test_measured_pods_are_known_for_whole_boxes(tmp_path):
    sizes = 2.0 ** np.arange(12, 29)
    frame = pd.DataFrame({"op": "all_reduce", "bytes": sizes, "world_size": 32, "device": "b200"})
    frame.assign(devices_per_node=8, latency_us=50 + sizes / 1e5).to_csv(tmp_path / "pod.csv")
    run("calibrate-collectives", tmp_path / "pod.csv", "--out", tmp_path / "own.json")
    own, pod = own_collectives(tmp_path / "own.json"), find_cluster("dgx-b200-x64")
    found = own.estimate("all_reduce", 2**24, range(32), pod)
    assert (found.source, found.detail) == ("learned", "calibrated")
    assert found.latency == pytest.approx(218e-6, rel=0.1)
    assert own.estimate("all_reduce", 2**24, 64, pod).source == "analytical"


def test_report_and_json(rows):
    tables = json.loads(run("calibrate-collectives", rows, "--report", "--known-only", "--json"))
    assert tables["op"][0]["op"] == "all_reduce" and tables["op"][0]["fitted mean"] >= 0
    assert "by source" in run("calibrate-collectives", rows, "--report", "--known-only")


def test_nothing_to_do(rows):
    with pytest.raises(DatasetError, match="--out"):
        run("calibrate-collectives", rows)
