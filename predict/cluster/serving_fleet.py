"""Prediction of an autoscaled fleet: replicas, cost and SLO attainment by hour and in total."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, inf

import numpy as np

from ...common.interval import Interval, end_fields
from ...common.types import JsonObject
from ...features.devices.catalogue import read_device
from ...models.power.energy import energy_fields
from ...simulate.serving.autoscale import Played, play, smoothed
from ...simulate.serving.pools import Nodes, Pool
from .deployment import deployment_of, device_of
from .fleet_curves import Replica, replica_of
from .fleet_file import FleetFile
from .serving import ServingPredictor

_HOUR = 3600.0
#: Resolution of the search for the best static fleet: steps per mean replica count.
_PARTS = 16


@dataclass(frozen=True)
class FleetPrediction:
    """Prediction of a fleet.

    Attributes:
        asked: The fleet.
        replicas: Prediction of one replica of each pool.
        played: Simulations at the estimate and with all replicas at the fast and the slow bound.
        static: The smallest fleet without scaling that has the same SLO attainment by the
            estimate; ``None`` if the fleet itself does not scale.
        sizes: Replicas of each pool of the static fleet.
        output_tokens: Mean output tokens of each model.
    """

    asked: FleetFile
    replicas: tuple[Replica, ...]
    played: tuple[Played, ...]
    static: Played | None
    sizes: tuple[int, ...]
    output_tokens: tuple[float, ...]

    def _over(self, figure: Callable[[Played], float]) -> Interval:
        """Return a figure with its values at both bounds of the replicas' speed."""
        return Interval.outer([figure(one) for one in self.played])

    def _hours(self, one: Played, pool: int, span: slice) -> float:
        """Return the device hours of a pool."""
        own = self.replicas[pool].deployment.devices
        return float(one.paid[pool, span].sum()) * one.step / _HOUR * own

    def _cost(self, one: Played, span: slice) -> float:
        return sum(
            (pool.price or 0.0) * self._hours(one, i, span)
            for i, pool in enumerate(self.asked.pools)
        )

    @property
    def _priced(self) -> bool:
        return all(pool.price is not None for pool in self.asked.pools)

    def _tokens(self, one: Played, span: slice) -> float:
        """Return the output tokens served, in millions."""
        return float(one.served[:, span].sum(axis=1) @ np.array(self.output_tokens)) / 1e6

    def _totals(self, span: slice) -> JsonObject:
        """Return the figures of a time span that both hours and the total report."""
        pools = range(len(self.asked.pools))
        arrived = self.played[0].arrived[:, span]
        data: JsonObject = {"requests": float(arrived.sum())}
        data |= end_fields("slo_attainment", self._over(lambda one: attained(one, span)))
        data["slo_attainment_by_model"] = {
            model.name: attained(self.played[0], span, [at])
            for at, model in enumerate(self.asked.models)
        }
        hours = self._over(lambda one: sum(self._hours(one, i, span) for i in pools))
        data |= end_fields("device_hours", hours)
        if self._priced:
            cost = self._over(lambda one: self._cost(one, span))
            data |= end_fields("cost", cost)
            # Without tokens served in a simulation, there is no price per token.
            if min(self._tokens(one, span) for one in self.played) > 0.0:
                per_token = self._over(lambda one: self._cost(one, span) / self._tokens(one, span))
                data |= end_fields("dollars_per_million_tokens", per_token)
        if all(replica.powered for replica in self.replicas):
            data |= energy_fields(self._over(lambda one: float(one.joules[:, span].sum())))
        data |= end_fields(
            "backlog_max", self._over(lambda one: float(one.backlog[:, span].sum(0).max()))
        )
        return data

    @property
    def _spans(self) -> list[slice]:
        """The time steps of each hour: those whose midpoint lies in it."""
        one = self.played[0]
        hours = ((np.arange(one.arrived.shape[1]) + 0.5) * one.step // _HOUR).astype(int)
        edges = np.searchsorted(hours, np.arange(hours[-1] + 2)).tolist()
        return [slice(*both) for both in pairwise(edges)]

    def hour(self, at: int) -> JsonObject:
        """Return the figures of one hour."""
        one, span = self.played[0], self._spans[at]
        wait = one.wait[:, span].max()
        return {
            "hour": at,
            **self._totals(span),
            # Requests that are never served wait for ever.
            "wait_max_s": float(wait) if wait < inf else None,
            "utilisation": {
                model.name: float(one.share[m, span].mean())
                for m, model in enumerate(self.asked.models)
            },
            "replicas": {
                pool.name: float(one.ready[i, span].mean())
                for i, pool in enumerate(self.asked.pools)
            },
        }

    def pool(self, at: int) -> JsonObject:
        """Return the figures of one pool."""
        case, own, one = self.asked.pools[at], self.replicas[at], self.played[0]
        everything = slice(None)
        model = [m.name for m in self.asked.models].index(case.model)
        within = Interval.outer([curve.within(self.asked.asked) for curve in own.warm])
        data: JsonObject = {
            "name": case.name,
            "model": case.model,
            "device": own.deployment.spec.name,
            "plan": own.deployment.text(),
            "devices": own.deployment.devices,
            "known": own.known,
            **end_fields("requests_per_s", Interval.outer([curve.capacity for curve in own.warm])),
            **end_fields("requests_per_s_within_slo", within),
            "startup_s": own.start_s,
            "warm_s": own.warm_s,
            "replicas_mean": float(one.ready[at].mean()),
            "replicas_max": float(one.ready[at].max()),
            "replicas_wished": one.wished[at],
            **end_fields("device_hours", self._over(lambda p: self._hours(p, at, everything))),
        }
        if case.spot is not None:
            data["interruptions"] = float(one.lost[at].sum())
            hours = float(one.ready[at].sum()) * one.step / _HOUR
            data["interruptions_expected"] = case.spot.rate_per_h * hours
        data["recommended"] = self._recommended(at, model)
        return data

    def _recommended(self, at: int, model: int) -> list[int] | None:
        """Return the replicas that meet the SLO in the quietest and in the busiest hour.

        Each is sized for the busiest step of its hour, since sizing for the hourly mean leaves
        requests waiting. ``None`` if no number of replicas meets the SLO.
        """
        one, pools = self.played[0], self.asked.pools
        within = [
            replica.warm[0].within(self.asked.asked) if pool.model == pools[at].model else 0.0
            for pool, replica in zip(pools, self.replicas, strict=True)
        ]
        if not within[at]:
            return None
        # The router splits requests among pools in proportion to their capacity.
        served = [w * float(one.ready[i].mean()) for i, w in enumerate(within)]
        part = served[at] / sum(served) if sum(served) else 1.0
        arrived = one.arrived[model]
        if self.asked.models[model].trace is not None:
            arrived = smoothed(arrived, arrived)
        rates = [float(arrived[span].max()) / one.step for span in self._spans]
        return [max(1, ceil(rate * part / within[at])) for rate in (min(rates), max(rates))]

    def to_dict(self) -> JsonObject:
        """Return JSON data, as ``opcast simulate-serving --fleet --json`` prints it."""
        one, everything = self.played[0], slice(None)
        hours = [self.hour(at) for at in range(len(self._spans))]
        data: JsonObject = {
            "hours": self.asked.hours,
            **self._totals(everything),
            **end_fields("served", self._over(lambda p: float(p.served.sum()))),
            "waiting_at_end": float(one.backlog[:, -1].sum()),
            "worst_hour": min(hours, key=lambda hour: float(hour["slo_attainment"]))["hour"],
            "pools": [self.pool(at) for at in range(len(self.asked.pools))],
            "by_hour": hours,
            "notes": self.notes(),
        }
        if self.static is not None:
            own = sum(self._hours(self.static, i, everything) for i in range(len(self.sizes)))
            data["static"] = {
                "replicas": {p.name: n for p, n in zip(self.asked.pools, self.sizes, strict=True)},
                "slo_attainment": attained(self.static, everything),
                "device_hours": own,
                "saved_device_hours": 1.0 - float(data["device_hours"]) / own,
            }
            if self._priced:
                cost = self._cost(self.static, everything)
                data["static"] |= {"cost": cost, "saved_cost": 1.0 - float(data["cost"]) / cost}
        return data

    def notes(self) -> list[str]:
        """Return notes on assumptions and on what lies outside the measured runs."""
        told = [
            "each replica is simulated alone under Poisson arrivals; a router that sees their "
            "queues does better near maximum throughput",
        ]
        if any(pool.spot for pool in self.asked.pools):
            told.append(
                f"interruptions are one sample of a Poisson process (seed {self.asked.seed})"
            )
        for at, (pool, own) in enumerate(zip(self.asked.pools, self.replicas, strict=True)):
            if self.played[0].wished[at] > pool.most > pool.least:
                told.append(
                    f"{pool.name}: its scaling policy requested {self.played[0].wished[at]} "
                    f"replicas, but the pool has at most {pool.most}"
                )
            if self.played[0].short[at]:
                told.append(
                    f"{pool.name}: the fleet has too few devices to start "
                    f"{self.played[0].short[at]} of the replicas"
                )
            told += [f"{pool.name}: {note}" for note in own.notes]
        return told


def attained(one: Played, span: slice, models: Sequence[int] | None = None) -> float:
    """Return the share of the requests of a time span that meet their SLO; 1 without requests.

    Args:
        one: A simulation of the fleet.
        span: Time steps.
        models: Indices of the models to include; ``None`` for all.
    """
    own = slice(None) if models is None else models
    arrived = one.arrived[own, span]
    total = float(arrived.sum())
    return float((arrived * one.good[own, span]).sum()) / total if total else 1.0


def predict_fleet(predictor: ServingPredictor, asked: FleetFile) -> FleetPrediction:
    """Simulate a fleet at the estimate and at both 90 % bounds of its replicas' speed.

    Args:
        predictor: Predictor of serving.
        asked: The fleet.

    Raises:
        PlanError: A replica does not fit its devices, or its model or device is unknown.
    """
    models = {model.name: model for model in asked.models}
    replicas = tuple(
        replica_of(
            predictor,
            deployment_of(pool.case, files=asked.files),
            models[pool.model],
            pool.startup,
            pool.spot.notice_s if pool.spot else 0.0,
            asked.seed,
        )
        for pool in asked.pools
    )
    arrived = np.array([model.arrived(asked.steps, asked.step_s) for model in asked.models])
    played = tuple(
        play(_pools(asked, replicas, end), arrived, asked.step_s, _nodes(asked), asked.seed)
        for end in range(3)
    )
    static, sizes = None, tuple(pool.least for pool in asked.pools)
    if any(pool.least < pool.most for pool in asked.pools):
        static, sizes = _static(_pools(asked, replicas, 0), played[0], asked.seed)
    tokens = tuple(float(model.lengths(10_000, asked.seed)[1].mean()) for model in asked.models)
    return FleetPrediction(asked, replicas, played, static, sizes, tokens)


def _nodes(asked: FleetFile) -> Nodes:
    counts = {device_of(name): count for name, count in asked.devices.items()}
    return Nodes(counts, {n: read_device(n).devices_per_node or c for n, c in counts.items()})


def _pools(asked: FleetFile, replicas: Sequence[Replica], end: int) -> list[Pool]:
    """Return the pools with replicas at the estimate (0), the fast (1) or the slow bound (2)."""
    names = [model.name for model in asked.models]
    return [
        Pool(
            names.index(case.model),
            own.warm[end],
            own.cold[end] if own.cold else None,
            case.least,
            case.most,
            case.initial,
            case.scaling,
            case.startup.provision_s,
            own.start_s,
            own.warm_s,
            own.deployment.devices,
            own.deployment.device,
            case.spot,
        )
        for case, own in zip(asked.pools, replicas, strict=True)
    ]


def _static(
    pools: Sequence[Pool], scaled: Played, seed: int
) -> tuple[Played | None, tuple[int, ...]]:
    """Find the smallest static fleet with the same SLO attainment of each model.

    Pools of a model keep the proportions of their mean sizes.

    Args:
        pools: The scaled pools.
        scaled: Simulation of the scaled pools.
        seed: Random seed of the interruptions.
    """
    means = scaled.ready.mean(axis=1)
    models = len(scaled.arrived)
    asked = [attained(scaled, slice(None), [model]) for model in range(models)]
    if not min(asked):
        # Every fleet reaches an attainment of 0.
        return None, ()

    def sized(parts: Sequence[int]) -> list[Pool]:
        counts = [
            max(1, ceil(m * parts[p.model] / _PARTS)) for m, p in zip(means, pools, strict=True)
        ]
        return [replace(p, least=n, most=n, initial=n) for n, p in zip(counts, pools, strict=True)]

    low, high = [0] * models, [_PARTS * 8] * models
    while any(a + 1 < b for a, b in zip(low, high, strict=True)):
        middle = [(a + b + 1) // 2 for a, b in zip(low, high, strict=True)]
        tried = play(sized(middle), scaled.arrived, scaled.step, Nodes({}, {}), seed)
        for model in range(models):
            if attained(tried, slice(None), [model]) >= asked[model]:
                high[model] = middle[model]
            else:
                low[model] = middle[model]
    best = sized(high)
    found = play(best, scaled.arrived, scaled.step, Nodes({}, {}), seed)
    return found, tuple(pool.least for pool in best)
