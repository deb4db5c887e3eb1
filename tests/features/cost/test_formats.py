"""The table of number formats: scales count, and names agree between tables, steps and serving."""

from __future__ import annotations

from opcast.features.cost.formats import FORMATS, TABLE_FORMATS, UNQUANTISED, format_name
from opcast.features.devices.catalogue import find_device
from opcast.features.ir.program import DTYPE_BITS, REDUCED
from opcast.simulate.serving.served import CACHES, WEIGHTS
from opcast.simulate.step.workload import PRODUCTS


def test_table_formats_count_the_scales_of_their_blocks():
    assert TABLE_FORMATS["nvfp4"].weight_bits == 4 + 8 / 16
    assert TABLE_FORMATS["w4a16_mxfp4"].weight_bits == 4 + 8 / 32
    for name, kind in TABLE_FORMATS.items():
        assert {kind.weights, kind.rate} <= {*DTYPE_BITS, REDUCED}
        assert (kind.block == 0) or name not in UNQUANTISED
        assert kind.weight_bits >= DTYPE_BITS[kind.weights]


def test_steps_and_serving_name_formats_of_the_table():
    assert {*PRODUCTS, *WEIGHTS, *CACHES} <= set(FORMATS)
    # AWQ: 4 bits, and one scale of 16 bits for 128 weights.
    assert FORMATS["int4"].weight_bits == 4 + 16 / 128
    assert FORMATS["bf16"].element_bytes == 2.0 and FORMATS["nvfp4"].element_bytes == 0.5
    for name, kind in FORMATS.items():
        assert {kind.rate, kind.fastest or kind.rate} <= {*DTYPE_BITS, REDUCED}
        assert not kind.wider or kind.wider in FORMATS, name


def test_other_names_mean_formats():
    assert [format_name(n) for n in ("bfloat16", "half", "fp32", "float8_e5m2", "nvfp4")] == [
        "bf16", "f16", "f32", "fp8", "nvfp4"
    ]  # fmt: skip


def test_products_run_at_the_faster_of_the_rates_that_a_device_has_for_them():
    hopper, ultra = find_device("h200-sxm"), find_device("b300")
    # Activations narrowed to eight bits are faster on Hopper; Blackwell Ultra has few such units.
    assert FORMATS["int4"].peak_on(hopper) == hopper.matrix_peak("s8") > hopper.matrix_peak("bf16")
    assert FORMATS["int4"].peak_on(ultra) == ultra.matrix_peak("bf16") > ultra.matrix_peak("s8")
