"""Boosted trees as small files: what only training needs is cleared, the rest is compressed.

A saved booster holds the gain, cover and weight of every node besides its split. Prediction needs
none of them; cleared, and with leaf values rounded, a large model takes a tenth of the space. It
cannot be trained further, and TreeSHAP, which needs covers, is not possible.
"""

from __future__ import annotations

import json
import lzma
from typing import Any

import numpy as np

SUFFIX = ".ubj.xz"
#: Log-ratios of leaves are kept to so many decimals: 700 trees add up to an error below 0.1 %.
DECIMALS = 6
#: Bytes that a file may hold, and that reading it may take besides.
MAX_BYTES, MAX_MEMORY = 2**30, 2**28
_CLEARED = ("loss_changes", "sum_hessian")


def compact(booster: Any) -> bytes:
    """A booster as compressed UBJSON without training statistics."""
    import xgboost as xgb

    model = json.loads(bytes(booster.save_raw("json")))
    for tree in model["learner"]["gradient_booster"]["model"]["trees"]:
        left = np.array(tree["left_children"])
        values = np.array(tree["split_conditions"], np.float64)
        leaf = left < 0
        values[leaf] = np.round(values[leaf], DECIMALS)
        tree["split_conditions"] = values.astype(np.float32).tolist()
        tree["base_weights"] = np.where(leaf, values, 0.0).astype(np.float32).tolist()
        for name in _CLEARED:
            tree[name] = [0.0] * len(left)
    small = xgb.Booster()
    small.load_model(bytearray(json.dumps(model).encode()))
    return lzma.compress(bytes(small.save_raw("ubj")))


def expand(data: bytes) -> bytes:
    """UBJSON of a compressed booster.

    Raises:
        ValueError: It is damaged, or holds more than :data:`MAX_BYTES`.
    """
    unpacker = lzma.LZMADecompressor(memlimit=MAX_MEMORY)
    try:
        found = unpacker.decompress(data, MAX_BYTES)
    except (lzma.LZMAError, EOFError, MemoryError) as error:
        raise ValueError(f"not a compressed booster: {error}") from None
    if not unpacker.eof:
        raise ValueError("a compressed booster is cut off or too large")
    return found
