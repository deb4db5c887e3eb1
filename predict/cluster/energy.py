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
from ...models.power.energy import energy
from ...models.power.law import Work
from ...simulate.serving.load import Load, Run
from ..operator.prices import work_of
from .deployment import Deployment

#: Cores that wait for weights draw less than those that multiply: the share of their power is the
#: utilisation of the matrix unit over that of the memory, times the first, to the second power, and
#: at most 1. Products of 1 to 64 rows on H200 (published-kernels pack, power, linear):
#: the law alone reads 26 % too much (median), with this it errs by 12 %.
_FEEDING, _FEEDING_POWER = 1.6, 0.3


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

    Passes read all weights once, and every output token the keys and values before it; products
    count the parameters that are active for a token.

    Args:
        deployment: What serves.
        load: The requests.
        run: What became of them.
        total: Seconds from the first request to the last token, with their interval.
    """
    spec = read_device(deployment.device)
    model, plan = deployment.model, deployment.engine.plan
    workers = [deployment.engine, *([deployment.prefill] if deployment.prefill else [])]
    busy = float(run.busy.sum()) / sum(own.count for own in workers)
    busy = min(max(busy, 1e-9), total.value)
    length = (load.prompts + load.outputs).astype(float)
    one = replace(model.workload, batch=1, seq=max(1, round(length.mean())), mode="forward")
    flops = one.model_flops() * len(length)
    # Half of its output lies before a token on average.
    before = float((load.outputs * (load.prompts + load.outputs / 2.0)).sum())
    passes = run.iterations * model.weight_bytes(plan) * plan.devices
    moved = passes + before * model.token_bytes(plan) * plan.devices / deployment.options.accepted
    each = np.array([busy])
    rate = spec.matrix_peak(FORMATS[model.weights].rate)
    matrix = np.array([flops / deployment.devices])
    memory = np.array([moved / deployment.devices])
    ratio = (matrix / rate) / np.maximum(memory / spec.bandwidth, 1e-30)
    waiting = each * (1.0 - np.minimum(1.0, (_FEEDING * ratio) ** _FEEDING_POWER))
    work = Work.of(matrix, memory, each, waiting, rate, spec.bandwidth, np.zeros(1, bool))
    return energy(spec, work, each, busy, total, deployment.devices)
