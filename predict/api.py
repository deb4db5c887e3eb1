"""``opcast.predict`` and ``opcast.save``: from a function to a prediction or a file in one call."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, overload

from ..common.errors import DeviceError, ProgramError

if TYPE_CHECKING:
    import pandas as pd

    from ..features.devices.device import DeviceSpec
    from ..features.ir.platforms import Platform
    from ..features.ir.torch.program import TorchProgram
    from ..features.lowering.target_compiler.process import CompileSettings
    from ..simulate.clusters.topology import Cluster
    from .cluster.partitioned import PartitionedPrediction
    from .operator.torch_price import TorchPrediction
    from .program.predictor import Prediction, Predictor

#: Several devices, for a table of predictions.
Devices: TypeAlias = list[str] | tuple[str, ...]
#: Suffixes of files that :func:`save` writes as text.
_TEXT = (".mlir", ".txt")


def torch_on_cluster(where: str = "") -> ProgramError:
    """Return the error for a PyTorch program on a cluster."""
    return ProgramError(
        "a program of PyTorch is for one device, but a cluster was given",
        where=where,
        hint="opcast simulate --hf config.json --cluster … predicts steps of whole models on "
        "clusters",
    )


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
    train: object = None,
    loss: object = None,
    framework: Literal["xla"] = "xla",
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
    train: object = None,
    loss: object = None,
    framework: Literal["xla"] = "xla",
    **kwargs: object,
) -> PartitionedPrediction: ...


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
    train: object = None,
    loss: object = None,
    framework: Literal["torch-eager", "torch-compiled"],
    **kwargs: object,
) -> TorchPrediction: ...


@overload
def predict(
    program: object,
    *args: object,
    device: Devices,
    cluster: None = None,
    model: str | Path = "default",
    lowering: str = "auto",
    trip_counts: dict[str, int] | int | None = None,
    strict: bool = False,
    fallback: str = "",
    settings: CompileSettings | None = None,
    train: object = None,
    loss: object = None,
    framework: str = "xla",
    **kwargs: object,
) -> pd.DataFrame: ...


def predict(
    program: object,
    *args: object,
    device: str | Path | DeviceSpec | Devices | None = None,
    cluster: str | Path | Cluster | None = None,
    model: str | Path = "default",
    lowering: str = "auto",
    trip_counts: dict[str, int] | int | None = None,
    strict: bool = False,
    fallback: str = "",
    settings: CompileSettings | None = None,
    train: object = None,
    loss: object = None,
    framework: str = "xla",
    **kwargs: object,
) -> Prediction | PartitionedPrediction | TorchPrediction | pd.DataFrame:
    """Predict a program on a device, or a program for several devices on a cluster.

    Args:
        program: A function, jitted or not, followed by its example arguments; or a path, text or
            bytes of StableHLO or HLO, or an exported, lowered or compiled JAX function; or a
            PyTorch module followed by its inputs, a ``torch.export.ExportedProgram`` or a ``.pt2``
            file, which is predicted as run by XLA.
        args: Example arguments of a function: arrays or ``jax.ShapeDtypeStruct``; tensors of a
            module.
        device: Name (``opcast device --list``), path of a device file, or description; ``local``
            by default, which is this machine as measured by ``opcast device --save``. A list of
            names and files returns a table; for a PyTorch module, ``batch`` may then list batch
            sizes, which replace the first size of all inputs that share that of the first tensor.
        cluster: Instead of a device: name (``opcast cluster --list``), path of a YAML file, or
            description.
        model: Name or folder of the model; it is loaded once.
        lowering: ``auto``, ``xla``, ``fused`` or ``op``.
        trip_counts: Trip counts of loops whose count cannot be determined.
        strict: Raise an error instead of using the roofline for a kernel or operator; devices
            only.
        fallback: Lowering to use if the device's compiler is missing or fails.
        settings: Limits and options of that compiler.
        train: For a PyTorch program: predict a full training step (forward, loss, backward, update)
            with this optimiser, ``adamw``, ``adam``, ``sgd`` or ``momentum``; other functions
            receive it as a keyword argument.
        loss: With ``train``: ``cross_entropy``, ``sum``, or a function of the module's outputs
            written in PyTorch; by default the module returns its loss. Other functions receive it
            as a keyword argument.
        framework: For a PyTorch program: ``xla``, or ``torch-eager`` or ``torch-compiled`` for the
            kernels that PyTorch itself launches.
        kwargs: Keyword arguments of a function.

    Returns:
        A ``Prediction`` for a device, a ``PartitionedPrediction`` for a cluster, a
        ``TorchPrediction`` for a framework of PyTorch; all have ``latency_us``, ``lo_us`` and
        ``hi_us``. For several devices a table in the given order, with the columns ``batch`` (if
        given), ``device``, those times, memory, energy, ``notes``, and ``error`` for failures.

    Raises:
        OpcastError: The program, device, cluster or lowering is not usable.
    """
    if cluster is not None and device is not None:
        raise DeviceError("both a device and a cluster were given", hint="give one of them")
    from ..features.lowering.options import LoweringOptions
    from .cluster.partitioned import predict_partitioned
    from .program.case import ProgramCase

    given = {"train": train, "loss": loss}
    batches = _batches(program, args, device, kwargs)
    own_torch = _torch_program(program, args, kwargs, train, loss)
    if own_torch is None:
        kwargs |= {name: value for name, value in given.items() if value is not None}
        if framework != "xla":
            raise ProgramError(
                f"framework {framework!r} is for programs of PyTorch",
                hint="give a torch.nn.Module with its inputs, an exported program or a .pt2 file",
            )
    elif cluster is not None:
        raise torch_on_cluster()
    elif framework != "xla":
        _refuse_compiler_options(lowering, trip_counts, fallback, settings)
        from .operator.torch_framework import TorchPredictor

        torch_predictor = TorchPredictor(framework, model)
        if isinstance(device, list | tuple):
            from .program.many import by_torch, predict_on

            answers = by_torch({framework: torch_predictor}, strict=strict)
            return predict_on(own_torch, device, batches, answers, torch_predictor.devices)
        return torch_predictor.predict(own_torch, device or "local", strict=strict)
    own = own_torch if own_torch is not None else _call(program, args, kwargs)
    predictor = loaded(model)
    if isinstance(device, list | tuple):
        from .program.many import by_xla, predict_on

        options = LoweringOptions(lowering, None, trip_counts, fallback, settings)
        like = ProgramCase(own, options, strict=strict)
        return predict_on(own, device, batches, {"xla": by_xla(predictor, like)}, predictor.devices)
    if cluster is None:
        _require_measured(device)
    options = LoweringOptions(lowering, device, trip_counts, fallback, settings)
    if cluster is None:
        return predictor.answer(ProgramCase(own, options, strict=strict))
    if strict:
        raise DeviceError("strict does not apply to a cluster", hint="leave it out")
    return predict_partitioned(own, cluster, predictor, options)


def _batches(
    program: object, args: tuple[object, ...], device: object, kwargs: dict[str, object]
) -> list[int] | tuple[int, ...] | None:
    """Remove the list of batch sizes from the keyword arguments and return it.

    Raises:
        ProgramError: A batch size is not an integer, or only one device is given.
    """
    from ..features.ir.torch.program import as_torch_program

    batch = kwargs.get("batch")
    if not isinstance(batch, list | tuple) or not as_torch_program(program, args):
        return None
    if not isinstance(device, list | tuple) or not all(isinstance(n, int) for n in batch):
        raise ProgramError(
            "batch is a list of numbers of samples, for a table of devices",
            hint="such as device=['h100-sxm'], batch=[1, 8, 32]",
        )
    del kwargs["batch"]
    return batch


def _require_measured(device: str | Path | DeviceSpec | None) -> None:
    """Check that this machine was measured if it is the device.

    Raises:
        DeviceError: The device is this machine, and it was never measured.
    """
    from .devices import is_known

    if device in (None, "local") and not is_known("local", {}):
        raise DeviceError(
            "this machine has not been measured",
            hint="opcast device --save measures it once (15 s); or name another device, such as "
            "device='h100-sxm' (opcast device --list)",
        )


def _torch_program(
    program: object,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    train: object,
    loss: object,
) -> TorchProgram | None:
    """Return the program as a PyTorch program, or ``None`` if it is another program.

    Raises:
        ProgramError: The optimiser or loss is unknown.
    """
    from ..features.ir.jax_function import FunctionCall
    from ..features.ir.torch.program import as_torch_program

    if isinstance(program, FunctionCall) and not (args or kwargs):
        own = program
        return as_torch_program(own.function, own.args, own.kwargs, train, loss, own.origin)
    return as_torch_program(program, args, kwargs, train, loss)


def _refuse_compiler_options(
    lowering: str, trip_counts: object, fallback: str, settings: object
) -> None:
    given = {
        "lowering": lowering != "auto",
        "trip_counts": trip_counts is not None,
        "fallback": fallback != "",
        "settings": settings is not None,
    }
    named = [name for name, own in given.items() if own]
    if named:
        raise ProgramError(
            f"{', '.join(named)}: options of XLA's lowering, which PyTorch's frameworks lack",
            hint="leave them out, or framework out",
        )


def _call(program: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Return a program, or a function with its arguments.

    Raises:
        ProgramError: Arguments were given, but the program is not a function.
    """
    from ..features.ir.jax_function import FunctionCall
    from ..features.ir.reader import check_arguments

    check_arguments(program, args, kwargs)
    if not (args or kwargs):
        return program
    return FunctionCall(program, args, kwargs, str(getattr(program, "__name__", "")))


def loaded(model: str | Path) -> Predictor:
    """Load a model for programs; it is read again only if its folder has changed."""
    from .locate import model_stamp

    return _load(model, model_stamp(model))


@lru_cache(maxsize=4)
def _load(model: str | Path, stamp: tuple[object, ...]) -> Predictor:
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

    Donated arguments and source lines are kept; the file names its platform. Unlike with
    ``serialize`` of ``jax.export``, arguments may be any trees, such as optimiser states.

    Args:
        function: A function, jitted or not, or a PyTorch module.
        args: Its example arguments: arrays or ``jax.ShapeDtypeStruct``.
        path: File to write: text if it ends in ``.mlir`` or ``.txt``, else bytecode.
        device: Target device: name, path of a device file, or description.
        kwargs: Keyword arguments of the function.

    Returns:
        The path.

    Raises:
        ProgramError: The function cannot be lowered, or the program is already a file.
        DeviceError: The device is unknown.
    """
    from ..features.ir.platforms import platform_here, platform_of
    from .devices import find_anywhere, is_known

    if isinstance(function, str | Path | bytes):
        raise ProgramError(
            "only a function can be saved; this is already a file or its content",
            hint="opcast.save(function, *arguments, path=…, device=…)",
        )
    # The platform of this machine is known even if it was never measured.
    unmeasured = device == "local" and not is_known("local", {})
    platform = platform_here() if unmeasured else platform_of(find_anywhere(device))
    write_program(_call(function, args, kwargs), Path(path), platform)
    return Path(path)


def write_program(program: object, path: Path, platform: Platform) -> str:
    """Write a program as StableHLO that names its platform; returns a note on conversions.

    Args:
        program: A function, or one with its arguments.
        path: File to write: text if it ends in ``.mlir`` or ``.txt``, else bytecode.
        platform: Platform for which a function is lowered.

    Raises:
        ProgramError: The function cannot be lowered.
    """
    from ..common.files import write_bytes
    from ..features.ir.mlir.bindings import write_bytecode
    from ..features.ir.platforms import mark_platforms
    from ..features.ir.reader import read_program

    source = read_program(program, platform=platform)
    module = mark_platforms(source.module, source.platforms or (platform.name,))
    if path.suffix in _TEXT:
        data = str(module.operation.get_asm(enable_debug_info=True)).encode()
    else:
        data = write_bytecode(module)
    write_bytes(path, data)
    return source.note
