"""Reader of tables of training steps, and predictions of their rows.

A row specifies the model, the plan and the devices, and holds the measured time if its source
measured it. Columns are those of published tables of training runs (docs/steps.md).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from math import ceil, gcd, isfinite

import numpy as np

from ...common.errors import OpcastError, PlanError
from ...features.cost.formats import format_name
from ...features.devices.catalogue import find_device, find_typed
from ...features.operators.op import Op
from ...models.operators import OpModel
from ...models.steps.effects import (
    FRAMEWORKS,
    EffectTable,
    StepContext,
    device_context,
    is_compiled,
)
from ...models.steps.memory import weight_copies
from ...models.steps.model import StepModel
from ...simulate.clusters.catalogue import joined
from ...simulate.clusters.topology import Cluster
from ...simulate.step.blocks import step_stages
from ...simulate.step.compose import MOST_TASKS, StepTime, step_time
from ...simulate.step.costs import Costs, StepEffects
from ...simulate.step.fitting import memory_of
from ...simulate.step.memory import StageMemory
from ...simulate.step.plan import Plan, resolved
from ...simulate.step.workload import PRODUCTS, Workload, trained_in
from ..operator.step_operators import OperatorLatency
from .case_table import FAULTS, Cells, case_data, noted_share, noted_sizes, reason_of
from .peaks import arithmetic_seconds, as_multiplied
from .recipes import as_run, interleaved
from .step import StepPrediction, StepPredictor


@dataclass(frozen=True)
class StepRow:
    """A row as a simulation input.

    Attributes:
        id: Identifier of the row.
        source: Who measured it, without a revision; empty if not given.
        framework: Lower case, without remarks in brackets; empty if not given.
        workload: The model, with the batch rounded up to whole micro-batches.
        plan: The resolved plan.
        cluster: Devices and links.
        share: Steps of the row per step of the workload: below 1 if the last micro-batch of the row
            is smaller than the others, above 1 if a block of steps was measured.
        launched: Whether the host launches every kernel in every step.
        measured_s: Measured seconds of the row's steps; NaN if not given.
        memory_bytes: Measured peak memory of a device; NaN if not given.
        split: ``test`` if training does not learn from it; empty if not given.
    """

    id: str
    source: str
    framework: str
    workload: Workload
    plan: Plan
    cluster: Cluster
    share: float
    launched: bool
    measured_s: float
    memory_bytes: float
    split: str


def step_row(row: Mapping[str, object]) -> StepRow:
    """Convert a row of a table of steps.

    Raises:
        OpcastError: The row cannot be represented; the message gives the reason.
    """
    cell = Cells(row)
    cluster = _cluster(cell)
    spec = find_device(cluster.device)
    framework = cell.text("framework").lower().split(" (")[0]
    plan = _plan(cell, cluster.size)
    micro, rounds = cell.count("micro_batch", 0), cell.count("grad_accum", 0)
    batch = cell.count("global_batch", max(1, micro) * max(1, rounds) * plan.batch_ranks)
    micro = micro or max(1, batch // plan.batch_ranks)
    rounds = rounds or ceil(batch / (micro * plan.batch_ranks))
    whole = micro * rounds * plan.batch_ranks
    workload = _workload(cell, whole)
    plan = as_run(workload, plan.changed(microbatches=rounds), framework)
    if not cell.text("virtual"):
        plan = interleaved(plan, workload, cluster.size, framework)
    elif plan.pp > 1 and cell.count("virtual", 1) > 1 and rounds % plan.pp == 0:
        plan = plan.changed(schedule="interleaved", virtual=cell.count("virtual", 1))
    overlap = cell.text("overlap").lower()
    seconds = cell.number("step_s")
    if not isfinite(seconds) and (rate := cell.number("samples_per_s")):
        seconds = batch / rate
    share = batch / whole
    if not isfinite(seconds):
        seconds, share = cell.number("block_s"), share * _block(cell, batch, plan)
    return StepRow(
        id=cell.text("id"),
        source=cell.text("source").split("@")[0],
        framework=framework,
        workload=workload,
        plan=resolved(workload, plan, cluster.size),
        cluster=cluster,
        share=share,
        launched=not (
            cell.flag("compile", False)
            or "cuda graph" in overlap
            or spec.platform != "gpu"
            or is_compiled(framework)
        ),
        measured_s=seconds,
        memory_bytes=cell.number("memory_gib") * 2.0**30,
        split=cell.text("split"),
    )


def _block(cell: Cells, batch: int, plan: Plan) -> float:
    """Return the training steps that a measured block is equivalent to; 1 without a block.

    A forward pass is a third of a step's products, a quarter with full recomputation.
    """
    found = re.search(case_data()["block"], cell.text("remark"))
    if not found:
        return 1.0
    passes = 4.0 if plan.recompute == "full" else 3.0
    return (int(found[1]) + int(found[2]) / passes) / batch


def _cluster(cell: Cells) -> Cluster:
    device = find_typed(cell.text("device")).name
    count = cell.count("partitions", 0) or cell.count("n_devices", 1, least=1)
    per_node = cell.count("devices_per_node", 0)
    network = cell.number("network") * 1e9
    if cell.text("network_scope") == "node" and per_node:
        network /= per_node
    return joined(device, count, per_node, network if network == network else 0.0)


def _plan(cell: Cells, devices: int) -> Plan:
    fsdp, zero = cell.count("fsdp", 1), cell.count("zero", 0)
    tp, pp, cp = (cell.count(name, 1) for name in ("tp", "pp", "cp"))
    dp = cell.count("dp", max(1, devices // (fsdp * tp * pp * cp)))
    if fsdp > 1 and zero in (1, 2):
        # Ranks that shard only gradients or the optimizer are replicas here.
        dp, fsdp = dp * fsdp, 1
    policy = cell.text("recompute") or "none"
    reduce = format_name(cell.text("reduce_dtype"))
    ep = cell.count("ep", 1)
    if ep > 1 and dp * fsdp * tp * pp * cp * ep == devices:
        # MaxText's expert axis has its own ranks, which also split the batch.
        dp *= ep
    return Plan(
        dp=dp,
        fsdp=fsdp,
        tp=tp,
        sp=cell.text("framework").lower() not in FRAMEWORKS["whole_sequences"]
        and "no sequence parallelism" not in cell.text("notes"),
        pp=pp,
        # Experts are spread over data-parallel ranks first; the rest spans tensor-parallel ranks,
        # which then hold whole experts.
        ep=gcd(ep, dp * fsdp),
        cp=cp,
        zero=0 if fsdp > 1 else zero,
        recompute="full" if policy == "offload" else policy,
        offload="activations" if policy == "offload" else "none",
        reduce=reduce,
    )


#: Sizes of a model that have no default.
_SIZES = ("layers", "d_model", "heads", "kv_heads", "d_ff", "vocab", "seq")


def _workload(cell: Cells, batch: int) -> Workload:
    dtype = format_name(re.sub(case_data()["undecided"], "", cell.text("dtype")) or "bf16")
    # Recipes of one format, such as fp8_full, differ in the layers that they exclude.
    dtype = next((d for d in PRODUCTS if dtype.startswith(f"{d}_")), dtype)
    if dtype not in PRODUCTS:
        raise PlanError(f"dtype {dtype!r} is not known", hint=", ".join(PRODUCTS))
    note = cell.text("arch_note")
    # A missing size becomes 0, which is refused.
    sizes = {**dict.fromkeys(_SIZES, 0), **cell.sizes(), **noted_sizes(note)}
    if "window" in sizes:
        sizes["window_share"] = noted_share("window_share", note) or 1.0
    return Workload(
        **{
            **sizes,
            "batch": batch,
            **trained_in(dtype),
            "norm": cell.text("norm") or "rmsnorm",
            "rope": cell.text("position") == "rope",
            "positions": cell.text("position") == "learned",
            "attention": cell.meant("attention"),
            "lora_targets": cell.text("lora_targets") or Workload.lora_targets,
        }
    )


class StepRuns:
    """Simulates rows of a table of steps.

    Args:
        rows: The rows.
        model: Latency model of library operators; ``None`` for rooflines.
        show: Progress callback: rows done, rows in total.
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
        #: Maximum number of pipeline tasks that are scheduled one by one.
        self.most_tasks = MOST_TASKS
        self.contexts: list[StepContext] = [row_context(row) for row in self.rows]
        self._latency: dict[str, OperatorLatency] = {}
        self._ops: dict[str, dict[Op, np.ndarray]] = {}
        self._clusters: dict[Cluster, StepPredictor] = {}
        self._logs: dict[tuple[StepRow, StepEffects], float] = {}
        self._prepare()

    def _prepare(self) -> None:
        """Price all operators of each chip in one batch."""
        calls: dict[str, dict[Op, None]] = {}
        for row in self.rows:
            own = calls.setdefault(row.cluster.device, {})
            # A row that fails here fails again in its own step, where the error is reported.
            with suppress(OpcastError, *FAULTS):
                for stage in dict.fromkeys(step_stages(row.workload, row.plan)):
                    own |= dict.fromkeys(stage.counts())
        for device, asked in calls.items():
            latency = OperatorLatency(find_device(device), self.operators)
            self._latency[device] = latency
            self._ops[device] = dict(zip(asked, latency(list(asked)), strict=True))

    def part(self, rows: Sequence[StepRow]) -> StepRuns:
        """Return some of the rows, sharing the operators and collectives priced so far."""
        part = copy(self)
        part.rows, part.contexts = list(rows), [row_context(row) for row in rows]
        return part

    def _on(self, cluster: Cluster) -> StepPredictor:
        """Return the predictor of steps on a cluster; its collectives are priced once."""
        if cluster not in self._clusters:
            own = StepPredictor(cluster, None, latency=self._latency[cluster.device])
            own.priced.ops = self._ops[cluster.device]
            self._clusters[cluster] = own
        return self._clusters[cluster]

    def costs(self, row: StepRow, effects: StepEffects) -> Costs:
        """Return the costs of a row with effects applied."""
        return self._on(row.cluster).priced.with_effects(effects, row.cluster.box)

    def step(self, row: StepRow, effects: StepEffects) -> StepTime:
        """Simulate a row."""
        return step_time(row.workload, row.plan, self.costs(row, effects), self.most_tasks)

    def simulate(
        self, which: Sequence[int], table: EffectTable, shifts: Mapping[str, float]
    ) -> np.ndarray:
        """Return logs of simulated seconds; see :data:`opcast.models.steps.effects.Simulate`."""
        return np.array(
            [self._log(self.rows[i], table.effects(self.contexts[i], shifts)) for i in which]
        )

    def _log(self, row: StepRow, effects: StepEffects) -> float:
        """Return the logarithm of a row's simulated seconds, cached by the effects that matter."""
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
        """Predict every row as users would get it; rows that fail give the reason instead."""
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


def floor_seconds(row: StepRow) -> float:
    """Return the minimum seconds of a row's steps: its matrix products at the dense peak."""
    spec = find_device(row.cluster.device)
    return arithmetic_seconds(as_multiplied(row.workload, spec), row.plan, spec) * row.share


def fullest(row: StepRow) -> StageMemory:
    """Return the memory of the stage that needs most, without learned corrections."""
    spec = find_device(row.cluster.device)
    workload = as_multiplied(row.workload, spec)
    stages = memory_of(workload, row.plan, weight_copies(workload, spec))
    return max(stages, key=lambda stage: stage.total)


def row_context(row: StepRow) -> StepContext:
    """Return the context of a row: framework, chip and owner of the cluster."""
    return device_context(
        find_device(row.cluster.device),
        row.workload.product_bits,
        row.framework,
        row.source,
        launched=row.launched,
        boxes=row.cluster.boxes,
    )
