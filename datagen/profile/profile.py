"""Profiles the local device: measures a plan of programs and writes a dataset.

See :mod:`opcast.datagen.profile.run` for the course of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ...common.errors import ProfileError
from ...features.devices.device import DeviceSpec
from ..dataset_folder import consolidate
from .plan import DEFAULT_MIX, WALL_SECONDS, given_items
from .run import ProfileRun
from .settings import PATIENCE, ProfileResult, ProfileSettings
from .worker_client import REPLY_TIMEOUT

__all__ = ["DEVICES", "ProfileResult", "ProfileSettings", "consolidate", "profile"]

DEVICES = ("local", "cpu", "gpu", "tpu")


def profile(
    out: Path | str,
    *,
    device: str = "local",
    budget_s: float | None = None,
    sources: Sequence[object] = (),
    mix: Mapping[str, float] | None = None,
    suite: str = "standard",
    seed: int = 0,
    resume: bool = True,
    progress: bool = True,
    max_memory: float | None = None,
    device_spec: DeviceSpec | None = None,
    check_every_s: float = 30.0,
    replicate_share: float = 0.03,
    recycle_every_s: float | None = None,
    timeout_s: float = REPLY_TIMEOUT,
    wall_s: float = WALL_SECONDS,
    patience: float = PATIENCE,
    env: Mapping[str, str] | None = None,
) -> ProfileResult:
    """Measure latencies on the local device and write a dataset.

    Args:
        out: Folder of the dataset. A second call with the same plan continues where the first one
            ended, however that was.
        device: ``local`` for whatever JAX sees, or ``cpu``, ``gpu``, ``tpu``.
        budget_s: Seconds; needed unless only given programs are measured.
        sources: Programs to measure: paths, StableHLO texts, or objects with ``name``, ``family``
            and ``mlir``. Their arguments are drawn from their types.
        mix: Default: given programs alone if there are any, else ops, random programs and the zoo.
        suite: Suite of the zoo.
        seed: Seed of the random streams.
        resume: Whether a folder that already holds data may be continued.
        progress: Whether to show progress.
        max_memory: Bytes that one program may need.
        device_spec: The device, if it is not to be probed.
        check_every_s: Time between two checks of the anchors.
        replicate_share: Part of the programs that are measured again in another process.
        recycle_every_s: Time after which the worker is replaced.
        timeout_s: Time without news after which a program counts as stuck.
        wall_s: Seconds of whole executions of each program; longer runs average over the speeds
            of a shared machine.
        patience: Share of the time that may go into waiting for an undisturbed machine.
        env: Environment variables for the measuring process.

    Raises:
        ProfileError: The device is not there, the folder holds data and ``resume`` is off, or
            measuring is not possible at all.
    """
    given = given_items(sources)
    settings = ProfileSettings(
        device=device,
        budget_s=budget_s,
        mix=dict(mix) if mix is not None else ({"given": 1.0} if given else dict(DEFAULT_MIX)),
        suite=suite,
        seed=seed,
        max_memory=max_memory,
        check_every_s=check_every_s,
        replicate_share=replicate_share,
        recycle_every_s=recycle_every_s,
        timeout_s=timeout_s,
        wall_s=wall_s,
        patience=patience,
    )
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    _check(settings, folder, resume)
    run = ProfileRun(folder, settings, given, device_spec, dict(env or {}))
    return run.execute(progress)


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
