"""Loads by their figures, and traces as their publishers write them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from opcast.common.errors import DatasetError, PlanError
from opcast.predict.cluster.serving_case import LoadSpec
from opcast.predict.cluster.serving_load import (
    draw,
    parse_lengths,
    parse_load,
    read_trace,
    read_traces,
)


def test_kinds_of_load() -> None:
    closed = parse_load("concurrency=8,prompt=100,output=10")
    assert (closed.kind, len(draw(closed).prompts)) == ("closed", 80)
    assert draw(closed).concurrency == 8
    static = LoadSpec(batch=4)
    assert (static.kind, len(draw(static).prompts)) == ("static-batch", 4)
    assert parse_load("rate=2").kind == "open-poisson"
    assert not draw(LoadSpec(count=5)).arrivals.any()


def test_gaps_between_requests() -> None:
    for shape in (0.25, 1.0, 4.0):
        gaps = np.diff(draw(LoadSpec(rate=5.0, burstiness=shape, count=20_000)).arrivals)
        assert gaps.mean() == pytest.approx(0.2, rel=0.05)
        # A gamma distribution's deviation over its mean is one over the root of its shape.
        assert gaps.std() / gaps.mean() == pytest.approx(shape**-0.5, rel=0.05)


@pytest.mark.parametrize(
    ("text", "mean", "least", "most"),
    [
        ("64", 64, 64, 64),
        ("uniform:10:30", 20, 10, 30),
        ("geometric:50", 50, 1, 10**4),
        ("lognormal:200:0.5", 200, 1, 10**5),
    ],
)
def test_lengths(text: str, mean: float, least: int, most: int) -> None:
    drawn = parse_lengths(text)(np.random.default_rng(0), 20_000)
    assert drawn.mean() == pytest.approx(mean, rel=0.03)
    assert drawn.min() >= least and drawn.max() <= most


@pytest.mark.parametrize("text", ["0", "many", "uniform:5", "uniform:9:3", "geometric:-1", "a:1"])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(PlanError, match=r"not a length distribution") as refused:
        parse_lengths(text)
    assert "an output of 1 for embeddings" in refused.value.hint


def test_a_deviation_in_tokens_is_not_taken_for_one_of_logarithms() -> None:
    with pytest.raises(PlanError, match="below one token"):
        parse_lengths("lognormal:292:200")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("users=3", "is not an option of a load"),
        ("rate=1,,count=3", "key=value"),
        ("rate=1,rate=2", "rate is given twice"),
        ("rate=fast", "not a number"),
        ("rate=1,concurrency=2", "more than one kind"),
        ("trace=a.csv,prompt=3", "more than one kind"),
        ("concurrency=4,burstiness=2", "burstiness applies only to a rate"),
    ],
)
def test_loads_that_are_none(text: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        parse_load(text)


def test_a_rate_is_checked() -> None:
    with pytest.raises(PlanError, match="burstiness=0"):
        draw(LoadSpec(rate=1.0, burstiness=0.0))
    with pytest.raises(PlanError, match="count=-1"):
        draw(LoadSpec(count=-1))


def test_csv_traces(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    # Arrivals by a clock, in no order.
    path.write_text("arrival_s,prompt,output\n1700000002.5,10,3\n1700000001.0,20,4\n")
    load = read_trace(path)
    assert load.prompts.tolist() == [20, 10] and load.arrivals.tolist() == [0.0, 1.5]
    # Models keep their distance.
    path.write_text("arrival_s,prompt,output,model\n7.5,10,3,a\n5.0,20,4,b\n")
    both = read_traces(path)
    assert both["a"].arrivals.tolist() == [2.5] and both["b"].arrivals.tolist() == [0.0]
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    azure = read_trace(path)
    assert azure.outputs.tolist() == [44, 109]
    assert azure.arrivals == pytest.approx([0.0, 4.314579])
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1087,Conversation log\n"
    )
    # A response of no tokens is a request that failed.
    assert read_trace(path).prompts.tolist() == [472]


def test_json_traces(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [1, 3]},
        {"timestamp": 0, "input_length": 700, "output_length": 9, "hash_ids": [1, 2]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    load = read_trace(path)
    assert load.arrivals.tolist() == [0.0, 3.0]
    assert list(load.blocks) == [(1, 2), (1, 3)] and load.block_tokens == 512
    path.write_text(
        json.dumps(
            {"input_lens": [10, 20], "output_lens": [3, 4], "request_rate": "inf",
             "max_concurrency": 2, "ttfts": [0.1, 0.2]}
        )
    )  # fmt: skip
    benchmark = read_trace(path)
    assert benchmark.concurrency == 2 and benchmark.outputs.tolist() == [3, 4]


def test_traces_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt\n1,2\n")
    with pytest.raises(DatasetError, match="output"):
        read_trace(path)
    for row in ("0,many,2", "0,3,", "-1,3,2", "0,3.5,2", "0,3,0"):
        path.write_text(f"arrival_s,prompt,output\n0,1,1\n{row}\n")
        with pytest.raises(DatasetError, match="row 2 is not a request"):
            read_trace(path)
    path.write_text('{"timestamp": 1}\n')
    with pytest.raises(DatasetError, match="cannot be read"):
        read_trace(path)
    with pytest.raises(DatasetError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")
