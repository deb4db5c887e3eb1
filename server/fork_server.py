"""The fork server: a process that holds the models and forks a child for each task.

It parses nothing untrusted itself. ``sandbox.py`` starts it with a socket, over which it passes a
connection for each task. The kernel enforces limits of memory and time on each child, so whatever
a program does to a native parser ends with that child. A fork takes milliseconds; importing the
packages and loading the models takes seconds.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import socket
import struct
import sys
import threading

from ..common.child_process import begin_worker, die_with_parent, limit_memory
from ..predict.program.predictor import Predictor, load
from .jobs import Task, answer

#: Headers on a task's connection, in network byte order: 32-bit length of the JSON and 64-bit
#: length of the payload; status and 64-bit length of a reply.
TASK, REPLY = struct.Struct("!IQ"), struct.Struct("!HQ")
READY = b"ready"
#: Predicted once before the first fork: modules imported and tables built lazily by a prediction
#: are then shared by all children.
_WARM = (
    b"module { func.func public @main(%a: tensor<8x8xf32>) -> tensor<8x8xf32> {"
    b" %0 = stablehlo.add %a, %a : tensor<8x8xf32> return %0 : tensor<8x8xf32> } }"
)


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
    # Operators load lazily; loaded here, their pages are shared with all children as well.
    for predictor in predictors.values():
        _ = predictor.operators
        _warm(predictor)
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


def _warm(predictor: Predictor) -> None:
    # One device suffices: imports are the same for all.
    for name in list(predictor.devices)[:1]:
        predictor.predict(_WARM, device=predictor.devices[name], lowering="op")


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
        lengths = TASK.unpack(_exactly(task, TASK.size))
        head: Task = json.loads(_exactly(task, lengths[0]))
        signal.setitimer(signal.ITIMER_REAL, head["timeout_s"])  # SIGALRM kills the child
        payload = _exactly(task, lengths[1])
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


def _exactly(task: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        received = task.recv_into(view)
        if not received:
            raise EOFError("the server closed the connection")
        view = view[received:]
    return bytes(data)


if __name__ == "__main__":
    begin_worker()
    number, memory, *names = sys.argv[1:]
    main(socket.socket(fileno=int(number)), names, int(memory))
