"""Element types of HLO: widths, families, codes, other names, and the rate of their products."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

_NAMES = (
    "pred s1 u1 s2 u2 s4 u4 s8 u8 s16 u16 s32 u32 s64 u64 f4e2m1fn f6e2m3fn f6e3m2fn f8e3m4 f8e4m3 "
    "f8e4m3fn f8e4m3b11fnuz f8e4m3fnuz f8e5m2 f8e5m2fnuz f8e8m0fnu bf16 f16 f32 f64 c64 c128"
)
#: Bits per element, by HLO type name, which begins with them. XLA stores a ``pred`` in a byte.
DTYPE_BITS: dict[str, int] = {
    **{name: int(re.findall(r"\d+|pred", name)[0].replace("pred", "8")) for name in _NAMES.split()},
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


def matrix_rate(dtype: str, attrs: Mapping[str, object]) -> str:
    """Name of the matrix rate of a ``dot``, ``convolution`` or library call of one.

    XLA runs f32 operands at precision ``default`` and ``high`` as TF32 where the device has it;
    only ``highest``, or an algorithm of that name, asks for true FP32. Algorithms named
    ``…bf16_bf16…`` split the operands into bf16.

    Args:
        dtype: Element type of the operands.
        attrs: Attributes of the instruction.

    Returns:
        A key of :attr:`DeviceSpec.peak_flops`: ``dtype`` itself for every other type.
    """
    if dtype != "f32":
        return dtype
    # Attributes come as tuples (StableHLO), texts (HLO) or dictionaries (library calls): their
    # names are searched as text.
    text = _text(attrs)
    if "bf16_bf16" in text:
        return "bf16"
    # The algorithm of true FP32 is "dot_f32_f32_f32"; TF32's, "dot_tf32_tf32_f32", must not pass
    # for it.
    exact = "highest" in text or "f32_f32_f32" in text.replace("tf32", "")
    return "f32" if exact else REDUCED


def _text(attrs: Mapping[str, object]) -> str:
    config = attrs.get("backend_config")
    parts = [attrs.get("operand_precision", ""), attrs.get("algorithm", "")]
    if isinstance(config, dict):
        own = config.get("gemm_backend_config", config)
        parts.append(json.dumps(own.get("precision_config", "")) if isinstance(own, dict) else "")
    return " ".join(str(part) for part in parts).lower()
