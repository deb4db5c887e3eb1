"""Tables of training steps: the step that each row means, and predictions of many of them.

A row says what was trained, how it was spread and on what; where its source measured the step, how
long that took. The columns are those of published tables of training runs (docs/steps.md).
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
from ...simulate.step.workload import DTYPES, PRODUCTS, Workload
from ..operator.step_operators import OperatorLatency
from .case_table import FAULTS, Cells, case_data, noted_share, noted_sizes, reason_of
from .peaks import arithmetic_seconds, as_multiplied
from .recipes import as_run, interleaved
from .step import StepPrediction, StepPredictor


@dataclass(frozen=True)
class StepRow:
    """A row, as the simulator takes it.

    Attributes:
        id: Of the row.
        source: Who measured it, without a revision; empty if the row does not say.
        framework: Lower case, without remarks in brackets; empty if the row does not say.
        workload: What is trained; of the batch that whole micro-batches make up.
        plan: Resolved.
        cluster: Devices and links.
        share: Steps of the row over steps of the workload: below 1 where the last micro-batch of
            the row is smaller than the others, above where a block of steps was measured.
        launched: Whether the host launches every kernel in every step.
        measured_s: Seconds of the row's steps; NaN if the row does not say.
        memory_bytes: Peak of a device; NaN if the row does not say.
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


def step_row(row: Mapping[str, object]) -> StepRow:
    """A row of a table of steps.

    Raises:
        OpcastError: The row says something that cannot be expressed; the message says what.
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
    )


def _block(cell: Cells, batch: int, plan: Plan) -> float:
    """Training steps that a measured block is worth; 1 where the row names none.

    A forward pass takes a third of a step's products, a quarter where all are computed again.
    """
    found = re.search(case_data()["block"], cell.text("remark"))
    if not found:
        return 1.0
    passes = 4.0 if plan.recompute == "full" else 3.0
    return (int(found[1]) + int(found[2]) / passes) / batch


def _cluster(cell: Cells) -> Cluster:
    device = find_typed(cell.text("device")).name
    count = cell.count("partitions", 0) or cell.count("n_devices", 1)
    per_node = cell.count("devices_per_node", 0)
    network = cell.number("network") * 1e9
    if cell.text("network_scope") == "node" and per_node:
        network /= per_node
    return joined(device, count, per_node, network if network == network else 0.0)


def _plan(cell: Cells, devices: int) -> Plan:
    fsdp, zero = cell.count("fsdp", 1), cell.count("zero", 0)
    dp, tp = cell.count("dp", 1), cell.count("tp", 1)
    if fsdp > 1 and zero in (1, 2):
        # Ranks that shard gradients or the optimiser alone are replicas here.
        dp, fsdp = dp * fsdp, 1
    policy = cell.text("recompute") or "none"
    reduce = format_name(cell.text("reduce_dtype"))
    ep = cell.count("ep", 1)
    pp, cp = cell.count("pp", 1), cell.count("cp", 1)
    if ep > 1 and dp * fsdp * tp * pp * cp * ep == devices:
        # MaxText's expert axis has ranks of its own, which hold parts of the batch, too.
        dp *= ep
    return Plan(
        dp=dp,
        fsdp=fsdp,
        tp=tp,
        sp=cell.text("framework").lower() not in FRAMEWORKS["whole_sequences"]
        and "no sequence parallelism" not in cell.text("notes"),
        pp=pp,
        # Experts are spread over data-parallel ranks first; what is left spans tensor ranks,
        # which hold whole experts then.
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
    # Recipes of one type, such as fp8_full, differ in what they leave out.
    dtype = next((d for d in PRODUCTS if dtype.startswith(f"{d}_")), dtype)
    if dtype not in PRODUCTS:
        raise PlanError(f"dtype {dtype!r} is not known", hint=", ".join(PRODUCTS))
    plain = dtype if dtype in DTYPES and dtype != "fp8" else "bf16"
    note = cell.text("arch_note")
    # A size that a row lacks is refused as 0.
    sizes = {**dict.fromkeys(_SIZES, 0), **cell.sizes(), **noted_sizes(note)}
    if "window" in sizes:
        sizes["window_share"] = noted_share("window_share", note) or 1.0
    return Workload(
        **{
            **sizes,
            "batch": batch,
            "dtype": plain,
            "products": "" if plain == dtype else dtype,
            "norm": cell.text("norm") or "rmsnorm",
            "rope": cell.text("position") == "rope",
            "positions": cell.text("position") == "learned",
            "attention": cell.meant("attention"),
        }
    )


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
            # A row that fails here fails in its step as well, where it is told.
            with suppress(OpcastError, *FAULTS):
                for stage in dict.fromkeys(step_stages(row.workload, row.plan)):
                    own |= dict.fromkeys(stage.counts())
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
        """Logarithms of simulated seconds, as :data:`opcast.models.steps.effects.Simulate`."""
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


def floor_seconds(row: StepRow) -> float:
    """Least seconds of a row's steps: its matrix products at the dense peak."""
    spec = find_device(row.cluster.device)
    return arithmetic_seconds(as_multiplied(row.workload, spec), row.plan, spec) * row.share


def fullest(row: StepRow) -> StageMemory:
    """Memory of the stage that needs most, by the plain count."""
    spec = find_device(row.cluster.device)
    workload = as_multiplied(row.workload, spec)
    stages = memory_of(workload, row.plan, weight_copies(workload, spec))
    return max(stages, key=lambda stage: stage.total)


def row_context(row: StepRow) -> StepContext:
    """Context of a row: its framework, chip and whose cluster it is."""
    return device_context(
        find_device(row.cluster.device),
        row.workload.product_bits,
        row.framework,
        row.source,
        launched=row.launched,
        boxes=row.cluster.boxes,
    )
