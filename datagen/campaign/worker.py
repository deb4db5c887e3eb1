"""The process of a campaign that measures. If it dies, the campaign starts another one.

Requests and replies are JSON messages (:class:`opcast.common.child_process.Channel`).
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

from ...common.child_process import Channel
from ...common.types import JsonObject


def _tasks(framework: str) -> ModuleType:
    if framework == "jax":
        from . import jax_tasks

        return jax_tasks
    from . import torch_tasks

    return torch_tasks


def serve(
    framework: str, requests: Iterator[JsonObject], reply: Callable[[JsonObject], None]
) -> None:
    """Answer every request: ``hello``, ``anchors``, or ``run`` with a kind and cases."""
    for request in requests:
        try:
            tasks = _tasks(framework)
            if request["do"] == "run":
                _run(tasks, request, reply)
                answer: JsonObject = {}
            elif request["do"] == "anchors":
                answer = {"row": tasks.anchors()}
            else:
                answer = {"host": tasks.describe()}
        # Whatever a request causes must reach the parent as an answer, or it would wait.
        except Exception as error:
            answer = {"error": reason_of(error)}
        reply({"done": request["do"], **answer})


def _run(tasks: ModuleType, request: JsonObject, reply: Callable[[JsonObject], None]) -> None:
    def tell(key: str, found: Sequence[JsonObject] | Exception | None) -> None:
        if found is None:  # in progress: restarts the reply timeout
            reply({"key": key})
        elif isinstance(found, Exception):
            reply({"key": key, "failed": reason_of(found)})
        else:
            reply({"key": key, "rows": list(found)})

    tasks.run(request["kind"], request["cases"], tell)


def reason_of(error: BaseException) -> str:
    """One line on why a case failed."""
    # Compiler messages may quote whole modules; 500 characters contain the cause.
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def main() -> None:
    """Run as ``python -m opcast.datagen.campaign.worker SETTINGS``."""
    channel = Channel()
    settings = json.loads(sys.argv[1])

    def reply(message: JsonObject) -> None:
        channel.send(json.dumps(message).encode())

    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        serve(settings["framework"], map(json.loads, channel), reply)


if __name__ == "__main__":
    main()
