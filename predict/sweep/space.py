"""The search space of a sweep: plans over clusters and batch sizes, each with its own key."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from ...common.errors import PlanError
from ...common.types import JsonObject
from ...simulate.clusters.topology import Cluster
from ...simulate.step.plan import RECOMPUTE, Plan, idle_setting, resolved
from ...simulate.step.settings import read_pairs
from ...simulate.step.workload import Workload

#: Axes of a sweep. ``data`` is the use of the devices that the other kinds of parallelism leave,
#: ``split`` the number of parts that the chosen micro-batch is split into.
AXES = ("tp", "pp", "cp", "ep", "data", "recompute", "schedule", "split", "offload")
#: Values of the axis ``data``: replicas, replicas with sharded optimizer state, sharded parameters.
DATA = ("dp", "zero1", "fsdp")
#: Model chunks per device in the interleaved schedule: the minimum (Narayanan et al., SC 2021,
#: section 2.2). More would multiply the transfers; not an axis.
CHUNKS = 2


@dataclass(frozen=True)
class Candidate:
    """One combination to evaluate.

    Attributes:
        cluster: Name or file.
        batch: Sequences of a step over all devices.
        plan: Plan with its number of micro-batches resolved.
    """

    cluster: str
    batch: int
    plan: Plan

    @property
    def key(self) -> str:
        """Digest of all settings, which identifies stored results."""
        text = json.dumps([self.cluster, self.batch, asdict(self.plan)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def parse_grid(text: str) -> dict[str, list[str]]:
    """Parse values by axis, such as ``tp=1/2/4,recompute=none/full``.

    Raises:
        PlanError: An axis is not one of :data:`AXES`.
    """
    axes = {}
    for key, value in read_pairs(text, "grid").items():
        if key not in AXES:
            raise PlanError(f"no axis {key!r}", where="grid", hint="axes: " + ", ".join(AXES))
        values = value if isinstance(value, list) else str(value).split("/")
        axes[key] = [str(v) for v in values]
    return axes


def axis_values(
    workload: Workload, cluster: Cluster, grid: Mapping[str, Sequence[str]]
) -> dict[str, list[str]]:
    """Choose the values of every axis: the grid's, else defaults for model and cluster.

    By default ``tp`` stays within a node, and ``cp`` and ``offload`` are off.
    """
    # Tensor parallelism communicates in every layer, so by default it stays on the links of one
    # node; it cannot exceed the number of heads.
    inside = min(cluster.devices_per_node or cluster.size, cluster.size)
    default = {
        "tp": _powers(min(inside, workload.heads)),
        # Maximum of the default axis: 32 stages; engineering estimate.
        "pp": _powers(min(cluster.size, workload.layers, 32)),
        "cp": ["1"],
        "ep": _powers(min(workload.experts, cluster.size)) if workload.experts else ["1"],
        "data": list(DATA),
        "recompute": list(RECOMPUTE),
        "schedule": ["1f1b", "interleaved", "zero-bubble"],
        "split": ["1", "2", "4"],
        "offload": ["none"],
    }
    return {axis: list(grid.get(axis, values)) for axis, values in default.items()}


def candidates(
    workload: Workload,
    clusters: Mapping[str, Cluster],
    batches: Sequence[int],
    grid: Mapping[str, Sequence[str]],
) -> list[Candidate]:
    """List all valid combinations, each once.

    Raises:
        PlanError: No combination is valid, or a value of the grid is unknown.
    """
    # A dict as an ordered set: different choices may resolve to the same plan.
    unique: dict[Candidate, None] = {}
    for (name, cluster), batch in itertools.product(clusters.items(), batches):
        own = replace(workload, batch=batch)
        values = axis_values(own, cluster, grid)
        for choice in itertools.product(*(values[axis] for axis in AXES)):
            plan = make_plan(dict(zip(AXES, choice, strict=True)), own, cluster)
            if isinstance(plan, Plan):
                unique[Candidate(name, batch, plan)] = None
    if not unique:
        pairs = itertools.product(clusters, batches)
        raise no_candidates({at: why_none(workload, clusters[at[0]], at[1], grid) for at in pairs})
    return list(unique)


def why_none(
    workload: Workload, cluster: Cluster, batch: int, grid: Mapping[str, Sequence[str]]
) -> str:
    """Return the most frequent reason why no combination is valid; empty if one is."""
    own = replace(workload, batch=batch)
    values = axis_values(own, cluster, grid)
    said: Counter[str] = Counter()
    for choice in itertools.product(*(values[axis] for axis in AXES)):
        made = make_plan(dict(zip(AXES, choice, strict=True)), own, cluster)
        if isinstance(made, Plan):
            return ""
        if made:
            said[made] += 1
    (most, _), *_ = said.most_common(1) or [("every plan equals a simpler one", 0)]
    return f"no valid plan: {most}"


def no_candidates(reasons: Mapping[tuple[str, int], str] | None = None) -> PlanError:
    """Return the error of a sweep without valid combinations.

    Args:
        reasons: Reasons by cluster and batch.
    """
    told = "".join(f"; {name}, batch {b}: {why}" for (name, b), why in (reasons or {}).items())
    return PlanError(
        f"no combination of the grid fits the model and the clusters{told}",
        hint="widen the grid, or check that the batch can be divided",
    )


def make_plan(choice: Mapping[str, str], workload: Workload, cluster: Cluster) -> Plan | str:
    """Return the plan of one choice, or the reason why model and cluster do not allow it.

    The reason is empty if the choice is equivalent to another.

    Raises:
        PlanError: A value is invalid, such as an unknown name.
    """
    sizes = {axis: _number(axis, choice[axis]) for axis in ("tp", "pp", "cp", "ep", "split")}
    taken = sizes["tp"] * sizes["pp"] * sizes["cp"]
    if cluster.size % taken:
        return f"tp x pp x cp = {taken} does not divide the {cluster.size} devices"
    data = cluster.size // taken
    known: JsonObject = {"fsdp": data} if choice["data"] == "fsdp" else {"dp": data}
    if choice["data"] == "zero1":
        known["zero"] = 1
    if choice["data"] == "fsdp" and sizes["pp"] > 1:
        # With zero 1, time and memory would equal those of the axis value zero1.
        known["zero"] = 3
    if choice["data"] not in DATA:
        raise PlanError(f"data={choice['data']!r}", where="grid", hint="one of " + ", ".join(DATA))
    # With a single rank all three are the same plan; only the plain one is kept.
    if data == 1 and choice["data"] != "dp":
        return ""
    virtual = CHUNKS if choice["schedule"] == "interleaved" else 1
    known |= {axis: sizes[axis] for axis in ("tp", "pp", "cp", "ep")}
    known |= {axis: choice[axis] for axis in ("recompute", "schedule", "offload")}
    try:
        plan = Plan(**known, virtual=virtual)
        if idle_setting(workload, plan):
            return ""
        # Resolved twice: first to choose the micro-batches, which ``split`` then multiplies.
        plan = resolved(workload, plan, cluster.size)
        more = plan.changed(microbatches=plan.microbatches * sizes["split"])
        return resolved(workload, more, cluster.size)
    except PlanError as error:
        # An unknown value is the user's mistake; sizes that do not divide only exclude a
        # combination.
        if "is not known" in error.what:
            raise
        return str(error)


def _powers(most: int) -> list[str]:
    return [str(2**i) for i in range(most.bit_length()) if 2**i <= most]


def _number(axis: str, value: str) -> int:
    if not value.isdigit() or int(value) < 1:
        raise PlanError(f"{axis}={value!r} is not a positive integer", where="grid")
    return int(value)


def chunks(items: Sequence[Candidate], size: int) -> Iterator[list[Candidate]]:
    """Cut candidates into pieces of at most ``size``, each within one cluster."""
    # A worker keeps a predictor per cluster, whose prices the next candidates reuse.
    ordered = sorted(items, key=lambda c: c.cluster)
    for start in range(0, len(ordered), size):
        yield list(ordered[start : start + size])


def undominated(points: ArrayLike) -> np.ndarray:
    """Return whether each point is on the Pareto front, shape ``(n_points,)``.

    A point is dominated if another is at most as large in all objectives and smaller in one.

    Args:
        points: Objectives to minimize, shape ``(n_points, n_objectives)``.
    """
    values = np.asarray(points, float)
    # Quadratic in the number of points, yet negligible compared with evaluating them.
    beaten = [((values <= own).all(axis=1) & (values < own).any(axis=1)).any() for own in values]
    return ~np.array(beaten, bool)
