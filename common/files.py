"""Atomic writing of files, and safe reading within limits, whatever their origin.

A file is written under another name in the same folder, synced to the disk and renamed, so that a
kill or a full disk at any moment leaves either the old or the new file. YAML, JSON and compressed
files are read as plain data within limits: a small file cannot expand to gigabytes, and no file can
name code that is run.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import secrets
import stat
import time
import tomllib
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from .errors import FileError
from .paths import PACKAGE
from .types import JsonObject

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

#: Suffix of files that are being written.
PARTIAL = ".partial"
#: Age in seconds after which such a file counts as left by a killed process.
STALE_S = 3600.0
#: Most bytes and levels of a YAML file. opcast's files have a few thousand bytes, four levels.
MAX_YAML_BYTES, MAX_YAML_DEPTH = 4_000_000, 32
#: Most bytes that a compressed file may expand to.
MAX_EXPANDED = 2**31


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to; the file replaces ``path`` when the block ends.

    Several processes may do this at once: each writes a separate file, and the last one wins.

    Args:
        path: The file to write; its folder is created if missing.

    Raises:
        FileError: The folder cannot be written, or the disk is full; ``path`` is unchanged.
    """
    partial: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = _new_file(path)
        yield partial
        _to_disk(partial)
        partial.replace(path)
        partial = None
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[None]:
    """Hold a lock file while the block runs (where the system has locks).

    Args:
        path: The lock file.
        wait: Whether to wait for another process that holds it.

    Raises:
        BlockingIOError: Another process holds it, and ``wait`` is false.
    """
    with path.open("ab") as file:
        if fcntl is not None:
            # The lock is released with the file descriptor, even if the process is killed.
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically; see :func:`replacing`."""
    with replacing(path) as partial:
        partial.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8 atomically; see :func:`replacing`."""
    write_bytes(path, text.encode())


def append_lines(path: Path, lines: str) -> None:
    """Append whole lines, on disk on return; a line truncated by a kill is terminated first."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                lines = "\n" + lines
        file.write(lines.encode())
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path) -> Iterator[JsonObject]:
    """Yield the JSON objects of a file's lines; none if there is no file.

    A line truncated by a kill is skipped: :func:`append_lines` continues after it.
    """
    text = path.read_bytes().decode(errors="replace") if path.exists() else ""
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            own = parse_json(line)
            if isinstance(own, dict):
                yield own


def cannot_write(path: Path, error: OSError) -> FileError:
    """Return the error to raise for a file that cannot be written."""
    return FileError(
        f"cannot be written: {error.strerror or error}",
        where=str(path),
        hint="free space, or write somewhere else; nothing half-written is left",
    )


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text.

    Raises:
        ValueError: It is not JSON, or nests too deep.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it nests too deep") from None


def read_json(path: Path) -> Any:
    """Read a JSON file of results.

    Raises:
        FileError: It is not JSON.
    """
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FileError(
            f"is not JSON: {error}", where=str(path), hint="give another folder, or remove it"
        ) from None


def parse_yaml(text: str) -> object:
    """Parse a YAML text to plain data: numbers, texts, lists, mappings.

    Raises:
        ValueError: It is not YAML, has a tag that names an object or an alias (a few lines of
            aliases can expand to gigabytes), is too large, or nests too deep.
    """
    import yaml

    check_yaml(text)
    try:
        return yaml.load(text, Loader=yaml_loader())
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError) as error:
        raise ValueError(f"not YAML: {error}") from None


@cache
def own_data(file: str) -> Any:
    """Content of a data file of the package, read once; callers must not modify it.

    Args:
        file: YAML or TOML below the package's folder, such as ``predict/cluster/cases.yaml``.
    """
    text = (PACKAGE / file).read_text(encoding="utf-8")
    return tomllib.loads(text) if file.endswith(".toml") else parse_yaml(text)


@cache
def yaml_loader() -> Any:
    """Return the fastest loader of plain data.

    YAML 1.1 reads ``1e9`` as text; here it is a number, as in YAML 1.2 and JSON.
    """
    import yaml

    loader: Any = type("PlainLoader", (getattr(yaml, "CSafeLoader", yaml.SafeLoader),), {})
    number = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")
    loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    return loader


def check_yaml(text: str) -> None:
    """Reject a YAML text that is too large, nests too deep or has aliases.

    Raises:
        ValueError: The text is rejected, or is not YAML.
    """
    import yaml

    if len(text) > MAX_YAML_BYTES:
        raise ValueError(f"not YAML of {len(text)} bytes: at most {MAX_YAML_BYTES} are read")
    depth = 0
    try:
        for event in yaml.parse(text, Loader=yaml_loader()):
            if isinstance(event, yaml.AliasEvent):
                raise ValueError(f"alias *{event.anchor} is not allowed: write the value out")
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_YAML_DEPTH:
                raise ValueError(f"it nests deeper than {MAX_YAML_DEPTH}")
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"not YAML: {error}") from None


def gunzip(data: bytes, limit: int = MAX_EXPANDED) -> bytes:
    """Unpack a ``.gz`` file.

    Raises:
        ValueError: It is not a gzip file, is truncated, or expands to more than ``limit`` bytes.
    """
    # 16 + MAX_WBITS expects a gzip header; `limit` stops a bomb before it is expanded.
    unpacker = zlib.decompressobj(16 + zlib.MAX_WBITS)
    try:
        content = unpacker.decompress(data, limit)
    except zlib.error as error:
        raise ValueError(f"not a gzip file: {error}") from None
    if not unpacker.eof:
        more = len(content) >= limit
        raise ValueError(f"it holds more than {limit} bytes" if more else "it is cut off")
    return content


def is_yaml(name: str | Path) -> bool:
    """Return whether a name is that of a YAML file."""
    return Path(name).suffix.lower() in (".yaml", ".yml")


def is_description(name: str | Path) -> bool:
    """Return whether a name is that of a YAML or JSON file, as describe devices and models."""
    return is_yaml(name) or Path(name).suffix.lower() == ".json"


def file_stamp(path: Path | str) -> tuple[int, int, int] | None:
    """Inode, size and modification time in nanoseconds, which identify a file's content.

    Returns:
        ``None`` if there is no such file.
    """
    try:
        found = Path(path).stat()
    # A name with a null byte cannot be a file.
    except (OSError, ValueError):
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def printable(text: str) -> str:
    """Escape control characters, which a terminal would act on."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else _escaped(c) for c in text)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode() if char not in " \u00a0\u202f" else char


def _new_file(path: Path) -> Path:
    """Create an empty file next to ``path`` for this process; remove files of killed processes."""
    # Hidden, and short enough with its suffix for file systems with a limit of 255 bytes.
    start = f".{path.name[-80:]}."
    for old in path.parent.glob(f"{glob.escape(start)}*{PARTIAL}"):
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > STALE_S:
                old.unlink()
    partial = path.with_name(f"{start}{os.getpid()}-{secrets.token_hex(4)}{PARTIAL}")
    # O_EXCL: two processes never get the same name; 0o666 applies the umask.
    os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    return partial


def _to_disk(path: Path) -> None:
    """Sync a file to the disk, so that the rename cannot precede its content."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
