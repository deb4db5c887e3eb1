"""Why the best plan of a sweep is best: what the best plan with another setting loses."""

from __future__ import annotations

import pandas as pd

#: Settings that are compared, by what they are called.
SETTINGS = {
    "tp": "tensor parallelism",
    "pp": "pipeline stages",
    "cp": "context parallelism",
    "ep": "expert parallelism",
    "fsdp": "FSDP",
    "zero": "ZeRO stage",
    "recompute": "recomputation",
    "schedule": "schedule",
    "microbatches": "micro-batches",
    "offload": "offloading",
    "batch": "batch",
    "cluster": "cluster",
}
#: Parts of a step.
_PARTS = {
    "compute_us": "computation",
    "exposed_communication_us": "exposed communication",
    "bubble_us": "bubble",
    "host_us": "host",
}


def reasons(frame: pd.DataFrame) -> list[str]:
    """Write one sentence for each setting that had an alternative, the costliest first.

    Args:
        frame: Results of a sweep.

    Returns:
        Empty if no plan fits. Times are compared for a sequence, so that batches compare.
    """
    fitting = frame[frame["fits"]]
    if fitting.empty:
        return []
    best = _per_sequence(fitting).sort_values("own_us").iloc[0]
    effects: list[tuple[float, str]] = []
    for setting, name in SETTINGS.items():
        if setting not in frame:
            continue
        # The best of the others may differ in further settings as well: each side is compared at
        # its best, which is what choosing another value would give.
        others = _per_sequence(frame[frame[setting] != best[setting]])
        if len(others):
            effects.append(_reason(setting, name, best, others))
    return [text for _, text in sorted(effects, key=lambda item: -item[0])]


def runner_up(frame: pd.DataFrame) -> list[str]:
    """Write one sentence on what the second-fastest plan that fits loses to the fastest.

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


def _told(best: pd.Series, other: pd.Series) -> str:
    """By how much each part of another plan's step is longer, in shares of the best step."""
    changes = {
        what: (other[part] / other["batch"] - best[part] / best["batch"]) / best["own_us"]
        for part, what in _PARTS.items()
    }
    return ", ".join(
        f"{what} {change:+.1%}" for what, change in changes.items() if abs(change) >= 0.001
    )


def _per_sequence(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.assign(own_us=frame["step_us"] / frame["batch"])


def _reason(setting: str, name: str, best: pd.Series, others: pd.DataFrame) -> tuple[float, str]:
    kept = f"{name} {best[setting]}"
    fitting = others[others["fits"]].sort_values("own_us")
    if fitting.empty:
        least = others.sort_values("memory_bytes_per_device").iloc[0]
        need = least["memory_bytes_per_device"] / 2**30
        # Sorted first: without an alternative the setting is not a choice.
        return float("inf"), f"{kept}: no other value fits, the least needs {need:.1f} GiB"
    other = fitting.iloc[0]
    share = float(other["own_us"] / best["own_us"] - 1.0)
    told = _told(best, other)
    # Half of the last printed digit of a per cent.
    slower = "as fast" if share < 0.0005 else f"{share:.1%} slower"
    why = f" ({told} of the step)" if told and share >= 0.0005 else ""
    memory = (other["memory_bytes_per_device"] - best["memory_bytes_per_device"]) / 2**30
    return share, (
        f"{kept}: the best with {other[setting]} is {slower}{why}, memory {memory:+.1f} GiB"
    )
