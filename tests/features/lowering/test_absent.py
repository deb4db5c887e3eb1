"""Lowering for a device that is not there, with the compiler's answers put in by hand."""

from __future__ import annotations

import pytest

from opcast.common.errors import LoweringError
from opcast.features.devices.catalogue import find_device
from opcast.features.ir.reader import read_program
from opcast.features.lowering import absent
from opcast.features.lowering.absent import lower_absent
from opcast.features.lowering.cache import LoweringCache
from opcast.features.lowering.lower import lower_with
from opcast.features.lowering.options import LoweringOptions
from opcast.features.lowering.target_compiler.install import Compiler
from opcast.features.lowering.target_compiler.process import CompiledModule, CompileSettings
from opcast.features.lowering.target_compiler.target import CompileTarget

H100 = find_device("h100-sxm")
SOURCE = """module @small {
  func.func public @main(%x: tensor<8xf32>) -> tensor<8xf32> {
    %y = stablehlo.negate %x : tensor<8xf32>
    return %y : tensor<8xf32>
  }
}
"""
HLO = """HloModule small, is_scheduled=true
ENTRY main {
  x = f32[8] parameter(0)
  ROOT y = f32[8] negate(x)
}
"""
NOTE = "of the target"


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> list:
    """Answers of the compiler, one a program; the last stays. ``calls`` counts its uses."""
    answers: list = [CompiledModule(HLO, 2.5, {"peak_memory_in_bytes": 96}, "1")]
    target = CompileTarget(
        "h100-sxm", "cuda", "sm_90", "config", 8, (), Compiler("gpu", None, "xla 1"), (NOTE,)
    )

    def compile_programs(programs, shapes, target, settings, *, origin):
        answers.append("called")
        return [answers[0]] * len(programs)

    monkeypatch.setattr(absent, "compile_programs", compile_programs)
    monkeypatch.setattr(absent, "target_of", lambda device: target)
    return answers


def test_what_the_compiler_said_is_told(compiler: list) -> None:
    found = lower_absent(read_program(SOURCE), H100, None)
    assert len(found.kernels) == 1 and found.kernels[0].bytes == 2 * 8 * 4
    assert (found.peak_memory_bytes, found.memory_source) == (96.0, "compiler")
    assert found.compile_seconds == 2.5 and found.notes == [NOTE]
    assert found.target == "h100-sxm" and found.compiler == "xla xla 1 for sm_90"


def test_a_program_is_compiled_once_for_one_set_of_options(tmp_path, compiler: list) -> None:
    cache, source = LoweringCache(tmp_path), read_program(SOURCE)
    first, again = (lower_absent(source, H100, cache) for _ in range(2))
    assert compiler.count("called") == 1
    assert [k.hash for k in again.kernels] == [k.hash for k in first.kernels]
    assert again.compile_seconds == 2.5 and again.notes == [NOTE]
    for settings in (CompileSettings(flags={"xla_flag": True}), CompileSettings(repeats=False)):
        lower_absent(source, H100, cache, settings=settings)
    assert compiler.count("called") == 3
    # Limits decide nothing about the kernels.
    lower_absent(source, H100, cache, settings=CompileSettings(timeout_s=1.0, progress=False))
    assert compiler.count("called") == 3


def test_a_refusal_is_raised_or_another_lowering_taken(compiler: list) -> None:
    compiler[0] = LoweringError("the compiler refuses the program: no tiles")
    source = read_program(SOURCE)
    with pytest.raises(LoweringError, match="no tiles"):
        lower_absent(source, H100, None)
    options = LoweringOptions("xla", H100, fallback="op", cache=False)
    found = lower_with(source, options)
    assert found.lowering == "op"
    assert "lowering op instead of xla" in found.notes[-1] and "no tiles" in found.notes[-1]
