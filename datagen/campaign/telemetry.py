"""Clock, power and temperature of an accelerator ten times a second, while a campaign runs.

A file is written line by line, so that a kill loses nothing that was read. NVIDIA: ``nvidia-smi``,
one process that repeats; AMD: the driver's hwmon files, else ``rocm-smi``; a CPU: its clock. A TPU
shows none of these.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

#: Columns of the file; an empty cell is what the device does not tell.
COLUMNS = ("time", "core_mhz", "memory_mhz", "power_w", "temperature_c", "load_percent")
#: Seconds between two readings, and between two calls of a program that takes long itself.
INTERVAL_S, _SLOW_S = 0.1, 1.0
_FIELDS = "timestamp,clocks.sm,clocks.mem,{power},temperature.gpu,utilization.gpu"
#: Power of the moment, which drivers before 525 lack; theirs is a mean of a second on most GPUs.
_POWER = ("power.draw.instant", "power.draw")
#: Files of Linux's amdgpu driver (kernel.org, gpu/amdgpu/thermal), with their units.
_HWMON = "/sys/class/drm/card*/device/hwmon/hwmon*"
_AMD = (
    *(("freq1_input", 1e6), ("freq2_input", 1e6)),
    *(("power1_input", 1e6), ("power1_average", 1e6), ("temp2_input", 1e3), ("temp1_input", 1e3)),
)
#: What ``rocm-smi --json`` calls the columns, in their order.
_ROCM = (r"^sclk clock speed", r"^mclk clock speed", r"Power \(W\)", r"Temperature .*\(C\)", "use")

Reading = list[float | str]


class Telemetry:
    """Reads until it is stopped.

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
    """Read a line of ``nvidia-smi``; empty if it is none.

    Args:
        line: ``2026/11/28 10:20:53.123, 1980, 2619, 312.50, 45, 98``.
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
        # The first card stands for the device that frameworks take.
        for folder in sorted(glob.glob(_HWMON)):  # noqa: PTH207 (folders of any name)
            if _text(Path(folder) / "name") == "amdgpu":
                return lambda: amd_reading(Path(folder))
        if shutil.which("rocm-smi"):
            return _rocm
    return None


def _cpu() -> Reading:
    lines = _text(Path("/proc/cpuinfo")).splitlines()
    clocks = [float(line.split(":")[1]) for line in lines if line.startswith("cpu MHz")]
    return [round(sum(clocks) / len(clocks), 1), "", "", "", ""] if clocks else []


def amd_reading(folder: Path) -> Reading:
    """Read the files of AMD's driver: clocks in MHz, power in W, temperature in °C."""
    found: dict[str, float | str] = {}
    for name, unit in _AMD:
        text = _text(folder / name)
        if text.isdigit():
            found[name] = int(text) / unit
    power = found.get("power1_input", found.get("power1_average", ""))
    heat = found.get("temp2_input", found.get("temp1_input", ""))
    load = _number(_text(folder.parent.parent / "gpu_busy_percent"))
    return [found.get("freq1_input", ""), found.get("freq2_input", ""), power, heat, load]


def _rocm() -> Reading:
    command = ["rocm-smi", "-d", "0", "--showclocks", "--showpower", "--showtemp", "--showuse"]
    try:
        answer = subprocess.run(
            [*command, "--json"], capture_output=True, text=True, timeout=10, check=True
        )
        return rocm_reading(answer.stdout)
    except (OSError, subprocess.SubprocessError):
        return []


def rocm_reading(text: str) -> Reading:
    """Read the JSON of ``rocm-smi``; the first figure of each column that it has."""
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


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
