"""Choose the trainer for a dataset and a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from .settings import TrainSettings
from .train_kernels import run_train

if TYPE_CHECKING:
    from rich.console import Console

    from ..features.dataset import Dataset


@dataclass(frozen=True)
class Trainer:
    """One way to train.

    Attributes:
        subject: Description for messages.
        fields: Fields of :class:`TrainSettings` that it reads.
        run: Function that trains, prints the metrics, saves and tracks.
    """

    subject: str
    fields: frozenset[str]
    run: Callable[[Console, Dataset, TrainSettings], object]


def trainer_of(dataset: Dataset, model: str) -> Trainer:
    """Choose the trainer of a model for a dataset.

    Raises:
        DatasetError: The dataset mixes operators with kernels.
    """
    from .train_gpu_passes import run_train_passes
    from .train_operators import run_train_operators

    # Each trainer ignores some settings; the command refuses those when they are given.
    every = frozenset(own.name for own in fields(TrainSettings))
    if not dataset.of_operators:
        return Trainer("training on kernels and programs", every - {"max_rows", "join"}, run_train)
    if model == "gpu-xla":
        spare = {"split", "threads", "final", "params", "max_rows", "join"}
        return Trainer("training gpu-xla on operators", every - spare, run_train_passes)
    subject = "training on operators, whose tables hold the split in a column"
    return Trainer(subject, every - {"split"}, run_train_operators)
