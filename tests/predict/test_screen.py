"""Candidates by the thousand: probabilities, what a line may be, and what measured tiles say."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pandas as pd
import pytest

from opcast.models.core.registry import OPERATOR_MODEL
from opcast.models.tile_rows import tile_rows
from opcast.models.tiles import LeftOut, TileModel, fit_tiles
from opcast.predict.cluster.step_case import StepCase
from opcast.predict.library import latency
from opcast.predict.operator.step_operators import load_step_model
from opcast.predict.published.tile_table import rank_configurations
from opcast.predict.screen import LEAST_UNSEEN, answer_lines, chances
from opcast.simulate.step.named_workloads import read_workload

from ..support.commands import opcast

TILES = (
    Path(os.environ.get("OPCAST_PUBLISHED_DATA", "../shared/data"))
    / "published-kernels"
    / "tpu.parquet"
)
RAGGED = {
    "op": "ragged_dot", "implementation": "pallas_mosaic_tpu", "device": "tpu-v6e",
    "args": {"lhs": "bf16[8192,4096]", "rhs": "bf16[8,4096,4096]"},
    "m": 8192, "n": 4096, "k": 4096, "groups": 8,
}  # fmt: skip


def test_a_chance_is_that_of_the_difference_of_two_errors():
    times = np.array([100.0, 120.0, 7.0])
    found = chances(times, times / 1.2, times * 1.2, ["a", "a", "b"])
    # One is within 5 % of the other if the difference of two normal logarithms is.
    deviation = np.sqrt(2.0) * np.log(1.2) / NormalDist().inv_cdf(0.95)
    far = np.log(1.2)
    second = NormalDist().cdf((np.log(1.05) - far) / deviation)
    first = NormalDist().cdf((np.log(1.05) + far) / deviation)
    assert found[:2] == pytest.approx([first, second], abs=0.04)
    # Alone in its group.
    assert found[2] == 1.0
    assert (chances(times, times / 1.2, times * 1.2, ["a", "a", "b"]) == found).all()


def lines(*candidates: object) -> list[str]:
    return [own if own == "" else json.dumps(own) for own in candidates]


def test_operators_are_those_of_single_questions():
    op = "linear m=4096 n=4096 k=4096 dtype=bf16"
    slow = op.replace("m=4096", "m=8192")
    asked = lines({"id": "x", "op": op}, op, {"op": op, "group": 1}, {"op": slow, "group": 1})
    (found,) = answer_lines(asked, "h100-sxm")
    assert found[0]["id"] == "x" and found[0]["chance"] is None and "measure" not in found[0]
    one = latency(op, "h100-sxm")
    for own in found[:3]:
        assert own["latency_us"] == pytest.approx(one.latency_us)
        assert (own["lo_us"], own["hi_us"]) == pytest.approx((one.lo_us, one.hi_us))
    assert found[2]["measure"] and not found[3]["measure"]


def test_tiles_compete_by_problem_and_unknown_devices_discard_nothing():
    tiles = [{"tile_m": m, "tile_k": 1024, "tile_n": 1024} for m in (128, 512, 1024)]
    asked = [{**RAGGED, "config": tile} for tile in tiles]
    (found,) = answer_lines(lines(*asked))
    table = pd.DataFrame(asked).assign(args=json.dumps(RAGGED["args"]))
    table["config"] = [json.dumps(tile) for tile in tiles]
    ranked = rank_configurations(table, TileModel.find())
    assert sorted(own["latency_us"] for own in found) == pytest.approx(sorted(ranked["latency_us"]))
    assert sum(own["chance"] for own in found) > 0.9
    far = [{**own, "device": "tpu-v4"} for own in asked]
    (unseen,) = answer_lines(lines(*far))
    assert all(own["chance"] >= LEAST_UNSEEN and own["measure"] for own in unseen)


def test_plans_that_do_not_fit_say_so():
    step = {"workload": "llama-3-8b", "cluster": "dgx-h100-x16", "set": "batch=64,seq=4096"}
    plans = ("tp=4,dp=4,zero=1", "tp=8,dp=2", "dp=16", "tp=3")
    (found,) = answer_lines(lines(*({**step, "plan": plan} for plan in plans)))
    first, second, unfit, wrong = found
    assert first["latency_us"] < second["latency_us"] and first["chance"] > second["chance"]
    assert "tp" in wrong["error"] and (first["fits"], first["measure"]) == (True, True)
    # The same time and the same smallest change as of ``opcast simulate``.
    case = StepCase(cluster="dgx-h100-x16", plan="dp=16")
    work = read_workload("llama-3-8b", {"batch": 64, "seq": 4096})
    alone = case.predict(work, load_step_model(OPERATOR_MODEL))
    assert unfit["latency_us"] == pytest.approx(1e6 * alone.step.total)
    assert unfit["reason"] == alone.fit.reason() and "would fit with zero=" in unfit["reason"]
    assert (unfit["fits"], unfit["measure"], unfit["chance"]) == (False, False, None)
    # Steps of other clusters of H100 were measured, and none on any chip like an L4.
    small = {"workload": "llama-3-8b", "set": "batch=8,seq=512", "plan": "fsdp=8"}
    (other,) = next(answer_lines(lines({**small, "cluster": "l4-x8"})))
    as_objects = {**small, "set": {"seq": 512, "batch": 8}, "plan": {"fsdp": 8}, "cluster": "l4-x8"}
    assert next(answer_lines(lines(as_objects))) == [other]
    assert (first["scope"], other["scope"]) == ("sibling", "unseen")


def test_a_problem_is_what_is_solved_however_it_is_written():
    """Llama's sequences have 4096 tokens where nothing is said."""
    step = {"workload": "llama-3-8b", "cluster": "dgx-h100-x16"}
    sets = ("batch=64", "seq=4096,batch=64", {"batch": 64}, "batch=64,seq=2048")
    pairs = [("batch=64,seq=4096", "tp=4,dp=4,zero=1"), *((own, "tp=8,dp=2") for own in sets)]
    (found,) = answer_lines(lines(*({**step, "set": s, "plan": p} for s, p in pairs)))
    chances = [own["chance"] for own in found]
    assert chances[0] > max(chances[1:4]) and chances[4] == 1.0
    tiles = [{"tile_m": m, "tile_k": 1024, "tile_n": 1024} for m in (128, 1024)]
    turned = json.dumps(dict(reversed(RAGGED["args"].items())))
    asked = [{**RAGGED, "config": tiles[0]}, {**RAGGED, "args": turned, "config": tiles[1]}]
    (same,) = answer_lines(lines(*asked))
    assert sum(own["chance"] for own in same) < 2.0


@pytest.mark.parametrize(
    ("candidate", "said"),
    [
        ({"op": "linear m=64 n=64 k=64 dtype=bf16"}, "give device or --device"),
        ({"plan": "tp=8"}, "give workload, cluster"),
        ({"workload": "llama-3-8b"}, "give cluster"),
        (
            {"op": "linear m=64 n=64 k=64 dtype=bf16", "device": ["l4"]},
            "device is text in quotation marks, not ['l4']",
        ),
        ({"implementation": "x", "device": "tpu-v6e"}, "give op, args"),
        ({}, "give op, device or --device"),
    ],
)
def test_what_is_missing_is_named(candidate, said):
    (found,) = next(answer_lines(lines(candidate)))
    assert found["error"] == said


@pytest.mark.parametrize(
    ("candidate", "said"),
    [
        ({"op": "linear m=64 n=64 k=64 dtype=bf16", "devic": "l4"}, "did you mean device?"),
        ({**RAGGED, "configs": {}}, "unknown key 'configs' of a kernel with tiles"),
        (
            {"workload": "llama-3-8b", "cluster": "h100-sxm-x8", "plan": "", "seq": 1},
            "did you mean",
        ),
        ({"op": "linear m=64 n=64 k=64 dtype=bf16", "args": {}}, "one of op, device, group, id"),
    ],
)
def test_unknown_keys_are_refused_with_what_they_were_meant_to_be(candidate, said):
    (found,) = next(answer_lines(lines({**candidate, "id": 7}), "h100-sxm"))
    assert found["id"] == 7 and found["error"].startswith("unknown key") and said in found["error"]


def test_faulty_lines_cost_only_themselves_and_batches_end_at_empty_lines():
    good = "linear m=64 n=4096 k=4096 dtype=bf16"
    asked = [*lines(good, "nonsense m=1", {"op": "linear m=1"}), "{", "3", "", json.dumps(good)]
    batches = list(answer_lines(asked, "a100-sxm-80gb"))
    assert [len(batch) for batch in batches] == [5, 1]
    assert ["error" in own for own in batches[0]] == [False, True, True, True, True]
    assert batches[0][0] == batches[1][0]
    (tile,) = next(answer_lines(lines({**RAGGED, "config": {"blocks": 3}})))
    assert "no setting 'blocks'" in tile["error"]
    (missing,) = next(answer_lines(lines(good)))
    assert "device" in missing["error"]


def test_the_command_reads_standard_input(tmp_path, monkeypatch):
    op = "linear m=64 n=4096 k=4096 dtype=bf16"
    monkeypatch.setattr("sys.stdin", io.StringIO(f'"{op}"\n"nonsense"\n'))
    done = opcast("screen", "--device", "h100-sxm")
    first, second = map(json.loads, done.stdout.splitlines())
    assert done.returncode == 0 and first["latency_us"] > 0 and "error" in second
    file = tmp_path / "c.jsonl"
    file.write_text('"nonsense"\n')
    assert opcast("screen", file, "--device", "h100-sxm").returncode == 1
    assert opcast("screen", tmp_path / "none.jsonl").returncode == 2


@pytest.fixture(scope="module")
def tiles() -> tuple[pd.DataFrame, LeftOut, TileModel]:
    """Candidates of the table, each with its fastest version, and errors when left out."""
    if not TILES.is_file():
        pytest.skip("the pack published-kernels is not here")
    table = pd.read_parquet(TILES)
    table = table[table["latency_us"] > 0].reset_index(drop=True)
    rows, seconds = tile_rows(table), table["latency_us"].to_numpy(float) * 1e-6
    model, left = fit_tiles(rows, seconds)
    own = pd.DataFrame(
        {
            "device": rows.device, "op": rows.names[:, 0], "subject": rows.subject,
            "candidate": rows.candidate, "seconds": seconds, "ceiling": rows.ceiling_s,
            "shapes": seconds * np.exp(-left.shapes), "devices": seconds * np.exp(-left.devices),
        }
    )  # fmt: skip
    kept = own.sort_values("seconds").drop_duplicates(["subject", "candidate"])
    return kept, left, model


def among_fastest(kept: pd.DataFrame, model: TileModel, by: str) -> tuple[np.ndarray, np.ndarray]:
    """Predicted and true: whether a candidate is within 5 % of the fastest of its problem."""
    several = kept[kept.groupby("subject")["seconds"].transform("size") >= 2]
    keys = several["device"] if by == "shapes" else [""] * len(several)
    ends = np.array([model.ends.of((key, ""), (0.0, 0.0)) for key in keys])
    predicted = several[by].to_numpy()
    low, high = (predicted * np.exp(ends[:, side]) for side in (0, 1))
    likely = chances(predicted, low, high, list(several["subject"]))
    best = several.groupby("subject")["seconds"].transform("min")
    return likely, (several["seconds"] <= 1.05 * best).to_numpy()


@pytest.mark.slow
@pytest.mark.exhaustive  # the tiles' model is trained three times
def test_what_is_not_worth_measuring_is_not(tiles):
    kept, _, model = tiles
    likely, true = among_fastest(kept, model, "shapes")
    assert true[likely < 0.05].mean() < 0.03 and true[likely < 0.01].mean() < 0.01
    assert (likely < 0.05).sum() > 1400 and true[likely > 0.9].mean() > 0.95
    # A device left out: the order tells too little, which is why none is discarded there.
    likely, true = among_fastest(kept, model, "devices")
    assert 0.1 < true[likely < 0.05].mean() < LEAST_UNSEEN


@pytest.mark.slow
@pytest.mark.exhaustive  # as above
def test_of_the_best_hundredth_most_survive_when_nineteen_of_twenty_are_discarded(tiles):
    """By share of the chip's ceiling, among all candidates of an op on a device."""
    kept, _, _ = tiles
    found = {}
    for by in ("shapes", "devices"):
        survived = best = 0
        for _, own in kept.groupby(["device", "op"]):
            if len(own) < 100:
                continue
            share = (own["seconds"] / own["ceiling"]).to_numpy()
            said = (own[by] / own["ceiling"]).to_numpy()
            first = np.argsort(share)[: int(np.ceil(0.01 * len(own)))]
            left = np.argsort(said)[: int(np.ceil(0.05 * len(own)))]
            survived += len(np.intersect1d(first, left))
            best += len(first)
        found[by] = survived / best
    assert found["shapes"] > 0.7 and found["devices"] > 0.25
