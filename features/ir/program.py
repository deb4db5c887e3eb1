"""The intermediate representation: programs, computations and ops, in the vocabulary of HLO.

StableHLO (text, bytecode, exports) and HLO text are both read into these classes, so that FLOPs,
bytes and features are defined once. Opcodes are HLO's (``dot``, ``dynamic-update-slice``); an op
that HLO lacks keeps its dialect (``chlo.erf_inv``). Values are ops, as in HLO: an op with several
results has ``is_tuple``, and its users read it through ``get-tuple-element``. The module also
defines the widths, families, codes and other names of HLO's element types.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple, TypeVar

from ...common.types import JsonObject
from .op_table import named

_NAMES = (
    "pred s1 u1 s2 u2 s4 u4 s8 u8 s16 u16 s32 u32 s64 u64 f4e2m1fn f6e2m3fn f6e3m2fn f8e3m4 f8e4m3 "
    "f8e4m3fn f8e4m3b11fnuz f8e4m3fnuz f8e5m2 f8e5m2fnuz f8e8m0fnu bf16 f16 f32 f64 c64 c128"
)
#: Bits per element by HLO type name. XLA stores a ``pred`` in a byte.
DTYPE_BITS: dict[str, int] = {
    **{name: int(re.findall(r"\d+|pred", name)[0].replace("pred", "8")) for name in _NAMES.split()},
    "token": 0,
    "opaque": 0,
}
#: Types of the two parts of complex numbers.
PARTS = {"c64": "f32", "c128": "f64"}
#: Name of the matrix rate for f32 operands that may be rounded to TensorFloat-32; devices without
#: such a unit use their f32 rate.
REDUCED = "tf32"
#: Types in a fixed order; the code of a dtype is its position. The last one is the matrix rate
#: :data:`REDUCED` instead of an HLO type. Saved feature rows contain codes: append only.
DTYPES = (*DTYPE_BITS, REDUCED)
DTYPE_CODE = {name: code for code, name in enumerate(DTYPES)}

#: Families of types with similar rates. The last one, for tokens, is not a numeric type
#: (features/table/row.py relies on its position).
FAMILIES = ("float", "half", "float8", "integer", "pred", "complex", "none")
FLOAT, HALF, FLOAT8, INTEGER, PRED, COMPLEX, NONE = range(len(FAMILIES))


def dtype_family(dtype: str) -> int:
    """Return the family of an HLO type; FLOAT is f32 and f64, HALF is bf16 and f16."""
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
    # HLO's s and u are int and uint in NumPy; names of small floats include the format, as in
    # float8_e4m3fn.
    if dtype[0] in "su":
        return ("int" if dtype[0] == "s" else "uint") + dtype[1:]
    if dtype in ("f16", "f32", "f64"):
        return "float" + dtype[1:]
    return f"float{dtype[1]}_{dtype[2:]}"


#: Names of HLO types in NumPy and in ml_dtypes, which JAX also uses.
NUMPY_NAMES = {dtype: _numpy_name(dtype) for dtype in DTYPE_BITS if dtype[0] in "suf"} | {
    "pred": "bool",
    "bf16": "bfloat16",
    "c64": "complex64",
    "c128": "complex128",
}
#: The inverse of :data:`NUMPY_NAMES`.
HLO_NAMES = {name: dtype for dtype, name in NUMPY_NAMES.items()}

# Key of the frontend attribute with the FLOPs, transcendentals and bytes of a kernel, which are
# counted when its function is lowered.
WORK = "opcast_work"
#: Figures that a kernel may declare, by the names of ``pl.CostEstimate``.
STATED = ("flops", "transcendentals", "bytes_accessed")
_WORK = re.compile(rf'{WORK}="([^"]*)"')

T = TypeVar("T")
#: Memory spaces on a TPU's chip: VMEM, the CMEM of a v4, and scalar memory, by the numbers that
#: libtpu prints in layouts: S(1), S(3) and S(6).
ON_CHIP = frozenset((1, 3, 6))
#: Elements of a tile of a TPU's memory, the shape of a vector register on all generations in the
#: catalogue: lanes of the minor dimension, and rows (sublanes) of the one above.
LANES, SUBLANES = 128, 8
#: Ops that run no code on any target, as they only name, group or order values.
BOOKKEEPING = named("bookkeeping")
#: Ops that run computations of the program: loops, branches, calls.
NESTING = frozenset(("while", "conditional", "call"))
#: Collectives, which also occur as ``X-start`` and ``X-done``.
COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
#: Constants with more elements are read without a value: no rule needs it, and text stays short.
MAX_CONSTANT_SIZE = 64


class TensorType(NamedTuple):
    """Element type, shape and layout of an array.

    Attributes:
        dtype: HLO name of the element type (``f32``, ``bf16``, ``pred``, ``token`` …).
        shape: Static dimension sizes.
        layout: Minor-to-major dimension order; ``None`` means row-major.
        memory_space: XLA's ``S(n)``: 0 is the device's main memory, those of :data:`ON_CHIP` are on
            a TPU's chip, 5 is the host's memory.
    """

    dtype: str
    shape: tuple[int, ...] = ()
    layout: tuple[int, ...] | None = None
    memory_space: int = 0

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in memory, with sub-byte types packed."""
        # XLA packs 4-bit types two per byte; the total is rounded up.
        return (self.size * DTYPE_BITS[self.dtype] + 7) // 8

    def __str__(self) -> str:
        """Return the HLO notation, such as ``f32[8,128]``."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def tiled_size(lanes: int, rows: int, least: int = 1) -> int:
    """Return the elements that an array takes in a TPU's memory, padded to tiles.

    Args:
        lanes: Size of the minor dimension.
        rows: Size of the one above. Tiles have 8, or the next power of two of fewer.
        least: Fewest rows of a tile, at most 8.
    """
    tile = min(SUBLANES, max(least, 1 << max(rows - 1, 0).bit_length()))
    return -(-lanes // LANES) * LANES * -(-rows // tile) * tile


def constant_value(elements: list[T]) -> T | list[T] | None:
    """Return the value to store for a constant.

    Args:
        elements: All elements, row-major; a single one for a splat.

    Returns:
        A scalar for scalars and splats, the list for up to :data:`MAX_CONSTANT_SIZE` elements,
        otherwise ``None``.
    """
    if elements and elements.count(elements[0]) == len(elements):
        return elements[0]
    # Splats of any size are handled above, since the value of a fill affects rewrites.
    return elements if 0 < len(elements) <= MAX_CONSTANT_SIZE else None


class WindowDim(NamedTuple):
    """One spatial dimension of a convolution or window reduction (HLO's ``WindowDimension``)."""

    size: int
    stride: int = 1
    pad_low: int = 0
    pad_high: int = 0
    lhs_dilation: int = 1
    rhs_dilation: int = 1
    reversal: bool = False


class Source(NamedTuple):
    """Origin of a kernel or op.

    Attributes:
        op: Name of the StableHLO op, such as ``stablehlo.dot_general``, or the framework's op name.
        file: File of the user's program, or of the StableHLO text if it has no locations.
        line: Line in that file; 0 if unknown.
        index: Position of the StableHLO op in the walk over the program; -1 if unknown.
    """

    op: str
    file: str = ""
    line: int = 0
    index: int = -1  # type: ignore[assignment]  # shadows tuple.index on purpose


@dataclass(slots=True)
class Op:
    """One instruction of a computation.

    Attributes:
        name: Unique within the program.
        opcode: HLO opcode.
        operands: Positions of the operand ops within ``Computation.ops``.
        results: Leaf types; exactly one unless ``is_tuple``.
        attrs: Normalised attributes (see docs/ir.md).
        called: Names of the computations that it calls (``fusion``, ``while``, ``reduce`` …).
        is_tuple: Whether the result is a (possibly nested) tuple.
        source: Origin of the op.
    """

    name: str
    opcode: str
    operands: tuple[int, ...] = ()
    results: tuple[TensorType, ...] = ()
    attrs: JsonObject = field(default_factory=dict)
    called: tuple[str, ...] = ()
    is_tuple: bool = False
    source: Source | None = None

    @property
    def type(self) -> TensorType:
        """Type of the first result."""
        return self.results[0]

    @property
    def result_bytes(self) -> int:
        """Bytes of all results."""
        return sum(t.nbytes for t in self.results)

    def config(self, *path: str) -> JsonObject:
        """Return the backend configuration, or the part of it under the keys of ``path``.

        Empty if the instruction has none, or if that part is not a dictionary.
        """
        part = self.attrs.get("backend_config")
        for key in path:
            part = part.get(key) if isinstance(part, dict) else None
        return part if isinstance(part, dict) else {}


@dataclass(slots=True)
class Computation:
    """Ops in order (the schedule, if the program is scheduled), including parameters."""

    name: str
    ops: list[Op] = field(default_factory=list)
    root: int = -1

    @property
    def root_op(self) -> Op:
        """Op whose value the computation returns."""
        return self.ops[self.root]

    @property
    def parameters(self) -> list[Op]:
        """Parameter ops ordered by number."""
        ops = [op for op in self.ops if op.opcode == "parameter"]
        return sorted(ops, key=lambda op: int(op.attrs["index"]))

    @property
    def parameter_places(self) -> dict[int, int]:
        """Position in ``ops`` by parameter number."""
        places = enumerate(self.ops)
        return {int(op.attrs["index"]): at for at, op in places if op.opcode == "parameter"}

    @property
    def only_op(self) -> Op | None:
        """Op of a computation with one op besides its parameters, which is the root."""
        plain = [op for op in self.ops if op.opcode != "parameter"]
        return plain[0] if len(plain) == 1 and self.root_op is plain[0] else None


@dataclass(slots=True)
class Program:
    """Computations reachable from ``entry``.

    Attributes:
        computations: By name, callees before callers.
        entry: Name of the entry computation.
        dialect: ``stablehlo`` or ``hlo``.
        name: Module name.
        num_replicas: Replicas that run the program (data parallel without a partitioner).
        num_partitions: Number of devices over which it is or will be partitioned.
        is_scheduled: Whether the order of ops is the execution order.
        aliases: Pairs (output index, parameter number) that share a buffer (donated arguments).
        donors: Numbers of parameters whose buffers any output may reuse, from an HLO header.
        meshes: Axis sizes by mesh name, from ``sdy.mesh``.
        origin: File that it was read from.
    """

    computations: dict[str, Computation] = field(default_factory=dict)
    entry: str = ""
    dialect: str = "hlo"
    name: str = ""
    num_replicas: int = 1
    num_partitions: int = 1
    is_scheduled: bool = False
    aliases: tuple[tuple[int, int], ...] = ()
    donors: tuple[int, ...] = ()
    meshes: dict[str, dict[str, int]] = field(default_factory=dict)
    origin: str = ""

    @property
    def entry_computation(self) -> Computation:
        """Computation where execution starts."""
        return self.computations[self.entry]

    @property
    def inlined_op_count(self) -> int:
        """Number of ops after inlining all calls, as targets do."""
        counts: dict[str, int] = {}
        for name, own in self.computations.items():
            calls = (op.called[0] for op in own.ops if op.opcode == "call" and op.called)
            counts[name] = len(own.ops) + sum(counts.get(callee, 0) for callee in calls)
        return counts[self.entry]


def reached(start: Iterable[T], following: Callable[[T], Iterable[T]]) -> set[T]:
    """Return ``start`` and all that follows from it, directly or not."""
    found = set(start)
    pending = list(found)
    while pending:
        new = set(following(pending.pop())) - found
        found |= new
        pending += new
    return found


def write_work(work: str) -> str:
    """Format a kernel's work as frontend attributes in HLO's notation."""
    return f'{{{WORK}="{work}"}}'


def read_work(attributes: object) -> str:
    """Return a kernel's work, three numbers as text, from frontend attributes; empty if none."""
    found = _WORK.search(attributes) if isinstance(attributes, str) else None
    return found[1] if found else ""
