"""Peak memory by framework: how state, activations and buffers differ from the plain count."""

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

#: Logarithmic error that weighs as much as a deviation of a figure: what repeated runs and the
#: roundings of sources leave.
_ERROR = 0.05
#: Deviations of the factors on state and activations, and of the constant in GiB, around the plain
#: count. Engineering estimates: allocators and copies of gradients add a third or so.
_DEVIATIONS = (0.33, 0.33, 1.0)
#: Ends of the 90 % interval in logarithms: of frameworks that were learned from, by the rows of
#: published-steps that say their memory (1,525 of five frameworks, each of which counts the same),
#: and of others, with each framework left out (``tests/models/steps/test_memory.py``).
KNOWN_ENDS, OTHER_ENDS = (-0.17, 0.36), (-0.2, 0.5)
#: Compute capabilities × 10 whose units take operands of 8 bits in any layout (Transformer Engine,
#: ``is_non_tn_fp8_gemm_supported``).
_ANY_LAYOUT = (*range(100, 120), *range(130, 200))
#: Bytes of a gibibyte.
_GIB = 2.0**30


@dataclass(frozen=True)
class MemoryLaw:
    """Peak bytes from the plain count.

    Attributes:
        state: Factor on parameters, gradients and optimiser state.
        activations: Factor on activations and working sets.
        constant: GiB besides.
    """

    state: float = 1.0
    activations: float = 1.0
    constant: float = 2.0

    def applied(self, memory: StageMemory) -> StageMemory:
        """Memory of a stage by the law, from its plain count.

        Parameters are counted exactly. What measurements say of state as a whole beyond that is
        copies of them, or gradients that are not there at the peak: it counts as reserved.
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
        """Bytes of a stage."""
        return self.applied(memory).total

    def to_list(self) -> list[float]:
        """Plain data."""
        return [round(value, 4) for value in asdict(self).values()]


def weight_copies(workload: Workload, spec: DeviceSpec) -> int:
    """Copies of the weights of quantised products that a device keeps during a training step.

    One is as the forward pass takes them. The backward pass takes a transposed one, where values
    share scales in blocks, which lie along one side, or the device's units take operands of 8 bits
    in one layout alone. XLA for TPUs quantises weights where they are used.

    Args:
        workload: With products in the format that the device multiplies.
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
    """Laws by framework, and under the empty name their median, for frameworks not measured.

    Args:
        frameworks: Of each run.
        stages: Plain count of its fullest stage.
        measured: Bytes; NaN where a run does not say.
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
    """Law of a framework, or the median one of those with its engine, or of all."""
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
        laws: By framework.
        framework: Whose law gave the total.
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
