"""An estimator that finds every kernel equally fast."""

import numpy as np

from opcast.models.core.base import KernelPrediction


class ConstantEstimator:
    name = "constant"

    def __init__(self, seconds: float = 1e-6) -> None:
        self.seconds = seconds

    def fit(self, dataset):
        return self

    def predict(self, kernels, device):
        n = len(kernels)
        latency = np.full(n, self.seconds)
        return KernelPrediction(
            latency, latency / 2, latency * 2, np.full(n, "latency"), np.full(n, "learned"),
            np.ones(n, bool),
        )  # fmt: skip

    def save(self, path):
        path.mkdir(parents=True)
        (path / "seconds.txt").write_text(str(self.seconds))

    @classmethod
    def load(cls, path):
        return cls(float((path / "seconds.txt").read_text()))
