import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from opcast import lower
from opcast.common.units import duration, size
from opcast.predict.export.timeline import chrome_trace, write_chrome_trace
from opcast.predict.program.predictor import KernelEstimate, Prediction
from opcast.predict.render.parts import cost_line
from opcast.predict.render.program import print_prediction


@pytest.mark.parametrize(
    ("us", "text"),
    [(0.25, "250 ns"), (1.0, "1 µs"), (12.34, "12.3 µs"), (1500.0, "1.5 ms"), (2.5e6, "2.5 s")],
)
def test_duration(us, text):
    assert duration(us) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(12, "12 B"), (2048, "2.0 KiB"), (3 * 1024**2, "3.0 MiB"), (5 * 1024**3, "5.00 GiB")],
)
def test_size(count, text):
    assert size(count) == text


def test_prediction_fits_one_screen_and_names_what_matters(predictor, device, step_file):
    prediction = predictor.predict(step_file, device=device)
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    print_prediction(console, prediction, top=3)
    console.file.close()
    text = console.export_text()
    assert len(text.splitlines()) < 24
    for word in (device.name, "90 % interval", "lowering xla", "peak memory", "by kind: gemm"):
        assert word in text


def shown(width, *args, **kwargs):
    console = Console(width=width, record=True, file=io.StringIO())
    print_prediction(console, *args, **kwargs)
    return console.export_text()


def kernel(name, us, line, module="Net/Block_0/attn", op="dot_general", **other):
    known = {
        "name": name, "kind": "gemm", "latency_us": us, "lo_us": us / 2, "hi_us": us * 2,
        "multiplicity": 1.0, "bound": "compute", "source": "learned:graph/linear",
        "in_domain": True, "flops": 1.0, "bytes": 1.0, "source_op": f"stablehlo.{op}",
        "source_line": line, "module": module, "phase": "forward",
    }  # fmt: skip
    return KernelEstimate(**(known | other))


LONG = "a_long_file_name_of_a_model.py:1234"
PREDICTION = Prediction(
    latency_us=1000.0, lo_us=800.0, hi_us=1300.0,
    kernels=(
        kernel("gemm_fusion_dot.113", 100.0, f"/home/me/{LONG}"),
        kernel("gemm_fusion_dot.7", 110.0, f"/home/me/{LONG}", "Net/Block_1/attn"),
        kernel("gemm_fusion_dot.8", 400.0, "m.py:5", "Net/head", phase="backward"),
        kernel("loop_add_fusion", 90.0, "m.py:9", "", op="add", phase=""),
    ),
    peak_memory_bytes=96 * 2.0**30, memory_source="compiler", lowering="xla", model="gpu-xla",
    device="h100-sxm", device_memory_bytes=80 * 2.0**30,
)  # fmt: skip


def test_time_outside_of_kernels_is_told():
    # 700 of 1,000 µs.
    assert "700 µs in kernels, the rest in the host's call" in shown(100, PREDICTION)
    assert "in the host's call" not in shown(100, replace(PREDICTION, latency_us=750.0))


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160])
def test_a_table_keeps_times_and_lines_at_any_width(width):
    text = shown(width, PREDICTION)
    assert all(len(line) <= width for line in text.splitlines())
    for word in ("400 µs", "210 µs", LONG, "m.py:5", "h100-sxm"):
        assert word in text
    assert ("interval of one" in text) == (width >= 160)


def test_a_long_module_leaves_its_op_in_sight():
    long = "GPT/blocks/MultiHeadDotProductAttention_0"
    ops = ("reduce_max", "exponential", "multiply")
    kernels = tuple(
        kernel(f"fusion.{n}", 100.0, "train.py:29", long, op, phase="recomputed")
        for n, op in enumerate(ops)
    )
    text = shown(100, replace(PREDICTION, kernels=(*kernels, PREDICTION.kernels[2])))
    rows = [line for line in text.splitlines() if "train.py:29" in line]
    assert len(rows) == 3 and all(f" {op} " in row for op, row in zip(ops, rows, strict=True))


def test_equal_kernels_of_layers_share_a_row_with_their_count():
    rows = [line for line in shown(170, PREDICTION).splitlines() if "%" in line and "py:" in line]
    assert len(rows) == 3
    assert rows[0].split()[:4] == ["57.1%", "400", "µs", "1"]
    assert "head (backward) dot_general" in rows[0]
    assert rows[1].split()[:4] == ["30.0%", "210", "µs", "2"]
    assert "Block_*/attn dot_general" in rows[1]
    assert "gemm_fusion_dot.7 +1" in rows[1]


def test_time_by_source_line_and_by_module():
    lines = shown(80, PREDICTION, by="line")
    assert "400 µs" in lines
    assert LONG in lines
    modules = shown(80, PREDICTION, by="module")
    assert "Block_*/attn" in modules
    assert "(none)" in modules


def test_a_run_below_a_cent_is_told_by_the_thousand_or_million():
    # 1 ms [0.8 – 1.3] at 3.6 an hour: 1e-06 a run; at 360, 1e-4; at 3.6e7, 10 a run.
    assert cost_line(PREDICTION, 3.6) == "cost 1  [0.8 – 1.3] per million runs"
    assert cost_line(PREDICTION, 360) == "cost 0.1  [0.08 – 0.13] per 1,000 runs"
    assert cost_line(PREDICTION, 3.6e7) == "cost 10  [8 – 13] a run"


def test_what_does_not_fit_is_said_in_the_first_line():
    first = shown(80, PREDICTION).splitlines()[0]
    assert first.endswith("on h100-sxm, does NOT fit")
    fitting = replace(PREDICTION, device_memory_bytes=0.0)
    assert "NOT" not in shown(80, fitting).splitlines()[0]


def test_standing_notes_are_grey():
    noted = replace(
        PREDICTION, notes=("of this program", "of the model"), standing=("of the model",)
    )
    out = io.StringIO()
    print_prediction(Console(file=out, force_terminal=True, color_system="standard"), noted)
    # ANSI: 33 is yellow, 90 bright black.
    assert "\x1b[33mnote: of this program" in out.getvalue()
    assert "\x1b[90mnote: of the model" in out.getvalue()


def test_recomputation_by_the_compiler_is_told(predictor, device, step_file):
    plain = predictor.predict(step_file, device=device)
    assert not any("rematerialisation" in note for note in plain.notes)
    lowered = lower(step_file, "auto", device=device)
    lowered.kernels[0].name = "loop_add_fusion.3.remat2"
    found = predictor.predict_lowered(lowered, device)
    assert "computes 1 kernels' values again" in found.notes[0]


def test_trace_covers_the_predicted_time(predictor, device, step_file, tmp_path):
    prediction = predictor.predict(step_file, device=device)
    events = chrome_trace(prediction)["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    named = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert named == dict.fromkeys({e["tid"] for e in spans}, "kernels")
    assert len(spans) == len(prediction.kernels)
    assert spans[-1]["ts"] + spans[-1]["dur"] == pytest.approx(prediction.latency_us)
    write_chrome_trace(prediction, tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text())["displayTimeUnit"] == "ms"


def test_what_users_ask_of_a_prediction(predictor, device, step_file):
    found = predictor.predict(step_file, device=device)
    groups = found.by("line")
    assert sum(g.total_us for g in groups) == pytest.approx(sum(k.total_us for k in found.kernels))
    assert sum(g.share for g in groups) == pytest.approx(1.0)
    assert found.top(1)[0] == max(found.kernels, key=lambda k: k.total_us)
    assert found.memory.peak_bytes == found.peak_memory_bytes
    assert (found.memory.fits, found.memory.source) == (found.fits, found.memory_source)
    assert float(found) == pytest.approx(found.latency_us * 1e-6)
    assert found.to_dict()["latency_us"] == found.latency_us


def test_a_prediction_is_short_in_a_session():
    text = repr(PREDICTION)
    assert text.startswith("Prediction(") and text.endswith(f"{len(PREDICTION.kernels)} kernels)")
    assert f" on {PREDICTION.device}, " in text and len(text) < 120
