"""Audit of measured tables: rows that cannot be right, or that other rows contradict.

A bound is a fact of the device: more operations than its data sheet's peak, or more bytes than its
memory delivers beyond the capacity of its last cache. A row beyond it is *impossible*. The other
checks compare rows with each other, and their findings are *suspicious*.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from ...common.errors import DatasetError
from ...features.devices.catalogue import find_described, in_catalogue
from ...features.devices.device import DeviceSpec
from ...features.operators.schema import BLOCKS, FAMILIES, families_hint
from .audit_rows import COLLECTIVE, KERNEL, REASONS, SLACK, AuditPart, audit_part, read_audited

#: Excess over the peak that a card's clock can explain: an RTX 3090 boosts a tenth beyond the 1,695
#: MHz of its data sheet. Such rows are only suspicious; engineering estimate.
BOOST = 1.10
#: Families whose work is partly estimated: sizes of a model known by name, or routing that the
#: table does not give. A row must exceed a bound by this factor, and is only suspicious.
ESTIMATED = {
    **dict.fromkeys(("layer/experts", "graph/sparse", "graph/scan"), 3.0),
    "graph/moe": 2.0,
}
#: Transfers whose sender finishes before the bytes have arrived, and the factor by which they must
#: exceed their link.
ONE_WAY, ONE_WAY_SLACK = ("send_recv", "collective_permute", "broadcast"), 3.0
#: Share of a library's rows of one type above the peak from which its measuring method is at fault,
#: and the minimum number. In XLA's table of H100, 8 % of FP8 products are above the peak, since its
#: benchmark halves calls of two kernels; isolated outliers are 1 %.
GROUP_SHARE, GROUP_LEAST = 0.05, 3
#: Minimum time (us) of anything on a device. An empty kernel takes 1 to 2 (Vidur's tables end at
#: 1 µs), more if the host waits for it; engineering estimate.
LEAST_US = 0.5
#: Ratios of times that are flagged: of a problem to a larger one, between equal problems, and of a
#: file's rows to those of another file. Engineering estimates, chosen so that sound tables raise
#: few alarms (docs/operators.md).
MONOTONE, TWINS, SESSION = 3.0, 2.5, 2.0
#: Minimum rows of a line to detect copied times, and of a file to compare it.
LINE_LEAST, SESSION_LEAST = 4, 50
#: Median of measured over expected time from which a whole group is flagged: as another unit if it
#: is a power of a thousand within a factor of 3, else as a kernel that does other work.
FAR, UNIT_WITHIN = 100.0, 3.0
#: Sizes with which the time of an operator grows.
GROWING = (
    *("b", "m", "n", "k", "rows", "batch", "q_len", "kv_len", "tokens", "bytes"),
    *("n_decode", "kv_decode", "kv_prefill", "kv_history", "seq_len"),
)


@dataclass
class Audit:
    """Result of an audit.

    Attributes:
        flagged: ``file``, ``row`` (row number from 0), ``id`` if the table has one, ``what``,
            ``device``, ``latency_us``, ``reason``, ``impossible``, ``evidence`` (factor by which
            the row is off) and ``explanation`` (the figures, to check by hand). A row is listed
            once per reason.
        rows: Number of checked rows.
        marked: Number of those that their publisher marks as wrong (``suspect``, ``above_peak``).
        found: Number of marked rows that are flagged.
        notes: What was not checked, and why.
    """

    flagged: pd.DataFrame
    rows: int
    marked: int = 0
    found: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def impossible(self) -> int:
        """Number of impossible rows."""
        wrong = self.flagged[self.flagged["impossible"]]
        return len(wrong[["file", "row"]].drop_duplicates())

    @property
    def alarms(self) -> int:
        """Number of flagged rows that are not marked."""
        return len(self.flagged[["file", "row"]].drop_duplicates()) - self.found

    def counts(self) -> pd.DataFrame:
        """Return rows by reason: ``reason``, ``verdict``, ``rows``, ``share``, ``largest``."""
        out = []
        for reason, impossible in REASONS.items():
            part = self.flagged[self.flagged["reason"] == reason]
            if len(part):
                verdict = "impossible" if impossible else "suspicious"
                share = len(part) / max(self.rows, 1)
                out.append((reason, verdict, len(part), share, part["evidence"].max()))
        return pd.DataFrame(out, columns=["reason", "verdict", "rows", "share", "largest"])


def audit(path: Path, described: Mapping[str, DeviceSpec] | None = None) -> Audit:
    """Check measured tables.

    Args:
        path: A table of operators, products, convolutions, layers or collectives (the packs'
            columns, or XLA's), a folder of such tables, or a dataset.
        described: The user's own devices by name, besides those of the catalogue and of a dataset.

    Raises:
        DatasetError: There is no such table, or it cannot be read.
    """
    tables, notes = read_audited(path, described or {})
    found: list[pd.DataFrame] = []
    marks: list[pd.DataFrame] = []
    count = 0
    for rows, devices in tables:
        known = {name: name in devices or in_catalogue(name) for name in rows["device"].unique()}
        foreign = [name for name, there in known.items() if not there]
        if foreign:
            names = ", ".join(sorted(map(str, foreign)))
            left = int((~rows["device"].map(known)).sum())
            notes.append(
                f"{left} rows of unknown devices were not checked: {names}; describe them "
                "with --device FILE"
            )
        rows = rows[rows["device"].map(known).astype(bool)]
        specs = {n: find_described(n, devices) for n, there in known.items() if there}
        rows = _described(rows, notes)
        parts = [
            audit_part(str(key), rows[rows["key"] == key].reset_index(drop=True), specs, notes)
            for key in rows["key"].unique()
            if key
        ]
        for part in parts:
            count += len(part.rows)
            marks.append(part.rows.loc[part.rows["marked"].astype(bool), ["file", "row"]])
            for check in _CHECKS:
                check(part)
        _groups([part for part in parts if part.key not in ESTIMATED])
        found += [flagged for part in parts for flagged in part.found]
    columns = ["file", "row", "id", "what", "device", "latency_us", "reason", "impossible"]
    columns += ["evidence", "explanation"]
    flagged = pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=columns)
    flagged = flagged[columns].astype({"impossible": bool})
    marked = pd.concat(marks, ignore_index=True) if marks else flagged[["file", "row"]]
    hit = marked.merge(flagged[["file", "row"]].drop_duplicates(), on=["file", "row"])
    return Audit(flagged, count, len(marked), len(hit), notes)


def _described(rows: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    """Remove rows of unknown families, with a note.

    Raises:
        DatasetError: All rows have unknown families.
    """
    known = rows["key"].isin(["", KERNEL, COLLECTIVE, *FAMILIES, *BLOCKS])
    foreign = ", ".join(sorted(rows["key"][~known].unique()))
    if len(rows) and not known.any():
        raise DatasetError(
            f"there is no family {foreign}", where=rows["file"].iloc[0], hint=families_hint()
        )
    if foreign:
        notes.append(f"{int((~known).sum())} rows of unknown families were not checked: {foreign}")
    return rows[known]


def _no_time(part: AuditPart) -> None:
    at = np.flatnonzero(~(part.seconds > 0) | ~np.isfinite(part.seconds))
    text = ["the time is not a positive number"] * len(at)
    part.flag("no time", at, np.full(len(at), np.inf), text)
    late = (part.seconds > 0) & (part.seconds < LEAST_US * 1e-6) & (part.key != KERNEL)
    at = np.flatnonzero(late)
    ratio = LEAST_US * 1e-6 / part.seconds[at]
    text = [
        f"{s * 1e6:.3g} µs, but no kernel takes less than {LEAST_US} µs" for s in part.seconds[at]
    ]
    part.flag("below a launch", at, ratio, text)


def _bounds(part: AuditPart) -> None:
    with np.errstate(divide="ignore", invalid="ignore"):
        compute = np.nan_to_num(part.flops / part.peak / part.seconds, posinf=0.0)
        beyond = np.maximum(part.moved - part.cache, 0.0)
        memory = np.nan_to_num(beyond / part.bandwidth / part.seconds, posinf=0.0)
    estimated = np.full(len(compute), ESTIMATED.get(part.key, 0.0))
    if part.key == COLLECTIVE:
        first = part.rows["what"].str.split().str[0].isin(ONE_WAY).to_numpy()
        estimated = np.where(first, ONE_WAY_SLACK, 0.0)
    vague = estimated > 0
    for wrong, ratio, reason, explain in (
        (~vague & (compute > BOOST), compute, "above the peak", _compute_text),
        (
            ~vague & (compute > SLACK) & (compute <= BOOST),
            compute,
            "just above the peak",
            _compute_text,
        ),
        (~vague & (memory > SLACK), memory, "above the bandwidth", _memory_text),
        (vague & (compute > estimated), compute, "above an estimated bound", _compute_text),
        (vague & (memory > estimated), memory, "above an estimated bound", _memory_text),
    ):
        at = np.flatnonzero(wrong)
        part.flag(reason, at, ratio[at], [explain(part, int(i)) for i in at])


def _compute_text(part: AuditPart, i: int) -> str:
    rate = part.flops[i] / part.seconds[i] / 1e12
    done = f"{part.flops[i] / 1e9:,.4g} GFLOP in {part.seconds[i] * 1e6:,.4g} µs"
    return f"{done} are {rate:,.4g} TFLOP/s; the peak is {part.peak[i] / 1e12:,.4g}"


def _memory_text(part: AuditPart, i: int) -> str:
    rate = (part.moved[i] - part.cache[i]) / part.seconds[i] / 1e9
    size = f"{part.moved[i] / 1e6:,.4g} MB, {part.cache[i] / 1e6:,.4g} of them cached,"
    spent = f"in {part.seconds[i] * 1e6:,.4g} µs"
    return f"{size} {spent} are {rate:,.4g} GB/s; it has {part.bandwidth[i] / 1e9:,.4g}"


def _groups(parts: list[AuditPart]) -> None:
    """Flag the rest of a library's rows of a type if many of them are above the peak."""
    over = {i: part.over_peak() for i, part in enumerate(parts)}
    group = {i: part.group("source", "device", "dtype", "backend") for i, part in enumerate(parts)}
    if not parts:
        return
    together = pd.DataFrame(
        {"group": np.concatenate(list(group.values())), "over": np.concatenate(list(over.values()))}
    )
    counts = together.groupby("group")["over"].agg(["sum", "mean"])
    many = (counts["sum"] >= GROUP_LEAST) & (counts["mean"] >= GROUP_SHARE)
    share = counts["mean"].where(many, 0.0).to_dict()
    for i, part in enumerate(parts):
        own = np.array([share[name] for name in group[i]])
        at = np.flatnonzero((own > 0) & ~over[i])
        text = [f"{own[j]:.0%} of the rows of {group[i][j]} are above the peak" for j in at]
        part.flag("group above the peak", at, own[at], text)


def _units(part: AuditPart) -> None:
    """Flag groups with times a thousand times off the physical estimate."""
    off = pd.Series(part.log_ratio() * np.log10(2.0))
    group = part.group("source", "device", "origin")
    middle = off.groupby(group).transform("median").to_numpy()
    many = off.groupby(group).transform("count").to_numpy() >= LINE_LEAST
    far = many & (np.abs(middle) > np.log10(FAR))
    thousands = np.abs(middle - 3 * np.round(middle / 3)) <= np.log10(UNIT_WITHIN)
    for wrong, reason in ((thousands, "another unit"), (~thousands, "far from physics")):
        at = np.flatnonzero(far & wrong)
        factor = 10 ** middle[at]
        named = zip(group[at], factor, strict=True)
        text = [f"times of {g} are {f:,.3g} of the physical estimate (median)" for g, f in named]
        part.flag(reason, at, factor, text)


def _lines(part: AuditPart) -> None:
    """Compare rows that differ only in one size, and rows that are equal."""
    whole = _summed(part.identity)
    valid = (part.seconds > 0) & ~part.slow
    _twins(part, whole, valid)
    for name in GROWING:
        if name not in part.identity or name not in part.rows:
            continue
        line = whole - part.identity[name]
        size = pd.to_numeric(part.rows[name], errors="coerce").to_numpy(np.float64)
        order = np.lexsort((size, line))
        order = order[valid[order]]
        first, second = order[:-1], order[1:]
        pair = (line[first] == line[second]) & (size[first] < size[second])
        slow = pair & (part.seconds[first] > MONOTONE * part.seconds[second])
        _non_monotone(part, name, first[slow], second[slow])


def _non_monotone(part: AuditPart, name: str, small: np.ndarray, large: np.ndarray) -> None:
    if not len(small):
        return
    # Flag the row that is further from the physical estimate.
    at = small
    if part.key != COLLECTIVE:
        off = part.log_ratio()
        middle = float(np.nanmedian(off))
        at = np.where(np.abs(off[small] - middle) >= np.abs(off[large] - middle), small, large)
    ratio = part.seconds[small] / part.seconds[large]
    sizes = part.rows[name].to_numpy()
    text = [
        f"{name}={sizes[i]:g} takes {part.seconds[i] * 1e6:,.4g} µs, "
        f"{name}={sizes[j]:g} {part.seconds[j] * 1e6:,.4g} (row {part.rows['row'].iloc[j]})"
        for i, j in zip(small, large, strict=True)
    ]
    part.flag("slower than a larger one", at, ratio, text)


def _twins(part: AuditPart, whole: np.ndarray, valid: np.ndarray) -> None:
    times = pd.Series(np.where(valid, part.seconds, np.nan))
    low, high = (times.groupby(whole).transform(f).to_numpy() for f in ("min", "max"))
    at = np.flatnonzero(valid & (high > TWINS * low))
    text = [f"equal rows take {low[i] * 1e6:,.4g} to {high[i] * 1e6:,.4g} µs" for i in at]
    part.flag("equal rows disagree", at, (high / low)[at], text)


def _copies(part: AuditPart) -> None:
    """Flag lines along a size with exactly the same times as another line."""
    whole = _summed(part.identity)
    # A norm timed once for all degrees of parallelism is not a copy: lines must also differ in
    # physical parameters.
    physical = _summed({n: v for n, v in part.identity.items() if not n.startswith("is_")})
    for name in GROWING:
        if name not in part.identity or name not in part.rows:
            continue
        size = pd.to_numeric(part.rows[name], errors="coerce").to_numpy(np.float64)
        line = whole - part.identity[name]
        # A digest of the line, independent of order.
        mixed = _mix(size.view(np.uint64) ^ _mix(part.seconds.view(np.uint64)))
        frame = pd.DataFrame({"line": line, "mixed": mixed, "s": part.seconds})
        frame["what"] = physical - part.identity[name]
        own = frame.groupby("line").agg(
            total=("mixed", "sum"),
            n=("mixed", "size"),
            different=("s", "nunique"),
            what=("what", "first"),
        )
        # A line with few distinct times is due to a coarse clock, not a copy.
        own = own[(own["n"] >= LINE_LEAST) & (own["different"] >= 0.9 * own["n"])]
        copied = own[own.groupby("total")["what"].transform("nunique") > 1]
        at = np.flatnonzero(frame["line"].isin(copied.index).to_numpy())
        counts = copied.groupby("total")["n"].transform("size")
        times = frame["line"].iloc[at].map(counts).to_numpy(np.float64)
        text = [f"{int(n)} lines along {name} have these times, digit for digit" for n in times]
        part.flag("times of other rows", at, times, text)


def _files(part: AuditPart) -> None:
    """Flag files with rows that are much slower than in another file of the same kernel."""
    if "origin" not in part.rows:
        return
    off = part.log_ratio()
    # For layers and blocks, a file is a model with its own kernels: only equal rows compare.
    equal = part.key not in FAMILIES
    told = ("source", "device", "op", "dtype", "backend", "kernel", "is_version")
    group = _summed(part.identity) if equal else part.group(*told)
    origin = part.rows["origin"].astype(str).to_numpy(object)
    frame = pd.DataFrame({"group": group, "origin": origin, "off": off})
    files = frame.groupby(["group", "origin"])["off"].agg(["median", "count"]).reset_index()
    if not equal:
        files = files[files["count"] >= SESSION_LEAST]
    excess = files["median"] - files.groupby("group")["median"].transform("min")
    files = files.assign(excess=excess)
    # For equal rows, a file is judged by the median over rows that another file has, too.
    many = files.groupby("group")["origin"].transform("size") > 1
    names = ["origin"] if equal else ["group", "origin"]
    slow = files[many].groupby(names)["excess"].agg(["median", "size"])
    slow = slow[slow["median"] > np.log2(SESSION)]
    if equal:
        slow = slow[slow["size"] >= SESSION_LEAST]
    keys = origin if equal else list(zip(group, origin, strict=True))
    factor = {key: 2**value for key, value in slow["median"].items()}
    at = np.array([i for i, key in enumerate(keys) if key in factor], int)
    ratio = np.array([factor[keys[i]] for i in at])
    beside = "of equal rows" if equal else "of similar rows, by physics,"
    text = [
        f"rows of {origin[i]} take {r:.2f} times those {beside} in another file"
        for i, r in zip(at, ratio, strict=True)
    ]
    part.slow[at] = True
    part.flag("slow file", at, ratio, text)


_CHECKS: tuple[Callable[[AuditPart], None], ...] = (
    _no_time,
    _bounds,
    _units,
    _files,
    _lines,
    _copies,
)


def _summed(identity: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return a digest of all columns; subtracting a column's digest removes the column."""
    total = np.zeros(len(next(iter(identity.values()))), np.uint64)
    for values in identity.values():
        total += values
    return total


def _mix(values: np.ndarray) -> np.ndarray:
    """Scatter 64-bit integers (splitmix64, Steele et al. 2014)."""
    mixed = np.asarray(values, np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(31)
    return np.asarray(mixed * np.uint64(0xBF58476D1CE4E5B9))
