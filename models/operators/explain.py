"""Explains the predicted latency of an operator.

``latency = base × exp(log-ratio)``. The base consists of terms (compute, memory, fixed cost). The
log-ratio is the sum of the device and library effects, the trees, and the calibration. The part of
the trees is split among groups of features by exact Shapley values, relative to the same operator
in other sizes on the same device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd

from ...common.types import JsonMapping
from ...common.units import size
from ...features.devices.device import DeviceSpec
from ...features.operators import FAMILIES, OpFeatures
from ...features.operators.columns import OpRows
from ...features.operators.schema import VARIED
from ..contributions import CALIBRATION, LIMIT, OPERATOR_GROUPS, Contribution, ranked, shapley
from .family import FamilyModel
from .mixture import Member
from .rows import unnamed

#: Contribution of mixing over libraries, relative to the typical one.
MIXTURE = "mixture over libraries"
#: Contributions below this are rounding errors of single-precision trees.
_ROUNDING = 1e-6
#: Remainders below this are rounding errors of the trees' sums.
_RAISED = 1e-3
#: Number of other sizes to compare with, and the largest power of two by which they differ. The
#: draw is fixed, so an explanation does not change from call to call.
VARIANTS, REACH = 48, 4
#: Overlapping terms, by the feature with the binary logarithm of their share of the estimate.
_TERMS = {
    "log_tiles_base": "compute",
    "log_memory_base": "memory",
    "log_vector_base": "vector",
    "log_blocks_base": "blocks",
}
#: Added terms, by the feature with their share of the estimate.
_ADDED = {
    "quant_base": "quantising",
    "extra_base": "beside it",
    "streams_base": "streams",
    "route_base": "routing",
}
#: Feature with the share of an operator's traffic served by the last cache, and the least share to
#: report.
_HELD, _SHOWN = "resident", 0.05
_UNSHOWN = frozenset(("key", "method", "family", "device", "op", "id"))


@dataclass(frozen=True)
class MeasuredOp:
    """A measured operator near another one.

    Attributes:
        label: Its parameters.
        device: Device it was measured on.
        measured_us: Its latency.
        distance: Root mean square difference of the key features, in standard deviations.
    """

    label: str
    device: str
    measured_us: float
    distance: float


@dataclass(frozen=True)
class OpExplanation:
    """Explanation of the prediction of an operator.

    Attributes:
        family: ``method/family``.
        device: Device it runs on.
        latency_us: ``base_us · exp(log_ratio)``.
        lo_us: Lower bound of the 90 % interval.
        hi_us: Upper bound of the 90 % interval.
        scope: ``known``, ``sibling``, ``unseen`` or ``calibrated``.
        in_domain: Whether there are training rows nearby.
        bound: Limiting term of the analytical estimate.
        roofline_us: Lower limit from FLOPs and bytes.
        base_us: The analytical estimate.
        terms: Terms of the estimate in microseconds; compute and memory overlap.
        log_ratio: Learned log-ratio to the analytical estimate.
        baseline: Mean log-ratio by the trees over other sizes of the operator.
        contributions: Largest first; with the baseline they sum to the log-ratio.
        neighbours: Nearest measured operators.
        notes: Limitations of the prediction.
        libraries: Libraries of the mixture, if the operator names none.
    """

    family: str
    device: str
    latency_us: float
    lo_us: float
    hi_us: float
    scope: str
    in_domain: bool
    bound: str
    roofline_us: float
    base_us: float
    terms: Mapping[str, float]
    log_ratio: float
    baseline: float
    contributions: tuple[Contribution, ...]
    neighbours: tuple[MeasuredOp, ...]
    notes: tuple[str, ...]
    libraries: tuple[Member, ...] = ()

    @property
    def factor(self) -> float:
        """Predicted latency over the analytical estimate."""
        return math.exp(self.log_ratio)

    def to_dict(self) -> dict[str, object]:
        """Convert to plain data for JSON."""
        return {**asdict(self), "terms": dict(self.terms), "factor": self.factor}


def explain_op(
    model: FamilyModel,
    row: Mapping[str, object],
    device: DeviceSpec,
    measured: pd.DataFrame | None = None,
    k: int = 3,
) -> OpExplanation:
    """Explain the prediction of one operator.

    Args:
        model: Model of the operator's family.
        row: Its parameters, as of ``features.operators.query.parse_op``.
        device: Device it runs on.
        measured: Measured rows of the family to look for neighbours in.
        k: Neighbours to name.

    Raises:
        DatasetError: A parameter is missing or out of range.
        ModelError: The model was not fitted.
    """
    specs = {device.name: device}
    asked = pd.DataFrame([{**row, "device": device.name}])
    prediction, found = model.with_members(OpRows.of(asked), specs)
    members = tuple(found)
    # A mixture has no features: explain the member nearest to its median.
    typical = typical_member(members, float(prediction.latency[0]))
    row = {**row, **typical}
    frame = asked.assign(**typical)
    features = model.features(frame, specs)
    base = float(features.base_s[0])
    ratio = float(np.log(prediction.latency[0] / base))
    models = model.fitted
    # Learned parts of a design are those of its base.
    asked_row, known = model.designs.bases(OpRows.of(frame), specs)
    learned, name = model.features(asked_row, known), str(asked_row.texts("device")[0])
    like, _ = model.known_devices.proxies(asked_row.texts("device"), known)
    parts = models.linear_parts(asked_row, learned, like)
    regressor, table = models.choose(learned, like)
    others = model.features(other_sizes(row, FAMILIES[model.family], name), known)
    _, background = models.choose(others, np.repeat(like, len(others.X)))
    baseline, groups = shapley(regressor, table, background, OPERATOR_GROUPS)
    # On an unseen device the log-ratio is shrunk as a whole, and with it each part.
    factor = float(models.carried(asked_row, like, known)[0])
    baseline, parts = baseline * factor, {name: value * factor for name, value in parts.items()}
    groups = {name: value * factor for name, value in groups.items()}
    # The calibration contributes the difference between predictions with and without it.
    plain = float(np.log(model.predict(frame, specs, corrected=False).latency[0] / base))
    own = float(np.log(model.predict(frame, specs).latency[0] / base)) if typical else ratio
    parts |= groups | {CALIBRATION: own - plain, MIXTURE: ratio - own}
    # Predictions below the physical limit are raised to it.
    raised = ratio - baseline - sum(parts.values())
    parts |= {LIMIT: raised} if raised > _RAISED else {}
    return OpExplanation(
        family=model.family,
        device=device.name,
        latency_us=float(prediction.latency[0]) * 1e6,
        lo_us=float(prediction.lo[0]) * 1e6,
        hi_us=float(prediction.hi[0]) * 1e6,
        scope=str(prediction.scope[0]),
        in_domain=bool(prediction.in_domain[0]),
        bound=str(prediction.bound[0]),
        roofline_us=float(prediction.roofline[0]) * 1e6,
        base_us=base * 1e6,
        terms=_terms(features),
        log_ratio=ratio,
        baseline=baseline,
        contributions=ranked(parts, _ROUNDING),
        neighbours=() if measured is None else nearest(model, frame, features, measured, device, k),
        notes=(*_notes(model, frame, measured, typical), *_cached(features, device)),
        libraries=members,
    )


def typical_member(members: Sequence[Member], median_s: float) -> dict[str, str]:
    """Names of the mixture member nearest to the median; empty without members."""
    if not members:
        return {}
    nearest = min(members, key=lambda m: abs(math.log(m.latency_us * 1e-6 / median_s)))
    return {"backend": nearest.backend, "kernel": nearest.kernel}


def _terms(features: OpFeatures) -> dict[str, float]:
    """Terms of the analytical estimate in microseconds."""
    base, row = float(features.base_s[0]), features.X[0]
    terms = {
        term: base * float(np.exp2(row[features.names.index(name)])) * 1e6
        for name, term in _TERMS.items()
        if name in features.names
    }
    terms |= {
        term: base * float(row[features.names.index(name)]) * 1e6
        for name, term in _ADDED.items()
        if name in features.names and row[features.names.index(name)] > 0
    }
    return {**terms, "fixed": float(features.floor_s[0]) * 1e6}


def other_sizes(row: JsonMapping, group: str, device: str) -> pd.DataFrame:
    """A fixed set of other sizes of the operator."""
    rng = np.random.default_rng(0)
    variants = []
    for _ in range(VARIANTS):
        own = {**row, "device": device}
        for names in VARIED[group]:
            factor = 2.0 ** int(rng.integers(-REACH, REACH + 1))
            for name in names.split():
                if own[name] > 1:  # one query token stays one
                    own[name] = max(1, round(own[name] * factor))
        variants.append(own)
    return pd.DataFrame(variants)


def nearest(
    model: FamilyModel,
    frame: pd.DataFrame,
    features: OpFeatures,
    measured: pd.DataFrame,
    device: DeviceSpec,
    k: int,
) -> tuple[MeasuredOp, ...]:
    """The nearest measured operators of the same device, preferably of the same library."""
    rows = measured[measured["device"] == device.name].reset_index(drop=True)
    # Another type or library means another kernel: use such rows only if there are no others.
    alike = rows["dtype"].astype(str) == str(frame["dtype"].iloc[0])
    if "backend" in rows and "backend" in frame:
        alike &= rows["backend"].fillna("") == (frame["backend"].fillna("").iloc[0])
    rows = rows[alike.to_numpy()].reset_index(drop=True) if alike.any() else rows
    if not len(rows):
        return ()
    others = model.features(rows, {device.name: device})
    distance = model.fitted.errors.distance(features, others)
    neighbours = []
    for place in np.argsort(distance, kind="stable")[:k].tolist():
        own = rows.iloc[place]
        names = [c for c in frame.columns if c in rows and c not in _UNSHOWN and pd.notna(own[c])]
        label = " ".join(f"{c}={own[c]}" for c in names)
        us = float(own["latency_us"])
        neighbours.append(MeasuredOp(label, str(own["device"]), us, float(distance[place])))
    return tuple(neighbours)


def _cached(features: OpFeatures, device: DeviceSpec) -> tuple[str, ...]:
    """A note on the traffic served by the last cache; none if it is little."""
    held = float(features.X[0, features.names.index(_HELD)]) if _HELD in features.names else 0
    if held < _SHOWN:
        return ()
    return (
        f"the cache of {size(device.cache_bytes)} serves {held:.0%} of what it reads and writes, "
        "since the tables time a call again and again on the same tensors; a program that does not "
        "find them there waits for main memory",
    )


def _notes(
    model: FamilyModel,
    frame: pd.DataFrame,
    measured: pd.DataFrame | None,
    typical: Mapping[str, str],
) -> tuple[str, ...]:
    notes = []
    if typical:
        name = " ".join(f"{column}={value}" for column, value in typical.items() if value)
        notes.append(f"no library is named: a mixture, taken apart as with {name}")
    lacking = [c for c in model.named if unnamed(frame, (c,))[0]]
    if lacking:
        notes.append(
            f"no {' and no '.join(lacking)} given, though every training row names one: the "
            "interval is as wide as an unknown device's"
        )
    if measured is None:
        notes.append("operator models hold no measured rows: give --data to see neighbours")
    return tuple(notes)
