"""Profiles the local device: measures a plan of programs and writes a dataset.

See :mod:`opcast.datagen.profile.run` for the course of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ...common.errors import ProfileError
from ...features.devices.device import DeviceSpec
from .plan import DEFAULT_MIX, ProfileResult, ProfileSettings, given_items
from .run import ProfileRun

DEVICES = ("local", "cpu", "gpu", "tpu")


def profile(
    out: Path | str,
    settings: ProfileSettings | None = None,
    *,
    sources: Sequence[object] = (),
    resume: bool = True,
    progress: bool = True,
    device_spec: DeviceSpec | None = None,
    env: Mapping[str, str] | None = None,
) -> ProfileResult:
    """Measure latencies on the local device and write a dataset.

    Args:
        out: Folder of the dataset. A second call with the same plan continues where the first one
            ended, however that was.
        settings: What is measured, and how; a budget is needed unless only given programs are.
        sources: Programs to measure: paths, StableHLO texts, or objects with ``name``, ``family``
            and ``mlir``. Their arguments are drawn from their types.
        resume: Whether a folder that already holds data may be continued.
        progress: Whether to show progress.
        device_spec: The device, if it is not to be probed.
        env: Environment variables for the measuring process.

    Raises:
        ProfileError: The device is not there, the folder holds data and ``resume`` is off, or
            measuring is not possible at all.
    """
    given = given_items(sources)
    settings = settings or ProfileSettings()
    if not settings.mix:
        settings = replace(settings, mix={"given": 1.0} if given else DEFAULT_MIX)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    _check(settings, folder, resume)
    return ProfileRun(folder, settings, given, device_spec, dict(env or {})).execute(progress)


def _check(settings: ProfileSettings, folder: Path, resume: bool) -> None:
    if settings.device not in DEVICES:
        raise ProfileError(
            f"unknown device {settings.device!r}", hint=f"one of {', '.join(DEVICES)}"
        )
    # Random streams never end.
    if settings.budget_s is None and set(settings.mix) != {"given"}:
        raise ProfileError("a plan without an end needs a budget", hint="give budget_s")
    # A folder with records alone holds nothing that could be mixed up.
    if not resume and any(folder.glob("*.parquet")):
        raise ProfileError(
            "holds a dataset already", where=str(folder), hint="resume, or give another folder"
        )
