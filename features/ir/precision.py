"""In which type, and in how many products of it, a matrix product is computed."""

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

#: An algorithm as HLO names it: ``dot_bf16_bf16_f32_x6``, in protocol buffers ``ALG_DOT_…``.
_ALGORITHM = re.compile(r"dot_(any_f8|[a-z0-9]+)_(?:any_f8|[a-z0-9]+)_[a-z0-9]+(?:_x(\d+))?")
#: Ops with attributes of precision.
_PRODUCTS = frozenset(("dot", "ragged-dot", "convolution"))
#: Products of bf16 that a TPU makes of one of f32, by precision. Its compiler writes the algorithms
#: of three and of six so (libtpu of JAX 0.10).
_TPU_PASSES = {"highest": 6, "high": 3}
_INTEGERS = frozenset(t for t in DTYPE_BITS if dtype_family(t) == INTEGER)
_BELOW_A_BYTE = frozenset(t for t in _INTEGERS if DTYPE_BITS[t] < 8)
_SMALL_FLOATS = frozenset(t for t in DTYPE_BITS if t.startswith(("f4", "f6", "f8")))


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
    ``highest`` asks for true FP32. Libraries do so on CUDA alone, but kernels that Triton generates
    (``IsTf32Allowed`` of its dot algorithms) on MI300, too, whose units have it. An algorithm
    decides alone, whatever the precision: it names the types, and after ``x`` the products that it
    splits one into.

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


def as_computed(program: Program, platform: str, narrow: frozenset[str] | None = None) -> Program:
    """The program with products that state by algorithms how a platform computes them.

    What reads kernels knows no platform. A TPU takes an f32 product at ``highest`` as six of bf16,
    at ``high`` as three; other platforms widen formats that they lack (:func:`widened`).

    Args:
        program: Left as it is.
        platform: ``cpu``, ``gpu`` or ``tpu``; empty if unknown.
        narrow: As for :func:`widened`; ``None`` where a compiler has widened already.
    """
    if platform != "tpu" and narrow is None:
        return program
    changed = {}
    for name, comp in program.computations.items():
        stated = {
            place: algorithm
            for place, op in enumerate(comp.ops)
            if op.opcode in _PRODUCTS and (algorithm := _meant(op, comp, platform, narrow))
        }
        if stated:
            ops = list(comp.ops)
            for place, algorithm in stated.items():
                attrs = {k: v for k, v in ops[place].attrs.items() if k != "operand_precision"}
                ops[place] = replace(ops[place], attrs={**attrs, "algorithm": algorithm})
            changed[name] = replace(comp, ops=ops)
    return replace(program, computations={**program.computations, **changed})


def _meant(op: Op, comp: Computation, platform: str, narrow: frozenset[str] | None) -> str:
    """The algorithm that a product without one means on a platform; empty if it is as written."""
    text, own = _text(op.attrs), [comp.ops[i].type.dtype for i in op.operands[:2]]
    if _ALGORITHM.search(text):
        return ""
    if platform == "tpu":
        asked = next((name for name in _TPU_PASSES if name in text), "")
        exact = not asked or PARTS.get(own[0], own[0]) != "f32"
        return "" if exact else f"dot_bf16_bf16_f32_x{_TPU_PASSES[asked]}"
    wide = widened(own, op.type.dtype, narrow) if op.opcode == "dot" else ""
    return f"dot_{wide}_{wide}_{op.type.dtype}" if wide else ""


def widened(own: Collection[str], result: str, narrow: frozenset[str] | None) -> str:
    """The type that operands of formats without a kernel are widened to (XLA of JAX 0.10).

    Floats of up to 8 bits that the matrix units lack become 16 bits wide, integers of fewer than 8
    what their product is accumulated in, also beside ones of 8 bits.

    Args:
        own: Element types of the operands of a ``dot`` on a CPU or GPU.
        result: That of its result.
        narrow: Floats of 8 bits that the units have; ``None`` leaves products of floats alone.

    Returns:
        Its name; empty if they are multiplied as they are.
    """
    if narrow is not None and (_SMALL_FLOATS - narrow).intersection(own):
        return "f16" if set(own) == {"f8e5m2"} else "bf16"
    if _BELOW_A_BYTE.intersection(own) and _INTEGERS.issuperset(own):
        # XLA's operand upcaster; products of s8 alone are left as they are.
        return result if DTYPE_BITS[result] >= 32 else "s32"
    return ""


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
