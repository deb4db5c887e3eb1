"""Names and releases of serving frameworks."""

from __future__ import annotations

import pytest

from opcast.common.errors import PlanError
from opcast.simulate.serving.policies import (
    engine_era,
    host_kind,
    known_framework,
    release_note,
    runs_ahead,
)


def test_releases_that_cannot_be_are_refused() -> None:
    for text in ("vllm@99", "vllm@2.0", "sglang@0.0.9", "trtllm@0.4.1"):
        with pytest.raises(PlanError, match="there is no release"):
            known_framework(text)
    with pytest.raises(PlanError, match="'new' is no version"):
        known_framework("vllm@new")


def test_releases_beyond_the_measured_ones_are_told() -> None:
    assert known_framework("vLLM@0.33.0") == ("vllm", "0.33.0")
    assert "newer than the newest release with measured runs" in release_note("vllm", "0.33.0")[0]
    assert release_note("trtllm", "") == release_note("vllm", "0.19.1") == ()
    assert release_note("", "7") == ()
    assert engine_era("vllm", "0.33.0") == "now"
    assert engine_era("vllm", "0.6.6") == "early"
    # Version 0 stands for one before engines were rewritten, of those that are not listed too.
    assert [engine_era("another", version) for version in ("0", "0.2", "")] == [
        "early",
        "now",
        "now",
    ]
    assert (
        runs_ahead("vllm", "") and runs_ahead("vllm", "0.14.1") and runs_ahead("sglang", "0.5.10")
    )
    assert not runs_ahead("vllm", "0.13.0") and not runs_ahead("lmdeploy", "")


def test_what_hosts_run() -> None:
    names = ("vllm", "tensorrt-llm", "deepspeed-mii", "lmdeploy")
    early = {name: host_kind(name, "early", "gpu") for name in names}
    native = {"tensorrt-llm": "native", "lmdeploy": "native"}
    assert early == {"vllm": "interpreted", "deepspeed-mii": "interpreted", **native}
    now = {name: host_kind(name, "now", "gpu") for name in ("vllm", "tensorrt-llm", "sglang")}
    assert now == {"vllm": "fused", "tensorrt-llm": "fused", "sglang": ""}
    assert host_kind("vllm", "now", "gpu", eager=True) == ""
    # A pass is one program there.
    assert host_kind("vllm", "now", "tpu") == "native"
