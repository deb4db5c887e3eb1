"""The correction of kernel latencies for their place in a program, as a cost model stores it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...features.devices.device import DeviceSpec
from ...features.kernels.kernel import Kernel, LoweredProgram
from ...features.table.roofline import roofline
from ..core.base import KernelPrediction
from .context import CONTEXT, context_features, loop_factors
from .context_trees import ContextTrees


@dataclass
class ContextCorrection:
    """Corrects kernel latencies for their place in a program.

    Attributes:
        trees: Fitted trees, one set for each seed; the mean of their corrections is applied.
        platforms: Platforms they were trained on; elsewhere nothing is corrected.
    """

    trees: tuple[ContextTrees, ...]
    platforms: tuple[str, ...]

    def apply(
        self,
        kernels: KernelPrediction,
        lowered: LoweredProgram,
        device: DeviceSpec,
        base_s: np.ndarray | None = None,
    ) -> KernelPrediction:
        """Correct the predictions of a program's kernels; the roofline's stay as they are.

        Args:
            kernels: Predictions of each by itself.
            lowered: The program.
            device: Device it runs on; on platforms that were not trained on, nothing changes.
            base_s: Roofline plus floor of each kernel, if it is there already.
        """
        if device.platform not in self.platforms or not lowered.kernels:
            return kernels
        if base_s is None:
            base_s = roofline(lowered.kernels, device).latency_s + device.floor
        features = context_features(kernels.latency, base_s, lowered, device)
        shift = np.mean([trees.shift(features) for trees in self.trees], axis=0)
        # The trees learned errors of the learned model; a bare roofline errs differently.
        factor = np.where(kernels.source != "roofline", np.exp(shift), 1.0)
        return _scaled(kernels, factor)

    def to_dict(self) -> dict[str, object]:
        """Plain data for the manifest; the trees are files of their own."""
        return {
            "trees": len(self.trees),
            "platforms": list(self.platforms),
            "features": list(CONTEXT),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], raw: Sequence[bytes]) -> ContextCorrection:
        """Read :meth:`to_dict`'s data, and the trees' files.

        Raises:
            ValueError: It has other features than this version.
        """
        if tuple(data["features"]) != CONTEXT:
            raise ValueError("context correction has other features than this version's")
        return cls(tuple(ContextTrees(own) for own in raw), tuple(data["platforms"]))


def in_loops(
    prediction: KernelPrediction, kernels: Sequence[Kernel], device: DeviceSpec
) -> KernelPrediction:
    """Scale the latencies of products in loops; the roofline's stay as they are.

    Args:
        prediction: Of a program's kernels, each by itself.
        kernels: The kernels.
        device: Device it runs on.
    """
    factors = loop_factors(kernels, device)
    if (factors == 1.0).all():
        return prediction
    # The roofline takes operands from the cache that they fit into already.
    return _scaled(prediction, np.where(prediction.source != "roofline", factors, 1.0))


def _scaled(prediction: KernelPrediction, factor: np.ndarray) -> KernelPrediction:
    return replace(
        prediction,
        latency=prediction.latency * factor,
        lo=prediction.lo * factor,
        hi=prediction.hi * factor,
    )
