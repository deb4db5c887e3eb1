"""Decompose exports to core ATen by PyTorch's rules, on the CPU whatever device they are from."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING

from ....common.errors import ProgramError
from .export import Exported, shortened

if TYPE_CHECKING:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

#: Operators that decompose into simpler ones but are priced, or fused by XLA, better undecomposed.
_KEPT = (
    "aten.scaled_dot_product_attention.default",
    "aten.linear.default",
    "aten.matmul.default",
    "aten.einsum.default",
    "aten.rms_norm.default",
    # Its rule gathers by an index whose traffic counts; XLA joins two slices.
    "aten.roll.default",
    # For channels-last images its rule needs strides, which JAX does not have.
    "aten.adaptive_avg_pool2d.default",
)
#: Maximum rounds of decomposition by rules beyond core ATen's; a guard.
_ROUNDS = 4
#: Functions of PyTorch that list its composite operators, and that override their kernels.
_LIST, _OVERRIDE = "_materialize_cpp_cia_ops", "_override_composite_implicit_decomp"
_DECOMPOSING = threading.RLock()
#: Operators that wrap a graph, followed by the graph's arguments; index of the graph argument.
WRAPPERS = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}


def decomposed(exported: Exported, known: Callable[[str], bool]) -> torch.export.ExportedProgram:
    """Decompose an export to functional core ATen, except for :data:`_KEPT`.

    Args:
        exported: The export.
        known: Whether a named operator has a translation; others are decomposed further if PyTorch
            has a rule.

    Raises:
        ProgramError: PyTorch cannot decompose it.
    """
    import torch

    program = exported.program
    try:
        with warnings.catch_warnings(), _listed_once():
            table = torch.export.default_decompositions()
            kept = {op for op in table if str(op) in _KEPT}
            table = {op: rule for op, rule in table.items() if op not in kept}
            # PyTorch's warnings about itself.
            warnings.simplefilter("ignore")
            with _prepared(program):
                found = program.run_decompositions(table)
            found.state_dict.update(program.state_dict)
            found.constants.update(program.constants)
            # Rules for operators that core ATen keeps whole, such as ``grid_sampler_2d``; their
            # results may have rules again.
            for _ in range(_ROUNDS):
                rules = torch._decomp.decomposition_table
                targets = {n.target for g in _graphs(found.graph_module) for n in g.nodes}
                left = {t for t in targets if _has_rule(t, rules) and not known(str(t))}
                if not left:
                    break
                found = found.run_decompositions({t: rules[t] for t in left})
            return found
    except Exception as error:
        raise ProgramError(
            f"PyTorch cannot decompose the export: {type(error).__name__}: {shortened(error)}",
            where=exported.name,
            hint="does exported.run_decompositions() work in PyTorch alone?",
        ) from error


@contextlib.contextmanager
def _listed_once() -> Iterator[None]:
    """Let PyTorch list its composite operators once, and override only kernels that change.

    In each decomposition it lists all operators of the dispatcher for each of two dozen namespaces,
    and overrides ten kernels of each of 600 composite operators, most of them by what they do
    anyway: four fifths of the time of a small graph.
    """
    from torch._export import utils
    from torch.export import exported_program

    # Internals of PyTorch, which a version may not have. Its overrides are global, too.
    if not hasattr(utils, _LIST) or not hasattr(exported_program, _OVERRIDE):
        yield
        return
    with _DECOMPOSING:
        listed, override = getattr(utils, _LIST), getattr(exported_program, _OVERRIDE)

        def changed(rules: Mapping[object, object]) -> object:
            return override({op: rule for op, rule in rules.items() if not _native(op, rule)})

        listed()
        setattr(utils, _LIST, lambda: None)
        setattr(exported_program, _OVERRIDE, changed)
        try:
            yield
        finally:
            setattr(utils, _LIST, listed)
            setattr(exported_program, _OVERRIDE, override)


def _native(op: object, rule: object) -> bool:
    """Whether a rule is the operator's own composite kernel."""
    return getattr(rule, "keywords", {}).get("kernel") is op


def _has_rule(target: object, rules: Mapping[object, object]) -> bool:
    """Return whether PyTorch has a rule in ATen operators; its references use other primitives."""
    return getattr(rules.get(target), "__module__", "").startswith("torch._decomp")


def _lies_at(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key of a tensor's storage, elements and type; a wrapper subclass is its own key."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if is_traceable_wrapper_subclass(tensor):
        return (id(tensor),)
    own = tensor.untyped_storage()._cdata, tensor.storage_offset()
    kind = type(tensor), tensor.dtype
    return *own, *kind, tuple(tensor.shape), tensor.stride()


class Fakes:
    """CPU tensors without memory (fake tensors), one for each real one, so that ties are kept.

    Attributes:
        mode: The fake-tensor mode that they belong to.
        made: Fake tensors by the real one's storage, since a file may load a tied weight twice.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.made: dict[tuple[object, ...], torch.Tensor] = {}
        # Kept alive, because addresses of freed tensors would be reused.
        self._real: list[torch.Tensor] = []

    @classmethod
    def of_a_run(cls) -> Fakes:
        """Create those of a run, which may also create its own tensors."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        return cls(FakeTensorMode(allow_non_fake_inputs=True))

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the fake tensor of a real one."""
        import torch

        key = _lies_at(tensor)
        if key not in self.made:
            fake = self.like(tensor)
            if isinstance(tensor, torch.nn.Parameter):
                fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
            self.made[key] = fake
            self._real.append(tensor)
        return self.made[key]

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Create a new fake tensor with the same shape, strides and type.

        A tensor that holds others, as quantised weights do, gets fake inner tensors.
        """
        import torch
        from torch.utils._python_dispatch import is_traceable_wrapper_subclass

        if is_traceable_wrapper_subclass(tensor):
            names, about = tensor.__tensor_flatten__()
            held = {name: self.of(getattr(tensor, name)) for name in names}
            shape = tuple(tensor.shape), tensor.stride()
            return type(tensor).__tensor_unflatten__(held, about, *shape)
        with self.mode:
            return torch.empty_strided(
                tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="cpu"
            )

    def replace(self, module: torch.fx.GraphModule) -> None:
        """Replace the tensors of a module by fake ones; its nodes then run on the CPU."""
        import torch

        for graph in _graphs(module):
            for node in graph.nodes:
                _place_on_cpu(node)
        for own in module.modules():
            for held in (own._parameters, own._buffers, vars(own)):
                for name, value in list(held.items()):
                    if isinstance(value, torch.Tensor):
                        held[name] = self.of(value)

    @property
    def bytes(self) -> int:
        """Total bytes of the tensors that they represent."""
        from torch.utils._python_dispatch import is_traceable_wrapper_subclass

        whole = (t for t in self.made.values() if not is_traceable_wrapper_subclass(t))
        distinct = {id(t): t for t in whole}
        return sum(t.numel() * t.element_size() for t in distinct.values())


def _place_on_cpu(node: torch.fx.Node) -> None:
    """Make a node run on the CPU, where the fake tensors are, whatever its exported device."""
    import torch

    if getattr(node.target, "__name__", "") == "wrap_with_autocast":
        node.args = ("cpu", *node.args[1:])
    if getattr(node.target, "_name", "") == "aten::_assert_tensor_metadata":
        # On another device autocast may not have performed the same casts.
        node.kwargs = {k: v for k, v in node.kwargs.items() if k != "dtype"}

    def placed(value: object) -> object:
        return torch.device("cpu") if isinstance(value, torch.device) else value

    node.args = torch.fx.node.map_aggregate(node.args, placed)
    node.kwargs = torch.fx.node.map_aggregate(node.kwargs, placed)


def setting_of(name: str, args: tuple[object, ...]) -> contextlib.AbstractContextManager[object]:
    """Return the context of a wrapped graph from the wrapper's name and leading arguments."""
    import torch

    if name == "wrap_with_set_grad_enabled":
        return torch.set_grad_enabled(args[0])
    device, dtype, enabled, cached = args
    return torch.autocast(device, dtype, enabled, cached)


@contextlib.contextmanager
def _prepared(program: torch.export.ExportedProgram) -> Iterator[None]:
    """Modify an export for decomposition, and restore it afterwards."""
    undo: list[Callable[[], object]] = []
    modules = [m for m in program.graph_module.modules() if hasattr(m, "recompile")]
    try:
        _move_to_cpu(program, undo)
        _keep_gradients(program.graph_module, undo)
        _keep_lines(modules, undo)
        for own in modules:
            own.recompile()
        yield
    finally:
        for step in reversed(undo):
            step()
        for own in modules:
            own.recompile()


def _move_to_cpu(program: torch.export.ExportedProgram, undo: list[Callable[[], object]]) -> None:
    """Treat all tensors as being on the CPU; those of other devices become fake tensors.

    Autocast casts by the device of its operands, and does not exist for ``meta``.
    """
    import torch

    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    mode = torch._guards.detect_fake_mode([n.meta.get("val") for n in placeholders])
    fakes = Fakes(mode or torch._subclasses.fake_tensor.FakeTensorMode())
    tables = [program.state_dict, program.constants, *(n.meta for n in placeholders)]
    for table in tables:
        for name, value in list(table.items()):
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                undo.append(partial(table.__setitem__, name, value))
                table[name] = fakes.of(value)
    for graph in _graphs(program.graph_module):
        for node in graph.nodes:
            undo += [partial(setattr, node, n, getattr(node, n)) for n in ("args", "kwargs")]
            _place_on_cpu(node)


def _keep_gradients(module: torch.fx.GraphModule, undo: list[Callable[[], object]]) -> None:
    """Replace detached tensors and regions without gradients by calls of a retained operator."""
    import torch

    stop = _stop_operator()
    for graph in _graphs(module):
        for node in list(graph.nodes):
            name = getattr(node.target, "__name__", "")
            if node.target in (torch.ops.aten.detach.default, torch.ops.aten.detach_.default):
                undo.append(partial(setattr, node, "target", node.target))
                node.target = stop
            elif name == "wrap_with_set_grad_enabled" and not node.args[0]:
                for own in [a for a in node.args[2:] if _is_float(a)]:
                    with graph.inserting_before(node):
                        still = graph.call_function(stop, (own,))
                    still.meta["val"] = own.meta["val"]
                    node.replace_input_with(own, still)
                    undo.append(partial(graph.erase_node, still))
                    undo.append(partial(node.replace_input_with, still, own))


def _keep_lines(modules: Sequence[torch.fx.GraphModule], undo: list[Callable[[], object]]) -> None:
    """Make wrapped graphs, such as autocast regions, run node by node.

    Run as code, they would report lines of that code instead of the model's.
    """
    import torch

    class Run(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, graph: torch.fx.GraphModule) -> None:
            super().__init__()
            self.graph_module = graph

        def forward(self, *args: object) -> object:
            return torch.fx.Interpreter(self.graph_module).run(*args)

    for own in modules:
        for node in own.graph.nodes:
            at = WRAPPERS.get(getattr(node.target, "__name__", ""))
            if at is not None:
                name = node.args[at].target
                undo.append(partial(setattr, own, name, getattr(own, name)))
                setattr(own, name, Run(getattr(own, name)))


def _graphs(module: torch.fx.GraphModule) -> list[torch.fx.Graph]:
    return [m.graph for m in module.modules() if hasattr(m, "graph")]


def _is_float(value: object) -> bool:
    own = getattr(value, "meta", {}).get("val")
    dtype = getattr(own, "dtype", None)
    return dtype is not None and bool(dtype.is_floating_point)


@cache
def _stop_operator() -> torch._ops.OpOverload:
    """Return an operator that copies, and marks where gradients stop."""
    import torch

    def copied(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    name = "opcast::stop_gradient"
    torch.library.define(name, "(Tensor x) -> Tensor")
    torch.library.impl(name, "CompositeExplicitAutograd", copied)
    torch.library.register_fake(name, copied)
    return torch.ops.opcast.stop_gradient.default
