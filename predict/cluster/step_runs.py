"""Predicts many rows of a table of steps: operators of a chip are asked for together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace

import numpy as np

from ...common.errors import OpcastError
from ...features.devices.catalogue import find_device
from ...features.operators.op import Op
from ...models.operators import OpModel
from ...models.steps.context import StepContext, context_of
from ...models.steps.effects import EffectTable
from ...models.steps.model import StepModel
from ...simulate.clusters.topology import Cluster
from ...simulate.step.compose import MOST_TASKS, StepTime, operator_counts, step_time
from ...simulate.step.costs import Costs, StepEffects
from ...simulate.step.fitting import memory_of
from ...simulate.step.memory import StageMemory
from ..operator.step_operators import OperatorLatency
from .peaks import as_multiplied
from .step import StepPrediction, StepPredictor
from .step_table import FAULTS, StepRow, reason_of


class StepRuns:
    """Simulates rows of a table of steps.

    Args:
        rows: The rows.
        model: Model of library operators; ``None`` for rooflines.
        show: Told of progress: rows done and rows in all.
    """

    def __init__(
        self,
        rows: Sequence[StepRow],
        model: OpModel | None,
        show: Callable[[int, int], None] = lambda done, of: None,
    ) -> None:
        self.rows = [
            replace(row, workload=as_multiplied(row.workload, find_device(row.cluster.device)))
            for row in rows
        ]
        self.show, self.operators = show, model
        #: Tasks of a pipeline that are placed one by one.
        self.most_tasks = MOST_TASKS
        self.contexts: list[StepContext] = [row_context(row) for row in self.rows]
        self._latency: dict[str, OperatorLatency] = {}
        self._ops: dict[str, dict[Op, np.ndarray]] = {}
        self._clusters: dict[Cluster, StepPredictor] = {}
        self._logs: dict[tuple[StepRow, StepEffects], float] = {}
        self._prepare()

    def _prepare(self) -> None:
        """Ask for every operator of every chip at once."""
        calls: dict[str, dict[Op, None]] = {}
        for row in self.rows:
            own = calls.setdefault(row.cluster.device, {})
            last = row.plan.pp - 1
            # Operators of a layer are the same in every stage; only a mixed model has more kinds.
            stages = range(row.plan.pp) if row.workload.mixed else {0, last // 2, last}
            # A row that fails here fails in its step as well, where it is told.
            with suppress(OpcastError, *FAULTS):
                for stage in stages:
                    own |= dict.fromkeys(operator_counts(row.workload, row.plan, stage))
        for device, asked in calls.items():
            latency = OperatorLatency(find_device(device), self.operators)
            self._latency[device] = latency
            self._ops[device] = dict(zip(asked, latency(list(asked)), strict=True))

    def part(self, rows: Sequence[StepRow]) -> StepRuns:
        """Some of the rows, with the operators and collectives that are known by now."""
        part = copy(self)
        part.rows, part.contexts = list(rows), [row_context(row) for row in rows]
        return part

    def _on(self, cluster: Cluster) -> StepPredictor:
        """Predictor of steps on a cluster; its collectives are asked for once."""
        if cluster not in self._clusters:
            own = StepPredictor(cluster, None, latency=self._latency[cluster.device])
            own.priced.ops = self._ops[cluster.device]
            self._clusters[cluster] = own
        return self._clusters[cluster]

    def costs(self, row: StepRow, effects: StepEffects) -> Costs:
        """Costs of a row under effects."""
        return self._on(row.cluster).priced.with_effects(effects, row.cluster.box)

    def step(self, row: StepRow, effects: StepEffects) -> StepTime:
        """Simulate a row."""
        return step_time(row.workload, row.plan, self.costs(row, effects), self.most_tasks)

    def simulate(
        self, which: Sequence[int], table: EffectTable, shifts: Mapping[str, float]
    ) -> np.ndarray:
        """Logarithms of simulated seconds, as :data:`opcast.models.steps.fit.Simulate`."""
        return np.array(
            [self._log(self.rows[i], table.effects(self.contexts[i], shifts)) for i in which]
        )

    def _log(self, row: StepRow, effects: StepEffects) -> float:
        """Logarithm of a row's simulated seconds; effects that it does not feel count as none."""
        none, absent = StepEffects(), set[str]()
        if not row.workload.experts:
            absent.add("experts")
        if row.plan.pp == 1:
            absent.add("hop_s")
        if row.cluster.boxes == 1:
            absent.add("between")
        key = row, replace(effects, **{name: getattr(none, name) for name in absent})
        if key not in self._logs:
            self._logs[key] = float(np.log(self.step(*key).total * row.share))
        return self._logs[key]

    def predict(self, model: StepModel) -> list[StepPrediction | str]:
        """Predict every row as a user who types it gets it; where that fails, say why instead."""
        found: list[StepPrediction | str] = []
        for row in self.rows:
            try:
                own = self._on(row.cluster).run_by(
                    row.framework, compiled=not row.launched, source=row.source, learned=model
                )
                found.append(own.predict(row.workload, row.plan, remedy=False))
            except (OpcastError, *FAULTS) as error:
                found.append(reason_of(error))
            self.show(len(found), len(self.rows))
        return found


def fullest(row: StepRow) -> StageMemory:
    """Memory of the stage that needs most, by the plain count."""
    return max(memory_of(row.workload, row.plan), key=lambda stage: stage.total)


def row_context(row: StepRow) -> StepContext:
    """Context of a row: its framework, chip and whose cluster it is."""
    return context_of(
        row.workload,
        find_device(row.cluster.device),
        row.framework,
        row.source,
        launched=row.launched,
        boxes=row.cluster.boxes,
    )
