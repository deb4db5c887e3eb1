"""Times of convolutions without a table: cuDNN's and PyTorch's own kernels, from physics.

cuDNN multiplies 16-bit images with the channels last: other images are transposed first, and the
result back (``nchwToNhwcKernel``). Each group is its own product, whose columns fill tiles of the
matrix units; some numbers of channels have kernels that process several groups at once. Without a
fast kernel, cuDNN runs one that loops over the filter at a few per cent of the vector units' peak.
The constants were fitted to whole models (``cudnn`` of features/operators/fitted.yaml).

    time = (FLOPs / (share · matrix peak) + FLOPs · other cost / vector peak) · waves

``waves`` is the number of waves of result blocks over the number if every wave filled all
multiprocessors (wave quantization): few small images leave some idle, even if the sum is split
(split-K). The other cost of a tile (addresses, loads through shared memory, the epilogue) runs at
the pace of the rest of the chip and dominates where matrix units are many times faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, exp, prod

import numpy as np

from ...features.devices.device import DeviceSpec
from ...features.ir.torch.record import FORWARD, AtenCall
from ...features.operators.physics import fitted
from ...models.gpu.memory_passes import (
    LOWER,
    UPPER,
    depthwise_seconds,
    shipped_constants,
    soft_maximum,
)
from ...models.program.pytorch import is_older
from .aten_costs import IMAGE
from .aten_work import AtenKernel
from .prices import MEMORY_SHARE

_FIT = fitted("cudnn")
#: Filter taps, and minimum channels, for which PyTorch calls cuDNN's depthwise convolution of
#: 16-bit NCHW images; others run its own kernels (Convolution.cpp, use_cudnn_depthwise and
#: check_cudnn_depthwise_workload_with_filter).
_CUDNN_TAPS, _CUDNN_CHANNELS = (1, 9, 25), 32
#: Filter taps for which cuDNN has depthwise kernels with the channels last.
_LAST_TAPS = (1, 9, 25, 49)
#: First PyTorch release whose wheels contain cuDNN 8.3, and the minimum groups and maximum channels
#: per group for which that has kernels for several groups at once (from training on the RTX 3090).
#: Earlier releases need a multiple of 32 groups, and a power of two of channels.
_SERVES_MORE, _FEWEST_GROUPS, _MOST_CHANNELS = (1, 12), 6, 48
_TOGETHER, _LEAST_CHANNELS = 32, 4
#: Maximum threads per block of PyTorch's depthwise weight gradient (DepthwiseConv2d.cu,
#: MAX_BLOCK_SIZE), and its blocks per multiprocessor of 1,536 threads.
_THREADS, _BLOCKS = 256, 6

#: Inductor's heuristics: relative time of convolutions with the channels last, by kind.
_LONGER = {"grouped": 1.358, "small": 0.783, "narrowing": 0.725, "other": 0.823}
#: Maximum channels of a small convolution, and the number of operators per convolution from which
#: the layout is not worth changing.
_SMALL, _FEW = 64, 300


def cudnn_seconds(work: AtenKernel, spec: DeviceSpec, release: str = "") -> float:
    """Return the seconds of a 16-bit or TF32 convolution by cuDNN, including transposes.

    Args:
        work: A convolution that is neither transposed nor depthwise, in its compute format.
        spec: An NVIDIA GPU.
        release: PyTorch release; empty for a recent one.
    """
    groups, channels = work.shape[0], _narrowest(work)
    memory = work.bytes / (spec.bandwidth * MEMORY_SHARE)
    # Powers of two have smaller tiles where nothing is transposed; groups of other widths have no
    # kernel for images with the channels last: RegNets with 8, 16, 32 and 64 channels gain a fifth
    # over NCHW, with 24 they lose a tenth, with 40 to 112 nothing (3090, 4090; PyTorch 2).
    straight = work.channels_last and (groups == 1 or _is_power(channels))
    turned = not straight and work.conv_size("c") > IMAGE
    tile = _FIT.tile_last if straight and _is_power(channels) else _FIT.tile
    filled = _filled(channels, tile) if groups > 1 else 1.0
    flops = work.op.flops()
    matrix, vector = spec.matrix_peak(work.dtype), spec.vector_peak("f32")
    filters = work.conv is not None and work.conv["op"] == "bwd_weights"
    # Weight gradients are long sums with few results, which are always split.
    waves = 1.0 if filters else _waves(work, spec)
    compute = flops / filled * (1.0 / (matrix * _FIT.matrix) + _FIT.beside / vector)
    seconds = max(compute * waves, memory)
    alone = groups > 1 and not _served_together(groups, channels, release)
    if filters and work.channels_last and alone:
        padded = flops / _filled(channels, _FIT.tile_last)
        seconds = max(seconds, padded / (_FIT.filters * vector))
    return (seconds + turned * _FIT.turn * memory + spec.floor) * work.op.scale


def depthwise_times(work: AtenKernel, spec: DeviceSpec, release: str = "") -> np.ndarray:
    """Return seconds of a depthwise convolution with (wide) interval bounds, shape ``(3,)``.

    Args:
        work: The convolution.
        spec: The device.
        release: PyTorch release; empty for a recent one.
    """
    assert work.conv is not None
    width = 4.0 if work.dtype == "f32" else 2.0
    multiplied = float(prod(work.shape))
    filters = work.conv["op"] == "bwd_weights"
    own = spec.runs_cuda and _runs_own_kernel(work)
    again = _FIT.filters_again if spec.runs_cuda and filters and not own else 1.0
    memory = shipped_constants().memory
    seconds = depthwise_seconds(
        np.array([work.bytes * again]),
        np.array([work.bytes * again / width]),
        np.array([multiplied * again]),
        np.array([filters]),
        spec,
        memory,
    )
    slow = 0.0
    if own and not filters:
        # Kernels for filters of one, three and five rows have unrolled loops.
        if work.taps not in _CUDNN_TAPS and spec.clock_hz:
            slow = multiplied / (_FIT.looped_taps * spec.core_count * spec.clock_hz)
    elif own:
        # PyTorch's kernel has a block per tap of a channel (DepthwiseConv2d.cu), so both tensors
        # are read from L2 once per tap, and few channels leave the chip idle.
        cache = spec.levels[0].bandwidth * memory.cache
        busy = _THREADS * min(work.shape[0] * work.taps, _BLOCKS * spec.core_count)
        steps = multiplied / busy * _FIT.step_cycles / spec.clock_hz if spec.clock_hz else 0.0
        slow = max(2.0 * width * multiplied / cache, steps)
    elif spec.runs_cuda and work.channels_last and work.taps not in _LAST_TAPS:
        share = _FIT.taps_before if is_older(release, _SERVES_MORE) else _FIT.taps
        slow = 2.0 * multiplied / (share * spec.vector_peak("f32"))
    middle = float(soft_maximum(seconds, np.array([slow]))[0]) if slow else float(seconds[0])
    middle = (middle + spec.floor) * work.op.scale
    return np.array([middle, middle * exp(-LOWER), middle * exp(UPPER)])


def _runs_own_kernel(work: AtenKernel) -> bool:
    """Return whether PyTorch uses its own kernel for a depthwise convolution on NVIDIA GPUs."""
    if work.dtype == "f32":
        return True
    return not work.channels_last and (
        work.taps not in _CUDNN_TAPS or work.conv_size("c") < _CUDNN_CHANNELS
    )


def _narrowest(work: AtenKernel) -> int:
    """Return the channels per group of input or output, whichever are fewer."""
    return max(1, min(work.conv_size("c"), work.conv_size("k")) // work.conv_size("groups"))


def _waves(work: AtenKernel, spec: DeviceSpec) -> float:
    """Return the waves of a product's result blocks over their filled part."""
    groups, rows, columns, terms = work.shape
    blocks = groups * ceil(rows / _FIT.block) * ceil(columns / _FIT.block)
    parts = max(1, min(int(terms // _FIT.split), spec.core_count // blocks))
    return ceil(blocks * parts / spec.core_count) * spec.core_count / (blocks * parts)


def _filled(channels: int, tile: float) -> float:
    """Return the share of a product's tiles that its columns fill."""
    return channels / (ceil(channels / tile) * tile)


def _served_together(groups: int, channels: int, release: str) -> bool:
    """Return whether one kernel computes weight gradients of several groups at once."""
    if is_older(release, _SERVES_MORE):
        enough = channels >= _LEAST_CHANNELS
        return groups % _TOGETHER == 0 and _is_power(channels) and enough
    aligned = channels == _LEAST_CHANNELS or channels % 8 == 0
    return groups >= _FEWEST_GROUPS and aligned and channels <= _MOST_CHANNELS


def _is_power(channels: int) -> bool:
    return channels & (channels - 1) == 0


def lays_channels_last(calls: Sequence[AtenCall]) -> bool:
    """Return whether a compiled program's convolutions run with the channels last.

    Args:
        calls: Operators of the forward pass and, in training, of the backward pass.
    """
    forward = [call for call in calls if call.phase == FORWARD]
    found = [call for call in forward if call.name == "aten.convolution"]
    if not found or len(forward) >= _FEW * len(found):
        return False
    kinds = [_kind(call) for call in found]
    if len(forward) < len(calls):
        risky = "grouped" in kinds or any(map(_narrows, found))
        return not risky and set(kinds) != {"small"}
    flops = [prod(c.outputs[0].shape) * prod(c.inputs[1].shape[1:]) for c in found]
    longer = sum(f * _LONGER[kind] for f, kind in zip(flops, kinds, strict=True))
    return longer <= sum(flops)


def _kind(call: AtenCall) -> str:
    outputs, inputs = call.inputs[1].shape[:2]
    if call.whole(-1) > 1 and inputs > 1:
        return "grouped"
    if max(outputs, inputs) <= _SMALL:
        return "small"
    return "narrowing" if _narrows(call) else "other"


def _narrows(call: AtenCall) -> bool:
    """Return whether a filter of several taps has at most half as many outputs as inputs."""
    outputs, inputs, *sides = call.inputs[1].shape
    return outputs * 2 <= inputs and sides[0] > 1
