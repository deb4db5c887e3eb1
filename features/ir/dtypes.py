"""Number formats: widths, families and codes of HLO's element types, and their other names.

The formats of published operator tables stand here too, since one name of them covers several HLO
types: that of the weights, and that whose matrix rate counts.
"""

from __future__ import annotations

from typing import NamedTuple

#: Bits per element, by HLO type name. XLA stores a ``pred`` in a byte.
DTYPE_BITS: dict[str, int] = {
    "pred": 8,
    "s1": 1,
    "u1": 1,
    "s2": 2,
    "u2": 2,
    "s4": 4,
    "u4": 4,
    "s8": 8,
    "u8": 8,
    "s16": 16,
    "u16": 16,
    "s32": 32,
    "u32": 32,
    "s64": 64,
    "u64": 64,
    "f4e2m1fn": 4,
    "f6e2m3fn": 6,
    "f6e3m2fn": 6,
    "f8e3m4": 8,
    "f8e4m3": 8,
    "f8e4m3fn": 8,
    "f8e4m3b11fnuz": 8,
    "f8e4m3fnuz": 8,
    "f8e5m2": 8,
    "f8e5m2fnuz": 8,
    "f8e8m0fnu": 8,
    "bf16": 16,
    "f16": 16,
    "f32": 32,
    "f64": 64,
    "c64": 64,
    "c128": 128,
    "token": 0,
    "opaque": 0,
}
#: Matrix rate of f32 operands that the compiler may round to TensorFloat-32; a device without such
#: a unit uses its f32 rate.
REDUCED = "tf32"
#: Types in a fixed order; a dtype's code is its position. The last one is the matrix rate
#: :data:`REDUCED` rather than an HLO type. Saved feature rows hold codes: append only.
DTYPES = (*DTYPE_BITS, REDUCED)
DTYPE_CODE = {name: code for code, name in enumerate(DTYPES)}

#: Families of types that run at similar rates. The last one, for tokens, is none of the others
#: (features/table/row.py counts on its place).
FAMILIES = ("float", "half", "float8", "integer", "pred", "complex", "none")
FLOAT, HALF, FLOAT8, INTEGER, PRED, COMPLEX, NONE = range(len(FAMILIES))


def dtype_family(dtype: str) -> int:
    """Return the family of an HLO type: FLOAT is f32 and f64, HALF is bf16 and f16."""
    if dtype in ("f32", "f64"):
        return FLOAT
    if dtype in ("bf16", "f16"):
        return HALF
    if dtype == "pred":
        return PRED
    if dtype in ("token", "opaque"):
        return NONE
    return {"f": FLOAT8, "c": COMPLEX}.get(dtype[0], INTEGER)


def _numpy_name(dtype: str) -> str:
    # HLO's s and u are int and uint in NumPy; small floats carry their format after the width, as
    # in float8_e4m3fn.
    if dtype[0] in "su":
        return ("int" if dtype[0] == "s" else "uint") + dtype[1:]
    if dtype in ("f16", "f32", "f64"):
        return "float" + dtype[1:]
    return f"float{dtype[1]}_{dtype[2:]}"


#: Names of HLO types in NumPy and in ml_dtypes, which JAX uses too.
NUMPY_NAMES = {dtype: _numpy_name(dtype) for dtype in DTYPE_BITS if dtype[0] in "suf"} | {
    "pred": "bool",
    "bf16": "bfloat16",
    "c64": "complex64",
    "c128": "complex128",
}
#: The inverse of :data:`NUMPY_NAMES`.
HLO_NAMES = {name: dtype for dtype, name in NUMPY_NAMES.items()}


class TableFormat(NamedTuple):
    """A number format of operator tables, which name it after its quantisation scheme.

    Attributes:
        weights: HLO type of the weights.
        rate: HLO type whose matrix rate counts: that of the wider operand.
        weight_bits: Stored bits of a weight, its share of its block's scale included.
        activation_bits: Bits of an activation as the matrix unit reads it.
        block: Weights that share a scale; 0 if the tables say of none.
    """

    weights: str
    rate: str
    weight_bits: float
    activation_bits: float
    block: int = 0


#: Formats without quantisation. Of two names of one HLO type the last is the usual one.
UNQUANTISED = ("tf32", "fp32", "fp16", "bf16")
#: Formats by the name that the tables use. A scale of 8 bits is shared by 16 values of NVFP4
#: (4 + 8 / 16 bits a value) and by 32 of the OCP microscaling formats (4 + 8 / 32). Scales of fp8
#: and int8, of a tensor, a channel or a large block, are too few to count. int4_wo counts as NVFP4.
TABLE_FORMATS: dict[str, TableFormat] = {
    "fp32": TableFormat("f32", "f32", 32.0, 32.0),
    # f32 operands that the matrix unit rounds to TF32: XLA's default for f32 products.
    "tf32": TableFormat("f32", "tf32", 32.0, 32.0),
    "fp16": TableFormat("f16", "f16", 16.0, 16.0),
    "bf16": TableFormat("bf16", "bf16", 16.0, 16.0),
    "fp64": TableFormat("f64", "f64", 64.0, 64.0),
    "int8": TableFormat("s8", "s8", 8.0, 8.0),
    "mxfp8": TableFormat("f8e4m3fn", "f8e4m3fn", 8.25, 8.25, block=32),
    "mxfp4": TableFormat("f4e2m1fn", "f4e2m1fn", 4.25, 4.25, block=32),
    "fp8": TableFormat("f8e4m3fn", "f8e4m3fn", 8.0, 8.0),
    "fp8_block": TableFormat("f8e4m3fn", "f8e4m3fn", 8.0, 8.0, block=128),
    "int8_sq": TableFormat("s8", "s8", 8.0, 8.0),
    # Weights alone are quantised in the "wo" and "w4a16" schemes: they are widened to bf16.
    "int8_wo": TableFormat("s8", "bf16", 8.0, 16.0),
    "nvfp4": TableFormat("f4e2m1fn", "f4e2m1fn", 4.5, 4.5, block=16),
    "int4_wo": TableFormat("s4", "bf16", 4.5, 16.0, block=128),
    "w4a16_mxfp4": TableFormat("f4e2m1fn", "bf16", 4.25, 16.0, block=32),
    "w4a8_mxfp4_mxfp8": TableFormat("f4e2m1fn", "f8e4m3fn", 4.25, 8.0, block=32),
}
