"""Progress of a long run on stderr: a bar on a terminal, otherwise occasional plain lines."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from .files import printable

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

#: Seconds between lines without a terminal; shorter tasks print nothing.
_LINE_EVERY_S = 10.0
#: The same for runs of hours.
_RARE_LINE_EVERY_S = 30.0
T = TypeVar("T")


def wrote(path: Path, what: str = "") -> None:
    """Report on stderr what a command wrote, once the file is complete.

    Args:
        path: File or folder.
        what: Its content, or what to do with it.
    """
    sys.stderr.write(f"wrote {printable(str(path))}{f': {what}' if what else ''}\n")
    sys.stderr.flush()


class Lines:
    """Plain lines on stderr, for logs of batch jobs and notebooks.

    Args:
        what: Description of the work.
        every_s: Seconds before the first line and between lines.
    """

    def __init__(self, what: str, every_s: float = _LINE_EVERY_S) -> None:
        self._what = what
        self._every = every_s
        self._started = self._last = time.monotonic()

    def say(self, state: str = "") -> None:
        """Write the state of the work, unless a line was written a moment ago."""
        now = time.monotonic()
        if now - self._last < self._every:
            return
        self._last = now
        parts = ", ".join(filter(None, (state, f"{now - self._started:.0f} s")))
        sys.stderr.write(f"{self._what}: {parts}\n")
        sys.stderr.flush()


class Progress:
    """Shows the progress of a run that measures or compiles for a while.

    Args:
        total: Seconds or programs at which the run ends.
        unit: ``s`` or ``programs``.
        show: Whether to show anything.
    """

    def __init__(self, total: float, unit: str = "s", show: bool = True) -> None:
        self._total = total
        self._unit = unit
        self._show = show
        self._open = contextlib.ExitStack()
        self._bar: RichProgress | None = None
        self._lines = Lines("profiling", _RARE_LINE_EVERY_S)

    def __enter__(self) -> Progress:
        columns = ("BarColumn", "TimeElapsedColumn", "TimeRemainingColumn")
        self._bar = self._open.enter_context(_bar(self._show, *columns))
        if self._bar is not None:
            self._bar.add_task("profiling", total=self._total)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def update(self, done: float, samples: int, programs: int, failed: int, note: str = "") -> None:
        """Show the present state.

        Args:
            done: Progress in the unit of ``total``.
            samples: Labels so far.
            programs: Programs measured so far.
            failed: Programs that failed.
            note: Anything unusual, such as a disturbed machine.
        """
        if not self._show:
            return
        text = f"{samples} samples, {programs} programs, {failed} failed"
        text += f", {note}" if note else ""
        if self._bar is not None:
            (task,) = self._bar.task_ids
            self._bar.update(task, completed=min(done, self._total), description=text)
        else:
            self._lines.say(f"{done:.0f} of {self._total:.0f} {self._unit}, {text}")


@contextlib.contextmanager
def _bar(show: bool, *columns: str) -> Iterator[RichProgress | None]:
    """A transient bar on stderr, so that tables on stdout can be redirected.

    ``None`` without a terminal or Rich.
    """
    bar: RichProgress | None = None
    if show and sys.stderr.isatty():
        with contextlib.suppress(ImportError):
            from rich import progress
            from rich.console import Console

            bar = progress.Progress(
                "{task.description}",
                *(getattr(progress, column)() for column in columns),
                console=Console(stderr=True),
                transient=True,
            )
    with bar or contextlib.nullcontext():
        yield bar


def tracked(items: Iterable[T], total: int, what: str, show: bool = True) -> Iterator[T]:
    """Pass items through, and show how many were consumed.

    Args:
        items: Items to pass through.
        total: Number of items.
        what: Description of the work.
        show: Whether to show anything.
    """
    with counting(what, show) as tell:
        for done, item in enumerate(items, 1):
            yield item
            tell(done, total)


@contextlib.contextmanager
def counting(what: str, show: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Show how many parts of a work are done; the callback takes finished and total numbers.

    Args:
        what: Description of the work.
        show: Whether to show anything.
    """
    with _bar(show, "BarColumn", "MofNCompleteColumn", "TimeRemainingColumn") as bar:
        if bar is not None:
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        else:
            lines = Lines(what)
            yield lambda done, total: lines.say(f"{done} of {total}") if show else None


@contextlib.contextmanager
def waiting(what: str, count: int, show: bool = True) -> Iterator[Callable[[int], None]]:
    """Show that a work is running and for how long; the callback takes the finished number.

    Call it repeatedly while the work runs, even if the number did not change.

    Args:
        what: Description of the work.
        count: Number of its parts; 1 shows no number.
        show: Whether to show anything.
    """
    with _bar(show, "BarColumn", "TimeElapsedColumn") as bar:
        if bar is not None:
            task = bar.add_task(what, total=count if count > 1 else None)
            yield lambda done: bar.update(task, completed=done)
        else:
            lines = Lines(what)
            state = "{} of " + str(count) if count > 1 else ""
            yield lambda done: lines.say(state.format(done)) if show else None


@contextlib.contextmanager
def stages(first: str) -> Iterator[Callable[[str], None]]:
    """Show the current stage of a work; the callback takes the name of the next one.

    Args:
        first: Name of the first stage, which is too short for a separate log line.
    """
    if not sys.stderr.isatty():
        yield lambda what: print(what, file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status(first) as status:
        yield lambda what: status.update(escape(what))
