"""Progress of a long run: a bar on a terminal if rich is installed, otherwise log lines."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

logger = logging.getLogger(__name__)

#: Seconds between log lines where no terminal shows a bar: hours of profiling stay readable.
_LOG_EVERY_S = 30.0
T = TypeVar("T")


class Progress:
    """Shows how far a run has got.

    Args:
        total: Seconds or programs at which the run ends.
        unit: ``s`` or ``programs``.
        show: Whether to show anything.
    """

    def __init__(self, total: float, unit: str = "s", show: bool = True) -> None:
        self._total = total
        self._unit = unit
        self._show = show
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        self._logged = 0.0

    def __enter__(self) -> Progress:
        if self._show and sys.stderr.isatty():
            with contextlib.suppress(ImportError):
                self._bar = _rich_bar()
                self._task = self._bar.add_task("profiling", total=self._total)
                self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: float, samples: int, programs: int, failed: int, note: str = "") -> None:
        """Show the present state.

        Args:
            done: How far, in the unit of ``total``.
            samples: Labels so far.
            programs: Programs measured so far.
            failed: Programs that failed.
            note: Anything unusual, such as a disturbed machine.
        """
        if not self._show:
            return
        text = f"{samples} samples, {programs} programs, {failed} failed"
        text += f", {note}" if note else ""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=min(done, self._total), description=text)
        # Without a terminal (batch jobs, CI) the log gets a line now and then.
        elif time.monotonic() - self._logged > _LOG_EVERY_S:
            self._logged = time.monotonic()
            logger.info("%.0f of %.0f %s: %s", done, self._total, self._unit, text)


def _rich_bar() -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def tracked(items: Iterable[T], total: int, what: str, show: bool = True) -> Iterator[T]:
    """Pass items through, with a bar on a terminal if rich is installed.

    Args:
        items: Items to pass through.
        total: Number of items.
        what: Description of the work.
        show: Whether to show anything.
    """
    bar: RichProgress | None = None
    if show and sys.stderr.isatty():
        with contextlib.suppress(ImportError):
            from rich.console import Console
            from rich.progress import Progress as Bar

            bar = Bar(console=Console(stderr=True))
    if bar is None:
        yield from items
        return
    with bar:
        yield from bar.track(items, total=total, description=what)


@contextlib.contextmanager
def counting(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on stderr; the callback takes the finished and total numbers.

    Args:
        what: Description of the work.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    )  # fmt: skip
    # On stderr, so that the tables on stdout can be redirected.
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
