"""What a compiled plan costs: its partitioned program, predicted as ``predict --cluster`` does."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...common.errors import DatasetError, OpcastError, fault
from ...common.interval import LATENCY_KEYS, Interval
from ...features.lowering.options import LoweringOptions
from ...features.lowering.target_compiler.process import CompileSettings
from ...models.power.energy import energy_fields
from ...simulate.clusters.topology import Cluster, Dimension, Topology
from ..api import loaded
from ..cluster.partitioned import PartitionedPrediction, predict_partitioned
from ..program.energy import program_energy
from ..sweep.workers import Rows

#: Collectives of the critical path that a row keeps.
_WAITS = 5

Row = dict[str, object]


@dataclass(frozen=True)
class PlanJob:
    """Settings that all plans share; can be sent to another process.

    Attributes:
        cluster: The cluster.
        model: Name or folder of the kernel model.
        lowering: Lowering of the partitioned programs.
        timeout_s: Limit of a compilation.
    """

    cluster: Cluster
    model: str = "default"
    lowering: str = "auto"
    timeout_s: float = 3600.0


#: Key of a plan, and the program with its shardings. Bytes, not a path: other hosts do not share
#: the folder of results.
Annotated = tuple[str, bytes]


def judge_plans(job: PlanJob, programs: Sequence[Annotated]) -> Rows:
    """One row for each annotated program; one that cannot be compiled has an ``error``."""
    rows: Rows = []
    for key, program in programs:
        started = time.monotonic()
        try:
            row = _judged(job, program)
        except OpcastError as error:
            row = {"error": str(error)}
        except Exception as error:  # one plan must not cost the others
            row = {"error": str(fault(error))}
        rows.append({"key": key, **row, "seconds": time.monotonic() - started})
    return rows


def number(row: Mapping[str, object], key: str) -> float:
    """A figure of a compiled plan; one that is missing is no 0.

    Raises:
        DatasetError: The row has none, such as one of a folder of an earlier version.
    """
    value = row.get(key)
    if isinstance(value, int | float):
        return float(value)
    raise DatasetError(
        f"the row of {row.get('plan', 'a plan')} has no {key}", hint="give another folder"
    )


def judge_alone(job: PlanJob, program: bytes) -> Row:
    """The row of a program of one device, predicted as ``predict --device`` does."""
    (row,) = judge_plans(replace(job, cluster=alone(job.cluster)), [("", program)])
    return row


def alone(cluster: Cluster) -> Cluster:
    """One device of a cluster."""
    network = Topology((Dimension("switch", 1, 1.0),))
    return Cluster(cluster.device, cluster.device, network)


def _judged(job: PlanJob, program: bytes) -> Row:
    settings = CompileSettings(timeout_s=job.timeout_s, progress=False)
    options = LoweringOptions(job.lowering, settings=settings)
    made = predict_partitioned(program, job.cluster, loaded(job.model), options)
    own = made.to_dict()
    return {
        **{name: own[name] for name in (*LATENCY_KEYS, "compute_us", "communication_us")},
        "exposed_communication_us": own["exposed_communication_us"],
        "memory_bytes_per_device": made.peak_memory_bytes,
        "fits": made.fits is not False,
        "lowering": made.lowering,
        "collectives": own["collectives"],
        "moved_bytes": sum(n.collective.whole * n.times for n in made.nodes if n.collective),
        "waits": _waits(made),
        "notes": list(made.notes),
        **_energy(job, made),
        "error": "",
    }


def _energy(job: PlanJob, made: PartitionedPrediction) -> Mapping[str, float | None]:
    """Joules of all devices: kernels by the law of power, waiting for the rest."""
    import numpy as np

    from ...features.table.roofline import roofline
    from ..devices import cluster_device

    spec = cluster_device(job.cluster, loaded(job.model).devices)
    kernels = [k for k in made.kernels if k.takes_time and k.kind != "collective"]
    if not kernels:
        return energy_fields(None)
    seconds = roofline(kernels, spec).latency_s
    counts = np.array([k.multiplicity for k in kernels])
    # Rooflines say how the time is shared; its sum is the simulated computation.
    seconds = seconds * (made.run.compute / max(float((seconds * counts).sum()), 1e-12))
    joules = program_energy(kernels, seconds, made.interval, spec)
    return energy_fields(Interval(*(made.devices * j for j in joules)) if joules else None)


def _waits(made: PartitionedPrediction) -> list[Row]:
    """The collectives of the critical path by source line, those that take longest first."""
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    moved: dict[tuple[str, str], float] = defaultdict(float)
    for place in made.run.critical:
        node = made.nodes[place]
        if node.collective is None:
            continue
        lines = [
            f"{s.file}:{s.line}" if s.file else s.op
            for member in node.members or ()
            for s in made.kernels[member].sources
        ]
        key = (node.collective.kind, lines[0] if lines else node.name)
        length = float(made.run.end[place] - made.run.start[place])
        seconds[key] += length * 1e6
        moved[key] += node.collective.whole * node.times
    return [
        {"collective": kind, "where": where, "us": us, "bytes": moved[kind, where]}
        for (kind, where), us in sorted(seconds.items(), key=lambda item: -item[1])[:_WAITS]
    ]
