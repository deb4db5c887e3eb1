from pathlib import Path

import numpy as np
import pytest

from opcast.common.errors import DeviceError
from opcast.features.devices.catalogue import load_device_file
from opcast.simulate.clusters.files import (
    ASTRA_GB,
    astra_network,
    cluster_data,
    cluster_of,
    load_cluster,
    save_cluster,
)
from opcast.simulate.clusters.topology import ALGORITHMS, Cluster, Dimension, Topology
from opcast.simulate.collectives.choose import collective_cost
from opcast.simulate.collectives.one_dimension import IN_DIMENSION


def dim(kind="switch", size=8, bandwidth=1e11, **more):
    return Dimension(kind, size, bandwidth, 1e-6, **more)


POD = Topology((dim(), dim("fat_tree", 16, 5e10, radix=4, oversubscription=2.0)))


def test_ranks_count_through_the_innermost_dimension_first():
    torus = Topology((dim("ring", 2), dim("torus", 12, shape=(3, 4))))
    assert torus.size == 24 and torus.axes == (2, 3, 4)
    # 17 = 1 + 2 · (2 + 3 · 2)
    assert torus.coordinates([0, 1, 2, 17]).tolist() == [[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 2, 2]]


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"kind": "mesh"}, "unknown kind 'mesh'"),
        ({"size": 0}, "size 0"),
        ({"bandwidth": 0.0}, "bandwidth"),
        ({"kind": "torus", "shape": (2, 3)}, "2 or 3 axes"),
        ({"kind": "fat_tree", "radix": 3}, "radix 3 does not divide 8"),
        ({"oversubscription": 0.5}, "oversubscription"),
        ({"efficiency": 1.5}, "efficiency"),
        ({"kind": "ring", "reduction": "tree"}, "a ring cannot reduce"),
        ({"algorithms": ("magic",)}, "unknown algorithms"),
    ],
)
def test_wrong_figures_are_refused(fields, what):
    with pytest.raises(DeviceError, match=what):
        dim(**fields)


def test_names_of_algorithms_are_those_that_exist():
    assert tuple(IN_DIMENSION) == ALGORITHMS


def test_groups_inside_and_across_boxes():
    inside, across = range(8), range(3, 128, 8)
    assert POD.group_dims(inside) == (POD.dims[0],)
    assert POD.group_dims(across) == (POD.dims[1],)
    assert POD.group_dims(128) == POD.dims
    assert POD.group_dims([5]) == ()
    half = POD.group_dims([0, 2, 4, 6, 8, 10, 12, 14])  # every second of two boxes
    assert [d.size for d in half] == [4, 2] and half[0].kind == "switch"


def test_part_of_a_fat_tree_is_a_switch_under_one_leaf_and_slower_across():
    tree = Topology((POD.dims[1],))
    (near,) = tree.group_dims(range(4))
    assert (near.kind, near.size, near.oversubscription) == ("switch", 4, 1.0)
    (far,) = tree.group_dims(range(0, 16, 2))  # two under each leaf, as its siblings
    assert (far.kind, far.size, far.radix, far.oversubscription) == ("fat_tree", 8, 2, 2.0)
    (one,) = tree.group_dims(range(0, 16, 4))
    assert (one.radix, one.size) == (1, 4)


def test_part_of_a_ring_shares_links_with_its_siblings():
    ring = Topology((dim("ring", 8),))
    (strided,) = ring.group_dims(range(0, 8, 2))  # two interleaved rings, two hops a step
    assert (strided.size, strided.bandwidth, strided.latency) == (4, 5e10, 2e-6)
    (segment,) = ring.group_dims(range(4))  # the way back takes the links of the other direction
    assert (segment.size, segment.bandwidth) == (4, 5e10)
    mesh = Topology((dim("fully_connected", 8, 7e10),))
    assert mesh.group_dims(range(3))[0].bandwidth == pytest.approx(2e10)  # two of seven links


def test_part_of_a_torus():
    torus = Topology((dim("torus", 16, 4e10, shape=(4, 4)),))
    (row,) = torus.group_dims(range(4))
    assert (row.kind, row.size, row.bandwidth) == ("ring", 4, 2e10)
    (half,) = torus.group_dims(range(8))
    assert half.shape == (4, 2) and half.bandwidth == 2e10  # a segment of two has half an axis


def test_slow_axes_of_a_torus_carry_least():
    # 32 chips of 16 x 16 x 16, eight apart: two on the first axis, whose links eight groups share,
    # and the whole second axis.
    torus = Topology((dim("torus", 4096, 6e11, shape=(16, 16, 16)),))
    fast, slow = torus.group_dims(range(0, 256, 8))
    assert (fast.size, fast.bandwidth) == (16, 2e11)
    assert (slow.size, slow.bandwidth) == (2, 2e11 / 8)
    # A gather goes along the slow axis first, with one sixteenth of the bytes.
    found = collective_cost("all_gather", 1e9, range(0, 256, 8), torus).transfer
    assert found == pytest.approx(1e9 / 2.5e10 + 2e9 * 15 / 2e11)


def test_irregular_groups_count_as_the_slowest_dimension():
    (flat,) = POD.group_dims([0, 1, 9])
    assert (flat.kind, flat.size, flat.bandwidth) == ("switch", 3, 5e10)


def test_groups_that_cannot_be():
    with pytest.raises(DeviceError, match="rank 128 is not one of 128"):
        POD.group_dims([0, 128])
    with pytest.raises(DeviceError, match="twice"):
        POD.group_dims([0, 0])
    with pytest.raises(DeviceError, match="at least one dimension"):
        Topology(())


FILE = """
name: two-boxes
device: h100-sxm
devices_per_node: 8
dimensions:
  - {name: nvlink, kind: switch, size: 8, bandwidth_gbps: 450, latency_us: 0.9, launch_us: 5,
     reduction: multicast, algorithms: [ring, in_network]}
  - {name: grid, kind: torus, shape: [2, 2], bandwidth_gbps: 50}
sources: {data sheet: [nvlink.bandwidth_gbps]}
"""


def test_yaml_says_units_and_comes_back(tmp_path):
    path = tmp_path / "pod.yaml"
    # Exponents are numbers as in YAML 1.2; YAML 1.1 takes them for texts.
    path.write_text(FILE.replace("size: 8", "size: 8e0").replace("s: 450", "s: 4.5e2"))
    found = load_cluster(path)
    first, second = found.topology.dims
    assert (first.bandwidth, first.launch) == (450e9, pytest.approx(5e-6))
    assert (second.size, second.shape) == (4, (2, 2))
    assert found.sources == {"nvlink.bandwidth_gbps": "data sheet"}
    save_cluster(found, tmp_path / "again" / "pod.yaml")
    assert load_cluster(tmp_path / "again" / "pod.yaml") == found


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("kind: switch", "kind: magic", r"dimensions\[0\]: unknown kind"),
        ("size: 8,", "size: 8.5,", r"dimensions\[0\].size: must be a whole number"),
        ("bandwidth_gbps: 50}", "}", r"dimensions\[1\]: key 'bandwidth_gbps' is missing"),
        ("shape: [2, 2], ", "", r"dimensions\[1\]: key 'size' is missing"),
        ("latency_us", "latency_ns", r"unknown key 'latency_ns'.*latency_us"),
        ("device: h100-sxm", "device: 7", "'device' must name a device"),
        ("dimensions:", "dims:", "unknown key 'dims'"),
        ("name: two-boxes", "- name", "not YAML"),
        ("[nvlink.bandwidth_gbps]", "x", "'sources' must map"),
        ("per_node: 8", "per_node: 5", "not whole boxes of 5 .one of 1, 2, 4, 8"),
    ],
)
def test_errors_in_a_file_say_where(tmp_path, old, new, what):
    path = tmp_path / "pod.yaml"
    path.write_text(FILE.replace(old, new, 1))
    with pytest.raises(DeviceError, match=what) as caught:
        load_cluster(path)
    assert "pod.yaml" in str(caught.value)


def test_a_missing_file():
    with pytest.raises(DeviceError, match="no such cluster file"):
        load_cluster(Path("nowhere.yaml"))


def test_astra_sim_counts_single_links_in_binary_gigabytes(tmp_path):
    path = tmp_path / "network.yml"
    path.write_text(
        "topology: [ Ring, FullyConnected, Switch ]\nnpus_count: [ 4, 3, 2 ]\n"
        "bandwidth: [ 50.0, 25.0, 12.5 ]  # GB/s\nlatency: [ 500, 600, 700 ]  # ns\n"
    )
    ring, full, switch = load_cluster(path).topology.dims
    assert (ring.kind, ring.size, ring.bandwidth) == ("ring", 4, 2 * 50 * ASTRA_GB)
    assert full.bandwidth == 2 * 25 * ASTRA_GB and full.latency == pytest.approx(600e-9)
    assert switch.bandwidth == 12.5 * ASTRA_GB and switch.latency == pytest.approx(1400e-9)
    again = tmp_path / "again.yml"
    again.write_text(astra_network(load_cluster(path).topology))
    before, after = load_cluster(path).topology, load_cluster(again).topology
    assert [d.kind for d in after.dims] == [d.kind for d in before.dims]
    for a, b in zip(after.dims, before.dims, strict=True):
        assert np.isclose(a.bandwidth, b.bandwidth) and np.isclose(a.latency, b.latency)


def test_astra_sim_gets_tori_as_rings_and_no_oversubscription(tmp_path):
    text = astra_network(Topology((dim("torus", 12, shape=(3, 4)),)))
    assert "topology: [ Ring, Ring ]" in text and "npus_count: [ 3, 4 ]" in text
    with pytest.raises(DeviceError, match="oversubscribed"):
        astra_network(POD)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("npus_count: [2]\ntopology: [Mesh]\nbandwidth: [1]\nlatency: [1]", "unknown topology"),
        ("npus_count: [2, 2]\ntopology: [Ring]\nbandwidth: [1]\nlatency: [1]", "must be lists"),
        ("npus_count: [2]\ntopology: [Ring]\nbandwidth: [x]\nlatency: [1]", "must be a number"),
    ],
)
def test_errors_in_a_network_file(tmp_path, text, what):
    path = tmp_path / "network.yml"
    path.write_text(text)
    with pytest.raises(DeviceError, match=what):
        load_cluster(path)


def test_cluster_data_is_read_again():
    found = Cluster("pod", "h100-sxm", POD, 8)
    assert cluster_of(cluster_data(found), "pod") == found


def test_a_devices_file_lies_beside_the_clusters(tmp_path, monkeypatch):
    dimension = "{name: a, kind: switch, size: 2, bandwidth_gbps: 9, latency_us: 1}"
    text = f"device: ../chips/mine.yaml\ndimensions: [{dimension}]\n"
    (tmp_path / "chips").mkdir()
    (tmp_path / "chips" / "mine.yaml").write_text("{name: mine, base: h100-sxm}\n")
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters" / "two.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    found = load_device_file(Path(load_cluster("clusters/two.yaml").device))
    assert found.name == "mine"
