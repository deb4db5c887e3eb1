"""Runs SCALE-Sim in the worker process: cycles of one fold of a product.

Its compute system is run as ``scalesim.single_layer_sim`` runs it, without the memory system: that
writes traces, goes cycle by cycle, and version 3.0.0 of it fails with NumPy from 2.4 on.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

#: Most steps in time that are simulated: beyond the fill of the array a fold's cycles grow by one a
#: step, so longer dimensions are extrapolated exactly (checked in docs/fidelities.md).
MAX_TIME = 64


def run(job: dict[str, Any]) -> dict[str, list[dict[str, int]]]:
    """Simulate one fold of a product, with either operand as the weights.

    Args:
        job: ``rows``, ``columns`` and ``dataflow`` (``ws``, ``os`` or ``is``) of the array;
            ``m``, ``n``, ``k`` of the product.

    Returns:
        ``ways``: for each choice of weights the ``folds`` of the product, the ``length`` of a fold
        in time, and as ``overhead`` the cycles that a fold takes beyond that.
    """
    # Transposing a product swaps its operands; a square one has a single way.
    sizes = {(job["m"], job["n"]), (job["n"], job["m"])}
    return {"ways": [_fold(job, m, n) for m, n in sorted(sizes)]}


def _fold(job: dict[str, Any], m: int, n: int) -> dict[str, int]:
    from scalesim.topology_utils import topologies

    dataflow, rows, columns = str(job["dataflow"]), int(job["rows"]), int(job["columns"])
    topology = topologies()
    # As a convolution of m × k by 1 × k: how the simulator writes products itself.
    topology.append_topo_arrays("kernel", ["kernel", m, job["k"], 1, job["k"], 1, n, 1, 1, 1, 1])
    topology.num_layers, topology.topo_load_flag = 1, True
    topology.topo_calc_hyperparams()
    across, down, length = topology.calc_spatio_temporal_params(df=dataflow, layer_id=0)
    # One fold: no larger than the array, and no longer than the extrapolation needs.
    own = min(across, rows), min(down, columns), min(length, MAX_TIME)
    cycles = compute_cycles(*own, rows, columns, dataflow)
    folds = -(-across // rows) * -(-down // columns)
    return {"folds": int(folds), "length": int(length), "overhead": cycles - own[2]}


def compute_cycles(
    across: int, down: int, length: int, rows: int, columns: int, dataflow: str
) -> int:
    """Cycles that the simulator's compute system takes.

    Args:
        across: Size laid over the array's rows; a larger one is folded.
        down: Size laid over its columns; a larger one is folded.
        length: Size that streams in time.
        rows: Rows of the array.
        columns: Columns of the array.
        dataflow: ``ws``, ``os`` or ``is``.
    """
    import numpy as np
    from scalesim.scale_config import scale_config

    config = scale_config()
    config.set_arr_dims(rows, columns)
    config.set_dataflow(dataflow)
    config.force_valid()
    shapes = {
        "ws": ((length, across), (across, down), (length, down)),
        "os": ((across, length), (length, down), (across, down)),
        "is": ((down, across), (across, length), (down, length)),
    }[dataflow]
    # Only the shapes count; the matrices hold addresses that nothing looks at.
    inputs, weights, outputs = (np.zeros(shape) for shape in shapes)
    name = f"systolic_compute_{dataflow}"
    system = getattr(import_module(f"scalesim.compute.{name}"), name)()
    system.set_params(
        config_obj=config, ifmap_op_mat=inputs, filter_op_mat=weights, ofmap_op_mat=outputs
    )
    system.create_demand_matrices()
    # A row of the demand matrix is a cycle.
    return int(system.ofmap_demand_matrix.shape[0])
