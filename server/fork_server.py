"""The fork server: a process that holds the models and forks a child for each task.

It parses nothing untrusted itself: programs, kernels and plans are read by its children.
``sandbox.py`` starts it with a socket, over which it passes a connection for each task. The kernel
enforces limits of memory and time on each child, so whatever a program does to a native parser ends
with that child. A fork takes milliseconds; importing the packages and loading the models takes
seconds.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import resource
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypedDict

from ..common.child_process import begin_worker, die_with_parent, limit_memory
from ..common.errors import LoweringError, OpcastError, PlanError, ProgramError
from ..common.interval import latency_fields
from ..features.devices.catalogue import device_names, find_device
from ..features.ir.reader import SourceProgram, read_program
from ..features.lowering.options import LoweringOptions
from ..features.lowering.target_compiler.process import CompileSettings
from ..predict.program.predictor import Predictor, ProgramCase, load
from .errors import RequestError, error_data, status_of
from .schemas import (
    ServingBody,
    SimulateQuery,
    SimulateServingQuery,
    StepBody,
    build,
    example,
)

if TYPE_CHECKING:
    from ..models.operators import OpModel

logger = logging.getLogger(__name__)

#: Headers on a task's connection, in network byte order: 32-bit length of the JSON and 64-bit
#: length of the payload; status and 64-bit length of a reply.
TASK, REPLY = struct.Struct("!IQ"), struct.Struct("!HQ")
READY = b"ready"
#: Asked once of each kind of device before the first fork, with a step and a deployment: what is
#: imported and read lazily by an answer is then shared by all children. It has a product, a
#: convolution, a reduction and a pass over elements.
_WARM = b"""module {
func.func public @main(
  %a: tensor<64x64xbf16>, %i: tensor<1x8x8x64xbf16>, %k: tensor<3x3x64x64xbf16>
) -> (tensor<64xbf16>, tensor<1x8x8x64xbf16>) {
  %0 = stablehlo.dot_general %a, %a, contracting_dims = [1] x [0]
    : (tensor<64x64xbf16>, tensor<64x64xbf16>) -> tensor<64x64xbf16>
  %1 = stablehlo.tanh %0 : tensor<64x64xbf16>
  %2 = stablehlo.constant dense<0.0> : tensor<bf16>
  %3 = stablehlo.reduce(%1 init: %2) applies stablehlo.add across dimensions = [1]
    : (tensor<64x64xbf16>, tensor<bf16>) -> tensor<64xbf16>
  %4 = stablehlo.convolution(%i, %k)
    dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f], window = {pad = [[1, 1], [1, 1]]}
    {batch_group_count = 1 : i64, feature_group_count = 1 : i64}
    : (tensor<1x8x8x64xbf16>, tensor<3x3x64x64xbf16>) -> tensor<1x8x8x64xbf16>
  return %3, %4 : tensor<64xbf16>, tensor<1x8x8x64xbf16>
}
}"""
#: Time that one answer may take then. Engineering estimate.
_WARM_S = 60.0

Predictors = Mapping[str, Predictor]
Reply = tuple[int, bytes]


class Task(TypedDict, total=False):
    """What a child is asked: all have ``kind`` and limits, the others depend on the kind."""

    kind: str
    request: str
    model: str
    device: str
    timeout_s: float
    memory_bytes: int
    allow_compile: bool
    lowering: str
    fallback: str
    trip_count: int | None
    strict: bool


def answer(predictors: Predictors, task: Task, payload: bytes) -> Reply:
    """Status and JSON of a task; whatever it raises becomes an answer.

    Args:
        predictors: Loaded models by name.
        task: ``kind`` (``program``, ``report``, ``kernels`` or ``simulate``) and its parameters.
        payload: The program, or JSON of a request.
    """
    try:
        result = _KINDS[task["kind"]](predictors, task, payload)
        return (200, result.encode()) if isinstance(result, str) else _reply(result)
    except OpcastError as error:
        return status_of(error), json.dumps(error_data(error)).encode()
    # RLIMIT_DATA makes allocations fail: Python raises a MemoryError, native code mostly aborts.
    except MemoryError:
        return _refused(
            "it needs more memory than the server allows",
            "split it, or start the server with more: opcast serve --memory",
        )
    except RecursionError:
        return _refused("it is nested too deeply", "call fewer functions within each other")
    except Exception as error:  # a reader met something unsupported: the log has the rest
        name = task.get("request", "")
        logger.exception("unexpected error in a %s task of request %s", task["kind"], name)
        # 422, not 500: the payload is untrusted, and most such errors are its fault.
        return _refused(
            f"it cannot be processed: {type(error).__name__}: {error}"[:300],
            "is it complete? If it runs elsewhere, please report it",
        )


def _reply(result: dict[str, object]) -> Reply:
    try:
        return 200, json.dumps(result, allow_nan=False).encode()
    except ValueError:  # JSON has no infinity
        return _refused("its sizes give figures that are not finite", "give smaller sizes")


def predict_program(predictors: Predictors, task: Task, payload: bytes) -> dict[str, object]:
    """The prediction of a program, as ``opcast predict --json`` prints it.

    Raises:
        OpcastError: The program, device or lowering is not usable.
        RequestError: The program would have to be compiled, which is not allowed.
    """
    predictor = predictors[task["model"]]
    source, options = _read(task, payload)
    return predictor.answer(ProgramCase(source, options, strict=task["strict"])).to_dict()


def report(predictors: Predictors, task: Task, payload: bytes) -> str:
    """The page of a program, as ``opcast report program`` writes it.

    Raises:
        OpcastError: The program, device or lowering is not usable.
        RequestError: The program would have to be compiled, which is not allowed.
    """
    from ..predict.page.report import ReportOptions, report_page

    source, options = _read(task, payload)
    return report_page(predictors[task["model"]], source, ReportOptions(options))


def _read(task: Task, payload: bytes) -> tuple[SourceProgram, LoweringOptions]:
    """A program, and how the server may lower it.

    Raises:
        ProgramError: The program cannot be read.
        RequestError: The program would have to be compiled, which is not allowed.
    """
    source = read_program(payload, trip_counts=task["trip_count"])
    compiled = source.kind == "hlo" and source.program.is_scheduled
    lowering = str(task["lowering"])
    # A compiler runs for minutes on code that a stranger sent; scheduled HLO needs none.
    if not (task["allow_compile"] or compiled):
        if lowering == "xla":
            raise RequestError(
                403,
                "this server does not compile programs",
                where="lowering",
                hint="ask for fused or op, or start it with --allow-compile",
            )
        # ``auto`` may mean the compiler, which must not run here.
        lowering = "fused" if lowering == "auto" else lowering
    return source, LoweringOptions(
        lowering, task["device"], task["trip_count"], task["fallback"], _limits(task)
    )


def predict_kernels(predictors: Predictors, task: Task, payload: bytes) -> dict[str, object]:
    """Columns of predictions of kernels given as HLO text.

    Raises:
        OpcastError: A text is not a kernel, or the device is unknown.
    """
    from ..features.kernels.extract import kernel_from_ir
    from ..predict.devices import resolve_device
    from ..predict.program.prediction import check_known

    predictor, kernels = predictors[task["model"]], []
    # One by one, so that an error can name the row.
    for row, text in enumerate(json.loads(payload)):
        try:
            kernels.append(kernel_from_ir(text))
        except OpcastError as error:
            # The class decides the status, so it is kept.
            raise type(error)(error.what, where=f"kernel {row}", hint=error.hint) from None
        # Limits of this process, not faults of the row: handled where all tasks end.
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


def simulate(predictors: Predictors, task: Task, payload: bytes) -> dict[str, object]:
    """A step on a cluster, as ``opcast simulate --json`` prints it.

    Raises:
        OpcastError: The workload, plan, cluster or model does not fit.
    """
    from ..predict.cluster.step_case import StepCase
    from ..simulate.step.workload import make_workload, read_by_model

    given = SimulateQuery.model_validate_json(payload).model_dump()
    case = build(StepCase, given)
    # Names of workloads alone: no file of the server is read.
    work = read_by_model(make_workload(given["workload"], case.settings), case.settings)
    case = replace(case, speed={int(rank): value for rank, value in case.speed.items()})
    return case.predict(work, _operators(predictors, task)).to_dict()


def simulate_serving(predictors: Predictors, task: Task, payload: bytes) -> dict[str, object]:
    """A deployment under a load, as ``opcast simulate-serving --json`` prints it.

    Raises:
        OpcastError: The model, plan, load or device does not fit.
    """
    from ..predict.cluster.deployment import deployment_of
    from ..predict.cluster.serving import ServingPredictor
    from ..predict.cluster.serving_case import ServingCase
    from ..predict.cluster.serving_load import parse_slo

    case = build(ServingCase, SimulateServingQuery.model_validate_json(payload).model_dump())
    load = case.load
    loads = [name for name in ("concurrency", "batch", "rate") if getattr(load, name)]
    if len(loads) > 1:
        raise PlanError(f"{' and '.join(loads)} exclude each other", hint="one of them")
    if not load.rate and load.burstiness != 1.0:
        raise PlanError("burstiness needs a rate", where="burstiness", hint="give rate")
    deployment = deployment_of(case)
    predictor = ServingPredictor(_operators(predictors, task))
    found = predictor.predict(deployment, load, slo=parse_slo(case.judged.slo))
    return found.to_dict(case.judged.price)


def _operators(predictors: Predictors, task: Task) -> OpModel | None:
    """The operators of a served model; ``None`` for rooflines."""
    return None if task["model"] == "roofline" else predictors[task["model"]].operators


def _limits(task: Task) -> CompileSettings:
    """What a target compiler gets: less time than the request, so that it can be told."""
    return CompileSettings(
        timeout_s=0.9 * task["timeout_s"], memory_bytes=task["memory_bytes"], progress=False
    )


def _refused(what: str, hint: str) -> Reply:
    return 422, json.dumps(error_data(ProgramError(what, where="request", hint=hint))).encode()


def ended(task: Mapping[str, object]) -> OpcastError:
    """The error to return for a task whose process died."""
    what = "the process that read it crashed, or needed more memory than the server allows"
    kind = LoweringError if str(task["kind"]).startswith("simulate") else ProgramError
    return kind(what, where=str(task["kind"]), hint="is it complete and well formed?")


_KINDS: dict[str, Callable[[Predictors, Task, bytes], dict[str, object] | str]] = {
    "program": predict_program,
    "report": report,
    "kernels": predict_kernels,
    "simulate": simulate,
    "simulate-serving": simulate_serving,
}


def main(control: socket.socket, models: list[str], memory_bytes: int) -> None:
    """Load the models, report ready, and fork a child for each connection that arrives.

    Args:
        control: Socket over which connections arrive; closing it ends the fork server.
        models: Names or folders of the models.
        memory_bytes: Limit of a child's private memory.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle
    predictors = {name: load(name) for name in models}
    _warm(predictors, memory_bytes)
    gc.collect()
    gc.freeze()  # a collection in a child would write to, and so copy, every page
    control.sendall(READY)
    own = os.getpid()
    while True:
        # The connection's file descriptor arrives as ancillary data (SCM_RIGHTS) of one byte.
        data, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        task = socket.socket(fileno=fds[0])
        if os.fork() == 0:
            control.close()
            _child(task, predictors, memory_bytes, own)
        task.close()


def _warm(predictors: Predictors, memory_bytes: int) -> None:
    """Answer what a child may be asked, once for each platform and vendor of devices."""
    specs = [find_device(name) for name in device_names()]
    kinds = {(spec.platform, spec.vendor): spec.name for spec in specs}
    for model, predictor in predictors.items():
        predictor.operators  # noqa: B018 - read lazily; read here, its pages are shared as well
        asked: Task = {
            "model": model, "lowering": "fused", "fallback": "", "trip_count": None,
            "strict": False, "timeout_s": _WARM_S, "memory_bytes": memory_bytes,
            "allow_compile": False,
        }  # fmt: skip
        devices = list(kinds.values())
        for kind, device in [*(("program", d) for d in devices), ("report", devices[0])]:
            answer(predictors, {**asked, "kind": kind, "device": device}, _WARM)
        for kind, body in ("simulate", StepBody), ("simulate-serving", ServingBody):
            answer(predictors, {"kind": kind, "model": model}, example(body))


def _child(
    task: socket.socket, predictors: dict[str, Predictor], memory_bytes: int, parent: int
) -> None:
    """Read a task, answer it and end; whatever happens, never return to the parent's loop."""
    try:
        die_with_parent(parent)
        # Compilers run in a grandchild, whose exit status would be lost if the kernel reaped it.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        limit_memory(memory_bytes)
        # A core dump would write the models' memory to disk for each crash.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        lengths = TASK.unpack(task.recv(TASK.size, socket.MSG_WAITALL))
        head: Task = json.loads(task.recv(lengths[0], socket.MSG_WAITALL))
        signal.setitimer(signal.ITIMER_REAL, head["timeout_s"])  # SIGALRM kills the child
        payload = task.recv(lengths[1], socket.MSG_WAITALL)
        threading.Thread(target=_end_with, args=(task,), daemon=True).start()
        status, body = answer(predictors, head, payload)
        task.sendall(REPLY.pack(status, len(body)) + body)
        task.close()
    finally:
        # Not sys.exit: handlers and buffers inherited from the parent must not run twice.
        os._exit(0)


def _end_with(task: socket.socket) -> None:
    """End this process when the server closes the connection: nobody waits for the answer."""
    # Nothing follows a task, so that this returns at the end of the connection alone.
    task.recv(1)
    os._exit(0)


if __name__ == "__main__":
    begin_worker()
    number, memory, *names = sys.argv[1:]
    main(socket.socket(fileno=int(number)), names, int(memory))
