"""Mixed precision as CUDA's autocast has it, on machines without CUDA.

``torch.autocast("cuda")`` turns itself off where there is no CUDA, and the CPU's casts the same
products but leaves softmax, norms and their like in 16 bits, which CUDA's runs in f32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: What CUDA's autocast runs in f32 (the f32 lists of ATen/autocast_mode.h): functions and methods
#: of tensors by name.
_F32 = frozenset(
    (
        *("exp", "expm1", "log", "log10", "log1p", "log2", "logsumexp", "pow", "reciprocal"),
        *("rsqrt", "softplus", "acos", "asin", "cosh", "sinh", "tan", "erfinv", "__pow__"),
        *("__rpow__", "layer_norm", "group_norm", "norm", "vector_norm", "matrix_norm", "cdist"),
        *("cosine_similarity", "softmax", "log_softmax", "cumsum", "cumprod", "prod", "sum"),
        *("interpolate", "upsample", "nll_loss", "cross_entropy", "mse_loss", "l1_loss"),
        *("smooth_l1_loss", "huber_loss", "kl_div", "renorm", "normalize"),
    )
)


def autocast_module(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """A module whose forward pass enters ``torch.autocast("cuda", dtype)``, for an export.

    Args:
        module: With weights of f32.
        dtype: ``torch.float16`` or ``torch.bfloat16``.
    """
    import torch

    class Autocast(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: object, **kwargs: object) -> object:
            with torch.autocast("cpu", dtype), _widening():
                return self.module(*args, **kwargs)

    return Autocast()


def _widening() -> torch.overrides.TorchFunctionMode:
    """A mode in which :data:`_F32` take their operands of 16 bits in f32."""
    import torch
    from torch.overrides import TorchFunctionMode

    def widened(value: object) -> object:
        if isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16):
            return value.float()
        return value

    class Widening(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self,
            function: object,
            types: object,
            args: tuple[object, ...] = (),
            kwargs: Mapping[str, object] | None = None,
        ) -> object:
            assert callable(function), function
            if getattr(function, "__name__", "") in _F32:
                args = torch.utils._pytree.tree_map(widened, args)
                kwargs = torch.utils._pytree.tree_map(widened, dict(kwargs or {}))
            return function(*args, **(kwargs or {}))

    return Widening()
