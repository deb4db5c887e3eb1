"""The compile process: compile the programs of a job folder one by one and write the results.

It is started by ``process.py`` and isolates what must not be in the main process: the plug-ins of
absent devices, with their start-up time, messages and crashes.

A job folder contains ``job.json`` with the keys of :class:`Job`, and ``program<i>`` files. For each
program the worker writes ``result<i>.json`` and ``hlo<i>.txt``, or only ``result<i>.json`` with an
``error``.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....common.child_process import begin_worker

#: Compiler message that the library of a call is unavailable (captures its name).
_NO_LIBRARY = re.compile(
    r"No (?:FFI handler registered for|registered implementation for custom call to) \"?([^\"\s]+)"
)
#: Failures of the compiler that other options avoid: part of its message, the options, and a note.
#: Where it cannot time candidates on a device, it uses default tiles for Triton GEMMs, which do not
#: divide odd sizes (seen with a ViT of 197 tokens).
DETOURS: tuple[tuple[str, dict[str, object], str], ...] = (
    (
        "find output tile sizes",
        {"xla_gpu_enable_triton_gemm": False},
        "compiled without Triton's products, for which the compiler found no tiles",
    ),
)


@dataclass(frozen=True)
class Job:
    """A compilation job: programs, target and options.

    Attributes:
        platform: ``cuda`` or ``tpu``.
        topology: Topology of the devices, as in ``pjrt_compat.open_devices``.
        target_config: Description of the GPU, as in ``pjrt_compat.open_devices``.
        folder: Folder with the plug-in's packages; empty if they are in the environment.
        shapes: Replicas and partitions of each program.
        flags: Options of XLA.
    """

    platform: str
    topology: str
    target_config: str = ""
    folder: str = ""
    shapes: tuple[tuple[int, int], ...] = ((1, 1),)
    flags: dict[str, object] = field(default_factory=dict)


def run(folder: Path) -> None:
    """Compile all programs of a job folder."""
    data = json.loads((folder / "job.json").read_text())
    job = Job(**{**data, "shapes": tuple(tuple(shape) for shape in data["shapes"])})
    if job.folder:
        # At the end: packages of this environment take precedence over the compiler folder's.
        sys.path.append(job.folder)
    try:
        from .pjrt_compat import compiler_version, open_devices

        devices = open_devices(job.platform, job.topology, job.target_config)
        version = compiler_version(devices)
    except Exception as error:  # plug-ins raise several unrelated classes
        _write(folder / "result0.json", {"error": _message(error), "stage": "start"})
        return
    for number, shape in enumerate(job.shapes):
        _compile(folder, number, devices, shape, job.flags, version)


def _compile(
    folder: Path,
    number: int,
    devices: list[object],
    shape: tuple[int, int],
    flags: dict[str, object],
    version: str,
) -> None:
    started = time.monotonic()
    target = folder / f"result{number}.json"
    try:
        program = (folder / f"program{number}").read_bytes()
        compiled, notes = _compiled(devices, program, shape, flags)
    except MemoryError:
        raise
    except Exception as error:  # compilers raise several unrelated classes
        _write(target, {"error": _message(error), "stage": "compile"})
        return
    # The module first: when its result file appears, the parent considers both complete.
    (folder / f"hlo{number}.txt").write_text(compiled.hlo)
    seconds = time.monotonic() - started
    result = {"seconds": seconds, "memory": compiled.memory, "version": version, "notes": notes}
    _write(target, result)


def _compiled(
    devices: list[object], program: bytes, shape: tuple[int, int], flags: dict[str, object]
) -> tuple[Any, list[str]]:
    """Compile a program; return it with a note for each workaround used."""
    from .pjrt_compat import compile_absent, register_stand_in

    try:
        return compile_absent(devices, program, *shape, flags), []
    except MemoryError:
        raise
    except Exception as error:
        library = _NO_LIBRARY.search(_message(error))
        if library and register_stand_in(library[1]):
            return _compiled(devices, program, shape, flags)
        detour = _detour(_message(error), flags)
        if detour is None:
            raise
    options, note = detour
    compiled, notes = _compiled(devices, program, shape, {**flags, **options})
    return compiled, [note, *notes]


def _detour(message: str, flags: dict[str, object]) -> tuple[dict[str, object], str] | None:
    """Return options that may help a rejected program compile, and a note; none the user set."""
    for part, options, note in DETOURS:
        if part in message and not options.keys() & flags.keys():
            return options, note
    return None


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _write(path: Path, data: dict[str, object]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(data))
    partial.replace(path)


if __name__ == "__main__":
    begin_worker()
    # The plug-in reads its settings when loaded; those of the user's shell must not reach it.
    os.environ["JAX_PLATFORMS"] = "cpu"
    run(Path(sys.argv[1]))
