"""In which type, and in how many products of it, a matrix product is computed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import NamedTuple

from .program import DTYPE_BITS, PARTS, REDUCED, TensorType

#: An algorithm as HLO names it: ``dot_bf16_bf16_f32_x6``, in protocol buffers ``ALG_DOT_…``.
_ALGORITHM = re.compile(r"dot_(any_f8|[a-z0-9]+)_(?:any_f8|[a-z0-9]+)_[a-z0-9]+(?:_x(\d+))?")


class Arithmetic(NamedTuple):
    """How a matrix product or convolution is computed.

    Attributes:
        rate: Type that the matrix unit multiplies, a key of :attr:`DeviceSpec.peak_flops`.
        passes: Products of that type that one product of real numbers is made of.
        parts: 2 for complex numbers, which are pairs, else 1.
    """

    rate: str
    passes: int = 1
    parts: int = 1

    @property
    def times(self) -> int:
        """Real products in all: four for a complex one, the default of GEMM libraries."""
        return self.passes * self.parts**2

    def operand_bytes(self, lhs: TensorType, rhs: TensorType) -> tuple[float, float]:
        """Bytes of both operands as they are multiplied, never fewer than they have in memory.

        A complex product is a real one of twice the rows and twice the contraction: the first
        operand has each number twice.
        """
        if self.times == 1:
            return lhs.nbytes, rhs.nbytes
        width = DTYPE_BITS.get(self.rate, 32) / 8 * self.passes * self.parts
        left, right = lhs.size * self.parts * width, rhs.size * width
        return max(left, lhs.nbytes), max(right, rhs.nbytes)


def arithmetic(dtype: str, attrs: Mapping[str, object]) -> Arithmetic:
    """How a ``dot``, ``convolution`` or library call of one is computed.

    XLA runs f32 operands at precision ``default`` and ``high`` as TF32 where the device has it, and
    the parts of c64 alike (``GetBlasComputationType`` of XLA's gpu/matmul_utils.cc); only
    ``highest`` asks for true FP32. An algorithm decides alone, whatever the precision: it names the
    types, and after ``x`` the products that it splits one into.

    Args:
        dtype: Element type of the operands.
        attrs: Attributes of the instruction.
    """
    text = _text(attrs)
    parts, real = (2, PARTS[dtype]) if dtype in PARTS else (1, dtype)
    named = _ALGORITHM.search(text)
    if named is not None:
        kind, passes = named[1], int(named[2] or 1)
        # "any_f8" is the operands' own type.
        return Arithmetic(kind if kind == REDUCED or kind in DTYPE_BITS else real, passes, parts)
    exact = real != "f32" or "highest" in text
    return Arithmetic(real if exact else REDUCED, 1, parts)


def algorithm_name(stated: Mapping[str, object]) -> str:
    """HLO's name of an algorithm that StableHLO states by its types and its number of products."""
    kinds = (
        stated.get(f"{key}_type") for key in ("lhs_precision", "rhs_precision", "accumulation")
    )
    count = stated.get("num_primitive_operations", 1)
    return "_".join(("dot", *map(str, kinds))) + (f"_x{count}" if count != 1 else "")


def _text(attrs: Mapping[str, object]) -> str:
    # Attributes come as tuples (StableHLO), texts (HLO) or dictionaries (library calls): their
    # names are searched as text.
    config = attrs.get("backend_config")
    parts = [attrs.get("operand_precision", ""), attrs.get("algorithm", "")]
    if isinstance(config, dict):
        own = config.get("gemm_backend_config", config)
        parts.append(json.dumps(own.get("precision_config", "")) if isinstance(own, dict) else "")
    return " ".join(str(part) for part in parts).lower()
