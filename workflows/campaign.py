"""Run measurement campaigns, and import and audit their archives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..common.errors import DatasetError, DeviceError
from ..common.progress import wrote
from ..common.types import JsonObject

if TYPE_CHECKING:
    from rich.console import Console

    from ..datagen.campaign.importer import ImportedCampaign
    from ..datagen.campaign.plan import CampaignSettings
    from ..features.devices.device import DeviceSpec

#: Maximum number of lines printed of a list.
_SHOWN = 8


def run_campaign(settings: CampaignSettings, tell: Callable[[str], None]) -> int:
    """Run a campaign, print a summary, and return the exit status.

    Args:
        settings: The cases and the time to spend.
        tell: Called with a line for each block, and for each case that failed.
    """
    from ..datagen.campaign.__main__ import ended_as_interrupted, summary
    from ..datagen.campaign.plan import outline
    from ..datagen.campaign.run import run_campaign as run

    if settings.plan:
        print("\n".join(outline(settings)))
        return 0
    with ended_as_interrupted():
        outcome = run(settings, tell)
    wrote(outcome.archive or settings.out, summary(outcome))
    return outcome.status


def campaign_device(
    record: JsonObject, device: str | None, described: DeviceSpec | None = None
) -> DeviceSpec:
    """Describe the device of a campaign: as given, as the campaign measured it, or by its name.

    Args:
        record: The campaign's record.
        device: Name, file or ``local``; ``None`` for the campaign's device.
        described: The device with the peaks that the campaign measured, if it did.

    Raises:
        DeviceError: The device is unknown, or contradicts the record.
    """
    from ..datagen.campaign.archive import device_names
    from ..features.devices.catalogue import find_device, in_catalogue
    from ..predict.devices import resolve_device
    from ..predict.locate import trained_devices

    names = device_names(record)
    # CPUs are not in the catalogue; known ones were measured here or used for training.
    known = trained_devices() if record["platform"] == "cpu" else {}
    if device is not None:
        spec = resolve_device(device, known)
        _check_same(spec, str(record["platform"]), names)
        return spec
    if described is not None:
        return described
    for name in names:
        if in_catalogue(name):
            return find_device(name)
        if known:
            with contextlib.suppress(DeviceError):
                return resolve_device(name, known)
    raise DeviceError(
        f"the campaign's device is unknown: {', '.join(names) or 'without a name'}",
        hint="give --device FILE: the output of opcast device on that machine, or a device file "
        "written by hand (docs/devices.md)",
    )


def _check_same(spec: DeviceSpec, platform: str, names: Sequence[str]) -> None:
    """Refuse a device that contradicts the record.

    Unknown names, and hand-written device files with other names, do not contradict it.

    Raises:
        DeviceError: The platform or the name differs.
    """
    from ..features.devices.catalogue import find_device, in_catalogue
    from ..features.devices.device import device_slug
    from ..features.devices.identity import base_name, is_measured

    listed = {find_device(name).name for name in names if in_catalogue(name)}
    other = spec.platform != platform
    if in_catalogue(spec.name):
        other |= bool(listed) and find_device(spec.name).name not in listed
    elif is_measured(spec) and names:
        other |= base_name(spec.name) not in {*names, *map(device_slug, names)}
    if other:
        raise DeviceError(
            f"the campaign was measured on a {platform} ({', '.join(names) or 'without a name'}), "
            f"but {spec.name} is a different device, a {spec.platform}",
            hint="leave --device out: the campaign records its device",
        )


def run_import_campaign(
    console: Console,
    path: Path,
    out: Path,
    *,
    device: str | None,
    tell: Callable[[str], None],
) -> ImportedCampaign:
    """Import and audit a campaign, and print a summary.

    Args:
        console: Console to print to.
        path: Folder or archive of the campaign.
        out: Folder to write.
        device: As for :func:`campaign_device`.
        tell: Called with a line for each note.

    Raises:
        OpcastError: The archive is invalid or was modified, or the device is unknown or differs.
    """
    from ..datagen.campaign.archive import read_archive
    from ..datagen.campaign.importer import (
        KERNELS,
        OPERATORS,
        TABLES,
        described_device,
        import_campaign,
    )

    archive = read_archive(path)
    rows, record, _ = archive
    spec = campaign_device(record, device, described_device(rows))
    found = import_campaign(archive, out, spec)
    if not found.samples and not found.operators and not found.tables:
        raise DatasetError("the campaign measured nothing", where=str(path))
    tables = ", ".join(f"{count} of {name}" for name, count in found.tables.items())
    console.print(
        f"{spec.name}: {found.samples} samples of kernels and programs ({out / KERNELS}), "
        f"{found.operators} of operators ({out / OPERATORS}), rows {tables} ({out / TABLES})"
    )
    console.print(f"digest {found.digest}")
    for name, own in found.noise["replicates"].items():
        console.print(
            f"noise of {name}: {own['median_ape']:.1%} over {own['pairs']} measured twice"
        )
    for name, own in found.noise["drift"].items():
        console.print(f"drift of {name}: {own['range']:.1%} over {own['workers']} workers")
    wrong = list(found.contradictions)
    for part in (KERNELS, OPERATORS):
        if (out / part).is_dir():
            wrong += _against_roofline(out / part, spec, tell)
    _list(console, "contradicted", wrong)
    _list(console, "without kernels", [f"{k}: {why}" for k, why in found.without.items()])
    return found


def _against_roofline(folder: Path, spec: DeviceSpec, tell: Callable[[str], None]) -> list[str]:
    """Describe the rows that are faster than the device can be."""
    from ..predict.published.audit import audit

    try:
        checked = audit(folder, {spec.name: spec})
    except DatasetError as error:
        tell(f"note: {folder.name} cannot be audited: {error}")
        return []
    for note in checked.notes:
        tell(f"note: {note}")
    bad = checked.flagged[checked.flagged["impossible"].astype(bool)]
    return [
        f"{row['what']}: {row['reason']}, {row['explanation']}" for row in bad.to_dict("records")
    ]


def _list(console: Console, what: str, lines: Sequence[str]) -> None:
    if lines:
        console.print(f"{what}: {len(lines)}")
        for line in lines[:_SHOWN]:
            console.print(f"  {line}")
        if len(lines) > _SHOWN:
            console.print(f"  and {len(lines) - _SHOWN} others")
