"""Energy of training steps and of serving, from the board power law."""

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
from ...models.power.law import Work, grown_peaks
from ...simulate.serving.forward import ROUTING_SKEW
from ...simulate.serving.load import CLASSES, Load, Run
from ..operator.prices import work_of
from .deployment import Deployment

#: Cores that wait for memory draw less power than busy ones, by the factor
#: ``min(1, (FEEDING · u_matrix / u_memory) ** FEEDING_POWER)`` with the utilizations ``u`` of the
#: matrix unit and of memory. Fitted to ML.ENERGY's 167 runs of vLLM on 1 to 8 H100, at their
#: measured throughput: the power law alone is 6 % too high (median) with a mean error of 18 %, with
#: this factor the mean error is 13 %.
_FEEDING, _FEEDING_POWER = 2.3, 0.15
#: Cost classes in which the device idles, and the class in which its cores poll. Kernels launched
#: one by one keep it busy.
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
    """Return joules of a step over all devices; ``None`` if the power limit is unknown.

    All devices are taken to be as busy as the busiest, which overstates the energy of unequal
    stages.

    Args:
        seconds: Time of all executions of each operator on the busiest device.
        counts: Executions of each operator.
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
    """Return joules of all devices while they serve a load; ``None`` if no power limit is known.

    A pass reads the dense weights and the experts that its tokens reach once; every output token
    reads the keys and values of all tokens before it; FLOPs count the active parameters of tokens
    that are not found in a prefix cache.
    Cores poll while they wait for the network, and idle while they wait for the host.

    Args:
        deployment: The deployment.
        load: The requests.
        run: Simulated times of the requests.
        total: Seconds from the first request to the last token of the whole load, with their
            interval.
    """
    # Only a part of the requests is simulated; energy is extrapolated in proportion.
    more = load.count / len(load.prompts)
    total = Interval(*(end / more for end in total))
    spec = read_device(deployment.device)
    model, plan = deployment.model, deployment.engine.plan
    workers = [deployment.engine, *([deployment.prefill] if deployment.prefill else [])]
    seconds = dict(zip(CLASSES, run.busy / sum(own.count for own in workers), strict=True))
    idle = sum(seconds[name] for name in _IDLE)
    busy = sum(seconds.values()) - idle - seconds[_POLLING]
    # The learned factor on a closed loop's request times makes its passes longer than simulated.
    scale = min(1.0, total.value / max(sum(seconds.values()), 1e-9))
    busy = min(max(busy * scale, 1e-9), total.value)
    idle = total.value - busy - seconds[_POLLING] * scale
    length = (load.prompts + load.outputs).astype(float)
    one = replace(model.workload, batch=1, seq=max(1, round(length.mean())), mode="forward")
    # Tokens in a prefix cache are not run.
    ran = length.sum() - float(run.found.sum())
    flops = one.model_flops() * ran / length.mean()
    # On average half of the output precedes a token.
    before = float((load.outputs * (load.prompts + load.outputs / 2.0)).sum())
    passes = run.iterations * _read_weights(deployment, ran / max(run.iterations, 1))
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
        grown_peaks(spec, [FORMATS[model.weights].rate]),
    )
    joules = energy(spec, work, np.array([busy]), busy, total, deployment.devices, idle=idle)
    return joules and joules.times(more)


def _read_weights(deployment: Deployment, tokens: float) -> float:
    """Return bytes of weights read by a pass of some tokens, over all devices of an engine."""
    model, plan = deployment.model, deployment.engine.plan
    parts = model.weight_parts(plan)
    sizes = model.workload
    if sizes.experts:
        asked = (max(tokens, 1.0), sizes.top_k, sizes.experts, 1, ROUTING_SKEW)
        reached = busy_rank(*(np.array([float(n)]) for n in asked))[1][0]
        parts["experts"] *= reached / sizes.experts
    return sum(parts.values()) * plan.devices
