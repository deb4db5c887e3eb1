"""The operators that PyTorch itself launches for a program, recorded without running any.

The exported graph is run on tensors without memory (``FakeTensorMode``), forward and, for training
steps, backward through autograd and the optimiser's update, and every operator that reaches a
device's kernels is written down. So the backward pass is autograd's own, not a rule about it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

from ....common.errors import ProgramError
from .decomposition import WRAPPERS, Fakes, setting_of
from .program import Exported, TorchProgram, export, shortened, torch_loss, torch_optimizer
from .translate import Place, place_of

if TYPE_CHECKING:
    import torch

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
#: Matches the line of a user's model that calls ``torch.utils.checkpoint`` or a wrapper of it. An
#: export has what is computed there, but not that it is computed again.
_CHECKPOINT = re.compile(r"checkpoint\w*\(")
#: Operators that launch nothing though they are no views.
_HOST = (
    *("aten.empty", "aten.new_empty", "aten._local_scalar_dense", "aten.detach"),
    *("aten.lift_fresh", "aten._unsafe_view", "aten.alias", "aten._assert", "aten.sym_"),
    *("aten.is_same_size", "aten.set_", "aten.resize_", "prim.", "profiler.", "opcast."),
)


@dataclass(frozen=True, slots=True)
class TensorUse:
    """A tensor that an operator reads or writes.

    Attributes:
        shape: Its shape.
        dtype: Element type by PyTorch's name, such as ``bfloat16``.
        memory: Number of the memory that it lies in; views share it.
        bytes: Its bytes; each element of memory counts once however it is broadcast.
        contiguous: Whether its elements lie in the order of its dimensions.
        channels_last: Whether those of an image lie with the channels last instead.
    """

    shape: tuple[int, ...]
    dtype: str
    memory: int
    bytes: int
    contiguous: bool = True
    channels_last: bool = False


@dataclass(frozen=True, slots=True)
class AtenCall:
    """One operator that launches kernels.

    Attributes:
        name: Such as ``aten.addmm``, without the overload.
        inputs: Tensors that it reads, in order.
        outputs: Tensors that it writes; of an operator in place the one that it changes.
        numbers: Arguments that are no tensors, in order.
        phase: ``forward``, ``backward`` or ``optimizer``.
        place: Where in the user's model it, or what it is the gradient of, belongs.
        again: Whether a backward pass computes it again (activation checkpointing).
    """

    name: str
    inputs: tuple[TensorUse, ...]
    outputs: tuple[TensorUse, ...]
    numbers: tuple[object, ...]
    phase: str
    place: Place
    again: bool = False

    def whole(self, at: int) -> int:
        """The whole number at a position of the numbers; from the end if it is negative."""
        value = self.numbers[at]
        assert isinstance(value, int), (self.name, value)
        return value

    def sizes(self, at: int) -> tuple[int, ...]:
        """The list of whole numbers at a position of the numbers."""
        values = self.numbers[at]
        assert isinstance(values, list | tuple), (self.name, values)
        return tuple(values)


@dataclass(frozen=True, slots=True)
class AttentionUse:
    """A call of ``scaled_dot_product_attention``, as PyTorch chooses a kernel for it.

    Attributes:
        query: Shape of the queries.
        key: Shape of the keys.
        value: Shape of the values.
        dtype: Element type of the queries by PyTorch's name.
        masked: Whether it has a mask as a tensor.
        causal: Whether ``is_causal`` is set.
        grouped: Whether ``enable_gqa`` is set.
        dropout: Probability.
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: str
    masked: bool = False
    causal: bool = False
    grouped: bool = False
    dropout: float = 0.0


#: Whether one kernel does the attention of a call; else PyTorch's products and passes do.
Fused: TypeAlias = Callable[[AttentionUse], bool]


@dataclass
class Recording:
    """What a program launches.

    Attributes:
        calls: In order.
        kept: Memory that outlives the program: weights, gradients, outputs.
        parameter_bytes: Bytes of parameters and buffers.
        recurrent: Calls of the forward pass that are steps of recurrent layers, written out.
        attention: Its calls of attention, and whether each was taken to be one kernel.
        otherwise: What it launches under releases of PyTorch that choose other kernels of
            attention, where these are written out.
    """

    calls: list[AtenCall] = field(default_factory=list)
    kept: set[int] = field(default_factory=set)
    parameter_bytes: int = 0
    recurrent: int = 0
    attention: dict[AttentionUse, bool] = field(default_factory=dict)
    otherwise: Recording | None = None


def record(program: TorchProgram, fused: Fused = lambda _: True) -> Recording:
    """Record the operators of a forward pass or a training step.

    Args:
        program: The program.
        fused: Which attention is one kernel.

    Raises:
        ProgramError: The program cannot be exported or run without data, or has nothing to train.
    """
    exported = export(program)
    try:
        with warnings.catch_warnings():
            # About tensors without data, which nobody asked for.
            warnings.simplefilter("ignore")
            return _recorded(exported, program, fused)
    except ProgramError:
        raise
    except Exception as error:
        raise ProgramError(
            f"the operators cannot be recorded: {type(error).__name__}: {shortened(error)}",
            where=program.name,
            hint="a branch on values needs data; predict it as XLA runs it: without --framework",
        ) from error


def _recorded(exported: Exported, program: TorchProgram, fused: Fused) -> Recording:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    module = exported.program.module()
    fakes = Fakes(FakeTensorMode(allow_non_fake_inputs=True))
    fakes.replace(module)
    given = [n.meta.get("val") for n in module.graph.nodes if n.op == "placeholder"]
    inputs = [fakes.like(v) if hasattr(v, "dtype") else v for v in given]
    log = _Recorder(fused)
    runner = _runner(module, log)
    train = bool(program.train)
    # The caller's default device may be another one.
    # The CPU's own library has recurrent layers that GPUs do not have.
    plain = torch.backends.mkldnn.flags(enabled=False)
    with plain, torch.device("cpu"), fakes.mode, _watching(log), torch.set_grad_enabled(train):
        found = runner.run(*inputs)
        if train:
            log.place = Place("", 0, "loss")
            loss = torch_loss(found, program.loss, exported.name)
            log.phase = BACKWARD
            if not loss.requires_grad:
                raise ProgramError("no parameter takes a gradient", where=exported.name)
            loss.backward()
            optimizer = torch_optimizer(program.train, module)
            log.phase, log.on = OPTIMIZER, False
            # The first step makes the moments.
            optimizer.step()
            log.on, log.place = True, Place("", 0, "optimizer")
            optimizer.step()
    recording = log.recording
    if train:
        recording.calls = _computed_again(recording.calls)
    recording.parameter_bytes = fakes.bytes
    held = [*module.parameters(), *module.buffers(), *(p.grad for p in module.parameters())]
    outputs = torch.utils._pytree.tree_leaves(found)
    recording.kept = {log.memory(t) for t in (*held, *outputs) if isinstance(t, torch.Tensor)}
    return recording


def _computed_again(calls: Sequence[AtenCall]) -> list[AtenCall]:
    """Let the backward pass begin with what checkpointing computes again, into other memory.

    PyTorch computes each region again when the backward pass comes to it, not all of them first;
    that decides what they need of memory, not which kernels run.
    """
    repeated = [call for call in calls if call.again]
    # Numbers below are taken; the memory of a region's own inputs is kept.
    free = 1 + max((t.memory for call in calls for t in (*call.inputs, *call.outputs)), default=0)
    moved = {t.memory: t.memory + free for call in repeated for t in call.outputs}

    def elsewhere(uses: tuple[TensorUse, ...]) -> tuple[TensorUse, ...]:
        return tuple(replace(t, memory=moved.get(t.memory, t.memory)) for t in uses)

    def again(call: AtenCall, phase: str) -> AtenCall:
        own = elsewhere(call.inputs), elsewhere(call.outputs)
        return replace(call, inputs=own[0], outputs=own[1], phase=phase)

    forward = [call for call in calls if call.phase == FORWARD]
    others = [call for call in calls if call.phase != FORWARD]
    return [*forward, *(again(c, BACKWARD) for c in repeated), *(again(c, c.phase) for c in others)]


class _Recorder:
    """Records calls and where in the program they are.

    Attributes:
        recording: What was written down.
        place: Where in the model the next call belongs.
        phase: ``forward``, ``backward`` or ``optimizer``.
        on: Whether calls are written down.
        fused: Which attention is one kernel.
        again: Whether the backward pass computes them again.
    """

    def __init__(self, fused: Fused) -> None:
        self.recording, self.fused = Recording(), fused
        self.place, self.phase, self.on, self.again = Place(), FORWARD, True, False
        # Held, so that no address is used again.
        self._storages: dict[int, tuple[int, torch.UntypedStorage]] = {}

    def write(
        self,
        operator: torch._ops.OpOverload,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        found: object,
    ) -> None:
        """Write a call down, if it launches anything."""
        import torch

        name = str(operator).rpartition(".")[0]
        if not self.on or operator.is_view or name.startswith(_HOST):
            return
        leaves = torch.utils._pytree.tree_leaves
        inputs = [t for t in leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        outputs = [t for t in leaves(found) if isinstance(t, torch.Tensor)]
        # Lists of tensors are changed in place and nothing is returned.
        count = len(args[0]) if args and isinstance(args[0], list | tuple) else 1
        written = outputs or inputs[:count]
        if not written:
            return
        numbers = tuple(a for a in args if not any(isinstance(t, torch.Tensor) for t in leaves(a)))
        self.recording.calls.append(
            AtenCall(
                name,
                tuple(map(self._use, inputs)),
                tuple(map(self._use, written)),
                numbers if name.startswith(_NUMBERED) else (),
                self.phase,
                self._place(),
                self.again and self.phase == FORWARD,
            )
        )

    def _place(self) -> Place:
        import torch

        node = torch._C._current_autograd_node() if self.phase == BACKWARD else None
        known = node.metadata.get("opcast") if node is not None else None
        return known or self.place

    def _use(self, tensor: torch.Tensor) -> TensorUse:
        import torch

        size = tensor.element_size()
        memory = min(tensor.numel() * size, tensor.untyped_storage().nbytes())
        dtype = str(tensor.dtype).removeprefix("torch.")
        own, dense = self.memory(tensor), tensor.is_contiguous()
        last = (
            not dense
            and tensor.dim() == 4
            and tensor.is_contiguous(memory_format=torch.channels_last)
        )
        return TensorUse(tuple(tensor.shape), dtype, own, memory, dense, last)

    def memory(self, tensor: torch.Tensor) -> int:
        """Number of the memory that a tensor lies in."""
        storage = tensor.untyped_storage()
        known = self._storages.setdefault(storage._cdata, (len(self._storages), storage))
        return known[0]


def _watching(recorder: _Recorder) -> AbstractContextManager[object]:
    """A mode of PyTorch in which a recorder sees each call; made late, as PyTorch is imported."""
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
            recorder.write(operator, args, kwargs or {}, found)
            return found

    return Mode()


#: Operators whose numbers matter for their time.
_NUMBERED = (
    *("aten.convolution", "aten._scaled_dot_product", "aten._fft", "aten.gather"),
    *("aten.scatter", "aten.index_put", "aten._unsafe_index_put", "aten._index_put_impl"),
    *("aten.index_add", "aten.native_batch_norm"),
)
#: Arguments of ``scaled_dot_product_attention`` in order.
_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
#: Layers that a GPU has as one call of cuDNN, and that are recorded step by step.
_RECURRENT = ("aten.lstm", "aten.gru", "aten.rnn_")


def _runner(module: torch.fx.GraphModule, log: _Recorder) -> torch.fx.Interpreter:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    aten = torch.ops.aten

    class Runner(torch.fx.Interpreter):  # type: ignore[misc]
        """Runs a graph, and marks what autograd made of each node with the node's place."""

        def run_node(self, node: torch.fx.Node) -> object:
            if node.op != "call_function":
                return super().run_node(node)
            place = place_of(node)
            log.place = place if place != Place() else log.place
            log.again = bool(_CHECKPOINT.search(node.meta.get("stack_trace") or ""))
            found = super().run_node(node)
            for tensor in torch.utils._pytree.tree_leaves(found):
                _mark(getattr(tensor, "grad_fn", None), log.place)
            return found

        def call_function(
            self, target: object, args: tuple[object, ...], kwargs: dict[str, object]
        ) -> object:
            # GPUs have these as one kernel; the CPU, where the tensors are, does not.
            if target is aten.dropout.default and args[2]:
                return aten.native_dropout.default(*args)[0]
            if target is aten.scaled_dot_product_attention.default:
                use = _attention_use(args, kwargs)
                one = log.recording.attention.setdefault(use, log.fused(use))
                # Fused attention draws its dropout itself, at little cost.
                args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
                # The CPU's kernel takes masks of two and four dimensions alone, a GPU's any.
                args = _four_dimensions(args) if one else args
                kwargs = {k: v for k, v in kwargs.items() if k != "dropout_p"}
                if not one:
                    with sdpa_kernel(SDPBackend.MATH):
                        return super().call_function(target, args, kwargs)
            name = getattr(target, "__name__", "")
            if name in WRAPPERS:
                # Node by node, so that each has its own place.
                at = WRAPPERS[name]
                with setting_of(name, args[:at]):
                    return _runner(args[at], log).run(*args[at + 1 :])
            before = len(log.recording.calls)
            found = super().call_function(target, args, kwargs)
            if str(target).startswith(_RECURRENT):
                log.recording.recurrent += len(log.recording.calls) - before
            return found

        def call_module(
            self, target: str, args: tuple[object, ...], kwargs: dict[str, object]
        ) -> object:
            return None if "guard" in str(target) else super().call_module(target, args, kwargs)

    return Runner(module, garbage_collect_values=False)


def _four_dimensions(args: tuple[object, ...]) -> tuple[object, ...]:
    """Arguments of attention with a mask of three dimensions as one of four."""
    import torch

    mask = args[3] if len(args) > 3 else None
    if isinstance(mask, torch.Tensor) and mask.dim() == 3:
        return (*args[:3], mask.unsqueeze(0), *args[4:])
    return args


def _attention_use(args: Sequence[object], kwargs: Mapping[str, object]) -> AttentionUse:
    """A call of attention by the operator's arguments."""
    import torch

    given = {**dict(zip(_ATTENTION, args, strict=False)), **kwargs}
    query, key, value, mask, dropout, causal = (given.get(name) for name in _ATTENTION)
    assert isinstance(query, torch.Tensor), "attention of no tensor"
    assert isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor)
    return AttentionUse(
        tuple(query.shape),
        tuple(key.shape),
        tuple(value.shape),
        dtype=str(query.dtype).removeprefix("torch."),
        masked=mask is not None,
        causal=bool(causal),
        grouped=bool(given.get("enable_gqa")),
        dropout=dropout if isinstance(dropout, float) else 0.0,
    )


def _mark(node: torch.autograd.graph.Node | None, place: Place) -> None:
    """Mark a node of autograd and what leads to it, as far as nothing is marked yet."""
    front = [node]
    while front:
        own = front.pop()
        if own is None or "opcast" in own.metadata:
            continue
        own.metadata["opcast"] = place
        front += [before for before, _ in own.next_functions]
