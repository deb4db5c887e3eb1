"""Prices ATen operators by learned kernels of libraries, else by the roofline."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp, prod
from typing import Any

import numpy as np
import pandas as pd

from ...features.cost.formats import FORMATS
from ...features.devices.device import DeviceSpec
from ...features.ir.torch.record import AttentionUse
from ...features.ir.torch.translate import Place
from ...features.operators.physics import resident_share
from ...features.operators.schema import PARAMETERS
from ...models.gpu.attention import attention_answer, lacks_bf16
from ...models.gpu.depthwise import LOWER, UPPER, depthwise_seconds
from ...models.gpu.memory_passes import shipped_constants, soft_maximum
from ...models.operators import OpModel
from ...models.operators.prediction import FamilyPrediction
from ...models.operators.rows import rows_of_published
from ...simulate.step.calls import OpCall
from ..published.composition import kernel_us
from ..published.opgraph import GraphOp, op_rows
from .aten_reuse import Stream, streams
from .aten_work import ATTENTION, CONVOLUTION, NORM, PASS, PRODUCT, SOFTMAX, Work
from .step_operators import (
    FAMILIES as STEP_FAMILIES,
)
from .step_operators import (
    FLASH2,
    MATRIX_SHARE,
    MEMORY_SHARE,
    REACH,
    ROOFLINE_FACTOR,
    TABLE_DTYPE,
    OperatorLatency,
    op_row,
)
from .torch_attention import EFFICIENT, MATH, attention_backend

#: Families of calls timed alone, for f32.
_ALONE = ("eager/linear", "eager/bmm", "eager/elementwise", "eager/softmax", "eager/ln")
#: Families of convolutions: cuDNN's in f32, timed alone, and MIOpen's fastest.
_CONVOLUTIONS = ("eager/conv", "tuned/conv")
#: Half-width of the roofline's interval for convolutions, as a factor either way. NeuSight's f32
#: convolutions take 0.5 to 6 times the roofline on five chips (5 to 95 %), the latter those of few
#: microseconds, whose launch is inside.
_CONV_FACTOR = 2.5
#: Time of memory-efficient attention over FlashAttention 2's, at most: that is 1.7 to 3 times as
#: fast as FlashAttention and xFormers (Dao, FlashAttention-2, ICLR 2024, figures 4 to 6).
_EFFICIENT_FACTOR = 2.0
#: Factor on the ends of the interval of a gradient of weights that is taken for the forward pass of
#: the same products, which libraries run by other kernels. Engineering estimate.
_OTHER_KERNEL = 1.4
#: Taps of the filters for which PyTorch calls cuDNN's depthwise convolutions in 16 bits; all others
#: run by kernels of its own (Convolution.cpp, check_cudnn_depthwise_workload_with_filter).
_CUDNN_TAPS = (1, 9, 25)
#: Element types as tables of convolutions call them.
_CONV_DTYPES = {"f32": "fp32", "f16": "fp16", "bf16": "bf16"}
#: Bytes of passes that show what a launch takes; what a byte from the last cache, as a share of it
#: that surely stays there; and what one from main memory, in caches. The least and most are for
#: chips whose cache is small or not known.
_EMPTY, _SMALL, _LARGE, _LEAST, _MOST = 6 * 8192.0, 0.4, 32.0, 2e6, 1e9
#: Families of the model of operators that prices need; the others need not be read.
FAMILIES = (*STEP_FAMILIES, *_ALONE, *_CONVOLUTIONS)


@dataclass(frozen=True)
class _Rates:
    """Seconds of passes: an empty one's, and a byte's from the last cache and from main memory."""

    launch: float
    cache: float
    main: float

    def seconds(self, parts: Sequence[Stream], capacity: float) -> float:
        """Time of a pass with some streams on a cache of some bytes."""
        size = np.array([s.bytes for s in parts])
        far = np.array([s.distance for s in parts])
        # The share that the tables' own passes find there (features/operators/pointwise.py).
        held = resident_share(far, np.array(max(capacity, 1.0)), 1.1, 0.5)
        return float(self.launch + (size * (self.main + held * (self.cache - self.main))).sum())


class AtenPrices:
    """Seconds and ends of the interval of kernels, and what each was learned from."""

    def __init__(
        self, spec: DeviceSpec, bundle: OpModel | None, product: float, attention: float
    ) -> None:
        self._spec = spec
        # Calls timed alone were measured on AMD's GPUs too; otherwise rows name CUDA libraries.
        known = bundle is not None and (spec.runs_cuda or spec.name in bundle.devices)
        self._alone = bundle if known else None
        self._bundle = bundle
        self._latency = OperatorLatency(spec, bundle)
        self._factors = {PRODUCT: product, ATTENTION: attention}
        self._rates: dict[bool, _Rates] = {}

    def __call__(
        self, found: Sequence[Work], kept: Collection[int] = ()
    ) -> tuple[np.ndarray, list[str]]:
        """Return seconds and ends of their intervals, shape ``(n, 3)``, and their sources.

        Args:
            found: ``n`` kernels, one after the other.
            kept: Memory that outlives them.
        """
        times, sources = self._alone_each(found)
        self._place(times, found, kept)
        return times, sources

    def _place(self, times: np.ndarray, found: Sequence[Work], kept: Collection[int]) -> None:
        """Change times of passes to what the caches hold of their tensors in the program."""
        near = streams([w.uses for w in found], [w.bytes for w in found], kept)
        for f32 in (True, False):
            at = [
                i
                for i, w in enumerate(found)
                if near[i] and w.kind in (PASS, NORM, SOFTMAX) and (w.dtype == "f32") == f32
            ]
            if at:
                alone = self._moves([found[i].bytes for i in at], f32)
                placed = np.array([self._stream(f32).seconds(near[i], self._cache) for i in at])
                scale = np.array([found[i].scale for i in at])
                # What a norm takes beyond a pass of its traffic stays.
                own = np.maximum(times[at, 0] / scale - alone + placed, placed) * scale
                times[at] *= (own / times[at, 0])[:, None]

    @cached_property
    def _cache(self) -> float:
        return float(self._spec.cache_bytes)

    def _stream(self, f32: bool) -> _Rates:
        """Launch and time of a byte of passes, as tables have them for small and large ones."""
        if f32 not in self._rates:
            small = max(_SMALL * self._cache, _LEAST)
            large = max(_LARGE * self._cache, _MOST)
            launch, near, far = self._moves([_EMPTY, small, large], f32)
            main = (far - launch) / large
            self._rates[f32] = _Rates(launch, min((near - launch) / small, main), main)
        return self._rates[f32]

    def _moves(self, sizes: Sequence[float], f32: bool) -> np.ndarray:
        """Seconds of passes of some bytes, as they are timed alone."""
        works = [
            Work("move", PASS, (), "f32" if f32 else "bf16", s, 1, 1.0, "", Place()) for s in sizes
        ]
        return self._alone_each(works)[0][:, 0]

    def _alone_each(self, found: Sequence[Work]) -> tuple[np.ndarray, list[str]]:
        """Times as of ``__call__``, each kernel as it is timed again and again alone."""
        times = np.empty((len(found), 3))
        sources = ["roofline"] * len(found)
        graph_ops = [self._timed_alone(w) for w in found]
        at = [i for i, op in enumerate(graph_ops) if op is not None]
        if at:
            own, keys = self._of_calls([op for op in graph_ops if op is not None])
            times[at] = own * np.array([[found[i].scale] for i in at])
            for i, key in zip(at, keys, strict=True):
                sources[i] = f"learned:{key}"
        convolutions = [i for i, w in enumerate(found) if w.kind == CONVOLUTION]
        for i in convolutions:
            direct = _is_depthwise(found[i])
            times[i] = (self._depthwise if direct else self._by_roofline)(found[i])
        rows = [(i, row) for i in convolutions if (row := self._conv_row(found[i])) is not None]
        if rows:
            own, keys = self._of_rows([row for _, row in rows])
            for (i, row), t, key in zip(rows, own, keys, strict=True):
                wide = _OTHER_KERNEL if _stands_in(row, found[i]) else 1.0
                times[i] = t * np.array([1.0, 1.0 / wide, wide])
                sources[i] = f"learned:{key}"
        own_kernel = [i for i, w in enumerate(found) if self._calls_library(w)]
        if own_kernel:
            answer = attention_answer(
                [_attention_call(found[i]) for i in own_kernel], self, self._spec
            )
            times[own_kernel] = np.stack([answer.latency, answer.lo, answer.hi], axis=1)
            longer = [_other_library(self._spec, found[i]) for i in own_kernel]
            times[own_kernel, 2] = np.maximum(times[own_kernel, 2], answer.latency * longer)
            for i, source in zip(own_kernel, answer.source, strict=True):
                sources[i] = str(source)
        done = {*at, *convolutions, *own_kernel}
        rest = [i for i in range(len(found)) if i not in done]
        if rest:
            calls = [self._call(found[i]) for i in rest]
            own = self._latency(calls)
            for i, call, t in zip(rest, calls, own, strict=True):
                factor = self._factors.get(found[i].kind, 1.0)
                times[i] = t * factor
                if self._latency.scopes[call] != "roofline":
                    sources[i] = f"learned:{call.op}"
            batched = [i for i in rest if found[i].kind == PRODUCT and found[i].shape[0] > 1]
            for i in batched:
                times[i] = self._by_roofline(found[i])
                sources[i] = "roofline"
        return times, sources

    def _calls_library(self, work: Work) -> bool:
        """Whether a kernel is fused attention that was published for NVIDIA's GPUs."""
        known = self._bundle is not None and self._spec.vendor == "NVIDIA"
        return known and work.kind == ATTENTION and work.dtype in TABLE_DTYPE

    def predict(self, key: str, rows: pd.DataFrame, device: DeviceSpec) -> FamilyPrediction:
        """Latencies of rows of one published family."""
        assert self._bundle is not None
        self._bundle.devices.setdefault(device.name, device)
        return self._bundle.predict(rows.assign(key=key, device=device.name))

    def _timed_alone(self, work: Work) -> GraphOp | None:
        """An f32 kernel as published op graphs name it; ``None`` if they have none such."""
        if self._alone is None or work.dtype != "f32" or work.kind in (ATTENTION, CONVOLUTION):
            return None
        if work.kind == PRODUCT:
            b, m, n, k = work.shape
            return GraphOp("Linear", (m, k, n)) if b == 1 else GraphOp("BMM", (b, m, k, n))
        if work.kind == NORM:
            return GraphOp("VECln", work.shape)
        if work.kind == SOFTMAX:
            return GraphOp("VECsoftmax", work.shape)
        return GraphOp("MOVE", (work.bytes,))

    def _conv_row(self, work: Work) -> dict[str, object] | None:
        """A convolution as tables of operators have it; ``None`` if nothing was measured like it.

        AMD's were measured in all directions and types. cuDNN's were measured forward, in full f32
        and with filters of 3 × 3: what a chip without TF32 runs, and PyTorch on others does not.
        """
        sizes, spec = work.conv, self._spec
        if self._alone is None or sizes is None or work.dtype not in _CONV_DTYPES:
            return None
        if spec.vendor == "AMD":
            kind = {"family": "conv", "source": "MIOpen", "dtype": _CONV_DTYPES[work.dtype]}
            return {**kind, **sizes}
        tf32 = spec.matrix_peak("tf32") > 1.5 * spec.matrix_peak("f32")
        square = {"kh": 3, "kw": 3, "stride_h": 1, "stride_w": 1, "pad_h": 1, "pad_w": 1}
        plain = {**square, "ndim": 2, "dil_h": 1, "dil_w": 1, "groups": 1, "h": sizes["w"]}
        alike = all(sizes[name] == value for name, value in plain.items())
        if work.dtype != "f32" or tf32 or not spec.runs_cuda or not alike:
            return None
        # The gradient of the image is a convolution of the same kind with the channels swapped.
        ends = ("k", "c") if sizes["op"] == "bwd_data" else ("c", "k")
        own = {"batch": sizes["n"], "cin": sizes[ends[0]], "cout": sizes[ends[1]]}
        row = {"family": "conv", "source": "neusight", "dtype": "fp32", "op": "conv", **own}
        return {**row, "insize": sizes["h"], "ksize": 3, "stride": 1, "pad": 1}

    def _of_calls(self, ops: Sequence[GraphOp]) -> tuple[np.ndarray, list[str]]:
        return self._of_rows([{"source": "neusight", **op_rows(op, "fp32")} for op in ops])

    def row(self, work: Work) -> dict[str, Any] | None:
        """What the model of operators is asked for a kernel; ``None`` where it is the roofline."""
        if (op := self._timed_alone(work)) is not None:
            return self._first({"source": "neusight", **op_rows(op, "fp32")})
        if work.kind == CONVOLUTION:
            own = self._conv_row(work)
            return None if own is None else self._first(own)
        batched = work.kind == PRODUCT and work.shape[0] > 1
        call = self._call(work)
        if self._latency.model is None or call.dtype not in TABLE_DTYPE or batched:
            return None
        return op_row(call, self._spec)

    def _first(self, row: dict[str, object]) -> dict[str, Any]:
        found = self._published([row]).iloc[0].to_dict()
        return {str(name): value for name, value in found.items() if pd.notna(value)}

    def _published(self, rows: Sequence[dict[str, object]]) -> pd.DataFrame:
        """Rows of published tables as the model of operators takes them."""
        frame = pd.DataFrame(rows).assign(device=self._spec.name)
        names = ("b", "m", "rows", "cols", "n_in", *PARAMETERS["conv"], *PARAMETERS["conv_nd"])
        whole = [c for c in names if c in frame]
        frame = frame.astype(dict.fromkeys(whole, "Int64"))
        return rows_of_published(frame, lambda _: self._spec)

    def _of_rows(self, rows: Sequence[dict[str, object]]) -> tuple[np.ndarray, list[str]]:
        """Times of rows of published tables within a stream of kernels, and their families."""
        assert self._alone is not None
        # The last one has almost no work: what it takes is the launch.
        least = {"source": "neusight", **op_rows(GraphOp("VECrelu", (1, 1024)), "fp32")}
        table = self._published([*rows, least])
        self._alone.devices.setdefault(self._spec.name, self._spec)
        said = self._alone.predict(table)
        seconds = np.stack([said.latency, said.lo, said.hi], axis=1)
        launch = float(seconds[-1, 0]) * 1e6
        own = seconds[:-1]
        eager = table["source"].to_numpy()[:-1] == "neusight"
        # Device time, which tuned libraries are measured by, has no launch inside.
        streamed = [
            kernel_us(t * 1e6, launch) * 1e-6 if e else t
            for t, e in zip(own[:, 0], eager, strict=True)
        ]
        # What is left after the launch errs by the same share, as in op graphs.
        keys = list(map(str, table["key"][:-1]))
        return own / own[:, :1] * np.array(streamed)[:, None], keys

    def _call(self, work: Work) -> OpCall:
        name, dtype = work.name, work.dtype
        if work.kind == PRODUCT:
            b, m, n, k = work.shape
            return OpCall(name, "linear", (b * m, n, k), dtype, work.scale)
        if work.kind == ATTENTION:
            return OpCall(name, "attention", work.shape, dtype, work.scale)
        if work.kind == NORM:
            kind = "rmsnorm" if "rms" in name else "layernorm"
            return OpCall(name, kind, work.shape, dtype, work.scale)
        return OpCall(name, "move", (max(1, round(work.bytes)),), dtype, work.scale)

    def _by_roofline(self, work: Work) -> np.ndarray:
        """Products of many matrices and convolutions, with the traffic of their own tensors."""
        b, m, n, k = work.shape
        rate = work.dtype
        # torch.backends.cudnn.allow_tf32 is on by default; MIOpen computes in f32.
        if work.kind == CONVOLUTION and rate == "f32" and self._spec.runs_cuda:
            rate = "tf32"
        peak = self._spec.matrix_peak(rate) * MATRIX_SHARE
        moved = work.bytes / (self._spec.bandwidth * MEMORY_SHARE)
        middle = (max(2.0 * b * m * n * k / peak, moved) + self._spec.floor) * work.scale
        reach = REACH.get(self._spec.vendor)
        if reach is not None and work.kind == PRODUCT and rate in TABLE_DTYPE:
            flops, traffic = np.array([2.0 * b * m * n * k]), np.array([work.bytes])
            peaks = np.array([self._spec.matrix_peak(FORMATS[rate].rate)])
            found = reach.seconds(flops, traffic, peaks, self._spec.bandwidth)
            middle = float(found[0]) * work.scale
        wide = _CONV_FACTOR if work.kind == CONVOLUTION else ROOFLINE_FACTOR
        return np.array([middle, middle / wide, middle * wide])

    def _depthwise(self, work: Work) -> np.ndarray:
        """A depthwise convolution by a direct kernel, with a wide interval."""
        assert work.conv is not None
        width = 4.0 if work.dtype == "f32" else 2.0
        multiplied = float(prod(work.shape))
        filters = work.conv["op"] == "bwd_weights"
        memory = shipped_constants().memory
        seconds = depthwise_seconds(
            np.array([work.bytes]),
            np.array([work.bytes / width]),
            np.array([multiplied]),
            np.array([filters]),
            self._spec,
            memory,
        )
        if filters and self._spec.runs_cuda and _runs_own_kernel(work):
            # PyTorch's kernel has a block for each tap of a channel (DepthwiseConv2d.cu), so both
            # tensors are read from L2 once for each tap.
            cache = self._spec.levels[0].bandwidth * memory.cache
            seconds = soft_maximum(seconds, np.array([2.0 * width * multiplied / cache]))
        middle = (float(seconds[0]) + self._spec.floor) * work.scale
        return np.array([middle, middle * exp(-LOWER), middle * exp(UPPER)])


def attention_library(spec: DeviceSpec, work: Work, *, cudnn: bool = True) -> str:
    """Whose fused attention a kernel is; as :func:`~.torch_attention.attention_backend`."""
    batch, heads, groups, size, queries, keys, causal = work.shape
    query, key = (batch, heads, queries, size), (batch, groups, keys, size)
    use = AttentionUse(query, key, key, work.dtype, work.masked, bool(causal), heads != groups)
    found = attention_backend(spec, use, cudnn=cudnn)
    # What was recorded as one kernel is one.
    return EFFICIENT if found == MATH else found


def _other_library(spec: DeviceSpec, work: Work) -> float:
    """Time of attention in other releases of PyTorch, or of a slower library, over the estimate.

    One query is bound by memory in all of them.
    """
    if work.shape[4] == 1 or work.dtype not in TABLE_DTYPE or lacks_bf16(spec):
        return 1.0
    last = attention_library(spec, work, cudnn=False) == EFFICIENT
    return FLASH2.get(spec.architecture, 1.0) * (_EFFICIENT_FACTOR if last else 1.0)


def _attention_call(work: Work) -> dict[str, int]:
    batch, heads, groups, size, queries, keys, causal = work.shape
    sizes = {"batch": batch, "q_heads": heads, "kv_heads": groups, "head_dim": size}
    lengths = {"v_head_dim": size, "q_len": queries, "kv_len": keys, "window": 0, "causal": causal}
    return {**sizes, **lengths, "backward": int(work.name.endswith("_backward"))}


def _is_depthwise(work: Work) -> bool:
    """Whether a convolution has one channel of its input in each group."""
    sizes = work.conv
    return sizes is not None and sizes["groups"] == sizes["c"] and work.shape[0] > 1


def _runs_own_kernel(work: Work) -> bool:
    """Whether PyTorch runs a depthwise convolution on NVIDIA's GPUs by a kernel of its own."""
    assert work.conv is not None
    taps = work.shape[3] if work.conv["op"] == "fwd" else work.shape[2]
    return work.dtype == "f32" or taps not in _CUDNN_TAPS


def _stands_in(row: Mapping[str, object], work: Work) -> bool:
    """Whether a gradient of weights is priced as a forward pass."""
    return row["op"] == "conv" and work.conv is not None and work.conv["op"] == "bwd_weights"
