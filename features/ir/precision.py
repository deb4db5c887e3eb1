"""Type in which a matrix product is computed, and the number of products of it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

from .program import (
    DTYPE_BITS,
    INTEGER,
    PARTS,
    REDUCED,
    Computation,
    Op,
    Program,
    TensorType,
    dtype_family,
)

#: An algorithm by HLO's name: ``dot_bf16_bf16_f32_x6``, in protocol buffers ``ALG_DOT_…``.
_ALGORITHM = re.compile(r"dot_(any_f8|[a-z0-9]+)_(?:any_f8|[a-z0-9]+)_[a-z0-9]+(?:_x(\d+))?")
#: Ops with a precision attribute.
_PRODUCTS = frozenset(("dot", "ragged-dot", "convolution"))
#: Number of bf16 products by which a TPU computes one of f32, by precision. These algorithms appear
#: in the output of its compiler (libtpu of JAX 0.10).
_TPU_PASSES = {"highest": 6, "high": 3}
_INTEGERS = frozenset(t for t in DTYPE_BITS if dtype_family(t) == INTEGER)
_BELOW_A_BYTE = frozenset(t for t in _INTEGERS if DTYPE_BITS[t] < 8)
_SMALL_FLOATS = frozenset(t for t in DTYPE_BITS if t.startswith(("f4", "f6", "f8")))


class Arithmetic(NamedTuple):
    """How a matrix product or convolution is computed.

    Attributes:
        rate: Type that the matrix unit multiplies, a key of :attr:`DeviceSpec.peak_flops`.
        passes: Products of that type per product of real numbers.
        parts: 2 for complex numbers, which are pairs, else 1.
    """

    rate: str
    passes: int = 1
    parts: int = 1

    @property
    def times(self) -> int:
        """Real products in total: four per complex one, the default of GEMM libraries."""
        return self.passes * self.parts**2

    def operand_bytes(self, lhs: TensorType, rhs: TensorType) -> tuple[float, float]:
        """Return the bytes of both operands as multiplied, at least those that they have in memory.

        A complex product is computed as a real one with twice the rows and twice the contraction,
        for which the first operand is stored twice.
        """
        if self.times == 1:
            return lhs.nbytes, rhs.nbytes
        width = DTYPE_BITS.get(self.rate, 32) / 8 * self.passes * self.parts
        left, right = lhs.size * self.parts * width, rhs.size * width
        return max(left, lhs.nbytes), max(right, rhs.nbytes)


def arithmetic(dtype: str, attrs: Mapping[str, object]) -> Arithmetic:
    """Derive how a ``dot``, a ``convolution`` or a library call for one is computed.

    At precision ``default`` and ``high``, XLA runs f32 operands and the parts of c64 as TF32 where
    the device has it (``GetBlasComputationType`` of XLA's gpu/matmul_utils.cc); only ``highest``
    means FP32. Libraries do so only on CUDA, but Triton kernels (``IsTf32Allowed`` of its dot
    algorithms) also on MI300, whose units support it. An algorithm overrides the precision: its
    name gives the types and, after ``x``, the number of products per product.

    Args:
        dtype: Element type of the operands.
        attrs: Attributes of the instruction.
    """
    text = _text(attrs)
    parts, real = (2, PARTS[dtype]) if dtype in PARTS else (1, dtype)
    named = _ALGORITHM.search(text)
    if named is not None:
        kind, passes = named[1], int(named[2] or 1)
        # "any_f8" means the type of the operands.
        return Arithmetic(kind if kind == REDUCED or kind in DTYPE_BITS else real, passes, parts)
    exact = real != "f32" or "highest" in text
    return Arithmetic(real if exact else REDUCED, 1, parts)


def as_computed(program: Program, platform: str, narrow: frozenset[str] | None = None) -> Program:
    """Copy a program, adding algorithms to products that the platform computes in another way.

    Consumers of kernels do not know the platform. A TPU computes an f32 product at ``highest`` as
    six products of bf16 and at ``high`` as three; other platforms widen formats without hardware
    support (:func:`widened`).

    Args:
        program: Not changed.
        platform: ``cpu``, ``gpu`` or ``tpu``; empty if unknown.
        narrow: As for :func:`widened`; ``None`` if a compiler has widened the operands already.
    """
    if platform != "tpu" and narrow is None:
        return program
    changed = {}
    for name, comp in program.computations.items():
        stated = {
            place: algorithm
            for place, op in enumerate(comp.ops)
            if op.opcode in _PRODUCTS and (algorithm := _implied(op, comp, platform, narrow))
        }
        if stated:
            ops = list(comp.ops)
            for place, algorithm in stated.items():
                attrs = {k: v for k, v in ops[place].attrs.items() if k != "operand_precision"}
                ops[place] = replace(ops[place], attrs={**attrs, "algorithm": algorithm})
            changed[name] = replace(comp, ops=ops)
    return replace(program, computations={**program.computations, **changed})


def _implied(op: Op, comp: Computation, platform: str, narrow: frozenset[str] | None) -> str:
    """Return the algorithm that a platform uses for a product; empty if it is as written."""
    text, own = _text(op.attrs), [comp.ops[i].type.dtype for i in op.operands[:2]]
    if _ALGORITHM.search(text):
        return ""
    if platform == "tpu":
        precision = next((name for name in _TPU_PASSES if name in text), "")
        exact = not precision or PARTS.get(own[0], own[0]) != "f32"
        return "" if exact else f"dot_bf16_bf16_f32_x{_TPU_PASSES[precision]}"
    wide = widened(own, op.type.dtype, narrow) if op.opcode == "dot" else ""
    return f"dot_{wide}_{wide}_{op.type.dtype}" if wide else ""


def widened(own: Collection[str], result: str, narrow: frozenset[str] | None) -> str:
    """Return the type to which operands of unsupported formats are widened (XLA of JAX 0.10).

    Floats of up to 8 bits that the matrix units lack become 16 bits wide. Integers of fewer than 8
    bits, also when multiplied with 8-bit ones, become the accumulator type of the product.

    Args:
        own: Element types of the operands of a ``dot`` on a CPU or GPU.
        result: Element type of the result.
        narrow: 8-bit floats that the units support; ``None`` leaves products of floats unchanged.

    Returns:
        HLO name of the type; empty if the operands are multiplied as they are.
    """
    if narrow is not None and (_SMALL_FLOATS - narrow).intersection(own):
        return "f16" if set(own) == {"f8e5m2"} else "bf16"
    if _BELOW_A_BYTE.intersection(own) and _INTEGERS.issuperset(own):
        # From XLA's operand upcaster, which leaves products of two s8 operands unchanged.
        return result if DTYPE_BITS[result] >= 32 else "s32"
    return ""


def algorithm_name(stated: Mapping[str, object]) -> str:
    """Return HLO's name of an algorithm that StableHLO gives as types and number of products."""
    kinds = (
        stated.get(f"{key}_type") for key in ("lhs_precision", "rhs_precision", "accumulation")
    )
    count = stated.get("num_primitive_operations", 1)
    return "_".join(("dot", *map(str, kinds))) + (f"_x{count}" if count != 1 else "")


def _text(attrs: Mapping[str, object]) -> str:
    # Attributes are tuples (StableHLO), text (HLO) or dictionaries (library calls), so their names
    # are searched as text.
    config = attrs.get("backend_config")
    parts = [attrs.get("operand_precision", ""), attrs.get("algorithm", "")]
    if isinstance(config, dict):
        own = config.get("gemm_backend_config", config)
        parts.append(json.dumps(own.get("precision_config", "")) if isinstance(own, dict) else "")
    return " ".join(str(part) for part in parts).lower()
