"""The platform that a program was lowered for: JAX lowers one function differently for each.

Random numbers become a loop on a CPU and straight code elsewhere, attention may become a call of
cuDNN, and ``jax.lax.platform_dependent`` may be anything: a program that was lowered for another
platform than the device's has other kernels.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from ...common.notes import WARNING
from ..devices.rules import capability_of

if TYPE_CHECKING:
    from ..devices.device import DeviceSpec
    from .reader import SourceProgram

#: Platforms by JAX's names.
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
#: Argument of every function of an export for several platforms that depends on the platform: its
#: number in the export's list (jax/_src/interpreters/mlir.py, lower_jaxpr_to_module).
INDEX = "_platform_index"
#: JAX's other names for the platforms.
_ALIASES = {"gpu": "cuda"}
#: Custom calls that one platform alone has, as JAX's lowering rules name them.
_CALLS = {
    "cpu": re.compile(r"lapack_|blas_|cpu_"),
    "cuda": re.compile(r"__cudnn\$|__cublas\$|cu(?:blas|solver|dnn|sparse|_)|mosaic_gpu"),
    "rocm": re.compile(r"hip(?:blas|solver|sparse|_)|miopen"),
    "tpu": re.compile(r"tpu_custom_call"),
}
#: Traces of any of these, or of a loop of Threefry, in bytecode, which holds names verbatim.
_TRACES = re.compile(
    rb"threefry2x32|lapack_|blas_|cpu_|cudnn|cublas|solver|sparse|cu_|hip_|miopen|mosaic_gpu|"
    rb"tpu_custom_call"
)


class Platform(NamedTuple):
    """What a function is lowered for.

    Attributes:
        name: One of :data:`PLATFORMS`.
        capability: Compute capability of an NVIDIA GPU times ten; 0 for others and unknown ones.
    """

    name: str
    capability: int = 0


def platform_of(device: DeviceSpec) -> Platform:
    """Return the platform of a device, as JAX calls it.

    GPUs are CUDA's unless they are AMD's: JAX has no name for GPUs of other vendors.
    """
    if device.platform != "gpu":
        return Platform(device.platform)
    # Measured devices have no vendor, but JAX's device kind as their name.
    words = f"{device.vendor} {device.name} {' '.join(device.aliases)}".lower()
    if re.search(r"\bamd\b|instinct|radeon|\bmi\d{3}", words):
        return Platform("rocm")
    return Platform("cuda", capability_of(str(device.compiler.get("target", ""))) or 0)


def platform_here() -> Platform:
    """Return the platform of JAX's default backend, as a device that nobody measured has it."""
    import jax

    name = jax.default_backend()
    version = str(getattr(jax.devices()[0].client, "platform_version", ""))
    return Platform("rocm" if "rocm" in version.lower() else known_platform(name))


def known_platform(name: str) -> str:
    """Return JAX's name of a platform: ``gpu`` stands for ``cuda``."""
    return _ALIASES.get(name, name)


def evident_platform(source: SourceProgram) -> str:
    """Infer from its ops which platform StableHLO was lowered for; empty if they do not show it."""
    data = source.compile_input
    raw = data.encode() if isinstance(data, str) else data
    # Most programs need not be walked.
    if source.kind != "stablehlo" or not _TRACES.search(raw):
        return ""
    from .jax_compat import walk_ops

    found = set()
    for op in walk_ops(source.module):
        if op.name == "stablehlo.custom_call":
            target = str(op.attributes["call_target_name"]).strip('"')
            found |= {name for name, calls in _CALLS.items() if calls.match(target)}
        # JAX rolls the rounds of Threefry into a loop on CPUs alone (jax/_src/prng.py).
        elif op.name == "func.func" and "threefry2x32" in str(op.attributes["sym_name"]):
            blocks = op.regions[0].blocks
            if any(o.operation.name == "stablehlo.while" for b in blocks for o in b.operations):
                found.add("cpu")
    return found.pop() if len(found) == 1 else ""


def _chooses(source: SourceProgram) -> bool:
    """Whether StableHLO takes the number of its platform as an argument."""
    data = source.compile_input
    raw = data.encode() if isinstance(data, str) else data
    return source.kind == "stablehlo" and INDEX.encode() in raw


def platform_note(source: SourceProgram, device: DeviceSpec) -> str:
    """Note that a program was lowered for another platform than a device's; empty if it was not."""
    wanted = platform_of(device).name
    if not source.platforms and _chooses(source):
        return (
            f"{WARNING}the program was exported for several platforms, and the file does not state "
            "which: the costliest of all branches counts; keep the whole export "
            f"(exported.serialize()), or export for {wanted} alone"
        )
    known = source.platforms or tuple(filter(None, (evident_platform(source),)))
    if not known or wanted in known:
        return ""
    what = "compiled" if source.kind == "hlo" else "lowered"
    return (
        f"{WARNING}the program was {what} for {' and '.join(known)}, but {device.name} needs "
        f"{wanted}: random numbers, attention and whatever else depends on the platform may have "
        "other kernels there, and the time may be far off; give the function itself (opcast "
        f"predict module.py:function --device {device.name}, in Python opcast.predict(function, "
        "*arguments, device=…)), or write the file by opcast.save(function, *arguments, path=…, "
        f"device={device.name!r}) or jax.export.export(function, platforms=[{wanted!r}])"
    )
