"""Memory and time of plans whose layers are compiled once, against whole compiles.

A program of many equal layers is compiled with four and with two of them and extrapolated
(docs/lowering.md, Equal layers). Each plan is compiled both ways for the cluster's device.

    python tests/bench/plan_memory.py --programs llama,gpt,vit --meshes data=4,fsdp=2:tensor=2
"""

from __future__ import annotations

import argparse
import json
import time

from opcast.datagen.zoo.registry import build
from opcast.features.lowering.options import LoweringOptions
from opcast.features.lowering.target_compiler.process import CompileSettings
from opcast.predict.api import loaded
from opcast.predict.cluster.partitioned import predict_partitioned
from opcast.predict.plan.program import read_planned
from opcast.predict.plan.space import Change, Plan
from opcast.simulate.clusters.catalogue import find_cluster

#: Twelve layers are the fewest that are compiled by layers for a GPU.
LAYERS: dict[str, object] = {"layers": 12, "dim": 1024, "heads": 16, "hidden": 4096}
PROGRAMS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {**LAYERS, "kv_heads": 8, "hidden": 2816, "seq": 1024, "batch": 8}),
    "gpt": ("bert", {**LAYERS, "seq": 512, "batch": 8}),
    "vit": ("vit", {**LAYERS, "batch": 32}),
}


def main() -> None:
    """Print a line for each plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    parser.add_argument("--cluster", default="h100-sxm-x4")
    parser.add_argument("--meshes", default="data=4,fsdp=4,tensor=4,fsdp=2:tensor=2")
    parser.add_argument("--remat", type=int, default=0, help="Layers to compute again.")
    given = parser.parse_args()
    change = Change(given.remat)
    for name in given.programs.split(","):
        family, settings = PROGRAMS[name]
        settings = {**settings, "dtype": "bf16", "mode": "train"}
        program = read_planned(build(family, **settings).mlir(platform="cuda")).changed(change)
        for mesh in given.meshes.split(","):
            sizes = tuple((k, int(n)) for k, _, n in (a.partition("=") for a in mesh.split(":")))
            # Megatron's cuts: all that tensor may cut.
            tensor = program.space.tensor if "tensor" in dict(sizes) else ()
            plan = Plan(sizes, tensor, change)
            line: dict[str, object] = {"program": name, "plan": plan.text(program.space.labels)}
            made = {}
            for kind, repeats in (("layers", True), ("whole", False)):
                compiling = CompileSettings(progress=False, repeats=repeats)
                options = LoweringOptions("xla", settings=compiling)
                cluster = find_cluster(given.cluster)
                started = time.monotonic()
                found = predict_partitioned(
                    program.annotated(plan), cluster, loaded("default"), options
                )
                made[kind] = found
                line[f"{kind}_s"] = round(time.monotonic() - started, 1)
                line[f"{kind}_mib"] = round(found.peak_memory_bytes / 2**20, 1)
                line[f"{kind}_us"] = round(found.latency_us, 1)
            by, whole = made["layers"], made["whole"]
            line["memory_error"] = round(by.peak_memory_bytes / whole.peak_memory_bytes - 1, 4)
            line["time_error"] = round(by.latency_us / whole.latency_us - 1, 4)
            line["by_layers"] = any("extrapolated" in note for note in by.notes)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
