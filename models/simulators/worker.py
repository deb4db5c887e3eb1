"""The process in which a tool runs: one line of JSON a job in, one line of JSON a reply out.

Whatever the tool prints goes to standard error. The process may be killed at any time; it ends with
its parent.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from typing import Any

from ...features.parent import die_with_parent


def serve(tool: str) -> None:
    """Answer jobs with the function ``run`` of a module of this package until input ends.

    A reply is what ``run`` returns, or ``{"error": …}`` with the message of what it raised.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module = import_module(f".{tool}", __package__)
    for line in sys.stdin:
        replies.write(json.dumps(_answer(module, json.loads(line))) + "\n")
        replies.flush()


def _answer(module: Any, job: dict[str, Any]) -> dict[str, Any]:
    try:
        return dict(module.run(job))
    except Exception as error:  # tools raise many unrelated classes
        first = (str(error).strip().splitlines() or [""])[0]
        return {"error": f"{type(error).__name__}: {first}"[:300]}


if __name__ == "__main__":
    die_with_parent()
    serve(sys.argv[1])
