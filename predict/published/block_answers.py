"""Predicts the kernel pack's tables of attention and experts, of layers, and of new attention."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from ...common.errors import DatasetError
from ...datagen.published.block_tables import block_rows
from ...features.operators.schema import BLOCKS
from ...models.operators import OpModel
from .pack_tables import TIMES

#: Parameters without which a row of a family says nothing; the other ones may be zero.
_NEEDED: dict[str, tuple[str, ...]] = {
    "layer/product": ("m", "n", "k"),
    "layer/pass": ("rows", "cols"),
    "layer/experts": ("tokens", "hidden", "inter", "experts", "routed"),
    "batch/attention": ("q_heads", "kv_heads", "head_dim"),
    "graph/sparse": ("batch", "heads", "q_len"),
    "graph/scan": ("batch", "seq_len", "value_heads", "value_dim"),
    "graph/streams": ("rows", "cols"),
}


def predict_blocks(rows: pd.DataFrame, model: OpModel) -> pd.DataFrame:
    """Predict rows that :func:`read_blocks` gave.

    Args:
        rows: The rows.
        model: Model of blocks.

    Returns:
        The rows with ``family`` (of the model, and what ran it), ``reason`` (empty where there is a
        prediction), ``scope``, and latency, lo and hi in seconds.
    """
    reason = np.full(len(rows), "", object)
    reason[_sizeless(rows)] = "a size is no positive number"
    lacking = ~rows["key"].isin(model.families).to_numpy()
    reason[lacking] = ["the model has no operators " + key for key in rows["key"][lacking]]
    known = {name: model.describes(str(name)) for name in rows["device"].unique()}
    foreign = ~rows["device"].map(known).to_numpy(bool)
    names = rows["device"][foreign]
    reason[foreign] = [f"device {name} is not in the catalogue" for name in names]
    good = np.flatnonzero(reason == "")
    times, scope = np.full((len(rows), len(TIMES)), np.nan), np.full(len(rows), "", object)
    if len(good):
        asked = rows.iloc[good].reset_index(drop=True)
        asked["device"] = asked["device"].map(
            {name: model.spec(str(name)).name for name in asked["device"].unique()}
        )
        found = model.predict(asked)
        times[good] = np.stack([getattr(found, c) for c in TIMES], axis=1)
        scope[good] = found.scope
    what = rows["key"].astype(str) + " " + rows["backend"].astype(str)
    answered = rows.assign(family=what.str.strip(), reason=reason, scope=scope)
    answered[list(TIMES)] = times
    return answered


def read_blocks(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Rows of a table as operators of blocks.

    Raises:
        DatasetError: A column is missing, or holds no numbers.
    """
    try:
        return block_rows(table)
    except KeyError as error:
        raise DatasetError(f"column {error.args[0]!r} is missing", where=str(path)) from None
    except (ValueError, TypeError) as error:
        raise DatasetError(f"a row cannot be read: {error}", where=str(path)) from None


def _sizeless(rows: pd.DataFrame) -> np.ndarray:
    """Rows that lack a size they cannot do without, or have a negative one, bool."""
    bad = np.zeros(len(rows), bool)
    for key, needed in _NEEDED.items():
        own = (rows["key"] == key).to_numpy()
        if not own.any():
            continue
        part = rows.loc[own]
        wrong = ~(part[list(needed)].to_numpy(np.float64) >= 1).all(axis=1)
        wrong |= ~(part[list(BLOCKS[key])].to_numpy(np.float64) >= 0).all(axis=1)
        if key == "batch/attention":
            wrong |= (part["batch"] * part["q_len"] + part["n_decode"]).to_numpy() < 1
        bad[own] = wrong
    return bad
