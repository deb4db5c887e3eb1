"""Decompose the difference between a predicted and a traced time into parts that add up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from ...datagen.traces.trace import RunTime

#: Minimum number of kernels to distinguish a common factor from errors of single kernels.
_LEAST = 4


@dataclass(frozen=True)
class ClassTime:
    """Time of a class of kernels in a run.

    Attributes:
        kind: Name of the class.
        predicted_us: Predicted time.
        traced_us: Traced time.
        count: Number of distinct kernels.
    """

    kind: str
    predicted_us: float
    traced_us: float
    count: int


@dataclass(frozen=True)
class Part:
    """A step of the waterfall; the time is positive if the trace takes longer."""

    what: str
    us: float


@dataclass
class TraceCheck:
    """Comparison of a prediction with a trace; times are per run.

    Attributes:
        trace: Path of the trace.
        format: ``xplane``, ``kineto`` or ``nsys``.
        device: Name of the device.
        predicted_us: Predicted time of a run.
        lo_us: Lower bound of its interval.
        hi_us: Upper bound.
        traced_us: Traced time of a run; the sum of the kernels if the trace has no start times.
        runs: Number of runs in the trace; 0 if it does not separate them.
        host_us: Time between two runs, which is not predicted.
        matched: Share of the traced kernels' time that is predicted.
        factor: Common factor of traced over predicted times; 1 if there is none.
        classes: Times by class of kernel, longest first.
        waterfall: Parts from the predicted to the traced time.
        kernels: The kernels.
        unmatched: Names and µs of kernels that are not predicted, longest first.
        notes: Limitations of the comparison.
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
        """Relative error: ``(predicted - traced) / traced``."""
        return self.predicted_us / self.traced_us - 1.0

    def to_dict(self) -> dict[str, object]:
        """Convert to the output of ``opcast check --trace --json``."""
        return {**asdict(self), "error": self.error}


@dataclass(frozen=True)
class KernelPair:
    """Prediction and trace of a kernel; times of one execution.

    Attributes:
        name: Name of the instruction or operator.
        kind: Class of the kernel.
        runs: Executions per run.
        predicted_us: Predicted time.
        lo_us: Lower bound of its interval.
        hi_us: Upper bound.
        traced_us: Median of the traced executions.
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
        """Make a pair from a prediction with its bounds in µs, and the traced seconds."""
        value, lo, hi = map(float, times_us)
        return cls(name, kind, runs, value, lo, hi, float(np.median(traced)) * 1e6)


def by_class(pairs: Sequence[KernelPair]) -> list[ClassTime]:
    """Sum kernels by class, longest first."""
    kinds = dict.fromkeys(p.kind for p in pairs)
    classes = []
    for kind in kinds:
        own = [p for p in pairs if p.kind == kind]
        predicted = sum(p.predicted_us * p.runs for p in own)
        traced = sum(p.traced_us * p.runs for p in own)
        classes.append(ClassTime(kind, predicted, traced, len(own)))
    return sorted(classes, key=lambda c: -c.traced_us)


def common_factor(pairs: Sequence[KernelPair]) -> float:
    """Common factor of traced over predicted times, due to a different clock or a shared machine.

    Computed from quartiles of the ratios, weighted by predicted time: if three quarters of the time
    are slower than predicted, it is the smallest of their ratios, and correspondingly for faster
    ones. Otherwise kernels err in both directions, and the factor is 1.
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
    """Decompose the difference between predicted and traced time.

    With predicted kernels ``K`` and traced ones ``k`` (by class, medians of executions), a common
    factor ``f``, collectives ``C`` and ``c``, kernels that are not predicted ``u``, traced gaps
    ``g``, overlap of kernels ``o``, and the excess ``m`` of this run's executions over their
    medians::

        predicted = K + C + G - O,   traced = k + c + u + m + g - o
        traced - predicted = (f - 1) K + Σ (k - f K) + u + (c - C) + (g - G) + (O - o) + m

    Args:
        predicted_us: Predicted time of a run; of its kernels alone if ``run`` is unknown.
        classes: Kernels by class.
        factor: Common factor of all kernels except collectives.
        run: A traced run; ``None`` if start times are unknown.
        unmatched_us: Time of the kernels of a run that are not predicted.
        collective: Name of the class of collectives.
    """
    own = [c for c in classes if c.kind != collective]
    others = [c for c in classes if c.kind == collective]
    kernels = sum(c.predicted_us for c in own)
    sent, took = (sum(getattr(c, f"{n}_us") for c in others) for n in ("predicted", "traced"))
    parts = [Part("clock: common factor of all kernels", (factor - 1.0) * kernels)]
    parts += [Part(f"kernels: {c.kind}", c.traced_us - factor * c.predicted_us) for c in own]
    parts.append(Part("kernels that are not predicted", unmatched_us))
    parts.append(Part("communication", took - sent))
    if run is not None:
        beyond = predicted_us - kernels - sent
        parts.append(Part("gaps and launches", run.gaps * 1e6 - max(beyond, 0.0)))
        parts.append(Part("overlap of kernels", -run.overlap * 1e6 - min(beyond, 0.0)))
        # Medians do not add up to the kernels of the run.
        medians = sum(c.traced_us for c in classes) + unmatched_us
        took_all = (run.kernels + run.collectives) * 1e6
        parts.append(Part("executions beyond their median", took_all - medians))
    return parts
