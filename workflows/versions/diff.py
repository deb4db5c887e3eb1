"""Compare two versions of programs on devices, and check the new ones against a budget."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ...common.errors import AbsentError, OpcastError, SeveralDevicesError
from ...common.files import parse_yaml, printable
from ...common.options import (
    DeviceList,
    Fallback,
    LoweringOpt,
    ModelOpt,
    Option,
    Trips,
    seconds_of,
)
from ...common.progress import stages
from ...common.types import JsonMapping
from ...common.units import duration, likely
from .revisions import Checkouts, Opened, commit_of, opened

if TYPE_CHECKING:
    from ...features.devices.device import DeviceSpec
    from ...features.ir.platforms import Platform
    from ...predict.difference import Difference, Judged, Version
    from ...predict.program.predictor import Predictor

#: Keys of an entry of a budget file.
_KEYS = ("name", "program", "device", "slower", "limit")


@dataclass(frozen=True)
class DiffSettings:
    """What ``opcast diff`` compares, and when it fails."""

    old: Annotated[
        str,
        Option(
            "Old version of the program: a file or module.py:function, or either at a git "
            "revision, REV:PATH. With --budget, a revision.",
            argument=True,
        ),
    ]
    new: Annotated[
        str,
        Option(
            "New version of the program. With --budget, a revision; default: the working tree.",
            argument=True,
            shows_default=False,
        ),
    ] = ""
    device: DeviceList = ""
    budget: Annotated[
        Path | None, Option("YAML file of programs and limits; exits with 1 if one is exceeded.")
    ] = None
    fail_above: Annotated[
        float | None,
        Option(
            "Exit with 1 if the new version is slower by more than this percentage. With "
            "--budget, for programs without `slower`.",
            least=0.0,
        ),
    ] = None
    sure: Annotated[
        float, Option("Minimum probability of exceeding a limit to fail.", least=0.0, most=1.0)
    ] = 0.5
    model: ModelOpt = "default"
    lowering: LoweringOpt = "auto"
    fallback: Fallback = ""
    trip_count: Trips = None


@dataclass(frozen=True)
class Allowed:
    """A program to compare, with its limits.

    Attributes:
        name: Name of the program.
        old: Specification of the old version (``revisions.py``).
        new: Specification of the new version.
        devices: Names or files of devices.
        slower: Allowed slowdown relative to the old version; ``None`` for any.
        limit_us: Allowed time of the new version in µs; ``None`` for any.
    """

    name: str
    old: str
    new: str
    devices: tuple[str, ...]
    slower: float | None = None
    limit_us: float | None = None

    def excess(self, found: Difference, sure: float) -> str:
        """Describe the limits exceeded with at least a probability; empty if none is."""
        found_excess = []
        if self.slower is not None and (p := found.slower_by(self.slower)) and p >= sure:
            found_excess.append(f"slower by more than {100 * self.slower:g} % ({likely(p)} likely)")
        if self.limit_us is not None and (p := found.beyond(self.limit_us)) and p >= sure:
            found_excess.append(f"above {duration(self.limit_us)} ({likely(p)} likely)")
        return ", ".join(found_excess)


@dataclass(frozen=True)
class DiffReport:
    """All comparisons of a run.

    Attributes:
        results: Results by program and device.
    """

    results: tuple[Judged, ...] = field(default=())

    @property
    def passes(self) -> bool:
        """Whether all comparisons succeeded without exceeding a limit."""
        return not any(own.excess or own.error for own in self.results)

    def to_dict(self) -> dict[str, object]:
        """Convert to the output of ``opcast diff --json``."""
        return {"passes": self.passes, "results": [own.to_dict() for own in self.results]}


def run_diff(settings: DiffSettings) -> DiffReport:
    """Compare two versions of a program, or of the programs of a budget.

    Raises:
        OpcastError: A version, device, budget or revision is not usable. Errors of single programs
            of a budget are in the report.
    """
    from ...predict.program.predictor import load_for_programs

    programs = _programs(settings)
    predictor = load_for_programs(settings.model)
    found = []
    with tempfile.TemporaryDirectory(prefix="opcast-diff-") as made:
        folder = Path(made).resolve()
        with closing(Checkouts(folder)) as trees, stages("reading programs") as say:
            run = _Run(settings, predictor, trees, folder, say)
            for allowed in programs:
                for own in run.judged(allowed):
                    if own.error is not None and settings.budget is None:
                        raise own.error
                    found.append(own)
    return DiffReport(tuple(found))


@dataclass(frozen=True)
class _Run:
    """State shared by all comparisons of a run; ``say`` reports the current stage."""

    settings: DiffSettings
    predictor: Predictor
    trees: Checkouts
    folder: Path
    say: Callable[[str], None]

    def judged(self, allowed: Allowed) -> Iterator[Judged]:
        """Compare the versions of a program on each of its devices."""
        from ...features.ir.platforms import platform_of
        from ...predict.devices import resolve_device
        from ...predict.difference import Judged, compare

        try:
            devices = [resolve_device(name, self.predictor.devices) for name in allowed.devices]
            platforms = list(dict.fromkeys(map(platform_of, devices)))
            new = self._opened(allowed.new, platforms)
            old, notes = new, {new.note: None}
            try:
                if allowed.old != allowed.new:
                    old = self._opened(allowed.old, platforms)
                    notes[old.note] = None
            except AbsentError:
                if self.settings.budget is None:
                    raise
                notes[f"no {allowed.old}: comparing the new version with itself"] = None
        except OpcastError as error:
            yield from (Judged(allowed.name, name, error=error) for name in allowed.devices)
            return
        for device in devices:
            try:
                before = self._version(old, device)
                after = before if new is old else self._version(new, device)
            except OpcastError as error:
                yield Judged(allowed.name, device.name, error=error)
                continue
            found = compare(before, after)
            excess = allowed.excess(found, self.settings.sure)
            noted = replace(found, notes=(*filter(None, notes), *found.notes))
            yield Judged(allowed.name, device.name, noted, excess)

    def _opened(self, text: str, platforms: Sequence[Platform]) -> Opened:
        self.say(printable(f"reading {text}"))
        return opened(text, platforms, self.trees, self.folder)

    def _version(self, program: Opened, device: DeviceSpec) -> Version:
        """Predict a version on a device.

        Raises:
            OpcastError: It cannot be predicted; the error has the user's specification, not the
                name of a temporary file.
        """
        from ...features.ir.platforms import platform_of
        from ...features.lowering.options import LoweringOptions
        from ...predict.difference import Version
        from ...predict.program.case import ProgramCase

        self.say(printable(f"predicting {program.text} on {device.name}"))
        own = self.settings
        options = LoweringOptions(own.lowering, device, own.trip_count, own.fallback)
        file = program.files[platform_of(device)]
        try:
            return Version.of(ProgramCase(file, options), self.predictor)
        except OpcastError as error:
            error.where = error.where.replace(str(file), program.text) or program.text
            if isinstance(error, SeveralDevicesError):
                error.hint = (
                    "opcast diff compares programs for one device; predict each version of this "
                    "one with opcast predict --cluster"
                )
            raise


def _programs(settings: DiffSettings) -> list[Allowed]:
    """List the programs to compare.

    Raises:
        OpcastError: The budget or a revision is not usable.
    """
    if settings.budget is None:
        slower = None if settings.fail_above is None else settings.fail_above / 100
        devices = _devices(settings.device.split(","))
        return [Allowed(_called(settings.new), settings.old, settings.new, devices, slower)]
    for revision in filter(None, (settings.old, settings.new)):
        commit_of(revision)
    found = []
    for own in read_budget(settings.budget, settings.old, settings.new):
        if settings.device:
            own = replace(own, devices=_devices(settings.device.split(",")))
        if settings.fail_above is not None and own.slower is None:
            own = replace(own, slower=settings.fail_above / 100)
        found.append(own)
    return found


def _devices(names: Iterable[object]) -> tuple[str, ...]:
    """Names of devices without duplicates."""
    return tuple(dict.fromkeys(str(name).strip() for name in names))


def _called(text: str) -> str:
    return text.rpartition("/")[2]


def read_budget(path: Path, old: str, new: str) -> list[Allowed]:
    """Read a budget: a list of programs with ``name``, ``program``, ``device`` and limits.

    Args:
        path: YAML file. Programs are files or ``module.py:function``, relative to the current
            folder. ``slower`` is a percentage, ``limit`` a duration.
        old: Revision of the old versions.
        new: Revision of the new ones; empty for the working tree.

    Raises:
        OpcastError: The file cannot be read, or an entry is invalid.
    """
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OpcastError(f"the budget cannot be read: {error}", where=str(path)) from None
    if not isinstance(data, list) or not data:
        raise OpcastError(
            "a budget is a list of programs", where=str(path), hint=f"keys: {', '.join(_KEYS)}"
        )
    found = []
    for number, entry in enumerate(data, 1):
        where = f"{path}, entry {number}"
        try:
            found.append(_allowed(entry, old, new))
        except ValueError as error:
            raise OpcastError(str(error), where=where) from None
    return found


def _allowed(entry: object, old: str, new: str) -> Allowed:
    """Parse an entry of a budget.

    Raises:
        ValueError: It is invalid.
    """
    if not isinstance(entry, dict) or not {"program", "device"} <= entry.keys() <= set(_KEYS):
        raise ValueError(f"needs program and device; keys are {', '.join(_KEYS)}; not {entry!r}")
    own: JsonMapping = entry
    listed = own["device"] if isinstance(own["device"], list) else str(own["device"]).split(",")
    devices = _devices(listed)
    if not devices or "" in devices:
        raise ValueError(f"device: {own['device']!r} has no device, or an empty name")
    program, slower, limit = own["program"], own.get("slower"), own.get("limit")
    if not isinstance(program, str):
        raise ValueError(f"program: {program!r} is not a file or module.py:function")
    if slower is None and limit is None:
        raise ValueError("needs slower, such as 3%, or limit, such as 33ms")
    return Allowed(
        str(own.get("name", _called(program))),
        f"{old}:{program}",
        f"{new}:{program}" if new else program,
        devices,
        None if slower is None else _percent(slower) / 100,
        None if limit is None else 1e6 * _limit(limit),
    )


def _limit(value: object) -> float:
    """Parse a limit into seconds.

    Raises:
        ValueError: It is not a duration, or has no unit, which is rarely meant to be seconds.
    """
    found = seconds_of(str(value))
    if not str(value)[-1].isalpha():
        raise ValueError(f"limit: {value!r} has no unit: write {value}ms or {value}us")
    return found


def _percent(value: object) -> float:
    """Parse a percentage, with or without a percent sign.

    Raises:
        ValueError: It is not a percentage.
    """
    text = str(value).removesuffix("%").strip()
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0.0 <= found < float("inf"):
        raise ValueError(f"slower: {value!r} is not a percentage: write 3%")
    return found
