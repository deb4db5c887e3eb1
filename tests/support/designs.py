"""Random designs of chips and random operators, for properties that hold for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pandas as pd

from opcast.features.devices.catalogue import find_device
from opcast.features.devices.device import DeviceSpec
from opcast.features.operators.schema import DTYPES, FAMILIES, FLAGS
from opcast.predict.designs import RATES

#: Chips that designs start from: all generations of tensor cores, another maker's, none.
BASES = ("v100-sxm", "a100-sxm-80gb", "l40s", "h100-sxm", "h200-sxm", "b200", "mi300x")


#: Figures that no kernel of one device depends on.
LINKS = ("link_bandwidth", "inter_node_bandwidth", "host_bandwidth")


def linked(spec: DeviceSpec, factor: float) -> DeviceSpec:
    """The chip with other links."""
    return replace(spec, **{name: getattr(spec, name) * factor for name in LINKS})


def designs(rng: np.random.Generator, count: int, spread: float = 0.4) -> Iterator[DeviceSpec]:
    """Random chips: each rate of a known one times e^N(0, spread), half with other cores."""
    for place in range(count):
        base = spec = find_device(BASES[place % len(BASES)])
        for rate in RATES.values():
            spec = rate(spec, float(np.exp(rng.normal(0, spread))))
        if rng.random() < 0.5:
            cores = max(1, round(base.core_count * float(np.exp(rng.normal(0, 0.7)))))
            spec = replace(spec, core_count=cores)
        yield replace(spec, name=f"design-{place}", aliases=(), base=base.name)


def operators(rng: np.random.Generator, family: str, count: int) -> pd.DataFrame:
    """Random operators of a family."""
    group = FAMILIES[family]
    rows = pd.DataFrame([_sizes(rng, family, group) for _ in range(count)])
    framework = rng.choice(FLAGS["backends"], count) if family.startswith("graph/") else ""
    formats = DTYPES.get(group, ("fp16", "fp32"))
    if not family.startswith(("graph/", "tuned/")):
        formats = {"xla": ("bf16", "tf32"), "eager": ("fp32",)}.get(family.split("/")[0], ("fp16",))
    return rows.assign(dtype=rng.choice(formats, count), backend=framework, kernel="")


def _sizes(rng: np.random.Generator, family: str, group: str) -> dict[str, object]:
    def size(low: int, high: int, step: int = 1) -> int:
        return max(step, int(np.exp(rng.uniform(np.log(low), np.log(high)))) // step * step)

    def one(*values: int) -> int:
        return int(rng.choice(values))

    op = family.split("/")[1]
    if group in ("gemm", "tuned_gemm"):
        b = 1 if op == "linear" else size(1, 128)
        row = {"op": op, "b": b, "m": size(1, 16384), "n": size(64, 16384, 8)}
        row["k"] = size(64, 16384, 8)
        calls = {"trans_a": 0, "trans_b": 1, "preshuffled": 0, "rotated": one(0, 1)}
        return row if group == "gemm" else {**row, **calls}
    if group == "pointwise":
        named = {"elementwise": "add", "norm": "rms_norm", "quantize": "quantize_fp8"}
        return {"op": named.get(op, op), "rows": size(1, 65536), "cols": size(16, 16384), "n_in": 2}
    if group == "conv":
        return {"op": op, "batch": size(1, 256), "cin": size(3, 512), "cout": size(16, 512),
                "ksize": one(1, 3, 5), "insize": size(7, 224), "stride": one(1, 2),
                "pad": 1}  # fmt: skip
    if group == "conv_nd":
        ones = ("d", "kd", "stride_d", "stride_h", "stride_w", "dil_d", "dil_h", "dil_w", "groups")
        h, k = size(7, 224), one(1, 3, 5)
        return dict.fromkeys(ones, 1) | {
            "op": str(rng.choice(["fwd", "bwd_data", "bwd_weights"])), "ndim": 2, "n": size(1, 256),
            "c": size(3, 512), "k": size(16, 512), "h": h, "w": h, "kh": k, "kw": k, "pad_d": 0,
            "pad_h": k // 2, "pad_w": k // 2, "channels_last": one(0, 1),
        }  # fmt: skip
    if group == "moe":
        return {"op": op, "tokens": size(1, 16384), "hidden": size(1024, 8192, 128), "tp": 1,
                "inter": size(512, 16384, 256), "topk": one(1, 2, 8), "experts": one(8, 64, 256),
                "ep": one(1, 8), "distribution": "balanced"}  # fmt: skip
    latent, decode = "mla" in family, "generation" in family
    kv_heads, keys = one(1, 2, 8), size(64, 16384)
    width = (576 if decode else 192) if latent else one(64, 128)
    return {"op": op, "batch": size(1, 128 if decode else 8), "kv_heads": kv_heads,
            "q_heads": kv_heads * one(1, 4, 8), "head_dim": width, "window": 0, "kv_dtype": "bf16",
            "v_head_dim": (512 if decode else 128) if latent else width, "kv_len": keys,
            "q_len": 1 if decode else keys, "causal": int("encoder" not in family)}  # fmt: skip
