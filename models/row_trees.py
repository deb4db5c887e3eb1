"""Boosted trees evaluated for single rows, without the fixed cost of a call into XGBoost.

XGBoost prepares all its trees on every call, which takes longer than walking one row through them.
Here the nodes of all trees lie in one array each, and a row walks through all trees at the same
time, one level at a step. The sum adds leaves in the order of the trees in 32 bits, as XGBoost
does, so that answers are the same to the last bit.
"""

from __future__ import annotations

import struct
from typing import Any, Self

import numpy as np

#: Most rows that are walked one by one, and how many such calls are left to XGBoost first: reading
#: the trees takes as long as fifty of them.
FEW, PATIENCE = 8, 20
#: Names of UBJSON's number types: how NumPy and struct call them.
_TYPES = {"i": "i1", "U": "u1", "I": "i2", "l": "i4", "L": "i8", "d": "f4", "D": "f8"}


class RowTrees:
    """Trees of a booster, for rows without missing values.

    Args:
        trees: Arrays of the saved model, one mapping a tree.
        start: What the sum begins with.
    """

    def __init__(self, trees: list[dict[str, Any]], start: float) -> None:
        sizes = [len(t["left_children"]) for t in trees]
        self.roots = np.concatenate([[0], np.cumsum(sizes[:-1])]).astype(np.int32)
        left = _joined(trees, "left_children", np.int32)
        leaf = left < 0
        offset = np.repeat(self.roots, sizes)
        own = np.arange(len(left))
        self.feature = np.where(leaf, 0, _joined(trees, "split_indices", np.int32))
        self.value = _joined(trees, "split_conditions", np.float32)
        # A leaf leads to itself on either side.
        right = _joined(trees, "right_children", np.int32)
        self.child = np.empty(2 * len(left), np.int32)
        self.child[0::2] = np.where(leaf, own, left + offset)
        self.child[1::2] = np.where(leaf, own, right + offset)
        self.depth = self._deepest(leaf)
        self.start = np.float32(start)

    @classmethod
    def of(cls, booster: Any) -> Self | None:
        """Trees of a booster; ``None`` for one that is more than trees with numeric splits."""
        model = read_ubj(bytes(booster.save_raw("ubj")))
        learner = model["learner"]
        trees = learner["gradient_booster"].get("model", {}).get("trees", [])
        given = str(learner["learner_model_param"]["base_score"]).strip("[]")
        plain = learner["gradient_booster"]["name"] == "gbtree" and "," not in given
        if not (trees and plain) or any(len(t["categories"]) for t in trees):
            return None
        return cls(trees, float(given))

    def _deepest(self, leaf: np.ndarray) -> int:
        node, depth = self.roots, 0
        while not leaf[node].all():
            inner = node[~leaf[node]]
            node = np.concatenate([self.child[2 * inner], self.child[2 * inner + 1]])
            depth += 1
        return depth

    def predict(self, row: np.ndarray) -> np.float32:
        """Sum of the leaves that a row ends in.

        Args:
            row: Features, float32, shape ``(d,)``, without NaN.
        """
        node = self.roots
        for _ in range(self.depth):
            beyond = row[self.feature[node]] >= self.value[node]
            node = self.child[2 * node + beyond]
        leaves = self.value[node]
        # Sums one by one: np.sum would add pairs.
        return np.float32(np.add.accumulate(np.concatenate([[self.start], leaves]))[-1])


class SmallBatches:
    """Walks few rows at a time through a booster's trees, once that has been asked often.

    Args:
        booster: What answers otherwise.
    """

    def __init__(self, booster: Any) -> None:
        self._booster = booster
        self._asked = 0
        self._trees: RowTrees | None = None

    def predict(self, values: np.ndarray) -> np.ndarray | None:
        """Sums of leaves, shape ``(n,)``; ``None`` where the booster had better be asked.

        Args:
            values: Features, float32, shape ``(n, d)``.
        """
        if len(values) > FEW:
            return None
        self._asked += 1
        if self._asked == PATIENCE:
            self._trees = RowTrees.of(self._booster)
        if self._trees is None or np.isnan(values).any():
            return None
        return np.array([self._trees.predict(row) for row in values], np.float64)


def _joined(trees: list[dict[str, Any]], name: str, dtype: Any) -> np.ndarray:
    return np.concatenate([np.asarray(tree[name]) for tree in trees]).astype(dtype)


def read_ubj(data: bytes) -> Any:
    """Values of a UBJSON document; typed arrays become NumPy arrays.

    Raises:
        ValueError: The document is cut off, or holds what models do not.
    """
    try:
        return _Reader(data).value()
    except (IndexError, struct.error, KeyError) as error:
        raise ValueError(f"no UBJSON: {error!r}") from None


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def value(self, mark: str = "") -> Any:
        mark = mark or self._mark()
        if mark == "{":
            return self._object()
        if mark == "[":
            return self._array()
        if mark == "S":
            return self._text()
        if mark in "TFZ":
            return {"T": True, "F": False, "Z": None}[mark]
        return self._numbers(_TYPES[mark], 1)[0].item()

    def _object(self) -> dict[str, Any]:
        found = {}
        while self._peek() != "}":
            name = self._text()
            found[name] = self.value()
        self.at += 1
        return found

    def _array(self) -> Any:
        if self._peek() == "$":
            self.at += 1
            kind = self._mark()
            return self._numbers(_TYPES[kind], self._count())
        if self._peek() == "#":
            return [self.value() for _ in range(self._count())]
        found = []
        while self._peek() != "]":
            found.append(self.value())
        self.at += 1
        return found

    def _count(self) -> int:
        if self._mark() != "#":
            raise ValueError("a typed array without a length")
        return int(self.value())

    def _text(self) -> str:
        length = int(self.value())
        self.at += length
        return self.data[self.at - length : self.at].decode()

    def _numbers(self, kind: str, count: int) -> np.ndarray:
        found = np.frombuffer(self.data, f">{kind}", count, self.at)
        self.at += found.nbytes
        return found.astype(kind)

    def _mark(self) -> str:
        self.at += 1
        return chr(self.data[self.at - 1])

    def _peek(self) -> str:
        return chr(self.data[self.at])
