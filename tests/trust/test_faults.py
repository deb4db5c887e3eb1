"""Kill -9, full disks, read-only folders, other processes, damaged files, dying compilers."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from pyarrow import parquet

from opcast.common.errors import DatasetError, FileError, ModelError
from opcast.common.files import PARTIAL, append_lines, locked, read_lines, write_bytes
from opcast.common.parquet import kept_table, write_table
from opcast.features.dataset import Dataset, write_text
from opcast.features.devices.catalogue import find_device
from opcast.features.lowering.cache import LoweringCache
from opcast.features.operators import op_features
from opcast.models.core.store import write_folder
from opcast.models.cost_model import CostModel

from ..support.cases import every
from ..support.commands import opcast as here
from ..support.processes import wait_for_end
from .test_attacks import V1, dataset, schema

DRIVER = Path(__file__).with_name("driver.py")
DEVICE = "cpu-amd-epyc-2c"


def drive(job: str, folder: Path, *fault: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", DRIVER, job, folder, *fault]
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, timeout=120
    )


def outcome(done: subprocess.CompletedProcess[str]) -> dict:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def opcast(*args: object, **env: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "opcast", *map(str, args)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, **{k: str(v) for k, v in env.items()}},
    )  # fmt: skip


def whole(folder: Path) -> None:
    """Every file in a folder that has its own name (and not that of a partial one) can be read."""
    for path in folder.rglob("*"):
        if path.name.endswith(PARTIAL) or any(p.startswith(".") for p in path.parts[-3:]):
            continue
        if path.suffix == ".parquet":
            assert len(pd.read_parquet(path))
        elif path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".gz":
            assert LoweringCache(folder).get(path.name.removesuffix(".json.gz")) is not None


@pytest.fixture(scope="module")
def published(tmp_path_factory, op_rows) -> Path:
    """A folder with tables as published."""
    folder = tmp_path_factory.mktemp("jobs")
    rows = op_rows("graph/linear", 60, 1).assign(device="NVIDIA L40S", op="linear")
    base = op_features(rows, "graph/linear", {"NVIDIA L40S": find_device("l40s")}).base_s
    rows = rows.assign(latency_us=base * 2e6, source="aiconfigurator", split="train")
    (folder / "published").mkdir()
    rows["id"] = [f"T{i}" for i in range(len(rows))]
    rows.drop(columns=["key", "method"]).to_parquet(folder / "published/ops_tc.parquet")
    return folder


@pytest.fixture(scope="module")
def clean(published) -> Callable[[str], dict]:
    """What a job says that nothing disturbs."""
    return cache(lambda job: outcome(drive(job, published / f"{job}-clean")))


#: Job, and every how many of its operations on files it is killed.
KILLS = [("profile", 8), ("import", 3), ("cache", 4), ("train", 3), ("sweep", 5)]
JOBS = every(3, [job for job, _ in KILLS])


def survives(job: str, folder: Path, number: int, expected: object) -> bool:
    """Kill a job at an operation, look at what it left, and end it; whether it was killed."""
    done = drive(job, folder, "kill", number)
    if folder.exists():
        whole(folder)
    assert outcome(drive(job, folder))["result"] == expected
    return done.returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_kill_9_half_way_leaves_whole_files_and_the_job_ends_as_if_it_had_not_been(
    job, published, clean
):
    undisturbed = clean(job)
    half = undisturbed["operations"] // 2
    assert survives(job, published / f"{job}-killed", half, undisturbed["result"])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("job", "every"), KILLS)
def test_kill_9_anywhere_leaves_whole_files_and_the_job_ends_as_if_it_had_not_been(
    job, every, published, clean
):
    undisturbed = clean(job)
    kills = 0
    for number in range(1, undisturbed["operations"] + 1, every):
        folder = published / f"{job}-killed-{number}"
        kills += survives(job, folder, number, undisturbed["result"])
    assert kills >= 3


@pytest.mark.exhaustive
def test_a_model_that_is_replaced_is_the_old_or_the_new_one(tmp_path):
    """Killed anywhere but between two renames, a model is there; one save later in any case."""
    missing = 0
    for number in range(2, 15, 2):
        folder = tmp_path / f"m{number}"
        shutil.copytree(V1, folder)
        assert drive("train", folder, "kill", number).returncode == -signal.SIGKILL
        try:
            CostModel.load(folder, schema())
        except ModelError:
            missing += 1
            assert not folder.exists()  # never a part of one
        assert outcome(drive("train", folder))["result"]["estimator"] == "ridge"
    assert missing <= 2


@pytest.mark.exhaustive
def test_kill_9_during_a_real_profile(tmp_path):
    """As ``test_kill_and_resume`` of the profiler, by the command and at its own pace."""
    command = [sys.executable, "-m", "opcast", "profile", "--out", tmp_path / "data",
               "--budget", "60s", "--suite", "quick", "--quiet"]  # fmt: skip
    process = subprocess.Popen(list(map(str, command)), stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 120
        while not list((tmp_path / "data").glob("*.parquet")) and time.monotonic() < until:
            time.sleep(0.2)
    finally:
        process.kill()
        process.wait()
    whole(tmp_path / "data")
    before = len(Dataset.load(tmp_path / "data"))
    done = opcast("profile", "--out", tmp_path / "data", "--budget", "70s", "--suite", "quick",
                  "--quiet")  # fmt: skip
    assert done.returncode == 0, done.stderr
    after = Dataset.load(tmp_path / "data")
    assert len(after) > before > 0
    assert not after.frame["sample_id"].duplicated().any()


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system with 64 KiB free, where the user may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root; the same is tested with a limit on file sizes")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_is_named_and_leaves_nothing(small_disk):
    data, kept = os.urandom(200_000), small_disk / "kept.txt"
    write_text(kept, "old")
    frame = pd.DataFrame({"a": np.random.default_rng(0).random(50_000)})
    for write in (
        lambda: write_bytes(kept, data),
        lambda: write_text(small_disk / "new.txt", data.hex()),
        lambda: write_table(frame, small_disk / "t.parquet"),
        lambda: write_folder(small_disk / "model", {}, {"weights": data}),
    ):
        with pytest.raises(FileError, match="No space left on device"):
            write()
    assert [p.name for p in small_disk.iterdir()] == ["kept.txt"]
    assert kept.read_text() == "old"


def test_a_cache_on_a_full_disk_only_logs(small_disk, caplog):
    cache = LoweringCache(small_disk)
    cache.put(cache.key("a"), os.urandom(200_000).hex(), {})
    assert "cannot write to the cache" in caplog.text
    assert cache.get(cache.key("a")) is None
    assert not [p for p in small_disk.rglob("*") if p.is_file()]


@pytest.mark.slow
def test_commands_on_a_full_disk_end_with_one_line(small_disk, tmp_path):
    program = tmp_path / "p.mlir"
    assert here("zoo", "export", "mlp", "--set", "batch=8", "--out", program).returncode == 0
    small = {"OPCAST_CACHE": str(small_disk)}
    done = here("predict", program, "--device", DEVICE, "--json", env=small)
    assert done.returncode == 0 and json.loads(done.stdout)["latency_us"] > 0
    shutil.rmtree(small_disk / "lowered", ignore_errors=True)
    while True:  # not a page is left
        try:
            (small_disk / f"filler{len(list(small_disk.iterdir()))}").write_bytes(bytes(4096))
        except OSError:
            break
    for run, command in (
        (here, ("lower", program, "--lowering", "xla", "--out", small_disk / "p.hlo")),
        (here, ("predict", program, "--device", DEVICE, "--timeline", small_disk / "t.json")),
        (opcast, ("zoo", "export", "llama", "--set", "layers=8", "--out", small_disk / "l.mlir")),
    ):
        done = run(*command)
        assert done.returncode == 1, done.stdout
        assert done.stderr.startswith("opcast: error:") and done.stderr.count("\n") == 1
        assert "No space left" in done.stderr
        assert not Path(command[-1]).exists()


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_files_that_cannot_grow_end_a_job_in_order(job, published, clean):
    out = published / f"{job}-limited"
    done = drive(job, out, "limit", 1500)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 0 or "FileError" in last, done.stderr
    if out.exists():
        whole(out)
        assert not list(out.rglob(f"*{PARTIAL}"))
    assert outcome(drive(job, out))["result"] == clean(job)["result"]


@pytest.fixture
def read_only(tmp_path) -> Iterator[Path]:
    """A folder that not even root can write, where the user may mount one."""
    place = tmp_path / "fixed"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "ro,size=64k", "tmpfs", str(place)]
    if os.geteuid():
        place.chmod(0o555)
        yield place
        place.chmod(0o755)
        return
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("root ignores permissions, and mounting is not allowed here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.slow
def test_a_read_only_cache_costs_time_and_nothing_else(read_only, tmp_path):
    program = tmp_path / "p.mlir"
    assert here("zoo", "export", "mlp", "--set", "batch=8", "--out", program).returncode == 0
    done = opcast("predict", program, "--device", DEVICE, "--json", OPCAST_CACHE=read_only)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["latency_us"] > 0
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_store_that_cannot_be_written_is_named(read_only):
    for store in (read_only / "mlruns", read_only):
        code, errors = finished(started(SHARED_STORE, str(store), "a"))
        assert code == 1
        last = errors.strip().splitlines()[-1]
        assert "ModelError" in last and "MLflow store cannot be used" in last, errors
        assert "--no-track" in last


SHARED_CACHE = """
import sys, os
from opcast.features.lowering.cache import LoweringCache
cache = LoweringCache(sys.argv[1], max_bytes=40_000)
for i in range(300):
    n = i % 7
    entry = cache.get(cache.key(str(n)))
    assert entry is None or entry.meta["n"] == n and entry.hlo.startswith(f"HloModule m{n} ")
    cache.put(cache.key(str(n)), f"HloModule m{n} " + os.urandom(4000).hex(), {"n": n})
"""
SHARED_STORE = """
import sys
from pathlib import Path
from opcast.models.tracking.mlflow_store import RunLog, log_run
for i in range(3):
    log_run(RunLog(f"{sys.argv[2]}-{i}", {"model": "m"}, {"mape": 1.0 + i}), root=Path(sys.argv[1]))
"""


def started(code: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=280)
    return process.returncode, errors


def together(code: str, *arguments: list[str]) -> None:
    for process in [started(code, *own) for own in arguments]:
        status, errors = finished(process)
        assert status == 0, errors


def test_processes_share_a_cache_that_is_too_small(tmp_path):
    together(SHARED_CACHE, [str(tmp_path)], [str(tmp_path)], [str(tmp_path)])
    whole(tmp_path)
    assert not list(tmp_path.rglob(f"*{PARTIAL}"))


@pytest.mark.slow
@pytest.mark.exhaustive  # two processes make MLflow's tables
def test_processes_share_a_new_mlflow_store(tmp_path):
    together(SHARED_STORE, [str(tmp_path), "a"], [str(tmp_path), "b"])
    database = sqlite3.connect(tmp_path / "mlflow.db")
    found = database.execute("select name, status from runs").fetchall()
    database.close()
    names = ["a-0", "a-1", "a-2", "b-0", "b-1", "b-2"]
    assert sorted(found) == [(name, "FINISHED") for name in names]


def test_a_lock_waits(tmp_path):
    code = ("import sys, time; from pathlib import Path; from opcast.common.files import locked\n"
            "with locked(Path(sys.argv[1])):\n"
            "    print('held', flush=True); time.sleep(1); Path(sys.argv[2]).touch()")  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "l", tmp_path / "last"],
        stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        assert not (tmp_path / "last").exists()
        with locked(tmp_path / "l"):  # not before the other has done all
            assert (tmp_path / "last").exists()


@pytest.mark.parametrize("name", ["estimator/ridge.npz", "estimator/manifest.json"])
def test_a_damaged_file_of_a_model_is_named_with_its_digest(tmp_path, name):
    folder = tmp_path / "model"
    shutil.copytree(V1, folder)
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(ModelError, match="SHA-256") as caught:
        CostModel.load(folder, schema())
    assert caught.value.where.endswith(name)
    (folder / name).unlink()
    with pytest.raises(ModelError, match="missing"):
        CostModel.load(folder, schema())


def test_a_damaged_shard_of_a_dataset_is_named_with_its_checksum(tmp_path):
    folder = dataset(tmp_path)
    shard = folder / "samples.parquet"
    write_table(Dataset.load(folder).frame, shard)
    group = parquet.read_metadata(shard).row_group(0)
    column = max(map(group.column, range(group.num_columns)), key=lambda c: c.total_compressed_size)
    data = bytearray(shard.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    data[start + column.total_compressed_size // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DatasetError, match=r"samples\.parquet: .*CRC"):
        Dataset.load(folder)


def test_a_finished_table_is_made_once_and_says_what_to_do_if_damaged(tmp_path):
    frame, path = (
        pd.DataFrame({"id": ["a"], "measured_us": [1.5]}),
        tmp_path / "parts" / "x.parquet",
    )
    pd.testing.assert_frame_equal(kept_table(path, lambda: frame), frame)
    pd.testing.assert_frame_equal(kept_table(path, lambda: pytest.fail("made again")), frame)
    path.write_bytes(b"PAR1")
    with pytest.raises(DatasetError, match="delete it"):
        kept_table(path, lambda: frame)


def test_lines_go_on_after_one_that_a_kill_cut_off(tmp_path):
    path = tmp_path / "lines.jsonl"
    assert list(read_lines(path)) == []
    path.write_text('{"a": 1}\n[2]\n{"a": 3')
    append_lines(path, '{"a": 4}\n')
    assert list(read_lines(path)) == [{"a": 1}, {"a": 4}]


def test_models_of_other_versions_say_which(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(V1, folder)
    with pytest.raises(ModelError, match="trained on feature schema"):
        CostModel.load(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(ModelError, match="model format 99 is not one that this version reads"):
        CostModel.load(folder, schema())


#: Runs ``opcast predict`` with another body.
_COMMAND = """
import sys
import opcast.cli
{setup}
module = sys.modules["opcast.cli.main"]
sys.argv = ["opcast", "predict", {path}]
module._main = {main}
module.main()
"""


def test_a_command_whose_native_code_crashes_says_so(tmp_path):
    program = tmp_path / "p.mlir"
    write_text(program, "module {}")
    code = _COMMAND.format(
        setup="import ctypes", path="sys.argv[1]", main="lambda: ctypes.string_at(0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"opcast: error: {program}: native code crashed (SIGSEGV)")


def test_a_killed_command_takes_its_child_along(tmp_path):
    slow = "import os, time\ndef slow():\n    print(os.getpid(), flush=True)\n    time.sleep(60)"
    code = _COMMAND.format(setup=slow, path="'x'", main="slow")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as own:
        assert own.stdout is not None
        child = int(own.stdout.readline())
        own.kill()
    wait_for_end(child)
