"""The model that a row of a table of serving means: sizes, formats, what its notes say."""

from __future__ import annotations

import re
from difflib import get_close_matches

from ...common.errors import PlanError
from ...simulate.serving.policies import FRAMEWORKS
from ...simulate.serving.served import ServedModel
from ...simulate.step.workload import Workload
from .step_table import Cells

#: Formats of weights by the names that sources use.
_WEIGHTS = {
    "fp16/bf16": "bf16",
    "fp16": "f16",
    "fp8-block": "fp8_block",
    "fp8_block": "fp8_block",
    "int8": "int8",
    "w8a8": "int8",
    "int4": "int4",
    "awq": "int4",
    "gptq": "int4",
    "fp4": "nvfp4",
}
#: Formats of the cache likewise; those of vLLM and SGLang are the values of their
#: ``--kv-cache-dtype``.
_CACHES = {
    **dict.fromkeys(("", "fp16", "f16", "fp16/bf16", "float16", "bfloat16"), "bf16"),
    **dict.fromkeys(("fp8_e4m3", "fp8_e4m3fn", "fp8_e5m2", "fp8_inc", "fp8_ds_mla"), "fp8"),
}
#: Sizes of models whose tables lack them, from their ``config.json`` files. DeciLM's key-value
#: heads differ by layer: 2 on average.
_SIZES: dict[str, dict[str, int | bool | str]] = {
    "decilm-7b": {"layers": 32, "d_model": 4096, "heads": 32, "kv_heads": 2, "d_ff": 14336},
    "aquila-7b": {"layers": 32, "d_model": 4096, "heads": 32, "d_ff": 11008, "vocab": 100008},
    "bloom-7b1": {
        "layers": 30,
        "d_model": 4096,
        "heads": 32,
        "d_ff": 16384,
        "vocab": 250880,
        "gated": False,
        "tied": True,
    },
    "opt-6.7b": {
        "layers": 32,
        "d_model": 4096,
        "heads": 32,
        "d_ff": 16384,
        "vocab": 50272,
        "gated": False,
        "tied": True,
    },
    "qwen2.5-vl-72b": {
        "layers": 80,
        "d_model": 8192,
        "heads": 64,
        "kv_heads": 8,
        "d_ff": 29568,
        "vocab": 152064,
    },
}


def framework_of(text: str) -> str:
    """A framework's name in lower case, with the engines of one project as one."""
    name = text.lower().split(" (")[0].strip()
    for known in ("tensorrt-llm", "sglang", "vllm", "lmdeploy", "deepspeed-mii"):
        if known in name.replace("trtllm", "tensorrt-llm").replace("trt-llm", "tensorrt-llm"):
            return known
    return name


def known_framework(text: str) -> str:
    """:func:`framework_of` of an engine that is known, or that is not named.

    Raises:
        PlanError: The name is none of a framework.
    """
    name = framework_of(text)
    if name and name not in FRAMEWORKS:
        near = get_close_matches(name, FRAMEWORKS, n=3, cutoff=0.5) or list(FRAMEWORKS)
        raise PlanError(
            f"framework {text!r} is not known",
            hint=f"{', '.join(near)}; empty for one that is not listed",
        )
    return name


def served_model(cell: Cells) -> ServedModel:
    """The model of a row.

    Raises:
        PlanError: Its sizes or formats are not known, or do not make a model.
    """
    known = _SIZES.get(cell.text("model").lower(), {})

    def size(name: str, default: int = 0) -> int:
        return cell.count(name, int(known.get(name, default)))

    if not size("layers") or not size("d_model"):
        raise PlanError(
            f"the sizes of {cell.text('model') or 'the model'} are not known",
            hint="give layers, d_model, heads, d_ff and vocab",
        )
    experts = size("experts")
    note = cell.text("attention_note")
    width = size("moe_d_ff") if experts else size("d_ff")
    arch = cell.text("arch").lower()
    gated = bool(known.get("gated", arch != "gpt"))
    dense = _dense_layers(cell, note, size("layers")) if experts else 0
    latent = _latent(note) if cell.flag("mla", False) or "kv_lora" in note else {}
    windows = _window(note, size("layers"))
    head = latent.pop("head_dim", 0) or size("head_dim")
    workload = Workload(
        layers=size("layers"),
        d_model=size("d_model"),
        heads=size("heads", 1),
        kv_heads=0 if latent else size("kv_heads"),
        head_dim=head,
        d_ff=width or size("d_ff"),
        vocab=size("vocab", 32000),
        seq=1,
        batch=1,
        dtype="bf16",
        experts=experts,
        top_k=size("top_k") if experts else 0,
        shared_experts=size("shared_experts") if experts else 0,
        dense_layers=dense,
        dense_ff=size("d_ff") if dense else 0,
        gated=gated,
        norm="layernorm" if arch == "gpt" else "rmsnorm",
        tied=bool(known.get("tied", False)),
        mode="forward",
        **latent,  # type: ignore[arg-type]
        **windows,  # type: ignore[arg-type]
    )
    return _formats(cell, workload, _linear_layers(note, arch, workload.layers))


def _formats(cell: Cells, workload: Workload, linear: int) -> ServedModel:
    return in_formats(
        workload,
        cell.text("weight_dtype"),
        cell.text("kv_dtype"),
        framework_of(cell.text("framework")),
        linear,
    )


def in_formats(
    workload: Workload,
    weights: str = "",
    cache: str = "",
    framework: str = "",
    linear: int = 0,
    *,
    experts: str = "",
    activations: str = "",
) -> ServedModel:
    """A model in the formats that published checkpoints of a name have.

    Args:
        workload: Its sizes.
        weights: Such as ``fp8``; empty for 16 bits.
        cache: Such as ``fp8``; empty for 16 bits, or what the framework takes by itself.
        framework: Lower case.
        linear: Layers with a recurrent state instead of attention over a cache.
        experts: Format of the experts alone; empty for what checkpoints do.
        activations: ``bf16`` for products on widened weights; empty for what the format says.

    Raises:
        PlanError: A format is not known.
    """
    text = weights.lower() or "bf16"
    weights = _WEIGHTS.get(text, text)
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
    if not kept and weights in ("fp8", "nvfp4", "mxfp4") and framework == "tensorrt-llm":
        # TensorRT-LLM follows the checkpoint, and those of NVIDIA's quantiser say fp8.
        kept = "fp8"
    kept = _CACHES.get(kept, kept)
    own = _WEIGHTS.get(experts.lower(), experts.lower()) or every
    return ServedModel(workload, other, own, kept, linear, attention)


def _latent(note: str) -> dict[str, int]:
    """Widths of latent attention, DeepSeek-V3's where the note does not say."""

    def of(name: str, default: int) -> int:
        found = re.search(rf"{name} (\d+)", note)
        return int(found[1]) if found else default

    return {
        "kv_lora": of("kv_lora", 512),
        "q_lora": of("q_lora", 0 if "kv_lora" in note else 1536),
        "rope_dim": of("rope", 64),
        "head_dim": of("nope", 128),
        "v_dim": of(r"\bv", 128),
    }


def _window(note: str, layers: int) -> dict[str, object]:
    """Window of sliding or chunked attention, and the share of layers that have it."""
    found = re.search(r"(?:sliding window|chunked attention|window) (?:of )?(\d+)", note)
    if not found:
        return {}
    share = _share(note.split(found[0])[0] or note, layers)
    return {"window": int(found[1]), "window_share": share}


def _share(note: str, layers: int) -> float:
    """Share of layers that words before a feature name; 1 for all."""
    some = re.findall(r"(\d+) (?:of|in|:) ?(\d+) ?(?:layers)?", note)
    if some:
        part, whole = map(int, some[-1])
        return min(1.0, part / max(whole, 1))
    every = re.search(r"every (\d+)(?:nd|rd|th)", note)
    if every:
        return 1.0 / int(every[1])
    return 0.5 if "every second" in note else 1.0


def _dense_layers(cell: Cells, note: str, layers: int) -> int:
    """Layers without experts; where they stand in the model does not matter to its time."""
    every = re.search(r"MoE every (\d+)(?:nd|rd|th) layer", note)
    if every:
        return layers - layers // int(every[1])
    return cell.count("dense_layers", 0)


#: Words for layers with a recurrent state instead of attention over a cache.
_RECURRENT = r"gated delta|gdn|deltanet|mamba|linear|lightning|kda|recurrent|ssm"


def _linear_layers(note: str, arch: str, layers: int) -> int:
    found = re.search(rf"(\d+) of (\d+) (?:layers )?[^,;]*?(?:{_RECURRENT})", note, re.IGNORECASE)
    if found:
        share = int(found[1]) / int(found[2])
    elif re.search(_RECURRENT, note, re.IGNORECASE) or arch == "hybrid":
        # Three of four layers, as published hybrids have (Qwen3-Next, Kimi Linear).
        full = re.search(r"every (\d+)th layer (?:is )?(?:full|softmax)", note)
        share = 1.0 - 1.0 / int(full[1]) if full else 0.75
    else:
        return 0
    return min(layers - 1, round(layers * share))
