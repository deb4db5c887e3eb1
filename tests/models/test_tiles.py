"""Kernels with tile configurations: physics of rows, the model, and rankings."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from opcast.common.errors import DatasetError, ModelError
from opcast.features.devices.catalogue import find_device
from opcast.models.core.registry import PRETRAINED
from opcast.models.tile_rows import TileRows, tile_rows
from opcast.models.tiles import TileModel, fit_tiles, ranking
from opcast.predict.published.tile_table import (
    predict_tiles,
    rank_configurations,
    rank_note,
    ties_note,
)


def candidates(device: str = "tpu-v6e", **own: object) -> pd.DataFrame:
    """Three tile configurations of a ragged product and XLA's own kernel."""
    tiles = [{"tile_m": m, "tile_k": 1024, "tile_n": 1024} for m in (128, 512, 1024)]
    rows = [
        {
            "device": device, "op": "ragged_dot", "implementation": "pallas_mosaic_tpu",
            "args": '{"lhs":"bf16[8192,4096]","rhs":"bf16[8,4096,4096]"}',
            "config": json.dumps(tile), "m": 8192, "n": 4096, "k": 4096, "groups": 8,
        }
        for tile in tiles
    ]  # fmt: skip
    rows.append({**rows[0], "implementation": "xla", "config": "{}"})
    frame = pd.DataFrame([{**row, **own} for row in rows])
    frame.insert(0, "id", [f"K{i}" for i in range(len(frame))])
    return frame


def test_ceiling_is_the_larger_of_arithmetic_and_traffic() -> None:
    v6e = find_device("tpu-v6e")
    rows = tile_rows(candidates())
    flops, moved = 2 * 8192 * 4096 * 4096, 2 * (8192 * 4096 + 8 * 4096 * 4096)
    least = max(flops / v6e.matrix_peak("bf16"), moved / v6e.bandwidth)
    assert rows.ceiling_s == pytest.approx(np.full(4, least))
    assert (rows.base_s > rows.ceiling_s).all()
    assert len(set(rows.subject)) == 1 and len(set(rows.candidate)) == 4


def test_work_of_attention_and_of_its_backward_pass() -> None:
    sizes = {
        "op": "attention", "args": '{"q":"bf16[1,4096,16,128]"}', "batch": 1, "q_len": 4096,
        "kv_len": 4096, "q_heads": 16, "kv_heads": 16, "head_dim": 128, "causal": 1,
        "m": None, "n": None, "k": None,
    }  # fmt: skip
    peak = find_device("h100-sxm").matrix_peak("bf16")
    forward = tile_rows(candidates("h100-sxm", **sizes)).ceiling_s[0]
    # Half of 4 * heads * q * kv * dim: the causal triangle.
    assert forward == pytest.approx(2 * 16 * 4096**2 * 128 / peak)
    both = tile_rows(candidates("h100-sxm", **{**sizes, "op": "attention_vjp"})).ceiling_s[0]
    assert both == pytest.approx(2.5 * forward)


@pytest.mark.parametrize("implementation", ["xla", "xla_chunked"])
def test_attention_that_is_not_fused_computes_what_a_mask_hides(implementation: str) -> None:
    def rows(causal: int) -> TileRows:
        sizes = {
            "op": "attention", "implementation": implementation, "batch": 1, "q_len": 4096,
            "kv_len": 4096, "q_heads": 16, "kv_heads": 16, "head_dim": 128, "causal": causal,
            "args": '{"q":"bf16[1,4096,16,128]"}', "m": None, "n": None, "k": None,
        }  # fmt: skip
        return tile_rows(candidates("tpu-v5p", **sizes))

    assert rows(1).base_s == pytest.approx(rows(0).base_s)
    scores = 16 * 4096 * 4096
    assert rows(1).base_s[0] > 16 * scores / find_device("tpu-v5p").bandwidth  # written, read twice


def test_a_device_without_rows_starts_from_those_of_its_kind() -> None:
    """An implementation is slow on both TPUs: so it is on a third, whatever it is on a GPU."""
    names = ("tpu-v5p", "tpu-v6e", "h100-sxm")
    table = pd.concat(
        candidates(name, m=m) for name in names for m in (1024, 2048, 4096, 8192)
    ).reset_index(drop=True)
    rows = tile_rows(table)
    slow = (rows.names[:, 1] == "xla") & (rows.platform == "tpu")
    model, _ = fit_tiles(rows, rows.base_s * np.where(slow, 7.0, 2.0))
    # XLA's ragged products on v5p say nothing of others.
    assert model.offsets["ragged_dot|xla|tpu"] == pytest.approx(np.log(7.0), abs=1e-6)
    asked = tile_rows(candidates("tpu-v7x"))
    found = model.predict(asked)
    assert found.seconds / asked.base_s == pytest.approx([2, 2, 2, 7], rel=0.1)
    assert set(found.scope) == {"unseen"}


def test_bad_rows_say_what_is_wrong() -> None:
    with pytest.raises(DatasetError, match="column 'args'"):
        tile_rows(candidates().drop(columns="args"))
    with pytest.raises(DatasetError, match=r"row 0.*not a JSON object|not a JSON object.*row 0"):
        tile_rows(candidates(config="[1]"))


def measured(n: int = 60) -> tuple[TileRows, np.ndarray]:
    """Made-up times: the ceiling times three, times more for small tiles."""
    draw = np.random.default_rng(0)
    frames = []
    for device in ("tpu-v6e", "tpu-v5p"):
        for size in draw.integers(8, 64, n) * 128:
            args = f'{{"lhs":"bf16[{size},4096]","rhs":"bf16[8,4096,4096]"}}'
            frames.append(candidates(device, m=size, args=args))
    rows = tile_rows(pd.concat(frames, ignore_index=True))
    tile = np.array([float(str(c.get("tile_m", 256))) for c in rows.config])
    return rows, rows.base_s * 3.0 * (1024 / tile) ** 0.3


def test_learned_times_rank_configurations_of_shapes_left_out() -> None:
    rows, seconds = measured()
    model, left = fit_tiles(rows, seconds)
    assert np.abs(np.exp(-left.shapes) - 1).mean() < 0.05
    order = ranking(rows, seconds * np.exp(-left.shapes), seconds)
    assert order.top > 0.95 and order.kendall > 0.9
    said = model.predict(rows)
    assert (said.scope == "known").all()
    assert said.seconds == pytest.approx(seconds, rel=0.01)
    assert (said.lo <= said.seconds).all() and (said.seconds <= said.hi).all()
    other = model.predict(tile_rows(candidates("tpu-v5e")))
    assert (other.scope == "unseen").all() and (other.seconds > 0).all()
    only = tile_rows(candidates())
    with pytest.raises(ModelError, match="one device"):
        fit_tiles(only, np.ones(len(only)))


def test_a_ranking_by_hand() -> None:
    rows = tile_rows(candidates())
    seconds = np.array([4.0, 2.0, 1.0, 3.0])
    best = ranking(rows, seconds, seconds)
    assert (best.groups, best.top, best.loss) == (1, 1.0, 0.0)
    assert best.kendall == pytest.approx(1.0)
    worst = ranking(rows, -seconds, seconds)
    assert (worst.top, worst.loss) == (0.0, 3.0)
    assert worst.kendall == pytest.approx(-1.0)


def test_shipped_model_ranks_and_stays_above_the_ceiling() -> None:
    ranked = rank_configurations(candidates(), TileModel.find())
    assert list(ranked["rank"]) == [1, 2, 3, 4]
    assert ranked["latency_us"].is_monotonic_increasing
    assert (ranked["of_ceiling"] <= 1.0).all() and (ranked["lo_us"] < ranked["hi_us"]).all()
    assert (ranked["scope"] == "known").all()
    assert (PRETRAINED / "tiles.json").stat().st_size < 250_000


def test_a_table_of_queries() -> None:
    table = pd.concat([candidates(), candidates("abacus")], ignore_index=True)
    found = predict_tiles(table, Path("queries_tpu.parquet"), TileModel.find())
    assert (found["reason"] == "").sum() == 4
    assert "abacus is not in the catalogue" in found["reason"].iloc[-1]
    assert found["latency"].notna().sum() == 4
    assert rank_note(found) == []
    given = predict_tiles(
        candidates().assign(latency_us=[4.0, 3.0, 2.0, 1.0]), Path("tpu.parquet"), TileModel.find()
    )
    assert rank_note(given)[0].startswith("ranking of 1 problems")


def test_round_trip(tmp_path: Path) -> None:
    TileModel.find().save(tmp_path / "tiles.json")
    again = TileModel.load(tmp_path / "tiles.json")
    rows = tile_rows(candidates())
    assert again.predict(rows).seconds == pytest.approx(TileModel.find().predict(rows).seconds)
    (tmp_path / "tiles.json").write_text("{}")
    with pytest.raises(ModelError, match="opcast train --tiles"):
        TileModel.load(tmp_path / "tiles.json")


def test_settings_that_an_implementation_does_not_have_are_refused() -> None:
    model = TileModel.find()
    with pytest.raises(DatasetError, match=r"no setting 'tile_z'"):
        rank_configurations(candidates(config='{"tile_m":128,"tile_z":1}'), model)
    # A setting of another implementation.
    with pytest.raises(DatasetError, match="'num_warps'"):
        rank_configurations(candidates(config='{"tile_m":128,"num_warps":4}'), model)
    with pytest.raises(DatasetError, match=r"no setting 'tile_m'"):
        rank_configurations(candidates(implementation="xla", config='{"tile_m":128}'), model)


def test_ties_are_said() -> None:
    twice = pd.concat([candidates(), candidates()], ignore_index=True)
    ranked = rank_configurations(twice, TileModel.find())
    assert list(ranked["rank"]) == [1, 1, 3, 3, 5, 5, 7, 7]
    assert "2 candidates share the first place of 1 kernels" in ties_note(ranked)
    assert ties_note(rank_configurations(candidates(), TileModel.find())) == ""
    at_ceiling = ranked.assign(of_ceiling=1.0)
    assert "2 of them at the minimum time" in ties_note(at_ceiling)


def test_the_documented_example_is_ranked() -> None:
    example = Path(__file__).parents[2] / "docs" / "examples" / "tile_candidates.csv"
    ranked = rank_configurations(pd.read_csv(example), TileModel.find())
    assert set(ranked["scope"]) == {"known"} and (ranked["latency_us"] > 0).all()
    # Both problems have a first choice, and the unfused kernels are not it.
    first = ranked[ranked["rank"] == 1]
    assert set(first["op"]) == {"attention", "ragged_dot"}
