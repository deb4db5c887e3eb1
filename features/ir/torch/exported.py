"""Exports of PyTorch modules: ``torch.export`` and ``.pt2`` files."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
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
    # As JAX does by default: only indices of tokens and positions have 64 bits.
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
            f"torch.export cannot export the module: {type(error).__name__}: {shortened(error)}",
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
            assert callable(function), f"a {type(function).__name__} is not a function"
            return function(*args, **kwargs)

    Function.__name__ = Function.__qualname__ = name.rpartition(":")[2] or "Function"
    return Function()


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


def shortened(error: Exception) -> str:
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


def jax_dtype(dtype: torch.dtype, where: str) -> DTypeLike:
    """JAX's element type for PyTorch's; 64-bit integers become 32-bit ones.

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
