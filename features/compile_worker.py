"""The compile process: reads a job folder, compiles its programs one by one, writes the results.

It is started by ``compile_process.py`` and holds what must not be in the main process: the plug-ins
of absent devices, with their start-up time, their messages and their crashes.

A job folder holds ``job.json`` with the keys of :class:`Job` and ``program<i>`` files; of each
program ``result<i>.json`` and ``hlo<i>.txt`` are made, or ``result<i>.json`` with an ``error``.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .parent import die_with_parent

#: Faults of the compiler that other options avoid: words of its message, the options, and a note.
#: Without timing on a device it takes default tiles for Triton's products, which odd sizes refuse.
DETOURS: tuple[tuple[str, dict[str, Any], str], ...] = (
    (
        "find output tile sizes",
        {"xla_gpu_enable_triton_gemm": False},
        "compiled without Triton's products, for which the compiler found no tiles",
    ),
)


@dataclass(frozen=True)
class Job:
    """What to compile for what.

    Attributes:
        platform: ``cuda`` or ``tpu``.
        topology: See :func:`opcast.features._pjrt_compat.open_devices`.
        target_config: See there, too.
        folder: Folder with the plug-in's packages; empty if they are in the environment.
        shapes: Replicas and partitions of each program.
        flags: Options of XLA.
        memory_bytes: Most private memory of the process; 0 for no limit.
    """

    platform: str
    topology: str
    target_config: str = ""
    folder: str = ""
    shapes: tuple[tuple[int, int], ...] = ((1, 1),)
    flags: dict[str, Any] = field(default_factory=dict)
    memory_bytes: int = 0


def run(folder: Path) -> None:
    """Compile all programs of a job folder."""
    data = json.loads((folder / "job.json").read_text())
    job = Job(**{**data, "shapes": tuple(tuple(shape) for shape in data["shapes"])})
    if job.memory_bytes:
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        limit = job.memory_bytes
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    if job.folder:
        sys.path.append(job.folder)
    try:
        from ._pjrt_compat import compiler_version, open_devices

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
    devices: list[Any],
    shape: tuple[int, int],
    flags: dict[str, Any],
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
    (folder / f"hlo{number}.txt").write_text(compiled.hlo)
    seconds = time.monotonic() - started
    found = {"seconds": seconds, "memory": compiled.memory, "version": version, "notes": notes}
    _write(target, found)


def _compiled(
    devices: list[Any], program: bytes, shape: tuple[int, int], flags: dict[str, Any]
) -> tuple[Any, list[str]]:
    """The module of a program, with a note for each detour that it took."""
    from ._pjrt_compat import compile_absent

    try:
        return compile_absent(devices, program, *shape, flags), []
    except MemoryError:
        raise
    except Exception as error:
        detour = _detour(_message(error), flags)
        if detour is None:
            raise
    options, note = detour
    compiled, notes = _compiled(devices, program, shape, {**flags, **options})
    return compiled, [note, *notes]


def _detour(message: str, flags: dict[str, Any]) -> tuple[dict[str, Any], str] | None:
    """Options, and a note, with which a refused program may go; none that the user has set."""
    for words, options, note in DETOURS:
        if words in message and not options.keys() & flags.keys():
            return options, note
    return None


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _write(path: Path, data: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(data))
    partial.replace(path)


if __name__ == "__main__":
    die_with_parent()
    # The plug-in reads its settings when it is loaded; nothing of the user's shell may reach it.
    os.environ["JAX_PLATFORMS"] = "cpu"
    run(Path(sys.argv[1]))
