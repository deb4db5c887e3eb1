"""The optional column of a dataset."""

import pandas as pd

from opcast.features.dataset import COLUMNS, Dataset


def frame(name, **more):
    values = {c: "x" if t == "str" else 1 for c, t in COLUMNS.items()}
    return pd.DataFrame([{**values, "sample_id": name, "run_id": "r", **more}])


RUN = {"r": {"device": {"name": "d"}}}


def test_split_is_kept_and_others_are_not(tmp_path):
    Dataset(frame("a", split="val", other=3), RUN).save(tmp_path)
    found = Dataset.load(tmp_path).frame
    assert list(found) == [*COLUMNS, "split"]
    assert found["split"][0] == "val"


def test_split_need_not_be_there(tmp_path):
    Dataset(frame("a"), RUN).save(tmp_path)
    assert list(Dataset.load(tmp_path).frame) == list(COLUMNS)


def test_shards_with_and_without(tmp_path):
    Dataset(frame("a", split="val"), RUN).save(tmp_path, "one.parquet")
    Dataset(frame("b"), RUN).save(tmp_path, "two.parquet")
    found = Dataset.load(tmp_path).frame.set_index("sample_id")
    assert found["split"]["a"] == "val" and pd.isna(found["split"]["b"])
