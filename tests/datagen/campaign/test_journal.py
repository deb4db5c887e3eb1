"""A journal that a kill cut off at any byte is read as what was certain before."""

from __future__ import annotations

import json
from pathlib import Path

from opcast.datagen.campaign.journal import KILLED, Journal


def block(journal: Journal, *done: str, failed: dict[str, str] | None = None, **more) -> None:
    journal.add("begin", keys=[*done, *(failed or {})])
    rows = journal.keep({"table": "t", "key": key} for key in done)
    own = {"stage": "s", "kind": "k", "worker": "xla", "seconds": 3.0, "unfinished": []}
    journal.add("block", done=list(done), failed=failed or {}, rows=rows, **{**own, **more})


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    own = Journal(tmp_path)
    own.add("slice")
    block(own, "a", "b")
    block(own, "c", failed={"d": "out of memory"})
    again = Journal(tmp_path)
    assert again.done == {"a", "b", "c"}
    assert again.failed == {"d": "out of memory"}
    assert again.spent_s == {"s": 6.0}
    assert again.each_s == {("s", "k"): 1.5}
    assert [row["key"] for row in again.rows()] == ["a", "b", "c"]
    assert (again.slices, again.finished) == (1, {"a", "b", "c", "d"})


def test_every_place_to_be_cut_off(tmp_path: Path) -> None:
    own = Journal(tmp_path)
    own.add("slice")
    block(own, "a")
    block(own, "b")
    data = (tmp_path / "journal.jsonl").read_bytes()
    for length in range(0, len(data), 7):
        (tmp_path / "journal.jsonl").write_bytes(data[:length])
        cut = Journal(tmp_path)
        assert cut.done in (set(), {"a"}, {"a", "b"})
        assert {row["key"] for row in cut.rows()} == cut.done
        # The next line does not grow onto the half one.
        cut.add("note", text="x")
        assert Journal(tmp_path).notes == ["x"]


def test_a_case_that_takes_the_campaign_down_twice_is_left_out(tmp_path: Path) -> None:
    for time in range(2):
        own = Journal(tmp_path)
        assert "a" not in own.finished, time
        own.add("slice")
        own.add("begin", keys=["a", "b"])
        block(own, "b", unfinished=[])
    own = Journal(tmp_path)
    assert own.failed == {"a": KILLED}
    # One that the end of the time took, however often, is not.
    for _ in range(3):
        own.add("begin", keys=["c"])
        block(own, unfinished=["c"])
    assert "c" not in Journal(tmp_path).finished


def test_a_case_that_is_interrupted_is_tried_again(tmp_path: Path) -> None:
    for _ in range(3):
        own = Journal(tmp_path)
        own.add("slice")
        own.add("begin", keys=["a"])
        own.add("end")  # of Ctrl-C
    assert Journal(tmp_path).finished == set()


def test_time_is_that_of_all_slices_without_what_lies_between(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    events = [("slice", 100.0), ("note", 107.0), ("slice", 500.0), ("note", 503.0)]
    lines = [json.dumps({"event": e, "time": t, "text": ""}) for e, t in events]
    path.write_text("\n".join(lines) + "\n")
    own = Journal(tmp_path)
    assert (own.elapsed_s, own.slices, own.began) == (10.0, 2, 100.0)
