"""ZigZag as an estimator: cost of the best mapping (Mei et al., IEEE TC 70(8), 2021)."""

from __future__ import annotations

import tempfile
from math import floor
from pathlib import Path
from string import Template
from typing import ClassVar

import numpy as np
import yaml

from ...common.errors import ModelError
from ...common.types import JsonMapping, JsonObject
from ...features.devices.device import DeviceSpec
from ...features.kernels.kernel import Kernel
from .arrays import arrays_of, passes, product_of, require_arrays
from .base import Job, Reply, SimulatorEstimator

#: Fewest bits that a port moves in one access. Engineering estimate.
_LEAST = 64


class ZigZagEstimator(SimulatorEstimator):
    """Cycles of the best mapping that ZigZag finds on a TPU-like accelerator.

    The accelerator has the device's systolic arrays with stationary weights, its on-chip memory and
    its main memory with its bandwidth. A convolution is its implicit GEMM; repeated input elements
    get fewer bits, so that each counts once in memory traffic.

    Args:
        orders: Number of loops whose permutations are searched; time grows with its factorial.
        limit_s: Time limit of one kernel in seconds.
        progress: Whether to show progress.
    """

    name = "zigzag"
    extra = "zigzag"
    packages: ClassVar[tuple[str, ...]] = ("zigzag-dse",)
    source = "simulator:zigzag"

    def __init__(self, orders: int = 5, limit_s: float = 60.0, progress: bool = True) -> None:
        if orders < 1:
            raise ModelError(f"orders must be at least 1, not {orders}")
        super().__init__(limit_s, progress, orders=orders)

    def check(self, device: DeviceSpec) -> None:
        """Reject a device without systolic arrays or on-chip memory.

        Raises:
            DeviceError: Its description lacks the arrays, the clock or a memory.
        """
        require_arrays(device, self.name, memory=True)

    def job(self, kernel: Kernel, row: np.ndarray, device: DeviceSpec) -> Job | str:
        """Description of the accelerator and the product."""
        product = product_of(kernel, row)
        if isinstance(product, str):
            return product
        bits_per_cycle = device.bandwidth * 8.0 / device.clock_hz
        return {
            "b": product.batch,
            "m": product.m,
            "n": product.n,
            "k": product.k,
            "bits": product.bits,
            # ZigZag uses whole bits.
            "input_bits": max(round(product.bits * product.fold), 1),
            "rows": device.array_rows,
            "columns": device.array_columns,
            "arrays": arrays_of(device),
            "bits_per_cycle": max(floor(bits_per_cycle), 1),
            # ZigZag's accelerator is one core, with all arrays of the device and the memories of
            # all cores.
            "on_chip_bits": int(device.shared_bytes_per_core * device.core_count * 8),
            "memory_bits": int(device.memory_bytes * 8),
            "orders": self.params["orders"],
            "scale_s": product.times * passes(product.rate, device) / device.clock_hz,
        }

    def seconds(self, reply: Reply, job: Job) -> float:
        """Seconds of the best mapping's cycles."""
        return float(reply["cycles"] * job["scale_s"])


def run(job: dict[str, object]) -> dict[str, float]:
    """Search a mapping, with either operand as the stationary weights.

    Args:
        job: ``b m n k`` of the product, ``bits`` of its elements, ``input_bits`` of the elements of
            the first operand if it streams, and the device as for :func:`described`; ``orders``
            limits the search to permutations of that number of loops.

    Returns:
        ``cycles`` of the faster choice, with loading, stalls and writing back, and ``ideal``, the
        cycles of the arithmetic alone.
    """
    # As the product of the transposes: the convolution's input becomes the weights, which count
    # with all their bits.
    turned = {**job, "m": job["n"], "n": job["m"], "input_bits": job["bits"]}
    ways = [job] if job["m"] == job["n"] else [job, turned]
    return min((_search(way) for way in ways), key=lambda reply: reply["cycles"])


def _search(job: JsonObject) -> dict[str, float]:
    from zigzag.mapping.temporal_mapping import TemporalMappingType
    from zigzag.stages.evaluation.cost_model_evaluation import CostModelStage
    from zigzag.stages.main import MainStage
    from zigzag.stages.mapping.spatial_mapping_generation import SpatialMappingGeneratorStage
    from zigzag.stages.mapping.temporal_mapping_generator_stage import TemporalMappingGeneratorStage
    from zigzag.stages.parser.accelerator_parser import AcceleratorParserStage
    from zigzag.stages.parser.workload_parser import WorkloadParserStage
    from zigzag.stages.results.reduce_stages import MinimalLatencyStage, SumStage
    from zigzag.stages.workload_iterator import WorkloadStage

    stages = [
        WorkloadParserStage,
        AcceleratorParserStage,
        SumStage,
        WorkloadStage,
        MinimalLatencyStage,
        SpatialMappingGeneratorStage,
        MinimalLatencyStage,
        TemporalMappingGeneratorStage,
        CostModelStage,
    ]
    with tempfile.TemporaryDirectory(prefix="opcast-zigzag-") as name:
        parts = described(job)
        files = {part: Path(name) / f"{part}.yaml" for part in ("accelerator", "mapping")}
        for part, file in files.items():
            # The order of the memories is their order in the hierarchy.
            file.write_text(yaml.safe_dump(parts[part], sort_keys=False))
        results = MainStage(
            stages,
            workload=parts["workload"],
            accelerator=str(files["accelerator"]),
            mapping=str(files["mapping"]),
            # LOMA orders loop prime factors; this limits the number to permute.
            loma_lpf_limit=int(job["orders"]),
            loma_show_progress_bar=False,
            nb_mappings_generated=1,
            access_same_data_considered_as_no_access=True,
            temporal_mapping_type=TemporalMappingType.UNEVEN,
        ).run()
    best = results[0][0]
    return {"cycles": float(best.latency_total2), "ideal": float(best.ideal_cycle)}


def described(job: JsonMapping) -> JsonObject:
    """The ``accelerator``, its ``mapping`` and the ``workload`` in ZigZag's format.

    Args:
        job: ``b m n k``, ``bits`` and ``input_bits`` of the product; ``rows``, ``columns``,
            ``arrays``, ``on_chip_bits`` and ``memory_bits``, and ``bits_per_cycle`` of main memory,
            of the device.
    """
    # Loops of size 1 are left out of a batch.
    batch = job["b"] > 1
    loops = {"B": job["b"]} if batch else {}
    loops |= {"D": job["m"], "K": job["n"], "C": job["k"]}
    text = Path(__file__).with_name("zigzag.yaml").read_text(encoding="utf-8")
    filled = Template(text).safe_substitute(
        job,
        two_values=2 * job["bits"],
        least=min(job["bits"], _LEAST),
        main_least=min(job["bits_per_cycle"], _LEAST),
        shared="B" if batch else "D",
        lead="[b]" if batch else "",
        loops=list(loops),
        sizes=list(loops.values()),
    )
    return dict(yaml.safe_load(filled))
