"""The catalogue of clusters: from a name to devices and their network.

``<device>-x<n>`` is ``n`` devices in one box or slice, such as ``h100-sxm-x4`` and ``tpu-v3-x8``,
or in several whole ones, such as ``mi300x-x64``; ``<tpu>-<a>x<b>x<c>`` is a slice of that shape;
``dgx-<gpu>-x<total>`` is one or more boxes, such as ``dgx-h100-x128``. All follow rules in data
files (``simulate/clusters/*.yaml``), with a source for every figure. The figures of links inside a
box come from the device file.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import replace
from math import prod
from pathlib import Path

from ...common.errors import DeviceError
from ...common.files import is_yaml, own_data
from ...common.types import JsonObject
from ...features.devices.catalogue import find_device, in_catalogue, typed_name
from ...features.devices.device import DeviceSpec, device_slug
from .files import load_cluster
from .slices import Rule, shape_of, slice_of, sources_of
from .topology import Cluster, Dimension, Topology

_NAME = re.compile(r"(?P<device>.+)-x(?P<count>[1-9]\d*)")
#: A TPU slice by the chips along each of its axes.
_SHAPED = re.compile(r"(?P<device>.+)-(?P<shape>[1-9]\d*(x[1-9]\d*)+)")
#: Figures of a dimension in a rule: the field that each sets, and its factor to SI units.
_FIGURES = {
    "bandwidth_gbps": ("bandwidth", 1e9),
    "latency_us": ("latency", 1e-6),
    "launch_us": ("launch", 1e-6),
    "efficiency": ("efficiency", 1.0),
}
#: Chips of a whole TPU host, the least of a slice that is joined to others (Google Cloud, machine
#: types ct4p-hightpu-4t, ct5lp-hightpu-4t, ct6e-standard-4t, from memory).
_HOST_CHIPS = 4
#: Figures of a device file that a rule may use as bandwidth, with the ``DeviceSpec`` field.
_LINKS = {"link_gbps": "link_bandwidth", "pcie_gbps": "host_bandwidth"}


def find_cluster(name: str | Path | Cluster) -> Cluster:
    """Find a cluster in the catalogue, or read one from a file; a cluster is returned as it is.

    Args:
        name: ``<device>-x<n>``, ``<tpu>-<a>x<b>x<c>``, ``dgx-<gpu>-x<total>``, or the path of a
            YAML file (opcast's, or ASTRA-sim's ``network.yml``). ``<device>`` may be an alias;
            without ``-x<n>`` it means a single device.

    Raises:
        DeviceError: There is no such device, box or file, or the box does not hold as many; the
            message lists similar names.
    """
    if isinstance(name, Cluster):
        return name
    text = str(name)
    # The suffix decides before the catalogue does: a file may have the name of an entry.
    if is_yaml(text):
        return load_cluster(text)
    shaped = _SHAPED.fullmatch(device_slug(text))
    if shaped and (typed := typed_name(shaped["device"])):
        return _shaped(find_device(typed), tuple(map(int, shaped["shape"].split("x"))))
    match = _NAME.fullmatch(device_slug(text))
    # A device without a count is a cluster of one.
    if match is None and (alone := typed_name(text)):
        match = _NAME.fullmatch(f"{alone}-x1")
    if match is None:
        raise _unknown(text)
    device, count = match["device"], int(match["count"])
    boxed = device.removeprefix("dgx-").removeprefix("hgx-")
    if boxed != device and boxed in _rules("dgx"):
        found = _any_number(find_device(_rules("dgx")[boxed]["device"]), count, whole=True)
        # A single box is the same cluster as ``<device>-x<n>``.
        return replace(found, name=f"dgx-{boxed}-x{count}") if found.boxes > 1 else found
    typed = typed_name(boxed)
    if typed is None:
        raise _unknown(text)
    return _any_number(find_device(typed), count)


def named_cluster(device: str, count: int) -> str:
    """Name of the cluster with ``count`` devices; empty if there is none in the catalogue."""
    boxes = [gpu for gpu, rule in _rules("dgx").items() if rule["device"] == device]
    for name in (*(f"dgx-{gpu}-x{count}" for gpu in boxes), f"{device}-x{count}"):
        try:
            return find_cluster(name).name
        except DeviceError:
            continue
    return ""


def joined(
    device: str | DeviceSpec, count: int, per_node: int = 0, between: float = 0.0
) -> Cluster:
    """Any number of devices, connected as the rules for that device specify.

    Up to the size of a box or slice it is one; several are connected by InfiniBand or, for TPUs, by
    a data-centre network. Racks of 72 are partly filled if the number is not a multiple of 72.

    Args:
        device: Name or alias of a device of the catalogue, or a description. A device that is not
            in the catalogue is connected like others of its vendor and architecture, with the
            bandwidth in its description; a single one needs no links.
        count: Number of devices.
        per_node: Devices per box; 0 for the rule of the device.
        between: Bytes/s in one direction from one device to other boxes; 0 for the rule.

    Raises:
        DeviceError: The device is unknown, no rule applies to it, or the number is not a multiple
            of the box size.
    """
    spec = device if isinstance(device, DeviceSpec) else find_device(device)
    matched = _rule_of(spec.name) or _rule_like(spec)
    name = f"{spec.name}-x{count}"
    if matched is None and count == 1 and not in_catalogue(spec.name):
        # Nothing is sent, but a dimension needs a bandwidth.
        alone = Dimension("ring", 1, spec.link_bandwidth or spec.bandwidth)
        return Cluster(name, spec.name, Topology((alone,)), 1)
    if matched is None:
        between = between or spec.inter_node_bandwidth
        if not between:
            return _one_box(spec, count)
        # Without links in the box, as for single-device superchips, everything uses the network.
        rule = _unnamed_boxes()
        network = replace(_network(count, rule), bandwidth=between)
        sources = sources_of(rule, network.name, spec, "inter_node_gbps")
        return Cluster(name, spec.name, Topology((network,)), 1, sources)
    table, rule = matched
    most = rule["largest"]
    if most <= 8 and per_node:
        # Larger domains, racks and slices, have many hosts.
        most = min(per_node, most)
    whole = [n for n in range(1, min(most, count) + 1) if count % n == 0]
    if table == "slices":
        whole = [n for n in whole if shape_of(n, rule)]
        if count > most and max(whole, default=1) < _HOST_CHIPS:
            raise DeviceError(
                f"{count} devices are not whole slices of {spec.name}, of {_HOST_CHIPS} or more",
                where=name,
                hint=f"take a multiple of {_HOST_CHIPS}, best of a large power of two",
            )
    inner = max(whole, default=1)
    box = _one_box(spec, inner)
    if inner == count:
        return box
    between_boxes = _between(spec.name, "multislice" if table == "slices" else "dgx")
    named = spec.name in (between_boxes["device"], *between_boxes["like"])
    if not named:
        between = between or spec.inter_node_bandwidth
        if not between:
            raise DeviceError(
                f"one box joins at most {most} {spec.name}; how several are joined is open",
                where=name,
                hint="describe the cluster in a YAML file, or give its network",
            )
    network = _network(count // inner, between_boxes)
    if between:
        network = replace(network, bandwidth=between)
    link = "" if named else "inter_node_gbps"
    sources = box.sources | sources_of(between_boxes, network.name, spec, link)
    return Cluster(name, spec.name, Topology((*box.topology.dims, network)), inner, sources)


def cluster_names() -> list[str]:
    """Names of common sizes, sorted; other counts follow the same rules."""
    names = []
    for rule in _rules("boxes").values():
        # 36 and 72 are GB200 NVL36 and NVL72 racks; the others are common boxes and parts of them.
        sizes = [n for n in (2, 4, 8, 16, 36, 72) if n <= rule["largest"]]
        link = _LINKS[rule["bandwidth"]]
        linked = [d for d in rule["devices"] if getattr(find_device(d), link)]
        names += [f"{device}-x{n}" for device in linked for n in sizes]
    for rule in _rules("slices").values():
        sizes = [n for n in (4, 8, 16, 32, 64, 128, 256, 512) if n <= rule["largest"]]
        names += [f"{device}-x{n}" for device in rule["devices"] for n in sizes]
    for gpu, rule in _rules("dgx").items():
        names += [f"dgx-{gpu}-x{rule['per_node'] * boxes}" for boxes in (2, 4, 8, 16, 32, 128)]
    return sorted(names)


def _rules(name: str) -> dict[str, Rule]:
    rules: dict[str, Rule] = own_data(f"simulate/clusters/{name}.yaml")
    return rules


def _unnamed_boxes() -> Rule:
    """Rule without a bandwidth, for boxes that no other rule covers."""
    return next(rule for rule in _rules("dgx").values() if rule.get("others"))


def _rule_of(device: str) -> tuple[str, Rule] | None:
    for table in ("boxes", "slices"):
        for rule in _rules(table).values():
            if device in rule["devices"]:
                return table, rule
    return None


def _rule_like(device: DeviceSpec) -> tuple[str, Rule] | None:
    """Rule of devices of the same vendor and architecture, for an unlisted device."""
    if in_catalogue(device.name) or not device.architecture:
        return None
    for table in ("boxes", "slices"):
        for rule in _rules(table).values():
            if not getattr(device, _LINKS[rule.get("bandwidth", "link_gbps")]):
                continue
            for listed in map(find_device, rule["devices"]):
                own = (device.vendor, device.architecture)
                if (listed.vendor, listed.architecture) == own:
                    return table, rule
    return None


def _one_box(device: DeviceSpec, count: int) -> Cluster:
    name = f"{device.name}-x{count}"
    matched = _rule_of(device.name) or _rule_like(device)
    if matched is None:
        raise DeviceError(
            f"the catalogue does not define how {device.name} are joined",
            where=name,
            hint="describe the cluster in a YAML file (docs/clusters.md)",
        )
    table, rule = matched
    # Beyond one NVLink domain the user usually means a cluster of boxes: suggest it.
    if count > rule["largest"]:
        more = f", or dgx-<gpu>-x{count}" if rule.get("name") == "nvlink" else ""
        raise DeviceError(
            f"one box or slice joins at most {rule['largest']} {device.name}",
            where=name,
            hint=f"take fewer{more}, or describe the cluster in a YAML file",
        )
    if table == "slices":
        shape = shape_of(count, rule)
        if not shape:
            cube = rule.get("cube", 0) ** rule["axes"] * rule.get("cores_per_chip", 1)
            raise DeviceError(
                f"{count} devices are not a slice of {device.name}",
                where=name,
                hint="take a power of two" + (f" or a multiple of {cube}" if cube else ""),
            )
        return slice_of(device, count, rule, name, shape)
    dim, sources = _box_dimension(device, count, rule)
    return Cluster(name, device.name, Topology((dim,)), count, sources)


def _box_dimension(device: DeviceSpec, count: int, rule: Rule) -> tuple[Dimension, dict[str, str]]:
    bandwidth = getattr(device, _LINKS[rule["bandwidth"]])
    if not bandwidth:
        raise DeviceError(
            f"the device file has no {rule['bandwidth']}",
            where=device.name,
            hint="describe the cluster in a YAML file",
        )
    paired = device.name in rule.get("pairwise", ()) and count > 1
    dim = Dimension(
        rule["kind"],
        rule["largest"] if paired else count,
        bandwidth,
        rule["latency_us"] * 1e-6,
        rule["launch_us"] * 1e-6,
        efficiency=rule["efficiency"],
        name=rule["name"],
        algorithms=tuple(rule["algorithms"]),
        reduction=rule.get("reduction", ""),
    )
    if paired:
        (dim,) = Topology((dim,)).group_dims(count)
    return dim, sources_of(rule, rule["name"], device, rule["bandwidth"])


def _any_number(device: DeviceSpec, count: int, *, whole: bool = False) -> Cluster:
    """Devices of one box or slice, or of several whole ones.

    Args:
        device: Device of the catalogue.
        count: Number of devices.
        whole: Whether a part of a single box is also rejected.

    Raises:
        DeviceError: No rule applies to the device or to that number.
    """
    table, rule = _rule_of(device.name) or _rule_like(device) or ("", {"largest": 0})
    several = count > rule["largest"]
    if table == "boxes" and (whole or several):
        network = _between(device.name)
        # Racks of many hosts may be partly filled, each to the same part.
        box = network.get("host", min(rule["largest"], network["per_node"]))
        if count % box:
            part = "" if several else f", or {device.name}-x{count} for part of a box"
            raise DeviceError(
                f"{count} devices are not whole boxes of {box}",
                where=f"{device.name}-x{count}",
                hint=f"take a multiple of {box}{part}",
            )
    return joined(device, count) if several else _one_box(device, count)


def _between(device: str, over: str = "dgx") -> Rule:
    """Rule that connects the boxes of a device; the generic one if none names the device."""
    known = (r for r in _rules(over).values() if device in (r["device"], *r["like"]))
    return next(known, _unnamed_boxes())


def _network(boxes: int, rule: Rule) -> Dimension:
    fields: JsonObject = {field: rule[key] * si for key, (field, si) in _FIGURES.items()}
    fields["algorithms"] = tuple(rule["algorithms"])
    # The dimension connects devices with the same position in their boxes (a rail), so it has one
    # port per box. A dimension needs equal leaves: use the fullest that divide the boxes evenly.
    radix = max(n for n in range(1, rule["radix"] + 1) if boxes % n == 0)
    if boxes <= rule["radix"]:
        return Dimension("switch", boxes, name="infiniband", **fields)
    return Dimension("fat_tree", boxes, radix=radix, name="infiniband", **fields)


def _shaped(device: DeviceSpec, shape: tuple[int, ...]) -> Cluster:
    """A slice with a given shape."""
    name = f"{device.name}-{'x'.join(map(str, shape))}"
    matched = _rule_of(device.name)
    if matched is None or matched[0] != "slices" or len(shape) != matched[1]["axes"]:
        raise DeviceError(
            f"{device.name} has no slices of {len(shape)} axes", where=name, hint="docs/clusters.md"
        )
    rule = matched[1]
    count = prod(shape) * rule.get("cores_per_chip", 1)
    if count > rule["largest"]:
        raise DeviceError(
            f"a slice has at most {rule['largest']} {device.name}, this one {count}", where=name
        )
    return slice_of(device, count, rule, name, shape)


def _unknown(name: str) -> DeviceError:
    # No cutoff: even a far-fetched name gets suggestions.
    close = difflib.get_close_matches(name.lower(), cluster_names(), n=4, cutoff=0.0)
    return DeviceError(
        f"cluster {name!r} is not in the catalogue",
        hint=f"close to it: {', '.join(close)}; all: opcast cluster --list; or a YAML file",
    )
