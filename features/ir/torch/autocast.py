"""CUDA's autocast semantics on machines without CUDA.

``torch.autocast("cuda")`` disables itself without CUDA, and the CPU's autocast casts the same
products but leaves softmax, norms and similar in 16 bits, which CUDA's runs in f32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch

_Function: TypeAlias = Callable[..., object]
_Args: TypeAlias = tuple[object, ...]
#: Functions and tensor methods that CUDA's autocast runs in f32 (the f32 lists of
#: ATen/autocast_mode.h), by name.
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
    """Wrap a module so that its forward pass runs under ``torch.autocast("cuda", dtype)``.

    Args:
        module: The module, with f32 weights.
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


#: Devices whose autocast is treated as CUDA's: models query it for their tensors, on ``meta``.
_WIDE = ("cuda", "meta")


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Make ``torch.autocast("cuda")`` cast as on a GPU, even without one."""
    import torch

    own = torch.autocast
    known = own.__init__, own.__enter__, own.__exit__
    asked = torch.is_autocast_enabled, torch.get_autocast_dtype
    modes: dict[int, list[ExitStack]] = {}

    def init(
        self: torch.autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        wide = device_type in _WIDE
        if wide:
            device_type, dtype = "cpu", dtype or asked[1]("cuda")
        known[0](self, device_type, dtype, enabled, cache_enabled)
        if wide:
            modes[id(self)] = []

    def enter(self: torch.autocast) -> object:
        found = known[1](self)
        if id(self) in modes:
            modes[id(self)].append(ExitStack())
            modes[id(self)][-1].enter_context(_widening())
        return found

    def leave(self: torch.autocast, *error: object) -> object:
        if modes.get(id(self)):
            modes[id(self)].pop().close()
        return known[2](self, *error)

    def is_enabled(device_type: str = "cuda") -> bool:
        return bool(asked[0]("cpu" if device_type in _WIDE else device_type))

    def dtype_of(device_type: str) -> torch.dtype:
        if device_type in _WIDE:
            device_type = "cpu" if is_enabled() else "cuda"
        return asked[1](device_type)

    own.__init__, own.__enter__, own.__exit__ = init, enter, leave
    torch.is_autocast_enabled, torch.get_autocast_dtype = is_enabled, dtype_of
    try:
        yield
    finally:
        own.__init__, own.__enter__, own.__exit__ = known
        torch.is_autocast_enabled, torch.get_autocast_dtype = asked


def _widening() -> AbstractContextManager[object]:
    """Return a mode in which functions in :data:`_F32` widen 16-bit operands under autocast."""
    import torch

    def widened(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        # On meta nothing has been cast yet: an export records what a run casts later.
        late = value.is_meta and value.dtype == torch.float32
        narrow = value.dtype in (torch.float16, torch.bfloat16)
        return value.float() if narrow or late else value

    def wide(function: _Function, args: _Args, kwargs: dict[str, object]) -> object:
        listed = getattr(function, "__name__", "") in _F32
        if listed and torch.is_autocast_enabled("cpu"):
            args, kwargs = torch.utils._pytree.tree_map(widened, (args, kwargs))
        return function(*args, **kwargs)

    return function_mode(wide)


def function_mode(
    stand: Callable[[_Function, _Args, dict[str, object]], object],
) -> AbstractContextManager[object]:
    """Return a mode in which ``stand`` is called instead of every function of PyTorch.

    Args:
        stand: Receives the function, its positional arguments and its keyword arguments.
    """
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self,
            function: _Function,
            types: object,
            args: _Args = (),
            kwargs: Mapping[str, object] | None = None,
        ) -> object:
            return stand(function, args, dict(kwargs or {}))

    return Mode()
