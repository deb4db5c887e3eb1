"""Record the operators that PyTorch itself launches.

Every operator that reaches a device's kernels is recorded with its operands, its results and the
position in the user's model of it, or of the operation whose gradient it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from ....common.errors import ProgramError
from .eager import Place, Scopes
from .program import dtype_name, tensors_of

if TYPE_CHECKING:
    import torch

    from .storages import StorageLog

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
#: Operators with f32 operands that PyTorch's settings let chips round to TF32.
MATMUL, CONV, RNN = "matmul", "conv", "rnn"
#: Kernels of fused attention, and products and passes instead: PyTorch's ``SDPBackend``.
CUDNN, FLASH, EFFICIENT, MATH = BACKENDS = ("cuDNN", "FlashAttention 2", "memory-efficient", "math")
#: Operators that launch nothing although they are not views.
_HOST = (
    *("aten.empty", "aten.new_empty", "aten._local_scalar_dense", "aten.detach"),
    *("aten.lift_fresh", "aten._unsafe_view", "aten.alias", "aten._assert", "aten.sym_"),
    *("aten.is_same_size", "aten.set_", "aten.resize_", "prim.", "profiler.", "opcast."),
)
#: Operators whose first tensor is only written, or only provides a shape.
_UNREAD = (
    *("aten.copy_", "aten.fill_", "aten.zero_", "aten.uniform_", "aten.normal_", "aten.bernoulli_"),
    *("aten.zeros_like", "aten.ones_like", "aten.full_like", "aten.rand_like", "aten.randn_like"),
    *("aten.new_zeros", "aten.new_ones", "aten.new_full"),
)
#: Number of leading image operands for which operators require a layout.
_IMAGES = {"aten.convolution": 1, "aten.convolution_backward": 2, "aten.native_group_norm": 1}
#: Operators that PyTorch runs only on operands of one format.
_ALIKE = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.convolution")
#: Operators whose non-tensor arguments affect their time.
_NUMBERED = (
    *("aten.convolution", "aten._scaled_dot_product", "aten._fft", "aten.gather"),
    "aten.index_select",
    *("aten.scatter", "aten.index_put", "aten._unsafe_index_put", "aten._index_put_impl"),
    *("aten.index_add", "aten.index_reduce", "aten.index_copy", "aten.index_fill", "aten.put"),
    *("aten.native_batch_norm", "aten.cumsum", "aten.cumprod", "aten.logcumsumexp"),
    *("aten.cummax", "aten.cummin"),
)


@dataclass(frozen=True, slots=True)
class TensorUse:
    """A tensor that an operator reads or writes.

    Attributes:
        shape: Its shape.
        dtype: PyTorch's name of the element type, such as ``bfloat16``.
        memory: Number of its storage, which views share.
        bytes: Its bytes; each element in memory counts once even if broadcast.
        contiguous: Whether elements are stored in the order of its dimensions.
        channels_last: Whether it is an image stored with the channels last.
        start: Position of its first byte in the storage.
        storage: Bytes of the storage.
    """

    shape: tuple[int, ...]
    dtype: str
    memory: int
    bytes: int
    contiguous: bool = True
    channels_last: bool = False
    start: int = 0
    storage: int = 0


@dataclass(frozen=True, slots=True)
class AtenCall:
    """One operator that launches kernels.

    Attributes:
        name: Name without the overload, such as ``aten.addmm``.
        inputs: Tensors that it reads, in order.
        outputs: Tensors that it writes; for an in-place operator the one that it changes.
        numbers: Arguments that are not tensors, in order.
        phase: ``forward``, ``backward`` or ``optimizer``.
        place: Position in the user's model of it, or of the operation whose gradient it is.
        again: Whether a backward pass recomputes it (activation checkpointing).
        allowed: Backends of :data:`BACKENDS` that the program allows for attention.
    """

    name: str
    inputs: tuple[TensorUse, ...]
    outputs: tuple[TensorUse, ...]
    numbers: tuple[object, ...]
    phase: str
    place: Place
    again: bool = False
    allowed: tuple[str, ...] = BACKENDS

    def whole(self, at: int) -> int:
        """Return the integer at an index of the numbers, from the end if negative."""
        value = self.numbers[at]
        assert isinstance(value, int), (self.name, value)
        return value

    def sizes(self, at: int) -> tuple[int, ...]:
        """Return the list of integers at an index of the numbers."""
        values = self.numbers[at]
        assert isinstance(values, list | tuple), (self.name, values)
        return tuple(values)


@dataclass(frozen=True, slots=True)
class AttentionUse:
    """A call of ``scaled_dot_product_attention``, by the inputs to PyTorch's choice of kernel.

    Attributes:
        query: Shape of the queries.
        key: Shape of the keys.
        value: Shape of the values.
        dtype: PyTorch's name of the queries' element type.
        masked: Whether it has a mask tensor.
        causal: Whether ``is_causal`` is set.
        grouped: Whether ``enable_gqa`` is set.
        dropout: Dropout probability.
        allowed: Backends of :data:`BACKENDS` that the program allows (``sdpa_kernel``).
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: str
    masked: bool = False
    causal: bool = False
    grouped: bool = False
    dropout: float = 0.0
    allowed: tuple[str, ...] = BACKENDS


@dataclass(frozen=True, slots=True)
class FunctionUse:
    """A call of a function that is a single kernel if PyTorch chooses so.

    Attributes:
        function: ``rms_norm``, ``lstm_cell``, or ``group_norm`` of a channels-last image.
        dtype: PyTorch's name of its input's element type.
        weight: The same of its weight; empty if it has none.
        channels_last: Whether it is an image stored with the channels last.
    """

    function: str
    dtype: str
    weight: str = ""
    channels_last: bool = False


#: Whether a call is one kernel rather than PyTorch's products and passes.
Fused: TypeAlias = Callable[[AttentionUse | FunctionUse], bool]


@dataclass
class Recording:
    """The operators that a program launches.

    Attributes:
        calls: Operators in order.
        kept: Storages that outlive the program: weights, gradients, outputs.
        parameter_bytes: Bytes of parameters and buffers.
        recurrent: Calls of the forward pass that are unrolled steps of recurrent layers.
        uses: Calls that may be one kernel, and whether each was assumed to be.
        notes: Deviations from PyTorch's decisions, and their conditions.
        otherwise: The recording under PyTorch releases that choose other attention kernels, where
            attention is written out.
        storages: Memory allocated and freed; ``None`` if it cannot be tracked.
        compiled: Names of modules and functions that the model itself passes to ``torch.compile``.
        graphs: Whether the model asks ``torch.compile`` for CUDA graphs.
        tf32: Operators whose f32 operands may be rounded to TF32.
    """

    calls: list[AtenCall] = field(default_factory=list)
    kept: set[int] = field(default_factory=set)
    parameter_bytes: int = 0
    recurrent: int = 0
    uses: dict[AttentionUse | FunctionUse, bool] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    otherwise: Recording | None = None
    storages: StorageLog | None = None
    compiled: tuple[str, ...] = ()
    graphs: bool = False
    tf32: frozenset[str] = frozenset((CONV, RNN))

    @property
    def attention(self) -> dict[AttentionUse, bool]:
        """The attention calls among :attr:`uses`."""
        return {use: one for use, one in self.uses.items() if isinstance(use, AttentionUse)}

    def holds(self, fused: Fused) -> bool:
        """Return whether the program launches the same with another choice of single kernels."""
        return all(fused(use) == one for use, one in self.uses.items())


class Recorder:
    """Records calls and their position in the program.

    Attributes:
        recording: The calls recorded so far.
        place: Position of the next call in the model.
        phase: ``forward``, ``backward`` or ``optimizer``.
        on: Whether calls are recorded.
        fused: Which calls are one kernel.
        again: Whether the backward pass recomputes them.
        scopes: Running modules, for a module that is not exported.
        allowed: Backends that the program allows for the attention that runs.
    """

    def __init__(self, fused: Fused) -> None:
        self.recording, self.fused = Recording(), fused
        self.place, self.phase, self.on, self.again = Place(), FORWARD, True, False
        self.scopes: Scopes | None = None
        self.allowed: tuple[str, ...] = BACKENDS
        # Positions of autograd's nodes by sequence number.
        self._places: dict[int, Place] = {}
        # Kept alive, so that no address is reused.
        self._storages: dict[int, tuple[int, torch.UntypedStorage]] = {}

    def chooses(self, use: AttentionUse | FunctionUse) -> bool:
        """Decide whether a call is one kernel, and record the decision."""
        return self.recording.uses.setdefault(use, self.fused(use))

    def write(
        self,
        operator: torch._ops.OpOverload,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        found: object,
    ) -> None:
        """Record a call if it launches anything."""
        name = str(operator).rpartition(".")[0]
        self._note_place()
        if not self.on or operator.is_view or name.startswith(_HOST):
            return
        inputs = tensors_of((args, kwargs))[name.startswith(_UNREAD) :]
        written = tensors_of(found) or _changed(operator, args)
        if not written:
            return
        numbers = tuple(a for a in args if not tensors_of(a))
        self.recording.calls.append(
            AtenCall(
                name,
                tuple(map(self._use, inputs)),
                tuple(map(self._use, written)),
                numbers if name.startswith(_NUMBERED) else (),
                self.phase,
                self._place(),
                self.again and self.phase == FORWARD,
                self._allowed(),
            )
        )

    def write_library(
        self, name: str, given: Sequence[object], found: Sequence[object], sizes: tuple[int, ...]
    ) -> None:
        """Record a library call that no operator of PyTorch represents."""
        import torch

        if not self.on:
            return
        self._note_place()
        inputs, written = (
            tuple(self._use(t) for t in tensors if isinstance(t, torch.Tensor))
            for tensors in (given, found)
        )
        place = self._place()
        self.recording.calls.append(
            AtenCall(
                name, inputs, written, tuple(sizes), self.phase, place, allowed=self._allowed()
            )
        )

    def _place(self) -> Place:
        import torch

        node = torch._C._current_autograd_node() if self.phase == BACKWARD else None
        if node is None or (self.scopes and self.scopes.running):
            return self.place
        known = node.metadata.get("opcast") or self._places.get(node._sequence_nr())
        return known or self.place

    def _allowed(self) -> tuple[str, ...]:
        """Return the backends that the program allows for attention, whose gradient is the same."""
        import torch

        node = torch._C._current_autograd_node() if self.phase == BACKWARD else None
        return self.allowed if node is None else node.metadata.get("attention", BACKENDS)

    def _note_place(self) -> None:
        """Record the position of a call in a running module, also for its gradient."""
        import torch

        if self.scopes and self.scopes.running:
            self.place = self.scopes.place()
            # The autograd node of this call, if any, was just created.
            self._places.setdefault(torch._C._autograd._get_sequence_nr() - 1, self.place)

    def _use(self, tensor: torch.Tensor) -> TensorUse:
        size, storage = tensor.element_size(), tensor.untyped_storage().nbytes()
        return TensorUse(
            shape=tuple(tensor.shape),
            dtype=dtype_name(tensor),
            memory=self.memory(tensor),
            bytes=min(tensor.numel() * size, storage),
            contiguous=tensor.is_contiguous(),
            channels_last=lies_last(tensor),
            start=tensor.storage_offset() * size,
            storage=storage,
        )

    def memory(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor's storage."""
        storage = tensor.untyped_storage()
        known = self._storages.setdefault(storage._cdata, (len(self._storages), storage))
        return known[0]


def lies_last(tensor: torch.Tensor) -> bool:
    """Return whether an image is stored with the channels last."""
    import torch

    image = tensor.dim() == 4 and not tensor.is_contiguous()
    return image and tensor.is_contiguous(memory_format=torch.channels_last)


def _changed(operator: torch._ops.OpOverload, args: Sequence[object]) -> list[torch.Tensor]:
    """Return the tensors that an operator without results changes in place, by its schema."""
    own = operator._schema.arguments
    # Fused optimisers write gradients only to undo their scaling.
    named = [a.alias_info is not None and a.alias_info.is_write and a.name != "grads" for a in own]
    changed = [given for given, is_changed in zip(args, named, strict=False) if is_changed]
    return tensors_of(changed)


def _check_formats(name: str, args: Sequence[object]) -> None:
    """Reject products of different formats, as devices do but fake tensors do not.

    Raises:
        ProgramError: The formats differ.
    """
    import torch

    if name in _ALIKE:
        kinds = {dtype_name(t) for t in args if isinstance(t, torch.Tensor)}
        if len(kinds) > 1:
            raise ProgramError(
                f"{name} takes operands of one format, and was given {' and '.join(sorted(kinds))}",
                hint="cast the inputs or the module, or run it under torch.autocast",
            )


def laid_out(recorder: Recorder, name: str, args: tuple[object, ...]) -> tuple[object, ...]:
    """Convert operands to the layout that devices require, which fake tensors do not do.

    Convolutions use the filters' layout for images (``cudnn_conv_suggest_memory_format`` in
    PyTorch's ConvUtils.h) and copy parts of a tensor, such as a slice of channels, in any layout;
    group norms on GPUs use channels first (group_norm.cpp).

    Args:
        recorder: Decides whether a group norm accepts channels-last images.
        name: An operator of :data:`_IMAGES`.
        args: Its operands.
    """
    import torch

    count = _IMAGES[name]
    images = [a for a in args[:count] if isinstance(a, torch.Tensor)]
    layout, filters = torch.contiguous_format, args[count]
    convolves = "convolution" in name and isinstance(filters, torch.Tensor)
    if convolves:
        layout = torch._prims_common.suggest_memory_format(filters)
    elif not lies_last(images[0]) or recorder.chooses(
        FunctionUse("group_norm", dtype_name(images[0]), channels_last=True)
    ):
        return args

    def laid(image: torch.Tensor) -> torch.Tensor:
        dense = image.is_contiguous() or lies_last(image)
        part = convolves and not dense and image.untyped_storage().nbytes() > image.nbytes
        fits = image.is_contiguous(memory_format=layout)
        if fits or not (part or not convolves or layout == torch.channels_last):
            return image
        # The library itself copies parts, so that compilers fuse nothing with the copy.
        on, recorder.on = recorder.on, recorder.on and not part
        # `contiguous` would be dispatched as a part of a call, not as a call.
        made = torch.clone(image, memory_format=layout)
        recorder.on = on
        if part:
            recorder.write_library("contiguous", [image], [made], ())
        return made

    return *map(laid, images), *args[count:]


def watching(recorder: Recorder) -> AbstractContextManager[object]:
    """Return a mode in which a recorder sees each call (PyTorch is imported late)."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(
            self,
            operator: torch._ops.OpOverload,
            types: Sequence[type],
            args: tuple[object, ...] = (),
            kwargs: Mapping[str, object] | None = None,
        ) -> object:
            if any(hasattr(kind, "__tensor_flatten__") for kind in types):
                # A tensor that holds others, such as a quantised weight, dispatches its own calls.
                return NotImplemented
            if str(operator).startswith("aten.to."):
                # Casts of quantised weights; a view by its schema, but it may copy.
                with self:
                    return operator.decompose(*args, **(kwargs or {}))
            name = str(operator).removesuffix(".default")
            _check_formats(name, args)
            if name in _IMAGES:
                with self:
                    args = laid_out(recorder, name, args)
            found = operator(*args, **(kwargs or {}))
            recorder.write(operator, args, kwargs or {}, found)
            return found

    return Mode()
