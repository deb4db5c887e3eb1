"""Programs as they were at a git revision, and functions, each traced in a process of its own.

A text names a program: a file, ``module.py:function``, or one of these at a revision,
``REV:PATH``. Two versions of a function import modules of the same names, so that one process
could not trace both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...common.child_process import begin_worker
from ...common.errors import AbsentError, OpcastError, ProgramError
from ...common.files import printable
from ...common.worker_process import module_command, worker_environment
from ...features.ir.jax_function import is_function_path, load_function
from ...features.ir.platforms import Platform

#: Longest that tracing a function may take, seconds.
TRACE_S = 1800
#: Longest that git may take, seconds: it may check out a large repository.
_GIT_S = 600
#: Status of the process that traces a function of a file that has none of its name.
_ABSENT = 3
#: File of a note on how a function was converted.
_NOTE = "note.txt"
#: What git tells its hooks, which would point it at the wrong files of another folder.
_OF_HOOKS = ("GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY")


@dataclass(frozen=True)
class Versioned:
    """A program's text, taken apart.

    Attributes:
        revision: Of git; empty for the working tree.
        path: File, relative to the current folder or absolute.
        function: In the file; empty for a program's file.
    """

    revision: str
    path: str
    function: str

    @classmethod
    def parse(cls, text: str) -> Versioned:
        """Take a text apart.

        Raises:
            ProgramError: It is no file, and names no revision.
        """
        if Path(text).exists():
            return cls("", text, "")
        revision, path = "", text
        file = text.rpartition(":")[0]
        if not (is_function_path(text) and Path(file).exists()):
            revision, colon, path = text.partition(":")
            if not (colon and revision and path):
                raise ProgramError(
                    "no such file",
                    where=text,
                    hint="give a file, module.py:function, or one of them at a git revision: "
                    "REV:PATH, such as origin/main:train.py:step",
                )
        if is_function_path(path):
            file, _, name = path.rpartition(":")
            return cls(revision, file, name)
        return cls(revision, path, "")


class Checkouts:
    """Revisions of the repository of the current folder, each checked out once.

    Args:
        folder: For the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._trees: dict[str, Path] = {}

    def close(self) -> None:
        """Remove the working trees."""
        for tree in self._trees.values():
            _git("worktree", "remove", "--force", str(tree))
        self._trees.clear()

    def check(self, revision: str, path: str) -> None:
        """Check that a revision has a file.

        Raises:
            AbsentError: It has not.
            ProgramError: There is no such revision.
        """
        commit = commit_of(revision)
        listed = _git("ls-tree", "--name-only", commit, "--", _within(path), relative=True)
        if not listed.strip():
            raise AbsentError("the revision has no such file", where=f"{revision}:{path}")

    def file(self, revision: str, path: str) -> Path:
        """A file of a revision, without its surroundings.

        Raises:
            ProgramError: There is no such revision or file.
        """
        data = _git_bytes("show", f"{commit_of(revision)}:./{_within(path)}")
        target = self._folder / f"{len(list(self._folder.iterdir()))}-{Path(path).name}"
        target.write_bytes(data)
        return target

    def tree(self, revision: str) -> Path:
        """The folder that is the current one, in a working tree of a revision.

        Raises:
            ProgramError: There is no such revision.
        """
        commit = commit_of(revision)
        if commit not in self._trees:
            tree = self._folder / commit[:12]
            _git("worktree", "add", "--detach", str(tree), commit)
            self._trees[commit] = tree
        return self._trees[commit] / _git("rev-parse", "--show-prefix").strip()


@contextmanager
def checkouts(folder: Path) -> Iterator[Checkouts]:
    """Check revisions out into a folder; their working trees are removed at the end."""
    found = Checkouts(folder)
    try:
        yield found
    finally:
        found.close()


def _within(path: str) -> str:
    """A path relative to the current folder, as git takes it."""
    return os.path.relpath(path)


def commit_of(revision: str) -> str:
    """The commit that a revision names, in the repository of the current folder.

    Raises:
        ProgramError: There is none.
    """
    try:
        return _git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}").strip()
    except ProgramError as error:
        inside = _git("rev-parse", "--show-toplevel")
        raise ProgramError(
            f"no revision {revision!r}, and no such file",
            where=f"repository {inside.strip()}",
            hint="a file is given by its path from here, one of a commit as REVISION:PATH; a "
            "revision may have to be fetched first, in a shallow clone of CI the whole history",
        ) from error


def _git(*arguments: str, relative: bool = False) -> str:
    own = ("-c", "core.quotepath=off") if relative else ()
    return _git_bytes(*own, *arguments).decode(errors="replace")


def _git_bytes(*arguments: str) -> bytes:
    environment = {name: own for name, own in os.environ.items() if name not in _OF_HOOKS}
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, check=True, env=environment, timeout=_GIT_S
        )
    except FileNotFoundError:
        raise ProgramError("git is not installed", hint="give files instead of revisions") from None
    except subprocess.SubprocessError as error:
        said = bytes(getattr(error, "stderr", b"") or b"").decode(errors="replace").strip()
        last = printable(said.splitlines()[-1]) if said else str(error)
        raise ProgramError(last.removeprefix("fatal: "), where=f"git in {Path.cwd()}") from None
    return done.stdout


@dataclass(frozen=True)
class Opened:
    """A program as files.

    Attributes:
        text: What it was named by.
        files: By the platform that it is lowered for.
        note: How it was converted on the way, if that matters.
    """

    text: str
    files: dict[Platform, Path]
    note: str = ""


def opened(text: str, platforms: Sequence[Platform], trees: Checkouts, folder: Path) -> Opened:
    """Make files of a program.

    Args:
        text: File, ``module.py:function``, or one of them at a revision.
        platforms: What a function is lowered for.
        trees: Where revisions are checked out.
        folder: For what is written.

    Raises:
        AbsentError: There is no such file or function.
        ProgramError: There is no such revision, or the function cannot be traced.
    """
    own = Versioned.parse(text)
    if own.revision:
        trees.check(own.revision, own.path)
    if not own.function:
        file = trees.file(own.revision, own.path) if own.revision else Path(own.path)
        return Opened(text, dict.fromkeys(platforms, file))
    root = trees.tree(own.revision) if own.revision else Path.cwd()
    place = root / _within(own.path) if own.revision else Path(own.path)
    out = folder / f"traced-{len(list(folder.iterdir()))}"
    out.mkdir()
    _trace(f"{place}:{own.function}", text, root, out, platforms)
    files = {platform: out / _file(n) for n, platform in enumerate(platforms)}
    return Opened(text, files, (out / _NOTE).read_text(encoding="utf-8"))


def _file(number: int) -> str:
    return f"{number}.mlir"


def _trace(function: str, text: str, root: Path, out: Path, platforms: Sequence[Platform]) -> None:
    """Trace a function in a process of its own.

    Raises:
        AbsentError: The file has no such function.
        ProgramError: It cannot be traced.
    """
    kinds = json.dumps([tuple(platform) for platform in platforms])
    command = module_command(__name__, function, str(root), str(out), kinds)
    try:
        subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=TRACE_S,
            env=worker_environment(),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ProgramError(f"tracing takes longer than {TRACE_S} s", where=text) from None
    except subprocess.CalledProcessError as error:
        lines = str(error.stderr).strip().splitlines() or [f"status {error.returncode}"]
        kind = AbsentError if error.returncode == _ABSENT else ProgramError
        raise kind(printable(lines[-1]), where=text) from None


def main(function: str, root: str, out: str, kinds: str) -> None:
    """Write a function as StableHLO for each platform: what the process of its own does.

    Args:
        function: ``module.py:function``.
        root: Folder that it is run from, whose modules come before installed ones.
        out: Folder to write.
        kinds: Platforms as JSON.
    """
    from ...predict.api import write_program

    begin_worker()
    # A comparison leaves no files beside the user's.
    sys.dont_write_bytecode = True
    # An editable installation would give the modules of the working tree.
    sys.path[:0] = [root, str(Path(root) / "src")]
    try:
        call = load_function(function)
        for number, (name, capability, kind) in enumerate(json.loads(kinds)):
            platform = Platform(name, capability, kind)
            note = write_program(call, Path(out) / _file(number), platform)
        (Path(out) / _NOTE).write_text(note, encoding="utf-8")
    except OpcastError as error:
        print(error.what if not error.hint else f"{error.what} ({error.hint})", file=sys.stderr)
        sys.exit(_ABSENT if isinstance(error, AbsentError) else 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
