"""Archives: whole, within their size, told apart from changed ones; imports by hand."""

from __future__ import annotations

import json
import random
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from opcast.common.errors import DatasetError, DeviceError
from opcast.datagen.campaign import archive
from opcast.datagen.campaign.archive import noise_floor, pack, read_archive
from opcast.datagen.campaign.importer import described_device, import_campaign
from opcast.datagen.campaign.journal import Journal
from opcast.features.dataset import Dataset
from opcast.features.devices.catalogue import find_device
from opcast.features.devices.device import DeviceSpec, MemoryLevel
from opcast.features.devices.identity import MEASURED
from opcast.predict.locate import trained_devices
from opcast.workflows.campaign import campaign_device
from opcast.workflows.torch_models.rows import model_row

from ...support.campaigns import KEY, ROWS, campaign, events, program


def test_kernels_programs_and_operators_by_hand(tmp_path: Path) -> None:
    journal, plan = campaign(tmp_path / "c", ROWS)
    lines = [f"{100 + i / 10:.1f},{1900 + i},2619,{600 + i},50,99" for i in range(-5, 10)]
    (tmp_path / "c" / "telemetry-001.csv").write_text("\n".join(lines) + "\n99.0,cut o")
    pack(tmp_path / "c", journal, plan, "done")
    device = find_device("h200-sxm")
    found = import_campaign(read_archive(tmp_path / "c"), tmp_path / "out", device)
    frame = Dataset.load(tmp_path / "out" / "kernels").frame
    first = frame[frame["program"] == KEY].set_index("kind")["latency_us_p50"]
    assert first["gemm"] == pytest.approx(12.0)  # both kernels of the product
    assert first["fusion"] == pytest.approx(4.0)
    assert first["program"] == pytest.approx(21.0)
    product = frame[frame["kind"] == "gemm"].iloc[0]
    assert (product["flops"], product["repeats"]) == (2 * 64 * 128 * 64, 3)
    assert set(frame["device"]) == {device.name}
    operators = Dataset.load(tmp_path / "out" / "operators")
    assert operators.of_operators
    assert operators.frame["latency_us_p50"].tolist() == [32.0]  # of three calls
    models = pd.read_parquet(tmp_path / "out" / "tables" / "models.parquet").iloc[0]
    assert (models["latency_ms"], models["id"]) == (pytest.approx(5.1), "models/m")
    # Tables of whole models are read as it is (docs/torch.md).
    row = model_row(models.to_dict())
    assert (row.measured_s, row.memory_is, row.memory_bytes) == (0.0051, "allocated", 10.0)
    # Readings of the second that it ran: 600 to 609 W.
    assert models["power_w"] == pytest.approx(604.5)
    windows = pd.read_parquet(tmp_path / "out" / "tables" / "windows.parquet").iloc[0]
    assert windows["core_mhz"] == pytest.approx(1902.5)  # the first half second
    # The second half of three windows: the last two.
    power = pd.read_parquet(tmp_path / "out" / "tables" / "power.parquet").iloc[0]
    assert (power["id"], power["dtype"], power["m"]) == ("products/w", "bf16", 64)
    assert (power["latency_us"], power["power_limit_w"]) == (41000.0, 700.0)
    assert power["power_w"] == pytest.approx((606.0 + 608.0) / 2)
    assert found.noise["replicates"]["events"]["median_ape"] == pytest.approx(0.1 / 1.05)
    assert found.noise["drift"]["xla product_us"] == {"workers": 2, "range": pytest.approx(2 / 11)}
    assert found.without == {}
    assert found.contradictions == []
    assert "someone" not in json.dumps(found.record)
    # The same again is there once.
    import_campaign(read_archive(tmp_path / "c"), tmp_path / "out", device)
    assert len(Dataset.load(tmp_path / "out" / "kernels").frame) == len(frame)


def test_runs_that_a_gpu_does_not_mark_are_counted(tmp_path: Path) -> None:
    # One kernel runs twice in each execution, so that its name alone tells nothing.
    own = events("a/x")
    own |= {"marked": False, "run": [0] * 9, "names": ["same", "same", "loop_fusion"]}
    own["name"] = [0 if name < 2 else 2 for name in own["name"]]
    rows = [program("a/x", runs=3), own]
    journal, plan = campaign(tmp_path, rows)
    pack(tmp_path, journal, plan, "done")
    import_campaign(read_archive(tmp_path), tmp_path / "out", find_device("h200-sxm"))
    frame = Dataset.load(tmp_path / "out" / "kernels").frame.set_index("kind")
    assert frame.loc["gemm", "latency_us_p50"] == pytest.approx(12.0)
    assert frame.loc["gemm", "repeats"] == 3


def test_what_contradicts_itself_or_shows_nothing_is_told(tmp_path: Path) -> None:
    rows = [program("a/short", walls_us=[5.0]), events("a/short"), program("a/none")]
    journal, plan = campaign(tmp_path, rows)
    pack(tmp_path, journal, plan, "done")
    found = import_campaign(read_archive(tmp_path), tmp_path / "out", find_device("h200-sxm"))
    assert found.contradictions == ["a/short: 5.0 µs in all, 12.0 µs for one kernel"]
    assert found.without == {"a/none": "no kernel of it appears in the trace"}


def test_equal_content_makes_an_equal_archive_and_a_change_is_refused(tmp_path: Path) -> None:
    journal, plan = campaign(tmp_path, ROWS)
    path = pack(tmp_path, journal, plan, "done")
    data = path.read_bytes()
    assert pack(tmp_path, Journal(tmp_path), plan, "done").read_bytes() == data
    _, record, digest = read_archive(path)
    assert record["failed"]["programs/traced/y"].endswith("RESOURCE_EXHAUSTED in <path>")
    assert len(digest) == 64
    with zipfile.ZipFile(path) as own:
        page = own.read("page.html").decode()
        files = {name: own.read(name) for name in own.namelist()}
    assert "NVIDIA H200" in page
    assert "RESOURCE_EXHAUSTED" in page
    files["noise.json"] = files["noise.json"].replace(b"0.09", b"0.01")
    changed = tmp_path / "changed.zip"
    with zipfile.ZipFile(changed, "w") as own:
        for name, content in files.items():
            own.writestr(name, content)
    with pytest.raises(DatasetError, match="was changed"):
        read_archive(changed)
    changed.write_bytes(data[:1000])
    with pytest.raises(DatasetError, match="no archive of a campaign"):
        read_archive(changed)
    with pytest.raises(DatasetError, match="no archive of a campaign"):
        read_archive(tmp_path / "missing")


def test_without_pyarrow_tables_are_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, plan = campaign(tmp_path, ROWS)
    whole, *_ = read_archive(pack(tmp_path, journal, plan, "done"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = pack(tmp_path, journal, plan, "done")
    monkeypatch.undo()
    with zipfile.ZipFile(path) as own:
        assert "tables/events.jsonl.gz" in own.namelist()
    assert read_archive(path)[0] == whole


def test_an_archive_stays_within_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(0)
    rows = [
        {"table": "walls", "key": f"{stage}/k/{i}", "walls_us": [draw.random() for _ in range(99)]}
        for stage in ("programs", "operations")
        for i in range(20)
    ]
    journal, plan = campaign(tmp_path, rows)
    lines = [f"{i},{draw.random()},1,{draw.random()},1,1" for i in range(4000)]
    (tmp_path / "telemetry-001.csv").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(archive, "MOST_BYTES", 45_000)
    tables, record, _ = read_archive(pack(tmp_path, journal, plan, "done"))
    assert record["telemetry_every"] > 1
    assert record["left_out"] == []
    assert len(tables["walls"]) == 40
    monkeypatch.setattr(archive, "MOST_BYTES", 30_000)
    path = pack(tmp_path, journal, plan, "done")
    tables, record, _ = read_archive(path)
    # The stage of least value goes first, and the record says so.
    assert record["left_out"] == ["operations"]
    assert {row["key"].split("/")[0] for row in tables["walls"]} == {"programs"}
    assert path.stat().st_size <= 30_000


def test_noise_of_nothing_is_empty() -> None:
    assert noise_floor({}) == {"replicates": {}, "drift": {}}


def test_an_unknown_chip_needs_a_description(tmp_path: Path) -> None:
    journal, plan = campaign(tmp_path, ROWS, kind="Frobnicator 9000")
    _, record, _ = read_archive(pack(tmp_path, journal, plan, "done"))
    with pytest.raises(DeviceError, match="Frobnicator 9000"):
        campaign_device(record, None)
    assert campaign_device(record, "h200-sxm").name == "h200-sxm"
    with pytest.raises(DeviceError, match="measured on a gpu"):
        campaign_device(record, "tpu-v4")
    known = {**record, "hosts": [{"frameworks": {"jax": {"device_kind": "NVIDIA H200"}}}]}
    assert campaign_device(known, None).name == "h200-sxm"
    with pytest.raises(DeviceError, match="h100-sxm is a different device"):
        campaign_device(known, "h100-sxm")


def test_a_cpu_is_described_by_itself_and_is_no_other_device(tmp_path: Path) -> None:
    own = DeviceSpec(
        "cpu-x-2c", "cpu", {"f32": 1e11}, {"f32": 1e10}, (MemoryLevel(1e9, 1e10),), 1e-7,
        source=MEASURED,
    )  # fmt: skip
    rows = [{"key": "operations/device/seconds3", "description": own.to_json()}]
    assert described_device({"device": rows}) == own
    assert described_device({}) is None
    jax = {"device_kind": "cpu", "device_name": "cpu-x-2c"}
    record = {"platform": "cpu", "hosts": [{"frameworks": {"jax": jax}}]}
    assert campaign_device(record, None, own) is own
    with pytest.raises(DeviceError, match=r"on a cpu \(cpu-x-2c\), but h100-sxm is a different"):
        campaign_device(record, "h100-sxm")
    # Without its ceilings it needs a file: of that machine, not of another one.
    with pytest.raises(DeviceError, match="unknown: cpu-x-2c"):
        campaign_device(record, None)
    file = tmp_path / "cpu.json"
    file.write_text(own.to_json())
    assert campaign_device(record, str(file)) == own
    file.write_text(replace(own, name="cpu-y-2c").to_json())
    with pytest.raises(DeviceError, match="cpu-y-2c is a different device"):
        campaign_device(record, str(file))
    # What models were trained on is known by its name.
    trained = next(name for name, spec in trained_devices().items() if spec.platform == "cpu")
    jax["device_name"] = trained
    assert campaign_device(record, None).name == trained
