"""Files that try to run code, reach other files, fill the memory, or write on the screen."""

import contextlib
import gzip
import hashlib
import io
import json
import lzma
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from opcast.cli.options import one_line
from opcast.common.errors import DatasetError, ModelError, OpcastError
from opcast.common.files import gunzip, parse_json, parse_yaml
from opcast.features.dataset import Dataset, write_text
from opcast.features.devices.catalogue import load_device_file
from opcast.features.devices.device import DeviceSpec
from opcast.features.ir.reader import read_program
from opcast.features.lowering.cache import LoweringCache
from opcast.models.core import store
from opcast.models.core.store import unpack
from opcast.models.cost_model import CostModel
from opcast.models.estimators import xgboost_trees as compact
from opcast.models.estimators.xgboost_trees import expand
from opcast.models.operators import OpModel
from opcast.predict.published.opgraph import parse_ops, parse_shapes
from opcast.simulate.chakra.folder import read_folder
from opcast.simulate.clusters.catalogue import find_cluster
from opcast.simulate.step.named_workloads import read_workload
from opcast.simulate.step.plan import parse_plan

from ..support.cases import later
from .fuzzing import ROOT, TARGETS

V1 = ROOT / "tests/models/data/v1/ridge"


class Payload:
    """Runs when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.command = f"touch {canary}"

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.fixture
def canary(tmp_path) -> Path:
    """A file that exists once planted code has run."""
    return tmp_path / "canary"


TAGS = (
    "!!python/object/apply:os.system ['touch {0}']",
    "name: !!python/object/apply:os.system ['touch {0}']",
    "name: !!python/name:os.system",
    "name: !!python/object/new:subprocess.Popen [['touch', '{0}']]",
    "? !!python/object/apply:os.system ['touch {0}']\n: 1",
)
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(12)
)


@pytest.mark.parametrize("text", [*TAGS, BOMB, "[" * 100_000, "a: " * 5000, "x" * 5_000_000])
def test_yaml_makes_plain_data_or_nothing(tmp_path, canary, text):
    path = tmp_path / "file.yaml"
    path.write_text(text.replace("{0}", str(canary)))
    for read in (load_device_file, find_cluster, lambda p: read_workload(str(p)),
                 lambda p: parse_plan(str(p))):  # fmt: skip
        with pytest.raises(OpcastError) as caught:
            read(path)
        assert len(one_line(caught.value)) < 2100
    assert not canary.exists()


def test_no_yaml_of_opcast_itself_needs_what_is_refused():
    for path in [*ROOT.glob("features/devices/*.yaml"), *ROOT.glob("simulate/clusters/*.yaml")]:
        assert parse_yaml(path.read_text())


def test_json_that_nests_without_end_is_refused():
    with pytest.raises(ValueError, match="too deep"):
        parse_json("[" * 100_000)


@pytest.mark.parametrize("text", ["__import__('os').system('touch {0}')", "[['Linear', "
                                  "(__import__('os').system('touch {0}'),)]]", "(" * 20_000,
                                  "-" * 20_000 + "1", "[" * 199 + "]" * 199])  # fmt: skip
def test_lists_of_operations_are_no_code(canary, text):
    for read in (parse_ops, parse_shapes):
        with contextlib.suppress(DatasetError):
            read(text.format(canary))
    assert not canary.exists()


def resigned(folder: Path, name: str, data: bytes) -> Path:
    """Put a file into a copy of a model, with the digests that an attacker would put right."""
    shutil.copytree(V1, folder)
    target = folder / "estimator" / name
    target.write_bytes(data)
    for base, key in ((folder / "estimator", name), (folder, f"estimator/{name}")):
        manifest = json.loads((base / "manifest.json").read_text())
        manifest["files"][key] = hashlib.sha256(data).hexdigest()
        if base == folder:
            inner = (folder / "estimator/manifest.json").read_bytes()
            manifest["files"]["estimator/manifest.json"] = hashlib.sha256(inner).hexdigest()
        (base / "manifest.json").write_text(json.dumps(manifest))
    return folder


def schema() -> str:
    return str(json.loads((V1 / "estimator/manifest.json").read_text())["schema_hash"])


def pickled(canary: Path) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, weights=np.array([Payload(canary)], dtype=object))
    return buffer.getvalue()


def test_weights_are_never_unpickled(tmp_path, canary):
    for data in (pickled(canary), pickle.dumps(Payload(canary))):
        with pytest.raises(ModelError):
            CostModel.load(resigned(tmp_path / str(len(data)), "ridge.npz", data), schema())
        with pytest.raises(ValueError):
            unpack(data)
    assert not canary.exists()


def npy(shape: str) -> bytes:
    """An array file whose header promises what the file does not hold."""
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()


@pytest.mark.parametrize("shape", ["(1000000000000000,)", "(99999999, 99999999)", "(-1,)"])
def test_arrays_that_promise_petabytes_are_refused(shape):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("weights.npy", npy(shape))
    with pytest.raises(ValueError):
        unpack(buffer.getvalue())


@pytest.mark.parametrize("less", [64, later(1)])
def test_what_unpacks_to_gigabytes_is_refused(less, monkeypatch):
    """With limits that are a fraction of what they are, and with those."""
    assert (store.MAX_ARRAYS, compact.MAX_BYTES) == (2**31, 2**30)
    monkeypatch.setattr(store, "MAX_ARRAYS", 2**31 // less)
    monkeypatch.setattr(compact, "MAX_BYTES", 2**30 // less)
    zeros = bytes(2**26 // less)
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        for i in range(33):  # 2.1 GB in 2 MB
            archive.writestr(f"a{i}.npy", zeros)
    with pytest.raises(ValueError, match="more than"):
        unpack(bomb.getvalue())
    packed = lzma.LZMACompressor()
    data = b"".join(packed.compress(zeros) for _ in range(17)) + packed.flush()
    with pytest.raises(ValueError, match="too large"):
        expand(data)
    with pytest.raises(ValueError, match="more than"):
        gunzip(gzip.compress(zeros), limit=2**19)
    with pytest.raises(ValueError, match="cut off"):
        gunzip(gzip.compress(b"x" * 1000)[:-9])


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/../../secret", "link", "pipe",
                                  "folder", "a\0b"])  # fmt: skip
def test_a_manifest_reaches_no_file_outside_its_folder(tmp_path, name):
    (tmp_path / "secret").write_text("secret")
    folder = tmp_path / "model"
    shutil.copytree(V1, folder)
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = hashlib.sha256(b"secret").hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ModelError):
        CostModel.load(folder, schema())


@pytest.mark.parametrize("estimator", ["os:system", "subprocess.Popen", "../xgboost", "", None, []])
def test_a_manifest_names_no_code(tmp_path, estimator):
    folder = tmp_path / "model"
    shutil.copytree(V1, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "estimator": estimator}))
    with pytest.raises(ModelError):
        CostModel.load(folder, schema())
    with pytest.raises(ModelError):
        OpModel.load(folder)


def dataset(folder: Path, **changes: object) -> Path:
    """A dataset of twenty rows and one run."""
    (folder / "d").mkdir(parents=True)
    frame = pd.read_parquet(io.BytesIO(TARGETS["dataset shard"].seeds()[0]))
    frame.assign(**changes).to_parquet(folder / "d/samples.parquet")
    (folder / "d/run-r1.json").write_bytes(TARGETS["run record"].seeds()[0])
    return folder / "d"


def test_parquet_that_names_a_pickled_type_runs_nothing(tmp_path, canary):
    folder = dataset(tmp_path)
    planted = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickle.dumps(Payload(canary)),
    }
    table = pq.read_table(folder / "samples.parquet")
    fields = [f.with_metadata(planted) if f.name == "kind" else f for f in table.schema]
    found = pa.table(table.columns, schema=pa.schema(fields, metadata=table.schema.metadata))
    pq.write_table(found, folder / "samples.parquet")
    assert len(Dataset.load(folder)) == 20
    assert not canary.exists()


def test_a_table_that_does_not_fit_into_memory_is_refused(tmp_path):
    folder = dataset(tmp_path)
    one = pa.table({"sample_id": pa.DictionaryArray.from_arrays(np.zeros(10**6, np.int32), ["x"])})
    with pq.ParquetWriter(folder / "samples.parquet", one.schema) as writer:
        for _ in range(3):
            writer.write_table(one)
    data = bytearray((folder / "samples.parquet").read_bytes())
    assert len(data) < 10_000  # three million rows
    from opcast.common import parquet as tables

    old, tables.MEMORY_SHARE = tables.MEMORY_SHARE, 1e-4
    try:
        with pytest.raises(DatasetError, match="does not fit into"):
            Dataset.load(folder)
    finally:
        tables.MEMORY_SHARE = old


@pytest.mark.parametrize("name", ["../../x", "a/b", "a\\b", "", ".hidden", "a\x1b[2Jb", "x" * 300])
def test_names_of_devices_are_names(tmp_path, name):
    folder = dataset(tmp_path)
    record = json.loads((folder / "run-r1.json").read_text())
    record["device"]["name"] = name
    (folder / "run-r1.json").write_text(json.dumps(record))
    with pytest.raises(DatasetError, match="not a run record"):
        Dataset.load(folder)
    with pytest.raises(OpcastError):
        DeviceSpec.from_dict(record["device"])


def test_a_run_record_writes_under_its_own_name_only(tmp_path):
    from opcast.datagen.dataset_folder import run_records

    folder = dataset(tmp_path)
    record = json.loads((folder / "run-r1.json").read_text())
    (folder / "run-r1.json").write_text(json.dumps({**record, "run_id": "../../escaped"}))
    with pytest.raises(DatasetError, match="escaped"):
        run_records(folder)
    with pytest.raises(DatasetError, match="missing"):
        Dataset.load(dataset(tmp_path / "other", run_id="../../r1"))


def test_cache_entries_are_data(tmp_path, canary):
    cache = LoweringCache(tmp_path)
    key = cache.key("a")
    cache.put(key, "HloModule m", {})
    path = tmp_path / key[:2] / f"{key}.json.gz"
    assert cache.get(key) is not None
    for data in (pickle.dumps(Payload(canary)), gzip.compress(pickle.dumps(Payload(canary))),
                 gzip.compress(b"[" * 10**6), path.read_bytes()[:-5], b""):  # fmt: skip
        path.write_bytes(data)
        assert cache.get(key) is None
    assert not canary.exists()


PROGRAMS = {
    "tensor of exabytes": "func.func public @main() -> tensor<9223372036854775807xf32> {{ %0 = "
    "stablehlo.constant dense<0.0> : tensor<9223372036854775807xf32> return %0 : "
    "tensor<9223372036854775807xf32> }}",
    "nested tuples": "func.func @main(%a: "
    + "tuple<" * 99_999
    + "f32"
    + ">" * 99_999
    + ") {{ return }}",
    "nested regions": "module {{" * 50_000 + "}}" * 50_000,
    "unknown dialect": 'func.func @main() {{ "python.exec"() {{code = "import os; '
    "os.system('touch {0}')\"}} : () -> () return }}",
    "HLO custom call": "HloModule m\n\nENTRY e {{\n  ROOT c = f32[2] custom-call(), "
    'custom_call_target="xla_python_cpu_callback", backend_config="touch {0}"\n}}\n',
    "nested HLO": "HloModule m\n\nENTRY e {{\n  p = " + "(" * 99_999 + "\n}}",
    "dense resource": "module {{ func.func @main() {{ return }} }}\n{{-# dialect_resources: {{ "
    'builtin: {{ a: "0x' + "00" * 8 + '" }} }} #-}}',
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_read_and_never_run(tmp_path, canary, name):
    from opcast.features.lowering.lower import lower

    text = PROGRAMS[name].format(canary)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        lower(read_program(text), "op", cache=False)
    except OpcastError as error:
        assert len(one_line(error)) < 2100
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 1_500_000  # kB
    assert not canary.exists()


def test_a_jax_export_with_a_planted_pickle_is_refused(canary):
    data = TARGETS["jax.export file"].seeds()[0]
    for at in (0, len(data) // 2, len(data)):
        planted = data[:at] + pickle.dumps(Payload(canary)) + data[at:]
        with contextlib.suppress(OpcastError):
            read_program(planted)
    assert not canary.exists()


READY = (
    "import os, signal, time; from opcast.common.child_process import Channel; "
    "channel = Channel(); channel.send(b'ready'); "
)
CRASHES = f"{READY} next(iter(channel)); os.kill(os.getpid(), signal.SIGSEGV)"
HANGS = f"{READY} time.sleep(60)"


def test_bytecode_that_crashes_its_parser_does_not_crash_us(monkeypatch):
    import opcast.features.ir.untrusted as untrusted

    data = TARGETS["MLIR bytecode"].seeds()[0]
    read_program(data)
    untrusted.reader.close()
    monkeypatch.setattr(untrusted, "_passed", set())
    right = untrusted._command
    monkeypatch.setattr(untrusted, "_command", lambda: [sys.executable, "-c", CRASHES])
    with pytest.raises(
        OpcastError, match=r"bytecode is damaged \(reading it crashes: signal SIGSEGV\)"
    ):
        read_program(data)
    monkeypatch.setattr(untrusted, "_command", lambda: [sys.executable, "-c", HANGS])
    monkeypatch.setattr(untrusted, "TIMEOUT_S", 6)
    with pytest.raises(OpcastError, match="did not end within"):
        read_program(data)
    monkeypatch.setattr(untrusted, "TIMEOUT_S", 30)
    monkeypatch.setattr(
        untrusted, "_command", lambda: [sys.executable, "-c", "raise SystemExit(3)"]
    )
    with pytest.raises(OpcastError, match="does not start"):
        read_program(data)
    monkeypatch.setattr(untrusted, "_command", right)
    read_program(data)  # the next one is read by a new process
    assert untrusted.reader._worker is not None
    os.kill(untrusted.reader._worker.pid, signal.SIGKILL)  # as the system does when memory runs out
    monkeypatch.setattr(untrusted, "_passed", set())
    read_program(data)
    untrusted.reader.close()


def test_a_name_that_is_not_text_is_damage() -> None:
    """JAX's bindings end the process where one is read that is not UTF-8."""
    from jaxlib.mlir import ir

    with ir.Context() as context:
        context.allow_unregistered_dialects = True
        module = ir.Module.parse('"some.uncommon_name"() {other_name = 1 : i32} : () -> ()')
        data = io.BytesIO()
        module.operation.write_bytecode(data)
    for name in (b"uncommon_name", b"other_name"):
        assert name in data.getvalue()
        with pytest.raises(OpcastError, match="bytecode is damaged"):
            _ = read_program(data.getvalue().replace(name, b"\xa7" + name[1:])).program


def test_traces_do_not_leave_their_folder(tmp_path):
    (tmp_path / "secret").write_bytes(TARGETS["Chakra trace"].seeds()[0])
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "comm_group.json").write_text('{"../secret": [0]}')
    with pytest.raises(DatasetError):
        read_folder(folder)


ODD = "\x1b]0;owned\x07\x1b[2J[red]x[/red][link=http://evil]y[/link]:smile:\u202e"


def test_names_from_files_reach_the_terminal_as_text(capsys):
    from rich.table import Table

    from opcast.common.console import PlainConsole

    for terminal in (True, False):
        console = PlainConsole(width=200, force_terminal=terminal)
        table = Table("a")
        table.add_row(ODD)
        console.print(table)
        console.print(f"device {ODD}")
        shown = capsys.readouterr().out
        assert not any(odd in shown for odd in ("\x1b]", "\x1b[2J", "\u202e", "\x07"))
    assert "[red]x[/red][link=http://evil]" in shown and ":smile:" in shown
    assert "\x1b" not in shown and r"\x1b]0;owned" in shown


def test_names_of_runs_are_printed_as_text(capsys):
    from opcast.cli.options import make_console
    from opcast.common.tables_text import print_frame

    print_frame(make_console(), pd.DataFrame({"run": [ODD], "mape": [0.5]}), "runs")
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "[red]x[/red]" in shown


@pytest.mark.slow
def test_artefacts_of_mlflow_are_not_read(tmp_path, canary):
    """A planted artefact, and a run whose parameters would be code, are listed and nothing more."""
    artefacts = tmp_path / "artifacts/0/model"
    artefacts.mkdir(parents=True)
    (artefacts / "python_model.pkl").write_bytes(pickle.dumps(Payload(canary)))
    (artefacts / "MLmodel").write_text(f"x: !!python/object/apply:os.system ['touch {canary}']")
    code = (
        "import sys; from pathlib import Path; from opcast.models.tracking.mlflow_store import *\n"
        "from opcast.models.tracking.tracked_runs import compare\n"
        "root = Path(sys.argv[1])\n"
        "log_run(RunLog('r', {'model': \"__import__('os').system('true')\"}, {'mape': 1.0}),"
        " root=root)\n"
        "print(compare(root).to_csv())"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, tmp_path],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "__import__" in done.stdout and not canary.exists()


def test_a_kernel_and_a_file_with_odd_names_are_printed_as_text(tmp_path):
    name = "\x1b[31mred[bold]"
    program = tmp_path / "p.hlo"
    program.write_text(
        "HloModule m, is_scheduled=true\n\nENTRY e {\n  p = f32[64]{0} parameter(0)\n"
        f'  ROOT a = f32[64]{{0}} add(p, p), metadata={{op_name="{name}" source_file="{name}"'
        " source_line=3}\n}\n"
    )
    for path in (program, tmp_path / f"{name.replace('/', '')}.mlir"):
        done = subprocess.run(
            [sys.executable, "-m", "opcast", "predict", path, "--device", "cpu-amd-epyc-2c"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert "\x1b" not in done.stdout + done.stderr
    assert done.returncode == 1 and r"\x1b[31mred[bold].mlir" in done.stderr


def test_nothing_in_the_package_can_run_what_it_reads():
    """No call that makes code of data, outside of ``ast.literal_eval``."""
    words = ("import pickle", "pickle.load", "marshal.", "shelve.", "eval(", "exec(",
             "yaml.load(", "unsafe_load", "allow_pickle=True", "os.system", "shell=True",
             "joblib", "cloudpickle")  # fmt: skip
    allowed = {("common/files.py", "yaml.load(")}  # with a safe loader
    for path in ROOT.rglob("*.py"):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(("tests/", ".", "build/")):
            continue
        text = path.read_text().replace("literal_eval(", "").replace(".eval(", "")
        for word in words:
            assert word not in text or (name, word) in allowed, f"{name}: {word}"


def test_what_killed_writers_left_goes_with_the_next_write(tmp_path):
    old, young, other = (tmp_path / f".{n}.partial" for n in ("a.1-x", "a.2-y", "b.1-x"))
    for path in (old, young, other):
        path.write_text("half")
    for path in (old, other):
        os.utime(path, (0, 0))
    write_text(tmp_path / "a", "whole")
    assert {p.name for p in tmp_path.iterdir()} == {"a", young.name, other.name}


def test_texts_are_written_in_utf8_whole(tmp_path):
    write_text(tmp_path / "a", "é")
    assert (tmp_path / "a").read_bytes() == "é".encode()
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
