"""Compile for absent devices through unstable interfaces of JAX, used in no other module.

It runs only in the compile process (``worker.py``), where the plug-ins are on the path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jax._src.lib import xla_client  # type: ignore[attr-defined]
from jax.experimental import topologies
from jaxlib import _jax, lapack

from ....common.types import JaxObject, JsonMapping
from ...ir.mlir.bindings import make_context, parse_module

#: Memory statistics of the compiler that are kept.
_MEMORY = (
    "peak_memory_in_bytes",
    "argument_size_in_bytes",
    "output_size_in_bytes",
    "alias_size_in_bytes",
    "temp_size_in_bytes",
    "generated_code_size_in_bytes",
)


class Compiled(NamedTuple):
    """A compiled module.

    Attributes:
        hlo: Optimised, scheduled module text.
        memory: The compiler's memory statistics in bytes, by name; empty if it has none.
    """

    hlo: str
    memory: dict[str, int]


def open_devices(platform: str, topology: str, target_config: str = "") -> list[object]:
    """Open the devices of an absent machine.

    Args:
        platform: ``cuda`` or ``tpu``.
        topology: For a GPU ``slices x hosts x devices per host``; for a TPU a name such as
            ``v5e:2x2``.
        target_config: For a GPU, XLA's text description of it; for a TPU the name of its chip
            configuration (``megacore``: two cores as one device), or empty.

    Raises:
        Exception: Any error of the plug-in for an unsupported description.
    """
    if platform == "tpu":
        chips = {"chip_config_name": target_config} if target_config else {}
        description = topologies.get_topology_desc(platform="tpu", topology_name=topology, **chips)
    else:
        description = topologies.get_topology_desc(
            platform=platform, topology=topology, target_config=target_config
        )
    return list(description.devices)


def compiler_version(devices: Sequence[JaxObject]) -> str:
    """Return the version that the plug-in reports, in one line."""
    return " ".join(str(devices[0].client.platform_version).split())


def compile_absent(
    devices: Sequence[JaxObject], program: bytes, replicas: int, partitions: int, flags: JsonMapping
) -> Compiled:
    """Compile a module for devices from :func:`open_devices`.

    Args:
        devices: At least ``replicas * partitions``.
        program: StableHLO as text or bytecode.
        replicas: Number of replicas.
        partitions: Number of partitions; with more than one, the compiler's partitioner runs.
        flags: Options of XLA by name without dashes.

    Raises:
        Exception: Any error of the compiler for a program that it cannot compile.
    """
    used = list(devices[: replicas * partitions])
    context = make_context()
    module = parse_module(program, context)
    options = _options(used, replicas, partitions, flags)
    # One partitioner runs: Shardy for programs in its dialect, GSPMD for `mhlo.sharding`.
    options.executable_build_options.use_shardy_partitioner = partitions > 1 and _has_shardy(module)
    with context:
        executable = used[0].client.compile(
            module, executable_devices=_jax.DeviceList(tuple(used)), compile_options=options
        )
    return Compiled(executable.hlo_modules()[0].to_string(), _memory(executable))


#: Targets of custom calls with a registered stand-in.
_stand_ins: set[str] = set()


def register_stand_in(target: str) -> bool:
    """Let programs compile that call an unavailable library; they are never run.

    Args:
        target: Target of a custom call in a program for CUDA.

    Returns:
        Whether it is new; one that did not help is not registered again.
    """
    if target in _stand_ins:
        return False
    _stand_ins.add(target)
    # Any handler with the same interface: the compiler only checks that there is one.
    _, handler, _ = lapack.registrations()["cpu"][0]
    for version in (0, 1):
        xla_client.register_custom_call_target(target, handler, "CUDA", version)
    return True


def _options(
    used: Sequence[JaxObject], replicas: int, partitions: int, flags: Mapping[str, object]
) -> JaxObject:
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = replicas, partitions
    options.env_option_overrides = list(flags.items())
    build = options.executable_build_options
    build.num_replicas, build.num_partitions = replicas, partitions
    build.use_spmd_partitioning = partitions > 1
    ids = np.array([device.id for device in used]).reshape(replicas, partitions)
    build.device_assignment = xla_client.DeviceAssignment.create(ids)
    return options


def _has_shardy(module: JaxObject) -> bool:
    # Constants are elided: only dialect names are searched.
    return "sdy." in module.operation.get_asm(large_elements_limit=8)


def _memory(executable: JaxObject) -> dict[str, int]:
    try:
        stats = executable.get_compiled_memory_stats()
    except Exception:  # a plug-in may not have them; the program is compiled all the same
        return {}
    return {name: int(getattr(stats, name)) for name in _MEMORY if hasattr(stats, name)}
