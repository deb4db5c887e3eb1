"""Exposed communication of programs by ASTRA-sim's rules beside ours; prints a table.

Run ``python tests/bench/astra_sim_programs.py [FAMILY:MESH:CLUSTER ...]``. Rooflines stand in for
kernels, so that both sides have the same. The rules are those of ``tests/support/astra_sim.py``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from opcast.datagen.partition.workload import export_partitioned
from opcast.features.devices.catalogue import find_device
from opcast.features.lowering.options import LoweringOptions
from opcast.predict.cluster.partitioned import predict_partitioned
from opcast.predict.export.chakra import export_chakra
from opcast.simulate.chakra.folder import read_folder
from opcast.simulate.chakra.timeline import run_traces
from opcast.simulate.clusters.catalogue import find_cluster

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
import astra_sim

PROGRAMS = (
    *("llama:dp=4:h100-sxm-x4", "llama:fsdp=4:h100-sxm-x4", "llama:tp=4:h100-sxm-x4"),
    *("llama:dp=2,fsdp=2,tp=2:h100-sxm-x8", "resnet:dp=4:tpu-v5e-x4", "llama:fsdp=4:tpu-v5e-x4"),
)
SETTINGS = {
    "llama": {
        "mode": "train", "layers": 1, "dim": 512, "heads": 8, "kv_heads": 8, "hidden": 1024,
        "vocab": 1024, "seq": 256, "batch": 16,
    },
    "resnet": {"mode": "train", "batch": 16},
}  # fmt: skip


def main() -> None:
    print(f"{'program':36}{'ours us':>9}{'theirs us':>11}{'ratio':>7}")
    for name in sys.argv[1:] or PROGRAMS:
        family, mesh, cluster = name.split(":")
        where = find_cluster(cluster)
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "traces"
            step = export_partitioned(family, SETTINGS[family], mesh, Path(folder) / "step.mlir")
            found = predict_partitioned(step, where, None, LoweringOptions("fused"))
            export_chakra(found, where, find_device(found.device), out)
            compute = run_traces(*read_folder(out)).summary()["compute_us"]
            theirs = astra_sim.simulate(out) / 1e3 - float(compute)
        ours = found.run.exposed * 1e6
        print(f"{name:36}{ours:9.1f}{theirs:11.1f}{theirs / ours:7.3f}", flush=True)


if __name__ == "__main__":
    main()
