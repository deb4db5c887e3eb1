import io

from opcast.common.progress import tracked


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
