"""The report on devices that are not here: programs of the zoo, lowered by each one's compiler."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .features.errors import CompilerStartError, LoweringError, OpcastError

if TYPE_CHECKING:
    from rich.console import Console

    from .device_checks import Check
    from .features.device import DeviceSpec
    from .features.kernel import LoweredProgram
    from .features.reader import SourceProgram
    from .predict.predictor import Predictor

#: What is reported unless told otherwise.
DEVICES = (
    "h100-sxm", "a100-sxm-80gb", "v100-sxm", "l4", "tpu-v3", "tpu-v4", "tpu-v5e", "tpu-v5p",
)  # fmt: skip
#: Programs by name: family of the zoo and settings, of sizes that compile in seconds.
PROGRAMS: dict[str, str] = {
    "mlp": "mlp batch=4096 width=4096 layers=4 dtype=bf16",
    "mlp-train": "mlp batch=256 width=1024 layers=4 mode=train",
    "dlrm-train": "dlrm batch=1024 mode=train",
    "gnn-train": "gnn mode=train",
    "lstm-train": "lstm layers=1 dim=512 seq=32 mode=train",
    "llama-decode": "llama_decode layers=8 batch=8 dtype=bf16",
    "convnet-1d": "convnet_1d batch=8",
    "vit": "vit layers=12 batch=8 dtype=bf16",
    "moe": "moe layers=3 seq=256",
    "ssm": "ssm layers=3 dim=512 seq=256",
    "bert-train": "bert layers=4 batch=8 mode=train",
    "llama-train": "llama layers=4 batch=2 seq=512 dtype=bf16 mode=train",
    "resnet50-train": "resnet depth=50 batch=32 mode=train",
}


@dataclass(frozen=True)
class DeviceRow:
    """A program on a device. Times are of one run.

    Attributes:
        program: Name of the program.
        device: Name of the device.
        lowering: ``xla``, ``fused`` or ``op``.
        lower_s: Seconds that the lowering took now; milliseconds if it was in the cache.
        compile_s: Seconds that the compiler took when it made what is in the cache.
        kernels: Kernels that take time.
        executions: Their executions.
        roofline_us: Program time of kernels at roofline and floor.
        learned_us: Program time of kernels as the shipped model says.
        learned_lo_us: Lower end of its 90 % interval.
        learned_hi_us: Upper end.
        compiler_us: The same of the TPU compiler's own estimates, the roofline where it gives none;
            ``None`` for other platforms.
        least_us: Program time that physics allows, without launch and dispatch.
        undercut: Kernels that the model says to be faster than physics allows.
        peak_memory_bytes: Peak device memory.
        memory_source: ``compiler`` or ``liveness``.
        fits: Whether that is within the device's memory; ``None`` if it is not known.
        error: Why there are no figures; empty if there are.
    """

    program: str
    device: str
    lowering: str = ""
    lower_s: float = 0.0
    compile_s: float = 0.0
    kernels: int = 0
    executions: float = 0.0
    roofline_us: float = 0.0
    learned_us: float = 0.0
    learned_lo_us: float = 0.0
    learned_hi_us: float = 0.0
    compiler_us: float | None = None
    least_us: float = 0.0
    undercut: int = 0
    peak_memory_bytes: float = 0.0
    memory_source: str = ""
    fits: bool | None = None
    error: str = ""


def run_device_report(
    console: Console,
    programs: Sequence[str] = (),
    devices: Sequence[str] = (),
    *,
    lowering: str = "xla",
    out: Path | None = None,
) -> tuple[list[DeviceRow], list[Check]]:
    """Lower, predict and check programs on devices, print and write the figures.

    What a compiler made is cached, so a report that was stopped goes on where it was.

    Args:
        console: Where to print.
        programs: Names of :data:`PROGRAMS`; none for all.
        devices: Names or device files; none for :data:`DEVICES`.
        lowering: Of all programs.
        out: File for the figures: Markdown if it ends in ``.md``, else JSON.

    Raises:
        CompilerStartError: A compiler is installed, but does not start.
        OpcastError: A program or device is not known, or a compiler is missing.
    """
    from .datagen.progress import tracked
    from .device_checks import physics_checks
    from .device_tables import markdown, print_report
    from .features.files import write_text
    from .predict.devices import resolve_device
    from .predict.predictor import load

    chosen = known_programs(programs)
    predictor = load()
    specs = [resolve_device(name, predictor.devices) for name in devices or DEVICES]
    _require_compilers(specs, lowering)
    count = len(chosen) * len(specs)
    found = rows(predictor, chosen, specs, lowering)
    table = list(tracked(found, count, "programs on devices"))
    checks = physics_checks(predictor, table, specs, lowering)
    print_report(console, table, checks)
    if out is not None:
        data = {"rows": [asdict(r) for r in table], "checks": [asdict(c) for c in checks]}
        text = markdown(table, checks) if out.suffix == ".md" else json.dumps(data, indent=1)
        write_text(out, text)
    return table, checks


def known_programs(names: Sequence[str]) -> dict[str, str]:
    """Programs of the report by name, all without names.

    Raises:
        OpcastError: A name is not known.
    """
    for name in names:
        if name not in PROGRAMS:
            choices = ", ".join(PROGRAMS)
            raise OpcastError(f"the report has no program {name!r}", hint=f"it has: {choices}")
    return {name: PROGRAMS[name] for name in names or PROGRAMS}


def rows(
    predictor: Predictor,
    programs: dict[str, str],
    devices: Sequence[DeviceSpec],
    lowering: str = "xla",
) -> Iterator[DeviceRow]:
    """A row for each program and device, one after the other."""
    for name, text in programs.items():
        source = build_program(text)
        for device in devices:
            yield device_row(predictor, name, source, device, lowering)


def build_program(text: str, **changed: Any) -> SourceProgram:
    """A program of the zoo.

    Args:
        text: Family and settings, as in :data:`PROGRAMS`.
        changed: Settings to take instead.
    """
    from .datagen.zoo import build, parse_settings
    from .features.reader import read_program

    family, *pairs = text.split()
    settings = {**parse_settings(family, pairs), **changed}
    return read_program(build(family, **settings).mlir())


def device_row(
    predictor: Predictor,
    name: str,
    source: SourceProgram,
    device: DeviceSpec,
    lowering: str = "xla",
) -> DeviceRow:
    """Figures of a program on a device, or why there are none.

    Raises:
        CompilerStartError: The compiler is installed, but does not start.
    """
    from .features.lowering import lower

    start = time.perf_counter()
    try:
        lowered = lower(source, lowering, cache=predictor.cache, device=device)
    except CompilerStartError:
        raise
    except LoweringError as error:
        return DeviceRow(name, device.name, error=error.what)
    seconds = time.perf_counter() - start
    return replace(figures(predictor, name, lowered, device), lower_s=seconds)


def figures(
    predictor: Predictor, name: str, lowered: LoweredProgram, device: DeviceSpec
) -> DeviceRow:
    """Figures of a lowered program."""
    from .features.roofline import least_seconds
    from .models.schedule_cost import schedule_cost

    model = predictor.model_for(device)
    kernels = lowered.kernels
    learned = model.predict_kernels(kernels, device)
    by_model, program = model.predict_in_program(lowered, device, learned)
    least = least_seconds(kernels, device)
    takes = np.array([k.takes_time for k in kernels], bool)
    undercut = takes & (by_model.latency < least * (1 - 1e-9))
    peak, memory = lowered.peak_memory_bytes, device.memory_bytes
    return DeviceRow(
        name,
        device.name,
        lowered.lowering,
        compile_s=lowered.compile_seconds,
        kernels=int(takes.sum()),
        executions=float(sum(k.multiplicity for k in kernels if k.takes_time)),
        roofline_us=_physics_us(predictor, lowered, device),
        learned_us=program.latency * 1e6,
        learned_lo_us=program.lo * 1e6,
        learned_hi_us=program.hi * 1e6,
        compiler_us=_compiler_us(predictor, lowered, device),
        least_us=schedule_cost(least, lowered, device).makespan * 1e6,
        undercut=int(undercut.sum()),
        peak_memory_bytes=peak,
        memory_source=lowered.memory_source,
        fits=peak <= memory if memory else None,
    )


def _physics_us(
    predictor: Predictor,
    lowered: LoweredProgram,
    device: DeviceSpec,
    cycles: np.ndarray | None = None,
) -> float:
    """Program time in µs with rooflines for kernels, or with estimated cycles where there are."""
    from .models.roofline import RooflineEstimator

    found = RooflineEstimator().predict(lowered.kernels, device)
    if cycles is not None:
        estimated = np.where(cycles > 0, cycles / device.clock_hz, found.latency)
        found = replace(found, latency=estimated)
    # The kernels alone differ: launches and overlap are those of the learned prediction.
    program_model = predictor.model_for(device).program_model
    wall = program_model.predict(found.latency, lowered, device, found.lo, found.hi)
    return wall.latency * 1e6


def _compiler_us(predictor: Predictor, lowered: LoweredProgram, device: DeviceSpec) -> float | None:
    cycles = np.array([k.cycles for k in lowered.kernels], float)
    if device.platform != "tpu" or not device.clock_hz or not cycles.any():
        return None
    return _physics_us(predictor, lowered, device, cycles)


def _require_compilers(devices: Sequence[DeviceSpec], lowering: str) -> None:
    """Say at once that a compiler is missing, not once for each program."""
    from .features.compile_target import target_of

    if lowering == "xla":
        for device in devices:
            target_of(device)
