"""Predictions stay as they are committed; what the comparison says where they do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from .run import ANSWERS, Cases, Move, answers, compare, moves, read_answers, table, write_answers

CASES = Cases.read()
GROUPS = sorted({name.split("/")[0] for name in CASES.cases})


@pytest.mark.parametrize("group", GROUPS)
def test_predictions_stay(group: str) -> None:
    chosen = [name for name in CASES.cases if name.split("/")[0] == group]
    moved = compare(answers(CASES, chosen), CASES)
    assert not moved, f"explain in the commit and run make golden:\n{table(moved, chosen)}"


def test_every_case_has_an_answer_and_every_answer_a_case() -> None:
    assert sorted(read_answers()) == sorted(CASES.cases)
    assert ANSWERS.stat().st_size < 1_000_000


def test_a_leaf_moves_by_more_than_its_tolerance_or_by_its_kind() -> None:
    old = {"a": 100, "b": 1.0, "c": "x", "d": None, "e": True, "f": 3}
    new = {"a": 100.0001, "b": 1.1, "c": "y", "d": None, "e": 1, "g": 3}
    assert moves(old, new, 1e-5) == [
        Move("b", 1.0, 1.1), Move("c", "x", "y"), Move("e", True, 1), Move("f", 3, None),
        Move("g", None, 3),
    ]  # fmt: skip
    assert moves(old, new, 0.2)[0].leaf == "c"


def test_the_table_has_signs_and_no_average_across_them() -> None:
    moved = {
        "step/one": [Move("step_us", 100, 110), Move("mfu", 0.5, 0.4)],
        "step/two": [Move("step_us", 100, 90)],
    }
    text = table(moved, ["step/one", "step/two", "step/three"])
    assert "step_us" in text and "+10.000%" in text and "-10.000%" in text
    (summary,) = (line.split() for line in text.splitlines() if line.startswith("step  "))
    assert summary[1:3] == ["3", "2"] and summary[-2:] == ["-10.00%", "+10.00%"]
    assert text.index("-20.00%") > text.index("largest move of a case")


def test_answers_are_read_as_they_were_written(tmp_path: Path) -> None:
    found = {"b": {"x": 1.5, "y": "é"}, "a": {"z": None}}
    write_answers(found, tmp_path / "a.jsonl")
    assert read_answers(tmp_path / "a.jsonl") == found
    assert (tmp_path / "a.jsonl").read_text().splitlines()[0].startswith('{"answer": {"z": null}')
