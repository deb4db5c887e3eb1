"""Why the best plan of a sweep is best: the cost of changing each of its settings alone."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

#: Settings to compare, with their names; ``data`` is derived from columns of the plan.
SETTINGS = {
    "tp": "tensor parallelism",
    "pp": "pipeline stages",
    "cp": "context parallelism",
    "ep": "expert parallelism",
    "data": "data parallelism",
    "recompute": "recomputation",
    "schedule": "schedule",
    "microbatches": "micro-batches",
    "offload": "offloading",
    "batch": "batch",
    "cluster": "cluster",
}
#: Settings that determine how many ranks share the batch, and so the micro-batches of a replica.
_SHARING = ("tp", "pp", "cp", "data", "batch", "cluster")
#: Parts of a step, with their names.
_PARTS = {
    "compute_us": "computation",
    "exposed_communication_us": "exposed communication",
    "bubble_us": "bubble",
    "host_us": "host",
}


def reasons(frame: pd.DataFrame) -> list[str]:
    """Return one sentence per setting with alternatives, the costliest first.

    Each compares the best plan with one that differs only in that setting; if none was evaluated,
    with one that differs in as few settings as possible, which are named. No plan is used twice.

    Args:
        frame: Results of a sweep.

    Returns:
        Sentences, none if no plan fits. Times are per sequence, so that batches compare.
    """
    rows = _per_sequence(frame)
    fitting = rows[rows["fits"]]
    if fitting.empty:
        return []
    best = fitting.sort_values("own_us").iloc[0]
    known = [name for name in SETTINGS if name in rows]
    changes = [_changes(best, row, known) for _, row in rows.iterrows()]
    rows = rows.assign(changes=pd.Series(changes, rows.index, dtype=object))
    effects: list[tuple[float, str]] = []
    named: set[object] = set()
    # Settings with single changes first, so that their plans are not used for another setting.
    settings = sorted(known, key=lambda s: _fewest(rows, s))
    for setting in settings:
        others = rows[[setting in own for own in rows["changes"]]]
        others = others[~others.index.isin(named)]
        if others.empty:
            continue
        others = others[others["changes"].map(len) == others["changes"].map(len).min()]
        # The fastest alternative; if none fits, the one that needs least memory.
        by = "own_us" if others["fits"].any() else "memory_bytes_per_device"
        other = others.sort_values(["fits", by], ascending=[False, True]).iloc[0]
        named.add(other.name)
        effects.append(_reason(setting, best, other))
    return [text for _, text in sorted(effects, key=lambda item: -item[0])]


def runner_up(frame: pd.DataFrame) -> list[str]:
    """Return one sentence on what the second-fastest plan loses to the fastest.

    Args:
        frame: Results of a sweep.

    Returns:
        Empty if fewer than two plans fit.
    """
    fitting = _per_sequence(frame[frame["fits"]]).sort_values("own_us")
    if len(fitting) < 2:
        return []
    best, second = fitting.iloc[0], fitting.iloc[1]
    share = float(second["own_us"] / best["own_us"] - 1.0)
    told = _told(best, second) or "no part differs by 0.1%"
    return [f"second, {second['plan']}: {share:.1%} slower than {best['plan']} ({told})"]


def _changes(best: pd.Series, row: pd.Series, known: Sequence[str]) -> tuple[str, ...]:
    """Return the settings that differ, without those that depend on another change."""
    changes = [name for name in known if row[name] != best[name]]
    if any(name in _SHARING for name in changes):
        changes = [name for name in changes if name != "microbatches"]
    return tuple(changes)


def _fewest(rows: pd.DataFrame, setting: str) -> int:
    """Return the fewest changes of any plan that changes a setting."""
    return min((len(c) for c in rows["changes"] if setting in c), default=0)


def _told(best: pd.Series, other: pd.Series) -> str:
    """Return the change of each part of the step, as shares of the best step."""
    changes = {
        what: (other[part] / other["batch"] - best[part] / best["batch"]) / best["own_us"]
        for part, what in _PARTS.items()
    }
    return ", ".join(
        f"{what} {change:+.1%}" for what, change in changes.items() if abs(change) >= 0.001
    )


def _per_sequence(frame: pd.DataFrame) -> pd.DataFrame:
    rows = frame.assign(own_us=frame["step_us"] / frame["batch"])
    if {"fsdp", "zero"} <= set(rows):
        rows["data"] = [
            _data(fsdp, zero) for fsdp, zero in zip(rows["fsdp"], rows["zero"], strict=True)
        ]
    return rows


def _data(fsdp: int, zero: int) -> str:
    """Return what is sharded over data-parallel ranks, as a value of the axis ``data``.

    In a pipeline, ``fsdp`` alone shards like zero 1; the axis then means zero 3.
    """
    if fsdp > 1:
        return "fsdp,zero=3" if zero == 3 else "fsdp"
    return f"zero{zero}" if zero else "dp"


def _reason(setting: str, best: pd.Series, other: pd.Series) -> tuple[float, str]:
    kept = f"{SETTINGS[setting]} {best[setting]}"
    further = [f"{name}={other[name]}" for name in other["changes"] if name != setting]
    value = " and ".join([str(other[setting]), *further])
    if not other["fits"]:
        need = f"{other['memory_bytes_per_device'] / 2**30:.1f} GiB"
        # Folders written before host memory was counted have no such column.
        host = other.get("host_memory_bytes_per_box", 0.0)
        need += f" and {host / 2**30:.1f} GiB of host memory per node" if host > 0.0 else ""
        # First in the order: without a fitting alternative there is no choice.
        return float("inf"), f"{kept}: {value} does not fit, it needs {need}"
    share = float(other["own_us"] / best["own_us"] - 1.0)
    told = _told(best, other)
    # Half of the last printed digit.
    slower = "as fast" if share < 0.0005 else f"{share:.1%} slower"
    why = f" ({told} of the step)" if told and share >= 0.0005 else ""
    memory = (other["memory_bytes_per_device"] - best["memory_bytes_per_device"]) / 2**30
    return share, f"{kept}: {value} is {slower}{why}, memory {memory:+.1f} GiB"
