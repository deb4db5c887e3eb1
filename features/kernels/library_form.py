"""Rewrite library calls, Triton products and XLA's kernels to one form, whichever computes them.

Whether XLA assigns a matrix product to Triton or cuBLAS, and which scratch space a library asks
for, is decided by autotuning on the device. A kernel must not depend on whether a device was
present: a product becomes a ``dot``, alone or in a fusion with its epilogue, and scratch space is
removed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import NamedTuple

from ...common.types import JsonObject
from ..ir.program import Computation, Op, Program, TensorType

#: Targets of XLA's GemmRewriter.
_CUBLAS = ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8")
#: Fusions whose emitter is chosen on the device; others (a Triton softmax) are kept.
_CHOSEN = frozenset(
    (
        "__triton_gemm",
        "__triton_nested_gemm_fusion",
        "__cudnn$fusion",
        "__cublas$fusion",
        "__custom_fusion",
    )
)
_PRODUCTS = ("dot", "ragged-dot", "scaled-dot")
#: Kernels that XLA's RaggedDotExpander creates for TPUs, by instruction name: the product, and the
#: computation of each row tile's group. Pallas names have no hyphens.
_TPU_KERNEL, _TPU_RAGGED, _TPU_GROUPS = "tpu_custom_call", "ragged-dot-", "ragged-dot-metadata"
#: Name of the latter here: a pass over integers (`passes` of op_names.toml).
_GROUPS = "RaggedTileGroups"
#: The IR's names of dimension numbers, with the names in XLA's configuration.
_DIMS = {
    "lhs_contracting_dims": "lhs_contracting_dimensions",
    "rhs_contracting_dims": "rhs_contracting_dimensions",
    "lhs_batch_dims": "lhs_batch_dimensions",
    "rhs_batch_dims": "rhs_batch_dimensions",
}
#: Constants of the tanh approximation of GELU.
_GELU = (sqrt(2 / 3.141592653589793), 0.044715)


class PlainForm(NamedTuple):
    """An instruction without choices made by autotuning on a device.

    Attributes:
        op: The instruction; it may call ``added``.
        operands: The ops whose values it reads, in order.
        added: A computation that the program does not contain; ``None`` if there is none.
    """

    op: Op
    operands: Sequence[Op]
    added: Computation | None = None


def plain_form(op: Op, operands: Sequence[Op], program: Program) -> PlainForm:
    """Convert a library call or Triton product to the common form; others stay unchanged.

    Args:
        op: The instruction.
        operands: The ops whose values it reads, in order.
        program: The program with the computations that it calls.
    """
    if op.opcode == "custom-call":
        target = str(op.attrs.get("target", ""))
        if target in _CUBLAS and (product := _product(op, operands, target)) is not None:
            return product
        if target.startswith(("__cu", "xla.gpu.ext.")):
            return PlainForm(_without_scratch(op), operands)
        if target == _TPU_KERNEL and op.name.startswith(_TPU_RAGGED):
            return _ragged(op, operands)
    elif op.opcode == "fusion" and op.called and _emitter(op) in _CHOSEN:
        return _unwrapped(op, operands, program)
    return PlainForm(op, operands)


def _ragged(op: Op, operands: Sequence[Op]) -> PlainForm:
    """Convert a kernel that XLA created for a ragged product into that product.

    After the groups of tiles, the kernel reads the rows ``(m, k)`` and the weights of all groups
    ``(g, k, n)``. Other kernels stay unchanged.
    """
    if op.name.startswith(_TPU_GROUPS):
        kept = {key: op.attrs[key] for key in ("nesting",) if key in op.attrs}
        attrs = {"target": _GROUPS, **kept}
        groups = Op(op.name, op.opcode, (), op.results, attrs, (), op.is_tuple)
        return PlainForm(groups, operands)
    if len(operands) < 3 or len(op.results) != 1:
        return PlainForm(op, operands)
    starts, rows, weights = operands[1], *operands[-2:]
    m, k = (*rows.type.shape, 0, 0)[:2]
    n = weights.type.shape[-1:]
    if weights.type.shape[1:] != (k, *n) or op.type.shape != (m, *n):
        return PlainForm(op, operands)
    dims: dict[str, tuple[int, ...]] = {
        "lhs_contracting_dims": (1,),
        "rhs_contracting_dims": (1,),
        "lhs_batch_dims": (),
        "rhs_batch_dims": (),
        "lhs_ragged_dims": (0,),
        "rhs_group_dims": (0,),
    }
    return PlainForm(Op(op.name, "ragged-dot", (), op.results, dims), [rows, weights, starts])


def _emitter(op: Op) -> str:
    return str(op.config("fusion_backend_config").get("kind", ""))


def _unwrapped(op: Op, operands: Sequence[Op], program: Program) -> PlainForm:
    """Convert a fusion that is a single product of its parameters into that product."""
    inner = program.computations[op.called[0]]
    root = inner.root_op
    sources = [inner.ops[i] for i in root.operands]
    work = [o for o in inner.ops if o.opcode != "parameter"]
    if root.opcode in _PRODUCTS and len(work) == 1 and not root.called:
        attrs = {k: v for k, v in root.attrs.items() if k != "backend_config"}
        reads = [operands[int(o.attrs["index"])] for o in sources]
        return PlainForm(Op(op.name, root.opcode, (), op.results, attrs), reads)
    if not any(o.opcode in _PRODUCTS for o in inner.ops):
        return PlainForm(op, operands)
    attrs = {k: v for k, v in op.attrs.items() if k != "backend_config"}
    fusion = Op(op.name, "fusion", (), op.results, attrs, op.called, op.is_tuple)
    return PlainForm(fusion, operands)


def _without_scratch(op: Op) -> Op:
    """Drop trailing byte arrays, which are scratch space of libraries."""
    results = list(op.results)
    # Workspaces are flat byte arrays at the end; no product has such a result.
    while len(results) > 1 and results[-1].dtype in ("u8", "s8") and len(results[-1].shape) == 1:
        results.pop()
    if len(results) == len(op.results):
        return op
    attrs = {k: v for k, v in op.attrs.items() if k != "nesting"}
    return Op(op.name, op.opcode, op.operands, tuple(results), attrs, op.called, len(results) > 1)


def _product(op: Op, operands: Sequence[Op], target: str) -> PlainForm | None:
    """Convert a cuBLAS call to a product and its epilogue; ``None`` if it is not understood."""
    config = op.attrs.get("backend_config")
    config = config.get("gemm_backend_config") if isinstance(config, dict) else None
    if not isinstance(config, dict) or len(operands) < 2:
        return None
    plain = _without_scratch(op)
    body = _Epilogue(config, operands, plain.results, target)
    try:
        if not body.read():
            return None
    except (ValueError, TypeError, AttributeError, KeyError, IndexError):
        return None  # a configuration with another structure than XLA's
    if body.alone:
        return PlainForm(Op(op.name, "dot", (), plain.results, body.dot_attrs), operands[:2])
    computation = Computation(f"{op.name}.epilogue", body.ops, len(body.ops) - 1)
    fusion = Op(
        op.name,
        "fusion",
        (),
        plain.results,
        {"kind": "kCustom"},
        (computation.name,),
        plain.is_tuple,
    )
    return PlainForm(fusion, operands, computation)


class _Epilogue:
    """Builds a fused computation from a cuBLAS call.

    Its operands are the two factors, the matrix added if ``beta`` is not zero, scales (of the 8-bit
    call) and the bias of the epilogue.
    """

    def __init__(
        self,
        config: JsonObject,
        operands: Sequence[Op],
        results: tuple[TensorType, ...],
        target: str,
    ) -> None:
        self.config = config
        self.operands = operands
        self.results = results
        self.scaled = target.endswith("$f8")
        self.epilogue = str(config.get("epilogue", "DEFAULT"))
        self.auxiliary = -1
        self.ops = [
            Op(f"p{i}", "parameter", (), o.results, {"index": i}) for i, o in enumerate(operands)
        ]

    @property
    def dot_attrs(self) -> dict[str, object]:
        """Attributes of the product."""
        numbers = self.config.get("dot_dimension_numbers", {})
        attrs: JsonObject = {
            key: tuple(int(d) for d in numbers.get(name, ())) for key, name in _DIMS.items()
        }
        stated = self.config.get("precision_config", {})
        precision = stated.get("operand_precision", ())
        if any(p != "DEFAULT" for p in precision):
            attrs["operand_precision"] = "{" + ",".join(str(p).lower() for p in precision) + "}"
        algorithm = str(stated.get("algorithm", "ALG_UNSET"))
        if algorithm != "ALG_UNSET":
            attrs["algorithm"] = algorithm.removeprefix("ALG_").lower()
        return attrs

    @property
    def alone(self) -> bool:
        """Whether there is no epilogue."""
        return self.ops[-1].opcode == "dot"

    @property
    def alpha(self) -> float:
        """Factor of the product."""
        return float(self.config.get("alpha_real", 1.0))

    def read(self) -> bool:
        """Build the computation; return whether operands and epilogue are consistent."""
        # cuBLAS's order of operands after the factors: C, scales, bias.
        rest = list(range(2, len(self.operands)))
        out = self.results[0]
        value = self._add("dot", (0, 1), out, self.dot_attrs)
        # 8-bit calls are scaled by operands, see below.
        if not self.scaled and self.alpha != 1.0:
            value = self._binary("multiply", value, self._constant(self.alpha, out), out)
        if float(self.config.get("beta", 0.0)) != 0.0:
            if not rest:
                return False
            value = self._binary("add", value, self._converted(rest.pop(0), out), out)
        # A constant scale is assumed to be the one that XLA inserts where the program has none.
        for scale in [i for i in rest if self.scaled and not self.operands[i].results[0].shape]:
            rest.remove(scale)
            if self.operands[scale].opcode != "constant":
                value = self._binary("multiply", value, self._broadcast(scale, out, ()), out)
        parts = self.epilogue.split("_") if self.epilogue != "DEFAULT" else []
        return self._apply(parts, value, rest, out)

    def _apply(self, parts: list[str], value: int, rest: list[int], out: TensorType) -> bool:
        before = -1
        for part in parts:
            if part == "BIAS":
                if not rest:
                    return False
                value = self._binary("add", value, self._bias(rest.pop(0), out), out)
            elif part == "AUX":
                before = self.auxiliary
            elif part in _ACTIVATIONS:
                self.auxiliary = value
                value = _ACTIVATIONS[part](self, value, out)
            else:
                return False
        if len(self.results) > 1:
            if before < 0 or len(self.results) != 2:
                return False
            self.ops.append(Op("t", "tuple", (value, before), self.results, {}, (), True))
        return not rest

    def _add(
        self, opcode: str, operands: tuple[int, ...], like: TensorType, attrs: dict[str, object]
    ) -> int:
        self.ops.append(Op(f"e{len(self.ops)}", opcode, operands, (like,), attrs))
        return len(self.ops) - 1

    def _binary(self, opcode: str, first: int, second: int, out: TensorType) -> int:
        return self._add(opcode, (first, second), out, {})

    def _constant(self, number: float, out: TensorType) -> int:
        place = self._add("constant", (), TensorType(out.dtype, ()), {"value": number})
        return self._broadcast(place, out, ())

    def _broadcast(self, place: int, out: TensorType, dims: tuple[int, ...]) -> int:
        place = self._converted(place, out)
        return self._add("broadcast", (place,), out, {"dimensions": dims})

    def _converted(self, place: int, out: TensorType) -> int:
        source = self.ops[place].results[0]
        if source.dtype == out.dtype:
            return place
        return self._add(
            "convert", (place,), TensorType(out.dtype, source.shape, source.layout), {}
        )

    def _bias(self, place: int, out: TensorType) -> int:
        """Broadcast a vector along the last of the result's dimensions that has its size."""
        length = self.ops[place].results[0].size
        # The last dimension first: a bias has one value per column.
        fits = [d for d in reversed(range(len(out.shape))) if out.shape[d] == length]
        return self._broadcast(place, out, tuple(fits[:1]))

    def relu(self, value: int, out: TensorType) -> int:
        """Append ``max(x, 0)``."""
        return self._binary("maximum", value, self._constant(0.0, out), out)

    def silu(self, value: int, out: TensorType) -> int:
        """Append ``x · σ(x)``."""
        return self._binary("multiply", value, self._add("logistic", (value,), out, {}), out)

    def gelu(self, value: int, out: TensorType) -> int:
        """Append ``x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))``."""
        cube = self._binary("multiply", self._binary("multiply", value, value, out), value, out)
        inner = self._binary("multiply", cube, self._constant(_GELU[1], out), out)
        inner = self._binary("add", value, inner, out)
        inner = self._binary("multiply", inner, self._constant(_GELU[0], out), out)
        inner = self._add("tanh", (inner,), out, {})
        inner = self._binary("add", inner, self._constant(1.0, out), out)
        inner = self._binary("multiply", inner, self._constant(0.5, out), out)
        return self._binary("multiply", value, inner, out)


_ACTIVATIONS: dict[str, Callable[[_Epilogue, int, TensorType], int]] = {
    "RELU": _Epilogue.relu,
    "SILU": _Epilogue.silu,
    "GELU": _Epilogue.gelu,
}
