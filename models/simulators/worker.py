"""Entry point of a tool's process: one JSON message per job, and one per reply.

The tool's output goes to standard error. The process may be killed at any time; it ends with its
parent.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType

from ...common.child_process import Channel


def serve(tool: str) -> None:
    """Answer jobs with the function ``run`` of a module of this package until the input ends.

    A reply is the result of ``run``, or ``{"error": …}`` with the message of its exception.
    """
    channel = Channel()
    module = import_module(f".{tool}", __package__)
    for job in channel:
        channel.send(json.dumps(_answer(module, json.loads(job))).encode())


def _answer(module: ModuleType, job: Mapping[str, object]) -> dict[str, object]:
    try:
        return dict(module.run(job))
    except Exception as error:  # tools raise many unrelated classes
        first = (str(error).strip().splitlines() or [""])[0]
        # One line, cut to the length of a note.
        return {"error": f"{type(error).__name__}: {first}"[:300]}


if __name__ == "__main__":
    serve(sys.argv[1])
