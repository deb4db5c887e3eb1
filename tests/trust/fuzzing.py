"""What is fuzzed: seeds that are real files, how they are mutated, and who reads them.

A target reads bytes. It may return, or raise what a user is told in one line; all else is a fault.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests/features/data"

#: A mutation: what to do, where (a share of the length), and with what.
Mutation = tuple[str, float, int]
KINDS = ("flip", "set", "drop", "copy", "cut", "swap", "number", "word", "insert", "nest")
_NUMBERS = (
    "0", "-1", "1", "1e309", "nan", "2147483648", "18446744073709551616", "9" * 40, "0x7f", "1.5",
    "-9223372036854775809", "true", "null", "''", "[]", "{}",
)  # fmt: skip
_WORDS = (
    b"\x00", b"\xff\xfe", b"%s%n", b"../../../etc/passwd", b"!!python/object/apply:os.system",
    b"${jndi:x}", b"\x1b]0;title\x07", b"[red]", b"\n\n", b"\"", b"'", b"{", b"}", b"(", b")",
    b"[", b"]", b"<", b">", b"->", b"=", b",", b":", b"%0", b"tensor<", b"?x", b"f32[", b"&a *a",
    "é\u202e".encode(), b"while", b"fusion(", b"inf",
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A reader.

    Attributes:
        seeds: Makes the files to begin from.
        read: Reads one; may write below the folder that it is given.
        weight: Share of the time.
        native: Whether the reader is native code that only a process of its own contains.
    """

    seeds: Callable[[], list[bytes]]
    read: Callable[[bytes, Path], object]
    weight: float = 1.0
    native: bool = False


def mutate(data: bytes, mutations: list[Mutation]) -> bytes:
    """Apply mutations one after the other."""
    found = bytearray(data)
    for kind, where, value in mutations:
        _apply(found, kind, int(where * len(found)), value)
    return bytes(found)


def draw(rng: random.Random) -> list[Mutation]:
    """A few random mutations."""
    count = rng.choice((1, 1, 1, 2, 2, 3, 5, 10))
    return [(rng.choice(KINDS), rng.random(), rng.getrandbits(32)) for _ in range(count)]


def _apply(data: bytearray, kind: str, at: int, value: int) -> None:
    size = 1 + value % 40
    if kind == "flip" and data:
        data[at % len(data)] ^= 1 << value % 8
    elif kind == "set" and data:
        data[at % len(data)] = value % 256
    elif kind == "drop":
        del data[at : at + size]
    elif kind == "copy":
        start = value % (len(data) + 1)
        data[at:at] = data[start : start + size * 4]
    elif kind == "cut":
        del data[max(at, 1) :]
    elif kind == "swap":
        other = value % (len(data) + 1)
        here, there = data[at : at + size], data[other : other + size]
        data[at : at + size], data[other : other + size] = there, here
    elif kind == "number":
        _number(data, at, _NUMBERS[value % len(_NUMBERS)].encode())
    elif kind == "word":
        data[at:at] = _WORDS[value % len(_WORDS)]
    elif kind == "insert":
        data[at:at] = value.to_bytes(4, "little")
    elif kind == "nest":
        pair = (b"()", b"[]", b"{}", b"<>")[value % 4]
        depth = (3, 60, 1500)[value // 4 % 3]
        data[at:at] = pair[:1] * depth + pair[1:] * depth


def _number(data: bytearray, at: int, text: bytes) -> None:
    """Replace the next number."""
    start = next((i for i in range(at, len(data)) if 48 <= data[i] <= 57), None)
    if start is None:
        return
    end = start
    while end < len(data) and (48 <= data[end] <= 57 or data[end] == 46):
        end += 1
    data[start:end] = text


# Readers. Each imports what it needs, so that a process that fuzzes YAML does not load JAX.


def _program(data: bytes, _: Path) -> None:
    from opcast.features.ir.reader import read_program
    from opcast.features.lowering.lower import lower

    source = read_program(data, trip_counts=2)
    _ = source.program
    lower(source, "op", cache=False)
    lower(source, "fused", cache=False)


def _hlo(data: bytes, _: Path) -> None:
    from opcast.features.devices.device import DeviceSpec, MemoryLevel
    from opcast.features.ir.reader import read_program
    from opcast.features.ir.untrusted import well_formed
    from opcast.features.lowering.lower import lower
    from opcast.features.table.table import feature_table

    source = read_program(data, trip_counts=2)
    found = lower(source, "op", cache=False)
    if source.kind == "hlo" and source.program.is_scheduled:
        found = lower(source, "xla", cache=False)
    spec = DeviceSpec("round", "cpu", {"f32": 1e12}, {"f32": 1e11}, (MemoryLevel(1e9, 1e11),), 1e-6)
    if found.kernels:
        with well_formed():  # as Predictor.predict does
            feature_table(found.kernels, spec)


def _device_file(data: bytes, folder: Path) -> None:
    from opcast.features.devices.catalogue import load_device_file

    load_device_file(_put(folder / "device.yaml", data))


def _device_json(data: bytes, folder: Path) -> None:
    from opcast.predict.devices import resolve_device

    resolve_device(_put(folder / "device.json", data), {})


def _cluster(data: bytes, folder: Path) -> None:
    from opcast.simulate.clusters.files import load_cluster

    load_cluster(_put(folder / "cluster.yml", data))


def _workload(data: bytes, folder: Path) -> None:
    from opcast.simulate.step.named_workloads import read_workload

    read_workload(str(_put(folder / "work.yaml", data)))


def _plan(data: bytes, _: Path) -> None:
    from opcast.simulate.step.plan import parse_plan

    parse_plan(_text(data))


def _set(data: bytes, _: Path) -> None:
    from opcast.datagen.zoo import parse_settings
    from opcast.predict.sweep.space import parse_grid
    from opcast.simulate.step.named_workloads import read_workload

    for read in (
        lambda text: parse_settings("mlp", [text]),
        lambda text: read_workload("llama", [text]),
        parse_grid,
    ):
        _refusable(read, _text(data))


def _op(data: bytes, _: Path) -> None:
    import pandas as pd

    from opcast.features.devices.catalogue import find_device
    from opcast.features.operators import op_features
    from opcast.features.operators.query import parse_op

    row = parse_op(_text(data))
    frame = pd.DataFrame([{**row, "device": "h100-sxm"}])
    op_features(frame, row["key"], {"h100-sxm": find_device("h100-sxm")})


def _nccl(data: bytes, folder: Path) -> None:
    from opcast.models.collectives.measurements import read_collectives

    read_collectives([_put(folder / "all_reduce.log", data)])


def _csv(data: bytes, folder: Path) -> None:
    from opcast.models.collectives.measurements import read_collectives

    read_collectives([_put(folder / "rows.csv", data)])


def _chakra(data: bytes, folder: Path) -> None:
    from opcast.simulate.chakra.folder import read_folder
    from opcast.simulate.chakra.timeline import run_traces

    _put(folder / "trace.0.et", data)
    run_traces(*read_folder(folder))


def _groups(data: bytes, folder: Path) -> None:
    from opcast.simulate.chakra.folder import read_folder
    from opcast.simulate.chakra.timeline import run_traces

    _put(folder / "trace.0.et", _chakra_seeds()[0])
    _put(folder / "comm_group.json", data)
    run_traces(*read_folder(folder))


def _cache(data: bytes, folder: Path) -> None:
    from opcast.features.lowering.cache import LoweringCache

    cache = LoweringCache(folder)
    key = cache.key("a")
    path = folder / key[:2] / f"{key}.json.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    cache.get(key)


def _dataset(data: bytes, folder: Path) -> None:
    from opcast.features.dataset import Dataset

    _put(folder / "samples.parquet", data)
    _put(folder / "run-r1.json", _records()[0])
    found = Dataset.load(folder)
    _ = found.hash, found.devices


def _record(data: bytes, folder: Path) -> None:
    from opcast.datagen.dataset_folder import run_records
    from opcast.features.dataset import Dataset

    _put(folder / "samples.parquet", _shards()[0])
    _put(folder / "run-r1.json", data)
    _refusable(run_records, folder)
    _ = Dataset.load(folder).devices


def _graph_ops(data: bytes, _: Path) -> None:
    from opcast.predict.published.opgraph import op_rows, parse_ops, parse_shapes

    _refusable(parse_shapes, _text(data))
    for op in parse_ops(_text(data)):
        _refusable(op_rows, op, "fp32")


def _model(data: bytes, folder: Path) -> None:
    from opcast.models.cost_model import CostModel

    target = folder / "model"
    if not target.exists():
        shutil.copytree(ROOT / "tests/models/data/v1/ridge", target)
    (target / "manifest.json").write_bytes(data)
    CostModel.load(target, schema=_schema())


def _weights(data: bytes, folder: Path) -> None:
    """Files whose digests the attacker has put right."""
    import hashlib

    from opcast.models.cost_model import CostModel

    target = folder / "model"
    shutil.copytree(ROOT / "tests/models/data/v1/ridge", target, dirs_exist_ok=True)
    (target / "estimator/ridge.npz").write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    for path, name in ((target, "estimator/ridge.npz"), (target / "estimator", "ridge.npz")):
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["files"][name] = digest
        text = json.dumps(manifest)
        (path / "manifest.json").write_text(text)
        inner = hashlib.sha256(text.encode()).hexdigest()
    outer = json.loads((target / "manifest.json").read_text())
    outer["files"]["estimator/manifest.json"] = inner
    (target / "manifest.json").write_text(json.dumps(outer))
    CostModel.load(target, schema=_schema())


def _operators(data: bytes, folder: Path) -> None:
    """A table of operators whose cells hold anything that a CSV can say."""
    import io

    import pandas as pd

    from opcast.common.errors import DatasetError
    from opcast.datagen.published.importer import import_published

    try:
        table = pd.read_csv(io.BytesIO(data))
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        table.to_parquet(folder / "ops_tc.parquet")
    except (ValueError, OverflowError, TypeError) as error:  # of pandas, not of ours
        raise DatasetError(str(error)) from None
    import_published(folder, folder / "out")


def _params(data: bytes, folder: Path) -> None:
    from opcast.models.training.tuning import read_params

    read_params(_put(folder / "params.json", data), "xgboost")


def _collectives(data: bytes, folder: Path) -> None:
    from opcast.models.collectives.model import CollectiveModel

    CollectiveModel.load(_put(folder / "collectives.json", data))


def _hespas(data: bytes, folder: Path) -> None:
    from opcast.predict.export.hespas_run import configured

    configured(_put(folder / "config.json", data))


def _refusable(read: Callable[..., object], *arguments: object) -> None:
    from opcast.common.errors import OpcastError

    try:
        read(*arguments)
    except OpcastError:
        return


# Seeds.


def _files(*patterns: str) -> Callable[[], list[bytes]]:
    return lambda: [p.read_bytes() for pattern in patterns for p in sorted(ROOT.glob(pattern))]


def _texts(*texts: str) -> Callable[[], list[bytes]]:
    return lambda: [text.encode() for text in texts]


@cache
def _bytecode() -> list[bytes]:
    from opcast.features.ir.mlir.bindings import write_bytecode
    from opcast.features.ir.reader import read_program

    sources = [read_program(DATA / name) for name in ("all_ops.mlir", "quantised.mlir")]
    found = [write_bytecode(source.module) for source in sources]
    return [*found, *_exports()[1:]]


@cache
def _exports() -> list[bytes]:
    import jax
    import jax.numpy as jnp
    from jax import export

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        y, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=3)
        return jax.nn.softmax(y).sum()

    shapes = (jnp.ones((8, 16)), jnp.ones((16, 16)))
    made = export.export(jax.jit(jax.grad(step)))(*shapes)
    return [bytes(made.serialize()), bytes(made.mlir_module_serialized)]


@cache
def _chakra_seeds() -> list[bytes]:
    from opcast.simulate.chakra.messages import EtNode, NodeType, encode

    nodes = [
        EtNode(0, "dot.1", NodeType.COMP, (), 7, {"is_cpu_op": False, "num_ops": 2**40}),
        EtNode(1, "wait", NodeType.COMP, (0,), 1, {"kernels": 3}),
        EtNode(2, "r", NodeType.COMM_COLL, (0, 1), 1,
               {"comm_type": 0, "comm_size": 64, "pg_name": "1"}),
    ]  # fmt: skip
    return [encode(nodes), encode(nodes * 3)]


@cache
def _records() -> list[bytes]:
    from dataclasses import asdict

    from opcast.features.devices.catalogue import find_device

    return [json.dumps({"device": asdict(find_device("l4")), "run_id": "r1"}).encode()]


@cache
def _shards() -> list[bytes]:
    import io

    import pandas as pd

    from opcast.features.dataset import COLUMNS

    texts = dict.fromkeys((c for c, t in COLUMNS.items() if t == "str"), "x")
    rows = [{**texts, **{c: 1.5 for c, t in COLUMNS.items() if t != "str"}} for _ in range(20)]
    frame = pd.DataFrame(rows).assign(run_id="r1", repeats=3, level="kernel", device="l4")
    frame["sample_id"] = [f"s{i}" for i in range(20)]
    found = []
    for compression in ("zstd", "snappy"):
        buffer = io.BytesIO()
        frame.to_parquet(buffer, index=False, compression=compression, write_page_checksum=True)
        found.append(buffer.getvalue())
    return found


def _cached() -> list[bytes]:
    import gzip

    text = {"hlo": "HloModule m", "meta": {"peak_memory_bytes": 1.0, "kernels": {}}}
    return [gzip.compress(json.dumps(text).encode())]


def _clusters() -> list[bytes]:
    import yaml

    from opcast.simulate.clusters.catalogue import find_cluster
    from opcast.simulate.clusters.files import cluster_data

    names = ("dgx-h100-x16", "tpu-v4-x64")
    return [yaml.safe_dump(cluster_data(find_cluster(name))).encode() for name in names]


@cache
def _schema() -> str:
    manifest = ROOT / "tests/models/data/v1/ridge/estimator/manifest.json"
    return str(json.loads(manifest.read_text()).get("schema_hash", ""))


_NCCL = """# Collective test starting: all_gather_perf
#  Rank  0 Group  0 Pid  41 on      node0 device  0 [0x07] NVIDIA A100-SXM4-80GB
#  Rank  1 Group  0 Pid  41 on      node1 device  0 [0x07] NVIDIA A100-SXM4-80GB
        1024            64     float    none      -1    12.34    0.08    0.06      0    12.10
     1048576         65536     float    none      -1    45.60   23.00   17.25    N/A    45.10
"""

TARGETS: dict[str, Target] = {
    "StableHLO text": Target(_files("tests/features/data/*.mlir"), _program, 4, native=True),
    "MLIR bytecode": Target(_bytecode, _program, 6, native=True),
    "jax.export file": Target(lambda: _exports()[:1], _program, 3, native=True),
    "HLO text": Target(_files("tests/features/data/*.hlo", "tests/features/data/fused/l*.hlo",
                              "tests/features/data/absent/*.hlo"), _hlo, 5),
    "device file": Target(_files("features/devices/h*.yaml", "features/devices/t*.yaml"),
                          _device_file),
    "device JSON": Target(lambda: [json.dumps(json.loads(_records()[0])["device"]).encode()],
                          _device_json),
    "cluster file": Target(_clusters, _cluster),
    "network.yml": Target(_texts("topology: [ Ring, Switch ]\nnpus_count: [ 8, 4 ]\n"
                                 "bandwidth: [ 200.0, 50.0 ]\nlatency: [ 500.0, 1000 ]\n"),
                          _cluster),
    "workload file": Target(_texts("family: llama\nlayers: 32\nd_model: 4096\nheads: 32\n"
                                   "seq: 8192\nbatch: 256\n"), _workload),
    "plan": Target(_texts("tp=8,pp=2,dp=8", "fsdp=4,tp=2,recompute=full,microbatches=4",
                          "ep=8,dp=8"), _plan),
    "--set": Target(_texts("batch=8", "layers=32,d_model=4096", "mode=train",
                           "tp=4/8,recompute=none/full"), _set),
    "--op": Target(_texts("linear m=4096 n=4096 k=4096 dtype=bf16 backend=vllm",
                          "moe tokens=128 hidden=4096 inter=1024 topk=8 experts=64 dtype=fp8",
                          "generation_attention batch=4 q_heads=32 kv_heads=8 head_dim=128 "
                          "kv_len=4096 dtype=bf16", "eager/conv batch=8 cin=3 cout=64 insize=224 "
                          "ksize=7 stride=2 pad=3 dtype=fp32"), _op),
    "nccl-tests output": Target(_texts(_NCCL), _nccl),
    "collectives CSV": Target(_texts("op,bytes,world_size,latency_us,device\n"
                                     "all_reduce,1024,8,12.5,h100-sxm\n"
                                     "all_gather,4096,8,22.5,h100-sxm\n"), _csv),
    "Chakra trace": Target(_chakra_seeds, _chakra),
    "Chakra groups": Target(_texts('{"1": [0], "2": [0, 1]}'), _groups),
    "cache entry": Target(_cached, _cache),
    "dataset shard": Target(_shards, _dataset, 2, native=True),
    "run record": Target(_records, _record),
    "operator table": Target(
        _texts(
            "id,device,source,op,family,dtype,backend,kernel,split,b,m,n,k,latency_us\n"
            "T1,NVIDIA L40S,aiconfigurator,linear,linear,bf16,vllm,,train,1,64,4096,4096,31.5\n"
            "T2,NVIDIA L40S,aiconfigurator,linear,linear,fp8,trtllm,,val,1,512,1024,4096,22.25\n"
        ),
        _operators,
        weight=2,
    ),
    "operation lists": Target(_texts("[['Linear', (64, 32, 16)], ['VECadd', (4, 8)]]"), _graph_ops),
    "model manifest": Target(_files("tests/models/data/v1/ridge/manifest.json"), _model, 2),
    "model weights": Target(_files("tests/models/data/v1/ridge/estimator/ridge.npz"), _weights),
    "parameters": Target(_texts('{"model": "xgboost", "params": {"max_depth": 6}}'), _params),
    "collective parameters": Target(_files("models/pretrained/collectives.json"), _collectives),
    "HESPAS configuration": Target(
        _texts('{"perf_estimator": {"method": "opcast", "hardware": {"device": "l4"}}}'), _hespas
    ),
}  # fmt: skip


def attempt(target: Target, data: bytes, folder: Path) -> str:
    """Read once: ``accepted``, ``refused``, or ``contained``: MLIR's reader crashed, apart from us.

    Raises:
        Exception: What no reader may raise.
    """
    import typer

    from opcast.common.errors import OpcastError

    try:
        target.read(data, folder)
    except (OpcastError, typer.BadParameter) as error:
        return "contained" if "reading it crashes" in str(error) else "refused"
    return "accepted"


def _put(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace").replace("\0", "")
