"""Compare estimators on one program: the same kernels, lowered once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...common.errors import DeviceError, ModelError
from ...common.interval import latency_of
from ...features.kernels.kernel import LoweredProgram
from ..devices import resolve_device
from .predictor import Prediction, Predictor, ProgramCase, load_for_programs

if TYPE_CHECKING:
    from ...features.devices.device import DeviceSpec

#: Name of a device's default model.
LEARNED = "learned"
#: Name of the roofline. Other estimators fall back to the same source, but for the roofline itself
#: it is no fallback.
ROOFLINE = "roofline"


@dataclass(frozen=True)
class Fidelity:
    """One estimator's prediction of a program.

    Attributes:
        name: Name of the estimator as requested.
        prediction: Prediction of the program.
        covered: Share of the summed kernel time that it models itself; the rest is the roofline.
        own: Whether it models each kernel itself, in schedule order.
        reasons: Why it does not model a kernel; empty if it does, or gives no reason.
    """

    name: str
    prediction: Prediction
    covered: float
    own: tuple[bool, ...]
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Predictions of a program on a device by several estimators.

    Attributes:
        program: Name of the program.
        device: Name of the device.
        lowering: Lowering that made its kernels.
        fidelities: Predictions in the order of the request.
    """

    program: str
    device: str
    lowering: str
    fidelities: tuple[Fidelity, ...]

    @property
    def times_us(self) -> np.ndarray:
        """Time of each kernel over all its executions, shape ``(fidelities, kernels)``."""
        return np.array([[k.total_us for k in f.prediction.kernels] for f in self.fidelities])

    @property
    def total_us(self) -> dict[str, float]:
        """Time of the program by fidelity."""
        return {f.name: f.prediction.latency_us for f in self.fidelities}

    def disputed(self, count: int = 10) -> list[int]:
        """Return the kernels with the largest differences of time (us), in decreasing order."""
        times = self.times_us
        # Differences, not ratios, since ratios of tiny kernels would crowd out important kernels.
        spread = times.max(axis=0) - times.min(axis=0)
        # Stable: equal differences keep the order of the schedule.
        order = np.argsort(-spread, kind="stable")[:count]
        return [int(i) for i in order if spread[i] > 0]

    def to_dict(self) -> dict[str, object]:
        """Return JSON data, as ``opcast predict --json`` prints it."""
        return {
            "program": self.program,
            "device": self.device,
            "lowering": self.lowering,
            "fidelities": {
                f.name: {
                    **latency_of(f.prediction),
                    "covered": f.covered,
                    "model": f.prediction.model,
                    "notes": list(f.prediction.notes),
                }
                for f in self.fidelities
            },
            "kernels": [self._kernel(i) for i in range(len(self.fidelities[0].own))],
        }

    def _kernel(self, place: int) -> dict[str, object]:
        first = self.fidelities[0].prediction.kernels[place]
        return {
            "name": first.name,
            "kind": first.kind,
            "multiplicity": first.multiplicity,
            **{
                f.name: {
                    **latency_of(f.prediction.kernels[place]),
                    "source": f.prediction.kernels[place].source,
                    "reason": f.reasons[place],
                }
                for f in self.fidelities
            },
        }


def compare_fidelities(case: ProgramCase, names: Sequence[str]) -> Comparison:
    """Predict a program by several estimators; it is lowered once.

    Args:
        case: The program on a device.
        names: Model names or folders; ``learned`` is the device's default model, ``roofline``,
            ``scalesim``, ``zigzag``, ``iree`` and ``compiler`` need no training.

    Raises:
        OpcastError: The program, the device, an estimator or the lowering is not usable.
    """
    predictors = load_fidelities(names)
    options = replace(case.options, device=device_for(case.options.device, predictors))
    # Lowered once, so that only the estimators differ.
    source, lowered, device = replace(case, options=options).lower(next(iter(predictors.values())))
    found = tuple(fidelity(name, own, lowered, device) for name, own in predictors.items())
    own = case.program
    title = Path(own).name if isinstance(own, str | Path) else source.program.name
    return Comparison(title, device.name, lowered.lowering, found)


def load_fidelities(names: Sequence[str]) -> dict[str, Predictor]:
    """Load predictors by name.

    Raises:
        ModelError: A name is empty, duplicated or unknown.
    """
    if not names or "" in names or len(set(names)) < len(names):
        raise ModelError(
            f"{','.join(names)!r} is not a list of different models",
            hint="write --model roofline,scalesim,learned",
        )
    # A device's default model depends on its platform, which is determined later.
    return {n: load_for_programs("default" if n == LEARNED else n) for n in names}


def device_for(
    device: str | Path | DeviceSpec | None, predictors: dict[str, Predictor]
) -> DeviceSpec:
    """Find a device as measured here or in the catalogue, else as a model was trained on it.

    Simulators need data, such as sizes of systolic arrays, that the catalogue has and older models
    may lack.

    Raises:
        DeviceError: The device is unknown.
    """
    known = {n: spec for own in predictors.values() for n, spec in own.devices.items()}
    try:
        return resolve_device(device, {})
    except DeviceError:
        return resolve_device(device, known)


def fidelity(
    name: str, predictor: Predictor, lowered: LoweredProgram, device: DeviceSpec
) -> Fidelity:
    """Predict a lowered program by one estimator, with its coverage.

    Raises:
        OpcastError: The estimator cannot be used for the device.
    """
    prediction = predictor.predict_lowered(lowered, device)
    # The part after the colon is the training data; only the kind matters here.
    sources = [k.source.split(":")[0] for k in prediction.kernels]
    own = tuple(name == ROOFLINE or source != ROOFLINE for source in sources)
    times = np.array([k.total_us for k in prediction.kernels])
    total = float(times.sum())
    # Optional in the estimator protocol: only wrappers of simulators omit kernels.
    explain = getattr(predictor.model_for(device).estimator, "reasons", None)
    reasons = explain(lowered.kernels, device) if explain else [""] * len(own)
    # An empty program counts as fully covered.
    covered = float(times[list(own)].sum()) / total if total else 1.0
    return Fidelity(name, prediction, covered, own, tuple(reasons))
