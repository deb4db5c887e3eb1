"""Run the profiler, summarise datasets, and measure and describe devices."""

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
    REPORTED_CHANGE,
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
#: Seconds of a probe; rarely used number formats are skipped if they do not fit.
PROBE_SECONDS = 12.0
#: Seconds after a probe during which the machine's speed is assumed unchanged, and readings of the
#: anchors for a prediction (half a second each). Engineering estimates.
_FRESH_S, _READINGS = 120.0, 3


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
    """Run the profiler into a dataset folder, and print a summary."""
    from ..datagen.profile.plan import ProfileSettings as RunSettings

    mix = parse_mix(settings.mix)
    own = RunSettings(settings.device, settings.budget_s, mix, settings.suite, settings.seed)
    if settings.ray:
        from ..datagen.profile.profile import profile_fleet

        result = profile_fleet(settings.out, settings.ray, own, progress=not settings.quiet)
    else:
        from ..datagen.profile.profile import profile

        result = profile(settings.out, own, progress=not settings.quiet)
    settings.save(settings.out)
    # Both are 0 on a Ray cluster, whose hosts overlap them.
    parts = f"set-up and probe {result.setup_s:.0f} s, final check {result.check_s:.0f} s"
    detail = f" ({parts})" if result.setup_s + result.check_s > 0.0 else ""
    wrote(
        result.folder,
        f"{result.samples} samples of {result.programs} programs, {result.failed} failed, "
        f"{result.elapsed_s:.0f} s{detail}, {result.stopped}",
    )
    # Ends with status 130 after the measurements have been saved and reported.
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


def local_now(
    known: Mapping[str, DeviceSpec], tell: Callable[[str], None] = lambda what: None
) -> DeviceSpec:
    """Describe this machine at its present speed, probing it first if it has not been measured.

    Args:
        known: Devices that the model was trained on.
        tell: Called with a message before a probe.
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
    """Describe this machine as it was last measured; arguments as for :func:`local_now`."""
    from ..predict.devices import is_known, resolve_device

    if not is_known("local", known):
        tell("measuring this machine's peak rates, once (15 s)")
        measure_device(save=True)
    return resolve_device("local", known)


def measure_device(*, save: bool, tell: Callable[[str], None] = logger.warning) -> DeviceSpec:
    """Measure the local device, and save the result for ``--device local`` if ``save`` is set.

    Reports differences from the last measurement, because every prediction for this machine depends
    on its peak rates.

    Args:
        save: Whether to save it. Intervals then also cover the earlier peaks.
        tell: Called with a message about differences.
    """
    from ..common.files import write_text
    from ..datagen.profile.device_probe import probe_device
    from ..predict.devices import measured_path, time_text

    spec = probe_device(PROBE_SECONDS)
    path = measured_path(spec.name)
    # Measuring again replaces a damaged file.
    with contextlib.suppress(DeviceError, FileNotFoundError):
        before = DeviceSpec.from_file(path)
        if told := ceilings_moved(spec, before):
            tell(told)
        spec = remeasured(spec, before)
    if save:
        # Notes of predictions state the time, because the peaks of shared machines drift.
        spec = replace(spec, extra={**spec.extra, MEASURED_AT: time_text(datetime.now(UTC))})
        write_text(path, spec.to_json())
    return spec


def ceilings_moved(now: DeviceSpec, then: DeviceSpec) -> str:
    """Describe the peak rates that changed in a new measurement; empty if none did."""
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
        if old.get(dtype) and max(rate / old[dtype], old[dtype] / rate) > REPORTED_CHANGE
    ]
    if not moved:
        return ""
    change = compare_ceilings(now, then)
    holds = (
        "intervals of predictions cover both"
        if change.same
        else "the earlier ones are discarded, because measurements of one machine differ by less"
    )
    return (
        f"peak rates of {now.name} changed since "
        f"{then.extra.get(MEASURED_AT, 'they were measured')}: {', '.join(moved)}; times change by "
        f"up to {change.factor:.2f} x, and {holds}"
    )


def show_device(console: Console, name: str, *, as_json: bool) -> None:
    """Print a device with its sources: measured here, from the catalogue or a device file."""
    from ..predict.devices import find_anywhere
    from ..predict.render.device import print_device

    spec = find_anywhere(name)
    if as_json:
        print(spec.to_json())
    else:
        print_device(console, spec)


def list_devices(console: Console, *, as_json: bool) -> None:
    """Print the catalogue, and the devices of the trained models outside of it, as a table."""
    from ..features.devices.catalogue import device_names, find_device, in_catalogue
    from ..predict.locate import trained_devices
    from ..predict.render.device import print_devices

    specs = [find_device(name) for name in device_names()]
    specs += [spec for name, spec in trained_devices().items() if not in_catalogue(name)]
    if as_json:
        print(json.dumps([json.loads(spec.to_json()) for spec in specs]))
    else:
        print_devices(console, specs)
