"""Finds estimators by name: opcast's, and others from entry points ``opcast.estimators``."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, cast

from ...common.errors import ModelError
from ...common.paths import PACKAGE

if TYPE_CHECKING:  # the command line asks for names before anything needs NumPy
    from .base import Estimator

GROUP = "opcast.estimators"
#: opcast's estimators by class path, so that they are found even if the package is not installed;
#: imported on use, since some need heavy libraries.
_OWN = {
    "roofline": "..estimators.linear:RooflineEstimator",
    "ridge": "..estimators.linear:RidgeEstimator",
    "forest": "..estimators.forest:ForestEstimator",
    "xgboost": "..estimators.boosted:XGBoostEstimator",
    "ensemble": "..estimators.ensemble:EnsembleEstimator",
    "mlp": "..neural.estimators:MLPEstimator",
    "gnn-flax": "..neural.estimators:FlaxGraphEstimator",
    "gnn-pyg": "..neural.estimators:PygGraphEstimator",
    "gpu-xla": "..gpu.estimator:GpuEstimator",
    "tpu-xgboost": "..estimators.tpu:TpuEstimator",
    "scalesim": "..simulators.scalesim:ScaleSimEstimator",
    "zigzag": "..simulators.zigzag:ZigZagEstimator",
    "iree": "..simulators.iree:IreeEstimator",
    "compiler": "..estimators.tpu:CompilerEstimator",
}
#: opcast's estimators that predict without training.
UNTRAINED = ("roofline", "scalesim", "zigzag", "iree", "compiler")
#: Folder of the shipped models.
PRETRAINED = PACKAGE / "models" / "pretrained"
#: Shipped model of library operators.
OPERATOR_MODEL = "gpu-operators"
#: Shipped models of programs by platform.
CPU_MODEL, GPU_MODEL, TPU_MODEL = "cpu-xgboost", "gpu-xla", "tpu-xgboost"


def estimator_names() -> list[str]:
    """Names of all estimators that are installed."""
    return sorted({*_OWN, *_foreign()})


def estimator_class(name: str) -> type[Estimator]:
    """The class of an estimator.

    Raises:
        ModelError: No estimator of that name, or its package cannot be imported.
    """
    if name in _OWN:
        module, _, attribute = _OWN[name].partition(":")
        return cast("type[Estimator]", getattr(import_module(module, __package__), attribute))
    entry = _foreign().get(name)
    if entry is None:
        choices = ", ".join(estimator_names())
        raise ModelError(f"no estimator {name!r}", hint=f"choose one of: {choices}")
    try:
        return cast("type[Estimator]", entry.load())
    except (ImportError, AttributeError) as error:
        raise ModelError(
            f"estimator {name!r} cannot be loaded: {error}", where=entry.value
        ) from None


def make_estimator(name: str, **params: object) -> Estimator:
    """An unfitted estimator.

    Args:
        name: One of :func:`estimator_names`.
        params: Parameters of the estimator.

    Raises:
        ModelError: No such estimator, or it does not take a parameter.
    """
    cls = estimator_class(name)
    try:
        return cls(**params)
    # A constructor that does not take a keyword raises TypeError with the keyword's name.
    except TypeError as error:
        raise ModelError(f"estimator {name!r}: {error}", hint="see docs/models.md") from None


def _foreign() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in _OWN}
