"""The commands of docs/server.md, run as they stand."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from . import malformed

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "server.md").read_text()
COMMANDS = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.split("$URL")[1].split()[0][:30])
def test_commands_of_the_document(command, url, tmp_path):
    (tmp_path / "step.mlir").write_text(malformed.TEXT)
    done = subprocess.run(
        ["sh", "-c", f"{command} --fail"], cwd=tmp_path, env={**os.environ, "URL": url},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    if "/metrics" in command:
        assert "opcast_requests_total" in done.stdout
        return
    if "/v1/report" in command:
        assert "tpu-v4" in (tmp_path / "step.html").read_text()
        return
    found = json.loads(done.stdout)
    if "predict" in command:
        latency = found["latency_us"]
        assert min(latency if isinstance(latency, list) else [latency]) > 0
    if "simulate-serving" in command:
        assert found["mean_ttft_ms"] > 0
    elif "simulate" in command:
        assert found["step_us"] > 0


def test_every_endpoint_and_status_is_in_the_document(client):
    document = client.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        assert path in DOCUMENT
        for operation in operations.values():
            for status in operation["responses"]:
                assert status == "200" or re.search(rf"\| [\d, ]*\b{status}\b", DOCUMENT), status
