"""Run a module as eager PyTorch does, on tensors without memory: no export, no graph.

Python then decides as on a GPU: which attention is called and whether with a mask, how a cache
grows, what activation checkpointing recomputes. An export freezes different decisions, since
libraries build masks and repeat keys for exports that they otherwise omit.

Functions with a single GPU kernel but none on the CPU, where the tensors are, are caught by name.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import sys
import traceback
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

#: Folders of opcast that call a user's model. Other files in a clone may be the user's.
_LAYERS = ("cli", "common", "features", "models", "predict", "server", "workflows")
_OWN = tuple(f"{Path(__file__).parents[3] / layer}{os.sep}" for layer in _LAYERS)
#: Depth to which user-defined objects, such as caches, are searched for tensors.
_DEPTH = 5
#: Attribute of a tensor of truth values, all of which are known.
_ANSWER = "_opcast_answer"
#: Attribute in which a compiled function keeps the original.
_ORIGINAL = "_torchdynamo_orig_callable"
_FRAME = re.compile(r'File "([^"\n]+)", line (\d+)')
Result = TypeVar("Result")
#: Replacement for a function of PyTorch, which it receives before the arguments.
Stand: TypeAlias = Callable[..., object]


@cache
def is_users(file: str) -> bool:
    """Return whether a Python file belongs to a model, not to PyTorch or the caller."""
    return not (FRAMEWORK.search(file) or file.startswith(("<", *_OWN)))


def users_frame() -> FrameType | None:
    """Return the innermost frame of the running model, none outside :func:`run`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not run.__code__:
        if is_users(frame.f_code.co_filename):
            return frame
        frame = frame.f_back
    return None


@dataclass(frozen=True)
class Place:
    """Position of a node in the user's model.

    Attributes:
        file: The innermost file of the user; empty if unknown.
        line: Line in it.
        modules: Scopes, outermost first, joined by slashes.
    """

    file: str = ""
    line: int = 0
    modules: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else self.modules


def place_of(node: torch.fx.Node) -> Place:
    """Return the user's line and modules of a node of an FX graph."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    # Outermost first, down to PyTorch's own modules.
    own = [f for f in frames if is_users(f[0])]
    file, line = (own or [("", "0")])[-1]
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    names, before = [], ""
    for path, kind in stack:
        # The outermost module has only its class as a name.
        text = kind if isinstance(kind, str) else kind.__name__
        names.append(path.removeprefix(before).lstrip(".") if path else text.rpartition(".")[2])
        before = path
    return Place(file, int(line), "/".join(n for n in names if n))


@dataclass
class Scopes:
    """The modules that are currently running.

    Attributes:
        names: Path of each module from the outermost, by ``id``.
        outermost: Class of the outermost module.
        running: Path and displayed name of each running module, outermost first.
    """

    names: Mapping[int, str]
    outermost: str
    running: list[tuple[str, str]] = field(default_factory=list)

    def place(self) -> Place:
        """Return the position of the current call in the user's files and modules."""
        modules = "/".join(text for _, text in self.running if text)
        frame = users_frame()
        if frame is None:
            return Place("", 0, modules)
        return Place(frame.f_code.co_filename, frame.f_lineno, modules)

    def enter(self, module: torch.nn.Module, _: object) -> None:
        """Record that a module starts."""
        path = self.names.get(id(module), "")
        if self.running:
            text = path.removeprefix(self.running[-1][0]).lstrip(".") or type(module).__name__
        else:
            # A recomputed part has no enclosing module.
            text = "/".join(t for t in (self.outermost, path) if t)
        self.running.append((path, text))

    def leave(self, module: torch.nn.Module, *_: object) -> None:
        """Record that a module ends."""
        if self.running:
            self.running.pop()


def sized_by_data(error: Exception) -> str:
    """Return advice on an operator whose result sizes depend on values; empty for other errors.

    One of them is the CTC loss, which keeps a score per step and label of the longest target.
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


def line_of(error: Exception) -> str:
    """Return the innermost line of user code that an error comes from; empty if none."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def run(steps: Callable[[], Result]) -> Result:
    """Call a function; frames outside this call are not considered the user's."""
    return steps()


@contextlib.contextmanager
def noting_compiled(module: torch.nn.Module) -> Iterator[list[str]]:
    """Record what a model passes to ``torch.compile``, which runs uncompiled here.

    Yields:
        Names of compiled modules, and of compiled functions when they are called.
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


def asks_for_graphs(module: torch.nn.Module) -> bool:
    """Return whether a model was compiled for CUDA graphs.

    That is ``torch.compile(model, mode="reduce-overhead")`` or ``"max-autotune"``, or the option
    ``triton.cudagraphs``.
    """
    around = getattr(module, "dynamo_ctx", None)
    asked = getattr(module._compiled_call_impl, "get_compiler_config", None)
    settings = asked() if asked else getattr(around, "compiler_config", None)
    return bool((settings or {}).get("triton.cudagraphs"))


def _is_compiled(value: object) -> TypeGuard[Callable[..., object]]:
    return _ORIGINAL in getattr(value, "__dict__", {})


def tensors_in(value: object, depth: int = _DEPTH) -> list[torch.Tensor]:
    """Return the tensors in lists, mappings and user-defined objects, such as KV caches."""
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
    """Temporarily replace a module's tensors by tensors without memory."""
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
    """Copy arguments, with their tensors replaced by tensors without memory."""
    held = tensors_in((args, kwargs))
    made: dict[int, object] = {id(t): fakes.like(t).requires_grad_(t.requires_grad) for t in held}
    return copy.deepcopy(args, made), copy.deepcopy(dict(kwargs), made)


@contextlib.contextmanager
def deciding_without_values(asked: Mapping[str, object]) -> Iterator[None]:
    """Make libraries decide as for typical values where they read values of tensors.

    Transformers checks positions for packed sequences, and builds masks if it cannot read them: a
    row is assumed to be one sequence unless positions are given.

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
        # Its kernels still run.
        known(position_ids)

    setattr(masks, known.__name__, single)
    try:
        yield
    finally:
        setattr(masks, known.__name__, known)


@contextlib.contextmanager
def scoped(scopes: Scopes) -> Iterator[None]:
    """Track which modules run."""
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
def checkpointing(module: torch.nn.Module) -> Iterator[dict[str, int]]:
    """Record which modules run inside ``torch.utils.checkpoint``, whose results are computed again.

    Its reentrant form runs without gradients, which an export would keep: it runs as the other.

    Yields:
        The number of checkpoint's call, by path of each such module.
    """
    import torch
    from torch.utils import checkpoint

    names = {id(own): name for name, own in module.named_modules()}
    found: dict[str, int] = {}
    calls: list[FrameType] = []

    def enter(own: torch.nn.Module, _: object) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not (
            frame.f_code.co_name == "checkpoint" and frame.f_code.co_filename == checkpoint.__file__
        ):
            frame = frame.f_back
        if frame is not None and id(own) in names:
            if not calls or calls[-1] is not frame:
                calls.append(frame)
            found[names[id(own)]] = len(calls)

    class Plain:
        @staticmethod
        def apply(function: Callable[..., object], _: object, *args: object) -> object:
            return function(*args)

    reentrant = checkpoint.CheckpointFunction
    checkpoint.CheckpointFunction = Plain
    handle = torch.nn.modules.module.register_module_forward_pre_hook(enter)
    try:
        yield found
    finally:
        handle.remove()
        checkpoint.CheckpointFunction = reentrant


def _finite(
    function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    """Call a function of PyTorch; all values are finite for a program that checks.

    Many models of transformers clamp values that are not. The kernels that look for them run.
    """
    import torch

    own = torch.Tensor
    given = args[0] if args and isinstance(args[0], own) else None
    answer = getattr(given, _ANSWER, None)
    if answer is not None and function in (own.__bool__, own.item):
        return answer
    found = function(*args, **kwargs)
    if function in (torch.isfinite, own.isfinite):
        answer = True
    elif function in (torch.isnan, own.isnan, torch.isinf, own.isinf):
        answer = False
    elif function not in (torch.all, own.all, torch.any, own.any):
        return found
    if answer is not None:
        setattr(found, _ANSWER, answer)
    return found


@contextlib.contextmanager
def standing_in(stands: Mapping[str, Stand]) -> Iterator[None]:
    """Replace some functions of ``torch.nn.functional`` and ``torch._VF``.

    ``torch.autocast("cuda")`` casts as on a GPU.

    Args:
        stands: Replacements by name in these modules; each receives the original function first.
    """
    import torch

    functional = torch.nn.functional
    owners = {
        n: functional if hasattr(functional, n) else torch._C._VariableFunctions for n in stands
    }
    known = {getattr(owner, name): name for name, owner in owners.items()}

    # Calls by users under any name; functions of ``torch.nn.functional`` hide inner calls.
    def seen(
        function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        name = known.get(function)
        if name is not None:
            return stands[name](function, *args, **kwargs)
        if kwargs.get("device") is not None:
            kwargs["device"] = "cpu"
        return _finite(function, args, kwargs)

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
