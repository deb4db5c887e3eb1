"""A server of its own for the tests, started once; skipped where its packages are missing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

START_S = 300


@contextmanager
def running(*options: str, **environment: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server process and its address, once it answers."""
    process = subprocess.Popen(
        [sys.executable, "-m", "opcast.cli", "serve", "--port", "0", *options],
        stderr=subprocess.PIPE, text=True, env={**os.environ, **environment},
    )  # fmt: skip
    try:
        assert process.stderr is not None
        url = process.stderr.readline().split("/docs")[0]
        _wait(url, process)
        yield url, process
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=START_S)


def _wait(url: str, process: subprocess.Popen[str]) -> None:
    for _ in range(10 * START_S):
        assert process.poll() is None, process.communicate()[1]
        try:
            assert httpx.get(f"{url}/health", timeout=30).status_code == 200
            return
        except httpx.TransportError:
            time.sleep(0.1)
    pytest.fail(f"the server did not start within {START_S} s")


@pytest.fixture(scope="session")
def start() -> Callable[..., object]:
    return running


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    with running("--timeout", "30s", "--max-body", "16", "--max-rows", "1000") as (url, _):
        yield url


@pytest.fixture(scope="session")
def client(url) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=90) as own:
        yield own


@pytest.fixture(scope="session")
def ask(client) -> Callable[..., tuple[int, dict]]:
    """Posts JSON; gives status and JSON."""

    def post(path: str, body: object) -> tuple[int, dict]:
        answer = client.post(path, json=body)
        return answer.status_code, answer.json()

    return post
