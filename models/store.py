"""Model folders: a manifest with digests, and weights without pickle.

A folder is written beside its place and renamed into it, so that a half-written model is never
found. Reading checks the format, the feature schema and the digest of every file.
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
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from ..features.errors import ModelError
from ..features.files import cannot_write, parse_json

#: Format of the folders that this version writes, and of those that it reads.
FORMAT = 1
READS = (1,)
MANIFEST = "manifest.json"
#: Value of ``kind`` in the manifest of a model of library operators.
OPERATORS = "operators"
#: What reading a manifest that says anything may raise.
DAMAGE = (
    KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RecursionError,
    MemoryError,
)  # fmt: skip
#: Bytes of all arrays of a file.
MAX_ARRAYS = 2**31
_LIBRARIES = (
    "opcast", "numpy", "xgboost-cpu", "xgboost", "scikit-learn", "jax", "flax", "torch",
    "torch-geometric",
)  # fmt: skip


def write_folder(path: Path, manifest: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
    """Write a model folder in one step; replaces an earlier model at the same place.

    Args:
        path: The folder. Its parent is made if needed.
        manifest: Plain data; format, library versions and file digests are added.
        files: Contents by relative name.

    Raises:
        ModelError: The place holds something that is no model.
        FileError: The place cannot be written, or the disk is full.
    """
    path = Path(path)
    if path.exists() and not (path / MANIFEST).is_file() and not _is_empty(path):
        raise ModelError("will not overwrite: not a model folder", where=str(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise cannot_write(path, error) from error
    try:
        partial.chmod(0o755)
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
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def read_manifest(path: Path) -> dict[str, Any]:
    """Read and check a model folder's manifest.

    Raises:
        ModelError: It is missing, not JSON, or of a format that this version does not read.
    """
    file = Path(path) / MANIFEST
    try:
        manifest = parse_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError("not a model folder: no manifest.json", where=str(path)) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"manifest cannot be read: {error}", where=str(file)) from None
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found not in READS:
        raise ModelError(
            f"model format {found!r} is not one that this version reads {READS}",
            where=str(file),
            hint="train again, or use the version of opcast that made it",
        )
    return dict(manifest)


def read_files(path: Path, manifest: Mapping[str, Any]) -> dict[str, bytes]:
    """Read every file that a manifest lists.

    Raises:
        ModelError: A file is missing or its digest differs.
    """
    contents = {}
    listed = manifest.get("files", {})
    if not isinstance(listed, dict):
        raise ModelError("manifest lists no files", where=str(path), hint="copy the model again")
    for name, digest in listed.items():
        file = _inside(Path(path), name)
        try:
            data = file.read_bytes()
        except OSError:
            raise ModelError("file of the model is missing", where=str(file)) from None
        found = hashlib.sha256(data).hexdigest()
        if found != digest:
            raise ModelError(
                f"file differs from the manifest's digest: SHA-256 {found[:16]}…, not "
                f"{str(digest)[:16]}…",
                where=str(file),
                hint="copy the model again, or train it again",
            )
        contents[name] = data
    return contents


def check_schema(
    path: Path, manifest: Mapping[str, Any], expected: str, *, kind: str = "feature"
) -> None:
    """Check that a model was trained on today's features.

    Args:
        path: The model folder.
        manifest: Its manifest.
        expected: Digest of today's schema.
        kind: Which schema: ``feature``, or ``graph`` for models that look at graphs.

    Raises:
        ModelError: The schema hash differs.
    """
    found = manifest.get("schema_hash" if kind == "feature" else f"{kind}_schema_hash")
    if found != expected:
        raise ModelError(
            f"model was trained on {kind} schema {found}, this version makes {expected}",
            where=str(Path(path) / MANIFEST),
            hint="train again on the dataset: features are recomputed from its kernels",
        )


def pack(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Arrays as the bytes of a compressed ``.npz``."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **{str(k): v for k, v in arrays.items()})  # type: ignore[arg-type]
    return buffer.getvalue()


def unpack(data: bytes) -> dict[str, np.ndarray]:
    """Arrays of a ``.npz``; pickled objects are refused.

    Raises:
        ValueError: It is none, is damaged, holds objects, or more than :data:`MAX_ARRAYS` bytes.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > MAX_ARRAYS:
                raise ValueError(f"its arrays take more than {MAX_ARRAYS} bytes")
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
        ValueError: It is no such file.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return dict(load(data))
    except SafetensorError as error:
        raise ValueError(f"not a safetensors file: {error}") from None


def library_versions() -> dict[str, str]:
    """Versions of what a model's numbers may depend on."""
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _swap(partial: Path, path: Path) -> None:
    """Rename ``partial`` to ``path``; what was there goes only once the new one is in place."""
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
    """A file of a model folder; not a link to elsewhere, nor anything that is no file.

    Raises:
        ModelError: It lies outside the folder, or is a device, a pipe or a folder.
    """
    file = folder / name
    outside = ".." in Path(name).parts or Path(name).is_absolute() or "\0" in name
    if outside or not file.resolve().is_relative_to(folder.resolve()):
        raise ModelError(f"manifest names a file outside the folder: {name}", where=str(folder))
    if file.exists() and not file.is_file():
        raise ModelError("this is no file", where=str(file), hint="copy the model again")
    return file


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())
