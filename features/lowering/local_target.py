"""JAX's default backend as a compilation target, remembered so that it need not be started."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from dataclasses import asdict, dataclass
from importlib import metadata

from ...common.errors import LoweringError
from ...common.files import parse_json, write_text
from ...common.jax_platforms import device_files
from ...common.paths import home
from ..devices.device import local_device_name

logger = logging.getLogger(__name__)

#: Environment variables that change what JAX compiles for, or how.
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
#: Packages whose versions decide what a program is compiled to.
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
        device_count: Devices that the backend has.
    """

    device: str
    platform: str
    compiler: str
    device_count: int


def local_target() -> LocalTarget:
    """Describe the default backend.

    A started backend is asked. Otherwise the answer of an earlier process counts, if it had the
    same machine, devices, packages and settings: starting a GPU backend takes seconds and memory.

    Raises:
        LoweringError: JAX cannot start a backend.
    """
    path = home() / "targets" / f"{environment_hash()}.json"
    # A backend that runs already answers for free, and may have been chosen in the process itself.
    if not _is_started():
        try:
            return LocalTarget(**parse_json(path.read_text()))
        except (OSError, ValueError, TypeError):
            logger.debug("no remembered target at %s", path)
    target = _ask()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(asdict(target)))
    except OSError as error:
        logger.debug("cannot remember the target: %s", error)
    return target


def environment_hash() -> str:
    """Digest everything but the program that decides what it is compiled to."""
    import jax

    # Host and kernel: a home folder may be shared by machines with unlike devices.
    parts = [platform.node(), platform.machine(), platform.release(), str(os.cpu_count())]
    parts += [f"{name}={os.environ.get(name, '')}" for name in _SETTINGS]
    parts += [f"{name}={_version(name)}" for name in _PACKAGES]
    parts.append(str(getattr(jax.config, "jax_platforms", "")))
    parts += device_files()
    # XLA:CPU partitions loops by the cores that the process may use.
    if hasattr(os, "sched_getaffinity"):
        parts.append(str(len(os.sched_getaffinity(0))))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _is_started() -> bool:
    from ..ir.jax_compat import backends_started

    return backends_started()


def _ask() -> LocalTarget:
    import jax

    try:
        device = jax.devices()[0]
    except RuntimeError as error:
        raise LoweringError(
            f"JAX has no device to compile for: {str(error).splitlines()[0]}",
            hint="unset or change JAX_PLATFORMS, or use lowering='op'",
        ) from error
    # The version text may span lines.
    version = " ".join(str(device.client.platform_version).split())
    compiler = f"xla {_version('jaxlib')} {device.client.platform}"
    if version and version != device.client.platform:
        compiler += f" ({version})"
    return LocalTarget(local_device_name(), device.platform, compiler, jax.device_count())
