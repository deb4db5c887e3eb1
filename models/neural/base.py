"""Base class of the neural estimators: inputs, target, early stopping and saving."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import numpy as np

from ...common.errors import ModelError
from ..core.kernel_table import KernelTable
from ..core.store import pack_tensors, unpack_tensors
from ..estimators.tabular import TabularEstimator
from ..training_data.stopping import stop_rows
from .scaling import Bound, Scaling

_FILE = "network.safetensors"


class NeuralEstimator(TabularEstimator):
    """A network on the standardised feature table, with a bounded log-ratio.

    The loss is the absolute error of the log-ratio, smoothed near zero: ``sqrt(r² + delta²)``
    (pseudo-Huber). Training is AdamW with a cosine schedule on mini-batches; the weights of the
    best epoch on held-back groups are kept. Equal seeds give equal models on the same machine.

    A subclass may fit more inputs in ``_look_at``; it trains in ``_train`` and predicts in
    ``_network_ratio``. Weights live in :attr:`weights` as plain arrays by name.
    """

    def __init__(self, **params: object) -> None:
        super().__init__(**params)
        self.inputs: Scaling | None = None
        # A placeholder until the targets are known.
        self.bound = Bound(-1.0, 1.0, 1.0, 0.0)
        self.weights: dict[str, np.ndarray] = {}

    @abstractmethod
    def _train(
        self, table: KernelTable, target: np.ndarray, stop: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Weights fitted to the rows that are not held back.

        Args:
            table: ``n`` kernels.
            target: Log-ratios, float32, shape ``(n,)``.
            stop: Rows that are held back, bool, shape ``(n,)``; perhaps none.
        """

    @abstractmethod
    def _network_ratio(self, table: KernelTable) -> np.ndarray:
        """Log-ratios by the network with :attr:`weights`, shape ``(n,)``, for at least one row."""

    @abstractmethod
    def _expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every array that :attr:`weights` must hold."""

    def _look_at(self, table: KernelTable) -> None:
        """Fit the standardisation of the inputs."""
        self.inputs = Scaling.fit(table.X)

    def _fit(self, table: KernelTable, target: np.ndarray, groups: np.ndarray) -> None:
        self._look_at(table)
        # The bounds come from all rows, held-back ones included: they limit predictions, no more.
        self.bound = Bound.fit(target)
        stop = stop_rows(groups, self.params["seed"])
        self.weights = self._train(table, target.astype(np.float32), stop)

    def _ratio(self, table: KernelTable) -> np.ndarray:
        return self._network_ratio(table) if len(table) else np.zeros(0)

    def _scaled(self, table: KernelTable) -> np.ndarray:
        return self._known(self.inputs)(table.X)

    def _known(self, scaling: Scaling | None) -> Scaling:
        """The scaling, which exists after fitting or loading.

        Raises:
            ModelError: The estimator was neither fitted nor loaded.
        """
        if scaling is None:
            raise ModelError(f"estimator {self.name!r} is not fitted", hint="call fit, or load")
        return scaling

    def _arrays(self) -> dict[str, np.ndarray]:
        """Everything that was learned, as arrays by name."""
        inputs = self._known(self.inputs)
        network = {f"network/{name}": array for name, array in self.weights.items()}
        return {**network, **inputs.to_arrays("inputs"), "bound": self.bound.to_array()}

    def _take(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restore what :meth:`_arrays` returned.

        Raises:
            KeyError: An array is missing.
            ValueError: The network's arrays do not match its parameters.
        """
        self.inputs = Scaling.from_arrays(arrays, "inputs")
        self.bound = Bound.from_array(arrays["bound"])
        own = {n: a for n, a in arrays.items() if n.startswith("network/")}
        self.weights = {name.removeprefix("network/"): array for name, array in own.items()}
        # A network with arrays of other shapes would fail late, or broadcast silently.
        shapes = {name: array.shape for name, array in self.weights.items()}
        if shapes != self._expected_shapes():
            raise ValueError("arrays of the network do not fit its parameters")

    def _weights(self) -> dict[str, bytes]:
        return {_FILE: pack_tensors(self._arrays())}

    def _restore(self, files: Mapping[str, bytes]) -> None:
        self._take(unpack_tensors(files[_FILE]))
