"""What the server answers, asked over HTTP."""

import json
from pathlib import Path

import httpx

from opcast.tests.server.conftest import running

LINEAR = {"m": [1, 64, 4096], "n": 4096, "k": 4096, "dtype": "bf16", "backend": "vllm"}
ASKED = {
    "predict/kernels": [
        {"device": "h100-sxm", "ops": ["linear m=64 n=4096 k=4096 dtype=bf16 backend=vllm"]},
        {"device": "b200", "operator": "linear", "columns": LINEAR},
    ],
    "predict/program": [{"device": "h100-sxm", "lowering": "fused"}],
    "simulate": [
        {
            "workload": "llama", "cluster": "dgx-h100-x16", "plan": "tp=8,dp=2",
            "settings": {"layers": 4, "batch": 16},
        },
    ],
    "simulate-serving": [
        {"workload": "llama-3.1-8b", "device": "h100-sxm", "concurrency": 8, "count": 16},
    ],
}  # fmt: skip

ASKED["predict/program"][0]["program"] = Path("mlp.mlir").read_text()
with running() as (url, _):
    found = {
        path: [httpx.post(f"{url}/v1/{path}", json=body, timeout=120).json() for body in bodies]
        for path, bodies in ASKED.items()
    }
print(json.dumps(found))
