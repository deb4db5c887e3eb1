"""Replica groups in all notations, expanded to tuples of device numbers.

- lists: ``{{0,1},{2,3}}`` (HLO), ``dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>`` (StableHLO); ``-1``
  pads uneven groups;
- iota: ``[2,2]<=[4]`` and ``[4,2]<=[2,4]T(1,0)``: devices are numbered row-major in the second
  shape, transposed, and reshaped to the first (HLO's ``IotaReplicaGroupList``);
- mesh axes: ``mesh['x'=4,'y'=2] {'x'}`` or ``@mesh {'x', 'y':(1)2}``: devices that differ only in
  the named axes form a group (``replica_group_mesh_axes`` of HLO and StableHLO); the mesh may list
  its devices in another order, ``mesh['x'=2,'y'=2], device_ids=([2,2]T(1,0)) {'x'}``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod

import numpy as np

from ...common.errors import ProgramError

Groups = tuple[tuple[int, ...], ...]

# ``[4,2]<=[2,4]T(1,0)``.
_IOTA = re.compile(r"\[([\d,\s]*)\]\s*<=\s*\[([\d,\s]*)\]\s*(?:T\(([\d,\s]*)\))?")
# ``mesh['x'=4,'y'=2]``.
_MESH = re.compile(r"\[([^\]]*=[^\]]*)\]")
# ``#sdy.mesh<["x"=4, "y"=2]>``, ``#stablehlo.mesh<axes = [...]>``.
_MLIR_MESH = re.compile(r"#?\w+\.mesh<(?:axes\s*=\s*)?\[((?:[^\]\[])*)\]")
_NAMED_MESH = re.compile(r"@(\"[^\"]+\"|[\w.\-]+)")
_AXIS_SIZE = re.compile(r"['\"]([^'\"]+)['\"]\s*(?:=|,\s*size\s*=)\s*(\d+)")
# ``'x'``, or a part of an axis: ``'y':(1)2`` is the part of size 2 with a pre-size of 1.
_AXIS_REF = re.compile(
    r"['\"]([^'\"]+)['\"](?:\s*:?\s*(?:,\s*sub_axis_info\s*=\s*)?\(\s*(\d+)\s*\)\s*(\d+))?"
)
_DEVICE_IDS = re.compile(r"device_ids\s*=\s*(?:dense<)?[(\[]*([\d,\s]*)[)\]]*")
_IOTA_IDS = re.compile(r"device_ids\s*=\s*\(\[([\d,\s]*)\]\s*(?:T\(([\d,\s]*)\))?")
_DENSE = re.compile(r"dense<(.*?)>\s*:\s*tensor<(?:(\d+)x(\d+)x)?", re.DOTALL)
_NUMBER = re.compile(r"-?\d+")

#: A sub-axis: axis name, product of the sizes before it in the axis (pre-size), its own size.
AxisRef = tuple[str, int, int]


def parse_replica_groups(
    text: str,
    meshes: Mapping[str, Mapping[str, int]] | None = None,
    n_devices: int = 0,
    *,
    device_ids: Mapping[str, Sequence[int]] | None = None,
) -> Groups:
    """Expand replica groups.

    Args:
        text: The groups in any of the notations above, without ``replica_groups=``.
        meshes: Axis sizes by mesh name, for meshes referred to by name.
        n_devices: Number of devices, which form one group if the list is empty.
        device_ids: Devices in mesh order by mesh name, if the order is not 0, 1, 2 …

    Returns:
        Device numbers by group; empty if the list is empty and ``n_devices`` is not given.

    Raises:
        ProgramError: The text has none of these notations, or names an unknown mesh or axis.
    """
    text = text.strip()
    # From the most to the least distinctive notation.
    if match := _IOTA.fullmatch(text):
        return _from_iota(*(_integers(part or "") for part in match.groups()))
    if match := _DENSE.match(text):
        return _from_dense(match, n_devices)
    if "=" in text or "@" in text or "'" in text or '"' in text:
        return _from_mesh_text(text, meshes or {}, device_ids or {})
    if text and not re.fullmatch(r"[\[\]{}\d,\s-]*", text):
        raise _unreadable(text)
    return expand_lists(_lists(text), n_devices)


def expand_lists(rows: Sequence[Sequence[int]], n_devices: int) -> Groups:
    """Remove padding (``-1``), and expand an empty list to one group of all devices.

    Args:
        rows: Device numbers, one row per group.
        n_devices: Number of devices; 0 keeps an empty list empty.
    """
    groups = tuple(tuple(d for d in row if d >= 0) for row in rows)
    groups = tuple(group for group in groups if group)
    return groups or ((tuple(range(n_devices)),) if n_devices else ())


def mesh_groups(
    sizes: Mapping[str, int], axes: Sequence[AxisRef], device_ids: Sequence[int] = ()
) -> Groups:
    """Group the devices that differ only in some axes of a mesh.

    Args:
        sizes: Size by axis name, major to minor.
        axes: Axes along which a group extends, major to minor; a whole axis has pre-size 1 and
            its own size (or 0, which means the whole axis).
        device_ids: Device at each mesh position, row-major; empty means 0, 1, 2 …

    Raises:
        ProgramError: An axis is not part of the mesh, or its parts do not fit.
    """
    total = prod(sizes.values())
    shape: list[int] = []
    parts: dict[tuple[str, int], int] = {}
    # Size 0 means the whole axis.
    wanted = [(name, pre, size or sizes.get(name, 0)) for name, pre, size in axes]
    for name, axis_size in sizes.items():
        for pre, size in _split_axis(name, axis_size, wanted):
            parts[name, pre] = len(shape)
            shape.append(size)
    try:
        inner = [parts[name, pre] for name, pre, _ in wanted]
    except KeyError as error:
        raise ProgramError(
            f"mesh axis {error.args[0][0]!r} of a replica group is not in the mesh",
            where="replica_groups",
            hint=f"the mesh has {', '.join(sizes) or 'no axes'}",
        ) from None
    outer = [i for i in range(len(shape)) if i not in inner]
    group_size = prod(shape[i] for i in inner)
    ids = np.asarray(device_ids) if len(device_ids) == total else np.arange(total)
    # Puts devices that differ only in the inner axes into one row.
    rows = ids.reshape(shape).transpose(outer + inner).reshape(-1, group_size)
    return tuple(tuple(int(d) for d in row) for row in rows)


def _split_axis(name: str, size: int, wanted: Sequence[AxisRef]) -> list[tuple[int, int]]:
    """Split an axis where referenced parts begin and end: (pre-size, size), major to minor."""
    edges = {1, size}
    for axis, pre, part in wanted:
        if axis == name:
            edges |= {pre, pre * part}
    # Each part of the axis lies between neighbouring cuts, each of which must divide the next.
    cuts = sorted(edges)
    pieces = list(pairwise(cuts)) or [(1, 1)]
    if any(after % before for before, after in pieces) or cuts[-1] != size:
        raise ProgramError(
            f"parts of mesh axis {name!r} (size {size}) do not fit into it",
            where="replica_groups",
            hint="check the sub-axes: pre-size times size must divide the axis",
        )
    return [(before, after // before) for before, after in pieces]


def _integers(text: str) -> list[int]:
    return [int(n) for n in _NUMBER.findall(text)]


def _from_iota(result: list[int], shape: list[int], permutation: list[int]) -> Groups:
    order = permutation or list(range(len(shape)))
    if len(order) == len(result) != len(shape):
        # Some tools write the flat count where HLO has the shape before the transposition.
        shape = [result[order.index(axis)] for axis in sorted(order) if axis in order]
    if prod(result) != prod(shape) or sorted(order) != list(range(len(shape))) or not result:
        raise _unreadable(f"{result}<={shape}T{permutation}")
    rows = np.arange(prod(shape)).reshape(shape).transpose(order).reshape(-1, result[-1])
    return tuple(tuple(int(d) for d in row) for row in rows)


def _from_dense(match: re.Match[str], n_devices: int) -> Groups:
    body, rows, columns = match.groups()
    if body.strip().startswith("["):
        return expand_lists(_lists(body), n_devices)
    value = _integers(body)
    shape = (int(rows or 0), int(columns or 0))
    # dense<0> : tensor<1x1xi64> contains its single element once.
    return expand_lists([value * shape[1]] * shape[0] if value else [], n_devices)


def _lists(text: str) -> list[list[int]]:
    inner = re.findall(r"[\[{]([^\[\]{}]*)[\]}]", text)
    return [_integers(row) for row in inner]


def _from_mesh_text(
    text: str, meshes: Mapping[str, Mapping[str, int]], device_ids: Mapping[str, Sequence[int]]
) -> Groups:
    name = _mesh_name(text)
    inline = _MLIR_MESH.search(text) or _MESH.search(text)
    axes_text = _axes_text(text)
    if name in meshes:
        sizes, ids = dict(meshes[name]), device_ids.get(name, ())
    elif inline:
        sizes = {axis: int(size) for axis, size in _AXIS_SIZE.findall(inline[1])}
        ids = _device_order(text)
    else:
        raise ProgramError(
            f"replica groups name the mesh {name!r}, which the program does not define",
            where=text,
            hint="define it with sdy.mesh, or give the groups as lists",
        )
    axes = [
        (axis[1], int(axis[2] or 1), int(axis[3] or 0)) for axis in _AXIS_REF.finditer(axes_text)
    ]
    return mesh_groups(sizes, axes, ids)


def _device_order(text: str) -> Sequence[int]:
    """Return the devices in mesh order, listed or as ``[2,2]T(1,0)``; empty for 0, 1, 2 …."""
    if iota := _IOTA_IDS.search(text):
        shape, order = _integers(iota[1]), _integers(iota[2] or "")
        ids = np.arange(prod(shape)).reshape(shape).transpose(order or None).reshape(-1)
        return [int(d) for d in ids]
    listed = _DEVICE_IDS.search(text)
    return _integers(listed[1]) if listed else ()


def _mesh_name(text: str) -> str:
    named = _NAMED_MESH.search(text)
    return named[1].strip('"') if named else ""


def _axes_text(text: str) -> str:
    """Extract the axes: the braces of HLO, or the last ``axes = [...]`` of StableHLO."""
    if "axis_ref" in text or "replica_group_mesh_axes" in text:
        return text[text.rindex("axes") + 4 :]
    return text[text.find("{") + 1 : text.rfind("}")]


def _unreadable(text: str) -> ProgramError:
    return ProgramError(
        f"replica groups {text!r} are in no known notation",
        where="replica_groups",
        hint="known are {{0,1},{2,3}}, [2,2]<=[2,2]T(1,0) and mesh['x'=4,'y'=2] {'x'}",
    )
