"""Cluster files: opcast's YAML, and ASTRA-sim's ``network.yml``.

Keys carry their unit: ``bandwidth_gbps`` is 1e9 bytes/s in one direction, over all links of a
device in the dimension; ``latency_us`` and ``launch_us`` are microseconds. ASTRA-sim gives the
bandwidth of *one link* in 2^30 bytes/s and the latency of one link in nanoseconds; a message
through its switch takes two links.
"""

from __future__ import annotations

from math import inf, prod
from pathlib import Path
from typing import Any

from ...common.errors import DeviceError, meant
from ...common.files import is_yaml, parse_yaml, write_text
from ...common.types import JsonObject
from .topology import Cluster, Dimension, Topology

_TOP = (
    "name", "device", "devices_per_node", "host_memory_gb", "dimensions", "sources", "notes",
)  # fmt: skip
#: Keys of a dimension: the field that each sets, its type, and its factor to SI units (0: no unit).
_KEYS: dict[str, tuple[str, type, float]] = {
    "name": ("name", str, 0),
    "kind": ("kind", str, 0),
    "size": ("size", int, 0),
    "bandwidth_gbps": ("bandwidth", float, 1e9),
    "latency_us": ("latency", float, 1e-6),
    "launch_us": ("launch", float, 1e-6),
    "shape": ("shape", list, 0),
    "radix": ("radix", int, 0),
    "oversubscription": ("oversubscription", float, 1),
    "reduction": ("reduction", str, 0),
    "efficiency": ("efficiency", float, 1),
    "algorithms": ("algorithms", list, 0),
}
_NEEDED = ("kind", "bandwidth_gbps")
#: Bytes/s in one GB/s of ASTRA-sim's analytical network, which converts with ``1 << 30``.
ASTRA_GB = 2.0**30
#: Topologies of ASTRA-sim's analytical network.
_ASTRA_KINDS = {"Ring": "ring", "FullyConnected": "fully_connected", "Switch": "switch"}
_ASTRA_KEYS = ("topology", "npus_count", "bandwidth", "latency")


def load_cluster(path: Path | str) -> Cluster:
    """Read a cluster from opcast's YAML, or from ASTRA-sim's ``network.yml``.

    An ASTRA-sim file names no device: its cluster has the device ``""``. A device file is searched
    for beside the cluster file, then in the current folder.

    Raises:
        DeviceError: The file is missing, not YAML, has an unknown or missing key, a value of the
            wrong type, or implausible figures; the message names file and key.
    """
    path = Path(path)
    data = _read(path)
    # Only ASTRA-sim's format has this key, and it is mandatory there.
    if "npus_count" in data:
        return Cluster(path.stem, "", _from_astra(data, str(path)))
    beside = path.parent / str(data.get("device"))
    if is_yaml(beside) and beside.exists():
        data = {**data, "device": str(beside)}
    return cluster_of(data, str(path))


def cluster_of(data: dict[str, object], where: str) -> Cluster:
    """A cluster from the content of a file; ``where`` names the file in errors."""
    _check_keys(data, _TOP, where)
    device = data.get("device")
    if not isinstance(device, str):
        raise DeviceError("'device' must name a device", where=where, hint="opcast device --list")
    items = data.get("dimensions")
    if not isinstance(items, list) or not items:
        raise DeviceError("'dimensions' must be a list", where=where, hint="innermost first")
    dims = tuple(_dimension(item, f"{where}: dimensions[{i}]") for i, item in enumerate(items))
    per_node = data.get("devices_per_node", 0)
    if isinstance(per_node, bool) or not isinstance(per_node, int) or per_node < 0:
        raise DeviceError("'devices_per_node' must be a whole number", where=where)
    host = data.get("host_memory_gb", 0)
    if isinstance(host, bool) or not isinstance(host, int | float) or not 0 <= host < inf:
        raise DeviceError(
            "'host_memory_gb' must be a number of GB, 1e9 bytes in the host of one box", where=where
        )
    sources = _sources(data.get("sources", {}), where)
    name, notes = str(data.get("name", Path(where).stem)), str(data.get("notes", ""))
    topology = Topology(dims)
    if 0 < per_node < topology.size and topology.size % per_node:
        fits = ", ".join(str(n) for n in range(1, topology.size) if topology.size % n == 0)
        what = f"{topology.size} devices are not whole boxes of {per_node}"
        raise DeviceError(what, where=f"{where}: devices_per_node", hint=f"one of {fits}")
    return Cluster(name, device, topology, per_node, sources, notes, host * 1e9)


def cluster_data(cluster: Cluster) -> dict[str, object]:
    """Plain data from which :func:`cluster_of` restores the cluster."""
    sources: dict[str, list[str]] = {}
    for key, source in cluster.sources.items():
        sources.setdefault(source, []).append(key)
    data = {
        "name": cluster.name,
        "device": cluster.device,
        "devices_per_node": cluster.devices_per_node,
        "host_memory_gb": cluster.host_memory / 1e9,
        "dimensions": [_dimension_data(d) for d in cluster.topology.dims],
        "sources": sources,
        "notes": cluster.notes,
    }
    return {k: v for k, v in data.items() if v or k in ("name", "device")}


def save_cluster(cluster: Cluster, path: Path) -> None:
    """Write a cluster as the YAML that :func:`load_cluster` reads."""
    import yaml

    write_text(path, yaml.safe_dump(cluster_data(cluster), sort_keys=False))


def astra_network(topology: Topology) -> str:
    """Text of ASTRA-sim's ``network.yml`` for a topology.

    A torus becomes one ring per axis, and a fat tree without oversubscription a switch. Efficiency
    is folded into the bandwidth; the format has no launch costs or in-network reductions.

    Raises:
        DeviceError: A fat tree is oversubscribed, which the format cannot express.
    """
    kinds = {ours: theirs for theirs, ours in _ASTRA_KINDS.items()} | {"fat_tree": "Switch"}
    rows = []
    for dim in (ring for d in topology.dims for ring in d.rings()):
        if dim.oversubscription > 1:
            raise DeviceError(
                "network.yml has no oversubscribed fat tree",
                where=f"dimension {dim.name!r}",
                hint="replace it with a switch of less bandwidth",
            )
        links, hops = _astra_links(dim.kind, dim.size)
        speed, delay = dim.rate / links / ASTRA_GB, dim.latency / hops * 1e9
        # 10 significant digits hide the rounding noise of the conversion to 2^30.
        rows.append((kinds[dim.kind], str(dim.size), f"{speed:.10g}", f"{delay:.10g}"))
    columns = zip(*rows, strict=True)
    pairs = zip(_ASTRA_KEYS, columns, strict=True)
    return "".join(f"{key}: [ {', '.join(values)} ]\n" for key, values in pairs)


def _astra_links(kind: str, size: int) -> tuple[int, int]:
    """Links per device, and links in series between neighbours."""
    if kind == "ring":
        return 2, 1
    return (max(size - 1, 1), 1) if kind == "fully_connected" else (1, 2)


def _from_astra(data: JsonObject, where: str) -> Topology:
    _check_keys(data, _ASTRA_KEYS, where)
    lists = [data.get(key) for key in _ASTRA_KEYS]
    # A length that differs would be cut off silently by ``zip``.
    if any(not isinstance(v, list) or len(v) != len(lists[0] or ()) or not v for v in lists):
        what = f"{', '.join(_ASTRA_KEYS)} must be lists with an entry for each dimension"
        raise DeviceError(what, where=where)
    dims = []
    for i, (kind, size, speed, delay) in enumerate(zip(*lists, strict=True)):
        at = f"{where}: dimension {i}"
        if kind not in _ASTRA_KINDS:
            hint = f"one of {', '.join(_ASTRA_KINDS)}"
            raise DeviceError(f"unknown topology {kind!r}", where=at, hint=hint)
        links, hops = _astra_links(_ASTRA_KINDS[kind], _typed(size, int, at))
        dims.append(
            _checked(
                at,
                kind=_ASTRA_KINDS[kind],
                size=size,
                name=f"dim{i}",
                bandwidth=_typed(speed, float, at) * links * ASTRA_GB,
                latency=_typed(delay, float, at) * hops * 1e-9,
            )
        )
    return Topology(tuple(dims))


def _dimension(item: object, where: str) -> Dimension:
    if not isinstance(item, dict):
        raise DeviceError("a dimension is a mapping of keys to figures", where=where)
    _check_keys(item, tuple(_KEYS), where)
    for key in _NEEDED:
        if key not in item:
            raise DeviceError(f"key {key!r} is missing", where=where)
    fields: JsonObject = {}
    for key, value in item.items():
        field, kind, scale = _KEYS[key]
        typed = _typed(value, kind, f"{where}.{key}")
        fields[field] = typed * scale if kind is float else typed
    for key, kind in (("shape", int), ("algorithms", str)):
        fields[key] = tuple(_typed(x, kind, f"{where}.{key}") for x in fields.get(key, ()))
    # The shape of a torus implies its size.
    if "size" not in fields:
        if not fields["shape"]:
            raise DeviceError("key 'size' is missing", where=where)
        fields["size"] = prod(fields["shape"])
    return _checked(where, **fields)


def _dimension_data(dim: Dimension) -> dict[str, object]:
    result: JsonObject = {}
    for key, (field, kind, scale) in _KEYS.items():
        value = getattr(dim, field)
        plain = {"launch": 0.0, "latency": 0.0, "oversubscription": 1.0, "efficiency": 1.0}
        # Defaults are left out, so that a saved file reads like a hand-written one.
        if value in ("", (), 0) or value == plain.get(field):
            continue
        result[key] = float(f"{value / scale:.10g}") if kind is float else value
    for key in ("shape", "algorithms"):
        if key in result:
            result[key] = list(result[key])
    return result


def _checked(where: str, **fields: Any) -> Dimension:
    # The dimension checks itself but does not know its file: name the file and key instead.
    try:
        return Dimension(**fields)
    except DeviceError as error:
        raise DeviceError(error.what, where=where, hint=error.hint) from None


def _typed(value: object, kind: type, where: str) -> Any:
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    allowed = (int, float) if kind is float else (kind,)
    # ``bool`` is a subclass of ``int``; YAML's ``yes`` must not pass as the size 1.
    if isinstance(value, bool) or not isinstance(value, allowed):
        names = {float: "a number", int: "a whole number", str: "a text", list: "a list"}
        raise DeviceError(f"must be {names[kind]}, not {value!r}", where=where)
    return value


def _check_keys(data: dict[str, object], known: tuple[str, ...], where: str) -> None:
    for key in data:
        if key not in known:
            raise DeviceError(f"unknown key {key!r}", where=where, hint=meant(str(key), known))


def _sources(value: object, where: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(v, list) for v in value.values()):
        raise DeviceError("'sources' must map a source to the keys that it gives", where=where)
    return {str(key): str(source) for source, keys in value.items() for key in keys}


def _read(path: Path) -> dict[str, object]:
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        raise DeviceError(
            "no such cluster file" if missing else str(error), where=str(path)
        ) from None
    except ValueError as error:
        raise DeviceError(str(error), where=str(path)) from None
    if not isinstance(data, dict):
        raise DeviceError("a cluster file is a mapping of keys to figures", where=str(path))
    return data
