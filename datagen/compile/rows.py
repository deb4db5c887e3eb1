"""Rows of a dataset from the cycles that the TPU's compiler estimates for its kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from ...common.errors import DeviceError
from ...features.devices.device import DeviceSpec
from ...features.ir.hlo_reader import parse_hlo
from ...features.kernels.extract import extract_kernels
from .merge import MergedModule
from .plan import CompileItem

#: Source of such rows: estimates of a compiler, not measurements.
SOURCE = "compiler:libtpu"


def estimated_rows(
    hlo: str, items: Sequence[CompileItem], device: DeviceSpec, merged: MergedModule | None = None
) -> list[dict[str, object]]:
    """A row for each kernel with an estimate; ``latency = cycles / clock``.

    Kernels without one (collectives, asynchronous copies, select-and-scatter, some fusions) get no
    row.

    Args:
        hlo: Optimised module.
        items: The programs in it, one if it is not merged.
        device: Device whose clock turns cycles into time.
        merged: Merged module, which assigns ops to programs; None for a single program.

    Raises:
        DeviceError: The device has no clock.
    """
    if not device.clock_hz:
        raise DeviceError("key 'boost_mhz' is missing to turn cycles into time", where=device.name)
    kernels, _ = extract_kernels(parse_hlo(hlo))
    owners = merged.owners(kernels) if merged else [0] * len(kernels)
    rows: dict[tuple[str, int], dict[str, object]] = {}
    for kernel, owner in zip(kernels, owners, strict=True):
        if kernel.cycles <= 0 or not kernel.takes_time or owner < 0:
            continue
        item = items[owner]
        # The estimate is deterministic: all quantiles are equal, and equal kernels of a program
        # are one row.
        latency_us = kernel.cycles / device.clock_hz * 1e6
        rows[kernel.hash, owner] = {
            "kernel_hash": kernel.hash,
            "kernel_ir": kernel.ir,
            "level": "op" if item.family.startswith("op:") else "kernel",
            "kind": kernel.kind,
            "dtype": kernel.dtype,
            "latency_us_p10": latency_us,
            "latency_us_p50": latency_us,
            "latency_us_p90": latency_us,
            "repeats": 1,
            "flops": kernel.flops,
            "bytes": kernel.bytes,
            "source": SOURCE,
            "family": item.family,
            "program": item.key,
        }
    return list(rows.values())


def without_doubles(frame: pd.DataFrame) -> pd.DataFrame:
    """Merge rows to one for each kernel and device, with the quantiles of its estimates.

    ``repeats`` counts how often a kernel was met. The row belongs to a model's family if the kernel
    is part of one, so that splits by family hold out whole models.

    Args:
        frame: Rows with the dataset's columns.
    """
    generated = frame["family"].eq("random") | frame["family"].str.startswith("op:")
    order = np.argsort(generated.to_numpy(), kind="stable")
    frame = frame.iloc[order]
    groups = frame.groupby(["device", "kernel_hash"], sort=False)
    first = groups.head(1).set_index(["device", "kernel_hash"])
    # Each column's own quantile: rows that were merged before keep their spread.
    for column, q in (("latency_us_p10", 0.1), ("latency_us_p50", 0.5), ("latency_us_p90", 0.9)):
        first[column] = groups[column].quantile(q)
    first["repeats"] = groups["repeats"].sum()
    return first.reset_index()[list(frame.columns)]
