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

#: Headers on a task's connection, in network byte order: 32-bit length of the JSON and 64-bit
#: length of the payload; status and 64-bit length of a reply.
TASK, REPLY = struct.Struct("!IQ"), struct.Struct("!HQ")
READY = b"ready"
#: Asked once of each kind of device before the first fork, with a step and a deployment: what is
#: imported and read lazily by an answer is then shared by all children. It has a product, a
#: convolution, a reduction and a pass over elements.
_WARM = Path(__file__).with_name("warm.mlir")
_EXAMPLES = (
    ("simulate", StepBody),
    ("simulate-serving", ServingBody),
    ("sweep", SweepQuery),
    ("plan-serving", SearchBody),
)
#: Time that one answer may take then. Engineering estimate.
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
    """Status and JSON of a task; whatever it raises becomes an answer.

    Args:
        predictors: Loaded models by name.
        task: ``kind``, a key of the table above, and its parameters.
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


def _refused(what: str, hint: str) -> Reply:
    return 422, json.dumps(error_data(ProgramError(what, where="request", hint=hint))).encode()


def ended(task: Mapping[str, object]) -> OpcastError:
    """The error to return for a task whose process died."""
    what = "the process that read it crashed, or needed more memory than the server allows"
    programs = ("program", "report", "what-if", "kernels")
    kind = ProgramError if task["kind"] in programs else LoweringError
    return kind(what, where=str(task["kind"]), hint="is it complete and well formed?")


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
        devices, program = list(kinds.values()), _WARM.read_bytes()
        for kind, device in [*(("program", d) for d in devices), ("report", devices[0])]:
            answer(predictors, {**asked, "kind": kind, "device": device}, program)
        # Imports what makes workloads; lowering one would start threads, which no fork has.
        build("mlp")
        for kind, body in _EXAMPLES:
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
