"""Lower JAX functions for absent devices, and attach the work of Pallas kernels to their calls.

Like ``jax_compat.py`` this uses unstable interfaces of JAX; any that a version lacks is skipped.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import jax
from jax._src.cudnn import fused_attention_stablehlo as _attention
from jax._src.interpreters import mlir as _jax_mlir
from jaxlib.mlir import ir

from ...common.types import JaxObject, MlirObject
from .jax_compat import backends_started
from .pallas_work import kernel_work
from .platforms import Platform, known_platform
from .program import WORK

#: cuDNN version assumed for an absent GPU: 9.13, which has all attention kernels that JAX calls.
_CUDNN_VERSION = 91300
#: Most ops between a kernel call and the results of JAX's rule: tuple elements and reshapes.
_MOST_BETWEEN = 4


@contextmanager
def assumed_device(platform: Platform) -> Iterator[None]:
    """Let JAX lower as if a device of the platform were present.

    JAX's rules for cuDNN attention, Pallas on TPUs and host callbacks query the device itself.

    Args:
        platform: Target platform; an unknown compute capability is taken as 90 (Hopper).
    """
    if backends_started() and known_platform(jax.default_backend()) == platform.name:
        yield
        return
    changes: list[tuple[JaxObject, str, object]] = [
        (_jax_mlir.ModuleContext, "get_backend", _client)
    ]
    if platform.name == "cuda":
        own = platform.capability or 90

        def tens(version: str) -> int:
            major, minor = map(int, version.split("."))
            return 10 * major + minor

        changes += [
            (_attention, "check_cudnn_version", lambda: _CUDNN_VERSION),
            (_attention, "check_compute_capability", lambda least: own >= tens(least)),
            (_attention, "is_cuda_compute_capability_equal", lambda other: own == tens(other)),
        ]
    elif platform.kind:
        from jax._src.pallas.mosaic import tpu_info

        changes += [
            (tpu_info, "get_device_kind", lambda: platform.kind),
            (tpu_info, "get_num_device_cores", lambda: 1),
        ]
    with _changed(changes):
        yield


def _client(context: object, optional: bool = False) -> _AbsentClient | None:
    return None if optional else _AbsentClient()


class _AbsentClient:
    """Replaces the client of an absent device; only lowered callbacks call it."""

    def make_python_callback_from_host_send_and_recv(self, *_: object) -> None:
        """Register nothing, since the program is not run."""


@contextmanager
def kernels_counted(platform: str) -> Iterator[None]:
    """Attach the counted work to the calls of Pallas kernels that are lowered in the block.

    Args:
        platform: Target platform by JAX's name.
    """
    # If the module is not imported, there are no Pallas kernels.
    pallas: JaxObject = sys.modules.get("jax._src.pallas.pallas_call")
    table: JaxObject = getattr(_jax_mlir, "_lowerings", {})
    primitive = getattr(pallas, "pallas_call_p", None)
    entry = table.get(primitive)
    if entry is None:
        yield
        return
    rule = getattr(entry, "rule", entry)

    def counted(ctx: JaxObject, *args: JaxObject, **params: JaxObject) -> JaxObject:
        results = rule(ctx, *args, **params)
        work = kernel_work(params, streams=platform == "tpu")
        if work is not None:
            _attach_work(results, " ".join(f"{figure:.17g}" for figure in work))
        return results

    table[primitive] = replace(entry, rule=counted) if hasattr(entry, "rule") else counted
    try:
        yield
    finally:
        table[primitive] = entry


def _attach_work(results: MlirObject, work: str) -> None:
    """Write the work into the custom call that makes the results, a few ops before them."""
    values = [v for v in jax.tree.leaves(results) if isinstance(v, ir.Value)]
    for _ in range(_MOST_BETWEEN):
        ops = [v.owner for v in values if isinstance(v.owner, ir.Operation | ir.OpView)]
        for op in ops:
            own = op.operation
            if own.name == "stablehlo.custom_call":
                key = "mhlo.frontend_attributes"
                entries: dict[str, ir.Attribute] = {WORK: ir.StringAttr.get(work)}
                if key in own.attributes:
                    given: MlirObject = own.attributes[key]
                    entries |= {a.name: a.attr for a in given}
                own.attributes[key] = ir.DictAttr.get(entries)
                return
        values = [operand for op in ops for operand in op.operation.operands]


@contextmanager
def _changed(changes: Sequence[tuple[JaxObject, str, object]]) -> Iterator[None]:
    """Replace attributes inside the block, skipping those that this JAX version lacks."""
    before = [(o, name, getattr(o, name)) for o, name, _ in changes if hasattr(o, name)]
    try:
        for owner, name, value in changes:
            if hasattr(owner, name):
                setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
