"""Fuzzes a server of its own and prints what was sent and what came back.

python tests/bench/fuzz_server.py [--programs 2000] [--examples 200] [--seed 0]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from load_server import server

from server import fuzzing


def show(name: str, fuzz: Callable[[], Counter[str]]) -> None:
    started = time.perf_counter()
    found = fuzz()
    parts = ", ".join(f"{k} {v}" for k, v in sorted(found.items()) if v and k != "seconds")
    print(f"{name}: {parts} in {time.perf_counter() - started:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--examples", type=int, default=200, help="by operation and mode")
    parser.add_argument("--seed", type=int, default=0)
    own = parser.parse_args()
    with server("--timeout", "60s") as (port, _):
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=120) as client:
            show("drawn from the document", lambda: fuzzing.fuzz_api(url, own.examples))
            show("programs", lambda: fuzzing.fuzz_programs(client, own.programs, own.seed))
            show("deep programs", lambda: fuzzing.fuzz_depth(client, 30_000))
            show("kernels", lambda: fuzzing.fuzz_kernels(client, own.programs, own.seed))
            assert client.get("/health").status_code == 200
            lines = client.get("/metrics").text.splitlines()
            print(
                *(
                    line
                    for line in lines
                    if line.startswith(("opcast_crashes", "opcast_kernels_total"))
                )
            )


if __name__ == "__main__":
    main()
