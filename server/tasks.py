"""Tasks on programs and kernels that children of the fork server execute."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypedDict

from ..common.errors import OpcastError, ProgramError
from ..common.interval import latency_fields
from ..common.types import JsonMapping
from ..datagen.zoo import Setting, build, parse_settings
from ..features.ir.reader import SourceProgram, read_program
from ..features.ir.torch.program import TorchProgram
from ..features.lowering.options import LoweringOptions
from ..features.lowering.target_compiler.process import CompileSettings
from ..predict.designs import changed_device
from ..predict.program.case import ProgramCase
from ..predict.program.predictor import Predictor
from .errors import RequestError, error_data

#: First bytes of zip archives, which torch.export.save writes.
_ZIP = b"PK\x03\x04"
#: Folder of the package, which answers must not contain.
_ROOT = Path(__file__).parents[1]

logger = logging.getLogger(__name__)
Predictors = Mapping[str, Predictor]


class Task(TypedDict, total=False):
    """A task of a child process: ``kind`` and limits, and keys that depend on the kind."""

    kind: str
    request: str
    model: str
    device: str
    timeout_s: float
    memory_bytes: int
    allow_compile: bool
    allow_torch: bool
    lowering: str
    fallback: str
    trip_count: int | None
    strict: bool
    workload: str
    settings: Mapping[str, Setting]
    points: Sequence[JsonMapping]


def predict_program(predictors: Predictors, task: Task, payload: bytes) -> dict[str, object]:
    """Predict a program, as for ``opcast predict --json``.

    Raises:
        OpcastError: The program, device or lowering is not usable.
        RequestError: The program would have to be compiled, which is not allowed.
    """
    predictor = predictors[task["model"]]
    source, options = _read(task, payload)
    return predictor.answer(ProgramCase(source, options, strict=task["strict"])).to_dict()


def report(predictors: Predictors, task: Task, payload: bytes) -> str:
    """Make the page of a program, as for ``opcast report program``.

    Raises:
        OpcastError: The program, device or lowering is not usable.
        RequestError: The program would have to be compiled, which is not allowed.
    """
    from ..predict.page.report import ReportOptions, report_page

    source, options = _read(task, payload)
    return report_page(predictors[task["model"]], source, ReportOptions(options))


def what_if(predictors: Predictors, task: Task, payload: bytes) -> dict[str, object]:
    """Predict a program on modified devices, or a workload with modified settings.

    Each point is the output of ``opcast predict --json`` without the kernels, or an error.

    Raises:
        OpcastError: As for :func:`predict_program`.
    """
    predictor = predictors[task["model"]]
    read: dict[str, tuple[SourceProgram, LoweringOptions]] = {}

    def one(point: JsonMapping) -> dict[str, object]:
        key = json.dumps(point["settings"], sort_keys=True)
        if key not in read:
            own: Task = {**task, "settings": {**task.get("settings", {}), **point["settings"]}}
            read[key] = _read(own, payload)
        source, options = read[key]
        if point["design"]:
            # Lowered again, because XLA's fusions depend on the device's rates.
            options = replace(options, device=changed_device(task["device"], point["design"]))
        case = ProgramCase(source, options, strict=task["strict"], power_cap_w=point["power_cap_w"])
        found = predictor.answer(case).to_dict()
        del found["kernels"]
        return found

    answers = []
    for point in task["points"]:
        try:
            answers.append(one(point))
        except OpcastError as error:
            answers.append(error_data(error))
    return {"points": answers}


def _source(task: Task, program: bytes) -> SourceProgram:
    """Read a program; a PyTorch export only if the server allows it.

    Raises:
        ProgramError: It cannot be read.
        RequestError: It is a PyTorch export, which is not allowed.
    """
    trips = task["trip_count"]
    if not program.startswith(_ZIP):
        return read_program(program, trip_counts=trips)
    if not task.get("allow_torch"):
        raise RequestError(
            403,
            "this server does not load PyTorch files (.pt2), because loading one may run code",
            where="program",
            hint="start it with: opcast serve --allow-torch; or send StableHLO (docs/torch.md)",
        )
    with TemporaryDirectory() as folder:
        path = Path(folder, "program.pt2")
        path.write_bytes(program)
        return read_program(TorchProgram(path, origin=path.name), trip_counts=trips)


def _program(task: Task, payload: bytes) -> bytes:
    """The program of a request: its payload, or a workload of the zoo.

    Raises:
        OpcastError: There is no such workload or setting.
    """
    if not task.get("workload"):
        return payload
    pairs = [f"{name}={value}" for name, value in task["settings"].items()]
    made = build(task["workload"], **parse_settings(task["workload"], pairs)).serialize("text")
    # Source locations contain paths of the package, which clients must not see.
    return made.replace(f"{_ROOT}/".encode(), b"opcast/")


def _read(task: Task, payload: bytes) -> tuple[SourceProgram, LoweringOptions]:
    """Read a program, and choose a lowering that the server allows.

    Raises:
        OpcastError: There is no such workload or setting.
        ProgramError: The program cannot be read.
        RequestError: The program would have to be compiled, which is not allowed.
    """
    source = _source(task, _program(task, payload))
    compiled = source.kind == "hlo" and source.program.is_scheduled
    lowering = str(task["lowering"])
    # A compiler may run for minutes on untrusted code; scheduled HLO needs none.
    if not (task["allow_compile"] or compiled):
        if lowering == "xla":
            raise RequestError(
                403,
                "this server does not compile programs",
                where="lowering",
                hint="ask for fused or op, or start it with --allow-compile",
            )
        # ``auto`` could choose the compiler.
        lowering = "fused" if lowering == "auto" else lowering
    return source, LoweringOptions(
        lowering, task["device"], task["trip_count"], task["fallback"], _limits(task)
    )


def predict_kernels(predictors: Predictors, task: Task, payload: bytes) -> dict[str, object]:
    """Predict kernels given as HLO text, by column.

    Raises:
        OpcastError: A text is not a kernel, or the device is unknown.
    """
    from ..features.kernels.extract import kernel_from_ir
    from ..predict.devices import resolve_device
    from ..predict.program.prediction import check_known

    predictor, kernels = predictors[task["model"]], []
    # One by one, so that an error names the row.
    for row, text in enumerate(json.loads(payload)):
        try:
            kernels.append(kernel_from_ir(text))
        except OpcastError as error:
            # The same class, because it determines the status.
            raise type(error)(error.what, where=f"kernel {row}", hint=error.hint) from None
        # Limits of the process, handled in ``fork_server.answer``.
        except (MemoryError, RecursionError):
            raise
        except Exception as error:
            logger.exception("unexpected error in a kernel's text")
            what = f"no kernel: {type(error).__name__}: {error}"[:300]
            raise ProgramError(what, where=f"kernel {row}") from None
    spec = resolve_device(task["device"], predictor.devices)
    estimates = predictor.model_for(spec).predict_kernels(kernels, spec)
    check_known(kernels, estimates.source)
    return {
        **{
            k: v.tolist()
            for k, v in latency_fields(estimates.latency, estimates.lo, estimates.hi).items()
        },
        "bound": estimates.bound.tolist(),
        "source": estimates.source.tolist(),
        "in_domain": estimates.in_domain.tolist(),
    }


def _limits(task: Task) -> CompileSettings:
    """Limits of a target compiler, with less time than the request, so that it can report."""
    return CompileSettings(
        timeout_s=0.9 * task["timeout_s"], memory_bytes=task["memory_bytes"], progress=False
    )
