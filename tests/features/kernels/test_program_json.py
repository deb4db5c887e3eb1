"""Round trips of schedules through JSON."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest

from opcast.common.errors import DatasetError
from opcast.features.ir.hlo_reader import parse_hlo
from opcast.features.kernels.extract import extract_kernels
from opcast.features.kernels.kernel import LoweredProgram
from opcast.features.kernels.program_json import schedule_from_json, schedule_to_json

ASYNC = """HloModule m, is_scheduled=true

add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT s = f32[] add(a, b)
}

move {
  x = f32[1024] parameter(0)
  ROOT y = f32[1024] copy(x)
}

ENTRY main {
  g = f32[1024] parameter(0)
  start = f32[1024] all-reduce-start(g), replica_groups={{0,1}}, to_apply=add
  other = f32[1024] negate(g)
  done = f32[1024] all-reduce-done(start)
  moving = ((f32[1024]), f32[1024], u32[]) async-start(other), calls=move
  moved = f32[1024] async-done(moving)
  ROOT r = f32[1024] add(done, moved)
}
"""


def scan(x, w):
    def body(c, _):
        return jnp.tanh(c @ w), c.sum()

    return jax.lax.scan(body, x, None, length=7)


def halved(x, least):
    return jax.lax.while_loop(lambda c: c.sum() > least.sum(), lambda c: c / 2, x)


@pytest.fixture(params=["scan", "while", "async"])
def lowered(request):
    hlo = ASYNC
    if request.param != "async":
        x = jax.ShapeDtypeStruct((32, 32), jnp.float32)
        loop = scan if request.param == "scan" else halved
        hlo = jax.jit(loop).lower(x, x).compile().as_text()
    kernels, _ = extract_kernels(parse_hlo(hlo))
    return LoweredProgram(kernels, "xla", "cpu-x", "xla 1", 123.0, "compiler", ["a note"], hlo)


FIELDS = (
    "kind", "ir", "hash", "flops", "transcendentals", "bytes_in", "bytes_out", "multiplicity",
    "operands", "scope", "endless", "async_role", "async_peer", "dtype",
)  # fmt: skip


def as_rows(lowered):
    return [[getattr(k, name) for name in FIELDS] for k in lowered.kernels]


def test_kernels_of_a_loop_that_data_end_are_endless():
    x = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    for loop, ended in ((halved, True), (scan, False)):
        kernels, _ = extract_kernels(parse_hlo(jax.jit(loop).lower(x, x).compile().as_text()))
        inside = [k for k in kernels if k.scope]
        assert inside and all(k.endless is ended for k in inside)
        assert not any(k.endless for k in kernels if not k.scope)


def test_round_trip(lowered):
    again = schedule_from_json(schedule_to_json(lowered), {})
    assert as_rows(again) == as_rows(lowered)
    for name in ("lowering", "target", "compiler", "peak_memory_bytes", "memory_source", "notes"):
        assert getattr(again, name) == getattr(lowered, name)


def test_known_kernels_are_left_out(lowered):
    texts = {k.hash: k.ir for k in lowered.kernels}
    text = schedule_to_json(lowered, set(texts))
    assert json.loads(text)["irs"] == {}
    assert "HloModule" not in text
    assert as_rows(schedule_from_json(text, texts)) == as_rows(lowered)
    unknown = lowered.kernels[0].hash
    partly = json.loads(schedule_to_json(lowered, set(texts) - {unknown}))
    assert list(partly["irs"]) == [unknown]


def test_missing_texts_are_an_error(lowered):
    text = schedule_to_json(lowered, {k.hash for k in lowered.kernels})
    with pytest.raises(DatasetError, match="missing"):
        schedule_from_json(text, {})


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.pop("operands"),
        lambda d: d["kernel"].append(0),
        lambda d: d.update(kernel=[999] * len(d["kernel"])),
        lambda d: d.update(schema=99),
        lambda d: d["irs"].update(dict.fromkeys(d["irs"], "no HLO")),
    ],
)
def test_damage_is_an_error(lowered, change):
    data = json.loads(schedule_to_json(lowered))
    change(data)
    with pytest.raises(DatasetError):
        schedule_from_json(json.dumps(data), {})


def test_truncated_text_is_an_error(lowered):
    with pytest.raises(DatasetError, match="damaged"):
        schedule_from_json(schedule_to_json(lowered)[:50], {})
    with pytest.raises(DatasetError, match="damaged"):
        schedule_from_json("[]", {})
