"""The rate at which a matrix product of f32 operands runs."""

from __future__ import annotations

import json
from collections.abc import Mapping

from .dtypes import REDUCED


def matrix_rate(dtype: str, attrs: Mapping[str, object]) -> str:
    """Name of the matrix rate of a ``dot``, ``convolution`` or library call of one.

    XLA runs f32 operands at precision ``default`` and ``high`` as TF32 where the device has it;
    only ``highest``, or an algorithm of that name, asks for true FP32. Algorithms named
    ``…bf16_bf16…`` split the operands into bf16.

    Args:
        dtype: Element type of the operands.
        attrs: Attributes of the instruction.

    Returns:
        A key of :attr:`DeviceSpec.peak_flops`: ``dtype`` itself for every other type.
    """
    if dtype != "f32":
        return dtype
    # Attributes come as tuples (StableHLO), texts (HLO) or dictionaries (library calls): their
    # names are searched as text.
    text = _text(attrs)
    if "bf16_bf16" in text:
        return "bf16"
    # The algorithm of true FP32 is "dot_f32_f32_f32"; TF32's, "dot_tf32_tf32_f32", must not pass
    # for it.
    exact = "highest" in text or "f32_f32_f32" in text.replace("tf32", "")
    return "f32" if exact else REDUCED


def _text(attrs: Mapping[str, object]) -> str:
    config = attrs.get("backend_config")
    parts = [attrs.get("operand_precision", ""), attrs.get("algorithm", "")]
    if isinstance(config, dict):
        own = config.get("gemm_backend_config", config)
        parts.append(json.dumps(own.get("precision_config", "")) if isinstance(own, dict) else "")
    return " ".join(str(part) for part in parts).lower()
