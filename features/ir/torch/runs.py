"""Run PyTorch programs on tensors without memory, and record what they launch.

A module runs as in eager PyTorch (``eager.py``); a file, an export, or a module whose decisions
need values runs as its exported graph. Training steps continue through autograd and the optimiser's
update, so the backward pass is autograd's own rather than a model of it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ....common.collection import paused_collection
from ....common.errors import ProgramError
from .decomposition import WRAPPERS, Fakes, setting_of
from .eager import (
    Place,
    Scopes,
    asks_for_graphs,
    deciding_without_values,
    given_to,
    line_of,
    noting_compiled,
    place_of,
    run,
    scoped,
    standing_in,
    tensors_in,
    without_memory,
)
from .export import Exported, export, quiet, shortened
from .program import TorchProgram, sparse_refusal, torch_loss, torch_optimizer
from .record import (
    BACKWARD,
    CONV,
    FORWARD,
    MATMUL,
    OPTIMIZER,
    RNN,
    AtenCall,
    Fused,
    Recorder,
    Recording,
    TensorUse,
    watching,
)
from .stand_ins import GATES, stands
from .translate import is_checkpointed

if TYPE_CHECKING:
    import torch

#: Recurrent layers, one cuDNN call on a GPU but recorded step by step.
_RECURRENT = tuple(f"aten.{name}." for name in GATES)
#: Functions of PyTorch, as seen by function modes, for operators of an export.
_FUNCTIONS = {
    "aten.scaled_dot_product_attention.default": "scaled_dot_product_attention",
    "aten.dropout.default": "dropout",
    "aten.rms_norm.default": "rms_norm",
    "aten.lstm_cell.default": "lstm_cell",
}


def record(program: TorchProgram, fused: Fused = lambda _: True) -> Recording:
    """Record the operators of a forward pass or a training step.

    Args:
        program: The program.
        fused: Which calls are one kernel.

    Raises:
        ProgramError: The program cannot be exported or run without data, or has nothing to train.
    """
    try:
        with warnings.catch_warnings(), quiet(), paused_collection():
            # Warnings about tensors without data.
            warnings.simplefilter("ignore")
            return _recorded(program, fused)
    except ProgramError:
        raise
    except Exception as error:
        # Fake tensors lack the classes in which PyTorch stores sparse values.
        if re.search(r"Sparse\w*TensorImpl", str(error)):
            raise _sparse(program, line_of(error) or program.name) from error
        raise ProgramError(
            f"the operators cannot be recorded: {type(error).__name__}: {shortened(error)}",
            where=program.name,
            hint="a branch on values needs data; predict it as XLA runs it: without --framework",
        ) from error


def _sparse(program: TorchProgram, where: str) -> ProgramError:
    """Return the error for a program that makes a sparse matrix, or has a sparse gradient."""
    import torch

    source = program.source
    modules = list(source.modules()) if isinstance(source, torch.nn.Module) else []
    if program.train and any(getattr(m, "sparse", None) is True for m in modules):
        return ProgramError(
            "gradients of embeddings with sparse=True are sparse matrices, which are not predicted",
            where=where,
            hint="sparse=False: dense gradients, whose update goes over the whole table",
        )
    return sparse_refusal("the program makes a sparse matrix", where)


def _recorded(program: TorchProgram, fused: Fused) -> Recording:
    import torch

    if not (isinstance(program.source, torch.nn.Module) and (program.args or program.kwargs)):
        return _as_exported(program, fused)
    try:
        return _as_eager(program, fused)
    except Exception as error:
        # An export may succeed where a run needs data to decide.
        try:
            found = _as_exported(program, fused)
        except ProgramError as refusal:
            if isinstance(error, ProgramError) or _needs_values(error):
                raise
            function = re.search(r"HigherOrderOperator (\w+)", str(error))
            if function:
                raise ProgramError(
                    f"{function[1]}, which takes functions, is not predicted",
                    where=line_of(error) or program.name,
                    hint="write out what it does; for flex_attention take "
                    "torch.nn.functional.scaled_dot_product_attention",
                ) from refusal
            several = any(isinstance(value, tuple) for value in program.args)
            apart = " (several are given one by one, not as a tuple)" if several else ""
            raise ProgramError(
                f"the module does not run: {type(error).__name__}: {shortened(error)}",
                where=line_of(error) or program.name,
                hint=f"do the shapes and formats of its inputs fit{apart}?",
            ) from refusal
        found.notes.append(
            "priced as torch.export has it, for which libraries may build masks and repeat keys, "
            f"since it does not run without data: {type(error).__name__}: {shortened(error)[:200]}"
        )
        return found


def _needs_values(error: Exception) -> bool:
    """Return whether a module read a value that a tensor without memory does not have."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
    )
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    kinds = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
    return isinstance(error, kinds)


def _as_eager(program: TorchProgram, fused: Fused) -> Recording:
    """Record a module that runs on tensors without memory as it would run on a device."""
    import torch

    source = program.source
    assert isinstance(source, torch.nn.Module), source
    log = Recorder(fused)
    log.scopes = scopes = Scopes(
        {id(m): name for name, m in source.named_modules()}, type(source).__name__
    )
    fakes = Fakes.of_a_run()
    inputs = Fakes(fakes.mode)
    with without_memory(source, fakes), noting_compiled(source) as compiled:
        args, kwargs = given_to(program.args, program.kwargs, inputs)
        with standing_in(stands(log)), scoped(scopes), deciding_without_values(program.kwargs):
            found = run(
                lambda: _steps(program, source, log, fakes, lambda: source(*args, **kwargs))
            )
    found.compiled = tuple(dict.fromkeys(compiled))
    found.graphs = asks_for_graphs(source)
    given = program.kwargs.get("attention_mask") is not None
    if given and any(use.masked for use in found.attention):
        found.notes.append(
            "attention takes a mask, since attention_mask is an input whose values are not known; "
            "eager transformers drops one that masks nothing: leave it out if nothing is padded"
        )
    return found


def _as_exported(program: TorchProgram, fused: Fused) -> Recording:
    """Record an export run node by node, marking autograd's nodes with their positions."""
    fakes = Fakes.of_a_run()
    exported = export(program)
    module, inputs = graph_on(fakes, exported)
    log, start = Recorder(fused), 0

    def before(node: torch.fx.Node) -> None:
        nonlocal start
        place = place_of(node)
        log.place = place if place != Place() else log.place
        log.again = is_checkpointed(node, exported.regions)
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


def graph_on(fakes: Fakes, exported: Exported) -> tuple[torch.fx.GraphModule, list[object]]:
    """Return an export's graph on tensors without memory, and its inputs."""
    module = exported.program.module()
    fakes.replace(module)
    given = [n.meta.get("val") for n in module.graph.nodes if n.op == "placeholder"]
    return module, [fakes.like(v) if hasattr(v, "dtype") else v for v in given]


def _steps(
    program: TorchProgram,
    module: torch.nn.Module,
    log: Recorder,
    fakes: Fakes,
    forward: Callable[[], object],
) -> Recording:
    """Record a forward pass and, for a training step, what follows it."""
    import torch

    train = bool(program.train)
    # The caller's default device may differ. MKL-DNN has recurrent layers that GPUs do not have.
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
            # The first step allocates the moments.
            optimizer.step()
            log.on, log.place = True, Place("", 0, "optimizer")
            optimizer.step()
    recording = log.recording
    recording.parameter_bytes, recording.tf32 = fakes.bytes, _tf32_allowed()
    held = [*module.parameters(), *module.buffers(), *(p.grad for p in module.parameters())]
    kept = [*(t for t in held if isinstance(t, torch.Tensor)), *tensors_in(found)]
    recording.kept = {log.memory(t) for t in kept}
    return recording


def _tf32_allowed() -> frozenset[str]:
    """Return the operators whose f32 operands PyTorch's settings let chips round to TF32."""
    import torch

    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    if hasattr(cudnn, "conv"):
        # Since 2.9, where reading a mix of these and the older settings is an error.
        own = {MATMUL: matmul, CONV: cudnn.conv, RNN: cudnn.rnn}
        return frozenset(name for name, of in own.items() if of.fp32_precision == "tf32")
    allowed = {MATMUL: matmul.allow_tf32, CONV: cudnn.allow_tf32, RNN: cudnn.allow_tf32}
    return frozenset(name for name, own in allowed.items() if own)


def _computed_again(calls: Sequence[AtenCall]) -> list[AtenCall]:
    """Prepend to the backward pass what checkpointing recomputes, into new memory.

    PyTorch recomputes each region when the backward pass reaches it, not all of them first; this
    affects memory, not which kernels run. A region ends at the last value that the backward pass
    reads from it (``set_checkpoint_early_stop``).
    """
    wanted = {t.memory for call in calls if call.phase != FORWARD for t in call.inputs}
    repeated: list[AtenCall] = []
    for call in reversed([call for call in calls if call.again]):
        if not wanted.isdisjoint(t.memory for t in call.outputs):
            repeated.insert(0, call)
            wanted |= {t.memory for t in call.inputs}
    # Lower numbers are taken; a region's inputs keep their memory.
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


def _mark(node: torch.autograd.graph.Node | None, place: Place) -> None:
    """Mark an autograd node and its unmarked predecessors with a position."""
    front = [node]
    while front:
        own = front.pop()
        if own is None or "opcast" in own.metadata:
            continue
        own.metadata["opcast"] = place
        front += [before for before, _ in own.next_functions]


def run_graph(
    module: torch.fx.GraphModule,
    inputs: Sequence[object],
    before: Callable[[torch.fx.Node], object],
    after: Callable[[torch.fx.Node, object], object] = lambda node, found: None,
) -> object:
    """Run a graph; each value dies after its last use.

    Args:
        module: The graph.
        inputs: Its inputs.
        before: Called with each function node before it runs.
        after: Called with the node and its results after it ran.
    """
    import torch

    class Runner(torch.fx.Interpreter):  # type: ignore[misc]
        def run_node(self, node: torch.fx.Node) -> object:
            if node.op != "call_function":
                return super().run_node(node)
            before(node)
            found = super().run_node(node)
            after(node, found)
            return found

        def call_function(
            self, target: object, args: tuple[object, ...], kwargs: dict[str, object]
        ) -> object:
            name = getattr(target, "__name__", "")
            if name in WRAPPERS:
                # Node by node, so that each has its own position.
                at = WRAPPERS[name]
                with setting_of(name, args[:at]):
                    return run_graph(args[at], args[at + 1 :], before, after)
            known = _FUNCTIONS.get(str(target))
            if known:
                target = getattr(torch.nn.functional, known, None) or getattr(torch, known)
            return super().call_function(target, args, kwargs)

        def call_module(
            self, target: str, args: tuple[object, ...], kwargs: dict[str, object]
        ) -> object:
            return None if "guard" in str(target) else super().call_module(target, args, kwargs)

    return Runner(module).run(*inputs)
