"""Error propagation: from the intervals of operators to the interval of what they compose."""

from __future__ import annotations

import numpy as np

#: Correlation between the errors of one step's operators. Engineering estimate: 0 would mean that
#: errors cancel, 1 that the model is off by the same factor everywhere.
RHO = 0.45


#: Relative half-width for what the composition itself adds: gaps between kernels, framework
#: overhead and overlap that the formulas do not see. Engineering estimate; no measured step on a
#: cluster was available to fit it.
COMPOSITION_ERROR = 0.08


#: Deviations of a normal distribution within which 90 % of it lie.
NINETY = 1.645


def combined_spread(ends: np.ndarray, rho: float) -> tuple[float, float]:
    """Half-widths of a sum whose terms have errors with pairwise correlation ``rho``.

    Args:
        ends: Half-widths of the terms downwards and upwards, shape ``(n, 2)``.
        rho: 0 for independent errors (root of the sum of squares), 1 for a common one (sum).

    Returns:
        ``sqrt((1 - rho) · sum of squares + rho · square of the sum)``, downwards and upwards.
    """
    # Variance of a sum of equicorrelated terms, sum_i s_i^2 + rho sum_{i != j} s_i s_j, rearranged.
    # Half-widths may stand for standard deviations, since all of them are of the same coverage.
    apart, together = (ends**2).sum(axis=0), ends.sum(axis=0) ** 2
    both = np.sqrt((1.0 - rho) * apart + rho * together)
    return float(both[0]), float(both[1])
