"""Steps on clusters: time and memory by number of devices; composition against every message."""

from __future__ import annotations

import resource
import time

from common import best, show
from opcast.models.operators import OpModel
from opcast.predict.cluster.step import StepPredictor
from opcast.predict.locate import OPERATOR_MODEL, find_model
from opcast.simulate.clusters.catalogue import find_cluster
from opcast.simulate.step.plan import parse_plan
from opcast.simulate.step.workload import make_workload
from opcast.tests.reference.by_rank import Wire
from opcast.tests.reference.rank_check import PLANS, compare_ranks

DECODER = {
    "layers": 32, "d_model": 4096, "heads": 32, "kv_heads": 8, "d_ff": 14336, "vocab": 128256,
    "seq": 8192,
}  # fmt: skip
SIZES = {
    16: "tp=8,pp=2,dp=1", 128: "tp=8,pp=2,dp=8", 1024: "tp=8,pp=8,dp=16",
    4096: "tp=8,pp=8,dp=64", 16384: "tp=8,pp=8,dp=256",
}  # fmt: skip


def main() -> None:
    operators = OpModel.load(find_model(OPERATOR_MODEL))
    loaded = peak_bytes()
    for devices, text in SIZES.items():
        workload = make_workload("llama", {**DECODER, "batch": max(32, devices // 4)})

        def predict(devices: int = devices, text: str = text, workload=workload) -> None:
            predictor = StepPredictor(find_cluster(f"dgx-h100-x{devices}"), operators)
            predictor.predict(workload, parse_plan(text))

        note = f"{text}; {(peak_bytes() - loaded) / 1e6:.0f} MB above the loaded model"
        show(f"a step of 32 layers on {devices} devices", best(predict), 1.0, note)
    show("memory above the loaded model (GB)", (peak_bytes() - loaded) / 1e9, 0.5)
    for bandwidth in (20e9, 200e9):
        compare(Wire(2e-6, bandwidth))


def compare(wire: Wire) -> None:
    """Largest difference between the composition and the simulation of every message."""
    worst: dict[int, tuple[float, str]] = {}
    start = time.perf_counter()
    for text in PLANS:
        error = abs(compare_ranks(text, wire).error)
        devices = parse_plan(text).devices
        worst[devices] = max(worst.get(devices, (0.0, "")), (error, text))
    for devices, (difference, text) in sorted(worst.items()):
        name = f"difference to every message, {devices} devices, {wire.bandwidth / 1e9:g} GB/s"
        print(f"{'ok  ' if difference < 0.03 else 'MISS'} {name:<58} {difference:10.2%}   {text}")
    print(f"     ({time.perf_counter() - start:.0f} s)")


def peak_bytes() -> float:
    """Most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


if __name__ == "__main__":
    main()
