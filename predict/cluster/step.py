"""Public entry for clusters: predict a training step of a workload under a parallel plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...common.interval import Interval, step_fields
from ...features.devices.device import DeviceSpec
from ...models.operators import OpModel
from ...models.steps.context import COMPILED, context_of
from ...models.steps.model import UNCALIBRATED, shipped_steps
from ...simulate.clusters.topology import Cluster
from ...simulate.step.calls import Estimate, OpCall, OpLatency
from ...simulate.step.compose import StepTime, operator_counts, step_time
from ...simulate.step.costs import Costs
from ...simulate.step.fitting import Fit, find_fit, memory_of
from ...simulate.step.jitter import StepSpread, sample_steps
from ...simulate.step.plan import Group, Plan
from ...simulate.step.workload import HLO_DTYPE, Workload, resolved
from ..devices import cluster_device
from ..operator.step_operators import SUSTAINED, SUSTAINED_RANGE, OperatorLatency
from .network import ClusterNetwork
from .spread import COMPOSITION_ERROR, RHO, combined_spread

#: Streaming multiprocessors that a collective occupies beside kernels: one for each NCCL channel.
#: Engineering estimate; not fitted (12 % of an H100's 132).
COLLECTIVE_CORES = 16


@dataclass(frozen=True)
class StepPrediction:
    """Predicted time of a step on a cluster, its parts, and whether the plan fits into memory.

    Attributes:
        workload: Model that is trained.
        plan: Parallel plan with its number of micro-batches resolved.
        cluster: Name of the cluster.
        device: Name of its device.
        step: Times in seconds.
        interval: ``step.total`` with its 90 % interval.
        fit: Memory use, and whether it fits.
        peak_flops: Matrix peak of one device for the workload's dtype.
        operators: Seconds of operators of the busiest stage, by name.
        scopes: Share of the operators' time by scope of the estimate (``known``, ``unseen`` …).
        spread: Sampled steps with jitter and stragglers, if requested.
        framework: Framework whose measured steps were learned from; empty for none.
        known: What is known of such steps, one of :data:`opcast.models.steps.model.TIERS`.
    """

    workload: Workload
    plan: Plan
    cluster: str
    device: str
    step: StepTime
    interval: Interval
    fit: Fit
    peak_flops: float
    operators: dict[str, float]
    scopes: dict[str, float]
    spread: StepSpread | None = None
    framework: str = ""
    known: str = ""

    @property
    def flops_per_device(self) -> float:
        """Model FLOP/s of one device, without recomputation (Chowdhery et al., PaLM, app. B)."""
        return self.workload.model_flops() / self.step.total / self.plan.devices

    def to_dict(self) -> dict[str, object]:
        """Plain data, as ``opcast simulate --json`` prints it."""
        s = self.step
        data: dict[str, object] = {
            **step_fields(self.interval),
            "compute_us": s.compute * 1e6,
            "exposed_communication_us": s.exposed * 1e6,
            "bubble_us": s.bubble * 1e6,
            "host_us": s.host * 1e6,
            "communication_us": {k: v * 1e6 for k, v in s.communication.items()},
            "memory_bytes_per_device": self.fit.worst.total,
            "memory_bytes": self.fit.worst.to_dict(),
            "capacity_bytes": self.fit.capacity if np.isfinite(self.fit.capacity) else None,
            "fits": self.fit.fits,
            "change_to_fit": self.fit.change,
            "tflops_per_device": self.flops_per_device / 1e12,
            "mfu": self.flops_per_device / self.peak_flops,
            "tokens_per_s": self.workload.batch * self.workload.seq / s.total,
            "parameters": self.workload.parameters,
            "devices": self.plan.devices,
            "microbatches": self.plan.microbatches,
            "cluster": self.cluster,
            "device": self.device,
            "plan": self.plan.text(),
            "operators_us": {k: v * 1e6 for k, v in self.operators.items()},
            "scope_share": self.scopes,
            "notes": list(self.notes()),
        }
        if self.spread is not None:
            data["samples"] = self.spread.to_dict()
        return data

    def notes(self) -> list[str]:
        """Known limits of the prediction."""
        notes = [self.fit.reason()] if not self.fit.fits else []
        if self.known in ("architecture", "new"):
            notes.append(
                f"no measured step of {self.framework} was learned from: as an average one"
            )
        # More than half of the time: a note about a few small operators would only distract.
        unknown = sum(v for k, v in self.scopes.items() if k == "roofline")
        if unknown > 0.5:
            notes.append(f"no model knows operators of {self.device}: times are of its roofline")
        elif sum(v for k, v in self.scopes.items() if k == "unseen") > 0.5:
            notes.append(f"the model was not fitted to {self.device}: calibrate it with samples")
        return notes


class StepPredictor:
    """Predicts steps on one cluster; each distinct operator and collective is priced once.

    Args:
        cluster: The devices and their links.
        model: Model of library operators; ``None`` for rooflines.
        device: Description to use instead of the one that the cluster names.
        framework: Framework whose measured steps are learned from (``docs/steps.md``), with
            intervals from steps that were left out; empty for operators and collectives alone,
            at an estimated clock.
        compiled: Whether the step is compiled, or replayed as CUDA graphs.

    Raises:
        DeviceError: The cluster names no device, and none is given.
    """

    def __init__(
        self,
        cluster: Cluster,
        model: OpModel | None,
        device: DeviceSpec | None = None,
        framework: str = "",
        *,
        compiled: bool = False,
    ) -> None:
        self.cluster = cluster
        self.spec = device or cluster_device(cluster)
        self.framework, self.compiled = framework.lower(), compiled
        # Measured steps hold the clock under load.
        self.latency = OperatorLatency(self.spec, model, 1.0 if framework else SUSTAINED)
        self._priced = cluster_costs(cluster, self.spec, self.latency)
        self._costs = self._priced

    def predict(
        self,
        workload: Workload,
        plan: Plan,
        jitter: float = 0.0,
        speeds: Mapping[int, float] | None = None,
        draws: int = 1000,
        seed: int = 0,
        *,
        remedy: bool = True,
    ) -> StepPrediction:
        """Predict time and memory of a step.

        Args:
            workload: Model that is trained.
            plan: Parallel plan.
            jitter: Standard deviation of the logarithm of a task's time on one device.
            speeds: Relative speeds of devices by rank; 1 where omitted.
            draws: Number of samples, taken if ``jitter`` or ``speeds`` is given.
            seed: Random seed of the samples.
            remedy: Whether to search for the smallest change if the plan does not fit into memory.

        Raises:
            PlanError: The plan does not fit the model or the cluster.
        """
        plan = resolved(workload, plan, self.cluster.size)
        known = self._learn(workload) if self.framework else ""
        step = step_time(workload, plan, self._costs)
        counts = operator_counts(workload, plan, step.worst)
        # Already priced while the step was composed; nothing is predicted again.
        own = self._costs
        seconds = {c: float(own.ops[c][0]) * own.effects.of(c) * n for c, n in counts.items()}
        capacity = self.spec.memory_bytes
        # A device file may omit the capacity; everything then fits rather than nothing.
        fit = Fit(memory_of(workload, plan), capacity or np.inf)
        # The search composes many neighbouring plans; sweeps turn it off, since they try them
        # anyway.
        if remedy and not fit.fits:
            fit = find_fit(workload, plan, fit.capacity, self._seconds(workload))
        spread = None
        if jitter or speeds:
            spread = sample_steps(workload, plan, step, jitter, speeds, draws, seed)
        interval = self._interval(workload, plan, step, counts)
        if known:
            low, high = np.exp(shipped_steps().ends.get(known, UNCALIBRATED))
            interval = Interval(step.total, step.total * float(low), step.total * float(high))
        return StepPrediction(
            workload=workload,
            plan=plan,
            cluster=self.cluster.name,
            device=self.spec.name,
            step=step,
            interval=interval,
            fit=fit,
            peak_flops=self.spec.matrix_peak(HLO_DTYPE[workload.dtype]),
            operators=_by_name(seconds),
            scopes=self._scopes(seconds),
            spread=spread,
            framework=self.framework,
            known=known,
        )

    def _learn(self, workload: Workload) -> str:
        """Take the effects of measured steps; gives what is known of steps like these."""
        model = shipped_steps()
        launched = not self.compiled and not self.framework.startswith(COMPILED)
        context = context_of(workload, self.spec, self.framework, launched=launched)
        effects = model.table.whole_effects(context)
        self._costs = self._priced.with_effects(effects, self.cluster.box)
        return model.tier(context)

    def _scopes(self, seconds: dict[OpCall, float]) -> dict[str, float]:
        """Share of the operators' time by scope."""
        total, shares = sum(seconds.values()) or 1.0, dict[str, float]()
        for call, value in seconds.items():
            scope = self.latency.scopes[call]
            shares[scope] = shares.get(scope, 0.0) + value / total
        return shares

    def _seconds(self, workload: Workload) -> Callable[[Plan], float]:
        return lambda plan: step_time(workload, plan, self._costs).total

    def _interval(
        self, workload: Workload, plan: Plan, step: StepTime, counts: dict[OpCall, float]
    ) -> Interval:
        """90 % interval from four independent errors: operators, clock, collectives, composition.

        Errors of operators correlate by ``RHO``; collectives err all alike, and so does the
        clock under load. The step is recomposed at both ends of each, so that errors of hidden
        work do not widen the interval.
        """
        costs, total = self._costs, step.total
        times = np.array([costs.ops[c] * n for c, n in counts.items()])
        ends = np.stack([times[:, 0] - times[:, 1], times[:, 2] - times[:, 0]], axis=1)
        down, up = combined_spread(ends, RHO)
        compute = float(times[:, 0].sum()) or 1.0
        own = COMPOSITION_ERROR * total
        # The lower end stays positive however wide the intervals are; 0.95 is a guard, not a fit.
        ops = [1.0 - min(down / compute, 0.95), 1.0 + up / compute]
        # Only arithmetic slows with the clock; memory-bound operators run at the memory's own
        # clock.
        slowed = sum(t[0] for t, c in zip(times, counts, strict=True) if self.latency.slowed.get(c))
        widths = []
        for side in (0, 1):
            # Both ends of the sustained clock, relative to the one that the estimate already
            # contains.
            clock = 1.0 + float(slowed) / compute * (SUSTAINED / SUSTAINED_RANGE[side] - 1.0)
            shifts = [
                step_time(workload, plan, _scaled(costs, ops[side], None)).total - total,
                step_time(workload, plan, _scaled(costs, clock, None)).total - total,
                step_time(workload, plan, _scaled(costs, 1.0, side)).total - total,
                own,
            ]
            # Independent errors add in quadrature.
            widths.append(float(np.sqrt(np.square(shifts).sum())))
        return Interval.around(total, *widths)


def _by_name(seconds: dict[OpCall, float]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for call, value in seconds.items():
        totals[call.name] = totals.get(call.name, 0.0) + value
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def _scaled(costs: Costs, factor: float, side: int | None) -> Costs:
    """Costs with operators scaled by ``factor``, and collectives at one end of their interval.

    ``side`` is 0 for the lower end, 1 for the upper, and ``None`` for the estimates themselves.
    """

    def latency(calls: Sequence[OpCall]) -> np.ndarray:
        costs.prepare(calls)
        return np.array([costs.ops[c] for c in calls]) * factor

    def network(kind: str, size: float, group: Group) -> Estimate:
        estimate = costs.estimate(kind, size, group)
        return estimate if side is None else estimate._replace(seconds=estimate[1 + side])

    return Costs(latency, network, costs.host_bandwidth, costs.contention, costs.effects, costs.box)


def cluster_costs(cluster: Cluster, spec: DeviceSpec, latency: OpLatency) -> Costs:
    """Costs of operators on a device, of collectives between them, and of its host."""
    # PCI Express 4.0 x16 in one direction: 16 GT/s x 16 lanes / 8 bits, 31.5 GB/s after 128b/130b
    # encoding.
    host = spec.host_bandwidth or 32e9
    return Costs(latency, ClusterNetwork(cluster), host, _contention(spec))


def _contention(spec: DeviceSpec) -> float:
    """Share of the compute cores that a running collective takes away from kernels.

    Collectives of a GPU are kernels themselves; a TPU's interconnect has DMA engines of its own.
    """
    if spec.platform != "gpu" or not spec.core_count:
        return 0.0
    # Guard for chips with few cores; engineering estimate.
    return min(0.5, COLLECTIVE_CORES / spec.core_count)


def breakdown(prediction: StepPrediction) -> list[tuple[str, float]]:
    """Split a step into computation, exposed communication and bubble, in seconds."""
    s = prediction.step
    parts = [("computation", s.compute), ("exposed communication", s.exposed), ("bubble", s.bubble)]
    return [*parts, ("host", s.host)] if s.host else parts
