"""From kernel latencies to the wall time of a program.

Two stages, each kept only if it beats the simpler one on held-out families:

1. physics with few coefficients, ``wall = (1 - θ) · total + θ · makespan + c · executions · floor +
   d · dispatch`` with ``0 ≤ θ ≤ 1`` and ``c, d ≥ 0`` (robust least squares of the relative error;
   Lawson & Hanson's NNLS), against the plain sum ``total + gaps + dispatch``. The kernels' times
   have no free factor, so that losses between kernels of small programs are never attributed to the
   kernels of large ones;
2. a small robust ridge regression of ``log(wall / stage 1)`` on the shape of the schedule.

It is fitted to held-out predictions of kernels, as in its use. Coefficients are kept per platform;
platforms without a fit take the plain sum.

Intervals are conformal, from whole programs of held-out families, so no assumption is needed on how
errors of kernels add up. What is measured is how the width should differ between programs: if the
log errors of any two kernels of a program have the correlation ``ρ``, the sum of kernels with
shares ``w`` of the time has an error proportional to ``sqrt(ρ + (1 - ρ) Σ w²)``, 1 for a single
kernel and ``sqrt(ρ)`` for very many. The conformal scores are divided by it, and intervals
multiplied by it (normalized conformal prediction: Papadopoulos et al., ECML 2002).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ...common.types import JsonMapping
from ...features.devices.device import DeviceSpec
from ...features.kernels.kernel import KINDS, LoweredProgram
from ..estimators.linear import huber_ridge
from ..trust.calibrator import UNCALIBRATED, Conformal
from .schedule_cost import SMALLEST, Overhead, ScheduleCost, schedule_cost

#: Features of the second stage, all dimensionless or logarithms.
CORRECTION = (
    "log_makespan_share",
    "log_critical_share",
    "log_mean_kernel",
    "log_baseline",
    "log_executions",
    "dispatch_share",
    "loop_share",
    "log_iterations",
    *(f"share_{kind}" for kind in KINDS),
)
#: Candidate ridge penalties, a decade apart, strongest first: a weaker one must beat it.
ALPHAS = (0.3, 0.03, 0.003)
#: Bend of Huber's loss, in log units: errors above 15 % count as outliers. Engineering estimate;
#: not fitted.
HUBER = 0.15
#: Candidate values of θ, in steps of 5 %.
OVERLAPS = np.linspace(0.0, 1.0, 21)
#: Fewest programs for a fit, of two families or more. Engineering estimate; not fitted.
MIN_PROGRAMS = 12
#: Largest correction (log of a factor): larger ones would be extrapolation.
MAX_CORRECTION = float(np.log(3.0))
#: Least relative reduction of the error for a stage to be kept: smaller ones are within the noise
#: of the folds. Engineering estimate; not fitted.
GAIN = 0.02
#: Programs of similar size per interval bin: enough for 5 % tails that are not the extremes (see
#: ``MIN_SCORES`` in :mod:`opcast.models.trust.calibrator`).
PER_BIN = 50
#: Folds over families; more than elsewhere, since no kernel model is trained for them.
_FOLDS = 10


class ProgramPrediction(NamedTuple):
    """Wall time of one run of a program, in seconds, with its 90 % interval.

    Attributes:
        latency: Expected time.
        lo: Lower bound.
        hi: Upper bound.
        least: Physical lower limit of a run; 0 if it was not computed.
    """

    latency: float
    lo: float
    hi: float
    least: float = 0.0


@dataclass
class WallTimeCorrection:
    """Fitted coefficients of one platform.

    Attributes:
        physics: ``1 - θ, θ, c, d`` of stage 1; ``None`` for the plain sum.
        mean: Means of the stage-2 features.
        scale: Inverse standard deviations of the stage-2 features; 0 for constant ones.
        coef: Coefficients of the standardized features, intercept last; all zero for no correction.
        conformal: Intervals from held-out programs, with scores divided by their spread.
        correlation: Correlation of the log errors of two kernels of a program; with 1, every spread
            is 1.
        error: Mean absolute log error on held-out families, by candidate.
    """

    physics: np.ndarray | None
    mean: np.ndarray
    scale: np.ndarray
    coef: np.ndarray
    conformal: Conformal = field(default_factory=Conformal)
    correlation: float = 1.0
    error: dict[str, float] = field(default_factory=dict)

    def predict(self, costs: Sequence[ScheduleCost]) -> np.ndarray:
        """Wall times in seconds, shape ``(n,)``."""
        base = physics_time(costs, self.physics)
        # Clipped at four standard deviations, so that unusual programs are not extrapolated.
        values = np.clip((features(costs) - self.mean) * self.scale, -4.0, 4.0)
        shift = values @ self.coef[:-1] + self.coef[-1]
        return np.asarray(base * np.exp(np.clip(shift, -MAX_CORRECTION, MAX_CORRECTION)))

    def interval(
        self, wall_s: np.ndarray, costs: Sequence[ScheduleCost]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper bounds in seconds around predicted wall times, shape ``(n,)`` each."""
        # Programs have no cells: all of them are calibrated as cell 0.
        lo, hi = self.conformal.interval(wall_s, np.zeros(len(wall_s), np.int64))
        # The bounds are stored for a spread of 1: a power of the ratio scales them in log space.
        width = np.array([cost.together(self.correlation) for cost in costs])
        return wall_s * (lo / wall_s) ** width, wall_s * (hi / wall_s) ** width


class ProgramModel:
    """Wall time of programs.

    Attributes:
        corrections: Fitted coefficients by platform.
        overheads: Overheads by platform, for platforms without a correction.
    """

    def __init__(self) -> None:
        self.corrections: dict[str, WallTimeCorrection] = {}
        self.overheads: dict[str, Overhead] = {}

    def fit(
        self,
        kernels_latency: Sequence[np.ndarray],
        lowered: Sequence[LoweredProgram],
        devices: Sequence[DeviceSpec],
        wall_s: np.ndarray,
        groups: Sequence[str],
        correlation: float = 1.0,
    ) -> ProgramModel:
        """Fit to measured programs.

        Args:
            kernels_latency: For each program the predicted seconds of its kernels, by a model
                fitted without them.
            lowered: Their schedules.
            devices: Device that each ran on.
            wall_s: Measured wall times in seconds, shape ``(n,)``.
            groups: Family of each program; families are held out whole.
            correlation: Correlation of the log errors of two kernels of a program.
        """
        triples = zip(kernels_latency, lowered, devices, strict=True)
        costs = [schedule_cost(*triple) for triple in triples]
        self.corrections = {}
        for platform in sorted({d.platform for d in devices}):
            own = [i for i, d in enumerate(devices) if d.platform == platform]
            names = [groups[i] for i in own]
            if len(own) >= MIN_PROGRAMS and len(set(names)) > 1:
                part = [costs[i] for i in own]
                self.corrections[platform] = _fit_platform(part, wall_s[own], names, correlation)
        return self

    def predict(
        self,
        kernels_latency: np.ndarray,
        lowered: LoweredProgram,
        device: DeviceSpec,
        kernels_lo: np.ndarray | None = None,
        kernels_hi: np.ndarray | None = None,
    ) -> ProgramPrediction:
        """Predict a program.

        Args:
            kernels_latency: Predicted seconds of each kernel, shape ``(n_kernels,)``.
            lowered: The schedule.
            device: Device it runs on.
            kernels_lo: Lower bounds of the kernels' intervals; used for platforms without a fit.
            kernels_hi: Upper bounds of the kernels' intervals.
        """
        cost = schedule_cost(kernels_latency, lowered, device)
        fitted = self.corrections.get(device.platform)
        if fitted is not None:
            wall = fitted.predict([cost])
            lo, hi = fitted.interval(wall, [cost])
            return ProgramPrediction(float(wall[0]), float(lo[0]), float(hi[0]))
        middle = cost.baseline
        if kernels_lo is None or kernels_hi is None or not cost.executions:
            # Neither a fit nor kernel intervals, or only the host's call: the width of an
            # uncalibrated roofline.
            reach = float(np.exp(UNCALIBRATED))
            return ProgramPrediction(middle, middle / reach, middle * reach)
        low, high = (schedule_cost(k, lowered, device) for k in (kernels_lo, kernels_hi))
        overhead = self.overheads.get(device.platform)
        if overhead is not None:
            return ProgramPrediction(overhead.wall(cost), *overhead.ends(cost, low, high))
        # Fully correlated kernels: the widest interval that the kernels' intervals allow.
        return ProgramPrediction(middle, min(low.baseline, middle), max(high.baseline, middle))

    def to_dict(self) -> dict[str, object]:
        """Convert to plain data for the manifest."""
        overheads = {name: {"overhead": o.to_dict()} for name, o in self.overheads.items()}
        return overheads | {platform: _to_dict(c) for platform, c in self.corrections.items()}

    @classmethod
    def from_dict(cls, data: JsonMapping) -> ProgramModel:
        """Read :meth:`to_dict`'s data.

        Raises:
            ValueError: It has other features than this version.
        """
        model = cls()
        for platform, stored in data.items():
            if "overhead" in stored:
                model.overheads[platform] = Overhead.from_dict(stored["overhead"])
                continue
            if tuple(stored["features"]) != CORRECTION:
                raise ValueError("program model has other features than this version's")
            physics = stored["physics"]
            model.corrections[platform] = WallTimeCorrection(
                physics=None if physics is None else np.array(physics, np.float64),
                mean=np.array(stored["mean"], np.float64),
                scale=np.array(stored["scale"], np.float64),
                coef=np.array(stored["coef"], np.float64),
                conformal=Conformal.from_dict(stored["conformal"]),
                correlation=float(stored.get("correlation", 1.0)),
                error=dict(stored["error"]),
            )
        return model


def physics_terms(costs: Sequence[ScheduleCost]) -> np.ndarray:
    """Terms of stage 1 in seconds, shape ``(n, 4)``."""
    return np.array([[c.total, c.makespan, c.floors, c.dispatch] for c in costs], np.float64)


def physics_time(costs: Sequence[ScheduleCost], coef: np.ndarray | None) -> np.ndarray:
    """Stage 1 in seconds, shape ``(n,)``; the plain sum without coefficients."""
    if coef is None:
        return np.array([c.baseline for c in costs], np.float64)
    return np.asarray(np.maximum(physics_terms(costs) @ coef, SMALLEST))


def features(costs: Sequence[ScheduleCost]) -> np.ndarray:
    """Features of stage 2, shape ``(n, len(CORRECTION))``."""
    rows = [
        (
            np.log(c.makespan / c.total),
            np.log(c.critical / c.total),
            np.log(c.total / max(c.executions, 1.0)),
            np.log(c.baseline),
            np.log(max(c.executions, 1.0)),
            c.dispatch / c.baseline,
            c.loop_share,
            np.log(max(c.iterations, 1.0)),
            *c.shares,
        )
        for c in costs
    ]
    return np.array(rows, np.float64).reshape(len(costs), len(CORRECTION))


def fit_physics(costs: Sequence[ScheduleCost], wall_s: np.ndarray) -> np.ndarray:
    """Coefficients of stage 1, in the order of :func:`physics_terms`, shape ``(4,)``.

    The share of overlap is found by a grid search, the overheads by non-negative least squares.
    """
    terms = physics_terms(costs) / wall_s[:, None]
    fits = (_fit_overheads(terms, overlap) for overlap in OVERLAPS)
    return min(fits, key=lambda fit: fit[0])[1]


def _fit_overheads(terms: np.ndarray, overlap: float) -> tuple[float, np.ndarray]:
    """Huber loss of the relative error, and coefficients, for a given share of overlap."""
    from scipy.optimize import nnls

    # Terms are relative to the measured wall time, so that the target is 1 for programs of any
    # size.
    left = 1.0 - (1.0 - overlap) * terms[:, 0] - overlap * terms[:, 1]
    weight = np.ones(len(terms))
    # Iteratively reweighted least squares; eight rounds suffice for two coefficients. The weight is
    # a square root because it multiplies rows whose squares are summed.
    for _ in range(8):
        coef = nnls(terms[:, 2:] * weight[:, None], left * weight)[0]
        residual = np.abs(terms[:, 2:] @ coef - left)
        weight = np.sqrt(HUBER / np.maximum(residual, HUBER))
    loss = np.where(residual <= HUBER, residual**2, HUBER * (2 * residual - HUBER))
    return float(loss.mean()), np.array([1.0 - overlap, overlap, *coef])


def _fit_platform(
    costs: Sequence[ScheduleCost], wall_s: np.ndarray, groups: Sequence[str], correlation: float
) -> WallTimeCorrection:
    """Choose the stages on held-out families, then fit the choice to all programs."""
    # In the order of their complexity: each must beat the best so far by GAIN.
    candidates: list[tuple[str, bool, float | None]] = [("sum", False, None)]
    candidates.append(("physics", True, None))
    candidates += [(f"ridge {a:g}", True, a) for a in ALPHAS]
    folds = _fold_of(groups)
    held = {name: np.zeros(len(costs)) for name, _, _ in candidates}
    for fold in sorted(set(folds)):
        train = [i for i, f in enumerate(folds) if f != fold]
        test = [i for i, f in enumerate(folds) if f == fold]
        part = [costs[i] for i in train]
        for name, physics, alpha in candidates:
            fitted = _fit_candidate(part, wall_s[train], physics, alpha)
            held[name][test] = fitted.predict([costs[i] for i in test])
    errors = {name: family_error(wall_s, p, groups) for name, p in held.items()}
    best = candidates[0]
    for candidate in candidates[1:]:
        if errors[candidate[0]] < errors[best[0]] * (1 - GAIN):
            best = candidate
    chosen = _fit_candidate(costs, wall_s, best[1], best[2])
    chosen.error = {**errors, "chosen": errors[best[0]]}
    cells = np.zeros(len(costs), np.int64)
    # Small generated programs have far larger errors than large models: bins by size.
    bins = max(1, len(costs) // PER_BIN)
    middle = held[best[0]]  # held-out predictions: fitted ones would make intervals too narrow
    width = np.array([cost.together(correlation) for cost in costs])
    scores = np.log(wall_s / middle) / width
    # Scores over the program's spread are passed like measurements.
    chosen.conformal = Conformal.fit(middle * np.exp(scores), middle, cells, bins=bins)
    chosen.correlation = correlation
    return chosen


def family_error(
    wall_s: np.ndarray, predicted_s: np.ndarray, groups: np.ndarray | Sequence[str]
) -> float:
    """Mean absolute log error with equal weight per family.

    Programs that are alone in their group, such as generated ones, form one family together.
    """
    errors = np.abs(np.log(predicted_s / wall_s))
    names, where, counts = np.unique(
        np.asarray(groups, dtype=str), return_inverse=True, return_counts=True
    )
    family = np.where(counts[where] > 1, where, len(names))
    return float(np.mean([errors[family == f].mean() for f in np.unique(family)]))


def _fit_candidate(
    costs: Sequence[ScheduleCost], wall_s: np.ndarray, physics: bool, alpha: float | None
) -> WallTimeCorrection:
    coef = fit_physics(costs, wall_s) if physics else None
    values = features(costs)
    mean, spread = values.mean(axis=0), values.std(axis=0)
    # A constant feature gets scale 0 rather than a division by zero.
    scale = np.where(spread > 1e-9, 1.0 / np.maximum(spread, 1e-9), 0.0)
    ridge = np.zeros(len(CORRECTION) + 1)
    if alpha is not None:
        target = np.log(wall_s / physics_time(costs, coef))
        design = np.clip((values - mean) * scale, -4.0, 4.0)
        design = np.concatenate([design, np.ones((len(costs), 1))], axis=1)
        ridge = huber_ridge(design, target, alpha, HUBER)
    return WallTimeCorrection(coef, mean, scale, ridge)


def _fold_of(groups: Sequence[str]) -> list[int]:
    """Fold of each program; a family is in one fold, generated programs are spread over folds."""
    number = {name: index % _FOLDS for index, name in enumerate(sorted(set(groups)))}
    return [number[group] for group in groups]


def _to_dict(correction: WallTimeCorrection) -> dict[str, object]:
    physics = correction.physics
    return {
        "physics_terms": ["total", "makespan", "executions*floor", "dispatch"],
        "physics": None if physics is None else physics.tolist(),
        "features": list(CORRECTION),
        "mean": correction.mean.tolist(),
        "scale": correction.scale.tolist(),
        "coef": correction.coef.tolist(),
        "conformal": correction.conformal.to_dict(),
        "correlation": correction.correlation,
        "error": correction.error,
    }
