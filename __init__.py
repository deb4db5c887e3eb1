"""opcast: predicts how long an ML program takes on a device, why, and how sure it is.

A StableHLO program and a device go in; latency with an interval comes out, in total and per kernel.
The names below are loaded on first use, so that importing the package stays fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .common.jax_platforms import keep_plugins_quiet

if TYPE_CHECKING:
    from .common.errors import OpcastError as OpcastError
    from .features.dataset import Dataset as Dataset
    from .features.devices.device import DeviceSpec as DeviceSpec
    from .features.ir.reader import read_program as read_program
    from .features.kernels.kernel import Kernel as Kernel
    from .features.lowering.lower import lower as lower
    from .predict.api import predict as predict
    from .predict.api import save as save
    from .predict.library import budget as budget
    from .predict.library import latency as latency
    from .predict.plan.answer import plan as plan
    from .predict.program.predictor import Prediction as Prediction
    from .predict.program.predictor import Predictor as Predictor
    from .predict.program.predictor import load as load

__version__ = "0.1.0"

_PUBLIC = {
    "Dataset": ".features.dataset",
    "DeviceSpec": ".features.devices.device",
    "Kernel": ".features.kernels.kernel",
    "OpcastError": ".common.errors",
    "Prediction": ".predict.program.predictor",
    "budget": ".predict.library",
    "latency": ".predict.library",
    "Predictor": ".predict.program.predictor",
    "load": ".predict.program.predictor",
    "plan": ".predict.plan.answer",
    "lower": ".features.lowering.lower",
    "read_program": ".features.ir.reader",
    "save": ".predict.api",
}

__all__ = [
    "Dataset",
    "DeviceSpec",
    "Kernel",
    "OpcastError",
    "Prediction",
    "Predictor",
    "budget",
    "latency",
    "load",
    "lower",
    "plan",
    "predict",
    "read_program",
    "save",
]

keep_plugins_quiet()


def __getattr__(name: str) -> Any:
    if name == "predict":
        # The package of that name, which can be called.
        return import_module(".predict", __name__)
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name], __name__), name)
    raise AttributeError(f"module 'opcast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
