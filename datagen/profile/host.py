"""Description of the machine for run records: device, versions, clocks, power; no host name."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from ...common import worker_process

#: Fields of ``nvidia-smi --query-gpu`` that may explain differences between runs.
_NVIDIA_FIELDS = (
    "driver_version",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "memory.total",
)
#: Linux describes the caches of every processor here; processor 0 stands for all.
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
#: Seconds that a program gets to answer: a broken driver may hang.
_ANSWER_S = 10.0


def describe_host() -> dict[str, object]:
    """Device, compiler and host of this process, as plain data for a run record."""
    import jax

    from ...features.devices.device import local_device_name, usable_cores

    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "device_name": local_device_name(),
        "device_kind": device.device_kind,
        "device_count": jax.device_count(),
        "memory_bytes": memory_bytes(),
        "cache_bytes": last_cache_bytes(),
        "cores": usable_cores(),
        "clock_mhz": round(clock_hz() / 1e6, 1),
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "compiler": f"xla {device.client.platform_version}".strip(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "python": platform.python_version(),
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        # Allocator and page size determine page faults, and thus times on a CPU.
        "allocator": {k: v for k, v in os.environ.items() if k.startswith("MALLOC_")},
        "huge_pages": first_line(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "nvidia": nvidia_smi(),
    }


def memory_bytes() -> float:
    """Memory of JAX's default device that a program may use, in bytes; 0 if unknown."""
    import jax

    device = jax.devices()[0]
    if device.platform != "cpu":
        # JAX preallocates a fraction of the device's memory; the limit is what programs can use.
        stats = device.memory_stats() or {}
        return float(stats.get("bytes_limit", 0))
    return worker_process.memory_bytes()


def free_memory_bytes() -> float:
    """Free memory of JAX's default device, in bytes; 0 if unknown."""
    import jax

    total = memory_bytes()
    if jax.devices()[0].platform != "cpu":
        return total
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return total
    # The kernel's estimate of what can be allocated without swapping, in units of 1024 bytes.
    free = [float(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable:")]
    return min([total, *free]) if total else sum(free)


def cpu_caches() -> dict[int, tuple[float, int]]:
    """The CPU's data caches by level: bytes of one, and number of logical cores that share it."""
    caches = {}
    for folder in sorted(_CACHES.glob("index*")):
        if first_line(folder / "type") == "Instruction":
            continue
        size = first_line(folder / "size")
        unit = {"K": 1024, "M": 1024**2, "G": 1024**3}.get(size[-1:], 0)
        shared = first_line(folder / "shared_cpu_list")
        if unit and shared:
            level = int(first_line(folder / "level"))
            caches[level] = (float(size[:-1]) * unit, _count(shared))
    return caches


def last_cache_bytes() -> float:
    """Bytes of the last-level cache of JAX's default device; 0 if unknown."""
    import jax

    device = jax.devices()[0]
    if device.platform == "cpu":
        return max((size for size, _ in cpu_caches().values()), default=0.0)
    # 64 MB is more than the L2 of an A100 (40 MB) or H100 (50 MB): too much only costs memory for
    # rotated arguments.
    return float(getattr(device, "l2_cache_size", 0) or (64e6 if device.platform == "gpu" else 0))


def clock_hz() -> float:
    """Current clock of JAX's default device in Hz; 0 if unknown."""
    import jax

    if jax.devices()[0].platform != "cpu":
        sm = nvidia_smi().get("clocks.sm", "").split(" ")[0]
        return float(sm) * 1e6 if sm.isdigit() else 0.0
    return 1e6 * cpu_mhz()


def cpu_mhz() -> float:
    """Mean clock of the CPU's cores in MHz; 0 where the system does not give it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return 0.0
    clocks = [float(line.split(":")[1]) for line in lines if line.startswith("cpu MHz")]
    return sum(clocks) / len(clocks) if clocks else 0.0


def nvidia_smi(fields: Sequence[str] = _NVIDIA_FIELDS, gpu: str = "0") -> dict[str, str]:
    """Values of an NVIDIA GPU by field; empty if there is none, or it rejects a field."""
    query = f"--query-gpu={','.join(fields)}"
    answer = output_of("nvidia-smi", query, "--format=csv,noheader", f"--id={gpu}")
    values = [value.strip() for value in answer.split(",")]
    known = answer and len(values) == len(fields)
    return dict(zip(fields, values, strict=True)) if known else {}


def output_of(*command: str) -> str:
    """Output of a program; empty if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_ANSWER_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def first_line(path: Path) -> str:
    """First line of a file of the system; empty if it cannot be read."""
    try:
        return path.read_text().split("\n", 1)[0].strip()
    except OSError:
        return ""


def _count(cpus: str) -> int:
    """Number of cores in a list such as ``0-3,8``."""
    spans = [part.split("-") for part in cpus.split(",")]
    return sum(int(span[-1]) - int(span[0]) + 1 for span in spans)
