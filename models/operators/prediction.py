"""The predictions of a model of one family of operators."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(slots=True)
class FamilyPrediction:
    """Latencies in seconds with 90 % intervals, shape ``(n,)`` each.

    Attributes:
        latency: Predicted latencies.
        lo: Lower ends.
        hi: Upper ends.
        roofline: Lower bounds from FLOPs and bytes.
        bound: Limiting term of the analytical estimate.
        scope: ``known``, ``calibrated``, ``sibling`` (another device with the same chip is known)
            or ``unseen``.
        in_domain: Whether training rows are near.
    """

    latency: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    roofline: np.ndarray
    bound: np.ndarray
    scope: np.ndarray
    in_domain: np.ndarray
