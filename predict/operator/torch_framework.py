"""Predicts PyTorch programs by the kernels that PyTorch launches, and explains the costliest."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...common.errors import DeviceError, ProgramError, StrictError
from ...common.versions import can_be_release
from ...features.devices.device import DeviceSpec
from ...features.ir.torch.program import TorchProgram
from ...features.ir.torch.record import MATH, FunctionUse
from ..devices import find_anywhere, resolve_device
from ..locate import OPERATOR_MODEL, load_operators
from .aten_prices import FAMILIES, AtenPrices
from .torch_choices import attention_backend, is_one
from .torch_notes import MEASURED_RELEASE
from .torch_price import AtenEstimate, TorchPrediction, price, works_of

if TYPE_CHECKING:
    from ...features.ir.torch.record import AttentionUse, Recording
    from ...models.operators.explain import OpExplanation

#: Frameworks whose kernels a PyTorch program is priced by, as ``--framework`` takes them.
FRAMEWORKS = ("xla", "torch-eager", "torch-compiled")
#: First release of PyTorch with each framework; torch.compile came with 2.0 (its release notes).
_FIRST = {"torch-eager": "1.0", "torch-compiled": "2.0"}


class TorchPredictor:
    """Predicts PyTorch programs by the kernels that PyTorch launches.

    Args:
        framework: ``torch-eager`` or ``torch-compiled``, with a release as in
            ``torch-eager@1.12``; without one, a recent release.
        model: Name or folder of an operator model; ``default`` is the shipped one, ``roofline``
            uses no learned model.

    Attributes:
        framework: Framework without the release.
        release: PyTorch release; empty for a recent one.
        model: Name of the model.

    Raises:
        ProgramError: The framework is unknown, or has no such release.
        ModelError: The model is not an operator model.
    """

    def __init__(self, framework: str, model: str | Path = "default") -> None:
        name, _, self.release = framework.partition("@")
        if name not in FRAMEWORKS[1:] or not re.fullmatch(r"(\d+\.\d+\S*)?", self.release):
            raise ProgramError(
                f"no PyTorch framework {framework!r}",
                hint="known: " + ", ".join(FRAMEWORKS) + "; with a release, as in torch-eager@2.4",
            )
        if self.release and not can_be_release(self.release, _FIRST[name], MEASURED_RELEASE):
            raise ProgramError(
                f"no PyTorch release {self.release} has {name}",
                hint=f"known releases: {_FIRST[name]} to {MEASURED_RELEASE}",
            )
        self.framework = name
        self.model = OPERATOR_MODEL if str(model) == "default" else str(model)
        self.bundle = operator_bundle(model)

    @property
    def devices(self) -> dict[str, DeviceSpec]:
        """Devices that the model was trained on, by name."""
        return dict(self.bundle.devices) if self.bundle else {}

    def checked(self, program: object) -> TorchProgram:
        """Return a PyTorch program unchanged, and refuse any other.

        Raises:
            ProgramError: It is not a PyTorch program.
        """
        if isinstance(program, TorchProgram):
            return program
        raise ProgramError(
            f"framework {self.framework} is for PyTorch programs",
            hint="a .pt2 file, a module in a Python file, or a torch.nn.Module with its inputs; "
            "omit the framework for other programs",
        )

    def predict(
        self, program: object, device: str | Path | DeviceSpec, *, strict: bool = False
    ) -> TorchPrediction:
        """Predict a forward pass or a training step.

        Args:
            program: A :class:`TorchProgram`.
            device: A GPU or CPU: name, path of a device file, or description.
            strict: Raise instead of falling back to the roofline for an operator.

        Raises:
            ProgramError: The program is not a PyTorch program, or cannot be exported.
            DeviceError: The device is unknown, or a TPU.
            StrictError: ``strict`` is set and an operator has no learned estimate.
        """
        own = self.checked(program)
        # Check the device before the recording, which may take long.
        spec = self.device(device)
        return self.price(self.record(own, spec), spec, strict=strict)

    def record(
        self,
        program: object,
        device: str | Path | DeviceSpec,
        before: Recording | None = None,
        *,
        times_alone: bool = False,
    ) -> Recording:
        """Record what a program launches on a device.

        Args:
            program: See :meth:`predict`.
            device: See :meth:`predict`.
            before: Recording of the same program for another device or release, returned if it is
                valid here.
            times_alone: Skip what only memory, and times of other releases, need.

        Raises:
            ProgramError: The program is not a PyTorch program, or cannot be exported.
            DeviceError: The device is unknown, or a TPU.
        """
        from ...features.ir.torch.runs import record
        from ...features.ir.torch.storages import log_storages

        own, spec = self.checked(program), self.device(device)

        def fused(use: AttentionUse | FunctionUse, *, cudnn: bool = True) -> bool:
            if isinstance(use, FunctionUse):
                return is_one(spec, use, self.framework, self.release)
            return attention_backend(spec, use, cudnn=cudnn) != MATH

        older = partial(fused, cudnn=False)
        found = before if before and before.holds(fused) else record(own, fused)
        if times_alone:
            return found
        if found is not before:
            with suppress(ProgramError):
                found = replace(found, storages=log_storages(own, fused))
        if found.holds(older):
            return replace(found, otherwise=None)
        if found.otherwise and found.otherwise.holds(older):
            return found
        return replace(found, otherwise=record(own, older))

    def price(
        self, recording: Recording, device: str | Path | DeviceSpec, *, strict: bool = False
    ) -> TorchPrediction:
        """Predict a recorded program; for arguments see :meth:`predict`.

        Raises:
            ProgramError: It launches nothing, or operators of unknown time.
            DeviceError: The device is unknown, or a TPU.
            StrictError: See :meth:`predict`.
        """
        found = price(recording, self.device(device), self.framework, self.bundle, self.release)
        if strict:
            _require_learned(found)
        return found

    def device(self, device: str | Path | DeviceSpec) -> DeviceSpec:
        """Find the device.

        Raises:
            DeviceError: The device is unknown, or a TPU.
        """
        if device == "local":
            check_gpu_here()
        try:
            spec = resolve_device(device, self.devices)
        except DeviceError:
            # One that another model was trained on.
            spec = find_anywhere(device)
        if spec.platform == "tpu":
            raise _no_gpu(f"{spec.name} is a {spec.platform}")
        return spec


#: Loads the families of a model that kernels are priced by; ``None`` for ``roofline``.
operator_bundle = partial(load_operators, only=FAMILIES)


def check_gpu_here() -> None:
    """Refuse this machine, before measuring it, if it has no GPU.

    Raises:
        DeviceError: JAX finds no GPU.
    """
    import jax

    if jax.default_backend() != "gpu":
        raise _no_gpu("JAX finds no GPU on this machine, and its CPU needs a device file")


def _no_gpu(why: str) -> DeviceError:
    return DeviceError(
        f"PyTorch's kernels are supported on GPUs, and on CPUs given by name or file; {why}",
        hint="use --device h100-sxm, cpu-i9-10940x or another (opcast device --list); or omit "
        "--framework to predict the program as XLA runs it",
    )


def _require_learned(found: TorchPrediction) -> None:
    for own in found.operators:
        if own.source == "roofline":
            raise StrictError(
                f"operator {own.name} ({own.kind}) has only a roofline estimate",
                where=own.source_line,
                hint="predict without strict, or use a model that covers it (opcast models)",
            )


@dataclass(frozen=True)
class ExplainedOperator:
    """Equal operators of a program with the explanation of one.

    Attributes:
        estimate: The first of them.
        count: Number of equal operators.
        share: Share of the program's operator time that they take together.
        explanation: Explanation of the operator as in tables; ``None`` if it is a roofline.
    """

    estimate: AtenEstimate
    count: int
    share: float
    explanation: OpExplanation | None

    @property
    def factor(self) -> float:
        """Ratio of the operator's time in the program to that of the explained operator.

        A backward pass is a multiple of the forward pass, a call within a stream has no launch
        overhead, and factors learned from whole steps apply.
        """
        if self.explanation is None:
            return 1.0
        return self.estimate.latency_us / self.explanation.latency_us


@dataclass(frozen=True)
class TorchExplanation:
    """A prediction with its costliest operators explained.

    Attributes:
        prediction: Prediction of the whole program.
        operators: Explained operators, costliest first.
    """

    prediction: TorchPrediction
    operators: tuple[ExplainedOperator, ...]

    def to_dict(self) -> dict[str, object]:
        """Return JSON data, as ``opcast explain --framework --json`` prints it."""
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
    """Explain the prediction of a PyTorch program.

    Args:
        predictor: Predictor with framework and model.
        program: See :meth:`TorchPredictor.predict`.
        device: A GPU or CPU: name, path of a device file, or description.
        top: Number of operators to explain; equal operators count as one.

    Raises:
        ProgramError: The program is not a PyTorch program, or cannot be exported.
        DeviceError: The device is unknown, or a TPU.
    """
    spec = predictor.device(device)
    recording = predictor.record(program, spec)
    prediction = predictor.price(recording, spec)
    found = works_of(recording, predictor.framework, spec)
    groups: dict[tuple[object, ...], list[int]] = {}
    for place, own in enumerate(prediction.operators):
        key = (own.name, own.shape, own.dtype, own.phase, own.source, round(own.bytes))
        groups.setdefault(key, []).append(place)

    def seconds(places: list[int]) -> float:
        return sum(prediction.operators[i].latency_us for i in places)

    from ...models.operators.explain import explain_op

    bundle = predictor.bundle
    prices = AtenPrices(spec, bundle, 1.0, 1.0)
    total = sum(own.latency_us for own in prediction.operators) or 1.0
    explained = []
    for places in sorted(groups.values(), key=seconds, reverse=True)[:top]:
        row = prices.row(found[places[0]])
        family = None if row is None or bundle is None else bundle.families.get(str(row["key"]))
        why = None
        if row is not None and family is not None:
            # Its notes apply to queries of a single operator.
            why = replace(explain_op(family, row, spec), notes=())
        estimate = prediction.operators[places[0]]
        explained.append(ExplainedOperator(estimate, len(places), seconds(places) / total, why))
    return TorchExplanation(prediction, tuple(explained))
