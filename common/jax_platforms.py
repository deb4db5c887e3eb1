"""Keeps compilers of absent devices from disturbing this process.

If they are installed in the same environment, JAX loads them when it looks for devices, waits for
missing hardware, and prints pages of messages.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

#: Device files of GPUs and TPUs on Linux: NVIDIA's driver, AMD's ROCm (kfd), TPU hosts (accel or
#: vfio).
_DEVICE_FILES = ("nvidia[0-9]*", "accel*", "kfd", "vfio/*")
#: Packages by which JAX finds GPUs and TPUs when it starts.
_PLUGINS = ("jax_plugins", "libtpu")


def device_files() -> list[str]:
    """Return the files of GPUs and TPUs on this machine, without starting JAX."""
    return sorted(str(p) for pattern in _DEVICE_FILES for p in Path("/dev").glob(pattern))


def keep_plugins_quiet() -> bool:
    """Restrict JAX to the CPU if there are plug-ins but no devices for them.

    The user's own choice (``JAX_PLATFORMS``) takes precedence. Called when the package is imported.

    Returns:
        Whether JAX was restricted.
    """
    if "JAX_PLATFORMS" in os.environ or "JAX_PLATFORM_NAME" in os.environ:
        return False
    if not any(find_spec(name) is not None for name in _PLUGINS) or device_files():
        return False
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules:  # it has read its settings already
        import jax

        if not getattr(jax.config, "jax_platforms", None):
            jax.config.update("jax_platforms", "cpu")  # type: ignore[no-untyped-call]
    return True
