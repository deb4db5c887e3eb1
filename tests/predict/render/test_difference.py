"""What of two versions is printed."""

from __future__ import annotations

from opcast.common.errors import ProgramError
from opcast.common.interval import Interval
from opcast.predict.difference import Change, Difference, Judged
from opcast.predict.render.difference import markdown_differences


def change(more_us: float, line: str) -> Change:
    return Change((line,), ("+2 B moved",), 10.0, 10.0 + more_us, 1, 1, ("fusion",), "")


def difference(*changes: Change) -> Difference:
    more = sum(own.more_us for own in changes)
    old, new, ratio = (Interval(v, v, v) for v in (1000.0, 1000.0 + more, 1.0 + more / 1000.0))
    return Difference("d", "xla", old, new, ratio, changes, 0.0, 3, (), 0.0, 0.0, 0.0)


def test_changes_that_no_figure_shows_are_counted():
    # Half a thousandth of a millisecond is 0.5 us.
    found = difference(change(40.0, "a.py:1"), change(0.3, "a.py:2"), change(4e-7, "a.py:3"))
    text = markdown_differences([Judged("step", "d", found)], 10)
    assert "a.py:1" in text and "a.py:2" not in text and "a.py:3" not in text
    assert "- 2 more changes of less than 520 ns together" in text
    tiny = markdown_differences([Judged("step", "d", difference(change(4e-7, "a.py:3")))], 10)
    assert "what changed" not in tiny and "- 1 change of less than 500 ns together" in tiny
    # Many small ones add up to what is told.
    many = difference(*(change(0.4, f"a.py:{n}") for n in range(10)))
    assert "- 10 changes +4 µs" in markdown_differences([Judged("step", "d", many)], 10)


def test_errors_stand_in_their_place():
    failed = Judged("a|b", "d", error=ProgramError("no such file", where="x.py"))
    text = markdown_differences([failed, Judged("step", "d", difference(), "above 1 ms")], 10)
    assert text.startswith("### opcast: 1 of 2 over budget, 1 of 2 not predicted\n")
    assert "| a\\|b | d | – | – | – | – | – | **error**: x.py: no such file |" in text
