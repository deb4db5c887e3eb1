"""Notes of tables: equal ones once, figures as ranges, and the rows that each is about."""

from opcast.predict.render.parts import Noted, folded


def test_notes_that_differ_in_figures_are_one_with_their_ranges():
    rows = [
        Noted("h100-sxm", "h100-sxm", ["kernels take 0.74 to 1.28 times (92% of the time)"]),
        Noted("l40s", "l40s", ["kernels take 0.73 to 1,200 times (92% of the time)", "odd"]),
        Noted("t4", "t4", ["kernels take 0.9 to 1.5 times (92% of the time)"]),
    ]
    assert folded(rows) == [
        "kernels take 0.73–0.9 to 1.28–1,200 times (92% of the time)",
        "l40s: odd",
    ]


def test_names_of_devices_are_no_figures():
    rows = [
        Noted("tpu-v5e", "tpu-v5e", ["tpu-v5e is a tpu", "rows exist of a100-sxm-80gb, mi50"]),
        Noted("tpu-v6e", "tpu-v6e", ["tpu-v6e is a tpu", "rows exist of a100-sxm-40gb, mi50"]),
        Noted("h100-sxm", "h100-sxm", ["no rows of h100-sxm"]),
    ]
    assert folded(rows) == [
        "tpu-v5e, tpu-v6e: the device is a tpu",
        "tpu-v5e: rows exist of a100-sxm-80gb, mi50",
        "tpu-v6e: rows exist of a100-sxm-40gb, mi50",
        # It says itself whom it is about.
        "no rows of h100-sxm",
    ]


def test_rows_of_one_name_and_many_rows():
    assert folded([Noted("", "t4", ["as it is"])]) == ["as it is"]
    many = [Noted(f"d{n}", f"d{n}", ["odd"] if n else []) for n in range(9)]
    assert folded(many) == ["d1, d2, d3, d4, d5, d6 and 2 more: odd"]
