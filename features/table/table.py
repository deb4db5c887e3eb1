"""Convert kernels to a table of dimensionless features for the tabular models.

Every feature is a flag, a fraction, a count or the logarithm of a ratio; none carries a unit. So a
model can be used for shapes and devices that it was not trained on (see docs/features.md).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from ..devices.device import DeviceSpec, MemoryLevel
from ..kernels.kernel import Kernel
from .columns import (
    CODE_FLAGS,
    COLUMNS,
    COMMON_COUNTS,
    COMMON_FLAGS,
    INDEX,
    RARE_COUNTS,
    RARE_FLAGS,
)
from .ratios import DeviceFacts, derived_features
from .roofline import roofline_of_rows
from .row import code_flags, rows

#: Incremented whenever the meaning or the set of features changes.
SCHEMA_VERSION = 2

# Rows per chunk: an intermediate float64 column takes 8 kB, so about a hundred of them fit into L2.
_CHUNK = 1024
_COUNTS, _FLAGS = (COMMON_COUNTS, RARE_COUNTS), (COMMON_FLAGS, RARE_FLAGS)


@dataclass(slots=True)
class FeatureTable:
    """Features of ``n`` kernels on one device.

    Attributes:
        X: Features, float32, shape ``(n, d)``, finite.
        names: Their ``d`` names.
        roofline_s: Roofline latency of one execution in seconds, shape ``(n,)``.
        bound: Bottleneck at the roofline, shape ``(n,)`` (see :class:`Roofline`).
        base_s: Time that learned ratios refer to, in seconds, shape ``(n,)``: roofline plus floor.
    """

    X: np.ndarray
    names: tuple[str, ...]
    roofline_s: np.ndarray
    bound: np.ndarray
    base_s: np.ndarray


def feature_table(kernels: Sequence[Kernel], device: DeviceSpec) -> FeatureTable:
    """Compute the features of all kernels on one device.

    The device-independent part of each kernel is computed once and cached in ``kernel.row``.

    Args:
        kernels: ``n`` kernels.
        device: Device that they run on.

    Raises:
        DeviceError: The device lists no peaks.
    """
    names = feature_names()
    n = len(kernels)
    X = np.empty((n, len(names)), np.float32)
    latency, bound = np.empty(n), np.empty(n, "<U13")
    facts = DeviceFacts.of(device)
    # Chunk by chunk, so that intermediate columns stay in the processor's cache.
    for start in range(0, n, _CHUNK):
        part = slice(start, min(start + _CHUNK, n))
        row = rows(kernels[part])
        line = roofline_of_rows(row, device)
        latency[part], bound[part] = line.latency_s, line.bound
        _fill(X[part], row, facts, device)
    return FeatureTable(X, names, latency, bound, latency + device.floor)


def _fill(X: np.ndarray, row: np.ndarray, facts: DeviceFacts, device: DeviceSpec) -> None:
    derived = derived_features(row, facts, device)
    # Column by column into contiguous memory, then transposed once: writing columns of a row-major
    # table directly would stride through all of it for each feature.
    block = np.empty((len(derived), len(row)), np.float32)
    for values, target in zip(derived.values(), block, strict=True):
        target[:] = values
    # Logarithms compress counts over many orders of magnitude; adding one keeps zero at zero.
    counts = [np.log2(1 + _columns(row, names).astype(np.float32)) for names in _COUNTS]
    flags = [_columns(row, names) for names in _FLAGS]
    device_part = np.broadcast_to(list(facts.features.values()), (len(row), len(facts.features)))
    parts = [*counts, *flags, *code_flags(row), block.T, device_part]
    np.concatenate(parts, axis=1, out=X, casting="unsafe")


def _columns(row: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
    first = INDEX[names[0]]
    return row[:, first : first + len(names)]


@cache
def feature_names() -> tuple[str, ...]:
    """Return the names of the features, in order."""
    empty = np.zeros((0, len(COLUMNS)))
    facts = DeviceFacts.of(_ANY)
    derived = derived_features(empty, facts, _ANY)
    counts = tuple(f"log_{name}" for group in _COUNTS for name in group)
    flags = tuple(name for group in _FLAGS for name in group)
    return (*counts, *flags, *CODE_FLAGS, *derived, *facts.features)


@cache
def schema_hash(names: tuple[str, ...] = ()) -> str:
    """Return a digest of version and feature names; models store it and reject any other.

    Args:
        names: Names of the features; by default :func:`feature_names`.
    """
    text = "\n".join((str(SCHEMA_VERSION), *(names or feature_names())))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# A device with all figures 1, since feature names do not depend on them.
_ANY = DeviceSpec("any", "cpu", {"f32": 1.0}, {"f32": 1.0}, (MemoryLevel(1.0, 1.0),), 1.0)
