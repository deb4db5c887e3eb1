"""Evaluates collective predictions: held-out sizes, held-out machines, simpler models.

Figures are absolute percentage errors. ``fitted`` is the model fitted to the other rows, ``three``
(parameters) and ``knots`` are simpler models fitted to the same rows, ``ring`` is the plain ring.
``left_out`` was fitted without any machine of the architecture; ``four_sizes`` also to four sizes
of each cell, which are not tested; ``from_a100`` to machines with A100 only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from .fit import CurveTree, cells, fit_tree, groups, refine_tree
from .measurements import size_bins
from .model import FindLinks, measured_table
from .table import CollectiveTable

#: Estimates to compare on held-out rows, and on held-out machines.
KNOWN = ("fitted", "three", "knots", "ring")
UNSEEN = ("left_out", "four_sizes", "from_a100")
#: Knots of the interpolation: about one per two octaves of the usual range of sizes.
KNOTS = 12
#: Start of the fit: launch and step latency in microseconds, fraction of the bandwidth. Plausible
#: for NCCL over NVLink; the bounds of e^-8 to e^4 around it exclude nothing realistic.
START = np.log([8.0, 1.0, 0.6])
#: Start-up time of one step of the plain ring, in microseconds. Engineering estimate, not fitted:
#: the ring is the baseline for the curves.
NAIVE_START_US = 3.0
#: Sizes per cell for ``four_sizes``, in octaves: 4 KiB, 256 KiB, 8 MiB and 256 MiB, so that each
#: part of the curve has one.
FOUR = (12.0, 18.0, 23.0, 28.0)
#: Architecture of the A100 in the published device tables.
A100 = "Ampere GA100"

Tell = Callable[[str], None]


def study(
    rows: pd.DataFrame, find: FindLinks, tell: Tell = lambda _: None, unseen: bool = True
) -> pd.DataFrame:
    """Errors of every row in per cent, NaN where an estimate does not apply.

    Args:
        rows: Measured collectives with ``latency_us``, ``split`` and ``source``.
        find: Links by device string.
        tell: Receives a message before each of the fits, which take a minute each.
        unseen: Whether to hold machines out.

    Returns:
        Columns :data:`KNOWN` and :data:`UNSEEN`, and ``size``, ``op``, ``backend``, ``machine``,
        ``fabric``, ``source``, ``world_size`` and ``architecture``.
    """
    table, latency = measured_table(rows, find)
    held = held_out_rows(rows)
    predictions = {name: np.full(len(table), np.nan) for name in (*KNOWN, *UNSEEN)}
    tell("fitting all machines without the held-out rows")
    _known(table, latency, held, predictions)
    if unseen:
        _unseen(table, latency, predictions, tell)
    frame = pd.DataFrame({n: 100 * np.abs(p / latency - 1) for n, p in predictions.items()})
    for name in ("fabric", "backend", "op", "machine"):
        frame[name] = getattr(table, name)
    frame["architecture"] = table.family
    frame["size"] = size_bins(table.points.size)
    frame["world_size"] = table.points.world.astype(int)
    frame["source"] = rows["source"].to_numpy()
    return frame


def _known(
    table: CollectiveTable,
    latency: np.ndarray,
    held: np.ndarray,
    predictions: dict[str, np.ndarray],
) -> None:
    rest, rest_us, part = table.take(~held), latency[~held], table.take(held)
    predictions["fitted"][held] = fit_tree(rest, rest_us).predict_us(part)
    predictions["three"][held] = predict_three(fit_three(rest, rest_us), part)
    predictions["knots"][held] = knots_us(rest, rest_us, part)
    predictions["ring"][held] = naive_ring_us(part)


def _unseen(
    table: CollectiveTable, latency: np.ndarray, predictions: dict[str, np.ndarray], tell: Tell
) -> None:
    families = sorted(set(table.family.tolist()))
    for family in families if len(families) > 1 else []:
        tell(f"fitting without {family}")
        apart = table.family == family
        tree = fit_tree(table.take(~apart), latency[~apart])
        predictions["left_out"][apart] = tree.predict_us(table.take(apart), known=False)
        _four_sizes(tree, table, latency, apart, predictions["four_sizes"])
    some = table.family == A100
    if some.any() and not some.all():
        tell("fitting A100 alone")
        tree = fit_tree(table.take(some), latency[some])
        predictions["from_a100"][~some] = tree.predict_us(table.take(~some), known=False)


def _four_sizes(
    tree: CurveTree,
    table: CollectiveTable,
    latency: np.ndarray,
    apart: np.ndarray,
    result: np.ndarray,
) -> None:
    part, own_us, places = table.take(apart), latency[apart], np.flatnonzero(apart)
    given = four_of_each_cell(part)
    own = refine_tree(tree, part.take(given), own_us[given], depths=(4,))
    rest = np.setdiff1d(np.arange(len(part)), given)
    result[places[rest]] = own.predict_us(part.take(rest))


def four_of_each_cell(table: CollectiveTable) -> np.ndarray:
    """Positions of the rows of every cell whose sizes are closest to :data:`FOUR`."""
    given: set[int] = set()
    for rows in groups(table, depth=4).values():
        for own in cells(table, rows).values():
            octaves = np.log2(table.points.size[own])
            given |= {int(own[np.argmin(np.abs(octaves - size))]) for size in FOUR}
    return np.array(sorted(given))


def summary(
    errors: pd.DataFrame, by: Sequence[str], columns: Sequence[str] = KNOWN
) -> pd.DataFrame:
    """Number of rows, and mean and median error in per cent, by group; ``all`` without groups."""
    some = errors.dropna(subset=list(columns), how="all")
    grouped = some.groupby(list(by) if by else [lambda _: "all"])
    figures: dict[str, pd.Series] = {"rows": grouped.size()}
    for name in columns:
        figures[f"{name} mean"] = grouped[name].mean()
        figures[f"{name} median"] = grouped[name].median()
    return pd.DataFrame(figures).round(1)


def naive_ring_us(table: CollectiveTable) -> np.ndarray:
    """Time by the alpha–beta ring with nominal bandwidth, in microseconds, shape ``(n,)``."""
    points = table.points
    return np.asarray(NAIVE_START_US * points.steps + points.wire / points.bandwidth)


def held_out_rows(rows: pd.DataFrame) -> np.ndarray:
    """Mask of the validation rows: split ``val…``, or every fifth row of a source without any."""
    named = rows["split"].astype(str).str.startswith("val").to_numpy()
    source = rows["source"].to_numpy()
    fifth = np.arange(len(rows)) % 5 == 4
    without = [s for s in set(source.tolist()) if not named[source == s].any()]
    return np.asarray(named | (fifth & np.isin(source, without)))


def three_parameters(table: CollectiveTable, latency_us: np.ndarray) -> np.ndarray:
    """Fit ``launch + steps · latency + wire bytes / (efficiency · bandwidth)`` in logarithms.

    Returns:
        Launch and latency in microseconds, and efficiency, shape ``(3,)``.
    """
    from scipy.optimize import least_squares

    def residuals(parameters: np.ndarray) -> np.ndarray:
        return np.asarray(np.log(three_parameter_us(np.exp(parameters), table) / latency_us))

    bounds = (START - 8.0, START + 4.0)
    # Linear beyond errors of 10 %, so that protocol changes, which this form cannot represent, do
    # not dominate the fit.
    solution = least_squares(residuals, START, loss="soft_l1", f_scale=0.1, bounds=bounds)
    return np.asarray(np.exp(solution.x))


def three_parameter_us(parameters: np.ndarray, table: CollectiveTable) -> np.ndarray:
    """Time by the three-parameter form in microseconds, shape ``(n,)``."""
    launch, latency, efficiency = parameters
    points = table.points
    moved = points.wire / (efficiency * points.bandwidth)
    return np.asarray(launch + points.steps * latency + moved)


def fit_three(table: CollectiveTable, latency_us: np.ndarray) -> dict[tuple[str, ...], np.ndarray]:
    """Fit three parameters to every machine's fabric, operation and library."""
    return {
        path: three_parameters(table.take(rows), latency_us[rows])
        for path, rows in groups(table, depth=4).items()
    }


def predict_three(fitted: dict[tuple[str, ...], np.ndarray], table: CollectiveTable) -> np.ndarray:
    """Predict by :func:`fit_three`: µs, shape ``(n,)``, NaN where nothing was fitted."""
    result = np.full(len(table), np.nan)
    for path, rows in groups(table, depth=4).items():
        if path in fitted:
            result[rows] = three_parameter_us(fitted[path], table.take(rows))
    return result


def knots_us(table: CollectiveTable, latency_us: np.ndarray, others: CollectiveTable) -> np.ndarray:
    """Log-linear interpolation between :data:`KNOTS` knots fitted to each cell of ``table``.

    Returns:
        Microseconds of ``others``, NaN for unmeasured cells; shape ``(n_others,)``.
    """
    measured = groups(table, depth=4)
    result = np.full(len(others), np.nan)
    for path, rows in groups(others, depth=4).items():
        known = cells(table, measured[path]) if path in measured else {}
        for world, own in cells(others, rows).items():
            if world in known:
                here = known[world]
                x, y = np.log2(table.points.size[here]), np.log(latency_us[here])
                result[own] = np.exp(_hats(x, y, np.log2(others.points.size[own])))
    return result


def _hats(x: np.ndarray, y: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Least squares over hat functions, with a weak penalty on second differences."""
    low, high = min(x.min(), at.min()), max(x.max(), at.max())
    # The knots also cover the requested sizes; the offset keeps the last one inside the last
    # interval.
    knots = np.linspace(low, high + 1e-9, KNOTS)
    basis = np.stack([np.interp(x, knots, row) for row in np.eye(KNOTS)], axis=1)
    # Weak relative to the data; it only determines knots without measurements nearby.
    smooth = 0.03 * np.diff(np.eye(KNOTS), 2, axis=0)
    matrix = np.concatenate([basis, smooth])
    values = np.linalg.lstsq(matrix, np.concatenate([y, np.zeros(KNOTS - 2)]), rcond=None)[0]
    return np.asarray(np.interp(at, knots, values))
