"""What all tests share: homes of their own, kept compiler output, groups; operator rows."""

from __future__ import annotations

import gc
import hashlib
import inspect
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest

if TYPE_CHECKING:
    from opcast.features.devices.device import DeviceSpec

# No test touches the user's own caches or MLflow store, nor those of the worker beside it.
_HOME = tempfile.TemporaryDirectory(prefix="opcast-tests-")
os.environ["OPCAST_CACHE"] = _HOME.name
# Processes of pytest-xdist set the width of its own terminal; tables are compared at ours.
os.environ.pop("COLUMNS", None)
# What thousands of tests keep is walked again and again otherwise: a tenth of their time.
gc.set_threshold(100_000, 50, 100)
os.environ["OPCAST_MLRUNS"] = os.path.join(_HOME.name, "mlruns")  # noqa: PTH118

# What a script starts in the background ignores Ctrl-C, and so would all that tests start.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

#: Files whose tests take minutes each: they begin first, or one process waits for them at the end.
_LONGEST = ("test_readme.py", "test_tutorials.py", "test_golden.py")


# pytest-xdist's own hook reads the groups, and is registered later, so that it would run earlier.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group tests for ``--dist loadgroup``: those of a group run in one process, in order.

    That is a file; the folder of the server, which is started once; a single page of the
    tutorials; and one group of the golden cases.
    """
    for item in items:
        group = item.nodeid.split("::")[0]
        if item.path.name == "test_tutorials.py" or "test_predictions_stay[" in item.nodeid:
            group = item.nodeid
        elif item.path.parent.name == "server":
            group = "server"
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: item.path.name not in _LONGEST)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep what was imported from garbage collection; check the groups.

    Groups that pytest-xdist does not see cost a quarter of the time, and nothing says so.
    """
    # Some tests collect garbage by the way, in a process that has all libraries imported.
    gc.collect()
    gc.freeze()
    grouped = all("@" in item.nodeid for item in session.items)
    if session.config.getoption("loadgroup", False) and not grouped:
        raise pytest.UsageError("pytest-xdist does not group tests under this version of pytest")


def _kept_folder() -> Path | None:
    """Where compilers' answers are kept from run to run: ``$OPCAST_TEST_CACHE``; empty for none."""
    given = os.environ.get("OPCAST_TEST_CACHE")
    if given is not None:
        return Path(given) if given else None
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "opcast-tests"


@pytest.fixture(scope="session", autouse=True)
def real_compiler() -> Iterator[Callable[[Path], list[str]]]:
    """As :func:`kept_compilers`, for all tests."""
    with kept_compilers() as real:
        yield real


@contextmanager
def kept_compilers() -> Iterator[Callable[[Path], list[str]]]:
    """Compilers of absent devices answer from an earlier run; gives the command of the real one."""
    from opcast.features.lowering.target_compiler import process as compile_process

    real, folder = compile_process._command, _kept_folder()
    if folder is None:
        yield real
        return
    script = Path(__file__).parent / "support" / "kept_compiles.py"
    start = [sys.executable, str(script), str(folder / "compiles")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            compile_process, "_command", lambda job: [*start, _compiling_code(), *real(job)]
        )
        yield real


@cache
def _compiling_code() -> str:
    """Digest of what runs in the compile process: its own modules and jaxlib's version."""
    from opcast.features.lowering.target_compiler.pjrt_compat import open_devices
    from opcast.features.lowering.target_compiler.worker import Job

    code = "".join(Path(inspect.getfile(own)).read_text() for own in (open_devices, Job))
    return hashlib.sha256(f"{version('jaxlib')} {code}".encode()).hexdigest()


@pytest.fixture
def cold_compiler(
    real_compiler: Callable[[Path], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compilers themselves, whatever was kept."""
    from opcast.features.lowering.target_compiler import process as compile_process

    monkeypatch.setattr(compile_process, "_command", real_compiler)


@pytest.fixture
def ray_cluster() -> Iterator[Any]:
    """A Ray of one host, to which a test may add."""
    ray = pytest.importorskip("ray", reason="the extra 'scale' is not installed")
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        yield nodes
    finally:
        ray.shutdown()
        nodes.shutdown()


@pytest.fixture(scope="session")
def round_gpu() -> Callable[..., DeviceSpec]:
    """GPUs with round figures: 100 SMs at 1 GHz, 1 MB of cache, 1 TB/s, 1 PFLOP/s in 16 bits."""
    from opcast.features.devices.device import DeviceSpec, MemoryLevel

    def make(name: str = "round", **changes: object) -> DeviceSpec:
        spec = DeviceSpec(
            name, "gpu",
            {"f32": 1e14, "bf16": 1e15, "f16": 1e15, "f8e4m3fn": 2e15, "f4e2m1fn": 4e15},
            {"f32": 1e13}, (MemoryLevel(1e6, 1e13), MemoryLevel(1e11, 1e12)), 2e-6,
            core_count=100, clock_hz=1e9, vendor="NVIDIA", architecture=f"arch-{name}",
            lanes_per_core=128,
        )  # fmt: skip
        return replace(spec, **changes)  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def op_rows() -> Callable[..., pd.DataFrame]:
    """Makes ``n`` random operators of a family, without ``device`` and ``latency_us``."""
    return _op_rows


def _op_rows(family: str, n: int, seed: int = 0) -> pd.DataFrame:
    from opcast.features.operators import FAMILIES

    rng = np.random.default_rng(seed)
    method, name = family.split("/")
    group = FAMILIES[family]
    rows = pd.DataFrame(_SIZES[group](rng, n, name))
    dtypes = {"eager": ["fp32"], "kernel": ["fp16"]}.get(method, _DTYPES.get(group, ["bf16"]))
    directions = rng.choice(["fwd", "bwd_data", "bwd_weights"], n)
    op = directions if group == "conv_nd" else _OPS.get(name, name)
    backends = ["vllm", "sglang", "trtllm"] if method == "graph" else [""]
    caches = ["", "fp8"] if group == "attention" else [""]
    loads = ["balanced", "power_law_1.2"] if group == "moe" else [""]
    return rows.assign(
        id=[f"X{i}" for i in range(n)], key=family, method=method, family=name, op=op,
        split="train",
        dtype=rng.choice(dtypes, n), backend=rng.choice(backends, n), kernel="",
        kv_dtype=rng.choice(caches, n), distribution=rng.choice(loads, n),
    )  # fmt: skip


_OPS = {"elementwise": "add", "norm": "rmsnorm", "quantize": "quantize_fp8"}
_DTYPES = {
    "gemm": ["bf16", "fp8", "fp8_block", "nvfp4", "int8_sq", "int8_wo", "int4_wo"],
    "conv_nd": ["fp32", "fp16", "bf16"],
    "tuned_gemm": ["bf16", "fp8", "fp8_block", "int8", "mxfp4", "fp64", "fp32"],
    "moe": ["bf16", "fp8", "fp8_block", "nvfp4", "int4_wo", "w4a16_mxfp4", "w4a8_mxfp4_mxfp8"],
}


def _between(rng: np.random.Generator, n: int, low: int, high: int) -> np.ndarray:
    """Whole numbers, uniform in their logarithm."""
    return np.exp(rng.uniform(np.log(low), np.log(high), n)).astype(np.int64)


def _gemms(rng: np.random.Generator, n: int, name: str) -> dict[str, np.ndarray]:
    batch = _between(rng, n, 1, 64) if name == "bmm" else np.ones(n, np.int64)
    return {"b": batch} | {c: _between(rng, n, 1, 16384) for c in "mnk"}


def _convs(rng: np.random.Generator, n: int, name: str) -> dict[str, np.ndarray]:
    channels = {c: _between(rng, n, 1, 512) for c in ("cin", "cout")}
    choices = {"ksize": (1, 3, 5, 7), "stride": (1, 2), "pad": (0, 1, 3)}
    drawn = {c: rng.choice(values, n) for c, values in choices.items()}
    sizes = {"batch": _between(rng, n, 1, 64), "insize": _between(rng, n, 7, 224)}
    return channels | drawn | sizes


def _convs_nd(rng: np.random.Generator, n: int, name: str) -> dict[str, np.ndarray]:
    groups, ones = rng.choice([1, 1, 4, 32], n), np.ones(n, np.int64)
    flat = rng.random(n) < 0.7
    deep = {c: np.where(flat, ones, rng.choice([1, 3], n)) for c in ("kd", "stride_d")}
    channels = {c: groups * _between(rng, n, 1, 64) for c in "ck"}
    sizes = {c: _between(rng, n, 7, 224) for c in "hw"} | {"n": _between(rng, n, 1, 64)}
    filters = {c: rng.choice([1, 3, 5, 7], n) for c in ("kh", "kw")}
    strides = {c: rng.choice([1, 2], n) for c in ("stride_h", "stride_w")}
    padding = {c: rng.choice([0, 1, 3], n) for c in ("pad_h", "pad_w")}
    holes = {c: rng.choice([1, 1, 2], n) for c in ("dil_h", "dil_w")}
    return sizes | channels | filters | strides | padding | holes | deep | {
        "ndim": np.where(flat, 2, 3), "d": np.where(flat, 1, _between(rng, n, 4, 32)),
        "pad_d": 0 * ones, "dil_d": ones, "groups": groups,
        "channels_last": rng.choice([0, 1], n),
    }  # fmt: skip


def _tuned(rng: np.random.Generator, n: int, name: str) -> dict[str, np.ndarray]:
    flags = {c: rng.choice([0, 1], n) for c in ("trans_a", "trans_b", "preshuffled", "rotated")}
    return _gemms(rng, n, name) | flags


def _passes(rng: np.random.Generator, n: int, name: str) -> dict[str, np.ndarray]:
    inputs = np.full(n, 2 if name == "elementwise" else 1)
    return {"rows": _between(rng, n, 1, 65536), "cols": _between(rng, n, 1, 16384), "n_in": inputs}


def _attentions(rng: np.random.Generator, n: int, name: str) -> dict[str, np.ndarray]:
    groups, kv_len = rng.choice([1, 2, 4, 8], n), _between(rng, n, 1, 32768)
    queries = np.minimum(_between(rng, n, 1, 8192), kv_len)
    return {
        "batch": _between(rng, n, 1, 256), "q_heads": groups * rng.choice([1, 2, 8, 16], n),
        "kv_heads": groups, "head_dim": rng.choice([64, 128, 192], n),
        "v_head_dim": rng.choice([64, 128], n),
        "q_len": np.ones(n, np.int64) if name.startswith("generation") else queries,
        "kv_len": kv_len, "window": rng.choice([0, 0, 128, 4096], n),
        "causal": rng.choice([0, 1], n),
    }  # fmt: skip


def _experts(rng: np.random.Generator, n: int, name: str) -> dict[str, np.ndarray]:
    sizes = {c: _between(rng, n, 64, 8192) for c in ("hidden", "inter")}
    ep = rng.choice([1, 2, 8], n)
    return sizes | {
        "tokens": _between(rng, n, 1, 16384), "topk": rng.choice([1, 2, 8], n),
        "experts": ep * rng.choice([4, 16, 32], n), "tp": rng.choice([1, 2, 8], n), "ep": ep,
    }  # fmt: skip


_SIZES = {
    "gemm": _gemms, "conv": _convs, "pointwise": _passes, "attention": _attentions,
    "moe": _experts, "conv_nd": _convs_nd, "tuned_gemm": _tuned,
}  # fmt: skip
