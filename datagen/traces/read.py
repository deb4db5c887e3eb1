"""Finds the files of a trace and chooses the reader."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from ...common.errors import DatasetError
from .kineto import read_kineto
from .nsys import read_nsys, read_nsys_csv
from .trace import Trace
from .xla import read_xplane

_XPLANE = ".xplane.pb"
_EXPECTED = (
    "expected xplane.pb (or the log directory) of jax.profiler, .json or .json.gz of "
    "torch.profiler, .sqlite or .csv of nsys"
)


def trace_files(paths: Iterable[Path]) -> list[Path]:
    """Return the files of traces; a log directory of ``jax.profiler`` gives its latest profile.

    Raises:
        DatasetError: A path does not exist, or a directory holds no profile.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_file():
            files.append(path)
            continue
        found = sorted(path.rglob(f"*{_XPLANE}")) if path.is_dir() else []
        if not found:
            what = "no profile in this directory" if path.is_dir() else "no such file"
            raise DatasetError(what, where=str(path), hint=_EXPECTED)
        # Sessions are folders named after the time; each host of one writes a file.
        latest = max(own.parent for own in found)
        files += [own for own in found if own.parent == latest]
    return files


def read_trace(path: Path, moved: Callable[[int, int], None] = lambda done, total: None) -> Trace:
    """Read a trace of any format.

    Args:
        path: The file.
        moved: Told how many bytes of a long text are read, and of how many.

    Raises:
        DatasetError: Its format is unknown, it is cut off, or it holds no kernels.
    """
    try:
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        raise DatasetError(f"cannot be read: {error}", where=str(path), hint=_EXPECTED) from None
    name = path.name.lower()
    if not head:
        raise DatasetError("the file is empty", where=str(path), hint=_EXPECTED)
    if head.startswith(b"SQLite format 3"):
        return read_nsys(path)
    if name.endswith((".nsys-rep", ".qdrep", ".qdstrm")):
        raise DatasetError(
            "a report in nsys' own format",
            where=str(path),
            hint=f"export it: nsys export --type sqlite {path.name}",
        )
    if name.endswith(".pb"):
        return read_xplane(path)
    if name.endswith(".csv"):
        return read_nsys_csv(path)
    if name.endswith((".json", ".json.gz")):
        return read_kineto(path, moved)
    raise DatasetError("a trace of no known format", where=str(path), hint=_EXPECTED)
