"""A training step from Python, as docs/simulate.md has it."""

import json

from opcast.models.operators import OpModel
from opcast.predict.cluster.step import StepPredictor
from opcast.predict.locate import find_model
from opcast.simulate.clusters.catalogue import find_cluster
from opcast.simulate.step.named_workloads import make_workload
from opcast.simulate.step.plan import parse_plan

predictor = StepPredictor(find_cluster("dgx-h100-x128"), OpModel.load(find_model("gpu-operators")))
prediction = predictor.predict(
    make_workload("llama", {"layers": 32, "batch": 256}), parse_plan("fsdp=8,tp=2,dp=8")
)
print(json.dumps(prediction.to_dict()))
