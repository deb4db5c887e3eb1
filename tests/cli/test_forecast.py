"""Questions that are answered before anybody has measured, and scored when somebody has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..support.commands import opcast

OP = "predict --op 'linear m=64 n=4096 k=4096 dtype=bf16' --device mine.yaml"
SERVED = (
    "simulate-serving --workload llama --set layers=2 --device l4 --concurrency 1 --count 1 "
    "--prompt 16 --output 4"
)
QUESTIONS = f"""questions:
  gemm: {OP}
  tpot: {{run: {SERVED}, figure: median_tpot_ms}}
"""
CHIP = "{name: mine, base: h100-sxm, power_w: 600}\n"
#: The committed questions about announced chips.
OWN = Path(__file__).parents[2] / "forecasts" / "2026-12.yaml"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "q.yaml").write_text(QUESTIONS)
    (tmp_path / "mine.yaml").write_text(CHIP)
    return tmp_path


def test_a_forecast_holds_what_the_commands_print(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("elsewhere") / "f.json"
    done = opcast("forecast", folder / "q.yaml", "--out", out)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["models"].keys() >= {"gpu-operators", "steps.json", "serving.json"}
    words = ("--op", "linear m=64 n=4096 k=4096 dtype=bf16", "--device", "mine.yaml", "--json")
    said = json.loads(opcast("predict", *words, cwd=folder).stdout)
    gemm = found["answers"]["gemm"]
    assert gemm == {
        "command": f"opcast {OP}",
        "figure": "latency_us",
        "predicted": said["latency_us"],
        "lo": said["lo_us"],
        "hi": said["hi_us"],
    }
    served = json.loads(opcast(*SERVED.split(), "--json").stdout)
    tpot = found["answers"]["tpot"]
    assert (tpot["predicted"], tpot["hi"]) == (
        served["median_tpot_ms"],
        served["median_tpot_ms_hi"],
    )


def test_a_forecast_is_not_rewritten(folder):
    (folder / "f.json").write_text("{}")
    done = opcast("forecast", folder / "q.yaml", "--out", folder / "f.json")
    assert done.returncode == 1
    assert "is not overwritten" in done.stderr
    assert (folder / "f.json").read_text() == "{}"


def test_a_forecast_is_scored(tmp_path):
    answers = {
        "a": {"figure": "latency_us", "predicted": 110.0, "lo": 90.0, "hi": 120.0},
        "b": {"figure": "latency_us", "predicted": 60.0, "lo": 50.0, "hi": 75.0},
        "c": {"figure": "latency_us", "predicted": 1.0, "lo": 0.5, "hi": 2.0},
    }
    (tmp_path / "f.json").write_text(json.dumps({"answers": answers}))
    (tmp_path / "m.csv").write_text("question,measured\na,100\nb,80\n")
    done = opcast("forecast", "f.json", "--measured", "m.csv", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # Errors of 10 and 25 %, of which the second lies outside.
    assert "2 of 3 questions measured: mean error 17.5%, median 17.5%, 50% inside" in done.stdout


@pytest.mark.parametrize(
    ("questions", "said"),
    [
        ("questions: {a: 7}", "a: a question is a command"),
        ("questions: {a: {run: x, figures: y}}", "a: a question is a command"),
        ("rows: {}", "no mapping 'questions'"),
        ("questions: {a: predict --op 'linear m=1' --device l4}", "question a: "),
        (f"questions: {{a: {{run: {SERVED}, figure: nope}}}}", "no nope with an interval"),
    ],
)
def test_questions_that_cannot_be_asked(tmp_path, questions, said):
    (tmp_path / "q.yaml").write_text(questions)
    done = opcast("forecast", "q.yaml", "--out", "f.json", cwd=tmp_path)
    assert done.returncode == 1
    assert said in done.stderr
    assert not (tmp_path / "f.json").exists()


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("question,measured\nz,1\n", "not forecast: z"),
        ("a,b\n1,2\n", "columns question and measured"),
        ("question,measured\na,200us\n", "m.csv: question a: measured is 200us,"),
        ("question,measured\na,-1700\n", "m.csv: question a: measured is -1700,"),
    ],
)
def test_tables_that_score_nothing(tmp_path, table, said):
    (tmp_path / "f.json").write_text('{"answers": {"a": {"predicted": 1}}}')
    (tmp_path / "m.csv").write_text(table)
    done = opcast("forecast", "f.json", "--measured", "m.csv", cwd=tmp_path)
    assert done.returncode == 1
    assert said in done.stderr


def test_all_faults_are_told_at_once(tmp_path):
    lines = [f"  {name}: predict --op 'nope m=1' --device l4" for name in "ab"]
    (tmp_path / "q.yaml").write_text("\n".join(("questions:", *lines)))
    said = opcast("forecast", "q.yaml", "--out", "f.json", cwd=tmp_path).stderr
    assert "question a" in said and "question b" in said


def test_one_of_both(folder):
    assert opcast("forecast", folder / "q.yaml").returncode == 2


def test_the_committed_questions_can_be_asked(tmp_path):
    out = tmp_path / "f.json"
    done = opcast("forecast", OWN, "--out", out)
    assert done.returncode == 0, done.stderr
    answers = json.loads(out.read_text())["answers"]
    assert len(answers) >= 20
    assert all(0 < a["lo"] < a["predicted"] < a["hi"] for a in answers.values())
