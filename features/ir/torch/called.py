"""Modules of PyTorch that a program calls, with which inputs, and the same on other batches."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ....common.errors import ProgramError

if TYPE_CHECKING:
    import torch

    from .program import TorchProgram


@dataclass(frozen=True)
class ModuleCall:
    """A module and the inputs that it was called with.

    Attributes:
        module: Without what ``torch.compile`` put around it.
        compiled: Whether ``torch.compile`` did.
        args: Inputs.
        kwargs: Inputs by name.
    """

    module: torch.nn.Module
    compiled: bool
    args: tuple[object, ...]
    kwargs: dict[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of its class."""
        return type(self.module).__name__


@contextmanager
def recorded_modules() -> Iterator[list[ModuleCall]]:
    """Note each module that is called inside, once for inputs of the same shapes.

    Modules that others call are part of those. Without PyTorch imported there are none.

    Yields:
        The calls, filled as they are made.
    """
    found: list[ModuleCall] = []
    if "torch" not in sys.modules:
        yield found
        return
    import torch

    own = torch.nn.Module
    before, seen = own.__call__, set[object]()

    def call(module: torch.nn.Module, *args: object, **kwargs: object) -> object:
        inner = getattr(module, "_orig_mod", None)
        key = id(module), str(_shapes(args)), str(_shapes(kwargs))
        if key not in seen:
            seen.add(key)
            compiled = isinstance(inner, own)
            found.append(ModuleCall(inner if compiled else module, compiled, args, kwargs))
        # What it calls is its own, and the compiler must not see this function.
        own.__call__ = before
        try:
            return before(module, *args, **kwargs)
        finally:
            own.__call__ = call

    own.__call__ = call
    try:
        yield found
    finally:
        own.__call__ = before


def _shapes(given: object) -> object:
    """Inputs with shapes and types in the place of tensors."""
    import torch
    from torch.utils._pytree import tree_map

    def shape(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return tuple(value.shape), str(value.dtype)
        return value

    return tree_map(shape, given)


def with_batch(program: TorchProgram, samples: int) -> TorchProgram:
    """Put a program on another batch: inputs as long as the first tensor get that many samples.

    Args:
        program: A module or function with its inputs.
        samples: First size of those inputs.

    Raises:
        ProgramError: It is an export or a file, whose sizes are fixed, it has no tensor of
            samples among its inputs, or there is less than one sample.
    """
    import torch

    given = (program.args, dict(program.kwargs))
    leaves = torch.utils._pytree.tree_leaves(given)
    batch = next((x.shape[0] for x in leaves if isinstance(x, torch.Tensor) and x.dim()), 0)
    if samples < 1 or not batch:
        raise ProgramError(
            f"no batch of {samples} can be made of the program",
            where=program.name,
            hint="batch takes whole numbers from 1 on, of a module or function with its inputs",
        )

    def resized(x: object) -> object:
        if not isinstance(x, torch.Tensor) or not x.dim() or x.shape[0] != batch:
            return x
        last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
        own = x.new_zeros((samples, *x.shape[1:]))
        if last and not x.is_contiguous():
            own = own.contiguous(memory_format=torch.channels_last)
        return own

    args, kwargs = torch.utils._pytree.tree_map(resized, given)
    return replace(program, args=args, kwargs=kwargs)
