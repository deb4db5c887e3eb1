"""Commands that run native code on files of others: a crash there ends in a message.

Parsers and compilers of programs are native code. The command runs in a child of this process,
which does nothing but wait: forked before anything heavy is imported, that takes milliseconds.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence

from .features.parent import die_with_parent

#: Commands that read programs.
GUARDED = ("predict", "explain", "check", "lower", "export", "import", "report")
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


def guarded(arguments: Sequence[str], command: Callable[[], None]) -> None:
    """Run a command in a child process if it reads programs, and end as it ends.

    Where the child crashes, the parent says so and ends with status 1.

    Args:
        arguments: Of the command line, without the program's name.
        command: What to run; it ends with ``SystemExit``.
    """
    if not arguments or arguments[0] not in GUARDED or not sys.platform.startswith("linux"):
        command()
        return
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        die_with_parent(parent)
        command()
        return
    raise SystemExit(_wait(child, arguments))


def _wait(child: int, arguments: Sequence[str]) -> int:
    """Status of the child, with which the parent is to end."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the child too, which ends in order
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status):
        return os.WEXITSTATUS(status)
    number = os.WTERMSIG(status)
    name = signal.Signals(number).name
    if number in _CRASHES:
        files = [a for a in arguments[1:] if os.path.isfile(a)]  # noqa: PTH113 (before pathlib)
        where = f"{files[0]}: " if files else ""
        sys.stderr.write(
            f"opcast: error: {where}native code crashed ({name}) while reading or compiling the "
            "program (the file is damaged, or the compiler has a fault: try --lowering op)\n"
        )
        return 1
    sys.stderr.write(f"opcast: error: the command was ended ({name})\n")
    return 128 + number
