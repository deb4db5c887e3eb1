"""Matrix products of ATen operators: their sizes and formats.

Narrow formats are scaled eight- and four-bit operands (``_scaled_mm``), integers (``_int_mm``), or
weights only, which the kernel widens (``_weight_int8pack_mm``). Grouped products are experts of a
mixture, each with its own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, prod
from typing import NamedTuple

from ...common.errors import ProgramError
from ...features.cost.formats import ALIASES
from ...features.devices.device import DeviceSpec
from ...features.ir.torch.record import AtenCall, TensorUse
from ...features.ir.torch.table import is_solver
from .aten_traffic import NAMES, distinct

#: Products whose time depends on the unknown sparsity pattern of a matrix.
_SPARSE = ("aten._sparse_addmm", "aten._sparse_mm")


class Product(NamedTuple):
    """Products that an operator computes.

    Attributes:
        shape: Batch, rows, columns and depth.
        dtype: Format of the operands, as in operator tables.
        times: Real products per product; more than 1 for complex operands.
        launches: Host launches.
        unread: Bytes of operands that no kernel reads; negative for some that are no tensors.
    """

    shape: tuple[int, int, int, int]
    dtype: str
    times: int = 1
    launches: int = 1
    unread: float = 0.0


#: Matrix products, and the position of their first operand among the tensors; the second follows.
MATRICES = {name: at for at, names in NAMES["matrices"].items() for name in names}
#: Types that products on GPUs do not have, except those made for int8 (``addmm_cuda`` and
#: ``baddbmm_cuda`` are "not implemented for 'Int'").
_INTEGERS = ("int8", "uint8", "int16", "int32", "int64", "bool")
#: Elements per scale that identify a block-scaled product (DeepSeek-V3, 2024, section 3.3.2).
_BLOCK = 128
#: Product formats of operands of one type; for complex types those of their parts.
_FORMATS = {
    **{name: dtype for name, dtype in ALIASES.items() if dtype in ("bf16", "f16", "f32", "fp8")},
    "float64": "fp64",
    "complex32": "f16",
    "complex64": "f32",
    "complex128": "fp64",
    "int8": "int8",
    "uint8": "int8",
    "float4_e2m1fn_x2": "nvfp4",
}
#: Weight-only formats by type in memory: 32-bit words and unsigned bytes hold several 4-bit values.
_WEIGHTS = {"int8": "int8_wo", "int32": "int4_wo", "uint8": "int4_wo", "float8_e4m3fn": "fp8_wo"}
#: Values per element of packed weights: 4-bit values in bytes and words, 8-bit values in words.
_PACKED = (1, 2, 4, 8)
#: Real products per complex product.
_COMPLEX = 4
#: Kernels of a distance matrix computed by a product: squares and their sums, ones and joined
#: operands of both, the product, a clamp and a root (Distance.cpp).
_DISTANCE = 11


def product_of(call: AtenCall) -> Product | None:
    """Return the products of an operator; ``None`` if it multiplies no matrices."""
    library, _, name = call.name.removesuffix("_").partition(".")
    if library == "quantized" and name.startswith("linear"):
        return _quantized(call)
    if library != "aten":
        return _foreign(call)
    if name in MATRICES:
        return _matrices(call, MATRICES[name], batched=True)
    if name in NAMES["layers"]:
        return _matrices(call, 0, batched=False)
    if name in NAMES["grouped"]:
        return _grouped(call)
    known = _OTHERS.get(name)
    return known(call) if known else None


def multiplies(name: str) -> bool:
    """Return whether an ATen operator multiplies matrices."""
    own = name.removeprefix("aten.").removesuffix("_")
    return own in MATRICES or own in NAMES["layers"] or own in NAMES["grouped"] or own in _OTHERS


def check_priced(calls: Sequence[AtenCall], spec: DeviceSpec) -> None:
    """Refuse factorizations, solvers and sparse products, which are not memory passes.

    Products without a kernel of PyTorch on the device are refused too.

    Raises:
        ProgramError: The program contains such an operator; the message gives the line.
    """
    _check_formats(calls, spec)
    for call in calls:
        if is_solver(call.name) or call.name in _SPARSE:
            raise ProgramError(
                f"the time of {call.name} (linear algebra) is unknown for PyTorch's kernels",
                where=str(call.place) if call.place.file else "",
                hint="predict the program without it, and measure this operator separately",
            )


def _check_formats(calls: Sequence[AtenCall], spec: DeviceSpec) -> None:
    """Refuse products for which PyTorch has no kernel on a device.

    Raises:
        ProgramError: There is such a product; the message gives the line.
    """
    for call in calls:
        lacking, instead = _lacking(call, spec)
        if lacking:
            raise ProgramError(
                f"{call.name} {lacking}",
                where=f"{call.place.file}:{call.place.line}" if call.place.file else "",
                hint=f"PyTorch refuses it there too: {instead}",
            )


def _lacking(call: AtenCall, spec: DeviceSpec) -> tuple[str, str]:
    """Return what an operator lacks on a device, and what to do; empty if nothing."""
    name = call.name.removeprefix("aten.").removesuffix("_")
    wide = max(spec.matrix_peak("f16"), spec.matrix_peak("bf16"))
    scaled = name.startswith(("_scaled_mm", "_scaled_grouped_mm"))
    if scaled and spec.matrix_peak("f8e4m3fn") <= wide:
        return f"needs matrix units for fp8, and {spec.name} has none", "use bfloat16 operands"
    # Its kernel multiplies bfloat16 by matrix units (int4mm.cu).
    narrow = spec.runs_cuda and spec.matrix_peak("bf16") <= 1.5 * spec.vector_peak("f32")
    if narrow and name.startswith("_weight_int4pack_mm"):
        return f"needs matrix units for bfloat16, and {spec.name} has none", "use 16-bit weights"
    plain = name in MATRICES and not name.startswith("_") and spec.vendor in ("NVIDIA", "AMD")
    integer = next((t.dtype for t in call.inputs if t.dtype in _INTEGERS), "")
    if plain and spec.platform == "gpu" and integer:
        return f"has no kernel for {integer} on GPUs", "use floats, or int8 by torch._int_mm"
    return "", ""


def _matrices(call: AtenCall, at: int, *, batched: bool) -> Product:
    first, second = call.inputs[at : at + 2]
    a = first.shape
    depth = a[-1] if a else 1
    batch = prod(a[:-2]) if batched and len(a) > 2 else 1
    rows = prod(a) // max(batch * depth, 1)
    columns = prod(call.outputs[0].shape) // max(batch * rows, 1)
    if "sparse" in call.name:
        # Two of four weights are zero and are skipped.
        depth //= 2
    dtype, times = _format(call, first, second)
    return Product((batch, rows, columns, depth * _packed(first)), dtype, times)


def _packed(tensor: TensorUse) -> int:
    """Return the number of values in an element of a type."""
    return 2 if tensor.dtype.endswith("_x2") else 1


def _format(call: AtenCall, first: TensorUse, second: TensorUse) -> tuple[str, int]:
    """Return the format of a product by its operands' types, and its number of real products."""
    if first.dtype in ("bfloat16", "float16", "float32") and second.dtype in _WEIGHTS:
        return _WEIGHTS[second.dtype], 1
    own = _FORMATS.get(first.dtype, "f32")
    if own == "fp8":
        scales = [t for t in call.inputs if t not in (first, second)]
        if any(t.dtype == "float8_e8m0fnu" for t in scales):
            own = "mxfp8"
        elif any(len(t.shape) > 1 and t.shape[-1] == first.shape[-1] // _BLOCK > 1 for t in scales):
            own = "fp8_block"
    return own, _COMPLEX if first.dtype.startswith("complex") else 1


def _grouped(call: AtenCall) -> Product:
    """Return one product per expert that receives rows, with tokens drawn at random."""
    first, second = call.inputs[:2]
    a, b, depth = first.shape, second.shape, first.shape[-1] * _packed(first)
    dtype, times = _format(call, first, second)
    if len(a) == 3 == len(b):
        return Product((a[0], a[1], b[2], depth), dtype, times)
    if len(a) == len(b):
        # The gradient of the weights, which sums over the tokens.
        groups = call.outputs[0].shape[0]
        return Product((groups, a[0], b[1], ceil(depth / groups)), dtype, times)
    held, tokens = (second, a[0]) if len(b) == 3 else (first, b[-1])
    groups = held.shape[0]
    busy = max(1, round(distinct(groups, tokens)))
    each = ceil(tokens / busy)
    rows, columns = (each, b[2]) if held is second else (a[1], each)
    unread = held.bytes * (1.0 - busy / groups)
    return Product((busy, rows, columns, depth), dtype, times, unread=unread)


def _addbmm(call: AtenCall) -> Product:
    """Return a product per batch entry, added up sequentially (addbmm of LinearAlgebra.cpp)."""
    found = _matrices(call, 1, batched=True)
    batch, rows, _, depth = found.shape
    return found._replace(
        shape=(batch, rows, call.outputs[0].shape[-1], depth), launches=max(batch, 1)
    )


def _trilinear(call: AtenCall) -> Product:
    """Return a bilinear layer: per output, products with its matrix and with the other input."""
    first, weight, second = (t.shape for t in call.inputs[:3])
    rows = prod(first) // first[-1]
    outputs = weight[0] if len(weight) == 3 else 1
    dtype, times = _format(call, call.inputs[0], call.inputs[1])
    return Product((outputs, rows, second[-1], first[-1]), dtype, times, launches=3 * outputs)


def _euclidean(call: AtenCall) -> Product:
    """Return distances as a product of points extended by squares (``|a|² - 2ab + |b|²``)."""
    a, b = (t.shape for t in call.inputs[:2])
    shape = (prod(a[:-2]), a[-2], b[-2], a[-1] + 2)
    return Product(shape, _format(call, *call.inputs[:2])[0], launches=_DISTANCE)


def _conv_tbc(call: AtenCall) -> Product:
    """Return a channels-last convolution over time: one product per tap (ConvolutionTBC.cpp)."""
    weight, out = call.inputs[1].shape, call.outputs[0].shape
    dtype, times = _format(call, *call.inputs[:2])
    return Product(
        (1, prod(out[:-1]), out[-1], weight[0] * weight[1]), dtype, times, launches=weight[0]
    )


def _sparse_dense(call: AtenCall) -> Product:
    """Return a packed sparse matrix times a dense one; two of four values are skipped."""
    packed, dense = call.inputs[:2]
    depth, columns = dense.shape[-2:]
    rows = prod(call.outputs[0].shape) // max(columns, 1)
    return Product((1, rows, columns, depth // 2), *_format(call, dense, packed))


_OTHERS: dict[str, Callable[[AtenCall], Product]] = {
    "addbmm": _addbmm,
    "_trilinear": _trilinear,
    "_euclidean_dist": _euclidean,
    "conv_tbc": _conv_tbc,
    "_cslt_sparse_mm": _sparse_dense,
    "_sparse_semi_structured_mm": lambda call: _matrices_packed(call, 0),
    "_sparse_semi_structured_addmm": lambda call: _matrices_packed(call, 1),
}


def _matrices_packed(call: AtenCall, at: int) -> Product:
    """Return a sparse matrix stored with half of its columns, times a dense one."""
    first, dense = call.inputs[at], call.inputs[at + 2]
    columns = dense.shape[-1]
    rows = prod(call.outputs[0].shape) // max(columns, 1)
    return Product((1, rows, columns, dense.shape[-2] // 2), *_format(call, first, dense))


def _quantized(call: AtenCall) -> Product:
    """Return a quantized layer of a CPU (FBGEMM), whose packed weights are no tensor."""
    given, made = call.inputs[0].shape, call.outputs[0].shape
    depth, columns = given[-1], made[-1]
    shape = (1, prod(given[:-1]), columns, depth)
    return Product(shape, "int8", unread=-float(depth * columns))


def _foreign(call: AtenCall) -> Product | None:
    """Return another library's linear layer, recognized by shapes; ``None`` if it is not one.

    The result has the rows of the first operand; the weights hold one value (or several per
    element) for each pair of input depth and output column.
    """
    if not call.inputs or len(call.outputs) != 1:
        return None
    first, out = call.inputs[0], call.outputs[0]
    if len(first.shape) < 2 or not out.shape or out.shape[:-1] != first.shape[:-1]:
        return None
    depth, columns = first.shape[-1], out.shape[-1]
    for other in call.inputs[1:]:
        packed = depth * columns / max(prod(other.shape), 1)
        if len(other.shape) > 1 and other.shape != first.shape and packed in _PACKED:
            dtype, times = _format(call, first, other)
            return Product((1, prod(first.shape[:-1]), columns, depth), dtype, times)
    return None
