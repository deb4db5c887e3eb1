"""Latencies of operators and a budget."""

import json

import opcast

OPERATORS = (
    "linear m=64 n=4096 k=4096 dtype=bf16",
    "linear m=4096 n=14336 k=4096 dtype=fp8",
    "generation_attention batch=16 q_heads=32 kv_heads=8 head_dim=128 q_len=1 kv_len=99 dtype=bf16",
)
found = [
    opcast.latency(operator, device)
    for operator in OPERATORS
    for device in ("h100-sxm", "l40s", "mi300x")
]
print(json.dumps([{"us": v.latency_us, "lo": v.lo_us, "hi": v.hi_us} for v in found]))
