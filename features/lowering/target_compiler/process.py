"""Compile for an absent device in a worker process, with limits on time and memory.

Programs and results are files in a job folder (``worker.py``), because modules take megabytes and
results from before a crash are kept.
"""

from __future__ import annotations

import json
import re
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ....common.errors import CompilerError, CompilerStartError, LoweringError
from ....common.progress import waiting
from ....common.worker_process import WorkerProcess, module_command
from ....common.worker_process import memory_bytes as machine_memory_bytes
from .target import CompileTarget
from .worker import Job

#: Environment variables of the user's shell that would affect the compiled program.
_UNSET = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORM_NAME", "CUDA_VISIBLE_DEVICES")
#: Keeps libtpu from searching for a TPU on this machine and from locking it for one process.
_SET = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
#: Messages of allocators and runtimes that run out of memory.
_OUT_OF_MEMORY = re.compile(
    r"bad_alloc|cannot allocate memory|out of memory|memoryerror|failed to allocate|mmap\(",
    re.IGNORECASE,
)
#: Error for a program that does not fit into the device's memory.
_DEVICE_MEMORY = re.compile(r"RESOURCE_EXHAUSTED")
#: Seconds between checks of the job folder; compiling takes at least seconds.
_POLL_S = 0.05


@dataclass(frozen=True)
class CompileSettings:
    """Limits and options of a compilation.

    Attributes:
        timeout_s: Seconds after which the compiler is considered stuck.
        memory_bytes: Limit on private memory of the compile process; 0 for four fifths of the
            machine's.
        flags: Options of XLA by name without dashes, in addition to the target's.
        progress: Whether to show progress on a terminal.
        repeats: Whether a program with many equal layers is compiled with few of them.
    """

    timeout_s: float = 3600.0
    memory_bytes: int = 0
    flags: Mapping[str, object] = field(default_factory=dict)
    progress: bool = True
    repeats: bool = True


@dataclass(frozen=True)
class CompiledModule:
    """A program compiled for a target.

    Attributes:
        hlo: Optimised, scheduled module text.
        seconds: Compile time, without the start of the process.
        memory: The compiler's memory statistics in bytes, by name.
        version: The version that the compiler reports.
        notes: Deviations from the requested compilation, if any.
    """

    hlo: str
    seconds: float
    memory: dict[str, int]
    version: str
    notes: tuple[str, ...] = ()


def compile_programs(
    programs: Sequence[bytes],
    shapes: Sequence[tuple[int, int]],
    target: CompileTarget,
    settings: CompileSettings | None = None,
    *,
    origin: str = "",
) -> list[CompiledModule | LoweringError]:
    """Compile programs for an absent device, one after the other in one process.

    Args:
        programs: StableHLO as text or bytecode.
        shapes: Replicas and partitions of each.
        target: Target device.
        settings: Limits and options.
        origin: Origin of the program, for messages.

    Returns:
        The module or the error for each program. A crash is attributed to the program being
        compiled; later ones are compiled in a new process.

    Raises:
        CompilerError: The compiler does not start, or exceeded its time limit.
    """
    settings = settings or CompileSettings()
    results: list[CompiledModule | LoweringError] = []
    # Each process yields at least one result, if only a crash, so the loop ends.
    while len(results) < len(programs):
        rest = slice(len(results), None)
        results += _one_process(programs[rest], shapes[rest], target, settings, origin)
    return results


def _one_process(
    programs: Sequence[bytes],
    shapes: Sequence[tuple[int, int]],
    target: CompileTarget,
    settings: CompileSettings,
    origin: str,
) -> list[CompiledModule | LoweringError]:
    """Compile in one process, up to the end or the program that crashes it."""
    # Four fifths: the parent process and the page cache need the rest.
    memory_bytes = settings.memory_bytes or int(0.8 * machine_memory_bytes())
    # Removed with everything in it, however the worker ends.
    with tempfile.TemporaryDirectory(prefix="opcast-compile-") as name:
        folder = Path(name)
        for number, program in enumerate(programs):
            (folder / f"program{number}").write_bytes(program)
        job = Job(
            platform=target.platform,
            # One topology for all: each program uses as many of its devices as it needs.
            topology=target.topology(max(r * p for r, p in shapes)),
            target_config=target.config,
            folder=str(target.compiler.folder or ""),
            shapes=tuple(shapes),
            # The user's flags win over the target's.
            flags={**dict(target.flags), **settings.flags},
        )
        (folder / "job.json").write_text(json.dumps(asdict(job)))
        with WorkerProcess(
            _command(folder),
            variables=_SET,
            without=_UNSET,
            memory_bytes=memory_bytes,
            messages=False,
        ) as worker:
            _wait(worker, folder, target, settings, len(programs), origin)
            results = list(_results(folder, len(programs), origin, target))
            # The program after the last result is the one that crashed the process.
            if len(results) < len(programs):
                results.append(_crash(worker, memory_bytes, origin, target))
        return results


def _command(folder: Path) -> list[str]:
    return module_command(f"{__package__}.worker", str(folder))


def _wait(
    worker: WorkerProcess,
    folder: Path,
    target: CompileTarget,
    settings: CompileSettings,
    count: int,
    origin: str,
) -> None:
    # The limit applies per program: it restarts whenever a result appears.
    started, done = time.monotonic(), 0
    # A TPU compiler may take minutes.
    what = f"compiling for {target.device} (lowering fused takes seconds, without a compiler)"
    with waiting(what, count, settings.progress) as show:
        while worker.status() is None:
            time.sleep(_POLL_S)
            while done < count and (folder / f"result{done}.json").is_file():
                started, done = time.monotonic(), done + 1
            show(done)
            if time.monotonic() - started > settings.timeout_s:
                raise CompilerError(
                    f"the compiler for {target.device} did not end within "
                    f"{settings.timeout_s:.0f} s",
                    where=origin,
                    hint="more time: opcast lower --compile-timeout; or use another lowering",
                )


def _results(
    folder: Path, count: int, origin: str, target: CompileTarget
) -> Iterator[CompiledModule | LoweringError]:
    # Results appear in order: the process ended at the first missing one.
    for number in range(count):
        path = folder / f"result{number}.json"
        if not path.is_file():
            return
        data = json.loads(path.read_text())
        if data.get("stage") == "start":
            raise CompilerStartError(
                f"the compiler for {target.device} does not start: {_first_line(data['error'])}",
                hint=f"install it anew: opcast compilers install {target.compiler.platform}",
            )
        if "error" in data:
            yield _refusal(data["error"], origin, target)
        else:
            hlo = (folder / f"hlo{number}.txt").read_text()
            yield CompiledModule(
                hlo, data["seconds"], data["memory"], data["version"], tuple(data.get("notes", ()))
            )


def _refusal(error: str, origin: str, target: CompileTarget) -> LoweringError:
    hint = "another lowering, such as --lowering op, works without the compiler"
    if _DEVICE_MEMORY.search(error):
        hint = f"it does not fit into the memory of {target.device}: use smaller sizes or more "
        hint += "devices, or another lowering"
    what = f"the compiler for {target.device} refuses the program: {_first_line(error)}"
    return LoweringError(what, where=origin, hint=hint)


def _crash(
    worker: WorkerProcess, memory_bytes: int, origin: str, target: CompileTarget
) -> CompilerError:
    status, how = worker.ending()
    errors = worker.errors()
    # Linux's out-of-memory killer sends SIGKILL.
    if status == -signal.SIGKILL or _OUT_OF_MEMORY.search(errors):
        limit = f"{memory_bytes / 2**30:.1f} GiB"
        return CompilerError(
            f"the compiler for {target.device} ran out of memory (limit {limit})",
            where=origin,
            hint="give it more with opcast lower --compile-memory, or use another lowering",
        )
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    # glog marks fatal lines with F and the date; the stack traces after them are less useful.
    telling = [line for line in lines if re.match(r"F\d{4} |.*(Check failed|Error:)", line)]
    last = (telling or lines)[-1:]
    return CompilerError(
        f"the compiler for {target.device} crashed ({how}){': ' if last else ''}"
        f"{last[0][:300] if last else ''}",
        where=origin,
        hint="use another lowering, such as --lowering op",
    )


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:500] if lines else text[:500]
