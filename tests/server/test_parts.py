"""What the server is made of, each part by itself: cache, batches, address, limits."""

import asyncio

import pytest

from opcast.common.errors import ModelError, ProgramError
from opcast.server.app import serve
from opcast.server.cache import LruCache
from opcast.server.guard import Guard
from opcast.server.kernels import BATCH_ROWS, MicroBatcher
from opcast.server.metrics import Metrics
from opcast.server.settings import ServeError, ServerSettings


def test_the_least_recently_used_entry_goes():
    cache = LruCache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.get_many(["a", "c"]) == [1, None]
    cache.put("c", 3)  # "b" was not asked for since
    assert cache.get_many("abc") == [1, None, 3]
    assert (cache.hits, cache.misses, len(cache)) == (3, 2, 2)


def test_entries_may_weigh_more_than_one():
    cache = LruCache(10)
    cache.put("a", 1, 4)
    cache.put("b", 2, 4)
    cache.put("a", 3, 6)  # in place of the first
    assert cache.get_many("ab") == [3, 2]
    cache.put("c", 4, 4)  # "a" was asked for before "b"
    assert cache.get_many("abc") == [None, 2, 4]
    cache.put("d", 5, 11)  # more than all: nothing is left
    assert len(cache) == 0


def test_queries_that_come_while_a_batch_is_computed_make_the_next():
    batches = []

    async def compute(group, works):
        batches.append((group, list(works)))
        await asyncio.sleep(0.01)
        if "bad" in works:
            raise ProgramError("bad")
        return [w * 2 for w in works]

    async def ask():
        batcher = MicroBatcher(compute)
        jobs = [("x", 1, 1), ("x", 2, 1), ("y", 3, 1), ("x", 4, 1), ("x", "bad", 1)]
        first = asyncio.create_task(batcher.ask("x", 0, 1))
        await asyncio.sleep(0.001)
        found = asyncio.gather(*(batcher.ask(*job) for job in jobs), return_exceptions=True)
        return await first, await found

    first, found = asyncio.run(ask())
    assert first == 0 and found[:4] == [2, 4, 6, 8]
    assert isinstance(found[4], ProgramError)  # and nobody else's query failed
    assert batches[:2] == [("x", [0]), ("x", [1, 2, 4, "bad"])]
    assert ("y", [3]) in batches


def test_a_batch_is_bounded_and_what_nobody_waits_for_is_left_out():
    sizes = []

    async def compute(group, works):
        sizes.append(len(works))
        await asyncio.sleep(0)
        return works

    async def ask():
        batcher = MicroBatcher(compute)
        jobs = [asyncio.create_task(batcher.ask("x", i, BATCH_ROWS // 2)) for i in range(4)]
        await asyncio.sleep(0)
        jobs[3].cancel()
        return await asyncio.gather(*jobs[:3])

    assert asyncio.run(ask()) == [0, 1, 2]
    assert sum(sizes) == 3 and max(sizes) <= 2


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "example.org"])
def test_other_addresses_than_loopback_need_a_token(host):
    with pytest.raises(ServeError, match="no token is set"):
        ServerSettings(host=host)
    assert ServerSettings(host=host, token="t").host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
def test_loopback_needs_none(host):
    assert ServerSettings(host=host).token == ""


class Requests:
    """Sends requests to a guard before an application that echoes bodies."""

    def __init__(self, **limits):
        self.release = asyncio.Event()
        settings = ServerSettings(**limits)
        self.metrics = Metrics()
        self.guard = Guard(self.app, settings, self.metrics, ["/echo"])

    async def app(self, scope, receive, send):
        if scope["path"] == "/slow":
            await self.release.wait()
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def send(self, path="/echo", parts=(b"x",), headers=()):
        """Status, headers and body of the answer to a request whose body comes in parts."""
        left = self.unread = list(parts)
        found = []

        async def receive():
            if not left:
                await asyncio.sleep(60)  # a client that does not go on
            part = left.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(left)}

        async def send(message):
            found.append(message)

        scope = {"type": "http", "path": path, "headers": list(headers), "method": "POST"}
        await self.guard(scope, receive, send)
        head = {k.decode(): v.decode() for k, v in found[0]["headers"]}
        return found[0]["status"], head, b"".join(m.get("body", b"") for m in found[1:])


def test_bodies_are_limited_whether_their_length_is_announced_or_not():
    async def ask():
        requests = Requests(max_body_bytes=10)
        announced = await requests.send(headers=[(b"content-length", b"11")])
        streamed = await requests.send(parts=[b"x" * 6, b"x" * 6])
        whole = await requests.send(parts=[b"x" * 5, b"y" * 5])
        return announced, streamed, whole

    announced, streamed, whole = asyncio.run(ask())
    assert announced[0] == streamed[0] == 413 and b"exceeds" in streamed[2]
    assert announced[1]["connection"] == "close"
    assert whole[0] == 200 and whole[2] == b"x" * 5 + b"y" * 5


@pytest.mark.parametrize(
    "parts, headers, unread",
    [
        # Its client reads the answer only once it has sent all.
        ([b"x" * 10] * 3, [(b"content-length", b"30")], 0),
        ([b"x" * 10] * 3, [], 0),
        # Four times the limit are read on, and a part more, after the two that exceed it.
        ([b"x" * 10] * 100, [], 93),
        ([b"x" * 10] * 3, [(b"content-length", b"30"), (b"expect", b"100-continue")], 3),
    ],
)
def test_a_refused_body_is_read_on(parts, headers, unread):
    async def ask():
        requests = Requests(max_body_bytes=10)
        status, _, _ = await requests.send(parts=parts, headers=headers)
        return status, len(requests.unread)

    assert asyncio.run(ask()) == (413, unread)


def test_time_and_number_of_requests_are_limited():
    async def ask():
        requests = Requests(timeout_s=1.0, concurrency=1)
        slow = asyncio.create_task(requests.send("/slow"))
        while not requests.guard.in_flight:
            await asyncio.sleep(0)
        busy = await requests.send()
        health = await requests.send("/health")
        late = await slow
        return busy, health, late, await requests.send(), requests.metrics.text().decode()

    busy, health, late, after, metrics = asyncio.run(ask())
    assert busy[0] == 503 and busy[1]["retry-after"] == "1"
    assert health[0] == 200  # a busy server is a healthy one
    assert late[0] == 504 and b"longer than 1 s" in late[2]
    assert after[0] == 200
    assert 'opcast_requests_total{path="/echo",status="503"} 1.0' in metrics
    assert 'opcast_requests_total{path="other",status="504"} 1.0' in metrics


def test_a_client_that_stops_sending_does_not_hold_a_place_for_ever():
    async def ask():
        requests = Requests(timeout_s=0.1, concurrency=1)
        found = await requests.send(parts=[])
        return found[0], requests.guard.in_flight

    assert asyncio.run(ask()) == (504, 0)


@pytest.mark.parametrize(
    ("shown", "status"),
    [(b"Bearer secret", 200), (b"Bearer Secret", 401), (b"secret", 401), (b"\xff", 401)],
)
def test_the_token_is_asked_for_but_of_health(shown, status):
    async def ask():
        requests = Requests(host="0.0.0.0", token="secret")
        known = await requests.send(headers=[(b"authorization", shown)])
        return known, await requests.send(), await requests.send("/health")

    known, none, health = asyncio.run(ask())
    assert (known[0], none[0], health[0]) == (status, 401, 200)
    assert none[1]["www-authenticate"] == "Bearer"


def test_a_model_that_is_missing_is_said_before_anything_starts() -> None:
    said: list[str] = []
    with pytest.raises(ModelError, match="no model 'nope'"):
        serve(ServerSettings(models=("default", "nope"), port=0), said.append)
    assert said == []
