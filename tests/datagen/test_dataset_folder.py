"""The writer of datasets: identities, order of writes, and going on after a kill."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from opcast.common.errors import DatasetError
from opcast.datagen.dataset_folder import (
    FAILURES,
    RunWriter,
    done_programs,
    read_failures,
    replace_shards,
    run_records,
)
from opcast.features.dataset import COLUMNS, Dataset
from opcast.features.devices.catalogue import find_device

DEVICE = asdict(find_device("l4"))


def row(program: str, source: str = "measured:trace", level: str = "kernel") -> dict[str, object]:
    values: dict[str, object] = {c: "" if t == "str" else 1.0 for c, t in COLUMNS.items()}
    for column in ("sample_id", "device", "run_id"):
        del values[column]
    return values | {"kernel_hash": "k", "level": level, "program": program, "source": source}


def writer(folder: Path, run_id: str = "r") -> RunWriter:
    run = RunWriter(folder, run_id)
    run.record["device"] = DEVICE
    return run


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("source", "identity"),
    [
        ("measured:wall", "k|kernel|p|l4|r"),
        ("compiler:libtpu", "k|kernel|p|l4|r"),
        ("simulator:scalesim", "k|p|l4|r"),
        ("published:vidur", "k|r|p"),
    ],
)
def test_ids_of_every_source_stay_as_they_are(tmp_path: Path, source: str, identity: str) -> None:
    run = writer(tmp_path)
    run.add_rows([row("p", source)], "l4")
    run.flush()
    assert Dataset.load(tmp_path).frame["sample_id"].tolist() == [digest(identity)]


def test_one_kernel_alone_and_as_a_program_are_two_samples(tmp_path: Path) -> None:
    run = writer(tmp_path)
    run.add_rows([row("p"), row("p", level="program")], "l4")
    run.flush()
    assert Dataset.load(tmp_path).frame["sample_id"].is_unique


def test_the_record_is_there_before_the_rows(tmp_path: Path) -> None:
    run = writer(tmp_path)
    run.flush("a")
    assert not list(tmp_path.iterdir())  # nothing to write
    run.add_rows([row("p")], "l4")
    run.flush("a")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run-r.json", "samples-r-a.parquet"]
    assert run.samples == 1


def test_a_run_goes_on_with_its_record(tmp_path: Path) -> None:
    first = writer(tmp_path)
    assert not first.resumed
    first.record["rounds"] = 3
    first.save_record()
    again = RunWriter(tmp_path, "r")
    assert again.resumed and again.record["rounds"] == 3
    assert list(run_records(tmp_path)) == ["r"]


def test_a_record_of_another_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run-r.json").write_text(json.dumps({"run_id": "s", "device": DEVICE}))
    with pytest.raises(DatasetError, match="of run 's'"):
        RunWriter(tmp_path, "r")
    (tmp_path / "run-r.json").write_text(json.dumps({"device": DEVICE}))
    with pytest.raises(DatasetError, match="'run_id' is missing"):
        run_records(tmp_path)


def test_done_programs_are_those_on_disk(tmp_path: Path) -> None:
    run = writer(tmp_path)
    run.add_rows([row("a"), row("b")], "l4")
    run.add_failure("c", "does not compile")
    run.drop_rows(["b"])
    assert done_programs(tmp_path) == set()
    run.flush()
    assert done_programs(tmp_path) == {"a", "c"}


def test_done_programs_of_some_runs(tmp_path: Path) -> None:
    for run_id, program in (("r", "a"), ("s", "b")):
        run = writer(tmp_path, run_id)
        run.add_rows([row(program)], "l4")
        run.add_failure(f"{program} fails", "does not compile")
        run.flush()
    assert done_programs(tmp_path, {"r"}) == {"a", "a fails"}
    assert done_programs(tmp_path, ()) == set()
    assert done_programs(tmp_path) == {"a", "a fails", "b", "b fails"}


def test_a_half_written_failure_is_left_out(tmp_path: Path) -> None:
    (tmp_path / FAILURES).write_text('{"program": "a", "reason": "x"}\n{"program": "b", "rea')
    run = writer(tmp_path)
    run.add_failure("c", "y")
    run.flush()
    assert [f["program"] for f in read_failures(tmp_path)] == ["a", "c"]


def test_a_dataset_too_large_for_one_file_keeps_its_shards(tmp_path: Path) -> None:
    run = writer(tmp_path)
    for program in ("a", "b"):
        run.add_rows([row(program)], "l4")
        run.flush()
    with pytest.raises(DatasetError, match="more than"):
        replace_shards(tmp_path, Dataset.load(tmp_path).frame, max_bytes=10.0)
    assert len(list(tmp_path.glob("*.parquet"))) == 2
    assert replace_shards(tmp_path, Dataset.load(tmp_path).frame).name == "samples.parquet"
    assert [p.name for p in tmp_path.glob("*.parquet")] == ["samples.parquet"]
    assert set(Dataset.load(tmp_path).frame["program"]) == {"a", "b"}
