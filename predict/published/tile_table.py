"""Prediction and ranking of kernels with tile configurations (the kernel pack's ``tpu`` table)."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from ...common.errors import DatasetError
from ...datagen.published.packs import pack_data
from ...features.devices.catalogue import in_catalogue
from ...models.tile_rows import NEEDED, TileRows, tile_rows
from ...models.tiles import TileModel, ranking
from .answers import TIMES, answered, foreign, required


def predict_tiles(table: pd.DataFrame, path: Path, model: TileModel) -> pd.DataFrame:
    """Predict a table of kernels with tile configurations.

    Returns:
        Columns as :func:`~.answers.predict_products`.

    Raises:
        DatasetError: A column is missing, or a configuration is not a JSON object.
    """
    required(table, ("id", *NEEDED), path)
    rows = table.reset_index(drop=True).assign(suspect=False, family=table["op"].to_numpy())

    def ask(asked: pd.DataFrame) -> pd.DataFrame:
        said = model.predict(tile_rows(asked))
        times = (said.seconds, said.lo, said.hi)
        return pd.DataFrame({**dict(zip(TIMES, times, strict=True)), "scope": said.scope})

    return answered(rows, [foreign(rows, in_catalogue)], ask)


def rank_note(rows: pd.DataFrame) -> list[str]:
    """Return a note on the ranking of candidates of equal problems, if times are given."""
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
        table: Candidates, as :func:`~opcast.models.tile_rows.tile_rows` reads them.
        model: Model of tiles.

    Returns:
        The candidates by device, op and arguments, the predicted fastest first: ``rank`` (equal for
        equal times, such as at the chip's ceiling), ``latency_us``, ``lo_us``, ``hi_us``,
        ``ceiling_us`` (the minimum time by the chip's peak and bandwidth), ``of_ceiling`` (its
        share of the predicted time) and ``scope``.

    Raises:
        DatasetError: A column is missing, or a configuration is not a JSON object or has a setting
            that its implementation does not have.
        DeviceError: A device is not in the catalogue.
    """
    rows = tile_rows(table.reset_index(drop=True))
    check_settings(rows, model)
    said = model.predict(rows)
    # A measured time is replaced by the predicted one, which has the same name.
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


def check_settings(rows: TileRows, model: TileModel) -> None:
    """Refuse unknown settings, which would be ignored.

    Raises:
        DatasetError: A configuration has an unknown setting.
    """
    # Settings that the model was trained on besides those of Tokamax's classes.
    settings = pack_data()["tile_settings"]
    listed = {key for ops in settings.values() for keys in ops.values() for key in keys}
    own = set(model.keys) - listed
    for place, ((op, made), config) in enumerate(zip(rows.names, rows.config, strict=True)):
        known = {*settings.get(made, {}).get(op, ()), *own}
        unknown = sorted(set(config) - known)
        if unknown:
            raise DatasetError(
                f"{made} of {op} has no setting {', '.join(map(repr, unknown))}",
                where=f"config of row {place}",
                hint="known: " + (", ".join(sorted(known)) or "none, an empty config"),
            )


def short_configs(ranked: pd.DataFrame) -> list[str]:
    """Return the settings of each configuration that differ among candidates of its kernel."""
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
    """Return how many candidates share the first place of their problem; empty if none do.

    Args:
        ranked: Result of :func:`rank_configurations`.
    """
    first = ranked[ranked["rank"] == 1]
    tied = first[first.duplicated(["device", "op", "args"], keep=False)]
    if tied.empty:
        return ""
    ceiling = int((tied["of_ceiling"] > 1.0 - 1e-9).sum())
    problems = tied.groupby(["device", "op", "args"]).ngroups
    why = f", {ceiling} of them at the minimum time that the chip allows" if ceiling else ""
    return (
        f"{len(tied)} candidates share the first place of {problems} kernels{why}: the fastest of "
        "them is unknown; measure them"
    )
