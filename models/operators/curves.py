"""Traces the error on a new device over the number of samples, chosen actively or at random."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ...common.errors import DatasetError
from ...features.devices.device import DeviceSpec
from ..adapt.active import allocate, choose, choose_for, errors_at, shares_of, spread_evenly
from ..adapt.covariance import Sites, covariance, joined_sites
from ..adapt.gaussian_process import ErrorPosterior
from ..trust.calibrator import NORMAL_90
from .family import FamilyModel
from .regressors import mean_ape

#: Most candidates and test rows; larger tables are subsampled to keep a trial's matrices small.
MAX_CANDIDATES, MAX_TEST = 1200, 3000
#: Numbers of samples per family on the curves.
COUNTS = (0, 5, 10, 25, 50, 100)
#: Draws of the random choice to average over.
RANDOM_DRAWS = 10
#: Test rows of a family with samples chosen individually, and candidates for each: the cost grows
#: with the square of the latter.
QUESTIONS, QUESTION_POOL = 30, 400
#: Name of the curve over all families.
ALL = "all, by time"


@dataclass(frozen=True)
class Curve:
    """Error against number of samples for one family on one device.

    Attributes:
        family: The family, or :data:`ALL`.
        device: The device.
        counts: Numbers of samples per family.
        active: MAPE on the other rows with actively chosen samples, one per count.
        random: MAPE with random samples, mean over draws.
    """

    family: str
    device: str
    counts: tuple[int, ...]
    active: tuple[float, ...]
    random: tuple[float, ...]

    def needed(self, count: int) -> float:
        """Number of actively chosen samples that reach the error of ``count`` random ones.

        The error is interpolated linearly in the logarithm of the number plus one; ``inf`` if no
        number of chosen samples reaches it.
        """
        goal = self.random[self.counts.index(count)]
        for place, error in enumerate(self.active):
            if error > goal:
                continue
            if place == 0:
                return float(self.counts[0])
            before = self.active[place - 1]
            low, high = np.log1p(self.counts[place - 1]), np.log1p(self.counts[place])
            return float(np.expm1(low + (high - low) * (before - goal) / (before - error)))
        return float("inf")


@dataclass(frozen=True)
class Asked:
    """Errors on single operators, with samples chosen for each one or at random.

    Attributes:
        family: The family.
        counts: Numbers of samples.
        chosen: MAPE over the operators, one per count.
        random: MAPE with random samples, mean over draws.
        narrowed: Predicted standard deviation of an operator's log error after the chosen samples,
            relative to that without samples.
        inside: Fraction of the operators whose error is inside the predicted 90 % interval.
    """

    family: str
    counts: tuple[int, ...]
    chosen: tuple[float, ...]
    random: tuple[float, ...]
    narrowed: tuple[float, ...]
    inside: tuple[float, ...]


@dataclass
class Trial:
    """One family on one device: candidates for measurement, and test rows.

    Features and predictions are computed once; every number of samples and every draw then costs
    a few small matrix operations.

    Attributes:
        family: The family.
        params: Parameters of its covariance.
        pool: Sites of the candidates.
        pool_errors: ``log(measured / predicted)`` of the candidates, shape ``(n,)``.
        test: Sites of the test rows.
        test_errors: ``log(measured / predicted)`` of these rows, shape ``(m,)``.
        rows: Rows of the candidates, in the same order.
        seconds: Predicted total time of the device's rows.
        order: Candidates, most informative first.
        gains: Expected reduction of the variance by each, in that order.
        groups: Groups of similar candidates, shape ``(n,)``; ``None`` without groups.
    """

    family: str
    params: np.ndarray
    pool: Sites
    pool_errors: np.ndarray
    test: Sites
    test_errors: np.ndarray
    rows: pd.DataFrame
    seconds: float
    order: np.ndarray
    gains: np.ndarray
    groups: np.ndarray | None = None

    @classmethod
    def of(
        cls,
        model: FamilyModel,
        pool: pd.DataFrame,
        test: pd.DataFrame,
        devices: Mapping[str, DeviceSpec],
        count: int,
        seed: int = 0,
    ) -> Trial:
        """Prepare a trial.

        Args:
            model: Model fitted without the device.
            pool: Candidate rows, with ``latency_us``.
            test: Test rows.
            devices: Descriptions by name.
            count: Number of candidates to rank.
            seed: Seed of the subsampling.

        Raises:
            DatasetError: The pool or the test rows are empty.
        """
        if not len(pool) or not len(test):
            raise DatasetError(f"no rows of {model.family} to measure or to test on")
        rng = np.random.default_rng(seed)
        number = len(pool) + len(test)
        pool, test = _some(pool, MAX_CANDIDATES, rng), _some(test, MAX_TEST, rng)
        sites, errors, seconds = model.site_errors(pool, devices)
        other, judged, _ = model.site_errors(test, devices)
        return cls.of_sites(
            model.family,
            model.fitted.errors.params,
            pool,
            (sites, errors),
            (other, judged),
            float(seconds.mean()) * number,
            count,
        )

    @classmethod
    def of_sites(
        cls,
        family: str,
        params: np.ndarray,
        rows: pd.DataFrame,
        pool: tuple[Sites, np.ndarray],
        test: tuple[Sites, np.ndarray],
        seconds: float,
        count: int,
        groups: np.ndarray | None = None,
    ) -> Trial:
        """Prepare a trial from sites and errors of its rows.

        Args:
            family: Name of the family.
            params: Parameters of the covariance.
            rows: The candidates.
            pool: Their sites and errors.
            test: Sites and errors of the test rows.
            seconds: Predicted total time of all rows.
            count: Number of candidates to rank.
            groups: Groups of similar candidates, such as kernels of one program.
        """
        sites, other = _coded(pool[0], test[0])
        order, gains = choose(sites, params, count)
        return cls(
            family, params, sites, pool[1], other, test[1], rows, seconds, order, gains, groups
        )

    def left(self, chosen: np.ndarray, test: np.ndarray | None = None) -> np.ndarray:
        """Remaining log errors on test rows after learning from some of the candidates.

        Args:
            chosen: Positions of the candidates.
            test: Positions of the test rows; all by default.
        """
        errors = self.test_errors if test is None else self.test_errors[test]
        if not len(chosen):
            return errors
        own = None if self.groups is None else self.groups[chosen]
        some = self.pool.take(chosen)
        correction = ErrorPosterior.fit(self.params, some, self.pool_errors[chosen], groups=own)
        # Only the posterior mean: intervals would need a matrix the size of the test rows.
        sites = self.test if test is None else self.test.take(test)
        cross = covariance(sites, correction.sites, correction.params)
        return np.asarray(errors - cross @ correction.weights)

    def error(self, chosen: np.ndarray) -> float:
        """MAPE on the test rows after learning from some of the candidates."""
        return mean_ape(self.left(chosen))

    def asked(self, counts: Sequence[int], seed: int = 0) -> Asked:
        """Compare samples chosen for one test row with random ones, over several test rows.

        Args:
            counts: Numbers of samples, ascending.
            seed: Seed of the draws of test rows, candidates and random samples.
        """
        rng = np.random.default_rng(seed)
        rows = rng.permutation(len(self.test_errors))[:QUESTIONS]
        some = rng.permutation(len(self.pool))[:QUESTION_POOL]
        chosen, random = np.empty((2, len(rows), len(counts)))
        left, inside = np.empty((2, len(rows), len(counts)))
        for place, row in enumerate(rows.tolist()):
            one = np.array([row])
            errors = errors_at(joined_sites(self.pool.take(some), self.test.take(one)), self.params)
            order, shares = choose_for(errors, max(counts))
            prior = float(np.mean([own.covariance[-1, -1] for own in errors]))
            noise = float(np.mean([own.noise for own in errors]))
            for at, count in enumerate(counts):
                error = float(self.left(some[order[:count]], one)[0])
                chosen[place, at] = abs(np.expm1(-error))
                drawn = (rng.permutation(len(self.pool))[:count] for _ in range(RANDOM_DRAWS))
                random[place, at] = np.mean([mean_ape(self.left(own, one)) for own in drawn])
                spread = prior * (shares[count - 1] if count else 1.0) + noise
                left[place, at] = np.sqrt(spread / (prior + noise))
                inside[place, at] = abs(error) <= NORMAL_90 * np.sqrt(spread)
        means = (each.mean(axis=0).tolist() for each in (chosen, random, left, inside))
        return Asked(self.family, tuple(counts), *map(tuple, means))


def error_curve(trial: Trial, device: str, counts: Sequence[int], seed: int = 0) -> Curve:
    """Compare active with random choice of samples within one family."""
    return _curve(trial.family, device, [trial], counts, seed, {trial.family: 1.0})


def joint_curve(
    trials: Sequence[Trial], device: str, counts: Sequence[int], seed: int = 0
) -> Curve:
    """Compare them over all families, with errors weighted by the families' shares of time.

    Active choice allocates samples by share × gain, random choice evenly. A count ``n`` means ``n``
    samples per family on average.
    """
    shares = shares_of({trial.family: trial.seconds for trial in trials})
    return _curve(ALL, device, trials, counts, seed, shares)


def _curve(
    name: str,
    device: str,
    trials: Sequence[Trial],
    counts: Sequence[int],
    seed: int,
    shares: Mapping[str, float],
) -> Curve:
    gains = {trial.family: trial.gains for trial in trials}
    totals = [n * len(trials) for n in counts]
    active = [
        _weighted(trials, shares, allocate(gains, shares, n), [t.order for t in trials])
        for n in totals
    ]
    rng = np.random.default_rng(seed)
    random = np.zeros((RANDOM_DRAWS, len(counts)))
    for draw in range(RANDOM_DRAWS):
        orders = [rng.permutation(len(trial.pool)) for trial in trials]
        for place, n in enumerate(totals):
            # A user without the model would spread samples evenly.
            evenly = spread_evenly(list(gains), n)
            random[draw, place] = _weighted(trials, shares, evenly, orders)
    return Curve(name, device, tuple(counts), tuple(active), tuple(random.mean(axis=0).tolist()))


def _weighted(
    trials: Sequence[Trial],
    shares: Mapping[str, float],
    numbers: Mapping[str, int],
    orders: Sequence[np.ndarray],
) -> float:
    """Mean of the families' errors, weighted by their shares."""
    return sum(
        shares[trial.family] * trial.error(order[: numbers[trial.family]])
        for trial, order in zip(trials, orders, strict=True)
    )


def _coded(first: Sites, second: Sites) -> tuple[Sites, Sites]:
    """Sites with names replaced by integer codes, which compare faster."""
    codes = []
    for name in ("coarse", "fine"):
        code, _ = pd.factorize(np.concatenate([getattr(first, name), getattr(second, name)]))
        codes.append((code[: len(first)], code[len(first) :]))
    return (
        Sites(first.place, first.share, codes[0][0], codes[1][0], first.leaves),
        Sites(second.place, second.share, codes[0][1], codes[1][1], second.leaves),
    )


def _some(rows: pd.DataFrame, count: int, rng: np.random.Generator) -> pd.DataFrame:
    if len(rows) <= count:
        return rows.reset_index(drop=True)
    return rows.iloc[rng.choice(len(rows), count, replace=False)].reset_index(drop=True)
