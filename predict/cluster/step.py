"""Prediction of a training step of a workload under a parallel plan on a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...common.errors import PlanError
from ...common.interval import Interval, step_fields
from ...common.units import likely
from ...features.cost.formats import FORMATS
from ...features.devices.device import DeviceSpec
from ...features.operators.op import Op
from ...models.operators import OpModel
from ...models.power.caps import fed, under_cap
from ...models.power.energy import cost_fields, energy_fields
from ...models.power.law import board_law
from ...models.steps.effects import OWN, StepContext, device_context, is_compiled
from ...models.steps.memory import interval_of, law_of, weight_copies
from ...models.steps.model import StepModel
from ...simulate.clusters.catalogue import find_cluster
from ...simulate.clusters.topology import Cluster
from ...simulate.step.compose import StepSpread, StepTime, sample_steps, step_time
from ...simulate.step.costs import Costs
from ...simulate.step.fitting import Fit, find_fit, memory_of
from ...simulate.step.memory import StageMemory, box_host
from ...simulate.step.plan import Plan, resolved
from ...simulate.step.traffic import sharding_note
from ...simulate.step.workload import Workload
from ..devices import cluster_device, generation_note, resolve_device
from ..operator.step_operators import OperatorLatency
from .energy import step_energy
from .network import cluster_costs, host_of
from .peaks import (
    EXCHANGE_SHARE,
    arithmetic_seconds,
    as_multiplied,
    best_note,
    best_seconds,
    exchange_wait,
    least_seconds,
    widened_note,
)
from .recipes import as_run
from .spread import step_interval
from .waterfall import Term, Waterfall, by_name

if TYPE_CHECKING:
    from .training_run import TrainingRun


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
        needed: Memory of the fullest device with its 90 % interval.
        peak_flops: Matrix peak of one device for the format of the layers' products.
        peak_format: That format; a wider one if the device has no rate for it.
        operators: Seconds of operators of the busiest stage, by name.
        scopes: Share of the operators' time by scope of the estimate (``known``, ``unseen`` …).
        spread: Sampled steps with jitter, if requested.
        framework: Framework that runs the step; empty for an average framework.
        known: How closely measured steps resemble this one: one of
            :data:`opcast.models.steps.model.TIERS`.
        terms: Terms of the step, if requested.
        whole: Learned effects on the whole step: level and value, and the factor.
        joules: Energy of all devices with its 90 % interval; ``None`` if the device's power limit
            is unknown.
        price: Dollars per device hour, if given.
        described: Notes on the device and the step model.
        run: A whole training run, if requested.
    """

    workload: Workload
    plan: Plan
    cluster: str
    device: str
    step: StepTime
    interval: Interval
    fit: Fit
    needed: Interval
    peak_flops: float
    peak_format: str
    operators: dict[str, float]
    scopes: dict[str, float]
    spread: StepSpread | None = None
    framework: str = ""
    known: str = ""
    terms: tuple[Term, ...] = ()
    whole: tuple[tuple[str, float], ...] = ()
    joules: Interval | None = None
    price: float | None = None
    described: tuple[str, ...] = ()
    run: TrainingRun | None = None

    @property
    def flops_per_device(self) -> float:
        """Model FLOP/s of one device, without recomputation (Chowdhery et al., PaLM, app. B)."""
        return self.workload.model_flops() / self.step.total / self.plan.devices

    @property
    def may_fit(self) -> bool:
        """Return whether the plan does not fit by the estimate, but fits within its error."""
        return not self.fit.fits and self.fit.host_fits and self.needed.lo <= self.fit.capacity

    def to_dict(self) -> dict[str, object]:
        """Return JSON data, as ``opcast simulate --json`` prints it."""
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
            "host_memory_bytes_per_box": self.fit.offloaded,
            "host_capacity_bytes_per_box": self.fit.host.capacity,
            "fits": self.fit.fits,
            "change_to_fit": self.fit.change or "",
            "tflops_per_device": self.flops_per_device / 1e12,
            "mfu": self.flops_per_device / self.peak_flops,
            "mfu_format": self.peak_format,
            "tokens_per_s": self.workload.batch * self.workload.seq / s.total,
            **energy_fields(self.joules),
            **cost_fields(self.price, self.interval, self.plan.devices),
            "parameters": self.workload.parameters,
            "devices": self.plan.devices,
            "microbatches": self.plan.microbatches,
            "cluster": self.cluster,
            "device": self.device,
            "plan": self.plan.text(),
            "framework": self.framework,
            "known": self.known,
            "operators_us": {k: v * 1e6 for k, v in self.operators.items()},
            "scope_share": self.scopes,
            "notes": list(self.notes()),
        }
        if self.spread is not None:
            data["samples"] = self.spread.to_dict()
        if self.run is not None:
            data["run"] = self.run.to_dict()
        if self.terms:
            data["terms"] = [term.to_dict() for term in self.terms]
            data["learned_of_the_whole"] = dict(self.whole)
        return data

    def notes(self) -> list[str]:
        """Return known limits of the prediction."""
        notes = [self.fit.reason()] if not self.fit.fits else []
        if self.may_fit:
            chance = 1.0 - self.needed.chance_below(self.fit.capacity)
            notes[0] = f"may not fit, out of memory {likely(chance)}: {notes[0]}"
        share = exchange_wait(self.workload, self.step) / self.step.total
        if share > EXCHANGE_SHARE:
            notes.append(
                f"{share:.0%} of the step is expert-parallel all-to-alls: every token is sent to "
                f"its {self.workload.top_k} experts, without routing limited to few nodes and "
                "without overlap (DualPipe, DeepEP); frameworks tuned for this hide a part, and "
                "real steps may take half of the time: the lower bound of the interval allows for "
                "it"
            )
        if self.workload.mode == "train" and (often := sharding_note(self.plan)):
            notes.append(often)
        if self.framework and self.known in ("architecture", "new"):
            notes.append(
                f"no measured step of {self.framework} was in the training data: an average "
                "framework is assumed"
            )
        # A note on less than half of the time would only distract.
        if self.scopes.get("roofline", 0.0) > 0.5:
            notes.append(f"operator times are rooflines of {self.device}, not a fitted model")
        elif self.scopes.get("unseen", 0.0) > 0.5:
            notes.append(f"the model was not fitted to {self.device}: calibrate it with samples")
        return [*notes, *self.described]


class StepPredictor:
    """Predicts steps on one cluster; each distinct operator and collective is priced once.

    Costs beyond operators and collectives (clock under load, networks, host) and the interval are
    learned from measured steps (``docs/steps.md``).

    Args:
        cluster: The devices and their links; a cluster, its name or file.
        model: Latency model of library operators; ``None`` for rooflines.
        device: Device instead of the one that the cluster names: description, name or file.
        framework: Framework that runs the steps; empty for an average framework.
        compiled: Whether the step is compiled, or replayed as CUDA graphs.
        learned: Step model, such as one adapted to the user's own cluster; ``None`` for the one
            that ships.
        source: Name under which the model was adapted to the cluster.
        power_cap_w: Sustained power of a device in watts, below its limit.
        latency: Latency of operators, if shared with other clusters of the device; by default made
            of ``model`` and the power cap.

    Raises:
        DeviceError: The cluster names no device, and none is given; or a power cap is outside the
            device's range.
    """

    def __init__(
        self,
        cluster: Cluster | str | Path,
        model: OpModel | None,
        device: DeviceSpec | str | Path | None = None,
        framework: str = "",
        *,
        compiled: bool = False,
        learned: StepModel | None = None,
        source: str = OWN,
        power_cap_w: float | None = None,
        latency: OperatorLatency | None = None,
    ) -> None:
        cluster = find_cluster(cluster)
        self.cluster = cluster
        self.spec = cluster_device(cluster) if device is None else resolve_device(device, {})
        self.framework, self.compiled = framework.lower(), compiled
        self.learned, self.source = learned or StepModel.find(), source
        self.spec, self.cap = fed(power_cap_w, self.spec)
        self.latency = latency or OperatorLatency(self.spec, model, self.cap)
        #: Predictor without the power cap; its step is never slower.
        self.free: StepPredictor | None = None
        if self.cap < 1.0:
            self.free = StepPredictor(
                cluster, model, self.spec, framework,
                compiled=compiled, learned=learned, source=source,
            )  # fmt: skip
        #: Costs before learned effects.
        self.priced = cluster_costs(cluster, self.spec, self.latency)

    def run_by(
        self, framework: str, *, compiled: bool, source: str, learned: StepModel
    ) -> StepPredictor:
        """Return a predictor for another framework or owner that shares the priced operators.

        Args:
            framework: See the class.
            compiled: See the class.
            source: See the class.
            learned: See the class.
        """
        other = copy(self)
        other.framework, other.compiled = framework.lower(), compiled
        other.source, other.learned = source, learned
        if self.free is not None:
            other.free = self.free.run_by(
                framework, compiled=compiled, source=source, learned=learned
            )
        return other

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
        explain: bool = False,
        price: float | None = None,
    ) -> StepPrediction:
        """Predict time and memory of a step.

        Args:
            workload: Model that is trained.
            plan: Parallel plan.
            jitter: Standard deviation of the logarithm of task times on a device.
            speeds: Relative speeds of devices by rank; 1 where omitted.
            draws: Number of samples, taken if ``jitter`` is given.
            seed: Random seed of the samples.
            remedy: Whether to search for the smallest change if the plan does not fit into memory.
            explain: Whether to break the step down into terms.
            price: Dollars per device hour, for the cost of the step.

        Raises:
            PlanError: The plan does not fit the model or the cluster, or a speed is not one of its
                ranks or goes with ``explain``.
        """
        free = self.free and self.free.predict(workload, plan, speeds=speeds, remedy=False)
        plan = resolved(workload, as_run(workload, plan, self.framework), self.cluster.size)
        widened = widened_note(workload, self.spec)
        workload = as_multiplied(workload, self.spec)
        context, own = self._learned(workload)
        known = self.learned.tier(context)
        # Effects were learned from steps on devices of equal speed.
        even = step_time(workload, plan, own)
        step = step_time(workload, plan, own, speeds=speeds) if speeds else even
        counts = step.busiest.counts()
        # Already priced while the step was composed.
        seconds = {c: float(own.ops[c][0]) * own.effects.of(c) * n for c, n in counts.items()}
        fit = self._fit(workload, plan)
        # The search composes many neighbouring plans; sweeps turn it off, since they try these
        # anyway.
        if remedy and not fit.fits:

            def seconds_of(changed: Plan) -> float:
                return step_time(workload, changed, own).total

            fit = find_fit(workload, plan, fit.capacity, seconds_of, self._memory, fit.host)
        if explain and speeds:
            raise PlanError(
                "terms need devices of equal speed",
                where="speeds",
                hint="omit --explain or --speed",
            )
        table = self.learned.table
        own_terms = Waterfall(workload, plan, own, counts, even, table, context)
        factors = step_interval(self.learned, context, workload, plan, own, even, self.latency)
        # A device faster than the data sheet (``speeds``) lowers the floors in proportion.
        fastest = max([1.0, *(speeds or {}).values()])
        floor = arithmetic_seconds(workload, plan, self.spec) / fastest
        best = best_seconds(workload, plan, self.spec) / fastest
        low, high = self._ends(step.total, factors)
        low = max(min(low, least_seconds(workload, step)), floor, free.interval.lo if free else 0.0)
        if step.total < floor:
            step = replace(step, total=floor, compute=step.compute + floor - step.total)
        interval = Interval(step.total, low, max(high, floor, best))
        return StepPrediction(
            workload=workload,
            plan=plan,
            cluster=self.cluster.name,
            device=self.spec.name,
            step=step,
            interval=interval,
            fit=fit,
            needed=interval_of(self.learned.memory, self.framework, fit.worst.total),
            peak_flops=self.spec.matrix_peak(FORMATS[workload.product_dtype].rate),
            peak_format=workload.product_dtype,
            operators=by_name(seconds),
            scopes=self._scopes(seconds),
            spread=sample_steps(plan, step, jitter, draws, seed) if jitter else None,
            framework=self.framework,
            known=known,
            terms=tuple(own_terms.terms()) if explain else (),
            whole=own_terms.whole() if explain else (),
            joules=step_energy(
                seconds, counts, step.compute, interval, self.spec, plan.devices, self.cap
            ),
            price=price,
            described=(
                *self.learned.source_note(self.source, self.spec.name),
                *generation_note(self.spec),
                *widened,
                *best_note(step.total, best, self.spec),
            ),
        )

    def fit(self, workload: Workload, plan: Plan) -> Fit:
        """Return the memory of a plan as :meth:`predict` does, without time or search for changes.

        Raises:
            PlanError: The plan does not fit the model or the cluster.
        """
        plan = resolved(workload, as_run(workload, plan, self.framework), self.cluster.size)
        return self._fit(as_multiplied(workload, self.spec), plan)

    def costs(self, workload: Workload) -> Costs:
        """Return the costs of operators and collectives that :meth:`predict` uses."""
        return self._learned(as_multiplied(workload, self.spec))[1]

    def _learned(self, workload: Workload) -> tuple[StepContext, Costs]:
        """Return the context of a workload's steps, and costs with the learned effects applied."""
        launched = not self.compiled and not is_compiled(self.framework)
        context = device_context(
            self.spec, workload.product_bits, self.framework, self.source, launched=launched,
            boxes=self.cluster.boxes,
        )  # fmt: skip
        effects = self.learned.table.whole_effects(context)
        return context, self.priced.with_effects(effects, self.cluster.box)

    def _ends(self, total: float, logs: tuple[float, float]) -> tuple[float, float]:
        """Return the ends in seconds of an interval given as logarithms of factors."""
        low, high = np.exp(logs)
        if self.cap < 1.0:
            # The error of the power law is common to all operators that the cap slows.
            low, high = under_cap(float(low), float(high), self.cap, board_law(self.spec))
        return total * float(low), total * float(high)

    def _scopes(self, seconds: dict[Op, float]) -> dict[str, float]:
        """Return the share of the operators' time by scope of the estimate."""
        total, shares = sum(seconds.values()) or 1.0, dict[str, float]()
        for call, value in seconds.items():
            scope = self.latency.scopes[call]
            shares[scope] = shares.get(scope, 0.0) + value / total
        return shares

    def _fit(self, workload: Workload, plan: Plan) -> Fit:
        host = host_of(self.cluster, self.spec)
        return Fit(
            self._memory(workload, plan),
            # A device file may omit the capacity: then everything fits.
            self.spec.usable_bytes or np.inf,
            offloaded=box_host(workload, plan, host.box),
            host=host,
        )

    def _memory(self, workload: Workload, plan: Plan) -> tuple[StageMemory, ...]:
        law = law_of(self.learned.memory, self.framework)
        copies = weight_copies(workload, self.spec)
        return tuple(law.applied(stage) for stage in memory_of(workload, plan, copies))


def breakdown(prediction: StepPrediction) -> list[tuple[str, float]]:
    """Split a step into computation, exposed communication and bubble, in seconds."""
    s = prediction.step
    parts = [("computation", s.compute), ("exposed communication", s.exposed), ("bubble", s.bubble)]
    return [*parts, ("host", s.host)] if s.host else parts
