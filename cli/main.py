"""The command line: its table of commands (``commands.toml``), and the entry point.

A command's module is imported when the command runs, so that ``opcast --help`` stays fast and the
process is forked (:mod:`.guard`) before anything heavy is loaded.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated, NoReturn

import typer

from .guard import guarded, stopped_status, stopped_text
from .lazy import LISTED, Command, Group, entry_of, lazy_app
from .options import one_line

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
