"""Memory traffic of PyTorch's kernels that go by indices, sort or transform.

Gradients that accumulate rows by index first sort the indices with CUB's radix sort, so that no two
blocks add to one row (EmbeddingBackwardKernel.cu and Indexing.cu of PyTorch). The number of
distinct rows depends on data: indices are assumed to be random.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log2, prod

from ...common.files import own_data
from ...common.types import JsonObject
from ...features.ir.torch.record import AtenCall
from ...models.gpu.routes import SECTOR
from .aten_streams import Use

#: Names of operators by what their kernels do.
NAMES = own_data("predict/operator/aten.yaml")
#: Operators that read only the rows of a table that an index selects.
LOOKUPS = NAMES["lookups"]
#: Operators that read selected rows of a table and add them up.
BAGS = ("aten._embedding_bag", "aten._embedding_bag_forward_only")
_EMBEDDING = "aten.embedding_dense_backward"
_MASKED, _PUT_FLAT = "aten.masked_scatter", "aten.put"
#: Maximum indices for which the gradient of an embedding is one kernel without a sort
#: (embedding_dense_backward_cuda).
_UNSORTED = 3072
#: Rows of one index that a thread adds up into a partial sum (NROWS_PER_THREAD).
_ROWS_A_THREAD = 10
#: Key bits per pass of the radix sort (Adinets and Merrill, Onesweep, arXiv:2206.01784, 2022).
_DIGIT_BITS = 8
#: Bits of the transform size that one pass over memory handles in shared memory: cuFFT does 4,096
#: complex f32 values in a kernel; the largest prime factor without Bluestein's algorithm (cuFFT's
#: documentation, "Accuracy and Performance"); passes that Bluestein's algorithm counts as.
#: Engineering estimates.
_FFT_BITS, _SMALL_PRIME, _BLUESTEIN = 12, 127, 6.0
#: Operators that are priced by the passes of a radix sort.
SORTS = ("aten.sort", "aten.topk", "aten.median", "aten.nanmedian", "aten.kthvalue", "aten.mode")
#: Selection from a row by one block: bits per pass, passes that then gather the selected values,
#: and threads per block (SortingRadixSelect.cuh, TensorTopK.cu).
_SELECT_BITS, _GATHERS, _SELECTORS = 2, 2, 1024
#: Maximum number of rows, and the length from which several blocks share a row (TensorTopK.cu);
#: the length for more rows.
_SHARED = ((20, 20000), (40, 10000), (80, 8000), (200, 5000), (800, 3000), (4000, 800))
_SHARED_MANY = 400
#: Bytes of an index, and of an index with its position.
_INDEX, _PAIR = 8.0, 16.0


def read_traffic(call: AtenCall) -> float | None:
    """Return the bytes that a look-up moves; ``None`` for any other operator."""
    if call.name in BAGS:
        return float(call.outputs[0].bytes + looked_up(call) + call.inputs[1].bytes)
    if call.name in LOOKUPS:
        written = sum(t.bytes for t in call.outputs)
        return float(written + looked_up(call) + sum(t.bytes for t in call.inputs[1:]))
    return None


def looked_up(call: AtenCall) -> float:
    """Return the bytes of a table that a look-up reads at least once."""
    return min(float(call.inputs[0].bytes), _selected(call))


def looked_up_again(call: AtenCall) -> tuple[float, float]:
    """Return the bytes of a table that indices select again, and that lie between two times.

    Look-ups read them and scatters also write them. Indices along an inner dimension stay within
    one part of the table at a time.
    """
    name = call.name.removesuffix("_")
    scatters = name in NAMES["scatters"] or name in NAMES["slices"] or name == _PUT_FLAT
    if not (call.name in LOOKUPS or call.name in BAGS or scatters):
        return 0.0, 0.0
    table = call.inputs[0]
    times = _times(call, name) if scatters else 1
    dims = [n for n in call.numbers if isinstance(n, int) and not isinstance(n, bool)]
    parts = prod(table.shape[: dims[0] % max(len(table.shape), 1)]) if dims else 1
    return times * max(_selected(call) - table.bytes, 0.0), table.bytes / max(parts, 1)


def queued_updates(call: AtenCall) -> float:
    """Return the mean number of atomic additions to an element of a table, which take turns."""
    name = call.name.removesuffix("_")
    adds = name in NAMES["scatters"] or name in NAMES["slices"] or name == _PUT_FLAT
    if not adds or _times(call, name) < 2:
        return 0.0
    return prod(_chosen(call, name)) / max(prod(call.inputs[0].shape), 1)


def selecting(uses: Sequence[Use], calls: Sequence[AtenCall]) -> tuple[Use, ...]:
    """Add to the uses of a kernel what its operators' indices select again."""
    found = list(uses)
    for call in calls:
        again, between = looked_up_again(call)
        if not again:
            continue
        memory = call.inputs[0].memory
        at = next((i for i, use in enumerate(found) if use.memory == memory), None)
        if at is not None:
            found[at] = found[at]._replace(again=found[at].again + again, between=between)
    return tuple(found)


def _selected(call: AtenCall) -> float:
    """Return the bytes that indices select: whole sectors of narrow rows, each as often as it is.

    For operators that write by index, of a table that is written once.
    """
    table, *indices = call.inputs
    name = call.name.removesuffix("_")
    if call.name in BAGS:
        return float(prod(indices[0].shape) * table.bytes / max(table.shape[0], 1))
    if call.name in LOOKUPS:
        values = float(call.outputs[0].bytes)
        count = max((prod(t.shape) for t in indices if t.dtype != "bool"), default=0)
        narrow = count > 0 and values / count < SECTOR
        narrow = _scatters(call) if call.name == "aten.gather" else narrow
    else:
        shape = _chosen(call, name)
        count, values = prod(shape), table.bytes / max(prod(table.shape), 1) * prod(shape)
        narrow = name == _PUT_FLAT or _scatters(call)
    return float(count * SECTOR if narrow else values)


def write_traffic(call: AtenCall) -> list[float] | None:
    """Return the bytes of each kernel of an operator that writes by index; ``None`` for others."""
    if call.name == _EMBEDDING:
        return _embedding(call)
    name = call.name.removesuffix("_")
    if name in NAMES["puts"]:
        return [*_copy(call), *_put(call)]
    if name == _MASKED:
        return [*_copy(call), *_masked(call)]
    if name in NAMES["scatters"] or name in NAMES["slices"] or name == _PUT_FLAT:
        return [*_copy(call), _scattered(call, name)]
    return None


def _scattered(call: AtenCall, name: str) -> float:
    """Return the bytes of one kernel that writes elements of a table, or adds by atomics."""
    table, index = call.inputs[:2]
    values = table.bytes / max(prod(table.shape), 1) * prod(_chosen(call, name))
    read = values * bool(len(call.inputs) > 2 and call.inputs[2].shape)
    return float(index.bytes + read + _times(call, name) * looked_up(call))


def _chosen(call: AtenCall, name: str) -> tuple[int, ...]:
    """Return the shape of what an operator writes by index."""
    table, index = call.inputs[:2]
    source = call.inputs[2].shape if len(call.inputs) > 2 else ()
    if name not in NAMES["slices"]:
        return index.shape
    # A slice is filled with a single value.
    along = call.whole(0)
    return source or (*table.shape[:along], prod(index.shape), *table.shape[along:][1:])


def _times(call: AtenCall, name: str) -> int:
    """Return how often an operator that writes by index touches an element: to add, twice."""
    own = (NAMES["scatters"] | NAMES["slices"]).get(name, 2 if True in call.numbers else 1)
    assert isinstance(own, int), name
    return own


def _masked(call: AtenCall) -> list[float]:
    """Return the bytes of a scan of the mask (source positions), and of the selection itself.

    PyTorch's ``launch_masked_scatter_kernel`` (IndexKernel.cu). How much of the source is selected
    depends on data; all that there is room for is assumed.
    """
    table, mask, source = call.inputs[:3]
    places = _INDEX * prod(table.shape)
    taken = min(source.bytes, table.bytes)
    return [mask.bytes + places, float(mask.bytes + places + 2 * table.bytes + taken)]


def _copy(call: AtenCall) -> list[float]:
    """Return the copy of an operator that is not in place; autograd's work in place."""
    if call.name.endswith("_") or call.phase == "backward":
        return []
    return [2.0 * call.outputs[0].bytes]


def _scatters(call: AtenCall) -> bool:
    """Return whether an index selects along the last dimension, so that values are scattered."""
    dims = [n for n in call.numbers if isinstance(n, int) and not isinstance(n, bool)]
    rank = max(len(call.inputs[1].shape), len(call.inputs[0].shape), 1)
    return bool(dims) and dims[0] % rank == rank - 1


def _embedding(call: AtenCall) -> list[float]:
    index, table = call.inputs[1], call.outputs[0]
    count, rows = prod(index.shape), max(table.shape[0], 1)
    row = table.bytes / rows
    written = distinct(rows, count) * row
    if count <= _UNSORTED:
        return [float(table.bytes), count * row + index.bytes + 2 * written]
    # Partial sums are f32; the kernels that count and place them move a few numbers per row.
    partial = max(distinct(rows, count), count / _ROWS_A_THREAD) * 4.0 * prod(table.shape[1:])
    segments = [_PAIR * count, *[_PAIR * distinct(rows, count)] * 3]
    return [
        float(table.bytes),
        *_sorted(count, rows),
        *segments,
        count * row + _PAIR * count + partial,
        partial + written,
    ]


def _put(call: AtenCall) -> list[float]:
    table, values = call.outputs[0], call.inputs[-1]
    count = max(prod(call.inputs[1].shape), 1)
    index = float(sum(t.bytes for t in call.inputs[1:-1]))
    # All elements of the values; a broadcast tensor has fewer in memory.
    size = float(table.bytes / max(prod(table.shape), 1) * prod(values.shape))
    if True not in call.numbers:
        return [index + 2.0 * size]
    rows = max(table.bytes * count / max(size, 1.0), 1.0)
    written = distinct(rows, count) * size / count
    # Negative indices are wrapped, and all are combined into a linear index: two kernels.
    linear = [index + _INDEX * count, 2 * _INDEX * count]
    return [*linear, *_sorted(count, rows), size + _PAIR * count + 2 * written]


def _sorted(count: int, rows: float) -> list[float]:
    """Return the bytes of the kernels of a radix sort: positions, histograms, sums, passes."""
    passes = max(1, ceil(log2(max(rows, 2.0)) / _DIGIT_BITS))
    return [_INDEX * count, _INDEX * count, 2.0**_DIGIT_BITS * 4, *[2 * _PAIR * count] * passes]


def transform_traffic(call: AtenCall) -> tuple[float, int]:
    """Return bytes and launches of a Fourier transform by cuFFT: passes per dimension.

    PyTorch copies the input of a real-valued result, since cuFFT overwrites it, and normalizes in a
    separate pass (SpectralOps.cpp).
    """
    given, made = call.inputs[0], call.outputs[0]
    dims, norm = call.sizes(0), call.whole(1)
    largest = max(given.bytes, made.bytes)
    passes = 0.0
    for dim in dims:
        size = max(given.shape[dim], made.shape[dim])
        # Bluestein's algorithm: two transforms of at least twice the size and three products.
        passes += _BLUESTEIN if _largest_prime(size) > _SMALL_PRIME else 1.0
        passes += max(0, ceil(log2(max(size, 2)) / _FFT_BITS) - 1)
    real = call.name == "aten._fft_c2r"
    moved = 2.0 * passes * largest + 2.0 * real * given.bytes + 2.0 * (norm != 0) * made.bytes
    return moved, len(dims) + real + (norm != 0)


def _largest_prime(number: int) -> int:
    found, factor = 1, 2
    while factor * factor <= number:
        while number % factor == 0:
            found, number = factor, number // factor
        factor += 1
    return max(found, number)


def sort_traffic(call: AtenCall) -> tuple[float, int]:
    """Return bytes and launches of a sort, or of a selection followed by a sort.

    A radix sort such as CUB's makes one pass per key byte: over values with their indices for a
    sort, over the values alone to select the largest. Modes, and medians of all values, sort.
    """
    given = call.inputs[0]
    count = prod(given.shape)
    width = given.bytes / max(count, 1)
    if _selects(call):
        return (width * given.bytes, 2 if call.name == "aten.topk" else 1)
    return width * 2.0 * (given.bytes + _INDEX * count), 1


def selection(call: AtenCall) -> JsonObject:
    """Return ``serial`` and ``swept`` of a selection by one GPU block per row; else nothing.

    These are the dependent loads of a thread, and the bytes of all passes.
    """
    given = call.inputs[0]
    if not _selects(call) or (call.name == "aten.topk" and _shared(call)):
        return {}
    bits = 8 * given.bytes // max(prod(given.shape), 1)
    passes = bits // _SELECT_BITS + _GATHERS
    return {"serial": passes * ceil(row_of(call) / _SELECTORS), "swept": passes * given.bytes}


def _selects(call: AtenCall) -> bool:
    """Return whether an operator selects values of rows by their bits, without a sort."""
    whole = len(call.outputs) == 1
    return call.name not in ("aten.sort", "aten.mode") and not whole


def row_of(call: AtenCall) -> int:
    """Return the elements of a row that a selection, sort or scan goes over."""
    given, made = call.inputs[0].shape, call.outputs[0].shape
    if call.name.removesuffix("_") in NAMES["scans"]:
        return given[call.whole(0) % len(given)] if given else 1
    if len(given) != len(made) or prod(given) != prod(made):
        # What it selects for each row; of topk some of the row.
        differ = [a for a, b in zip(given, made, strict=False) if a != b]
        return differ[0] if len(given) == len(made) else prod(given) // max(prod(made), 1)
    return (1, *given)[-1]


def _shared(call: AtenCall) -> bool:
    """Return whether several blocks select from a row."""
    row = row_of(call)
    rows = prod(call.inputs[0].shape) // max(row, 1)
    return row >= next((least for most, least in _SHARED if rows <= most), _SHARED_MANY)


def distinct(rows: float, count: float) -> float:
    """Return the expected number of distinct rows among ``count`` random indices."""
    return rows * (1.0 - (1.0 - 1.0 / rows) ** count) if rows > 1 else 1.0


def scan_steps(call: AtenCall) -> int:
    """Return a thread's dependent loads in a scan over an outer dimension; else 0.

    A thread walks one column; the compiler cannot exclude that a written result is read next
    (``tensor_kernel_scan_outer_dim`` of ScanUtils.cuh). Scans of rows, and of a single column, run
    in parallel.
    """
    shape = call.inputs[0].shape if call.inputs else ()
    if call.name.removesuffix("_") not in NAMES["scans"] or len(shape) < 2:
        return 0
    along = call.whole(0) % len(shape)
    inner = along == len(shape) - 1 or shape[along] == prod(shape)
    return 0 if inner else shape[along]


def evaluated(call: AtenCall) -> bool:
    """Return whether a call is a batch norm with given moments, which reads its operand once."""
    return call.name == "aten.native_batch_norm" and call.numbers[-3] is False


def channel_blocks(call: AtenCall) -> int:
    """Return the blocks (one per channel) of a batch norm that computes its moments; else 0.

    PyTorch calls cuDNN for images, but its own kernels, which split the channels, for images with
    the channels last (``_batch_norm_impl_index`` of Normalization.cpp).
    """
    own = call.inputs[0].shape if call.inputs else ()
    norm = "batch_norm" in call.name and len(own) > 2 and not evaluated(call)
    return own[1] if norm and not any(t.channels_last for t in call.inputs[:2]) else 0
