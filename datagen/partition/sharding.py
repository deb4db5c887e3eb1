"""Chooses which dimension of each array of a workload is cut along which axis of a device mesh.

Axes are named by what they do: ``dp`` cuts the batch, ``fsdp`` the batch and the largest dimension
of every parameter, ``tp`` the products of attention and feed-forward: columns of those that fan
out, rows of those that bring the parts together (Shoeybi et al., Megatron-LM, 2019).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod

from ...common.errors import PlanError

#: Axes of a mesh in rank order, outermost first.
AXES = ("dp", "fsdp", "tp")
#: Parameters whose columns or rows are cut, by words of their path in the zoo.
_COLUMNS = ("query", "key", "value", "qkv", "gate", "up", "head", "fc1", "embedding", "words")
_ROWS = ("out", "down", "fc2")

Spec = tuple[str | tuple[str, ...] | None, ...]


def parse_mesh(text: str) -> dict[str, int]:
    """Parse ``fsdp=4,tp=2`` into sizes by axis, outermost first.

    Raises:
        PlanError: An axis is unknown or repeated, or a size is not a number from 1 on.
    """
    axes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        axis, _, size = part.strip().partition("=")
        if axis not in AXES or axis in axes or not size.isdigit() or int(size) < 1:
            raise PlanError(
                f"{part!r} is not an axis of a mesh",
                where="--mesh",
                hint=f"axes are {', '.join(AXES)}, each once with its size: fsdp=4,tp=2",
            )
        axes[axis] = int(size)
    if prod(axes.values()) < 2:
        raise PlanError(f"mesh {text!r} has no two devices", where="--mesh", hint="fsdp=4")
    return {axis: axes[axis] for axis in AXES if axis in axes}


def batch_spec(shape: tuple[int, ...], mesh: Mapping[str, int], where: str) -> Spec:
    """Cut an input along its batch dimension.

    Raises:
        PlanError: The batch is not a multiple of the axes' sizes.
    """
    axes = tuple(a for a in ("dp", "fsdp") if a in mesh)
    parts = prod(mesh[a] for a in axes)
    if not shape or not axes:
        return ()
    if shape[0] % parts:
        raise PlanError(
            f"a batch of {shape[0]} cannot be cut into {parts} parts",
            where=where,
            hint=f"make batch a multiple of {parts}",
        )
    return (axes,)


def parameter_spec(path: str, shape: tuple[int, ...], mesh: Mapping[str, int]) -> Spec:
    """Cut a parameter, or the optimiser's state for it.

    Args:
        path: Names of the tree's keys, such as ``Block_0/attention/query/kernel``.
        shape: Its shape; dimensions that an axis does not divide stay whole.
        mesh: Sizes by axis.
    """
    spec: list[str | None] = [None] * len(shape)
    tensor = _tensor_dimension(path, shape) if "tp" in mesh else None
    if tensor is not None and shape[tensor] % mesh["tp"] == 0:
        spec[tensor] = "tp"
    if "fsdp" in mesh:
        free = [i for i in range(len(shape)) if spec[i] is None and shape[i] % mesh["fsdp"] == 0]
        # By convention the largest dimension that divides.
        if free:
            spec[max(free, key=lambda i: shape[i])] = "fsdp"
    return tuple(spec)


def cache_spec(shape: tuple[int, ...], mesh: Mapping[str, int], where: str) -> Spec:
    """Cut a cache of keys or values (batch, positions, heads, head size): batch and heads.

    Tensor parallelism keeps the keys and values of a head on the rank that makes them (Pope et al.,
    Efficiently Scaling Transformer Inference, 2022, section 3.3). Heads that ``tp`` does not divide
    stay whole.

    Raises:
        PlanError: The batch is not a multiple of the axes' sizes.
    """
    spec: list[str | tuple[str, ...] | None] = [None] * len(shape)
    spec[:1] = batch_spec(shape, mesh, where) or (None,)
    if "tp" in mesh and len(shape) > 2 and shape[-2] % mesh["tp"] == 0:
        spec[-2] = "tp"
    return tuple(spec)


def _tensor_dimension(path: str, shape: tuple[int, ...]) -> int | None:
    words = set(re.split(r"[^a-z0-9]+", path.lower()))
    # Biases and scales stay whole. Rows are checked first, since a path may hold words of both.
    if len(shape) < 2:
        return None
    if words & set(_ROWS):
        return len(shape) - 2
    return len(shape) - 1 if words & set(_COLUMNS) else None
