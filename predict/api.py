"""What ``opcast.predict`` and ``opcast.save`` do: one call from a function to an answer or file."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, overload

from ..common.errors import DeviceError, ProgramError

if TYPE_CHECKING:
    from ..features.devices.device import DeviceSpec
    from ..features.lowering.target_compiler.process import CompileSettings
    from ..simulate.clusters.topology import Cluster
    from .cluster.partitioned import PartitionedPrediction
    from .program.predictor import Prediction, Predictor

#: Suffixes of files that :func:`save` writes as text.
_TEXT = (".mlir", ".txt")


@overload
def predict(
    program: object,
    *args: object,
    device: str | Path | DeviceSpec | None = None,
    cluster: None = None,
    model: str | Path = "default",
    lowering: str = "auto",
    trip_counts: dict[str, int] | int | None = None,
    strict: bool = False,
    fallback: str = "",
    settings: CompileSettings | None = None,
    **kwargs: object,
) -> Prediction: ...


@overload
def predict(
    program: object,
    *args: object,
    device: None = None,
    cluster: str | Path | Cluster,
    model: str | Path = "default",
    lowering: str = "auto",
    trip_counts: dict[str, int] | int | None = None,
    strict: bool = False,
    fallback: str = "",
    settings: CompileSettings | None = None,
    **kwargs: object,
) -> PartitionedPrediction: ...


def predict(
    program: object,
    *args: object,
    device: str | Path | DeviceSpec | None = None,
    cluster: str | Path | Cluster | None = None,
    model: str | Path = "default",
    lowering: str = "auto",
    trip_counts: dict[str, int] | int | None = None,
    strict: bool = False,
    fallback: str = "",
    settings: CompileSettings | None = None,
    **kwargs: object,
) -> Prediction | PartitionedPrediction:
    """Predict a program on a device, or a program for several devices on a cluster.

    Args:
        program: A function, jitted or not, followed by its example arguments; or a path, text or
            bytes of StableHLO or HLO, or an exported, lowered or compiled JAX function.
        args: Example arguments of a function: arrays or ``jax.ShapeDtypeStruct``.
        device: Name (``opcast device --list``), path of a device file, or description; ``local``
            by default.
        cluster: Instead of a device: name (``opcast cluster --list``), path of a YAML file, or
            description.
        model: Name or folder of the model; it is loaded once.
        lowering: ``auto``, ``xla``, ``fused`` or ``op``.
        trip_counts: Trips of loops whose count cannot be found.
        strict: Raise instead of falling back to the roofline for a kernel; devices only.
        fallback: Lowering to take where the device's compiler is missing or fails.
        settings: Limits and options of that compiler.
        kwargs: Keyword arguments of a function.

    Returns:
        For a device its ``Prediction``, for a cluster a ``PartitionedPrediction``; both have
        ``latency_us``, ``lo_us`` and ``hi_us``.

    Raises:
        OpcastError: The program, device, cluster or lowering is not usable.
    """
    if cluster is not None and device is not None:
        raise DeviceError("both a device and a cluster were given", hint="give one of them")
    from ..features.lowering.options import LoweringOptions
    from .cluster.partitioned import predict_partitioned

    predictor, own = loaded(model), _call(program, args, kwargs)
    options = LoweringOptions(lowering, device, trip_counts, fallback, settings)
    if cluster is None:
        return predictor.predict_with(own, options, strict=strict)
    if strict:
        raise DeviceError("strict is not known for a cluster", hint="leave it out")
    return predict_partitioned(own, cluster, predictor, options)


def _call(program: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """A program, or a function with its arguments.

    Raises:
        ProgramError: What was given arguments is no function.
    """
    from ..features.ir.jax_function import FunctionCall
    from ..features.ir.reader import check_arguments

    check_arguments(program, args, kwargs)
    if not (args or kwargs):
        return program
    return FunctionCall(program, args, kwargs, str(getattr(program, "__name__", "")))


@lru_cache(maxsize=4)
def loaded(model: str | Path) -> Predictor:
    """Load a model for programs; once."""
    from .program.predictor import load_for_programs

    return load_for_programs(model)


def save(
    function: object,
    *args: object,
    path: str | Path,
    device: str | Path | DeviceSpec = "local",
    **kwargs: object,
) -> Path:
    """Write a function as StableHLO that ``opcast predict`` reads, lowered for a device's platform.

    Donated arguments and source lines are kept; the file says which platform it is for. Optimiser
    states and any other trees of arguments are fine, unlike with ``jax.export``'s ``serialize``.

    Args:
        function: A function, jitted or not.
        args: Its example arguments: arrays or ``jax.ShapeDtypeStruct``.
        path: File to write: text if it ends in ``.mlir`` or ``.txt``, else bytecode.
        device: What it is for: name, path of a device file, or description.
        kwargs: Keyword arguments of the function.

    Returns:
        The path.

    Raises:
        ProgramError: The function cannot be lowered, or the program is a file already.
        DeviceError: The device is not known.
    """
    from ..common.files import write_bytes
    from ..features.ir.jax_compat import say_platform, write_bytecode
    from ..features.ir.platforms import platform_of
    from ..features.ir.reader import read_program
    from .devices import resolve_device

    if isinstance(function, str | Path | bytes):
        raise ProgramError(
            "only a function can be saved; this is a file or its content already",
            hint="opcast.save(function, *arguments, path=…, device=…)",
        )
    platform = platform_of(resolve_device(device, {}))
    source = read_program(_call(function, args, kwargs), platform=platform)
    module = say_platform(source.module, source.platforms or (platform.name,))
    target = Path(path)
    if target.suffix in _TEXT:
        data = str(module.operation.get_asm(enable_debug_info=True)).encode()
    else:
        data = write_bytecode(module)
    write_bytes(target, data)
    return target
