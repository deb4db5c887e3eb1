"""What a PyTorch program is: a module, function, export or file, with inputs and how it trains.

PyTorch is imported where a function needs it.
"""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from ....common.errors import ProgramError

if TYPE_CHECKING:
    import torch

#: Rules of optimisers, with the defaults of ``torch.optim``; ``momentum`` is SGD with 0.9.
RULES = ("adamw", "adam", "sgd", "momentum")
#: How PyTorch runs them, if not over lists of tensors (``foreach``, its default on GPUs): by one
#: fused kernel, or by a loop over parameters. XLA has one way.
_WAYS = ("", "-fused", "-loop")
#: Optimisers of training steps.
OPTIMIZERS = tuple(rule + way for way in _WAYS for rule in RULES)
#: What an archive of ``torch.export.save`` holds, and no other.
_EXPORT = ("/archive_format", "/models/model.json")
#: Losses by name, besides a function of the model's outputs.
LOSSES = ("cross_entropy", "sum")
#: What a training step minimises: one of :data:`LOSSES`, a function of the module's outputs written
#: in PyTorch, or nothing if the module itself returns its loss.
Loss: TypeAlias = str | Callable[..., object] | None
_LOSS_HINT = f"known: {', '.join(LOSSES)}; or, in Python, a function of the module's outputs"


class _Output(Protocol):
    """A tensor of PyTorch, or its shape and type alone."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> object: ...


@dataclass(frozen=True)
class TorchProgram:
    """A PyTorch module, export or ``.pt2`` file as a program: its forward pass, or a training step.

    Attributes:
        source: ``torch.nn.Module``, a function of tensors, ``torch.export.ExportedProgram``, or the
            path of a ``.pt2`` file.
        args: Example inputs of a module or function.
        kwargs: Its keyword arguments.
        train: Optimiser of a full training step, one of :data:`OPTIMIZERS`; empty for the forward
            pass alone.
        loss: What a training step minimises: one of :data:`LOSSES`, or a function of the module's
            outputs written in PyTorch; if nothing, the module itself returns its loss.
        origin: Where it came from, for messages.
    """

    source: object
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)
    train: str = ""
    loss: Loss = None
    origin: str = ""

    def __post_init__(self) -> None:
        """Check the names of the optimiser and the loss, and the layout of the inputs.

        Raises:
            ProgramError: One of the names is unknown, or an input is a sparse matrix.
        """
        train, loss = _optimizer(self.train), _loss(self.loss)
        if loss is not None and not train:
            raise ProgramError("a loss without an optimiser", hint="such as train='adamw'")
        for value in (*self.args, *self.kwargs.values()):
            layout = str(getattr(value, "layout", ""))
            if layout.startswith("torch.sparse"):
                raise sparse_refusal(f"an input is a sparse matrix ({layout})", self.name)

    @property
    def name(self) -> str:
        """For messages."""
        if self.origin or isinstance(self.source, str | Path):
            return self.origin or str(self.source)
        own = getattr(self.source, "__name__", "")
        return str(own or type(self.source).__name__)


def sparse_refusal(what: str, where: str) -> ProgramError:
    """The error of a program with a sparse matrix.

    Args:
        what: What is one.
        where: Line or name of the program.
    """
    return ProgramError(
        f"{what}, whose products are not predicted: their time follows from which values there are",
        where=where,
        hint="write them by their indices, such as torch.index_add of x[columns]",
    )


def as_torch_program(
    source: object,
    args: tuple[object, ...] = (),
    kwargs: Mapping[str, object] | None = None,
    train: object = None,
    loss: object = None,
    origin: str = "",
) -> TorchProgram | None:
    """Take what belongs to PyTorch as a program; ``None`` if it does not.

    Args:
        source: Any program; a callable is PyTorch's if it is a module or an argument is a tensor.
        args: Its example arguments.
        kwargs: Its keyword arguments.
        train: As in :class:`TorchProgram`.
        loss: As in :class:`TorchProgram`.
        origin: Where it came from, for messages.

    Raises:
        ProgramError: The optimiser or the loss is unknown.
    """
    if isinstance(source, TorchProgram):
        if not (train or loss):
            return source
        return replace(source, train=_optimizer(train or ""), loss=_loss(loss))
    given = dict(kwargs or {})
    if is_torch_file(source) or _is_torch(source) or _has_tensors((*args, *given.values())):
        own = _optimizer(train or ""), _loss(loss)
        return TorchProgram(source, tuple(args), given, *own, origin)
    return None


def _optimizer(train: object) -> str:
    """The name of an optimiser, checked."""
    if not isinstance(train, str) or (train and train not in OPTIMIZERS):
        raise ProgramError(
            f"no optimiser {train!r}", hint="train is one of: " + ", ".join(OPTIMIZERS)
        )
    return train


def _loss(loss: object) -> Loss:
    """A loss, checked."""
    if isinstance(loss, str):
        if loss not in LOSSES:
            raise ProgramError(f"no loss {loss!r}", hint=_LOSS_HINT)
        return loss
    if loss is None or callable(loss):
        return loss
    raise ProgramError(f"a loss that is a {type(loss).__name__}", hint=_LOSS_HINT)


def check_loss(loss: Loss, outputs: Sequence[_Output], where: str) -> None:
    """Refuse a loss that does not fit a module's first output.

    Args:
        loss: As in :class:`TorchProgram`.
        outputs: Tensors that the module returns.
        where: Name of the module.

    Raises:
        ProgramError: It does not fit.
    """
    shape = tuple(outputs[0].shape) if outputs else ()
    if loss is None and (not outputs or prod(shape) != 1):
        what = f"{outputs[0].dtype}{list(shape)}".removeprefix("torch.") if outputs else "nothing"
        raise ProgramError(
            f"the module returns {what}, no loss to train by",
            where=where,
            hint="--loss cross_entropy (its first output as logits, labels of their own) or "
            "--loss sum; in Python also loss=function of the outputs",
        )
    if loss == "cross_entropy" and len(shape) < 2:
        raise ProgramError("cross entropy needs logits of rank 2 or more", where=where)


def is_torch_file(source: object) -> bool:
    """Whether a source is the path of a file of ``torch.export.save``, told by its content."""
    if not isinstance(source, str | Path) or "\n" in str(source) or len(str(source)) > 4096:
        return False
    try:
        path = Path(source).expanduser()
        if not path.is_file() or not zipfile.is_zipfile(path):
            return False
        with zipfile.ZipFile(path) as archive:
            return any(n.endswith(_EXPORT) for n in archive.namelist())
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile):
        return False


def _is_torch(source: object) -> bool:
    if sys.modules.get("torch") is None:
        return False
    import torch

    return isinstance(source, torch.nn.Module | torch.export.ExportedProgram)


def _has_tensors(values: tuple[object, ...]) -> bool:
    if sys.modules.get("torch") is None or not values:
        return False
    import torch

    return any(isinstance(v, torch.Tensor) for v in torch.utils._pytree.tree_leaves(list(values)))


def tensors_of(tree: object) -> list[torch.Tensor]:
    """The tensors in lists, tuples and mappings."""
    import torch

    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def torch_loss(found: object, loss: Loss, where: str) -> torch.Tensor:
    """PyTorch's own loss of a module's outputs; labels of cross entropy hold no data."""
    import torch

    if callable(loss):
        return loss(found)
    tensors = tensors_of(found)
    check_loss(loss, tensors, where)
    if loss == "sum":
        return sum(t.float().sum() for t in tensors if t.is_floating_point())
    if loss == "cross_entropy":
        logits = tensors[0].flatten(0, -2)
        labels = torch.empty(logits.shape[:1], dtype=torch.int64)
        return torch.nn.functional.cross_entropy(logits, labels)
    return tensors[0].reshape(())


def torch_optimizer(name: str, module: torch.nn.Module) -> torch.optim.Optimizer:
    """PyTorch's optimiser, over lists of tensors as on GPUs by default, or as its name has it."""
    import torch

    trained: Sequence[torch.nn.Parameter] = [p for p in module.parameters() if p.requires_grad]
    rule, _, way = name.partition("-")
    own, optim = {"foreach": not way, "fused": way == "fused"}, torch.optim
    if rule in ("adamw", "adam"):
        kind = optim.AdamW if rule == "adamw" else optim.Adam
        return kind(trained, lr=1e-3, **own)
    return optim.SGD(trained, lr=1e-3, momentum=0.9 if rule == "momentum" else 0.0, **own)


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
