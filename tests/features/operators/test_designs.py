"""The physics of operators on chips that do not exist: no cliffs, and never slower for more."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from opcast.features.devices.catalogue import find_device
from opcast.features.operators import FAMILIES, op_features
from opcast.predict.designs import RATES

from ...support.cases import later
from ...support.designs import designs, linked, operators

#: One per cent more of a rate moves no time by more than this, and a doubled rate slows nothing
#: down by more than that: what power leaves of a peak falls with the peak, by less than it rises.
MOST, SLOWER = 0.03, 0.0015


def seconds(rows, family, devices):
    """Times of all rows on each device, in one table: an array of devices by rows."""
    named = {f"design-{place}": device for place, device in enumerate(devices)}
    table = rows.merge(pd.Series(list(named), name="device"), how="cross")
    found = op_features(table, family, named)
    # XLA's table holds the mean of a call's kernels, which halves where a reduction is split.
    return (found.base_s * found.kernels).reshape(len(rows), -1).T


def check(seed, chips, count):
    """One per cent and a doubling of each rate of random designs, over all families."""
    rng = np.random.default_rng(seed)
    drawn = list(designs(rng, chips))
    asked = [
        own
        for device in drawn
        for own in (
            device,
            linked(device, 3.0),
            *(rate(device, factor) for rate in RATES.values() for factor in (1.01, 2.0)),
        )
    ]
    for family in FAMILIES:
        rows = operators(rng, family, count)
        times = seconds(rows, family, asked).reshape(chips, -1, count)
        for device, (base, unlinked, *changed) in zip(drawn, times, strict=True):
            assert np.array_equal(unlinked, base)
            for name, one, two in zip(RATES, changed[::2], changed[1::2], strict=True):
                step = np.log(one / base)
                assert np.abs(step).max() < MOST, (family, device, name)
                if FAMILIES[family] == "conv_nd" and name == "vector_tflops":
                    # A vector unit as fast as the matrix unit leaves none to speak of.
                    continue
                assert step.max() < SLOWER, (family, device, name)
                # As much per doubling as per cent of it.
                assert np.log(two / base).max() < 70 * SLOWER, (family, device, name)


def test_one_per_cent_of_a_rate_is_no_cliff():
    check(0, chips=7, count=12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", (1, later(3)))
def test_one_per_cent_of_a_rate_is_no_cliff_for_many(seed):
    check(seed, chips=28, count=40)


@pytest.mark.parametrize("cores", [16, 32, 64])
def test_more_clock_at_one_peak_is_no_slower_however_wide_the_cores(cores):
    """H100's peak from few cores of up to 41,000 operations a clock, at 1,400 to 1,900 MHz."""
    rng = np.random.default_rng(cores)
    for family in ("graph/linear", "xla/linear", "tuned/linear", "graph/moe"):
        rows = operators(rng, family, 40)
        chip = replace(find_device("h100-sxm"), core_count=cores)
        clocks = range(1400, 1900, 10)
        times = seconds(rows, family, [replace(chip, clock_hz=mhz * 1e6) for mhz in clocks])
        steps = np.diff(np.log(times), axis=0)
        assert steps.max() <= 1e-9 and steps.min() > -MOST
