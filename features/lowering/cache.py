"""On-disk cache of lowered programs: compiling takes seconds to minutes, reading milliseconds.

It also remembers the target (:func:`local_target`), because starting a backend takes seconds.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from ...common.errors import DatasetError, LoweringError
from ...common.files import gunzip, parse_json, write_bytes, write_text
from ...common.jax_platforms import device_files
from ...common.paths import home
from ...common.types import JsonMapping, JsonObject
from ...common.versions import installed
from ..devices.device import local_device_name
from ..ir.program import Source
from ..kernels.kernel import LoweredProgram
from ..kernels.program_json import schedule_from_json, schedule_to_json

logger = logging.getLogger(__name__)

#: Incremented whenever entries of older versions can no longer be used. It is part of every key, so
#: old entries are never read and are evicted eventually.
CACHE_VERSION = 1
#: Default limit on the bytes of entries. Engineering estimate.
DEFAULT_MAX_BYTES = 2_000_000_000
#: Fraction of the limit that remains after an eviction, so that not every write evicts again.
_KEPT_AFTER_EVICTION = 0.9
_SUFFIX = ".json.gz"


class CachedModule(NamedTuple):
    """A cache entry: a compiled module.

    Attributes:
        hlo: Optimised module text.
        meta: Associated JSON values, such as the peak memory.
    """

    hlo: str
    meta: JsonMapping


class LoweringCache:
    """Compiled modules in a folder, by key, with least-recently-used eviction.

    Several processes may share a folder: entries are written to a temporary file and renamed. An
    entry that cannot be read counts as missing; failures to write are only logged.

    Args:
        root: Folder; by default ``lowered`` in the user's cache (``$OPCAST_CACHE``).
        max_bytes: Limit on the bytes of entries.
    """

    def __init__(
        self, root: Path | str | None = None, *, max_bytes: int = DEFAULT_MAX_BYTES
    ) -> None:
        self.root = Path(root) if root is not None else home() / "lowered"
        self.max_bytes = max_bytes

    @staticmethod
    def key(*parts: str) -> str:
        """Compute the key from the program, target, compiler and options."""
        text = "\0".join([f"v{CACHE_VERSION}", *parts])
        return hashlib.sha256(text.encode()).hexdigest()

    def get(self, key: str) -> CachedModule | None:
        """Read an entry; ``None`` if there is none or it is damaged."""
        path = self._path(key)
        try:
            data = parse_json(gunzip(path.read_bytes()))
            module = CachedModule(str(data["hlo"]), dict(data["meta"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("ignored the damaged cache entry %s: %s", path, error)
            return None
        try:
            # The modification time records the last use, since access times are often disabled.
            os.utime(path)
        except OSError:
            logger.debug("cannot mark %s as used", path)
        return module

    def put(self, key: str, hlo: str, meta: JsonObject) -> None:
        """Write an entry; failures are only logged."""
        path = self._path(key)
        # Level 3 compresses HLO text nearly as well as level 9, several times faster.
        data = gzip.compress(json.dumps({"hlo": hlo, "meta": meta}).encode(), compresslevel=3)
        try:
            write_bytes(path, data)
            self._evict()
        except OSError as error:
            logger.warning("cannot write to the cache %s: %s", self.root, error)

    def clear(self) -> None:
        """Delete all entries."""
        for _, _, path in list(self._entries()):
            path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        # 256 folders, as in Git: some file systems are slow with many files in one.
        return self.root / key[:2] / (key + _SUFFIX)

    def _entries(self) -> Iterator[tuple[float, int, Path]]:
        """Yield the time of last use, size and path of each entry."""
        for path in self.root.glob(f"??/*{_SUFFIX}"):
            try:
                status = path.stat()
            except OSError:
                continue  # another process deleted it
            yield status.st_mtime, status.st_size, path

    def _evict(self) -> None:
        # Tuples start with the time: the least recently used come first.
        entries = sorted(self._entries())
        total = sum(size for _, size, _ in entries)
        if total <= self.max_bytes:
            return
        for _, size, path in entries:
            if total <= _KEPT_AFTER_EVICTION * self.max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size


#: Incremented whenever the same module would give different kernels, to invalidate older data.
EXTRACTION_VERSION = 11


def to_data(lowered: LoweredProgram) -> dict[str, object]:
    """Convert kernels to plain data, with names, and with sources as walk indices.

    Args:
        lowered: Compiled from StableHLO, with the trip counts of all loops known.
    """
    return {
        "version": EXTRACTION_VERSION,
        "schedule": schedule_to_json(lowered),
        "names": [k.name for k in lowered.kernels],
        "sources": [[s.index for s in k.sources] for k in lowered.kernels],
        "cycles": [k.cycles for k in lowered.kernels],
    }


def from_data(data: JsonMapping, ops: Sequence[Source], hlo: str) -> LoweredProgram | None:
    """Rebuild the result of :func:`to_data`; ``None`` if damaged or from another version.

    Args:
        data: The plain data.
        ops: Sources by walk index.
        hlo: Text of the compiled module.
    """
    try:
        if data["version"] != EXTRACTION_VERSION:
            return None
        lowered = schedule_from_json(data["schedule"], {})
        columns = (data["names"], data["sources"], data["cycles"])
        for kernel, name, indices, cycles in zip(lowered.kernels, *columns, strict=True):
            kernel.name = name
            kernel.cycles = float(cycles)
            kernel.sources = tuple([ops[i] for i in indices])
    except (DatasetError, KeyError, ValueError, TypeError, IndexError):
        return None
    lowered.hlo = hlo
    return lowered


#: Environment variables that affect what JAX compiles for, or how.
_SETTINGS = (
    "JAX_PLATFORMS",
    "JAX_PLATFORM_NAME",
    "XLA_FLAGS",
    "LIBTPU_INIT_ARGS",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "JAX_ENABLE_X64",
    "PJRT_DEVICE",
    "TPU_VISIBLE_CHIPS",
)
#: Packages whose versions affect the compiled program.
_PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "jax-rocm7-plugin",
    "libtpu",
)


@dataclass(frozen=True)
class LocalTarget:
    """JAX's default backend.

    Attributes:
        device: Canonical name of the device.
        platform: ``cpu``, ``gpu`` or ``tpu``.
        compiler: Compiler and version.
        device_count: Number of devices of the backend.
    """

    device: str
    platform: str
    compiler: str
    device_count: int


def local_target() -> LocalTarget:
    """Describe the default backend.

    A running backend is queried. Otherwise the result from an earlier process is reused if machine,
    devices, packages and settings are unchanged: starting a GPU backend takes seconds and memory.

    Raises:
        LoweringError: JAX cannot start a backend.
    """
    from ..ir.jax_compat import backends_started

    path = home() / "targets" / f"{environment_hash()}.json"
    # Querying a running backend is free, and it may have been chosen in this process.
    if not backends_started():
        try:
            return LocalTarget(**parse_json(path.read_text()))
        except (OSError, ValueError, TypeError):
            logger.debug("no remembered target at %s", path)
    target = _ask()
    try:
        write_text(path, json.dumps(asdict(target)))
    except OSError as error:
        logger.debug("cannot remember the target: %s", error)
    return target


def environment_hash() -> str:
    """Return a digest of everything except the program that affects compilation."""
    import jax

    # Host and kernel: machines with different devices may share a home folder.
    parts = [platform.node(), platform.machine(), platform.release(), str(os.cpu_count())]
    parts += [f"{name}={os.environ.get(name, '')}" for name in _SETTINGS]
    versions = installed(_PACKAGES)
    parts += [f"{name}={versions.get(name, '')}" for name in _PACKAGES]
    parts.append(str(getattr(jax.config, "jax_platforms", "")))
    parts += device_files()
    # XLA:CPU partitions loops by the cores that the process may use.
    if hasattr(os, "sched_getaffinity"):
        parts.append(str(len(os.sched_getaffinity(0))))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _ask() -> LocalTarget:
    import jax

    try:
        device = jax.devices()[0]
    except RuntimeError as error:
        raise LoweringError(
            f"JAX has no device to compile for: {str(error).splitlines()[0]}",
            hint="unset or change JAX_PLATFORMS, or use lowering='op'",
        ) from error
    # The version text may span several lines.
    version = " ".join(str(device.client.platform_version).split())
    compiler = f"xla {installed(('jaxlib',)).get('jaxlib', '')} {device.client.platform}"
    if version and version != device.client.platform:
        compiler += f" ({version})"
    return LocalTarget(local_device_name(), device.platform, compiler, jax.device_count())
