"""A server of its own for the tests, started once; skipped where its packages are missing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

import pytest

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

START_S = 300


@contextmanager
def running(*options: str, **environment: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server process and its address, once it answers."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "opcast", "serve", "--port", "0", *options],
            stderr=log, env={**os.environ, **environment},
        )  # fmt: skip
        try:
            yield _address(process, log), process
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait(START_S)


def _address(process: subprocess.Popen[bytes], log: IO[str]) -> str:
    for _ in range(10 * START_S):
        time.sleep(0.1)
        log.seek(0)
        said = log.read()
        assert process.poll() is None, said
        found = re.search(r"(http://\S+)/docs", said)
        if found is not None:
            assert said.index("loading models") < found.start()
            # The address is told when connections are accepted, not before.
            assert httpx.get(f"{found[1]}/health", timeout=30).status_code == 200
            return found[1]
    pytest.fail(f"the server did not start within {START_S} s")


@pytest.fixture(scope="session")
def start() -> Callable[..., object]:
    return running


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    with running("--timeout", "30s", "--max-body", "72", "--max-rows", "1000") as (url, _):
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
