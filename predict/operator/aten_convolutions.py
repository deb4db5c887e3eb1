"""Times of convolutions that no table of operators has: cuDNN's and PyTorch's own, by physics.

cuDNN multiplies 16-bit images with the channels last: others are turned first, and the result back
(``nchwToNhwcKernel``). Each group is a product of its own, whose columns fill tiles of the matrix
units; a few numbers of channels have kernels that serve several groups at once. Where cuDNN has no
fast kernel it runs one that reads as the filter goes, at a few per cent of the vector units. What
of it is a constant was fitted to whole models (``cudnn`` of features/operators/fitted.yaml).

    time = (FLOPs / (share · matrix peak) + FLOPs · cost beside / vector peak) · waves

``waves`` are those that the blocks of the result take, over as many as would run if they filled all
multiprocessors in each: few images of small sizes leave some idle, even if the sum is split among
them (split-K). What a tile costs beside its products (addresses, loads through shared memory, the
epilogue) goes at the pace of the rest of the chip: it decides where matrix units are many times as
fast as that.
"""

from __future__ import annotations

from math import ceil, exp, prod

import numpy as np

from ...features.devices.device import DeviceSpec
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
#: Taps of the filters for which PyTorch calls cuDNN's depthwise convolutions of 16-bit images in
#: NCHW, and the least number of their channels; all others run by kernels of its own
#: (Convolution.cpp, use_cudnn_depthwise and check_cudnn_depthwise_workload_with_filter).
_CUDNN_TAPS, _CUDNN_CHANNELS = (1, 9, 25), 32
#: Taps for which cuDNN has depthwise kernels with the channels last.
_LAST_TAPS = (1, 9, 25, 49)
#: First release of PyTorch that comes with cuDNN 8.3 (its wheels), and fewest groups and most
#: channels of one for which that has kernels of several groups at once, read off training on the
#: 3090. Before, there had to be a multiple of 32 groups of as many channels as a power of two.
_SERVES_MORE, _FEWEST_GROUPS, _MOST_CHANNELS = (1, 12), 6, 48
_TOGETHER, _LEAST_CHANNELS = 32, 4
#: Threads of a block of PyTorch's gradient of a depthwise filter, at most (DepthwiseConv2d.cu,
#: MAX_BLOCK_SIZE), and blocks of it that a multiprocessor of 1,536 threads holds.
_THREADS, _BLOCKS = 256, 6


def cudnn_seconds(work: AtenKernel, spec: DeviceSpec, release: str = "") -> float:
    """Seconds of a convolution of 16 bits, or in TF32, by cuDNN, with the turns of its images.

    Args:
        work: A convolution that is neither transposed nor depthwise, in the format that it
            multiplies.
        spec: A GPU of NVIDIA's.
        release: Of PyTorch; empty for a recent one.
    """
    groups, channels = work.shape[0], _narrowest(work)
    memory = work.bytes / (spec.bandwidth * MEMORY_SHARE)
    turned = not work.channels_last and work.conv_size("c") > IMAGE
    # Powers of two have smaller tiles where nothing is turned: with the channels last RegNets of 16
    # of them gain a quarter over NCHW, those of 24 lose a tenth (3090 and 4090, PyTorch 2.4).
    tile = _FIT.tile_last if _is_power(channels) and not turned else _FIT.tile
    filled = _filled(channels, tile) if groups > 1 else 1.0
    flops = work.op.flops()
    matrix, vector = spec.matrix_peak(work.dtype), spec.vector_peak("f32")
    filters = work.conv is not None and work.conv["op"] == "bwd_weights"
    # Gradients of filters are long sums of few results, which are split whatever they take.
    waves = 1.0 if filters else _waves(work, spec)
    compute = flops / filled * (1.0 / (matrix * _FIT.matrix) + _FIT.beside / vector)
    seconds = max(compute * waves, memory)
    alone = groups > 1 and not _served_together(groups, channels, release)
    if filters and work.channels_last and alone:
        padded = flops / _filled(channels, _FIT.tile_last)
        seconds = max(seconds, padded / (_FIT.filters * vector))
    return (seconds + turned * _FIT.turn * memory + spec.floor) * work.op.scale


def depthwise_times(work: AtenKernel, spec: DeviceSpec, release: str = "") -> np.ndarray:
    """Seconds and both ends of the interval, a wide one, of a depthwise convolution.

    Args:
        work: The convolution.
        spec: The device.
        release: Of PyTorch; empty for a recent one.
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
        # Filters of one, three and five rows have kernels whose loops are unrolled.
        if work.taps not in _CUDNN_TAPS and spec.clock_hz:
            slow = multiplied / (_FIT.looped_taps * spec.core_count * spec.clock_hz)
    elif own:
        # PyTorch's kernel has a block for each tap of a channel (DepthwiseConv2d.cu), so both
        # tensors are read from L2 once for each tap, and few channels leave the chip idle.
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
    """Whether PyTorch runs a depthwise convolution on NVIDIA's GPUs by a kernel of its own."""
    if work.dtype == "f32":
        return True
    return not work.channels_last and (
        work.taps not in _CUDNN_TAPS or work.conv_size("c") < _CUDNN_CHANNELS
    )


def _narrowest(work: AtenKernel) -> int:
    """Channels of a group, of its input or its output, whichever are fewer."""
    return max(1, min(work.conv_size("c"), work.conv_size("k")) // work.conv_size("groups"))


def _waves(work: AtenKernel, spec: DeviceSpec) -> float:
    """Waves of blocks of a product's results, over the part of them that is filled."""
    groups, rows, columns, terms = work.shape
    blocks = groups * ceil(rows / _FIT.block) * ceil(columns / _FIT.block)
    parts = max(1, min(int(terms // _FIT.split), spec.core_count // blocks))
    return ceil(blocks * parts / spec.core_count) * spec.core_count / (blocks * parts)


def _filled(channels: int, tile: float) -> float:
    """Share of the tiles of a product that its columns fill."""
    return channels / (ceil(channels / tile) * tile)


def _served_together(groups: int, channels: int, release: str) -> bool:
    """Whether a kernel makes gradients of filters of several groups at once."""
    if is_older(release, _SERVES_MORE):
        enough = channels >= _LEAST_CHANNELS
        return groups % _TOGETHER == 0 and _is_power(channels) and enough
    aligned = channels == _LEAST_CHANNELS or channels % 8 == 0
    return groups >= _FEWEST_GROUPS and aligned and channels <= _MOST_CHANNELS


def _is_power(channels: int) -> bool:
    return channels & (channels - 1) == 0
