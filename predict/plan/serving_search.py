"""Search deployments of a model on so many devices: engines, plans, batch limits, prompts apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ...common.errors import OpcastError
from ...features.devices.catalogue import read_device
from ...simulate.serving.latencies import Slo
from ...simulate.serving.load import Load
from ...simulate.serving.served import EnginePlan
from ..cluster.deployment import Deployment, Workers, check_blocks
from ..cluster.serving import ServingPredictor
from ..cluster.serving_case import LoadSpec
from ..cluster.serving_engine import engine_cache, engine_memory
from ..cluster.serving_load import draw, is_open, load_of
from .serving_answer import Planned, ServingPlans

#: Limits of sequences that are tried beside the framework's own, of a rank: below it they trade
#: throughput for latency.
BATCHES = (16, 64, 256)
#: Shares of the devices that run prompts where these have workers of their own.
PREFILL_SHARES = (0.25, 0.5, 0.75)
#: Told of progress: deployments done, in all, and the next.
Show = Callable[[int, int, str], None]


def engine_plans(base: Deployment, devices: int) -> Iterator[EnginePlan]:
    """Plans of one engine on at most so many devices, smallest first.

    Tensor parallelism stays within a box, pipelines are tried over boxes and within them, and
    experts are cut over tensor-parallel ranks, spread whole over them, or spread over ranks that
    each attend to sequences of their own.
    """
    w = base.model.workload
    box = read_device(base.device).devices_per_node or devices
    powers = [2**n for n in range(devices.bit_length()) if 2**n <= devices]
    for size in powers:
        for tp in (n for n in powers if n <= min(size, box) and w.heads % n == 0):
            if size % tp:
                continue
            pp = size // tp
            if pp <= min(w.layers, 8):
                yield EnginePlan(tp=tp, pp=pp, moe_tp=tp)
                if w.experts and tp > 1 and w.experts % tp == 0:
                    yield EnginePlan(tp=tp, pp=pp, ep=tp)
            if w.experts and pp > 1 and w.experts % size == 0:
                yield EnginePlan(tp=tp, dp=pp, ep=size)


def deployments(base: Deployment, devices: int, apart: bool = True) -> Iterator[Deployment]:
    """Deployments on all of the devices, without those that differ in their batch limit alone.

    Args:
        base: Model, device, framework and options; its workers do not matter.
        devices: How many.
        apart: Whether to try workers that run prompts alone.
    """
    plans = list(engine_plans(base, devices))
    for plan in plans:
        if devices % plan.devices == 0:
            yield replace(base, engine=Workers(plan, devices // plan.devices), prefill=None)
    if not apart:
        return
    for share in PREFILL_SHARES:
        ahead = round(devices * share)
        for first in plans:
            for second in plans:
                # Prompts gain nothing from pipelines or ranks of their own that decoding has not.
                if first.pp > 1 or second.pp > 1 or first.dp > 1:
                    continue
                behind = devices - ahead
                if ahead % first.devices or behind % second.devices or not ahead or not behind:
                    continue
                yield replace(
                    base,
                    engine=Workers(second, behind // second.devices),
                    prefill=Workers(first, ahead // first.devices),
                )


def counts(devices: int) -> list[int]:
    """Numbers of devices that are tried: powers of two, and all of them."""
    return [*(1 << n for n in range((devices - 1).bit_length())), devices]


def search(
    predictor: ServingPredictor,
    base: Deployment,
    devices: int,
    spec: LoadSpec,
    slo: Slo,
    *,
    apart: bool = True,
    fewer: bool = True,
    show: Show = lambda done, of, what: None,
) -> ServingPlans:
    """Simulate deployments, cheap ones to rule out first; an interrupt keeps what is known.

    A deployment is left out if its weights do not fit, or if one pass over the cache and weights of
    a single request, at the rate of its memory, is slower than the SLO allows. Limits of sequences
    below the framework's own are tried for the deployments on the front alone.

    Args:
        predictor: Predicts them.
        base: Model, device, framework and options.
        devices: How many.
        spec: The load.
        slo: What requests have to keep.
        apart: Whether to try workers that run prompts alone.
        fewer: Whether to try fewer devices than there are.
        show: Told of progress: done, in all, and what is next.

    Raises:
        PlanError: The load lacks what the router looks at.
    """
    load = draw(spec)
    found = ServingPlans(slo, devices=devices, open=is_open(spec, load))
    load_of(base, load)
    asked, slow = [], []
    tried = counts(devices) if fewer else [devices]
    for one in (own for count in tried for own in deployments(base, count, apart)):
        owned = predictor.own(one)
        try:
            check_blocks(one)
            memories = [engine_memory(owned, w) for w in (one.engine, one.prefill) if w]
        except OpcastError as error:
            found.refused[one.text()] = str(error)
            continue
        unfit = next((m for m in memories if m.cache <= 0.0), None)
        if unfit is not None:
            found.refused[one.text()] = unfit.too_large()
        elif _least_token(one) > slo.tpot:
            found.pruned += 1
            slow.append(one)
        else:
            asked.append(one)
    try:
        _simulate(predictor, found, asked, spec, load, show)
        if found.nothing_fits:
            found.fewest = _fewest(predictor, base, devices, load)
        # Smaller batches of what is good already.
        better = []
        for kept in found.front():
            largest = kept.found.run.largest_batch
            ranks = kept.deployment.engine.plan.dp
            limits = [n for n in BATCHES if n * ranks < largest]
            options = kept.deployment.options
            better += [
                replace(kept.deployment, options=replace(options, max_batch=n)) for n in limits
            ]
            found.pruned += len(BATCHES) - len(limits)
        _simulate(predictor, found, better, spec, load, show)
        if found.best is None:
            _simulate_helps(predictor, found, slow, spec, load)
        found.settle()
    except KeyboardInterrupt:
        found.stopped = True
    return found


#: Most devices that an engine is looked for on where nothing fits.
_MOST_DEVICES = 1024


def _fewest(predictor: ServingPredictor, base: Deployment, devices: int, load: Load) -> int:
    """Devices of the smallest engine that holds the model and the longest request; 0 for none."""
    longest = int((load.prompts + load.outputs).max())
    for count in (1 << n for n in range(_MOST_DEVICES.bit_length())):
        for plan in engine_plans(base, max(count, devices)):
            if plan.devices != count:
                continue
            workers = Workers(plan)
            own = predictor.own(replace(base, engine=workers, prefill=None))
            try:
                check_blocks(own)
                if engine_cache(own, workers).share_of(longest) * plan.dp <= 1.0:
                    return count
            except OpcastError:
                continue
    return 0


def _simulate(
    predictor: ServingPredictor,
    found: ServingPlans,
    asked: Sequence[Deployment],
    spec: LoadSpec,
    load: Load,
    show: Show,
) -> None:
    for number, one in enumerate(asked):
        show(number, len(asked), one.text())
        try:
            simulated = predictor.simulate(one, spec, load)
        except OpcastError as error:
            found.refused[one.text()] = str(error)
            continue
        found.judged.append(Planned(simulated, predictor, found.slo))
    show(len(asked), len(asked), "")


def _simulate_helps(
    predictor: ServingPredictor,
    found: ServingPlans,
    slow: Sequence[Deployment],
    spec: LoadSpec,
    load: Load,
) -> None:
    """Change the nearest to an SLO that none keeps, and see what becomes of it.

    Args:
        predictor: Predicts the changed.
        found: What was found; what helps is added.
        slow: Deployments that are too slow for the SLO whatever the load.
        spec: The load.
        load: Its requests.
    """
    if found.nearest is None and slow:
        # Nothing was simulated, since no token comes in time: the fastest of these.
        _simulate(
            predictor, found, [min(slow, key=_least_token)], spec, load, lambda done, of, what: None
        )
    if found.nearest is None:
        return
    for change, one in _changes(found.nearest.deployment):
        try:
            check_blocks(one)
            simulated = predictor.simulate(one, spec, load)
        except OpcastError as error:
            found.helps[change] = str(error)
            continue
        found.helps[change] = Planned(simulated, predictor, found.slo)


def _changes(own: Deployment) -> Iterator[tuple[str, Deployment]]:
    """What may make a deployment faster: weights in fp8, more devices, wider engines."""
    model, spec = own.model, own.spec
    formats = (model.weights, model.attention_format, model.expert_weights)
    wide = [name in ("bf16", "f16", "f32") for name in formats]
    if any(wide[:2]) and spec.matrix_peak("f8e4m3fn") > spec.matrix_peak("bf16"):
        narrow = replace(
            model,
            weights="fp8" if wide[0] else model.weights,
            attention_weights="fp8" if wide[1] else model.attention_weights,
            expert_weights="fp8" if wide[2] else model.expert_weights,
        )
        yield "weights in fp8", replace(own, model=narrow)
    more = 2 * own.devices
    engine, plan = own.engine, own.engine.plan
    first = own.prefill and replace(own.prefill, count=2 * own.prefill.count)
    if own.prefill is None or engine.count > 1:
        twice = replace(own, engine=replace(engine, count=2 * engine.count), prefill=first)
        yield f"twice the engines ({more} devices)", twice
    if 2 * plan.ranks <= (spec.devices_per_node or more) and not model.workload.heads % (
        2 * plan.tp
    ):
        wider = replace(plan, tp=2 * plan.tp, moe_tp=2 * plan.moe_tp)
        if plan.ep > 1:
            wider = replace(plan, tp=2 * plan.tp, ep=2 * plan.ep)
        count = own.devices + plan.devices * engine.count
        yield (
            f"engines twice as wide ({count} devices)",
            replace(own, engine=replace(engine, plan=wider)),
        )


def _least_token(one: Deployment) -> float:
    """Seconds below which no pass of a decoding engine is: reading what a token must see."""
    spec, plan, model = read_device(one.device), one.engine.plan, one.model
    parts = model.weight_parts(plan)
    w = model.workload
    experts = parts.pop("experts", 0.0)
    parts.pop("embedding and head", None)
    if w.experts:
        # A token alone reads the experts that it goes to, spread over their ranks at best.
        experts *= min(1.0, w.top_k / w.experts)
    read = (sum(parts.values()) + experts) * plan.pp
    return read / spec.bandwidth / one.options.accepted
