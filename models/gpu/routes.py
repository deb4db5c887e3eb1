"""Decides how a GPU kernel is priced: product, convolution, attention, or pass over memory.

Depthwise convolutions have a separate route (:func:`.memory_passes.depthwise_seconds`). Notes
describe the route of each kernel, and the limitations of the model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import pandas as pd

from ...features.devices.device import DeviceSpec
from ...features.ir.program import DTYPE_BITS, DTYPES
from ...features.kernels.kernel import Kernel
from ...features.operators.physics import fitted
from ...features.table.columns import INDEX
from ...features.table.row import rows
from ...features.table.row_products import attention_numbers
from .library_calls import Call, call_notes, call_of
from .memory_passes import COLUMN_BYTES, MemoryParams, Traffic, pass_seconds

PRODUCT, CONV, ATTENTION, PASS, OTHER = "product", "conv", "attention", "pass", "other"
LIBRARY = "library"
DEPTHWISE = "depthwise"
#: Kinds of kernel that only pass over memory.
_PASSES = frozenset(("fusion", "reduce", "copy", "gather_scatter"))
#: Words in the targets of library calls that only pass over memory as well.
_PASS_TARGETS = ("norm", "softmax")
#: Bytes of a sector, the smallest transfer between L2 cache and memory on NVIDIA GPUs (CUDA C++
#: Best Practices Guide, coalesced access to global memory).
SECTOR = 32.0

# Extra memory time of a pass relative to a stream, by access pattern. The published rows are plain
# streams, so these are engineering estimates, not fitted: a tiled transpose through shared memory
# loses some bandwidth; strided elements transfer whole sectors; indexed rows hit DRAM pages at
# random; atomic updates read what they write.
TRANSPOSED, STRIDED, GATHERED, SCATTERED = 0.25, 1.0, 0.3, 1.0
#: Fewest elements of a row for reductions and softmax over it to count as long: a warp holds this
#: many in one vector register per thread (32 threads of 8 elements).
LONG_ROW = 256
#: Extra traffic of passes over long rows that do not fit the cache, relative to a stream.
LONG_ROWS = fitted("passes").long_rows
#: Elements of a row beyond which the extra bytes stop growing: the longest measured rows of
#: PyTorch's softmax (1.7 to 2.7 times a stream; latency pack). Longer rows are logits, which those
#: steps do not determine (2 % of the smallest one's time); 14 losses on an H100 with rows of
#: 128,256 and more leave no room for more than a stream (docs/gpu.md).
LONGEST_ROW = 16_384

#: Share of long rows in the bytes of passes above which a note mentions them.
_MUCH = 0.2
_PRODUCTS = {PRODUCT: "a product", CONV: "a convolution, a product of"}


@dataclass(slots=True)
class Described:
    """Routes and features of ``n`` kernels.

    Attributes:
        route: Route of each kernel, object, shape ``(n,)``.
        row: Device-independent feature rows, shape ``(n, len(COLUMNS))``.
        flops: FLOPs of each kernel without those on the holes of dilated inputs, shape ``(n,)``.
        attention: Parameters of attention calls by position.
        library: Factorisations and Fourier transforms by position.
    """

    route: np.ndarray
    row: np.ndarray
    flops: np.ndarray
    attention: dict[int, dict[str, int]]
    library: dict[int, Call]

    def column(self, name: str) -> np.ndarray:
        """A column of the rows, shape ``(n,)``."""
        return self.row[:, INDEX[name]]

    @property
    def rate(self) -> np.ndarray:
        """Name of the matrix rate of each kernel, object, shape ``(n,)``."""
        names = np.array(DTYPES, object)
        return np.asarray(names[self.column("matrix_dtype").astype(np.intp)])


def describe(kernels: Sequence[Kernel], device: DeviceSpec) -> Described:
    """Find the route of each kernel on a device, and compute its feature row."""
    row = rows(kernels)
    attention = {i: a for i, k in enumerate(kernels) if (a := attention_of(k)) is not None}
    library = {i: call for i, k in enumerate(kernels) if (call := call_of(k)) is not None}
    sized = row[:, INDEX["gemm_m"]] > 0
    depthwise = sized & _one_channel_a_group(row)
    # MIOpen has no direct kernels of these for chips since MI300X, which are closer to products
    # with one column per group: the median error on 60 rows of the MI300X (published-kernels pack,
    # MIOpen of 2023 and 2024) is 85 % this way and 97 % as direct kernels; on MI100 to MI250X it is
    # 340 to 440 % this way and 44 to 52 % as direct kernels.
    if device.rules.untuned_convolutions:
        depthwise &= ~filter_gradients(row)
    route = np.full(len(kernels), OTHER, object)
    for i, kernel in enumerate(kernels):
        if i in attention:
            route[i] = ATTENTION
        elif i in library:
            route[i] = LIBRARY
        elif depthwise[i]:
            route[i] = DEPTHWISE
        elif kernel.kind in _PASSES or _is_pass_call(kernel):
            route[i] = PASS
        # Only kernels with known product dimensions can be looked up; the rest falls to OTHER.
        elif kernel.kind == "gemm" and sized[i]:
            route[i] = PRODUCT
        elif kernel.kind == "conv" and sized[i]:
            route[i] = CONV
    flops = np.array([kernel.flops for kernel in kernels], np.float64)
    return Described(route, row, flops, attention, library)


def _one_channel_a_group(row: np.ndarray) -> np.ndarray:
    """Mask of depthwise convolutions and their gradients, shape ``(n,)``."""
    depthwise = row[:, INDEX["conv_depthwise"]] > 0
    # Written out, the gradient of the filter has the channels as groups of its batch, each of which
    # makes one feature.
    batches = (row[:, INDEX["conv_batch_grouped"]] > 0) & (row[:, INDEX["gemm_n"]] == 1)
    return np.asarray(depthwise | batches)


def filter_gradients(row: np.ndarray) -> np.ndarray:
    """Mask of depthwise convolutions that are filter gradients, shape ``(n,)``."""
    calls = row[:, INDEX["conv_window_over_output"]] > 0
    return np.asarray(calls | (row[:, INDEX["conv_batch_grouped"]] > 0))


def _is_pass_call(kernel: Kernel) -> bool:
    target = str(kernel.op.attrs.get("target", "")).lower()
    return kernel.kind == "custom_call" and any(word in target for word in _PASS_TARGETS)


def attention_of(kernel: Kernel) -> dict[str, int] | None:
    """Parameters of a fused attention call (cuDNN's ``fmha``); ``None`` for any other kernel.

    The dimension numbers of queries times keys identify the sizes: batch and heads are batch
    dimensions, the head size is contracted, and positions are the rest.
    """
    op = kernel.op
    target = str(op.attrs.get("target", ""))
    # XLA names these calls __cudnn$fmhaSoftmax, __cudnn$fmhaSoftmaxBackward and so on; queries,
    # keys and values are the first three operands.
    if "fmha" not in target or len(op.operands) < 3:
        return None
    entry = kernel.body.entry_computation.ops
    query, key = (entry[i].type for i in op.operands[:2])
    numbers = attention_numbers(op)
    if numbers is None:
        return None
    sides = []
    for contracted, batch, shape in zip(
        numbers[:2], numbers[2:], (query.shape, key.shape), strict=True
    ):
        # Layouts other than a permutation of (batch, heads, positions, head) are not supported; the
        # call then takes the roofline.
        if len(batch) != 2 or len(contracted) != 1 or len(shape) != 4:
            return None
        free = prod(shape) // prod(shape[d] for d in (*batch, *contracted))
        sides.append(([shape[d] for d in batch], shape[contracted[0]], free))
    mask = op.config("cudnn_fmha_backend_config").get("mask_type", "")
    (lead, size, queries), ((_, kv_heads), _, keys) = sides
    return {
        "batch": lead[0],
        "q_heads": lead[1],
        "kv_heads": kv_heads,
        "head_dim": size,
        # The first product does not show the size of a value, which only differs from that of a key
        # in latent attention.
        "v_head_dim": size,
        "q_len": queries,
        "kv_len": keys,
        "window": 0,
        "causal": int("CAUSAL" in str(mask).upper()),
        "backward": "Backward" in target,
    }


def products(described: Described, at: np.ndarray) -> pd.DataFrame:
    """Dimensions of the products, or of the implicit GEMMs of convolutions, at some positions.

    Returns:
        ``b m n k`` (at least 1), ``rate``, ``width`` (bytes of an operand's element), ``times``
        (FLOPs of all products of a kernel over those of its largest), ``dense`` (share of the
        multiplications that are not on holes of a dilated input), ``run`` (channels of a
        convolution's input), ``extra`` (bytes read besides the two operands), ``moved`` (bytes
        read and written) and ``stored`` (share of the bytes of operands and result that are moved,
        below 1 where the kernel itself widens what it reads).
    """
    row, rate = described.row[at], described.rate[at]
    size = {
        c: np.maximum(row[:, INDEX[f"gemm_{long}"]], 1.0)
        for c, long in (("b", "batch"), ("m", "m"), ("n", "n"), ("k", "k"))
    }
    # Multiply and add count as two FLOPs.
    main = 2.0 * size["b"] * size["m"] * size["n"] * size["k"]
    width = np.array([DTYPE_BITS.get(r, 32) / 8 for r in rate])
    operands = row[:, INDEX["gemm_lhs_bytes"]] + row[:, INDEX["gemm_rhs_bytes"]]
    result = size["b"] * size["m"] * size["n"] * width
    # Less is read where operands are narrower in memory, or broadcast from less.
    read = np.minimum(row[:, INDEX["bytes_in"]], operands)
    # The gradient of a strided convolution's input is a convolution of a dilated array, whose holes
    # libraries skip: they compute one small convolution per position within the stride.
    dilated = row[:, INDEX["conv_dilates_input"]] > 0
    whole = np.maximum(row[:, INDEX["dense_flops"]], 1.0)
    dense = np.where(dilated, np.clip(described.flops[at] / whole, 0.0, 1.0), 1.0)
    return pd.DataFrame(
        {
            **{c: v.astype(np.int64) for c, v in size.items()},
            "rate": rate,
            "width": width,
            "times": np.maximum(row[:, INDEX["dense_flops"]] / main, 1.0),
            "dense": dense,
            "run": np.maximum(row[:, INDEX["conv_channels"]], 1.0),
            "extra": np.maximum(row[:, INDEX["bytes_in"]] - operands, 0.0),
            "moved": row[:, INDEX["bytes_in"]] + row[:, INDEX["bytes_out"]],
            "stored": (read + result) / (operands + result),
        }
    )


def traffic(row: np.ndarray) -> Traffic:
    """Traffic of kernels that pass over memory.

    Args:
        row: Feature rows, shape ``(n, len(COLUMNS))``.
    """

    def c(name: str) -> np.ndarray:
        return np.asarray(row[:, INDEX[name]])

    elements = np.maximum(c("elements_max"), 1.0)
    width = np.maximum(c("dtype_bits"), 8.0) / 8
    # Rows shorter than a sector transfer the rest of the sector: extra traffic.
    dragged = c("moved_gathered") * width * _drag(c("gather_run"), width)
    dragged = dragged + c("moved_scattered") * width * _drag(c("scatter_length"), width)
    moved = c("bytes_in") + c("bytes_out")
    # A penalty applies to the share of the largest array with that access pattern.
    share = {
        n: np.minimum(c(f"moved_{n}") / elements, 1.0)
        for n in ("transposed", "strided", "gathered", "scattered")
    }
    # Reductions that keep the minor dimension read columns: coalesced, but with partial sums to
    # combine. A kernel may reduce less than it moves, such as one that sums the parts of a split
    # product while writing them into a cache.
    column = (c("reduce_length") > 1) & (c("reduce_minor") == 0)
    summed = np.minimum(c("reduce_length") * np.maximum(c("reduce_kept"), 1.0), elements)
    penalty = (
        1.0
        + TRANSPOSED * share["transposed"]
        + STRIDED * share["strided"]
        + GATHERED * share["gathered"]
        + COLUMN_BYTES * column * summed / np.maximum(moved, 1.0)
        + SCATTERED * share["scattered"] * (c("scatter_combines") > 0)
    )
    updates = c("scatter_rows") * c("scatter_length") * (c("scatter_combines") > 0)
    # Integer work is a part of the others.
    work = sum(
        row[:, i]
        for name, i in INDEX.items()
        if name.startswith("work_") and name != "work_integer"
    )
    work = np.asarray(work + c("dense_flops"))
    # Engineering estimate: data-centre chips run f64 at about half the f32 rate, others far slower.
    wide = np.where(c("dtype_wide") > 0, 2.0, 1.0)
    exponentials = c("work_transcendental") >= elements
    arrays = c("n_inputs") - c("n_scalar_inputs")
    # A plain sum or maximum of one array streams: the steps are explained without its share.
    # Kernels that also write the rows hold them meanwhile, as normalizations do.
    reduced = (c("reduce_minor") > 0) & (c("reduce_length") >= LONG_ROW)
    reduced &= c("out_elements") < elements / 2.0
    reduced &= exponentials | (c("bytes_in") >= 1.5 * c("operand_bytes_max"))
    # A softmax gradient reduces nothing itself: it takes exponentials of every element, and
    # combines two arrays with two numbers per row. Gates have fewer of either.
    normalised = (c("broadcast_minor") > 0) & (c("out_minor") >= LONG_ROW)
    normalised &= exponentials & (arrays >= 4)
    length = np.where(reduced, c("reduce_length"), c("out_minor"))
    longest = np.minimum(LONGEST_ROW / np.maximum(length, 1.0), 1.0)
    again = LONG_ROWS * moved * longest * (reduced | normalised)
    integers = np.minimum(c("work_integer"), work)
    queued = updates / np.maximum(c("out_elements"), 1.0)
    return Traffic(moved + dragged, again, work * wide, integers * wide, penalty, queued)


def irregular(row: np.ndarray) -> np.ndarray:
    """Mask of kernels that do more than stream, unlike any published row, shape ``(n,)``."""
    names = ("moved_transposed", "moved_strided", "moved_gathered", "moved_scattered")
    moves_irregularly = np.zeros(len(row), bool)
    for name in names:
        moves_irregularly |= row[:, INDEX[name]] > 0
    return (
        moves_irregularly | (row[:, INDEX["window_size"]] > 1) | (row[:, INDEX["dense_flops"]] > 0)
    )


def _drag(run: np.ndarray, width: np.ndarray) -> np.ndarray:
    """Unused bytes moved per used byte if contiguous runs are shorter than a sector."""
    length = np.maximum(run, 1.0) * width
    return np.asarray(np.maximum(SECTOR / length, 1.0) - 1.0)


def route_notes(kernels: Sequence[Kernel], device: DeviceSpec, params: MemoryParams) -> list[str]:
    """Describe the published operator that each kernel is predicted from, in one sentence."""
    described = describe(kernels, device)
    moves = traffic(described.row)
    times = pass_seconds(moves, device, params)
    notes = []
    for i, kernel in enumerate(kernels):
        route = str(described.route[i])
        if route in _PRODUCTS:
            row = products(described, np.array([i])).iloc[0]
            sizes = f"b={row.b} m={row.m} n={row.n} k={row.k}"
            text = f"estimated as {_PRODUCTS[route]} {sizes} at the rate of {row.rate}"
        elif route == ATTENTION:
            own = described.attention[i].items()
            text = "estimated as attention " + " ".join(f"{name}={value}" for name, value in own)
        elif route == DEPTHWISE:
            text = "estimated by the loads and the traffic of a direct kernel"
        elif route == PASS:
            parts = {"launch": times.launch, "memory": times.memory, "arithmetic": times.vector}
            text = "estimated as a memory-bound kernel: " + ", ".join(
                f"{name} {seconds[i] * 1e6:.1f} µs" for name, seconds in parts.items()
            )
            if moves.again[i] > 0:
                most = 1 + moves.again[i] / moves.moved[i]
                text += f"; of long rows, at up to {most:.1f} times a stream's traffic"
        elif route == LIBRARY:
            text = "estimated by the steps of its algorithm, one after the other"
        else:
            text = "no published operator is like it: roofline"
        notes.append(f"{kernel.name}: {text}")
    return notes


def limit_notes(
    kernels: Sequence[Kernel], device: DeviceSpec, known: Collection[str]
) -> tuple[str, ...]:
    """Limits of the predictions on a device, for the user.

    Args:
        kernels: The kernels.
        device: Device they run on.
        known: Names of the devices with published rows.
    """
    notes = ["kernels are predicted from published library operators, not from XLA's own"]
    if device.name not in known:
        notes.append(
            f"no published rows of {device.name}, so intervals are wider: errors on devices that "
            f"were left out in turn (rows exist of {', '.join(sorted(known))})"
        )
    described = describe(kernels, device)
    moves = traffic(described.row)
    runs = np.array([k.multiplicity for k in kernels], float)
    passes = runs * (described.route == PASS)
    long = passes * (moves.again > 0)
    if (long * moves.moved).sum() > _MUCH * (passes * moves.moved).sum():
        most = 1 + (long * moves.again).sum() / (long * moves.moved).sum()
        notes.append(
            f"softmax over long rows, its gradient and reductions of such rows are priced at up to "
            f"{most:.1f} times the time of other passes of equal bytes: whole training steps took "
            f"{1 + LONG_ROWS:.1f} times over rows of scores, losses over rows of logits no more "
            "than a stream; no such kernel was measured alone"
        )
    notes += call_notes(described.library)
    sized = described.column("gemm_m") > 0
    # Devices before Ampere have no TF32: their "tf32" rate is the f32 rate, and the note would be
    # wrong.
    has_unit = device.matrix_peak("tf32") > device.matrix_peak("f32")
    if has_unit and bool((described.rate[sized] == "tf32").any()):
        notes.append(
            "f32 products at default precision run as TF32 on this device, as XLA does; ask for "
            "precision 'highest' for true FP32"
        )
    return tuple(notes)
