from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from opcast.models.core.kernel_table import KernelTable, cells
from opcast.models.trust.domain import Domain

Tables = Callable[..., tuple[KernelTable, np.ndarray]]


def plane(points: np.ndarray, kind: str = "gemm") -> KernelTable:
    n = len(points)
    return KernelTable(
        points.astype(np.float32),
        ("log_roofline_floor", "compute_over_memory"),
        np.ones(n),
        np.full(n, "memory", object),
        cells([kind] * n, "cpu"),
        "",
    )


def test_combination_outside_is_found_though_both_ranges_hold() -> None:
    line = np.linspace(0, 1, 400)
    domain = Domain.fit(plane(np.stack([line, line], axis=1)))
    asked = plane(np.array([[0.5, 0.5], [0.0, 1.0], [1.0, 1.0], [1.5, 1.5], [-0.2, 0.0]]))
    assert domain.contains(asked).tolist() == [True, False, True, False, False]


def test_cells_are_apart() -> None:
    line = np.linspace(0, 1, 400)
    points = np.stack([line, line], axis=1)
    domain = Domain.fit(plane(points, "gemm"))
    assert not domain.contains(plane(points, "sort")).any()


def test_most_held_out_rows_are_inside(make_table: Tables) -> None:
    domain = Domain.fit(make_table(3000, 0)[0])
    domain.calibrate(domain.score(make_table(1000, 1)[0]))
    assert domain.contains(make_table(1000, 2)[0]).mean() > 0.9
    far = make_table(100, 3)[0]
    far.X[:, :6] *= 20
    assert domain.contains(far).mean() < 0.1


def test_constant_feature_admits_only_its_value() -> None:
    points = np.stack([np.linspace(0, 1, 50), np.full(50, 3.0)], axis=1)
    domain = Domain.fit(plane(points))
    asked = plane(np.array([[0.5, 3.0], [0.5, 3.5]]))
    assert domain.contains(asked).tolist() == [True, False]


def test_round_trip(make_table: Tables) -> None:
    domain = Domain.fit(make_table(500, 0)[0])
    domain.calibrate(np.array([0.4, 0.8, 1.0]))
    again = Domain.from_arrays(domain.to_arrays())
    asked = make_table(200, 1)[0]
    np.testing.assert_array_equal(again.score(asked), domain.score(asked))
    assert again.threshold == pytest.approx(domain.threshold)
