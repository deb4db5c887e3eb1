from dataclasses import replace

import pytest

from opcast.common.errors import DeviceError
from opcast.features.devices.catalogue import find_device
from opcast.models.collectives.links import Links

H100 = {
    "link_gbs_unidir": 450.0,
    "pcie_gbs_unidir": 64.0,
    "inter_node_gbs_unidir": 50.0,
    "hbm_gbs": 3350.0,
    "boost_mhz": 1980,
    "devices_per_node": 8.0,
    "arch": "Hopper GH100",
}


def test_from_row_converts_to_bytes_per_second():
    links = Links.from_row(H100)
    assert links.link == 450e9 and links.host == 64e9 and links.inter_node == 50e9
    assert links.memory == 3350e9 and links.clock_hz == 1.98e9


def test_from_row_takes_the_host_where_there_is_no_link():
    links = Links.from_row({"link_gbs_unidir": float("nan"), "pcie_gbs_unidir": 16.0})
    assert links.link == 16e9 and links.fabric(2, 8) == "pcie"


def test_from_spec_reads_attributes_and_takes_changes():
    h100 = find_device("h100-sxm")
    spec = replace(h100, link_bandwidth=450e9, inter_node_bandwidth=50e9, devices_per_node=4)
    links = Links.from_spec(spec, island=2)
    assert (links.link, links.devices_per_node, links.island) == (450e9, 4, 2)


def test_from_spec_without_any_link_says_what_to_add():
    with pytest.raises(DeviceError, match="link_bandwidth"):
        Links.from_spec(replace(find_device("h100-sxm"), link_bandwidth=0.0, host_bandwidth=0.0))


def test_bandwidths_must_be_positive():
    with pytest.raises(DeviceError, match="inter_node"):
        Links(link=1e9, host=1e9, inter_node=0.0)


@pytest.mark.parametrize(
    ("changes", "world", "per_node", "fabric", "bandwidth"),
    [
        ({}, 8, 8, "scale_up", 450e9),
        ({}, 16, 8, "network", 50e9),
        ({"island": 2}, 2, 4, "scale_up", 450e9),
        ({"island": 2}, 4, 4, "host", 64e9),
        ({"link": 64e9}, 4, 8, "pcie", 64e9),
        ({"peer_access": False}, 2, 4, "staged", 64e9),
        ({"inter_node": 450e9}, 16, 8, "scale_up", 450e9),  # a rack in one scale-up domain
    ],
)
def test_the_slowest_link_that_a_group_crosses(changes, world, per_node, fabric, bandwidth):
    links = Links.from_row(H100, **changes)
    assert links.fabric(world, per_node) == fabric
    assert links.bandwidth(fabric) == bandwidth
