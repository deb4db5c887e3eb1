"""The input of estimators: a feature table of kernels with their roofline, kind and platform."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...features.devices.device import DeviceSpec
from ...features.kernels.kernel import KINDS, Kernel
from .graphs import KernelGraphs

#: Platforms with separate cells. They are in the order of the cells, which saved models list by
#: name.
PLATFORMS = ("cpu", "gpu", "tpu")
#: Names of the cells (platform × kind) that have intervals and a domain of their own; the last one
#: takes all other kernels.
CELLS = (*(f"{platform}/{kind}" for platform in PLATFORMS for kind in KINDS), "other")
_KIND_INDEX = {kind: index for index, kind in enumerate(KINDS)}
#: Shortest time of a kernel in seconds: keeps logarithms finite for any device description.
#: One nanosecond is a few clock cycles, less than any launch.
SMALLEST = 1e-9


@dataclass(slots=True)
class KernelTable:
    """Features of ``n`` kernels, each on its device.

    Attributes:
        X: Features, float32, shape ``(n, d)``.
        names: Names of the features, length ``d``.
        base_s: Reference of the learned ratio in seconds, shape ``(n,)``, positive: roofline plus
            floor, on a TPU the sum of parts of :func:`~opcast.features.table.tpu.tpu_parts`.
        bound: Limiting term of the roofline, shape ``(n,)``.
        cell: Index into :data:`CELLS`, shape ``(n,)``.
        schema: Digest of the feature schema.
        graphs: Computation graphs of the kernels, for the estimators that look at them; they
            cost nothing before they are used.
        line_s: Roofline plus floor in seconds, shape ``(n,)``, where that differs from the base.
    """

    X: np.ndarray
    names: tuple[str, ...]
    base_s: np.ndarray
    bound: np.ndarray
    cell: np.ndarray
    schema: str
    graphs: KernelGraphs | None = None
    line_s: np.ndarray | None = None

    @property
    def roofline_s(self) -> np.ndarray:
        """Roofline plus floor in seconds, shape ``(n,)``."""
        return self.base_s if self.line_s is None else self.line_s

    def __len__(self) -> int:
        """Number of kernels."""
        return len(self.X)

    def take(self, rows: np.ndarray) -> KernelTable:
        """The given rows, by position or mask."""
        return KernelTable(
            self.X[rows],
            self.names,
            self.base_s[rows],
            self.bound[rows],
            self.cell[rows],
            self.schema,
            None if self.graphs is None else self.graphs.take(rows),
            None if self.line_s is None else self.line_s[rows],
        )

    def with_names(self, names: tuple[str, ...]) -> KernelTable:
        """The table with the features of another platform, for a model that was trained there.

        Features of a TPU are appended to the common ones, so one list begins with the other.

        Args:
            names: Names of the features. Those that this table lacks at the end are zero; those
                that it has beyond are dropped. Unrelated names leave the table as it is.
        """
        n, width = self.X.shape
        shared = min(width, len(names))
        if width == len(names) or not names or self.names[:shared] != names[:shared]:
            return self
        X = np.zeros((n, len(names)), np.float32)
        X[:, :shared] = self.X[:, :shared]
        return replace(self, X=X, names=names)


def kernel_table(
    kernels: Sequence[Kernel], device: DeviceSpec, *, graphs: bool = False
) -> KernelTable:
    """Feature table of kernels on one device, with their graphs if wanted."""
    from ...features.table.table import feature_table, schema_hash
    from ...features.table.tpu import tpu_feature_table

    is_tpu = device.platform == "tpu"
    features = (tpu_feature_table if is_tpu else feature_table)(kernels, device)
    return KernelTable(
        X=np.ascontiguousarray(features.X, np.float32),
        names=tuple(features.names),
        base_s=np.maximum(features.base_s, SMALLEST),
        bound=np.asarray(features.bound, dtype=object),
        cell=cells([k.kind for k in kernels], device.platform),
        schema=schema_hash(features.names),
        graphs=KernelGraphs.of([k.hash for k in kernels], kernels) if graphs else None,
        line_s=np.maximum(features.roofline_s + device.floor, SMALLEST) if is_tpu else None,
    )


def concatenate(tables: Sequence[KernelTable]) -> KernelTable:
    """Tables one after the other; graphs are kept if all of them have some.

    Features of the widest are kept: TPUs' own are zero for the other platforms.
    """
    first = max(tables, key=lambda table: len(table.names))
    tables = [table.with_names(first.names) for table in tables]
    graphs = [t.graphs for t in tables if t.graphs is not None]
    plain = all(t.line_s is None for t in tables)
    return KernelTable(
        np.concatenate([t.X for t in tables]),
        first.names,
        np.concatenate([t.base_s for t in tables]),
        np.concatenate([t.bound for t in tables]),
        np.concatenate([t.cell for t in tables]),
        first.schema,
        KernelGraphs.concatenate(graphs) if len(graphs) == len(tables) else None,
        None if plain else np.concatenate([t.roofline_s for t in tables]),
    )


def cells(kinds: Sequence[str], platform: str) -> np.ndarray:
    """Cell of each kernel, int16, shape ``(n,)``."""
    other = len(CELLS) - 1
    if platform not in PLATFORMS:
        return np.full(len(kinds), other, np.int16)
    start = PLATFORMS.index(platform) * len(KINDS)
    known = {kind: start + index for kind, index in _KIND_INDEX.items()}
    return np.fromiter((known.get(k, other) for k in kinds), np.int16, len(kinds))
