import pytest

from opcast.common.units import duration, energy, per_second, plain, quantity, size


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.4567, "0.457"),
        (999.6, "1,000"),
        (12345.6, "12,300"),
        (-32000.0, "-32,000"),
        (1.0e12, "1,000,000,000,000"),
        (1.234e-5, "0.0000123"),
        (9.996e-6, "0.00001"),
        (float("nan"), "nan"),
    ],
)
def test_a_plain_number_has_no_exponent(value: float, text: str) -> None:
    assert plain(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1030.0, "1.03 kJ"),
        (999.4, "999 J"),
        (999.6, "1 kJ"),
        (0.0123, "12.3 mJ"),
        (2.5e13, "25 TJ"),
        (1e-12, "0.001 nJ"),
        (0.0, "0 J"),
        (float("inf"), "inf J"),
    ],
)
def test_a_quantity_takes_the_prefix_of_its_rounded_value(value: float, text: str) -> None:
    assert quantity(value, "J") == text


def test_times_energies_and_sizes_read_as_people_write_them() -> None:
    # 999.6 us round to a millisecond; hours are seconds, not kiloseconds or 5.02e+03.
    assert [duration(us) for us in (0.12, 999.4, 999.6, 1.5e6, 999.6e6, 5.02e9)] == [
        "120 ns",
        "999 µs",
        "1 ms",
        "1.5 s",
        "1,000 s",
        "5,020 s",
    ]
    assert [energy(j) for j in (1461.2, 1.03e3, 0.5)] == ["1.461 kJ", "1.03 kJ", "500 mJ"]
    assert size(2.0**40 * 1234) == "1,230 TiB"


def test_a_small_rate_is_not_none():
    rates = {0.0512: "0.0512", 9.87: "9.87", 43.6: "44", 12345.6: "12,346"}
    assert {value: per_second(value) for value in rates} == rates
