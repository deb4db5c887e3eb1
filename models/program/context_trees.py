"""Boosted trees that correct kernel latencies for a kernel's context in its program.

They learn the log-ratio of a kernel's label *in a program* to the prediction of a model fitted
without it, from the features of :mod:`.context`. A program's time is a sum, so the error of the sum
matters as well as the errors of its terms; the objective has both,
    Σ_kernels |c_i - r_i|_δ  +  λ n/m Σ_programs |log Σ t_i exp(c_i) - log Σ t_i exp(r_i)|_δ'

with the correction ``c``, the label's log-ratio ``r``, the predicted time of all executions ``t``,
``n`` kernels, ``m`` programs and ``|·|_δ`` Huber's loss divided by its bend (linear beyond ``δ``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...common.types import JsonMapping
from ...features.devices.device import DeviceSpec
from ...features.kernels.kernel import Kernel, LoweredProgram
from ...features.table.roofline import roofline
from ..core.base import KernelPrediction
from ..estimators.xgboost_trees import saved_trees
from .context import CONTEXT, context_features, loop_factors
from .schedule_cost import INLINE_S, inline

if TYPE_CHECKING:
    from xgboost import Booster

#: Boosting rounds. Like all settings here, chosen on the training part of ``unseen_family``, before
#: any test family was examined (docs/models.md).
ROUNDS = 150
#: Weight λ of the error of a program's sum relative to its kernels' errors.
SUM_WEIGHT = 0.5
#: Bends δ and δ' of Huber's loss, in log units: single kernels scatter more than sums.
BEND_KERNEL = 0.3
BEND_SUM = 0.1
#: Parameters of XGBoost: shallow, strongly regularized trees, since there are few families to
#: generalize from.
SETTINGS = {
    "max_depth": 5,
    "eta": 0.05,
    "min_child_weight": 5.0,
    "subsample": 0.8,
    "colsample_bytree": 0.5,
    "max_bin": 64,
    "reg_lambda": 5.0,
    "tree_method": "hist",
    # No correction is the prior, not the mean of the labels' ratios.
    "base_score": 0.0,
}
#: Largest correction of a kernel (log of a factor): larger ones would be extrapolation.
MAX_SHIFT = float(np.log(4.0))
#: Largest share of unlabelled kernels' time for a program's sum to count: their times are
#: predictions.
MAX_UNLABELLED = 0.02

Objective = Callable[[np.ndarray, object], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class ContextProgram:
    """The kernels of one measured program.

    Attributes:
        features: Result of :func:`.context.context_features`, shape ``(n, f)``.
        predicted_s: Seconds of one execution by a model fitted without them, shape ``(n,)``.
        label_s: Measured seconds in this program, shape ``(n,)``; NaN without a label.
        executions: Executions per run, 0 for kernels that take no time, shape ``(n,)``.
        hashes: Hashes of the kernels, shape ``(n,)``.
        group: Group that is held out as a whole.
    """

    features: np.ndarray
    predicted_s: np.ndarray
    label_s: np.ndarray
    executions: np.ndarray
    hashes: np.ndarray
    group: str

    @property
    def labelled(self) -> np.ndarray:
        """Mask of kernels that can be learned from, shape ``(n,)``."""
        return np.asarray(np.isfinite(self.label_s) & (self.executions > 0))

    @property
    def sum_is_known(self) -> bool:
        """Whether the labels cover (nearly) all of its time."""
        times = self.predicted_s * self.executions
        return float(times[~self.labelled].sum()) <= MAX_UNLABELLED * float(times.sum())


@dataclass
class ContextTrees:
    """Boosted trees of the correction.

    Attributes:
        raw: The booster in XGBoost's universal binary JSON (UBJ).
    """

    raw: bytes

    @classmethod
    def fit(
        cls,
        programs: Sequence[ContextProgram],
        *,
        without: frozenset[str] = frozenset(),
        seed: int = 0,
        n_jobs: int = 1,
    ) -> ContextTrees:
        """Learn from kernels with labels.

        Args:
            programs: Measured programs.
            without: Hashes of kernels to leave out, because they are held out.
            seed: Random state.
            n_jobs: Threads.
        """
        import xgboost as xgb

        kept = [p.labelled & ~np.isin(p.hashes, list(without)) for p in programs]
        known = np.array([p.sum_is_known for p in programs])
        where = np.repeat(np.arange(len(programs)), [int(own.sum()) for own in kept])
        pairs = list(zip(programs, kept, strict=True))
        values = np.concatenate([p.features[own] for p, own in pairs])
        ratio = np.concatenate([np.log(p.label_s[own] / p.predicted_s[own]) for p, own in pairs])
        times = np.concatenate([(p.predicted_s * p.executions)[own] for p, own in pairs])
        rows = xgb.QuantileDMatrix(values, ratio, max_bin=SETTINGS["max_bin"], nthread=n_jobs)
        settings = {**SETTINGS, "seed": seed, "nthread": n_jobs}
        loss = objective(ratio, times, where, known)
        booster = xgb.train(settings, rows, ROUNDS, obj=loss)
        return cls(bytes(booster.save_raw("ubj")))

    def shift(self, features: np.ndarray) -> np.ndarray:
        """Log of the factor for every kernel, shape ``(n,)``."""
        if not len(features):
            return np.zeros(0)
        shift = self.booster.inplace_predict(features, validate_features=False)
        return np.asarray(np.clip(shift, -MAX_SHIFT, MAX_SHIFT), np.float64)

    @property
    def booster(self) -> Booster:
        """The trees, read on first use."""
        return saved_trees(self.raw, small=False).booster


def objective(
    ratio: np.ndarray, times: np.ndarray, where: np.ndarray, known: np.ndarray
) -> Objective:
    """Gradient and curvature of the loss in the module's docstring, for XGBoost.

    Args:
        ratio: Log-ratio of label to prediction, shape ``(n,)``.
        times: Predicted seconds of all executions, shape ``(n,)``.
        where: Program of each kernel, shape ``(n,)``.
        known: Mask of the programs whose sum counts, shape ``(m,)``.
    """
    size = len(known)
    # t · exp(r) is the measured time of a kernel's executions.
    measured = np.bincount(where, times * np.exp(ratio), size)
    # λ n/m of the loss; programs without any remaining kernels do not count.
    weight = SUM_WEIGHT * len(ratio) / max(int((np.bincount(where, minlength=size) > 0).sum()), 1)

    def loss(shift: np.ndarray, _: object) -> tuple[np.ndarray, np.ndarray]:
        kernel = np.clip(shift - ratio, -BEND_KERNEL, BEND_KERNEL) / BEND_KERNEL
        corrected = times * np.exp(np.clip(shift, -MAX_SHIFT, MAX_SHIFT))
        total = np.bincount(where, corrected, size)
        off = np.log(np.maximum(total, 1e-15) / np.maximum(measured, 1e-15))
        program = np.clip(off, -BEND_SUM, BEND_SUM) / BEND_SUM * known
        # Derivative of log Σ t exp(c) by one kernel's correction: its share of the sum.
        share = corrected / total[where]
        gradient = kernel + weight * program[where] * share
        # Upper bounds of the curvature, halved: nearly all errors are beyond the bends.
        curvature = 0.5 * (1.0 / BEND_KERNEL + weight * share / BEND_SUM)
        return gradient, curvature

    return loss


@dataclass
class ContextCorrection:
    """Corrects kernel latencies for their place in a program.

    Attributes:
        trees: Fitted trees, one set per seed, whose corrections are averaged.
        platforms: Platforms they were trained on; no correction elsewhere.
    """

    trees: tuple[ContextTrees, ...]
    platforms: tuple[str, ...]

    def apply(
        self,
        kernels: KernelPrediction,
        lowered: LoweredProgram,
        device: DeviceSpec,
        base_s: np.ndarray | None = None,
    ) -> KernelPrediction:
        """Correct the predictions of a program's kernels, except those by the roofline.

        Args:
            kernels: Predictions of the kernels in isolation.
            lowered: The program.
            device: Device it runs on; no correction on platforms outside the training data.
            base_s: Roofline plus floor of each kernel, if already computed.
        """
        if device.platform not in self.platforms or not lowered.kernels:
            return kernels
        if base_s is None:
            base_s = roofline(lowered.kernels, device).latency_s + device.floor
        features = context_features(kernels.latency, base_s, lowered, device)
        shift = np.mean([trees.shift(features) for trees in self.trees], axis=0)
        # The trees learned the errors of the learned model; a bare roofline has different ones.
        factor = np.where(kernels.source != "roofline", np.exp(shift), 1.0)
        return kernels.scaled(factor)

    def to_dict(self) -> dict[str, object]:
        """Convert to plain data for the manifest; the trees are separate files."""
        return {
            "trees": len(self.trees),
            "platforms": list(self.platforms),
            "features": list(CONTEXT),
        }

    @classmethod
    def from_dict(cls, data: JsonMapping, raw: Sequence[bytes]) -> ContextCorrection:
        """Read :meth:`to_dict`'s data, and the trees' files.

        Raises:
            ValueError: It has other features than this version.
        """
        if tuple(data["features"]) != CONTEXT:
            raise ValueError("context correction has other features than this version's")
        return cls(tuple(ContextTrees(own) for own in raw), tuple(data["platforms"]))


def in_loops(
    prediction: KernelPrediction, kernels: Sequence[Kernel], device: DeviceSpec
) -> KernelPrediction:
    """Scale the latencies of products in loops, except those by the roofline, and of small kernels.

    Products read their operands from the cache, and small kernels start only once.

    Args:
        prediction: Predictions of a program's kernels in isolation.
        kernels: The kernels.
        device: Device it runs on.
    """
    small = inline(kernels, device) & (prediction.latency > 0.0)
    # The roofline already reads operands from the cache that they fit into.
    factors = np.where(prediction.source != "roofline", loop_factors(kernels, device), 1.0)
    latency = factors * prediction.latency
    runs = np.array([k.multiplicity for k in kernels], np.float64)
    later = np.maximum(
        1.0 - device.floor / latency[small], np.minimum(1.0, INLINE_S / latency[small])
    )
    factors[small] *= 1.0 / runs[small] + (1.0 - 1.0 / runs[small]) * later
    return prediction.scaled(factors)
