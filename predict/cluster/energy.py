"""Energy of steps and of serving: units at work by the law of power, and waiting for the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ...common.interval import Interval
from ...features.cost.formats import FORMATS
from ...features.devices.catalogue import read_device
from ...features.devices.device import DeviceSpec
from ...features.operators.op import Op
from ...features.operators.routing import busy_rank
from ...models.power.energy import energy
from ...models.power.law import Work
from ...simulate.serving.forward import ROUTING_SKEW
from ...simulate.serving.load import CLASSES, Load, Run
from ..operator.prices import work_of
from .deployment import Deployment

#: Cores that wait for weights draw less than those that multiply: the share of their power is the
#: utilisation of the matrix unit over that of the memory, times the first, to the second power, and
#: at most 1. ML.ENERGY's 167 runs of vLLM on 1 to 8 H100, power at their measured throughput: the
#: law alone reads 6 % too much (median) and errs by 18 % on average, with this by 13 %.
_FEEDING, _FEEDING_POWER = 2.3, 0.15
#: Classes of a pass in which nothing runs on the device, and the one in which its cores poll. While
#: the host launches kernels, they run one by one.
_IDLE, _POLLING = ("host", "sequence"), "network"


def step_energy(
    seconds: Mapping[Op, float],
    counts: Mapping[Op, float],
    computing: float,
    total: Interval,
    spec: DeviceSpec,
    devices: int,
    cap: float = 1.0,
) -> Interval | None:
    """Joules of a step over all its devices; ``None`` where the power limit is unknown.

    The busiest device stands for all, which overstates energy where stages are unequal.

    Args:
        seconds: Time of all executions of each operator on the busiest device.
        counts: Executions of each.
        computing: Seconds of the step in which a device computes.
        total: Time of the step, with its interval.
        spec: The device.
        devices: Number of devices.
        cap: Sustained power as a share of the limit.
    """
    calls = [call for call, value in seconds.items() if value > 0]
    own = np.array([seconds[call] for call in calls])
    each = own / np.array([counts[call] for call in calls])
    return energy(spec, work_of(calls, each, spec), own, computing, total, devices, cap)


def serving_energy(
    deployment: Deployment, load: Load, run: Run, total: Interval
) -> Interval | None:
    """Joules of all devices while they serve a load; ``None`` where the power limit is unknown.

    Passes read the weights once, of experts those that their tokens reach, and every output token
    reads the keys and values before it; products count the parameters that are active for a token.
    Cores poll while they wait for the network, and idle while they wait for the host.

    Args:
        deployment: What serves.
        load: The requests.
        run: What became of them.
        total: Seconds from the first request to the last token of all that is asked about, with
            their interval.
    """
    # The run is of some of the requests; what all of them take is in proportion.
    more = load.count / len(load.prompts)
    total = Interval(*(end / more for end in total))
    spec = read_device(deployment.device)
    model, plan = deployment.model, deployment.engine.plan
    workers = [deployment.engine, *([deployment.prefill] if deployment.prefill else [])]
    seconds = dict(zip(CLASSES, run.busy / sum(own.count for own in workers), strict=True))
    idle = sum(seconds[name] for name in _IDLE)
    busy = sum(seconds.values()) - idle - seconds[_POLLING]
    # Passes of a closed loop take longer than simulated ones where its requests do.
    scale = min(1.0, total.value / max(sum(seconds.values()), 1e-9))
    busy = min(max(busy * scale, 1e-9), total.value)
    idle = total.value - busy - seconds[_POLLING] * scale
    length = (load.prompts + load.outputs).astype(float)
    one = replace(model.workload, batch=1, seq=max(1, round(length.mean())), mode="forward")
    flops = one.model_flops() * len(length)
    # Half of its output lies before a token on average.
    before = float((load.outputs * (load.prompts + load.outputs / 2.0)).sum())
    passes = run.iterations * _read_weights(deployment, length.sum() / max(run.iterations, 1))
    moved = passes + before * model.token_bytes(plan) * plan.devices / deployment.options.accepted
    rate = spec.matrix_peak(FORMATS[model.weights].rate)
    matrix, memory = flops / deployment.devices, moved / deployment.devices
    ratio = (matrix / rate) / max(memory / spec.bandwidth, 1e-30)
    waiting = busy * (1.0 - min(1.0, (_FEEDING * ratio) ** _FEEDING_POWER))
    work = Work.of(
        np.array([matrix]),
        np.array([memory]),
        np.array([busy]),
        np.array([waiting]),
        rate,
        spec.bandwidth,
        np.zeros(1, bool),
    )
    joules = energy(spec, work, np.array([busy]), busy, total, deployment.devices, idle=idle)
    return joules and joules.times(more)


def _read_weights(deployment: Deployment, tokens: float) -> float:
    """Bytes of weights that a pass of some tokens reads on all devices of an engine."""
    model, plan = deployment.model, deployment.engine.plan
    parts = model.weight_parts(plan)
    sizes = model.workload
    if sizes.experts:
        asked = (max(tokens, 1.0), sizes.top_k, sizes.experts, 1, ROUTING_SKEW)
        reached = busy_rank(*(np.array([float(n)]) for n in asked))[1][0]
        parts["experts"] *= reached / sizes.experts
    return sum(parts.values()) * plan.devices
