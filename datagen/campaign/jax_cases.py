"""A plan's cases as compiled JAX programs, with everything needed to execute them."""

from __future__ import annotations

import gzip
import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ...common.errors import ProfileError
from ...common.types import JaxObject, JsonObject
from ..profile.runner import MakeArguments, module_name, wide_types

if TYPE_CHECKING:
    import jax
    import numpy as np

#: Aliased buffers in the head of a module: ``{0}: (2, {}, may-alias)``, or ``{}: (2, {})`` if the
#: program has one output.
_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}")
#: Parts that contain names of functions, files and lines of the source program: the metadata of
#: instructions, and the tables at the head of a module.
_METADATA = re.compile(r',? metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}')
_TABLES = re.compile(
    r"^(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:\d.*\n)*\n?", re.MULTILINE
)
#: Options to compile without command buffers, which become CUDA graphs and hide single kernels from
#: traces. They are options of one compilation, since an unknown name in XLA_FLAGS would end the
#: process.
_PLAIN: dict[str, str | bool] = {"xla_gpu_enable_command_buffer": ""}
#: XLA's error message for an unknown option.
_NO_OPTION = "No such compile option"
#: Cores per concurrent compilation: XLA uses several by itself.
_CORES_EACH = 4
#: Standard deviation of random weights and inputs: small enough that deep networks do not overflow.
_DEVIATION = 0.02

T = TypeVar("T")
_Run = Callable[["list[jax.Array]"], "Sequence[jax.Array]"]
_Function = tuple[
    Callable[..., object], list["jax.ShapeDtypeStruct"], list[int], MakeArguments, str
]


@dataclass
class Compiled:
    """A compiled case.

    Attributes:
        key: Key of the case.
        family: Family of its program; ``op:…`` for a single operation.
        module: Name of the optimised module, as traces spell it.
        hlo: Its text, without names of functions, files and lines.
        run: Executes it on arrays of the device.
        plain: Executes it without command buffers; ``None`` if that makes no difference.
        make_arguments: Draws arguments.
        bytes: Bytes of the arguments.
        aliases: Pairs (output, parameter) that share a buffer.
        compile_s: Seconds of tracing, lowering and compiling.
        memory: Bytes as reported by XLA.
    """

    key: str
    family: str
    module: str
    hlo: str
    run: _Run
    plain: _Run | None
    make_arguments: MakeArguments
    bytes: int
    aliases: list[tuple[int, int]]
    compile_s: float
    memory: dict[str, int]

    @property
    def single(self) -> bool:
        """Whether it is a single operation, whose whole time is mostly its dispatch."""
        return self.family.startswith("op:")


def compile_cases(
    cases: Sequence[JsonObject], begun: Callable[[str], None]
) -> list[Compiled | Exception]:
    """Compile cases concurrently; those that cannot be compiled give their error.

    Args:
        cases: Keys and specs.
        begun: Callback with the key of each finished one.
    """
    workers = max(1, min(len(cases), (os.cpu_count() or 1) // _CORES_EACH))
    found = []
    with ThreadPoolExecutor(workers) as pool:
        for case, own in zip(cases, pool.map(_tried, range(len(cases)), cases), strict=True):
            begun(str(case["key"]))
            found.append(own)
    return found


def _tried(index: int, case: JsonObject) -> Compiled | Exception:
    try:
        return _compile(index, str(case["key"]), case["spec"])
    except Exception as error:  # compilers fail in many ways
        return error


def _compile(index: int, key: str, spec: JsonObject) -> Compiled:
    begin = time.perf_counter()
    if "file" in spec:
        return _compile_file(key, Path(spec["file"]), begin)
    flat, structs, donated, make_arguments, family = _function(spec)
    # Programs of one trace session are distinguished by the names of their modules.
    flat.__name__ = f"case{index}"
    import jax

    # Operations use 64-bit types; steps are compiled as their users do it.
    with wide_types() if "op" in spec else nullcontext():
        jitted = jax.jit(flat, donate_argnums=donated, keep_unused=True)
        lowered = jitted.lower(*structs)
        compiled = lowered.compile()
        seconds = time.perf_counter() - begin
        plain = _without_command_buffers(lambda o: lowered.compile(compiler_options=o))
    text = (plain or compiled).as_text() or ""
    return Compiled(
        key=key,
        family=family,
        module=module_name(text),
        hlo=anonymous(text),
        run=lambda arrays: compiled(*arrays),
        plain=(lambda arrays: plain(*arrays)) if plain else None,
        make_arguments=make_arguments,
        bytes=sum(s.size * s.dtype.itemsize for s in structs),
        aliases=aliases_of(text),
        compile_s=seconds,
        memory=_memory(compiled),
    )


def _without_command_buffers(compile_with: Callable[[dict[str, str | bool]], T]) -> T | None:
    """Compile again; ``None`` if there are no command buffers, or they cannot be turned off."""
    import jax

    if jax.default_backend() != "gpu":
        return None
    try:
        return compile_with(_PLAIN)
    except Exception as error:  # a class of jaxlib's own
        if _NO_OPTION in str(error):
            return None
        raise


def anonymous(hlo: str) -> str:
    """Remove names of functions, files and lines from a module."""
    return _TABLES.sub("", _METADATA.sub("", hlo))


def aliases_of(hlo: str) -> list[tuple[int, int]]:
    """Pairs (output, parameter) of a module that share a buffer."""
    head = hlo.split("\n", 1)[0]
    start = head.find("input_output_alias=")
    if start < 0:
        return []
    found = _ALIAS.findall(head[start:])
    return [(int(output or 0), int(parameter)) for output, parameter in found]


def _memory(compiled: JaxObject) -> dict[str, int]:
    try:
        stats = compiled.memory_analysis()
    except Exception:  # not every backend has it
        return {}
    names = ("argument", "output", "temp", "alias")
    found = {n: getattr(stats, f"{n}_size_in_bytes", None) for n in names}
    return {f"{n}_bytes": int(v) for n, v in found.items() if v is not None}


def _function(spec: JsonObject) -> _Function:
    """Flat function, types of its arguments, donated ones, their values, and the family."""
    if "zoo" in spec:
        return _of_zoo(spec)
    import jax

    if "op" in spec:
        from .jax_ops import operation

        name = str(spec["op"])
        function, args = operation(name, spec["shape"], str(spec["dtype"]))
        with wide_types():
            make: Callable[..., jax.ShapeDtypeStruct] = jax.ShapeDtypeStruct
            structs = [make(shape, dtype) for shape, dtype, _ in args]
        draw = partial(_draw, structs, [high for *_, high in args])
        family = f"op:{name.split('.')[1]}"
        return _flat(function, None), structs, [], draw, family
    from .jax_models import model

    name = str(spec["model"])
    function, trees = model(name, spec)
    leaves = jax.tree.leaves(trees)
    # Weights and the optimiser's state are updated in place, as are the caches of a decoding step.
    kept = {"train": 3, "decode": 0}.get(str(spec["mode"]), 0)
    donated = list(range(len(jax.tree.leaves(trees[:kept]))))
    if spec["mode"] == "decode":
        donated = list(range(len(jax.tree.leaves(trees[:2])), len(leaves)))
    top = int(spec.get("vocabulary", 1000))
    draw = partial(_draw, leaves, [top] * len(leaves))
    structure = jax.tree.structure(trees)
    return _flat(function, structure), leaves, donated, draw, name


def _flat(function: Callable[..., object], structure: JaxObject) -> Callable[..., object]:
    """A function of flat arguments that returns flat results."""
    import jax

    def flat(*values: object) -> tuple[object, ...]:
        args = values if structure is None else jax.tree.unflatten(structure, values)
        return tuple(jax.tree.leaves(function(*args)))

    return flat


def _of_zoo(spec: JsonObject) -> _Function:
    """A program of the zoo, which requires flax and optax."""
    from ..zoo import build, parse_settings

    name = str(spec["zoo"])
    workload = build(name, **parse_settings(name, str(spec["set"]).split()))
    return *workload.flattened(), workload.arguments, name


def _draw(
    structs: Sequence[jax.ShapeDtypeStruct], tops: Sequence[int], seed: int
) -> list[np.ndarray]:
    """Random values: normal ones, and integers below the end of their range."""
    import numpy as np

    from ..programs.source import Arg

    rng = np.random.default_rng(seed)
    found = []
    for struct, top in zip(structs, tops, strict=True):
        whole = np.issubdtype(struct.dtype, np.integer)
        # Draw in one of two HLO types; the array is then cast to the program's type.
        arg = Arg(
            struct.shape,
            "s32" if whole else "f32",
            "integer" if whole else "normal",
            0.0,
            max(1, min(top or 100, np.iinfo(struct.dtype).max)) if whole else _DEVIATION,
        )
        found.append(arg.draw(rng).astype(struct.dtype))
    return found


def _compile_file(key: str, path: Path, begin: float) -> Compiled:
    """Compile a given program, which requires opcast's own packages beside JAX.

    Raises:
        ProfileError: They are missing.
    """
    try:
        from ...features.ir.reader import read_program
        from ...features.lowering.xla import compile_native
        from ..programs.source import random_arguments
    except ImportError as error:
        raise ProfileError(
            f"programs of one's own need all of opcast: {error}", hint="pip install opcast"
        ) from None
    data = path.read_bytes()
    data = gzip.decompress(data) if path.name.endswith(".gz") else data
    source = read_program(data if b"\0" in data else data.decode())
    name = re.sub(r"\W", "_", key.split("/")[-1])
    native = compile_native(source, name=name)
    seconds = time.perf_counter() - begin
    plain = _without_command_buffers(lambda o: compile_native(source, name=name, flags=o))
    hlo = (plain or native).hlo
    types = native.input_types
    return Compiled(
        key=key,
        family="given",
        module=module_name(hlo),
        hlo=anonymous(hlo),
        run=native.run,
        plain=plain.run if plain else None,
        make_arguments=lambda seed: random_arguments(types, seed),
        bytes=sum(t.nbytes for t in types),
        aliases=list(native.aliases),
        compile_s=seconds,
        memory={"peak_bytes": int(native.peak_memory_bytes)},
    )
