"""The fork server: a process with the models, from which a child is forked for each task.

It parses nothing untrusted itself. ``sandbox.py`` starts it with a socket, over which it passes one
connection for each task. Each child has limits of memory and time that the kernel enforces, so that
whatever a program does to a native parser ends with that child. A fork takes milliseconds;
importing the packages and loading the models takes seconds.
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
from typing import Any

from ..common.child_process import begin_worker, die_with_parent, limit_memory
from ..predict.program.predictor import Predictor, load
from .jobs import answer

#: Headers on a task's connection: lengths of its JSON and payload; status and length of a reply.
TASK, REPLY = struct.Struct("!IQ"), struct.Struct("!HQ")
READY = b"ready"
#: Predicted once before the first fork, so that children inherit what every prediction imports.
_WARM = (
    b"module { func.func public @main(%a: tensor<8x8xf32>) -> tensor<8x8xf32> {"
    b" %0 = stablehlo.add %a, %a : tensor<8x8xf32> return %0 : tensor<8x8xf32> } }"
)


def main(control: socket.socket, models: list[str], memory_bytes: int) -> None:
    """Load the models, say so, and fork a child for each connection that arrives.

    Args:
        control: Brings the connections; the fork server ends when it is closed.
        models: Names or folders of the models.
        memory_bytes: Most private memory of a child.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle
    predictors = {name: load(name) for name in models}
    for predictor in predictors.values():
        _ = predictor.operators
        _warm(predictor)
    gc.collect()
    gc.freeze()  # a collection in a child would write to, and so copy, every page
    control.sendall(READY)
    own = os.getpid()
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        task = socket.socket(fileno=fds[0])
        if os.fork() == 0:
            control.close()
            _child(task, predictors, memory_bytes, own)
        task.close()


def _warm(predictor: Predictor) -> None:
    for name in list(predictor.devices)[:1]:
        predictor.predict(_WARM, device=predictor.devices[name], lowering="op")


def _child(
    task: socket.socket, predictors: dict[str, Predictor], memory_bytes: int, parent: int
) -> None:
    """Read a task, answer it and end; whatever happens, never return to the parent's loop."""
    try:
        die_with_parent(parent)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        limit_memory(memory_bytes)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        lengths = TASK.unpack(_exactly(task, TASK.size))
        head: dict[str, Any] = json.loads(_exactly(task, lengths[0]))
        signal.setitimer(signal.ITIMER_REAL, head["timeout_s"])  # SIGALRM kills the child
        status, body = answer(predictors, head, _exactly(task, lengths[1]))
        task.sendall(REPLY.pack(status, len(body)) + body)
        task.close()
    finally:
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
