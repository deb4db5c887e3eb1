"""Serving: 100,000 requests on eight engines, cost against requests, a search of deployments."""

from __future__ import annotations

import time

from common import show
from opcast.models.core.registry import OPERATOR_MODEL
from opcast.predict.cluster.deployment import Deployment, Workers
from opcast.predict.cluster.serving import ServingPredictor
from opcast.predict.cluster.serving_case import EngineOptions, LoadSpec
from opcast.predict.cluster.serving_load import draw
from opcast.predict.operator.serving_operators import load_serving_operators
from opcast.predict.plan.serving_search import search
from opcast.simulate.serving.latencies import Slo
from opcast.simulate.serving.served import EnginePlan, ServedModel
from opcast.simulate.step.named_workloads import read_workload


def main() -> None:
    predictor = ServingPredictor(load_serving_operators(OPERATOR_MODEL))
    model = ServedModel(read_workload("llama-3.1-8b", []))
    for router in ("round-robin", "least-loaded"):
        options = EngineOptions(router=router)
        own = Deployment(model, "h100-sxm", engine=Workers(EnginePlan(), 8), options=options)
        for count in (10_000, 30_000, 100_000):
            spec = LoadSpec(prompt="geometric:512", output="geometric:128", rate=150.0, count=count)
            load = draw(spec)
            start = time.process_time()
            # Three runs: the estimate, and both ends of the interval of an open load.
            predictor.predict(own, spec, load=load, record=False)
            took = time.process_time() - start
            show(f"{count} requests on 8 engines, {router}", took, 60.0, "three runs")
    spec = LoadSpec(rate=10.0, count=400)
    start = time.process_time()
    large = ServedModel(read_workload("llama-3.1-70b", []))
    found = search(predictor, Deployment(large, "h100-sxm"), 16, spec, Slo(0.5, 0.03))
    took = time.process_time() - start
    show("plans of 70B on 16 devices", took, 120.0, f"{len(found.judged)} simulated")


if __name__ == "__main__":
    main()
