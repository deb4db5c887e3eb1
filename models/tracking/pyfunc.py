"""Registered models as MLflow Python functions: ``mlflow.pyfunc.load_model`` loads this module.

A model of kernels takes rows of ``kernel_ir`` (one-instruction HLO modules, the column of datasets)
and ``device``; a model of library operators takes rows of ``op`` (in the format of ``opcast predict
--op``) and ``device``. The result has one row each: microseconds with their 90 % interval, and
whether the row is in the training domain.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import pandas as pd

from ...common.errors import DatasetError, OpcastError
from ...common.interval import latency_fields
from ...features.devices.catalogue import find_device
from ...features.kernels.extract import kernel_from_ir
from ...features.operators.query import parse_op
from ..core.store import predicts_operators, read_manifest
from ..cost_model import CostModel
from ..operators import OpModel

Row = TypeVar("Row")
_KERNEL, _OP, _DEVICE = "kernel_ir", "op", "device"
_TIMES, _IN_DOMAIN = ("latency_us", "lo_us", "hi_us"), "in_domain"


class TrackedModel:
    """Predicts a frame of kernels or operators with a saved model.

    Args:
        folder: A model folder.
    """

    def __init__(self, folder: Path) -> None:
        operators = predicts_operators(read_manifest(folder))
        self.model: OpModel | CostModel = (OpModel if operators else CostModel).load(folder)

    @property
    def text(self) -> str:
        """The column with the text of kernels or operators."""
        return _OP if isinstance(self.model, OpModel) else _KERNEL

    def predict(self, model_input: pd.DataFrame, params: object = None) -> pd.DataFrame:
        """Predict rows; the parameters have MLflow's names.

        Args:
            model_input: Columns :attr:`text` and ``device``, shape ``(n, 2)``.
            params: Must be empty.

        Returns:
            ``latency_us``, ``lo_us``, ``hi_us`` and ``in_domain``, shape ``(n, 4)``.

        Raises:
            DatasetError: A column is missing, or parameters are given.
            OpcastError: A row is not a kernel or operator, or its device is unknown.
        """
        if params:
            raise DatasetError("a prediction takes no parameters", where=f"params {params!r}")
        missing = [name for name in (self.text, _DEVICE) if name not in model_input]
        if missing:
            raise DatasetError(
                f"column {missing[0]!r} is missing",
                hint=f"the model takes the columns {self.text} and {_DEVICE}",
            )
        rows = model_input.reset_index(drop=True)
        found = pd.DataFrame(index=rows.index, columns=[*_TIMES, _IN_DOMAIN])
        for device, part in rows.groupby(_DEVICE):
            found.loc[part.index] = self._on_device(str(device), part[self.text])
        types = dict.fromkeys(_TIMES, float) | {_IN_DOMAIN: bool}
        return found.astype(types).set_index(model_input.index)

    def _on_device(self, name: str, texts: pd.Series) -> pd.DataFrame:
        model = self.model
        device = model.devices[name] if name in model.devices else find_device(name)
        if isinstance(model, OpModel):
            # Rows only name their device, so the model needs its description.
            model.devices.setdefault(device.name, device)
            rows = pd.DataFrame([_read(parse_op, i, text) for i, text in texts.items()])
            ops = model.predict(rows.assign(device=device.name))
            times, in_domain = latency_fields(ops.latency, ops.lo, ops.hi), ops.in_domain
        else:
            kernels = [_read(kernel_from_ir, i, text) for i, text in texts.items()]
            found = model.predict_kernels(kernels, device)
            times, in_domain = latency_fields(found.latency, found.lo, found.hi), found.in_domain
        return pd.DataFrame({**times, _IN_DOMAIN: in_domain}, index=texts.index)


def _read(read: Callable[[str], Row], place: object, text: str) -> Row:
    try:
        return read(text)
    except OpcastError as error:
        where = ", ".join(filter(None, (f"row {place}", error.where)))
        raise type(error)(error.what, where=where, hint=error.hint) from None


def description(folder: Path) -> str:
    """Content of MLflow's file ``MLmodel`` for a model folder: this module, and the columns.

    Written according to MLflow's documentation ("MLmodel file"), since importing its classes would
    import all of MLflow.
    """
    import yaml

    text = _OP if predicts_operators(read_manifest(folder)) else _KERNEL
    given = dict.fromkeys((text, _DEVICE), "string")
    answer = dict.fromkeys(_TIMES, "double") | {_IN_DOMAIN: "boolean"}
    loader = {"loader_module": __name__, "python_version": platform.python_version()}
    return yaml.safe_dump(
        {
            "flavors": {"python_function": loader},
            "signature": {"inputs": _columns(given), "outputs": _columns(answer)},
        }
    )


def _columns(types: Mapping[str, str]) -> str:
    return json.dumps([{"name": k, "type": v, "required": True} for k, v in types.items()])


def _load_pyfunc(path: str) -> TrackedModel:
    """MLflow's hook: load the model from a folder of artifacts."""
    return TrackedModel(Path(path))
