"""The ratio of two versions: its error by hand, and on published measurements of programs."""

from __future__ import annotations

import os
from itertools import combinations
from math import exp, log, sqrt
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from opcast.common.interval import Interval
from opcast.features.ir.jax_function import FunctionCall
from opcast.features.lowering.options import LoweringOptions
from opcast.predict.difference import RHO, Version, compare, ratio_error
from opcast.predict.program.case import ProgramCase
from opcast.predict.program.predictor import load_for_programs

from .test_matched_kernels import piece

PROGRAMS = Path(os.environ.get("OPCAST_PUBLISHED_DATA", "../shared/data")) / "published-programs"


def version(us: float, *pieces, rho: float = 0.5, lo: float = 0.0, hi: float = 0.0) -> Version:
    own = SimpleNamespace(latency_us=us, lo_us=lo or us / 1.01, hi_us=hi or us * 1.01)
    return Version(own, pieces, None, rho)


def test_equal_versions_have_no_error_whatever_their_intervals():
    one = version(100.0, piece("a", 60.0), piece("b", 40.0, flops=5), lo=20.0, hi=500.0)
    assert ratio_error(one, one) == (0.0, 0.0)


def test_the_error_is_that_of_the_shares_that_differ():
    old = version(100.0, piece("a", 60.0), piece("b", 40.0, flops=5))
    new = version(120.0, piece("a", 60.0), piece("c", 60.0, flops=9))
    # Shares: a 0.6 → 0.5, b 0.4 → 0, c 0 → 0.5; ends 0.1 down and 0.2 up.
    ups = np.array([0.1 * 0.1, 0.4 * 0.1, 0.5 * 0.2]) * [-1, -1, 1]
    up = sqrt((1 - RHO) * (ups**2).sum() + RHO * ups.sum() ** 2)
    downs = np.array([0.1 * 0.2, 0.4 * 0.2, 0.5 * 0.1]) * [-1, -1, 1]
    down = sqrt((1 - RHO) * (downs**2).sum() + RHO * downs.sum() ** 2)
    assert ratio_error(old, new) == pytest.approx((down, up))
    # An interval of the program that is wider than its kernels make it widens the ratio's, too.
    kernels = sqrt(0.5 * (0.5**2 + 0.5**2) + 0.5)
    wide = version(120.0, *new.pieces, lo=120.0 * exp(-0.3), hi=120.0 * exp(0.6))
    factor = 3.0 / kernels
    assert ratio_error(old, wide) == pytest.approx((down * factor, up * factor))


def test_gaps_that_are_added_may_be_absent_or_twice_as_long():
    old, new = version(100.0, piece("a", 100.0)), version(110.0, piece("a", 100.0))
    share = 10 / 110
    # The kernels' own share fell by as much.
    parts = np.array([share * log(2), -share * 0.1])
    up = sqrt((1 - RHO) * (parts**2).sum() + RHO * parts.sum() ** 2)
    assert ratio_error(old, new)[1] == pytest.approx(up)


def test_probabilities_follow_from_the_interval():
    ratio = Interval(1.1, 1.0, 1.21)
    assert 1.0 - ratio.chance_below(1.1) == pytest.approx(0.5)
    assert 1.0 - ratio.chance_below(1.0) == pytest.approx(0.95)


@pytest.fixture(scope="module")
def predictor():
    return load_for_programs()


def traced(function, *shapes):
    return FunctionCall(function, tuple(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes))


def test_a_wider_type_is_found_with_its_lines(predictor):
    def before(x, w):
        h = jax.nn.gelu(x @ w)
        return h * 2 + 1

    def after(x, w):
        h = jax.nn.gelu((x @ w).astype(jnp.float32))
        return h * 2 + 1

    options = LoweringOptions("fused", "h100-sxm")
    shapes = (4096, 2048), (2048, 8192)
    old, new = (
        Version.of(ProgramCase(traced(own, *shapes), options), predictor) for own in (before, after)
    )
    found = compare(old, new)
    assert found.ratio.lo < found.ratio.value < found.ratio.hi
    assert found.ratio.value == pytest.approx(new.prediction.latency_us / old.prediction.latency_us)
    assert found.slower > 0.8 and found.slower_by(1.0) < 0.1
    # The product is the same and cancels; what follows it is not.
    assert found.same >= 1
    reasons = [reason for change in found.changes for reason in change.reasons]
    assert any("bf16 widened to f32" in own for own in reasons)
    assert all(line.startswith("test_difference.py:") for c in found.changes for line in c.lines)
    more = sum(c.more_us for c in found.changes) + found.rest_us
    assert more == pytest.approx(found.new.value - found.old.value)
    # Much narrower than two intervals side by side.
    apart = log(found.new.hi / found.new.value) + log(found.old.value / found.old.lo)
    assert log(found.ratio.hi / found.ratio.value) < 0.7 * apart
    same = compare(old, old)
    assert same.ratio == (1.0, 1.0, 1.0) and not same.changes and same.slower == 0.0


@pytest.mark.slow
@pytest.mark.exhaustive  # dozens of measured programs are lowered and compared in pairs
def test_intervals_hold_the_ratios_of_measured_programs(predictor):
    """Pairs of programs on one GPU, of which none was learned from (docs/ci.md)."""
    if not PROGRAMS.is_dir():
        pytest.skip("the pack published-programs is not here")
    table = pd.read_csv(PROGRAMS / "programs.csv")
    own = table[(table["device"] == "mi350") & table["file"].notna()]
    own = own[own["latency_us"].notna() & (own["trust"] != "doubtful")]
    own = own.sort_values("n_devices").drop_duplicates("file")
    options = LoweringOptions("fused", PROGRAMS / "mi350.yaml")
    found = [
        Version.of(ProgramCase(PROGRAMS / f, options, whole=True, on_stream=True), predictor)
        for f in own["file"]
    ]
    rows = list(zip(found, own["latency_us"], strict=True))
    inside = []
    for (old, was), (new, now) in combinations(rows, 2):
        down, up = ratio_error(old, new)
        # Equal programs on more devices at once: their ratio is the label's own error.
        if up == 0.0:
            continue
        error = log(now / was) - log(new.prediction.latency_us / old.prediction.latency_us)
        inside.append(-down <= error <= up)
    assert len(inside) > 1000
    assert 0.88 < np.mean(inside) < 0.98
