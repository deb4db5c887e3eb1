"""Kernels of the lowering ``fused`` beside those of the real compiler, over the zoo.

    python tests/bench/compare_fused.py --device h100-sxm [--op] [--only llama] [--hlo FOLDER]

Needs the compiler of the device (``opcast compilers install gpu``), or the modules that it made,
which ``--hlo`` keeps. Rules were tuned on the families
in ``TUNED``; the others were looked at only here. Times are rooflines on the catalogue's device, no
kernel under its floor, summed without overlap.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from opcast.common.errors import OpcastError
from opcast.datagen.zoo.registry import build, parse_settings
from opcast.features.devices.catalogue import find_device
from opcast.features.devices.device import DeviceSpec
from opcast.features.ir.reader import SourceProgram, read_program
from opcast.features.kernels.kernel import LoweredProgram
from opcast.features.lowering.lower import lower
from opcast.features.lowering.target_compiler.process import CompileSettings
from opcast.features.table.roofline import roofline

#: GEMMs by the library: without a device to time them, Triton's products are split by guess.
LIBRARY = CompileSettings(flags={"xla_gpu_enable_triton_gemm": False})
#: Families whose kernels were looked at while the rules were written.
TUNED = (
    "mlp", "resnet", "vit", "bert", "llama", "llama_decode", "lstm", "moe", "gnn", "ssm",
)  # fmt: skip
PROGRAMS = """
mlp batch=32 features=64 width=128 layers=2
mlp batch=256 width=1024 layers=4
mlp batch=256 width=512 layers=3 mode=train
mlp batch=4096 width=4096 layers=3 dtype=bf16 mode=train
resnet depth=18 width=64 image=224 batch=8
resnet depth=18 width=64 image=96 batch=32 mode=train
resnet depth=50 image=224 batch=32 dtype=bf16 mode=train
vit layers=2 dim=768 heads=12 hidden=3072 image=224 batch=8
vit layers=2 dim=384 heads=6 hidden=1536 image=160 batch=16 mode=train
vit batch=32 layers=12 mode=train dtype=bf16
bert layers=2 dim=768 heads=12 hidden=3072 seq=128 batch=8 dtype=bf16
bert layers=2 dim=768 heads=12 hidden=3072 seq=128 batch=8 mode=train
bert layers=2 dim=256 heads=4 hidden=1024 seq=64 batch=8 dropout=0.1 mode=train
llama layers=2 dim=1024 heads=16 kv_heads=4 hidden=2816 seq=512 vocab=8192 batch=4 dtype=bf16
llama layers=2 dim=1024 heads=16 kv_heads=4 hidden=2816 seq=256 batch=4 mode=train
llama layers=4 dim=512 heads=8 kv_heads=4 hidden=1408 seq=128 vocab=8192 batch=1 \
scan_layers=true remat=true mode=train
llama layers=4 dim=2048 heads=32 kv_heads=8 hidden=8192 seq=1024 batch=4 dtype=bf16 mode=train
llama_decode layers=2 dim=1024 heads=16 kv_heads=4 hidden=2816 cache=1024 batch=8 dtype=bf16
llama_decode layers=2 dim=512 heads=8 kv_heads=8 hidden=1408 cache=512 batch=4
lstm layers=2 dim=512 seq=32 batch=16
lstm layers=1 dim=512 seq=32 batch=16 mode=train optimizer=sgd
moe layers=2 dim=512 heads=8 kv_heads=4 hidden=1024 seq=256 vocab=8192 experts=8
moe layers=1 dim=512 heads=8 kv_heads=4 hidden=1024 seq=256 vocab=8192 experts=8 mode=train
moe layers=1 dim=256 heads=4 kv_heads=2 hidden=512 seq=128 vocab=4096 experts=8 \
dispatch=scatter mode=train
gnn nodes=16384 edges=131072 dim=128 layers=3
gnn nodes=8192 edges=65536 dim=128 layers=2 conv=gat mode=train
gnn nodes=2048 edges=16384 dim=128 layers=3 conv=mpnn mode=train
ssm layers=2 dim=256 seq=512 state=16 vocab=8192 batch=2
ssm layers=1 dim=256 seq=256 state=16 vocab=8192 mode=train
convnext size=atto image=128 batch=16
convnext size=atto image=128 batch=16 mode=train
efficientnet size=b0 image=224 batch=16
efficientnet size=mini image=96 batch=16 mode=train
efficientnet size=b0 image=224 batch=32 mode=train
unet image=64 channels=64 levels=3 blocks=1 attention_levels=1 batch=8
unet image=32 channels=64 levels=2 blocks=1 attention_levels=1 batch=8 mode=train
dlrm batch=2048 tables=8 rows=50000 dim=64 lookups=4
dlrm batch=2048 tables=8 rows=20000 dim=64 mode=train
convnet_1d samples=16000 channels=128 blocks=4 batch=8
convnet_1d samples=16000 channels=128 blocks=2 stem_layers=4 batch=8 mode=train
""".replace("\\\n", "")


class Totals(NamedTuple):
    """Sums over one run of a program.

    Attributes:
        kernels: Executions of kernels.
        bytes: Bytes read and written.
        flops: Floating-point operations.
        seconds: Roofline time.
    """

    kernels: float
    bytes: float
    flops: float
    seconds: float


def totals(lowered: LoweredProgram, device: DeviceSpec) -> Totals:
    """Totals of a lowered program; each execution takes its roofline plus the device's floor."""
    kernels = [k for k in lowered.kernels if k.takes_time]
    times = np.array([k.multiplicity for k in kernels])
    seconds = roofline(kernels, device).latency_s + device.floor
    return Totals(
        float(times.sum()),
        float(times @ np.array([k.bytes for k in kernels])),
        float(times @ np.array([k.flops for k in kernels])),
        float(times @ seconds),
    )


def programs(only: str) -> Iterable[tuple[str, str, SourceProgram]]:
    """Family, name and program of each line that contains ``only``."""
    for line in PROGRAMS.strip().splitlines():
        family, *pairs = line.split()
        workload = build(family, **parse_settings(family, pairs))
        if only in workload.name:
            yield family, workload.name, read_program(workload.mlir())


def compiled(name: str, source: SourceProgram, device: DeviceSpec, folder: Path | None) -> Totals:
    """Totals of what the compiler makes of a program, or made of it before."""
    path = folder / f"{name}.hlo" if folder else None
    if path is not None and path.is_file():
        return totals(lower(path.read_text(), "xla"), device)
    found = lower(source, "xla", device=device, settings=LIBRARY)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found.hlo)
    return totals(found, device)


def main() -> None:
    """Print a line for each program, and the deviations by part of the zoo."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="h100-sxm")
    parser.add_argument("--only", default="", help="part of a program's name")
    parser.add_argument("--op", action="store_true", help="compare the lowering op too")
    parser.add_argument("--hlo", type=Path, help="folder of compiled modules")
    parser.add_argument("--json", type=Path, help="file to write")
    given = parser.parse_args()
    device = find_device(given.device)
    rows = []
    print(f"{'program':60} {'kernels':>12} {'MB':>16} {'FLOPs':>6} {'us':>14}  s", flush=True)
    for family, name, source in programs(given.only):
        try:
            real = compiled(name, source, device, given.hlo)
        except OpcastError as error:
            print(f"{name:60} not compiled: {error}", flush=True)
            continue
        start = time.process_time()
        ours = totals(lower(source, "fused", device=device), device)
        spent = time.process_time() - start
        ratios = {"fused": [a / b for a, b in zip(ours, real, strict=True)]}
        if given.op:
            op = totals(lower(source, "op", device=device), device)
            ratios["op"] = [a / b for a, b in zip(op, real, strict=True)]
        rows.append({"family": family, "name": name, "xla": real._asdict(), **ratios})
        r = ratios["fused"]
        print(
            f"{name[:60]:60} {real.kernels:6.0f} {r[0]:5.2f} {real.bytes / 1e6:10.1f} {r[1]:5.2f} "
            f"{r[2]:6.3f} {real.seconds * 1e6:8.0f} {r[3]:5.2f} {spent:4.1f}"
            + (f"  op {ratios['op'][0]:.1f} {ratios['op'][1]:.1f} {ratios['op'][3]:.1f}"
               if given.op else ""),
            flush=True,
        )  # fmt: skip
    summarise(rows)
    if given.json:
        given.json.write_text(json.dumps({"device": device.name, "rows": rows}, indent=1))


def summarise(rows: list[dict[str, object]]) -> None:
    """Mean absolute deviation, largest deviation and bias, for tuned families and others."""
    for kind in ("fused", "op"):
        for part, inside in (("tuned families", True), ("other families", False)):
            chosen = [r[kind] for r in rows if (r["family"] in TUNED) is inside and kind in r]
            if not chosen:
                continue
            off = np.array(chosen) - 1.0
            mean, worst, bias = np.abs(off).mean(0), np.abs(off).max(0), off.mean(0)
            text = ", ".join(
                f"{what} {mean[i]:.1%} (worst {worst[i]:.0%}, bias {bias[i]:+.1%})"
                for i, what in enumerate(("kernels", "bytes", "FLOPs", "time"))
            )
            print(f"{kind}, {part}, {len(chosen)} programs: {text}")


if __name__ == "__main__":
    main()
