"""What a campaign's record tells of a machine: driver, clocks, power caps, topology, libraries.

No name of a user or host, no path, no serial number: see :func:`scrubbed`.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from ...common.types import JsonObject
from ...common.versions import installed

#: Figures of ``nvidia-smi --query-gpu``, one query each: a driver refuses a query with a field
#: that it does not know.
_NVIDIA = (
    *("name", "driver_version", "vbios_version", "pstate", "persistence_mode", "compute_mode"),
    *("memory.total", "ecc.mode.current", "mig.mode.current", "pcie.link.gen.current"),
    *("pcie.link.width.current", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem"),
    *("clocks.applications.graphics", "power.limit", "power.default_limit", "power.max_limit"),
    *("enforced.power.limit", "temperature.gpu"),
)
#: Other programs whose whole answer is kept, by the name it has in the record.
_ANSWERS = {
    "topology": ("nvidia-smi", "topo", "-m"),
    "nvlink": ("nvidia-smi", "nvlink", "-s", "-i", "0"),
    "rocm": ("rocm-smi", "--showdriverversion", "--showmaxpower", "--showproductname", "--json"),
    "rocm_topology": ("rocm-smi", "--showtopo", "--json"),
}
_LIBRARIES = (
    *("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin", "libtpu"),
    *("torch", "triton", "timm", "transformers", "flax", "optax", "numpy", "pandas", "pyarrow"),
    *("nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cublas-cu12", "nvidia-cublas"),
)
#: Seconds that a program gets to answer: a broken driver may hang.
_ANSWER_S = 10.0
#: Identifiers of one card, which ``nvidia-smi`` writes beside its name.
_SERIAL = re.compile(r"\(UUID: [^)]*\)|GPU-[0-9a-f]{8}-[0-9a-f-]+")
_PATH = re.compile(r"(?<![\w.])~?(?:/[\w.+@%-]+){2,}/?|[A-Za-z]:\\[\w.\\-]+")


def host_record(hosts: Mapping[str, object], platform_name: str) -> JsonObject:
    """Describe the machine.

    Args:
        hosts: What each framework sees, by name.
        platform_name: ``gpu``, ``tpu`` or ``cpu``.
    """
    found: JsonObject = {
        "platform": platform_name,
        "frameworks": dict(hosts),
        "python": platform.python_version(),
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
        "libraries": installed(_LIBRARIES),
    }
    if platform_name == "gpu":
        found["nvidia"] = _nvidia()
        found |= {name: text for name, own in _ANSWERS.items() if (text := _answer(*own))}
    return scrubbed(found)


def _nvidia() -> dict[str, str]:
    if shutil.which("nvidia-smi") is None:
        return {}
    index = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
    common = ("--format=csv,noheader", f"--id={index}")
    whole = _answer("nvidia-smi", f"--query-gpu={','.join(_NVIDIA)}", *common)
    values = [value.strip() for value in whole.split(",")]
    if len(values) == len(_NVIDIA):
        return dict(zip(_NVIDIA, values, strict=True))
    single = {name: _answer("nvidia-smi", f"--query-gpu={name}", *common) for name in _NVIDIA}
    return {name: text for name, text in single.items() if text}


def _answer(*command: str) -> str:
    """Return what a program prints; nothing if it is not there or fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_ANSWER_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def scrubbed(record: Mapping[str, object]) -> JsonObject:
    """Replace names of the user and the host, paths and serial numbers in all texts of a record."""
    return {str(k): _scrubbed(v) for k, v in record.items()}


def _scrubbed(value: object) -> object:
    if isinstance(value, Mapping):
        return scrubbed(value)
    if isinstance(value, list | tuple):
        return [_scrubbed(v) for v in value]
    return scrubbed_text(value) if isinstance(value, str) else value


def scrubbed_text(text: str) -> str:
    """Replace what :func:`scrubbed` does in one text."""
    text = _PATH.sub("<path>", _SERIAL.sub("<serial>", text))
    for name, mark in _names():
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", mark, text)
    return text


def _names() -> list[tuple[str, str]]:
    """Names of this user and host, each with what takes its place."""
    user = ""
    # A user without an entry in the system's list has no name.
    with contextlib.suppress(OSError, KeyError):
        user = getpass.getuser()
    host = socket.gethostname()
    found = [(user, "<user>"), (Path.home().name, "<user>"), (host, "<host>")]
    found.append((host.split(".")[0], "<host>"))
    # A single letter is a word of its own.
    return [(name, mark) for name, mark in found if len(name) > 1]
