"""Profiles the local device, or all hosts of a Ray cluster at once: measures a plan into a dataset.

See :mod:`opcast.datagen.profile.run` for the course of a run. A host of a cluster measures for some
minutes, returns its new results, and continues from there, so that losing a host only loses its
last piece. Each host's number is added to the seed, so equal hosts measure different programs.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...common.errors import ProfileError
from ...common.files import write_bytes
from ...common.progress import Progress
from ...common.tasks import Host, hosts_of, run_on_hosts
from ...features.dataset import read_record, write_record
from ...features.devices.device import DeviceSpec
from ..dataset_folder import FAILURES, add_failures, read_failures, run_records
from .plan import DEFAULT_MIX, ProfileResult, ProfileSettings, given_items
from .run import ProfileRun

logger = logging.getLogger(__name__)

DEVICES = ("local", "cpu", "gpu", "tpu")
#: Seconds that a host measures before it returns its rows. Restarting (a process, the ceilings of
#: the device, anchors) costs a few per cent of it. Engineering choice.
PIECE_S = 300.0
#: Remaining budget in seconds that is too short to start for: the anchors alone take longer.
_LEAST_S = 1.0
#: Key in a run's record for the host that made it.
FLEET = "fleet"


def profile(
    out: Path | str,
    settings: ProfileSettings | None = None,
    *,
    sources: Sequence[object] = (),
    progress: bool = True,
    device_spec: DeviceSpec | None = None,
) -> ProfileResult:
    """Measure latencies on the local device and write a dataset.

    Args:
        out: Folder of the dataset. A second call with the same plan continues where the first one
            ended, for whatever reason.
        settings: Settings of the run; a budget is required unless only given programs are measured.
        sources: Programs to measure: paths, StableHLO texts, or objects with ``name``, ``family``
            and ``mlir``. Their arguments are drawn from their types.
        progress: Whether to show progress.
        device_spec: The device, if it is not to be probed.

    Raises:
        ProfileError: The device is missing, or measuring is not possible at all.
    """
    given = given_items(sources)
    settings = settings or ProfileSettings()
    if not settings.mix:
        settings = replace(settings, mix={"given": 1.0} if given else DEFAULT_MIX)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    _check(settings)
    return ProfileRun(folder, settings, given, device_spec).execute(progress)


def _check(settings: ProfileSettings) -> None:
    if settings.device not in DEVICES:
        raise ProfileError(
            f"unknown device {settings.device!r}", hint=f"one of {', '.join(DEVICES)}"
        )
    # Random streams never end.
    if settings.budget_s is None and set(settings.mix) != {"given"}:
        raise ProfileError("a plan without an end needs a budget", hint="give budget_s")


@dataclass(frozen=True)
class Piece:
    """Work for one host in one go.

    Attributes:
        settings: Settings of the run; the budget covers this piece and all before it.
        known: Earlier measurements of the host: files of the dataset by name.
        device_spec: The device, if it is not to be probed.
    """

    settings: ProfileSettings
    known: Mapping[str, bytes]
    device_spec: DeviceSpec | None = None


@dataclass(frozen=True)
class Measured:
    """Result of a piece.

    Attributes:
        files: New shards and run records by name.
        failures: Programs that failed, with their reasons.
        result: Counts.
    """

    files: Mapping[str, bytes]
    failures: list[dict[str, str]]
    result: ProfileResult


def measure_piece(piece: Piece) -> Measured:
    """Measure a piece on this host, in a temporary folder."""
    own = piece.settings
    with tempfile.TemporaryDirectory(prefix="opcast-profile-") as scratch:
        folder = Path(scratch)
        for name, data in piece.known.items():
            (folder / name).write_bytes(data)
        before = len(read_failures(folder))
        result = profile(folder, own, progress=False, device_spec=piece.device_spec)
        made = [p for p in sorted(folder.iterdir()) if p.name not in (*piece.known, FAILURES)]
        kept = (p for p in made if p.suffix == ".parquet" or p.match("run-*.json"))
        files = {p.name: p.read_bytes() for p in kept}
        return Measured(files, read_failures(folder)[before:], result)


def profile_fleet(
    out: Path | str,
    address: str,
    settings: ProfileSettings,
    *,
    piece_s: float = PIECE_S,
    progress: bool = True,
) -> ProfileResult:
    """Measure on all hosts of a Ray cluster that have the device, into one dataset.

    A run's record identifies the host that made it (``fleet``): its number and Ray's node id, no
    host name. Repeating the call continues, also for hosts that were lost.

    Args:
        out: Local folder of the dataset.
        address: Ray cluster; ``local`` starts one.
        settings: Settings of the run; ``budget_s`` applies to each host, ``seed`` to the first one.
        piece_s: Seconds that a host measures before it returns its rows.
        progress: Whether to show progress.

    Raises:
        ProfileError: There is no budget, no host has the device, or all were lost.
        OpcastError: Ray is not installed, the cluster cannot be reached, or measuring is not
            possible.
    """
    if settings.budget_s is None:
        raise ProfileError("a plan without an end needs a budget", hint="give budget_s")
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    kind = settings.device.upper()
    hosts = hosts_of(address, kind if kind in ("GPU", "TPU") else "CPU")
    if not hosts:
        raise ProfileError(
            f"no host of the cluster has a device {settings.device!r}",
            where=address,
            hint="ray status lists what its nodes have",
        )
    fleet = _Fleet(folder, settings, settings.budget_s, piece_s)
    start, stopped = time.monotonic(), "budget"
    with Progress(len(hosts) * settings.budget_s, "s", progress) as bar:

        def tick() -> None:
            done = len(hosts) * min(time.monotonic() - start, fleet.budget_s)
            note = f"{len(hosts)} hosts" + (f", {len(fleet.lost)} lost" if fleet.lost else "")
            bar.update(done, fleet.samples, fleet.programs, fleet.failed, note)

        try:
            pieces = run_on_hosts(measure_piece, hosts, fleet.next_piece, fleet.lose, tick)
            for host, made in pieces:
                fleet.keep(host, made)
        except KeyboardInterrupt:
            logger.info("interrupted; the pieces that hosts have returned are kept")
            stopped = "interrupted"
    if len(fleet.lost) == len(hosts):
        raise ProfileError("all hosts were lost", where=address, hint="the same command goes on")
    elapsed = time.monotonic() - start
    return ProfileResult(
        folder, fleet.samples, fleet.programs, fleet.failed, elapsed, stopped, fleet.run_id
    )


class _Fleet:
    """Results of the hosts, and their next pieces."""

    def __init__(
        self,
        folder: Path,
        settings: ProfileSettings,
        budget_s: float,
        piece_s: float,
    ) -> None:
        self.budget_s = budget_s
        self.samples = self.programs = self.failed = 0
        self.run_id = ""
        self.lost: list[Host] = []
        self._folder = folder
        self._settings = settings
        self._piece_s = piece_s
        self._ended: set[int] = set()

    def lose(self, host: Host) -> None:
        """Continue without a host."""
        self.lost.append(host)
        logger.warning("host %d is lost; what it has returned is kept", host.number)

    def next_piece(self, host: Host) -> Piece | None:
        """The next piece of a host; ``None`` at the end of its budget."""
        own = {
            run: record
            for run, record in run_records(self._folder).items()
            if record.get(FLEET, {}).get("host") == host.number
        }
        spent = sum(float(record.get("elapsed_s", 0.0)) for record in own.values())
        if host.number in self._ended or self.budget_s - spent < _LEAST_S:
            return None
        settings = replace(
            self._settings,
            seed=self._settings.seed + host.number,
            budget_s=min(spent + self._piece_s, self.budget_s),
        )
        return Piece(settings, self._files(own))

    def _files(self, runs: Mapping[str, object]) -> dict[str, bytes]:
        """Records, shards and failures of some runs."""
        names = [f"run-{run}.json" for run in runs]
        names += [p.name for run in runs for p in sorted(self._folder.glob(f"samples-{run}-*"))]
        failures = [f for f in read_failures(self._folder) if f.get("run_id") in runs]
        files = {name: (self._folder / name).read_bytes() for name in names}
        if failures:
            with tempfile.TemporaryDirectory() as scratch:
                add_failures(Path(scratch), failures)
                files[FAILURES] = (Path(scratch) / FAILURES).read_bytes()
        return files

    def keep(self, host: Host, made: Measured) -> None:
        """Write what a host returned: records first, since rows of unknown runs do not load."""
        for name in sorted(made.files, key=lambda n: (not n.endswith(".json"), n)):
            write_bytes(self._folder / name, made.files[name])
            if name.endswith(".json"):
                record = read_record(self._folder / name)
                self.run_id = str(record["run_id"])
                told = {"host": host.number, "node": host.node}
                write_record(self._folder, self.run_id, {**record, FLEET: told})
        add_failures(self._folder, made.failures)
        if not made.files:
            # Its streams have ended, or its time was up.
            self._ended.add(host.number)
        self.samples += made.result.samples
        self.programs += made.result.programs
        self.failed += made.result.failed
