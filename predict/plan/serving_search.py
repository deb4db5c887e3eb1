"""Search over deployments of a model: engines, plans, batch limits, separate prefill workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ...common.errors import OpcastError
from ...features.devices.catalogue import read_device
from ...simulate.serving.latencies import Slo
from ...simulate.serving.load import Load
from ...simulate.serving.served import EnginePlan
from ..cluster.deployment import Deployment, Workers, check_blocks, deployment_of
from ..cluster.serving import ServingPredictor
from ..cluster.serving_case import FleetCase, LoadSpec, SearchCase, ServingCase
from ..cluster.serving_engine import engine_cache, engine_memory
from ..cluster.serving_load import draw, is_open, load_of, parse_load, parse_slo
from .serving_answer import Planned, ServingPlans

#: Batch limits per rank to try below the framework's default, trading throughput for latency.
BATCHES = (16, 64, 256)
#: Shares of the devices to use for separate prefill workers.
PREFILL_SHARES = (0.25, 0.5, 0.75)
#: Progress callback: deployments done, deployments in total, and the next one.
Show = Callable[[int, int, str], None]


def engine_plans(base: Deployment, devices: int) -> Iterator[EnginePlan]:
    """Yield plans of one engine on at most some number of devices, smallest first.

    Tensor parallelism stays within a node; pipelines may cross nodes. Experts are split over the
    tensor-parallel ranks, distributed whole over these, or distributed over ranks with
    data-parallel attention.
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
    """Yield the deployments that use all devices, without those that differ only in batch limit.

    Args:
        base: Model, device, framework and options; its workers are ignored.
        devices: Number of devices.
        apart: Whether to try separate prefill workers.
    """
    plans = list(engine_plans(base, devices))
    for plan in plans:
        if devices % plan.devices == 0:
            yield replace(base, engine=Workers(plan, devices // plan.devices), prefill=None)
    if not apart:
        return
    # Of few devices, two shares are the same number.
    for ahead in dict.fromkeys(round(devices * share) for share in PREFILL_SHARES):
        for first in plans:
            for second in plans:
                # Prefill gains nothing from pipelines or data-parallel attention.
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
    """Return the numbers of devices to try: powers of two, and all of them."""
    return [*(1 << n for n in range((devices - 1).bit_length())), devices]


def search_case(
    predictor: ServingPredictor,
    case: SearchCase,
    *,
    files: bool,
    fewer: bool = True,
    show: Show = lambda done, of, what: None,
) -> ServingPlans:
    """Search the deployments of a case.

    Args:
        predictor: Predicts them.
        case: The model, the devices, the load and the SLO.
        files: Whether the model's name may be a file.
        fewer: As for :func:`search`.
        show: As for :func:`search`.

    Raises:
        OpcastError: The model, device, load or SLO is not usable.
    """
    # A transfer rate applies only to the deployments of the search with prefill workers.
    engines = replace(case.options, transfer=0.0)
    served = ServingCase(case.model, FleetCase(device=case.device), engines)
    base = replace(deployment_of(served, files=files), options=case.options, context=0)
    load, slo = parse_load(case.load), parse_slo(case.judged.slo)
    apart = not case.together
    return search(predictor, base, case.gpus, load, slo, apart=apart, fewer=fewer, show=show)


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
    """Simulate deployments, after cheap exclusions; an interrupt keeps the results so far.

    A deployment is skipped if its weights do not fit, or if a single pass over the weights at
    memory bandwidth is slower than the SLO allows. Batch limits below the framework's default are
    tried only for deployments on the front.

    Args:
        predictor: Predictor of the deployments.
        base: Model, device, framework and options.
        devices: Number of devices.
        spec: The load.
        slo: Latency limits.
        apart: Whether to try separate prefill workers.
        fewer: Whether to try fewer devices as well.
        show: Progress callback, see :data:`Show`.

    Raises:
        PlanError: The load lacks the data that the router needs.
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
        # Smaller batch limits for the front.
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


#: Maximum devices of an engine to look for if nothing fits.
_MOST_DEVICES = 1024


def _fewest(predictor: ServingPredictor, base: Deployment, devices: int, load: Load) -> int:
    """Return the devices of the smallest engine that fits model and longest request; 0 if none."""
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
    """Simulate changes of the deployment that comes nearest to the SLO.

    Args:
        predictor: Predictor of the deployments.
        found: Results so far, to which the changes are added.
        slow: Deployments that are too slow for the SLO under any load.
        spec: The load.
        load: Requests of the load.
    """
    if found.nearest is None and slow:
        # Nothing was simulated, since all deployments are too slow: take the fastest of them.
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
    """Yield changes that may make a deployment faster: fp8 weights, more devices, wider engines."""
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
        yield "fp8 weights", replace(own, model=narrow)
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
    """Return the minimum seconds of a decode pass: reading the weights for a single token."""
    spec, plan, model = read_device(one.device), one.engine.plan, one.model
    parts = model.weight_parts(plan)
    w = model.workload
    experts = parts.pop("experts", 0.0)
    parts.pop("embedding and head", None)
    if w.experts:
        # A single token reads only its own experts, at best spread evenly over their ranks.
        experts *= min(1.0, w.top_k / w.experts)
    read = (sum(parts.values()) + experts) * plan.pp
    return read / spec.bandwidth / one.options.accepted
