"""A program lowered by ``fused`` and by the device's compiler, both priced by one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from opcast.common.errors import LoweringError
from opcast.features.devices.device import DeviceSpec
from opcast.features.ir.reader import read_program
from opcast.features.kernels.kernel import LoweredProgram
from opcast.features.lowering.lower import lower
from opcast.features.lowering.target_compiler.process import CompileSettings, compile_programs
from opcast.features.lowering.target_compiler.target import target_of
from opcast.features.lowering.xla import compile_native
from opcast.models.program.fused_error import (
    left_joined,
    lowering_note,
    shares,
    uncertain_counts,
)
from opcast.predict.program.predictor import Predictor

#: Programs of one compile process.
BATCH = 25


class Price(NamedTuple):
    """What a lowered program costs.

    Attributes:
        us: Microseconds on the device's stream.
        lo: Lower end, without the error of the lowering.
        hi: Upper end.
        kernels: Executions of kernels.
        bytes: Bytes that they move.
        flops: FLOPs that they do.
        shares: Share of each group in the time.
        notes: What the answer says of the lowering.
        uncertain: Counts that the answer says may be the compiler's in other amounts.
        left: Share of the time that is left if kernels are joined, for ``op``.
    """

    us: float
    lo: float
    hi: float
    kernels: float
    bytes: float
    flops: float
    shares: Mapping[str, float]
    notes: tuple[str, ...]
    uncertain: tuple[str, ...]
    left: float


def on_stream(device: DeviceSpec) -> DeviceSpec:
    """A device whose host takes no time, which would hide errors of small programs."""
    return replace(device, dispatch=device.floor)


def compiled(
    texts: Mapping[str, str], device: DeviceSpec, folder: Path | None = None
) -> dict[str, str]:
    """Optimised HLO of programs by name, kept in a folder; without those that are refused."""
    kept = {} if folder is None else {name: path_of(name, folder) for name in texts}
    found = {n: path.read_text() for n, path in kept.items() if path.is_file()}
    todo = [name for name in texts if name not in found]
    make = _here if device.platform == "cpu" else partial(_absent, device=device)
    for start in range(0, len(todo), BATCH):
        names = todo[start : start + BATCH]
        for name, hlo in zip(names, make([texts[name] for name in names]), strict=True):
            found[name] = hlo
            if name in kept:
                kept[name].parent.mkdir(parents=True, exist_ok=True)
                kept[name].write_text(hlo)
    return {name: hlo for name, hlo in found.items() if hlo}


def _absent(texts: Sequence[str], device: DeviceSpec) -> list[str]:
    programs, settings = [text.encode() for text in texts], CompileSettings(progress=False)
    results = compile_programs(programs, [(1, 1)] * len(texts), target_of(device), settings)
    return ["" if isinstance(result, LoweringError) else result.hlo for result in results]


def _here(texts: Sequence[str]) -> list[str]:
    def one(text: str) -> str:
        try:
            return compile_native(read_program(text)).hlo
        except LoweringError:
            return ""

    return list(map(one, texts))


def path_of(name: str, folder: Path) -> Path:
    """Where a case's compiled module is kept."""
    return folder / f"{name.replace('/', '-')}.hlo"


def prices(predictor: Predictor, text: str, hlo: str, device: DeviceSpec) -> tuple[Price, Price]:
    """Price of ``fused``, and of the compiler's kernels."""
    ours = lower(text, "fused", device=device)
    return priced(predictor, ours, device), priced(predictor, lower(hlo, "xla"), device)


def priced(predictor: Predictor, lowered: LoweredProgram, device: DeviceSpec) -> Price:
    """Price one lowered program."""
    # By the name of the compiler's: the error of our own lowering is what is asked for.
    found = predictor.predict_lowered(replace(lowered, lowering="xla"), device)
    kernels = [k for k in lowered.kernels if k.takes_time]
    times = np.array([k.multiplicity for k in kernels], np.float64)
    latency = np.array([k.latency_us for k in found.kernels])
    said = lowering_note(lowered, latency, device)
    parts = shares(lowered.kernels, latency)
    return Price(
        found.latency_us,
        found.lo_us,
        found.hi_us,
        float(times.sum()),
        _total(times, [k.bytes for k in kernels]),
        _total(times, [k.flops for k in kernels]),
        parts,
        said,
        tuple(uncertain_counts(lowered)),
        left_joined(lowered, parts),
    )


def _total(times: np.ndarray, amounts: Sequence[float]) -> float:
    return float(times @ np.array(amounts, np.float64))
