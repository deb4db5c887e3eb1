"""Replacements for functions with a single GPU kernel but none on the CPU.

For attention, dropout, norms, recurrent cells and layers, they return results without data and
record the call that a GPU runs, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from .program import dtype_name
from .record import BACKENDS, AttentionUse, FunctionUse, Recorder, lies_last

if TYPE_CHECKING:
    import torch

    from .eager import Stand

#: Arguments of ``scaled_dot_product_attention`` in order.
_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_ATTENTION_NAME = "aten._scaled_dot_product_attention"
_NORM, _NORM_BACKWARD = "aten._fused_rms_norm", "aten._fused_rms_norm_backward"
#: Gates of a cell by function of PyTorch.
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
RNN, RNN_BACKWARD = "cudnn.rnn", "cudnn.rnn_backward"
#: Numbers of a cell and step that its gradient reads again, over the cell's width: gates, output,
#: the cell state of an LSTM and the hidden product of a GRU. In training cuDNN keeps them in its
#: reserve space; that it keeps nothing else is an engineering estimate.
_RESERVED = {"lstm": 6, "gru": 5, "rnn_tanh": 1, "rnn_relu": 1}
#: Records a call by its name, operands, results and sizes.
Write: TypeAlias = Callable[[str, Sequence[object], Sequence[object], tuple[int, ...]], None]


class Sizes(NamedTuple):
    """Sizes of a stack of recurrent layers.

    Attributes:
        gates: Gates of a cell.
        layers: Number of layers.
        directions: 2 if bidirectional, else 1.
        steps: Positions of a sequence.
        batch: Sequences.
        given: Width of the input.
        hidden: Width of a cell.
        shown: Width of the output, less than ``hidden`` if projected.
    """

    gates: int
    layers: int
    directions: int
    steps: int
    batch: int
    given: int
    hidden: int
    shown: int


def _recurrent(name: str, write: Write) -> Callable[..., object]:
    """Return a replacement for a recurrent function, recorded as one call without data."""
    import torch

    class Layer(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(
            ctx: torch.autograd.function.FunctionCtx,
            sizes: Sizes,
            many: int,
            train: bool,
            *operands: torch.Tensor,
        ) -> tuple[torch.Tensor, ...]:
            given, *states = operands[: 1 + many]
            wide = sizes.directions * sizes.shown
            found = given.new_empty((*given.shape[:-1], wide))
            last = tuple(s.new_empty(s.shape) for s in states)
            write(RNN, operands, (found, *last), sizes)
            cells = sizes.layers * sizes.directions * sizes.steps * sizes.batch * sizes.hidden
            reserved = given.new_empty(train * _RESERVED[name] * cells)
            ctx.save_for_backward(found, reserved, *operands)
            ctx.sizes = sizes
            return (found, *last)

        @staticmethod
        def backward(
            ctx: torch.autograd.function.BackwardCFunction, *gradients: torch.Tensor
        ) -> tuple[object, ...]:
            _, _, *operands = ctx.saved_tensors
            found = tuple(t.new_empty(t.shape) for t in operands)
            kept = [g for g in gradients if g is not None]
            write(RNN_BACKWARD, (*kept, *operands), found, ctx.sizes)
            return (None, None, None, *found)

    def stand(function: Callable[..., object], given: torch.Tensor, *rest: object) -> object:
        states, weights, _, layers, _, train, both, first = rest
        held = [states] if isinstance(states, torch.Tensor) else states
        assert isinstance(held, list | tuple) and isinstance(weights, list | tuple), name
        assert isinstance(layers, int), name
        steps, batch = given.shape[:2][:: -1 if first else 1]
        hidden, shown = weights[0].shape[0] // GATES[name], held[0].shape[-1]
        own = GATES[name], layers, 1 + bool(both)
        sizes = Sizes(*own, steps, batch, given.shape[-1], hidden, shown)
        return Layer.apply(sizes, len(held), bool(train), given, *held, *weights)

    return stand


def _rms_norm(write: Write) -> Callable[..., torch.Tensor]:
    """Return a replacement for the function, recorded as one call without data.

    Its arguments are the number of normalised dimensions, the input, and the weight or ``None``.
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
            # A factor per row, which the gradient reads again.
            rows = (*given.shape[: given.dim() - over], *[1] * over)
            factors = given.new_empty(rows, dtype=torch.float32)
            ctx.save_for_backward(given, factors, weight)
            write(_NORM, (given, weight), (found, factors), ())
            return found

        @staticmethod
        def backward(
            ctx: torch.autograd.function.BackwardCFunction, gradient: torch.Tensor
        ) -> tuple[torch.Tensor | None, ...]:
            given, factors, weight = ctx.saved_tensors
            wanted = zip((given, weight), ctx.needs_input_grad[1:], strict=True)
            found = [t.new_empty(t.shape) if own else None for t, own in wanted]
            write(_NORM_BACKWARD, (gradient, given, factors, weight), found, ())
            return (None, *found)

    norm: Callable[..., torch.Tensor] = Norm.apply
    return norm


def _uneven_attention(write: Write) -> Callable[..., torch.Tensor]:
    """Return a replacement for attention whose values are narrower or wider than its queries.

    The CPU has a single kernel for equal widths alone. Its arguments are whether it is causal,
    queries, keys, values, and the mask or ``None``.
    """
    import torch

    class Attention(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(
            ctx: torch.autograd.function.FunctionCtx,
            causal: bool,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            mask: torch.Tensor | None,
        ) -> torch.Tensor:
            found = query.new_empty((*query.shape[:-1], value.shape[-1]))
            # The logarithm of each row's sum, which the gradient reads again.
            sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
            write(_ATTENTION_NAME, (query, key, value, mask), (found, sums), (causal,))
            ctx.save_for_backward(query, key, value, mask, found, sums)
            ctx.causal = causal
            return found

        @staticmethod
        def backward(
            ctx: torch.autograd.function.BackwardCFunction, gradient: torch.Tensor
        ) -> tuple[torch.Tensor | None, ...]:
            *operands, mask, out, sums = ctx.saved_tensors
            found = [t.new_empty(t.shape) for t in operands]
            given = (gradient, *operands, out, sums, mask)
            write(f"{_ATTENTION_NAME}_backward", given, found, (ctx.causal,))
            return (None, *found, None)

    attention: Callable[..., torch.Tensor] = Attention.apply
    return attention


def stands(log: Recorder) -> dict[str, Stand]:
    """Return replacements for functions of PyTorch by name, recorded in ``log``."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    uneven = _uneven_attention(log.write_library)

    def attention(function: Callable[..., object], *args: object, **kwargs: object) -> object:
        given = {**dict(zip(_ATTENTION, args, strict=False)), **kwargs}
        use = _attention_use(given)
        one = log.chooses(use)
        # Fused attention generates its dropout itself, at little cost.
        given.pop("dropout_p", None)
        if not one:
            # PyTorch's decomposition into products and passes.
            with sdpa_kernel(SDPBackend.MATH):
                return function(**given)
        mask = given.get("attn_mask")
        if isinstance(mask, torch.Tensor) and mask.dim() == 3:
            # The CPU kernel accepts only masks of two and four dimensions, a GPU any.
            given["attn_mask"] = mask.unsqueeze(0)
        # PyTorch has one fused kernel on a CPU, which stands for all of a GPU's.
        log.allowed = use.allowed
        if use.query[-1] == use.value[-1]:
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
                found = function(**given)
        else:
            found = uneven(use.causal, *(given.get(name) for name in _ATTENTION[:4]))
        log.allowed = BACKENDS
        if isinstance(found, torch.Tensor) and found.grad_fn is not None:
            found.grad_fn.metadata["attention"] = use.allowed
        return found

    def dropout(
        function: Callable[..., object],
        input: torch.Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> object:
        if not training or p == 0.0:
            return input
        return torch.ops.aten.native_dropout.default(input, p, True)[0]

    one_kernel = _rms_norm(log.write_library)

    def norm(
        function: Callable[..., object],
        input: torch.Tensor,
        normalized_shape: Sequence[int],
        weight: torch.Tensor | None = None,
        eps: float | None = None,
    ) -> object:
        own = "" if weight is None else dtype_name(weight)
        if log.chooses(FunctionUse("rms_norm", dtype_name(input), own, lies_last(input))):
            return one_kernel(len(normalized_shape), input, weight)
        return function(input, normalized_shape, weight, eps)

    def cell(
        function: Callable[..., object],
        input: torch.Tensor,
        hx: Sequence[torch.Tensor],
        w_ih: torch.Tensor,
        w_hh: torch.Tensor,
        *biases: torch.Tensor,
    ) -> object:
        if not log.chooses(FunctionUse("lstm_cell", dtype_name(input))):
            return function(input, hx, w_ih, w_hh, *biases)
        gates = torch.matmul(input, w_ih.t()), torch.matmul(hx[0], w_hh.t())
        return torch.ops.aten._thnn_fused_lstm_cell.default(*gates, hx[1], *biases)[:2]

    layers = {name: _recurrent(name, log.write_library) for name in GATES}
    known: dict[str, Stand] = {"dropout": dropout, "rms_norm": norm, "lstm_cell": cell, **layers}
    return {"scaled_dot_product_attention": attention, **known}


def _attention_use(given: Mapping[str, object]) -> AttentionUse:
    """Describe a call of attention by its arguments."""
    import torch

    query, key, value, mask, dropout, causal = (given.get(name) for name in _ATTENTION)
    assert isinstance(query, torch.Tensor), "attention of no tensor"
    assert isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor)
    own = torch.backends.cuda
    enabled = (
        *(own.cudnn_sdp_enabled(), own.flash_sdp_enabled()),
        *(own.mem_efficient_sdp_enabled(), own.math_sdp_enabled()),
    )
    return AttentionUse(
        tuple(query.shape),
        tuple(key.shape),
        tuple(value.shape),
        dtype=dtype_name(query),
        masked=mask is not None,
        causal=bool(causal),
        grouped=bool(given.get("enable_gqa")),
        dropout=dropout if isinstance(dropout, float) else 0.0,
        allowed=tuple(name for name, own in zip(BACKENDS, enabled, strict=True) if own),
    )
