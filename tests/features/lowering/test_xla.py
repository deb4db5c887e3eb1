"""Kernels of optimised modules: trip counts that the user gives, and what the cache keeps."""

from __future__ import annotations

import pytest

from opcast.features.ir.hlo_reader import parse_hlo
from opcast.features.ir.reader import read_program
from opcast.features.lowering import xla
from opcast.features.lowering.cache import LocalTarget, LoweringCache
from opcast.features.lowering.xla import NativeExecutable, lower_compiled, lower_xla

TARGET = LocalTarget("some-cpu", "cpu", "xla 1 cpu", 1)

#: A loop whose condition reads a value, so that nothing says how often it runs.
LOOP = """HloModule m, is_scheduled=true
body {
  s = (f32[8]) parameter(0)
  v = f32[8] get-tuple-element(s), index=0
  w = f32[8] negate(v)
  ROOT t = (f32[8]) tuple(w)
}
condition {
  s = (f32[8]) parameter(0)
  v = f32[8] get-tuple-element(s), index=0
  first = f32[1] slice(v), slice={[0:1]}
  value = f32[] reshape(first)
  zero = f32[] constant(0)
  ROOT less = pred[] compare(value, zero), direction=LT
}
ENTRY main {
  x = f32[8] parameter(0)
  s = (f32[8]) tuple(x)
  loop = (f32[8]) while(s), condition=condition, body=body
  ROOT y = f32[8] get-tuple-element(loop), index=0
}
"""
SMALL = """HloModule small, is_scheduled=true
ENTRY main {
  x = f32[8] parameter(0)
  ROOT y = f32[8] negate(x)
}
"""
SOURCE = """module @small {
  func.func public @main(%x: tensor<8xf32>) -> tensor<8xf32> {
    %y = stablehlo.negate %x : tensor<8xf32>
    return %y : tensor<8xf32>
  }
}
"""


@pytest.mark.parametrize(("given", "times"), [(None, 1), (7, 7), ({"loop": 5}, 5), ({"k": 5}, 1)])
def test_trip_counts_of_the_user(given, times: int) -> None:
    lowered = lower_compiled(parse_hlo(LOOP), LOOP, read_program(LOOP), TARGET, {}, given)
    (negate,) = [k for k in lowered.kernels if k.takes_time and "negate" in k.ir]
    assert negate.multiplicity == times
    assert bool(lowered.notes) == (times == 1)
    assert lowered.target == "some-cpu" and lowered.memory_source == "liveness"


def test_the_compilers_own_peak_is_taken() -> None:
    meta = {"peak_memory_bytes": 12345, "compiler": "xla 1 cpu"}
    lowered = lower_compiled(parse_hlo(SMALL), SMALL, read_program(SMALL), TARGET, meta)
    assert (lowered.peak_memory_bytes, lowered.memory_source) == (12345.0, "compiler")
    assert lowered.compiler == "xla 1 cpu"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the compiler; holds a word for each compilation."""
    calls: list[str] = []

    def compile_native(source) -> NativeExecutable:
        calls.append(source.kind)
        return NativeExecutable(source, None, SMALL, 64.0, TARGET)

    monkeypatch.setattr(xla, "compile_native", compile_native)
    monkeypatch.setattr(xla, "local_target", lambda: TARGET)
    return calls


def test_a_program_is_compiled_once(tmp_path, compiled: list[str]) -> None:
    cache, source = LoweringCache(tmp_path), read_program(SOURCE)
    first, again = (lower_xla(source, cache) for _ in range(2))
    assert compiled == ["stablehlo"]
    assert [k.hash for k in again.kernels] == [k.hash for k in first.kernels]
    assert again.hlo == SMALL and again.peak_memory_bytes == 64.0
    lower_xla(source, None)
    assert len(compiled) == 2


def test_a_module_in_the_cache_that_cannot_be_read_is_compiled_again(
    tmp_path, compiled: list[str]
) -> None:
    cache, source = LoweringCache(tmp_path), read_program(SOURCE)
    lower_xla(source, cache)
    (path,) = tmp_path.glob("*/*.json.gz")
    cache.put(path.name.removesuffix(".json.gz"), "no HLO", {})
    assert len(lower_xla(source, cache).kernels) == 1
    assert len(compiled) == 2


def test_scheduled_hlo_is_taken_as_it_is(compiled: list[str]) -> None:
    lowered = lower_xla(read_program(SMALL), None)
    assert compiled == [] and lowered.hlo == SMALL and lowered.target == "hlo"
