"""What all neural estimators share: saving before fitting, and weights that do not fit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from opcast.common.errors import ModelError
from opcast.models.core.kernel_table import KernelTable
from opcast.models.neural.base import NeuralEstimator
from opcast.models.neural.estimators import MLPEstimator


def test_an_unfitted_network_says_so() -> None:
    with pytest.raises(ModelError, match="not fitted"):
        MLPEstimator()._weights()


def test_weights_of_another_size_are_refused(
    make_table: Callable[..., tuple[KernelTable, np.ndarray]],
) -> None:
    model: NeuralEstimator = MLPEstimator(hidden=8, layers=1, epochs=1, batch=64)
    model.fit_table(*make_table(100, 0))
    arrays = model._arrays()
    model._take(arrays)
    name = next(n for n in arrays if n.startswith("network/") and n.endswith("kernel"))
    with pytest.raises(ValueError, match="do not fit"):
        model._take({**arrays, name: arrays[name][:-1]})
