"""Recurrent layers as the one call of a library that they are on a GPU, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import torch

#: Function of PyTorch: gates of a cell.
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
FORWARD, BACKWARD = "cudnn.rnn", "cudnn.rnn_backward"
#: Writes down a call by its name, operands, results and sizes.
Write: TypeAlias = Callable[[str, Sequence[object], Sequence[object], tuple[int, ...]], None]


class Sizes(NamedTuple):
    """Sizes of a stack of recurrent layers.

    Attributes:
        gates: Of a cell.
        layers: Their number.
        directions: 2 of bidirectional ones.
        steps: Positions of a sequence.
        batch: Sequences.
        given: Width of the input.
        hidden: Width of a cell.
        shown: Width of what it returns, narrower than ``hidden`` if it is projected.
    """

    gates: int
    layers: int
    directions: int
    steps: int
    batch: int
    given: int
    hidden: int
    shown: int


def recurrent(name: str, write: Write) -> Callable[..., object]:
    """What stands for a recurrent function: its results without data, and one call written down."""
    import torch

    class Layer(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(
            ctx: object, sizes: Sizes, many: int, *operands: torch.Tensor
        ) -> tuple[torch.Tensor, ...]:
            given, *states = operands[: 1 + many]
            wide = sizes.directions * sizes.shown
            found = given.new_empty((*given.shape[:-1], wide))
            last = tuple(s.new_empty(s.shape) for s in states)
            write(FORWARD, operands, (found, *last), sizes)
            ctx.sizes, ctx.operands = sizes, operands  # type: ignore[attr-defined]
            return (found, *last)

        @staticmethod
        def backward(ctx: object, *gradients: torch.Tensor) -> tuple[object, ...]:
            sizes, operands = ctx.sizes, ctx.operands  # type: ignore[attr-defined]
            found = tuple(t.new_empty(t.shape) for t in operands)
            kept = [g for g in gradients if g is not None]
            write(BACKWARD, (*kept, *operands), found, sizes)
            return (None, None, *found)

    def stand(function: Callable[..., object], given: torch.Tensor, *rest: object) -> object:
        states, weights, _, layers, _, _, both, first = rest
        held = [states] if isinstance(states, torch.Tensor) else states
        assert isinstance(held, list | tuple) and isinstance(weights, list | tuple), name
        assert isinstance(layers, int), name
        steps, batch = given.shape[:2][:: -1 if first else 1]
        hidden, shown = weights[0].shape[0] // GATES[name], held[0].shape[-1]
        own = GATES[name], layers, 1 + bool(both)
        sizes = Sizes(*own, steps, batch, given.shape[-1], hidden, shown)
        return Layer.apply(sizes, len(held), given, *held, *weights)

    return stand
