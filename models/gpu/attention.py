"""Fused attention calls as published attention kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from ...features.device import DeviceSpec
from .answers import Answer, spread
from .library import Operators

#: Whose kernels stand for cuDNN's; ``trtllm`` has most rows.
LIBRARY = {"backend": "trtllm", "kernel": "torch_flow", "dtype": "bf16", "kv_dtype": "bf16"}
#: Five products instead of two, with the scores made a second time, at a somewhat lower rate: an
#: engineering estimate, since the tables hold forward passes alone.
BACKWARD = 3.0
#: Log half-widths added for another library, and for a backward pass.
OTHER_LIBRARY, OTHER_PASS = 0.25, 0.5


def attention_answer(
    calls: Sequence[dict[str, Any]], operators: Operators, device: DeviceSpec
) -> Answer:
    """Latencies of fused attention calls.

    Args:
        calls: As :func:`~opcast.models.gpu.describe.attention_of` describes them.
        operators: Published families.
        device: Where they run.
    """
    rows = pd.DataFrame(list(calls)).assign(**LIBRARY)
    answer = Answer.empty(len(rows))
    key = np.where(rows["causal"] == 1, "graph/context_attention", "graph/encoder_attention")
    for family in dict.fromkeys(key.tolist()):
        at = np.flatnonzero(key == family)
        found = operators.predict(family, rows.iloc[at], device)
        back = rows["backward"].to_numpy(bool)[at]
        plain = spread(found.latency, found.lo, found.hi, OTHER_LIBRARY)
        wide = spread(found.latency, found.lo, found.hi, OTHER_PASS)
        lower, upper = (np.where(back, w, p) for w, p in zip(wide, plain, strict=True))
        latency = found.latency * np.where(back, BACKWARD, 1.0)
        inside = found.in_domain & ~back
        answer.put(at, Answer.around(latency, lower, upper, f"learned:{family}", inside))
    return answer
