"""What pages hold: schedules, memory, comparison, and names that want to be markup."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from opcast.features.ir.reader import read_program
from opcast.features.kernels.provenance import ModulePaths
from opcast.features.lowering.lower import lower
from opcast.features.lowering.options import LoweringOptions
from opcast.predict.devices import resolve_device
from opcast.predict.page import Page, assemble
from opcast.predict.page import kernel_data as kernel_data_module
from opcast.predict.page.assemble import json_for_html, short
from opcast.predict.page.kernel_data import kernel_columns, memory_data, schedule_of
from opcast.predict.page.report import (
    SCRIPTS,
    ReportOptions,
    compare_devices,
    report_data,
    report_page,
)

SCHEDULE = Path(__file__).parents[2] / "features" / "data" / "gpu_schedule.hlo"
#: Every name that a program brings, written so that it would run if it were taken for markup.
PLANTED = "</script><script>window.planted=1</script><img src=x onerror='window.planted=2'>"
ATTACK = f"""
module @m {{
  func.func public @main(%arg0: tensor<64x64xf32>) -> tensor<64x64xf32> {{
    %0 = stablehlo.dot_general %arg0, %arg0, contracting_dims = [1] x [0] : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32> loc(#l)
    return %0 : tensor<64x64xf32>
  }}
}}
#f = loc("{PLANTED}.py":3:1)
#l = loc("jit(f)/{PLANTED}/dot_general"(#f))
"""  # noqa: E501


@pytest.fixture(scope="module")
def gpu(predictor):
    return resolve_device("h100-sxm", predictor.devices)


@pytest.fixture(scope="module")
def found(predictor, step, gpu):
    """Prediction, lowered program and schedule of the small step on an H100."""
    lowered = lower(read_program(step), "fused", device=gpu)
    prediction = predictor.predict_lowered(lowered, gpu)
    return prediction, lowered, schedule_of(prediction, lowered, gpu)


@pytest.fixture(scope="module")
def data(predictor, step, gpu, found):
    return report_data(predictor, read_program(step), found[1], gpu)


def test_schedule_fills_the_predicted_time(found):
    prediction, lowered, schedule = found
    assert schedule.names == ["compute", "asynchronous"]
    assert schedule.busy.sum() == pytest.approx(sum(k.total_us for k in prediction.kernels))
    one = np.flatnonzero(schedule.stream == 0)
    assert (schedule.start[one][1:] >= schedule.end[one][:-1] - 1e-9).all()
    # A gap lies before every execution, so that the last kernel ends with the program.
    gaps = prediction.latency_us - schedule.busy.sum()
    assert schedule.end.max() == pytest.approx(prediction.latency_us)
    runs = sum(k.multiplicity for k in lowered.kernels if k.takes_time)
    assert schedule.start[one].min() == pytest.approx(gaps / runs, rel=0.2)


def test_schedule_shrinks_where_kernels_overlap_more(found, gpu):
    prediction, lowered, _ = found
    total = sum(k.total_us for k in prediction.kernels)
    schedule = schedule_of(replace(prediction, latency_us=total / 2), lowered, gpu)
    assert schedule.stretch == pytest.approx(0.5)
    assert schedule.end.max() == pytest.approx(total / 2)


def test_asynchronous_kernels_run_beside_the_others(predictor, gpu):
    """Of a module with collectives that start before and end after others."""
    source = read_program(SCHEDULE)
    data = report_data(predictor, source, lower(source, "xla", device=gpu), gpu)
    columns = data["kernels"]["columns"]
    spans = list(zip(columns["start"], columns["end"], columns["stream"], strict=True))
    beside = [s for s in spans if s[2] == 1]
    compute = [s for s in spans if s[2] == 0]
    assert data["streams"][1] == "asynchronous" and beside
    assert any(a[0] < c[1] and c[0] < a[1] for a in beside for c in compute)


def test_columns_agree_with_the_prediction(data, found):
    prediction = found[0]
    columns = data["kernels"]["columns"]
    assert {len(column) for column in columns.values()} == {len(columns["name"])}
    kinds = data["kernels"]["names"]["kind"]
    gemm = sum(
        t for t, k in zip(columns["busy"], columns["kind"], strict=True) if kinds[k] == "gemm"
    )
    own = sum(k.total_us for k in prediction.kernels if k.kind == "gemm")
    assert gemm == pytest.approx(own, rel=1e-3)
    assert data["total"]["us"] == pytest.approx(prediction.latency_us, rel=1e-4)
    assert "backward" in data["kernels"]["names"]["phase"]
    assert {row for own in data["explained"] for row in own["rows"]} <= set(
        range(len(columns["name"]))
    )


def test_long_programs_keep_the_costliest_kernels(found, gpu, step, monkeypatch):
    prediction, lowered, schedule = found
    monkeypatch.setattr(kernel_data_module, "MOST_KERNELS", 2)
    kept = kernel_columns(prediction, lowered, gpu, schedule, ModulePaths(read_program(step)))
    assert sorted(kept["columns"]["busy"], reverse=True) == pytest.approx(
        sorted(schedule.busy, reverse=True)[:2], rel=1e-4
    )
    assert kept["left_out"]["count"] == (schedule.busy > 0).sum() - 2
    assert kept["left_out"]["us"] == pytest.approx(np.sort(schedule.busy)[:-2].sum(), rel=1e-3)


@pytest.mark.parametrize("lowering", ["op", "fused"])
def test_memory_over_time_peaks_at_the_peak(predictor, step, gpu, lowering):
    lowered = lower(read_program(step), lowering, device=gpu)
    prediction = predictor.predict_lowered(lowered, gpu)
    memory = memory_data(prediction, lowered, schedule_of(prediction, lowered, gpu))
    assert max(memory["bytes"]) == pytest.approx(lowered.peak_memory_bytes, rel=1e-4)
    assert memory["us"] == sorted(memory["us"])
    assert memory["us"][-1] <= prediction.latency_us


def test_extrapolated_layers_have_no_course_over_time(found, gpu):
    prediction, lowered, schedule = found
    repeated = [replace(k, multiplicity=3.0, scope=()) for k in lowered.kernels]
    memory = memory_data(prediction, replace(lowered, kernels=repeated), schedule)
    assert "extrapolated" in memory["why_not"]
    assert "us" not in memory


def test_comparison_names_lowering_and_failures(predictor, step, tmp_path):
    told = []
    missing = str(tmp_path / "none.yaml")
    rows = compare_devices(
        predictor, read_program(step), ["h100-sxm", "tpu-v4", missing], tell=told.append
    )
    assert told == [f"comparing with {name}" for name in ("h100-sxm", "tpu-v4", missing)]
    good, tpu, bad = rows
    assert good["lowering"] == tpu["lowering"] == "fused"
    assert good["us"] > 0 and tpu["model"] != good["model"]
    assert any("rules for layouts, products and windows alone" in note for note in tpu["notes"])
    assert bad["error"] and "us" not in bad


def test_json_cannot_leave_its_element():
    text = json_for_html({"name": f"{PLANTED}&\u2028"})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text)["name"] == f"{PLANTED}&\u2028"
    with pytest.raises(ValueError, match="JSON"):
        json_for_html([float("nan")])


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.23456789, "1.2346"), (3.0, "3"), (1e300, "1e+300"), (float("inf"), "None")],
)
def test_short_numbers(value, text):
    assert str(short(value)) == text


def test_planted_names_stay_text(predictor, tmp_path):
    path = tmp_path / "a<script>window.planted=3<script>.mlir"
    path.write_text(ATTACK)
    page = report_page(predictor, path, ReportOptions(LoweringOptions("fused", "h100-sxm"), ()))
    # The data and the script of the page, and nothing besides.
    assert page.count("<script") == 2 and page.count("</script") == 2
    assert "<img" not in page
    embedded = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1]
    assert any(PLANTED in line for line in json.loads(embedded)["kernels"]["names"]["line"])


def test_policy_allows_the_page_alone():
    page = assemble(Page("t", {}, SCRIPTS))
    policy = re.search(r'Policy" content="([^"]*)"', page)[1]
    assert "default-src &#x27;none&#x27;" in policy
    assert "unsafe" not in policy
    assert not re.search(r"""(?:src|href)=["'](?!data:)""", page)
    assert "http" not in page.replace("http-equiv", "")
