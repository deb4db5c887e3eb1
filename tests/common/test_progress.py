import io

import pytest

from opcast.common import progress
from opcast.common.progress import Lines, Progress, counting, stages, tracked, waiting


class Clock:
    """Stands for ``time``: seconds go by only as a test says."""

    now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    own = Clock()
    monkeypatch.setattr(progress, "time", own)
    return own


def test_lines_come_every_ten_seconds_where_no_terminal_is(clock, capsys):
    lines = Lines("compiling")
    for second in range(26):
        clock.now = 100.0 + second
        lines.say("1 of 3")
    assert capsys.readouterr().err == "compiling: 1 of 3, 10 s\ncompiling: 1 of 3, 20 s\n"


def test_what_is_short_says_nothing(clock, capsys):
    with counting("predictions") as tell:
        clock.now += 9.0
        tell(1, 2)
    with waiting("compiling", 1) as show:
        clock.now += 9.0
        show(0)
    assert list(tracked(range(3), 3, "reading")) == [0, 1, 2]
    assert capsys.readouterr().err == ""


def test_logs_say_how_far_a_table_and_a_compile_are(clock, capsys):
    with counting("predictions") as tell:
        clock.now += 12.0
        tell(2, 6)
    with waiting("compiling for h100-sxm", 1) as show:
        clock.now += 31.0
        show(0)
    with waiting("compiling", 4) as show:
        clock.now += 10.0
        show(3)
    with waiting("compiling", 4, show=False) as show:
        clock.now += 10.0
        show(3)
    said = "predictions: 2 of 6, 12 s\ncompiling for h100-sxm: 31 s\ncompiling: 3 of 4, 10 s\n"
    assert capsys.readouterr().err == said


def test_a_profile_in_a_log_says_how_far_it_is(clock, capsys):
    with Progress(600.0) as shown:
        for second in (10.0, 31.0, 45.0):
            clock.now = 100.0 + second
            shown.update(second, 7, 3, 0)
    assert capsys.readouterr().err == (
        "profiling: 31 of 600 s, 7 samples, 3 programs, 0 failed, 31 s\n"
    )


def test_stages_are_lines_in_a_log(capsys):
    with stages("reading") as tell:
        tell("kernels for h100-sxm")
        tell("comparing with a30")
    assert capsys.readouterr().err == "kernels for h100-sxm\ncomparing with a30\n"


def test_items_pass_through():
    for show in (False, True):
        assert list(tracked(iter("abc"), 3, "reading", show)) == ["a", "b", "c"]


def test_a_bar_is_shown_to_a_person(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    assert list(tracked(range(3), 3, "reading")) == [0, 1, 2]
    assert "reading" in screen.getvalue()
    quiet = Terminal()
    monkeypatch.setattr("sys.stderr", quiet)
    assert list(tracked(range(3), 3, "reading", show=False)) == [0, 1, 2]
    assert quiet.getvalue() == ""


def test_items_are_taken_one_by_one():
    taken = []

    def source():
        for i in range(3):
            taken.append(i)
            yield i

    items = tracked(source(), 3, "reading")
    assert next(items) == 0 and taken == [0]
