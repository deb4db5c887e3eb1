"""The catalogue of accelerators as their vendors describe them: files in ``features/devices``.

Other packages add folders of such files through entry points of the group ``opcast.devices``.
Lookup by name returns a :class:`DeviceSpec`. opcast measured none of these figures; a measurement
of the device (``opcast device --save``) is always better.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ...common import plugins
from ...common.errors import DeviceError
from ...common.files import is_description, is_yaml
from ...common.paths import PACKAGE
from .device import DeviceSpec, device_slug
from .rules import generations
from .sheet import Sheet, overlay, read_designs, read_sheet
from .spec_of_sheet import device_of_sheet

#: Entry-point group through which packages add folders of device files.
GROUP = "opcast.devices"
_FOLDER = PACKAGE / "features" / "devices"
#: Number of suggestions for a mistyped name.
_CLOSEST = 4
#: Spelling variants: SXM2 to SXM6 are the sockets of successive generations; 80g means 80gb.
_SPELLINGS = re.compile(r"(?<=sxm)\d|(?<=\dg)b")


def device_names() -> list[str]:
    """Return the canonical names of all devices in the catalogue, sorted."""
    return sorted(_files())


@cache
def _files() -> dict[str, Path]:
    """Return the device files by canonical name; opcast's override those of other packages."""
    folders = [Path(plugins.load(point)) for point in plugins.found(GROUP).values()]
    # The last one wins: a plug-in cannot replace a device that models were trained on.
    return {path.stem: path for folder in (*folders, _FOLDER) for path in folder.glob("*.yaml")}


def find_device(name: str) -> DeviceSpec:
    """Find a device in the catalogue.

    Args:
        name: Canonical name (``h100-sxm``), an alias such as JAX's device kind
            (``NVIDIA H100 80GB HBM3``), or the :func:`device_slug` of one; case does not matter.

    Raises:
        DeviceError: The catalogue has no such device; the hint lists the closest names.
    """
    canonical = _canonical(name)
    if canonical is None:
        raise DeviceError(
            f"device {name!r} is not in the catalogue",
            hint=f"close to it: {', '.join(closest_names(name))}; all: opcast device --list",
        )
    return _catalogue_device(canonical)


def typed_name(name: str) -> str | None:
    """Return the canonical name of the device that a user means, possibly by a short name.

    Args:
        name: Canonical name or alias, or any short name that matches one device: ``v5e``,
            ``rtx4090``, ``mi300``, ``a100-pcie-80g``.

    Returns:
        ``None`` if the catalogue has no such device.

    Raises:
        DeviceError: The short name, such as ``h100``, matches several devices; the hint lists them.
    """
    slug = device_slug(name)
    if slug in _files():
        return slug
    names = {own: [own] for own in device_names()}
    meant = shortened(slug, names)
    # The alias H100 in tables means one product, but a user may mean any product with that chip.
    # Names reported by a runtime ("TPU v5") have several words.
    if slug in _index() and (not meant or "-" in slug):
        return _index()[slug]
    if not meant:
        aliases = {own: list(map(device_slug, _catalogue_sheet(own).aliases)) for own in names}
        meant = shortened(slug, aliases)
    if len(meant) > 1:
        raise DeviceError(
            f"{name!r} may be any of {len(meant)} devices", hint=f"name one: {', '.join(meant)}"
        )
    return meant[0] if meant else None


def find_typed(name: str) -> DeviceSpec:
    """Find a device in the catalogue by a name that a user typed; see :func:`typed_name`.

    Raises:
        DeviceError: The catalogue has no such device, or the name matches several.
    """
    return find_device(typed_name(name) or name)


def read_device(device: str) -> DeviceSpec:
    """Find a device in the catalogue, or read it from a file.

    Args:
        device: As for :func:`typed_name`, or the path of a YAML or JSON file.

    Raises:
        DeviceError: The catalogue has no such device, the name matches several, or the file is
            missing or invalid.
    """
    return device_file(device) or find_typed(device)


def device_file(device: str | Path) -> DeviceSpec | None:
    """Read the device of a file; ``None`` for a name, which never has a file suffix.

    Raises:
        DeviceError: The argument is neither a name nor a path; the file is missing or invalid; or
            it changes a base but has the name of a catalogue device with other figures.
    """
    if not isinstance(device, str | Path):
        raise DeviceError(
            f"a device is given by {type(device).__name__} {device!r}",
            hint="give its name, the path of its file, or an opcast.DeviceSpec",
        )
    if not is_description(device):
        return None
    return _own_name(DeviceSpec.from_file(device), Path(device))


def _own_name(device: DeviceSpec, path: Path) -> DeviceSpec:
    """Reject a file that changes a base and has the name of a device in the catalogue.

    Measurements are assigned by name. A complete description may differ from the catalogue's, such
    as another data sheet of the same chip, or a probe.
    """
    listed = _canonical(device.name) if device.base else None
    if listed is not None and _unnamed(device) != _unnamed(_catalogue_device(listed)):
        raise DeviceError(
            f"name {device.name!r} is that of a device of the catalogue with other figures",
            where=str(path),
            hint=f"give this chip a name of its own; base: {listed} takes what it shares with that",
        )
    return device


def find_described(name: str, described: Mapping[str, DeviceSpec]) -> DeviceSpec:
    """Find a device of a table, in the accompanying descriptions or else in the catalogue.

    Args:
        name: Name in the table: of a description, or as for :func:`find_device`.
        described: Devices by name, from device files, a dataset or a model. They take precedence:
            a dataset's labels and a model's constants belong to them.

    Raises:
        DeviceError: The device is neither described nor in the catalogue.
    """
    found = described.get(name) or described.get(_canonical(name) or name)
    if found is not None:
        return found
    if not in_catalogue(name):
        own = f"described here: {', '.join(sorted(described))}; " if described else ""
        raise DeviceError(
            f"device {name!r} is not in the catalogue",
            hint=f"{own}close to it in the catalogue: {', '.join(closest_names(name))}; a chip of "
            "your own: --device FILE, with this name in the file",
        )
    return find_device(name)


def choose_described(device: str, described: Mapping[str, DeviceSpec]) -> DeviceSpec:
    """Find a device that a user typed, for data or a model with its own device descriptions.

    Args:
        device: The path of a YAML or JSON file, the name of a description, or as for
            :func:`typed_name`.
        described: As for :func:`find_described`.

    Raises:
        DeviceError: As :func:`find_described`; the name matches several devices; or the file is
            missing or invalid.
    """
    if device in described:
        return described[device]
    return device_file(device) or find_described(typed_name(device) or device, described)


def in_catalogue(name: str) -> bool:
    """Return whether the catalogue has a device, by name or alias."""
    return _canonical(name) is not None


def same_figures(device: DeviceSpec) -> DeviceSpec | None:
    """Find the catalogue device that a description repeats under another name, if any.

    A device file that names a ``base`` and changes nothing describes the base.
    """
    figures = _unnamed(device)
    like = (_catalogue_device(name) for name in device_names())
    return next((d for d in like if _unnamed(d) == figures), None)


def measured_as(device: DeviceSpec) -> str:
    """Return the name under which a device is measured: for an unchanged base, the base's."""
    if in_catalogue(device.name):
        return device.name
    return (same_figures(device) or device).name


def _unnamed(device: DeviceSpec) -> DeviceSpec:
    return replace(device, name="", source="", aliases=(), provenance={}, base="")


def closest_names(name: str) -> list[str]:
    """List canonical names that are, or have an alias, closest to ``name``, best first."""
    known = _index()
    close = difflib.get_close_matches(device_slug(name), known, n=len(known), cutoff=0.0)
    found = list(dict.fromkeys(known[slug] for slug in close))
    # Names of one platform or product line share their first part: cpu-…, tpu-…, rtx-….
    first = name.lower().split("-")[0]
    return sorted(found, key=lambda other: other.split("-")[0] != first)[:_CLOSEST]


def load_device_file(path: Path | str) -> DeviceSpec:
    """Read a device file, for example of a chip that does not exist yet.

    A file with ``base: h100-sxm`` takes the figures that it omits from that catalogue device; any
    name that :func:`typed_name` accepts is allowed.

    Raises:
        DeviceError: The file is missing, not YAML, has unknown keys or wrong types, is incomplete,
            or its figures contradict each other; the message contains file and key.
    """
    path = Path(path)
    # Time and size are part of the cache key, so that an edited file is read again.
    stat = path.stat() if path.is_file() else None
    return _load_device_file(path, stat and stat.st_mtime_ns, stat and stat.st_size)


class Design(NamedTuple):
    """One device of a file with ranges.

    Attributes:
        figures: Value of each figure that the file gives as a range, by its key.
        device: The description.
    """

    figures: dict[str, float]
    device: DeviceSpec


def load_designs(path: Path | str) -> list[Design]:
    """Read all designs of a device file whose figures may be ranges; see docs/devices.md.

    Raises:
        DeviceError: As :func:`load_device_file`, or a range is malformed.
    """
    path = Path(path)
    return [
        Design(figures, _own_name(device_of(sheet), path)) for figures, sheet in read_designs(path)
    ]


def unchanged(path: Path | str) -> DeviceSpec | None:
    """Read the base of a file's designs, with the file's linear models, if it has a base.

    Raises:
        DeviceError: As :func:`load_device_file`.
    """
    sheet = read_designs(Path(path))[0][1]
    if "base" not in sheet.texts:
        return None
    device = device_of(replace(sheet, values={}, sources={}, unsourced=()))
    return replace(device, name=device.base)


def base_of(design: DeviceSpec) -> DeviceSpec | None:
    """Return the catalogue device that a design starts from; ``None`` for a catalogue device.

    It is the base named in the design's file. Without one, a GPU starts from the device of its
    architecture that is nearest in cores and capacities; rates only break ties, so that no rate of
    a design changes its base. A GPU of unknown architecture starts from its vendor's reference.
    """
    # A file may repeat a catalogue device under its name, and name it as base as well.
    if in_catalogue(design.name):
        return None
    if design.base and in_catalogue(design.base):
        return find_device(design.base)
    if design.platform != "gpu":
        return None
    same = [chip for chip in _gpus() if chip.architecture == design.architecture]
    if not same:
        maker = "NVIDIA" if design.runs_cuda else design.vendor
        return find_device(generations().references[maker])
    return min(same, key=lambda chip: _unlikeness(chip, design))


@cache
def _gpus() -> tuple[DeviceSpec, ...]:
    every = map(_catalogue_device, device_names())
    return tuple(chip for chip in every if chip.platform == "gpu")


def _unlikeness(chip: DeviceSpec, other: DeviceSpec) -> tuple[float, float]:
    """Return distances of two devices in counts and capacities, and in rates (log scale)."""
    cores, memory, cache, lanes, *rates = zip(_figures(chip), _figures(other), strict=True)

    def apart(pairs: Iterable[tuple[float, float]]) -> float:
        # Omitted figures carry no information.
        return sum(abs(math.log(a / b)) for a, b in pairs if a and b)

    # Rounded, so that equal distances compare equal.
    return round(apart((cores, memory, cache, lanes)), 6), apart(rates)


def _figures(chip: DeviceSpec) -> tuple[float, ...]:
    counts = (chip.core_count, chip.memory_bytes, chip.cache_bytes, chip.lanes_per_core)
    peaks = (chip.matrix_peak("bf16"), chip.vector_peak("f32"))
    return (*map(float, counts), *peaks, chip.bandwidth, chip.clock_hz, chip.power_w)


def has_ranges(device: str) -> bool:
    """Return whether a device is a file that describes several designs."""
    return is_yaml(device) and len(load_designs(device)) > 1


@cache
def _load_device_file(path: Path, *_: int | None) -> DeviceSpec:
    return device_of(read_sheet(path))


def device_of(sheet: Sheet) -> DeviceSpec:
    """Build the description of a sheet's device, completed from its base.

    Raises:
        DeviceError: There is no such base, or figures are missing or contradict each other.
    """
    device = device_of_sheet(_with_base(sheet))
    base = typed_name(sheet.texts["base"]) if "base" in sheet.texts else None
    return replace(device, base=base or "")


@cache
def _catalogue_sheet(name: str) -> Sheet:
    return read_sheet(_files()[name])


@cache
def _catalogue_device(name: str) -> DeviceSpec:
    return device_of_sheet(_with_base(_catalogue_sheet(name)))


def _with_base(sheet: Sheet, above: tuple[str, ...] = ()) -> Sheet:
    if "base" not in sheet.texts:
        return sheet
    try:
        base = typed_name(sheet.texts["base"])
    except DeviceError as error:
        raise DeviceError(f"base: {error.what}", where=sheet.where, hint=error.hint) from None
    # Bases may form a circle only by mistake; `above` ends it.
    if base is None or base in above:
        what = f"base {sheet.texts['base']!r} is not in the catalogue"
        close = ", ".join(closest_names(sheet.texts["base"]))
        raise DeviceError(
            what,
            where=sheet.where,
            hint=f"close to it: {close}; devices of models alone are no bases: edit the "
            "figures that opcast device NAME --json prints, in a file NAME.json",
        )
    return overlay(_with_base(_catalogue_sheet(base), (*above, base)), sheet)


def _canonical(name: str) -> str | None:
    slug = device_slug(name)
    if slug in _files():
        return slug
    return _index().get(slug)


@cache
def _index() -> dict[str, str]:
    """Return canonical names by slug of every name and alias."""
    names: dict[str, str] = {}
    for name in device_names():
        for alias in (name, *_catalogue_sheet(name).aliases):
            # An alias of two devices would make its meaning depend on the order of files.
            other = names.setdefault(device_slug(alias), name)
            if other != name:
                raise DeviceError(f"{alias!r} names both {other} and {name}", where=str(_FOLDER))
    return names


def shortened(slug: str, names: Mapping[str, Sequence[str]]) -> list[str]:
    """Find devices whose name has all parts of a short name, in order.

    Args:
        slug: Short name, in lower case with dashes, which may be omitted.
        names: Names of each device in the same form.

    Returns:
        The devices; the short name has to include the part that names the chip.
    """
    plain = _SPELLINGS.sub("", slug).replace("-", "")
    return [device for device, full in names.items() if any(_shortens(plain, f) for f in full)]


def _shortens(plain: str, full: str) -> bool:
    parts = _SPELLINGS.sub("", full).split("-")
    # The first part with a digit names the chip; the others are its vendor, socket or memory.
    chip = next((i for i, part in enumerate(parts) if re.search(r"\d", part)), None)
    if chip is None:
        return False
    pattern = "".join(
        _chip(part) if i == chip else f"(?:{re.escape(part)})?" for i, part in enumerate(parts)
    )
    return re.fullmatch(pattern, plain) is not None


def _chip(part: str) -> str:
    """Match the chip's part, with optional last letter: MI300 for MI300X, v5 for v5e and v5p."""
    return re.escape(part) + ("?" if part[-1].isalpha() else "")
