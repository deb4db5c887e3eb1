"""End-to-end time of published op graphs from the latencies of their operations.

    step = sum over kernels of count · (latency - launch + kernel floor) + exposed communication

A published operation was timed alone, between two events around one call, so its latency includes
the wait for the host's launch: a fixed time on top of the kernel's own. In a run of a whole model
the host launches ahead while the device works, so this time is paid once, not per kernel. It is
estimated from the same latencies, as that of an operation with almost no work.

Forward, backward and accumulation add up (``inf`` is the forward pass), and so do tensor-parallel
all-reduces. Gradient all-reduces of data parallelism overlap with the backward pass: the time
beyond it is exposed, at least the last bucket. A pipeline takes ``(m + p - 1) / p`` of the pass of
one micro-batch, plus its transfers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from ...common.errors import DatasetError
from ...common.interval import combined_spread
from ..operator.prices import kernel_us
from .graph_program import GraphProgram, graph_programs
from .opgraph import COLLECTIVES

#: Gradient bucket size in bytes: the default ``bucket_cap_mb`` of PyTorch's
#: DistributedDataParallel (Li et al., VLDB 2020). The last bucket is reduced after the end of the
#: backward pass, so nothing hides it.
BUCKET_BYTES = 25 * 2**20
#: Correlation between the errors of one graph's operations: the smallest at which 90 % intervals
#: cover 90 % of NeuSight's 40 measured programs (Lee et al., ASPLOS 2025), each chip predicted by
#: models of the others. Operations without data for a chip have wide intervals already, which cover
#: their common error.
RHO = 0.1
#: Relative half-width of the difference between a run of a whole model and calls timed one by one
#: on the same card: clocks and temperature. For cards with operation data, the 90 % intervals cover
#: 34 of the 40 programs; the others ran on P4 and A100 80 GB, up to 1.4 times slower than their
#: calls.
RUN_ERROR = 0.12
#: Columns that the callbacks return, in microseconds: estimate and bounds of its 90 % interval.
LATENCY_COLUMNS = ("latency_us", "lo_us", "hi_us")
#: Kinds of operations that are matrix products.
PRODUCTS = ("Linear", "BMM")
_NEEDED = ("desc", "device", "model", "mode", "n_layer")

Latency = Callable[[pd.DataFrame], pd.DataFrame]


def compose(
    labels: pd.DataFrame,
    graphs: pd.DataFrame,
    op_latency: Latency,
    collective_latency: Latency,
) -> pd.DataFrame:
    """Predict the end-to-end time of every label.

    Args:
        labels: ``desc`` (name of the graph), ``device``, ``model``, ``mode`` (``inf`` or
            ``train``), ``n_layer`` (0 or NaN if not given), optionally ``variant`` and ``dtype``
            (default ``fp32``).
        graphs: Nodes of all graphs in order: ``desc``, ``Name``, ``OpName``, ``FwOps``, ``BwOps``,
            ``AccOps``, ``InputShapes`` and ``OutputShape``.
        op_latency: Given the unique operations of all labels (``device`` and the columns of the
            published op schema), returns ``latency_us``, ``lo_us`` and ``hi_us`` in their order.
        collective_latency: The same for ``device``, ``op``, ``bytes``, ``world_size``, ``dtype``.

    Returns:
        With the index of ``labels``: ``latency_ms``, ``lo_ms`` and ``hi_ms`` (90 %), and the parts
        ``fw_ms``, ``bw_ms`` (with accumulation) and ``communication_ms`` (exposed).

    Raises:
        DatasetError: A column or a graph is missing, a list cannot be read, or a callback does not
            return positive latencies for every row.
    """
    missing = [c for c in _NEEDED if c not in labels]
    if missing:
        raise DatasetError(f"labels lack the columns {missing}", hint=f"needed: {list(_NEEDED)}")
    programs = graph_programs(labels, graphs)
    # One call for all labels: estimators have a fixed cost per call, and programs share most of
    # their operations.
    op_times = _ask(op_latency, programs.operations, "op_latency")
    link_times = _ask(collective_latency, programs.collectives, "collective_latency")
    results = [_step(program, op_times, link_times) for program in programs.programs]
    return pd.DataFrame(results, index=labels.index)


def _ask(latency: Latency, table: pd.DataFrame, who: str) -> np.ndarray:
    if table.empty:
        return np.zeros((0, 3))
    answer = latency(table)
    lacking = [c for c in LATENCY_COLUMNS if c not in answer]
    if lacking or len(answer) != len(table):
        raise DatasetError(f"{who} must return {LATENCY_COLUMNS} for every row", where=who)
    times = answer[list(LATENCY_COLUMNS)].to_numpy(float)
    if not (np.isfinite(times) & (times > 0)).all():
        row = table.iloc[int(np.flatnonzero(~(np.isfinite(times) & (times > 0)).all(axis=1))[0])]
        raise DatasetError(
            f"{who} returned a latency that is not positive", where=str(row.dropna().to_dict())
        )
    return times


def _step(program: GraphProgram, op_times: np.ndarray, link_times: np.ndarray) -> dict[str, float]:
    probes = op_times[program.probes, 0]
    share = program.variant.pipeline_share
    parts = {"fw": 0.0, "bw": 0.0, "acc": 0.0}
    spread: list[tuple[float, float]] = []
    for term in program.terms:
        if term.kind in COLLECTIVES:
            continue
        time, low, high = op_times[term.row]
        # A JOIN is traffic of another kernel (an epilogue), so it has no launch of its own.
        launch = float(probes.min() if term.kind in PRODUCTS else probes[0])
        own = kernel_us(time, launch, joins=term.kind == "JOIN")
        # A pipeline's share scales all compute: bubbles are part of the ratio (m + p - 1) / p.
        weight = term.times * share * own
        parts[term.phase] += weight
        # The interval is relative to the latency measured alone; the time left after subtracting
        # the launch is assumed to have the same relative error.
        spread.append((weight * (1.0 - low / time), weight * (high / time - 1.0)))
    exposed, ends = _communication(program, link_times, parts["bw"])
    total = sum(parts.values()) + exposed
    # The reshape keeps two columns if a graph has no terms.
    down, up = combined_spread(np.array(spread + ends).reshape(-1, 2), RHO)
    own_error = RUN_ERROR * total
    figures = {
        "latency_ms": total,
        # Guard against lower bounds near or below zero; not fitted.
        "lo_ms": max(total - float(np.hypot(down, own_error)), 0.05 * total),
        "hi_ms": total + float(np.hypot(up, own_error)),
        "fw_ms": parts["fw"],
        # Autograd accumulates gradients during the backward pass, so both are one phase of a label.
        "bw_ms": parts["bw"] + parts["acc"],
        "communication_ms": exposed,
    }
    return {name: value / 1e3 for name, value in figures.items()}


def _communication(
    program: GraphProgram, link_times: np.ndarray, backward: float
) -> tuple[float, list[tuple[float, float]]]:
    """Return exposed communication in microseconds, and half-widths of its parts down and up."""
    total, ends = 0.0, []
    hidden, bucket = np.zeros(3), 0.0
    for term in program.terms:
        if term.kind not in COLLECTIVES:
            continue
        # Transfers of micro-batches overlap; exposed are those in sequence, while the pipeline
        # fills and drains.
        times = program.variant.pipeline_hops if term.kind == "SENDRECV" else term.times
        if term.kind == "ALLREDUCE_ASYNC":
            hidden += times * link_times[term.row]
            bucket += times * term.size
        else:
            time, low, high = times * link_times[term.row]
            total += time
            ends.append((time - low, high - time))
    if bucket:
        # The last bucket's share of the time is its share of the bytes. Reductions start with the
        # first full bucket, so they can hide behind nearly all of the pass.
        last = hidden * min(1.0, BUCKET_BYTES / bucket)
        time, low, high = np.maximum(hidden - backward, last)
        total += time
        ends.append((time - low, high - time))
    return total, ends
