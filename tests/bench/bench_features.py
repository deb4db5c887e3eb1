"""Time of ``feature_table`` for many kernels on one core: rows empty, rows kept, and per step.

Run with ``python tests/bench/bench_features.py [n]``; budgets are those of docs/features.md.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from opcast.features.devices.device import DeviceSpec, MemoryLevel
from opcast.features.ir.hlo_reader import parse_hlo
from opcast.features.kernels.kernel import Kernel
from opcast.features.table.kernel_graph import kernel_graph
from opcast.features.table.roofline import roofline
from opcast.features.table.table import feature_table

DEVICE = DeviceSpec(
    "bench", "cpu", {"f32": 150e9}, {"f32": 60e9},
    (MemoryLevel(1e6, 200e9), MemoryLevel(32e6, 60e9), MemoryLevel(64e9, 15e9)),
    floor=1e-6, core_count=2, clock_hz=2.5e9,
)  # fmt: skip

LOOP = """
%fused (p0: f32[{b},{n}], p1: f32[{n}], p2: f32[{b}], p3: f32[{b},{n}]) -> f32[{b},{n}] {{
  %p0 = f32[{b},{n}]{{1,0}} parameter(0)
  %p1 = f32[{n}]{{0}} parameter(1)
  %c = f32[] constant(0.5)
  %cb = f32[{b},{n}]{{1,0}} broadcast(%c), dimensions={{}}
  %b1 = f32[{b},{n}]{{1,0}} broadcast(%p1), dimensions={{1}}
  %p2 = f32[{b}]{{0}} parameter(2)
  %b2 = f32[{b},{n}]{{1,0}} broadcast(%p2), dimensions={{0}}
  %s = f32[{b},{n}]{{1,0}} subtract(%p0, %b2)
  %m = f32[{b},{n}]{{1,0}} multiply(%s, %b1)
  %e = f32[{b},{n}]{{1,0}} exponential(%m)
  %t = f32[{b},{n}]{{1,0}} tanh(%e)
  %p3 = f32[{b},{n}]{{1,0}} parameter(3)
  %g = pred[{b},{n}]{{1,0}} compare(%p3, %cb), direction=GT
  ROOT %r = f32[{b},{n}]{{1,0}} select(%g, %t, %cb)
}}
ENTRY %main (a: f32[{b},{n}], w: f32[{n}], v: f32[{b}], y: f32[{b},{n}]) -> f32[{b},{n}] {{
  %a = f32[{b},{n}]{{1,0}} parameter(0)
  %w = f32[{n}]{{0}} parameter(1)
  %v = f32[{b}]{{0}} parameter(2)
  %y = f32[{b},{n}]{{1,0}} parameter(3)
  ROOT %k = f32[{b},{n}]{{1,0}} fusion(%a, %w, %v, %y), kind=kLoop, calls=%fused, backend_config={{"outer_dimension_partitions":["2"]}}
}}
"""  # noqa: E501
SMALL = """
%fused (p0: f32[{b},{n}]) -> f32[{b},{n}] {{
  %p0 = f32[{b},{n}]{{1,0}} parameter(0)
  ROOT %t = f32[{b},{n}]{{1,0}} tanh(%p0)
}}
ENTRY %main (a: f32[{b},{n}]) -> f32[{b},{n}] {{
  %a = f32[{b},{n}]{{1,0}} parameter(0)
  ROOT %k = f32[{b},{n}]{{1,0}} fusion(%a), kind=kLoop, calls=%fused
}}
"""
YNN = """
%fused (p0: f32[{b},{k}], p1: f32[{k},{n}]) -> f32[{b},{n}] {{
  %p0 = f32[{b},{k}]{{1,0}} parameter(0)
  %p1 = f32[{k},{n}]{{1,0}} parameter(1)
  ROOT %d = f32[{b},{n}]{{1,0}} dot(%p0, %p1), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}
ENTRY %main (a: f32[{b},{k}], w: f32[{k},{n}]) -> f32[{b},{n}] {{
  %a = f32[{b},{k}]{{1,0}} parameter(0)
  %w = f32[{k},{n}]{{1,0}} parameter(1)
  ROOT %k = f32[{b},{n}]{{1,0}} fusion(%a, %w), kind=kCustom, calls=%fused, backend_config={{"outer_dimension_partitions":[],"fusion_config":{{"kind":"__ynn_fusion"}}}}
}}
"""  # noqa: E501
DOT = """
ENTRY %main (a: f32[{k},{b}], w: f32[{k},{n}]) -> f32[{b},{n}] {{
  %a = f32[{k},{b}]{{1,0}} parameter(0)
  %w = f32[{k},{n}]{{1,0}} parameter(1)
  ROOT %d = f32[{b},{n}]{{1,0}} dot(%a, %w), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}
}}
"""
CONV = """
ENTRY %main (x: f32[4,{b},{b},{k}], w: f32[3,3,{k},{n}]) -> f32[4,{b},{b},{n}] {{
  %x = f32[4,{b},{b},{k}]{{3,2,1,0}} parameter(0)
  %w = f32[3,3,{k},{n}]{{3,2,1,0}} parameter(1)
  ROOT %c = f32[4,{b},{b},{n}]{{3,2,1,0}} convolution(%x, %w), window={{size=3x3 pad=1_1x1_1}}, dim_labels=b01f_01io->b01f
}}
"""  # noqa: E501
COPY = """
%fused (p0: f32[{b},{k},{n}]) -> f32[{n},{b},{k}] {{
  %p0 = f32[{b},{k},{n}]{{2,1,0}} parameter(0)
  %t = f32[{n},{b},{k}]{{0,2,1}} transpose(%p0), dimensions={{2,0,1}}
  ROOT %c = f32[{n},{b},{k}]{{2,1,0}} copy(%t)
}}
ENTRY %main (a: f32[{b},{k},{n}]) -> f32[{n},{b},{k}] {{
  %a = f32[{b},{k},{n}]{{2,1,0}} parameter(0)
  ROOT %k = f32[{n},{b},{k}]{{2,1,0}} fusion(%a), kind=kLoop, calls=%fused
}}
"""
REDUCE = """
%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}}
%fused (p0: f32[{b},{n}], p1: f32[{b},{n}]) -> f32[{b}] {{
  %p0 = f32[{b},{n}]{{1,0}} parameter(0)
  %p1 = f32[{b},{n}]{{1,0}} parameter(1)
  %m = f32[{b},{n}]{{1,0}} multiply(%p0, %p1)
  %z = f32[] constant(0)
  ROOT %r = f32[{b}]{{0}} reduce(%m, %z), dimensions={{1}}, to_apply=%add
}}
ENTRY %main (a: f32[{b},{n}], c: f32[{b},{n}]) -> f32[{b}] {{
  %a = f32[{b},{n}]{{1,0}} parameter(0)
  %c = f32[{b},{n}]{{1,0}} parameter(1)
  ROOT %k = f32[{b}]{{0}} fusion(%a, %c), kind=kLoop, calls=%fused
}}
"""
TEMPLATES = {
    "loop": ("fusion", LOOP), "small": ("fusion", SMALL), "ynn": ("gemm", YNN),
    "dot": ("gemm", DOT), "conv": ("conv", CONV), "copy": ("copy", COPY),
    "reduce": ("reduce", REDUCE),
}  # fmt: skip
#: Of 20 kernels, how many are of which body: the shares of a train step on CPU.
MIX = {"loop": 8, "small": 3, "ynn": 3, "dot": 1, "conv": 1, "copy": 2, "reduce": 2}


def bodies() -> Iterator[Kernel]:
    """Kernels of the mix with ever other shapes."""
    names = [name for name, share in MIX.items() for _ in range(share)]
    for i in range(2000):
        kind, template = TEMPLATES[names[i % len(names)]]
        b, n, k = 8 + i % 97, 16 + 3 * (i % 331), 32 + i % 61
        program = parse_hlo("HloModule m, is_scheduled=true\n" + template.format(b=b, n=n, k=k))
        flops = 2.0 * b * n * k if kind in ("gemm", "conv") else 6.0 * b * n
        yield Kernel(f"k{i}", kind, program, "", str(i), flops, b * n, 8.0 * b * n, 4.0 * b * n)


def timed(run: Callable[[], object]) -> float:
    """Wall seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main(n: int = 100_000) -> None:
    """Print seconds, and what keeping the rows saves."""
    pool = list(bodies())
    kernels = [replace(pool[i % len(pool)], row=None) for i in range(n)]
    ops = sum(len(kernel.inner.ops) for kernel in kernels) / n
    print(f"{n} kernels, {ops:.1f} ops each")
    cold = timed(lambda: feature_table(kernels, DEVICE))
    warm = min(timed(lambda: feature_table(kernels, DEVICE)) for _ in range(3))
    line = min(timed(lambda: roofline(kernels, DEVICE)) for _ in range(3))
    graphs = timed(lambda: [kernel_graph(kernel) for kernel in kernels[: n // 20]])
    print(f"feature_table, rows empty   {cold:7.3f} s  {cold / n * 1e6:7.1f} us a kernel")
    print(f"feature_table, rows kept    {warm:7.3f} s  {warm / n * 1e6:7.1f} us a kernel")
    print(f"roofline, rows kept         {line:7.3f} s  {line / n * 1e6:7.1f} us a kernel")
    print(f"kernel_graph                {graphs * 20:7.3f} s  {graphs / n * 20e6:7.1f} us a kernel")
    print(f"keeping rows is {cold / warm:.0f} times as fast")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
