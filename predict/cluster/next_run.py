"""Which step of a cluster to measure next: the one that tells most beyond those measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...common.errors import OpcastError
from ...features.devices.catalogue import find_device
from ...models.steps.effects import Slopes, informative, slopes_at
from ...models.steps.memory import law_of
from ...models.steps.model import StepModel
from ...simulate.step.fitting import memory_of
from ..sweep.space import candidates
from .case_table import FAULTS
from .step_table import StepRow, StepRuns

#: Most models and clusters among the measured steps for which plans are tried, and plans tried of
#: each pair: an engineering choice, which takes seconds.
_MODELS, _PLANS = 4, 12
#: Classes of cost that a cluster has effects on, in words.
_TELLS = {
    "between": "the scale-out network",
    "launch": "launches from the host",
    "whole": "the cluster as a whole",
}


@dataclass(frozen=True)
class NextRun:
    """A step worth measuring.

    Attributes:
        row: The step.
        nats: Information that its time would give of the cluster's effects.
        tells: What it tells most about, in words.
    """

    row: StepRow
    nats: float
    tells: str

    def text(self) -> str:
        """One line for people."""
        work, plan = self.row.workload, self.row.plan
        return (
            f"measure next: {work.layers} layers of {work.d_model} on {self.row.cluster.size} × "
            f"{self.row.cluster.device} with {plan.text()}, batch {work.batch}: tells most about "
            f"{self.tells}"
        )


def next_run(model: StepModel, runs: StepRuns, measured: np.ndarray) -> NextRun | None:
    """Find the step that would tell most of the clusters of measured steps.

    Args:
        model: Before it was adapted to them.
        runs: The measured steps.
        measured: Logarithms of their seconds.

    Returns:
        The step; ``None`` if no other plan of the measured models fits their clusters.
    """
    done = {(row.workload, row.cluster, row.plan) for row in runs.rows}
    rows = [r for r in _others(model, runs) if (r.workload, r.cluster, r.plan) not in done]
    if not rows:
        return None
    more = StepRuns(rows, runs.operators)
    near = slopes_at(runs.simulate, model.table, len(runs.rows))
    far = slopes_at(more.simulate, model.table, len(rows))
    nats = informative(near, runs.contexts, measured, far, more.contexts)
    best = int(np.argmax(nats))
    return NextRun(rows[best], float(nats[best]), _tells(near, far, best))


def _tells(near: Slopes, far: Slopes, best: int) -> str:
    """Class of cost whose slope differs most from those of the measured steps."""
    more = {
        cost: float(far.slope[cost][best] - near.slope[cost].mean())
        for cost in _TELLS
        if cost != "whole"
    }
    cost = max(more, key=lambda name: more[name])
    return _TELLS[cost if more[cost] > 0.0 else "whole"]


def _others(model: StepModel, runs: StepRuns) -> Iterator[StepRow]:
    """Other plans of the measured models on the measured clusters that fit into memory."""
    works = {row.workload: row for row in runs.rows}
    clusters = {row.cluster: None for row in runs.rows}
    grid = _used(runs.rows)
    for row in list(works.values())[:_MODELS]:
        law = law_of(model.memory, row.framework)
        own = grid | {"recompute": [row.plan.recompute], "offload": [row.plan.offload]}
        for cluster in list(clusters)[:_MODELS]:
            capacity = find_device(cluster.device).memory_bytes or np.inf
            try:
                plans = candidates(row.workload, {"": cluster}, [row.workload.batch], own)
            except (OpcastError, *FAULTS):
                continue
            fitting = [
                c.plan
                for c in plans
                if max(law.total(m) for m in memory_of(row.workload, c.plan)) <= capacity
            ]
            for plan in fitting[:: max(1, len(fitting) // _PLANS)]:
                yield replace(row, cluster=cluster, plan=plan, measured_s=float("nan"))


def _used(rows: Sequence[StepRow]) -> dict[str, list[str]]:
    """Axes of plans that the measured steps use: a framework may know no others."""
    plans = [row.plan for row in rows]
    grid = {"schedule": ["1f1b"], "data": ["fsdp"] if any(p.fsdp > 1 for p in plans) else ["dp"]}
    if any(p.zero for p in plans):
        grid["data"].append("zero1")
    for axis in ("tp", "pp", "cp", "ep"):
        if all(getattr(plan, axis) == 1 for plan in plans):
            grid[axis] = ["1"]
    return grid
