"""HLO text of operators, by group of families: what one kernel of each looks like.

A template takes a row and the text of its ``backend_config``, and gives a module of one fusion or
one custom call. :mod:`.hlo` chooses among them.

Texts identify samples by their hash: a change to a template makes stored samples look new.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ...common.errors import DatasetError
from ...common.types import JsonMapping
from ..cost.formats import TABLE_FORMATS, UNQUANTISED
from .op import ungated
from .schema import PARAMETERS

#: Target of custom calls that only this package reads.
TARGET = "opcast.op"
#: Rows of an embedding table, whose height the published rows do not give: Llama's vocabulary. Only
#: the gathered rows count as traffic, so it hardly matters.
VOCABULARY = 32_000

Row = JsonMapping


def _module(
    parameters: list[str], inner: str, result: str, kind: str, config: str, more: str
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
        return _module([left, right], inner, out, "kCustom", config, "")
    left, right, out = f"{kind}[{m},{k}]", f"{kind}[{k},{n}]", f"{kind}[{m},{n}]"
    dot = f"{out} dot(v0, v1), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}\n"
    if row["method"] != "eager":
        return _module([left, right], f"  ROOT v2 = {dot}", out, "kCustom", config, "")
    # NeuSight's linear layers are PyTorch's `addmm`, with a bias.
    bias = f"{kind}[{n}]"
    inner = (
        f"  v3 = {dot}  v4 = {out} broadcast(v2), dimensions={{1}}\n  ROOT v5 = {out} add(v3, v4)\n"
    )
    return _module([left, right, bias], inner, out, "kCustom", config, "")


def _quantised(dtype: str, shape: tuple[int, int, int, int], config: str) -> str:
    """Write a product with narrow weights, 16-bit activations and scales for blocks."""
    b, m, n, k = shape
    batch = f"{b}," if b > 1 else ""
    types = [f"bf16[{batch}{m},{k}]", f"{TABLE_FORMATS[dtype].weights}[{batch}{k},{n}]"]
    if block := TABLE_FORMATS[dtype].block:
        deep = -(-k // block)
        # Block scales of fp8 cover 128 × 128 weights; those of the 4-bit formats lie along the
        # depth only.
        wide = -(-n // 128) if dtype == "fp8_block" else n
        types.append(f"f8e4m3fn[{batch}{deep},{wide}]")
    return _call(types, f"bf16[{batch}{m},{n}]", f"{TARGET}.quantized_gemm", config)


def _conv(row: Row, config: str) -> str:
    batch, cin, cout, size, inside, stride, pad = (int(row[c]) for c in PARAMETERS["conv"])
    out = max((inside + 2 * pad - size) // stride + 1, 1)
    types = [f"f32[{batch},{cin},{inside},{inside}]", f"f32[{cout},{cin},{size},{size}]"]
    result = f"f32[{batch},{cout},{out},{out}]"
    window = f"size={size}x{size}"
    window += f" stride={stride}x{stride}" if stride > 1 else ""
    window += f" pad={pad}_{pad}x{pad}_{pad}" if pad else ""
    inner = (
        f"  ROOT v2 = {result} convolution(v0, v1), dim_labels=bf01_oi01->bf01, "
        f"window={{{window}}}\n"
    )
    return _module(types, inner, result, "kCustom", config, "")


def _conv_nd(row: Row, config: str) -> str:
    """Write a convolution in one to three dimensions; gradients are custom calls.

    A gradient is a convolution of a dilated or transposed array, of which libraries compute what
    meets data only.
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
        # The printer leaves out what is usual, and texts have to be canonical.
        if set(values) != {usual}:
            window += f" {name}={'x'.join(values)}"
    places = "012"[: len(axes)]
    lies = f"b{places}f" if last else f"bf{places}"
    group = f", feature_group_count={groups}" if groups > 1 else ""
    inner = (
        f"  ROOT v2 = {y} convolution(v0, v1), dim_labels={lies}_oi{places}->{lies}{group}, "
        f"window={{{window}}}\n"
    )
    return _module([x, w], inner, y, "kCustom", config, "")


class _Along(NamedTuple):
    """One dimension of a convolution: places of the result, taps, stride, padding, dilation."""

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
    """Write a product whose operands are both in their format already."""
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
    kind = TABLE_FORMATS[row["dtype"]].weights
    rows, cols = int(row["rows"]), int(row["cols"])
    op = str(row["op"])
    if op not in _BODIES:
        raise DatasetError(f"no element-wise op {op!r}", hint="ops: " + ", ".join(_BODIES))
    return _BODIES[op](op, kind, rows, cols, config)


_BINARY = {"add": "add", "mul": "multiply", "pow": "power", "div": "divide"}


def _binary(op: str, kind: str, rows: int, cols: int, config: str) -> str:
    t = f"{kind}[{rows},{cols}]"
    inner = f"  ROOT v2 = {t} {_BINARY[op]}(v0, v1)\n"
    return _module([t, t], inner, t, "kLoop", config, "")


def _scalar(op: str, kind: str, rows: int, cols: int, config: str) -> str:
    t = f"{kind}[{rows},{cols}]"
    inner = (
        # Any constant does: the cost of an op does not depend on its value.
        f"  v1 = {kind}[] constant(2)\n  v2 = {t} broadcast(v1), dimensions={{}}\n"
        f"  ROOT v3 = {t} {_BINARY[op[:-1]]}(v0, v2)\n"
    )
    return _module([t], inner, t, "kLoop", config, "")


def _unary(op: str, kind: str, rows: int, cols: int, config: str) -> str:
    t = f"{kind}[{rows},{cols}]"
    fill = "broadcast(v1), dimensions={}\n"
    inner = {
        "tanh": f"  ROOT v1 = {t} tanh(v0)\n",
        "relu": f"  v1 = {kind}[] constant(0)\n  v2 = {t} {fill}  ROOT v3 = {t} maximum(v0, v2)\n",
        "gelu": (
            f"  v1 = {kind}[] constant(0.5)\n  v2 = {t} {fill}  v3 = {t} erf(v0)\n"
            f"  v4 = {t} multiply(v0, v2)\n  v5 = {t} multiply(v4, v3)\n"
            f"  ROOT v6 = {t} add(v4, v5)\n"
        ),
    }[op]
    return _module([t], inner, t, "kLoop", config, "")


def _embedding(op: str, kind: str, rows: int, cols: int, config: str) -> str:
    t, ids = f"{kind}[{rows},{cols}]", f"s32[{rows},1]"
    inner = (
        f"  ROOT v2 = {t} gather(v0, v1), offset_dims={{1}}, collapsed_slice_dims={{0}}, "
        f"start_index_map={{0}}, index_vector_dim=1, slice_sizes={{1,{cols}}}\n"
    )
    return _module([f"{kind}[{VOCABULARY},{cols}]", ids], inner, t, "kLoop", config, "")


def _rope(op: str, kind: str, rows: int, cols: int, config: str) -> str:
    """Write a rotary embedding: ``x cos + rotate(x) sin``, halves of the width rotated."""
    t, half = f"{kind}[{rows},{cols}]", f"{kind}[{rows},{cols // 2}]"
    rest = cols - cols // 2
    tail = f"{kind}[{rows},{rest}]"
    inner = (
        f"  v3 = {half} slice(v0), slice={{[0:{rows}], [0:{cols // 2}]}}\n"
        f"  v4 = {tail} slice(v0), slice={{[0:{rows}], [{cols // 2}:{cols}]}}\n"
        f"  v5 = {tail} negate(v4)\n  v6 = {t} concatenate(v5, v3), dimensions={{1}}\n"
        f"  v7 = {t} broadcast(v1), dimensions={{0}}\n  v8 = {t} broadcast(v2), dimensions={{0}}\n"
        f"  v9 = {t} multiply(v0, v7)\n  v10 = {t} multiply(v6, v8)\n"
        f"  ROOT v11 = {t} add(v9, v10)\n"
    )
    angle = f"{kind}[{rows}]"
    return _module([t, angle, angle], inner, t, "kLoop", config, "")


def _gated(op: str, kind: str, rows: int, cols: int, config: str) -> str:
    """Write ``silu(gate) × value``, gate and value side by side in one tensor of ``cols``."""
    half = cols // 2
    t, out = f"{kind}[{rows},{cols}]", f"{kind}[{rows},{half}]"
    inner = (
        f"  v1 = {out} slice(v0), slice={{[0:{rows}], [0:{half}]}}\n"
        f"  v2 = {out} slice(v0), slice={{[0:{rows}], [{half}:{2 * half}]}}\n"
        f"  v3 = {out} logistic(v1)\n  v4 = {out} multiply(v1, v3)\n"
        f"  ROOT v5 = {out} multiply(v4, v2)\n"
    )
    return _module([t], inner, out, "kLoop", config, "")


def _reducer(kind: str, name: str, opcode: str) -> str:
    return (
        f"{name} {{\n  a = {kind}[] parameter(0)\n  b = {kind}[] parameter(1)\n"
        f"  ROOT c = {kind}[] {opcode}(a, b)\n}}\n\n"
    )


def _softmax(op: str, kind: str, rows: int, cols: int, config: str) -> str:
    t, row = f"{kind}[{rows},{cols}]", f"{kind}[{rows}]"
    more = _reducer(kind, "top", "maximum") + _reducer(kind, "sum", "add")
    inner = (
        f"  v1 = {kind}[] constant(-inf)\n"
        f"  v2 = {row} reduce(v0, v1), to_apply=top, dimensions={{1}}\n"
        f"  v3 = {t} broadcast(v2), dimensions={{0}}\n  v4 = {t} subtract(v0, v3)\n"
        f"  v5 = {t} exponential(v4)\n  v6 = {kind}[] constant(0)\n"
        f"  v7 = {row} reduce(v5, v6), to_apply=sum, dimensions={{1}}\n"
        f"  v8 = {t} broadcast(v7), dimensions={{0}}\n  ROOT v9 = {t} divide(v5, v8)\n"
    )
    return _module([t], inner, t, "kInput", config, more)


def _norm(op: str, kind: str, rows: int, cols: int, config: str) -> str:
    """Write a layer norm with scale and shift, or an RMS norm with scale."""
    t, row, wide = f"{kind}[{rows},{cols}]", f"{kind}[{rows}]", f"{kind}[{cols}]"
    more = _reducer(kind, "sum", "add")
    shift = op != "rmsnorm"
    types = [t, wide, wide] if shift else [t, wide]
    lines = [f"z = {kind}[] constant(0)", f"w = {kind}[] constant({cols})"]
    source = "v0"
    if shift:
        lines += [
            f"s = {row} reduce(v0, z), to_apply=sum, dimensions={{1}}",
            f"ws = {row} broadcast(w), dimensions={{}}",
            f"m = {row} divide(s, ws)",
            f"mb = {t} broadcast(m), dimensions={{0}}",
            f"x = {t} subtract(v0, mb)",
        ]
        source = "x"
    lines += [
        f"q = {t} multiply({source}, {source})",
        f"qs = {row} reduce(q, z), to_apply=sum, dimensions={{1}}",
        f"wq = {row} broadcast(w), dimensions={{}}",
        f"v = {row} divide(qs, wq)",
        f"i = {row} rsqrt(v)",
        f"ib = {t} broadcast(i), dimensions={{0}}",
        f"n = {t} multiply({source}, ib)",
        f"g = {t} broadcast(v1), dimensions={{1}}",
    ]
    last = f"{t} multiply(n, g)"
    if shift:
        lines += [f"y = {last}", f"h = {t} broadcast(v2), dimensions={{1}}"]
        last = f"{t} add(y, h)"
    inner = "".join(f"  {line}\n" for line in lines) + f"  ROOT o = {last}\n"
    return _module(types, inner, t, "kInput", config, more)


def _quantize(op: str, kind: str, rows: int, cols: int, config: str) -> str:
    t, out = f"{kind}[{rows},{cols}]", f"f8e4m3fn[{rows},{cols}]"
    inner = (
        f"  v2 = {t} broadcast(v1), dimensions={{}}\n  v3 = {t} multiply(v0, v2)\n"
        f"  ROOT v4 = {out} convert(v3)\n"
    )
    return _module([t, f"{kind}[]"], inner, out, "kLoop", config, "")


#: Writers of element-wise and row-wise ops, by the name in the tables.
_BODIES: dict[str, Callable[[str, str, int, int, str], str]] = {
    **dict.fromkeys(_BINARY, _binary),
    **dict.fromkeys((f"{o}u" for o in _BINARY), _scalar),
    **dict.fromkeys(("tanh", "relu", "gelu"), _unary),
    "embedding": _embedding,
    "rope": _rope,
    "silu_and_mul": _gated,
    "softmax": _softmax,
    "ln": _norm,
    "layernorm": _norm,
    "rmsnorm": _norm,
    "quantize_fp8": _quantize,
}


def _attention(row: Row, config: str) -> str:
    batch, heads, groups, d_key, d_value, q_len, kv_len = (
        int(row[c]) for c in PARAMETERS["attention"][:7]
    )
    cached = "f8e4m3fn" if row.get("kv_dtype") == "fp8" else "bf16"
    types = [
        f"bf16[{batch},{q_len},{heads},{d_key}]",
        f"{cached}[{batch},{kv_len},{groups},{d_key}]",
    ]
    if row["family"] != "generation_mla":  # whose values are part of the latent keys
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


#: Templates by group of families.
TEMPLATES: dict[str, Callable[[Row, str], str]] = {
    "gemm": _gemm,
    "conv": _conv,
    "conv_nd": _conv_nd,
    "tuned_gemm": _tuned_gemm,
    "pointwise": _pointwise,
    "attention": _attention,
    "moe": _moe,
}
