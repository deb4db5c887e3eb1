"""What a record of a machine keeps, and what it does not."""

from __future__ import annotations

import getpass
import json
import socket
from pathlib import Path

import pytest

from opcast.datagen.campaign.machine import host_record, scrubbed, scrubbed_text

#: Answers of nvidia-smi as its versions print them; an old one refuses a field.
SMI = """#!/bin/sh
case "$*" in
  *topo*) printf '\\tGPU0\\tGPU1\\nGPU0\\t X \\tNV18\\n';;
  *nvlink*) echo "GPU 0: NVIDIA H200 (UUID: GPU-0a1b2c3d-1111-2222-3333-444455556666)";;
  *name,driver*) echo 'Field "mig.mode.current" is not a valid field to query.'; exit 2;;
  *query-gpu=name*) echo "NVIDIA H200";;
  *query-gpu=power.limit*) echo "700.00 W";;
  *) exit 1;;
esac
"""


def test_names_paths_and_serials_are_replaced() -> None:
    user, host = getpass.getuser(), socket.gethostname()
    text = f"/home/{user}/code/model.py:12 on {host}: GPU-0a1b2c3d-1111-2222-3333-444455556666"
    cleaned = scrubbed({"reason": text, "list": [text], "count": 3})
    assert cleaned["count"] == 3
    for own in (cleaned["reason"], *cleaned["list"]):
        assert own.startswith("<path>:12 on ")
        assert host not in own
        assert "0a1b2c3d" not in own
    assert (
        scrubbed_text("--xla_dump_to=/tmp/someone/dump --flag=2") == "--xla_dump_to=<path> --flag=2"
    )
    assert scrubbed_text(r"C:\Users\someone\x.py") == "<path>"
    # What only looks like a path stays.
    assert scrubbed_text("f32[64]/128 GB/s, xla/0.10") == "f32[64]/128 GB/s, xla/0.10"


def test_fields_that_a_driver_does_not_know_cost_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(SMI)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    record = host_record({"jax": {"device_kind": "NVIDIA H200"}}, "gpu")
    assert record["nvidia"] == {"name": "NVIDIA H200", "power.limit": "700.00 W"}
    assert "NV18" in record["topology"]
    assert "<serial>" in record["nvlink"]
    assert "GPU-0a1b" not in json.dumps(record)
    assert "jax" in record["libraries"]
    assert socket.gethostname() not in json.dumps(record)
