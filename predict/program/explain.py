"""Explain a program's predicted time: its costliest kernels, each broken down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...common.errors import ProgramError
from ...common.interval import latency_of
from .predictor import Prediction, Predictor, ProgramCase

if TYPE_CHECKING:
    from ...features.devices.device import DeviceSpec
    from ...features.kernels.kernel import LoweredProgram
    from ...models.explain import KernelExplanation

#: Kernels to explain by default: what fits on a screen.
DEFAULT_KERNELS = 3
#: Number of kernel names to suggest when one is not found.
_LISTED = 8


@dataclass(frozen=True)
class ExplainedKernel:
    """A kernel of a program with its explanation.

    Attributes:
        name: Instruction name; for equal kernels, the first one's.
        executions: Executions per run of the program, equal kernels together.
        share: Share of the program's summed kernel time.
        origin: StableHLO op and source line that it mainly came from.
        in_program_us: Predicted latency of one execution in the program, the mean over equal
            kernels; differs from the isolated one if the model corrects for context.
        explanation: Explanation of one execution in isolation.
    """

    name: str
    executions: float
    share: float
    origin: str
    in_program_us: float
    explanation: KernelExplanation


@dataclass(frozen=True)
class ProgramExplanation:
    """A prediction with its costliest kernels explained.

    Attributes:
        prediction: Prediction of the whole program.
        kernels: Explained kernels, costliest first.
    """

    prediction: Prediction
    kernels: tuple[ExplainedKernel, ...]

    def to_dict(self) -> dict[str, object]:
        """Return JSON data, as ``opcast explain --json`` prints it."""
        p = self.prediction
        return {
            **latency_of(p),
            "device": p.device,
            "model": p.model,
            "lowering": p.lowering,
            "notes": list(p.notes),
            "kernels": [
                {
                    "name": k.name,
                    "executions": k.executions,
                    "share": k.share,
                    "origin": k.origin,
                    "in_program_us": k.in_program_us,
                    **k.explanation.to_dict(),
                }
                for k in self.kernels
            ],
        }


def explain(
    predictor: Predictor,
    case: ProgramCase,
    *,
    kernel: str | None = None,
    top: int = DEFAULT_KERNELS,
    neighbours: int = 3,
) -> ProgramExplanation:
    """Explain the prediction of a program.

    Args:
        predictor: Predictor with the model to explain.
        case: The program on a device.
        kernel: Explain only the kernel of this name.
        top: Number of costliest kernels to explain; equal kernels count as one.
        neighbours: Number of nearest training kernels to list for each.

    Raises:
        OpcastError: The program, device or lowering is not usable, or there is no such kernel.
    """
    _, lowered, device = case.lower(predictor)
    return explain_lowered(
        predictor, lowered, device, kernel=kernel, top=top, neighbours=neighbours
    )


def explain_lowered(
    predictor: Predictor,
    lowered: LoweredProgram,
    device: DeviceSpec,
    *,
    kernel: str | None = None,
    top: int = DEFAULT_KERNELS,
    neighbours: int = 3,
) -> ProgramExplanation:
    """Explain the prediction of a program that is already lowered; see :func:`explain`.

    Raises:
        ProgramError: The program has no kernel of that name.
    """
    from ...models.explain import explain_kernels
    from .prediction import origin

    prediction = predictor.predict_lowered(lowered, device)
    groups = _chosen(lowered, prediction, kernel, top)
    # In isolation, one of each group: trees explain a kernel by its own features; the effect of
    # neighbouring kernels is the ratio to ``in_program_us``.
    found = explain_kernels(
        predictor.model_for(device),
        [lowered.kernels[group[0]] for group in groups],
        device,
        neighbours,
    )
    # Guard for a program whose kernels take no time.
    total = sum(k.total_us for k in prediction.kernels) or 1.0
    explained = []
    for group, explanation in zip(groups, found, strict=True):
        own = [prediction.kernels[i] for i in group]
        executions = sum(k.multiplicity for k in own)
        explained.append(
            ExplainedKernel(
                name=own[0].name,
                executions=executions,
                share=sum(k.total_us for k in own) / total,
                origin=origin(own[0]),
                # Without executions, the kernel is in a loop with zero trips.
                in_program_us=sum(k.total_us for k in own) / executions if executions else 0.0,
                explanation=replace(explanation, kind=_said(explanation.kind, own[0].kind)),
            )
        )
    return ProgramExplanation(prediction, tuple(explained))


def _said(cell: str, kind: str) -> str:
    """Return a kind with its platform, such as ``gpu/gemm``, in the user's terms."""
    platform, _, known = cell.partition("/")
    return f"{platform}/{kind}" if known else cell


def _chosen(
    lowered: LoweredProgram, prediction: Prediction, name: str | None, top: int
) -> list[list[int]]:
    """Return positions of the kernels to explain, equal ones grouped, costliest first."""
    # Equal kernels share an explanation, so groups are ranked by their total time.
    groups: dict[str, list[int]] = {}
    for position, kernel in enumerate(lowered.kernels):
        groups.setdefault(kernel.hash, []).append(position)
    cost = {h: sum(prediction.kernels[i].total_us for i in own) for h, own in groups.items()}
    ordered = [groups[h] for h in sorted(groups, key=lambda h: -cost[h])]
    if name is None:
        return ordered[:top]
    position = _position(lowered, name, ordered)
    own = groups[lowered.kernels[position].hash]
    # The requested kernel comes first, since the first name is printed.
    return [[position, *(i for i in own if i != position)]]


def _position(lowered: LoweredProgram, name: str, ordered: Sequence[Sequence[int]]) -> int:
    for position, kernel in enumerate(lowered.kernels):
        if kernel.name == name:
            return position
    # Names of optimised kernels cannot be guessed, so the message lists the costliest.
    costly = ", ".join(lowered.kernels[group[0]].name for group in ordered[:_LISTED])
    raise ProgramError(f"no kernel {name!r} in the lowered program", hint=f"costliest: {costly}")
