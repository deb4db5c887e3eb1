"""What a calibration may measure, what it has measured, and what its rounds were worth."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ...common.types import JsonObject

if TYPE_CHECKING:
    import pandas as pd

    from ...datagen.profile.plan import Item
    from ...features.devices.device import DeviceSpec
    from ...features.kernels.kernel import Kernel
    from ...models.cost_model import CostModel

logger = logging.getLogger(__name__)

#: Kernels considered for each program, those that take most time; the covariance of all candidates'
#: kernels is a dense matrix. Engineering estimate.
MAX_KERNELS = 40


@dataclass(frozen=True)
class Candidate:
    """A program that may be measured.

    Attributes:
        item: Program, as the profiler takes it.
        kernels: The program's costliest kernels.
        share: Share of each in the program's predicted time, shape ``(n,)``.
        factors: Factor on the latency of each of the program's kernels for its loops, by hash.
    """

    item: Item
    kernels: tuple[Kernel, ...]
    share: np.ndarray
    factors: Mapping[str, float]


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
    return Candidate(item, tuple(kernels[i] for i in costly), share, mean)


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
