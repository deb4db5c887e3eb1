from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from opcast.common.errors import DatasetError
from opcast.datagen.traces.aten import traced_operators
from opcast.datagen.traces.importer import import_trace, is_collective
from opcast.datagen.traces.kineto import read_kineto, stream_events
from opcast.datagen.traces.trace import Collective, TraceKernel, by_run, chosen, run_time
from opcast.features.dataset import Dataset
from opcast.features.devices.catalogue import find_device
from opcast.models.collectives.measurements import read_collectives
from opcast.models.operators.rows import rows_of_dataset

from ...support.traces import Kineto, two_steps


def test_kernels_belong_to_the_operators_that_launched_them(tmp_path: Path) -> None:
    trace = read_kineto(two_steps(tmp_path / "t.json.gz"))
    assert trace.device_name == "NVIDIA H100 80GB HBM3" and not trace.of_xla
    (device,) = trace.devices
    assert len(device.executed.events) == 12
    first = device.executed.events[0]
    assert isinstance(first, TraceKernel)
    assert [o.name for o in first.operators] == ["aten::addmm", "aten::linear"]
    assert first.launched < first.start
    found = {o.name: o for o in traced_operators(device.executed.events)}
    # Both kernels of a call count: 10 + 2 and 11 + 2 microseconds.
    assert found["aten::addmm"].seconds == pytest.approx([12e-6, 13e-6])
    product = {"family": "linear", "op": "linear", "dtype": "bf16"}
    assert found["aten::addmm"].row == {**product, "b": 1, "m": 512, "n": 1024, "k": 256}
    assert found["aten::native_layer_norm"].row["cols"] == 1024
    assert found["aten::add"].row["op"] == "add" and found["aten::add"].row["n_in"] == 2
    assert found["aten::cumsum"].row == {}
    reduced = found["all_reduce"].collective
    assert reduced == Collective("all_reduce", 2 * 524288, 8, "bfloat16")


def test_steps_gaps_and_exposed_communication(tmp_path: Path) -> None:
    (device,) = chosen(read_kineto(two_steps(tmp_path / "t.json")), None)
    runs = [run_time(r, is_collective) for r in by_run(device.executed.events)]
    assert len(runs) == 2
    assert runs[0].kernels == pytest.approx(24e-6) and runs[1].kernels == pytest.approx(25e-6)
    assert runs[0].exposed == pytest.approx(20e-6) == runs[0].collectives
    # One stream: what is not a kernel is a gap, and nothing runs at once.
    assert runs[0].span == pytest.approx(runs[0].gaps + 44e-6) and runs[0].gaps > 0
    assert runs[0].overlap == pytest.approx(0, abs=1e-12)


def test_import_is_anonymous_repeatable_and_learnable(tmp_path: Path) -> None:
    trace = read_kineto(two_steps(tmp_path / "t.json"))
    spec = find_device("h100-sxm")
    result = import_trace(trace, tmp_path / "out", spec)
    assert result.samples == 3 and result.collectives == 1
    # Only the scan, 5 of 44.5 microseconds, has no family.
    assert result.matched == pytest.approx(1 - 5 / 44.5, abs=1e-3)
    assert result.unmatched == [("aten::cumsum", pytest.approx(5 / 44.5, abs=1e-3))]
    texts = "".join(p.read_text() for p in (tmp_path / "out").glob("*.json"))
    texts += Dataset.load(tmp_path / "out").frame.to_csv()
    for name in ("xmma", "splitK", "cumsum", "aten::", "t.json", str(tmp_path)):
        assert name not in texts
    again = import_trace(trace, tmp_path / "out", spec)
    assert again.kept and again.samples == 0
    rows = rows_of_dataset(Dataset.load(tmp_path / "out")).set_index("key")
    assert len(rows) == 3
    assert rows.loc["kernel/linear", "latency_us"] == pytest.approx(12.5)
    assert rows.loc["kernel/norm", "op"] == "layernorm"
    collectives, _ = read_collectives([tmp_path / "out"])
    assert collectives.iloc[0][["op", "bytes", "world_size", "latency_us"]].tolist() == [
        "all_reduce", 1048576, 8, pytest.approx(20.0)
    ]  # fmt: skip
    named = import_trace(trace, tmp_path / "named", spec, keep_names=True)
    assert named.samples == 3
    assert "sm90_xmma_gemm_bf16" in next((tmp_path / "named").glob("*.json")).read_text()


@pytest.mark.parametrize(
    ("name", "dims", "values", "wanted"),
    [
        ("aten::bmm", [[8, 64, 32], [8, 32, 16]], (), {"family": "bmm", "b": 8, "m": 64, "n": 16}),
        ("aten::mul", [[64, 32], []], (), {"op": "mulu", "rows": 64, "cols": 32, "n_in": 1}),
        ("aten::silu", [[4, 8, 32]], (), {"op": "gelu", "rows": 32, "cols": 32, "n_in": 1}),
        ("aten::_softmax", [[4, 8, 128], [], []], ("", "-1", "False"), {"rows": 32, "cols": 128}),
        (
            "aten::_scaled_dot_product_flash_attention",
            [[2, 32, 512, 128], [2, 8, 512, 128], [2, 8, 512, 128], [], []],
            ("", "", "", "0.", "True"),
            {"batch": 2, "q_heads": 32, "kv_heads": 8, "kv_len": 512, "causal": 1},
        ),
        (
            "aten::convolution",
            [[8, 64, 56, 56], [128, 64, 3, 3], [], [], [], [], [], [], []],
            ("", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"),
            {"op": "fwd", "c": 64, "k": 128, "kh": 3, "stride_w": 2, "pad_h": 1, "groups": 1},
        ),
    ],
)
def test_rows_of_operators(tmp_path, name, dims, values, wanted) -> None:
    trace = Kineto()
    trace.operator(name, dims, [("k", 1.0)], values=values)
    (device,) = read_kineto(trace.save(tmp_path / "t.json")).devices
    (operator,) = traced_operators(device.executed.events)
    assert wanted.items() <= operator.row.items()
    made = import_trace(read_kineto(tmp_path / "t.json"), tmp_path / "out", find_device("h100-sxm"))
    assert made.samples == 1


def test_a_softmax_over_another_dimension_has_no_row(tmp_path: Path) -> None:
    trace = Kineto()
    trace.operator("aten::_softmax", [[4, 8, 128], [], []], [("k", 1.0)], values=("", "1", "False"))
    (device,) = read_kineto(trace.save(tmp_path / "t.json")).devices
    assert traced_operators(device.executed.events)[0].row == {}


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    whole = two_steps(tmp_path / "t.json").read_bytes()
    cut = tmp_path / "cut.json"
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DatasetError, match="ends in the middle"):
        read_kineto(cut)
    packed = tmp_path / "cut.json.gz"
    packed.write_bytes(gzip.compress(whole)[:-200])
    with pytest.raises(DatasetError, match="cut off or damaged"):
        read_kineto(packed)
    host = tmp_path / "host.json"
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": 1, "dur": 1, "args": {}}
    host.write_text(json.dumps([event]))
    with pytest.raises(DatasetError, match=r"only events of the host.*ProfilerActivity.CUDA"):
        read_kineto(host)
    host.write_text(json.dumps({"traceEvents": [{**event, "ts": "soon"}]}))
    with pytest.raises(DatasetError, match="event 'aten::add' cannot be read"):
        read_kineto(host)
    host.write_text("<html>")
    with pytest.raises(DatasetError, match="not a trace"):
        read_kineto(host)


def test_devices_that_ran_different_kernels_need_a_choice(tmp_path: Path) -> None:
    trace = Kineto()
    trace.operator("aten::mm", [[64, 64], [64, 64]], [("a", 1.0)], device=0)
    trace.operator("aten::mm", [[64, 64], [64, 64]], [("b", 1.0)], device=1)
    read = read_kineto(trace.save(tmp_path / "t.json"))
    with pytest.raises(DatasetError, match=r"2 devices ran different kernels.*--device-index"):
        chosen(read, None)
    assert [d.index for d in chosen(read, 1)] == [1]
    with pytest.raises(DatasetError, match="no device 2"):
        chosen(read, 2)


def test_a_profile_of_pytorch_on_a_cpu_says_how_to_record(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    with torch.profiler.profile(record_shapes=True) as profile:
        torch.mm(torch.ones(8, 8), torch.ones(8, 8))
    path = tmp_path / "t.json.gz"
    profile.export_chrome_trace(str(path))
    with pytest.raises(DatasetError, match="only events of the host"):
        read_kineto(path)


def test_values_across_the_ends_of_chunks(tmp_path: Path, monkeypatch) -> None:
    from opcast.datagen.traces import kineto

    path = tmp_path / "t.json"
    data = {
        "a": [1, 22, "ü€"],
        "traceEvents": [{"n": i, "s": "größe" * i} for i in range(9)],
        "b": 1234,
    }
    path.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
    for size in (1, 2, 3, 7, 1000):
        monkeypatch.setattr(kineto, "_CHUNK", size)
        found = list(stream_events(path))
        assert [v for k, v in found if k == "traceEvents"] == data["traceEvents"]
        assert dict(p for p in found if p[0] != "traceEvents") == {"a": data["a"], "b": 1234}


def test_an_empty_trace_asks_whether_the_schedule_had_ended(tmp_path):
    path = tmp_path / "t.json"
    path.write_text('{"schemaVersion": 1, "traceEvents": []}')
    with pytest.raises(DatasetError, match=r"no events of an operator.*schedule has ended"):
        read_kineto(path)
