"""Track which tensors a PyTorch program allocates and frees, in order.

The module itself runs on tensors without memory, so values held by its frames, autograd's graph,
autocast's copies and checkpoints stay alive as in a real run. An export, which has no frames, frees
each value after its last use.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ....common.errors import ProgramError
from .decomposition import Fakes
from .eager import deciding_without_values, place_of, run, standing_in, users_frame
from .export import export, shortened
from .program import TorchProgram, tensors_of, torch_loss, torch_optimizer
from .record import Fused, Recorder
from .runs import graph_on, run_graph
from .stand_ins import stands

if TYPE_CHECKING:
    import torch

#: Purposes of a storage.
WEIGHTS, INPUTS, GRADIENTS = "weights", "inputs", "gradients"
STATES, ACTIVATIONS, WORKSPACE = "optimizer", "activations", "workspace"
#: Operators whose results are host constants, such as ``torch.tensor(0.5)``.
_CONSTANTS = ("aten.lift_fresh", "aten._local_scalar_dense")
#: Operators that call cuBLAS, whose workspace stays allocated.
_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._scaled_mm")


class Storage(NamedTuple):
    """Memory of a tensor and its views.

    Attributes:
        bytes: Size.
        kind: Purpose, such as :data:`WEIGHTS`.
        line: ``file:line`` of the model that allocated it; empty in a backward pass.
        name: Operator that allocated it.
    """

    bytes: int
    kind: str
    line: str = ""
    name: str = ""


@dataclass
class StorageLog:
    """Storages of a forward pass or of a training step.

    Attributes:
        storages: Storages by number.
        events: Numbers of allocated storages and, as ``~number``, of freed ones: of a forward pass,
            or of two training steps, since moments exist from the second on.
        batch: First dimension of the first input; 0 if it has none.
        framed: Whether the module's own frames kept values alive.
        products: Whether cuBLAS products are among the operators.
        train: Whether it is a training step.
    """

    storages: list[Storage] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    batch: int = 0
    framed: bool = True
    products: bool = False
    train: bool = False

    def peak(self) -> int:
        """Return the most bytes held at one time, before any rounding."""
        now = most = 0
        for event in self.events:
            now += self.storages[event].bytes if event >= 0 else -self.storages[~event].bytes
            most = max(most, now)
        return most


def log_storages(program: TorchProgram, fused: Fused = lambda _: True) -> StorageLog:
    """Track the storages of a program.

    Args:
        program: The program.
        fused: Which calls are one kernel; fused attention keeps no scores.

    Raises:
        ProgramError: The program cannot be run without data.
    """
    with warnings.catch_warnings():
        # Warnings about tensors without data.
        warnings.simplefilter("ignore")
        if _is_module(program.source):
            try:
                return run(_Run(program, fused).by_module)
            except Exception:
                # Branches on data, or tensors hidden in the module: its export has neither.
                pass
        try:
            return run(_Run(program, fused).by_export)
        except ProgramError:
            raise
        except Exception as error:
            raise ProgramError(
                f"its tensors cannot be followed: {type(error).__name__}: {shortened(error)}",
                where=program.name,
            ) from error


def _is_module(source: object) -> bool:
    import torch

    return isinstance(source, torch.nn.Module) and not isinstance(source, torch.fx.GraphModule)


class _Run:
    """One run of a program on tensors without memory."""

    def __init__(self, program: TorchProgram, fused: Fused) -> None:
        self.program, self.fused = program, fused
        self.fakes = Fakes.of_a_run()

    def by_module(self) -> StorageLog:
        """Run a copy of the module whose tensors have no memory."""
        import torch

        module = self.program.source
        assert isinstance(module, torch.nn.Module), "no module"
        held = [v for m in module.modules() for v in vars(m).values()]
        held += [*module.parameters(), *module.buffers()]
        memo = {id(t): self.fakes.of(t) for t in held if isinstance(t, torch.Tensor)}
        own = copy.deepcopy(module, memo)

        def placed(value: object) -> object:
            if not isinstance(value, torch.Tensor):
                return value
            return self.fakes.like(value).requires_grad_(value.requires_grad)

        args, kwargs = torch.utils._pytree.tree_map(
            placed, (self.program.args, dict(self.program.kwargs))
        )
        return self._follow(own, lambda _: own(*args, **kwargs), (args, kwargs))

    def by_export(self) -> StorageLog:
        """Run the export, whose values die after their last use."""
        module, inputs = graph_on(self.fakes, export(self.program))

        def forward(watch: _Watch) -> object:
            def at(node: torch.fx.Node) -> None:
                place = place_of(node)
                watch.line = str(place) if place.file else watch.line

            return run_graph(module, inputs, at)

        log = self._follow(module, forward, inputs)
        log.framed = False
        return log

    def _follow(
        self, module: torch.nn.Module, forward: Callable[[_Watch], object], inputs: object
    ) -> StorageLog:
        """Run a forward pass, or whole steps, and record allocations and frees."""
        import torch

        watch = _Watch(StorageLog(train=bool(self.program.train)))
        watch.hold((*module.parameters(), *module.buffers()), WEIGHTS)
        tensors = tensors_of(inputs)
        watch.hold(tensors, INPUTS)
        watch.log.batch = tensors[0].shape[0] if tensors and tensors[0].dim() else 0
        # MKL-DNN has recurrent layers that GPUs do not have.
        plain = torch.backends.mkldnn.flags(enabled=False)
        decides = Recorder(self.fused)
        # A recording would keep what it has seen alive.
        decides.on = False
        as_on_gpus = standing_in(stands(decides))
        decided = deciding_without_values(self.program.kwargs)
        with plain, as_on_gpus, decided, torch.device("cpu"), self.fakes.mode, _watching(watch):
            if watch.log.train:
                self._train(module, forward, watch)
            else:
                with torch.no_grad():
                    found = forward(watch)
                del found
        watch.on = False
        return watch.log

    def _train(
        self, module: torch.nn.Module, forward: Callable[[_Watch], object], watch: _Watch
    ) -> None:

        log, start = watch.log, len(watch.log.events)
        found = forward(watch)
        loss = torch_loss(found, self.program.loss, self.program.name)
        if not loss.requires_grad:
            raise ProgramError("no parameter takes a gradient", where=self.program.name)
        watch.forward = False
        loss.backward()
        watch.relabel((p.grad for p in module.parameters() if p.grad is not None), GRADIENTS)
        step = len(log.events)
        optimizer = torch_optimizer(self.program.train, module)
        optimizer.step()
        moments = tensors_of([list(state.values()) for state in optimizer.state.values()])
        watch.relabel(moments, STATES)
        later = len(log.events)
        optimizer.step()
        watch.on = False
        log.events = _two_steps(log, start, step, later)


def _two_steps(log: StorageLog, start: int, step: int, later: int) -> list[int]:
    """Return the events of two training steps.

    Args:
        log: Forward and backward pass from ``start``, an update that allocates the moments from
            ``step``, and an update that reuses them from ``later``.
        start: Index of an event.
        step: Index of an event.
        later: Index of an event.
    """
    passes, made, update = log.events[start:step], log.events[step:later], log.events[later:]
    freed = {~e for e in (*passes, *made, *update) if e < 0}
    # ``zero_grad`` frees the gradients before the next forward pass.
    left = [~e for e in passes if e >= 0 and e not in freed]
    renamed: dict[int, int] = {}
    again = []
    for event in (*passes, *update):
        if event >= 0:
            renamed[event] = len(log.storages)
            log.storages.append(log.storages[event])
            again.append(renamed[event])
        elif ~event in renamed:
            again.append(~renamed[~event])
    return [*log.events[:later], *left, *again]


class _Watch:
    """Records storages when an operator allocates them and when their last tensor dies."""

    def __init__(self, log: StorageLog) -> None:
        self.log, self.on, self.forward, self.line = log, True, True, ""
        self._known: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}

    def hold(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Record tensors that exist before the program runs."""
        for tensor in tensors:
            self._note(tensor, kind, "", "")

    def relabel(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Set the purpose of allocated tensors."""
        for tensor in tensors:
            known = self._known.get(tensor.untyped_storage()._cdata)
            if known is not None:
                self.log.storages[known[0]] = self.log.storages[known[0]]._replace(kind=kind)

    def see(
        self, name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        """Record the results of an operator."""
        if not self.on or name.startswith(_CONSTANTS):
            return
        self.log.products |= name.startswith(_PRODUCTS)
        line = (self.line or _line()) if self.forward else ""
        for tensor in outputs:
            self._note(tensor, ACTIVATIONS, line, name)
        for size in _scratch(name, inputs, outputs):
            self.log.events += [len(self.log.storages), ~len(self.log.storages)]
            self.log.storages.append(Storage(size, WORKSPACE, line, name))

    def _note(self, tensor: torch.Tensor, kind: str, line: str, name: str) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or not size:
            return
        number = len(self.log.storages)
        self.log.storages.append(Storage(size, kind, line, name))
        self.log.events.append(number)

        def gone(_: object) -> None:
            del self._known[key]
            if self.on:
                self.log.events.append(~number)

        self._known[key] = number, weakref.ref(storage, gone)


def _scratch(
    name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> Iterator[int]:
    """Yield the bytes of workspace that an operator's kernels use while they run.

    Fused attention accumulates the queries' gradient in f32 (FlashAttention's ``dq_accum``). Matrix
    units need channels-last images: cuDNN converts other 16-bit images and results there and back
    (its kernels ``nchwToNhwc`` and ``nhwcToNchw``), except for depthwise convolutions, for which
    PyTorch has direct kernels.
    """
    import torch

    if name.startswith("aten._scaled_dot_product") and name.endswith("_backward"):
        yield 4 * inputs[1].numel()
    if name in ("aten.convolution", "aten.convolution_backward"):
        image, weight = inputs[-2:] if name.endswith("_backward") else inputs[:2]
        result = inputs[0] if name.endswith("_backward") else outputs[0]
        dense = image.dim() == 4 and image.is_contiguous() and weight.shape[1] > 1
        last = dense and image.is_contiguous(memory_format=torch.channels_last)
        if dense and not last and image.element_size() == 2:
            yield 2 * (image.numel() + result.numel())


def _line() -> str:
    """Return the innermost running line of the model."""
    frame = users_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""


def _watching(watch: _Watch) -> AbstractContextManager[object]:
    """Return a mode in which ``watch`` sees each call (PyTorch is imported late)."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(
            self,
            operator: torch._ops.OpOverload,
            types: Sequence[type],
            args: tuple[object, ...] = (),
            kwargs: Mapping[str, object] | None = None,
        ) -> object:
            found = operator(*args, **(kwargs or {}))
            watch.see(
                str(operator).rpartition(".")[0], tensors_of((args, kwargs)), tensors_of(found)
            )
            return found

    return Mode()
