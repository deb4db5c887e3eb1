"""Prices collectives on a cluster by fitted curves where they apply, by closed forms elsewhere.

Inside one box of GPUs, the fitted curves (:mod:`.model`) represent the library's protocols; across
whole boxes they apply only to machines that were measured that way. All other groups, including
those on other kinds of networks or networks with specified figures, use the closed forms of
:mod:`opcast.simulate.collectives`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import exp, prod
from pathlib import Path

from ...common.errors import DeviceError
from ...features.devices.catalogue import base_of, in_catalogue, read_device
from ...features.devices.device import DeviceSpec
from ...simulate.clusters.catalogue import joined
from ...simulate.clusters.topology import Cluster, Dimension
from ...simulate.collectives.choose import COLLECTIVES, collective_cost, collective_name
from .fit import LIKE, cell_key
from .intervals import UNKNOWN
from .links import Links
from .model import CollectiveModel
from .table import RING_PERMUTE, one_collective

#: Largest group on a machine that was not measured with as many devices: most published scale-up
#: measurements are of boxes of eight, so that larger groups would be extrapolations.
MOST_DEVICES = 8
#: Libraries to try in turn: PyTorch and XLA call NCCL, so their rows stand in if NCCL has none. XLA
#: was only measured inside one domain, with up to 72 devices.
_LIKE = {"nccl": ("nccl", "torch", "xla"), "xla": ("xla", "nccl", "torch")}
#: Cache key: the collective, its group and its library.
_Query = tuple[str, float, int | range | tuple[int, ...], Cluster, str]


@dataclass(frozen=True)
class CollectiveEstimate:
    """Time of a collective.

    Attributes:
        latency: Seconds.
        lo: Lower bound of the 90 % interval.
        hi: Upper bound of the 90 % interval.
        source: ``learned`` or ``analytical``.
        detail: Scope of the curve (as of :meth:`CollectiveModel.predict`), or the algorithm.
    """

    latency: float
    lo: float
    hi: float
    source: str
    detail: str


@dataclass
class ClusterCollectives:
    """Estimates collectives between the ranks of a cluster, with a cache.

    Attributes:
        model: Fitted collectives.
    """

    model: CollectiveModel = field(default_factory=CollectiveModel.find)
    _answers: dict[tuple[_Query, float], CollectiveEstimate] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def estimate(
        self,
        kind: str,
        bytes_per_rank: float,
        group: Sequence[int] | int,
        cluster: Cluster,
        backend: str = "nccl",
    ) -> CollectiveEstimate:
        """Estimate a collective, with the arguments of ``choose.collective_cost``.

        Args:
            kind: Collective.
            bytes_per_rank: Bytes that each rank contributes.
            group: Ranks, or their number.
            cluster: Cluster that they belong to.
            backend: Library whose curves to use.

        Raises:
            DeviceError: As ``collective_cost``.
        """
        ranks = group if isinstance(group, int | range) else tuple(int(r) for r in group)
        query = (kind, bytes_per_rank, ranks, cluster, backend)
        written = _written(cluster.device)
        if (query, written) not in self._answers:
            self._answers[query, written] = self._estimate(*query)
        return self._answers[query, written]

    def _estimate(
        self,
        kind: str,
        bytes_per_rank: float,
        ranks: int | range | tuple[int, ...],
        cluster: Cluster,
        backend: str,
    ) -> CollectiveEstimate:
        plain, size = collective_name(kind).removeprefix("ragged_"), float(bytes_per_rank)
        dims = cluster.topology.group_dims(ranks)
        measured = COLLECTIVES[plain].measured
        chip = _chip(cluster.device) if size > 0 and measured else None
        if chip is not None and _as_usual(dims, cluster.topology.dims[0], chip):
            for library in _LIKE.get(backend, (backend,)):
                learned = _learned(self.model, plain, size, dims, cluster, chip, library)
                if learned is not None:
                    return learned
        cost = collective_cost(plain, size, ranks, cluster)
        # A group of a single rank sends nothing: its time is exactly 0.
        lower, upper = UNKNOWN if dims else (0.0, 0.0)
        low, high = cost.total * exp(lower), cost.total * exp(upper)
        return CollectiveEstimate(cost.total, low, high, "analytical", cost.algorithm)


@dataclass(frozen=True)
class _Chip:
    """A GPU, and the catalogue GPU whose curves it takes: itself, or a design's base."""

    spec: DeviceSpec
    base: DeviceSpec


def _chip(device: str) -> _Chip | None:
    """The GPU of a cluster by name or file; ``None`` if it is another device or unknown."""
    try:
        spec = read_device(device)
    # A cluster may be built for a description without a file.
    except DeviceError:
        return None
    if spec.platform != "gpu":
        return None
    return _Chip(spec, spec if in_catalogue(spec.name) else base_of(spec) or spec)


def _written(device: str) -> float:
    """Modification time of a device's file; 0 for a name, without accessing the disk."""
    path = Path(device) if "." in device else None
    return path.stat().st_mtime if path and path.is_file() else 0.0


def _as_usual(dims: tuple[Dimension, ...], first: Dimension, chip: _Chip) -> bool:
    """Whether a group is in one box or of whole boxes, joined in the usual way for the chip.

    The curves scale with the bandwidth of a box's links; another kind of link, or one with a
    specified latency or efficiency, was not measured.
    """
    # A group with parts of several boxes has another traffic pattern.
    whole = len(dims) == 2 and dims[0] == first
    if not (len(dims) == 1 and dims[0].name == first.name) and not whole:
        return False
    usual = _usual(chip.base.name, 2)
    if not usual:
        return True
    across = _usual(chip.base.name, prod(d.size for d in dims))[1:] if whole else ()
    return _alike(first, usual[0]) and (
        not whole or (len(across) == 1 and _alike(dims[1], across[0], bandwidth=True))
    )


def _alike(dim: Dimension, usual: Dimension, bandwidth: bool = False) -> bool:
    """Whether the specified figures of a dimension match the usual ones for such devices."""
    plain = Dimension(dim.kind, dim.size, dim.bandwidth, shape=dim.shape, radix=dim.radix)
    figures = ("latency", "launch", "efficiency", "algorithms", "reduction", "oversubscription")
    if dim.kind != usual.kind or (bandwidth and dim.bandwidth != usual.bandwidth):
        return False
    return all(getattr(dim, k) in (getattr(usual, k), getattr(plain, k)) for k in figures)


@lru_cache(maxsize=256)
def _usual(device: str, count: int) -> tuple[Dimension, ...]:
    """Usual topology of devices of the catalogue; empty if no rule joins this many."""
    try:
        return joined(device, count).topology.dims
    except DeviceError:
        return ()


def _learned(
    model: CollectiveModel,
    kind: str,
    size: float,
    dims: tuple[Dimension, ...],
    cluster: Cluster,
    chip: _Chip,
    library: str,
) -> CollectiveEstimate | None:
    """Estimate from the curves; ``None`` if the library's operation was not measured like this.

    Across boxes, the machine itself must have been measured with the same number of devices.
    """
    spec, first = chip.base, cluster.topology.dims[0]
    world, inside = prod(d.size for d in dims), dims[0].size
    links = Links.from_spec(chip.spec, link=first.bandwidth, devices_per_node=inside)
    usual = _usual(spec.name, 2)
    own = not usual or first.bandwidth == usual[0].bandwidth
    own = own and Links.from_spec(chip.spec) == Links.from_spec(spec)
    asked = COLLECTIVES[kind]
    # Machines with measurements of this library: others may use different names.
    paths = [key.split("/", 3) for key in model.tree.curves if key.count("/") >= 3]
    machines = {p[3] for p in paths if p[1] == asked.measured and library in (p[2], LIKE.get(p[2]))}
    # A calibration may have named the cluster itself, which takes precedence over the device.
    machine = next((m for m in (cluster.name, spec.name, *spec.aliases) if m in machines), "")
    # Networks differ more than their data sheets (docs/collectives.md): across boxes, only
    # measurements of this machine and number of devices are used.
    cell = cell_key(("network", asked.measured, library, machine), world)
    if len(dims) > 1 and cell not in model.tree.residuals:
        return None
    table = one_collective(
        asked.measured,
        max(size * (world if asked.gathers else 1), 1.0),
        # A shift is one transfer between two devices per device.
        2 if asked.measured == RING_PERMUTE else world,
        inside,
        machine or spec.name,
        library,
        links,
    )
    prediction = {name: column[0] for name, column in model.answer(table, own).items()}
    measured = prediction["scope"] in ("known", "calibrated")
    if prediction["scope"] == "foreign" or (world > MOST_DEVICES and not measured):
        return None
    latency, lo, hi = (float(prediction[c]) for c in ("latency_s", "lo_s", "hi_s"))
    return CollectiveEstimate(latency, lo, hi, "learned", str(prediction["scope"]))
