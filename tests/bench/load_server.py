"""Load on a server of its own over loopback: queries a second, latencies, batches, memory.

    python tests/bench/load_server.py [--requests 20000] [--seconds 60] [--flat 200000]

Everything is bounded in number and time. Client and server share the machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
PATH = "/v1/predict/kernels"
#: Columns of a batch, and how many distinct operators single queries choose from.
ROWS, DISTINCT = 10_000, 1000
#: Seconds that a start may take on a busy machine.
START_S = 300
QUERIES_PER_S, P99_MS, KERNELS_PER_S = 3000, 20, 150_000


@contextmanager
def server(*options: str) -> Iterator[tuple[int, int]]:
    """A server; gives its port and process id. Unexpected errors that it logs are printed."""
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-m", "opcast", "serve", "--port", "0", *options]
        process = subprocess.Popen(command, stderr=log)
        try:
            yield _port(process, log), process.pid
        finally:
            process.terminate()
            process.wait(START_S)
            log.seek(0)
            print(*(line for line in log if "Error" in line), sep="", end="")


def _port(process: subprocess.Popen, log: IO[str]) -> int:
    """Port of a server, once it answers."""
    for _ in range(START_S * 5):
        time.sleep(0.2)
        log.seek(0)
        found = re.search(r":(\d+)/docs", log.read())
        if found is not None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{found[1]}/health", timeout=60).read()
                return int(found[1])
            except OSError:
                pass
        assert process.poll() is None, "the server did not start"
    raise TimeoutError("the server did not start")


class Connection(asyncio.Protocol):
    """A kept-alive connection that sends one request after the other."""

    def __init__(self, next_body: Callable[[], bytes | None], times: list[float]) -> None:
        self.next_body = next_body
        self.times = times
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failed = 0

    def connection_made(self, transport) -> None:
        self.transport = transport
        self._send()

    def _send(self) -> None:
        body = self.next_body()
        if body is None:
            self.transport.close()
            return
        self.buffer = bytearray()
        self.needed = -1
        self.started = time.perf_counter()
        self.transport.write(
            b"POST %s HTTP/1.1\r\nHost: l\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (PATH.encode(), len(body), body)
        )

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if self.needed < 0:
            end = self.buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self.buffer[:end]).lower()
            length = head.split(b"content-length:")[1].split(b"\r\n")[0]
            self.needed = end + 4 + int(length)
            self.failed += not head.startswith(b"http/1.1 200")
        if len(self.buffer) >= self.needed:
            self.times.append(time.perf_counter() - self.started)
            self._send()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


async def _run(port: int, connections: int, bodies: Iterator[bytes], seconds: float):
    """Times of all requests, elapsed seconds and failures."""
    times: list[float] = []
    end = time.perf_counter() + seconds

    def next_body() -> bytes | None:
        return next(bodies, None) if time.perf_counter() < end else None

    loop = asyncio.get_running_loop()
    started = time.perf_counter()
    own = [Connection(next_body, times) for _ in range(connections)]
    for connection in own:
        await loop.create_connection(lambda c=connection: c, "127.0.0.1", port)
    async with asyncio.timeout(seconds + 30):
        await asyncio.gather(*(c.done for c in own))
    return np.array(times), time.perf_counter() - started, sum(c.failed for c in own)


def run(port: int, connections: int, bodies: Iterator[bytes], seconds: float):
    try:
        import uvloop as loops
    except ImportError:
        loops = asyncio
    return loops.run(_run(port, connections, bodies, seconds))


def single(m: int) -> bytes:
    query = {"device": "h100-sxm", "ops": [f"linear m={m} n=4096 k=4096 dtype=bf16 backend=vllm"]}
    return json.dumps(query).encode()


def singles(count: int, fresh: int = 0) -> Iterator[bytes]:
    """Queries of one operator each: of the distinct ones, and a new one after every ``fresh``."""
    known = [single(m) for m in range(1, DISTINCT + 1)]
    for i in range(count):
        yield single(DISTINCT + 1 + i) if fresh and i % fresh == 0 else known[i % DISTINCT]


def batch(seed: int) -> bytes:
    draw = np.random.default_rng(seed).integers(1, 16384, (3, ROWS)).tolist()
    columns = dict(zip("mnk", draw, strict=True)) | {"dtype": "bf16", "backend": "vllm"}
    query = {"device": "h100-sxm", "operator": "linear", "columns": columns}
    return json.dumps(query).encode()


def resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def cpu_s(pid: int) -> float:
    """CPU time of a process so far: what neighbours on the machine do not change."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def say(mark: bool | None, text: str) -> None:
    load = os.getloadavg()[0]
    word = "    " if mark is None else "ok  " if mark else "MISS"
    print(f"{word} {text}   (load average {load:.1f})", flush=True)


def measure_single(port: int, pid: int, requests: int, seconds: float, connections: int) -> None:
    run(port, 4, singles(2 * DISTINCT), seconds)
    before = cpu_s(pid)
    times, elapsed, failed = run(port, connections, singles(requests), seconds)
    rate, p50, p99 = len(times) / elapsed, *(np.percentile(times, [50, 99]) * 1e3)
    say(
        rate >= QUERIES_PER_S and p99 < P99_MS and not failed,
        f"cached queries, {connections} connections: {rate:,.0f}/s, p50 {p50:.2f} ms, "
        f"p99 {p99:.2f} ms, {failed} failed of {len(times):,}; server's CPU time "
        f"{(cpu_s(pid) - before) / len(times) * 1e6:.0f} µs a query",
    )


def measure_batches(port: int, pid: int, count: int, seconds: float) -> None:
    """Batches of new rows, then the same again."""
    bodies = [batch(i) for i in range(count)]
    for name in ("new kernels", "kernels seen before"):
        before = cpu_s(pid)
        times, elapsed, failed = run(port, 2, iter(bodies), seconds)
        used = (cpu_s(pid) - before) / (ROWS * len(times))
        rate = ROWS * len(times) / elapsed
        say(
            rate >= KERNELS_PER_S and not failed,
            f"batches of {ROWS:,} {name}: {rate:,.0f} kernels/s, {failed} failed of {len(times)}; "
            f"server's CPU time {used * 1e6:.2f} µs a kernel",
        )


def measure_memory(port: int, pid: int, requests: int, seconds: float) -> None:
    """Resident memory along many queries, one in a hundred of them new."""
    steps = 8
    found = []
    bodies = singles(requests, fresh=100)
    sent = 0
    for _ in range(steps):
        part = (body for _, body in zip(range(requests // steps), bodies, strict=False))
        times, _, failed = run(port, 16, part, seconds / steps)
        sent += len(times)
        found.append(resident_mb(pid))
        assert not failed
    growth = found[-1] - found[1]
    shown = ", ".join(f"{mb:.0f}" for mb in found)
    say(
        growth < 0.03 * found[1] and sent >= requests,
        f"memory along {sent:,} requests, 1 % of them new: {shown} MB",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--batches", type=int, default=15)
    parser.add_argument("--flat", type=int, default=200_000, help="requests for flat memory; 0: no")
    own = parser.parse_args()
    with server("--cache", "200000") as (port, pid):
        for _ in range(own.repeats):
            measure_single(port, pid, own.requests, own.seconds, own.connections)
        measure_batches(port, pid, own.batches, own.seconds)
        if own.flat:
            measure_memory(port, pid, own.flat, 10 * own.seconds)


if __name__ == "__main__":
    main()
