"""Export PyTorch programs: modules, functions, and existing exports."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING

from ....common.errors import ProgramError
from .autocast import cuda_autocast
from .eager import checkpointing, line_of, place_of, sized_by_data, tensors_in
from .program import TorchProgram

if TYPE_CHECKING:
    import torch
    from jax.typing import DTypeLike

_NO_TORCH = "pip install 'torch>=2.6', or opcast's own extra: pip install '.[torch]' in its clone"
#: Supported element types.
_DTYPES = frozenset(
    (
        *("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"),
        *("int16", "int32", "int64", "bool", "complex64"),
    )
)
#: JAX types with other names. Integers follow JAX's default: only token and position indices have
#: 64 bits in PyTorch.
_RENAMED = {"int64": "int32", "bool": "bool_"}


@dataclass(frozen=True)
class Exported:
    """A module's forward pass as a graph of ATen operators.

    Attributes:
        program: ``torch.export.ExportedProgram``, as returned by ``torch.export.export``.
        name: Class of the module, or the file, for messages.
        regions: Paths of modules that run inside ``torch.utils.checkpoint``, with the number of its
            call.
    """

    program: torch.export.ExportedProgram
    name: str
    regions: Mapping[str, int] = field(default_factory=dict)


def export(given: TorchProgram) -> Exported:
    """Export a module or function, or load an existing export.

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
        known = isinstance(source, torch.export.ExportedProgram)
        program = source if known else _loaded(Path(str(source)))
        if args or kwargs:
            program = _sized(program, args, kwargs, name)
        return _checked(Exported(program, name))
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
        with (
            warnings.catch_warnings(),
            quiet(),
            cuda_autocast(),
            _tensors_out(module),
            checkpointing(module) as regions,
        ):
            warnings.simplefilter("ignore")
            program = torch.export.export(module, *_beside(module, args, kwargs))
    except ProgramError:
        raise
    except Exception as error:
        if type(error).__name__ == "GuardOnDataDependentSymNode":
            raise ProgramError(
                "a decision depends on values of tensors, which a prediction does not have",
                where=line_of(error) or name,
                hint="torch.where computes both sides of a branch; what nonzero, unique or a mask "
                "finds, sort into a number that is fixed (a capacity)",
            ) from error
        raise ProgramError(
            f"torch.export cannot export the module: {type(error).__name__}: {shortened(error)}",
            where=name,
            hint=sized_by_data(error)
            or "opcast reads what torch.export exports: no branches on values of tensors, no "
            "shapes that depend on data; try torch.export.export(module, inputs) alone",
        ) from error
    return _checked(Exported(program, name, regions))


@contextmanager
def _tensors_out(module: torch.nn.Module) -> Iterator[None]:
    """Let a module return its tensors instead of objects of its own that hold them (KV caches)."""
    import torch
    from torch.utils import _pytree

    def plain(leaf: object) -> object:
        known = isinstance(leaf, torch.Tensor) or not hasattr(leaf, "__dict__")
        return leaf if known else tensors_in(leaf) or leaf

    def flat(_: object, __: object, found: object) -> object:
        return _pytree.tree_map(plain, found)

    handle = module.register_forward_hook(flat)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress PyTorch's output of graphs and tracebacks for errors reported in one line."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        # A failed export prints its partial graph instead of logging it.
        with redirect_stderr(StringIO()):
            yield
    finally:
        logging.disable(before)


def _beside(
    module: torch.nn.Module, args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the inputs, moved to ``meta`` if the module is there: only shapes are read."""
    from torch.utils import _pytree

    held = [*module.parameters(), *module.buffers()]
    pair = (tuple(args), dict(kwargs))
    if not held or not all(tensor.is_meta for tensor in held):
        return pair
    return _pytree.tree_map(lambda v: v.to("meta") if hasattr(v, "is_meta") else v, pair)


def _as_module(function: object, name: str) -> torch.nn.Module:
    """Wrap a function as a module; modules that it uses are found in its closure and globals."""
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
            return run(*args, **kwargs)

    run = _named_forward(function)
    Function.__name__ = Function.__qualname__ = name.rpartition(":")[2] or "Function"
    return Function()


def _named_forward(function: object) -> Callable[..., object]:
    """Rename a function to ``forward``, the only name whose lines exports keep."""
    assert callable(function), f"a {type(function).__name__} is not a function"
    own: object = function
    if not isinstance(own, FunctionType):
        return function
    code, held = own.__code__.replace(co_name="forward"), own.__closure__
    run = FunctionType(code, own.__globals__, "forward", own.__defaults__, held)
    run.__kwdefaults__ = own.__kwdefaults__
    return run


def _loaded(path: Path) -> torch.export.ExportedProgram:
    import torch

    try:
        return torch.export.load(path)
    except Exception as error:
        raise ProgramError(
            f"torch.export.load cannot read it: {type(error).__name__}: {shortened(error)}",
            where=str(path),
            hint="write it by torch.export.save(torch.export.export(module, inputs), path), with "
            f"a PyTorch no newer than {torch.__version__}; the module's package must be importable",
        ) from error


def _sized(
    program: torch.export.ExportedProgram,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    name: str,
) -> torch.export.ExportedProgram:
    """Fix an export's dynamic dimensions to the sizes of given inputs.

    Raises:
        ProgramError: The export does not accept the inputs.
    """
    import torch

    try:
        with quiet():
            return torch.export.export(program.module(), args, dict(kwargs))
    except Exception as error:
        raise ProgramError(
            f"the export does not take these inputs: {shortened(error).partition(' While ')[0]}",
            where=name,
            hint="sizes may differ in the dimensions that were exported as dynamic, within their "
            "ranges; for others give the module itself with its inputs",
        ) from error


def shortened(error: Exception) -> str:
    """Return the beginning of a message, since PyTorch's may contain whole graphs."""
    return " ".join(str(error).split())[:600]


def _checked(exported: Exported) -> Exported:
    ranges = exported.program.range_constraints
    # Nodes whose results bring new symbols take them from values.
    nodes = exported.program.graph.nodes if ranges else ()
    by_value = [n for n in nodes if n.meta.get("unbacked_bindings")]
    if by_value:
        raise _by_value(by_value[0], exported.name)
    if ranges:
        raise ProgramError(
            f"dimensions are dynamic: {'; '.join(_dynamic(exported.program))}",
            where=exported.name,
            hint="give inputs of the sizes that the time is wanted of, as opcast.predict(exported, "
            "*inputs, device=…), or export it without dynamic_shapes",
        )
    return exported


def _by_value(node: torch.fx.Node, name: str) -> ProgramError:
    """Return the error for a node whose results are a number or sizes from values."""
    operator, where = str(node.target).removesuffix(".default"), str(place_of(node)) or name
    if operator.endswith(("item", "_local_scalar_dense")):
        return ProgramError(
            f"{operator} reads a value of a tensor, which a prediction does not have",
            where=where,
            hint="compute with the tensor itself (x * y.sum(), not x * y.sum().item()), or give "
            "the number as an argument",
        )
    return ProgramError(
        f"sizes depend on the values of tensors: how much {operator} finds",
        where=where,
        hint="as how many tokens torch.where finds for an expert: sort or take the top of them "
        "into a number that is fixed (a capacity), so that the program has one time",
    )


def _dynamic(program: torch.export.ExportedProgram) -> list[str]:
    """Describe inputs with dynamic dimensions, such as ``0 and 1 of tokens``."""
    found = []
    for node in program.graph.nodes:
        shape = getattr(node.meta.get("val"), "shape", ()) if node.op == "placeholder" else ()
        sizes = [str(at) for at, size in enumerate(shape) if not isinstance(size, int)]
        if sizes:
            found.append(f"{' and '.join(sizes)} of {node.name}")
    return found or [str(name) for name in program.range_constraints]


def jax_dtype(dtype: torch.dtype, where: str) -> DTypeLike:
    """Return JAX's element type for PyTorch's; 64-bit integers become 32-bit ones.

    Raises:
        ProgramError: JAX has no such type.
    """
    import jax.numpy as jnp

    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        hint = "cast it, as by module.float(), bfloat16() or half()"
        raise ProgramError(f"tensors of {name} are not translated", where=where, hint=hint)
    kind: DTypeLike = getattr(jnp, _RENAMED.get(name, name))
    return kind
