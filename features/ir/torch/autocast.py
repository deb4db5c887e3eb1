"""Mixed precision as CUDA's autocast has it, on machines without CUDA.

``torch.autocast("cuda")`` turns itself off where there is no CUDA, and the CPU's casts the same
products but leaves softmax, norms and their like in 16 bits, which CUDA's runs in f32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: What CUDA's autocast runs in f32 (the f32 lists of ATen/autocast_mode.h): functions and methods
#: of tensors by name.
_F32 = frozenset(
    (
        *("exp", "expm1", "log", "log10", "log1p", "log2", "logsumexp", "pow", "reciprocal"),
        *("rsqrt", "softplus", "acos", "asin", "cosh", "sinh", "tan", "erfinv", "__pow__"),
        *("__rpow__", "layer_norm", "rms_norm", "group_norm", "norm", "vector_norm"),
        *("matrix_norm", "cdist"),
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
            with cuda_autocast(), torch.autocast("cuda", dtype):
                return self.module(*args, **kwargs)

    return Autocast()


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Let ``torch.autocast("cuda")`` cast as it does on a GPU, where there may be none."""
    import torch

    own = torch.autocast
    known = own.__init__, own.__enter__, own.__exit__
    modes: dict[int, list[torch.overrides.TorchFunctionMode]] = {}

    def init(
        self: torch.autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        wide = device_type == "cuda"
        if wide:
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        known[0](self, device_type, dtype, enabled, cache_enabled)
        if wide:
            modes[id(self)] = []

    def enter(self: torch.autocast) -> object:
        found = known[1](self)
        if id(self) in modes:
            modes[id(self)].append(_widening())
            modes[id(self)][-1].__enter__()
        return found

    def leave(self: torch.autocast, *error: object) -> object:
        if modes.get(id(self)):
            modes[id(self)].pop().__exit__(*error)
        return known[2](self, *error)

    own.__init__, own.__enter__, own.__exit__ = init, enter, leave
    try:
        yield
    finally:
        own.__init__, own.__enter__, own.__exit__ = known


def _widening() -> torch.overrides.TorchFunctionMode:
    """A mode in which :data:`_F32` take operands of 16 bits in f32 where autocast is on."""
    import torch
    from torch.overrides import TorchFunctionMode

    def widened(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        # Nothing has been cast on meta yet, where an export records what a run casts later.
        late = value.is_meta and value.dtype == torch.float32
        narrow = value.dtype in (torch.float16, torch.bfloat16)
        return value.float() if narrow or late else value

    class Widening(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self,
            function: object,
            types: object,
            args: tuple[object, ...] = (),
            kwargs: Mapping[str, object] | None = None,
        ) -> object:
            assert callable(function), function
            listed = getattr(function, "__name__", "") in _F32
            if listed and torch.is_autocast_enabled("cpu"):
                args = torch.utils._pytree.tree_map(widened, args)
                kwargs = torch.utils._pytree.tree_map(widened, dict(kwargs or {}))
            return function(*args, **(kwargs or {}))

    return Widening()
