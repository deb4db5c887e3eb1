"""Imports published tables of measured latencies.

Every row becomes a sample of level ``operator`` whose kernel text contains its parameters
(see :mod:`opcast.features.operators.hlo`). Shards are written one by one under names that identify
their content, so that a stopped import can be resumed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from ...common.errors import DatasetError
from ...common.parquet import is_csv, read_table
from ...common.progress import tracked
from ...features.cost.formats import TABLE_FORMATS, UNQUANTISED
from ...features.dataset import (
    PUBLISHED_NAME,
    record_path,
    sample_ids,
    write_record,
    write_shard,
)
from ...features.devices.catalogue import find_described
from ...features.devices.device import DeviceSpec, check_name
from ...features.operators import FAMILIES, family_keys, op_features
from ...features.operators.columns import texts_of
from ...features.operators.hlo import op_texts
from ...features.operators.query import with_defaults
from ...features.operators.schema import KERNEL_KINDS, methods, sources
from .clones import CloneFile, clone_files, digest_of, with_split
from .packs import CONV_FILE, PRODUCT_FILES, numbers, training_convs, training_products

#: Files of operators, of either pack.
OPERATOR_FILES = tuple(f"{own.table}.parquet" for own in sources().values() if own.table)
#: Columns that every table has.
REQUIRED = ("id", "source", "family", "op", "dtype", "device", "latency_us")
#: Columns of a user's table: rows without ``id`` are numbered, and without ``split`` a part of the
#: shapes is held out.
OWN = ("source", "family", "op", "dtype", "device", "latency_us")
#: Rows per shard, which bound the memory of an import (engineering choice).
ROWS_PER_SHARD = 100_000
#: Normalisations are reductions; every other memory-bound operator counts as a fusion.
_KIND_OF_OP = {"softmax": "reduce", "ln": "reduce", "layernorm": "reduce", "rmsnorm": "reduce"}
_DTYPE = {name: TABLE_FORMATS[name].weights for name in UNQUANTISED}


@dataclass(frozen=True)
class Imported:
    """Outcome of an import.

    Attributes:
        rows: Samples in the dataset.
        skipped: Rows without a positive latency.
        shards: Files written by this call.
        kept: Files that an earlier, stopped import had written.
        devices: Names of the devices.
    """

    rows: int
    skipped: int
    shards: int
    kept: int
    devices: tuple[str, ...]


def import_published(
    folder: Path,
    out: Path,
    show: bool = False,
    described: Mapping[str, DeviceSpec] | None = None,
) -> Imported:
    """Convert the operator tables of a folder to a dataset.

    Args:
        folder: A folder with :data:`OPERATOR_FILES` or tables of XLA's products, possibly in
            subfolders; or a clone of a repository that
            :mod:`~opcast.datagen.published.clones` supports; or a user's CSV or parquet table with
            the columns :data:`OWN` and any name, or a folder of them.
        out: Dataset folder; existing shards are kept.
        show: Whether to show a progress bar.
        described: The user's devices by name, in addition to those of the catalogue.

    Raises:
        DatasetError: There is no table, or one lacks a column or names an unknown operator.
        DeviceError: A device is neither described nor in the catalogue.
    """
    own = described or {}
    total, parts = _tables(folder)
    out.mkdir(parents=True, exist_ok=True)
    rows = skipped = shards = kept = 0
    devices: dict[str, DeviceSpec] = {}
    for name, number, part in tracked(parts, total, "importing", show):
        # Unknown devices stop the import here, before anything of the part is written.
        new = [d for d in part["device"].unique() if d not in devices]
        devices |= {d: find_described(d, own) for d in new}
        target = out / f"{name}-{number:04d}.parquet"
        good = part["latency_us"].to_numpy(np.float64) > 0
        skipped += int((~good).sum())
        rows += int(good.sum())
        if not good.any():
            continue
        # Records before the shard: a dataset with rows of unknown runs does not load.
        _write_runs(out, part.loc[good, ["source", "device"]], devices)
        if target.is_file():
            kept += 1
            continue
        write_shard(samples(part[good].reset_index(drop=True), devices), target)
        shards += 1
    known = tuple(sorted({spec.name for spec in devices.values()}))
    return Imported(rows, skipped, shards, kept, known)


def _tables(folder: Path) -> tuple[int, Iterator[tuple[str, int, pd.DataFrame]]]:
    """Number of parts to import (for a clone, of files), and the parts."""
    files, products = _files(folder), _products(folder)
    if files or products:
        total = sum(-(-_open(p).metadata.num_rows // ROWS_PER_SHARD) for p in files)
        return total + len(products), chain(_parts(files), _cut(products))
    found = clone_files(folder) or _own(folder)
    if found:
        return len(found), _cut(found)
    if not folder.exists():
        raise DatasetError("no such folder or table", where=str(folder))
    clones = [own.clone["name"] for own in sources().values() if own.clone]
    expected = (
        f"expected {', '.join((*OPERATOR_FILES, *PRODUCT_FILES, CONV_FILE))}, a clone of "
        f"{', '.join(clones[:-1])} or {clones[-1]}, or a CSV or parquet table with {', '.join(OWN)}"
    )
    raise DatasetError("no operator table here", where=str(folder), hint=expected)


def _own(folder: Path) -> list[CloneFile]:
    """A user's tables: a file, or those of a folder that have the columns."""
    if folder.is_file():
        return [_own_file(folder, folder.name)]
    tables = (p for p in sorted(folder.rglob("*")) if p.suffix == ".parquet" or is_csv(p))
    return [
        _own_file(path, path.relative_to(folder).as_posix())
        for path in tables
        if set(OWN) <= set(read_table(path).columns)
    ]


def _own_file(path: Path, origin: str) -> CloneFile:
    digest = digest_of(origin)

    def rows() -> pd.DataFrame:
        table = read_table(path)
        missing = [c for c in OWN if c not in table]
        if missing:
            hint = f"it has {', '.join(map(str, table.columns))}; docs/operator-tables.md shows one"
            raise DatasetError(f"column {missing[0]!r} is missing", where=str(path), hint=hint)
        if "id" not in table:
            table = table.assign(id=[f"{digest}-{n}" for n in range(len(table))])
        table = with_defaults(table, family_keys(table))
        return _checked(table if "split" in table else with_split(table), path)

    return CloneFile(path, f"own-{digest}", rows)


def _products(folder: Path) -> list[CloneFile]:
    """Tables of products and of convolutions."""
    paths = [p for name in PRODUCT_FILES for p in sorted(folder.rglob(name))]
    tables = training_products(paths)
    products = [
        CloneFile(path, f"xla_{path.name.split('.')[0]}", partial(tables.__getitem__, path))
        for path in tables
    ]
    convs = sorted(folder.rglob(CONV_FILE))
    return products + [CloneFile(path, path.stem, partial(training_convs, path)) for path in convs]


def _cut(files: Sequence[CloneFile]) -> Iterator[tuple[str, int, pd.DataFrame]]:
    for file in files:
        rows = file.read()
        for number in range(-(-len(rows) // ROWS_PER_SHARD)):
            part = rows.iloc[number * ROWS_PER_SHARD : (number + 1) * ROWS_PER_SHARD]
            yield file.name, number, part.reset_index(drop=True)


def _files(folder: Path) -> list[Path]:
    files: dict[str, Path] = {}
    # In the order of the names, so that shards of a resumed import have the same numbers.
    for path in (p for name in OPERATOR_FILES for p in sorted(folder.rglob(name))):
        twin = files.setdefault(path.name, path)
        if twin is not path:  # their shards would have the same names
            raise DatasetError(
                f"the table is there twice, {path} besides",
                where=str(twin),
                hint="import them apart",
            )
    return list(files.values())


def _open(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise DatasetError(f"cannot be read as parquet: {error}", where=str(path)) from None


def _parts(files: Sequence[Path]) -> Iterator[tuple[str, int, pd.DataFrame]]:
    for path in files:
        file = _open(path)
        missing = [c for c in REQUIRED if c not in file.schema_arrow.names]
        if missing:
            raise DatasetError(f"column {missing[0]!r} is missing", where=str(path))
        for number, part in enumerate(_batches(file, path)):
            yield path.stem, number, _checked(part, path)


def _batches(file: pq.ParquetFile, path: Path) -> Iterator[pd.DataFrame]:
    try:
        for batch in file.iter_batches(ROWS_PER_SHARD):
            # Integer columns with gaps become floats, as the feature code expects.
            yield batch.to_pandas(integer_object_nulls=False)
    except (OSError, ValueError) as error:
        raise DatasetError(f"cannot be read as parquet: {error}", where=str(path)) from None


def _checked(part: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Convert texts to ``str`` and latencies to ``float``.

    Raises:
        DatasetError: A latency is not a number, or a source is not a valid name.
    """
    texts = {c: part[c].astype(str) for c in ("id", "source", "device") if c in part}
    try:
        for source in texts["source"].unique() if "source" in texts else ():
            check_name(source)
        latency = part["latency_us"].to_numpy(np.float64, na_value=np.nan)
    except (ValueError, TypeError) as error:
        raise DatasetError(f"a row cannot be read: {error}", where=str(path)) from None
    return part.assign(**texts, latency_us=latency)


def samples(part: pd.DataFrame, devices: dict[str, DeviceSpec]) -> pd.DataFrame:
    """Convert published rows to samples, in the same order.

    Args:
        part: Rows of a published table, each with a positive latency.
        devices: Descriptions by the names in the column ``device``.

    Raises:
        DatasetError: An operator is unknown, or lacks a parameter.
    """
    keys = family_keys(part)
    unknown = sorted(set(keys) - set(FAMILIES))
    if unknown:
        row = part["id"][keys == unknown[0]].iloc[0]
        known = ", ".join(FAMILIES)
        raise DatasetError(f"no operator family {unknown[0]!r}", where=f"row {row}", hint=known)
    parts = [_family(part[keys == key], str(key), devices) for key in keys.unique()]
    return pd.concat(parts).sort_index()


def _family(rows: pd.DataFrame, key: str, devices: dict[str, DeviceSpec]) -> pd.DataFrame:
    group = FAMILIES[key]
    features = op_features(rows, key, devices)
    irs = op_texts(rows, key)
    hashes = [hashlib.sha256(ir.encode()).hexdigest()[:16] for ir in irs]
    device = rows["device"].map({name: spec.name for name, spec in devices.items()})
    runs = rows["source"].astype(str) + "-" + device
    median = rows["latency_us"].to_numpy(np.float64)
    spread = numbers(rows, "latency_std_us")
    kind: str | pd.Series = KERNEL_KINDS[group]
    if group == "pointwise":
        kind = rows["op"].map(_KIND_OF_OP).fillna(kind)
    frame = pd.DataFrame(
        {
            "kernel_hash": hashes,
            "kernel_ir": irs,
            "level": "operator",
            "kind": kind,
            "dtype": rows["dtype"].map(_DTYPE).fillna(rows["dtype"]),
            "device": device,
            # The minimum, if published, is used as the 10 % quantile.
            "latency_us_p10": np.fmin(numbers(rows, "latency_min_us", np.inf), median),
            "latency_us_p50": median,
            # 1.2816 standard deviations: the 90 % quantile of a normal distribution.
            "latency_us_p90": median + 1.2816 * spread,
            "repeats": rows["source"].map(_repeats()).fillna(1).astype(np.int64),
            "flops": features.flops,
            "bytes": features.moved,
            "source": "published:" + rows["source"].astype(str),
            "run_id": runs,
            "family": f"op:{key}",
            "program": rows["id"].astype(str),
            "split": rows["split"].astype(str) if "split" in rows else "",
            "version": texts_of(rows["version"]).astype(str) if "version" in rows else "",
        },
        index=rows.index,
    )
    return frame.assign(sample_id=sample_ids(frame))


def _repeats() -> dict[str, int]:
    return {name: source.repeats for name, source in sources().items()}


def _write_runs(out: Path, part: pd.DataFrame, devices: dict[str, DeviceSpec]) -> None:
    """Write a run record for every (source, device), with the method of its labels."""
    for source, name in part[["source", "device"]].drop_duplicates().itertuples(index=False):
        spec = devices[name]
        run_id = f"{source}-{spec.name}"
        if record_path(out, run_id).is_file():
            continue
        record = {
            "device": asdict(spec),
            "source": f"published:{source}",
            "method": methods().get(source, "kernel"),
            PUBLISHED_NAME: name,
            "repeats": _repeats().get(source, 1),
        }
        write_record(out, run_id, record)
