"""What becomes of tasks that wait, are repeated, or lose their process; no process is started."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from opcast.common.errors import OpcastError, ProgramError
from opcast.server.errors import RequestError, error_response
from opcast.server.sandbox import Sandbox, _Died
from opcast.server.settings import ServerSettings

TASK = {"kind": "program", "device": "h100-sxm"}
CRASHED = ProgramError("the process that read it crashed")
One = Callable[[dict[str, object], bytes], Awaitable[tuple[int, bytes]]]


def sandbox(one: One, **settings: int) -> Sandbox:
    """A sandbox whose tasks are answered by a function instead of by processes."""
    own = Sandbox(ServerSettings(**settings))
    own._one = one  # type: ignore[method-assign, assignment]
    return own


def test_a_repeated_task_is_answered_from_memory_and_a_refusal_is_not_kept() -> None:
    asked = []

    async def one(task: dict[str, object], payload: bytes) -> tuple[int, bytes]:
        asked.append((task["device"], payload))
        return (422 if payload == b"bad" else 200), b"answer"

    async def ask() -> None:
        own = sandbox(one)
        for payload in (b"a", b"a", b"bad", b"bad"):
            await own.run(TASK, payload)
        # The order of options is not part of a question, their values are.
        await own.run({"device": "h100-sxm", "kind": "program"}, b"a")
        await own.run(TASK | {"device": "b200"}, b"a")
        assert (own.cache.hits, len(own.cache)) == (2, 2)

    asyncio.run(ask())
    assert asked == [("h100-sxm", b"a"), *[("h100-sxm", b"bad")] * 2, ("b200", b"a")]


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_task_whose_process_died_is_tried_once_more(deaths: int) -> None:
    left = deaths

    async def one(task: dict[str, object], payload: bytes) -> tuple[int, bytes]:
        nonlocal left
        left -= 1
        if left >= 0:
            raise _Died(CRASHED)
        return 200, b"answer"

    own = sandbox(one)
    if deaths == 1:
        assert asyncio.run(own.run(TASK, b"a")) == (200, b"answer")
    else:
        with pytest.raises(OpcastError, match="crashed"):
            asyncio.run(own.run(TASK, b"a"))
    assert own.crashes == deaths and own.running == 0


def test_a_full_queue_says_when_to_come_again_and_places_are_freed() -> None:
    async def ask() -> None:
        release = asyncio.Event()

        async def one(task: dict[str, object], payload: bytes) -> tuple[int, bytes]:
            await release.wait()
            return 200, payload

        own = sandbox(one, workers=1, waiting=2)
        own._mean_s = 7.0
        tasks = [asyncio.create_task(own.run(TASK, b"%d" % i)) for i in range(3)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (own.running, own.waiting, own.full) == (1, 2, True)
        with pytest.raises(RequestError) as refused:
            await own.run(TASK, b"too many")
        # Three tasks of 7 s each come before it is this one's turn.
        assert error_response(refused.value).headers["Retry-After"] == "21"
        # Whoever leaves makes room, at work or in the queue.
        for task in tasks[:2]:
            task.cancel()
        await asyncio.gather(*tasks[:2], return_exceptions=True)
        assert (own.running, own.waiting, own.full) == (1, 0, False)
        release.set()
        assert await tasks[2] == (200, b"2")
        assert (own.running, own.waiting) == (0, 0)

    asyncio.run(ask())
