"""What explains the difference between a predicted and a traced time, in parts that add up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from ...datagen.traces.trace import RunTime

#: Fewer kernels than this do not separate a common factor from their own errors.
_LEAST = 4


@dataclass(frozen=True)
class ClassTime:
    """Kernels of one class in one run; microseconds.

    Attributes:
        kind: Name of the class.
        predicted_us: Predicted.
        traced_us: Traced.
        count: Distinct kernels.
    """

    kind: str
    predicted_us: float
    traced_us: float
    count: int


@dataclass(frozen=True)
class Part:
    """A step of the waterfall; microseconds, positive where the trace takes longer."""

    what: str
    us: float


@dataclass
class TraceCheck:
    """A prediction beside a trace; microseconds of one run.

    Attributes:
        trace: File.
        format: ``xplane``, ``kineto`` or ``nsys``.
        device: Name of the device.
        predicted_us: Predicted time of a run.
        lo_us: Lower end of its interval.
        hi_us: Upper end.
        traced_us: Traced time of a run; of a trace without times of start, the sum of its kernels.
        runs: Runs in the trace; 0 if it does not separate them.
        host_us: Between two runs, which no prediction holds.
        matched: Share of the traced kernels' time that is predicted.
        factor: What all kernels take longer by; 1 if there is no common factor.
        classes: Kernels by class, the longest first.
        waterfall: Parts from the predicted to the traced time.
        kernels: Name, class, predicted, lower and upper end, and traced of each kernel, and how
            often a run executes it.
        unmatched: Microseconds by name of what is not predicted, the longest first.
        notes: What limits the comparison.
    """

    trace: str
    format: str
    device: str
    predicted_us: float
    lo_us: float
    hi_us: float
    traced_us: float
    runs: int
    host_us: float
    matched: float
    factor: float
    classes: list[ClassTime]
    waterfall: list[Part]
    kernels: list[KernelPair]
    unmatched: list[tuple[str, float]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def error(self) -> float:
        """``(predicted - traced) / traced``."""
        return self.predicted_us / self.traced_us - 1.0

    def to_dict(self) -> dict[str, object]:
        """Plain data, as ``opcast check --trace --json`` prints it."""
        return {**asdict(self), "error": self.error}


@dataclass(frozen=True)
class KernelPair:
    """A kernel's prediction beside the trace; microseconds of one execution.

    Attributes:
        name: Instruction or operator.
        kind: Class.
        runs: Executions in a run.
        predicted_us: Predicted.
        lo_us: Lower end of the interval.
        hi_us: Upper end.
        traced_us: Median of the trace.
    """

    name: str
    kind: str
    runs: float
    predicted_us: float
    lo_us: float
    hi_us: float
    traced_us: float

    @classmethod
    def of(
        cls, name: str, kind: str, runs: float, times_us: Iterable[float], traced: Sequence[float]
    ) -> KernelPair:
        """The pair of a prediction with the ends of its interval, and each execution's seconds."""
        value, lo, hi = map(float, times_us)
        return cls(name, kind, runs, value, lo, hi, float(np.median(traced)) * 1e6)


def by_class(pairs: Sequence[KernelPair]) -> list[ClassTime]:
    """Sum kernels by class, the longest first."""
    kinds = dict.fromkeys(p.kind for p in pairs)
    classes = []
    for kind in kinds:
        own = [p for p in pairs if p.kind == kind]
        predicted = sum(p.predicted_us * p.runs for p in own)
        traced = sum(p.traced_us * p.runs for p in own)
        classes.append(ClassTime(kind, predicted, traced, len(own)))
    return sorted(classes, key=lambda c: -c.traced_us)


def common_factor(pairs: Sequence[KernelPair]) -> float:
    """What kernels take longer by in common: another clock, or a machine that is shared.

    Quartiles of traced over predicted times, weighted by the predicted ones: if three quarters of
    the time are slower than predicted, the least of their factors is common to all of these, and so
    for faster ones. Otherwise kernels err both ways and nothing is common.
    """
    if len(pairs) < _LEAST:
        return 1.0
    ratios = np.array([p.traced_us / p.predicted_us for p in pairs])
    weights = np.array([p.predicted_us * p.runs for p in pairs])
    order = np.argsort(ratios)
    share = np.cumsum(weights[order]) / weights.sum()
    low, high = (float(ratios[order][np.searchsorted(share, q)]) for q in (0.25, 0.75))
    return low if low > 1.0 else high if high < 1.0 else 1.0


def waterfall(
    predicted_us: float,
    classes: Sequence[ClassTime],
    factor: float,
    run: RunTime | None,
    unmatched_us: float,
    collective: str,
) -> list[Part]:
    """Explain the difference in parts that add up to the traced time.

    With predicted kernels ``K`` and traced ones ``k`` (by class, medians of executions), a factor
    ``f`` that is common to all, collectives ``C`` and ``c``, what was not predicted ``u``, traced
    gaps ``g``, time ``o`` saved by kernels that run at once, and what the executions of this run
    take beyond these medians, ``m``::

        predicted = K + C + G - O,   traced = k + c + u + m + g - o
        traced - predicted = (f - 1) K + Σ (k - f K) + u + (c - C) + (g - G) + (O - o) + m

    Args:
        predicted_us: Predicted time of a run; of its kernels alone if ``run`` is unknown.
        classes: Kernels by class.
        factor: The factor that is common to all kernels but collectives.
        run: A traced run; ``None`` if start times are unknown.
        unmatched_us: Kernels of a run that were not predicted.
        collective: Name of the class of collectives.
    """
    own = [c for c in classes if c.kind != collective]
    others = [c for c in classes if c.kind == collective]
    kernels = sum(c.predicted_us for c in own)
    sent, took = (sum(getattr(c, f"{n}_us") for c in others) for n in ("predicted", "traced"))
    parts = [Part("clock: all kernels by one factor", (factor - 1.0) * kernels)]
    parts += [Part(f"kernels: {c.kind}", c.traced_us - factor * c.predicted_us) for c in own]
    parts.append(Part("kernels that are not predicted", unmatched_us))
    parts.append(Part("communication", took - sent))
    if run is not None:
        beyond = predicted_us - kernels - sent
        parts.append(Part("gaps and launches", run.gaps * 1e6 - max(beyond, 0.0)))
        parts.append(Part("kernels at once", -run.overlap * 1e6 - min(beyond, 0.0)))
        # Medians of kernels need not add up to the kernels of the run.
        medians = sum(c.traced_us for c in classes) + unmatched_us
        took_all = (run.kernels + run.collectives) * 1e6
        parts.append(Part("executions beyond their median", took_all - medians))
    return parts
