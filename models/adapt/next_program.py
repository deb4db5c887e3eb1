"""Chooses which program to measure next: the most informative one for the time it takes.

Measuring a program gives labels of all its kernels at once. Its gain is the expected fall of the
error variance at the targets, each weighted by its share of the time and by the square of its
interval (active learning of Cohn, Neural Networks 9, 1996, for blocks).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .gaussian_process import Sites, covariance, noise_variance


@dataclass
class RemainingVariance:
    """Error variance that remains after the measurements so far.

    Attributes:
        posterior: Covariance of the errors of all kernels given what was measured, shape
            ``(n, n)``.
        noise: Variance of a label's noise, in log space.
        weight: Importance of each kernel, shape ``(n,)``; zero for those that are only candidates.
    """

    posterior: np.ndarray
    noise: float
    weight: np.ndarray

    @classmethod
    def of(
        cls, sites: Sites, params: np.ndarray, weight: np.ndarray, measured: Sites | None = None
    ) -> RemainingVariance:
        """Start from kernels, and from what was measured already.

        Args:
            sites: Kernels of the candidates and the targets.
            params: Parameters of the covariance.
            weight: Importance of each, shape ``(n,)``.
            measured: Kernels that have a label already.
        """
        posterior, noise = covariance(sites, sites, params), noise_variance(params)
        if measured is not None and len(measured):
            inner = covariance(measured, measured, params) + noise * np.eye(len(measured))
            cross = covariance(measured, sites, params)
            posterior -= cross.T @ np.linalg.solve(inner, cross)
        return cls(posterior, noise, weight)

    def gain(self, block: np.ndarray) -> float:
        """Expected fall of the weighted variance if the kernels ``block`` are measured."""
        cross = self.posterior[block]
        solved = np.linalg.solve(cross[:, block] + self.noise * np.eye(len(block)), cross)
        return float((cross * solved).sum(axis=0) @ self.weight)

    def measure(self, block: np.ndarray) -> None:
        """Update the posterior as if the kernels ``block`` had been measured."""
        cross = self.posterior[block]
        solved = np.linalg.solve(cross[:, block] + self.noise * np.eye(len(block)), cross)
        self.posterior = self.posterior - cross.T @ solved


def choose_programs(
    choice: RemainingVariance,
    blocks: Sequence[np.ndarray],
    seconds: Sequence[float],
    time_s: float,
    most: int,
) -> list[int]:
    """Programs to measure together, largest gain per second first.

    Args:
        choice: The state; it is moved on as if the chosen ones were measured.
        blocks: Positions of each candidate's kernels.
        seconds: Expected time to measure each candidate.
        time_s: Time for all of them together.
        most: Most candidates to choose.

    Returns:
        Positions of the chosen candidates; empty if none fits into the time.
    """
    chosen: list[int] = []
    left = time_s
    while len(chosen) < most:
        open_ = [i for i in range(len(blocks)) if i not in chosen and seconds[i] <= left]
        if not open_:
            break
        # Greedy by gain per second. A posterior that is updated after each choice keeps a second
        # program with the same kernels from looking as good as the first.
        best = max(open_, key=lambda i: choice.gain(blocks[i]) / seconds[i])
        chosen.append(best)
        left -= seconds[best]
        choice.measure(blocks[best])
    return chosen
