"""Training time on 100,000 kernels, beside ridge on the same table."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).parent))
from common import show
from opcast.features.dataset import Dataset
from opcast.models.training.train import train
from opcast.models.training_data.prepared import prepare
from opcast.workflows.reports.accuracy import COMMITTED

ROWS = 100_000


def main() -> None:
    dataset = Dataset.load(COMMITTED)
    kernels = dataset.frame[dataset.frame["level"] != "program"]
    copies = -(-ROWS // len(kernels))
    frames = [kernels.assign(sample_id=kernels["sample_id"] + f"-{i}") for i in range(copies)]
    big = Dataset(pd.concat(frames, ignore_index=True).head(ROWS), dataset.runs)
    start = time.perf_counter()
    prepared = prepare(big)
    features = time.perf_counter() - start
    seconds = {}
    for model in ("ridge", "xgboost"):
        start = time.perf_counter()
        train(prepared, model, "random", n_jobs=2, folds=2)
        seconds[model] = time.perf_counter() - start
    ratio = seconds["xgboost"] / seconds["ridge"]
    show(
        f"train xgboost on {ROWS} kernels, evaluation included", seconds["xgboost"], 60.0,
        f"{ratio:.1f} times ridge; reading features {features:.1f} s",
    )  # fmt: skip


if __name__ == "__main__":
    main()
