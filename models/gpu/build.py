"""The model of XLA's GPU kernels, made from published operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from ...features.dataset import Dataset
from ...features.device import DeviceSpec
from ..cost_model import CostModel
from ..ops.rows import rows_of_dataset
from ..program_model import ProgramModel
from .constants import Constants
from .estimator import GpuEstimator
from .traffic_fit import FAMILIES, MemoryFit, fit_memory

#: Least correlation of kernel errors in a program: kernels of a route share what the route gets
#: wrong, whatever the passes alone say.
LEAST_CORRELATION = 0.5


def pass_rows(dataset: Dataset) -> tuple[pd.DataFrame, str]:
    """Rows of a published dataset that pass over memory, and the digest of their samples.

    Raises:
        DatasetError: There is none.
    """
    names = sorted({family.split("/")[1] for family in FAMILIES})
    mark = '"family":"(?:' + "|".join(names) + ')"'
    some = dataset.frame["kernel_ir"].str.contains(mark, regex=True)
    part = dataset.select(some.to_numpy())
    return rows_of_dataset(part), part.hash


def build_gpu_model(
    rows: pd.DataFrame, devices: Mapping[str, DeviceSpec], info: Mapping[str, Any], seed: int = 0
) -> tuple[CostModel, MemoryFit]:
    """Fit the constants of passes and put the model together.

    Args:
        rows: As :func:`pass_rows` gives them.
        devices: Descriptions by name.
        info: What else to keep in the manifest.
        seed: Of the draw of rows.

    Raises:
        DatasetError: No row is a pass over memory.
    """
    fit = fit_memory(rows, devices, seed)
    together = max(fit.correlation, LEAST_CORRELATION)
    constants = Constants(fit.params, fit.known, fit.left_out, together)
    estimator = GpuEstimator(constants=constants)
    program_model = ProgramModel()
    program_model.overheads.update(estimator.overheads)
    metrics = {f"passes, {name} left out": errors for name, errors in fit.errors.items()}
    about = {**info, "metrics": metrics, "pass_correlation": fit.correlation, "seed": seed}
    return CostModel(estimator, program_model, {}, about), fit
