"""The process that untrusted work is forked from: it has the models, and parses nothing itself.

It is started by ``sandbox.py`` with a socket on which it is handed one connection for each task. A
child is forked for every connection, with limits of memory and time that the kernel enforces, so
that whatever a program does to a native parser ends with that child. A fork takes milliseconds,
importing and loading takes seconds.
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

from ..features.parent import die_with_parent
from ..predict.predictor import Predictor, load
from .jobs import answer

#: Lengths of a task's head and payload; status and length of a reply.
TASK, REPLY = struct.Struct("!IQ"), struct.Struct("!HQ")
READY = b"ready"
#: Read by every child, so that none has to import and compute what all need.
_WARM = (
    b"module { func.func public @main(%a: tensor<8x8xf32>) -> tensor<8x8xf32> {"
    b" %0 = stablehlo.add %a, %a : tensor<8x8xf32> return %0 : tensor<8x8xf32> } }"
)


def main(control: socket.socket, models: list[str], memory_bytes: int) -> None:
    """Load the models, say so, and fork a child for each connection that is handed over."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are not waited for
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle
    predictors = {name: load(name) for name in models}
    for predictor in predictors.values():
        _ = predictor.operators
        _warm(predictor)
    gc.collect()
    gc.freeze()  # collections in children would copy every page
    control.sendall(READY)
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        task = socket.socket(fileno=fds[0])
        if os.fork() == 0:
            control.close()
            _child(task, predictors, memory_bytes)
        task.close()


def _warm(predictor: Predictor) -> None:
    for name in list(predictor.devices)[:1]:
        predictor.predict(_WARM, device=predictor.devices[name], lowering="op")


def _child(task: socket.socket, predictors: dict[str, Predictor], memory_bytes: int) -> None:
    """Read a task, answer it, end; whatever happens, never return to the nursery's loop."""
    try:
        die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        lengths = TASK.unpack(_exactly(task, TASK.size))
        head: dict[str, Any] = json.loads(_exactly(task, lengths[0]))
        signal.setitimer(signal.ITIMER_REAL, head["timeout_s"])  # by default it kills
        status, body = answer(predictors, head, _exactly(task, lengths[1]))
        task.sendall(REPLY.pack(status, len(body)) + body)
        task.close()
    finally:
        os._exit(0)


def _exactly(task: socket.socket, count: int) -> bytes:
    found = bytearray(count)
    view = memoryview(found)
    while view:
        received = task.recv_into(view)
        if not received:
            raise EOFError("the server went away")
        view = view[received:]
    return bytes(found)


if __name__ == "__main__":
    die_with_parent()
    number, memory, *names = sys.argv[1:]
    main(socket.socket(fileno=int(number)), names, int(memory))
