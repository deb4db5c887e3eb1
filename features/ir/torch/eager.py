"""Runs a module as eager PyTorch does, on tensors without memory: no export, no graph.

Python decides in a run what it decides on a GPU: which attention is called and whether with a mask,
how a cache grows, what activation checkpointing computes again. An export freezes other decisions:
libraries build masks and repeat keys for it that they leave out otherwise.

What a GPU has as one kernel and the CPU, where the tensors are, has not, is caught by name.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, wraps
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TypeAlias, TypeGuard, TypeVar

from ..mlir.locations import FRAMEWORK
from .autocast import cuda_autocast, function_mode

if TYPE_CHECKING:
    import torch

    from .decomposition import Fakes

#: Folders of opcast that call a user's model. Files beside them in a clone may be the user's.
_LAYERS = ("cli", "common", "features", "models", "predict", "server", "workflows")
_OWN = tuple(f"{Path(__file__).parents[3] / layer}{os.sep}" for layer in _LAYERS)
#: Depth to which objects of the user's own are searched for tensors, as caches hold them.
_DEPTH = 5
#: Attribute in which a compiled function keeps the one that it was made of.
_ORIGINAL = "_torchdynamo_orig_callable"
Result = TypeVar("Result")
#: What stands for a function of PyTorch: it gets the function itself before its arguments.
Stand: TypeAlias = Callable[..., object]


@cache
def is_users(file: str) -> bool:
    """Whether a file of Python belongs to a model, not to PyTorch or to what runs it."""
    return not (FRAMEWORK.search(file) or file.startswith(("<", *_OWN)))


def users_frame() -> FrameType | None:
    """The innermost frame of the model that runs; none of those around :func:`run`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not run.__code__:
        if is_users(frame.f_code.co_filename):
            return frame
        frame = frame.f_back
    return None


@dataclass(frozen=True)
class Place:
    """Where in the user's model a node belongs.

    Attributes:
        file: The innermost file of the user's own; empty if unknown.
        line: Line in it.
        modules: Scopes, outermost first, joined by slashes.
    """

    file: str = ""
    line: int = 0
    modules: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else self.modules


@dataclass
class Scopes:
    """The modules that are running.

    Attributes:
        names: Path of each module from the outermost, by ``id``.
        outermost: Its class.
        running: Path and text of each that runs, outermost first.
    """

    names: Mapping[int, str]
    outermost: str
    running: list[tuple[str, str]] = field(default_factory=list)

    def place(self) -> Place:
        """Where the call that is being made stands in the user's files and modules."""
        modules = "/".join(text for _, text in self.running if text)
        frame = users_frame()
        if frame is None:
            return Place("", 0, modules)
        return Place(frame.f_code.co_filename, frame.f_lineno, modules)

    def enter(self, module: torch.nn.Module, _: object) -> None:
        """Note that a module begins to run."""
        path = self.names.get(id(module), "")
        if self.running:
            text = path.removeprefix(self.running[-1][0]).lstrip(".") or type(module).__name__
        else:
            # A part that is computed again has none around it.
            text = "/".join(t for t in (self.outermost, path) if t)
        self.running.append((path, text))

    def leave(self, module: torch.nn.Module, *_: object) -> None:
        """Note that it is through."""
        if self.running:
            self.running.pop()


def sized_by_data(error: Exception) -> str:
    """What to do about an operator whose results' sizes depend on values; empty for other errors.

    One of them is the CTC loss, which keeps a score for each step and label of the longest target.
    """
    from torch._subclasses.fake_tensor import DynamicOutputShapeException

    if not isinstance(error, DynamicOutputShapeException):
        return ""
    operator = str(error.func).rpartition(".")[0]
    return (
        f"how large the results of {operator} are depends on values of its inputs, which a "
        "prediction does not have (F.ctc_loss: on lengths, also those given as lists; nonzero, "
        "masked_select, unique: on the data): end the module before it and add its time as "
        "measured, or write it with fixed sizes"
    )


def run(steps: Callable[[], Result]) -> Result:
    """Call a function, below which all callers are the user's or PyTorch's."""
    return steps()


@contextlib.contextmanager
def noting_compiled(module: torch.nn.Module) -> Iterator[list[str]]:
    """Note what a model gives to ``torch.compile``, which runs here as it is written.

    Yields:
        Names of its modules, and of functions as they are called.
    """
    found = list[str]()
    replaced: list[tuple[dict[str, object], str, Callable[..., object]]] = []

    def noting(function: Callable[..., object]) -> Callable[..., object]:
        @wraps(function)
        def call(*args: object, **kwargs: object) -> object:
            found.append(function.__name__)
            return function(*args, **kwargs)

        return call

    for name, own in module.named_modules():
        inner = getattr(own, "_orig_mod", own)
        if inner is not own or own._compiled_call_impl or _is_compiled(own.forward):
            found.append(name or type(inner).__name__)
        around = getattr(own.forward, "__globals__", {})
        called = getattr(getattr(own.forward, "__code__", None), "co_names", ())
        held = {known: around.get(known) for known in called}
        replaced += [(around, known, f) for known, f in held.items() if _is_compiled(f)]
    try:
        for around, known, function in replaced:
            around[known] = noting(function)
        yield found
    finally:
        for around, known, function in replaced:
            around[known] = function


def _is_compiled(value: object) -> TypeGuard[Callable[..., object]]:
    return _ORIGINAL in getattr(value, "__dict__", {})


def tensors_in(value: object, depth: int = _DEPTH) -> list[torch.Tensor]:
    """Tensors in lists, mappings and objects of the user's own, such as caches of keys."""
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if depth == 0 or isinstance(value, str | bytes | torch.nn.Module):
        return []
    if isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, Sequence):
        parts = list(value)
    else:
        parts = list(getattr(value, "__dict__", {}).values())
    return [t for part in parts for t in tensors_in(part, depth - 1)]


@contextlib.contextmanager
def without_memory(module: torch.nn.Module, fakes: Fakes) -> Iterator[None]:
    """Let tensors without memory stand for a module's own; afterwards it is as it was."""
    import torch

    tables = [
        table
        for own in module.modules()
        for table in (vars(own), own._parameters, own._buffers)
        if isinstance(table, dict)
    ]
    saved = [dict(table) for table in tables]
    try:
        for table in tables:
            for name, value in table.items():
                if isinstance(value, torch.Tensor):
                    table[name] = fakes.of(value)
        yield
    finally:
        for table, before in zip(tables, saved, strict=True):
            table.clear()
            table.update(before)


def given_to(
    args: tuple[object, ...], kwargs: Mapping[str, object], fakes: Fakes
) -> tuple[tuple[object, ...], dict[str, object]]:
    """A copy of arguments in which tensors without memory stand for those given."""
    held = tensors_in((args, kwargs))
    made: dict[int, object] = {id(t): fakes.like(t).requires_grad_(t.requires_grad) for t in held}
    return copy.deepcopy(args, made), copy.deepcopy(dict(kwargs), made)


@contextlib.contextmanager
def deciding_without_values(asked: Mapping[str, object]) -> Iterator[None]:
    """Let libraries decide what they read values for as they do for common values.

    Transformers asks positions whether a row holds several sequences, and builds masks if it may
    not read them: they are taken as one unless positions are given.

    Args:
        asked: Keyword arguments of the module.
    """
    masks = sys.modules.get("transformers.masking_utils")
    known = getattr(masks, "find_packed_sequence_indices", None)
    if known is None or asked.get("position_ids") is not None:
        yield
        return

    @wraps(known)
    def single(position_ids: torch.Tensor) -> None:
        # Its kernels run all the same.
        known(position_ids)

    setattr(masks, known.__name__, single)
    try:
        yield
    finally:
        setattr(masks, known.__name__, known)


@contextlib.contextmanager
def scoped(scopes: Scopes) -> Iterator[None]:
    """Follow which modules run."""
    import torch

    own = torch.nn.modules.module
    handles = [
        own.register_module_forward_pre_hook(scopes.enter),
        own.register_module_forward_hook(scopes.leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def standing_in(stands: Mapping[str, Stand]) -> Iterator[None]:
    """Call other functions in the place of some of ``torch.nn.functional`` and ``torch._VF``.

    ``torch.autocast("cuda")`` casts as on a GPU.

    Args:
        stands: By name in these modules. Each is called with the function that it stands for.
    """
    import torch

    functional = torch.nn.functional
    owners = {
        n: functional if hasattr(functional, n) else torch._C._VariableFunctions for n in stands
    }
    known = {getattr(owner, name): name for name, owner in owners.items()}

    # What users call by any name; functions of ``torch.nn.functional`` hide their own.
    def seen(
        function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        name = known.get(function)
        if name is not None:
            return stands[name](function, *args, **kwargs)
        if kwargs.get("device") is not None:
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)

    def stand(name: str, original: Callable[..., object]) -> Callable[..., object]:
        @wraps(original)
        def call(*args: object, **kwargs: object) -> object:
            with torch._C.DisableTorchFunction():
                return stands[name](original, *args, **kwargs)

        return call

    inside = {name: getattr(functional, name) for name, o in owners.items() if o is functional}
    for name, original in inside.items():
        setattr(functional, name, stand(name, original))
    try:
        with cuda_autocast(), function_mode(seen):
            yield
    finally:
        for name, original in inside.items():
            setattr(functional, name, original)
