"""Number formats of a served model, from the names used by checkpoints, engines and tables."""

from __future__ import annotations

import re
from typing import NamedTuple

from ...common.errors import PlanError
from ...common.files import own_data
from ..step.workload import Workload
from .policies import framework_defaults
from .served import WEIGHTS, ServedModel

#: Name patterns of formats.
_NAMES = own_data("simulate/serving/names.yaml")


class Formats(NamedTuple):
    """Number formats given by the user; empty for those of the published checkpoint.

    Attributes:
        weights: Weight format, such as ``fp8``.
        cache: Format of the KV cache.
        experts: Format of the experts only.
        activations: ``bf16`` for weight-only quantisation.
        linear_layers: Layers with a recurrent state; 0 for the model's own number.
        framework: Lower-case name of the framework, which may choose the cache format.
    """

    weights: str = ""
    cache: str = ""
    experts: str = ""
    activations: str = ""
    linear_layers: int = 0
    framework: str = ""


def format_in(name: str) -> str:
    """Weight format in a checkpoint's name, or else the one in which its model is published.

    Empty for 16 bits. Examples: ``openai/gpt-oss-120b``: ``mxfp4``; ``Qwen/Qwen3-32B-FP8``:
    ``fp8``.
    """
    text = name.lower().replace("_", "-").rsplit("/", 1)[-1]
    rules = (*_NAMES["weights"].items(), *_NAMES["published"].items())
    return next((own for pattern, own in rules if re.search(pattern, text)), "")


def in_formats(workload: Workload, formats: Formats) -> ServedModel:
    """Apply formats to a model, as published checkpoints with these formats do.

    Args:
        workload: Model sizes.
        formats: Number formats.

    Raises:
        PlanError: A format is unknown, or applies to a part that the model lacks.
    """
    cache, experts, activations = formats.cache, formats.experts, formats.activations
    weights = _weights_of(formats.weights) or "bf16"
    if experts and not workload.experts:
        raise PlanError(f"experts in {experts!r}: the model has none", where="experts")
    if activations not in ("", "bf16", "f16", weights):
        raise PlanError(
            f"activations in {activations!r} under weights in {weights!r}",
            hint="bf16 for weights alone, or nothing for what the format says",
        )
    if activations in ("bf16", "f16") and weights in ("fp8", "int8"):
        weights += "_wo"
    elif activations in ("bf16", "f16") and weights in ("fp8_block", "nvfp4"):
        raise PlanError(f"products of {weights} take activations in it", hint="fp8, int8 or int4")
    other, attention, every = weights, "", weights
    if workload.experts and weights in ("mxfp4", "int4"):
        # Published MoE checkpoints in these formats quantise only their experts (gpt-oss, Kimi).
        other = "bf16"
    if weights == "fp8" and workload.kv_lora:
        # DeepSeek's checkpoints have one scale per block of 128 x 128.
        other = every = "fp8_block"
    if weights == "nvfp4" and workload.kv_lora:
        # NVIDIA's checkpoints of DeepSeek models leave attention in 16 bits.
        attention = "bf16"
    kept = "" if cache.lower() == "auto" else cache.lower().replace("-", "_")
    if not kept and weights in framework_defaults(formats.framework).cache_follows:
        kept = "fp8"
    kept = _NAMES["caches"].get(kept, kept)
    own = _weights_of(experts) or every
    return ServedModel(workload, other, own, kept, formats.linear_layers, attention)


def _weights_of(text: str) -> str:
    """The member of :data:`WEIGHTS` for a format name, or the name itself if there is none."""
    name = text.lower()
    if name in WEIGHTS:
        return name
    return next(
        (own for pattern, own in _NAMES["weights"].items() if re.search(pattern, name)), name
    )
