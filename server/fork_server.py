"""The fork server: a process that holds the models and forks a child for each task.

Only its children read untrusted programs, kernels and plans. ``sandbox.py`` starts it with a
socket, over which it passes a connection for each task. The operating system enforces memory and
time limits on each child, so a program that crashes a native parser ends only that child. A fork
takes milliseconds, whereas importing the packages and loading the models takes seconds.
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
from pathlib import Path

from ..common.child_process import begin_worker, die_with_parent, limit_memory
from ..common.errors import LoweringError, OpcastError, ProgramError
from ..datagen.zoo import build
from ..features.devices.catalogue import device_names, find_device
from ..predict.program.predictor import Predictor, load
from . import cluster_tasks, tasks
from .cluster_schemas import SearchBody, ServingBody, StepBody, SweepQuery, example
from .errors import error_data, status_of
from .tasks import Predictors, Task

logger = logging.getLogger(__name__)

#: Headers on a task's connection, in network byte order. Task: 32-bit length of the JSON, 64-bit
#: length of the payload. Reply: 16-bit status, 64-bit length.
TASK, REPLY = struct.Struct("!IQ"), struct.Struct("!HQ")
READY = b"ready"
#: Program predicted on each kind of device before the first fork, so that all children share what a
#: prediction imports and loads lazily. It has a matrix product, a convolution, a reduction and an
#: elementwise operation.
_WARM = Path(__file__).with_name("warm.mlir")
_EXAMPLES = (
    ("simulate", StepBody),
    ("simulate-serving", ServingBody),
    ("sweep", SweepQuery),
    ("plan-serving", SearchBody),
)
#: Time limit in seconds of each of these predictions. Engineering estimate.
_WARM_S = 60.0

Reply = tuple[int, bytes]
_KINDS: Mapping[str, Callable[[Predictors, Task, bytes], dict[str, object] | str]] = {
    "program": tasks.predict_program,
    "report": tasks.report,
    "what-if": tasks.what_if,
    "kernels": tasks.predict_kernels,
    "simulate": cluster_tasks.simulate,
    "simulate-serving": cluster_tasks.simulate_serving,
    "sweep": cluster_tasks.sweep,
    "plan-serving": cluster_tasks.plan_serving,
}


def answer(predictors: Predictors, task: Task, payload: bytes) -> Reply:
    """Execute a task; return its status and JSON, also for every exception.

    Args:
        predictors: Loaded models by name.
        task: ``kind``, a key of the table above, and its parameters.
        payload: The program, or the JSON of a request.
    """
    try:
        result = _KINDS[task["kind"]](predictors, task, payload)
        return (200, result.encode()) if isinstance(result, str) else _reply(result)
    except OpcastError as error:
        return status_of(error), json.dumps(error_data(error)).encode()
    # RLIMIT_DATA makes allocations fail: Python raises MemoryError, native code mostly aborts.
    except MemoryError:
        return _refused(
            "it needs more memory than the server allows",
            "split it, or start the server with more: opcast serve --memory",
        )
    except RecursionError:
        return _refused("it is nested too deeply", "call fewer functions within each other")
    except Exception as error:  # unsupported input
        name = task.get("request", "")
        logger.exception("unexpected error in a %s task of request %s", task["kind"], name)
        # 422, not 500: the payload is untrusted, and most such errors are its fault.
        return _refused(
            f"it cannot be processed: {type(error).__name__}: {error}"[:300],
            "check that it is complete; if it runs elsewhere, please report it",
        )


def _reply(result: dict[str, object]) -> Reply:
    try:
        return 200, json.dumps(result, allow_nan=False).encode()
    except ValueError:  # JSON has no infinity
        return _refused("its sizes lead to infinite figures", "give smaller sizes")


def _refused(what: str, hint: str) -> Reply:
    return 422, json.dumps(error_data(ProgramError(what, where="request", hint=hint))).encode()


def ended(task: Mapping[str, object]) -> OpcastError:
    """Make the error for a task whose process died."""
    what = "the process that read it crashed, or needed more memory than the server allows"
    programs = ("program", "report", "what-if", "kernels")
    kind = ProgramError if task["kind"] in programs else LoweringError
    return kind(what, where=str(task["kind"]), hint="check that it is complete and well formed")


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
    gc.freeze()  # a collection in a child would write to every page, and thereby copy it
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
    """Execute example tasks for each platform and vendor, to load everything before forking."""
    specs = [find_device(name) for name in device_names()]
    kinds = {(spec.platform, spec.vendor): spec.name for spec in specs}
    for model, predictor in predictors.items():
        predictor.operators  # noqa: B018 - loads lazily
        options: Task = {
            "model": model, "lowering": "fused", "fallback": "", "trip_count": None,
            "strict": False, "timeout_s": _WARM_S, "memory_bytes": memory_bytes,
            "allow_compile": False,
        }  # fmt: skip
        devices, program = list(kinds.values()), _WARM.read_bytes()
        for kind, device in [*(("program", d) for d in devices), ("report", devices[0])]:
            answer(predictors, {**options, "kind": kind, "device": device}, program)
        # Only imports: lowering a workload would start threads, which a fork does not copy.
        build("mlp")
        for kind, body in _EXAMPLES:
            answer(predictors, {"kind": kind, "model": model}, example(body))


def _child(
    task: socket.socket, predictors: dict[str, Predictor], memory_bytes: int, parent: int
) -> None:
    """Read and execute a task, and exit; never return to the parent's loop."""
    try:
        die_with_parent(parent)
        # The exit status of compilers, which are child processes, must not be discarded.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        limit_memory(memory_bytes)
        # No core dumps, which would write the models' memory to disk.
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
        # Not sys.exit, which would run exit handlers inherited from the parent.
        os._exit(0)


def _end_with(task: socket.socket) -> None:
    """Exit when the server closes the connection, because nobody waits for the answer."""
    # No data follows a task, so this returns only when the connection closes.
    task.recv(1)
    os._exit(0)


if __name__ == "__main__":
    begin_worker()
    number, memory, *names = sys.argv[1:]
    main(socket.socket(fileno=int(number)), names, int(memory))
