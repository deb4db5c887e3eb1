"""Requests that a server must survive: drawn from its own document, and malformed programs."""

from __future__ import annotations

import base64
import json
import time
from collections import Counter
from typing import Any

import httpx
import numpy as np

from .malformed import HLO, TEXT, bytecode, mutations, nested

#: Answers that say that a request was read, and why it was refused.
EXPECTED = {200, 400, 403, 404, 413, 415, 422}
DEVICES = ("h100-sxm", "tpu-v4", "cpu-amd-epyc-2c")
#: Operators that exist, so that drawn requests get beyond their names.
_KNOWN = {"device": "h100-sxm", "cluster": "dgx-h100-x16"}


def fuzz_programs(client: httpx.Client, count: int, seed: int) -> Counter[str]:
    """Send mutated programs, deep ones and noise; count answers, crashed processes and seconds.

    Raises:
        AssertionError: An answer is not among the expected ones.
    """
    rng = np.random.default_rng(seed)
    programs = [TEXT.encode(), HLO.encode(), bytecode()]
    found: Counter[str] = Counter()
    mutants = mutations(rng, programs)
    for _ in range(count):
        kind, program = next(mutants)
        options = {
            "device": str(rng.choice(DEVICES)), "lowering": str(rng.choice(["auto", "op"])),
        }  # fmt: skip
        if rng.random() < 0.8:
            raw = {"content": program, "headers": {"Content-Type": "application/octet-stream"}}
            found += send(client, kind, params=options, **raw)
        else:
            text = base64.b64encode(program).decode()
            found += send(client, kind, json=options | {"program": text, "encoding": "base64"})
    return found


def fuzz_depth(client: httpx.Client, depth: int) -> Counter[str]:
    """Send programs that are nested deeply."""
    found: Counter[str] = Counter()
    for name, program in nested(depth).items():
        for lowering in ("fused", "op"):
            options = {"device": "h100-sxm", "lowering": lowering}
            found += send(
                client, f"deep {name}", params=options, content=program,
                headers={"Content-Type": "text/plain"},
            )  # fmt: skip
    return found


def send(client: httpx.Client, kind: str, **request: Any) -> Counter[str]:
    """Send a program; count the answer by status, and what it tells of the process."""
    started = time.perf_counter()
    answer = client.post("/v1/predict/program", **request)
    seconds = time.perf_counter() - started
    assert answer.status_code in EXPECTED, (kind, answer.status_code, answer.text[:500])
    data = answer.json()
    found = Counter({f"status {answer.status_code}": 1, kind.split()[0]: 1, "sent": 1})
    if answer.status_code != 200:
        assert data["error"] and data["what"], data
        found["process died"] += "crashed" in data["what"]
        found["unexpected errors"] += "cannot be processed" in data["what"]
    found["seconds"] += round(seconds)
    return found


def fuzz_api(url: str, examples: int) -> Counter[str]:
    """Draw requests, valid and invalid, from the server's document and check every answer.

    What is valid by its schema may still be refused: no schema can say which programs parse.

    Raises:
        Exception: An answer is not as documented, or a server error.
    """
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    found: Counter[str] = Counter()
    document = schemathesis.openapi.from_url(f"{url}/openapi.json")
    quietly = settings(
        max_examples=examples, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck), derandomize=examples < 100,
    )  # fmt: skip

    def known(case: Any) -> None:
        # Gets beyond names that no one could guess.
        for part in (case.body, case.query):
            if isinstance(part, dict):
                part.update({k: v for k, v in _KNOWN.items() if k in part})
                part.pop("model", None)

    def check(case: Any) -> None:
        answer = case.call(timeout=60)
        found["sent"] += 1
        found[f"status {answer.status_code}"] += 1
        case.validate_response(answer, excluded_checks=[positive_data_acceptance])

    def check_valid(case: Any) -> None:
        if found["sent"] % 2:
            known(case)
        check(case)

    for result in document.get_all_operations():
        operation = result.ok()
        modes = {schemathesis.GenerationMode.POSITIVE: check_valid}
        if operation.body:
            # Names that are known could be in place of what makes a request invalid.
            modes[schemathesis.GenerationMode.NEGATIVE] = check
        for mode, test in modes.items():
            quietly(given(case=operation.as_strategy(generation_mode=mode))(test))()
    return found


def fuzz_kernels(client: httpx.Client, count: int, seed: int) -> Counter[str]:
    """Send operators and kernels with random words and sizes."""
    rng = np.random.default_rng(seed)
    words = ["linear", "bmm", "moe", "graph/", "context_attention", "m=1", "n=-1", "k=1e9", "b=",
             "dtype=bf16", "dtype=", "=", "m=99999999999999999999", "op=add", "\u0000", "🙂",
             "q_heads=8", "head_dim=64", "kv_len=7", "batch=2", "k=4", "n=4", "rows=1"]  # fmt: skip
    found: Counter[str] = Counter()
    kernel = HLO.encode()
    mutants = mutations(rng, [kernel])
    for i in range(count):
        if i % 2:
            texts = [" ".join(rng.choice(words, rng.integers(1, 8)))]
            body = {"device": str(rng.choice(DEVICES)), "ops": texts}
        else:
            body = {"device": "h100-sxm", "kernels": [next(mutants)[1].decode("latin-1")]}
        answer = client.post("/v1/predict/kernels", content=json.dumps(body),
                             headers={"Content-Type": "application/json"})  # fmt: skip
        assert answer.status_code in EXPECTED, (body, answer.text[:500])
        found += Counter({"sent": 1, f"status {answer.status_code}": 1})
        found["unexpected errors"] += "no kernel: " in answer.text
    return found
