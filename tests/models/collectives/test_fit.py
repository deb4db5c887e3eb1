"""Fits of collective curves: which group answers, what is thinned, what a child may learn."""

import numpy as np
import pandas as pd
import pytest

from opcast.models.collectives.curve import PARAMETERS, START, curve_us
from opcast.models.collectives.fit import (
    MIN_ROWS,
    ROWS_PER_CELL,
    CurveTree,
    fit_curve,
    groups,
    refine_tree,
    thin,
)
from opcast.models.collectives.links import Links
from opcast.models.collectives.table import collective_table

LINKS = Links(link=400e9, host=32e9, inter_node=25e9, memory=2e12, architecture="A")


def table_of(sizes, world=4, op="all_reduce"):
    frame = pd.DataFrame({"op": op, "bytes": sizes, "world_size": world, "device": "fast"})
    return collective_table(frame, lambda name: LINKS)


def test_the_closest_group_answers():
    tree = CurveTree({"": START, "scale_up": START, "scale_up/all_reduce/nccl": START})
    assert tree.find(("scale_up", "all_reduce", "nccl", "mine")) == "scale_up/all_reduce/nccl"
    assert tree.find(("scale_up", "all_gather", "nccl", "mine")) == "scale_up"
    assert tree.find(("pcie", "all_reduce", "nccl", "mine")) == ""


def test_groups_go_from_the_fabric_to_the_machine():
    table = table_of([1024.0, 4096.0])
    assert list(groups(table, 1)) == [("scale_up",)]
    ((path, rows),) = groups(table, 4).items()
    assert path == ("scale_up", "all_reduce", "nccl", "fast")
    assert rows.tolist() == [0, 1]


def test_thinning_keeps_the_ends_and_at_most_so_many():
    sizes = 2.0 ** np.linspace(10, 28, 5 * ROWS_PER_CELL)
    kept = thin(table_of(sizes))
    assert len(kept) <= ROWS_PER_CELL
    assert kept[0] == 0 and kept[-1] == len(sizes) - 1
    few = thin(table_of(sizes[:7]))
    assert few.tolist() == list(range(7))


def test_a_fit_recovers_what_moved_and_stays_near_the_prior_elsewhere():
    table = table_of(2.0 ** np.arange(10, 30))
    truth = START.copy()
    bulk = PARAMETERS.index("log_e_bulk")
    truth[bulk] += 0.3
    fitted = fit_curve(table, curve_us(truth, table.points), START, 1.0)
    assert fitted[bulk] == pytest.approx(truth[bulk], abs=0.05)
    ratio = curve_us(fitted, table.points) / curve_us(truth, table.points)
    assert ratio == pytest.approx(np.ones(len(table)), abs=0.03)
    host = PARAMETERS.index("log_host")  # no row is issued by the host
    assert fitted[host] == pytest.approx(START[host])


def test_few_rows_make_a_machine_but_no_group():
    table = table_of(2.0 ** np.arange(10, 10 + MIN_ROWS - 1))
    measured = 1.2 * curve_us(START, table.points)
    grown = refine_tree(CurveTree(), table, measured, depths=(1, 4))
    assert sorted(grown.curves) == ["", "scale_up/all_reduce/nccl/fast"]
    assert list(grown.residuals) == ["scale_up/all_reduce/nccl/fast/4"]
    assert grown.predict_us(table) == pytest.approx(measured, rel=0.03)
    assert grown.knows(table).all() and not grown.knows(table, depth=1).any()
    # Without the machine's own parameters the start counts.
    assert grown.predict_us(table, known=False) == pytest.approx(curve_us(START, table.points))
