"""Links between devices, and which of them limits a collective.

The *fabric* of a group of devices is the slowest kind of link that it has to cross: the scale-up
links (NVLink, xGMI, Xe Link), the host's PCI Express, or the network between nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...common.errors import DeviceError
from ...common.types import JsonMapping, JsonObject
from ...features.devices.device import NETWORK_BANDWIDTH, DeviceSpec

#: A link counts as scale-up if it is this much faster than the host's, otherwise as PCI Express.
#: The bridge of an A40, the slowest NVLink in the tables, has 1.8 times the rate of PCI Express.
SCALE_UP_RATIO = 1.3
#: Share of the scale-up bandwidth from which on the network counts as the same fabric, as in an
#: NVL72 rack.
RACK_RATIO = 0.9
#: Clock in Hz that the fitted start-up times refer to. The value only sets their unit: between the
#: boost clocks of A100 (1.41 GHz) and H100 (1.98 GHz).
REFERENCE_CLOCK = 1.8e9


@dataclass(frozen=True)
class Links:
    """Links of one kind of machine. Bandwidths in bytes/s, one direction, of one device.

    Attributes:
        link: Between devices of a scale-up island; PCI Express if there is none.
        host: PCI Express to the host.
        inter_node: Network of one device to other nodes.
        devices_per_node: Devices in a node.
        island: Devices that scale-up links join; 0 for the whole node.
        memory: Device memory bandwidth.
        peer_access: Whether devices access each other directly rather than through host memory.
        clock_hz: Device clock, 0 if unknown. Start-up times scale with its inverse.
        architecture: Name of the architecture, for reports.
        peers: Devices that share ``link`` if each is wired to every other one (xGMI); 0 behind a
            switch.
    """

    link: float
    host: float
    inter_node: float
    devices_per_node: int = 8
    island: int = 0
    memory: float = 0.0
    peer_access: bool = True
    clock_hz: float = 0.0
    architecture: str = ""
    peers: int = 0

    def __post_init__(self) -> None:
        """Check that all bandwidths are positive.

        Raises:
            DeviceError: A bandwidth is not positive.
        """
        for name in ("link", "host", "inter_node"):
            value = getattr(self, name)
            if not value > 0:
                raise DeviceError(
                    f"{name} bandwidth is {value}, which no collective can use",
                    where=self.architecture or "links",
                    hint="describe the device's links, in bytes/s and one direction",
                )

    @classmethod
    def from_spec(cls, spec: DeviceSpec, **changes: Any) -> Links:
        """Read the links of a device description.

        Args:
            spec: The description. A missing network has ``NETWORK_BANDWIDTH`` of
                :mod:`~opcast.features.devices.device`, a missing link the host's bandwidth.
            **changes: Fields to override, such as ``island=2``.

        Raises:
            DeviceError: The description has neither a link nor a host bandwidth.
        """
        if not spec.host_bandwidth and not spec.link_bandwidth:
            raise DeviceError(
                "the device description has no link_bandwidth and no host_bandwidth",
                where=spec.name,
                hint="add one of them; collectives cannot be estimated without",
            )
        node = spec.devices_per_node or 8
        facts: JsonObject = {
            "link": spec.link_bandwidth or spec.host_bandwidth,
            "host": spec.host_link,
            "inter_node": spec.inter_node_bandwidth or NETWORK_BANDWIDTH,
            "devices_per_node": node,
            "memory": spec.bandwidth,
            "clock_hz": spec.clock_hz,
            "architecture": spec.architecture,
        }
        # AMD connects the devices of a node pairwise (data sheets of MI100 to MI355X).
        if spec.vendor.upper() == "AMD":
            facts["peers"] = node - 1
        return cls(**{**facts, **changes})

    @classmethod
    def from_row(cls, row: JsonMapping, **changes: Any) -> Links:
        """Read the links from a row of a published device table.

        Args:
            row: ``link_gbs_unidir``, ``pcie_gbs_unidir``, ``inter_node_gbs_unidir`` and
                ``hbm_gbs`` in 1e9 bytes/s, ``boost_mhz``, ``arch``; absent or NaN if unknown.
            **changes: Fields to override, such as ``island=2``.
        """
        host = 1e9 * _number(row.get("pcie_gbs_unidir"), 32.0)
        facts = {
            "link": 1e9 * _number(row.get("link_gbs_unidir"), host / 1e9),
            "host": host,
            "inter_node": 1e9 * _number(row.get("inter_node_gbs_unidir"), 25.0),
            "devices_per_node": int(_number(row.get("devices_per_node"), 8.0)),
            "memory": 1e9 * _number(row.get("hbm_gbs"), 0.0),
            "clock_hz": 1e6 * _number(row.get("boost_mhz"), 0.0),
            "architecture": str(row.get("arch") or ""),
        }
        return cls(**{**facts, **changes})

    def fabric(self, world_size: int, devices_per_node: int) -> str:
        """The kind of link that limits a group of ``world_size``.

        ``scale_up``; ``pcie``: devices without scale-up links; ``host``: scale-up islands (pairs)
        joined by PCI Express; ``staged``: through the host's memory, without peer access;
        ``network``: more than one node.
        """
        if world_size > devices_per_node and self.inter_node < RACK_RATIO * self.link:
            return "network"
        if not self.peer_access:
            return "staged"
        if self.link < SCALE_UP_RATIO * self.host:
            return "pcie"
        return "host" if self.island and world_size > self.island else "scale_up"

    def bandwidth(self, fabric: str, world_size: int = 0) -> float:
        """Bytes/s in one direction that ``world_size`` devices can use over a fabric's links."""
        # Pairwise links to devices outside the group are idle.
        used = min(world_size - 1, self.peers) / self.peers if self.peers and world_size else 1.0
        return {
            "scale_up": self.link * used,
            "pcie": self.link,
            "host": self.host,
            "staged": self.host,
        }.get(fabric, self.inter_node)


def _number(value: float | str | None, default: float) -> float:
    number = float(value) if value not in (None, "") else float("nan")
    return number if number == number else default
