"""Evaluates boosted trees for single rows, without the fixed cost of a call into XGBoost.

XGBoost prepares all its trees on every call, which takes longer than evaluating them on one row.
Here the nodes of all trees are in one array, and a row descends all trees at once, one level per
step. The leaves are summed in the order of the trees in 32 bits, like in XGBoost, so that results
are the same to the last bit.
"""

from __future__ import annotations

import base64
import json
import lzma
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ...common.errors import ModelError
from ...common.types import JsonObject
from .xgboost_import import xgboost

if TYPE_CHECKING:
    from xgboost import Booster

#: Most rows to evaluate one by one, and calls after which the trees of an already loaded booster
#: are read: reading takes as long as fifty calls, which does not pay off for few queries.
FEW, PATIENCE = 8, 20
#: NumPy types of UBJSON's number types, by type marker (https://ubjson.org).
_TYPES = {"i": "i1", "U": "u1", "I": "i2", "l": "i4", "L": "i8", "d": "f4", "D": "f8"}
#: Readers of single numbers by type marker.
_SINGLE = {mark: struct.Struct(f">{code}") for mark, code in zip("iUIlLdD", "bBhiqfd", strict=True)}
#: Suffix of a compressed booster's file: UBJSON in the xz container.
SUFFIX = ".ubj.xz"
#: Decimals of leaf values (log-ratios): for 700 trees the total error is below 0.1 %.
DECIMALS = 6
#: Most bytes that a file may unpack to, and most memory of the decompressor: a guard against
#: decompression bombs.
MAX_BYTES, MAX_MEMORY = 2**30, 2**28
#: Node statistics that only training and TreeSHAP read; zeros compress to nothing.
_CLEARED = ("loss_changes", "sum_hessian")


class RowTrees:
    """Trees of a booster, for rows without missing values.

    Args:
        trees: Arrays of the saved model, one mapping per tree.
        start: Initial value of the sum.
    """

    def __init__(self, trees: list[JsonObject], start: float) -> None:
        sizes = np.array([len(t["left_children"]) for t in trees], np.int32)
        self.roots = np.concatenate([[0], np.cumsum(sizes[:-1])]).astype(np.int32)
        left, right, feature = (
            _joined(trees, name, np.int32)
            for name in ("left_children", "right_children", "split_indices")
        )
        leaf = left < 0
        own = np.arange(len(left), dtype=np.int32)
        # 16 bytes per node, which share a cache line: children below and from the condition on (a
        # leaf is its own child), feature and condition.
        self.nodes = np.empty((len(left), 4), np.int32)
        for place, child in enumerate((left, right)):
            # A damaged file may have children outside their tree.
            if (~leaf & ((child < 0) | (child >= np.repeat(sizes, sizes)))).any():
                raise ValueError("a node's child lies outside its tree")
            child += np.repeat(self.roots, sizes)
            self.nodes[:, place] = np.where(leaf, own, child)
        self.nodes[:, 2] = np.where(leaf, 0, feature)
        self.nodes[:, 3] = _joined(trees, "split_conditions", np.float32).view(np.int32)
        if (self.nodes[:, 2] < 0).any():
            raise ValueError("a split has no feature")
        self.depth = self._deepest(leaf)
        self.width = int(self.nodes[:, 2].max()) + 1
        self.start = np.float32(start)

    @classmethod
    def of(cls, data: bytes) -> Self | None:
        """Read a saved booster's trees; ``None`` unless they are plain trees with numeric splits.

        Args:
            data: The booster as UBJSON.

        Raises:
            ValueError: The data is damaged.
        """
        try:
            learner = read_ubj(data)["learner"]
            trees = learner["gradient_booster"].get("model", {}).get("trees", [])
            # Recent versions of XGBoost write a list, "[5E-1]", earlier versions a number; more
            # than one value means several outputs.
            given = str(learner["learner_model_param"]["base_score"]).strip("[]")
            # Dropout (dart) weights trees and categorical splits test sets: not supported here.
            plain = learner["gradient_booster"]["name"] == "gbtree" and "," not in given
            if not (trees and plain) or any(len(t["categories"]) for t in trees):
                return None
            return cls(trees, float(given))
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"no saved booster: {error!r}") from None

    def _deepest(self, leaf: np.ndarray) -> int:
        node, depth = self.roots, 0
        while not leaf[node].all():
            inner = self.nodes[node[~leaf[node]]]
            node = np.concatenate([inner[:, 0], inner[:, 1]])
            depth += 1
            # No level has more nodes than there are in total: otherwise there is a cycle.
            if len(node) > len(leaf) or depth > len(leaf):
                raise ValueError("nodes of a tree form a ring")
        return depth

    def predict(self, row: np.ndarray) -> np.float32:
        """Sum of the leaves that a row falls into.

        Args:
            row: Features, float32, shape ``(d,)``, without NaN.
        """
        node = self.nodes.take(self.roots, axis=0)
        for _ in range(self.depth):
            # XGBoost goes left below the condition and right otherwise.
            beyond = row.take(node[:, 2]) >= node[:, 3].view(np.float32)
            node = self.nodes.take(np.where(beyond, node[:, 1], node[:, 0]), axis=0)
        leaves = node[:, 3].view(np.float32)
        # One addition at a time: np.sum adds pairwise.
        return np.float32(np.add.accumulate(np.concatenate([[self.start], leaves]))[-1])


class BoostedTrees:
    """A booster, and its trees for small batches; both are read on first use.

    A process that predicts single operators never loads XGBoost, whose import and setup take longer
    than reading the trees.

    Args:
        booster: A booster that was just grown, or ``None``.
        stored: Returns the UBJSON of a saved booster (:func:`saved_trees`); raises
            :class:`ValueError` if it is damaged.
        threads: Threads of a saved booster.
    """

    def __init__(
        self,
        booster: Booster | None = None,
        stored: Callable[[], bytes] | None = None,
        threads: int = 1,
    ) -> None:
        self._booster = booster
        self._stored = stored
        self._threads = threads
        self._asked = 0
        self._trees: RowTrees | None = None

    @property
    def booster(self) -> Booster:
        """The whole booster.

        Raises:
            ModelError: The saved booster is damaged.
        """
        # In this order: another thread may replace one by the other in between.
        stored, found = self._stored, self._booster
        if found is None:
            assert stored is not None
            xgb = xgboost()
            loaded: Booster = xgb.Booster({"nthread": self._threads})
            try:
                loaded.load_model(bytearray(stored()))
            except ValueError as error:  # XGBoost's own error is one
                raise ModelError(
                    f"trees of a model cannot be read: {str(error)[:200]}",
                    hint="copy the model again, or train it again",
                ) from None
            self._booster = found = loaded
            self._stored = None
        return found

    def few(self, values: np.ndarray) -> np.ndarray | None:
        """Sums of leaves of few rows, shape ``(n,)``; ``None`` if the booster should predict.

        Args:
            values: Features, float32, shape ``(n, d)``.
        """
        if len(values) > FEW:
            return None
        self._asked += 1
        if self._trees is None:
            self._read()
        trees = self._trees
        if trees is None or values.shape[1] < trees.width or np.isnan(values).any():
            return None
        return np.array([trees.predict(row) for row in values], np.float64)

    def _read(self) -> None:
        # Once: at the first call without a loaded booster, else after several calls.
        stored = self._stored
        if self._asked != (1 if stored else PATIENCE):
            return
        # Damaged trees are left to XGBoost for its specific error.
        with suppress(ValueError):
            self._trees = RowTrees.of(stored() if stored else bytes(self.booster.save_raw("ubj")))


def _joined(trees: list[dict[str, object]], name: str, dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.asarray(tree[name]) for tree in trees]).astype(dtype)


def read_ubj(data: bytes) -> Any:
    """Values of a UBJSON document (https://ubjson.org); typed arrays become NumPy arrays.

    Raises:
        ValueError: The document is cut off, or has types that saved models do not use.
    """
    try:
        return _UbjReader(data).value()
    except (IndexError, struct.error, KeyError) as error:
        raise ValueError(f"not UBJSON: {error!r}") from None


class _UbjReader:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def value(self, mark: str = "") -> Any:
        # UBJSON marks each value's type with one character; numbers are big-endian.
        mark = mark or self._mark()
        # NumPy would take ten times as long for a single number, of which each tree has forty.
        number = _SINGLE.get(mark)
        if number is not None:
            self.at += number.size
            return number.unpack_from(self.data, self.at - number.size)[0]
        if mark == "{":
            return self._object()
        if mark == "[":
            return self._array()
        if mark == "S":
            return self._text()
        return {"T": True, "F": False, "Z": None}[mark]

    def _object(self) -> JsonObject:
        entries = {}
        while self._peek() != "}":
            name = self._text()
            entries[name] = self.value()
        self.at += 1
        return entries

    def _array(self) -> object:
        if self._peek() == "$":
            self.at += 1
            kind = self._mark()
            return self._numbers(_TYPES[kind], self._count())
        if self._peek() == "#":
            return [self.value() for _ in range(self._count())]
        items = []
        while self._peek() != "]":
            items.append(self.value())
        self.at += 1
        return items

    def _count(self) -> int:
        if self._mark() != "#":
            raise ValueError("a typed array without a length")
        return int(self.value())

    def _text(self) -> str:
        length = self.value()
        if length < 0:
            raise ValueError("a text of negative length")
        self.at += length
        return self.data[self.at - length : self.at].decode()

    def _numbers(self, kind: str, count: int) -> np.ndarray:
        numbers = np.frombuffer(self.data, f">{kind}", count, self.at)
        self.at += numbers.nbytes
        # To the machine's byte order.
        return numbers.astype(kind)

    def _mark(self) -> str:
        self.at += 1
        return chr(self.data[self.at - 1])

    def _peek(self) -> str:
        return chr(self.data[self.at])


def compact(booster: Booster) -> bytes:
    """Compress a booster as UBJSON without training statistics.

    Leaves are rounded to :data:`DECIMALS`; splits keep all bits, so that no row changes its path.
    """
    import xgboost as xgb

    model = json.loads(bytes(booster.save_raw("json")))
    for tree in model["learner"]["gradient_booster"]["model"]["trees"]:
        # Leaves store their value in place of a condition; rounded values compress well.
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
        ValueError: It is damaged, or larger than :data:`MAX_BYTES`.
    """
    # Limits on memory and output: the file comes from a model folder, which may be malicious.
    unpacker = lzma.LZMADecompressor(memlimit=MAX_MEMORY)
    try:
        booster = unpacker.decompress(data, MAX_BYTES)
    except (lzma.LZMAError, EOFError, MemoryError) as error:
        raise ValueError(f"not a compressed booster: {error}") from None
    if not unpacker.eof:
        raise ValueError("a compressed booster is cut off or too large")
    return booster


# Enough for all shipped models, which take 0.3 GB.
@lru_cache(maxsize=64)
def saved_trees(data: bytes, *, small: bool, threads: int = 1) -> BoostedTrees:
    """Trees of a saved booster, read on first use.

    Results are cached by content: expanding a model of operators takes a tenth of a second, as long
    as many of the commands and calls that use it.

    Args:
        data: UBJSON, or the result of :func:`compact` if ``small``.
        small: Whether ``data`` is compressed.
        threads: Threads for XGBoost.
    """
    return BoostedTrees(None, partial(expand if small else bytes, data), threads)


@dataclass
class SavedTrees:
    """Small trees of models in a single JSON file, as of :func:`compact`; read on first use."""

    data: bytes

    @classmethod
    def from_text(cls, text: str) -> SavedTrees:
        """Read the result of :meth:`text`."""
        return cls(base64.b64decode(text))

    def text(self) -> str:
        """The trees as text."""
        return base64.b64encode(self.data).decode()

    def predict(self, features: np.ndarray) -> np.ndarray:
        """Predictions, shape ``(n,)``, for features of shape ``(n, d)``."""
        return applied(saved_trees(self.data, small=True).booster, features)


def grow(
    features: np.ndarray,
    target: np.ndarray,
    rows: np.ndarray,
    trees: int,
    depth: int,
    child_weight: int,
    seed: int,
) -> Booster:
    """Fit trees to some rows by absolute error.

    Args:
        features: Features of ``n`` rows, shape ``(n, d)``.
        target: Values to predict, shape ``(n,)``.
        rows: Rows to learn from, bool or positions.
        trees: Number of trees.
        depth: Depth of the trees.
        child_weight: Least number of rows in a leaf.
        seed: Seed of the draws.
    """
    settings = {
        # Some labels are off by a large factor; squared errors would fit those.
        "objective": "reg:absoluteerror",
        "max_depth": depth,
        "eta": 0.08,
        "subsample": 0.8,
        "min_child_weight": child_weight,
        "nthread": 1,
        "seed": seed,
        "verbosity": 0,
    }
    matrix = xgboost().DMatrix(features[rows], target[rows])
    grown: Booster = xgboost().train(settings, matrix, trees)
    return grown


def applied(booster: Booster, features: np.ndarray) -> np.ndarray:
    """Predictions of trees, shape ``(n,)``."""
    return np.asarray(booster.predict(xgboost().DMatrix(features)), float)
