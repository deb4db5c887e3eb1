"""Predicts programs of PyTorch by the kernels that PyTorch launches, and explains the costliest."""

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
from ...features.ir.torch.record import FunctionUse
from ..devices import resolve_device
from ..locate import OPERATOR_MODEL, load_operators
from .aten_prices import FAMILIES, AtenPrices
from .torch_choices import MATH, attention_backend, is_one
from .torch_notes import MEASURED_RELEASE
from .torch_price import AtenEstimate, TorchPrediction, price, works_of

if TYPE_CHECKING:
    from ...features.ir.torch.record import AttentionUse, Recording
    from ...models.operators.explain import OpExplanation

#: Whose kernels a program of PyTorch is priced by, as ``--framework`` takes them.
FRAMEWORKS = ("xla", "torch-eager", "torch-compiled")
#: First releases of PyTorch that run so: the first with a compiler is 2.0 (its release notes).
_FIRST = {"torch-eager": "1.0", "torch-compiled": "2.0"}


class TorchPredictor:
    """Predicts programs of PyTorch by the kernels that PyTorch launches.

    Args:
        framework: ``torch-eager`` or ``torch-compiled``; ``torch-eager@1.12`` for a release of
            PyTorch, a recent one otherwise.
        model: Name or folder of a model of operators; ``default`` is the shipped one, ``roofline``
            learns nothing.

    Attributes:
        framework: Without the release.
        release: Of PyTorch; empty for a recent one.
        model: Name of the model.

    Raises:
        ProgramError: The framework is not known, or cannot have the release.
        ModelError: The model is not one of operators.
    """

    def __init__(self, framework: str, model: str | Path = "default") -> None:
        name, _, self.release = framework.partition("@")
        if name not in FRAMEWORKS[1:] or not re.fullmatch(r"(\d+\.\d+\S*)?", self.release):
            raise ProgramError(
                f"no framework {framework!r} of PyTorch",
                hint="known: " + ", ".join(FRAMEWORKS) + "; with a release torch-eager@2.4",
            )
        if self.release and not can_be_release(self.release, _FIRST[name], MEASURED_RELEASE):
            raise ProgramError(
                f"there is no release {self.release} of PyTorch that runs {name}",
                hint=f"known are {_FIRST[name]} to {MEASURED_RELEASE}",
            )
        self.framework = name
        self.model = OPERATOR_MODEL if str(model) == "default" else str(model)
        self.bundle = operator_bundle(model)

    @property
    def devices(self) -> dict[str, DeviceSpec]:
        """Devices that the model was trained on, by name."""
        return dict(self.bundle.devices) if self.bundle else {}

    def checked(self, program: object) -> TorchProgram:
        """Take a program of PyTorch as it is.

        Raises:
            ProgramError: It is another one.
        """
        if isinstance(program, TorchProgram):
            return program
        raise ProgramError(
            f"framework {self.framework} is for programs of PyTorch",
            hint="a .pt2 file, a module in a Python file, or a torch.nn.Module with its inputs; "
            "leave the framework out to predict any other program",
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
            ProgramError: The program is not PyTorch's, or cannot be exported.
            DeviceError: The device is not known, or a TPU.
            StrictError: ``strict`` is set and an operator has no learned estimate.
        """
        own = self.checked(program)
        # Before the recording, which may take long.
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
            program: As of :meth:`predict`.
            device: As of :meth:`predict`.
            before: Of the same program on another device or by another release, which is the
                answer where the same calls are one kernel.
            times_alone: Leave out what memory, and other releases' times, are answered from.

        Raises:
            ProgramError: The program is not PyTorch's, or cannot be exported.
            DeviceError: The device is not known, or a TPU.
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
        """Predict what was recorded of a program; arguments as of :meth:`predict`.

        Raises:
            ProgramError: It launches nothing, or what has no known time.
            DeviceError: The device is not known, or a TPU.
            StrictError: As for :meth:`predict`.
        """
        found = price(recording, self.device(device), self.framework, self.bundle, self.release)
        if strict:
            _require_learned(found)
        return found

    def device(self, device: str | Path | DeviceSpec) -> DeviceSpec:
        """Find the device.

        Raises:
            DeviceError: It is not known, or a TPU.
        """
        if device == "local":
            check_gpu_here()
        spec = resolve_device(device, self.devices)
        if spec.platform == "tpu":
            raise _no_gpu(f"{spec.name} is a {spec.platform}")
        return spec


#: The families of a model that kernels are priced by; ``None`` for ``roofline``.
operator_bundle = partial(load_operators, only=FAMILIES)


def check_gpu_here() -> None:
    """Refuse this machine without measuring it if it has no GPU.

    Raises:
        DeviceError: JAX finds none.
    """
    import jax

    if jax.default_backend() != "gpu":
        raise _no_gpu("JAX finds no GPU on this machine, whose CPU needs a file")


def _no_gpu(why: str) -> DeviceError:
    return DeviceError(
        f"PyTorch's own kernels are known for GPUs, and for CPUs of a name or file; {why}",
        hint="--device h100-sxm, cpu-i9-10940x or another (opcast device --list); or leave "
        "--framework out, which predicts the program as XLA runs it",
    )


def _require_learned(found: TorchPrediction) -> None:
    for own in found.operators:
        if own.source == "roofline":
            raise StrictError(
                f"operator {own.name} ({own.kind}) has only a roofline estimate",
                where=own.source_line,
                hint="predict without strict, or by a model that learned it (opcast models)",
            )


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
        device: A GPU or CPU: name, path of a device file, or description.
        top: Number of operators to explain; equal ones count as one.

    Raises:
        ProgramError: The program is not PyTorch's, or cannot be exported.
        DeviceError: The device is not known, or a TPU.
    """
    spec = predictor.device(device)
    recording = predictor.record(program, spec)
    prediction = predictor.price(recording, spec)
    found = works_of(recording, predictor.framework)
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
            # Its notes are about what one may ask of an operator by itself.
            why = replace(explain_op(family, row, spec), notes=())
        estimate = prediction.operators[places[0]]
        explained.append(ExplainedOperator(estimate, len(places), seconds(places) / total, why))
    return TorchExplanation(prediction, tuple(explained))
