"""SCALE-Sim as an estimator of products on systolic arrays (Samajdar et al., ISPASS 2020)."""

from __future__ import annotations

from dataclasses import asdict
from importlib import import_module
from typing import ClassVar

import numpy as np

from ...common.errors import ModelError
from ...common.types import JsonObject
from ...features.devices.device import DeviceSpec
from ...features.kernels.kernel import Kernel
from .arrays import arrays_of, passes, product_of, require_arrays, shared_cycles
from .base import Job, Reply, SimulatorEstimator

#: SCALE-Sim's names of the stationary operand (weights, outputs, inputs).
DATAFLOWS = ("ws", "os", "is")
#: Most simulated time steps: after the array is filled, a fold's cycles grow by one per step, so
#: longer dimensions are extrapolated exactly (checked in docs/fidelities.md).
MAX_TIME = 64


class ScaleSimEstimator(SimulatorEstimator):
    """Cycles of SCALE-Sim's systolic array for products and convolutions.

    The simulator computes one fold; a product of ``F`` folds takes ``F`` times that, distributed
    over the device's arrays. Either operand may be the weights; the faster choice is used. Loading
    weights does not overlap with computing, so products with few rows come out too slow
    (docs/fidelities.md).

    Args:
        dataflow: Stationary operand: ``ws`` weights (as in a TPU), ``os`` outputs, ``is`` inputs.
        limit_s: Time limit of one kernel in seconds.
        progress: Whether to show progress.
    """

    name = "scalesim"
    extra = "scalesim"
    packages: ClassVar[tuple[str, ...]] = ("scalesim",)
    source = "simulator:scalesim"

    def __init__(self, dataflow: str = "ws", limit_s: float = 60.0, progress: bool = True) -> None:
        if dataflow not in DATAFLOWS:
            raise ModelError(
                f"unknown dataflow {dataflow!r}", hint=f"one of: {', '.join(DATAFLOWS)}"
            )
        super().__init__(limit_s, progress, dataflow=dataflow)

    def check(self, device: DeviceSpec) -> None:
        """Reject a device without a systolic array.

        Raises:
            DeviceError: Its description lacks the arrays or the clock.
        """
        require_arrays(device, self.name)

    def job(self, kernel: Kernel, row: np.ndarray, device: DeviceSpec) -> Job | str:
        """Sizes of the array and the product; the tool tries either operand as the weights."""
        product = product_of(kernel, row)
        if isinstance(product, str):
            return product
        return {
            **asdict(product),
            "rows": device.array_rows,
            "columns": device.array_columns,
            "dataflow": self.params["dataflow"],
            "arrays": arrays_of(device),
            "cycle_s": passes(product.rate, device) / device.clock_hz,
        }

    def seconds(self, reply: Reply, job: Job) -> float:
        """Seconds with the faster choice of weights."""
        # With stationary outputs the reduction streams: splitting it would leave partial sums in
        # several arrays.
        split = job["dataflow"] != "os"
        cycles = min(
            shared_cycles(
                way["folds"] * job["batch"],
                way["length"] if split else 0,
                way["overhead"] + (0 if split else way["length"]),
                job["arrays"],
            )
            for way in reply["ways"]
        )
        return float(cycles * job["times"] * job["cycle_s"])


def run(job: JsonObject) -> dict[str, list[dict[str, int]]]:
    """Simulate one fold of a product, with either operand as the weights.

    Args:
        job: ``rows``, ``columns`` and ``dataflow`` (``ws``, ``os`` or ``is``) of the array;
            ``m``, ``n``, ``k`` of the product.

    Returns:
        ``ways``: for each choice of weights the ``folds`` of the product, the ``length`` of a fold
        in time, and the ``overhead`` cycles of a fold beyond that.
    """
    # Transposing a product swaps its operands; a square one needs only one way.
    sizes = {(job["m"], job["n"]), (job["n"], job["m"])}
    return {"ways": [_fold(job, m, n) for m, n in sorted(sizes)]}


def _fold(job: JsonObject, m: int, n: int) -> dict[str, int]:
    from scalesim.topology_utils import topologies

    dataflow, rows, columns = str(job["dataflow"]), int(job["rows"]), int(job["columns"])
    topology = topologies()
    # As a convolution of m × k by 1 × k, the simulator's own form of products.
    topology.append_topo_arrays("kernel", ["kernel", m, job["k"], 1, job["k"], 1, n, 1, 1, 1, 1])
    topology.num_layers, topology.topo_load_flag = 1, True
    topology.topo_calc_hyperparams()
    across, down, length = topology.calc_spatio_temporal_params(df=dataflow, layer_id=0)
    # One fold: no larger than the array, and no longer than needed for the extrapolation.
    own = min(across, rows), min(down, columns), min(length, MAX_TIME)
    cycles = compute_cycles(*own, rows, columns, dataflow)
    folds = -(-across // rows) * -(-down // columns)
    return {"folds": int(folds), "length": int(length), "overhead": cycles - own[2]}


def compute_cycles(
    across: int, down: int, length: int, rows: int, columns: int, dataflow: str
) -> int:
    """Cycles of the simulator's compute system.

    Args:
        across: Size mapped to the array's rows; a larger one is folded.
        down: Size mapped to its columns; a larger one is folded.
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
    # Only the shapes matter; the matrices would contain unused addresses.
    inputs, weights, outputs = (np.zeros(shape) for shape in shapes)
    name = f"systolic_compute_{dataflow}"
    system = getattr(import_module(f"scalesim.compute.{name}"), name)()
    system.set_params(
        config_obj=config, ifmap_op_mat=inputs, filter_op_mat=weights, ofmap_op_mat=outputs
    )
    system.create_demand_matrices()
    # A row of the demand matrix is a cycle.
    return int(system.ofmap_demand_matrix.shape[0])
