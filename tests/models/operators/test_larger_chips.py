"""A chip with more of everything, or of one thing, is not slower: physics, and shipped models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd
import pytest

from opcast.features.devices.catalogue import (
    _catalogue_sheet,
    _with_base,
    device_names,
    find_device,
)
from opcast.features.devices.device import DeviceSpec
from opcast.features.devices.sheet import Sheet, overlay
from opcast.features.devices.spec_of_sheet import device_of_sheet
from opcast.features.lowering.lower import lower
from opcast.features.operators import FAMILIES, op_features
from opcast.features.table.roofline import least_seconds, roofline
from opcast.models.gpu.operator_library import Operators
from opcast.predict.program.predictor import load
from opcast.workflows.reports.device_rows import build_program

from ...support.cases import later

AXES = {"cores": "core_count", "clock": "boost_mhz", "bandwidth": "hbm_bandwidth_gbps",
        "l2": "l2_mb"}  # fmt: skip
ALL = "+".join(AXES)
GROWN = (*AXES, ALL)
DTYPES = {
    "eager": ("fp32",),
    "kernel": ("fp16",),
    "graph": ("bf16", "fp8", "nvfp4"),
    "xla": ("bf16", "tf32"),
    "tuned": ("fp16", "fp32"),
    "profiled": ("bf16",),
}
#: Analytical estimates that more cores may lengthen, by at most this factor: more rows in flight
#: leave the cache, a decode is split further than pays, or its one wave of blocks has less of the
#: memory's bandwidth for each, and the same power feeds more cores.
MORE_CORES = {
    "kernel/linear": 1.003, "kernel/bmm": 1.013, "graph/linear": 1.014, "graph/bmm": 1.014,
    "eager/softmax": 1.43, "eager/ln": 1.22, "graph/generation_attention": 1.17,
    "graph/generation_mla": 1.2, "tuned/linear": 1.006, "tuned/bmm": 1.006,
}  # fmt: skip
#: Ones that more of everything may lengthen: chips of 300 cores split a latent decode further than
#: pays.
MORE_OF_ALL = {"graph/generation_mla": 1.15}
#: The largest factor by which an operator takes longer when one figure of a chip that the model
#: never saw is doubled, when all are, and when any are of a chip of the catalogue. A larger chip
#: starts from the one of its architecture that has most of its cores and capacities, so that what
#: trees learned of two chips differs, as do libraries where no kernel is named.
LEARNED = {
    "eager/linear": (1.0, 1.0, 1.0), "eager/conv": (1.0, 1.0, 1.7),
    "eager/softmax": (1.34, 1.0, 1.36), "kernel/norm": (1.0, 1.0, 1.0),
    "graph/linear": (1.01, 1.0, 1.02), "graph/moe": (1.0, 1.0, 1.09),
    "graph/context_attention": (1.0, 1.0, 1.0),
    "graph/generation_attention": (1.0, 1.0, 1.17),
}  # fmt: skip


def larger(name: str, axes: str, factor: int) -> DeviceSpec:
    """A device of the catalogue with more of what the axes name."""
    base = _with_base(_catalogue_sheet(name))
    values = {
        AXES[a]: base.values[AXES[a]] * factor for a in axes.split("+") if AXES[a] in base.values
    }
    texts = {"name": f"{name}|{axes}|{factor}"}
    return device_of_sheet(overlay(base, Sheet("x.yaml", texts, (), values)))


def chips(names: list[str]) -> dict[str, DeviceSpec]:
    """Devices, and their larger ones by the name ``device|axes|factor``."""
    found = {name: device_of_sheet(_with_base(_catalogue_sheet(name))) for name in names}
    made = [larger(n, a, f) for n, a, f in product(names, GROWN, (2, 4))]
    return found | {chip.name: chip for chip in made}


@pytest.fixture(scope="module", params=["architectures", later("all")])
def gpus(request: pytest.FixtureRequest) -> dict[str, DeviceSpec]:
    """One of each architecture, or all of the catalogue, and their larger ones."""
    names = [n for n in device_names() if find_device(n).platform == "gpu"]
    if request.param == "architectures":
        names = list({find_device(name).architecture: name for name in names}.values())
    return chips(names)


def operators(family: str) -> pd.DataFrame:
    """Small to large operators of a family in every dtype."""
    group, method = FAMILIES[family], family.split("/")[0]
    rows = list(_sizes(family, group))
    table = [{**row, "dtype": d} for row, d in product(rows, DTYPES[method])]
    names = {"backend": "vllm", "kernel": ""} if method == "graph" else {}
    return pd.DataFrame(table).assign(**names)


def _sizes(family: str, group: str) -> Iterator[dict[str, object]]:
    if group in ("gemm", "tuned_gemm"):
        plain = {"trans_a": 0, "trans_b": 1, "preshuffled": 0, "rotated": 0}
        for m, n, k in product((1, 64, 1024, 8192), (1024, 8192), (1024, 8192)):
            row: dict[str, object] = {"op": "linear", "b": 1, "m": m, "n": n, "k": k}
            yield row if group == "gemm" else row | plain
    elif group == "pointwise":
        named = {"eager/softmax": "softmax", "eager/ln": "ln", "kernel/norm": "rms_norm",
                 "graph/quantize": "quantize_fp8"}  # fmt: skip
        for rows, cols in product((128, 4096, 65536), (1024, 8192)):
            yield {"op": named.get(family, "add"), "rows": rows, "cols": cols, "n_in": 2}
    elif group == "conv":
        for batch, c, size in product((1, 64), (64, 512), (14, 112)):
            yield {"op": "conv", "batch": batch, "cin": c, "cout": c, "ksize": 3, "insize": size,
                   "stride": 1, "pad": 1}  # fmt: skip
    elif group == "conv_nd":
        once = ("d", "kd", "stride_d", "stride_h", "stride_w", "dil_d", "dil_h", "dil_w", "groups")
        for op, n, c, size in product(("fwd", "bwd_weights"), (1, 64), (64, 512), (14, 112)):
            yield dict.fromkeys(once, 1) | {
                "op": op, "ndim": 2, "n": n, "c": c, "k": c, "h": size, "w": size, "kh": 3, "kw": 3,
                "pad_d": 0, "pad_h": 1, "pad_w": 1, "channels_last": 0,
            }  # fmt: skip
    elif group == "moe":
        for tokens, inter in product((1, 256, 16384), (1024, 14336)):
            yield {"op": "moe", "tokens": tokens, "hidden": 4096, "inter": inter, "topk": 2,
                   "experts": 8, "tp": 1, "ep": 1, "distribution": "balanced"}  # fmt: skip
    else:
        latent = "mla" in family
        for batch, keys in product((1, 16), (128, 1024, 8192)):
            yield {"op": "attention", "batch": batch, "q_heads": 32,
                   "kv_heads": 1 if latent else 8, "head_dim": 576 if latent else 128,
                   "v_head_dim": 512 if latent else 128, "window": 0, "kv_len": keys,
                   "q_len": 1 if "generation" in family else keys,
                   "causal": int("encoder" not in family)}  # fmt: skip


def growth(seconds: np.ndarray, devices: dict[str, DeviceSpec], axes: str) -> np.ndarray:
    """Time on each larger chip over that on the next smaller one."""
    at = {name: place for place, name in enumerate(devices)}
    bases = [name for name in devices if "|" not in name]
    steps = [(at[f"{n}|{axes}|2"], at[n]) for n in bases]
    steps += [(at[f"{n}|{axes}|4"], at[f"{n}|{axes}|2"]) for n in bases]
    return np.concatenate([seconds[more] / seconds[less] for more, less in steps])


@pytest.mark.parametrize("family", FAMILIES)
def test_physics_of_no_operator_is_slower(family: str, gpus: dict[str, DeviceSpec]) -> None:
    rows = operators(family)
    frame = pd.concat([rows.assign(device=name) for name in gpus], ignore_index=True)
    found = op_features(frame, family, gpus)
    shape = (len(gpus), len(rows))
    for axes in GROWN:
        least = found.roofline_s * found.kernels
        assert growth(least.reshape(shape), gpus, axes).max() <= 1 + 1e-9, axes
        # An algorithm of more launches may be the fastest on the larger chip.
        if FAMILIES[family] != "conv_nd":
            assert growth(found.floor_s.reshape(shape), gpus, axes).max() <= 1 + 1e-9, axes
        bounds = {"cores": MORE_CORES, ALL: MORE_OF_ALL}.get(axes, {})
        bound = bounds.get(family, 1.0)
        # XLA's table holds the mean of a call's kernels, which halves where a reduction is split.
        call = found.base_s * found.kernels
        assert growth(call.reshape(shape), gpus, axes).max() <= bound + 1e-9, axes


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("eager/linear", "fp32"), ("kernel/linear", "fp16"), ("graph/linear", "bf16"),
     ("graph/linear", "fp8"), ("graph/linear", "nvfp4")],
)  # fmt: skip
def test_a_huge_product_scales_with_the_cores(
    family: str, dtype: str, gpus: dict[str, DeviceSpec]
) -> None:
    row = {"b": 1, "m": 65536, "n": 65536, "k": 16384, "dtype": dtype, "op": "linear"}
    frame = pd.DataFrame([{**row, "backend": "sglang", "device": name} for name in gpus])
    found = op_features(frame, family, gpus)
    # The arithmetic alone: on chips of little memory narrow numbers wait for that.
    tiles = found.base_s * 2 ** found.X[:, found.names.index("log_tiles_base")]
    for axes in ("cores", "clock", ALL):
        assert growth(tiles[:, None], gpus, axes).max() <= 1 / 1.8, axes
    if dtype == "fp32":
        assert growth(found.base_s[:, None], gpus, "cores").max() <= 1 / 1.8


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_no_kernel_and_program_is_slower(platform: str) -> None:
    source = build_program("mlp batch=512 features=512 width=512 layers=2 mode=train")
    predictor = load()
    name = {"gpu": "h100-sxm", "tpu": "tpu-v5e"}[platform]
    devices = chips([name])
    lowered = lower(source, "fused", device=devices[name])
    every = [n for n in device_names() if find_device(n).platform == platform]
    grown = chips(every)
    for find in (lambda k, d: roofline(k, d).latency_s, least_seconds):
        seconds = np.array([find(lowered.kernels, d) for d in grown.values()])
        seconds = np.maximum(seconds, 1e-15)
        for axes in GROWN:
            assert growth(seconds, grown, axes).max() <= 1 + 1e-9, axes
    model = predictor.model_for(devices[name])
    wall = np.array([model.predict_program(lowered, d).latency for d in devices.values()])
    for axes in GROWN:
        # XLA's products are learned by trees, which are not monotone.
        assert growth(wall[:, None], devices, axes).max() <= 1.005, axes


@pytest.mark.parametrize("family", LEARNED)
def test_how_far_learned_operators_are_from_monotone(family: str) -> None:
    devices = chips(["h100-sxm", "a100-sxm-80gb", "l4", "v100-sxm", "b200", "t4"])
    devices = {n: replace(d, name=n) for n, d in devices.items()}
    rows = operators(family)
    frame = pd.concat([rows.assign(device=name) for name in devices], ignore_index=True)
    found = Operators().family(family).predict(frame, devices).latency
    seconds = found.reshape(len(devices), len(rows))
    single, together, known = LEARNED[family]
    for axes in GROWN:
        first, second = np.split(growth(seconds, devices, axes), 2)
        assert second.max() <= (together if axes == ALL else single) + 1e-3, axes
        assert first.max() <= known + 1e-3, axes


def test_true_fp32_scales_on_larger_chips() -> None:
    chip = {n: replace(larger("h100-sxm", "cores+bandwidth", f), name=n)
            for n, f in (("one", 1), ("two", 2), ("four", 4))}  # fmt: skip
    row = {"op": "linear", "b": 1, "m": 8192, "n": 8192, "k": 8192, "dtype": "fp32"}
    frame = pd.DataFrame([{**row, "device": name} for name in chip])
    one, two, four = Operators().family("eager/linear").predict(frame, chip).latency
    assert one / two > 1.8 and two / four > 1.8
