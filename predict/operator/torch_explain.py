"""Explain the time of a program that PyTorch itself runs: its costliest operators, taken apart."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...models.operators.explain import explain_op
from .aten_prices import AtenPrices
from .torch_framework import works_of

if TYPE_CHECKING:
    from ...features.devices.device import DeviceSpec
    from ...models.operators.explain import OpExplanation
    from .torch_framework import AtenEstimate, TorchPrediction, TorchPredictor


@dataclass(frozen=True)
class ExplainedOperator:
    """Equal operators of a program with the explanation of one.

    Attributes:
        estimate: The first of them.
        count: Their number.
        share: Of the operators' time, all of them together.
        explanation: Of the operator as tables have it; ``None`` where it is priced by the roofline.
    """

    estimate: AtenEstimate
    count: int
    share: float
    explanation: OpExplanation | None

    @property
    def factor(self) -> float:
        """Its time in the program over that of the explained operator.

        A backward pass is a multiple of the forward one, a call within a stream lacks the launch
        that it has alone, and whole steps taught how fast their kernels are.
        """
        if self.explanation is None:
            return 1.0
        return self.estimate.latency_us / self.explanation.latency_us


@dataclass(frozen=True)
class TorchExplanation:
    """A prediction with its costliest operators explained.

    Attributes:
        prediction: Of the whole program.
        operators: Explained ones, costliest first.
    """

    prediction: TorchPrediction
    operators: tuple[ExplainedOperator, ...]

    def to_dict(self) -> dict[str, object]:
        """Plain data, as ``opcast explain --framework --json`` prints it."""
        return {
            **{k: v for k, v in self.prediction.to_dict().items() if k != "operators"},
            "operators": [
                {
                    **asdict(own.estimate),
                    "count": own.count,
                    "share": own.share,
                    "factor": own.factor,
                    "explanation": own.explanation and own.explanation.to_dict(),
                }
                for own in self.operators
            ],
        }


def explain_torch(
    predictor: TorchPredictor, program: object, device: str | Path | DeviceSpec, top: int = 3
) -> TorchExplanation:
    """Explain the prediction of a program of PyTorch.

    Args:
        predictor: Whose kernels, and the model.
        program: As of :meth:`TorchPredictor.predict`.
        device: A GPU: name, path of a device file, or description.
        top: Number of operators to explain; equal ones count as one.

    Raises:
        ProgramError: The program is not PyTorch's, or cannot be exported.
        DeviceError: The device is not known, or no GPU.
    """
    spec = predictor.gpu(device)
    recording = predictor.record(program, spec)
    prediction = predictor.price(recording, spec)
    found = works_of(recording, predictor.framework)
    groups: dict[tuple[object, ...], list[int]] = {}
    for place, own in enumerate(prediction.operators):
        key = (own.name, own.shape, own.dtype, own.phase, own.source, round(own.bytes))
        groups.setdefault(key, []).append(place)

    def seconds(places: list[int]) -> float:
        return sum(prediction.operators[i].latency_us for i in places)

    bundle = predictor.bundle
    prices = AtenPrices(spec, bundle, 1.0, 1.0)
    total = sum(own.latency_us for own in prediction.operators) or 1.0
    explained = []
    for places in sorted(groups.values(), key=seconds, reverse=True)[:top]:
        row = prices.row(found[places[0]])
        family = None if row is None or bundle is None else bundle.families.get(str(row["key"]))
        why = None
        if row is not None and family is not None:
            # Its notes are about what one may ask of an operator by itself.
            why = replace(explain_op(family, row, spec), notes=())
        estimate = prediction.operators[places[0]]
        explained.append(ExplainedOperator(estimate, len(places), seconds(places) / total, why))
    return TorchExplanation(prediction, tuple(explained))
