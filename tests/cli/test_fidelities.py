"""Datasets from simulators, estimators side by side, and the table over the zoo."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from opcast.cli import app
from opcast.common.errors import ModelError
from opcast.features.dataset import Dataset
from opcast.workflows.label_with_simulator import simulate_dataset
from opcast.workflows.reports import fidelities as fidelity_report
from opcast.workflows.reports.fidelities import FidelityReport, run_fidelity_report
from opcast.workflows.reports.settings import FidelitySettings

PROGRAM = """
module @step {{
  func.func public @main(%a: tensor<{m}x64xbf16>, %b: tensor<64x32xbf16>) -> tensor<{m}x32xbf16> {{
    %0 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0]
      : (tensor<{m}x64xbf16>, tensor<64x32xbf16>) -> tensor<{m}x32xbf16>
    %1 = stablehlo.tanh %0 : tensor<{m}x32xbf16>
    return %1 : tensor<{m}x32xbf16>
  }}
}}
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setenv("OPCAST_CACHE", str(tmp_path / "cache"))
    paths = [tmp_path / f"step{m}.mlir" for m in (128, 256)]
    for path in paths:
        path.write_text(PROGRAM.format(m=path.stem.removeprefix("step")))
    return paths


def invoke(*args: str) -> str:
    result = CliRunner().invoke(app, list(args), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout if "--json" in args else result.output


def test_a_dataset_of_labels_resumes(programs: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("scalesim")
    out = tmp_path / "ds"
    first = simulate_dataset(out, programs[:1], "tpu-v3", "scalesim", lowering="op")
    assert (first.samples, first.programs, first.skipped, first.refused) == (1, 1, 0, 1)
    again = simulate_dataset(out, programs, "tpu-v3", "scalesim", lowering="op")
    assert (again.samples, again.programs, again.skipped) == (1, 1, 1)
    other = simulate_dataset(out, programs, "tpu-v4", "scalesim", lowering="op", family="mine")
    assert (other.samples, other.skipped) == (2, 0)
    dataset = Dataset.load(out)
    frame = dataset.frame
    assert set(frame["source"]) == {"simulator:scalesim"}
    assert frame["device"].value_counts().to_dict() == {"tpu-v3": 2, "tpu-v4": 2}
    assert set(frame["kind"]) == {"gemm"} and set(frame["level"]) == {"kernel"}
    assert frame["sample_id"].is_unique
    # The first operand stays in the arrays and the 32 columns stream: one fold of 2·128 + 128 - 2
    # and its columns shared by two arrays; or a fold for each of them. At 940 MHz, and the floor.
    label = frame.set_index(["device", "program"])["latency_us_p50"]
    assert label["tpu-v3", "step128"] == pytest.approx((382 + 32 / 2) / 940 + 0.27)
    assert label["tpu-v3", "step256"] == pytest.approx((382 + 32) / 940 + 0.27)
    assert set(frame[frame["device"] == "tpu-v4"]["family"]) == {"mine"}
    assert dataset.devices["tpu-v3"].array_rows == 128
    (record,) = [run for run in dataset.runs.values() if run["device"]["name"] == "tpu-v3"]
    assert record["refused"] == 2 and record["compiler"].startswith("scalesim 3.")


def test_labels_come_from_simulators_alone(programs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no simulator 'roofline'"):
        simulate_dataset(tmp_path / "ds", programs, "tpu-v3", "roofline")


def test_commands(programs: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("scalesim")
    args = ("data", "simulate", *map(str, programs), "--lowering", "op")
    said = invoke(*args, "--out", str(tmp_path / "ds"))
    assert "2 kernels of 2 programs on tpu-v3, source simulator:scalesim" in said
    args = ("predict", str(programs[0]), "--device", "tpu-v3", "--lowering", "op")
    data = json.loads(invoke(*args, "--model", "roofline,scalesim", "--json"))
    assert set(data["fidelities"]) == {"roofline", "scalesim"}
    assert "covered" in invoke(*args, "--model", "roofline, scalesim")
    refused = CliRunner().invoke(app, [*args, "--model", "roofline,scalesim", "--strict"])
    assert refused.exit_code == 2 and "single --model" in refused.output
    alone = json.loads(invoke(*args, "--model", "scalesim", "--json"))
    assert alone["latency_us"] == data["fidelities"]["scalesim"]["latency_us"]


def test_the_table_over_the_zoo_resumes(
    programs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("scalesim")
    models = ("roofline", "scalesim")
    settings = FidelitySettings(("tpu-v3",), models, "quick", "op", 3, tmp_path / "out")
    found = run_fidelity_report(settings)
    assert len(found.answers) == 3 and not found.failures
    table = found.correlations()
    assert table["models"].tolist() == ["roofline / scalesim"]
    assert table["programs"].tolist() == [3]
    assert -1 <= table["rho_kernels"][0] <= 1
    assert (table["kernels"] == table["products"]).all()  # it models nothing else

    def refuse(*args: object) -> None:
        raise AssertionError("asked again")

    monkeypatch.setattr(fidelity_report, "_ask", refuse)
    again = run_fidelity_report(settings)
    assert again.answers == found.answers
    said = invoke(
        "fidelities", "--device", "tpu-v3", "--model", "roofline,scalesim", "--suite", "quick",
        "--lowering", "op", "--limit", "3", "--out", str(tmp_path / "out"),
    )  # fmt: skip
    assert "rank correlation" in said


def answer(
    program: str, times: tuple[float, float], kernels: list[tuple[str, float | None, float]]
):
    return {
        "program": program, "device": "d", "lowering": "op", "count": len(kernels),
        "totals": {n: {"latency_us": t, "covered": 1.0} for n, t in zip("ab", times, strict=True)},
        "kernels": [{"hash": h, "kind": "gemm", "a": a, "b": b} for h, a, b in kernels],
    }  # fmt: skip


def test_correlations_by_hand() -> None:
    report = FidelityReport([
        answer("p", (1.0, 2.0), [("x", 1.0, 9.0), ("y", 2.0, 4.0)]),
        answer("q", (2.0, 6.0), [("x", 1.0, 9.0), ("z", 3.0, 1.0)]),
        answer("r", (3.0, 4.5), [("w", None, 5.0)]),
    ])  # fmt: skip
    (row,) = report.correlations().to_dict("records")
    # Ranks 1 2 3 against 1 3 2: 1 - 6 · (0 + 1 + 1) / (3 · 8).
    assert row["rho_programs"] == pytest.approx(0.5)
    # x, y and z once each; w has one answer alone. Ranks 1 2 3 against 3 2 1.
    assert (row["kernels"], row["rho_kernels"]) == (3, pytest.approx(-1.0))
    assert row["ratio"] == pytest.approx(2.0)  # of 2, 3 and 1.5


def test_too_few_have_no_rank() -> None:
    frame = pd.DataFrame({"a": [1.0, 2.0, None], "b": [1.0, 2.0, 3.0]})
    assert fidelity_report.rank_correlation(frame) != fidelity_report.rank_correlation(frame)
