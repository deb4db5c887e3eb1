"""A campaign's workers: what kills, hangs or breaks one costs its case and nothing else."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from opcast.common.errors import ProfileError
from opcast.datagen.campaign.client import Workers
from opcast.datagen.campaign.plan import Case

MODULE = "opcast.tests.support.campaign_worker"


def cases(*how: str, timeout_s: float = 20.0) -> list[Case]:
    return [
        Case(f"s/k/{i}-{word}", "s", "k", "xla", {"how": word}, timeout_s)
        for i, word in enumerate(how)
    ]


def workers(seconds: float = 60.0) -> Workers:
    return Workers("cpu", time.monotonic() + seconds, MODULE)


def test_one_that_dies_takes_only_its_own_case_with_it() -> None:
    own = workers()
    own.ready("xla", ())
    found = own.measure(cases("fine", "die", "fine"))
    own.stop()
    # The first was told before the death and is not measured again.
    assert found.done == ["s/k/0-fine", "s/k/2-fine"]
    assert [*found.failed] == ["s/k/1-die"]
    assert "SIGKILL" in found.failed["s/k/1-die"]
    assert found.unfinished == []
    rows = [row for row in found.rows if row["table"] == "t"]
    assert len({row["process"] for row in rows}) == 2


def test_a_hung_kernel_is_told_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    own = workers()
    own.ready("xla", ())
    found = own.measure(cases("hang", "fine", timeout_s=1.0))
    own.stop()
    assert found.done == ["s/k/1-fine"]
    assert found.failed == {"s/k/0-hang": "no reply for 1 s"}


def test_the_end_of_the_time_is_no_fault_of_a_case() -> None:
    own = workers(1.5)
    own.ready("xla", ())
    begin = time.monotonic()
    found = own.measure(cases("hang", timeout_s=60.0))
    own.stop()
    assert time.monotonic() - begin < 5.0
    assert (found.done, found.failed, found.unfinished) == ([], {}, ["s/k/0-hang"])


def test_a_broken_context_gets_a_new_process_and_a_lack_of_memory_does_not() -> None:
    own = workers()
    own.ready("xla", ())
    assert [*own.measure(cases("memory")).failed] == ["s/k/0-memory"]
    assert own.ready("xla", ()) == []  # the same process goes on
    assert [*own.measure(cases("fault")).failed] == ["s/k/0-fault"]
    (row,) = own.ready("xla", ())
    assert (row["table"], row["worker"]) == ("anchors", "xla")
    own.stop()
    assert own.starts == 2


def test_what_follows_a_broken_context_is_measured_by_another_process() -> None:
    own = workers()
    own.ready("xla", ())
    found = own.measure(cases("fine", "fault", "broken", "broken"))
    own.stop()
    # In the process of the fault both would have failed with it.
    assert found.done == ["s/k/0-fine", "s/k/2-broken", "s/k/3-broken"]
    assert [*found.failed] == ["s/k/1-fault"]
    assert own.starts == 2


def test_a_case_that_says_that_it_goes_on_is_waited_for() -> None:
    own = workers()
    own.ready("xla", ())
    found = own.measure(cases("alive", timeout_s=0.6))  # a second, with a word every 0.3 s
    own.stop()
    assert found.done == ["s/k/0-alive"]
    assert own.starts == 1


def test_a_case_without_an_answer_has_failed() -> None:
    own = workers()
    own.ready("xla", ())
    found = own.measure(cases("silent"))
    own.stop()
    assert found.failed == {"s/k/0-silent": "the measuring process gave no result"}


def test_replicates_run_in_another_process() -> None:
    own = workers()
    own.ready("xla", ())
    (first,) = own.measure(cases("fine")).rows
    own.ready("xla", ["s/k/0-fine"])
    (second,) = own.measure(cases("fine")).rows
    own.stop()
    assert first["process"] != second["process"]


def test_a_lost_driver_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = tmp_path / "lost"
    lost.touch()
    monkeypatch.setenv("TEST_CAMPAIGN_LOST", str(lost))
    own = workers()
    with pytest.raises(ProfileError, match="no CUDA-capable device"):
        own.ready("xla", ())
    lost.unlink()
    own.stop()
    assert len(own.ready("xla", ())) == 1
    own.stop()
