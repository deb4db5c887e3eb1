"""Reads operator rows from datasets and published tables into a common form."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ...common.errors import DatasetError
from ...features.dataset import Dataset
from ...features.devices.device import DeviceSpec
from ...features.operators import FAMILIES, family_keys
from ...features.operators.columns import OpRows, distinct, texts_of
from ...features.operators.hlo import op_frame
from ...features.operators.physics import BACKENDS, KERNEL_WORDS
from ...features.operators.query import with_defaults
from ...features.operators.schema import ALIKE, BLOCKS, NAMES
from ..training_data.splits import draw

if TYPE_CHECKING:
    import pandas as pd

#: Share of the groups, and of single rows, held out of the fit to calibrate intervals. Whole groups
#: show the error on unseen shapes, single rows the error between measured sizes. Both are small
#: because held-out rows are lost to the regressor. Engineering estimates.
HELD_GROUPS, HELD_ROWS = 0.05, 0.03
#: With fewer groups than ``FEW_GROUPS``, every group is held out once, in ``PARTS`` folds: a
#: twentieth would be fewer than the 20 groups that two 5 % tails need. With fewer than
#: ``TWO_GROUPS``, the others do not show the error of a new group. Engineering estimates.
FEW_GROUPS, PARTS, TWO_GROUPS = 400, 5, 3


def rows_of_dataset(dataset: Dataset) -> pd.DataFrame:
    """Operator rows of a dataset.

    Returns:
        One row per sample of an operator, with ``id``, ``key`` (method/family), ``device``,
        ``latency_us``, ``split``, ``version`` (empty if unknown) and the operators' parameters.

    Raises:
        DatasetError: No row is an operator.
        DatasetError: No row is an operator's.
    """
    import pandas as pd

    frame = dataset.frame
    # Parsing a kernel's text is slow: once per distinct text.
    first = ~frame["kernel_hash"].duplicated().to_numpy()
    table = op_frame(frame["kernel_ir"][first])
    known = table["method"].astype(str) != ""
    if not known.any():
        raise DatasetError(
            "no sample is a library operator", hint="import one with: opcast data import published"
        )
    place = pd.Series(np.arange(int(first.sum())), index=frame["kernel_hash"][first])
    at = frame["kernel_hash"].map(place).to_numpy()
    rows = table.iloc[at].reset_index(drop=True)
    rows["key"] = rows["method"].astype(str) + "/" + rows["family"].astype(str)
    rows["id"] = frame["program"].to_numpy()
    rows["device"] = frame["device"].to_numpy()
    rows["latency_us"] = frame["latency_us_p50"].to_numpy(np.float64)
    rows["split"] = frame["split"].fillna("train").to_numpy() if "split" in frame else "train"
    # Shards of earlier versions have no versions.
    rows["version"] = frame["version"].fillna("").to_numpy() if "version" in frame else ""
    return rows[rows["method"] != ""].reset_index(drop=True)


def rows_of_published(frame: pd.DataFrame, find: Callable[[str], DeviceSpec]) -> pd.DataFrame:
    """Operator rows of a published table, with the catalogue's device names and all parameters.

    Raises:
        DatasetError: A column is missing, or a family is unknown.
        DeviceError: A device is not in the catalogue.
    """
    for column in ("op", "family", "dtype", "device", "source"):
        if column not in frame:
            what = f"column {column!r} of the operator table is missing"
            raise DatasetError(what, hint="give op, family, dtype, device and source of each row")
    devices = {name: find(name).name for name in frame["device"].unique()}
    rows = frame.assign(key=family_keys(frame), device=frame["device"].map(devices))
    unknown = sorted(set(rows["key"]) - set(FAMILIES))
    if unknown:
        where = f"row {rows['id'][rows['key'] == unknown[0]].iloc[0]}"
        hint = "families: " + ", ".join(FAMILIES)
        raise DatasetError(f"no operator family {unknown[0]!r}", where=where, hint=hint)
    return with_defaults(rows, rows["key"])


def versions_of(rows: pd.DataFrame) -> dict[str, list[str]]:
    """Versions by library; empty if rows do not name them.

    Args:
        rows: Rows of operators, with ``backend`` and ``version`` if known.
    """
    import pandas as pd

    if "version" not in rows or "backend" not in rows:
        return {}
    named = pd.DataFrame({"library": texts_of(rows["backend"]), "it": texts_of(rows["version"])})
    named = named[(named["library"] != "") & (named["it"] != "")].drop_duplicates().astype(str)
    return {str(k): sorted(part["it"]) for k, part in named.groupby("library")}


def joined_versions(
    first: Mapping[str, Collection[str]], second: Mapping[str, Collection[str]]
) -> dict[str, list[str]]:
    """Union of two sets of versions by library."""
    return {
        name: sorted({*first.get(name, ()), *second.get(name, ())}) for name in {**first, **second}
    }


def group_draw(rows: pd.DataFrame, key: str, seed: int = 0) -> np.ndarray:
    """Draw a number in [0, 1) for each row, the same for all rows of a group.

    Args:
        rows: ``n`` rows of one family.
        key: The family.
        seed: Seed of the draw.
    """
    import pandas as pd

    columns = [c for c in _alike(key) if c in rows]
    text = rows[columns[0]].astype(str)
    for column in columns[1:]:
        text = text + "|" + rows[column].astype(str)
    code, names = pd.factorize(text)
    return np.array([draw(f"{key}:{name}", seed) for name in names])[code]


def group_names(rows: pd.DataFrame | OpRows, key: str) -> np.ndarray:
    """Name of each row's group, independent of how numbers are stored, shape ``(n,)``.

    Args:
        rows: ``n`` rows of one family.
        key: The family.
    """
    rows = OpRows.of(rows)
    columns = _alike(key)
    names = [c for c in columns if c in NAMES]
    # Missing numbers are zero, as in a query that omits them.
    numbers = [np.nan_to_num(rows.numbers(c)) for c in columns if c not in NAMES]
    texts = [rows.texts(c).astype(str) for c in names]
    return np.array(
        [
            "|".join((*own[: len(texts)], *(f"{n:.0f}" for n in own[len(texts) :])))
            for own in zip(*texts, *numbers, strict=True)
        ],
        object,
    )


def _alike(key: str) -> tuple[str, ...]:
    # Other blocks have one group per shape.
    return ALIKE[FAMILIES[key]] if key in FAMILIES else ALIKE.get(key, BLOCKS[key])


class HeldOut(NamedTuple):
    """Rows to hold out of a fit.

    Attributes:
        rows: Mask of single rows, plus some whole groups if there are many, shape ``(n,)``.
        parts: If there are few groups, masks of folds that contain each group once.
    """

    rows: np.ndarray
    parts: list[np.ndarray]


def held_out(rows: pd.DataFrame, key: str, seed: int, rng: np.random.Generator) -> HeldOut:
    """Draw the rows to hold out of a fit.

    Args:
        rows: ``n`` rows of one family.
        key: The family.
        seed: Seed of the draw of groups.
        rng: For the draw of rows.
    """
    place = group_draw(rows, key, seed)
    groups, group = np.unique(place, return_inverse=True)
    few = TWO_GROUPS <= len(groups) < FEW_GROUPS
    count = min(PARTS, len(groups)) if few else 0
    whole = round(HELD_GROUPS * len(groups)) if len(groups) >= FEW_GROUPS else 0
    first = groups[whole - 1] if whole else -1.0
    held = np.asarray((place <= first) | drawn(len(rows), rng))
    return HeldOut(held, [group % count == part for part in range(count)])


def drawn(count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw :data:`HELD_ROWS` of the rows, bool, shape ``(count,)``."""
    return np.asarray(rng.random(count) < HELD_ROWS)


def codes(rows: pd.DataFrame | OpRows) -> tuple[np.ndarray, np.ndarray]:
    """Coarse and fine codes of the implementation, shape ``(n,)`` each.

    The coarse code is :func:`dispatch`; the fine code adds kernel, KV cache type and distribution.
    They are the groups of the error covariance.
    """
    rows = OpRows.of(rows)
    coarse = dispatch(rows)
    return coarse, coarse + "|" + _joined(rows, ("kernel", "kv_dtype", "distribution"))


def dispatch(rows: pd.DataFrame | OpRows) -> np.ndarray:
    """Key by which a library dispatches: op, dtype and backend of each row, shape ``(n,)``."""
    return _joined(rows, ("op", "dtype", "backend"))


def libraries(rows: pd.DataFrame | OpRows) -> np.ndarray:
    """Library that runs each row: op, dtype, backend and type of the KV cache, shape ``(n,)``."""
    return _joined(rows, ("op", "dtype", "backend", "kv_dtype"))


def named_columns(rows: pd.DataFrame) -> tuple[str, ...]:
    """Columns that name the implementation and are filled in every row."""
    return tuple(c for c in ("backend", "kernel") if c in rows and not _empty(rows[c]).any())


def unnamed(rows: pd.DataFrame | OpRows, columns: Sequence[str]) -> np.ndarray:
    """Mask of rows where a name is missing or has no feature, shape ``(n,)``."""
    rows = OpRows.of(rows)
    lacking = np.zeros(len(rows), bool)
    for column in columns:
        lacking |= ~rows.where(column, _of_backend if column == "backend" else _of_kernel)
    return lacking


def _of_backend(name: str) -> bool:
    return name.lower() in BACKENDS


def _of_kernel(name: str) -> bool:
    # Kernel names are matched by the substrings that features are made of.
    return any(word in name.lower() for word in (*BACKENDS, *KERNEL_WORDS, "static_scaled"))


def _empty(values: pd.Series) -> np.ndarray:
    return np.asarray(texts_of(values) == "", bool)


def _joined(rows: pd.DataFrame | OpRows, columns: tuple[str, ...]) -> np.ndarray:
    """Values of the columns, each after a bar; a missing column counts as empty."""
    code, values = OpRows.of(rows).combined(columns)
    joined = np.array(["".join(f"|{text}" for text in own) for own in values], object)
    return np.asarray(joined[code])


def among(values: np.ndarray, names: Collection[str]) -> np.ndarray:
    """Mask of the values that are one of some names, shape ``(n,)``."""
    code, found = distinct(values)
    return np.asarray(np.array([value in names for value in found], bool)[code])
