"""Import of published operator tables: small made-up tables of each source, and the real ones."""

import os
from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from opcast.common.errors import DatasetError, DeviceError
from opcast.datagen.published import importer as published
from opcast.datagen.published.importer import OPERATOR_FILES, import_published
from opcast.features.dataset import Dataset
from opcast.features.devices.device import DeviceSpec
from opcast.features.kernels.extract import kernel_from_ir
from opcast.features.operators.schema import FAMILIES, NAMES, PARAMETERS
from opcast.models.operators.rows import rows_of_dataset, rows_of_published

EAGER, SUMMED, GRAPH = OPERATOR_FILES
P4, A100, H200 = "Tesla P4", "NVIDIA A100-SXM4-80GB (vidur a100)", "NVIDIA H200"


def table(rows, source, device, dtype):
    frame = pd.DataFrame(rows)
    frame.insert(0, "id", [f"{source[0].upper()}{i:06d}" for i in range(len(frame))])
    fixed = {"source": source, "device": device, "dtype": dtype, "origin": "made/up.csv"}
    whole = frame.select_dtypes("number").columns.difference(
        ["latency_us", "latency_min_us", "latency_std_us"]
    )
    return frame.assign(**fixed).astype(dict.fromkeys(whole, "Int64"))


def eager_table():
    rows = [
        {"op": "add", "family": "elementwise", "rows": 12, "cols": 168, "n_in": 2},
        {"op": "softmax", "family": "softmax", "rows": 64, "cols": 128, "n_in": 1},
        {"op": "linear", "family": "linear", "b": 1, "m": 32, "n": 48, "k": 64},
        {"op": "bmm", "family": "bmm", "b": 3, "m": 32, "n": 48, "k": 64},
        {"op": "conv", "family": "conv", "batch": 2, "cin": 3, "cout": 4, "ksize": 3, "insize": 8,
         "stride": 1, "pad": 1},
    ]  # fmt: skip
    times = {"latency_us": [26.5, 30.0, 44.0, 50.0, 61.0], "tile_m": -1}
    splits = ["train", "val", "train", "dev_unseen_gpu", "train"]
    return table(rows, "neusight", P4, "fp32").assign(**times, split=splits)


def summed_table():
    rows = [
        {"op": "linear", "family": "linear", "b": 1, "m": 4064, "n": 24576, "k": 8192},
        {"op": "rmsnorm", "family": "norm", "rows": 4064, "cols": 8192, "n_in": 1},
        {"op": "silu_and_mul", "family": "elementwise", "rows": 40, "cols": 64, "n_in": 1},
    ]
    times = {
        "latency_us": [7300.0, 90.0, 4.0], "latency_min_us": [6500.0, 91.0, np.nan],
        "latency_std_us": [200.0, 2.0, np.nan], "model": "made/up", "column": "mlp", "tp": 1,
    }  # fmt: skip
    return table(rows, "vidur", A100, "fp16").assign(**times, split="train")


def graph_table():
    heads = {
        "batch": 2, "q_heads": 8, "kv_heads": 2, "head_dim": 64, "v_head_dim": 64, "kv_len": 128,
        "window": 0, "causal": 1,
    }  # fmt: skip
    rows = [
        {"op": "linear", "family": "linear", "b": 1, "m": 16, "n": 256, "k": 512},
        {"op": "quantize_fp8", "family": "quantize", "rows": 16, "cols": 256},
        {"op": "context_attention", "family": "context_attention", **heads, "q_len": 128},
        {"op": "generation_attention", "family": "generation_attention", **heads, "q_len": 1},
        {"op": "moe", "family": "moe", "tokens": 16, "hidden": 512, "inter": 256, "topk": 2,
         "experts": 8, "tp": 1, "ep": 1, "distribution": "balanced"},
    ]  # fmt: skip
    frame = table(rows, "aiconfigurator", H200, "bf16").fillna({"distribution": ""})
    frame["latency_us"] = np.array([2.5, 3.0, 17.0, 9.0, 40.0], np.float32)
    texts = {"kv_dtype": ["", "", "fp8", "bf16", ""], "backend": "vllm", "version": "0.22.0"}
    return frame.assign(**texts, kernel="default", n_meas=1, split="val_group")


TABLES = {EAGER: eager_table, SUMMED: summed_table, GRAPH: graph_table}


@pytest.fixture
def folder(tmp_path):
    for pack, names in {"first": (EAGER, SUMMED), "second": (GRAPH,)}.items():
        (tmp_path / "packs" / pack).mkdir(parents=True)
        for name in names:
            TABLES[name]().to_parquet(tmp_path / "packs" / pack / name)
    return tmp_path / "packs"


@pytest.fixture
def only(tmp_path):
    """A folder with one table."""

    def write(frame, name=EAGER):
        (tmp_path / "one").mkdir(exist_ok=True)
        frame.to_parquet(tmp_path / "one" / name)
        return tmp_path / "one"

    return write


def test_import(folder, tmp_path):
    done = import_published(folder, tmp_path / "out")
    assert (done.rows, done.skipped, done.shards, done.kept) == (5 + 3 + 5, 0, 3, 0)
    assert done.devices == ("a100-sxm-80gb", "h200-sxm", "p4")
    data = Dataset.load(tmp_path / "out")
    assert len(data) == 13
    assert set(data.devices) == set(done.devices)
    frame = data.frame.set_index("program")
    assert frame["latency_us_p50"]["N000003"] == 50.0
    assert frame["split"]["N000003"] == "dev_unseen_gpu"
    assert frame["source"]["V000000"] == "published:vidur"
    assert frame["run_id"]["V000000"] == "vidur-a100-sxm-80gb"
    assert frame["family"]["A000004"] == "op:graph/moe"
    assert (frame["level"] == "operator").all()
    assert frame["repeats"]["V000000"] == 20
    assert list(frame["dtype"][["N000000", "V000000", "A000000"]]) == ["f32", "f16", "bf16"]
    assert data.runs["aiconfigurator-h200-sxm"]["method"] == "graph"
    assert data.runs["neusight-p4"]["published_name"] == P4


def test_quantiles_are_ordered(folder, tmp_path):
    import_published(folder, tmp_path / "out")
    frame = Dataset.load(tmp_path / "out").frame.set_index("program")
    low, middle, high = (frame[f"latency_us_p{q}"] for q in (10, 50, 90))
    assert (low <= middle).all() and (middle <= high).all()
    assert low["V000000"] == 6500.0
    assert high["V000000"] == pytest.approx(7300.0 + 1.2816 * 200.0)
    assert low["V000001"] == 90.0  # a stated minimum above the median is none
    assert low["N000000"] == middle["N000000"] == high["N000000"] == 26.5


def test_kernels_agree_with_the_samples(folder, tmp_path):
    import_published(folder, tmp_path / "out")
    frame = Dataset.load(tmp_path / "out").frame
    assert frame["sample_id"].is_unique
    for row in frame.itertuples():
        kernel = kernel_from_ir(row.kernel_ir)
        assert kernel.kind == row.kind
        assert row.flops > 0 and row.bytes > 0
        assert (kernel.ir, kernel.hash) == (row.kernel_ir, row.kernel_hash)


def test_parameters_come_back(folder, tmp_path):
    import_published(folder, tmp_path / "out")
    rows = rows_of_dataset(Dataset.load(tmp_path / "out")).set_index("id")
    assert rows["key"]["N000001"] == "eager/softmax" and rows["key"]["V000001"] == "kernel/norm"
    assert rows["kv_len"]["A000002"] == 128 and rows["kv_dtype"]["A000002"] == "fp8"
    assert rows["n_in"]["N000000"] == 2 and np.isnan(rows["n_in"]["A000001"])
    assert rows["latency_us"]["A000003"] == 9.0
    assert rows["split"]["A000003"] == "val_group"


def test_an_import_goes_on_where_it_stopped(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(published, "ROWS_PER_SHARD", 2)
    out = tmp_path / "out"
    first = import_published(folder, out)
    assert (first.shards, first.kept) == (3 + 2 + 3, 0)
    before = Dataset.load(out)
    shard = out / "ops_neusight-0001.parquet"
    kept = out / "ops_neusight-0000.parquet"
    written = kept.stat().st_mtime_ns
    shard.unlink()
    (out / "run-neusight-p4.json").unlink()
    second = import_published(folder, out)
    assert (second.shards, second.kept, second.rows) == (1, 7, first.rows)
    assert kept.stat().st_mtime_ns == written
    assert Dataset.load(out).hash == before.hash


def test_rows_without_a_latency_are_counted(only, tmp_path, monkeypatch):
    monkeypatch.setattr(published, "ROWS_PER_SHARD", 2)
    frame = eager_table()
    frame["latency_us"] = [0.0, -1.0, np.nan, 4.0, 5.0]  # the first shard is left empty
    done = import_published(only(frame), tmp_path / "out")
    assert (done.rows, done.skipped, done.shards) == (2, 3, 2)
    assert sorted(Dataset.load(tmp_path / "out").frame["latency_us_p50"]) == [4.0, 5.0]


def test_a_table_without_splits(only, tmp_path):
    import_published(only(eager_table().drop(columns="split")), tmp_path / "out")
    assert set(Dataset.load(tmp_path / "out").frame["split"]) == {""}


def test_inputs_stated_for_some_rows_only(only, tmp_path):
    frame = eager_table().iloc[[0, 0]].assign(id=["a", "b"], n_in=pd.array([2, None], "Int64"))
    import_published(only(frame), tmp_path / "out")
    rows = rows_of_dataset(Dataset.load(tmp_path / "out")).set_index("id")
    assert rows["n_in"]["a"] == 2 and np.isnan(rows["n_in"]["b"])


def test_a_folder_without_tables(tmp_path):
    with pytest.raises(DatasetError, match=r"no operator table here .*ops_vidur.parquet"):
        import_published(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def measured():
    """Products that a user measured, without ids and splits."""
    rows = [
        {"op": "linear", "family": "linear", "b": 1, "m": m, "n": 256, "k": 512}
        for m in range(1, 201)
    ]
    frame = pd.DataFrame(rows).assign(source="mylab", dtype="bf16", device="h100-sxm")
    return frame.assign(latency_us=5.0 + 0.01 * frame["m"])


@pytest.mark.parametrize("name", ["mine.csv", "mine.csv.gz", "mine.parquet", "lab/mine.csv"])
def test_a_table_of_ones_own(measured, tmp_path, name):
    path = tmp_path / "own" / name
    path.parent.mkdir(parents=True)
    measured.to_parquet(path) if path.suffix == ".parquet" else measured.to_csv(path, index=False)
    given = tmp_path / "own" if "/" in name else path
    assert import_published(given, tmp_path / "out").rows == 200
    rows = rows_of_dataset(Dataset.load(tmp_path / "out"))
    assert rows["id"].is_unique and set(rows["key"]) == {"kernel/linear"}
    held = rows["split"] == "val"
    assert set(rows["split"]) == {"train", "val"} and 0.01 < held.mean() < 0.12
    # The same shapes are held out again, so that a resumed import has no row twice.
    assert import_published(given, tmp_path / "out").kept == 1


def test_a_table_of_ones_own_keeps_its_ids_and_splits(measured, tmp_path):
    path = tmp_path / "mine.csv"
    measured.assign(id=[f"r{n}" for n in range(200)], split="train").to_csv(path, index=False)
    import_published(path, tmp_path / "out")
    rows = rows_of_dataset(Dataset.load(tmp_path / "out"))
    assert set(rows["id"]) == {f"r{n}" for n in range(200)} and set(rows["split"]) == {"train"}


CHIP = """name: zephyr-1
platform: gpu
vendor: NVIDIA
peak_tflops: {bf16: 800}
vector_tflops: {f32: 50}
core_count: 100
hbm_bandwidth_gbps: 3000
memory_gb: 96
"""


def test_a_table_of_ones_own_chip(measured, tmp_path):
    """A chip that no catalogue lists: described by a file, as everywhere else."""
    table, chip = tmp_path / "mine.csv", tmp_path / "zephyr.yaml"
    measured.assign(device="zephyr-1").to_csv(table, index=False)
    chip.write_text(CHIP)
    with pytest.raises(DeviceError, match=r"'zephyr-1' is not in the catalogue.*--device FILE"):
        import_published(table, tmp_path / "out")
    spec = DeviceSpec.from_file(chip)
    import_published(table, tmp_path / "out", described={spec.name: spec})
    dataset = Dataset.load(tmp_path / "out")
    assert dataset.devices["zephyr-1"].memory_bytes == 96 * 2**30
    assert set(rows_of_dataset(dataset)["device"]) == {"zephyr-1"}


def test_a_table_of_ones_own_may_leave_out_what_a_query_may(tmp_path):
    rows = pd.DataFrame(
        {"op": "context_attention", "family": "context_attention", "dtype": "bf16",
         "source": "mylab", "device": "h100-sxm", "batch": [1, 2], "q_heads": 32, "head_dim": 64,
         "q_len": [512, 1024], "window": [None, 256], "latency_us": [20.0, 80.0]}
    )  # fmt: skip
    rows.to_csv(tmp_path / "mine.csv", index=False)
    import_published(tmp_path / "mine.csv", tmp_path / "out")
    found = rows_of_dataset(Dataset.load(tmp_path / "out")).sort_values("batch")
    assert found["kv_len"].tolist() == [512, 1024] and found["window"].tolist() == [0, 256]
    assert found["kv_heads"].tolist() == [32, 32] and found["v_head_dim"].tolist() == [64, 64]


def test_a_table_of_ones_own_that_lacks_a_column(measured, tmp_path):
    path = tmp_path / "mine.csv"
    measured.drop(columns="source").to_csv(path, index=False)
    with pytest.raises(DatasetError, match=r"mine.csv: column 'source' is missing .*latency_us"):
        import_published(path, tmp_path / "out")
    with pytest.raises(DatasetError, match=r"no such folder or table"):
        import_published(tmp_path / "absent.csv", tmp_path / "out")


def test_a_damaged_table(tmp_path):
    (tmp_path / EAGER).write_text("no parquet")
    with pytest.raises(DatasetError, match=rf"{EAGER}: cannot be read as parquet"):
        import_published(tmp_path, tmp_path / "out")


def test_a_table_that_is_there_twice(folder, tmp_path):
    eager_table().to_parquet(folder / "second" / EAGER)
    with pytest.raises(DatasetError, match=r"the table is there twice"):
        import_published(folder, tmp_path / "out")


@pytest.mark.parametrize("column", ["id", "family", "dtype", "device", "latency_us"])
def test_a_missing_column(only, tmp_path, column):
    with pytest.raises(DatasetError, match=rf"{EAGER}: column '{column}' is missing"):
        import_published(only(eager_table().drop(columns=column)), tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "fft"}, r"row N000000: no operator family 'eager/fft'.*eager/conv"),
        ({"dtype": "fp7"}, r"row N000000: no dtype 'fp7'"),
    ],
)
def test_rows_that_are_not_known(only, tmp_path, changes, message):
    with pytest.raises(DatasetError, match=message):
        import_published(only(eager_table().assign(**changes)), tmp_path / "out")


def test_unknown_ops_and_missing_parameters_name_the_row(only, tmp_path):
    frame = eager_table()
    frame.loc[0, "op"] = "erf"
    with pytest.raises(DatasetError, match="row N000000: no element-wise op 'erf'"):
        import_published(only(frame), tmp_path / "out")
    frame = eager_table()
    frame.loc[3, "k"] = pd.NA
    with pytest.raises(DatasetError, match=r"row N000003: .*'k'"):
        import_published(only(frame), tmp_path / "out")


def test_an_unknown_device(only, tmp_path):
    with pytest.raises(DeviceError, match="Tesla P5"):
        import_published(only(eager_table().assign(device="Tesla P5")), tmp_path / "out")


def packs():
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    return Path(os.environ.get("OPCAST_PUBLISHED_DATA", beside))


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATOR_FILES)
def test_a_shard_of_the_real_tables(name, tmp_path, only):
    import pyarrow.parquet as pq

    from opcast.features.devices.catalogue import find_device

    found = next(iter(packs().rglob(name)), None) if packs().is_dir() else None
    if found is None:
        pytest.skip(f"needs the published table {name} (set OPCAST_PUBLISHED_DATA)")
    file = pq.ParquetFile(found)
    # From the middle of the table, where large ones have several families.
    middle = file.metadata.num_rows // 20_000
    batch = next(islice(file.iter_batches(10_000), middle, None))
    part = batch.to_pandas(integer_object_nulls=False)
    part = part.assign(id=part["id"].astype(str))
    done = import_published(only(part, name), tmp_path / "out")
    data = Dataset.load(tmp_path / "out")
    assert done.rows + done.skipped == len(part) and len(data) == done.rows
    low, middle, high = (data.frame[f"latency_us_p{q}"] for q in (10, 50, 90))
    assert (low <= middle).all() and (middle <= high).all()
    expected = rows_of_published(part[part["latency_us"] > 0], find_device).set_index("id")
    rows = rows_of_dataset(data).set_index("id")
    assert list(rows.index) == list(expected.index)
    for key, own in expected.groupby("key"):
        columns = (*PARAMETERS[FAMILIES[key]], *NAMES, "key", "device", "latency_us", "split")
        for column in (c for c in columns if c in expected):
            assert_same(rows.loc[own.index, column], own[column])


def assert_same(found, expected):
    if pd.api.types.is_numeric_dtype(expected.dtype):
        left, right = (c.to_numpy(np.float64, na_value=np.nan) for c in (found, expected))
        np.testing.assert_array_equal(left, right, err_msg=expected.name)
    else:
        left, right = (c.astype(object).fillna("").astype(str) for c in (found, expected))
        assert (left == right).all(), expected.name
