"""Exact FLOPs of convolutions, excluding products with padding and dilation holes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd, prod
from typing import NamedTuple

import numpy as np

from ..ir.program import TensorType, WindowDim


class ConvDims(NamedTuple):
    """Positions of the dimensions of a convolution, from its ``dim_labels``.

    Attributes:
        lhs_batch: Batch dimension of the input.
        lhs_feature: Feature dimension of the input.
        lhs_spatial: Spatial dimensions of the input, in the window's order.
        rhs_input: Input-feature dimension of the kernel.
        rhs_output: Output-feature dimension of the kernel.
        rhs_spatial: Spatial dimensions of the kernel.
        out_batch: Batch dimension of the result.
        out_feature: Feature dimension of the result.
        out_spatial: Spatial dimensions of the result.
    """

    lhs_batch: int
    lhs_feature: int
    lhs_spatial: tuple[int, ...]
    rhs_input: int
    rhs_output: int
    rhs_spatial: tuple[int, ...]
    out_batch: int
    out_feature: int
    out_spatial: tuple[int, ...]

    @property
    def is_nhwc(self) -> bool:
        """Whether the dimensions are in TensorFlow's order, ``b01f_01io->b01f``."""
        last = len(self.lhs_spatial) + 1
        ends = (self.lhs_batch, self.lhs_feature, self.out_batch, self.out_feature)
        return ends == (0, last, 0, last) and (self.rhs_input, self.rhs_output) == (last - 1, last)


@lru_cache(maxsize=1024)
def read_dim_labels(labels: str) -> ConvDims:
    """Read labels such as ``b01f_01io->b01f`` (NHWC) or ``bf01_oi01->bf01`` (NCHW).

    Raises:
        ValueError: The labels lack a dimension.
    """
    operands, _, out = labels.partition("->")
    lhs, _, rhs = operands.partition("_")
    spatial = [str(i) for i in range(len(lhs) - 2)]
    return ConvDims(
        lhs.index("b"),
        lhs.index("f"),
        tuple(lhs.index(d) for d in spatial),
        rhs.index("i"),
        rhs.index("o"),
        tuple(rhs.index(d) for d in spatial),
        out.index("b"),
        out.index("f"),
        tuple(out.index(d) for d in spatial),
    )


@lru_cache(maxsize=65536)
def valid_positions(size: int, out_size: int, window: WindowDim) -> int:
    """Count pairs of output and kernel positions whose input holds data, in one dimension.

    Output ``o`` and kernel tap ``k`` read position ``o * stride + k * rhs_dilation - pad_low`` of
    the dilated input; it holds data if it lies in ``[0, (size - 1) * lhs_dilation]`` and is a
    multiple of ``lhs_dilation``. For every tap (or output, whichever are fewer) the partners form
    an arithmetic progression, so they are counted without enumeration.

    Args:
        size: Input size.
        out_size: Output size.
        window: Kernel size, stride, padding and dilations.
    """
    # Taps and outputs play symmetric roles: loop over the fewer, count along the more.
    few, few_step, many, many_step = window.size, window.rhs_dilation, out_size, window.stride
    if few > many:
        few, few_step, many, many_step = many, many_step, few, few_step
    if size <= 0 or few <= 0:
        return 0
    hole = window.lhs_dilation
    base = np.arange(few, dtype=np.int64) * few_step - window.pad_low
    # -(base // step) is the ceiling of -base / step: the first partner at or beyond the left edge.
    first = np.maximum(0, -(base // many_step))
    last = np.minimum(many - 1, ((size - 1) * hole - base) // many_step)
    if hole == 1:
        return int(np.maximum(0, last - first + 1).sum())
    # With holes (lhs_dilation) only positions divisible by `hole` hold data: base + j · step ≡ 0
    # (mod hole) has solutions j spaced by hole / gcd, if gcd divides base.
    common = gcd(many_step, hole)
    period = hole // common
    # The modular inverse gives the first solution; modulo 1 every number is one.
    inverse = pow(many_step // common, -1, period) if period > 1 else 0
    start = (-base // common * inverse) % period
    first = first + (start - first) % period
    count = np.where(base % common == 0, (last - first) // period + 1, 0)
    return int(np.maximum(0, count).sum())


def conv_flops(
    lhs: TensorType,
    rhs: TensorType,
    out: TensorType,
    window: Sequence[WindowDim],
    dim_labels: str,
    batch_group_count: int = 1,
) -> float:
    """Count the FLOPs of a convolution: two for every product with data.

    ``2 · batch / batch_groups · out_features · kernel_in_features · Π valid_positions``; feature
    groups are already reflected in the kernel's input features. Agrees with XLA's cost analysis.

    Args:
        lhs: Input type; dimensions in the order of ``dim_labels``.
        rhs: Kernel type.
        out: Result type.
        window: One entry per spatial dimension.
        dim_labels: HLO labels, such as ``b01f_01io->b01f``.
        batch_group_count: Groups of the batch dimension (gradients of grouped convolutions).
    """
    dims = read_dim_labels(dim_labels)
    # HLO may omit the window: it is then as large as the kernel, with stride 1.
    if not window:
        window = tuple(WindowDim(rhs.shape[d]) for d in dims.rhs_spatial)
    spatial = prod(
        valid_positions(lhs.shape[i], out.shape[o], w)
        for i, o, w in zip(dims.lhs_spatial, dims.out_spatial, window, strict=True)
    )
    features = out.shape[dims.out_feature] * rhs.shape[dims.rhs_input]
    return 2.0 * lhs.shape[dims.lhs_batch] / batch_group_count * features * spatial
