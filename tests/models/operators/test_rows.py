"""Operator rows: groups, known faults, and what datasets without operators give."""

import numpy as np
import pandas as pd
import pytest

from opcast.common.errors import DatasetError
from opcast.features.dataset import Dataset
from opcast.features.operators import FAMILIES
from opcast.features.operators.hlo import op_ir
from opcast.features.operators.schema import ALIKE, faulty
from opcast.models.operators.rows import (
    FEW_GROUPS,
    PARTS,
    codes,
    group_draw,
    group_names,
    held_out,
    rows_of_dataset,
    rows_of_published,
    unnamed,
)


def test_faulty_rows():
    rows = pd.DataFrame(
        [
            ("p4", "eager/linear", "train", ""),
            ("p4", "eager/linear", "dev_larger_shape", ""),
            ("p4", "eager/bmm", "train", ""),
            ("t4", "eager/linear", "train", ""),
            ("h100-sxm", "graph/moe", "train", "vllm_modeloptfp8moe_flashinfer_cutlass"),
            ("h100-sxm", "graph/moe", "train", "vllm_default"),
        ],
        columns=["device", "key", "split", "kernel"],
    )
    assert list(faulty(rows, "wrong")) == [True] + 5 * [False]
    assert list(faulty(rows.drop(columns="split"), "wrong")) == [True, True] + 4 * [False]
    assert list(faulty(rows, "local")) == [False, False, False, False, True, False]
    assert not faulty(rows.drop(columns="kernel"), "local").any()


def test_experts_that_say_nothing_of_other_chips():
    """Untuned grouped products on Hopper, and ranks that compute the rows of all ranks on A100."""
    rows = pd.DataFrame(
        [
            ("h100-sxm", "sglang_flashinfer_cutlass_moe", 1, True),
            ("rtx-pro-6000", "sglang_flashinfer_cutlass_moe", 1, False),
            ("a100-sxm-80gb", "sglang_fused_moe_triton", 8, True),
            ("a100-sxm-80gb", "sglang_fused_moe_triton", 1, False),
            ("a100-sxm-80gb", "vllm_fused_moe", 8, False),
            ("h100-sxm", "sglang_fused_moe_triton", 8, False),
        ],
        columns=["device", "kernel", "ep", "expected"],
    )
    assert list(faulty(rows, "local")) == list(rows["expected"])
    # Other families of a table have no ranks.
    rows["ep"] = rows["ep"].astype("Int64").where(rows["kernel"] != "vllm_fused_moe")
    assert list(faulty(rows, "local")) == list(rows["expected"])


@pytest.mark.parametrize("family", FAMILIES)
def test_draws_are_by_group(family, op_rows):
    rows = op_rows(family, 300)
    twice = pd.concat([rows, rows]).reset_index(drop=True)
    drawn = group_draw(twice, family)
    assert ((drawn >= 0) & (drawn < 1)).all()
    assert (drawn[:300] == drawn[300:]).all()
    keys = twice[list(ALIKE[FAMILIES[family]])].astype(str).agg("|".join, axis=1)
    assert pd.Series(drawn).groupby(keys).nunique().max() == 1
    assert len(set(drawn)) == keys.nunique()
    assert (group_draw(twice, family, seed=1) != drawn).any()
    some = group_draw(twice.iloc[[5, 17]], family)
    assert (some == drawn[[5, 17]]).all()  # whatever the other rows are


@pytest.mark.parametrize(("groups", "parts"), [(2, 0), (4, 4), (20, PARTS), (300, PARTS), (400, 0)])
def test_where_there_are_few_groups_each_is_held_out_once(groups, parts, op_rows):
    rows = op_rows("graph/linear", 3 * groups + 400)
    rows["n"], rows["k"], rows["b"] = np.arange(len(rows)) % groups, 64, 1
    held, folds = held_out(rows, "graph/linear", 0, np.random.default_rng(0))
    assert len(folds) == parts
    if parts:
        assert (np.sum(folds, axis=0) == 1).all()
        assert all(len(set(rows["n"][fold])) == groups / parts for fold in folds)
    # Of many groups a twentieth is held out whole; of few, single rows besides the folds.
    whole = {n for n, own in rows.groupby("n") if held[own.index].all()}
    assert len(whole) == (0.05 * groups if groups >= FEW_GROUPS else 0)
    assert 0 < held.mean() < 0.2


def test_a_group_has_one_name_however_its_numbers_are_stored(op_rows):
    rows = op_rows("graph/generation_mla", 3).assign(q_heads=128, window=0)
    stored = rows.assign(q_heads=pd.array([128] * 3, "Int64"), window=[0.0, np.nan, 0.0])
    names = group_names(rows, "graph/generation_mla")
    assert list(names) == list(group_names(stored, "graph/generation_mla"))
    assert names[0].startswith("128|")
    assert names[0] != group_names(rows.assign(q_heads=64), "graph/generation_mla")[0]


def test_codes_say_what_runs_a_row():
    rows = pd.DataFrame(
        {"op": ["linear"] * 3, "dtype": ["bf16", "bf16", "fp8"], "kernel": ["a", None, "a"]}
    )
    coarse, fine = codes(rows)
    assert coarse[0] == coarse[1] != coarse[2]
    assert len(set(fine)) == 3


def dataset(make_frame, rows, **columns):
    irs = [op_ir(row) for row in rows.to_dict("records")]
    hashes = [str(hash(ir)) for ir in irs]
    return Dataset(make_frame(kernel_ir=irs, kernel_hash=hashes, **columns))


def test_rows_of_a_dataset(make_frame, op_rows):
    first, second = op_rows("eager/bmm", 3), op_rows("graph/moe", 2)
    rows = pd.concat([first, second, first.iloc[:1]]).reset_index(drop=True)
    times = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    found = rows_of_dataset(dataset(make_frame, rows, latency_us_p50=times))
    assert list(found["key"]) == 3 * ["eager/bmm"] + 2 * ["graph/moe"] + ["eager/bmm"]
    assert list(found["latency_us"]) == times  # the same kernel twice keeps both labels
    assert list(found["m"][:3]) == list(first["m"])
    assert list(found["experts"][3:5]) == list(second["experts"])
    assert (found["split"] == "train").all()


def test_kernels_of_programs_are_left_out(make_frame, op_rows):
    frame = dataset(make_frame, op_rows("eager/bmm", 2)).frame
    other = make_frame(kernel_ir=["HloModule m"], kernel_hash=["other"], program=["p"])
    mixed = Dataset(pd.concat([other, frame.assign(split="val")], ignore_index=True))
    found = rows_of_dataset(mixed)
    assert len(found) == 2 and (found["split"] == "val").all()
    with pytest.raises(DatasetError, match=r"no sample is a library operator .*data import"):
        rows_of_dataset(Dataset(other))


def test_rows_of_a_published_table(op_rows, round_gpu):
    rows = op_rows("eager/bmm", 2).drop(columns="key").assign(source="neusight", device="Round GPU")
    found = rows_of_published(rows, lambda name: round_gpu(name.lower().replace(" ", "-")))
    assert list(found["key"]) == ["eager/bmm"] * 2
    assert list(found["device"]) == ["round-gpu"] * 2
    with pytest.raises(DatasetError, match=r"row X1: no operator family 'eager/sort'"):
        rows.loc[1, "family"] = "sort"
        rows_of_published(rows, lambda name: round_gpu())


def test_draws_are_even(op_rows):
    drawn = group_draw(op_rows("eager/bmm", 3000), "eager/bmm")
    assert np.quantile(drawn, [0.25, 0.5, 0.75]) == pytest.approx([0.25, 0.5, 0.75], abs=0.04)


def test_codes_do_not_depend_on_which_columns_a_table_has():
    rows = pd.DataFrame({"op": ["add"], "dtype": ["fp32"]})
    wide = rows.assign(backend=[None], kernel=[""], kv_dtype=[float("nan")], distribution=[""])
    for narrow, full in zip(codes(rows), codes(wide), strict=True):
        assert list(narrow) == list(full)
    assert codes(rows)[0][0] == "|add|fp32|"


def test_names_that_say_nothing_count_as_none():
    rows = pd.DataFrame(
        {"backend": ["vllm", "foo", "", "sglang"], "kernel": ["vllm_fa3", "fa2", "fa2", "xyzzy"]}
    )
    assert unnamed(rows, ("backend", "kernel")).tolist() == [False, True, True, True]
    assert unnamed(rows, ("kernel",)).tolist() == [False, False, False, True]
    assert unnamed(rows.drop(columns="kernel"), ("kernel",)).all()
    assert not unnamed(rows, ()).any()
