"""Which kernels of a program to measure for the interval of its time."""

from __future__ import annotations

import numpy as np

from ...common.errors import ProgramError
from ...common.interval import Interval
from ...models.adapt.active import Errors, RemainingVariance
from ...models.adapt.device_correction import kernel_sites, prior_params
from ...models.core.base import distinct
from ...models.core.kernel_table import kernel_table
from ..next_runs import NextRuns, Run, next_runs, variance_of
from .prediction import origin
from .predictor import Predictor, ProgramCase


def next_kernels(
    predictor: Predictor, case: ProgramCase, count: int, price: float | None = None
) -> NextRuns:
    """Choose kernels of a program to measure, by themselves or in any program that has them.

    Args:
        predictor: Predicts the program.
        case: The program on a device.
        count: Number of kernels; equal ones count once.
        price: Of a device for an hour; with one, by what they narrow for their cost.

    Raises:
        OpcastError: The program, device or lowering is not usable.
    """
    _, lowered, device = case.lower(predictor)
    prediction = predictor.predict_lowered(lowered, device)
    if not lowered.kernels:
        raise ProgramError("the program has no kernel", hint="nothing can be measured of it")
    kernels, index = distinct(lowered.kernels)
    total = np.bincount(index, [k.total_us for k in prediction.kernels], len(kernels))
    first = [int(np.argmax(index == place)) for place in range(len(kernels))]
    share = total / (total.sum() or 1.0)
    sites = kernel_sites(kernel_table(kernels, device), device)
    known = predictor.model_for(device).corrections.get(device.name)
    measured = known.correction.sites if known else None
    # As opcast calibrate --budget: the parameters are cautious already, so there are no variants.
    left = RemainingVariance.of(sites, prior_params(), share, measured)
    errors = _with_sum(Errors(left.posterior, left.noise), share)
    ends = (prediction.latency_us, prediction.lo_us, prediction.hi_us)
    asked = Interval(*(us * 1e-6 for us in ends))
    # What is each kernel's own averages out over a program.
    stays = left.noise * float((share**2).sum())
    told = max(variance_of(asked) - stays, 0.0)
    runs = [
        Run(f"{own.name} ({part:.0%} of the time; {origin(own)})", "", own.latency_us * 1e-6)
        for own, part in zip((prediction.kernels[at] for at in first), share.tolist(), strict=True)
    ]
    return next_runs(
        asked,
        runs,
        [errors.given(told)],
        count,
        kind="kernel",
        price=price,
        stays=stays,
        then=(
            "opcast campaign --programs FOLDER --out measured   # on the device; "
            "FOLDER holds the program, or smaller ones with these kernels",
            "opcast data import campaign measured --out rows",
            f"opcast calibrate --device {device.name} --data rows --samples {count} --out adapted",
        ),
    )


def _with_sum(errors: Errors, share: np.ndarray) -> Errors:
    """Errors of kernels, and last that of their sum, to which each adds by its share."""
    joint = np.vstack([np.eye(len(share)), share])
    return Errors(joint @ errors.covariance @ joint.T, errors.noise)
