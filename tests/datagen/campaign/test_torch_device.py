"""What workers do with PyTorch on a GPU, by a device that is played: calls, order, what is told.

The order of a capture and the meaning of the memory statistics are those of PyTorch's notes "CUDA
semantics" (CUDA graphs, memory management).
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from opcast.datagen.campaign import torch_device, torch_tasks  # noqa: E402

SPEC = {
    "library": "opcast.datagen.campaign.torch_models", "model": "small_cnn", "batch": 2,
    "img_size": 16, "dtype": "fp32", "layout": "nchw", "mode": "infer",
}  # fmt: skip


class Played:
    """A device that notes what is asked of it; tensors stay on the host."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, what: str) -> Any:
        return lambda *_: self.said.append(what)

    @contextmanager
    def around(self, what: str) -> Any:
        self.said.append(f"{what}(")
        yield
        self.said.append(")")


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    own = Played()
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(cuda, name, own.note(name))
    monkeypatch.setattr(cuda, "max_memory_allocated", lambda: 10)
    monkeypatch.setattr(cuda, "max_memory_reserved", lambda: 20)

    class Stream:
        wait_stream = own.note("wait_stream")

    class Graph:
        replay = own.note("replay")

    monkeypatch.setattr(cuda, "Stream", Stream)
    monkeypatch.setattr(cuda, "current_stream", Stream)
    monkeypatch.setattr(cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(cuda, "stream", lambda stream: own.around("side"))
    monkeypatch.setattr(cuda, "graph", lambda graph: own.around("capture"))
    monkeypatch.setattr(torch_tasks, "device", lambda: "cpu")
    if "torch._dynamo" in sys.modules:  # others of PyTorch's modules hold it
        monkeypatch.setattr(torch._dynamo, "reset", own.note("reset"))
    else:
        # Its own import, and with a GPU that of its graphs, takes seconds and warns.
        dynamo = SimpleNamespace(reset=own.note("reset"))
        monkeypatch.setitem(sys.modules, "torch._dynamo", dynamo)
        monkeypatch.setattr(torch, "_dynamo", dynamo, raising=False)
    return own


def test_a_graph_is_captured_after_steps_on_another_stream(played: Played) -> None:
    replay = torch_device.captured(played.note("step"))
    assert " ".join(played.said) == (
        "wait_stream side( step step step ) wait_stream capture( step )"
    )
    played.said.clear()
    replay()
    assert played.said == ["replay"]


def test_memory_is_that_of_a_step_with_an_empty_cache(played: Played) -> None:
    found = torch_device.peak(played.note("step"))
    assert played.said == [
        "synchronize", "empty_cache", "reset_peak_memory_stats", "step", "synchronize",
    ]  # fmt: skip
    assert found == {"allocated_bytes": 10, "reserved_bytes": 20}


def test_a_model_as_a_graph_is_replayed_and_frees_what_it_held(played: Played) -> None:
    found: list[Any] = []
    torch_tasks.run(
        "models", [{"key": "a", "spec": {**SPEC, "framework": "torch-graph"}}],
        lambda key, own: found.append(own),
    )  # fmt: skip
    ((row,),) = found
    assert (row["allocated_bytes"], row["reserved_bytes"]) == (10, 20)
    # The first, three that warm up, one for memory, three to estimate, those timed after another.
    assert played.said.count("replay") == 1 + 3 + 1 + 3 + 1 + len(row["walls_us"])
    assert played.said[-1] == "empty_cache"


def test_times_stay_where_nobody_can_trace(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

    monkeypatch.setattr(torch.profiler, "profile", refuse)
    found: dict[str, Any] = {}
    spec = {**SPEC, "framework": "torch-eager"}
    torch_tasks.run("models", [{"key": "a", "spec": spec}], found.__setitem__)
    size = {"m": 16, "n": 16, "k": 16, "dtype": "fp32"}
    monkeypatch.setattr(torch_tasks, "_ROTATED_BYTES", 1.0)
    torch_tasks.run("products", [{"key": "b", "spec": size}], found.__setitem__)
    for key in ("a", "b"):
        row, note = found[key]
        assert min(row.get("walls_us") or row["us_each"]) > 0
        assert note["text"] == "no kernels: RuntimeError: CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"


def test_compiled_models_do_not_share_dynamos_limit(played: Played) -> None:
    """After 8 compilations of one function it would run eagerly, without an error."""
    spec = {**SPEC, "model": "none", "framework": "torch-compiled"}
    for key in ("a", "b"):
        torch_tasks.run("models", [{"key": key, "spec": spec}], lambda *_: None)
    assert played.said.count("reset") == 2
