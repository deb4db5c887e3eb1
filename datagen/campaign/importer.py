"""Creates datasets from a campaign's archive: kernels and programs, PyTorch operators, tables.

Kernels come from the optimised modules and the events of their traces, as in a profile
(:mod:`opcast.datagen.profile.measure`); values that were not observed stay missing.
"""

from __future__ import annotations

import json
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd

from ...common.errors import OpcastError
from ...common.parquet import write_table
from ...common.types import JsonObject
from ...features.devices.device import DeviceSpec
from ...features.ir.reader import read_program
from ...features.lowering.lower import lower
from ..dataset_folder import Row, RunWriter, sample_rows
from ..profile.executions import Event
from ..profile.runner import module_name
from ..profile.trace import Executed, expected
from ..traces.aten import TracedOperator
from ..traces.importer import operator_rows
from .archive import Archive, noise_floor

#: Folders and tables of an import.
KERNELS, OPERATORS, TABLES = "kernels", "operators", "tables"
#: Tables that are written as they are, with a column of medians.
_PLAIN = ("programs", "models", "products", "windows", "launches", "anchors", "kernels")
#: Columns with lists of times, whose median becomes the column ``us_median``.
_TIMES = ("walls_us", "us_each", "us", "blocked_us")
#: Telemetry of which rows with a start and an end get the median.
_READ = ("core_mhz", "power_w", "temperature_c")
#: Lower bound of the ratio of a whole run to its longest kernel; the profiler slows kernels down.
_SHORTER = 0.8


@dataclass
class ImportedCampaign:
    """Result of importing an archive.

    Attributes:
        digest: Digest of its files.
        record: Its record.
        noise: Its noise floor, recomputed.
        samples: Rows of kernels and programs.
        operators: Rows of PyTorch operators.
        tables: Number of rows of each other table.
        without: Programs and models without kernels, with reasons.
        contradictions: Descriptions of rows that contradict others.
    """

    digest: str
    record: JsonObject
    noise: JsonObject
    samples: int = 0
    operators: int = 0
    tables: dict[str, int] = field(default_factory=dict)
    without: dict[str, str] = field(default_factory=dict)
    contradictions: list[str] = field(default_factory=list)


def described_device(tables: Mapping[str, Sequence[JsonObject]]) -> DeviceSpec | None:
    """The device as described by its own ceilings, if the campaign measured them.

    Raises:
        DeviceError: The archive's description is invalid.
    """
    rows = tables.get("device") or ()
    own = [DeviceSpec.from_dict(json.loads(row["description"]), where=row["key"]) for row in rows]
    return own[-1] if own else None


def import_campaign(archive: Archive, out: Path, device: DeviceSpec) -> ImportedCampaign:
    """Write a campaign's measurements into datasets and tables.

    Runs are named after the digest, so that repeated imports of an archive do not duplicate it.

    Args:
        archive: Result of :func:`~opcast.datagen.campaign.archive.read_archive`.
        out: Folder to write: ``kernels`` and ``operators`` are datasets, ``tables`` holds the rest.
        device: The measured device.
    """
    tables, record, digest = archive
    found = ImportedCampaign(digest, record, noise_floor(tables))
    run_id = f"campaign-{digest[:12]}"
    common = {
        "device": asdict(device),
        "source": "campaign",
        "date": datetime.fromtimestamp(float(record["began"]), UTC).isoformat(),
        "digest": digest,
        "host": record["hosts"][-1] if record["hosts"] else {},
        "noise": found.noise,
        "failed": record["failed"],
    }
    found.without |= {str(r["key"]): str(r["text"]) for r in tables.get("notes", [])}
    rows = _kernel_rows(tables, found)
    found.samples = _written(out / KERNELS, run_id, common, rows, device)
    own = [
        TracedOperator(json.loads(r["row"]), "", "", [u * 1e-6 for u in r["us"]])
        for r in _pooled(tables.get("operators", []))
    ]
    made = operator_rows(own, device, False)[0] if own else []
    found.operators = _written(out / OPERATORS, run_id, common, made, device)
    for name in _PLAIN:
        if tables.get(name):
            frame = _plain(tables[name], tables.get("telemetry", []), device)
            (out / TABLES).mkdir(parents=True, exist_ok=True)
            write_table(frame, out / TABLES / f"{name}.parquet")
            found.tables[name] = len(frame)
    power = _power(tables, record, device)
    if power:
        write_table(pd.DataFrame(power), out / TABLES / "power.parquet")
        found.tables["power"] = len(power)
    return found


def _written(
    folder: Path, run_id: str, record: JsonObject, rows: Sequence[Row], device: DeviceSpec
) -> int:
    if not rows:
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    writer = RunWriter(folder, run_id)
    writer.record |= record
    if not any(folder.glob(f"samples-{run_id}-*.parquet")):
        writer.add_rows(rows, device.name)
        writer.flush()
    writer.save_record()
    return len(rows)


def _kernel_rows(tables: Mapping[str, Sequence[JsonObject]], found: ImportedCampaign) -> list[Row]:
    """Samples of all programs with a module and events."""
    events = {r["key"]: r for r in tables.get("events", [])}
    rows: list[Row] = []
    for program in tables.get("programs", []):
        key = str(program["key"])
        try:
            own = _samples(program, events.get(key, {}))
        except OpcastError as error:
            found.without[key] = str(error)
            continue
        if not own:
            found.without.setdefault(key, "no kernel of it appears in the trace")
        rows += own
        _contradicted(key, own, program, found)
    return rows


def _samples(program: JsonObject, events: JsonObject) -> list[Row]:
    if not events:
        return []
    hlo = str(program["hlo"])
    module = module_name(hlo)
    lowered = lower(read_program(hlo), cache=False)
    executions, reads = expected(module, lowered)
    # Events on GPUs do not identify their run: all runs of the program are counted as one.
    marked = bool(events["marked"])
    count = 1 if marked else int(program["runs"])
    columns = zip(*(events[n] for n in ("op", "name", "run", "start", "end")), strict=True)
    own = [
        Event(
            module,
            events["ops"][op],
            run if marked else 0,
            events["names"][name],
            float(start),
            float(end),
        )
        for op, name, run, start, end in columns
    ]
    counts = {name: number * count for name, number in executions.items()}
    durations = Executed(str(events["platform"]), own).durations(counts, reads)
    seconds = {op: [s for s in times if s > 0] for (_, op), times in durations.items()}
    walls = [us * 1e-6 for us in program.get("walls_us") or []]
    family = str(program["family"])
    # Names of cases contain only their sizes.
    return sample_rows(lowered, seconds, walls, family=family, program=str(program["key"]))


def _contradicted(
    key: str, rows: Sequence[Row], program: JsonObject, found: ImportedCampaign
) -> None:
    """Record a program whose whole time is shorter than that of its longest kernel."""
    kernels = [float(str(r["latency_us_p50"])) for r in rows if r["level"] != "program"]
    walls = program.get("walls_us") or []
    if kernels and walls and statistics.median(walls) < _SHORTER * max(kernels):
        found.contradictions.append(
            f"{key}: {statistics.median(walls):.1f} µs in all, {max(kernels):.1f} µs for one kernel"
        )


def _pooled(rows: Sequence[JsonObject]) -> list[JsonObject]:
    """Pool operators of one size into one row: a size is a sample, whatever its model."""
    found: dict[str, JsonObject] = {}
    for row in rows:
        own = found.setdefault(str(row["row"]), {"row": row["row"], "us": []})
        own["us"] += row["us"]
    return list(found.values())


def _power(
    tables: Mapping[str, Sequence[JsonObject]], record: JsonObject, device: DeviceSpec
) -> list[JsonObject]:
    """Products that ran for seconds, in the format of power tables (docs/simulate.md).

    Time, power and clock are medians over the second half of their windows, when temperature and
    power limits have settled.
    """
    windows = [r for r in tables.get("windows", []) if r.get("m")]
    frame = _plain(windows, tables.get("telemetry", []), device) if windows else pd.DataFrame()
    if "power_w" not in frame or not frame["power_w"].notna().any():
        return []
    limit = str((record["hosts"][-1].get("nvidia") or {}).get("power.limit", "")).split(" ")[0]
    made: list[JsonObject] = []
    for key, rows in frame.groupby("key", sort=False):
        late = rows.iloc[len(rows) // 2 :]
        sizes = {name: rows.iloc[0][name] for name in ("dtype", "m", "n", "k")}
        own: JsonObject = {"id": key, "source": "campaign", "op": "linear", "family": "linear"}
        own |= {"device": device.name, "b": 1, **sizes}
        own |= {"latency_us": late["us_each"].median(), "power_w": late["power_w"].median()}
        own["core_mhz"] = late["core_mhz"].median()
        own["power_limit_w"] = float(limit) if limit.replace(".", "").isdigit() else None
        made.append(own)
    return [row for row in made if pd.notna(row["power_w"])]


def _plain(
    rows: Sequence[JsonObject], telemetry: Sequence[JsonObject], device: DeviceSpec
) -> pd.DataFrame:
    """A table with the device, and medians of times, clock, power and temperature."""
    times = [float(r["time"]) for r in telemetry]
    made = []
    for row in rows:
        # Modules are in the samples.
        own: JsonObject = {"device": device.name, **{k: v for k, v in row.items() if k != "hlo"}}
        listed = next((row[n] for n in _TIMES if isinstance(row.get(n), list) and row[n]), None)
        if listed is not None:
            own["us_median"] = statistics.median(listed)
        if isinstance(row.get("walls_us"), list) and "library" in row:
            # In the format of tables of whole models (docs/torch.md).
            own |= {"id": row["key"], "latency_ms": own["us_median"] * 1e-3, "source": "campaign"}
        if row.get("begin") and row.get("executions"):
            row = {**row, "end": row["begin"] + row["us_each"] * row["executions"] * 1e-6}
        if row.get("begin") and row.get("end"):
            inside = telemetry[bisect_left(times, row["begin"]) : bisect_right(times, row["end"])]
            for name in _READ:
                values = [r[name] for r in inside if r[name] is not None]
                own[name] = statistics.median(values) if values else None
        made.append(own)
    return pd.DataFrame(made)
