"""Writes a workload in each StableHLO container."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax import export

    from .workload import Workload


def serialize(workload: Workload, format: str, platform: str | None = None) -> bytes:
    """Return a workload's program as bytes of the given format (see ``registry.export``)."""
    if format == "text":
        return workload.mlir(platform=platform).encode()
    if format == "bytecode":
        module: Any = workload.lower(platform).compiler_ir("stablehlo")
        buffer = io.BytesIO()
        module.operation.write_bytecode(buffer)
        return buffer.getvalue()
    exported = _exported(workload, platform)
    # ``mlir_module_serialized`` is a portable artifact with StableHLO's compatibility guarantees.
    if format == "portable":
        return bytes(exported.mlir_module_serialized)
    return bytes(exported.serialize())


def _exported(workload: Workload, platform: str | None) -> export.Exported:
    """The program over flat arguments and results.

    JAX cannot serialize the classes of optimizer states, so trees are flattened.
    """
    import jax
    from jax import export

    flat, _ = jax.tree.flatten(workload.abstract_args)
    starts = [
        len(jax.tree.leaves(workload.abstract_args[:i]))
        for i in range(len(workload.abstract_args) + 1)
    ]
    donated = [i for n in workload.donate_argnums for i in range(starts[n], starts[n + 1])]

    def main(*values: object) -> tuple[object, ...]:
        args = workload.unflatten(list(values))
        return tuple(jax.tree.leaves(workload.function(*args)))

    main.__name__ = workload.function.__name__
    backend = platform or jax.default_backend()
    return export.export(
        jax.jit(main, donate_argnums=donated, keep_unused=True),
        # jax.export names platforms, not backends.
        platforms=["cuda" if backend == "gpu" else backend],
    )(*flat)
