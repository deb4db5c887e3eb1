"""Predicts and ranks kernels with tile configurations: the kernel pack's ``tpu`` table."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd

from ...common.errors import DatasetError
from ...features.devices.catalogue import in_catalogue
from ...models.tiles.model import TileModel, ranking
from ...models.tiles.rows import NEEDED, TileRows, tile_rows
from .pack_tables import TIMES

#: Settings of the configurations of implementations, by op: those of Tokamax's classes of
#: configurations (tokamax 2026-07, ``Config`` of each implementation). Others have none.
SETTINGS: dict[tuple[str, str], frozenset[str]] = {
    (implementation, op): frozenset(keys.split())
    for implementation, op, keys in (
        ("pallas_mosaic_tpu", "attention", "block_q block_kv block_kv_compute q_layout k_layout "
         "v_layout use_experimental_scheduler use_base2_exp"),
        ("pallas_mosaic_tpu", "ragged_dot", "tile_m tile_k tile_n input_buffer_count "
         "combine_scopes"),
        ("pallas_mosaic_tpu_v2", "ragged_dot", "tile_m tile_k tile_n bucket_base"),
        ("pallas_mosaic_gpu", "attention", "block_q block_kv num_stages fold_q_sequence_heads "
         "split_k"),
        ("pallas_mosaic_gpu", "attention_vjp", "block_q_dkv block_kv_dkv block_q_dq block_kv_dq "
         "num_stages compute_wgs"),
        ("pallas_mosaic_gpu", "glu", "tile_m tile_n tile_k num_stages epi_tile_n epi_tile_m "
         "grid_minor_dim grid_tile_width wg_dimension cluster_size_m cluster_size_n"),
        ("pallas_mosaic_gpu", "ragged_dot", "block_m block_n block_k num_stages split_k split_m "
         "persistent post_scale collective grid_minor_dim grid_tile_width grid_block_n "
         "warp_specialized async_store"),
        ("pallas_triton", "attention", "block_q block_k num_stages num_warps block_d block_d_out "
         "split_k pack_mask"),
        ("pallas_triton", "attention_vjp", "block_m1 block_n1 block_m2 block_n2 num_stages "
         "num_warps"),
        ("pallas_triton", "glu", "block_m block_n block_k num_warps num_stages"),
        ("pallas_triton", "norm", "block_m block_n num_warps"),
        ("pallas_triton", "norm_vjp", "block_m block_n num_warps"),
        ("pallas_triton", "ragged_dot", "block_m block_n block_k split_k num_warps num_stages"),
        ("chunked_xla", "softmax_ce", "b_block_size v_block_size"),
        ("chunked_xla", "softmax_ce_vjp", "b_block_size v_block_size"),
    )
}  # fmt: skip
_WITHOUT: frozenset[str] = frozenset()


def is_tiles(columns: set[str]) -> bool:
    """Whether a table is one of kernels with tile configurations, by its columns."""
    return columns >= {*NEEDED, "config"}


def predict_tiles(table: pd.DataFrame, path: Path, model: TileModel) -> pd.DataFrame:
    """Predict a table of kernels with tile configurations.

    Returns:
        Columns as :func:`~.pack_tables.predict_products`.

    Raises:
        DatasetError: A column is missing, or a configuration is no JSON object.
    """
    for column in ("id", *NEEDED):
        if column not in table:
            raise DatasetError(f"column {column!r} is missing", where=str(path))
    rows = table.reset_index(drop=True)
    found = {str(name): in_catalogue(str(name)) for name in rows["device"].unique()}
    good = np.array([found[str(name)] for name in rows["device"]], bool)
    times, scope = np.full((len(rows), len(TIMES)), np.nan), np.full(len(rows), "", object)
    if good.any():
        said = model.predict(tile_rows(rows[good].reset_index(drop=True)))
        times[good] = np.stack([said.seconds, said.lo, said.hi], axis=1)
        scope[good] = said.scope
    reason = np.where(good, "", "device " + rows["device"].astype(str) + " is not in the catalogue")
    rows = rows.assign(reason=reason, scope=scope, suspect=False, family=rows["op"])
    rows[list(TIMES)] = times
    return rows


def rank_note(rows: pd.DataFrame) -> list[str]:
    """Say how candidates of equal problems were ranked, where their times are given."""
    if "latency_us" not in rows:
        return []
    known = (rows["reason"] == "") & (rows["latency_us"] > 0)
    judged = rows[known].reset_index(drop=True)
    if not len(judged):
        return []
    seconds = judged["latency_us"].to_numpy(float) * 1e-6
    order = ranking(tile_rows(judged), judged["latency"].to_numpy(float), seconds)
    if not order.groups:
        return []
    return [
        f"ranking of {order.groups} problems: first choice within 5 % of the best in "
        f"{order.top:.1%}, Kendall's τ {order.kendall:.2f}"
    ]


def rank_configurations(table: pd.DataFrame, model: TileModel) -> pd.DataFrame:
    """Rank implementations and tile configurations of kernels.

    Args:
        table: Candidates, as :func:`~opcast.models.tiles.rows.tile_rows` reads them.
        model: Model of tiles.

    Returns:
        The candidates by device, op and arguments, the predicted fastest first: ``rank`` (the same
        for equal times, such as those at the chip's ceiling), ``latency_us``, ``lo_us``, ``hi_us``,
        ``ceiling_us`` (the least time that the chip's peak and bandwidth allow), ``of_ceiling``
        (its share of the predicted time) and ``scope``.

    Raises:
        DatasetError: A column is missing, or a configuration is no JSON object or has a setting
            that its implementation does not have.
        DeviceError: A device is not in the catalogue.
    """
    rows = tile_rows(table.reset_index(drop=True))
    _check_settings(rows, model)
    said = model.predict(rows)
    # A measured time gives way to the predicted one, which has the same name.
    frame = table.reset_index(drop=True).assign(
        latency_us=said.seconds * 1e6,
        lo_us=said.lo * 1e6,
        hi_us=said.hi * 1e6,
        ceiling_us=rows.ceiling_s * 1e6,
        of_ceiling=rows.ceiling_s / said.seconds,
        scope=said.scope,
    )
    frame["rank"] = frame["latency_us"].groupby(rows.subject).rank(method="min").astype(int)
    return frame.sort_values(["device", "op", "args", "rank"]).reset_index(drop=True)


def _check_settings(rows: TileRows, model: TileModel) -> None:
    """Refuse settings that nothing is known of: they would be ignored.

    Raises:
        DatasetError: A configuration has such a setting.
    """
    # What the model was trained on beyond Tokamax's own classes.
    listed = frozenset().union(*SETTINGS.values())
    own = frozenset(model.keys) - listed
    for place, ((op, made), config) in enumerate(zip(rows.names, rows.config, strict=True)):
        known = SETTINGS.get((made, op), _WITHOUT) | own
        unknown = sorted(set(config) - known)
        if unknown:
            raise DatasetError(
                f"{made} of {op} has no setting {', '.join(map(repr, unknown))}",
                where=f"config of row {place}",
                hint="known: " + (", ".join(sorted(known)) or "none, an empty config"),
            )


def short_configs(ranked: pd.DataFrame) -> list[str]:
    """The settings of each configuration that differ among the candidates of its kernel."""
    texts = ranked["config"].fillna("{}") if "config" in ranked else pd.Series("{}", ranked.index)
    configs = pd.Series([json.loads(text or "{}") for text in texts], ranked.index, object)
    short: dict[object, str] = {}
    for _, group in configs.groupby([ranked[c] for c in ("device", "op", "args")]):
        values: dict[str, set[str]] = {}
        for key, value in (pair for own in group for pair in own.items()):
            values.setdefault(key, set()).add(repr(value))
        for at, own in group.items():
            kept = [f"{k}={v}" for k, v in own.items() if len(values[k]) > 1]
            short[at] = " ".join(kept) or ("(one)" if own else "")
    return [short[at] for at in ranked.index]


def ties_note(ranked: pd.DataFrame) -> str:
    """Say how many candidates share the first place of their problem; empty if none do.

    Args:
        ranked: Of :func:`rank_configurations`.
    """
    first = ranked[ranked["rank"] == 1]
    tied = first[first.duplicated(["device", "op", "args"], keep=False)]
    if tied.empty:
        return ""
    ceiling = int((tied["of_ceiling"] > 1.0 - 1e-9).sum())
    problems = tied.groupby(["device", "op", "args"]).ngroups
    why = f", {ceiling} of them at the least time that the chip allows" if ceiling else ""
    return (
        f"{len(tied)} candidates share the first place of {problems} kernels{why}: which of them "
        "is fastest is not known; measure them"
    )
