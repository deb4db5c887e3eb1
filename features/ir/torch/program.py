"""PyTorch programs: a module, function, export or file, with inputs and training settings.

PyTorch is imported only where a function needs it.
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

#: Optimiser rules, with the defaults of ``torch.optim``; ``momentum`` is SGD with 0.9.
RULES = ("adamw", "adam", "sgd", "momentum")
#: PyTorch's implementations other than lists of tensors (``foreach``, the default on GPUs): one
#: fused kernel, or a loop over parameters. XLA has only one implementation.
_WAYS = ("", "-fused", "-loop")
#: Optimisers of training steps.
OPTIMIZERS = tuple(rule + way for way in _WAYS for rule in RULES)
#: Members that identify an archive of ``torch.export.save``.
_EXPORT = ("/archive_format", "/models/model.json")
#: Losses by name, besides a function of the model's outputs.
LOSSES = ("cross_entropy", "sum")
#: Objective of a training step: one of :data:`LOSSES`, a PyTorch function of the module's outputs,
#: or ``None`` if the module itself returns its loss.
Loss: TypeAlias = str | Callable[..., object] | None
_LOSS_HINT = f"known: {', '.join(LOSSES)}; or, in Python, a function of the module's outputs"


class _Output(Protocol):
    """A PyTorch tensor, or just its shape and type."""

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
        train: Optimiser of a full training step, one of :data:`OPTIMIZERS`; empty for only the
            forward pass.
        loss: Objective of a training step: one of :data:`LOSSES`, or a PyTorch function of the
            module's outputs; ``None`` if the module itself returns its loss.
        origin: Origin, for messages.
    """

    source: object
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)
    train: str = ""
    loss: Loss = None
    origin: str = ""

    def __post_init__(self) -> None:
        """Check the names of the optimiser and the loss, and the layout of inputs and parameters.

        Raises:
            ProgramError: One of the names is unknown, an input is a sparse matrix, or a parameter
                is distributed over devices.
        """
        train, loss = _optimizer(self.train), _loss(self.loss)
        if loss is not None and not train:
            raise ProgramError("a loss without an optimiser", hint="such as train='adamw'")
        for value in (*self.args, *self.kwargs.values()):
            layout = str(getattr(value, "layout", ""))
            if layout.startswith("torch.sparse"):
                raise sparse_refusal(f"an input is a sparse matrix ({layout})", self.name)
        named = getattr(self.source, "named_parameters", dict[str, object]().items)
        if spread := next((name for name, p in named() if hasattr(p, "device_mesh")), ""):
            raise ProgramError(
                f"parameter {spread} is distributed over devices (DTensor, as by fully_shard or "
                "parallelize_module); a module is predicted on one device",
                where=self.name,
                hint="give the module before it is distributed; opcast simulate predicts training "
                "steps of transformers on clusters, with fsdp and tensor parallelism",
            )

    @property
    def name(self) -> str:
        """Name for messages."""
        if self.origin or isinstance(self.source, str | Path):
            return self.origin or str(self.source)
        own = getattr(self.source, "__name__", "")
        return str(own or type(self.source).__name__)


def sparse_refusal(what: str, where: str) -> ProgramError:
    """Return the error for a program with a sparse matrix.

    Args:
        what: The sparse object.
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
    """Wrap a PyTorch program; ``None`` if the source is not PyTorch's.

    Args:
        source: A program; a callable is PyTorch's if it is a module or an argument is a tensor.
        args: Its example arguments.
        kwargs: Its keyword arguments.
        train: As in :class:`TorchProgram`.
        loss: As in :class:`TorchProgram`.
        origin: Origin, for messages.

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
    """Check and return the name of an optimiser."""
    if not isinstance(train, str) or (train and train not in OPTIMIZERS):
        raise ProgramError(
            f"no optimiser {train!r}", hint="train is one of: " + ", ".join(OPTIMIZERS)
        )
    return train


def _loss(loss: object) -> Loss:
    """Check and return a loss."""
    if isinstance(loss, str):
        if loss not in LOSSES:
            raise ProgramError(f"no loss {loss!r}", hint=_LOSS_HINT)
        return loss
    if loss is None or callable(loss):
        return loss
    raise ProgramError(f"a loss that is a {type(loss).__name__}", hint=_LOSS_HINT)


def check_loss(loss: Loss, outputs: Sequence[_Output], where: str) -> None:
    """Check that a loss fits a module's first output.

    Args:
        loss: As in :class:`TorchProgram`.
        outputs: Tensors that the module returns.
        where: Name of the module.

    Raises:
        ProgramError: The loss does not fit.
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
    """Return whether a source is the path of a file of ``torch.export.save``, by its content."""
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
    """Return the tensors in lists, tuples and mappings."""
    import torch

    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def torch_loss(found: object, loss: Loss, where: str) -> torch.Tensor:
    """Compute PyTorch's loss of a module's outputs; cross-entropy labels have no data."""
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
    """Create PyTorch's optimiser, with ``foreach`` as on GPUs unless its name says otherwise."""
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
        module: The module, without the wrapper of ``torch.compile``.
        compiled: Whether it was wrapped by ``torch.compile``.
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
    """Record each module called within the context, once for inputs of the same shapes.

    Modules called by other modules are not recorded separately. Empty if PyTorch is not imported.

    Yields:
        The calls, filled in as they occur.
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
        # Nested calls are not recorded, and the compiler must not see this function.
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
    """Replace the tensors in inputs by their shapes and types."""
    import torch
    from torch.utils._pytree import tree_map

    def shape(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return tuple(value.shape), str(value.dtype)
        return value

    return tree_map(shape, given)


def with_batch(program: TorchProgram, samples: int) -> TorchProgram:
    """Change the batch size of a program: inputs as long as the first tensor are resized.

    Args:
        program: A module or function with its inputs.
        samples: First dimension of those inputs.

    Raises:
        ProgramError: The program is an export or a file, whose sizes are fixed; it has no batched
            tensor among its inputs; or ``samples`` is less than one.
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


def dtype_name(tensor: torch.Tensor) -> str:
    """Return PyTorch's name of a tensor's element type, such as ``bfloat16``."""
    return str(tensor.dtype).removeprefix("torch.")
