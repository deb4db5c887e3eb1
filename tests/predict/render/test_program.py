import json

import pytest
from rich.console import Console

from opcast.common.units import duration, size
from opcast.predict.export.timeline import chrome_trace, write_chrome_trace
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


def test_trace_covers_the_predicted_time(predictor, device, step_file, tmp_path):
    prediction = predictor.predict(step_file, device=device)
    spans = [e for e in chrome_trace(prediction)["traceEvents"] if e["ph"] == "X"]
    assert len(spans) == len(prediction.kernels)
    assert spans[-1]["ts"] + spans[-1]["dur"] == pytest.approx(prediction.latency_us)
    write_chrome_trace(prediction, tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text())["displayTimeUnit"] == "ms"
