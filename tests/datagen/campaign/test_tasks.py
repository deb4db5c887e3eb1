"""What workers observe of single cases, in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from opcast.common.errors import ProfileError
from opcast.datagen.campaign import jax_cases, jax_tasks, torch_tasks
from opcast.datagen.campaign.jax_cases import aliases_of, anonymous
from opcast.datagen.campaign.timing import time_calls, time_launches, time_windows
from opcast.datagen.profile import host, trace
from opcast.features.ir.hlo_reader import parse_hlo

LLAMA = {
    "model": "llama", "layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "ffn": 16,
    "vocabulary": 32, "batch": 1, "length": 8, "dtype": "float32",
}  # fmt: skip


def told(run: Callable[[Any, Any], None], *specs: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def tell(key: str, own: Any) -> None:
        if own is not None:  # else it says that it goes on
            assert key not in found
            found[key] = own

    run([{"key": f"case-{i}", "spec": s} for i, s in enumerate(specs)], tell)
    return found


def op(name: str, *shape: int) -> dict[str, Any]:
    return {"op": name, "shape": list(shape), "dtype": "float32"}


def test_programs_of_a_session_are_told_apart_and_carry_no_names() -> None:
    found = told(
        jax_tasks.traced, op("rows.softmax", 64, 64), {**LLAMA, "mode": "train"}, op("rows.no", 1)
    )
    assert isinstance(found["case-2"], ProfileError)
    (softmax, events), (step, own) = found["case-0"], found["case-1"]
    assert (softmax["family"], step["family"]) == ("op:softmax", "llama")
    # A single operation's whole time is its dispatch.
    assert "walls_us" not in softmax
    assert len(step["walls_us"]) >= 3
    for row, seen in ((softmax, events), (step, own)):
        program = parse_hlo(row["hlo"], "test")
        names = {o.name for c in program.computations.values() for o in c.ops}
        assert set(seen["ops"]) & names
        assert len(seen["op"]) == len(seen["start"]) == len(seen["end"]) > 0
        assert all(end >= start for start, end in zip(seen["start"], seen["end"], strict=True))
        assert seen["platform"] == "cpu"
        for word in ("metadata", "jax_ops", "jax_models", ".py"):
            assert word not in row["hlo"]
    json.dumps(found["case-1"])
    assert softmax["argument_bytes"] == 64 * 64 * 4


def test_a_step_goes_on_with_its_own_results() -> None:
    row, *windows, events = told(jax_tasks.traced, {**LLAMA, "mode": "train", "seconds": 0.2})[
        "case-0"
    ]
    assert (row["table"], events["table"]) == ("programs", "events")
    assert row["cold_us"] >= row["warm_us"] > 0
    assert row["alias_bytes"] > 0  # weights and state are updated in place
    assert len(windows) >= 2
    assert "plain_us" not in row  # nothing to turn off on a CPU


def test_programs_of_the_zoo_are_compiled_as_their_users_do() -> None:
    """Types of 64 bits would mix with the positions of a decode, which then has no program."""
    sizes = "layers=1 dim=64 heads=4 kv_heads=2 hidden=128 cache=16 batch=1 vocab=64"
    row, events = told(jax_tasks.traced, {"zoo": "llama_decode", "set": sizes})["case-0"]
    assert row["family"] == "llama_decode"
    assert "s64" not in row["hlo"]
    assert events["op"]


def test_names_of_functions_and_files_are_left_out() -> None:
    def secret_name(x: jax.Array) -> jax.Array:
        return jnp.sin(x) @ x

    text = jax.jit(secret_name).lower(jnp.ones((8, 8))).compile().as_text()
    assert text is not None
    assert "metadata" in text
    head, rest = text.split("\n", 1)
    tables = (
        'FileNames\n1 "/home/someone/secret.py"\n\nFunctionNames\n1 "secret"\n\n'
        "FileLocations\n1 {file_name_id=1 function_name_id=1 line=3}\n\nStackFrames\n"
        "1 {file_location_id=1 parent_frame_id=1}\n\n"
    )
    braces = rest.replace('op_name="', 'op_name="a{b}\\"c', 1)
    cleaned = anonymous(f"{head}\n\n{tables}{braces}")
    for word in ("metadata", "someone", "FileNames", "StackFrames", "a{b}"):
        assert word not in cleaned
    assert "jit_secret_name" in cleaned  # of a campaign: case0
    before, after = parse_hlo(text, "a"), parse_hlo(cleaned, "b")
    assert [o.opcode for o in before.entry_computation.ops] == [
        o.opcode for o in after.entry_computation.ops
    ]


def test_buffers_that_are_shared() -> None:
    head = "HloModule m, input_output_alias={ {0}: (2, {}, may-alias), {3}: (0, {}) }, x={}\n"
    assert aliases_of(head) == [(0, 2), (3, 0)]
    assert aliases_of("HloModule m, input_output_alias={ {}: (1, {}, must-alias) }\n") == [(0, 1)]
    assert aliases_of("HloModule m\n %a = f32[] add(b, c)") == []


def test_what_does_not_fit_is_refused_before_it_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "memory_bytes", lambda: 1e4)
    error = told(jax_tasks.traced, op("rows.softmax", 64, 64))["case-0"]
    assert "the device has 1e-05 GB" in str(error)
    monkeypatch.undo()
    monkeypatch.setattr(jax_tasks.worker_process, "memory_bytes", lambda: 3e4)
    error = told(jax_tasks.traced, op("rows.softmax", 64, 64))["case-0"]
    assert str(error) == "needs 3.28e-05 GB, drawn on a host of 3e-05 GB"


@pytest.mark.parametrize("what", ("refused", "empty"))
def test_times_stay_where_nobody_can_trace(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def recorded(run: Callable[[], None]) -> object:
        run()
        if what == "refused":
            raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")
        return object()

    monkeypatch.setattr(trace, "recorded", recorded)
    monkeypatch.setattr(trace, "executed", lambda data: [trace.Executed("cpu", [])])
    found = told(jax_tasks.traced, {**LLAMA, "mode": "forward"}, op("rows.softmax", 64, 64))
    (program, note), (operation, _) = found["case-0"], found["case-1"]
    assert len(program["walls_us"]) >= 3
    assert len(operation["us_each"]) == 9
    assert min(operation["us_each"]) > 0
    assert note["table"] == "notes"
    assert note["text"] == "no kernels: " + (
        "RuntimeError: CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"
        if what == "refused"
        else "no kernel of it appears in the trace"
    )


def test_kernels_are_those_without_command_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA takes the option on every platform, and refuses one that it does not have."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    spec = {**LLAMA, "mode": "forward"}
    row, events = told(jax_tasks.traced, spec)["case-0"]
    assert len(row["plain_us"]) >= 3
    assert len(row["walls_us"]) >= 3
    assert events["op"]
    monkeypatch.setattr(jax_cases, "_PLAIN", {"xla_gpu_no_such_option": ""})
    row, events = told(jax_tasks.traced, spec)["case-0"]
    assert "plain_us" not in row
    assert events["op"]


def test_long_runs_launches_and_anchors_of_jax() -> None:
    row, *windows, _ = told(jax_tasks.traced, {**op("elementwise.add", 64, 64), "seconds": 0.2})[
        "case-0"
    ]
    assert row["table"] == "programs"
    assert len(windows) >= 2
    assert all(w["us_each"] > 0 and w["executions"] >= 1 for w in windows)
    (launch,) = told(partial(jax_tasks.run, "launches"), {"arguments": 3})["case-0"]
    assert min(launch["issue_us"]) > 0
    assert min(launch["blocked_us"]) > 0
    assert set(jax_tasks.anchors()) >= {"product_us", "memory_us"}


def test_models_and_products_of_pytorch() -> None:
    pytest.importorskip("torch")
    spec = {
        "library": "opcast.datagen.campaign.torch_models", "model": "small_cnn", "batch": 2,
        "img_size": 16, "dtype": "amp-bf16", "layout": "nhwc", "framework": "torch-eager",
    }  # fmt: skip

    def models(cases: Any, tell: Any) -> None:
        torch_tasks.run("models", cases, tell)

    def products(cases: Any, tell: Any) -> None:
        torch_tasks.run("products", cases, tell)

    found = told(models, {**spec, "mode": "train"}, {**spec, "mode": "infer", "model": "none"})
    (row,) = found["case-0"]
    # 3·16·9 + 16·2 + 16·32·9 + 32·2 + 32·10, and the biases.
    weights = 3 * 16 * 9 + 16 + 2 * 16 + 16 * 32 * 9 + 32 + 2 * 32 + 32 * 10 + 10
    assert row["param_m"] * 1e6 == pytest.approx(weights)
    assert (row["mode"], row["layout"], row["dtype"]) == ("train", "nhwc", "amp-bf16")
    assert len(row["walls_us"]) >= 3
    assert isinstance(found["case-1"], Exception)
    sizes = {"m": 32, "n": 16, "k": 64}
    found = told(products, {**sizes, "dtype": "fp32"}, {**sizes, "dtype": "fp5"})
    (row,) = found["case-0"]
    assert (row["m"], row["n"], row["k"], row["dtype"]) == (32, 16, 64, "fp32")
    assert min(row["us_each"]) > 0
    assert isinstance(found["case-1"], KeyError)


def test_times_of_calls() -> None:
    calls: list[int] = []
    assert len(time_calls(lambda: calls.append(0), lambda _: None, 5)) == 5
    assert len(calls) == 6  # one warms up
    found = time_launches(lambda: calls.append(0), lambda _: None)
    assert len(found["issue_us"]) == 15
    windows = time_windows(lambda: None, lambda _: None, 1e-3, 0.05)
    assert {w["executions"] for w in windows} == {12}  # a quarter of 50 ms
