"""Tables of predictions beside measurements, for kernels and for programs."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ..cost_model import CostModel
from ..training_data.crossfit import predict_entries
from ..training_data.prepared import PreparedDataset, ProgramSample
from ..training_data.splits import is_family


def prediction_frame(model: CostModel, data: PreparedDataset, rows: np.ndarray) -> pd.DataFrame:
    """Predictions beside measurements, one row for each kernel row among ``rows``."""
    own = data.kernel_rows(rows)
    prediction = predict_entries(model.estimator, data, data.entry[own])
    part = data.frame.iloc[own].reset_index(drop=True)
    frame = part[["sample_id", "kernel_hash", "kind", "device", "level", "family", "program"]]
    return frame.assign(
        measured_us=part["latency_us_p50"].to_numpy(np.float64),
        predicted_us=prediction.latency * 1e6,
        lo_us=prediction.lo * 1e6,
        hi_us=prediction.hi * 1e6,
        bound=prediction.bound,
        source=prediction.source,
        in_domain=prediction.in_domain,
    )


def program_frame(model: CostModel, data: PreparedDataset, rows: np.ndarray) -> pd.DataFrame:
    """Predictions beside measurements, one row for each program row among ``rows``."""
    records = [_program_record(model, data, p) for p in data.programs_among(rows)]
    return pd.DataFrame(records)


def _program_record(
    model: CostModel, data: PreparedDataset, sample: ProgramSample
) -> dict[str, object]:
    alone = predict_entries(model.estimator, data, sample.entries)
    base_s = data.table.base_s[sample.entries]
    kernels, wall = model.predict_in_program(sample.lowered, sample.device, alone, base_s)
    counts = np.array([k.multiplicity for k in sample.lowered.kernels])
    time = kernels.latency * counts
    return {
        "program": sample.name,
        "family": sample.family,
        "set": "zoo" if is_family(sample.family) else "generated",
        "device": sample.device.name,
        "kind": "program",
        "measured_us": sample.wall_s * 1e6,
        "predicted_us": wall.latency * 1e6,
        "lo_us": wall.lo * 1e6,
        "hi_us": wall.hi * 1e6,
        "sum_us": float(time.sum()) * 1e6,
        "labels_us": data.label_sum_s(sample) * 1e6,
        "kernels": len(time),
        # The guard is for programs without any time.
        "in_domain_share": float(time[kernels.in_domain].sum() / max(time.sum(), 1e-12)),
    }


def _total(table: pd.DataFrame) -> dict[str, float]:
    row = table[table["group"] == "all"].iloc[0]
    return {str(k): float(v) for k, v in row.items() if k != "group"}
