"""Number formats of a served model, by the names that checkpoints, engines and tables have."""

from __future__ import annotations

import re
from typing import NamedTuple

from ...common.errors import PlanError
from ..step.workload import Workload
from .policies import framework_defaults
from .served import WEIGHTS, ServedModel

#: Formats of weights by words that the names of sources contain, the first that does.
_WEIGHTS = (
    ("nvfp4", "nvfp4"),
    ("mxfp4|mxfp6", "mxfp4"),
    ("w4a8|w4afp8|int4|awq|gptq|w4a16|q4|4bit", "int4"),
    (r"^fp4|\bfp4", "nvfp4"),
    ("fp8.?block|blockwise", "fp8_block"),
    ("fp8|float8|mxfp8|f8e", "fp8"),
    ("int8|w8a8|smoothquant", "int8"),
    ("^(fp16/bf16|bf16/fp16)", "bf16"),
    ("bf16|bfloat16", "bf16"),
    (r"^(fp|f|float)16", "f16"),
    (r"^(fp|f|float)32", "f32"),
)
#: Formats of the cache likewise; those of vLLM and SGLang are the values of their
#: ``--kv-cache-dtype``.
_CACHES = {
    **dict.fromkeys(("", "fp16", "f16", "fp16/bf16", "float16", "bfloat16"), "bf16"),
    **dict.fromkeys(("fp8_e4m3", "fp8_e4m3fn", "fp8_e5m2", "fp8_inc", "fp8_ds_mla"), "fp8"),
}
#: Formats in which models are published whose names do not say one, by their ``config.json`` on
#: huggingface.co (``quantization_config``); everything else is published in 16 bits. Distilled
#: models of DeepSeek-R1 have the sizes and the format of Llama and Qwen.
_PUBLISHED = (
    ("gpt-oss", "mxfp4"),
    (r"deepseek-(v3|r1(?!.*(llama|qwen)))", "fp8"),
    (r"kimi-k2(-thinking|\.)", "int4"),
    ("kimi-k2", "fp8"),
    ("minimax-m2", "fp8"),
)


class Formats(NamedTuple):
    """Number formats as a command says them; empty for those of published checkpoints.

    Attributes:
        weights: Such as ``fp8``.
        cache: Of keys and values.
        experts: Of the experts alone.
        activations: ``bf16`` for products on widened weights.
        linear_layers: Layers with a recurrent state; 0 for those that the model is known to have.
        framework: Which may choose the format of the cache; lower case.
    """

    weights: str = ""
    cache: str = ""
    experts: str = ""
    activations: str = ""
    linear_layers: int = 0
    framework: str = ""


def format_in(name: str) -> str:
    """The format that a checkpoint's name says, else that its model is published in.

    Empty for 16 bits. ``openai/gpt-oss-120b`` is in ``mxfp4``, ``Qwen/Qwen3-32B-FP8`` in ``fp8``.
    """
    text = name.lower().replace("_", "-").rsplit("/", 1)[-1]
    rules = (*_WEIGHTS, *_PUBLISHED)
    return next((own for pattern, own in rules if re.search(pattern, text)), "")


def in_formats(workload: Workload, formats: Formats) -> ServedModel:
    """A model in the formats that published checkpoints of a name have.

    Args:
        workload: Its sizes.
        formats: Of its numbers.

    Raises:
        PlanError: A format is not known, or is that of what the model has not.
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
    plain = "bf16"
    other, attention, every = weights, "", weights
    if workload.experts and weights in ("mxfp4", "int4"):
        # Published MoE checkpoints in these formats quantise their experts only (gpt-oss, Kimi).
        other = plain
    if weights == "fp8" and workload.kv_lora:
        # DeepSeek's checkpoints have scales for blocks of 128 x 128.
        other = every = "fp8_block"
    if weights == "nvfp4" and workload.kv_lora:
        # NVIDIA's checkpoints of DeepSeek's models leave attention in 16 bits.
        attention = plain
    kept = "" if cache.lower() == "auto" else cache.lower().replace("-", "_")
    if not kept and weights in framework_defaults(formats.framework).cache_follows:
        kept = "fp8"
    kept = _CACHES.get(kept, kept)
    own = _weights_of(experts) or every
    return ServedModel(workload, other, own, kept, formats.linear_layers, attention)


def _weights_of(text: str) -> str:
    """One of :data:`WEIGHTS` for a format's name, or the name itself."""
    name = text.lower()
    if name in WEIGHTS:
        return name
    return next((own for pattern, own in _WEIGHTS if re.search(pattern, name)), name)
