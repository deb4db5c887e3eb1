"""Peak memory by framework: corrections of the analytic count of state, activations and buffers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp

import numpy as np

from ...common.interval import Interval
from ...features.cost.formats import FORMATS
from ...features.devices.device import DeviceSpec
from ...features.devices.rules import capability_of
from ...simulate.step.memory import StageMemory
from ...simulate.step.workload import Workload
from .effects import FRAMEWORKS

#: Logarithmic error weighted like one prior deviation of a parameter: the spread of repeated runs
#: and the rounding of sources.
_ERROR = 0.05
#: Prior deviations of the factors on state and activations, and of the constant in GiB, around the
#: plain count. Engineering estimates: allocators and copies of gradients add a third or so.
_DEVIATIONS = (0.33, 0.33, 1.0)
#: Bounds of the 90 % interval in logarithms: of measured frameworks, from the rows of
#: published-steps with a memory (1,525 rows, five frameworks of equal weight), and of others, with
#: each framework held out in turn (``tests/models/steps/test_memory.py``).
KNOWN_ENDS, OTHER_ENDS = (-0.17, 0.36), (-0.2, 0.5)
#: Compute capabilities × 10 with matrix units that take 8-bit operands in any layout (Transformer
#: Engine, ``is_non_tn_fp8_gemm_supported``).
_ANY_LAYOUT = (*range(100, 120), *range(130, 200))
#: Bytes of a gibibyte.
_GIB = 2.0**30


@dataclass(frozen=True)
class MemoryLaw:
    """Peak bytes as a function of the plain count.

    Attributes:
        state: Factor on parameters, gradients and optimizer state.
        activations: Factor on activations and working sets.
        constant: Additional GiB.
    """

    state: float = 1.0
    activations: float = 1.0
    constant: float = 2.0

    def applied(self, memory: StageMemory) -> StageMemory:
        """Apply the law to the plain count of a stage.

        Parameters are counted exactly. A factor on state therefore stands for copies of them, or
        for gradients that are absent at the peak, and changes the reserved bytes.
        """
        copies = (self.state - 1.0) * memory.parameters
        return StageMemory(
            parameters=memory.parameters,
            gradients=self.state * memory.gradients,
            optimizer=self.state * memory.optimizer,
            activations=self.activations * memory.activations,
            temporary=self.activations * memory.temporary,
            buffers=memory.buffers,
            reserved=max(0.0, self.constant * _GIB + copies),
        )

    def total(self, memory: StageMemory) -> float:
        """Peak bytes of a stage."""
        return self.applied(memory).total

    def to_list(self) -> list[float]:
        """Convert to plain data for JSON."""
        return [round(value, 4) for value in asdict(self).values()]


def weight_copies(workload: Workload, spec: DeviceSpec) -> int:
    """Number of copies of quantized weights that a device keeps during a training step.

    The forward pass needs one. The backward pass needs a transposed one if values share scales in
    blocks, which lie along one dimension, or if the matrix units take 8-bit operands in one layout
    only. XLA for TPUs quantizes weights at their use.

    Args:
        workload: Workload with products in the format that the device multiplies.
        spec: The device.
    """
    if spec.platform != "gpu":
        return 0
    shared = FORMATS[workload.product_dtype].block > 1
    capability = capability_of(str(spec.compiler.get("target", "")))
    return 1 if capability in _ANY_LAYOUT and not shared else 2


def fit_laws(
    frameworks: Sequence[str], stages: Sequence[StageMemory], measured: Sequence[float]
) -> dict[str, MemoryLaw]:
    """Fit a law for each framework, and their median (key ``""``) for unmeasured frameworks.

    Args:
        frameworks: Framework of each run.
        stages: Plain count of its fullest stage.
        measured: Peak bytes; NaN if a run does not report them.
    """
    known = np.isfinite(np.asarray(measured, float))
    laws = {}
    for name in sorted({f for f, own in zip(frameworks, known, strict=True) if own}):
        at = [i for i, f in enumerate(frameworks) if f == name and known[i]]
        laws[name] = _fit([stages[i] for i in at], np.array([measured[i] for i in at]))
    if laws:
        laws[""] = _median(laws.values())
    return laws


def law_of(laws: Mapping[str, MemoryLaw], framework: str) -> MemoryLaw:
    """Law of a framework, else the median of those with the same engine, else of all."""
    if framework in laws:
        return laws[framework]
    engines = FRAMEWORKS["engines"]
    engine = engines.get(framework)
    same = [law for name, law in laws.items() if engine and engines.get(name) == engine]
    return _median(same) if same else laws.get("") or MemoryLaw()


def _median(laws: Iterable[MemoryLaw]) -> MemoryLaw:
    middle = np.median([law.to_list() for law in laws], axis=0)
    return MemoryLaw(*(float(value) for value in middle))


def interval_of(laws: Mapping[str, MemoryLaw], framework: str, total: float) -> Interval:
    """Peak bytes with their 90 % interval.

    Args:
        laws: Laws by framework.
        framework: Framework whose law gave the total.
        total: Bytes.
    """
    low, high = KNOWN_ENDS if framework in laws and framework else OTHER_ENDS
    return Interval(total, total * exp(low), total * exp(high))


def _fit(stages: Sequence[StageMemory], measured: np.ndarray) -> MemoryLaw:
    from scipy.optimize import least_squares

    start = MemoryLaw()
    prior = np.array([start.state, start.activations, start.constant])

    def errors(values: np.ndarray) -> np.ndarray:
        law = MemoryLaw(*(float(v) for v in values))
        said = np.array([law.total(stage) for stage in stages])
        return np.concatenate(
            [np.log(said / measured) / _ERROR, (values - prior) / np.array(_DEVIATIONS)]
        )

    bounds = ([0.3, 0.3, 0.0], [3.0, 4.0, 20.0])
    found = least_squares(errors, prior, bounds=bounds, loss="soft_l1")
    return MemoryLaw(*(float(value) for value in found.x))
