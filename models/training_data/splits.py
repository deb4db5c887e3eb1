"""Named, reproducible splits. In none of them does a kernel appear in both training and test.

``random``         kernels drawn by the digest of their hash;
``unseen_shape``   the largest kernels of each kind are held out;
``unseen_family``  every third model family is held out;
``unseen_device``  one device is held out;
``unseen_run``     one profile run is held out.

Other splits are functions of installed packages under the entry points ``opcast.splits``, or tables
of samples (:func:`make_split`).

Rows of level ``program`` are never in the test part of the first two: their kernels are on both
sides. With ``unseen_family`` they follow their family, and no training row has a kernel inside a
held-out program; ``inside`` lists these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...common import plugins
from ...common.errors import DatasetError
from ...common.parquet import read_table

if TYPE_CHECKING:
    import pandas as pd

SPLITS = ("random", "unseen_shape", "unseen_family", "unseen_device", "unseen_run")
#: Shares of the kernels, by the usual convention 70:10:20.
TEST_SHARE = 0.2
VALIDATION_SHARE = 0.1
#: ``unseen_family`` holds out one in this many families: a smaller test part would depend too much
#: on the drawn families. Engineering estimate.
FAMILY_STRIDE = 3
#: Share of the groups held back for early stopping; a tenth is usual and costs little data.
STOP_SHARE = 0.1
#: Fewest rows on either side: with fewer, the validation error is too noisy for early stopping.
MIN_STOP_ROWS = 50
_FOLD = "fold"
#: Names of the parts of a split in tables and plug-ins.
PARTS = ("train", "validation", "test")
#: Entry points of splits from other packages.
GROUP = "opcast.splits"
_TABLES = (".csv", ".parquet")

Inside = Mapping[str, AbstractSet[str]]


@dataclass(frozen=True)
class Split:
    """Row positions of the parts, ascending int64 arrays. Some rows may be in none.

    Attributes:
        name: Name of the split.
        train: Rows to fit on.
        validation: Rows to tune and calibrate on.
        test: Rows to report on, which share no kernel with the others.
        held_out: Contents of ``test`` (families, device or run), for such splits.
    """

    name: str
    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray
    held_out: tuple[str, ...] = ()

    @property
    def fitting(self) -> np.ndarray:
        """Rows of ``train`` and ``validation``, ascending."""
        return np.sort(np.concatenate([self.train, self.validation]))


def make_split(
    frame: pd.DataFrame,
    name: str,
    seed: int = 0,
    *,
    inside: Inside | None = None,
    held_out: str | None = None,
) -> Split:
    """Split the rows of a dataset.

    Args:
        frame: Rows with the dataset's columns.
        name: One of :data:`SPLITS`; an entry point of :data:`GROUP`: a function of the frame and
            the seed that returns the part of each row; or a file, ``.csv`` or ``.parquet``, with
            the columns ``sample_id`` and ``part``. A part is one of :data:`PARTS`, or empty for
            rows in none.
        seed: Selects among equivalent splits: the draw of ``random``, or the families that are held
            out.
        inside: Hashes of the kernels inside each program row, by ``sample_id``.
        held_out: Device or run to hold out; by default the last in order.

    Raises:
        DatasetError: No such split, it has other parts or samples, or the dataset has too little to
            hold out.
    """
    out: tuple[str, ...] = ()
    if name == "random":
        parts = _by_draw(frame, seed)
    elif name == "unseen_shape":
        parts = _by_size(frame)
    elif name == "unseen_family":
        parts, out = _by_family(frame, seed)
    elif name in ("unseen_device", "unseen_run"):
        column = "device" if name == "unseen_device" else "run_id"
        parts, out = _by_column(frame, column, seed, held_out)
    elif name.endswith(_TABLES):
        parts = _by_table(frame, Path(name))
    elif (point := plugins.found(GROUP).get(name)) is not None:
        parts = _coded(np.asarray(plugins.call(point, frame, seed), object), len(frame), name)
    else:
        known = ", ".join((*SPLITS, *plugins.found(GROUP)))
        raise DatasetError(
            f"no split {name!r}", hint=f"choose one of: {known}; or a table, as in parts.csv"
        )
    split = _without_leaks(frame, name, parts, out, inside or {})
    for part in ("train", "test"):
        if not len(getattr(split, part)):
            raise DatasetError(
                f"split {name!r} leaves no {part} rows", hint="profile more, or take another split"
            )
    return split


def is_family(family: str) -> bool:
    """Whether a value of column ``family`` is a model family rather than generated programs."""
    return bool(family) and family != "random" and not family.startswith("op:")


def fold_groups(frame: pd.DataFrame, name: str = "unseen_family") -> np.ndarray:
    """The group that each row is held out with, shape ``(n,)``.

    Args:
        frame: Rows with the dataset's columns.
        name: Split that the folds should resemble: with ``unseen_family``, whole model families
            (and single generated programs) are held out together; otherwise kernels.
    """
    own = frame["program"].where(frame["level"] == "program", frame["kernel_hash"]).astype(object)
    if name != "unseen_family":
        return np.asarray(own, dtype=object)
    generated = frame["program"].where(frame["program"] != "", own)
    return np.asarray(frame["family"].where(frame["family"].map(is_family), generated), object)


def make_folds(
    frame: pd.DataFrame,
    groups: np.ndarray,
    folds: int,
    seed: int = 0,
    *,
    inside: Inside | None = None,
) -> list[Split]:
    """Folds by group, balanced in rows; a fold's test and train rows share no kernel.

    Raises:
        DatasetError: There are fewer than two groups.
    """
    if len(np.unique(groups.astype(str))) < 2:
        raise DatasetError("cannot make folds of a single group", hint="profile more programs")
    fold = balanced_folds(groups, folds, seed)
    splits = []
    for number in range(int(fold.max()) + 1):
        parts = np.where(fold == number, 2, 0)
        splits.append(_without_leaks(frame, f"{_FOLD}{number}", parts, (), inside or {}))
    return splits


def balanced_folds(groups: np.ndarray, folds: int, seed: int = 0) -> np.ndarray:
    """Fold of every row, int64, shape ``(n,)``: groups stay whole, folds are of similar size.

    Args:
        groups: Group of every row, shape ``(n,)``.
        folds: Number of folds; fewer if there are fewer groups.
        seed: Seed of the order among groups of equal size.
    """
    names, codes, sizes = np.unique(groups.astype(str), return_inverse=True, return_counts=True)
    load = np.zeros(min(folds, len(names)))
    fold_of = np.empty(len(names), np.int64)
    # Ties are broken by a draw from the name: they depend on the seed, not on the order of rows.
    order = sorted(range(len(names)), key=lambda i: (-sizes[i], draw(str(names[i]), seed)))
    for index in order:  # greedy: the largest group goes to the emptiest fold
        fold_of[index] = int(np.argmin(load))
        load[fold_of[index]] += sizes[index]
    return np.asarray(fold_of[codes])


def _by_draw(frame: pd.DataFrame, seed: int) -> np.ndarray:
    parts = _parts(np.array([draw(str(value), seed) for value in frame["kernel_hash"]]))
    return np.where(frame["level"] == "program", 0, parts)


def _by_size(frame: pd.DataFrame) -> np.ndarray:
    """By rank of FLOPs and bytes within the kind: top 20 % test, next 10 % validation."""
    unique = frame.drop_duplicates("kernel_hash")
    # The mean rank of FLOPs and bytes: a kernel may be large in either. Within a kind, since a
    # large copy is a small GEMM.
    ranks = unique.groupby("kind")[["flops", "bytes"]].rank(pct=True).mean(axis=1)
    place = ranks.groupby(unique["kind"]).rank(pct=True, method="first")
    by_hash = dict(zip(unique["kernel_hash"], place, strict=True))
    parts = _parts(1.0 - frame["kernel_hash"].map(by_hash).to_numpy(np.float64))
    return np.where(frame["level"] == "program", 0, parts)


def _by_family(frame: pd.DataFrame, seed: int) -> tuple[np.ndarray, tuple[str, ...]]:
    families = sorted(f for f in set(frame["family"]) if is_family(f))
    if len(families) < 2:
        raise DatasetError(
            "unseen_family needs at least two model families",
            hint="choose another: --split random; or add programs of the zoo to the dataset",
        )
    # Seed 0 holds out the third, sixth … family in alphabetical order; other seeds shift this.
    first = (FAMILY_STRIDE - 1 - seed) % FAMILY_STRIDE % len(families)
    test = families[first::FAMILY_STRIDE]
    rest = [f for f in families if f not in test]
    # Every fourth of the others, about a sixth of all families.
    validation = rest[FAMILY_STRIDE :: FAMILY_STRIDE + 1]
    family = frame["family"]
    return np.where(family.isin(test), 2, np.where(family.isin(validation), 1, 0)), tuple(test)


def _by_column(
    frame: pd.DataFrame, column: str, seed: int, held_out: str | None
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Hold out a value of a column. Kernels on both sides are assigned to one of them."""
    values = sorted(set(frame[column]))
    out = held_out if held_out is not None else values[-1]
    if len(values) < 2 or out not in values:
        raise DatasetError(
            f"cannot hold out {column} {out!r}", hint=f"the dataset has: {', '.join(values)}"
        )
    away = (frame[column] == out).to_numpy()
    hashes = frame["kernel_hash"]
    shared = hashes.isin(set(hashes[away]) & set(hashes[~away])).to_numpy()
    first = np.array([draw(h, seed) for h in hashes])
    # A coin flip by hash decides for kernels on both sides.
    to_test, to_train = ~shared | (first < 0.5), ~shared | (first >= 0.5)
    second = np.array([draw(h, seed + 1) for h in hashes])
    train = np.where(second < VALIDATION_SHARE, 1, 0)
    return np.where(away & to_test, 2, np.where(~away & to_train, train, -1)), (out,)


def _by_table(frame: pd.DataFrame, path: Path) -> np.ndarray:
    """Parts by sample; samples outside the table are in none."""
    table = _read(path)
    missing = [name for name in ("sample_id", "part") if name not in table]
    if missing:
        raise DatasetError(f"column {missing[0]!r} is missing", where=str(path))
    parts = dict(zip(table["sample_id"].astype(str), table["part"].fillna(""), strict=True))
    samples = frame["sample_id"].astype(str)
    other = sorted(set(parts) - set(samples))
    if other or len(parts) < len(table):
        what = f"sample {other[0]!r} is not in the dataset" if other else "a sample is there twice"
        raise DatasetError(what, where=str(path), hint="see: opcast data show --json")
    found = samples.map(parts).fillna("").to_numpy(object)
    return _coded(found, len(frame), str(path))


def _read(path: Path) -> pd.DataFrame:
    import pandas as pd

    if path.suffix == ".parquet":
        return read_table(path)
    try:
        return pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise DatasetError(f"cannot be read as CSV: {error}", where=str(path)) from None


def _coded(words: np.ndarray, rows: int, where: str) -> np.ndarray:
    """Numbers of the named parts; -1 for none."""
    if words.shape != (rows,):
        raise DatasetError(
            f"a split of shape {words.shape} for {rows} rows", where=where, hint="one part a row"
        )
    codes = {word: code for code, word in enumerate(PARTS)} | {"": -1}
    wrong = sorted({str(word) for word in words if word not in codes})
    if wrong:
        raise DatasetError(
            f"no part {wrong[0]!r}", where=where, hint=f"parts: {', '.join(PARTS)}, or empty"
        )
    return np.array([codes[word] for word in words])


def _parts(place: np.ndarray) -> np.ndarray:
    """Places in [0, 1): the first fifth is test (2), the next tenth validation (1), the rest 0."""
    return np.where(place < TEST_SHARE, 2, np.where(place < TEST_SHARE + VALIDATION_SHARE, 1, 0))


def _without_leaks(
    frame: pd.DataFrame, name: str, parts: np.ndarray, out: tuple[str, ...], inside: Inside
) -> Split:
    """Remove from earlier parts the kernels of a later part, including those in programs."""
    hashes = frame["kernel_hash"].to_numpy(object)
    programs = frame["sample_id"].to_numpy(object)
    is_kernel = (frame["level"] != "program").to_numpy()
    kept = parts.copy()
    # Test first, then validation: a kernel stays in its last part.
    for later in (2, 1):
        held = set(hashes[kept == later])
        # Not for splits whose later parts have no programs.
        if name == "unseen_family" or name not in SPLITS:
            held = held.union(*(inside.get(s, ()) for s in programs[(kept == later) & ~is_kernel]))
        leak = np.array([h in held for h in hashes], bool)
        kept[leak & (kept >= 0) & (kept < later)] = -1
    train, validation, test = (np.flatnonzero(kept == part) for part in range(3))
    return Split(name, train, validation, test, out)


def draw(text: str, seed: int) -> float:
    """A number in [0, 1) that only depends on the arguments."""
    # A digest rather than a generator: the draw of a kernel does not depend on the other rows.
    digest = hashlib.blake2b(f"{seed}:{text}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def query_names(frame: pd.DataFrame) -> np.ndarray:
    """The query of every row of a dataset: device and family, shape ``(n,)``."""
    return np.asarray(frame["device"].astype(str) + "|" + frame["family"].astype(str), object)


def stop_rows(groups: np.ndarray, seed: int) -> np.ndarray:
    """Draw the rows held back for early stopping, in whole groups by name.

    The names are salted: splits draw kernels by the same names and seed, so that without the salt
    the training part would have none of the groups drawn here.

    Args:
        groups: Group of every row, shape ``(n,)``.
        seed: Seed of the draw.

    Returns:
        Bool, shape ``(n,)``; all false if either side would have fewer than
        :data:`MIN_STOP_ROWS` rows, to train without early stopping.
    """
    names, codes = np.unique(groups.astype(str), return_inverse=True)
    drawn = np.array([draw(f"stop:{name}", seed) < STOP_SHARE for name in names], bool)
    stop = drawn[codes]
    enough = min(stop.sum(), (~stop).sum()) >= MIN_STOP_ROWS
    return stop if enough else np.zeros(len(groups), bool)
