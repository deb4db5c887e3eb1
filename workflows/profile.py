"""Run the profiler, and summarise datasets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..common.errors import DatasetError
from ..common.progress import wrote
from ..common.tables_text import print_frame

if TYPE_CHECKING:
    from rich.console import Console

    from .settings import ProfileSettings


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
        from ..datagen.profile.fleet import profile_fleet

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
