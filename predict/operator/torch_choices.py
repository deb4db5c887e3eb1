"""Kernels that PyTorch chooses for attention, norms and cells, by the checks in its sources.

For attention (``sdp_utils.cpp``) it calls the first of a list that supports the call: cuDNN's if
PyTorch prefers it, FlashAttention 2, the memory-efficient kernel, and else separate products and
passes (``SDPBackend.MATH``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ...common.errors import ProgramError
from ...features.devices.device import DeviceSpec
from ...features.ir.torch.record import (
    CUDNN,
    EFFICIENT,
    FLASH,
    MATH,
    AttentionUse,
    FunctionUse,
)
from ...models.gpu.attention import Families, attention_answer, lacks_bf16
from ...models.program.pytorch import is_older
from .aten_work import AtenKernel
from .step_operators import FLASH2

#: Maximum head size of cuDNN's attention (its releases above 9.22 take 256, with recent PyTorch)
#: and of FlashAttention 2.
_CUDNN_HEAD, _FLASH_HEAD = 128, 256
#: Divisor of head sizes for kernels on matrix units, by bits per element: 16 bytes for 16 bits, and
#: four elements for f32.
_ALIGNED = {16: 8, 32: 4}
#: First release whose ``F.rms_norm`` is one kernel on GPUs, ``_fused_rms_norm`` (pytorch/pytorch
#: #153666).
_FUSED_NORM = (2, 9)
#: Time of FlashAttention 1 and of memory-efficient attention over FlashAttention 2's, which is 1.7
#: to 3 times as fast as FlashAttention and xFormers (Dao, FlashAttention-2, ICLR 2024, figures 4 to
#: 6). At this factor, savings in Stable Diffusion's U-Net match measurements on A100 and V100.
_SLOWER = 2.0
#: First release of PyTorch whose flash kernel is FlashAttention 2 (its release notes).
_SECOND = (2, 2)
#: Functions that are one kernel on all devices of a platform, and several kernels on others.
_ONE_ON = {"lstm_cell": "gpu", "group_norm": "cpu"}
_NARROW = ("float16", "bfloat16", "f16", "bf16")


def attention_backend(spec: DeviceSpec, use: AttentionUse, *, cudnn: bool = True) -> str:
    """Return the attention backend that PyTorch calls; empty for fused ones of other vendors.

    Args:
        spec: A GPU or CPU.
        use: The call.
        cudnn: Whether PyTorch prefers cuDNN on the chips where it can: with cuDNN 9.15.1 or later,
            as in its packages for CUDA 13 but not for CUDA 12.
    """
    if spec.platform == "cpu":
        return "" if _cpu_takes(use) and FLASH in use.allowed else MATH
    found = next(_supporting(spec, use, cudnn), MATH)
    return found if spec.runs_cuda or found == MATH else ""


def check_attention(uses: Iterable[AttentionUse], spec: DeviceSpec) -> None:
    """Refuse attention for which a program allows no backend that supports it.

    Raises:
        ProgramError: There is such a call.
    """
    for use in uses:
        if spec.platform == "gpu" and not any(_supporting(spec, use, cudnn=True)):
            raise ProgramError(
                f"no attention kernel that sdpa_kernel allows ({', '.join(use.allowed)}) supports "
                f"{use.dtype} queries {list(use.query)} with keys {list(use.key)} on {spec.name}",
                hint="PyTorch refuses it there too: allow SDPBackend.MATH as well",
            )


def _supporting(spec: DeviceSpec, use: AttentionUse, cudnn: bool) -> Iterator[str]:
    """Yield the backends that support a call, in PyTorch's order."""
    prefers = cudnn and spec.rules.asynchronous
    order = (CUDNN, FLASH, EFFICIENT, MATH) if prefers else (FLASH, EFFICIENT, MATH, CUDNN)
    for own in order:
        if own in use.allowed and (own == MATH or _TAKES[own](spec, use)):
            yield own


def why_written(spec: DeviceSpec, use: AttentionUse) -> str:
    """Return why no fused kernel supports a call."""
    if use.allowed == (MATH,):
        return "sdpa_kernel asks for it"
    if spec.runs_cuda and lacks_bf16(spec) and use.dtype in ("bfloat16", "bf16"):
        return f"the matrix units of {spec.name} do not multiply bfloat16 (they do float16)"
    if any(len(shape) != 4 for shape in (use.query, use.key, use.value)):
        return "fused kernels need four dimensions: batch, heads, positions and width"
    if use.dtype not in (*_NARROW, "float32", "f32"):
        return f"fused kernels do not support {use.dtype}"
    return (
        "FlashAttention supports neither f32, nor a mask, nor is_causal with different numbers of "
        "queries and keys, the memory-efficient kernel no grouped keys (enable_gqa), and all need "
        "head sizes that are multiples of 8"
    )


def attention_library(spec: DeviceSpec, work: AtenKernel, *, cudnn: bool = True) -> str:
    """Return the backend of a fused attention kernel; see :func:`attention_backend`."""
    batch, heads, groups, size, shown, queries, keys, causal = work.op.shape
    query = (batch, heads, queries, size)
    key, value = ((batch, groups, keys, width) for width in (size, shown))
    use = AttentionUse(
        *(query, key, value, work.dtype, work.masked, bool(causal), heads != groups),
        allowed=work.allowed,
    )
    # It was recorded as one kernel, so it cannot be the math backend.
    fused = (own for own in _supporting(spec, use, cudnn) if own != MATH)
    return next(fused, EFFICIENT) if spec.runs_cuda else ""


def attention_times(
    found: Sequence[AtenKernel], operators: Families, spec: DeviceSpec, release: str
) -> tuple[np.ndarray, list[str]]:
    """Price fused attention as published kernels.

    Args:
        found: ``n`` kernels.
        operators: Published families.
        spec: The NVIDIA GPU that they run on.
        release: PyTorch release; empty for a recent one.

    Returns:
        Seconds with both bounds of the 90 % interval, shape ``(n, 3)``, and their sources.
    """
    called = [attention_library(spec, work) for work in found]
    calls = [
        # The memory-efficient kernel is priced by FlashAttention 2's time.
        {**_call(w, splits=own == FLASH and _is_single(w)), "flash2": int(own != CUDNN)}
        for w, own in zip(found, called, strict=True)
    ]
    answer = attention_answer(calls, operators, spec)
    both = np.array([_over_published(spec, work, release) for work in found])
    times = np.stack([answer.latency, answer.lo, answer.hi], axis=1) * both[:, :1]
    times[:, 2] = np.maximum(times[:, 2], answer.latency * both[:, 1])
    # Nobody measured cuDNN's kernels for a single query: they may split its keys or not.
    alone = [i for i, w in enumerate(found) if _is_single(w) and called[i] == CUDNN]
    if alone:
        cut = attention_answer([_call(found[i], splits=True) for i in alone], operators, spec)
        times[alone, 1] = np.minimum(times[alone, 1], cut.lo)
    return times, [str(source) for source in answer.source]


def _call(work: AtenKernel, *, splits: bool) -> dict[str, int]:
    """Return the columns of a call; ``splits``: whether blocks share the keys of a single query."""
    batch, heads, groups, size, shown, queries, keys, causal = work.op.shape
    if splits:
        # FlashAttention 2 turns the heads of a group into the rows of a tile, and splits the keys
        # (mha_fwd of PyTorch's flash_api.cpp). vLLM's rows split only if heads share keys, which
        # takes the same blocks as heads that share none.
        causal, heads = 1, max(heads, 2 * groups)
    sizes = {"batch": batch, "q_heads": heads, "kv_heads": groups, "head_dim": size}
    lengths = {"v_head_dim": shown, "q_len": queries, "kv_len": keys, "window": 0, "causal": causal}
    return {**sizes, **lengths, "backward": int(work.name.endswith("_backward"))}


def _is_single(work: AtenKernel) -> bool:
    """Return whether attention has one query."""
    return work.shape[4] == 1


def _over_published(spec: DeviceSpec, work: AtenKernel, release: str) -> tuple[float, float]:
    """Return attention time by PyTorch's and by an older library, over the published kernels'.

    A single query is memory-bound in all of them.
    """
    if _is_single(work):
        return 1.0, 1.0
    old = is_older(release, _SECOND)
    factors = []
    for cudnn in (not old, False):
        library = attention_library(spec, work, cudnn=cudnn)
        slower = _SLOWER if library == EFFICIENT or old else 1.0
        second = 1.0 if library == CUDNN else FLASH2.get(spec.architecture, 1.0)
        factors.append(slower * second)
    return factors[0], factors[1]


def is_one(spec: DeviceSpec, use: FunctionUse, framework: str, release: str = "") -> bool:
    """Return whether a function is one kernel, instead of a pass per step.

    An LSTM cell after its two products is one kernel, eager and compiled (RNN.cpp); a group norm
    with channels last only on CPUs (group_norm.cpp). For an RMS norm (layer_norm.cpp), compiled
    code fuses the passes with whatever else fits.

    Args:
        spec: A GPU or CPU.
        use: The call.
        framework: ``torch-eager`` or ``torch-compiled``.
        release: PyTorch release; empty for a recent one.
    """
    if use.function in _ONE_ON:
        return spec.platform == _ONE_ON[use.function]
    eager = spec.platform == "gpu" and framework == "torch-eager"
    alike = use.weight in ("", use.dtype) and not use.dtype.startswith("complex")
    return eager and alike and not use.channels_last and not is_older(release, _FUSED_NORM)


def _cudnn_takes(spec: DeviceSpec, use: AttentionUse) -> bool:
    """Return whether cuDNN supports the call (check_cudnn_tensor_shapes): not a single key."""
    sizes = use.query[-1], use.value[-1]
    drops = use.dropout > 0.0
    return (
        spec.runs_cuda
        and not lacks_bf16(spec)
        and use.dtype in _NARROW
        and _plain(use, grouped=True)
        and all(size <= _CUDNN_HEAD and size % 8 == 0 for size in sizes)
        and use.key[-2] != 1
        and not (drops and (use.query[-2] == 1 or use.dropout * 16 % 1))
    )


def _flash_takes(spec: DeviceSpec, use: AttentionUse) -> bool:
    """Return whether FlashAttention does: no mask tensor, and causal only if square."""
    return (
        use.dtype in _NARROW
        and not (spec.runs_cuda and lacks_bf16(spec))
        and _plain(use, grouped=True)
        and not use.masked
        and use.query[-1] == use.value[-1] <= _FLASH_HEAD
        and not (use.causal and use.query[-2] != use.key[-2])
    )


def _efficient_takes(spec: DeviceSpec, use: AttentionUse) -> bool:
    """Return whether the memory-efficient kernel does: no grouping (until late 2026's releases)."""
    narrow, old = use.dtype in _NARROW, lacks_bf16(spec)
    aligned = _ALIGNED[16] if narrow else 1 if old else _ALIGNED[32]
    return (
        not (old and use.dtype in ("bfloat16", "bf16"))
        and (narrow or use.dtype in ("float32", "f32"))
        and _plain(use, grouped=False)
        and use.query[-1] % aligned == 0
        and use.value[-1] % aligned == 0
    )


def _cpu_takes(use: AttentionUse) -> bool:
    """Return whether the CPU kernel does: no dropout, equal widths (sdp_utils_cpp.cpp)."""
    return use.dropout == 0.0 and _plain(use, grouped=True) and use.query[-1] == use.value[-1]


#: Whether a backend supports a call.
_TAKES = {CUDNN: _cudnn_takes, FLASH: _flash_takes, EFFICIENT: _efficient_takes}


def _plain(use: AttentionUse, *, grouped: bool) -> bool:
    """Return whether tensors are (batch, heads, positions, size) of one batch, and heads match.

    Args:
        use: The call.
        grouped: Whether the kernel supports fewer key heads than query heads.
    """
    shapes = use.query, use.key, use.value
    if any(len(s) != 4 for s in shapes) or len({s[0] for s in shapes}) > 1:
        return False
    heads, keys, values = (s[1] for s in shapes)
    if heads == keys == values:
        return True
    return grouped and use.grouped and keys == values and heads % keys == 0
