"""Compute the features of operator tables: a physical estimate first, one family at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ...common.errors import DatasetError
from ..devices.device import DeviceSpec, MemoryLevel
from .attention import attention
from .blocks import PHYSICS
from .columns import OpRows, OpTable
from .conv import conv, library_conv
from .gemm import gemm, moe, tuned_gemm
from .hlo import op_texts
from .physics import Physics
from .pointwise import pointwise
from .schema import BLOCKS, FAMILIES, MAY_BE_ZERO, OPTIONAL, parameters_of

if TYPE_CHECKING:
    import pandas as pd

#: Incremented whenever the meaning or the set of a family's features changes.
OPS_VERSION = 1

#: Estimator by group of parameters.
_PHYSICS: dict[str, Callable[[OpTable], Physics]] = {
    "gemm": gemm,
    "conv": conv,
    "conv_nd": library_conv,
    "tuned_gemm": tuned_gemm,
    "pointwise": pointwise,
    "attention": attention,
    "moe": moe,
}


@dataclass(slots=True)
class OpFeatures:
    """Features of ``n`` operators of one family.

    Attributes:
        X: Features, float32, shape ``(n, d)``, finite.
        names: Their ``d`` names.
        base_s: Analytical estimate in seconds, shape ``(n,)``, positive.
        roofline_s: Roofline bound in seconds, shape ``(n,)``.
        floor_s: Fixed cost included in ``base_s``, seconds, shape ``(n,)``.
        flops: Operations, shape ``(n,)``.
        moved: Compulsory bytes, shape ``(n,)``.
        bound: Bottleneck: ``compute``, ``memory`` or ``latency``, shape ``(n,)``.
        kernels: Kernels per call, over which all seconds are averaged, shape ``(n,)``.
        general: Which features do not identify a device, bool, shape ``(d,)``.
        keys: Indices of the features in which distances between operators are measured.
        irs: HLO texts of the kernels, object, shape ``(n,)``, if requested.
    """

    X: np.ndarray
    names: tuple[str, ...]
    base_s: np.ndarray
    roofline_s: np.ndarray
    floor_s: np.ndarray
    flops: np.ndarray
    moved: np.ndarray
    bound: np.ndarray
    kernels: np.ndarray
    general: np.ndarray
    keys: np.ndarray
    irs: np.ndarray | None = None

    def take(self, rows: np.ndarray) -> OpFeatures:
        """Select rows by position or mask."""
        own = {name: getattr(self, name) for name in self.__slots__}
        # The remaining attributes belong to the features, not to the rows.
        of_rows = {n for n in own if n not in ("names", "general", "keys") and own[n] is not None}
        return OpFeatures(**{**own, **{name: own[name][rows] for name in of_rows}})


def op_features(
    rows: pd.DataFrame | OpRows,
    family: str,
    devices: Mapping[str, DeviceSpec],
    texts: bool = False,
) -> OpFeatures:
    """Compute the features of the rows of a published table.

    Args:
        rows: Rows of one family, with the columns of its group of parameters.
        family: One of :data:`~opcast.features.operators.schema.FAMILIES` or ``BLOCKS``.
        devices: Descriptions by the values of column ``device``.
        texts: Whether to also write the kernels as HLO.

    Raises:
        DatasetError: The family is unknown, or a row lacks a parameter or has one out of range.
    """
    if family not in FAMILIES and family not in BLOCKS:
        known = ", ".join((*FAMILIES, *BLOCKS))
        raise DatasetError(f"no operator family {family!r}", hint=f"families are: {known}")
    table = OpTable.of(rows, family, parameters_of(family), devices)
    _check(table)
    # Both branches of each `np.where` are evaluated; the discarded one may divide by zero.
    with np.errstate(divide="ignore", invalid="ignore"):
        physics = (PHYSICS.get(family) or _PHYSICS[FAMILIES[family]])(table)
    names = tuple(physics.features)
    # float32 halves the memory of millions of rows; trees do not need more digits.
    X = np.empty((len(table), len(names)), np.float32)
    for place, values in enumerate(physics.features.values()):
        X[:, place] = values
    general, keys = _positions(names, physics.specific, physics.keys)
    limited = np.where(physics.compute_s > physics.least_s, "compute", "memory")
    return OpFeatures(
        X=X,
        names=names,
        base_s=physics.base_s,
        roofline_s=np.maximum(physics.compute_s, physics.least_s),
        floor_s=physics.fixed_s,
        flops=physics.flops,
        moved=physics.moved,
        # If a fixed cost exceeds half of the time, neither peak matters much.
        bound=np.where(physics.fixed_s > 0.5 * physics.base_s, "latency", limited).astype(object),
        kernels=np.broadcast_to(physics.kernels, len(table)),
        general=general,
        keys=keys,
        irs=np.array(op_texts(table.rows.frame(), family), object) if texts else None,
    )


@lru_cache(maxsize=256)
def _positions(
    names: tuple[str, ...], specific: tuple[str, ...], keys: tuple[str, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Return which features do not identify a device, and the indices of the key features."""
    general = np.array([name not in specific for name in names])
    return general, np.array([names.index(key) for key in keys])


def _check(table: OpTable) -> None:
    for name, values in table.columns.items():
        if name in OPTIONAL:
            continue
        # Written so that NaN (a missing value) fails the check.
        zero = name in MAY_BE_ZERO or table.family in BLOCKS
        bad = ~(values >= (0 if zero else 1))
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise DatasetError(
                f"{table.family} needs a positive whole number in column {name!r}, found "
                f"{values[row]}",
                where=f"row {table.rows.label(row)}",
                hint="correct or drop the row",
            )


@cache
def ops_schema_hash(family: str) -> str:
    """Return a digest of a family's features; models store it and reject any other."""
    text = "\n".join((str(OPS_VERSION), family, *feature_names(family)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def feature_names(family: str) -> tuple[str, ...]:
    """Return the names of a family's features, in order."""
    row = dict.fromkeys(parameters_of(family), 1) | {"device": "any"}
    return op_features(OpRows.of_one(row), family, {"any": _ANY}).names


# A device with all figures 1, since feature names do not depend on them.
_LEVELS = (MemoryLevel(1.0, 1.0), MemoryLevel(1.0, 1.0))
_ANY = DeviceSpec("any", "gpu", {"f32": 1.0}, {"f32": 1.0}, _LEVELS, 1.0, clock_hz=1.0)
