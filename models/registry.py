"""Estimators by name: ours, and others from the entry points ``opcast.estimators``."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from ..features.errors import ModelError
from .base import Estimator

GROUP = "opcast.estimators"
#: Ours by class path, so that they are found where the package runs without being installed.
_OWN = {
    "roofline": ".roofline:RooflineEstimator",
    "ridge": ".linear:RidgeEstimator",
    "forest": ".forest:ForestEstimator",
    "xgboost": ".boosted:XGBoostEstimator",
    "ensemble": ".ensemble:EnsembleEstimator",
    "mlp": ".neural.mlp:MLPEstimator",
    "gnn-flax": ".neural.gnn_flax:FlaxGraphEstimator",
    "gnn-pyg": ".neural.gnn_pyg:PygGraphEstimator",
    "gpu-xla": ".gpu.estimator:GpuEstimator",
    "tpu-xgboost": ".tpu:TpuEstimator",
    "scalesim": ".simulators.scalesim:ScaleSimEstimator",
    "zigzag": ".simulators.zigzag:ZigZagEstimator",
    "iree": ".simulators.iree:IreeEstimator",
    "compiler": ".simulators.compiler:CompilerEstimator",
}
#: Of ours, those that answer without having learned anything.
UNTRAINED = ("roofline", "scalesim", "zigzag", "iree", "compiler")


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
        return cast(type[Estimator], getattr(import_module(module, __package__), attribute))
    found = _foreign().get(name)
    if found is None:
        choices = ", ".join(estimator_names())
        raise ModelError(f"no estimator {name!r}", hint=f"choose one of: {choices}")
    try:
        return cast(type[Estimator], found.load())
    except (ImportError, AttributeError) as error:
        raise ModelError(
            f"estimator {name!r} cannot be loaded: {error}", where=found.value
        ) from None


def make_estimator(name: str, **params: Any) -> Estimator:
    """An unfitted estimator.

    Args:
        name: As in :func:`estimator_names`.
        params: Its own parameters.

    Raises:
        ModelError: No such estimator, or it does not take a parameter.
    """
    cls = estimator_class(name)
    try:
        return cls(**params)
    except TypeError as error:
        raise ModelError(f"estimator {name!r}: {error}", hint="see docs/models.md") from None


def _foreign() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in _OWN}
