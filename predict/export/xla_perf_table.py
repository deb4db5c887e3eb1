"""Tables of products and collectives for XLA's latency-hiding scheduler.

XLA's speed-of-light estimator reads times of products from
``--xla_gpu_experimental_matmul_perf_table_path`` and of collectives inside a domain from
``--xla_gpu_experimental_collective_perf_table_path`` (``sol_latency_estimator.cc``). Both hold a
``DeviceHloInstructionProfiles`` (``hlo_op_profile.proto``) as text. XLA looks up the nearest
entry, and silently ignores a file that it cannot read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from ...common.errors import DeviceError, ProgramError
from ...features.devices.device import DeviceSpec
from ...features.devices.rules import capability_of
from ...features.ir.program import Program
from ...models.collectives.links import Links
from ...models.collectives.model import CollectiveModel
from ...models.collectives.table import RING_PERMUTE, XLA
from ...models.operators import OpModel

#: A product ``out[b, m, n] = lhs[b, m, k] · rhs[b, k, n]`` and its HLO type.
Shape = tuple[int, int, int, int, str]
#: Products of XLA's own tables (README of the XLA pack): powers of two in each dimension.
SIDES, BATCHES = (256, 512, 1024, 2048, 4096), (1, 2, 4)
#: HLO types that can be tabulated, with the model's name, XLA's name and bytes per element. XLA
#: computes f32 in TF32.
DTYPES = {"bf16": ("bf16", "BF16", 2), "f16": ("fp16", "F16", 2), "f32": ("tf32", "F32", 4)}
#: Collectives by XLA's opcode, with the model's names.
COLLECTIVES = {
    "all-gather": "all_gather",
    "all-reduce": "all_reduce",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "alltoall",
}
#: Bytes of the collectives: the range of XLA's own tables.
BYTES = tuple(2**i for i in range(10, 33))
#: Compute capability whose chips XLA distinguishes by the last word of the device's name.
_NAMED = "sm_100"


def own_shapes(dtypes: Sequence[str]) -> list[Shape]:
    """Return the products of XLA's own table, for each type."""
    return [
        (b, m, n, k, dtype)
        for dtype in dtypes
        for b in BATCHES
        for m in SIDES
        for n in SIDES
        for k in SIDES
    ]


def program_shapes(program: Program) -> list[Shape]:
    """Return the distinct products of a program, in order, without types that XLA does not support.

    Raises:
        ProgramError: The program has no such product.
    """
    found: dict[Shape, None] = {}
    for computation in program.computations.values():
        for op in computation.ops:
            if op.opcode != "dot":
                continue
            lhs, rhs = (computation.ops[o].type for o in op.operands[:2])
            dtype = lhs.dtype
            if dtype != rhs.dtype or dtype not in DTYPES:
                continue
            over = op.attrs.get("lhs_contracting_dims", ())
            batch = op.attrs.get("lhs_batch_dims", ())
            b = int(np.prod([lhs.shape[d] for d in batch], dtype=np.int64))
            k = int(np.prod([lhs.shape[d] for d in over], dtype=np.int64))
            if lhs.size and rhs.size:
                found[(b, lhs.size // (b * k), rhs.size // (b * k), k, dtype)] = None
    if not found:
        raise ProgramError(
            "the program has no product to tabulate", hint="types: " + ", ".join(DTYPES)
        )
    return list(found)


def keys_of(device: DeviceSpec) -> tuple[str, ...]:
    """Return the keys under which XLA looks up a device.

    Raises:
        DeviceError: It is not an NVIDIA GPU, or its clock is unknown.
    """
    target = str(device.compiler.get("target", ""))
    if device.platform != "gpu" or not target.startswith("sm_") or capability_of(target) is None:
        raise DeviceError(
            "XLA has performance tables only for NVIDIA GPUs",
            where=f"device {device.name}",
            hint="use a device with compiler_target sm_…",
        )
    if not device.clock_hz:
        raise DeviceError("boost_mhz is missing: XLA's table is in cycles", where=device.name)
    # Versions before 2026 do not use device names (hlo_op_profiles.cc).
    named = f"{_NAMED}_{device.name.split('-')[0].upper()}"
    return (target, named) if target == _NAMED else (target,)


def product_seconds(shapes: Sequence[Shape], device: DeviceSpec, model: OpModel) -> np.ndarray:
    """Predict products as in XLA's own benchmark; seconds, shape ``(n,)``."""
    model.devices[device.name] = device
    b, m, n, k, dtype = zip(*shapes, strict=True)
    rows = pd.DataFrame({"b": b, "m": m, "n": n, "k": k, "device": device.name, "source": "xla"})
    rows["dtype"] = [DTYPES[t][0] for t in dtype]
    rows["family"] = np.where(rows["b"] > 1, "bmm", "linear")
    rows["op"], rows["key"] = rows["family"], "xla/" + rows["family"]
    return model.predict(rows).latency


def matmul_table(
    shapes: Sequence[Shape], device: DeviceSpec, model: OpModel
) -> tuple[str, list[str]]:
    """Return the text of the table of products.

    XLA stores sizes in bytes without the type, so an f32 product of side 256 has the same key as a
    bf16 product of side 512; the first of such a pair is kept.

    Returns:
        The text, and notes on omitted products.

    Raises:
        DeviceError: See :func:`keys_of`.
    """
    keys = keys_of(device)
    kept: dict[tuple[int, ...], Shape] = {}
    for shape in shapes:
        b, *sides, dtype = shape
        kept.setdefault((b, *(side * DTYPES[dtype][2] for side in sides)), shape)
    notes = []
    if len(kept) < len(shapes):
        notes.append(
            f"{len(shapes) - len(kept)} products are omitted: XLA cannot distinguish them from "
            "products of another type with the same bytes per side"
        )
    chosen = list(kept.values())
    seconds = product_seconds(chosen, device, model)
    # XLA divides cycles by its clock and truncates to whole nanoseconds, at least one.
    cycles = np.ceil(np.maximum(seconds, 1e-9) * device.clock_hz).astype(np.int64)
    lines = [_product(shape, int(c)) for shape, c in zip(chosen, cycles, strict=True)]
    return _table(keys, lines), notes


def collective_table(
    device: DeviceSpec, worlds: Sequence[int], model: CollectiveModel
) -> tuple[str, pd.DataFrame]:
    """Return the text of the table of collectives inside a domain.

    Args:
        device: The device.
        worlds: Group sizes.
        model: Collective model.

    Returns:
        The text, and its rows: ``op`` (XLA's opcode), ``bytes`` (the larger of a device's input and
        output), ``world_size``, ``latency_s``.

    Raises:
        DeviceError: See :func:`keys_of`; or the links are unknown.
    """
    keys = keys_of(device)
    links = Links.from_spec(device)
    grid = [(op, size, world) for op in COLLECTIVES for world in worlds for size in BYTES]
    # XLA prices a permute by its pattern, regardless of the number of devices; a ring is one.
    grid += [("collective-permute", size, max(worlds)) for size in BYTES]
    rows = pd.DataFrame(grid, columns=["opcode", "bytes", "world_size"])
    rows["op"] = rows["opcode"].map(COLLECTIVES).fillna(RING_PERMUTE)
    asked = rows.assign(device=device.name, backend=XLA, dtype="f32", devices_per_node=max(worlds))
    asked["world_size"] = asked["world_size"].where(rows["op"] != RING_PERMUTE, 2)
    rows["latency_s"] = model.predict(asked, lambda name: links)["latency_s"].to_numpy()
    lines = [
        _collective(op, dtype, size, world, size / seconds)
        for dtype in ("F32", "BF16")
        for op, size, world, seconds in zip(
            rows["opcode"], rows["bytes"], rows["world_size"], rows["latency_s"], strict=True
        )
        if dtype == "F32" or op != "collective-permute"
    ]
    return _table(keys, lines), rows.drop(columns="op").rename(columns={"opcode": "op"})


def _table(keys: Iterable[str], lines: Sequence[str]) -> str:
    body = "\n".join(f"    entries {{ {line} }}" for line in lines)
    return "".join(f'entries {{\n  key: "{key}"\n  value {{\n{body}\n  }}\n}}\n' for key in keys)


def _shape(kind: str, sizes: Sequence[int]) -> str:
    order = reversed(range(len(sizes)))
    dims = " ".join(f"dimensions: {size}" for size in sizes)
    layout = " ".join(f"minor_to_major: {place}" for place in order)
    return f"shape {{ element_type: {kind} {dims} layout {{ {layout} }} }}"


def _product(shape: Shape, cycles: int) -> str:
    b, m, n, k, dtype = shape
    kind = DTYPES[dtype][1]
    head = [b] if b > 1 else []
    first = len(head)
    numbers = f"lhs_contracting_dimensions: {first + 1} rhs_contracting_dimensions: {first}"
    if head:
        numbers += " lhs_batch_dimensions: 0 rhs_batch_dimensions: 0"
    dot = f'name: "dot" opcode: "dot" {_shape(kind, [*head, m, n])}'
    operands = " ".join(
        f'operands {{ name: "{name}" opcode: "parameter" {_shape(kind, [*head, *sides])} }}'
        for name, sides in (("lhs", (m, k)), ("rhs", (k, n)))
    )
    said = f"instruction {{ {dot} dot_dimension_numbers {{ {numbers} }} }}"
    return f"{said} {operands} clock_cycles: {cycles}"


_WIDTHS: Mapping[str, int] = {"F32": 4, "BF16": 2}


def _collective(opcode: str, kind: str, size: int, world: int, rate: float) -> str:
    # The shape is the result's; for a reduce-scatter one device's share.
    elements = size // _WIDTHS[kind] // (world if opcode == "reduce-scatter" else 1)
    groups = (
        f"iota_collective_device_list {{ num_replica_groups: 1 num_devices_per_group: {world} "
        f"iota_reshape_dims: {world} iota_transpose_perm: 0 }} use_global_device_ids: true "
        "channel_id: 1"
    )
    if opcode == "collective-permute":
        pairs = [(i, (i + 1) % world) for i in range(world)]
        groups = "channel_id: 1 " + " ".join(
            f"source_target_pairs {{ source: {a} target: {b} }}" for a, b in pairs
        )
    said = f'instruction {{ name: "c" opcode: "{opcode}" {_shape(kind, [max(elements, 1)])} '
    return f"{said}{groups} }} network_throughput_bytes_per_sec: {max(1, round(rate))}"
