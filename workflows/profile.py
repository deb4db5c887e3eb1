"""Run the profiler, and summarise datasets."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ..common.errors import DatasetError, DeviceError
from ..common.progress import wrote
from ..common.tables_text import print_frame
from ..common.units import quantity
from ..features.devices.device import DeviceSpec, local_device_name
from ..features.devices.identity import (
    MEASURED_AT,
    TOLD_CHANGE,
    anchors_of,
    compare_anchors,
    compare_ceilings,
    remeasured,
    with_speed,
)

if TYPE_CHECKING:
    from rich.console import Console

    from .settings import ProfileSettings

logger = logging.getLogger(__name__)

#: Streams of a profile run by their names on the command line.
_STREAMS = {"ops": "op", "random": "random", "zoo": "zoo"}


def parse_mix(text: str) -> dict[str, float]:
    """Parse the shares of the streams, such as ``ops=0.4,random=0.3,zoo=0.3``.

    Raises:
        DatasetError: A stream is unknown or a share is not a number.
    """
    try:
        pairs = (part.split("=", 1) for part in text.split(","))
        return {_STREAMS[name.strip()]: float(share) for name, share in pairs}
    except (KeyError, ValueError):
        raise DatasetError(
            f"{text!r} is not a mix", hint="write shares such as ops=0.4,random=0.3,zoo=0.3"
        ) from None


def run_profile(settings: ProfileSettings) -> None:
    """Measure into a dataset folder and print what was done."""
    from ..datagen.profile.plan import ProfileSettings as RunSettings

    mix = parse_mix(settings.mix)
    own = RunSettings(settings.device, settings.budget_s, mix, settings.suite, settings.seed)
    if settings.ray:
        from ..datagen.profile.profile import profile_fleet

        result = profile_fleet(settings.out, settings.ray, own, progress=not settings.quiet)
    else:
        from ..datagen.profile.profile import profile

        result = profile(settings.out, own, progress=not settings.quiet)
    # Beside the dataset, so that the run can be repeated.
    settings.save(settings.out)
    # On a fleet the hosts do both beside one another, in the time that they measure.
    parts = f"set-up and probe {result.setup_s:.0f} s, final check {result.check_s:.0f} s"
    told = f" ({parts})" if result.setup_s + result.check_s > 0.0 else ""
    wrote(
        result.folder,
        f"{result.samples} samples of {result.programs} programs, {result.failed} failed, "
        f"{result.elapsed_s:.0f} s{told}, {result.stopped}",
    )
    # What was measured is saved and reported; the command still ends as interrupted (status 130).
    if result.stopped == "interrupted":
        raise KeyboardInterrupt


def show_data(console: Console, paths: Sequence[Path], *, plot: Path | None, as_json: bool) -> None:
    """Print a summary of datasets."""
    from ..datagen.describe import describe, tables
    from ..datagen.describe import plot as draw
    from ..features.dataset import Dataset

    dataset = Dataset.load(*paths)
    summary = describe(dataset)
    if plot is not None:
        draw(dataset, plot)
        wrote(plot, "plot")
    if as_json:
        print(json.dumps(summary))
        return
    for title, table in tables(summary).items():
        print_frame(console, table, title.replace("_", " "))


#: Seconds of a probe; rare types are left out if they do not fit.
PROBE_SECONDS = 12.0
#: Seconds after a probe for which the machine is taken to run as it did; readings of the anchors
#: for a prediction (half a second each). Engineering estimates.
_FRESH_S, _READINGS = 120.0, 3


def local_now(
    known: Mapping[str, DeviceSpec], tell: Callable[[str], None] = lambda what: None
) -> DeviceSpec:
    """Describe this machine by its own probe, made now if there is none, and its present speed.

    Args:
        known: Devices that the model was trained on.
        tell: Called with one line before a probe.
    """
    from ..predict.devices import measured_path

    spec = local_device(known, tell)
    then = anchors_of(spec)
    path = measured_path(local_device_name())
    if not then or time.time() - path.stat().st_mtime < _FRESH_S:
        return spec
    from ..datagen.profile.anchors import present_anchors

    return with_speed(spec, compare_anchors(present_anchors(_READINGS), then))


def local_device(
    known: Mapping[str, DeviceSpec], tell: Callable[[str], None] = lambda what: None
) -> DeviceSpec:
    """Describe this machine by its own probe; arguments as of :func:`local_now`."""
    from ..predict.devices import is_known, resolve_device

    if not is_known("local", known):
        tell("measuring this machine's ceilings, once (15 s)")
        measure_device(save=True)
    return resolve_device("local", known)


def measure_device(*, save: bool, tell: Callable[[str], None] = logger.warning) -> DeviceSpec:
    """Measure the local device, and keep the result for ``--device local`` if ``save`` is set.

    What the last measurement gave otherwise is told: every prediction for the machine moves with
    its ceilings.

    Args:
        save: Whether to keep it. Intervals then hold the earlier ceilings, too.
        tell: Called with one line.
    """
    from ..common.files import write_text
    from ..datagen.profile.device_probe import probe_device
    from ..predict.devices import measured_path, time_text

    spec = probe_device(PROBE_SECONDS)
    path = measured_path(spec.name)
    # A damaged file is what measuring again replaces.
    with contextlib.suppress(DeviceError, FileNotFoundError):
        before = DeviceSpec.from_file(path)
        if told := ceilings_moved(spec, before):
            tell(told)
        spec = remeasured(spec, before)
    if save:
        # Ceilings of shared machines drift, so notes of predictions state when they were taken.
        spec = replace(spec, extra={**spec.extra, MEASURED_AT: time_text(datetime.now(UTC))})
        write_text(path, spec.to_json())
    return spec


def ceilings_moved(now: DeviceSpec, then: DeviceSpec) -> str:
    """Say which ceilings of a machine a new measurement moved, and by how much; empty if none."""
    figures = (
        ("matrix", now.peak_flops, then.peak_flops, "FLOP/s"),
        ("vector", now.vector_flops, then.vector_flops, "FLOP/s"),
        ("memory", {"": now.bandwidth}, {"": then.bandwidth}, "B/s"),
    )
    moved = [
        f"{name}{dtype and ' ' + dtype} {quantity(old[dtype], unit)} -> {quantity(rate, unit)} "
        f"({rate / old[dtype] - 1.0:+.0%})"
        for name, new, old, unit in figures
        for dtype, rate in new.items()
        if old.get(dtype) and max(rate / old[dtype], old[dtype] / rate) > TOLD_CHANGE
    ]
    if not moved:
        return ""
    change = compare_ceilings(now, then)
    holds = (
        "intervals of predictions hold both"
        if change.same
        else "they differ by more than measurements of one machine do, so the earlier ones no "
        "longer count"
    )
    return (
        f"ceilings of {now.name} moved since {then.extra.get(MEASURED_AT, 'they were measured')}: "
        f"{', '.join(moved)}; times change by up to {change.factor:.2f} x, and {holds}"
    )


def show_device(console: Console, name: str, *, as_json: bool) -> None:
    """Print a device with its sources: measured here, of the catalogue, or of a device file."""
    from ..predict.devices import resolve_device
    from ..predict.locate import trained_devices
    from ..predict.render.device import print_device

    spec = resolve_device(name, trained_devices())
    if as_json:
        print(spec.to_json())
    else:
        print_device(console, spec)


def list_devices(console: Console, *, as_json: bool) -> None:
    """Print the catalogue as a table."""
    from ..features.devices.catalogue import device_names, find_device
    from ..predict.render.device import print_devices

    specs = [find_device(name) for name in device_names()]
    if as_json:
        print(json.dumps([json.loads(spec.to_json()) for spec in specs]))
    else:
        print_devices(console, specs)
