"""RMS norms as the one kernel that they are on a GPU, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .recurrent import Write

if TYPE_CHECKING:
    import torch

FORWARD, BACKWARD = "aten._fused_rms_norm", "aten._fused_rms_norm_backward"


def rms_norm(write: Write) -> Callable[..., torch.Tensor]:
    """What stands for the function: its result without data, and one call written down.

    It takes over how many dimensions the norm goes, its input, and its weight or ``None``.
    """
    import torch

    class Norm(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(
            ctx: torch.autograd.function.FunctionCtx,
            over: int,
            given: torch.Tensor,
            weight: torch.Tensor | None,
        ) -> torch.Tensor:
            found = given.new_empty(given.shape)
            # A factor of each row, which the gradient reads again.
            rows = (*given.shape[: given.dim() - over], *[1] * over)
            factors = given.new_empty(rows, dtype=torch.float32)
            ctx.save_for_backward(given, factors, weight)
            write(FORWARD, (given, weight), (found, factors), ())
            return found

        @staticmethod
        def backward(
            ctx: torch.autograd.function.BackwardCFunction, gradient: torch.Tensor
        ) -> tuple[torch.Tensor | None, ...]:
            given, factors, weight = ctx.saved_tensors
            wanted = zip((given, weight), ctx.needs_input_grad[1:], strict=True)
            found = [t.new_empty(t.shape) if own else None for t, own in wanted]
            write(BACKWARD, (gradient, given, factors, weight), found, ())
            return (None, *found)

    norm: Callable[..., torch.Tensor] = Norm.apply
    return norm
