"""What a calibration may measure, what it has measured, and whether it was worth it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
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

#: Kernels considered for each program, those that take most time; the covariance of all candidates'
#: kernels is a dense matrix. Engineering estimate.
MAX_KERNELS = 40
#: Share of the time by which an adapted model may err more than before without counting as worse:
#: half of the last digit in which errors are printed, twice over.
_SAME = 0.001
#: Relative error beyond which a model is of little use: the worst published source of steps,
#: adapted to twenty of its own, errs by 0.67 on the others. And the share of the logarithm of an
#: error before that such a model has to gain. Engineering estimates.
_USELESS, _GAIN = 1.0, 0.1


def check_unseen(
    console: Console, what: str, before: float, after: float, *, keep: bool = True
) -> None:
    """Print an adapted model's error on what it did not learn from; refuse one that is no better.

    Where measurements do not follow what is measured, as random times, errors stay beyond
    :data:`_USELESS`, somewhat less or more than before.

    Args:
        console: Console to print to.
        what: What it was judged on, such as ``5 programs``, each predicted without itself.
        before: Relative error of the model as it was.
        after: Relative error of the model as adapted to the others.
        keep: Whether it is to be saved.

    Raises:
        WorseModelError: It is worse than before or still of no use, and was to be saved.
    """
    errors = f"{before:.1%} before, {after:.1%} after"
    told = f"error on {what}, each left out of what is learned: {errors}"
    console.print(told, highlight=False, soft_wrap=True)
    # Also where one is no number.
    if not after <= before + _SAME and keep:
        raise WorseModelError(
            f"the adapted model is worse on {what} that it did not learn from, so it is not saved: "
            f"error {errors}",
            hint="measure more, on a quiet machine; or keep the model as it is",
        )
    if after <= _USELESS:
        return
    if np.log1p(after) > (1.0 - _GAIN) * np.log1p(before) and keep:
        raise WorseModelError(
            f"the adapted model is of no use on {what} that it did not learn from, so it is not "
            f"saved: error {errors}",
            hint="the times do not follow what was run: are they of these rows, and in the unit "
            "that the column names?",
        )
    console.print(
        f"WARNING: an error of {after:.0%} is of little use: the times hardly follow what was run",
        highlight=False,
        soft_wrap=True,
    )


#: Factor from a prediction at which a measurement is taken for another unit or another run than its
#: row describes. All 2,232 published steps are within 25 of what the shipped models predict, and of
#: three published runs of each model, engine and chip the times of tokens (532) within 6.
FAR = 30.0


def far_off(name: str, logs: float) -> str:
    """Why a measurement is not learned from; empty where it is.

    Args:
        name: Of the row and the figure, with its value and unit.
        logs: ``log(measured / predicted)`` of the model before it is adapted.
    """
    factor = float(np.exp(abs(logs)))
    if not factor > FAR:
        return ""
    return (
        f"{name} is {factor:,.0f} times as {'long' if logs > 0.0 else 'short'} as predicted, and "
        f"no published run is {FAR:.0f} times off: not learned from; is it in the unit that the "
        "column names, and of what the row says?"
    )


def mean_error(logs: np.ndarray) -> float:
    """Mean of absolute logarithms of ratios, as a relative error."""
    return float(np.expm1(np.abs(logs).mean()))


@dataclass(frozen=True)
class Candidate:
    """A program that may be measured.

    Attributes:
        item: Program, as the profiler takes it.
        kernels: The program's costliest kernels.
        share: Share of each in the program's predicted time, shape ``(n,)``.
        factors: Factor on the latency of each of the program's kernels for its loops, by hash.
        runs: Executions of each of the program's kernels with those factors, by hash: its time is
            the sum of these times the kernels' latencies.
    """

    item: Item
    kernels: tuple[Kernel, ...]
    share: np.ndarray
    factors: Mapping[str, float]
    runs: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Samples:
    """Measured kernels, each once; a later measurement replaces an earlier one.

    Attributes:
        kernels: By hash.
        seconds: What each would take outside of loops, where the model predicts it.
        rounds: Round that it was first measured in.
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
        """Add a program's kernels.

        Args:
            rows: Rows of the program's kernels; the row of the program itself is left out.
            number: Round that measured them.
            factors: Factors for the program's loops by hash; 1 where one is missing.

        Returns:
            Hashes of the kernels that were unknown.
        """
        from ...features.kernels.extract import kernels_from_irs

        # A latency of zero is a kernel that the trace's clock could not resolve.
        own = [r for r in rows if r["level"] != "program" and r["latency_us_p50"] > 0]
        new = [r for r in own if r["kernel_hash"] not in self.kernels]
        read = kernels_from_irs([r["kernel_ir"] for r in new])
        self.kernels |= {r["kernel_hash"]: k for r, k in zip(new, read, strict=True)}
        self.rounds |= {r["kernel_hash"]: number for r in new}
        # The model predicts kernels by themselves and applies the factor later: a label that was
        # taken in a loop would count its speed there as an error of the kernel.
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
        model: Decides which of its kernels take most time.
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
    # A program that cannot be lowered here is no candidate; others are.
    except OpcastError as error:
        logger.info("%s: %s", item.key, error)
        return None
    own = {k.hash: k for k in lowered.kernels if k.takes_time}
    if not own:
        return None
    # Equal kernels are one candidate, with the executions of all of them.
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
    # Guard against a model that predicts zero for all of them.
    share = total[costly] / max(float(total.sum()), 1e-12)
    # One label stands for all executions; a branch that is never taken has none.
    mean = {h: inside[h] / runs[h] for h in own if runs[h] > 0}
    return Candidate(item, tuple(kernels[i] for i in costly), share, mean, inside)


@dataclass(frozen=True)
class Round:
    """What a round measured, and the model's errors before it learned from it.

    Attributes:
        learned: Kernels that the model had learned before the round.
        kernels: Kernels measured in the round.
        programs: Names of the programs of the round.
        before: Median relative error on them of the model without correction.
        error: The same of the model as corrected by the earlier rounds.
        seconds: Since the start.
    """

    learned: int
    kernels: int
    programs: tuple[str, ...]
    before: float
    error: float
    seconds: float


def rounds_table(rounds: Sequence[Round]) -> pd.DataFrame:
    """Tabulate rounds, with errors in per cent."""
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
    """Errors on each measured program when its kernels are left out of what is learned.

    A program's time is the sum of its kernels', as measured and as predicted.

    Args:
        model: As calibrated to the samples.
        device: The device.
        samples: Its kernels.
        programs: Executions of kernels by hash, of each program.

    Returns:
        ``log(measured / predicted)`` of each, before and after; empty for a single program, which
        leaves nothing to learn from.
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
