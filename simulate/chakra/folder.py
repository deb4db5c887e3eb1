"""A folder that ASTRA-sim runs as it is: traces, process groups, network, system, remote memory."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ...common.errors import DatasetError, DeviceError
from ...common.files import parse_json, write_bytes, write_text
from ...features.devices.device import DeviceSpec
from ..clusters.files import astra_network
from ..clusters.topology import Cluster, Dimension, Topology
from .messages import EtNode, decode, encode
from .ranks import SPLITS

#: Traces are ``trace.<rank>.et``; ASTRA-sim takes the part before the rank
#: (``--workload-configuration``).
PREFIX = "trace"
GROUPS, NETWORK, SYSTEM, MEMORY = (
    "comm_group.json",
    "network.yml",
    "system.json",
    "remote_memory.json",
)
#: The cluster by its data sheet, beside a network that was fitted to predicted times.
CLUSTER_NETWORK, CLUSTER_SYSTEM = "network_cluster.yml", "system_cluster.json"
#: The same for ASTRA-sim's congestion-aware network, which supports only one dimension: a torus as
#: one ring.
RING_NETWORK, RING_SYSTEM = "network_ring.yml", "system_ring.json"


def write_folder(
    out: Path,
    traces: Iterable[Sequence[EtNode]],
    groups: Mapping[tuple[int, ...], str],
    cluster: Cluster,
    device: DeviceSpec,
    fitted: Topology | None = None,
) -> None:
    """Write a folder.

    Args:
        out: The folder; created if it is missing.
        traces: Traces of all ranks.
        groups: Names of process groups, by their ranks; read after all traces are written.
        cluster: Cluster of the ranks.
        device: Device of each rank.
        fitted: Network on which ASTRA-sim's collectives take the predicted times; it then becomes
            the network, and the cluster's is written beside it if the format supports it.

    Raises:
        DeviceError: ASTRA-sim cannot describe the network.
    """
    own = cluster.topology if fitted is None else fitted
    # First, because it may reject the network: nothing is written then.
    network = astra_network(own)
    # Traces of an earlier export to more ranks would be read along with the new ones.
    for old in out.glob(f"{PREFIX}.*.et"):
        old.unlink()
    for rank, trace in enumerate(traces):
        write_bytes(out / f"{PREFIX}.{rank}.et", encode(trace))
    write_text(out / GROUPS, json.dumps({name: list(g) for g, name in groups.items()}) + "\n")
    write_text(out / NETWORK, network)
    write_text(out / SYSTEM, json.dumps(astra_system(own, device), indent=2) + "\n")
    if fitted is not None:
        # The format has no oversubscribed trees.
        with contextlib.suppress(DeviceError):
            write_text(out / CLUSTER_NETWORK, astra_network(cluster.topology))
            system = astra_system(cluster.topology, device)
            write_text(out / CLUSTER_SYSTEM, json.dumps(system, indent=2) + "\n")
    dims = cluster.topology.dims
    if len(dims) == 1 and dims[0].kind == "torus":
        ring = Topology((one_ring(dims[0]),))
        write_text(out / RING_NETWORK, astra_network(ring))
        write_text(out / RING_SYSTEM, json.dumps(astra_system(ring, device), indent=2) + "\n")
    write_text(out / MEMORY, json.dumps({"memory-type": "NO_MEMORY_EXPANSION"}) + "\n")


def one_ring(torus: Dimension) -> Dimension:
    """A ring of a torus' devices on which very large and very small collectives take as long.

    It has the bandwidth of all axes together, which the axes' rings use at the same time, and the
    total latency of the rings of all axes in turn.
    """
    steps = sum(n - 1 for n in torus.shape)
    latency = torus.latency * steps / max(torus.size - 1, 1)
    return replace(torus, kind="ring", shape=(), latency=latency)


def read_folder(folder: Path) -> tuple[list[list[EtNode]], dict[str, list[int]]]:
    """Read the traces of all ranks, in order, and the ranks of each process group.

    Raises:
        DatasetError: There are no traces, ranks are missing, or a file cannot be read.
    """
    files = {f.name.split(".")[-2]: f for f in folder.glob("*.et")}
    ranks = [str(r) for r in range(len(files))]
    if not files or set(files) != set(ranks):
        raise DatasetError(
            "no traces of ranks 0, 1 …", where=str(folder), hint="files are named trace.RANK.et"
        )
    traces = [decode(files[r].read_bytes(), str(files[r])) for r in ranks]
    return traces, _groups(folder / GROUPS)


def _groups(path: Path) -> dict[str, list[int]]:
    if not path.is_file():
        return {}
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
        return {str(name): [int(r) for r in ranks] for name, ranks in data.items()}
    except (ValueError, TypeError, AttributeError):
        raise DatasetError(
            "no process groups", where=str(path), hint='write {"1": [0, 1]}: ranks by name'
        ) from None


def astra_system(topology: Topology, device: DeviceSpec) -> dict[str, object]:
    """ASTRA-sim's system file: an algorithm per dimension; durations come from the traces.

    ``local-mem-bw`` is in GB/s, ``peak-perf`` in TFLOP/s. Settings that do not depend on cluster or
    device are those of ASTRA-sim's example systems.
    """
    dims = [ring for d in topology.dims for ring in d.rings()]
    reduce = [_algorithm(d) for d in dims]
    # Halving and doubling does not implement an all-to-all.
    scatter = ["direct" if name == "halvingDoubling" else name for name in reduce]
    return {
        "scheduling-policy": "LIFO",
        "endpoint-delay": 10,
        "active-chunks-per-dimension": 1,
        "preferred-dataset-splits": SPLITS,
        "all-reduce-implementation": reduce,
        "all-gather-implementation": reduce,
        "reduce-scatter-implementation": reduce,
        "all-to-all-implementation": scatter,
        "collective-optimization": "localBWAware",
        "local-mem-bw": device.bandwidth / 1e9,
        "boost-mode": 0,
        # Durations are in the traces; the figures below apply if this is switched on.
        "roofline-enabled": 0,
        "peak-perf": device.matrix_peak("bf16") / 1e12,
    }


def _algorithm(dim: Dimension) -> str:
    """ASTRA-sim's name of the algorithm; halving and doubling needs a power of two."""
    if dim.kind == "ring":
        return "ring"
    if dim.kind == "fully_connected":
        return "direct"
    return "halvingDoubling" if dim.size & (dim.size - 1) == 0 else "ring"
