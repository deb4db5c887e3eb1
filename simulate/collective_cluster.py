"""Collectives on a cluster: by what was measured where it was, by the analytical form elsewhere.

Inside one box of GPUs, the fitted curves of ``collective`` know the library's protocols, and across
whole boxes where the machine was measured so; everywhere else the formulas of ``algorithms`` count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, prod
from typing import TYPE_CHECKING

import pandas as pd

from ..features.catalogue import find_device, in_catalogue
from .algorithms import collective_name, dims_cost
from .collective_intervals import UNKNOWN
from .collective_residual import cell_key
from .links import Links
from .topology import Cluster, Dimension

if TYPE_CHECKING:
    from .collective import CollectiveModel

#: Names in the tables that curves were fitted to, and what its bytes are per byte that a rank puts
#: in: one, or the number of ranks.
_TABLE = {
    "all_reduce": ("all_reduce", False),
    "all_gather": ("all_gather", True),
    "reduce_scatter": ("reduce_scatter", False),
    "all_to_all": ("alltoall", False),
    "send_recv": ("send_recv", False),
}
#: Most devices for which curves fitted to boxes of eight are taken on a machine never measured.
MOST_DEVICES = 8
#: Libraries to look at where the one that was asked for has no rows: NCCL, called by PyTorch.
_LIKE = {"nccl": ("nccl", "torch")}


@dataclass(frozen=True)
class CollectiveEstimate:
    """Time of a collective.

    Attributes:
        latency: Seconds.
        lo: Lower end of the 90 % interval.
        hi: Upper end.
        source: ``learned`` or ``analytical``.
        detail: Scope of the curve (as :meth:`CollectiveModel.predict`), or the algorithm.
    """

    latency: float
    lo: float
    hi: float
    source: str
    detail: str


def estimate_collective(
    model: CollectiveModel,
    kind: str,
    bytes_per_rank: float,
    group: Sequence[int] | int,
    cluster: Cluster,
    backend: str = "nccl",
    algorithm: str = "auto",
    skew: float = 1.0,
) -> CollectiveEstimate:
    """Time of a collective; arguments as :func:`~opcast.simulate.algorithms.collective_cost`.

    Args:
        model: Fitted collectives.
        kind: Collective.
        bytes_per_rank: What each rank puts in.
        group: Ranks.
        cluster: Where they are.
        backend: Library whose curves are asked for.
        algorithm: Anything but ``auto`` takes the analytical form.
        skew: Bytes of the busiest rank over the mean, for all-to-all.

    Raises:
        DeviceError: As ``collective_cost``.
    """
    name = collective_name(kind)
    plain = name.removeprefix("ragged_")
    size = float(bytes_per_rank) * (skew if plain == "all_to_all" else 1.0)
    dims = cluster.topology.group_dims(group)
    if algorithm == "auto" and size > 0 and plain in _TABLE and _of_gpus(cluster, dims):
        for library in _LIKE.get(backend, (backend,)):
            found = _learned(model, plain, size, dims, cluster, library)
            if found is not None:
                return found
    cost = dims_cost(plain, size, dims, algorithm)
    lower, upper = UNKNOWN if dims else (0.0, 0.0)
    low, high = cost.total * exp(lower), cost.total * exp(upper)
    return CollectiveEstimate(cost.total, low, high, "analytical", cost.algorithm)


def _of_gpus(cluster: Cluster, dims: tuple[Dimension, ...]) -> bool:
    """Whether a group of GPUs lies in one box, or is made of whole boxes."""
    first = cluster.topology.dims[0]
    whole = len(dims) == 2 and dims[0] == first
    if not (len(dims) == 1 and dims[0].name == first.name) and not whole:
        return False
    return in_catalogue(cluster.device) and find_device(cluster.device).platform == "gpu"


def _learned(
    model: CollectiveModel,
    kind: str,
    size: float,
    dims: tuple[Dimension, ...],
    cluster: Cluster,
    library: str,
) -> CollectiveEstimate | None:
    """By the curves, if the library's operation was measured on such links.

    Across boxes the machine itself must have been measured with as many devices.
    """
    spec, first = find_device(cluster.device), cluster.topology.dims[0]
    world, inside = prod(d.size for d in dims), dims[0].size
    links = Links.from_spec(spec, link=first.bandwidth, devices_per_node=inside)
    operation, gathered = _TABLE[kind]
    machines = {key.split("/", 3)[3] for key in model.tree.curves if key.count("/") >= 3}
    machine = next((m for m in (cluster.name, spec.name, *spec.aliases) if m in machines), "")
    row = {
        "op": operation,
        "bytes": max(size * (world if gathered else 1), 1.0),
        "world_size": world,
        "devices_per_node": inside,
        "device": machine or spec.name,
        "backend": library,
    }
    cell = cell_key(("network", operation, library, machine), world)
    if len(dims) > 1 and cell not in model.tree.residuals:
        return None
    found = model.predict(pd.DataFrame([row]), lambda _: links).iloc[0]
    measured = found["scope"] in ("known", "calibrated")
    if found["scope"] == "foreign" or (world > MOST_DEVICES and not measured):
        return None
    latency, lo, hi = (float(found[c]) for c in ("latency_s", "lo_s", "hi_s"))
    return CollectiveEstimate(latency, lo, hi, "learned", str(found["scope"]))
