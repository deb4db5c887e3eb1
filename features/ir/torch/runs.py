"""Runs a program of PyTorch on tensors without memory, and records what it launches.

A module runs as eager PyTorch runs it (``eager.py``); a file, an export, or a module that needs
values to decide runs as its exported graph. Training steps go on backward through autograd and the
optimiser's update, so that the backward pass is autograd's own, not a rule about it.
"""

from __future__ import annotations

import logging
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ....common.collection import paused_collection
from ....common.errors import ProgramError
from .decomposition import Fakes
from .eager import (
    Scopes,
    Stand,
    deciding_without_values,
    given_to,
    is_users,
    run,
    scoped,
    standing_in,
    tensors_in,
    without_memory,
)
from .export import export, shortened
from .graph_runs import run_graph
from .place import Place
from .program import TorchProgram, torch_loss, torch_optimizer
from .record import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    AtenCall,
    AttentionUse,
    FunctionUse,
    Fused,
    Recorder,
    Recording,
    TensorUse,
    dtype_name,
    lies_last,
    watching,
)
from .recurrent import GATES, recurrent
from .rms_norm import rms_norm
from .translate import is_checkpointed, place_of

if TYPE_CHECKING:
    import torch

#: Arguments of ``scaled_dot_product_attention`` in order.
_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
#: Layers that a GPU has as one call of cuDNN, and that are recorded step by step.
_RECURRENT = tuple(f"aten.{name}." for name in GATES)


def record(program: TorchProgram, fused: Fused = lambda _: True) -> Recording:
    """Record the operators of a forward pass or a training step.

    Args:
        program: The program.
        fused: Which calls are one kernel.

    Raises:
        ProgramError: The program cannot be exported or run without data, or has nothing to train.
    """
    try:
        with warnings.catch_warnings(), _quiet(), paused_collection():
            # About tensors without data, which nobody asked for.
            warnings.simplefilter("ignore")
            return _recorded(program, fused)
    except ProgramError:
        raise
    except Exception as error:
        raise ProgramError(
            f"the operators cannot be recorded: {type(error).__name__}: {shortened(error)}",
            where=program.name,
            hint="a branch on values needs data; predict it as XLA runs it: without --framework",
        ) from error


def _recorded(program: TorchProgram, fused: Fused) -> Recording:
    import torch

    if not (isinstance(program.source, torch.nn.Module) and (program.args or program.kwargs)):
        return _as_exported(program, fused)
    try:
        return _as_eager(program, fused)
    except Exception as error:
        # What a run cannot decide without data, an export may.
        try:
            found = _as_exported(program, fused)
        except ProgramError as refusal:
            if isinstance(error, ProgramError) or _needs_values(error):
                raise
            function = re.search(r"HigherOrderOperator (\w+)", str(error))
            if function:
                raise ProgramError(
                    f"{function[1]}, which takes functions, is not predicted",
                    where=_line(error) or program.name,
                    hint="write out what it does; for flex_attention take "
                    "torch.nn.functional.scaled_dot_product_attention",
                ) from refusal
            several = any(isinstance(value, tuple) for value in program.args)
            apart = " (several are given one by one, not as a tuple)" if several else ""
            raise ProgramError(
                f"the module does not run: {type(error).__name__}: {shortened(error)}",
                where=_line(error) or program.name,
                hint=f"do the shapes and formats of its inputs fit{apart}?",
            ) from refusal
        found.notes.append(
            "priced as torch.export has it, for which libraries may build masks and repeat keys, "
            f"since it does not run without data: {type(error).__name__}: {shortened(error)[:200]}"
        )
        return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep PyTorch from logging the tracebacks of errors that are told in a line."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def _needs_values(error: Exception) -> bool:
    """Whether a module asked for what a tensor without memory does not have."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
    )
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    kinds = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
    return isinstance(error, kinds)


def _line(error: Exception) -> str:
    """The innermost line of the user's own that an error comes from; empty if there is none."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def _as_eager(program: TorchProgram, fused: Fused) -> Recording:
    """Record a module that runs on tensors without memory as it would run on a device."""
    import torch

    source = program.source
    assert isinstance(source, torch.nn.Module), source
    log = Recorder(fused)
    log.scopes = scopes = Scopes(
        {id(m): name for name, m in source.named_modules()}, type(source).__name__
    )
    fakes, inputs = _fakes(), _fakes()
    inputs.mode = fakes.mode
    with without_memory(source, fakes):
        args, kwargs = given_to(program.args, program.kwargs, inputs)
        with standing_in(stands(log)), scoped(scopes), deciding_without_values(program.kwargs):
            found = run(
                lambda: _steps(program, source, log, fakes, lambda: source(*args, **kwargs))
            )
    given = program.kwargs.get("attention_mask") is not None
    if given and any(use.masked for use in found.attention):
        found.notes.append(
            "attention takes a mask, since attention_mask is an input whose values are not known; "
            "eager transformers drops one that masks nothing: leave it out if nothing is padded"
        )
    return found


def _as_exported(program: TorchProgram, fused: Fused) -> Recording:
    """Record an export, run node by node; what autograd makes of each is marked with its place."""
    exported = export(program)
    module = exported.program.module()
    fakes = _fakes()
    fakes.replace(module)
    given = [n.meta.get("val") for n in module.graph.nodes if n.op == "placeholder"]
    inputs = [fakes.like(v) if hasattr(v, "dtype") else v for v in given]
    log, start = Recorder(fused), 0

    def before(node: torch.fx.Node) -> None:
        nonlocal start
        place = place_of(node)
        log.place = place if place != Place() else log.place
        log.again = is_checkpointed(node)
        start = len(log.recording.calls)

    def after(node: torch.fx.Node, found: object) -> None:
        if str(node.target).startswith(_RECURRENT):
            log.recording.recurrent += len(log.recording.calls) - start
        for tensor in tensors_in(found):
            _mark(tensor.grad_fn, log.place)

    with standing_in(stands(log)):
        forward = partial(run_graph, module, inputs, before, after)
        recording = _steps(program, module, log, fakes, forward)
    if program.train:
        recording.calls = _computed_again(recording.calls)
    return recording


def _fakes() -> Fakes:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return Fakes(FakeTensorMode(allow_non_fake_inputs=True))


def _steps(
    program: TorchProgram,
    module: torch.nn.Module,
    log: Recorder,
    fakes: Fakes,
    forward: Callable[[], object],
) -> Recording:
    """Record a forward pass, and of a training step what follows it."""
    import torch

    train = bool(program.train)
    # The caller's default device may be another one.
    # The CPU's own library has recurrent layers that GPUs do not have.
    plain = torch.backends.mkldnn.flags(enabled=False)
    with plain, torch.device("cpu"), fakes.mode, watching(log), torch.set_grad_enabled(train):
        found = forward()
        if train:
            log.place = Place("", 0, "loss")
            loss = torch_loss(found, program.loss, program.name)
            log.phase = BACKWARD
            if not loss.requires_grad:
                raise ProgramError("no parameter takes a gradient", where=program.name)
            loss.backward()
            optimizer = torch_optimizer(program.train, module)
            log.phase, log.on = OPTIMIZER, False
            # The first step makes the moments.
            optimizer.step()
            log.on, log.place = True, Place("", 0, "optimizer")
            optimizer.step()
    recording = log.recording
    recording.parameter_bytes = fakes.bytes
    held = [*module.parameters(), *module.buffers(), *(p.grad for p in module.parameters())]
    kept = [*(t for t in held if isinstance(t, torch.Tensor)), *tensors_in(found)]
    recording.kept = {log.memory(t) for t in kept}
    return recording


def _computed_again(calls: Sequence[AtenCall]) -> list[AtenCall]:
    """Let the backward pass begin with what checkpointing computes again, into other memory.

    PyTorch computes each region again when the backward pass comes to it, not all of them first;
    that decides what they need of memory, not which kernels run. A region ends with what the
    backward pass reads last of it (``set_checkpoint_early_stop``).
    """
    wanted = {t.memory for call in calls if call.phase != FORWARD for t in call.inputs}
    repeated: list[AtenCall] = []
    for call in reversed([call for call in calls if call.again]):
        if not wanted.isdisjoint(t.memory for t in call.outputs):
            repeated.insert(0, call)
            wanted |= {t.memory for t in call.inputs}
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


def _attention(
    log: Recorder,
    call: Callable[..., object],
    target: object,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> object:
    """Run attention by one kernel, or by the products and passes that PyTorch writes it out as."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    one = log.chooses(_attention_use(args, kwargs))
    # Fused attention draws its dropout itself, at little cost.
    args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
    kwargs = {k: v for k, v in kwargs.items() if k != "dropout_p"}
    if one:
        # The CPU's kernel takes masks of two and four dimensions alone, a GPU's any.
        return call(
            target,
            (*args[:3], *map(_four_dimensions, args[3:4]), *args[4:]),
            {k: _four_dimensions(v) if k == "attn_mask" else v for k, v in kwargs.items()},
        )
    with sdpa_kernel(SDPBackend.MATH):
        return call(target, args, kwargs)


def _four_dimensions(given: object) -> object:
    """A mask of attention that has three dimensions as one of four."""
    import torch

    if isinstance(given, torch.Tensor) and given.dim() == 3:
        return given.unsqueeze(0)
    return given


def stands(log: Recorder) -> dict[str, Stand]:
    """What stands for functions that a GPU has as one kernel and the CPU has not."""
    import torch

    def attention(function: Callable[..., object], *args: object, **kwargs: object) -> object:
        return _attention(log, lambda f, a, k: f(*a, **k), function, args, kwargs)

    def dropout(
        function: Callable[..., object],
        input: torch.Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> object:
        if not training or p == 0.0:
            return input
        return torch.ops.aten.native_dropout.default(input, p, True)[0]

    one_kernel = rms_norm(log.write_library)

    def norm(
        function: Callable[..., object],
        input: torch.Tensor,
        normalized_shape: Sequence[int],
        weight: torch.Tensor | None = None,
        eps: float | None = None,
    ) -> object:
        own = "" if weight is None else dtype_name(weight)
        if log.chooses(FunctionUse("rms_norm", dtype_name(input), own, lies_last(input))):
            return one_kernel(len(normalized_shape), input, weight)
        return function(input, normalized_shape, weight, eps)

    def cell(
        function: Callable[..., object],
        input: torch.Tensor,
        hx: Sequence[torch.Tensor],
        w_ih: torch.Tensor,
        w_hh: torch.Tensor,
        *biases: torch.Tensor,
    ) -> object:
        if not log.chooses(FunctionUse("lstm_cell", dtype_name(input))):
            return function(input, hx, w_ih, w_hh, *biases)
        gates = torch.matmul(input, w_ih.t()), torch.matmul(hx[0], w_hh.t())
        return torch.ops.aten._thnn_fused_lstm_cell.default(*gates, hx[1], *biases)[:2]

    layers = {name: recurrent(name, log.write_library) for name in GATES}
    known: dict[str, Stand] = {"dropout": dropout, "rms_norm": norm, "lstm_cell": cell, **layers}
    return {"scaled_dot_product_attention": attention, **known}


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
        dtype=dtype_name(query),
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
