"""Steps on clusters: time and memory by number of devices; composition against every message."""

from __future__ import annotations

import random
import resource
import time
from statistics import mean

from common import best, show
from opcast.common.types import JsonObject
from opcast.models.operators import OpModel
from opcast.predict.cluster.step import StepPredictor
from opcast.predict.devices import cluster_device
from opcast.predict.locate import OPERATOR_MODEL, find_model
from opcast.predict.screen import screen
from opcast.predict.sweep.space import candidates
from opcast.simulate.clusters.catalogue import find_cluster
from opcast.simulate.step.fitting import memory_of
from opcast.simulate.step.named_workloads import make_workload, read_workload
from opcast.simulate.step.plan import parse_plan
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
#: Model, batch and cluster of the plans that are screened.
SCREENED = (("llama-3-70b", 256, "dgx-h100-x256"), ("llama-3.1-405b", 512, "dgx-h100-x512"))


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
    screened()
    for bandwidth in (20e9, 200e9):
        compare(Wire(2e-6, bandwidth))


def screened() -> None:
    """Processor time of a candidate of ``opcast screen``, with prices that are new to the process.

    Plans are drawn from those of a sweep; of their pipelines no schedule is said.
    """
    for model, batch, cluster in SCREENED:
        settings = {"batch": batch, "seq": 4096}
        work, found = read_workload(model, settings), find_cluster(cluster)
        own = candidates(work, {"": found}, [batch], {"schedule": ["1f1b"]})
        random.Random(0).shuffle(own)
        device = cluster_device(found)
        kinds: dict[str, list[JsonObject]] = {}
        for plan in (candidate.plan for candidate in own):
            kind = "pipelines" if plan.pp > 1 else "other plans"
            needed = max(stage.total for stage in memory_of(work, plan))
            kind += " that fit" if needed <= device.memory_bytes else " that do not fit"
            text = plan.text().replace(",schedule=1f1b", "")
            case = {"workload": model, "set": settings, "cluster": cluster, "plan": text}
            kinds.setdefault(kind, []).append(case)
        for kind, cases in sorted(kinds.items()):
            screen(cases[:1])
            times = []
            for case in cases[1:41]:
                start = time.process_time()
                screen([case])
                times.append(time.process_time() - start)
            note = f"{1 / mean(times):.0f} a second, at most {max(times):.2g} s"
            show(f"screen {model} on {cluster}, {kind}", mean(times), 0.5, note)


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
