"""Calibrates a model to a device from a few samples: a Gaussian process on its errors there.

The error of a model on a new device is mostly systematic: its compute, memory and launch are each a
bit faster or slower than assumed, differently for every library, and close kernels have similar
errors. The covariance of two errors is

    w·w' (a0 + a1 [same op, dtype, backend] + a2 [same kernel])
      + exp(-d) (s0 + s1 [same op, dtype, backend] + s2 [same kernel])

with ``w`` the shares of compute, memory and launch in a kernel's time, and ``d`` the scaled
distance of the key features (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006,
chapters 2, 4 and 5). The variances and length scales are fitted once, to errors on held-out
devices, so that a handful of samples of a new device is enough.

If the sites have tree leaves, the fraction of trees in which two kernels share a leaf replaces
``exp(-d)`` (:mod:`.covariance`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from ..trust.calibrator import NORMAL_90, few_or_ends
from .covariance import (
    AMPLITUDES,
    LEAST_NOISE,
    Sites,
    cautious_params,
    covariance,
    distance,
    leaf_variants,
    nearness,
    noise_variance,
    prior_variance,
    start_params,
    weakened,
)

#: Largest distance of fitted parameters from :func:`start_params`, in log space (a factor of 150):
#: keeps the covariance well conditioned where the errors do not determine a parameter.
FARTHEST = 5.0
#: Most samples: the time to invert their covariance grows with the cube of their number, and
#: further ones hardly change the correction.
MAX_SAMPLES = 1500
#: Candidate factors on amplitudes and noise, selected by the samples of a device: the fitted values
#: or weaker corrections. Engineering estimates.
AMPLITUDE_FACTORS, NOISE_FACTORS = (0.3, 0.6, 1.0), (1.0, 2.5, 6.0)
#: Candidate factors on the terms that all rows of a device share: libraries may err independently.
SHARED_FACTORS = (1.0, 0.3, 0.05)
#: Factor on the amplitudes if held-out samples are predicted best without any correction.
SMALLEST = 0.05
#: Fewest samples for that selection, and most samples that it uses: each of its 27 variants inverts
#: their covariance.
LEAST_CHOICE, MAX_CHOICE = 8, 400


def fit_params(tasks: Sequence[tuple[Sites, np.ndarray]], iterations: int = 15) -> np.ndarray:
    """Fit variances and length scales to the errors on held-out devices.

    Maximizes the marginal likelihood, one Gaussian process per device, with a weak log-normal prior
    around :func:`start_params`.

    Args:
        tasks: Sites and errors of some rows of each device; a few hundred each suffice.
        iterations: Steps of L-BFGS.
    """
    from scipy.optimize import minimize

    start = start_params(tasks[0][0].place.shape[1])

    def loss(params: np.ndarray) -> tuple[float, np.ndarray]:
        # A standard deviation of one log unit: two or three held-out devices determine few
        # parameters.
        away = params - start
        value, slope = 0.5 * float((away**2).sum()), away.copy()
        for task in tasks:
            own, own_slope = negative_log_likelihood(params, *task)
            value += own
            slope += own_slope
        return value, slope

    bounds = [(value - FARTHEST, value + FARTHEST) for value in start]
    optimum = minimize(
        loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": iterations}
    )
    return np.asarray(optimum.x)


def negative_log_likelihood(
    params: np.ndarray, sites: Sites, errors: np.ndarray
) -> tuple[float, np.ndarray]:
    """Negative log marginal likelihood of a device, up to a constant, and its gradient.

    Rasmussen and Williams, equations 5.8 and 5.9. Numerical differences would need a Cholesky
    factorization per parameter.

    Args:
        params: Parameters as of :func:`start_params`, shape ``(7 + keys,)``.
        sites: Sites of ``n`` kernels.
        errors: Errors of the kernels, shape ``(n,)``.

    Returns:
        The value, and its derivatives by ``params``.
    """
    from scipy.linalg import cho_solve

    count = len(errors)
    near = nearness(sites, sites, params)
    matrix = covariance(sites, sites, params, near) + noise_variance(params) * np.eye(count)
    try:
        lower = np.linalg.cholesky(matrix)
    except np.linalg.LinAlgError:  # not positive definite: L-BFGS backs off
        return 1e9, np.zeros_like(params)
    factor = (lower, True)
    weights = cho_solve(factor, errors)
    value = float(0.5 * errors @ weights + np.log(np.diag(lower)).sum())
    # Derivative by each entry of the covariance; the derivative by a parameter is the inner product
    # with the entries' derivatives by it.
    by_entry = 0.5 * (cho_solve(factor, np.eye(count)) - np.outer(weights, weights))
    squares = np.exp(2 * params[:AMPLITUDES])
    coarse = sites.coarse[:, None] == sites.coarse[None]
    fine = sites.fine[:, None] == sites.fine[None]
    shared, smooth = by_entry * (sites.share @ sites.share.T), by_entry * near
    parts = [kind[mask].sum() for kind in (shared, smooth) for mask in (..., coarse, fine)]
    noise = np.trace(by_entry) if np.exp(params[AMPLITUDES - 1]) > LEAST_NOISE else 0.0
    amplitudes = 2 * squares * np.array([*parts, noise])
    reaches = np.zeros(len(params) - AMPLITUDES)
    if sites.leaves is None:
        scaled = sites.place / np.exp(params[AMPLITUDES:])
        # exp(-d) changes with the logarithm of a length scale by exp(-d) (a - b)² / d.
        pull = smooth * (squares[3] + squares[4] * coarse + squares[5] * fine)
        pull /= distance(sites, sites, params)
        reaches = 2 * (pull.sum(1) @ scaled**2 - ((pull @ scaled) * scaled).sum(0))
    return value, np.concatenate([amplitudes, reaches])


def left_out_errors(
    inverse: np.ndarray, weights: np.ndarray, groups: np.ndarray | None = None
) -> np.ndarray:
    """Error of each sample when it is predicted from the samples of other groups.

    In closed form (Rasmussen and Williams, equation 5.12, and the same for blocks).

    Args:
        inverse: Inverse covariance of the samples, shape ``(n, n)``.
        weights: Its product with their errors, shape ``(n,)``.
        groups: Group of each, shape ``(n,)``; by default, or with a single group such as the
            kernels of one trace, each sample is a separate group.
    """
    if groups is None or len(np.unique(groups)) == 1:
        return np.asarray(weights / np.diag(inverse))
    left_out = np.empty(len(weights))
    for group in np.unique(groups):
        own = np.flatnonzero(groups == group)
        left_out[own] = np.linalg.solve(inverse[np.ix_(own, own)], weights[own])
    return left_out


def chosen_params(
    params: np.ndarray,
    sites: Sites,
    errors: np.ndarray,
    groups: np.ndarray | None = None,
    gain: float = 0.0,
) -> np.ndarray:
    """Scale amplitudes and noise such that held-out samples are predicted best.

    A device may be closer to the known ones than they are to each other, or its errors rougher:
    then the fitted amplitudes would weight the samples too little or too much. Or the errors of its
    libraries may be independent, so that shared terms count less. Each sample is predicted from the
    samples of other groups (:func:`left_out_errors`); if no correction reduces the error by the
    fraction ``gain``, the smallest amplitudes are used.
    """
    # The error without any correction, which every variant has to beat.
    # The error without any correction: what every variant has to beat.
    best, least = weakened(params, SMALLEST, 1.0), (1.0 - gain) * float(np.abs(errors).mean())
    # Distances depend only on parameters that all variants share.
    near = nearness(sites, sites, params)
    for scaled in _variants(params) if sites.leaves is None else leaf_variants(params):
        matrix = covariance(sites, sites, scaled, near)
        inverse = np.linalg.inv(matrix + noise_variance(scaled) * np.eye(len(errors)))
        left_out = left_out_errors(inverse, inverse @ errors, groups)
        loss = float(np.abs(left_out).mean())
        if loss < least:
            best, least = scaled, loss
    return best


def _variants(params: np.ndarray) -> Iterator[np.ndarray]:
    for shared, amplitude, noise in product(SHARED_FACTORS, AMPLITUDE_FACTORS, NOISE_FACTORS):
        scaled = weakened(params, amplitude, noise)
        # a0 and s0: the terms shared by all ops, dtypes and backends.
        scaled[[0, 3]] += np.log(shared)
        yield scaled


@dataclass
class ErrorPosterior:
    """Posterior of a model's log errors on one device, given samples.

    Attributes:
        params: Parameters of the covariance, logarithms.
        sites: Sites of the samples.
        weights: Solution of the covariance for the samples' errors, shape ``(n,)``.
        inverse: Inverse covariance of the samples, shape ``(n, n)``.
        scale: Factor on the standard deviation such that intervals cover the samples' held-out
            errors at the nominal rate.
        count: Number of samples.
        errors: Errors of the samples as given, shape ``(n,)``; saved.
        left_out: Errors of the samples, each predicted from the others, shape ``(n,)``; empty with
            fewer than :data:`LEAST_CHOICE`.
    """

    params: np.ndarray
    sites: Sites
    weights: np.ndarray
    inverse: np.ndarray
    scale: float = 1.0
    count: int = 0
    errors: np.ndarray = field(default_factory=lambda: np.zeros(0))
    left_out: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @classmethod
    def fit(
        cls,
        params: np.ndarray,
        sites: Sites,
        errors: np.ndarray,
        choose: bool = True,
        groups: np.ndarray | None = None,
        gain: float = 0.0,
    ) -> ErrorPosterior:
        """Condition the Gaussian process on samples.

        Args:
            params: From :func:`fit_params`.
            sites: Sites of the samples.
            errors: ``log(measured / predicted)`` of the samples by the uncorrected model.
            choose: Whether to rescale ``params`` to the samples.
            groups: Groups of similar samples, such as kernels of one program, shape ``(n,)``: in
                that selection a sample is not predicted from its own group.
            gain: Least relative reduction of the held-out error for a correction to be made.
        """
        if len(errors) > MAX_SAMPLES:
            keep = np.random.default_rng(0).choice(len(errors), MAX_SAMPLES, replace=False)
            sites, errors = sites.take(keep), errors[keep]
            groups = None if groups is None else groups[keep]
        # Single failed measurements must not distort the correction of their neighbours; with 20
        # samples or fewer a percentile is no outlier.
        bounded = errors
        if len(errors) > 20:
            bounded = np.clip(errors, *np.quantile(errors, [0.01, 0.99]))
        if choose and len(errors) >= LEAST_CHOICE:
            some = np.arange(min(len(errors), MAX_CHOICE))
            own = None if groups is None else groups[some]
            params = chosen_params(params, sites.take(some), bounded[some], own, gain)
        elif choose and sites.leaves is not None:
            params = cautious_params(params)
        matrix = covariance(sites, sites, params) + noise_variance(params) * np.eye(len(errors))
        inverse = np.linalg.inv(matrix)
        posterior = cls(params, sites, inverse @ bounded, inverse, 1.0, len(errors), errors)
        if len(errors) >= LEAST_CHOICE:
            # Held-out mean and variance in closed form: Rasmussen and Williams, equations 5.12.
            posterior.left_out = left_out_errors(inverse, posterior.weights)
            scores = posterior.left_out * np.sqrt(np.diag(inverse))
            low, high = few_or_ends(scores, NORMAL_90)
            # One factor for both bounds, the larger one: the process is symmetric. Above zero even
            # if all samples are exact.
            posterior.scale = max(-low, high, 1e-6)
        return posterior

    def widening(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """Least factors on bounds that make them cover the held-out errors, shape ``(n,)``.

        Args:
            low: Lower bounds in log space, at most 0, shape ``(n,)``.
            high: Upper bounds, at least 0, likewise.

        Returns:
            Factors of at least 1; infinite with too few samples.
        """
        if not len(self.left_out):
            return np.full(len(low), np.inf)
        # A table has few distinct bounds; rounding errors would make thousands.
        pairs, place = np.unique(np.round([-low, high], 9), axis=1, return_inverse=True)
        found = []
        for below, above in np.maximum(pairs.T, 1e-9):
            errors = self.left_out / np.where(self.left_out < 0, below, above)
            least, most = few_or_ends(errors)
            found.append(max(-least, most, 1.0))
        return np.array(found)[place.ravel()]

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Arrays to save: the samples, from which the matrices are recomputed."""
        leaves = self.sites.leaves
        return {
            **({} if leaves is None else {"leaves": leaves}),
            "params": self.params,
            "place": self.sites.place.astype(np.float32),
            "share": self.sites.share.astype(np.float32),
            "coarse": self.sites.coarse.astype(str),
            "fine": self.sites.fine.astype(str),
            "errors": self.errors,
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> ErrorPosterior:
        """Read :meth:`to_arrays`'s arrays, and condition on the samples again.

        The saved parameters were already selected by the samples.
        """
        sites = Sites(
            arrays["place"].astype(np.float64),
            arrays["share"].astype(np.float64),
            arrays["coarse"].astype(object),
            arrays["fine"].astype(object),
            arrays.get("leaves"),
        )
        return cls.fit(arrays["params"], sites, arrays["errors"], choose=False)

    def apply(self, sites: Sites) -> tuple[np.ndarray, np.ndarray]:
        """Mean error and half-width of its 90 % interval, both in log space, shape ``(n,)``."""
        mean = np.empty(len(sites))
        half = np.empty(len(sites))
        # In pieces: the covariance with all samples takes memory proportional to the rows.
        for start in range(0, len(sites), 4096):
            part = sites.take(np.arange(start, min(start + 4096, len(sites))))
            cross = covariance(part, self.sites, self.params)
            own = prior_variance(part, self.params)
            mean[start : start + 4096] = cross @ self.weights
            # Variance that the samples explain (Rasmussen and Williams, equation 2.26).
            known = np.einsum("ij,jk,ik->i", cross, self.inverse, cross, optimize=True)
            spread = np.sqrt(np.maximum(own - known, 0.0) + noise_variance(self.params))
            half[start : start + 4096] = NORMAL_90 * self.scale * spread
        return mean, half
