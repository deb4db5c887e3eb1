from dataclasses import replace

import pytest

from opcast.common.errors import DeviceError
from opcast.features.devices.catalogue import find_device
from opcast.simulate.clusters.catalogue import cluster_names, find_cluster, joined
from opcast.simulate.clusters.files import save_cluster
from opcast.simulate.collectives.choose import collective_cost


def test_every_name_of_the_list_is_found_with_sources():
    names = cluster_names()
    assert {"h100-sxm-x4", "a100-sxm-40gb-x4", "h200-sxm-x4", "b200-x4", "tpu-v3-x8"} <= set(names)
    for name in names:
        found = find_cluster(name)
        assert found.name == name and found.size == int(name.rsplit("-x", 1)[1])
        assert find_device(found.device).name == found.device
        for dim in found.topology.dims:
            given = {k.split(".")[1] for k in found.sources if k.startswith(f"{dim.name}.")}
            if dim.name != "cores":
                assert {"latency_us", "launch_us", "efficiency"} <= given, (name, dim.name)


def test_a_box_has_the_bandwidth_of_its_device_file():
    (dim,) = find_cluster("h100-sxm-x4").topology.dims
    assert (dim.kind, dim.size, dim.bandwidth) == ("switch", 4, 450e9)
    assert "data sheet" in find_cluster("h100-sxm-x4").sources["nvlink.bandwidth_gbps"]
    assert find_cluster("NVIDIA H200-x8").device == "h200-sxm"
    assert find_cluster("l40s-x4").topology.dims[0].bandwidth == 32e9
    assert find_cluster("h100-sxm").size == 1


def test_part_of_a_box_has_its_share_of_links_between_pairs():
    """One of the seven links of an MI300X, or 3 of the 21 ports of a Gaudi 2, to each other one."""
    rates = {n: find_cluster(f"mi300x-x{n}").topology.dims[0].bandwidth for n in (2, 4, 8)}
    assert rates == pytest.approx({2: 64e9, 4: 192e9, 8: 448e9})
    assert find_cluster("gaudi2-x2").topology.dims[0].bandwidth == pytest.approx(37.5e9)
    # The same as of two devices of a whole box.
    (pair,) = find_cluster("mi300x-x8").topology.group_dims(2)
    assert pair.bandwidth == pytest.approx(rates[2])


def test_several_boxes():
    pod = find_cluster("dgx-h100-x128")
    assert [(d.kind, d.size) for d in pod.topology.dims] == [("switch", 8), ("switch", 16)]
    assert pod.devices_per_node == 8 and pod.topology.dims[1].bandwidth == 50e9
    large = find_cluster("dgx-h100-x16384").topology.dims[1]
    assert (large.kind, large.size, large.radix) == ("fat_tree", 2048, 32)
    assert (
        find_cluster("dgx-a100-x8").topology.dims == find_cluster("a100-sxm-80gb-x8").topology.dims
    )


def test_slices_of_tpus():
    cores, grid = find_cluster("tpu-v3-x8").topology.dims
    assert (cores.size, grid.shape) == (2, (2, 2))
    assert grid.bandwidth == 164e9 / 2  # two of the four links of a chip stay inside 2 × 2 chips
    cube = find_cluster("tpu-v4-x64").topology.dims[0]
    assert cube.shape == (4, 4, 4) and cube.bandwidth == 300e9


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        # Whole cubes of 4 x 4 x 4, as even as may be (Google Cloud: TPU v4, v5p).
        ("tpu-v4-x192", (4, 4, 12)),
        ("tpu-v5p-x1536", (8, 12, 16)),
        ("tpu-v5p-x6144", (16, 16, 24)),
        # Below a cube a power of two.
        ("tpu-v4-x16", (2, 2, 4)),
    ],
)
def test_slices_are_made_of_whole_cubes(name, shape):
    found = find_cluster(name)
    assert tuple(n for d in found.topology.dims for n in d.axes) == shape
    assert found.boxes == 1


def test_a_slice_of_a_shape():
    found = find_cluster("TPU v4-4x6x8")
    assert (found.name, found.size) == ("tpu-v4-4x6x8", 192)
    # Six chips are no whole cubes: what returns takes the same links.
    assert [(d.size, d.bandwidth) for d in found.topology.dims] == [(4, 1e11), (6, 5e10), (8, 1e11)]
    assert find_cluster("tpu-v7x-2x2x1").size == 8  # two chiplets a chip


def test_slices_are_joined_by_a_data_centre_network():
    found = find_cluster("tpu-v5e-x8192")
    assert (found.name, found.size, found.boxes) == ("tpu-v5e-x8192", 8192, 32)
    assert found.topology.dims[0].shape == (16, 16)
    assert found.topology.dims[1].bandwidth == 12.5e9


def test_racks_are_used_in_part():
    found = find_cluster("dgx-gb200-x256")
    assert [d.size for d in found.topology.dims] == [64, 4]
    assert (found.name, found.boxes) == ("dgx-gb200-x256", 4)
    assert found.topology.dims == joined("gb200", 256).topology.dims


@pytest.mark.parametrize(("name", "port"), [("dgx-gb200-x144", 50e9), ("dgx-gb300-x144", 100e9)])
def test_racks_have_the_ports_of_their_own_cards(name, port):
    """ConnectX-7 of 400 Gb/s for each GPU of a GB200 NVL72, ConnectX-8 of 800 in a GB300's."""
    inner, outer = find_cluster(name).topology.dims
    assert (inner.size, outer.size, outer.bandwidth) == (72, 2, port)


def test_several_boxes_of_any_device():
    pod = find_cluster("mi300x-x64")
    assert [(d.name, d.size, d.bandwidth) for d in pod.topology.dims] == [
        ("xgmi", 8, 448e9),
        ("infiniband", 8, 50e9),
    ]
    assert pod.sources["infiniband.bandwidth_gbps"].startswith("inter_node_gbps of mi300x")
    assert find_cluster("dgx-mi300x-x64") == pod
    assert find_cluster("dgx-mi300x-x8") == find_cluster("mi300x-x8")
    assert find_cluster("hgx-h100-x16") == find_cluster("dgx-h100-x16")
    assert find_cluster("h100-sxm-x16").topology == find_cluster("dgx-h100-x16").topology
    assert find_cluster("gb200-x144").devices_per_node == 72
    # Superchips of one device each are joined by fours, and those by the network.
    assert [d.size for d in find_cluster("gh200-x8").topology.dims] == [4, 2]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("tpu-v4-x96", "power of two or a multiple of 64"),
        ("tpu-v4-8x8", "no slices of 2 axes"),
        ("h100-sxm-2x4", "no slices of 2 axes"),
        ("tpu-v5e-16x32", "at most 256"),
        ("dgx-gb200-x258", "take a multiple of 4"),
        ("h100-sxm-x9", "whole boxes of 8"),
        ("gb200-x150", "take a multiple of 4"),
        ("dgx-h100-x12", "whole boxes of 8"),
        ("h100-smx-x4", "close to it: .*h100-sxm-x4"),
        ("dgx-l5-x16", "not in the catalogue"),
        ("tpu-v4-x6", "power of two"),
        # 257 slices of one chip, or 129 of two.
        ("tpu-v5e-x257", "257 devices are not whole slices"),
        ("tpu-v6e-x258", "take a multiple of 4"),
        ("h100-sxm-x0", "not in the catalogue"),
        ("pod.yaml", "no such cluster file"),
    ],
)
def test_names_that_are_not_there(name, what):
    with pytest.raises(DeviceError, match=what):
        find_cluster(name)


@pytest.mark.parametrize("name", ["mine.yaml", "mine.YML"])
def test_a_path_is_a_name(tmp_path, name):
    save_cluster(find_cluster("b200-x4"), tmp_path / name)
    assert find_cluster(tmp_path / name) == find_cluster("b200-x4")


def test_networks_are_slower_than_boxes():
    pod = find_cluster("dgx-h100-x128")
    inside = collective_cost("all-reduce", 2**28, range(8), pod)
    across = collective_cost("all-reduce", 2**28, range(0, 128, 8), pod)
    both = collective_cost("all-reduce", 2**28, 128, pod)
    assert inside.algorithm == "in_network" and inside.total < both.total < across.total


def test_devices_that_are_not_listed_are_joined_as_their_make():
    own = replace(find_device("h100-sxm"), name="mine", link_bandwidth=600e9)
    pair = joined(own, 2).topology.dims[0]
    assert (pair.kind, pair.name, pair.bandwidth) == ("switch", "nvlink", 600e9)
    assert joined(own, 16).size == 16
    other = replace(own, architecture="unheard-of", inter_node_bandwidth=0.0)
    assert joined(other, 1).size == 1
    with pytest.raises(DeviceError, match="how mine are joined"):
        joined(other, 2)


def test_superchips_of_one_device_are_joined_by_fours():
    assert joined("gh200", 1).size == 1
    spec, eight = find_device("gh200"), joined("gh200", 8)
    assert (eight.size, eight.devices_per_node) == (8, 4)
    inside, between = (dim.bandwidth for dim in eight.topology.dims)
    assert (inside, between) == (spec.link_bandwidth, spec.inter_node_bandwidth)
