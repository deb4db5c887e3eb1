"""Features of operators: their names and digests, and what is refused."""

import numpy as np
import pandas as pd
import pytest

from opcast.common.errors import DatasetError
from opcast.features.operators import FAMILIES, family_keys, op_features
from opcast.features.operators.features import feature_names, ops_schema_hash
from opcast.features.operators.schema import PARAMETERS


@pytest.fixture(scope="module")
def devices(round_gpu):
    other = round_gpu("other", core_count=60, vendor="AMD", clock_hz=1.5e9)
    return {"a": round_gpu("a"), "b": other}


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_digest_do_not_depend_on_the_rows(family, op_rows, devices):
    for seed, n in ((1, 3), (2, 50)):
        found = op_features(op_rows(family, n, seed).assign(device="a"), family, devices)
        assert found.names == feature_names(family)
        assert len(set(found.names)) == len(found.names) == found.X.shape[1]
        assert found.X.dtype == np.float32
    assert len(ops_schema_hash(family)) == 16


def test_digests_tell_families_apart():
    assert len({ops_schema_hash(family) for family in FAMILIES}) == len(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_describe_kernels_rather_than_devices(family, op_rows, devices):
    found = op_features(op_rows(family, 3).assign(device="a"), family, devices)
    assert found.general[found.keys].all()
    assert not found.general.all()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_has_the_same_features_among_others(family, op_rows, devices):
    rows = op_rows(family, 40).assign(device=["a", "b"] * 20)
    every = op_features(rows, family, devices)
    some = op_features(rows.iloc[[7, 30]], family, devices)
    assert (every.X[[7, 30]] == some.X).all()
    assert (some.base_s == every.base_s[[7, 30]]).all()


def test_a_faster_device_is_estimated_faster(op_rows, round_gpu):
    rows = op_rows("kernel/linear", 100)
    rates = {k: 2 * v for k, v in round_gpu().peak_flops.items()}
    twice = round_gpu(core_count=200, peak_flops=rates)
    slow = op_features(rows.assign(device="a"), "kernel/linear", {"a": round_gpu()})
    fast = op_features(rows.assign(device="a"), "kernel/linear", {"a": twice})
    assert (fast.base_s <= slow.base_s * (1 + 1e-9)).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_missing_parameter_names_the_row(family, op_rows, devices):
    for column in PARAMETERS[FAMILIES[family]]:
        if column == "n_in":
            continue
        rows = op_rows(family, 3).assign(device="a").astype({column: float})
        rows.loc[1, column] = np.nan
        with pytest.raises(DatasetError, match=rf"row X1: .*'{column}', found nan"):
            op_features(rows, family, devices)
        with pytest.raises(DatasetError, match=rf"row X0: .*'{column}'"):
            op_features(rows.drop(columns=column), family, devices)


@pytest.mark.parametrize("value", [0, -4])
def test_parameter_below_one_names_the_row(value, op_rows, devices):
    rows = op_rows("eager/bmm", 4).assign(device="a")
    rows.loc[2, "k"] = value
    with pytest.raises(DatasetError, match=f"row X2: eager/bmm .*'k', found {value}"):
        op_features(rows, "eager/bmm", devices)
    with pytest.raises(DatasetError, match="row 2:"):  # its index if it has no id
        op_features(rows.drop(columns="id"), "eager/bmm", devices)


def test_zero_is_allowed_where_it_says_none(op_rows, devices):
    rows = op_rows("graph/context_attention", 4).assign(device="a", window=0, causal=0)
    assert np.isfinite(op_features(rows, "graph/context_attention", devices).X).all()
    rows = op_rows("eager/conv", 4).assign(device="a", pad=0)
    assert np.isfinite(op_features(rows, "eager/conv", devices).X).all()


def test_number_of_inputs_may_be_missing(op_rows, devices):
    rows = op_rows("eager/softmax", 4).assign(device="a", n_in=1)
    stated = op_features(rows, "eager/softmax", devices)
    assert (op_features(rows.drop(columns="n_in"), "eager/softmax", devices).X == stated.X).all()


def test_unknown_family_lists_the_known(op_rows, devices):
    with pytest.raises(DatasetError, match=r"no operator family 'eager/fft'.*graph/moe"):
        op_features(op_rows("eager/bmm", 1).assign(device="a"), "eager/fft", devices)


def test_family_keys_say_how_a_source_measured():
    sources = ["neusight", "vidur", "aiconfigurator", "mine"]
    frame = pd.DataFrame({"source": sources, "family": "linear"})
    assert list(family_keys(frame)) == [
        "eager/linear", "kernel/linear", "graph/linear", "kernel/linear",
    ]  # fmt: skip
