"""Kernels of two versions: which are the same, where lines moved to, which belong together."""

from __future__ import annotations

from opcast.predict.matched_kernels import MovedLines, Piece, Place, linked, match


def piece(
    text: str,
    us: float = 10.0,
    line: int = 1,
    *more: int,
    kind: str = "fusion",
    opcode: str = "fusion",
    dtype: str = "bf16",
    flops: float = 100.0,
    moved: float = 50.0,
    times: float = 1.0,
    file: str = "model.py",
    path: str = "",
    op: str = "add",
    rate: str = "bf16",
) -> Piece:
    """A kernel whose interval is 10 % down and 20 % up in logarithms."""
    places = tuple(Place(op, file, number) for number in (line, *more))
    work = (kind, opcode, dtype, flops, moved, moved, rate)
    files = ((file, path),) if path else ()
    return Piece(text, text, work, us, 0.1, 0.2, times, places, "", files)


def test_kernels_of_the_same_text_match_once_each():
    old = [piece("a"), piece("b"), piece("b")]
    new = [piece("b"), piece("c", flops=7.0)]
    found = match(old, new)
    assert [(one.text, other.text) for one, other in found.both] == [("b", "b")]
    assert [p.text for p in found.old] == ["a", "b"] and [p.text for p in found.new] == ["c"]


def test_kernels_of_the_same_work_match_if_they_take_as_long():
    assert len(match([piece("a", 10.0)], [piece("b", 10.1)]).both) == 1
    assert not match([piece("a", 10.0)], [piece("b", 10.5)]).both
    # Products at another rate err otherwise, whatever they take.
    assert not match([piece("a", rate="tf32")], [piece("b", rate="f32")]).both
    # More executions of the same kernel are a change.
    assert not match([piece("a")], [piece("a", times=2.0)]).both


def test_kernels_in_both_tell_by_how_much_lines_moved():
    both = [(piece("a", line=3), piece("a", line=3)), (piece("b", line=9), piece("b", line=14))]
    moved = MovedLines((), (), both)
    lines = [moved(Place("add", "model.py", line)).line for line in (1, 3, 4, 9, 11)]
    assert lines == [1, 3, 4, 14, 16]
    # Nothing is known of another file, nor of kernels without a line.
    assert moved(Place("add", "other.py", 4)).line == 4
    assert moved(Place("add", "model.py", 0)).line == 0


def test_files_that_can_be_read_tell_it_better(tmp_path):
    old, new = tmp_path / "old.py", tmp_path / "new.py"
    old.write_text("a\nb\nc\nd\n")
    new.write_text("a\nnew\nb\nchanged\nd\n")
    moved = MovedLines([piece("x", path=str(old))], [piece("y", path=str(new))], [])
    lines = [moved(Place("add", "model.py", line)).line for line in (1, 2, 3, 4)]
    assert lines == [1, 3, 4, 5]


def test_a_kernel_that_a_fusion_held_belongs_to_it():
    moved = MovedLines((), (), ())
    old = [piece("whole", 10.0, 1, 2), piece("other", line=8)]
    new = [piece("first", line=1), piece("second", line=2), piece("changed", line=8)]
    groups = [[[p.text for p in side] for side in group] for group in linked(old, new, moved)]
    assert groups == [[["whole"], ["first", "second"]], [["other"], ["changed"]]]


def test_kernels_that_only_hold_each_other_stay_in_one_group():
    """Main ops of the one version are inside the kernels of the other one, both ways."""
    moved = MovedLines((), (), ())
    groups = linked([piece("a", 1.0, 1, 2)], [piece("b", 1.0, 2, 1)], moved)
    assert [[len(side) for side in group] for group in groups] == [[1, 1]]


def test_without_lines_kernels_of_an_op_belong_together():
    moved = MovedLines((), (), ())
    old = [piece("a", line=0, opcode="dot"), piece("b", line=0, opcode="reduce")]
    new = [piece("c", line=0, opcode="dot")]
    assert [[len(side) for side in group] for group in linked(old, new, moved)] == [[1, 1], [1, 0]]
