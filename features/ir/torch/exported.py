"""Exports of PyTorch modules: ``torch.export``, ``.pt2`` files, and their decomposed graphs."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ....common.errors import ProgramError
from .program import TorchProgram

if TYPE_CHECKING:
    import torch

_NO_TORCH = "pip install 'torch>=2.6', or opcast's own extra: pip install '.[torch]' in its clone"
#: Operators that decompose into simpler ones, but are priced, or fused by XLA, better as they are.
_KEPT = (
    "aten.scaled_dot_product_attention.default",
    "aten.linear.default",
    "aten.matmul.default",
    "aten.einsum.default",
    "aten.rms_norm.default",
    # Of channels-last images its rule asks for strides, which JAX does not have.
    "aten.adaptive_avg_pool2d.default",
)
#: Most times that an operator is decomposed by rules beyond core ATen's; a guard.
_ROUNDS = 4
_DTYPES: dict[str, DTypeLike] = {
    "bfloat16": jnp.bfloat16,
    "float16": jnp.float16,
    "float32": jnp.float32,
    "float8_e4m3fn": jnp.float8_e4m3fn,
    "float8_e5m2": jnp.float8_e5m2,
    "int8": jnp.int8,
    "uint8": jnp.uint8,
    "int16": jnp.int16,
    "int32": jnp.int32,
    # As JAX does by default: indices of tokens and positions are what has 64 bits.
    "int64": jnp.int32,
    "bool": jnp.bool_,
    "complex64": jnp.complex64,
}


@dataclass(frozen=True)
class Exported:
    """A module's forward pass as a graph of ATen operators.

    Attributes:
        program: ``torch.export.ExportedProgram``, as ``torch.export.export`` makes it.
        name: Of the module's class or the file, for messages.
    """

    program: torch.export.ExportedProgram
    name: str


def export(given: TorchProgram) -> Exported:
    """Export a module or function, or take what is exported already.

    Raises:
        ProgramError: PyTorch is missing, cannot export the module or read the file, or shapes are
            dynamic.
    """
    source, args, kwargs, name = given.source, given.args, given.kwargs, given.name
    try:
        import torch
    except ImportError:
        raise ProgramError("PyTorch is not installed", where=name, hint=_NO_TORCH) from None
    if isinstance(source, torch.export.ExportedProgram | str | Path):
        if args or kwargs:
            raise ProgramError(
                "an exported program has its inputs already, but others were given",
                where=name,
                hint="give the module itself with its inputs, or the export alone",
            )
        known = isinstance(source, torch.export.ExportedProgram)
        return _checked(Exported(source if known else _loaded(Path(str(source))), name))
    if not (args or kwargs):
        raise ProgramError(
            "a module needs its example inputs",
            where=name,
            hint="opcast.predict(module, *inputs, device=…)",
        )
    if isinstance(source, type):
        raise ProgramError("this is a class of modules", where=name, hint="give an instance of it")
    try:
        module = source if isinstance(source, torch.nn.Module) else _as_module(source, name)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            program = torch.export.export(module, tuple(args), dict(kwargs))
    except ProgramError:
        raise
    except Exception as error:
        raise ProgramError(
            f"torch.export cannot export the module: {type(error).__name__}: {_short(error)}",
            where=name,
            hint="opcast reads what torch.export exports: no branches on values of tensors, no "
            "shapes that depend on data; try torch.export.export(module, inputs) alone",
        ) from error
    if any("CUDA is not available" in str(w.message) for w in said):
        raise ProgramError(
            "the module casts by torch.autocast('cuda'), which is off on a machine without CUDA",
            where=name,
            hint="write torch.autocast('cpu', …) for the prediction, which casts alike, or export "
            "it to a .pt2 file on a machine with a GPU",
        )
    return _checked(Exported(program, name))


def _as_module(function: object, name: str) -> torch.nn.Module:
    """A module whose forward pass is a function; modules that it uses are found in its closure."""
    import torch

    class Function(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
            names = getattr(getattr(function, "__code__", None), "co_names", ())
            used = [getattr(function, "__globals__", {}).get(n) for n in names]
            held = [m for m in (*cells, *used) if isinstance(m, torch.nn.Module)]
            # Registered, so that their weights are parameters rather than constants.
            self.used = torch.nn.ModuleList(held)

        def forward(self, *args: object, **kwargs: object) -> object:
            assert callable(function), f"a {type(function).__name__} is no function"
            return function(*args, **kwargs)

    Function.__name__ = Function.__qualname__ = name.rpartition(":")[2] or "Function"
    return Function()


def _loaded(path: Path) -> torch.export.ExportedProgram:
    import torch

    try:
        return torch.export.load(path)
    except Exception as error:
        raise ProgramError(
            f"torch.export.load cannot read it: {type(error).__name__}: {_short(error)}",
            where=str(path),
            hint="write it by torch.export.save(torch.export.export(module, inputs), path), with "
            f"a PyTorch no newer than {torch.__version__}; the module's package must be importable",
        ) from error


def _short(error: Exception) -> str:
    """The first lines of a message: PyTorch's go on with whole graphs."""
    return " ".join(str(error).split())[:600]


def _checked(exported: Exported) -> Exported:
    ranges = exported.program.range_constraints
    # PyTorch calls sizes that depend on values u0, u1 …
    if any(str(name).startswith("u") for name in ranges):
        raise ProgramError(
            f"sizes depend on the values of tensors: {', '.join(map(str, ranges))}",
            where=exported.name,
            hint="as how many tokens torch.where finds for an expert: sort or take the top of them "
            "into a number that is fixed (a capacity), so that the program has one time",
        )
    if ranges:
        raise ProgramError(
            f"dimensions are dynamic: {', '.join(map(str, ranges))}",
            where=exported.name,
            hint="export it without dynamic_shapes, for the sizes that the time is wanted of",
        )
    return exported


def decomposed(exported: Exported, known: Callable[[str], bool]) -> torch.export.ExportedProgram:
    """The export in core ATen, functional, but for what :data:`_KEPT` names.

    Args:
        exported: The export.
        known: Whether an operator of a name has a translation; others are decomposed further where
            PyTorch has a rule.

    Raises:
        ProgramError: PyTorch cannot decompose it.
    """
    import torch

    table = torch.export.default_decompositions()
    kept = {op for op in table if str(op) in _KEPT}
    table = {op: rule for op, rule in table.items() if op not in kept}
    try:
        with warnings.catch_warnings(), _as_it_trains(exported.program.graph_module):
            # PyTorch's about itself.
            warnings.simplefilter("ignore")
            found = exported.program.run_decompositions(table)
            # Rules of operators that core ATen keeps whole, such as ``grid_sampler_2d``; what they
            # are made of may have rules again.
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
            f"PyTorch cannot decompose the export: {type(error).__name__}: {_short(error)}",
            where=exported.name,
            hint="does exported.run_decompositions() work in PyTorch alone?",
        ) from error


def _has_rule(target: object, rules: Mapping[object, object]) -> bool:
    """Whether PyTorch has a rule by operators of ATen; its references use other primitives."""
    return getattr(rules.get(target), "__module__", "").startswith("torch._decomp")


@contextlib.contextmanager
def _as_it_trains(module: torch.fx.GraphModule) -> Iterator[None]:
    """Keep, while a graph is decomposed, what decomposing would drop of it.

    Detached tensors and regions without gradients become calls of an operator that stays, and
    autocast for other devices is one for the CPU, where the graph is traced.
    """
    import torch

    stop = _stop_operator()
    undo: list[Callable[[], object]] = []
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
            elif name == "wrap_with_autocast":
                undo.append(partial(setattr, node, "args", node.args))
                node.args = ("cpu", *node.args[1:])
    modules = [m for m in module.modules() if hasattr(m, "recompile")]
    for own in modules:
        own.recompile()
    try:
        yield
    finally:
        for step in reversed(undo):
            step()
        for own in modules:
            own.recompile()


def _graphs(module: torch.fx.GraphModule) -> list[torch.fx.Graph]:
    return [m.graph for m in module.modules() if hasattr(m, "graph")]


def _is_float(value: object) -> bool:
    own = getattr(value, "meta", {}).get("val")
    dtype = getattr(own, "dtype", None)
    return dtype is not None and bool(dtype.is_floating_point)


@cache
def _stop_operator() -> torch._ops.OpOverload:
    """An operator of PyTorch that copies, and stands for the end of a gradient's way."""
    import torch

    def copied(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    name = "opcast::stop_gradient"
    torch.library.define(name, "(Tensor x) -> Tensor")
    torch.library.impl(name, "CompositeExplicitAutograd", copied)
    torch.library.register_fake(name, copied)
    return torch.ops.opcast.stop_gradient.default


def jax_dtype(dtype: torch.dtype, where: str) -> DTypeLike:
    """JAX's element type for PyTorch's; 64-bit integers become those of 32.

    Raises:
        ProgramError: There is none.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        hint = "cast it, as by module.float(), bfloat16() or half()"
        raise ProgramError(f"tensors of {name} are not translated", where=where, hint=hint)
    return _DTYPES[name]


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's values for JAX; for tests and checks, since predictions need shapes alone."""
    import torch

    own = tensor.detach().cpu()
    if own.dtype == torch.bfloat16:
        return np.asarray(own.float().numpy()).astype(jnp.bfloat16)
    return np.asarray(own.numpy().astype(jax_dtype(own.dtype, "")))
