"""Reader of a fleet's YAML file: models with their loads, pools of replicas, shared devices."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ...common.errors import PlanError, meant
from ...common.files import is_description, parse_yaml
from ...common.options import flat_options, made
from ...common.types import JsonMapping, JsonObject, typed
from ...simulate.serving.latencies import FREE, Slo
from ...simulate.serving.load import Load
from ...simulate.serving.pools import SCALED_BY, Scaling, Spot
from ...simulate.step.settings import build
from .serving_case import EngineOptions, FleetCase, ModelCase, ServingCase
from .serving_load import parse_lengths, parse_slo, read_traces

T = TypeVar("T")

#: Start-up seconds of an engine besides loading weights: imports, compiled graphs from a cache,
#: graph capture and initialization of Llama 3.1 8B under vLLM on an L40S (Tensorfuse, "Reducing GPU
#: Cold Start Time when using vLLM", 2025: 34 + 10 + 13 + 7 s; 200 s without caches).
ENGINE_START_S = 64.0
#: Hours simulated for loads given as rates; seconds of a time step (a short trace gets at least
#: 100 steps); maximum number of steps.
WEEK_H, STEP_S, MOST_STEPS = 168.0, 30.0, 500_000


@dataclass(frozen=True)
class Startup:
    """Start-up times of a replica.

    Attributes:
        seconds: From allocated devices to the first request; 0 to derive it from the other fields.
        storage_gbps: GB/s at which a replica reads its weights.
        engine_s: Start-up of the engine besides loading weights.
        provision_s: Until devices are allocated.
        warm_s: Until the prefix cache is filled; 0 for the time in which so many tokens arrive.
    """

    seconds: float = 0.0
    storage_gbps: float = 0.0
    engine_s: float = ENGINE_START_S
    provision_s: float = 0.0
    warm_s: float = 0.0


@dataclass(frozen=True)
class PoolCase:
    """A pool of identical replicas of a model; ``case`` describes one of them.

    Attributes:
        name: Name of the pool.
        model: Name of the model.
        case: Serving case of a replica.
        least: Minimum replicas.
        most: Maximum replicas.
        initial: Replicas at the start.
        price: Dollars per device hour; ``None`` if not given.
        scaling: Scaling policy.
        startup: Start-up times.
        spot: Interruptions of spot devices, if any.
    """

    name: str
    model: str
    case: ServingCase
    least: int
    most: int
    initial: int
    price: float | None
    scaling: Scaling
    startup: Startup
    spot: Spot | None


@dataclass(frozen=True)
class ModelLoad:
    """Load of a model.

    Attributes:
        name: Name in the file.
        case: Fields of the model case.
        slo: Latency limits of its requests.
        rates: Requests/s at the start of each hour, repeated periodically; empty with a trace.
        prompt: Length distribution of prompts, with rates.
        output: Length distribution of outputs, with rates.
        trace: Requests of a trace.
    """

    name: str
    case: JsonMapping
    slo: Slo
    rates: tuple[float, ...] = ()
    prompt: str = "1024"
    output: str = "256"
    trace: Load | None = None

    def arrived(self, steps: int, step: float) -> np.ndarray:
        """Return the requests in each step, shape ``(steps,)``; rates are linear between hours."""
        if self.trace is not None:
            edges = np.arange(steps + 1) * step
            return np.histogram(self.trace.arrivals, edges)[0].astype(float)
        hours = (np.arange(steps) + 0.5) * step / 3600.0
        period = float(len(self.rates))
        rates: np.ndarray = np.interp(hours, np.arange(len(self.rates)), self.rates, period=period)
        return rates * step

    def lengths(self, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw lengths of prompts and outputs in tokens, each of shape ``(count,)``."""
        rng = np.random.default_rng(seed)
        if self.trace is None:
            return parse_lengths(self.prompt)(rng, count), parse_lengths(self.output)(rng, count)
        at = rng.integers(0, len(self.trace.prompts), count)
        return self.trace.prompts[at], self.trace.outputs[at]


@dataclass(frozen=True)
class FleetFile:
    """A fleet and its loads.

    Attributes:
        models: The models and their loads.
        pools: Pools of replicas, in order of priority for scarce devices.
        devices: Number of devices that pools share, by name; others are unlimited.
        hours: Simulated hours.
        step_s: Seconds of a time step.
        asked: SLO attainment that recommended sizes have to reach.
        seed: Random seed of lengths, arrivals and interruptions.
        files: Whether the description lies in a folder and may refer to files.
    """

    models: tuple[ModelLoad, ...]
    pools: tuple[PoolCase, ...]
    devices: Mapping[str, int] = field(default_factory=dict)
    hours: float = WEEK_H
    step_s: float = STEP_S
    asked: float = 0.99
    seed: int = 0
    files: bool = False

    @property
    def steps(self) -> int:
        """Number of time steps."""
        return max(1, round(self.hours * 3600.0 / self.step_s))


def read_fleet(path: Path) -> FleetFile:
    """Read a fleet file; traces are looked up beside it.

    Raises:
        PlanError: The file cannot be read or contains an error; the message gives the place.
        DatasetError: A trace cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"the fleet cannot be read: {error}", where=str(path)) from None
    return parse_fleet(text, path.name, path.parent)


def parse_fleet(text: str, where: str = "fleet", folder: Path | None = None) -> FleetFile:
    """Parse a fleet from YAML text.

    Args:
        text: YAML as described in docs/fleets.md.
        where: Name of the text in error messages.
        folder: Folder of traces, device and cluster files; ``None`` to refuse files.

    Raises:
        PlanError: The text contains an error; the message gives the place.
        DatasetError: A trace cannot be read.
    """
    try:
        data = parse_yaml(text)
    except ValueError as error:
        raise PlanError(str(error), where=where) from None
    plain = {"hours", "step_s", "asked", "seed"}
    top = _mapping(data, where, {*plain, "slo", "requests", "devices", "models", "pools"})
    traces = _traces(top, where, folder)
    models = tuple(
        _model(name, _mapping(own, f"{where}: models: {name}"), top, traces, where)
        for name, own in _mapping(top.get("models"), f"{where}: models").items()
    )
    if folder is None:
        _no_files([top.get("devices"), top.get("pools")], where)
    pools = tuple(
        _pool(name, _mapping(own, f"{where}: pools: {name}"), models, where)
        for name, own in _mapping(top.get("pools"), f"{where}: pools").items()
    )
    idle = sorted({m.name for m in models} - {pool.model for pool in pools})
    stray = sorted({*traces} - {m.name for m in models} - {""})
    if idle or stray:
        raise PlanError(
            f"no pool serves {idle[0]!r}" if idle else f"the trace asks for {stray[0]!r}",
            where=where,
            hint="add a pool with that model, or remove the model",
        )
    spans = [float(model.trace.arrivals.max()) for model in models if model.trace is not None]
    span = max(*spans, 1.0) if spans else 0.0
    of_trace = {"hours": span / 3600.0, "step_s": min(STEP_S, span / 100.0)} if spans else {}
    devices = _mapping(top.get("devices", {}), f"{where}: devices", empty=True)
    own = {**of_trace, **{key: top[key] for key in plain if key in top}}
    found = build(
        FleetFile,
        own,
        where,
        models=models,
        pools=pools,
        devices=_counts(devices, where),
        files=folder is not None,
    )
    # Figures are reported by hour, so each hour needs at least one step.
    good = 0 < found.step_s <= 3600.0 * min(1.0, found.hours) and found.hours < inf
    good = good and 0 < found.asked <= 1 and found.seed >= 0
    if not good or found.hours * 3600.0 / found.step_s > MOST_STEPS:
        raise PlanError(
            f"hours={found.hours:g}, step_s={found.step_s:g}, asked={found.asked:g}",
            where=where,
            hint=f"above 0; asked ≤ 1, step_s at most 3600 and hours, at most {MOST_STEPS:,} steps",
        )
    return found


def _mapping(
    value: object, where: str, keys: Collection[str] = (), *, empty: bool = False
) -> JsonObject:
    if not isinstance(value, dict) or not (value or empty):
        raise PlanError("a mapping is needed here", where=where, hint="write key: value")
    for key in value:
        if keys and key not in keys:
            raise PlanError(f"unknown key {key!r}", where=where, hint=meant(str(key), sorted(keys)))
    return {str(key): own for key, own in value.items()}


def _no_files(given: object, where: str) -> None:
    """Refuse file names where devices and clusters are named.

    Raises:
        PlanError: A value is a file name.
    """
    if isinstance(given, dict | list):
        for own in (*given, *(given.values() if isinstance(given, dict) else ())):
            _no_files(own, where)
    elif "/" in str(given) or is_description(str(given)):
        raise PlanError("files of the server are not read", where=f"{where}: {given}")


def _counts(devices: JsonMapping, where: str) -> dict[str, int]:
    for name, count in devices.items():
        if type(count) is not int or count < 1:
            raise PlanError(f"{count!r} {name}", where=f"{where}: devices", hint="a whole number")
    return dict(devices)


def _traces(top: JsonMapping, where: str, folder: Path | None) -> dict[str, Load]:
    if "requests" not in top:
        return {}
    if folder is None:
        raise PlanError(
            "files of the server are not read", where=f"{where}: requests", hint="give rates"
        )
    return read_traces(folder / str(top["requests"]))


def _model(
    name: str,
    own: JsonObject,
    top: JsonMapping,
    traces: Mapping[str, Load],
    where: str,
) -> ModelLoad:
    where = f"{where}: models: {name}"
    asks = {"rate", "prompt", "output", "slo"}
    case = {key: value for key, value in own.items() if key not in asks}
    _fields(case, where, ModelCase, asks)
    slo = parse_slo(str(own.get("slo", top.get("slo", ""))))
    if slo == FREE:
        raise PlanError(
            "the model has no SLO", where=where, hint="give one, such as slo: ttft=1s,tpot=50ms"
        )
    trace = traces.get(name, traces.get(""))
    if (trace is None) == ("rate" not in own) or (trace is not None and asks & {*own} - {"slo"}):
        raise PlanError(
            "a model needs either a rate or a trace",
            where=where,
            hint="give rate (with prompt and output), or requests of the fleet and none of them",
        )
    if trace is not None:
        return ModelLoad(name, case, slo, trace=trace)
    rate = own["rate"] if isinstance(own["rate"], list) else [own["rate"]]
    if not all(type(r) in (int, float) and 0 <= r < inf for r in rate) or not sum(rate):
        raise PlanError(
            f"rate={own['rate']!r}",
            where=where,
            hint="requests per second, one number or one for each hour",
        )
    prompt, output = (str(own.get(key, getattr(ModelLoad, key))) for key in ("prompt", "output"))
    for text in (prompt, output):
        parse_lengths(text)
    return ModelLoad(name, case, slo, tuple(map(float, rate)), prompt, output)


_POOL = ("model", "replicas", "initial", "price", "scaling", "startup", "spot")
#: Options that a pool sets itself, or that refer to files.
_NOT_OF_POOL = {"replicas", "hf"}


def _fields(given: JsonMapping, where: str, kind: type, more: Collection[str]) -> None:
    """Check the fields of a case against their types and ranges.

    Raises:
        PlanError: A field is unknown, or has a wrong type or range.
    """
    known = {f.name: (hint, option) for f, hint, option in flat_options(kind)}
    _mapping(dict(given), where, {*known} - _NOT_OF_POOL | {*more}, empty=True)
    for name, value in given.items():
        hint, option = known[name]
        try:
            typed(hint, value, name)
        except ValueError as error:
            raise PlanError(str(error), where=where) from None
        least, most = option.least, option.most
        beyond = isinstance(value, int | float) and not (
            (least is None or value >= least) and (most is None or value <= most)
        )
        if beyond or (option.choices and value not in option.choices):
            allowed = ", ".join(option.choices) or f"from {least} to {most}"
            raise PlanError(f"{name}={value!r}", where=where, hint=allowed)


@dataclass(frozen=True)
class _Replica:
    """Fields of a pool that describe a replica; its engine and formats may override the model's."""

    model: ModelCase
    fleet: FleetCase
    options: EngineOptions


def _part(kind: type[T], own: JsonMapping, name: str, where: str, **known: object) -> T:
    """Build a part of a pool from its mapping; required fields must be given."""
    at = f"{where}: {name}"
    return build(kind, _mapping(own.get(name, {}), at, empty=not known), at, **known)


def _pool(name: str, own: JsonObject, models: tuple[ModelLoad, ...], where: str) -> PoolCase:
    where = f"{where}: pools: {name}"
    model = next((m for m in models if m.name == own.get("model")), None)
    if model is None:
        raise PlanError(
            f"model={own.get('model')!r} is not a model of the file",
            where=where,
            hint="model: " + " or ".join(m.name for m in models),
        )
    given = {key: value for key, value in own.items() if key not in _POOL}
    _fields(given, where, _Replica, _POOL)
    case = made(ServingCase, {**model.case, **given})
    scaling, startup = _part(Scaling, own, "scaling", where), _part(Startup, own, "startup", where)
    spot = _part(Spot, own, "spot", where, rate_per_h=0.0) if "spot" in own else None
    least, most = _bounds(own.get("replicas", 1), where)
    if "scaling" in own and least == most:
        raise PlanError(
            f"a pool of exactly {most} replicas cannot scale",
            where=f"{where}: scaling",
            hint=f"give a range such as replicas: [1, {max(most, 2)}], or omit scaling",
        )
    initial, price = own.get("initial", least), own.get("price")
    figures = [*vars(startup).values(), *(vars(spot).values() if spot else ()), price or 0.0]
    figures += [scaling.up_s, scaling.down_s]
    if not all(isinstance(f, int | float) and 0.0 <= f < inf for f in figures):
        raise PlanError("times, rates and prices must be finite and at least 0", where=where)
    if scaling.metric not in SCALED_BY or not 0.0 < scaling.target < inf:
        raise PlanError(
            f"metric={scaling.metric!r}, target={scaling.target:g}",
            where=f"{where}: scaling",
            hint="metric " + " or ".join(SCALED_BY) + ", target above 0",
        )
    if type(initial) is not int or not least <= initial <= most:
        raise PlanError(f"initial={initial!r}", where=where, hint=f"from {least} to {most}")
    starts = most > initial or spot is not None
    if starts and not (startup.seconds or startup.storage_gbps):
        raise PlanError(
            "the start-up time of a replica is unknown",
            where=f"{where}: startup",
            hint="give storage_gbps (read rate of the weights), or seconds (total)",
        )
    return PoolCase(name, model.name, case, least, most, initial, price, scaling, startup, spot)


def _bounds(given: Any, where: str) -> tuple[int, int]:
    both = given if isinstance(given, list) else [given, given]
    whole = len(both) == 2 and all(type(n) is int and n >= 0 for n in both)
    if not whole or not both[0] <= both[1] or not both[1]:
        raise PlanError(
            f"replicas={given!r}", where=where, hint="give a number, or a range: [2, 12]"
        )
    return int(both[0]), int(both[1])
