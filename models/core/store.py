"""Model folders: a manifest with digests, and weights without pickle; models in one JSON file.

A folder is written next to its target and renamed, so that no half-written model is ever found.
Reading checks the format, the feature schema and the digest of every file.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import shutil
import tempfile
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Self, cast

import numpy as np

from ...common.errors import ModelError
from ...common.files import cannot_write, parse_json, write_text
from ...common.types import JsonMapping, JsonObject
from ...common.versions import installed
from .registry import PRETRAINED

#: Format of the folders that this version writes, and of those that it reads.
FORMAT = 1
READS = (1,)
MANIFEST = "manifest.json"
#: Entries that :func:`write_folder` adds to every manifest.
_ADDED = ("format", "libraries", "files")
#: Value of ``kind`` in the manifest of a model of library operators.
OPERATORS = "operators"
#: Errors that reading a manifest with unexpected contents may raise. A manifest is untrusted input:
#: any value may have the wrong type, be missing or be absurdly large or deep.
DAMAGE = (
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    IndexError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)
#: Most bytes that the arrays of one file may unpack to, against decompression bombs. 2 GiB is far
#: above the largest model.
MAX_ARRAYS = 2**31
#: Libraries whose versions are stored in the manifest, to explain differences between predictions.
_LIBRARIES = (
    "opcast",
    "numpy",
    "xgboost-cpu",
    "xgboost",
    "scikit-learn",
    "jax",
    "flax",
    "torch",
    "torch-geometric",
)


def write_folder(path: Path, manifest: Mapping[str, object], files: Mapping[str, bytes]) -> None:
    """Write a model folder in one step; replaces an earlier model at the same place.

    Args:
        path: The folder. Its parent is created if needed.
        manifest: Plain data; format, library versions and file digests are added.
        files: Contents by relative name.

    Raises:
        ModelError: The place holds something that is not a model.
        FileError: The place cannot be written, or the disk is full.
    """
    path = Path(path)
    # A mistyped path must not destroy a user's folder.
    if path.exists() and not (path / MANIFEST).is_file() and not _is_empty(path):
        raise ModelError("will not overwrite: not a model folder", where=str(path))
    # In the same folder, so that the rename stays on one file system and is atomic.
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise cannot_write(path, error) from error
    try:
        partial.chmod(0o755)  # mkdtemp makes it private, which others could not read
        for name, data in files.items():
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            (partial / name).write_bytes(data)
        full = {
            "format": FORMAT,
            **manifest,
            "libraries": library_versions(),
            "files": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
        }
        (partial / MANIFEST).write_text(json.dumps(full, indent=1, sort_keys=True) + "\n")
        _swap(partial, path)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise cannot_write(path, error) from error
    # Interrupting by Ctrl-C must leave nothing half-written either.
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def read_manifest(path: Path) -> JsonObject:
    """Read and check a model folder's manifest.

    Raises:
        ModelError: It is missing, not JSON, or of an unsupported format.
    """
    file = Path(path) / MANIFEST
    try:
        manifest = parse_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError("not a model folder: no manifest.json", where=str(path)) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"manifest cannot be read: {error}", where=str(file)) from None
    # JSON may have a list or a number at the top.
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if version not in READS:
        raise ModelError(
            f"model format {version!r} is not one that this version reads {READS}",
            where=str(file),
            hint="train again, or use the version of opcast that made it",
        )
    return dict(manifest)


def read_files(
    path: Path, manifest: Mapping[str, object], under: Collection[str] | None = None
) -> dict[str, bytes]:
    """Read every file that a manifest lists.

    Args:
        path: The model folder.
        manifest: Its manifest.
        under: Top-level folders to read; all files by default.

    Raises:
        ModelError: A file is missing or its digest differs.
    """
    contents = {}
    listed = manifest.get("files", {})
    if not isinstance(listed, dict):
        raise ModelError("manifest lists no files", where=str(path), hint="copy the model again")
    for name, digest in listed.items():
        if under is not None and name.split("/")[0] not in under:
            continue
        file = _inside(Path(path), name)
        try:
            data = file.read_bytes()
        except OSError:
            raise ModelError("file of the model is missing", where=str(file)) from None
        actual = hashlib.sha256(data).hexdigest()
        if actual != digest:
            raise ModelError(
                f"file differs from the manifest's digest: SHA-256 {actual[:16]}…, not "
                f"{str(digest)[:16]}…",
                where=str(file),
                hint="copy the model again, or train it again",
            )
        contents[name] = data
    return contents


class JsonModel(ABC):
    """A model in a single JSON file.

    Attributes:
        form: Format number that this version writes and reads.
        what: What the model predicts, also the name of the shipped file.
        command: opcast command that trains another model; ``{what}`` is replaced.
    """

    form: ClassVar[int]
    what: ClassVar[str]
    command: ClassVar[str] = "train --{what} TABLE"

    @abstractmethod
    def to_dict(self) -> dict[str, object]:
        """Convert to plain data for JSON."""

    @classmethod
    @abstractmethod
    def from_dict(cls, data: JsonMapping) -> Self:
        """Read :meth:`to_dict`'s data; raises one of :data:`DAMAGE` if it is damaged."""

    def save(self, path: Path) -> None:
        """Write the model as one JSON file; its folder is created if needed."""
        write_text(path, self.text({"format": self.form, **self.to_dict()}))

    def text(self, data: JsonMapping) -> str:
        """JSON text of the data, without spaces, since such files ship."""
        return json.dumps(data, separators=(",", ":"))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a model.

        Raises:
            ModelError: The file is missing, damaged, or of another format.
        """
        try:
            data = parse_json(path.read_text(encoding="utf-8"))
            if data["format"] != cls.form:
                raise ValueError(f"format {data['format']!r} is not one that this version reads")
            return cls.from_dict(data)
        except (OSError, *DAMAGE) as error:
            raise ModelError(
                f"the model of {cls.what} cannot be read: {error}",
                where=str(path),
                hint=f"train it again: opcast {cls.command.format(what=cls.what)}",
            ) from None

    @classmethod
    def find(cls, name: str = "default") -> Self:
        """The shipped model (``default``), read once, or a model from a file.

        Raises:
            ModelError: The file is missing, damaged, or of another format.
        """
        return cast("Self", _shipped(cls)) if name == "default" else cls.load(Path(name))


@lru_cache
def _shipped(model: type[JsonModel]) -> JsonModel:
    return model.load(PRETRAINED / f"{model.what}.json")


def predicts_operators(manifest: Mapping[str, object]) -> bool:
    """Whether a manifest describes a model of library operators, not of programs."""
    return manifest.get("kind") == OPERATORS


def training_info(manifest: Mapping[str, object], own: Collection[str]) -> dict[str, object]:
    """Provenance in a manifest: all entries except those of the folder and the ``own`` ones."""
    return {k: v for k, v in manifest.items() if k not in _ADDED and k not in own}


def folder_digest(*folders: Path) -> str:
    """First 16 hexadecimal digits of the SHA-256 of model folders, in order.

    It is computed from the manifests, which list the digests of all other files.
    """
    digest = hashlib.sha256()
    for folder in folders:
        digest.update((folder / MANIFEST).read_bytes())
    return digest.hexdigest()[:16]


def contents_of(save: Callable[[Path], object]) -> dict[str, bytes]:
    """Files that ``save`` writes below the given folder, by relative name.

    A bundle saves its parts this way, so that :func:`write_folder` writes everything in one step.
    """
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        save(root)
        files = [p for p in sorted(root.rglob("*")) if p.is_file()]
        return {p.relative_to(root).as_posix(): p.read_bytes() for p in files}


def check_estimator(path: Path, manifest: Mapping[str, object], name: str) -> None:
    """Check that a model folder was written by an estimator of this name.

    Raises:
        ModelError: It is another estimator's.
    """
    if manifest.get("estimator") != name:
        raise ModelError(
            f"holds a {manifest.get('estimator')!r} model, not {name!r}", where=str(path)
        )


def check_schema(
    path: Path, manifest: Mapping[str, object], expected: str, *, kind: str = "feature"
) -> None:
    """Check that a model was trained on the current features.

    Args:
        path: The model folder.
        manifest: Its manifest.
        expected: Digest of the current schema.
        kind: Schema to check: ``feature``, or ``graph`` for models on graphs.

    Raises:
        ModelError: The schema hash differs.
    """
    stored = manifest.get("schema_hash" if kind == "feature" else f"{kind}_schema_hash")
    if stored != expected:
        raise ModelError(
            f"model was trained on {kind} schema {stored}, this version makes {expected}",
            where=str(Path(path) / MANIFEST),
            hint="train again on the dataset: features are recomputed from its kernels",
        )


def pack(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Arrays as the bytes of a compressed ``.npz``."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **{str(k): v for k, v in arrays.items()})  # type: ignore[arg-type]
    return buffer.getvalue()


def unpack(data: bytes) -> dict[str, np.ndarray]:
    """Arrays of a ``.npz``; pickled objects are rejected.

    Raises:
        ValueError: The bytes are not an archive, are damaged, hold objects, or unpack to more than
            :data:`MAX_ARRAYS` bytes.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            # Sizes from the archive's directory, before anything is unpacked.
            if sum(entry.file_size for entry in archive.infolist()) > MAX_ARRAYS:
                raise ValueError(f"its arrays take more than {MAX_ARRAYS} bytes")
        # Loading a pickled object would execute code.
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (zipfile.BadZipFile, zlib.error, EOFError, MemoryError, NotImplementedError) as error:
        raise ValueError(f"not a .npz file: {error}") from None


def pack_tensors(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Arrays as the bytes of a ``.safetensors`` file."""
    from safetensors.numpy import save

    return bytes(save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))


def unpack_tensors(data: bytes) -> dict[str, np.ndarray]:
    """Arrays of a ``.safetensors`` file.

    Raises:
        ValueError: The bytes are not in that format.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return dict(load(data))
    except SafetensorError as error:
        raise ValueError(f"not a safetensors file: {error}") from None


def library_versions() -> dict[str, str]:
    """Versions of libraries that a model's numbers may depend on."""
    return {"python": platform.python_version()} | installed(_LIBRARIES)


def _swap(partial: Path, path: Path) -> None:
    """Rename ``partial`` to ``path``; delete the former folder once the new one is in place."""
    # Two renames, since a folder cannot be renamed onto one that is not empty.
    old = partial.with_name(partial.name + ".old")
    if path.exists():
        path.rename(old)
    try:
        partial.rename(path)
    except OSError:
        if old.exists() and not path.exists():
            old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _inside(folder: Path, name: str) -> Path:
    """Path of a regular file inside a model folder; links that lead out of it are rejected.

    Raises:
        ModelError: It is outside the folder, or is a device, a pipe or a folder.
    """
    file = folder / name
    # A manifest is untrusted: its names must not lead out of the folder by dots or links.
    outside = ".." in Path(name).parts or Path(name).is_absolute() or "\0" in name
    if outside or not file.resolve().is_relative_to(folder.resolve()):
        raise ModelError(f"manifest names a file outside the folder: {name}", where=str(folder))
    if file.exists() and not file.is_file():
        raise ModelError("not a regular file", where=str(file), hint="copy the model again")
    return file


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())
