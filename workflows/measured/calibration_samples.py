"""Candidates and samples of a calibration, and the check that the adapted model is better."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ...common.errors import WorseModelError
from ...common.types import JsonObject

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from ...datagen.profile.plan import Item
    from ...features.devices.device import DeviceSpec
    from ...features.kernels.kernel import Kernel
    from ...models.cost_model import CostModel

logger = logging.getLogger(__name__)

#: Maximum number of kernels per program, the costliest ones; limits the size of the dense
#: covariance matrix of all candidates. Engineering estimate.
MAX_KERNELS = 40
#: Increase of the relative error that does not count as worse: the last printed digit.
_SAME = 0.001
#: Relative error from which a model is of little use (the worst published source of steps, adapted
#: to twenty of its steps, has 0.67 on the others), and the fraction of the logarithm of the earlier
#: error by which such a model must improve. Engineering estimates.
_USELESS, _GAIN = 1.0, 0.1
#: Ratio to the prediction from which a measurement is assumed to be in a wrong unit or of a
#: different run than its row describes. All 2,232 published steps are within a factor of 25 of the
#: shipped models, and the times per token of three published runs of each model, engine and chip
#: (532) within 6.
FAR = 30.0


def check_unseen(
    console: Console, what: str, before: float, after: float, *, keep: bool = True
) -> None:
    """Print an adapted model's error on held-out measurements; refuse a model that is no better.

    With measurements that do not depend on what was run, such as random times, errors remain beyond
    :data:`_USELESS`, a little larger or smaller than before.

    Args:
        console: Console to print to.
        what: The measurements, such as ``5 programs``, each predicted without itself.
        before: Relative error of the model before.
        after: Relative error of the model adapted to the other measurements.
        keep: Whether the model is to be saved.

    Raises:
        WorseModelError: The model to be saved is worse than before, or still of no use.
    """
    errors = f"{before:.1%} before, {after:.1%} after"
    message = f"error on {what}, each held out of the calibration: {errors}"
    console.print(message, highlight=False, soft_wrap=True)
    # Negated, to be true for nan.
    if not after <= before + _SAME and keep:
        raise WorseModelError(
            f"the adapted model is worse on {what} held out of the calibration, so it is not "
            f"saved: error {errors}",
            hint="measure more, on a quiet machine, or keep the model as it is",
        )
    if after <= _USELESS:
        return
    if np.log1p(after) > (1.0 - _GAIN) * np.log1p(before) and keep:
        raise WorseModelError(
            f"the adapted model is of no use on {what} held out of the calibration, so it is not "
            f"saved: error {errors}",
            hint="the times do not depend on what was run: check that they belong to these rows "
            "and are in the unit of their column",
        )
    console.print(
        f"WARNING: an error of {after:.0%} is of little use: the times hardly depend on what was "
        "run",
        highlight=False,
        soft_wrap=True,
    )


def far_off(name: str, logs: float) -> str:
    """Reason to ignore an implausible measurement; empty if it is plausible.

    Args:
        name: Name of the row and the figure, with its value and unit.
        logs: ``log(measured / predicted)`` of the model before the calibration.
    """
    factor = float(np.exp(abs(logs)))
    if not factor > FAR:
        return ""
    return (
        f"{name} is {factor:,.0f} times as {'long' if logs > 0.0 else 'short'} as predicted: not "
        f"used, because no published run is off by {FAR:.0f}; check that it is in the unit of its "
        "column and of the run that the row describes"
    )


def plausible(names: Sequence[str], logs: np.ndarray, tell: Callable[[str], None]) -> np.ndarray:
    """Mask of the measurements that are not :func:`far_off`, bool, shape ``(n,)``.

    Args:
        names: Name of each measurement's row and figure, with its value and unit.
        logs: ``log(measured / predicted)`` of the model before the calibration, shape ``(n,)``.
        tell: Called with the reason for each of the others.
    """
    reasons = [far_off(name, log) for name, log in zip(names, logs.tolist(), strict=True)]
    for reason in filter(None, reasons):
        tell(reason)
    return np.array([not reason for reason in reasons], bool)


def mean_error(logs: np.ndarray) -> float:
    """Mean of absolute logarithms of ratios, converted to a relative error."""
    return float(np.expm1(np.abs(logs).mean()))


@dataclass(frozen=True)
class Candidate:
    """A program that may be measured.

    Attributes:
        item: The program, for the profiler.
        kernels: The program's costliest kernels.
        share: Share of each in the program's predicted time, shape ``(n,)``.
        factors: Factor on the latency of each of the program's kernels due to loops, by hash.
        runs: Executions of each of the program's kernels, multiplied by those factors, by hash; the
            program's time is the sum of these times the kernels' latencies.
    """

    item: Item
    kernels: tuple[Kernel, ...]
    share: np.ndarray
    factors: Mapping[str, float]
    runs: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Samples:
    """Distinct measured kernels by hash; a later measurement replaces an earlier one.

    Attributes:
        kernels: The kernels.
        seconds: Latency of each outside of loops, as the model predicts it.
        rounds: Round in which each was first measured.
    """

    kernels: dict[str, Kernel] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    rounds: dict[str, int] = field(default_factory=dict)

    def add(
        self,
        rows: Sequence[JsonObject],
        number: int = 0,
        factors: Mapping[str, float] | None = None,
    ) -> list[str]:
        """Add the kernels of a program.

        Args:
            rows: Rows of the program's kernels; the row of the program itself is ignored.
            number: Round that measured them.
            factors: Factors due to the program's loops by hash; 1 by default.

        Returns:
            Hashes of the new kernels.
        """
        from ...features.kernels.extract import kernels_from_irs

        # Zero latencies are below the resolution of the trace's clock.
        own = [r for r in rows if r["level"] != "program" and r["latency_us_p50"] > 0]
        new = [r for r in own if r["kernel_hash"] not in self.kernels]
        read = kernels_from_irs([r["kernel_ir"] for r in new])
        self.kernels |= {r["kernel_hash"]: k for r, k in zip(new, read, strict=True)}
        self.rounds |= {r["kernel_hash"]: number for r in new}
        # The model predicts kernels outside of loops and applies the factors afterwards.
        known = factors or {}
        self.seconds |= {
            r["kernel_hash"]: r["latency_us_p50"] * 1e-6 / known.get(r["kernel_hash"], 1.0)
            for r in own
        }
        return list(dict.fromkeys(r["kernel_hash"] for r in new))

    def __len__(self) -> int:
        """Number of kernels."""
        return len(self.kernels)


def candidate_of(item: Item, model: CostModel, device: DeviceSpec) -> Candidate | None:
    """Compile a program for the local device, and predict its kernels.

    Args:
        item: The program.
        model: Model that determines the costliest kernels.
        device: The local device.

    Returns:
        ``None`` if it cannot be lowered here, or has no kernel that takes time.
    """
    from ...common.errors import OpcastError
    from ...datagen.profile.plan import load_item
    from ...features.ir.reader import read_program
    from ...features.lowering.lower import lower
    from ...models.program.context import loop_factors

    try:
        lowered = lower(read_program(load_item(item).mlir))
    except OpcastError as error:
        logger.info("%s: %s", item.key, error)
        return None
    own = {k.hash: k for k in lowered.kernels if k.takes_time}
    if not own:
        return None
    # Equal kernels are merged, with the sum of their executions.
    runs, inside = dict.fromkeys(own, 0.0), dict.fromkeys(own, 0.0)
    factors = loop_factors(lowered.kernels, device)
    for kernel, factor in zip(lowered.kernels, factors.tolist(), strict=True):
        if kernel.hash in runs:
            runs[kernel.hash] += kernel.multiplicity
            inside[kernel.hash] += kernel.multiplicity * factor
    kernels = list(own.values())
    latency = model.predict_kernels(kernels, device).latency
    total = latency * np.array(list(inside.values()))
    costly = np.argsort(-total)[:MAX_KERNELS]
    # Avoids division by zero if the model predicts zero for all kernels.
    share = total[costly] / max(float(total.sum()), 1e-12)
    # Kernels of branches that are never taken have no label.
    mean = {h: inside[h] / runs[h] for h in own if runs[h] > 0}
    return Candidate(item, tuple(kernels[i] for i in costly), share, mean, inside)


@dataclass(frozen=True)
class Round:
    """A round of measurements, with the model's errors before it learned from them.

    Attributes:
        learned: Number of kernels learned before the round.
        kernels: Number of kernels measured in the round.
        programs: Names of the programs of the round.
        before: Median relative error of the model without correction.
        error: Median relative error of the model corrected by the earlier rounds.
        seconds: Seconds since the start.
    """

    learned: int
    kernels: int
    programs: tuple[str, ...]
    before: float
    error: float
    seconds: float


def rounds_table(rounds: Sequence[Round]) -> pd.DataFrame:
    """Tabulate rounds, with errors in percent."""
    import pandas as pd

    return pd.DataFrame(
        {
            "learned": [r.learned for r in rounds],
            "new kernels": [r.kernels for r in rounds],
            "programs": [len(r.programs) for r in rounds],
            "model as it was": [round(100 * r.before, 1) for r in rounds],
            "calibrated": [round(100 * r.error, 1) for r in rounds],
            "seconds": [round(r.seconds) for r in rounds],
        }
    )


def unseen_errors(
    model: CostModel,
    device: DeviceSpec,
    samples: Samples,
    programs: Sequence[Mapping[str, float]],
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the error on each measured program with its kernels held out of the calibration.

    A program's time is the sum over its kernels, both measured and predicted.

    Args:
        model: Model calibrated to the samples.
        device: The device.
        samples: The measured kernels.
        programs: Executions of kernels by hash, for each program.

    Returns:
        ``log(measured / predicted)`` of each program, before and after the calibration; empty if
        there is only one program.
    """
    known = model.corrections[device.name]
    place = {digest: n for n, digest in enumerate(samples.kernels)}
    measured = np.array([samples.seconds[digest] for digest in place])
    plain = model.estimator.predict(list(samples.kernels.values()), device).latency
    errors = []
    for runs in programs if len(programs) > 1 else ():
        count = np.array([runs.get(digest, 0.0) for digest in place])
        shifts = known.without(np.flatnonzero(count).tolist())
        own = np.array(list(shifts), int)
        held, before = (float((count * each)[own].sum()) for each in (measured, plain))
        if held > 0.0:
            after = float((count * plain)[own] @ np.exp(list(shifts.values())))
            errors.append([np.log(held / before), np.log(held / after)])
    both: np.ndarray = np.array(errors).reshape(-1, 2).T
    return both[0], both[1]
