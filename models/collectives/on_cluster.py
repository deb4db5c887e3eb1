"""Prices collectives on a cluster by fitted curves where they apply, by closed forms elsewhere.

Inside one box of GPUs, the fitted curves (:mod:`.model`) represent the library's protocols; across
whole boxes they apply only to machines that were measured that way. If a file specifies other
figures for the links of a box, such as a latency, the curves are scaled by what the closed forms of
:mod:`opcast.simulate.collectives` make of the difference. All other groups, including those on
other kinds of networks, use the closed forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import exp, prod
from pathlib import Path

from ...common.errors import DeviceError
from ...features.devices.catalogue import base_of, in_catalogue, read_device
from ...features.devices.device import DeviceSpec
from ...simulate.clusters.catalogue import joined
from ...simulate.clusters.topology import Cluster, Dimension, Topology
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
#: Figures of links beside their kind and bandwidth.
_FIGURES = ("latency", "launch", "efficiency", "algorithms", "reduction", "oversubscription")
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

    def on_other_links(self, ratio: float) -> CollectiveEstimate:
        """Return the estimate for links that take ``ratio`` times as long by the closed forms.

        The interval covers both, since no such links were measured.
        """
        lo, hi = self.lo * min(1.0, ratio), self.hi * max(1.0, ratio)
        return replace(self, latency=self.latency * ratio, lo=lo, hi=hi)


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
        usual = _usual_links(dims, cluster.topology.dims[0], chip) if chip else None
        if chip and usual:
            for library in _LIKE.get(backend, (backend,)):
                learned = _learned(self.model, plain, size, dims, cluster, chip, library)
                if learned is None:
                    continue
                if usual[0] == usual[1]:
                    return learned
                own, measured_on = (
                    collective_cost(plain, size, ranks, _with_first(cluster, first)).total
                    for first in usual
                )
                return learned.on_other_links(own / measured_on)
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


def _usual_links(
    dims: tuple[Dimension, ...], first: Dimension, chip: _Chip
) -> tuple[Dimension, Dimension] | None:
    """Links of a box with the figures of its file, and with the usual ones of the chip.

    Figures that the file leaves out are the usual ones in both. The bandwidth is the file's in
    both, since the curves scale with it. ``None`` if a group is neither in one box nor of whole
    boxes, or joined by another kind of links or network.
    """
    # A group with parts of several boxes has another traffic pattern.
    whole = len(dims) == 2 and dims[0] == first
    if not (len(dims) == 1 and dims[0].name == first.name) and not whole:
        return None
    usual = _usual(chip.base.name, 2)
    if not usual:
        return first, first
    across = _usual(chip.base.name, prod(d.size for d in dims))[1:] if whole else ()
    if first.kind != usual[0].kind or (
        whole and not (len(across) == 1 and _is_usual_network(dims[1], across[0]))
    ):
        return None
    figures = {name: getattr(usual[0], name) for name in _FIGURES}
    given = {name: getattr(first, name) for name in _given(first)}
    return replace(first, **figures | given), replace(first, **figures)


def _is_usual_network(dim: Dimension, usual: Dimension) -> bool:
    """Whether the network between boxes has the usual kind, bandwidth, and given figures."""
    alike = dim.kind == usual.kind and dim.bandwidth == usual.bandwidth
    return alike and all(getattr(dim, name) == getattr(usual, name) for name in _given(dim))


def _given(dim: Dimension) -> list[str]:
    """Figures of a dimension that differ from the values that stand for none."""
    plain = Dimension(dim.kind, dim.size, dim.bandwidth, shape=dim.shape, radix=dim.radix)
    return [name for name in _FIGURES if getattr(dim, name) != getattr(plain, name)]


def _with_first(cluster: Cluster, first: Dimension) -> Cluster:
    """A cluster with other links in its boxes."""
    return replace(cluster, topology=Topology((first, *cluster.topology.dims[1:])))


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
