"""Draws rows of a table of whole models: few models of each family, each way of running once."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from ...common.errors import DeviceError
from ...predict.devices import resolve_device

#: What a way of running is.
_WAY = ("device", "framework", "mode", "layout")
#: What a table may leave out.
_ABSENT: Mapping[str, str | float] = {
    "framework": "",
    "mode": "",
    "layout": "",
    "batch": 1,
    "img_size": 0,
    "param_m": 0.0,
}
#: Models of a family for each that is drawn of it. Engineering choice.
_LEAST = 6


def drawn(table: pd.DataFrame, samples: int, seed: int = 0) -> pd.DataFrame:
    """Draw rows.

    Of models that ran in most ways the smaller half is drawn from, which record fastest. Where it
    can be, all ways of a model have one batch and one size of images, so that one recording serves
    several; of rows that then differ by release, one is drawn.

    Args:
        table: With a row for each run; with ``family``, and parameters as ``param_m``.
        samples: Most models of a family; no more than a sixth of it, but one of each.
        seed: Of the draw.

    Returns:
        Rows of the table, in its order.
    """
    columns, table = list(table), table.copy()
    for name, default in _ABSENT.items():
        if name not in table:
            table[name] = default
    table = table.fillna({"param_m": 0.0})
    table["way"] = table[list(_WAY)].astype(str).agg("/".join, axis=1)
    # Models of CPUs are learned by themselves.
    platforms = table["device"].map({d: platform_of(d) for d in table["device"].unique()})
    found = [at for _, own in table.groupby(platforms) for at in _drawn(own, samples, seed)]
    return table.loc[sorted(found), columns]


def platform_of(device: str) -> str:
    """Platform of a device by its name; empty where there is no such device."""
    try:
        return resolve_device(device, {}).platform
    except DeviceError:
        return ""


def _drawn(table: pd.DataFrame, samples: int, seed: int) -> list[int]:
    """Labels of drawn rows."""
    rng = np.random.default_rng(seed)
    models = table.groupby("model")
    ways, size = models["way"].nunique(), models["param_m"].first()
    rounds: list[list[str]] = [[] for _ in range(samples)]
    for _, own in table.groupby("family"):
        names = own["model"].unique()
        most = ways[names].index[ways[names] >= ways[names].max()]
        best = sorted(most[size[most] <= size[most].median()])
        picked = rng.choice(best, min(len(best), samples), replace=False)
        for at, name in enumerate(picked[: max(1, len(names) // _LEAST)]):
            rounds[at].append(str(name))
    for own_round in rounds:
        rng.shuffle(own_round)
    order = [name for own in rounds for name in own]
    return [at for name in order for at in _rows(table[table["model"] == name], rng)]


def _rows(own: pd.DataFrame, rng: np.random.Generator) -> list[int]:
    """A row of each way of running a model, by their labels."""
    found = []
    for _, rows in own.groupby("mode"):
        sizes = rows["batch"].astype(str) + "x" + rows["img_size"].astype(str)
        common = rows.groupby(sizes)["way"].nunique().sort_values(ascending=False).index[0]
        for _, same in rows.groupby("way"):
            alike = same[sizes[same.index] == common]
            alike = alike if len(alike) else same
            found.append(alike.index.to_list()[int(rng.integers(len(alike)))])
    return found
