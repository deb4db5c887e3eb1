"""Predicts many rows of a table of steps: operators of a chip are asked for together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from math import exp, log2

import numpy as np

from ...common.errors import OpcastError
from ...features.devices.catalogue import find_device
from ...models.operators import OpModel
from ...models.steps.context import StepContext, context_of
from ...models.steps.effects import EffectTable
from ...models.steps.memory import law_of
from ...models.steps.model import StepModel
from ...models.steps.residual import stacked
from ...simulate.clusters.topology import Cluster
from ...simulate.step.calls import OpCall
from ...simulate.step.compose import MOST_TASKS, StepTime, operator_counts, step_time
from ...simulate.step.costs import Costs, StepEffects
from ...simulate.step.fitting import memory_of
from ...simulate.step.layer_ops import micro_tokens
from ...simulate.step.memory import StageMemory
from ..operator.step_operators import OperatorLatency
from .peaks import arithmetic_seconds, as_multiplied
from .step import cluster_costs, step_interval
from .step_table import FAULTS, StepRow, reason_of


@dataclass(frozen=True)
class RowPrediction:
    """A row's step.

    Attributes:
        seconds: Estimate.
        lo: Lower end of the 90 % interval, seconds.
        hi: Upper end.
        step: Its parts, before the factor on the whole step.
        factor: ``seconds`` over the parts' total.
        memory_bytes: Peak of the fullest device.
        known: What is known of the step, as :data:`opcast.models.steps.model.TIERS`.
    """

    seconds: float
    lo: float
    hi: float
    step: StepTime
    factor: float
    memory_bytes: float
    known: str


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
        self._ops: dict[str, dict[OpCall, np.ndarray]] = {}
        self._costs: dict[Cluster, Costs] = {}
        self._prepare()

    def _prepare(self) -> None:
        """Ask for every operator of every chip at once."""
        calls: dict[str, dict[OpCall, None]] = {}
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

    def costs(self, row: StepRow, effects: StepEffects) -> Costs:
        """Costs of a row under effects; collectives of a cluster are asked for once."""
        cluster = row.cluster
        if cluster not in self._costs:
            known = cluster_costs(
                cluster, find_device(cluster.device), self._latency[cluster.device]
            )
            known.ops = self._ops[cluster.device]
            self._costs[cluster] = known
        return self._costs[cluster].with_effects(effects, cluster.box)

    def step(self, row: StepRow, effects: StepEffects) -> StepTime:
        """Simulate a row."""
        return step_time(row.workload, row.plan, self.costs(row, effects), self.most_tasks)

    def simulate(
        self, which: Sequence[int], table: EffectTable, shifts: Mapping[str, float]
    ) -> np.ndarray:
        """Logarithms of simulated seconds, as :data:`opcast.models.steps.fit.Simulate`."""
        logs = np.zeros(len(which))
        for place, index in enumerate(which):
            row = self.rows[index]
            effects = table.effects(self.contexts[index], shifts)
            logs[place] = np.log(self.step(row, effects).total * row.share)
        return logs

    def _interval(self, model: StepModel, index: int, step: StepTime) -> tuple[float, float]:
        row, context = self.rows[index], self.contexts[index]
        return step_interval(
            model,
            context,
            row.workload,
            row.plan,
            self.costs(row, model.table.effects(context)),
            step,
            self._latency[row.cluster.device],
            self.most_tasks,
        )

    def features(self, index: int, step: StepTime) -> list[float]:
        """Features for residuals, of plan, sizes and the simulated parts."""
        row = self.rows[index]
        w, p = row.workload, row.plan
        sizes = (p.tp, p.pp, p.dp * p.fsdp, p.cp, p.ep, p.virtual, row.cluster.size)
        micro = (p.microbatches, micro_tokens(w, p), w.layers / p.pp, w.d_model, w.seq)
        parts = (step.exposed, step.host, step.bubble)
        return [
            *(log2(value) for value in (*sizes, *micro)),
            *(part / step.total for part in parts),
            log2(step.total / p.microbatches),
            float(p.stage),
            float(p.recompute == "full"),
            float(w.experts > 0),
        ]

    def predict(self, model: StepModel) -> list[RowPrediction | str]:
        """Predict every row; where that fails, say why instead."""
        steps: dict[int, StepTime] = {}
        intervals: dict[int, tuple[float, float]] = {}
        memory: dict[int, float] = {}
        reasons: dict[int, str] = {}
        for i, (row, context) in enumerate(zip(self.rows, self.contexts, strict=True)):
            try:
                steps[i] = self.step(row, model.table.effects(context))
                intervals[i] = self._interval(model, i, steps[i])
                memory[i] = law_of(model.memory, row.framework).total(fullest(row))
            except (OpcastError, *FAULTS) as error:
                steps.pop(i, None)
                reasons[i] = reason_of(error)
            self.show(i + 1, len(self.rows))
        found: list[RowPrediction | str] = [reasons.get(i, "") for i in range(len(self.rows))]
        if not steps:
            return found
        features = stacked([self.features(i, step) for i, step in steps.items()])
        answer = model.answer([self.contexts[i] for i in steps], features)
        for place, (i, step) in enumerate(steps.items()):
            factor = float(answer.factor[place]) * self.rows[i].share
            seconds = step.total * factor
            low, high = intervals[i]
            row = self.rows[i]
            device = find_device(row.cluster.device)
            floor = arithmetic_seconds(row.workload, row.plan, device) * row.share
            found[i] = RowPrediction(
                max(seconds, floor),
                max(seconds * exp(low), floor),
                max(seconds * exp(high), floor),
                step,
                factor,
                memory[i],
                answer.tier[place],
            )
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
    )
