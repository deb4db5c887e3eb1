"""The command line: its table of commands (``commands.toml``), and the entry point.

A command's module is imported when the command runs, so that ``opcast --help`` stays fast and the
process is forked before anything heavy is loaded. Parsers and compilers of programs, and readers of
tables and models, are native code, which a damaged file can crash: a command runs in a child
process, for which this one waits, so that a crash ends in an error message. All commands but those
in :data:`UNGUARDED` do.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, NoReturn

import typer

from ..common.child_process import die_with_parent
from .lazy import LISTED, Command, Group, entry_of, lazy_app
from .options import one_line

#: Commands that read no untrusted file in their own process. They run until they are stopped, and
#: leave whatever may crash to worker processes.
UNGUARDED = ("demo", "profile", "serve", "ui")
#: Seconds that a command gets to end in order after Ctrl-C or SIGTERM, which compilers do not look
#: for: what `plan` has found takes a second to print, and more than three on a busy machine.
GRACE_S = 10.0
#: The signal that ended a command in order.
_stopped_by = [signal.SIGINT.value]
#: Signals that the parent waits for.
_AWAITED = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
# Signals by which native code fails: bad memory accesses, aborts, illegal instructions, arithmetic.
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


def guarded(arguments: Sequence[str], command: Callable[[], None]) -> None:
    """Run a command, in a child process if it is guarded, and exit with its status.

    If the child crashes, the parent reports it and exits with status 1.

    Args:
        arguments: Arguments of the command line, without the program's name.
        command: Runs the command; it ends with ``SystemExit``.
    """
    # Elsewhere forking is unsafe (macOS frameworks) or absent (Windows); commands then run
    # unguarded.
    if not is_guarded(arguments) or not sys.platform.startswith("linux"):
        command()
        return
    parent = os.getpid()
    # Blocked before there is a child, and taken from the queue: none that comes early is lost.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, ask_to_end)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        die_with_parent(parent)
        command()
        return
    raise SystemExit(_wait(child, arguments))


def stopped_text(arguments: Sequence[str]) -> str:
    """Message for a command that Ctrl-C or SIGTERM ended."""
    kept = LISTED["kept"]
    return f"opcast: stopped: {kept.get(arguments[0] if arguments else '', kept['else'])}\n"


def ask_to_end(number: int, _frame: object) -> None:
    """What SIGTERM does in a command: it ends as after Ctrl-C, and prints what is finished.

    Raises:
        KeyboardInterrupt: Always.
    """
    _stopped_by[0] = number
    raise KeyboardInterrupt


def stopped_status() -> int:
    """Status of a command that a signal ended in order, as shells report it."""
    return 128 + _stopped_by[0]


def is_guarded(arguments: Sequence[str]) -> bool:
    """Whether a command line names a command that runs in a child process."""
    # Options before a command (--help, --version) read no files.
    return bool(arguments) and arguments[0][:1] != "-" and arguments[0] not in UNGUARDED


def _wait(child: int, arguments: Sequence[str]) -> int:
    """Exit status for the parent, once the child has ended; signals awaited are blocked."""
    stopped, ended = 0, 0
    while not ended:
        if not stopped:
            got = signal.sigwait(_AWAITED)
        elif left := signal.sigtimedwait(_AWAITED, GRACE_S):
            got = left.si_signo
        else:
            os.kill(child, signal.SIGKILL)
            continue
        if got == signal.SIGINT:
            # Ctrl-C reaches the child as well, which ends in order unless native code holds it.
            stopped = signal.SIGINT
        elif got == signal.SIGTERM:
            # SIGTERM reaches this process alone, so it is passed on.
            stopped = signal.SIGTERM
            os.kill(child, signal.SIGTERM)
        ended, status = os.waitpid(child, os.WNOHANG)
    if os.WIFEXITED(status):
        return os.WEXITSTATUS(status)
    number = os.WTERMSIG(status)
    name = signal.Signals(number).name
    if stopped and number == signal.SIGKILL:
        sys.stderr.write(stopped_text(arguments))
        return 128 + stopped
    if number in _CRASHES:
        files = [a for a in arguments[1:] if os.path.isfile(a)]  # noqa: PTH113 (before pathlib)
        where = f"{files[0]}: " if files else ""
        sys.stderr.write(
            f"opcast: error: {where}native code crashed ({name}) while reading or compiling what "
            "it was given (a file is damaged, or a compiler has a fault: where there is "
            "--lowering, try --lowering op)\n"
        )
        return 1
    sys.stderr.write(f"opcast: error: the command was ended ({name})\n")
    # The convention of POSIX shells for a process that a signal ended.
    return 128 + number


#: Status of a command that Ctrl-C ended, as shells report it.
_STOPPED = 128 + signal.SIGINT

#: Panels of ``opcast --help``, with their commands and groups by name.
PANELS: dict[str, dict[str, Command | Group]] = {
    title: {name: entry_of(data) for name, data in panel.items()}
    for title, panel in LISTED["panels"].items()
}
COMMANDS = {name: entry for panel in PANELS.values() for name, entry in panel.items()}

app = lazy_app(
    Group(
        "Predict how long an ML program takes on a device, why, and how sure that is.",
        COMMANDS,
        panels=PANELS,
    ),
    name="opcast",
)


def _version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        typer.echo(f"opcast {__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Predict how long an ML program takes on a device, why, and how sure that is."""


def main() -> NoReturn:
    """Run the command line: one line on stderr and status 1 for every error."""
    # Forks before anything heavy is imported: the copy is cheap, and no thread runs yet.
    guarded(sys.argv[1:], _main)
    raise SystemExit(0)


def _main() -> NoReturn:
    from ..common.errors import OpcastError, fault
    from ..models.estimators.xgboost_import import own_process

    # This process is opcast's own, so XGBoost may be imported without scikit-learn.
    own_process()
    try:
        app(standalone_mode=True)
    except OpcastError as error:
        sys.stderr.write(f"opcast: error: {one_line(error)}\n")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        sys.stderr.write(stopped_text(sys.argv[1:]))
        raise SystemExit(stopped_status()) from None
    except SystemExit as end:
        # Typer ends a command so on Ctrl-C, without a word.
        if end.code == _STOPPED:
            sys.stderr.write(stopped_text(sys.argv[1:]))
            raise SystemExit(stopped_status()) from None
        raise
    except Exception as error:
        if os.environ.get("OPCAST_TRACEBACK"):
            raise
        sys.stderr.write(f"opcast: error: {one_line(fault(error))}\n")
        raise SystemExit(1) from None
    raise SystemExit(0)
