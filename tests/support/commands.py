"""Runs commands of the command line in this process, which saves the start of one for each."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from opcast import cli
from opcast.cli.options import one_line
from opcast.common.errors import OpcastError


def opcast(
    *args: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> CompletedProcess[str]:
    """Run a command as ``python -m opcast.cli`` does, but for the process that guards it.

    Args:
        args: Of the command line.
        cwd: Folder to run it in.
        env: Variables of the environment to set.
    """
    words = list(map(str, args))
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in (env or {}).items():
            patch.setenv(name, value)
        if cwd is not None:
            patch.chdir(cwd)
        stack.enter_context(shown_warnings())
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(errors))
        code = _status(words, errors)
    return CompletedProcess(words, code, out.getvalue(), errors.getvalue())


def _status(words: list[str], errors: io.StringIO) -> int:
    try:
        cli.app(words, prog_name="opcast", standalone_mode=True)
    except OpcastError as error:  # as cli.main() does
        errors.write(f"opcast: error: {one_line(error)}\n")
        return 1
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


@contextlib.contextmanager
def shown_warnings() -> Iterator[None]:
    """Warnings as a process of its own has them: on stderr, where a test can see them."""
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", kind)
        yield


def changed(env: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Those of some variables that differ from this process's own."""
    return {n: env[n] for n in names if n in env and env[n] != os.environ.get(n)}
