"""Fits the parameters of collective curves by group, each regularized towards its parent.

The groups form a tree: all, one fabric, one operation on it, one library, one machine. A child's
parameters are shrunk towards its parent's, so that a group with few rows stays close to it and an
unmeasured machine takes the parameters of its closest ancestor.

On a measured machine, every cell (fabric, operation, library, machine and number of devices) also
gets a table by size. The logarithm of measured over predicted is modelled as an Ornstein–Uhlenbeck
process (Rasmussen and Williams, *Gaussian Processes for Machine Learning*, 2006, appendix B.2) over
the logarithm of the size, observed with noise. It interpolates between measured sizes and decays to
the bare curve beyond them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .curve import PARAMETERS, SPREAD, START, curve_us
from .table import RING_PERMUTE, XLA, XLA_AMD, CollectiveTable

#: Transfers between two devices, which XLA runs by NCCL's send and receive: a quarter of the link
#: rate up to 128 MiB (octave 27), twice as much beyond, on both H100 and B200 (README of the XLA
#: pack).
PERMUTES, LATE_BULK = ("send_recv", RING_PERMUTE), 27.0
#: Stand-ins for libraries without measurements on a fabric: those called and timed the same way.
LIKE = {XLA_AMD: XLA}
#: Residual in log latency that costs as much as one :data:`SPREAD` of a parameter. Engineering
#: estimate; not fitted.
NOISE = 0.1
#: Spread of a child around its parent, as a share of that around the start: groups that share a
#: fabric differ less from each other than fabrics do. Engineering estimate; not fitted.
CHILD_SPREAD = 0.6
#: Most rows of one machine, operation and world size in a fit, evenly over the sizes: densely
#: measured machines must not dominate. Sixty sizes are two or three per octave.
ROWS_PER_CELL = 60
#: Fewest rows for a group above machines to get separate parameters. Machines are exempt:
#: calibration may provide as few as four sizes, and the parent determines the rest.
MIN_ROWS = 6
#: Correlation length of residuals in octaves of size: a protocol spans several octaves. Engineering
#: estimate; not fitted.
LENGTH = 3.0
#: Standard deviations of residuals and of measurement noise, in log units. Only their ratio
#: matters: it sets how strongly the table smooths. Engineering estimates; not fitted.
RESIDUAL_SPREAD, RESIDUAL_NOISE = 0.15, 0.03
#: Standard deviation of normal errors over the median of their absolute second differences, whose
#: variance is six times as large: 1 / (0.6745 √6).
_OF_DIFFERENCES = 0.605
#: Second differences around a measurement for estimating its noise: few enough to lie within one
#: protocol, enough that a step affects one of them. Engineering estimate; not fitted.
_AROUND = 6
#: Most measurements in the fit of a cell, which costs O(n³), and most knots kept in the saved file.
MOST_ROWS, MOST_KNOTS = 240, 64
#: Knots in log2 bytes and the logarithms there, shape ``(n_knots,)`` each.
Table = tuple[np.ndarray, np.ndarray]


@dataclass
class CurveTree:
    """Fitted parameters by group; keys are ``fabric/operation/library/machine`` cut from the right.

    Attributes:
        curves: Parameters of every group, shape ``(17,)`` each; the key ``""`` is the root.
        residuals: Tables of the residuals on machines' rows, by :func:`cell_key`.
    """

    curves: dict[str, np.ndarray] = field(default_factory=lambda: {"": START.copy()})
    residuals: dict[str, Table] = field(default_factory=dict)

    def find(self, path: tuple[str, ...]) -> str:
        """Key of the closest fitted group: the path itself, else its nearest ancestor."""
        # A library without measurements on the fabric takes the curves of its stand-in before those
        # of all libraries.
        like = LIKE.get(path[2]) if len(path) > 2 else None
        other = ("/".join((*path[:2], like)),) if like else ()
        keys = ["/".join(path[:length]) for length in range(len(path), 0, -1)]
        found = (key for key in (*keys[:-2], *other, *keys[-2:]) if key in self.curves)
        return next(found, "")

    def predict_us(self, table: CollectiveTable, known: bool = True) -> np.ndarray:
        """Latency in microseconds, shape ``(n,)``.

        Args:
            table: Collectives.
            known: Whether to use parameters of the machines themselves.
        """
        result = np.zeros(len(table))
        for path, rows in groups(table, depth=4).items():
            # Without the machine's name, it counts as unmeasured.
            key = self.find(path if known else path[:3])
            result[rows] = curve_us(self.curves[key], table.points.take(rows))
            # Residual tables are specific to a machine.
            for world, own in cells(table, rows).items() if known else ():
                residual = self.residuals.get(cell_key(path, world))
                if residual is not None:
                    octaves = np.log2(table.points.size[own])
                    result[own] *= np.exp(read_residual(residual, octaves))
        return result

    def knows(self, table: CollectiveTable, depth: int = 4) -> np.ndarray:
        """Whether each group at ``depth`` (4: machine) has parameters, shape ``(n,)``."""
        result = np.zeros(len(table), dtype=bool)
        for path, rows in groups(table, depth).items():
            result[rows] = "/".join(path) in self.curves
        return result

    def reaches(self, table: CollectiveTable) -> np.ndarray:
        """Whether each row's machine was measured with at least as many devices, shape ``(n,)``."""
        result = np.zeros(len(table), dtype=bool)
        for path, rows in groups(table, depth=4).items():
            start = cell_key(path, 0).removesuffix("0")
            most = max(
                (float(k.removeprefix(start)) for k in self.residuals if k.startswith(start)),
                default=0.0,
            )
            result[rows] = table.points.world[rows] <= most
        return result


def groups(table: CollectiveTable, depth: int) -> dict[tuple[str, ...], np.ndarray]:
    """Positions of the rows of each group at ``depth`` (1 fabric … 4 machine)."""
    columns = (table.fabric, table.op, table.backend, table.machine)[:depth]
    result: dict[tuple[str, ...], list[int]] = {}
    for i, path in enumerate(zip(*columns, strict=True)):
        result.setdefault(tuple(str(p) for p in path), []).append(i)
    return {path: np.array(rows) for path, rows in result.items()}


def fit_tree(table: CollectiveTable, latency_us: np.ndarray) -> CurveTree:
    """Fit every group of ``table``, from the most general to the machines."""
    tree = CurveTree()
    every = thin(table)
    tree.curves[""] = fit_curve(table.take(every), latency_us[every], START, 1.0)
    return refine_tree(tree, table, latency_us, depths=(1, 2, 3, 4))


def refine_tree(
    tree: CurveTree, table: CollectiveTable, latency_us: np.ndarray, depths: tuple[int, ...]
) -> CurveTree:
    """Copy ``tree`` and fit the groups of ``table`` at ``depths`` near their parents.

        A group that already has parameters is fitted near those instead.

    Args:
        tree: Not modified.
        table: Collectives, ``n`` of them.
        latency_us: Measured latencies, shape ``(n,)``.
        depths: Depths of the groups, ascending (1 fabric … 4 machine).
    """
    grown = CurveTree(dict(tree.curves), dict(tree.residuals))
    for depth in depths:
        for path, rows in groups(table, depth).items():
            if len(rows) < MIN_ROWS and depth < 4:
                continue
            part = table.take(rows)
            some = thin(part)
            own = "/".join(path) in grown.curves
            parent = grown.curves[grown.find(path if own else path[:-1])]
            if depth == 3 and path[1] in PERMUTES and path[2] in (XLA, XLA_AMD):
                parent = _with_late_bulk(parent)
            # Fabrics differ as much as the truth from the start; groups below them differ less.
            spread = 1.0 if depth < 2 else CHILD_SPREAD
            fitted = fit_curve(part.take(some), latency_us[rows][some], parent, spread)
            grown.curves["/".join(path)] = fitted
            if depth == 4:
                _keep_residuals(grown, path, table, latency_us, rows)
    return grown


def _with_late_bulk(parameters: np.ndarray) -> np.ndarray:
    """Curve parameters whose bulk part begins at :data:`LATE_BULK` for two devices."""
    late = parameters.copy()
    # The size of a switch is given for four devices, an octave above two.
    slope = late[PARAMETERS.index("switch_bulk_n")]
    late[PARAMETERS.index("switch_bulk")] = LATE_BULK + slope
    return late


def _keep_residuals(
    tree: CurveTree,
    path: tuple[str, ...],
    table: CollectiveTable,
    latency_us: np.ndarray,
    rows: np.ndarray,
) -> None:
    """Store tables of the residuals of the machine's rows, one per number of devices."""
    for world, own in cells(table, rows).items():
        points = table.points.take(own)
        left = np.log(latency_us[own] / curve_us(tree.curves["/".join(path)], points))
        tree.residuals[cell_key(path, world)] = fit_residual(np.log2(points.size), left)


def fit_curve(
    table: CollectiveTable, latency_us: np.ndarray, prior: np.ndarray, spread: float
) -> np.ndarray:
    """Parameters that fit ``latency_us`` in logarithms, robustly, and stay near ``prior``.

    Args:
        table: Collectives, ``n`` of them.
        latency_us: Measured latencies, shape ``(n,)``.
        prior: Parameters to start from and to stay near, shape ``(17,)``.
        spread: Allowed distance from the prior, as a multiple of ``SPREAD``.
    """
    from scipy.optimize import least_squares

    target = np.log(latency_us)
    width = SPREAD * spread

    def robust(parameters: np.ndarray) -> np.ndarray:
        error = (np.log(curve_us(parameters, table.points)) - target) / NOISE
        # Its square is the pseudo-Huber loss 2·(√(1 + e²) - 1). The loss of least_squares would
        # also apply to the prior's residuals, which must stay quadratic.
        return np.asarray(np.sign(error) * np.sqrt(2.0 * (np.sqrt(1.0 + error**2) - 1.0)))

    def residuals(parameters: np.ndarray) -> np.ndarray:
        return np.concatenate([robust(parameters), (parameters - prior) / width])

    def jacobian(parameters: np.ndarray) -> np.ndarray:
        # Finite differences by all parameters at once: for few rows as fast as by one.
        step = 1.5e-8 * np.maximum(np.abs(parameters), 1.0)
        moved = robust((parameters[:, None] + np.diag(step))[:, :, None])
        slope = (moved - robust(parameters)) / step[:, None]
        return np.concatenate([slope.T, np.diag(1.0 / width)])

    # Six spreads exceed any plausible value; the bounds only keep exponentials finite.
    solution = least_squares(
        residuals, prior, jacobian, (prior - 6 * width, prior + 6 * width), max_nfev=60
    )
    return np.asarray(solution.x)


def thin(table: CollectiveTable) -> np.ndarray:
    """Positions of at most :data:`ROWS_PER_CELL` rows of each machine, op, library and world size.

    They are spread evenly over the logarithm of the size.
    """
    keep: list[np.ndarray] = []
    for rows in groups(table, depth=4).values():
        world = table.points.world[rows]
        for n in np.unique(world):
            cell = rows[world == n]
            order = cell[np.argsort(np.log(table.points.size[cell]), kind="stable")]
            keep.append(order[_spread_out(np.log(table.points.size[order]))])
    return np.sort(np.concatenate(keep)) if keep else np.zeros(0, dtype=int)


def _spread_out(log_size: np.ndarray) -> np.ndarray:
    if len(log_size) <= ROWS_PER_CELL:
        return np.arange(len(log_size))
    marks = np.linspace(log_size[0], log_size[-1], ROWS_PER_CELL)
    return np.unique(np.clip(np.searchsorted(log_size, marks), 0, len(log_size) - 1))


def cell_key(path: tuple[str, ...], world: float) -> str:
    """Key of a cell: the machine's path and the number of devices."""
    return "/".join((*path, f"{world:g}"))


def fit_residual(octaves: np.ndarray, logs: np.ndarray) -> Table:
    """Fit the residual table of one cell.

    Args:
        octaves: log2 of the bytes, shape ``(n,)``.
        logs: log of measured over predicted, shape ``(n,)``.
    """
    order = np.argsort(octaves, kind="stable")
    some = order[np.unique(np.linspace(0, len(order) - 1, MOST_ROWS).astype(int))]
    # A residual beyond a factor e is attributed to a faulty measurement.
    x, y = octaves[some], np.clip(logs[some], -1.0, 1.0)
    # Posterior mean in units of SPREAD² (Rasmussen and Williams, equation 2.25).
    noise = np.maximum(RESIDUAL_NOISE, _scatter(y)) / RESIDUAL_SPREAD
    weights = np.linalg.solve(_alike(x, x) + np.diag(noise**2), y)
    seen = np.unique(x)
    # The table is interpolated linearly: 64 knots over some 20 octaves suffice.
    knots = seen[np.unique(np.linspace(0, len(seen) - 1, MOST_KNOTS).astype(int))]
    return knots, _alike(knots, x) @ weights


def read_residual(table: Table, octaves: np.ndarray) -> np.ndarray:
    """Evaluate a table at ``octaves`` of size, shape ``(n,)``: linear, decaying beyond the knots.

    Returns:
        Log-ratios of measured to predicted, shape ``(n,)``.
    """
    knots, values = table
    beyond = np.maximum(knots[0] - octaves, octaves - knots[-1])
    # Decay of the process from its last known value.
    fade = np.exp(-np.maximum(beyond, 0.0) / LENGTH)
    return np.asarray(np.interp(octaves, knots, values) * fade)


def _scatter(logs: np.ndarray) -> np.ndarray:
    """Noise of measurements in order of size, from second differences around each.

    Random differences between neighbours count; slopes and a single protocol step do not.

    Returns:
        Standard deviations, shape ``(n,)``.
    """
    steps = np.abs(np.diff(logs, 2))
    if len(steps) < _AROUND:
        return np.zeros(len(logs))
    first = np.clip(np.arange(len(logs)) - _AROUND // 2, 0, len(steps) - _AROUND)
    windows = steps[first[:, None] + np.arange(_AROUND)]
    seen = _OF_DIFFERENCES * np.median(windows, axis=1)
    # Subtract the variation of the process itself from octave to octave.
    own = 2.0 * RESIDUAL_SPREAD**2 * (1.0 - np.exp(-1.0 / LENGTH)) / 3.0
    return np.asarray(np.sqrt(np.maximum(seen**2 - own, 0.0)))


def _alike(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.asarray(np.exp(-np.abs(a[:, None] - b[None]) / LENGTH))


def cells(table: CollectiveTable, rows: np.ndarray) -> dict[float, np.ndarray]:
    """Split ``rows`` (positions in the table) by number of devices."""
    world = table.points.world[rows]
    return {float(n): rows[world == n] for n in np.unique(world)}
