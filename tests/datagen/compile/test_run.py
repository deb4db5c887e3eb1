"""Compile runs: they resume, survive refusals, and work with the real compiler."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from opcast.common.errors import CompilerError, CompilerStartError, DatasetError, LoweringError
from opcast.datagen.compile import run as compile_run
from opcast.datagen.compile.plan import CompilePlan
from opcast.datagen.compile.run import SOURCE, compile_dataset, merge_dataset
from opcast.datagen.dataset_folder import read_failures
from opcast.features.dataset import Dataset
from opcast.features.devices.catalogue import find_device
from opcast.features.lowering.target_compiler.install import Compiler, find_compiler
from opcast.features.lowering.target_compiler.process import CompiledModule
from opcast.features.lowering.target_compiler.target import CompileTarget

HLO = Path(__file__).parents[2] / "features" / "data" / "absent" / "v5e_bmm.hlo"
PLAN = CompilePlan(ops=1, random=0, suite="")


@pytest.fixture
def compiler(monkeypatch):
    """Replaces the compiler by one that always answers with the same module."""
    target = CompileTarget("tpu-v5e", "tpu", "v5e", "", 8, (), Compiler("tpu", None, "fake 1"))
    calls: list[int] = []

    def answer(programs, *rest):
        calls.append(len(programs))
        return [CompiledModule(HLO.read_text(), 0.1, {}, "fake 1") for _ in programs]

    monkeypatch.setattr(compile_run, "target_of", lambda device: target)
    monkeypatch.setattr(compile_run, "compile_programs", answer)
    return calls


def test_a_run_goes_on_where_it_stopped(compiler, tmp_path: Path) -> None:
    device = find_device("tpu-v5e")
    for _ in range(2):
        compile_dataset(tmp_path, [device], 1e-3, plan=PLAN, progress=False)
    dataset = Dataset.load(tmp_path)
    assert set(dataset.frame["program"]) == {"op-0-000000", "op-0-000001"}
    (record,) = dataset.runs.values()
    assert record["rounds"] == 2
    assert record["compiler"] == "fake 1"
    merged = merge_dataset(tmp_path)
    assert len(merged) == merged.frame["kernel_hash"].nunique() == len(Dataset.load(tmp_path))
    assert set(merged.frame["repeats"]) == {2}


@pytest.mark.parametrize(("clock_hz", "bandwidth"), [(1.5e9, 819e9), (1.0e9, 1.0)])
def test_records_describe_devices_as_the_catalogue_does_now(
    compiler, tmp_path: Path, clock_hz: float, bandwidth: float
) -> None:
    device = find_device("tpu-v5e")
    old = replace(device, clock_hz=clock_hz, levels=(replace(device.levels[0], bandwidth=1.0),))
    compile_dataset(tmp_path, [old], 1e-3, plan=PLAN, progress=False)
    merge_dataset(tmp_path)
    # Labels are cycles over the clock: those of another clock keep their own description.
    assert Dataset.load(tmp_path).devices["tpu-v5e"].bandwidth == bandwidth


def test_a_plan_without_programs_is_done(compiler, tmp_path: Path) -> None:
    plan = CompilePlan(ops=0, random=0, suite="")
    result = compile_dataset(tmp_path, [find_device("tpu-v5e")], 60.0, plan=plan, progress=False)
    assert (result.stopped, result.samples, compiler) == ("done", 0, [])


def test_a_refused_program_does_not_spoil_the_others(compiler, tmp_path: Path, monkeypatch) -> None:
    plan = CompilePlan(ops=3, random=0, suite="")
    bad = plan.round(0)[1].mlir
    good = compile_run.compile_programs
    spoilt = compile_run.merge_programs

    def merge(programs):
        found = spoilt(programs)
        if bad in programs:
            object.__setattr__(found, "data", b"bad")
        return found

    def answer(programs, *rest):
        return [LoweringError("no") if p == b"bad" else good([p])[0] for p in programs]

    monkeypatch.setattr(compile_run, "merge_programs", merge)
    monkeypatch.setattr(compile_run, "compile_programs", answer)
    result = compile_dataset(tmp_path, [find_device("tpu-v5e")], 1e-3, plan=plan, progress=False)
    assert result.failed == 1
    assert [f["program"] for f in read_failures(tmp_path)] == ["op-0-000001"]
    assert set(Dataset.load(tmp_path).frame["program"]) >= {"op-0-000000"}


def test_a_compiler_that_does_not_start_ends_the_run(compiler, tmp_path: Path, monkeypatch) -> None:
    def answer(*rest):
        raise CompilerStartError("does not start")

    monkeypatch.setattr(compile_run, "compile_programs", answer)
    with pytest.raises(CompilerStartError):
        compile_dataset(tmp_path, [find_device("tpu-v5e")], 1.0, plan=PLAN, progress=False)
    assert read_failures(tmp_path) == []


def test_only_tpus_have_such_labels(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="not a TPU"):
        compile_dataset(tmp_path, [find_device("h100-sxm")], 1.0, progress=False)


def test_rounds_are_the_same_again() -> None:
    plan = CompilePlan(ops=2, random=1, suite="quick", seed=3)
    first, second = plan.round(1), plan.round(1)
    assert first[:3] == second[:3]
    assert [item.key for item in first] == [item.key for item in second]
    assert [item.merged for item in first] == [True, True, True, False]
    assert plan.round(2)[0].key == "op-3-000004"


def test_large_ops_are_large_and_alone() -> None:
    items = CompilePlan(ops=0, random=0, suite="", large=3).round(1)
    assert [item.key for item in items] == [f"large-0-{n:06d}" for n in (3, 4, 5)]
    assert [item.family for item in items] == ["op:softmax", "op:layer_norm", "op:reduce"]
    assert not any(item.merged for item in items)


@pytest.mark.slow
def test_the_real_compiler_labels_a_tiny_round(tmp_path: Path) -> None:
    try:
        find_compiler("tpu")
    except CompilerError as error:
        pytest.skip(f"no TPU compiler: {error.what}")
    plan = CompilePlan(ops=2, random=1, suite="")
    device = find_device("tpu-v5e")
    result = compile_dataset(tmp_path, [device], 1.0, plan=plan, progress=False)
    frame = Dataset.load(tmp_path).frame
    assert result.samples == len(frame) > 0
    assert (frame["latency_us_p50"] > 0).all()
    assert set(frame["source"]) == {SOURCE}
    assert set(frame["family"].str.split(":").str[0]) <= {"op", "random"}
