"""Read programs at git revisions, and trace functions in separate processes.

A program is specified as a file or ``module.py:function``, or either at a revision, ``REV:PATH``.
Two versions of a function import modules of the same name, so a single process cannot trace both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...common.child_process import begin_worker
from ...common.errors import AbsentError, OpcastError, ProgramError
from ...common.files import printable
from ...common.worker_process import module_command, worker_environment
from ...features.ir.jax_function import is_function_path, load_function
from ...features.ir.platforms import Platform

#: Time limit in seconds for tracing a function.
TRACE_S = 1800
#: Time limit of git in seconds, which may check out a large repository.
_GIT_S = 600
#: Exit status of the tracing process if the file does not have the function.
_ABSENT = 3
#: File with a note on how a function was converted.
_NOTE = "note.txt"
#: Variables that git sets for its hooks, which would apply to the wrong folder here.
_OF_HOOKS = ("GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY")


@dataclass(frozen=True)
class Versioned:
    """A parsed specification of a program.

    Attributes:
        revision: Git revision; empty for the working tree.
        path: File, relative to the current folder or absolute.
        function: Function in the file; empty for a program file.
    """

    revision: str
    path: str
    function: str

    @classmethod
    def parse(cls, text: str) -> Versioned:
        """Parse a specification.

        Raises:
            ProgramError: It is neither a file nor has a revision.
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
                    hint="give a file or module.py:function, or either at a git revision: "
                    "REV:PATH, such as origin/main:train.py:step",
                )
        if is_function_path(path):
            file, _, name = path.rpartition(":")
            return cls(revision, file, name)
        return cls(revision, path, "")


class Checkouts:
    """Working trees of revisions of the current folder's repository, each checked out once.

    Args:
        folder: Folder for the files.
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
            AbsentError: It does not.
            ProgramError: There is no such revision.
        """
        commit = commit_of(revision)
        listed = _git("ls-tree", "--name-only", commit, "--", _within(path), relative=True)
        if not listed.strip():
            raise AbsentError("the revision has no such file", where=f"{revision}:{path}")

    def file(self, revision: str, path: str) -> Path:
        """Write a single file of a revision, and return its path.

        Raises:
            ProgramError: There is no such revision or file.
        """
        data = _git_bytes("show", f"{commit_of(revision)}:./{_within(path)}")
        target = self._folder / f"{len(list(self._folder.iterdir()))}-{Path(path).name}"
        target.write_bytes(data)
        return target

    def tree(self, revision: str) -> Path:
        """Check out a revision, and return the equivalent of the current folder in it.

        Raises:
            ProgramError: There is no such revision.
        """
        commit = commit_of(revision)
        if commit not in self._trees:
            tree = self._folder / commit[:12]
            _git("worktree", "add", "--detach", str(tree), commit)
            self._trees[commit] = tree
        return self._trees[commit] / _git("rev-parse", "--show-prefix").strip()


def _within(path: str) -> str:
    """Path relative to the current folder, for git."""
    return os.path.relpath(path)


def commit_of(revision: str) -> str:
    """Resolve a revision to a commit in the repository of the current folder.

    Raises:
        ProgramError: There is no such revision.
    """
    try:
        return _git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}").strip()
    except ProgramError as error:
        inside = _git("rev-parse", "--show-toplevel")
        raise ProgramError(
            f"no revision {revision!r}, and no such file",
            where=f"repository {inside.strip()}",
            hint="give a path relative to the current folder, or REVISION:PATH; a revision may "
            "have to be fetched first, with the whole history in a shallow clone of CI",
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
        message = bytes(getattr(error, "stderr", b"") or b"").decode(errors="replace").strip()
        last = printable(message.splitlines()[-1]) if message else str(error)
        raise ProgramError(last.removeprefix("fatal: "), where=f"git in {Path.cwd()}") from None
    return done.stdout


@dataclass(frozen=True)
class Opened:
    """A program as files.

    Attributes:
        text: The user's specification.
        files: Files by the platform that they are lowered for.
        note: Note on the conversion; may be empty.
    """

    text: str
    files: dict[Platform, Path]
    note: str = ""


def opened(text: str, platforms: Sequence[Platform], trees: Checkouts, folder: Path) -> Opened:
    """Write a program to files.

    Args:
        text: File or ``module.py:function``, or either at a revision.
        platforms: Platforms to lower a function for.
        trees: Checked-out revisions.
        folder: Folder to write to.

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
    """Trace a function in a separate process.

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
    """Write a function as StableHLO for each platform; runs in the separate process.

    Args:
        function: ``module.py:function``.
        root: Folder whose modules take precedence over installed ones.
        out: Folder to write to.
        kinds: Platforms as JSON.
    """
    from ...predict.api import write_program

    begin_worker()
    # No files beside the user's.
    sys.dont_write_bytecode = True
    # Takes precedence over an editable installation of the working tree.
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
