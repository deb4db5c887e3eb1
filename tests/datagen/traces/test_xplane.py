from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from opcast.common.errors import DatasetError
from opcast.common.wire import fields
from opcast.datagen.traces.importer import import_trace, trace_files
from opcast.datagen.traces.trace import RunTime, typical
from opcast.datagen.traces.xla import read_xplane, traced_programs
from opcast.features.dataset import Dataset
from opcast.features.devices.catalogue import find_device

SIZES = (128, 192)


def secret_step(w: jax.Array, x: jax.Array) -> jax.Array:
    def layer(_: int, c: jax.Array) -> jax.Array:
        return jnp.tanh(c @ w)

    return jax.lax.fori_loop(0, 3, layer, x).sum(axis=1)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Profile of two programs of one name: five runs each."""
    folder = tmp_path_factory.mktemp("log")
    own = [(jnp.ones((n, n)), jnp.ones((64, n))) for n in SIZES]
    programs = [jax.jit(secret_step).lower(*args).compile() for args in own]
    for program, args in zip(programs, own, strict=True):
        jax.block_until_ready(program(*args))
    with jax.profiler.trace(str(folder)):
        for _ in range(5):
            for program, args in zip(programs, own, strict=True):
                jax.block_until_ready(program(*args))
    return folder


def test_programs_of_one_name_are_told_apart(log: Path) -> None:
    (file,) = trace_files([log])
    programs = traced_programs(read_xplane(file))
    assert len({p.module for p in programs}) == 2
    assert all(p.module.startswith("jit_secret_step(") for p in programs)
    for program in programs:
        assert len(program.runs) == 5
        assert not program.unmatched
        products = [k for k in program.lowered.kernels if k.kind == "gemm"]
        # Three iterations of five runs.
        assert [len(program.durations[k.name]) for k in products] == [15]
        step = typical(program.runs)
        assert 0 < step.busy <= step.span and step.collectives == 0
        assert min(min(s) for s in program.durations.values()) > 0


def test_import_is_anonymous_and_whole(log: Path, tmp_path: Path) -> None:
    (file,) = trace_files([log])
    trace = read_xplane(file)
    device = find_device("h100-sxm")
    result = import_trace(trace, tmp_path / "out", device)
    assert result.matched == 1.0 and sorted(result.programs.values()) == [5, 5]
    frame = Dataset.load(tmp_path / "out").frame
    assert len(frame) == result.samples
    assert (frame["level"] == "program").sum() == 2
    sources = set(frame["source"])
    assert sources == {"trace:kernels", "trace:span"}
    texts = frame.to_csv() + "".join(p.read_text() for p in (tmp_path / "out").glob("*.json"))
    assert "secret" not in texts and "test_xplane" not in texts
    named = import_trace(trace, tmp_path / "named", device, keep_names=True)
    assert all("secret_step" in name for name in named.programs)


def test_a_damaged_profile_is_told(log: Path, tmp_path: Path) -> None:
    (file,) = trace_files([log])
    cut = tmp_path / "cut.xplane.pb"
    cut.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(DatasetError, match="cut off or damaged"):
        read_xplane(cut)


def test_a_profile_without_kernels_says_how_to_record(tmp_path: Path) -> None:
    with jax.profiler.trace(str(tmp_path)):
        pass
    (file,) = trace_files([tmp_path])
    with pytest.raises(DatasetError, match=r"no kernels.*block_until_ready"):
        read_xplane(file)


def test_fields_of_a_message() -> None:
    # Field 1: varint 300; field 2: bytes "ab"; field 3: four bytes.
    data = b"\x08\xac\x02" + b"\x12\x02ab" + b"\x1d\x00\x00\x80\x3f"
    found = [(n, v if isinstance(v, int) else bytes(v)) for n, v in fields(memoryview(data))]
    assert found == [(1, 300), (2, b"ab"), (3, b"\x00\x00\x80\x3f")]
    for cut in (data[:2], data[:6], data[:-1], b"\x0b"):
        with pytest.raises(ValueError, match="byte"):
            list(fields(memoryview(cut)))


def test_the_run_in_the_middle_leaves_the_first_out() -> None:
    runs = [
        RunTime(float(i), span, span, span, 0, 0) for i, span in enumerate((9.0, 3.0, 1.0, 2.0))
    ]
    assert typical(runs).span == 2.0
