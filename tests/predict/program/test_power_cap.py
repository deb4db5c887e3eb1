"""Someone whose datacentre caps its boards asks what a program costs in time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from opcast import Prediction, load
from opcast.common.errors import DeviceError

from ...support.commands import opcast

SIDE = 8192


def _predict(function, cap, *shapes) -> Prediction:
    own = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    return load().predict(function, *own, device="h100-sxm", lowering="fused", power_cap_w=cap)


def test_products_slow_down_under_a_cap_and_passes_less():
    product = [
        _predict(jnp.matmul, cap, (SIDE, SIDE), (SIDE, SIDE)) for cap in (None, 700.0, 350.0)
    ]
    free, limit, low = (p.latency_us for p in product)
    assert limit == free
    # Half of the limit, of which idling and memory take a part: the clock keeps the cube root of
    # what is left, between a third and 0.8 of it.
    assert 1.2 < low / free < 3.0
    assert product[2].hi_us / product[2].lo_us > product[0].hi_us / product[0].lo_us
    assert any("held below 350 W" in note for note in product[2].notes)
    assert not any("held below" in note for note in product[0].notes)
    copies = [_predict(jnp.negative, cap, (SIDE, SIDE)) for cap in (None, 350.0)]
    assert 1.0 <= copies[1].latency_us / copies[0].latency_us < low / free


def test_no_lower_end_is_below_what_holds_without_a_cap():
    free, deep = (_predict(jnp.matmul, cap, (SIDE, SIDE), (SIDE, SIDE)) for cap in (None, 200.0))
    assert free.lo_us <= deep.lo_us < deep.latency_us


def test_a_capped_program_draws_no_more_than_its_cap():
    found = _predict(jnp.matmul, 350.0, (SIDE, SIDE), (SIDE, SIDE))
    assert found.energy is not None
    assert found.energy.value / found.seconds < 350.0


def test_a_device_without_a_power_limit_takes_no_cap():
    with pytest.raises(DeviceError, match="needs the device's power limit"):
        load().predict(
            jnp.negative, jnp.zeros(8), device="tpu-v5e", lowering="fused", power_cap_w=100.0
        )


def test_watts_may_have_their_unit(tmp_path):
    program = tmp_path / "mlp.mlir"
    assert opcast("zoo", "export", "mlp", "--set", "batch=8", "--out", program).returncode == 0
    command = ("predict", program, "--device", "h100-sxm", "--lowering", "fused", "--power-cap")
    plain, unit, kilo = (opcast(*command, w).stdout for w in ("400", "400W", "0.4kW"))
    assert plain == unit == kilo != ""
    assert "400W" in opcast(*command, "many").stderr
    done = opcast(*command, "20W")
    assert done.returncode == 1 and "outside 175 to 700 W" in done.stderr
