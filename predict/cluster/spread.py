"""How errors of operators combine into the error of what they compose."""

from __future__ import annotations

import numpy as np

#: Correlation of the errors of one program's operations: what :func:`measure_rho` finds on 40
#: published programs when the operations' estimator was fitted to other devices.
RHO = 0.45


#: Half-width, relative, of what the composition itself adds to the error.
COMPOSITION_ERROR = 0.08


def combined_spread(ends: np.ndarray, rho: float) -> tuple[float, float]:
    """Half-widths of a sum of terms whose errors correlate by ``rho``.

    Args:
        ends: Half-widths of the terms downwards and upwards, shape ``(n, 2)``.
        rho: 0 for independent errors (root of the sum of squares), 1 for a common one (sum).

    Returns:
        ``sqrt((1 - rho) · sum of squares + rho · square of the sum)``, downwards and upwards.
    """
    apart, together = (ends**2).sum(axis=0), ends.sum(axis=0) ** 2
    both = np.sqrt((1.0 - rho) * apart + rho * together)
    return float(both[0]), float(both[1])
