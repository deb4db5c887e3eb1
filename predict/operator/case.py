"""An operator to predict, its device and the model.

The fields are options of ``opcast predict --op`` and ``opcast explain --op``, which
:func:`.predict.predict_op` and :func:`.predict.explain_operator` answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...common.options import DeviceOpt, ModelOpt, OpOpt, PowerCapOpt


@dataclass(frozen=True)
class OperatorCase:
    """An operator on a device.

    Attributes:
        op: Text as accepted by :func:`~opcast.features.operators.query.parse_op`.
        device: Name, or path of a device file.
        model: Name or folder of an operator model; ``default`` is the shipped one.
        power_cap_w: Sustained power of the device in watts, below its limit.
    """

    op: OpOpt = ""
    device: DeviceOpt = "local"
    model: ModelOpt = "default"
    power_cap_w: PowerCapOpt = None
