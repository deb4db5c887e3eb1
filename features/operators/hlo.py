"""Convert operators of published tables to HLO kernels, and back.

Every operator becomes a canonical one-instruction module with its true shapes: products as ``dot``,
convolutions as ``convolution``, passes over memory as loop fusions, and operators without an HLO
equivalent (fused attention, experts, products of quantised operands) as custom calls. The root's
``backend_config`` stores the operator's parameters, library and timing method under
``published_op``, so that the row can be recovered from the text alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from string import Template
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ...common.errors import DatasetError
from ...common.files import own_data
from ...common.types import JsonMapping
from ..cost.formats import TABLE_FORMATS, UNQUANTISED
from .op import ungated
from .schema import FAMILIES, NAMES, OPTIONAL, PARAMETERS

if TYPE_CHECKING:
    import pandas as pd

#: Key of the root's ``backend_config`` that holds the operator's parameters.
CONFIG = "published_op"
# Start of the configuration as `json.dumps` writes it: a plain search finds it without parsing HLO,
# which matters for millions of rows.
_MARK = f'{{"{CONFIG}":'

#: Prefix of custom-call targets that only this package interprets.
TARGET = "opcast.op"

Row = JsonMapping


def _module(
    parameters: list[str], inner: str, result: str, kind: str, config: str, more: str = ""
) -> str:
    """Write a module whose entry fuses ``inner``; ``more`` holds other computations."""
    entry = "".join(f"  p{i} = {t} parameter({i})\n" for i, t in enumerate(parameters))
    places = ", ".join(f"p{i}" for i in range(len(parameters)))
    heads = "".join(f"  v{i} = {t} parameter({i})\n" for i, t in enumerate(parameters))
    return (
        f"HloModule kernel\n\n{more}body {{\n{heads}{inner}}}\n\nENTRY main {{\n{entry}"
        f"  ROOT r = {result} fusion({places}), calls=body, kind={kind}, "
        f"backend_config={config}\n}}\n"
    )


def _call(parameters: list[str], result: str, target: str, config: str) -> str:
    """Write a module whose entry is one custom call."""
    entry = "".join(f"  p{i} = {t} parameter({i})\n" for i, t in enumerate(parameters))
    places = ", ".join(f"p{i}" for i in range(len(parameters)))
    return (
        f"HloModule kernel\n\nENTRY main {{\n{entry}  ROOT r = {result} custom-call({places}), "
        f'custom_call_target="{target}", backend_config={config}\n}}\n'
    )


def _gemm(row: Row, config: str) -> str:
    b, m, n, k = (int(row[c]) for c in ("b", "m", "n", "k"))
    kind = TABLE_FORMATS[row["dtype"]].weights
    if row["dtype"] not in UNQUANTISED:
        return _quantised(row["dtype"], (b, m, n, k), config)
    if row["family"] == "bmm":
        left, right, out = f"{kind}[{b},{m},{k}]", f"{kind}[{b},{k},{n}]", f"{kind}[{b},{m},{n}]"
        inner = (
            f"  ROOT v2 = {out} dot(v0, v1), lhs_batch_dims={{0}}, lhs_contracting_dims={{2}}, "
            "rhs_batch_dims={0}, rhs_contracting_dims={1}\n"
        )
        return _module([left, right], inner, out, "kCustom", config)
    left, right, out = f"{kind}[{m},{k}]", f"{kind}[{k},{n}]", f"{kind}[{m},{n}]"
    dot = f"{out} dot(v0, v1), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}\n"
    if row["method"] != "eager":
        return _module([left, right], f"  ROOT v2 = {dot}", out, "kCustom", config)
    # NeuSight's linear layers are PyTorch's `addmm`, with a bias.
    bias = f"{kind}[{n}]"
    inner = (
        f"  v3 = {dot}  v4 = {out} broadcast(v2), dimensions={{1}}\n  ROOT v5 = {out} add(v3, v4)\n"
    )
    return _module([left, right, bias], inner, out, "kCustom", config)


def _quantised(dtype: str, shape: tuple[int, int, int, int], config: str) -> str:
    """Write a product with narrow weights, 16-bit activations and block scales."""
    b, m, n, k = shape
    batch = f"{b}," if b > 1 else ""
    types = [f"bf16[{batch}{m},{k}]", f"{TABLE_FORMATS[dtype].weights}[{batch}{k},{n}]"]
    if block := TABLE_FORMATS[dtype].block:
        deep = -(-k // block)
        # Block scales of fp8 cover 128 × 128 weights; those of 4-bit formats run along the depth
        # only.
        wide = -(-n // 128) if dtype == "fp8_block" else n
        types.append(f"f8e4m3fn[{batch}{deep},{wide}]")
    return _call(types, f"bf16[{batch}{m},{n}]", f"{TARGET}.quantized_gemm", config)


def _conv(row: Row, config: str) -> str:
    """Write a square 2-D convolution; published ones are all in f32."""
    sizes = {"n": "batch", "c": "cin", "k": "cout"}
    sizes |= {f"{of}{a}": name for of, name in _SQUARE.items() for a in "hw"}
    fixed = {"op": "fwd", "ndim": 2, "dtype": "fp32", "groups": 1, "channels_last": 0}
    own = {name: row[column] for name, column in sizes.items()}
    return _conv_nd({**fixed, "dil_h": 1, "dil_w": 1, **own}, config)


#: Columns of square convolutions by the prefix of the corresponding general columns.
_SQUARE = {"": "insize", "k": "ksize", "stride_": "stride", "pad_": "pad"}


def _conv_nd(row: Row, config: str) -> str:
    """Write a convolution in one to three dimensions; gradients are custom calls.

    A gradient is a convolution of a dilated or transposed array, of which libraries compute only
    the part that meets data.
    """
    axes = "dhw"[3 - int(row["ndim"]) :]
    sizes = {a: _along(row, a) for a in axes}
    kind, groups = TABLE_FORMATS[row["dtype"]].weights, int(row["groups"])
    n, c, k = (int(row[name]) for name in ("n", "c", "k"))
    last = bool(row["channels_last"])

    def image(channels: int, places: list[int]) -> str:
        inner = [*places, channels] if last else [channels, *places]
        return f"{kind}[{','.join(map(str, [n, *inner]))}]"

    x = image(c, [int(row[a]) for a in axes])
    y = image(k, [size.out for size in sizes.values()])
    taps = ",".join(str(size.taps) for size in sizes.values())
    w = f"{kind}[{k},{c // groups},{taps}]"
    if row["op"] != "fwd":
        types, result = ([y, w], x) if row["op"] == "bwd_data" else ([x, y], w)
        return _call(types, result, f"{TARGET}.convolution_gradient", config)
    window = f"size={'x'.join(str(size.taps) for size in sizes.values())}"
    for name, values, usual in (
        ("stride", [str(size.stride) for size in sizes.values()], "1"),
        ("pad", [f"{size.pad}_{size.pad}" for size in sizes.values()], "0_0"),
        ("rhs_dilate", [str(size.hole) for size in sizes.values()], "1"),
    ):
        # The printer omits default values, and texts have to be canonical.
        if set(values) != {usual}:
            window += f" {name}={'x'.join(values)}"
    places = "012"[: len(axes)]
    lies = f"b{places}f" if last else f"bf{places}"
    group = f", feature_group_count={groups}" if groups > 1 else ""
    inner = (
        f"  ROOT v2 = {y} convolution(v0, v1), dim_labels={lies}_oi{places}->{lies}{group}, "
        f"window={{{window}}}\n"
    )
    return _module([x, w], inner, y, "kCustom", config)


class _Along(NamedTuple):
    """One dimension of a convolution: output size, taps, stride, padding, dilation."""

    out: int
    taps: int
    stride: int
    pad: int
    hole: int


def _along(row: Row, axis: str) -> _Along:
    taps, stride, pad, hole = (int(row[f"{c}{axis}"]) for c in ("k", "stride_", "pad_", "dil_"))
    reach = (taps - 1) * hole + 1
    out = max((int(row[axis]) + 2 * pad - reach) // stride + 1, 1)
    return _Along(out, taps, stride, pad, hole)


def _tuned_gemm(row: Row, config: str) -> str:
    """Write a product whose operands are already in their format."""
    form = TABLE_FORMATS[row["dtype"]]
    # Narrow products return 16 bits for the next layer.
    out = form.weights if form.weight_bits >= 16 else "bf16"
    b, m, n, k = (int(row[c]) for c in ("b", "m", "n", "k"))
    batch = f"{b}," if b > 1 else ""
    left = f"{k},{m}" if row["trans_a"] else f"{m},{k}"
    right = f"{n},{k}" if row["trans_b"] else f"{k},{n}"
    types = [f"{form.weights}[{batch}{left}]", f"{form.weights}[{batch}{right}]"]
    return _call(types, f"{out}[{batch}{m},{n}]", f"{TARGET}.tuned_gemm", config)


def _pointwise(row: Row, config: str) -> str:
    op, rows, cols = str(row["op"]), int(row["rows"]), int(row["cols"])
    if op not in _passes():
        raise DatasetError(f"no element-wise op {op!r}", hint="ops: " + ", ".join(_passes()))
    own, opcode = _passes()[op]
    kind, middle = TABLE_FORMATS[row["dtype"]].weights, cols // 2
    words = {
        "kind": kind,
        "opcode": opcode,
        "rows": rows,
        "cols": cols,
        "all": f"{kind}[{rows},{cols}]",
        "row": f"{kind}[{rows}]",
        "wide": f"{kind}[{cols}]",
        "half": f"{kind}[{rows},{middle}]",
        "rest": f"{kind}[{rows},{cols - middle}]",
        "one": f"{kind}[]",
        "middle": middle,
        "even": 2 * middle,
    }
    *first, last = (Template(line).substitute(words) for line in own.body.splitlines())
    reductions = "".join(
        f"{name} {{\n  a = {kind}[] parameter(0)\n  b = {kind}[] parameter(1)\n"
        f"  ROOT c = {kind}[] {reducer}(a, b)\n}}\n\n"
        for name, reducer in own.reductions.items()
    )
    types = [Template(taken).substitute(words) for taken in own.takes]
    inner = "".join(f"  {line}\n" for line in first) + f"  ROOT {last}\n"
    result = Template(own.makes).substitute(words)
    return _module(types, inner, result, own.kind, config, reductions)


@dataclass(frozen=True)
class _Pass:
    """A template of ``hlo_passes.yaml``, which explains the fields."""

    ops: Mapping[str, str]
    takes: Sequence[str]
    body: str
    makes: str = "$all"
    kind: str = "kLoop"
    reductions: Mapping[str, str] = field(default_factory=dict)


@cache
def _passes() -> dict[str, tuple[_Pass, str]]:
    """Return template and opcode of element-wise and row-wise operators by name."""
    each = [_Pass(**own) for own in own_data("features/operators/hlo_passes.yaml")]
    return {op: (own, opcode) for own in each for op, opcode in own.ops.items()}


def _attention(row: Row, config: str) -> str:
    batch, heads, groups, d_key, d_value, q_len, kv_len = (
        int(row[c]) for c in PARAMETERS["attention"][:7]
    )
    cached = "f8e4m3fn" if row.get("kv_dtype") == "fp8" else "bf16"
    types = [
        f"bf16[{batch},{q_len},{heads},{d_key}]",
        f"{cached}[{batch},{kv_len},{groups},{d_key}]",
    ]
    if row["family"] != "generation_mla":  # its values are part of the latent keys
        types.append(f"{cached}[{batch},{kv_len},{groups},{d_value}]")
    result = f"bf16[{batch},{q_len},{heads},{d_value}]"
    return _call(types, result, f"{TARGET}.attention", config)


def _moe(row: Row, config: str) -> str:
    tokens, hidden, full, topk, experts, tp, ep = (int(row[c]) for c in PARAMETERS["moe"])
    local, inner = max(experts // ep, 1), max(full // tp, 1)
    gated = 1 if ungated(full, topk, experts, str(row.get("kernel", ""))) else 2
    kind = TABLE_FORMATS[row["dtype"]].weights
    types = [
        f"bf16[{tokens},{hidden}]",
        f"s32[{tokens},{topk}]",
        f"f32[{tokens},{topk}]",
        f"{kind}[{local},{hidden},{gated * inner}]",
        f"{kind}[{local},{inner},{hidden}]",
    ]
    return _call(types, f"bf16[{tokens},{hidden}]", f"{TARGET}.moe", config)


#: Writers by group of families.
TEMPLATES: dict[str, Callable[[Row, str], str]] = {
    "gemm": _gemm,
    "conv": _conv,
    "conv_nd": _conv_nd,
    "tuned_gemm": _tuned_gemm,
    "pointwise": _pointwise,
    "attention": _attention,
    "moe": _moe,
}


def op_ir(row: Row) -> str:
    """Write an operator's kernel as HLO text.

    Args:
        row: ``method``, and the numeric and text parameters of its family.

    Raises:
        DatasetError: The family, dtype or op is unknown, or a parameter is missing.
    """
    key = f"{row['method']}/{row['family']}"
    if key not in FAMILIES:
        raise DatasetError(f"no operator family {key!r}", hint="families: " + ", ".join(FAMILIES))
    group = FAMILIES[key]
    dtype = row.get("dtype")
    if dtype not in TABLE_FORMATS:
        raise DatasetError(
            f"no dtype {dtype!r} of operators", hint="dtypes: " + ", ".join(TABLE_FORMATS)
        )
    # Compact and in a fixed order, because the text is hashed and searched for `_MARK`.
    config = json.dumps({CONFIG: _config(row, group)}, separators=(",", ":"))
    return TEMPLATES[group](row, config)


def op_texts(frame: pd.DataFrame, family: str) -> list[str]:
    """Write the kernels of rows of one family as HLO texts.

    Raises:
        DatasetError: As :func:`op_ir`, with the row's ``id``.
    """
    texts = []
    for place, row in enumerate(_records(frame, family)):
        try:
            texts.append(op_ir(row))
        except DatasetError as error:
            label = frame["id"].iloc[place] if "id" in frame else frame.index[place]
            raise DatasetError(error.what, where=f"row {label}", hint=error.hint) from None
    return texts


def _records(frame: pd.DataFrame, family: str) -> Iterator[dict[str, object]]:
    """Yield the parameters of each row as plain Python values."""
    method, own = family.split("/")
    whole = [c for c in PARAMETERS[FAMILIES[family]] if c in frame]
    text = [c for c in NAMES if c in frame and c != "family"]
    columns: list[object] = [
        frame[c].astype(np.int64).tolist() if frame[c].notna().all() else frame[c].astype(object)
        for c in whole
    ]
    columns += [frame[c].astype(object).fillna("").tolist() for c in text]
    for values in zip(*columns, strict=True):
        record = dict(zip((*whole, *text), values, strict=True))
        yield {"method": method, "family": own, **record}


def read_op(ir: str) -> dict[str, object] | None:
    """Return the parameters of a kernel written by :func:`op_ir`, or ``None`` for other kernels."""
    start = ir.find(_MARK)
    if start < 0:
        return None
    config: dict[str, object] = json.JSONDecoder().raw_decode(ir, start)[0][CONFIG]
    return config


def op_frame(irs: Iterable[str]) -> pd.DataFrame:
    """Make a table of the kernels' operators, one row each; other kernels have an empty method."""
    import pandas as pd

    rows = [read_op(ir) or {"method": ""} for ir in irs]
    # A fixed column order, whatever the first kernel contains; unknown columns come last.
    wanted = ["method", *NAMES, *dict.fromkeys(c for g in PARAMETERS.values() for c in g)]
    frame = pd.DataFrame(rows)
    return frame.reindex(columns=[*wanted, *(c for c in frame if c not in wanted)])


def _config(row: Row, group: str) -> dict[str, object]:
    config: dict[str, object] = {"method": row["method"]}
    config |= {c: str(row[c]) for c in NAMES if _present(row.get(c))}
    config |= {c: int(row[c]) for c in PARAMETERS[group] if _present(row.get(c))}
    absent = [c for c in PARAMETERS[group] if c not in config and c not in OPTIONAL]
    if absent:
        family = f"{row['method']}/{row['family']}"
        raise DatasetError(f"{family} needs a whole number in column {absent[0]!r}")
    return config


def _present(value: object) -> bool:
    import pandas as pd

    return value is not None and value is not pd.NA and value == value and value != ""
