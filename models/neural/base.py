"""Common parts of the neural estimators: input scaling, bounded output, early stopping, saving.

Independent of the library that computes the gradients.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

import numpy as np

from ...common.errors import ModelError
from ..core.base import Params
from ..core.kernel_table import KernelTable
from ..core.store import pack_tensors, unpack_tensors
from ..estimators.tabular import TabularEstimator
from ..training_data.splits import stop_rows
from .batches import GraphBatch, GraphRows, Scaling, TableBatch, TableRows

logger = logging.getLogger(__name__)

W = TypeVar("W")
#: Weights of a network by name.
Weights = dict[str, np.ndarray]
#: Kernels before batching, and a padded batch: their features, optionally with their graphs.
Rows = TableRows | GraphRows
Batch = TableBatch | GraphBatch

#: Share of the steps with rising learning rate: Adam's estimates of the second moment vary too much
#: in the first steps (Liu et al., On the Variance of the Adaptive Learning Rate and Beyond, ICLR
#: 2020). The value is an engineering estimate.
WARM_UP = 0.05
#: Norm to which larger gradients are scaled down (Pascanu et al., ICML 2013), so that a batch with
#: outliers does not undo previous learning.
CLIP_NORM = 1.0
#: Share of the training targets beyond each bound before :data:`ROOM` is added, so that faulty
#: labels do not determine the bounds.
TAIL = 0.0005
#: Distance between those quantiles and the bounds, in log units (a factor of 1.65). Engineering
#: estimate.
ROOM = 0.5
_FILE = "network.safetensors"


def learning_rates(steps: int, peak: float) -> np.ndarray:
    """Learning rate of every step: linear warm-up, then cosine decay to zero.

    Args:
        steps: Number of steps.
        peak: Largest learning rate.

    Returns:
        float32, shape ``(steps,)``.
    """
    rising = max(1, round(WARM_UP * steps))
    at = np.arange(steps)
    falling = 0.5 * (1.0 + np.cos(np.pi * np.clip((at - rising) / max(1, steps - rising), 0, 1)))
    return np.asarray(peak * np.minimum((at + 1) / rising, falling), np.float32)


def shuffled(rows: int, batch: int, rng: np.random.Generator) -> np.ndarray:
    """Rows in random order, cut into full batches: shape ``(steps, min(batch, rows))``.

    The remainder after the last full batch is left out; it differs between epochs.
    """
    size = min(batch, rows)
    steps = rows // size
    return rng.permutation(rows)[: steps * size].reshape(steps, size)


def best_epoch(epochs: Iterator[W], error: Callable[[W], float] | None, patience: int) -> W:
    """Weights of the epoch with the least error on held-back rows.

    Args:
        epochs: Yields the weights after every epoch; at least once.
        error: Error of weights on the held-back rows; ``None`` takes the last weights.
        patience: Epochs without improvement before stopping.
    """
    best: W | None = None
    least, since = np.inf, 0
    for number, weights in enumerate(epochs):
        # Without an error, decreasing values make the last epoch win.
        current = error(weights) if error else -float(number)
        logger.debug("epoch %d: error %.4f", number, current)
        if current < least or best is None:
            best, least, since = weights, current, 0
            continue
        since += 1
        if since >= patience:
            break
    assert best is not None
    return best


@dataclass(frozen=True, slots=True)
class Bound:
    """Keeps log-ratios, and so the roofline utilization, between two bounds.

    The utilization ``base / latency = exp(-ratio)`` of a kernel is bounded as in NeuSight (Lee et
    al., ASPLOS 2025): above by the roofline, with an allowance since kernels with cached data beat
    it, and below, so that no prediction is a thousand times its roofline. Both bounds are taken
    from the training labels. In between, with ``s`` the logistic function,

        ratio(u) = low + (high - low) · s(slope · u + shift)

    where slope and shift are such that ``ratio(0)`` is the training median and ``ratio'(0) = 1``.

    Attributes:
        low: Least log-ratio.
        high: Largest log-ratio.
        slope: Slope of the logistic function's argument.
        shift: Shift of the logistic function's argument.
    """

    low: float
    high: float
    slope: float
    shift: float

    @classmethod
    def fit(cls, target: np.ndarray) -> Self:
        """Learn from training targets, shape ``(n,)``."""
        below, middle, above = np.quantile(target, [TAIL, 0.5, 1 - TAIL]).tolist()
        low, high = below - ROOM, above + ROOM
        # Value of the logistic function at u = 0; its slope there is share · (1 - share).
        share = (middle - low) / (high - low)
        slope = 1.0 / ((high - low) * share * (1.0 - share))
        return cls(low, high, slope, float(np.log(share / (1.0 - share))))

    def __call__(self, raw: Any, logistic: Callable[[Any], Any]) -> Any:
        """Convert a network's raw outputs to log-ratios.

        Args:
            raw: Array or tensor of any library.
            logistic: The logistic function of that library.
        """
        return self.low + (self.high - self.low) * logistic(self.slope * raw + self.shift)

    def to_array(self) -> np.ndarray:
        """The four numbers, float64."""
        return np.array([self.low, self.high, self.slope, self.shift])

    @classmethod
    def from_array(cls, array: np.ndarray) -> Self:
        """Restore from the array of :meth:`to_array`.

        Raises:
            TypeError: There are not four numbers.
        """
        return cls(*array.tolist())


@dataclass(frozen=True)
class NetworkParams(Params):
    """Parameters of a network and its training.

    Attributes:
        hidden: Width of a layer; for a graph network, of a node.
        layers: Number of hidden layers; for a graph network, of the perceptron.
        epochs: Most passes over the rows; early stopping may use fewer.
        batch: Rows per step.
        learning_rate: Peak of the learning rate.
        weight_decay: Weight decay of AdamW.
        delta: Errors of the log-ratio below this count quadratically.
        stop_epochs: Epochs without improvement before stopping.
        seed: Seed of weights, order and held-back groups.
    """

    hidden: int = 256
    layers: int = 3
    epochs: int = 30
    batch: int = 256
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    delta: float = 0.1
    stop_epochs: int = 10
    seed: int = 0


class Network(Protocol):
    """The layers in one library, with their weights."""

    def step(self, batch: Any, rate: np.float32) -> None:
        """Update the weights by AdamW at a learning rate."""

    def ratio(self, batch: Any) -> np.ndarray:
        """Log-ratios of the batch's rows including padding, shape ``(rows,)``."""

    def arrays(self) -> dict[str, np.ndarray]:
        """Copies of the weights by name."""


class NeuralEstimator(TabularEstimator):
    """A network on the standardized feature table, with a bounded log-ratio.

    The loss is the absolute error of the log-ratio, smoothed near zero: ``sqrt(r² + delta²)``
    (pseudo-Huber). Training is AdamW with a cosine schedule on mini-batches; the weights of the
    best epoch on held-back groups are kept. Equal seeds give equal models on the same machine.

    A subclass defines the layers in ``_network`` and their input in ``_rows``; it may fit more
    inputs in ``_look_at``. Weights are stored in :attr:`weights` as plain arrays by name.
    """

    keywords = NetworkParams
    params: NetworkParams

    def __init__(self, **params: object) -> None:
        super().__init__(**params)
        self.inputs: Scaling | None = None
        # A placeholder until the targets are known.
        self.bound = Bound(-1.0, 1.0, 1.0, 0.0)
        self.weights: Weights = {}

    @abstractmethod
    def _network(self, weights: Weights | None = None) -> Network:
        """A network with the given weights, or with new ones drawn with the seed."""

    @abstractmethod
    def _rows(self, table: KernelTable, target: np.ndarray | None = None) -> Rows:
        """The table in the form of a network's input; missing targets are zero."""

    def _look_at(self, table: KernelTable) -> None:
        """Fit the standardization of the inputs."""
        self.inputs = Scaling.fit(table.X)

    def _fit(self, table: KernelTable, target: np.ndarray, groups: np.ndarray) -> None:
        self._look_at(table)
        # The bounds come from all rows, including held-back ones: they only limit predictions.
        self.bound = Bound.fit(target)
        p, rows = self.params, self._rows(table, target.astype(np.float32))
        stop = stop_rows(groups, p.seed)
        held: list[Batch] = list(rows.take(stop).batches(p.batch))
        self.weights = best_epoch(
            self._epochs(rows.take(~stop)),
            (lambda weights: self._error(weights, held)) if held else None,
            p.stop_epochs,
        )

    def _epochs(self, rows: Rows) -> Iterator[Weights]:
        """Weights after every epoch over the rows."""
        p, network = self.params, self._network()
        rng = np.random.default_rng(p.seed)
        for epoch in range(p.epochs):
            order = shuffled(len(rows.y), p.batch, rng)
            rates = learning_rates(p.epochs * len(order), p.learning_rate)
            for step, batch in rows.training_batches(order):
                network.step(batch, rates[epoch * len(order) + step])
            yield network.arrays()

    def _error(self, weights: Weights, held: list[Batch]) -> float:
        """Mean absolute error of the log-ratio."""
        network = self._network(weights)
        total, count = 0.0, 0.0
        for batch in held:
            total += float((np.abs(network.ratio(batch) - batch.y) * batch.weight).sum())
            count += float(batch.weight.sum())
        return total / count

    def _ratio(self, table: KernelTable) -> np.ndarray:
        if not len(table):
            return np.zeros(0)
        network = self._network(self.weights)
        batches = self._rows(table).batches(self.params.batch)
        return np.concatenate([network.ratio(batch)[batch.weight > 0] for batch in batches])

    def _scaled(self, table: KernelTable) -> np.ndarray:
        return self._known(self.inputs)(table.X)

    def _known(self, scaling: Scaling | None) -> Scaling:
        """The scaling, which is set by fitting or loading.

        Raises:
            ModelError: The estimator was neither fitted nor loaded.
        """
        if scaling is None:
            raise ModelError(f"estimator {self.name!r} is not fitted", hint="call fit, or load")
        return scaling

    def _arrays(self) -> dict[str, np.ndarray]:
        """All learned arrays by name."""
        inputs = self._known(self.inputs)
        network = {f"network/{name}": array for name, array in self.weights.items()}
        return {**network, **inputs.to_arrays("inputs"), "bound": self.bound.to_array()}

    def _take(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restore the result of :meth:`_arrays`.

        Raises:
            KeyError: An array is missing.
            ValueError: The network's arrays do not match its parameters.
        """
        self.inputs = Scaling.from_arrays(arrays, "inputs")
        self.bound = Bound.from_array(arrays["bound"])
        own = {n: a for n, a in arrays.items() if n.startswith("network/")}
        self.weights = {name.removeprefix("network/"): array for name, array in own.items()}
        # A network with arrays of other shapes would fail late, or broadcast silently.
        shapes, expected = (
            {name: array.shape for name, array in own.items()}
            for own in (self.weights, self._network().arrays())
        )
        if shapes != expected:
            raise ValueError("arrays of the network do not fit its parameters")

    def _weights(self) -> dict[str, bytes]:
        return {_FILE: pack_tensors(self._arrays())}

    def _restore(self, files: Mapping[str, bytes]) -> None:
        self._take(unpack_tensors(files[_FILE]))
