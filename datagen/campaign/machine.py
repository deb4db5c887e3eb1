"""A campaign's description of the machine, and telemetry: clock, power and temperature over time.

The description contains driver, clocks, power caps, topology and libraries, but no user or host
name, path or serial number: see :func:`scrubbed`.

Ten times a second a line of telemetry is written, so that a kill loses no readings. NVIDIA:
``nvidia-smi``, one repeating process; AMD: the driver's hwmon files, or ``rocm-smi``; CPU: its
clock. A TPU provides none of these.
"""

from __future__ import annotations

import contextlib
import getpass
import glob
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path

from ...common.types import JsonObject
from ...common.versions import installed
from ..profile.host import cpu_mhz, first_line, nvidia_smi, output_of

#: Columns of the file; empty cells are values that the device does not provide.
COLUMNS = ("time", "core_mhz", "memory_mhz", "power_w", "temperature_c", "load_percent")
#: Seconds between two readings, and between two calls of a slow program.
INTERVAL_S, _SLOW_S = 0.1, 1.0
_FIELDS = "timestamp,clocks.sm,clocks.mem,{power},temperature.gpu,utilization.gpu"
#: Instantaneous power, which drivers before 525 lack; theirs is a mean over a second on most GPUs.
_POWER = ("power.draw.instant", "power.draw")
#: Files of Linux's amdgpu driver (kernel.org, gpu/amdgpu/thermal), with their units.
_HWMON = "/sys/class/drm/card*/device/hwmon/hwmon*"
_AMD = (
    *(("freq1_input", 1e6), ("freq2_input", 1e6)),
    *(("power1_input", 1e6), ("power1_average", 1e6), ("temp2_input", 1e3), ("temp1_input", 1e3)),
)
#: Names of the columns in ``rocm-smi --json``, in their order.
_ROCM = (r"^sclk clock speed", r"^mclk clock speed", r"Power \(W\)", r"Temperature .*\(C\)", "use")
Reading = list[float | str]
#: Fields of ``nvidia-smi --query-gpu``, queried one by one if a driver rejects the query because of
#: an unknown field.
_NVIDIA = (
    *("name", "driver_version", "vbios_version", "pstate", "persistence_mode", "compute_mode"),
    *("memory.total", "ecc.mode.current", "mig.mode.current", "pcie.link.gen.current"),
    *("pcie.link.width.current", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem"),
    *("clocks.applications.graphics", "power.limit", "power.default_limit", "power.max_limit"),
    *("enforced.power.limit", "temperature.gpu"),
)
#: Other programs whose whole output is kept, by its name in the record.
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
#: Identifiers of a card, which ``nvidia-smi`` prints beside its name.
_SERIAL = re.compile(r"\(UUID: [^)]*\)|GPU-[0-9a-f]{8}-[0-9a-f-]+")
_PATH = re.compile(r"(?<![\w.])~?(?:/[\w.+@%-]+){2,}/?|[A-Za-z]:\\[\w.\\-]+")


class Telemetry:
    """Records telemetry until it is stopped.

    Args:
        path: File to write.
        platform: ``gpu``, ``cpu`` or ``tpu``.
    """

    def __init__(self, path: Path, platform: str) -> None:
        self._path = path
        self._platform = platform
        self._stop = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Telemetry:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._process is not None:
            self._process.kill()
        self._thread.join(5.0)

    def _run(self) -> None:
        # A missing tool or a broken driver costs the readings, not the campaign.
        with (
            contextlib.suppress(OSError, ValueError),
            self._path.open("a", encoding="utf-8") as out,
        ):

            def write(reading: Reading) -> None:
                out.write(",".join(map(str, reading)) + "\n")
                out.flush()

            if self._platform == "gpu" and shutil.which("nvidia-smi"):
                self._nvidia(write)
            elif (read := _reader(self._platform)) is not None:
                pause = INTERVAL_S if read is not _rocm else _SLOW_S
                while not self._stop.wait(pause):
                    values = read()
                    if values:
                        write([round(time.time(), 3), *values])

    def _nvidia(self, write: Callable[[Reading], None]) -> None:
        for power in _POWER:
            command = [
                *("nvidia-smi", f"--query-gpu={_FIELDS.format(power=power)}", "-lms", "100"),
                *("--format=csv,noheader,nounits", f"--id={_visible()}"),
            ]
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            assert self._process.stdout is not None
            told = 0
            for line in self._process.stdout:
                reading = nvidia_reading(line)
                if reading:
                    told += 1
                    write(reading)
                if self._stop.is_set():
                    break
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
            if told or self._stop.is_set():
                return


def _visible() -> str:
    """The first GPU that frameworks see, as ``nvidia-smi`` numbers it."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"


def nvidia_reading(line: str) -> Reading:
    """Parse a line of ``nvidia-smi``; empty if it is not a reading.

    Args:
        line: Such as ``2026/11/28 10:20:53.123, 1980, 2619, 312.50, 45, 98``.
    """
    parts = [part.strip() for part in line.split(",")]
    try:
        at = datetime.strptime(parts[0], "%Y/%m/%d %H:%M:%S.%f").timestamp()
    except ValueError:
        return []
    return [round(at, 3), *(_number(part) for part in parts[1:])]


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:  # [N/A], [Not Supported]
        return ""


def _reader(platform: str) -> Callable[[], Reading] | None:
    if platform == "cpu":
        return _cpu
    if platform == "gpu":
        # The first card is the device that frameworks use.
        for folder in sorted(glob.glob(_HWMON)):  # noqa: PTH207 (folders of any name)
            if first_line(Path(folder) / "name") == "amdgpu":
                return lambda: amd_reading(Path(folder))
        if shutil.which("rocm-smi"):
            return _rocm
    return None


def _cpu() -> Reading:
    clock = cpu_mhz()
    return [round(clock, 1), "", "", "", ""] if clock else []


def amd_reading(folder: Path) -> Reading:
    """Read the files of AMD's driver: clocks in MHz, power in W, temperature in °C."""
    found: dict[str, float | str] = {}
    for name, unit in _AMD:
        text = first_line(folder / name)
        if text.isdigit():
            found[name] = int(text) / unit
    power = found.get("power1_input", found.get("power1_average", ""))
    heat = found.get("temp2_input", found.get("temp1_input", ""))
    load = _number(first_line(folder.parent.parent / "gpu_busy_percent"))
    return [found.get("freq1_input", ""), found.get("freq2_input", ""), power, heat, load]


def _rocm() -> Reading:
    asked = ("-d", "0", "--showclocks", "--showpower", "--showtemp", "--showuse", "--json")
    return rocm_reading(output_of("rocm-smi", *asked))


def rocm_reading(text: str) -> Reading:
    """Parse the JSON of ``rocm-smi``; the first number of each available column."""
    try:
        card = next(iter(json.loads(text).values()))
    except (ValueError, StopIteration, AttributeError):
        return []
    found: Reading = []
    for pattern in _ROCM:
        values = [str(v) for k, v in card.items() if re.search(pattern, k)]
        numbers = [n for v in values if (n := re.search(r"\d+(\.\d+)?", v))]
        found.append(float(numbers[0][0]) if numbers else "")
    return found


def host_record(hosts: Mapping[str, object], platform_name: str) -> JsonObject:
    """Describe the machine.

    Args:
        hosts: Description by each framework, by name.
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
        found |= {name: text for name, own in _ANSWERS.items() if (text := output_of(*own))}
    return scrubbed(found)


def _nvidia() -> dict[str, str]:
    gpu = _visible()
    if found := nvidia_smi(_NVIDIA, gpu):
        return found
    # A driver rejects a whole query for one field that it lacks.
    for name in _NVIDIA:
        found |= nvidia_smi((name,), gpu)
    return found


def scrubbed(record: Mapping[str, object]) -> JsonObject:
    """Replace user and host names, paths and serial numbers in all texts of a record."""
    return {str(k): _scrubbed(v) for k, v in record.items()}


def _scrubbed(value: object) -> object:
    if isinstance(value, Mapping):
        return scrubbed(value)
    if isinstance(value, list | tuple):
        return [_scrubbed(v) for v in value]
    return scrubbed_text(value) if isinstance(value, str) else value


def scrubbed_text(text: str) -> str:
    """Apply :func:`scrubbed` to one text."""
    text = _PATH.sub("<path>", _SERIAL.sub("<serial>", text))
    for name, mark in _names():
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", mark, text)
    return text


def _names() -> list[tuple[str, str]]:
    """Names of this user and host, each with its replacement."""
    user = ""
    # A user without an entry in the system's list has no name.
    with contextlib.suppress(OSError, KeyError):
        user = getpass.getuser()
    host = socket.gethostname()
    found = [(user, "<user>"), (Path.home().name, "<user>"), (host, "<host>")]
    found.append((host.split(".")[0], "<host>"))
    # A single letter may be an ordinary word.
    return [(name, mark) for name, mark in found if len(name) > 1]
