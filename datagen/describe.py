"""Summarises a dataset and the noise of its labels: tables and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ..common.errors import OpcastError
from ..common.types import JsonObject
from .profile.plan import REPLICATE

if TYPE_CHECKING:
    from ..features.dataset import Dataset


def describe(dataset: Dataset) -> dict[str, object]:
    """Counts, ranges and noise floor of a dataset, as plain data.

    Returns:
        ``samples``, ``programs``, ``distinct_kernels``; counts in ``by_level``, ``by_kind``,
        ``by_family``, ``by_dtype``, ``by_device``; ``latency_us`` (quantiles by level); ``noise``
        (see :func:`noise_floor`); ``runs`` (one summary each).
    """
    frame = dataset.frame
    kernels = frame[frame["level"] != "program"]
    operators = frame["level"] == "operator"
    names = frame["family"].str.removeprefix("op:")
    # Single ops have a family per opcode; one line for all of them keeps the table short. Library
    # operators have the family of their model: ``graph/context_attention``.
    single = frame["family"].str.startswith("op:") & ~operators
    families = names.where(operators, frame["family"]).mask(single, "op")
    kinds = names.str.split("/").str[-1].where(operators, frame["kind"])
    return {
        "samples": len(frame),
        "programs": int(frame["program"].str.split(REPLICATE).str[0].nunique()),
        "distinct_kernels": int(kernels["kernel_hash"].nunique()),
        "by_level": _counts(frame["level"]),
        "by_kind": _counts(kinds),
        "by_family": _counts(families),
        "by_dtype": _counts(frame["dtype"]),
        "by_device": _counts(frame["device"]),
        "latency_us": {str(level): _range(part) for level, part in frame.groupby("level")},
        "noise": noise_floor(frame),
        "runs": {run_id: _run_summary(record) for run_id, record in dataset.runs.items()},
    }


def _counts(column: pd.Series) -> dict[str, int]:
    return {str(k): int(n) for k, n in column.value_counts().items()}


def _range(frame: pd.DataFrame) -> dict[str, float]:
    values = frame["latency_us_p50"].to_numpy(np.float64)
    names = ("min", "p10", "p50", "p90", "max")
    cuts = np.quantile(values, [0, 0.1, 0.5, 0.9, 1])
    return {name: float(cut) for name, cut in zip(names, cuts, strict=True)}


def noise_floor(frame: pd.DataFrame) -> dict[str, object]:
    """Differences between repeated measurements, a lower bound on any model's mean error.

    Returns:
        For levels ``kernels`` and ``programs``: ``replicates``, pairs of the same program measured
        in two processes; ``same_kernel``, neighbouring pairs of the same kernel in different
        programs; ``within``, the spread (p90 - p10) / p50 of one measurement. Pairs are summarised
        as ``pairs``, ``median_ape`` and ``mean_ape`` (absolute difference over the pair's mean).
    """
    whole = frame["level"] == "program"
    return {"kernels": _noise(frame[~whole]), "programs": _noise(frame[whole])}


def _noise(frame: pd.DataFrame) -> dict[str, object]:
    base = frame["program"].str.split(REPLICATE).str[0]
    first = frame.assign(base=base)
    replicates = _pairs(first, ["kernel_hash", "device", "base"])
    # Replicates are left out here: they repeat the program, not only the kernel.
    singles = first[first["program"] == first["base"]]
    same = _pairs(singles.drop_duplicates(["kernel_hash", "program"]), ["kernel_hash", "device"])
    spread = (frame["latency_us_p90"] - frame["latency_us_p10"]) / frame["latency_us_p50"]
    return {
        "replicates": _differences(replicates),
        "same_kernel": _differences(same),
        "within": {"median": float(spread.median()), "mean": float(spread.mean())}
        if len(spread)
        else {},
    }


def _pairs(frame: pd.DataFrame, by: list[str]) -> np.ndarray:
    """Labels of neighbouring rows within each group, shape ``(n_pairs, 2)``."""
    pairs = [
        np.stack([values[:-1], values[1:]], axis=1)
        for _, group in frame.groupby(by, sort=False)["latency_us_p50"]
        if len(values := group.to_numpy(np.float64)) > 1
    ]
    return np.concatenate(pairs) if pairs else np.zeros((0, 2))


def _differences(pairs: np.ndarray) -> dict[str, float]:
    if not len(pairs):
        return {"pairs": 0}
    # Relative to the mean, because neither measurement is the reference.
    ape = np.abs(pairs[:, 0] - pairs[:, 1]) / pairs.mean(axis=1)
    return {"pairs": len(pairs), "median_ape": float(np.median(ape)), "mean_ape": float(ape.mean())}


def _run_summary(record: JsonObject) -> JsonObject:
    keys = ("date", "state", "elapsed_s", "counts", "noise_floor")
    return {"device": record["device"]["name"]} | {k: record[k] for k in keys if k in record}


def tables(description: JsonObject) -> dict[str, pd.DataFrame]:
    """The parts of a description as tables, for printing."""
    counted = ("by_level", "by_kind", "by_family", "by_dtype", "by_device")
    tables = {
        name: pd.DataFrame(
            {
                name.removeprefix("by_"): description[name].keys(),
                "samples": description[name].values(),
            }
        )
        for name in counted
    }
    latency = pd.DataFrame.from_dict(description["latency_us"], orient="index")
    tables["latency_us"] = latency.rename_axis("level").reset_index()
    tables["noise"] = pd.DataFrame(
        [
            {"level": level, "what": what, **values}
            for level, parts in description["noise"].items()
            for what, values in parts.items()
        ]
    )
    return tables


def plot(dataset: Dataset, path: Path | str) -> Path:
    """Draw histograms of the latencies by level and by kind into an image file.

    Raises:
        OpcastError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise OpcastError(
            "a plot needs matplotlib", hint="pip install 'matplotlib>=3.8,<4'"
        ) from None
    frame = dataset.frame
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    kernels = frame[frame["level"] != "program"]
    panels = ((frame, "level", "latency by level"), (kernels, "kind", "latency of kernels by kind"))
    for position, (part, column, title) in enumerate(panels, start=1):
        axes = figure.add_subplot(1, 2, position)
        # A nanosecond is below any timer's resolution; the clip only keeps the logarithm finite.
        logs = np.log10(part["latency_us_p50"].clip(lower=1e-3).to_numpy(np.float64))
        edges = np.logspace(*_log_range(logs), 50)
        # Largest group at the bottom of the stack.
        groups = sorted(part.groupby(column), key=lambda g: -len(g[1]))
        axes.hist(
            [group["latency_us_p50"].to_numpy() for _, group in groups],
            bins=list(edges),
            stacked=True,
            label=[f"{name} ({len(group)})" for name, group in groups],
        )
        axes.set(xscale="log", xlabel="median latency (µs)", ylabel="samples", title=title)
        axes.legend(fontsize=8)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=120)
    return target


def _log_range(logs: np.ndarray) -> tuple[float, float]:
    if not len(logs):
        return 0.0, 1.0
    return float(logs.min()) - 0.05, float(logs.max()) + 0.05
