"""Compiling in a process of its own: crashes, hangs, limits, the cache; and for real."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from opcast.common.errors import CompilerError, LoweringError
from opcast.datagen.zoo import build
from opcast.features.devices.catalogue import find_device
from opcast.features.ir.partitioning import annotated_devices, header_counts
from opcast.features.ir.platforms import Platform
from opcast.features.ir.reader import read_program
from opcast.features.lowering.cache import LoweringCache
from opcast.features.lowering.lower import lower
from opcast.features.lowering.target_compiler import install as compilers
from opcast.features.lowering.target_compiler import process as compile_process
from opcast.features.lowering.target_compiler.install import Compiler, find_compiler
from opcast.features.lowering.target_compiler.process import CompileSettings, compile_programs
from opcast.features.lowering.target_compiler.target import CompileTarget
from opcast.features.lowering.target_compiler.worker import DETOURS

from ....support.costs import program_cost

TARGET = CompileTarget(
    "h100-sxm", "cuda", "sm_90", "config", 8, (), Compiler("gpu", Path("/none"), "fake 1")
)
SETTINGS = CompileSettings(timeout_s=20, progress=False)
HLO = (Path(__file__).parents[2] / "data" / "absent" / "h100_bmm.hlo").read_text()
#: A compile process of which a test says what it does with ``folder`` and each ``number``.
WORKER = """
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
job = json.loads((folder / "job.json").read_text())
def done(number, **data):
    path = folder / f"result{number}.json"
    path.with_suffix(".p").write_text(json.dumps(data))
    path.with_suffix(".p").replace(path)
for number in range(len(job["shapes"])):
    text = (folder / f"program{number}").read_bytes().decode(errors="replace")
"""


@pytest.fixture
def worker(monkeypatch):
    """Replaces the compile process by lines of a test's own."""

    def install(*lines: str) -> None:
        script = WORKER + "\n".join("    " + line for line in lines)
        monkeypatch.setattr(
            compile_process, "_command", lambda folder: [sys.executable, "-c", script, str(folder)]
        )

    return install


def test_results_and_refusals_stay_in_order(worker) -> None:
    worker(
        "if text == 'bad': done(number, error='XlaRuntimeError: no\\nmore', stage='compile')",
        "else:",
        "    (folder / f'hlo{number}.txt').write_text(text.upper())",
        "    done(number, seconds=1.5, memory={'peak_memory_in_bytes': 7}, version='v')",
    )
    first, second, third = compile_programs([b"a", b"bad", b"c"], [(1, 1)] * 3, TARGET, SETTINGS)
    assert (first.hlo, first.seconds, first.memory) == ("A", 1.5, {"peak_memory_in_bytes": 7})
    assert isinstance(second, LoweringError) and "XlaRuntimeError: no" in str(second)
    assert third.hlo == "C"


def test_a_crash_counts_for_one_program_only(worker) -> None:
    worker(
        "if text == 'crash':",
        "    print('F0000 00:00 Check failed: x == y', file=sys.stderr, flush=True)",
        "    os.kill(os.getpid(), signal.SIGABRT)",
        "(folder / f'hlo{number}.txt').write_text(text)",
        "done(number, seconds=0, memory={}, version='v')",
    )
    results = compile_programs([b"a", b"crash", b"c"], [(1, 1)] * 3, TARGET, SETTINGS, origin="m")
    assert [type(r).__name__ for r in results] == ["CompiledModule", "CompilerError",
                                                   "CompiledModule"]  # fmt: skip
    assert "SIGABRT" in str(results[1]) and "Check failed" in str(results[1])
    assert str(results[1]).startswith("m: ")


def test_a_hang_ends_at_the_limit(worker) -> None:
    worker("time.sleep(100)")
    with pytest.raises(CompilerError, match="did not end within 1 s"):
        compile_programs([b"a"], [(1, 1)], TARGET, replace(SETTINGS, timeout_s=1))


def test_running_out_of_memory_is_named(worker) -> None:
    worker("print('std::bad_alloc', file=sys.stderr, flush=True); os.abort()")
    (found,) = compile_programs([b"a"], [(1, 1)], TARGET, SETTINGS)
    assert "ran out of memory" in str(found) and "--compile-memory" in str(found)


def test_a_plug_in_that_does_not_start(worker) -> None:
    worker("done(0, error='RuntimeError: no such plug-in', stage='start'); break")
    with pytest.raises(CompilerError, match="does not start: RuntimeError: no such plug-in"):
        compile_programs([b"a", b"b"], [(1, 1)] * 2, TARGET, SETTINGS)


def test_the_users_flags_do_not_reach_the_compiler(worker, monkeypatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    worker(
        "(folder / 'hlo0.txt').write_text(json.dumps([os.environ.get('XLA_FLAGS'), job['flags']]))",
        "done(0, seconds=0, memory={}, version='v')",
    )
    settings = replace(SETTINGS, flags={"xla_y": 2})
    target = replace(TARGET, flags=(("xla_x", "1"),))
    (found,) = compile_programs([b"a"], [(1, 1)], target, settings)
    assert json.loads(found.hlo) == [None, {"xla_x": "1", "xla_y": 2}]


def program(devices: int = 1) -> str:
    def f(x, w, c):
        return 0.5 * jnp.einsum("bij,bjk->bik", x, w) + c

    arg = jax.ShapeDtypeStruct((8, 512, 512), jnp.bfloat16)
    return jax.jit(f).lower(arg, arg, arg).as_text()


@pytest.fixture
def compiles(worker, monkeypatch, tmp_path):
    """A compiler that makes the module of the fixture of any program, and counts how often."""
    count = tmp_path / "count"
    count.write_text("")
    worker(
        f"open({str(count)!r}, 'a').write('x')",
        f"(folder / 'hlo0.txt').write_text({HLO!r})",
        "done(0, seconds=2.0, memory={'peak_memory_in_bytes': 123456}, version='v')",
    )
    monkeypatch.setattr(
        "opcast.features.lowering.absent.target_of", lambda d: replace(TARGET, device=d.name)
    )
    return lambda: len(count.read_text())


def test_lowering_takes_the_compilers_figures_and_is_cached(compiles, tmp_path) -> None:
    cache, device = LoweringCache(tmp_path / "cache"), find_device("h100-sxm")
    first = lower(program(), device=device, cache=cache)
    again = lower(program(), device=device, cache=cache)
    assert compiles() == 1
    for found in (first, again):
        assert found.peak_memory_bytes == 123456 and found.memory_source == "compiler"
        assert found.target == "h100-sxm" and "fake 1 for sm_90" in found.compiler
        assert found.compile_seconds == 2.0
        assert [k.kind for k in found.kernels] == ["gemm"] and found.notes == []
    flags = CompileSettings(flags={"xla_gpu_enable_triton_gemm": False})
    lower(program(), device=device, cache=cache, settings=flags)
    assert compiles() == 2


def test_lost_work_is_noted(compiles) -> None:
    def f(x, w, v):
        return x @ w @ v

    arg = jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16)
    text = jax.jit(f).lower(arg, arg, arg).as_text()
    found = lower(text, device=find_device("h100-sxm"), cache=False)
    assert any("34.36 GFLOP" in note and "2.15" in note for note in found.notes)


def test_a_missing_compiler_says_what_to_run(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("OPCAST_COMPILERS", str(tmp_path))
    monkeypatch.setattr(compilers, "_versions", lambda folder: {})
    with pytest.raises(CompilerError, match="no gpu compiler") as caught:
        lower(program(), device=find_device("h100-sxm"), cache=False)
    assert "opcast compilers install gpu" in caught.value.hint
    found = lower(program(), device=find_device("h100-sxm"), cache=False, fallback="op")
    assert found.lowering == "op" and any("no gpu compiler" in n for n in found.notes)


def test_a_compiler_of_another_jaxlib_is_refused(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("OPCAST_COMPILERS", str(tmp_path))
    monkeypatch.setattr(
        compilers, "_versions", lambda folder: {"jax-cuda13-pjrt": "0.1"} if not folder else {}
    )
    with pytest.raises(CompilerError, match=r"jax-cuda13-pjrt 0\.1"):
        find_compiler("gpu")


def test_devices_of_a_program() -> None:
    mesh = 'module { sdy.mesh @m = <["x"=2, "y"=4]> func.func @main() { return } }'
    told = "module attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 2 : i32} "
    tiled = (
        'module { func.func @main(%a: tensor<8xf32> {mhlo.sharding = "{devices=[4]<=[4]}"})'
        " -> tensor<8xf32> { return %a : tensor<8xf32> } }"
    )
    one = "func.func @main() { return }"
    texts = (mesh, told + "{ func.func @main() { return } }", tiled, one)
    programs = [read_program(text) for text in texts]
    assert [header_counts(p) for p in programs] == [(1, 1), (2, 4), (1, 1), (1, 1)]
    assert [annotated_devices(p) for p in programs] == [8, 1, 4, 1]


def _real(platform: str) -> None:
    try:
        find_compiler(platform)
    except CompilerError as error:
        pytest.skip(str(error))


def test_real_gpu_compiler(tmp_path, cold_compiler) -> None:
    """One small program for an NVIDIA GPU that is not there."""
    _real("gpu")
    cache = LoweringCache(tmp_path)
    found = lower(program(), device=find_device("h100-sxm"), cache=cache)
    assert [k.kind for k in found.kernels] == ["gemm"]
    source = program_cost(read_program(program()).program)
    assert found.kernels[0].flops == pytest.approx(source.flops, rel=0.01)
    assert found.peak_memory_bytes >= 4 * 8 * 512 * 512 * 2
    assert found.notes == [] and found.hlo.startswith("HloModule")


def test_sizes_for_which_the_compiler_has_no_tiles_go_without_triton(tmp_path) -> None:
    """A ViT of 197 tokens, which the compiler refuses without timing on a device."""
    _real("gpu")
    mlir = build("vit", layers=1, batch=8, dtype="bf16").mlir()
    device = find_device("h100-sxm")
    found = lower(mlir, device=device, cache=LoweringCache(tmp_path))
    (note,) = [note for note in found.notes if "Triton" in note]
    assert note == DETOURS[0][2]
    # What the user sets stays, and then the refusal is told.
    settings = CompileSettings(flags={"xla_gpu_enable_triton_gemm": True}, progress=False)
    with pytest.raises(LoweringError, match="refuses the program"):
        lower(mlir, device=device, cache=False, settings=settings)


@pytest.mark.parametrize("version", [2, 4])
def test_programs_compile_that_call_absent_libraries(tmp_path, version) -> None:
    """By either interface of XLA: nothing is run."""
    _real("gpu")

    def call(x):
        return jax.ffi.ffi_call(f"absent{version}", x, custom_call_api_version=version)(x) + 1.0

    x = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    source = read_program(call, x, platform=Platform("cuda", 90))
    found = lower(source, device=find_device("h100-sxm"), cache=LoweringCache(tmp_path))
    assert [k.kind for k in found.kernels] == ["custom_call", "fusion"]


SHARDED = """
import jax, jax.numpy as jnp, numpy as np, sys
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P
from jax.sharding import Mesh
mesh = Mesh(np.array(jax.devices()), ("x",))
def f(x, w):
    return jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)
s = lambda shape, *p: jax.ShapeDtypeStruct(shape, "bfloat16", sharding=NamedSharding(mesh, P(*p)))
lowered = jax.jit(f, out_shardings=NamedSharding(mesh, P())).lower(s((4096, 512), "x"),
                                                                    s((512, 512)))
sys.stdout.write(lowered.as_text())
"""


@pytest.mark.slow
def test_real_gpu_compiler_partitions(tmp_path) -> None:
    """A program with sharding annotations over four devices gets an all-reduce."""
    import subprocess

    _real("gpu")
    flags = "--xla_force_host_platform_device_count=4"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", SHARDED], env=env, capture_output=True, text=True, check=True
    )
    source = read_program(done.stdout)
    assert header_counts(source) == (1, 4)
    found = lower(source, device=find_device("a100-sxm-80gb"), cache=False)
    assert any(k.kind == "collective" for k in found.kernels)
    gemms = sum(k.flops for k in found.kernels if k.kind == "gemm")
    assert gemms == pytest.approx(2 * 2 * 4096 * 512 * 512 / 4, rel=0.02)


@pytest.mark.slow
def test_real_tpu_compiler(tmp_path, cold_compiler) -> None:
    """One small program for a TPU that is not there."""
    _real("tpu")
    found = lower(program(), device=find_device("tpu-v5e"), cache=LoweringCache(tmp_path))
    assert sum(k.cycles for k in found.kernels) > 0
    assert sum(k.flops for k in found.kernels) == pytest.approx(2 * 8 * 512**3, rel=0.02)
    assert found.memory_source == "compiler"
    again = lower(program(), device=find_device("tpu-v5e"), cache=LoweringCache(tmp_path))
    assert [k.cycles for k in again.kernels] == [k.cycles for k in found.kernels]
