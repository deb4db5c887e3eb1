"""Attributes of StableHLO ops in the names and formats of the IR (docs/ir.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ....common.types import JsonObject, MlirObject
from ..hlo_attributes import read_backend_config
from ..op_table import NAMES, by_op, named
from ..precision import algorithm_name
from ..program import WORK, TensorType, WindowDim, write_work
from .values import Raw

Attrs = JsonObject
Types = Sequence[TensorType]

#: Attributes that do not affect the computation, or that the reader handles itself (callees,
#: function attributes).
_DROPPED = named("dropped_attributes")
#: Opcodes whose attributes have defaults, so that rules apply even to ops without attributes.
ALWAYS_NORMALISED = frozenset(("dot", "broadcast", "all-reduce"))


def normalise(opcode: str, attrs: Attrs, operands: Types, results: Types) -> Attrs:
    """Convert the attributes of one op to the names of the IR.

    Args:
        opcode: HLO opcode.
        attrs: Values read from the MLIR attributes, by MLIR name; consumed.
        operands: Types of the operands' leaves.
        results: Types of the results' leaves.

    Returns:
        The attributes of docs/ir.md, followed by the remaining ones unchanged.
    """
    # Rules remove (`pop`) the attributes that they rename; the others keep their names.
    rule = _RULES.get(opcode)
    normalised = rule(attrs, operands, results) if rule else {}
    for key, value in attrs.items():
        # Names with a dot are annotations by frameworks and partitioners.
        if key not in _DROPPED and "." not in key and key not in normalised:
            normalised[key] = value.text if isinstance(value, Raw) else value
    return normalised


def _ints(value: object) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,)
    return tuple(int(v) for v in value) if isinstance(value, tuple) else ()


def _pairs(value: MlirObject) -> tuple[tuple[int, int], ...]:
    return tuple((int(low), int(high)) for low, high in value) if value else ()


def _struct(value: object) -> Attrs:
    return value if isinstance(value, dict) else {}


def _precision(attrs: Attrs) -> Attrs:
    """Read ``operand_precision`` as in HLO, where the default is left out."""
    values = attrs.pop("precision_config", None) or ()
    names = tuple(str(v).lower() for v in values if isinstance(v, str))
    return {"operand_precision": names} if set(names) - {"default"} else {}


def _dot_general(attrs: Attrs, operands: Types, results: Types) -> Attrs:
    given = attrs.pop("dot_dimension_numbers", None)
    numbers = _struct(given)
    if given is None:  # stablehlo.dot: last dimension with first
        rank = len(operands[0].shape)
        numbers = {"lhs_contracting_dimensions": (rank - 1,), "rhs_contracting_dimensions": (0,)}
    algorithm = attrs.pop("algorithm", None)
    names = {
        f"{side}_{short}_dims": _ints(numbers.get(f"{side}_{long}_dimensions", ()))
        for short, long in (("contracting", "contracting"), ("batch", "batching"))
        for side in ("lhs", "rhs")
    }
    stated = {k: v.text if isinstance(v, Raw) else v for k, v in _struct(algorithm).items()}
    extra = {"algorithm": algorithm_name(stated)} if stated else {}
    return {**names, **_precision(attrs), **extra}


def _ragged_dot(attrs: Attrs, operands: Types, results: Types) -> Attrs:
    numbers = _struct(attrs.pop("ragged_dot_dimension_numbers", None))
    ragged = {
        f"{name}_dims": _ints(numbers.get(f"{name}_dimensions", ()))
        for name in ("lhs_ragged", "rhs_group")
    }
    attrs["dot_dimension_numbers"] = numbers
    return {**_dot_general(attrs, operands, results), **ragged}


def _windows(attrs: Attrs, sizes: Sequence[int], names: dict[str, str]) -> tuple[WindowDim, ...]:
    """Make one window per size; ``names`` maps strides and dilations to their MLIR names."""
    rank = len(sizes)

    def column(field: str, default: int) -> tuple[int, ...]:
        values = _ints(attrs.pop(names.get(field, field), None) or ())
        # A single value applies to all dimensions (MLIR's notation for splats).
        return values if len(values) == rank else (values or (default,))[:1] * rank

    pads = _pairs(attrs.pop("padding", None)) or ((0, 0),) * rank
    strides = column("window_strides", 1)
    lhs, rhs = column("lhs_dilation", 1), column("rhs_dilation", 1)
    flips = column("window_reversal", 0)
    rows = zip(sizes, strides, pads, lhs, rhs, flips, strict=True)
    return tuple(
        WindowDim(size, stride, pad[0], pad[1], left, right, bool(flip))
        for size, stride, pad, left, right, flip in rows
    )


def _labels(text: str) -> str:
    """Rewrite ``#stablehlo.conv<[b, 0, f]x[0, i, o]->[b, 0, f]>`` to ``b0f_0io->b0f``."""
    body = text[text.index("<") + 1 : text.rindex(">")]
    left, _, output = body.partition("->")
    lhs, _, rhs = left.partition("]x[")
    lhs, rhs, output = ("".join(c for c in part if c.isalnum()) for part in (lhs, rhs, output))
    return f"{lhs}_{rhs}->{output}"


def _convolution(attrs: Attrs, operands: Types, results: Types) -> Attrs:
    numbers = attrs.pop("dimension_numbers")
    labels = _labels(numbers.text)
    kernel = labels[labels.index("_") + 1 : labels.index("->")]
    by_label = {label: operands[1].shape[i] for i, label in enumerate(kernel)}
    # The sizes of the window are the spatial dimensions of the kernel, in the order of the labels.
    sizes = [by_label[str(i)] for i in range(len(kernel) - 2)]
    return {
        "window": _windows(attrs, sizes, {}),
        "dim_labels": labels,
        "feature_group_count": attrs.pop("feature_group_count", 1),
        "batch_group_count": attrs.pop("batch_group_count", 1),
        **_precision(attrs),
    }


def _reduce_window(attrs: Attrs, operands: Types, results: Types) -> Attrs:
    names = {"lhs_dilation": "base_dilations", "rhs_dilation": "window_dilations"}
    sizes = _ints(attrs.pop("window_dimensions", None) or (1,) * len(operands[0].shape))
    return {"window": _windows(attrs, sizes, names)}


def _broadcast(attrs: Attrs, operands: Types, results: Types) -> Attrs:
    for key in ("known_expanding_dimensions", "known_nonexpanding_dimensions"):
        attrs.pop(key, None)
    # The old `broadcast` op prepends the new dimensions.
    if "broadcast_sizes" in attrs:
        added = len(_ints(attrs.pop("broadcast_sizes")))
        return {"dimensions": tuple(range(added, len(results[0].shape)))}
    return {"dimensions": _ints(attrs.pop("broadcast_dimensions", ()))}


def _renamed(**names: str) -> Callable[[Attrs, Types, Types], Attrs]:
    """Make a rule that reads tuples of integers, given as IR name = MLIR name."""

    def rule(attrs: Attrs, operands: Types, results: Types) -> Attrs:
        return {new: _ints(attrs.pop(old, ())) for new, old in names.items()}

    return rule


def _slice(attrs: Attrs, operands: Types, results: Types) -> Attrs:
    keys = ("start_indices", "limit_indices", "strides")
    starts, limits, strides = (_ints(attrs.pop(key, ())) for key in keys)
    strides = strides or (1,) * len(starts)
    return {"slice": tuple(zip(starts, limits, strides, strict=True))}


def _pad(attrs: Attrs, operands: Types, results: Types) -> Attrs:
    keys = ("edge_padding_low", "edge_padding_high", "interior_padding")
    columns = (_ints(attrs.pop(key, ())) for key in keys)
    return {"padding": tuple(zip(*columns, strict=True))}


def _index_numbers(value: object, lists: Sequence[str]) -> Attrs:
    """Return the dimension numbers of a gather or scatter and the place of the index vectors."""
    numbers = _struct(value)
    return {
        **{key: _ints(numbers.get(key, ())) for key in lists},
        "index_vector_dim": numbers.get("index_vector_dim", 0),
    }


def _gather(attrs: Attrs, operands: Types, results: Types) -> Attrs:
    return {
        **_index_numbers(attrs.pop("dimension_numbers", None), NAMES["gather_numbers"]),
        "slice_sizes": _ints(attrs.pop("slice_sizes", ())),
        "indices_are_sorted": bool(attrs.pop("indices_are_sorted", False)),
    }


def _scatter(attrs: Attrs, operands: Types, results: Types) -> Attrs:
    return {
        **_index_numbers(attrs.pop("scatter_dimension_numbers", None), NAMES["scatter_numbers"]),
        "indices_are_sorted": bool(attrs.pop("indices_are_sorted", False)),
        "unique_indices": bool(attrs.pop("unique_indices", False)),
    }


def _compare(attrs: Attrs, operands: Types, results: Types) -> Attrs:
    kind = attrs.pop("compare_type", None)
    # Other types follow from the operands and are left out in HLO.
    extra = {"type": kind} if kind == "TOTALORDER" else {}
    return {"direction": str(attrs.pop("comparison_direction", "")), **extra}


def _custom_call(attrs: Attrs, operands: Types, results: Types) -> Attrs:
    config = attrs.pop("backend_config", "")
    # Triton kernels are stored in a separate attribute, which XLA writes as text into HLO.
    triton = attrs.pop("mhlo.backend_config", None)
    if not config and isinstance(triton, dict):
        texts = {key: f'"{v}"' if isinstance(v, str) else str(v) for key, v in triton.items()}
        config = f"{{{', '.join(f'{key} = {text}' for key, text in texts.items())}}}"
    given = attrs.pop("mhlo.frontend_attributes", None)
    work = given.get(WORK) if isinstance(given, dict) else None
    return {
        # In the notation of HLO.
        **({"frontend_attributes": write_work(work)} if isinstance(work, str) else {}),
        "target": str(attrs.pop("call_target_name", "")),
        # A dictionary, or text that contains JSON, as in HLO.
        "backend_config": config if isinstance(config, dict) else read_backend_config(str(config)),
    }


def _rng(attrs: Attrs, operands: Types, results: Types) -> Attrs:
    return {"distribution": f"rng_{str(attrs.pop('rng_distribution', 'uniform')).lower()}"}


def _rng_bits(attrs: Attrs, operands: Types, results: Types) -> Attrs:
    return {"algorithm": f"rng_{str(attrs.pop('rng_algorithm', 'default')).lower()}"}


def _fft(attrs: Attrs, operands: Types, results: Types) -> Attrs:
    return {
        "fft_type": str(attrs.pop("fft_type", "FFT")),
        "fft_length": _ints(attrs.pop("fft_length", ())),
    }


def _sort(attrs: Attrs, operands: Types, results: Types) -> Attrs:
    dimension = int(attrs.pop("dimension", -1))
    rank = len(operands[0].shape)
    return {
        # StableHLO's default of -1 means the last dimension.
        "dimension": dimension + rank if dimension < 0 else dimension,
        "is_stable": bool(attrs.pop("is_stable", False)),
    }


def _channel(attrs: Attrs) -> Attrs:
    handle = _struct(attrs.pop("channel_handle", None))
    number = handle.get("handle")
    # StableHLO's 0 means no channel in HLO.
    return {"channel_id": number if isinstance(number, int) and number > 0 else None}


def _collective(attrs: Attrs, operands: Types, results: Types) -> Attrs:
    """Normalise a collective; the reader, which knows the meshes, expands its groups."""
    normalised = {
        "replica_groups": attrs.pop("replica_groups", ()),
        **_channel(attrs),
        "use_global_device_ids": bool(attrs.pop("use_global_device_ids", False)),
    }
    for key in ("all_gather_dim", "scatter_dimension", "split_dimension"):
        if key in attrs:
            normalised["dimension"] = int(attrs.pop(key))
    return normalised


def _permute(attrs: Attrs, operands: Types, results: Types) -> Attrs:
    pairs = _pairs(attrs.pop("source_target_pairs", ()))
    return {"source_target_pairs": pairs, **_channel(attrs)}


def _point_to_point(attrs: Attrs, operands: Types, results: Types) -> Attrs:
    pairs = _pairs(attrs.pop("source_target_pairs", ()))
    return {**_channel(attrs), **({"source_target_pairs": pairs} if pairs else {})}


_Rule = Callable[[Attrs, Types, Types], Attrs]
_RULES: dict[str, _Rule] = by_op(
    {
        "dot": _dot_general,
        "ragged-dot": _ragged_dot,
        "convolution": _convolution,
        "reduce-window": _reduce_window,
        "broadcast": _broadcast,
        "reduce": _renamed(dimensions="dimensions"),
        "map": _renamed(dimensions="dimensions"),
        "reverse": _renamed(dimensions="dimensions"),
        "transpose": _renamed(dimensions="permutation"),
        "concatenate": _renamed(dimensions="dimension"),
        "iota": _renamed(dimensions="iota_dimension"),
        "dynamic-slice": _renamed(dynamic_slice_sizes="slice_sizes"),
        "slice": _slice,
        "pad": _pad,
        "gather": _gather,
        "scatter": _scatter,
        "compare": _compare,
        "custom-call": _custom_call,
        "rng": _rng,
        "rng-bit-generator": _rng_bits,
        "fft": _fft,
        "sort": _sort,
        "all-gather": _collective,
        "collective-permute": _permute,
        "send": _point_to_point,
    }
)
