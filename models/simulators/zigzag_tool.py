"""Runs ZigZag in the worker process: cycles of the best mapping of a product that it finds.

Its stages are ``zigzag.api``'s, without the ones that write files.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import yaml

#: Bits of a partial sum: matrix units of TPUs accumulate in f32 (Jouppi et al., CACM 63(7), 2020).
SUM_BITS = 32
#: Bits a clock between VMEM and the arrays: enough that VMEM never limits, since device files hold
#: no bandwidth for it.
_WIDE = 1 << 20
#: Fewest bits that a port moves in one access. Engineering estimate.
_LEAST = 64


def run(job: dict[str, object]) -> dict[str, float]:
    """Search a mapping, with either operand as the stationary weights.

    Args:
        job: ``b m n k`` of the product, ``bits`` of its elements, ``input_bits`` of those of the
            first operand where it streams, and the device as :func:`accelerator` takes it;
            ``orders`` limits the search to permutations of a number of loops.

    Returns:
        ``cycles`` of the faster way round, with loading, stalls and writing back, and ``ideal``,
        those of the arithmetic alone.
    """
    # As the product of the transposes. What was the convolution's input is then the weights, which
    # count with all their bits.
    turned = {**job, "m": job["n"], "n": job["m"], "input_bits": job["bits"]}
    ways = [job] if job["m"] == job["n"] else [job, turned]
    return min((_search(way) for way in ways), key=lambda reply: reply["cycles"])


def _search(job: dict[str, Any]) -> dict[str, float]:
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
        folder = Path(name)
        for part, data in (("accelerator", accelerator(job)), ("mapping", mapping(job))):
            # The order of the memories is their order in the hierarchy.
            (folder / f"{part}.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
        results = MainStage(
            stages,
            workload=workload(job),
            accelerator=str(folder / "accelerator.yaml"),
            mapping=str(folder / "mapping.yaml"),
            # LOMA orders loop prime factors; the limit bounds how many there are to permute.
            loma_lpf_limit=int(job["orders"]),
            loma_show_progress_bar=False,
            nb_mappings_generated=1,
            access_same_data_considered_as_no_access=True,
            temporal_mapping_type=TemporalMappingType.UNEVEN,
        ).run()
    best = results[0][0]
    return {"cycles": float(best.latency_total2), "ideal": float(best.ideal_cycle)}


def workload(job: dict[str, Any]) -> list[dict[str, object]]:
    """The product as ZigZag describes one; loops of size 1 are left out of a batch."""
    batch = int(job["b"]) > 1
    lead = "[b]" if batch else ""
    return [
        {
            "id": 0,
            "operator_type": "Gemm",
            "equation": f"O{lead}[d][k]+=I{lead}[d][c]*W{lead}[c][k]",
            "loop_dims": [*(["B"] if batch else []), "D", "K", "C"],
            "loop_sizes": [*([job["b"]] if batch else []), job["m"], job["n"], job["k"]],
            "operand_precision": {
                "I": job["input_bits"],
                "W": job["bits"],
                "O": SUM_BITS,
                "O_final": job["bits"],
            },
            "operand_source": {"I": 0, "W": 0},
        }
    ]


def mapping(job: dict[str, Any]) -> list[dict[str, object]]:
    """Spatial mapping: columns over array columns, the sum over array rows, rows over arrays.

    A batch is spread over the arrays instead of the rows of one product.
    """
    # Independent products of a batch need no exchange between arrays, nor do rows of one product.
    shared = "B" if int(job["b"]) > 1 else "D"
    return [
        {
            "name": "default",
            "spatial_mapping": {
                "D1": [f"K, {job['columns']}"],
                "D2": [f"C, {job['rows']}"],
                "D3": [f"{shared}, {job['arrays']}"],
            },
            "memory_operand_links": {"O": "O", "W": "I2", "I": "I1"},
        }
    ]


def accelerator(job: dict[str, Any]) -> dict[str, object]:
    """Weight-stationary arrays with registers, one on-chip memory and main memory.

    Args:
        job: ``rows``, ``columns``, ``arrays``, ``bits`` of an element, ``on_chip_bits`` and
            ``memory_bits`` of the memories, ``bits_per_cycle`` of main memory.
    """
    bits, sides = int(job["bits"]), ["D1", "D2", "D3"]
    reads = ["I1, tl", "I2, tl", "O, tl", "O, th"]
    writes = ["I1, fh", "I2, fh", "O, fh", "O, fl"]
    memories = {
        # Registers hold two values, so that the next one is loaded behind the array's back.
        "weights": _memory(
            2 * bits,
            ["I2"],
            [],
            [_port(1, "read", bits, ["I2, tl"]), _port(1, "write", bits, ["I2, fh"])],
        ),
        "sums": _memory(
            2 * SUM_BITS,
            ["O"],
            ["D2"],
            [
                _port(1, "read", SUM_BITS, ["O, tl"]),
                _port(2, "read", SUM_BITS, ["O, th"]),
                _port(1, "write", SUM_BITS, ["O, fh"]),
                _port(2, "write", SUM_BITS, ["O, fl"]),
            ],
        ),
        "on_chip": _memory(
            int(job["on_chip_bits"]),
            ["I1", "I2", "O"],
            sides,
            [_port(1, "read", _WIDE, reads), _port(1, "write", _WIDE, writes)],
            doubled=True,
        ),
        "main": _memory(
            int(job["memory_bits"]),
            ["I1", "I2", "O"],
            sides,
            [_port(1, "read_write", int(job["bits_per_cycle"]), [*reads, *writes])],
        ),
    }
    array = {
        "unit_energy": 0.0,
        "unit_area": 0.0,
        "dimensions": sides,
        "sizes": [job["columns"], job["rows"], job["arrays"]],
        "systolic_dimensions": ["D1", "D2"],
    }
    return {"name": "device", "memories": memories, "operational_array": array}


def _memory(
    size: int,
    operands: list[str],
    served: list[str],
    ports: list[dict[str, object]],
    doubled: bool = False,
) -> dict[str, object]:
    # Energy and area are not asked for, but must be there.
    return {
        "size": size,
        "r_cost": 0.0,
        "w_cost": 0.0,
        "area": 0.0,
        "latency": 1,
        "operands": operands,
        "ports": ports,
        "served_dimensions": served,
        "force_double_buffering": doubled,
    }


def _port(number: int, kind: str, bits: int, allocation: list[str]) -> dict[str, object]:
    short = {"read": "r", "write": "w", "read_write": "rw"}[kind]
    return {
        "name": f"{short}_port_{number}",
        "type": kind,
        "bandwidth_min": min(bits, _LEAST),
        "bandwidth_max": bits,
        "allocation": allocation,
    }
