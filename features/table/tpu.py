"""TPU-specific features: memory spaces, and the 8 × 128 tiles that arrays are padded to.

A TPU's vector unit works on registers of 8 sublanes by 128 lanes, and memory holds arrays in tiles
of that shape: the minor dimension is padded to 128, the next one to 8, or to a power of two if it
is smaller (see XLA's "Tiled layout"). An array with a minor dimension of one takes 128 times its
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from ..cost.bytes import array_traffic
from ..devices.device import DeviceSpec, MemoryLevel
from ..ir.program import (
    DTYPE_BITS,
    LANES,
    ON_CHIP,
    SUBLANES,
    Computation,
    Op,
    TensorType,
    tiled_size,
)
from ..kernels.kernel import Kernel
from .columns import INDEX, TPU_COLUMNS, type_facts
from .roofline import compute_seconds, main_bytes, peaks
from .row import rows as kernel_rows
from .table import FeatureTable, feature_table, log_ratio, real_share

#: Bytes of a vector register: 8 × 128 values of 32 bits.
REGISTER = SUBLANES * LANES * 4
#: Cycles that libtpu estimates per vector register read or written: the median of its estimates for
#: kernels that only pass over registers (docs/features.md).
REGISTER_CYCLES = 8.0
#: Cycles of its estimates per register whose row is copied to a tile of its own: 22.5 on v5e, 20.9
#: on v6e, the same for five repeated arrays in f32 and bf16.
SPREAD_CYCLES = 22.0
#: Vector operations that libtpu counts for an f32 sine or cosine, whose angle it reduces exactly
#: (docs/features.md): more than ten times an ordinary transcendental.
ANGLE_FLOPS = 200.0
#: Ops that first reduce an angle to one period.
_ANGLES = frozenset(("sine", "cosine", "tan"))
#: Ops that pass on what a broadcast repeats.
_AS_IT_IS = frozenset(("copy", "bitcast", "reshape", "convert"))
_SMALL = 2**-10  # fraction of a floor that is added, so that ratios level off far below it

_AT = {name: place for place, name in enumerate(TPU_COLUMNS)}


class Tiles(NamedTuple):
    """Layout of an array in TPU memory.

    Attributes:
        lanes: Size of the minor dimension; 1 for a scalar.
        sublanes: Size of the next dimension; 1 if there is none.
        outer: Product of the other dimensions.
        padded_bytes: Bytes with both padded to tiles.
        order: Dimensions, minor to major, including dimensions of size one.
    """

    lanes: int
    sublanes: int
    outer: int
    padded_bytes: float
    order: tuple[int, ...]


@lru_cache(maxsize=65536)
def tiles(t: TensorType) -> Tiles:
    """Tile an array by default: 8 × 128, fewer sublanes if it has fewer rows, 1024 for vectors."""
    order = t.layout if t.layout is not None else tuple(range(len(t.shape) - 1, -1, -1))
    sizes = [t.shape[d] for d in order]
    lanes, sublanes = (*sizes, 1, 1)[:2]
    outer = prod(sizes[2:])
    # Only the two minor dimensions are tiled; the others repeat tiles.
    if len(sizes) < 2:
        # A vector is tiled as (1024) from 1024 elements on, and in lanes of 128 below that.
        step = SUBLANES * LANES if lanes >= SUBLANES * LANES else LANES
        elements = -(-lanes // step) * step
    else:
        elements = outer * tiled_size(lanes, sublanes)
    return Tiles(lanes, sublanes, outer, elements * DTYPE_BITS[t.dtype] / 8, tuple(order))


def tpu_feature_table(kernels: Sequence[Kernel], device: DeviceSpec) -> FeatureTable:
    """Compute a TPU's feature table: the features of every platform, then the TPU-specific ones.

    ``base_s`` is the sum of :func:`tpu_parts`, which is closer to a TPU compiler's estimates than
    the roofline: it adds up transfers and arithmetic, and counts arrays with their padding.

    Args:
        kernels: ``n`` kernels.
        device: A TPU.

    Raises:
        DeviceError: The device lists no peaks.
    """
    table = feature_table(kernels, device)
    rows, own = kernel_rows(kernels), tpu_rows(kernels)
    parts = tpu_parts(rows, own, device)
    base_s = base_seconds(parts)
    columns = _features(rows, own, parts, base_s, device)
    X = np.column_stack([table.X, *columns.values()]).astype(np.float32)
    return FeatureTable(X, (*table.names, *columns), table.roofline_s, table.bound, base_s)


@cache
def tpu_feature_names() -> tuple[str, ...]:
    """Return the names of the TPU-specific features, in order."""
    rows, own = np.zeros((0, len(INDEX))), np.zeros((0, len(TPU_COLUMNS)))
    return tuple(_features(rows, own, tpu_parts(rows, own, _ANY), np.zeros(0), _ANY))


def tpu_parts(rows: np.ndarray, own: np.ndarray, device: DeviceSpec) -> dict[str, np.ndarray]:
    """Return the components of a kernel's time, in seconds by name, each of shape ``(n,)``.

    ``main``: padded bytes to and from main memory over its bandwidth; ``registers``:
    :data:`REGISTER_CYCLES` per vector register read or written, by each core; ``compute``: products
    and other arithmetic at the peaks, :data:`ANGLE_FLOPS` per sine or cosine; ``start``: the
    device's launch floor.

    Args:
        rows: Platform-independent rows, shape ``(n, columns)``.
        own: :func:`tpu_rows` of the same kernels.
        device: A TPU.
    """
    c = dict(zip(TPU_COLUMNS, own.T, strict=True))
    products, other = compute_seconds(rows, device)
    return {
        "main": (c["main_in"] + c["main_out"]) / device.bandwidth,
        # A register at the on-chip rate takes one cycle, divided by the vector units of all cores,
        # which work in parallel.
        "registers": REGISTER_CYCLES * c["registers"] * REGISTER / _near_rate(device),
        "compute": products + other + ANGLE_FLOPS * c["angles"] / device.vector_peak("f32"),
        "start": np.full(len(own), device.floor),
    }


def base_seconds(parts: dict[str, np.ndarray]) -> np.ndarray:
    """Combine the parts, shape ``(n,)``: transfers overlap with registers, the rest adds up."""
    # DMA engines move data while the vector units work on data that arrived earlier.
    moved = np.maximum(parts["main"], parts["registers"])
    return np.asarray(moved + parts["compute"] + parts["start"])


def near_share(own: np.ndarray) -> np.ndarray:
    """Return the share of padded bytes that kernels read and write on the chip, shape ``(n,)``.

    Args:
        own: :func:`tpu_rows` of the kernels.
    """
    near, main = (
        own[:, _AT[f"{place}_in"]] + own[:, _AT[f"{place}_out"]] for place in ("near", "main")
    )
    return np.asarray(near / np.maximum(near + main, 1.0))


def sort_seconds(rows: np.ndarray, device: DeviceSpec) -> np.ndarray:
    """Return the seconds of sorts by a bitonic network, shape ``(n,)``; 0 for other kernels.

    ``2^l`` keys pass through ``l (l + 1) / 2`` stages of compare-exchange (Batcher, Sorting
    networks and their applications, 1968). Blocks of ``2^b`` keys that fit into VMEM are sorted in
    one pass over memory; each of the ``l - b`` merges above them takes one pass per stage that
    reaches beyond a block, and one for all others. A stage compares each pair once and selects each
    operand of each key; it overlaps with the transfers.

    Args:
        rows: Platform-independent rows, shape ``(n, columns)``.
        device: A TPU.
    """
    length, batch = rows[:, INDEX["sort_length"]], rows[:, INDEX["sort_batch"]]
    keys = np.maximum(length * batch, 1.0)
    moved = rows[:, INDEX["bytes_in"]] + rows[:, INDEX["bytes_out"]]
    levels = np.ceil(np.log2(np.maximum(length, 1.0)))
    # A block is read while another is written, so VMEM holds both keys and results.
    near = device.core_count * device.shared_bytes_per_core
    block = np.floor(np.log2(np.maximum(near * keys / np.maximum(moved, 1.0), 2.0)))
    merges = np.maximum(levels - block, 0.0)
    passes = 1.0 + merges * (merges + 1) / 2 + merges
    stages = levels * (levels + 1) / 2
    work = rows[:, INDEX["sort_comparator"]] / 2 + rows[:, INDEX["sort_operands"]]
    compute = stages * keys * work / device.vector_peak("f32")
    seconds = np.maximum(passes * main_bytes(rows, device) / device.bandwidth, compute)
    return np.asarray(np.where(length > 1.0, seconds, 0.0))


def grouped_seconds(rows: np.ndarray, device: DeviceSpec) -> np.ndarray:
    """Return the least seconds of convolutions in small groups, shape ``(n,)``; 0 for others.

    The compiler multiplies blocks of as many channels as a register has lanes, most of them by
    zeros, and a block fills its part of a systolic array: a depthwise convolution takes 128 times
    its FLOPs on arrays of 128 × 128 (docs/tpu.md).

    Args:
        rows: Platform-independent rows, shape ``(n, columns)``.
        device: A TPU.
    """
    matrix, _ = peaks(rows, device)
    channels = np.maximum(rows[:, INDEX["conv_channels"]], 1.0)
    own = channels / np.maximum(rows[:, INDEX["conv_groups"]], 1.0)
    padded = np.ceil(channels / LANES) * LANES / channels
    arrays = max(device.array_rows, LANES) * max(device.array_columns, LANES) / LANES**2
    small = (rows[:, INDEX["conv_grouped"]] > 0.0) & (own < LANES)
    flops = rows[:, INDEX["grouped_flops"]] * padded * arrays * LANES / own
    return np.where(small, flops / matrix, 0.0)


def spread_seconds(kernels: Sequence[Kernel], device: DeviceSpec) -> np.ndarray:
    """Return the seconds in which kernels copy rows to several sublanes, shape ``(n,)``.

    An array that is repeated along the dimension of the sublanes, as by ``jnp.repeat`` over heads
    or rows of an image, is taken apart row by row: every register of the operand's rows is copied
    to a tile of its own.

    Args:
        kernels: ``n`` kernels.
        device: A TPU.
    """
    registers = np.array([_spread(k) for k in kernels], np.float64)
    return np.asarray(SPREAD_CYCLES * registers / max(device.clock_hz, 1.0))


def _spread(kernel: Kernel) -> float:
    """Count the registers of rows that a kernel writes to several sublanes."""
    return sum(_repeated(own) for own in kernel.body.computations.values())


def _repeated(computation: Computation) -> float:
    """Count the registers of an operand that a computation returns repeated along sublanes."""
    op = computation.root_op
    while op.opcode in _AS_IT_IS and op.operands:
        op = computation.ops[op.operands[0]]
    dims = op.attrs.get("dimensions") if op.opcode == "broadcast" else None
    order = type_facts(op.type).order if dims else ()
    if not dims or len(order) < 2 or order[0] not in dims or order[1] in dims:
        return 0.0
    lanes = op.type.shape[order[0]]
    rows = computation.ops[op.operands[0]].type.size / lanes
    return float(rows * np.ceil(lanes / LANES))


def _near_rate(device: DeviceSpec) -> float:
    """Return on-chip memory bytes/s: a word per lane and cycle, the vector units' addition rate."""
    return 4.0 * device.vector_peak("f32")


def tpu_rows(kernels: Sequence[Kernel]) -> np.ndarray:
    """Return the device-independent inputs of TPU-specific features, shape ``(n, columns)``."""
    own = np.zeros((len(kernels), len(TPU_COLUMNS)))
    for row, kernel in zip(own, kernels, strict=True):
        _enter(row, kernel)
    return own


def _enter(row: np.ndarray, kernel: Kernel) -> None:
    entry = kernel.body.entry_computation
    read, written = array_traffic(entry.root_op, entry, kernel.body)
    # The general rule counts a reshape as free, but between two layouts it is a pass here.
    if kernel.opcode == "reshape":
        read, written = ([(t, float(t.nbytes)) for t, _ in arrays] for arrays in (read, written))
    for side, arrays in (("in", read), ("out", written)):
        for t, moved in arrays:
            # The touched part of an array is padded like the whole: slices along outer dimensions
            # are whole tiles. Slices across a tile move more than this.
            padded = moved * tiles(t).padded_bytes / max(t.nbytes, 1)
            place = "near" if t.memory_space in ON_CHIP else "main"
            row[_AT[f"{place}_{side}"]] += padded
            row[_AT[f"touched_{side}"]] += moved
            # An element takes a 32-bit lane of a register whatever its width: narrow types are
            # unpacked.
            row[_AT["registers"]] += padded / REGISTER * 32 / max(DTYPE_BITS[t.dtype], 1)
            row[_AT[f"n_{place}"]] += t.size > 1
    # Scalars do not reveal the layout.
    source = max((t for t, _ in read if t.size > 1), key=_size, default=None)
    result = max((t for t, _ in written), key=_size, default=None)
    if source is not None:
        row[_AT["largest_near"]] = source.memory_space in ON_CHIP
        row[_AT["in_lanes"] : _AT["in_outer"] + 1] = tiles(source)[:3]
    if result is not None:
        row[_AT["result_near"]] = result.memory_space in ON_CHIP
        row[_AT["out_lanes"] : _AT["out_outer"] + 1] = tiles(result)[:3]
    # Dimensions of both can be matched by number only for equal shapes.
    if source is not None and result is not None and source.shape == result.shape:
        before, after = tiles(source).order, tiles(result).order
        row[_AT["same_lanes"]] = before[:1] == after[:1]
        row[_AT["same_sublanes"]] = before[1:2] == after[1:2]
        # A transpose of the two minor dimensions moves data across lanes, which is costly on a TPU.
        row[_AT["lanes_to_sublanes"]] = before[:1] == after[1:2]
    _reduced(row, kernel.inner)
    row[_AT["angles"]] = sum(
        op.type.size
        for computation in kernel.body.computations.values()
        for op in computation.ops
        if op.opcode in _ANGLES
    )


def _size(t: TensorType) -> int:
    return t.nbytes


def _reduced(row: np.ndarray, inner: Computation) -> None:
    """Record along which tile dimensions the largest reduction runs."""
    largest: tuple[int, TensorType, Op] | None = None
    for op in inner.ops:
        if op.opcode == "reduce" and op.operands:
            t = inner.ops[op.operands[0]].results[0]
            if largest is None or t.size > largest[0]:
                largest = t.size, t, op
    if largest is None:
        return
    _, t, op = largest
    order, dims = tiles(t).order, op.attrs.get("dimensions", ())
    sizes = [t.shape[d] if d in dims else 0 for d in order]
    row[_AT["reduced_lanes"]], row[_AT["reduced_sublanes"]] = (*sizes, 0, 0)[:2]
    row[_AT["reduced_outer"]] = prod(size for size in sizes[2:] if size) if any(sizes[2:]) else 0


def _features(
    rows: np.ndarray,
    own: np.ndarray,
    parts: dict[str, np.ndarray],
    base: np.ndarray,
    device: DeviceSpec,
) -> dict[str, np.ndarray]:
    """Derive the features by name, each of shape ``(n,)``, dimensionless and finite."""
    c = dict(zip(TPU_COLUMNS, own.T, strict=True))
    # One nanosecond for a device described without a floor, to avoid a division by zero.
    floor = max(device.floor, 1e-9)
    near = (c["near_in"] + c["near_out"]) / _near_rate(device)
    padded_in, padded_out = c["main_in"] + c["near_in"], c["main_out"] + c["near_out"]
    return {
        # Time: the estimate, then its parts relative to the floor.
        "log_base_floor": log_ratio(base, floor),
        "log_padded_main_floor": log_ratio(parts["main"] + _SMALL * floor, floor),
        "log_padded_near_floor": log_ratio(near + _SMALL * floor, floor),
        "log_registers_floor": log_ratio(parts["registers"] + _SMALL * floor, floor),
        **{f"{name}_share": part / base for name, part in parts.items()},
        # Memory space: which arrays are on the chip.
        "near_share_in": c["near_in"] / (padded_in + 1.0),
        "near_share_out": c["near_out"] / (padded_out + 1.0),
        "largest_near": c["largest_near"],
        "result_near": c["result_near"],
        "log_n_main": np.log2(1.0 + c["n_main"]),
        "log_n_near": np.log2(1.0 + c["n_near"]),
        # Layout: padding, and whether dimensions keep their position in the tile.
        "padding_in": log_ratio(padded_in + 1.0, c["touched_in"] + 1.0),
        "padding_out": log_ratio(padded_out + 1.0, c["touched_out"] + 1.0),
        "same_lanes": c["same_lanes"],
        "same_sublanes": c["same_sublanes"],
        "lanes_to_sublanes": c["lanes_to_sublanes"],
        **{f"log_{name}": np.log2(1.0 + c[name]) for name in _AT if name.startswith("reduced")},
        **_sides(c),
        **_products(rows, parts, device, floor),
    }


def _sides(c: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    features = {}
    for side in ("in", "out"):
        lanes, sublanes = c[f"{side}_lanes"], c[f"{side}_sublanes"]
        features[f"log_{side}_lanes"] = np.log2(1.0 + lanes)
        features[f"log_{side}_sublanes"] = np.log2(1.0 + sublanes)
        features[f"log_{side}_outer_tiles"] = np.log2(1.0 + c[f"{side}_outer"])
        features[f"fill_{side}_lanes"] = real_share(lanes, LANES)
        features[f"fill_{side}_sublanes"] = real_share(sublanes, SUBLANES)
    return features


def _products(
    rows: np.ndarray, parts: dict[str, np.ndarray], device: DeviceSpec, floor: float
) -> dict[str, np.ndarray]:
    """Describe how products fill the systolic arrays."""
    m, n, k = (rows[:, INDEX[f"gemm_{dim}"]] for dim in "mnk")
    depth, width = device.array_rows or LANES, device.array_columns or LANES
    fill_n, fill_k = real_share(n, width), real_share(k, depth)
    # Time of the arithmetic including the padding of rows, columns and depth.
    padded = parts["compute"] / (real_share(m, SUBLANES) * fill_n * fill_k)
    return {
        "fill_n_array": fill_n,
        "fill_k_array": fill_k,
        "array_fill": np.log2(_array_fill(rows, device)),
        "log_padded_products_floor": log_ratio(padded + _SMALL * floor, floor),
        "padded_products_over_main": log_ratio(
            padded + _SMALL * floor, parts["main"] + _SMALL * floor
        ),
    }


def _array_fill(rows: np.ndarray, device: DeviceSpec) -> np.ndarray:
    """Return the useful fraction of the systolic arrays' work, shape ``(n,)``; 1 without a product.

    Columns and depth are padded to the array, and its weights change no faster than a column of
    rows passes; either operand may be the weights.
    """
    m, n, k = (rows[:, INDEX[f"gemm_{dim}"]] for dim in "mnk")
    depth, width = device.array_rows or LANES, device.array_columns or LANES
    # Weights are loaded row by row, `depth` cycles for a full array: with fewer than `depth` rows
    # of activations to stream meanwhile, the array waits for its next weights.
    usual = real_share(n, width) * np.minimum(m / depth, 1.0)
    swapped = real_share(m, width) * np.minimum(n / depth, 1.0)
    share = np.maximum(usual, swapped) * real_share(k, depth)
    # A floor before the logarithm; no real product fills the arrays less.
    return np.asarray(np.where(m > 0, np.maximum(share, 2**-10), 1.0))


_ANY = DeviceSpec("any", "tpu", {"f32": 1.0}, {"f32": 1.0}, (MemoryLevel(1.0, 1.0),), 1.0)
