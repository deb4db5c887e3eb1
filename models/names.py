"""Names of the models that come with the package, and where they lie."""

from __future__ import annotations

from pathlib import Path

#: Folder of the models that come with the package.
PRETRAINED = Path(__file__).resolve().parent / "pretrained"
#: Model of library operators.
OPERATOR_MODEL = "gpu-operators"
#: Models of programs by platform.
CPU_MODEL, GPU_MODEL, TPU_MODEL = "cpu-xgboost", "gpu-xla", "tpu-xgboost"
