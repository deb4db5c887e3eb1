"""Explains the predicted latency of a kernel.

A prediction is ``(roofline + floor) × exp(log-ratio)``. The log-ratio is split into contributions
of groups of features: exactly, by TreeSHAP, for boosted trees; otherwise by ablation to the
training median of the kernel's kind. Ablations of single groups need not sum to the total; the
remainder is listed as ``interactions``. Either way ``baseline + Σ contributions = log-ratio``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from ..features.devices.device import DeviceSpec
from ..features.kernels.kernel import Kernel
from .contributions import (
    CALIBRATION,
    KERNEL_GROUPS,
    Contribution,
    Split,
    ablation,
    ranked,
    treeshap,
)
from .core.base import KernelPrediction
from .core.kernel_table import CELLS, KernelTable, kernel_table
from .cost_model import CostModel
from .estimators.tabular import TabularEstimator
from .trust.domain import Domain
from .trust.neighbours import Neighbour, NeighbourTable

DEFAULT_NEIGHBOURS = 3
TREESHAP, ABLATION, NONE = "treeshap", "ablation", "none"
#: Contributions below this are rounding errors of the sums.
_ROUNDING = 1e-9
NO_TABLE = (
    "this model holds no neighbour table (it was trained by an earlier version): "
    "train it again to see neighbours"
)
_NO_MEDIANS = "without the neighbour table there are no medians to set feature groups to"
_NO_KIND = "the model was not trained on kernels of this kind on this platform: roofline and floor"
_NO_GROUPS = "this estimator does not learn from the feature table: no contributions by group"
#: Notes that do not apply to an estimator that describes its own routes.
_OF_TABLES = (NO_TABLE, _NO_MEDIANS, _NO_KIND, _NO_GROUPS)


@dataclass(frozen=True)
class Outside:
    """A key feature outside the training range, or in a rare combination with others.

    Attributes:
        feature: Name of the feature.
        value: Value of the kernel.
        low: Lower end of the training range.
        high: Upper end of the training range.
        empty_pairs: Share of the other key features without nearby training kernels for the pair.
    """

    feature: str
    value: float
    low: float
    high: float
    empty_pairs: float

    @property
    def beyond(self) -> bool:
        """Whether the value itself is beyond the training range."""
        return not self.low <= self.value <= self.high


@dataclass(frozen=True)
class KernelExplanation:
    """Explanation of the prediction of one execution of a kernel.

    Attributes:
        kernel_hash: Hash of the kernel.
        kind: Platform and kind, such as ``cpu/gemm``.
        latency_us: Predicted latency: ``(roofline_us + floor_us) · exp(log_ratio)``.
        roofline_us: Roofline; on a TPU the base from its features, without the floor.
        floor_us: Launch floor of the device.
        log_ratio: Learned log-ratio to roofline plus floor.
        bound: Limiting term of the roofline.
        source: ``learned`` or ``roofline``.
        method: Method of the contributions: ``treeshap``, ``ablation`` or ``none``.
        baseline: Log-ratio before any group.
        contributions: Largest first; with the baseline they sum to the log-ratio.
        in_domain: Whether the kernel is in the training domain.
        domain_score: Fraction of pairs of key features near training kernels; ``None`` for an
            estimator without a domain.
        domain_threshold: Least score inside the domain.
        outside: Reasons for being outside, the worst feature first; for a kernel inside, key
            features beyond the training range.
        neighbours: Nearest training kernels.
        notes: Parts that could not be explained, and why.
    """

    kernel_hash: str
    kind: str
    latency_us: float
    roofline_us: float
    floor_us: float
    log_ratio: float
    bound: str
    source: str
    method: str
    baseline: float
    contributions: tuple[Contribution, ...]
    in_domain: bool
    domain_score: float | None
    domain_threshold: float | None
    outside: tuple[Outside, ...]
    neighbours: tuple[Neighbour, ...]
    notes: tuple[str, ...]

    @property
    def factor(self) -> float:
        """Predicted latency over roofline plus floor (on a TPU over the base of its features)."""
        return float(np.exp(self.log_ratio))

    def to_dict(self) -> dict[str, object]:
        """Convert to plain data for JSON."""
        return {**asdict(self), "factor": self.factor}


def explain_kernels(
    model: CostModel, kernels: Sequence[Kernel], device: DeviceSpec, k: int = DEFAULT_NEIGHBOURS
) -> list[KernelExplanation]:
    """Explain the predictions of kernels on a device.

    Args:
        model: A trained model.
        kernels: ``n`` kernels.
        device: Device they run on.
        k: Neighbours to name.
    """
    if not kernels:
        return []
    prediction = model.predict_kernels(kernels, device)
    table = kernel_table(kernels, device)
    if isinstance(model.estimator, TabularEstimator):
        table = table.with_names(model.estimator.feature_names)
    digests = [kernel.hash for kernel in kernels]
    explained = explain_table(model, table, prediction, digests, device, k)
    routes = getattr(model.estimator, "routes", None)
    if routes is None:
        return explained
    return [
        replace(own, notes=(route, *(n for n in own.notes if n not in _OF_TABLES)))
        for own, route in zip(explained, routes(kernels, device), strict=True)
    ]


def explain_table(
    model: CostModel,
    table: KernelTable,
    prediction: KernelPrediction,
    hashes: Sequence[str],
    device: DeviceSpec,
    k: int = DEFAULT_NEIGHBOURS,
) -> list[KernelExplanation]:
    """Explain the predictions of the kernels of a table.

    Args:
        model: A trained model.
        table: Features of ``n`` kernels.
        prediction: Their predictions.
        hashes: Their hashes.
        device: Device they run on.
        k: Neighbours to name.
    """
    nearby = model.neighbours
    ratio = np.log(prediction.latency / table.base_s)
    learned_ratio, correction = ratio, model.corrections.get(device.name)
    if correction is not None:
        # The estimator's contributions sum to its own log-ratio, before the calibration.
        learned_ratio = ratio - correction.mean(table, device)
    method, split = _split(model, table, learned_ratio, nearby)
    parts = dict(split.parts)
    if correction is not None and method != NONE:
        parts[CALIBRATION] = ratio - learned_ratio
    near = nearby.nearest(table, list(hashes), k) if nearby is not None else [[] for _ in hashes]
    domain = getattr(model.estimator, "domain", None)
    # On a TPU the base is not roofline plus floor and may be less than the floor.
    floor = np.minimum(device.floor, table.base_s)
    explained = []
    for i, digest in enumerate(hashes):
        learned = prediction.source[i] != "roofline" or model.name == "roofline"
        own = method if learned else NONE
        score, threshold, outside = _domain(domain, table.take(np.array([i])))
        explained.append(
            KernelExplanation(
                kernel_hash=digest,
                kind=CELLS[table.cell[i]],
                latency_us=float(prediction.latency[i]) * 1e6,
                roofline_us=float(table.base_s[i] - floor[i]) * 1e6,
                floor_us=float(floor[i]) * 1e6,
                log_ratio=float(ratio[i]),
                bound=str(prediction.bound[i]),
                source=str(prediction.source[i]),
                method=own,
                baseline=float(split.baseline[i]) if own != NONE else float(ratio[i]),
                contributions=_contributions(parts, i) if own != NONE else (),
                in_domain=bool(prediction.in_domain[i]),
                domain_score=score,
                domain_threshold=threshold,
                outside=tuple(o for o in outside if o.beyond or not prediction.in_domain[i]),
                neighbours=tuple(near[i]),
                notes=_notes(model, nearby, method, learned),
            )
        )
    return explained


def _split(
    model: CostModel, table: KernelTable, ratio: np.ndarray, nearby: NeighbourTable | None
) -> tuple[str, Split]:
    """Split the log-ratios by the best method that applies; returns its name and the split."""
    estimator = model.estimator
    if isinstance(estimator, TabularEstimator) and estimator.learned:
        exact = treeshap(estimator, table, ratio, KERNEL_GROUPS)
        if exact is not None:
            return TREESHAP, exact
        if nearby is not None:
            medians = nearby.medians[table.cell]
            return ABLATION, ablation(estimator, table, ratio, KERNEL_GROUPS, medians)
    return NONE, Split(ratio, {})


def _contributions(parts: Mapping[str, np.ndarray], row: int) -> tuple[Contribution, ...]:
    return ranked({group: float(values[row]) for group, values in parts.items()}, _ROUNDING)


def _domain(
    domain: Domain | None, row: KernelTable
) -> tuple[float | None, float | None, tuple[Outside, ...]]:
    """Domain score, threshold, and the key features that put a one-row table outside."""
    if domain is None:
        return None, None, ()
    occupied = domain.occupancy(row)[0]
    empty = np.zeros(len(domain.keys))
    for (first, second), full in zip(domain.pairs, occupied.tolist(), strict=True):
        empty[[first, second]] += not full
    values = row.X[0, domain.keys]
    others = max(len(domain.keys) - 1, 1)
    outside = [
        Outside(
            feature=row.names[key],
            value=float(values[i]),
            low=float(domain.low[i]),
            high=float(domain.high[i]),
            empty_pairs=float(empty[i] / others),
        )
        for i, key in enumerate(domain.keys.tolist())
        if empty[i]
    ]
    ordered = sorted(outside, key=lambda o: (not o.beyond, -o.empty_pairs))
    return float(domain.score(row)[0]), float(domain.threshold), tuple(ordered)


def _notes(
    model: CostModel, nearby: NeighbourTable | None, method: str, learned: bool
) -> tuple[str, ...]:
    tabular = isinstance(model.estimator, TabularEstimator)
    notes = []
    if not learned:
        notes.append(_NO_KIND)
    if not tabular:
        notes.append(_NO_GROUPS)
    if nearby is None:
        notes.append(NO_TABLE)
        if tabular and method == NONE and model.name != "roofline":
            notes.append(_NO_MEDIANS)
    return tuple(notes)
