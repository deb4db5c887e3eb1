"""The archive of a campaign: tables, record, noise, telemetry, a page, and a digest of everything.

Tables are Parquet if pyarrow is installed, otherwise gzipped JSON lines; both can be read. Equal
content yields an equal archive.
"""

from __future__ import annotations

import gzip
import hashlib
import html
import io
import json
import statistics
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ...common.errors import DatasetError
from ...common.files import gunzip, write_bytes
from ...common.types import JsonMapping, JsonObject
from ..profile.plan import REPLICATE
from .journal import Journal
from .machine import COLUMNS, scrubbed
from .plan import Plan

#: Schema version of an archive.
SCHEMA = 1
NAME, _DIGEST = "campaign.zip", "digest.json"
#: Maximum bytes of an archive, so that it can be mailed and committed.
MOST_BYTES = 15_000_000
#: Time stamp of every file: the start of the zip format's epoch.
_TIME = (1980, 1, 1, 0, 0, 0)
#: Maximum expanded size of an archive that is read.
_MOST_READ = 2_000_000_000

Rows = Sequence[JsonMapping]
#: Content of an archive: rows by table, the record, and the digest.
Archive = tuple[dict[str, list[JsonObject]], JsonObject, str]


def pack(folder: Path, journal: Journal, plan: Plan, why: str) -> Path:
    """Write ``campaign.zip`` into a campaign's folder.

    If it would exceed :data:`MOST_BYTES`, telemetry is thinned, then the tables of the last stages
    are left out, as stated in the record.

    Args:
        folder: The campaign's folder.
        journal: Its journal.
        plan: Its plan.
        why: Reason for its end.
    """
    tables: dict[str, list[JsonObject]] = defaultdict(list)
    for row in journal.rows():
        table = row.pop("table")
        tables[table].append(scrubbed(row) if table == "notes" else row)
    readings = _readings(folder)
    record = _record(journal, plan, why)
    stages = list(plan.shares)
    step, left_out = 1, list[str]()
    while True:
        own = {
            name: [r for r in rows if _stage(r) not in left_out] for name, rows in tables.items()
        }
        own["telemetry"] = readings[::step]
        record |= {"telemetry_every": step, "left_out": list(left_out)}
        data = _zipped(own, record)
        if len(data) <= MOST_BYTES or not stages:
            break
        if step < 64 and readings:
            step *= 4
        else:
            left_out.append(stages.pop())
    path = folder / NAME
    write_bytes(path, data)
    return path


def _stage(row: JsonMapping) -> str:
    return str(row.get("key", "")).split("/")[0]


def _record(journal: Journal, plan: Plan, why: str) -> JsonObject:
    from ... import __version__

    planned = Counter(case.stage for case in plan.cases)
    done = Counter(key.split("/")[0] for key in journal.done)
    record: JsonObject = {
        "schema": SCHEMA,
        "opcast": __version__,
        "began": round(journal.began, 3),
        "platform": journal.platform,
        "hosts": journal.hosts,
        "slices": journal.slices,
        "elapsed_s": round(journal.elapsed_s, 1),
        "ended": why,
        "spent_s": {k: round(v, 1) for k, v in journal.spent_s.items()},
        "planned": dict(planned),
        "done": dict(done),
        "failed": dict(sorted(journal.failed.items())),
        "notes": journal.notes,
    }
    return scrubbed(record)


def _readings(folder: Path) -> list[JsonObject]:
    """Telemetry of all slices; a line truncated by a kill is left out."""
    found = []
    for path in sorted(folder.glob("telemetry-*.csv")):
        for line in path.read_text(encoding="utf-8").splitlines():
            cells = line.split(",")
            if len(cells) == len(COLUMNS):
                try:
                    values = [float(cell) if cell else None for cell in cells]
                except ValueError:
                    continue
                found.append(dict(zip(COLUMNS, values, strict=True)))
    return found


def _zipped(tables: Mapping[str, Rows], record: JsonObject) -> bytes:
    files: dict[str, bytes] = {}
    for name, rows in sorted(tables.items()):
        if rows:
            suffix, data = _table(rows)
            files[f"tables/{name}{suffix}"] = data
    noise = noise_floor(tables)
    files["record.json"] = _json(record)
    files["noise.json"] = _json(noise)
    files["page.html"] = page(record, noise, tables).encode()
    files[_DIGEST] = _json(_digests(files))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            # Compressing compressed data would only enlarge it.
            how = zipfile.ZIP_STORED if name.startswith("tables/") else zipfile.ZIP_DEFLATED
            archive.writestr(zipfile.ZipInfo(name, _TIME), data, how)
    return out.getvalue()


def _json(value: object) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode()


def _digests(files: Mapping[str, bytes]) -> JsonObject:
    own = {name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())}
    whole = hashlib.sha256("".join(f"{d}  {n}\n" for n, d in own.items()).encode()).hexdigest()
    return {"files": own, "digest": whole}


def _table(rows: Rows) -> tuple[str, bytes]:
    """A table's suffix and bytes."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    whole = [{name: row.get(name) for name in names} for row in rows]
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        text = "".join(json.dumps(row) + "\n" for row in whole)
        return ".jsonl.gz", gzip.compress(text.encode(), 9, mtime=0)
    out = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(whole), out, compression="zstd", compression_level=9)
    return ".parquet", out.getvalue()


def noise_floor(tables: Mapping[str, Rows]) -> JsonObject:
    """Differences between first and second measurements of cases, and drift of the anchors.

    Returns:
        By table ``pairs``, ``median_ape`` and ``largest_ape`` (difference over the mean), and by
        worker and anchor ``drift``: the range of the medians of all workers over their median.
    """
    found: JsonObject = {"replicates": {}, "drift": {}}
    for name, rows in tables.items():
        times = {str(r["key"]): t for r in rows if (t := _typical(r)) > 0}
        gaps = [
            abs(t - times[first]) / ((t + times[first]) / 2)
            for key, t in times.items()
            if REPLICATE in key and (first := key.partition(REPLICATE)[0]) in times
        ]
        if gaps:
            own = {"pairs": len(gaps), "median_ape": statistics.median(gaps)}
            found["replicates"][name] = own | {"largest_ape": max(gaps)}
    anchors: dict[str, list[float]] = defaultdict(list)
    for row in tables.get("anchors", ()):
        for what in ("product_us", "memory_us"):
            anchors[f"{row['worker']} {what}"].append(statistics.median(row[what]))
    for name, values in anchors.items():
        spread = (max(values) - min(values)) / statistics.median(values)
        found["drift"][name] = {"workers": len(values), "range": spread}
    return found


def _typical(row: JsonMapping) -> float:
    """Representative time of a row in µs; 0 if it has none."""
    for name in ("walls_us", "us_each", "blocked_us"):
        value = row.get(name)
        if value is not None and not isinstance(value, float) and len(value):
            return float(statistics.median(value))
    if "start" in row and len(row["start"]):
        ends = zip(row["start"], row["end"], strict=True)
        return float(sum(end - start for start, end in ends)) * 1e-3
    return 0.0


def page(record: JsonObject, noise: JsonObject, tables: Mapping[str, Rows]) -> str:
    """An HTML page for people: the device, measured cases, noise, failures."""
    host = record["hosts"][-1] if record["hosts"] else {}
    told = {
        "device": ", ".join(device_names(record)) or "unknown",
        "platform": record["platform"],
        "driver": host.get("nvidia", {}).get("driver_version", ""),
        "power limit": host.get("nvidia", {}).get("power.limit", ""),
        "libraries": ", ".join(f"{n} {v}" for n, v in host.get("libraries", {}).items()),
        "time": f"{record['elapsed_s']} s in {record['slices']} slices: {record['ended']}",
    }
    stages = [
        (stage, planned, record["done"].get(stage, 0), record["spent_s"].get(stage, 0.0))
        for stage, planned in record["planned"].items()
    ]
    pairs = [(n, v["pairs"], f"{v['median_ape']:.1%}") for n, v in noise["replicates"].items()]
    drift = [(n, v["workers"], f"{v['range']:.1%}") for n, v in noise["drift"].items()]
    parts = [
        _html_table(("", ""), told.items()),
        "<h2>Measured</h2>",
        _html_table(("stage", "planned", "measured", "seconds"), stages),
        _html_table(("table", "rows"), ((n, len(rows)) for n, rows in sorted(tables.items()))),
        "<h2>Noise</h2>",
        _html_table(("table", "measured twice", "median difference"), pairs),
        _html_table(("anchor", "workers", "range"), drift),
        "<h2>Notes</h2>",
        _html_table(("case", "note"), ((r["key"], r["text"]) for r in tables.get("notes", ()))),
        "<h2>Failed</h2>",
        _html_table(("case", "reason"), record["failed"].items()),
    ]
    style = "body{font:15px sans-serif;margin:2em}td,th{padding:2px 12px;text-align:left}"
    head = f"<!doctype html><meta charset=utf-8><title>Campaign</title><style>{style}</style>"
    return head + "<h1>A campaign of opcast</h1>" + "".join(parts) + "\n"


def _html_table(names: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    def line(cells: Iterable[object], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(c))}</{tag}>" for c in cells) + "</tr>"

    return "<table>" + line(names, "th") + "".join(line(r, "td") for r in rows) + "</table>"


def device_names(record: JsonObject) -> list[str]:
    """Names of the device by frameworks and driver, each once."""
    found: list[str] = []
    # Frameworks call every CPU "cpu".
    what = "device_name" if record["platform"] == "cpu" else "device_kind"
    for host in record["hosts"]:
        own = [h.get(what) for h in host["frameworks"].values()]
        found += [str(n) for n in (host.get("nvidia", {}).get("name"), *own) if n]
    return list(dict.fromkeys(found))


def read_archive(path: Path) -> Archive:
    """Read an archive, or the folder that contains it, and check its digest.

    Returns:
        Rows by table, the record, and the digest.

    Raises:
        DatasetError: There is none, it is damaged or was changed, or a newer opcast wrote it.
    """
    path = path / NAME if path.is_dir() else path
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(info.file_size for info in archive.infolist()) > _MOST_READ:
                raise DatasetError("expands to more than an archive may", where=str(path))
            files = {info.filename: archive.read(info) for info in archive.infolist()}
        told = json.loads(files.pop(_DIGEST))
        record = json.loads(files["record.json"])
    except (OSError, zipfile.BadZipFile, KeyError, ValueError) as error:
        raise DatasetError(
            f"no archive of a campaign: {error}",
            where=str(path),
            hint=f"give the folder of opcast campaign, or its {NAME}",
        ) from None
    if _digests(files) != told:
        raise DatasetError(
            "the digest does not fit: the archive was changed after it was written",
            where=str(path),
            hint="take it from the campaign's folder again",
        )
    if record.get("schema") != SCHEMA:
        raise DatasetError(
            f"an archive of version {record.get('schema')}, expected {SCHEMA}",
            where=str(path),
            hint="update opcast",
        )
    tables = {
        Path(name).name.split(".")[0]: _rows(name, data)
        for name, data in files.items()
        if name.startswith("tables/")
    }
    return tables, record, str(told["digest"])


def _rows(name: str, data: bytes) -> list[JsonObject]:
    if name.endswith(".jsonl.gz"):
        return [json.loads(line) for line in gunzip(data).splitlines()]
    from pyarrow import parquet

    rows: list[JsonObject] = parquet.read_table(io.BytesIO(data)).to_pylist()
    return rows
