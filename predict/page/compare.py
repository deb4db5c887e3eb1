"""Predict one program on several devices with one lowering, so that only the devices differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...common.errors import OpcastError
from ...features.ir.reader import SourceProgram
from ...features.lowering.lower import lower
from ..devices import resolve_device
from ..program.predictor import Prediction, Predictor
from .assemble import short

#: Default devices of the comparison: GPUs and TPUs of several generations, all of the catalogue.
DEVICES = ("h100-sxm", "a100-sxm-80gb", "v100-sxm", "l4", "tpu-v3", "tpu-v4", "tpu-v5e", "tpu-v5p")
#: Default lowering of the comparison: no compiler needed, seconds per device.
LOWERING = "fused"
#: Lowering shown for a program that is optimised already.
AS_GIVEN = "as given"


def compare_devices(
    predictor: Predictor,
    source: SourceProgram,
    devices: Sequence[str],
    lowering: str = LOWERING,
    tell: Callable[[str], None] = lambda device: None,
) -> list[dict[str, object]]:
    """Predict a program on devices; a device that fails gets the reason.

    Args:
        predictor: Predictor with the model.
        source: The program; if it is optimised already, its kernels are used unchanged.
        devices: Names or device files.
        lowering: Lowering for all devices.
        tell: Called with what is done before it is predicted.

    Returns:
        One row per device, in the order given.
    """
    # ``xla`` takes scheduled HLO as it is, and compiles nothing.
    how = "xla" if is_optimised(source) else lowering
    rows = []
    for name in devices:
        tell(f"comparing with {name}")
        try:
            device = resolve_device(name, predictor.devices)
            lowered = lower(
                source, how, cache=predictor.cache, trip_counts=source.trip_counts, device=device
            )
            rows.append(_row(name, predictor.predict_lowered(lowered, device)))
        # One device that cannot be predicted must not cost the page.
        except OpcastError as error:
            rows.append({"device": name, "error": str(error)})
    return rows


def is_optimised(source: SourceProgram) -> bool:
    """Whether a program is a compiler's output, which is not lowered again."""
    return source.kind == "hlo" and source.program.is_scheduled


def _row(name: str, prediction: Prediction) -> dict[str, object]:
    return {
        "device": name,
        "us": short(prediction.latency_us),
        "lo": short(prediction.lo_us),
        "hi": short(prediction.hi_us),
        "inside": short(prediction.in_domain_share),
        "peak_bytes": short(prediction.peak_memory_bytes),
        "device_bytes": short(prediction.device_memory_bytes),
        "fits": prediction.fits,
        "lowering": prediction.lowering,
        "model": prediction.model,
        "notes": list(prediction.notes),
        "error": "",
    }
