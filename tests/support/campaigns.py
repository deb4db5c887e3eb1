"""Campaigns by hand: a journal with rows as a GPU's workers tell them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from opcast.datagen.campaign.journal import Journal
from opcast.datagen.campaign.plan import Case, Entry, Plan

#: What XLA makes of a product and an element-wise kernel for a GPU; the product is split over k, so
#: that it runs as two kernels.
HLO = """HloModule jit_case0, is_scheduled=true

%fused (p: bf16[64,64]) -> bf16[64,64] {
  %p = bf16[64,64]{1,0} parameter(0)
  ROOT %n = bf16[64,64]{1,0} negate(%p)
}

ENTRY %main (a: bf16[64,128], b: bf16[128,64]) -> bf16[64,64] {
  %a = bf16[64,128]{1,0} parameter(0)
  %b = bf16[128,64]{1,0} parameter(1)
  %dot.1 = bf16[64,64]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %loop_fusion = bf16[64,64]{1,0} fusion(%dot.1), kind=kLoop, calls=%fused
}
"""
KEY = "operations/traced/x"


def events(key: str, scale: float = 1.0) -> dict:
    """Three runs; the product takes 10 + 2 µs, the fusion 4 µs, in each."""
    start, end, op, name, run = [], [], [], [], []
    clock = 0.0
    for turn in range(3):
        for which, kernel, length in ((0, 0, 10_000), (0, 1, 2_000), (1, 2, 4_000)):
            start.append(round(clock))
            clock += length * scale
            end.append(round(clock))
            op.append(which)
            name.append(kernel)
            run.append(turn)
    return {
        "table": "events", "key": key, "platform": "gpu", "ops": ["dot.1", "loop_fusion"],
        "names": ["gemm", "splitk_reduce", "loop_fusion"], "marked": True, "op": op, "name": name,
        "run": run, "start": start, "end": end,
    }  # fmt: skip


def program(key: str, **more) -> dict:
    own = {
        "table": "programs",
        "key": key,
        "family": "test",
        "hlo": HLO,
        "begin": 10.0,
        "end": 12.0,
    }
    return {**own, "walls_us": [20.0, 22.0, 21.0], **more}


def campaign(folder: Path, rows: list[dict], kind: str = "NVIDIA H200") -> tuple[Journal, Plan]:
    own = Journal(folder)
    own.add("slice")
    host = {"frameworks": {"jax": {"device_kind": kind}}, "libraries": {}}
    host["nvidia"] = {"name": kind, "power.limit": "700.00 W"}
    own.add("host", platform="gpu", record=host)
    keys = sorted({row["key"] for row in rows})
    own.add(
        "block", stage="operations", kind="traced", worker="xla", seconds=1.0, done=keys,
        failed={"programs/traced/y": "XlaRuntimeError: RESOURCE_EXHAUSTED in /home/someone/x.py"},
        unfinished=[], rows=own.keep(rows),
    )  # fmt: skip
    cases = [Case(key, "operations", "traced", "xla", {}) for key in keys]
    return own, Plan([Entry(tuple(cases))], {"programs": 0.5, "operations": 0.5})


def slow_plan(count: int) -> Plan:
    """Cases for the workers of ``campaign_worker``, each of a fifth of a second, one in a block."""
    cases = [Case(f"s/k/{i}", "s", "k", "xla", {"how": "slow"}, 20.0) for i in range(count)]
    return Plan([Entry((case,)) for case in cases], {"s": 1.0})


def fewer(plan: Plan) -> Plan:
    """A plan without long runs and the programs that compile longest."""
    entries = [
        replace(entry, cases=tuple(c for c in entry.cases if not _long(c)))
        for entry in plan.entries
    ]
    return replace(plan, entries=entries)


def _long(case: Case) -> bool:
    larger = case.stage == "programs" and case.spec.get("mode") != "decode"
    return case.kind == "sustained" or larger


def operator(us: list[float]) -> dict:
    row = {
        "family": "linear",
        "op": "linear",
        "dtype": "bf16",
        "b": 1,
        "m": 64,
        "n": 4096,
        "k": 4096,
    }
    return {"table": "operators", "key": KEY, "row": json.dumps(row), "us": us, "kernels": ["g"]}


ROWS = [
    program(KEY),
    events(KEY),
    program(f"{KEY}#1"),
    events(f"{KEY}#1", 1.1),
    operator([30.0, 32.0]),
    operator([34.0]),
    {"table": "models", "key": "models/m", "library": "timm", "model": "resnet50", "batch": 8,
     "mode": "infer", "dtype": "bf16", "layout": "nhwc", "framework": "torch-eager",
     "walls_us": [5000.0, 5100.0, 5200.0], "allocated_bytes": 10, "reserved_bytes": 20,
     "begin": 100.0, "end": 101.0},
    # Half a second, then a tenth twice: readings are 600 W and one more each tenth.
    *({"table": "windows", "key": "products/w", "dtype": "bf16", "m": 64, "n": 64, "k": 64,
       "begin": 100.0 + begin, "executions": count, "us_each": us}
      for begin, count, us in ((0.0, 10, 50000.0), (0.55, 2, 40000.0), (0.75, 2, 42000.0))),
    {"table": "anchors", "key": "anchors-xla", "worker": "xla", "product_us": [10.0],
     "memory_us": [5.0], "begin": 1.0},
    {"table": "anchors", "key": "anchors-xla", "worker": "xla", "product_us": [12.0],
     "memory_us": [5.0], "begin": 2.0},
]  # fmt: skip
