"""Describe absent devices to their compilers.

XLA's GPU compiler decides by cores, clock, bandwidth, caches and registers what to fuse and in
which order to run it. A missing figure would silently change the kernels, so each one is required.
libtpu identifies devices by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from ....common.errors import CompilerError, DeviceError
from ...devices.device import DeviceSpec
from ...devices.rules import capability_of, generations
from .install import Compiler, find_compiler

#: Figures common to all GPUs that CUDA supports (CUDA C++ Programming Guide, Compute Capabilities).
_COMMON = (
    "threads_per_warp: 32 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 "
    "block_dim_limit_z: 65535"
)
#: Without a device no library is queried for algorithms, but the compiler requires versions; they
#: were found to have no effect on the kernels.
_LIBRARIES = (
    "dnn_version_info { major: 9 minor: 7 } runtime_version { major: 13 minor: 0 patch: 0 }"
)


@dataclass(frozen=True)
class CompileTarget:
    """A device described for its compiler.

    Attributes:
        device: Name of the device.
        platform: ``cuda`` or ``tpu``, the plug-ins' own names.
        architecture: Architecture of the compiler's rules: ``sm_90``, ``v5e``.
        config: XLA's text description of a GPU; for a TPU how its cores are combined, empty for the
            default.
        devices_per_node: Devices per host.
        flags: Options of XLA that belong to the target (location of the assembler).
        compiler: The compiler used.
        notes: Remarks for the user, such as a stand-in architecture.
    """

    device: str
    platform: str
    architecture: str
    config: str
    devices_per_node: int
    flags: tuple[tuple[str, str], ...]
    compiler: Compiler
    notes: tuple[str, ...] = ()

    def topology(self, count: int) -> str:
        """Return the name of the smallest machine with at least ``count`` devices."""
        if self.platform == "tpu":
            return tpu_topology(self.architecture, count)
        per_host = min(count, max(1, self.devices_per_node))
        # XLA's text form: slices × hosts × devices per host.
        return f"1x{math.ceil(count / per_host)}x{per_host}"


def target_of(device: DeviceSpec) -> CompileTarget:
    """Describe a device to its compiler.

    Args:
        device: From the catalogue, a device file, or a device measured or trained under any name
            in the catalogue.

    Raises:
        DeviceError: A figure that the compiler needs is missing; the message names its key.
        CompilerError: The compiler is not installed.
    """
    spec = _described(device)
    architecture = str(spec.compiler.get("target", ""))
    if not architecture:
        raise DeviceError(
            "key 'compiler_target' is missing, so no compiler can target it",
            where=f"device {device.name}",
            hint="give compiler_target (sm_90, v5e …) or a base in the device file; or use another "
            "lowering",
        )
    if spec.platform == "tpu":
        return _tpu_target(spec, architecture)
    return _gpu_target(spec, architecture)


def tpu_topology(generation: str, count: int) -> str:
    """Return the topology of a TPU with at least ``count`` devices, such as ``v5e:2x4``.

    Raises:
        DeviceError: The generation is unknown.
    """
    known = generations().tpus
    if generation not in known:
        raise DeviceError(
            f"compiler_target {generation!r} is not a TPU that libtpu supports",
            hint=f"one of {', '.join(known)}",
        )
    sides = list(known[generation]["host"])
    while math.prod(sides) * known[generation]["cores"] < count:
        # The shortest side grows, the last one first, as in slices of the cloud.
        side = min(range(len(sides)), key=lambda i: (sides[i], -i))
        sides[side] *= 2
    return f"{generation}:{'x'.join(map(str, sides))}"


def compiled_tpus() -> list[str]:
    """Return the TPUs of the catalogue that libtpu compiles for, and so has estimates for."""
    from ...devices.catalogue import device_names, find_device

    known = generations().tpus
    return [name for name in device_names() if find_device(name).compiler.get("target") in known]


def _described(device: DeviceSpec) -> DeviceSpec:
    """Return the device if it has a compiler target, else the catalogue's device of its name."""
    from ...devices.catalogue import find_device, in_catalogue

    if device.compiler.get("target"):
        return device
    names = (device.name, *device.aliases)
    return next((find_device(name) for name in names if in_catalogue(name)), device)


def _tpu_target(spec: DeviceSpec, architecture: str) -> CompileTarget:
    from ...devices.catalogue import in_catalogue

    tpu_topology(architecture, 1)
    notes = []
    if not in_catalogue(spec.name):
        notes.append(
            f"libtpu compiles for a TPU {architecture}: other figures of {spec.name} change the "
            "estimate, not the kernels"
        )
    compiler = find_compiler("tpu")
    return CompileTarget(
        spec.name,
        "tpu",
        architecture,
        generations().tpus[architecture].get("config", ""),
        spec.devices_per_node,
        (),
        compiler,
        tuple(notes),
    )


def _gpu_target(spec: DeviceSpec, architecture: str) -> CompileTarget:
    notes = []
    rules = generations().nearest.get(architecture, architecture)
    if rules != architecture:
        notes.append(
            f"no XLA compiler for {architecture} runs without the device: kernels follow the rules "
            f"of NVIDIA's {rules}, the nearest architecture, with the figures of {spec.name}"
        )
    number = _capability(rules, spec)
    figures = gpu_figures(spec)
    compiler = find_compiler("gpu")
    folder, used = _assembler(compiler, number)
    if used != number:
        notes.append(
            f"the installed CUDA assembler does not know sm_{number}: kernels follow the rules of "
            f"sm_{used}, the nearest it knows, with the figures of {spec.name}"
        )
    fields = " ".join(f"{name}: {value}" for name, value in figures.items())
    config = (
        f"gpu_device_info {{ {_COMMON} {fields} cuda_compute_capability {{ "
        f'major: {used // 10} minor: {used % 10} }} }} platform_name: "CUDA" {_LIBRARIES} '
        f'device_description_str: "{spec.name}"'
    )
    flags = (("xla_gpu_cuda_data_dir", str(folder)),)
    return CompileTarget(
        spec.name,
        "cuda",
        f"sm_{used}",
        config,
        spec.devices_per_node,
        flags,
        compiler,
        tuple(notes),
    )


def gpu_figures(spec: DeviceSpec) -> dict[str, float | int]:
    """Return the figures of a GPU for XLA, by XLA's field names, in SI units (clock in GHz).

    Raises:
        DeviceError: One is missing, or they contradict each other.
    """
    shared = {key: float(value) for key, value in spec.compiler.items() if key != "target"}
    known = {
        # The default of one core is a placeholder that would be mistaken for a figure.
        "core_count": 0 if "core_count" in spec.defaulted else spec.core_count,
        "lanes_per_core": spec.lanes_per_core,
        "boost_mhz": spec.clock_hz / 1e9,
        "hbm_bandwidth_gbps": spec.bandwidth,
        "memory_gb": spec.memory_bytes,
        "l2_mb": spec.cache_bytes,
        "shared_kb_per_core": spec.shared_bytes_per_core,
        **shared,
    }
    xla_fields = generations().xla_fields
    missing = [key for key in xla_fields.values() if not known.get(key)]
    if missing:
        raise DeviceError(
            f"the compiler needs {', '.join(missing)}: without them it would make other kernels",
            where=f"device {spec.name}",
            hint="add them to the device file, or give a base or a known compiler_target",
        )
    # In a device file that shrinks shared memory, the block limit still follows the capability.
    if known["shared_kb_per_block_optin"] > known["shared_kb_per_core"]:
        raise DeviceError(
            "shared_kb_per_block_optin is more than shared_kb_per_core",
            where=f"device {spec.name}",
            hint="a block runs on one core: give shared_kb_per_block_optin, too",
        )
    return {
        # The text format takes integers; the clock is the only fraction.
        field: round(known[key], 6) if field == "clock_rate_ghz" else round(known[key])
        for field, key in xla_fields.items()
    }


def _capability(architecture: str, spec: DeviceSpec) -> int:
    capability = capability_of(architecture)
    if capability is None:
        raise DeviceError(
            f"compiler_target {architecture!r} is not an architecture that XLA compiles for",
            where=f"device {spec.name}",
            hint=f"sm_90 and the like for NVIDIA; {', '.join(generations().nearest)} for AMD; "
            f"for a TPU one of {', '.join(generations().tpus)}, with platform: tpu",
        )
    return capability


def _assembler(compiler: Compiler, wanted: int) -> tuple[Path, int]:
    """Find the CUDA folder that supports an architecture, or else the nearest supported one."""
    assemblers = compiler.assemblers()
    if not assemblers:
        raise CompilerError(
            f"the CUDA assembler (ptxas) is missing in {compiler.folder or 'this environment'}",
            hint="run: opcast compilers install gpu",
        )
    for folder, known in assemblers:
        if wanted in known:
            return folder, wanted
    # At equal distance the newer architecture: its rules include the older ones'.
    choices = [(abs(n - wanted), -n, folder) for folder, known in assemblers for n in known]
    _, negative, folder = min(choices, key=lambda choice: choice[:2])
    return folder, -negative
