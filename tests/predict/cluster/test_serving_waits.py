"""What requests wait for: lock-step by hand, and the limit that binds by its name."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from opcast.models.serving.model import ServingModel
from opcast.predict.cluster.deployment import Deployment
from opcast.predict.cluster.serving import ServingPredictor
from opcast.predict.cluster.serving_case import EngineOptions, LoadSpec
from opcast.predict.cluster.serving_load import draw
from opcast.predict.cluster.serving_run import drifted
from opcast.simulate.serving.served import ServedModel
from opcast.simulate.step.named_workloads import make_workload

OWN = Deployment(ServedModel(make_workload("llama-3.1-8b", {"mode": "forward"})), "h100-sxm")
CLOSED = LoadSpec(concurrency=8, count=40)


@pytest.fixture(scope="module")
def predictor() -> ServingPredictor:
    return ServingPredictor(None, ServingModel())


def test_lengths_are_spread_where_they_can_differ() -> None:
    spread = drifted(draw(CLOSED), CLOSED.seed)
    assert spread is not None and spread[0] == "--output uniform:205:307"
    # The same requests as those of a user who follows the note.
    own = draw(replace(CLOSED, output="uniform:205:307"))
    assert np.array_equal(spread[1].outputs, own.outputs)
    assert np.array_equal(spread[1].prompts, own.prompts)
    # 0.8 and 1.2 times 2 are rounded to 2: the prompts are spread instead, by 819 to 1229 tokens.
    short = drifted(draw(replace(CLOSED, output="2")), 0)
    assert short is not None and short[0] == "--prompt uniform:819:1229"
    assert set(short[1].outputs) == {2}


@pytest.mark.parametrize(
    "spec",
    [
        replace(CLOSED, output="uniform:205:307"),
        replace(CLOSED, output="1", prompt="2"),
        replace(CLOSED, concurrency=1),
        replace(CLOSED, count=8),
        LoadSpec(rate=5.0, count=40),
    ],
)
def test_other_loads_are_not_in_lock_step(spec: LoadSpec) -> None:
    assert drifted(draw(spec), 0) is None


def test_nothing_is_advised_that_does_not_help(predictor: ServingPredictor) -> None:
    """Requests of one token wait for the prompts of others, whatever the lengths."""
    spec = replace(CLOSED, concurrency=16, count=64, output="1")
    fixed, loose = (
        predictor.predict(OWN, replace(spec, prompt=p)) for p in ("1024", "uniform:819:1229")
    )
    assert loose.figures["ttft/mean"].value > 0.95 * fixed.figures["ttft/mean"].value
    assert not any("uniform" in note for note in fixed.notes)


@pytest.mark.parametrize(
    ("framework", "options", "limit"),
    [
        ("vllm", {"max_batch": 4}, "a batch of 4 sequences (--max-batch)"),
        (
            "sglang",
            {"drafts": 3, "accepted": 2.5},
            "a batch of 48 sequences (the default of sglang while drafting; --max-batch sets",
        ),
        ("sglang", {"drafts": 3, "accepted": 2.5, "max_batch": 96}, ""),
        # 27.7 GiB less 15 of weights and 2 of activations hold 88,000 tokens, 20 requests of 4,352.
        ("vllm", {"memory": 0.35}, "the KV cache of"),
    ],
)
def test_the_limit_that_binds_is_named(
    predictor: ServingPredictor, framework: str, options: dict[str, float], limit: str
) -> None:
    own = replace(OWN, framework=framework, options=EngineOptions(**options))  # type: ignore[arg-type]
    prompt = "4096" if "memory" in options else "128"
    spec = LoadSpec(prompt=prompt, output="uniform:128:384", concurrency=96, count=384)
    found = [note for note in predictor.predict(own, spec).notes if "waiting" in note]
    assert len(found) == bool(limit)
    assert all(
        f"saturated: most of the time to the first token is spent waiting for room in {limit}"
        in note
        for note in found
    )


def test_an_overload_names_its_limit(predictor: ServingPredictor) -> None:
    own = replace(OWN, options=EngineOptions(max_batch=4))
    found = predictor.predict(own, LoadSpec(output="64", rate=100.0, count=100))
    (note,) = [note for note in found.notes if "saturated" in note]
    assert note.endswith("requests wait for room in a batch of 4 sequences (--max-batch)")
    share = re.search(r"the load is (\d+)% of their maximum throughput", note)
    (kept,) = [
        said for note in found.notes for said in re.findall("keep up with about (.*): ", note)
    ]
    # Engines keep up with 0.9 of their maximum throughput.
    assert share and float(kept) == pytest.approx(0.9 * 100.0 / (int(share[1]) / 100.0), rel=0.01)


def test_waits_for_a_check_are_not_called_saturation(predictor: ServingPredictor) -> None:
    spec = LoadSpec(output="uniform:205:307", concurrency=32)
    for passes, told in ((1, False), (20, True)):
        options = EngineOptions(recv_interval=passes)
        notes = predictor.predict(replace(OWN, framework="sglang", options=options), spec).notes
        assert not any("saturated" in note for note in notes)
        assert any("every 20 passes (--recv-interval)" in note for note in notes) == told
