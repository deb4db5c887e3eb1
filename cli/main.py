"""The command-line application and its entry point.

The commands are listed in ``commands.toml``. A command's module is imported when the command runs,
so that ``opcast --help`` is fast and the process is forked before anything heavy is loaded.
Parsers, compilers and file readers are native code that a damaged file can crash; every command
except those in :data:`UNGUARDED` therefore runs in a child process, and the parent turns a crash
into an error message.
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

#: Long-running commands that leave everything that may crash to worker processes of their own.
UNGUARDED = ("demo", "profile", "serve", "ui")
#: Seconds between Ctrl-C or SIGTERM and SIGKILL. Compilers ignore the former; printing the results
#: that `plan` has so far takes one second, and more than three on a busy machine.
GRACE_S = 10.0
#: Exit status of a command ended by Ctrl-C, as shells report it.
_STOPPED = 128 + signal.SIGINT
#: The signal that stopped the command.
_stopped_by = [signal.SIGINT.value]
#: Signals that the parent waits for.
_AWAITED = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
# Signals that a crash of native code raises.
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


def guarded(arguments: Sequence[str], command: Callable[[], None]) -> None:
    """Run a command, in a child process if it is guarded, and exit with its status.

    If the child crashes, the parent reports it and exits with status 1.

    Args:
        arguments: Arguments of the command line, without the program's name.
        command: Runs the command and raises ``SystemExit``.
    """
    # Forking is unsafe with macOS frameworks and absent on Windows; commands run unguarded there.
    if not is_guarded(arguments) or not sys.platform.startswith("linux"):
        command()
        return
    parent = os.getpid()
    # Blocked before the fork, so that a signal that arrives early stays pending for sigwait.
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
    """Message for a command that was stopped by Ctrl-C or SIGTERM."""
    kept = LISTED["kept"]
    return f"opcast: stopped: {kept.get(arguments[0] if arguments else '', kept['else'])}\n"


def ask_to_end(number: int, _frame: object) -> None:
    """Handle SIGTERM like Ctrl-C, so that a command prints its finished results.

    Raises:
        KeyboardInterrupt: Always.
    """
    _stopped_by[0] = number
    raise KeyboardInterrupt


def stopped_status() -> int:
    """Exit status of a command that a signal stopped, as shells report it."""
    return 128 + _stopped_by[0]


def is_guarded(arguments: Sequence[str]) -> bool:
    """Whether a command line runs in a child process."""
    # Options before a command (--help, --version) read no files.
    return bool(arguments) and arguments[0][:1] != "-" and arguments[0] not in UNGUARDED


def _wait(child: int, arguments: Sequence[str]) -> int:
    """Wait for the child and return the parent's exit status.

    The signals in :data:`_AWAITED` must be blocked.
    """
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
            # Ctrl-C also reaches the child, which handles it unless it is stuck in native code.
            stopped = signal.SIGINT
        elif got == signal.SIGTERM:
            # SIGTERM reaches only this process, so it is forwarded.
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
            f"opcast: error: {where}native code crashed ({name}) while reading or compiling its "
            "input: a file is damaged or a compiler has a bug; if the command has --lowering, try "
            "--lowering op\n"
        )
        return 1
    sys.stderr.write(f"opcast: error: the command was ended ({name})\n")
    # The convention of POSIX shells for a process that was killed by a signal.
    return 128 + number


#: Panels of ``opcast --help``: title to commands and groups by name.
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
    """Run the command line; every error ends as one line on stderr and exit status 1."""
    # Forks before heavy imports, while a fork is cheap and no thread runs.
    guarded(sys.argv[1:], _main)
    raise SystemExit(0)


def _main() -> NoReturn:
    from ..common.errors import OpcastError, fault
    from ..models.estimators.xgboost_import import own_process

    # In opcast's own process, XGBoost can be imported without scikit-learn.
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
        # Typer turns Ctrl-C into this status without a message.
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
