"""Converts rows of a frame to arrays for the curves.

Bytes are those of nccl-tests: the buffer for ``all_reduce``, ``send_recv`` and ``broadcast``; the
full buffer (the output of the gather, the input of the scatter) for ``all_gather`` and
``reduce_scatter``; one device's whole send buffer for ``alltoall``. Backend ``oneccl`` differs: its
``all_gather`` counts one device's share (measured times rise with ``n - 1`` shares, and only this
makes them consistent with its other operations).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from ...common.errors import DatasetError, DeviceError
from ...common.files import own_data
from ...features.operators.schema import Source, sources
from .curve import COPY_EFFICIENCY, Points, steps, wire_bytes
from .links import REFERENCE_CLOCK, Links

#: Frameworks with a custom all-reduce, which sends whole buffers for small messages.
CUSTOM_BACKENDS = ("sglang", "vllm", "trtllm")
#: Operations that NCCL runs as rings in one domain for any number of devices; trees are for
#: all-reduces (NCCL, ``NCCL_ALGO``).
RINGS = ("all_gather", "reduce_scatter", "alltoall")
#: A permute in which every device sends to the next while receiving from the previous one.
RING_PERMUTE = "collective_permute"
#: Collectives as XLA times them; on AMD devices they run in RCCL, whose start-ups are three times
#: those of NCCL in XLA's tables.
XLA, XLA_AMD = "xla", "xla_rccl"
#: Machines that published tables name instead of a device: device string, and overridden links
#: (``platforms.yaml``).
PLATFORMS: dict[str, tuple[str, dict[str, object]]] = {
    name: (own["device"], own["links"])
    for name, own in own_data("models/collectives/platforms.yaml").items()
}
_NEEDED = ("op", "bytes", "world_size")


@dataclass(frozen=True)
class CollectiveTable:
    """Collectives ready to be estimated; arrays of shape ``(n,)``.

    Attributes:
        fabric: Result of :meth:`~opcast.models.collectives.links.Links.fabric`.
        backend: Library, with ``_eager`` where the host issues the calls one by one.
        op: Operation; ``all_reduce_int8`` for all-reduces of bytes, which switches cannot reduce.
        machine: Device string or platform, the key of known machines.
        family: Architecture of the device.
        points: Arguments of the curves.
    """

    fabric: np.ndarray
    backend: np.ndarray
    op: np.ndarray
    machine: np.ndarray
    family: np.ndarray
    points: Points

    def __len__(self) -> int:
        """Number of collectives."""
        return len(self.op)

    def take(self, rows: np.ndarray) -> CollectiveTable:
        """The collectives at ``rows``, a mask or positions."""
        names = ("fabric", "backend", "op", "machine", "family")
        columns = {name: getattr(self, name)[rows] for name in names}
        return replace(self, points=self.points.take(rows), **columns)


def device_rows(*tables: pd.DataFrame) -> Callable[[str], Links]:
    """Make a function from device string to links, from published device tables.

    Args:
        *tables: Frames with a ``device`` column and those of ``Links.from_row``; the last row of a
            device with a link bandwidth wins.
    """
    links: dict[str, Links] = {}
    for table in tables:
        for row in table.to_dict("records"):
            name = str(row["device"])
            # NaN differs from itself: a row without a link bandwidth does not replace one with it.
            if name not in links or row.get("link_gbs_unidir") == row.get("link_gbs_unidir"):
                links[name] = Links.from_row({str(k): v for k, v in row.items()})

    def find(name: str) -> Links:
        if name not in links:
            raise DeviceError(
                f"no links are known for {name!r}", hint="add a row to the device table"
            )
        return links[name]

    return find


def machine_links(machines: Iterable[str], find: Callable[[str], Links]) -> dict[str, Links]:
    """Links of every machine, where a machine is a device string or one of :data:`PLATFORMS`."""
    result = {}
    for machine in sorted(set(machines)):
        device, changes = PLATFORMS.get(machine, (machine, {}))
        links = find(device)
        result[machine] = Links(**{**links.__dict__, **changes})
    return result


def collective_table(frame: pd.DataFrame, find: Callable[[str], Links]) -> CollectiveTable:
    """Prepare rows for estimation.

    Args:
        frame: ``op``, ``bytes`` (see the module), ``world_size``, and ``device`` or
            ``platform``; optionally ``devices_per_node`` (default: that of the machine),
            ``backend`` (default: what the row's ``source`` calls, such as ``torch`` for NCCL
            called from PyTorch), ``kernel`` (only whether it ends in ``_eager``) and ``dtype``.
        find: Links by device string: :func:`device_rows`, or a catalogue lookup with
            ``Links.from_spec``.

    Raises:
        DatasetError: A column is missing, or a row has fewer than two devices or no bytes.
        DeviceError: The links of a device are unknown.
    """
    _check(frame)
    machine = _machines(frame)
    links = machine_links(machine, find)
    world = frame["world_size"].to_numpy(float)
    nodes = np.array([links[m].devices_per_node for m in machine], dtype=float)
    per_node = frame["devices_per_node"].to_numpy(float) if "devices_per_node" in frame else nodes
    size, op, backend = frame["bytes"].to_numpy(float), _operations(frame), _backends(frame)
    return _table(op, size, world, per_node, machine, backend, [links[m] for m in machine])


def one_collective(
    op: str, size: float, world: int, per_node: int, machine: str, backend: str, links: Links
) -> CollectiveTable:
    """The table of a single collective, as :func:`collective_table` of a frame with one row.

    Args:
        op: Operation.
        size: Bytes, as counted in a table.
        world: Devices, at least two.
        per_node: Devices in a box.
        machine: Device string or platform.
        backend: Library.
        links: Links of the device.
    """
    own = machine_links([machine], lambda _: links)[machine]
    ops, machines, backends = (np.array([w], dtype=object) for w in (op, machine, backend))
    sizes, worlds, boxes = (np.array([n], dtype=float) for n in (size, world, per_node))
    return _table(ops, sizes, worlds, boxes, machines, backends, [own])


def _table(
    op: np.ndarray,
    size: np.ndarray,
    world: np.ndarray,
    per_node: np.ndarray,
    machine: np.ndarray,
    backend: np.ndarray,
    links: list[Links],
) -> CollectiveTable:
    each = list(zip(links, world, per_node, strict=True))
    fabric = np.array([own.fabric(int(n), int(k)) for own, n, k in each], dtype=object)
    # RCCL under the same name: its curves must not mix with NCCL's.
    amd = np.array([own.architecture.startswith("cdna") for own in links], bool)
    backend[amd & (backend == XLA)] = XLA_AMD
    points = _points(size, world, per_node, op, backend, fabric, links)
    family = np.array([own.architecture for own in links], dtype=object)
    return CollectiveTable(fabric, backend, op, machine, family, points)


def _check(frame: pd.DataFrame) -> None:
    missing = [c for c in _NEEDED if c not in frame]
    if missing or not ({"device", "platform"} & set(frame.columns)):
        raise DatasetError(
            f"collectives lack the columns {missing or ['device']}",
            hint="needed: op, bytes, world_size, and device or platform",
        )
    bad = (frame["world_size"] < 2) | ~(frame["bytes"] > 0)
    if bad.any():
        raise DatasetError(
            "a collective needs at least two devices and one byte",
            where=f"row {int(np.flatnonzero(bad.to_numpy())[0])}",
        )


def _machines(frame: pd.DataFrame) -> np.ndarray:
    empty = pd.Series([None] * len(frame), index=frame.index, dtype=object)
    device = frame["device"].astype(object) if "device" in frame else empty
    platform = frame["platform"].astype(object) if "platform" in frame else empty
    known = platform.isin(list(PLATFORMS)) | device.isna()
    return np.asarray(device.where(~known, platform), dtype=object)


def _operations(frame: pd.DataFrame) -> np.ndarray:
    op = frame["op"].astype(str).to_numpy(dtype=object)
    if "dtype" in frame:
        # NVLink switches (NVLS) reduce floating-point types but not bytes: NCCL uses another
        # algorithm.
        of_bytes = frame["dtype"].isin(["int8", "uint8", "s8", "u8"]).to_numpy()
        op = np.where((op == "all_reduce") & of_bytes, "all_reduce_int8", op)
    return op


def _backends(frame: pd.DataFrame) -> np.ndarray:
    calls = {name: own.calls for name, own in sources().items()}
    named = frame["source"] if "source" in frame else pd.Series("", frame.index)
    default = named.map(calls).fillna(Source().calls).to_numpy(object)
    if "backend" not in frame:
        return default
    given = frame["backend"].astype(object)
    backend = given.where(given.notna(), pd.Series(default, index=frame.index))
    eager = np.zeros(len(frame), dtype=bool)
    if "kernel" in frame:
        eager = (
            frame["kernel"].astype(object).fillna("").astype(str).str.endswith("_eager").to_numpy()
        )
    names = backend.astype(str).to_numpy(dtype=object)
    return np.array(
        [n + "_eager" * bool(e) for n, e in zip(names, eager, strict=True)], dtype=object
    )


def _points(
    size: np.ndarray,
    world: np.ndarray,
    per_node: np.ndarray,
    op: np.ndarray,
    backend: np.ndarray,
    fabric: np.ndarray,
    links: list[Links],
) -> Points:
    wire = np.zeros(len(size))
    for name in set(op):
        plain = str(name).removesuffix("_int8")
        for shards in (False, True):
            at = (op == name) & ((backend == "oneccl") == shards)
            wire[at] = wire_bytes(plain, size[at], world[at], gathers_shards=shards)
    library = np.array([str(b).removesuffix("_eager") for b in backend], dtype=object)
    custom = np.isin(library, CUSTOM_BACKENDS) & (op == "all_reduce")
    eager = np.array([str(b).endswith("_eager") for b in backend], dtype=float)
    memory = np.array([link.memory for link in links])
    plain_op = np.array([str(name).removesuffix("_int8") for name in op], dtype=object)
    # Read and written once; free on a device without a described memory bandwidth.
    copied = 2.0 * size / (COPY_EFFICIENCY * np.where(memory > 0, memory, np.inf)) * 1e6
    return Points(
        size=size,
        world=world,
        steps=steps(world, np.isin(plain_op, RINGS)),
        # Across nodes the link is a device's share of the network, which depends on the devices per
        # node, not on the number of nodes. The factor 2 starts one device at octave 1.
        spread=np.where(fabric == "network", 2.0 * np.minimum(per_node, world), world),
        wire=wire,
        # For small messages, a custom all-reduce sends its whole buffer to every other device.
        wire_low=np.where(custom, (world - 1.0) * size, wire),
        bandwidth=np.array(
            [k.bandwidth(f, int(n)) for k, f, n in zip(links, fabric, world, strict=True)]
        )
        / 1e6,
        # Start-ups are code on the device: they shorten as its clock rises.
        scale=np.array([REFERENCE_CLOCK / k.clock_hz if k.clock_hz else 1.0 for k in links]),
        copy=copied * eager,
        eager=eager,
    )
