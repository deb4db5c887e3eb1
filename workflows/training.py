"""Functions shared by all trainers: saving models, logging runs, excluding devices."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ..common.errors import DatasetError, ModelError
from ..common.plugins import extra_hint
from ..common.progress import wrote
from .settings import TrainSettings

if TYPE_CHECKING:
    from rich.console import Console

    from ..features.dataset import Dataset
    from ..features.devices.device import DeviceSpec
    from ..models.cost_model import CostModel
    from ..models.operators.model import OpModel
    from ..models.tracking.mlflow_store import RunLog


logger = logging.getLogger(__name__)


def keep_model(model: CostModel | OpModel, settings: TrainSettings, name: str) -> Path:
    """Save a trained model and its settings to the requested folders.

    Args:
        model: The trained model.
        settings: Settings with the output folder and the name to register, if any.
        name: Name of the folder in ``models-out`` if neither is given.

    Returns:
        The folder of ``--out`` if it is given, else that of the registered model or the default.
    """
    from ..predict.locate import registered

    folders = [settings.out] if settings.out is not None else []
    if settings.register:
        folders.append(registered() / settings.register)
    folders = folders or [Path("models-out") / name]
    for folder in folders:
        model.save(folder)
        settings.save(folder)
        wrote(folder, f"model; predict with it: --model {folder}")
    return folders[0]


def require_tracking(register: str | None) -> None:
    """Check before a training that its model can be registered.

    Raises:
        ModelError: A model is to be registered in MLflow, which is not installed.
    """
    if register and find_spec("mlflow") is None:
        raise ModelError(
            "--register also registers the model in MLflow, which is not installed",
            hint=f"{extra_hint('track')}; or pass --no-track",
        )


def log_training(console: Console, run: RunLog, register: str | None) -> None:
    """Log a training to MLflow, with a warning if that fails.

    Raises:
        ModelError: Logging failed, and the model was to be registered in MLflow.
    """
    from ..models.tracking.mlflow_store import log_run

    try:
        run_id = log_run(run, register=register)
    except ModelError as error:
        if register:
            raise
        # The model has been saved, so a missing log is not an error.
        logger.warning("not tracked: %s", error)
        return
    console.print(f"logged to MLflow as {run_id}; see it with: opcast ui")


def digests(*paths: Path) -> dict[str, str]:
    """Digests of tables, or folders of tables, for :class:`RunLog`."""
    return {str(path): _digest(path) for path in paths}


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    for file in files:
        digest.update(str(file.relative_to(path)).encode() + file.read_bytes())
    # As long as Dataset.hash.
    return digest.hexdigest()[:16]


def without_devices(dataset: Dataset, exclude: Sequence[str]) -> Dataset:
    """Remove the rows of some devices from a dataset.

    Args:
        dataset: The dataset.
        exclude: As for :func:`excluded_names`.

    Raises:
        DatasetError: A device is not in the dataset.
        DeviceError: A name is unknown.
    """
    names = excluded_names(exclude, dataset.frame["device"].unique(), dataset.devices)
    return dataset.select(~dataset.frame["device"].isin(names))


def excluded_names(
    exclude: Sequence[str], present: Iterable[str], described: Mapping[str, DeviceSpec]
) -> list[str]:
    """Resolve the devices to exclude to the names that the rows use.

    Args:
        exclude: Names, aliases or device files.
        present: Names in the rows.
        described: Devices described by the dataset, by name.

    Raises:
        DatasetError: A device has no rows.
        DeviceError: A name is unknown to the dataset and the catalogue.
    """
    from ..features.devices.catalogue import choose_described

    have = sorted(set(present))
    names = [name if name in have else choose_described(name, described).name for name in exclude]
    for name in names:
        if name not in have:
            raise DatasetError(
                f"device {name!r} is not in the dataset", hint=f"it has: {', '.join(have)}"
            )
    return names
