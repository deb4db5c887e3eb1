"""Models by name, and Hugging Face's ``config.json``, as settings of a workload."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ...common.errors import PlanError
from ...common.files import parse_json, parse_yaml
from ...common.types import JsonMapping
from .hybrid import Recurrence, nemotron_layers, recurrence_of, recurrent_layers

_FILE = Path(__file__).with_name("presets.yaml")
#: What to do about a model that a workload cannot describe.
_INSTEAD = "predict its program instead: opcast predict FILE --device NAME"
#: A context longer than this is what a model may be used with, not what it is trained with.
_MOST_SEQ = 8192


@dataclass(frozen=True)
class Preset:
    """A model as settings of a workload.

    Attributes:
        settings: By field of :class:`~.workload.Workload`.
        notes: What of the model is left out.
        step_notes: What steps leave out, but serving does not.
        published: Parameters that its source states; 0 where none is known.
        source: Where the sizes are from.
        linear_layers: Layers with a recurrent state instead of attention over a cache.
        recurrence: Sizes of these layers; ``None`` where none are known.
        bare_layers: Layers without a feed-forward.
        weights: Format that a checkpoint's weights are published in; empty for 16 bits.
        served_only: Why serving alone can describe it; empty if steps can as well.
    """

    settings: dict[str, object]
    notes: tuple[str, ...] = ()
    step_notes: tuple[str, ...] = ()
    published: float = 0.0
    source: str = ""
    linear_layers: int = 0
    recurrence: Recurrence | None = None
    bare_layers: int = 0
    weights: str = ""
    served_only: str = ""


def find_preset(name: str) -> Preset | None:
    """Return a model of ``presets.yaml``; ``None`` if there is none of that name.

    Args:
        name: Such as ``llama-3-8b``; case and underscores do not matter.

    Raises:
        PlanError: The model is known, but no workload can describe it.
    """
    if why := unsupported(name):
        raise PlanError(f"{name} is {why}, which no workload has", hint=_INSTEAD)
    return _read()[0].get(name.lower().replace("_", "-"))


def unsupported(name: str) -> str:
    """Why no workload can describe a model that is known; empty for others."""
    own = name.lower().replace("_", "-")
    families = _read()[1].items()
    return next((why for f, why in families if own == f or own.startswith(f + "-")), "")


def preset_names() -> list[str]:
    """Names of all models, in the order of the file."""
    return list(_read()[0])


def close_names(name: str) -> list[str]:
    """Names like one that is not known."""
    return difflib.get_close_matches(name.lower(), preset_names(), 4, 0.5)


@cache
def _read() -> tuple[dict[str, Preset], dict[str, str]]:
    data: Any = parse_yaml(_FILE.read_text(encoding="utf-8"))
    presets = {}
    for family in data["families"].values():
        for name, own in family["models"].items():
            settings = {**family["common"], **own}
            notes = (*family.get("notes", ()), *settings.pop("notes", ()))
            of_steps = (*family.get("step_notes", ()), *settings.pop("step_notes", ()))
            published = float(settings.pop("published")) * 1e9
            presets[name] = Preset(settings, notes, of_steps, published, family["source"])
    return presets, data["unsupported"]


@dataclass(frozen=True)
class _Kind:
    """How a model type's configuration is read.

    Attributes:
        read: Adds what is particular to the type.
        defaults: Values of keys that its configurations leave out (the classes of transformers).
    """

    read: Callable[[JsonMapping, dict[str, object], list[str]], None]
    defaults: dict[str, object] = field(default_factory=dict)


def read_config(path: Path) -> Preset:
    """Read a model's ``config.json``, as transformers writes it; nothing is downloaded.

    Args:
        path: The file.

    Raises:
        PlanError: It cannot be read, lacks a key, or describes a model that no workload can.
    """
    where = str(path)
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"the configuration cannot be read: {error}", where=where) from None
    if not isinstance(data, dict) or "model_type" not in data:
        raise PlanError(
            "no configuration of a model: it has no model_type",
            where=where,
            hint="give the config.json of a model on huggingface.co",
        )
    notes: list[str] = []
    if isinstance(data.get("text_config"), dict):
        # A model of text and images: the decoder alone.
        notes.append(f"only the text model of {data['model_type']} is described")
        whole = {"tie_word_embeddings": data.get("tie_word_embeddings", True)}
        if "quantization_config" in data:
            whole["quantization_config"] = data["quantization_config"]
        data = {**data["text_config"], **whole}
    kind = str(data.get("model_type", ""))
    if data.get("is_encoder_decoder"):
        raise PlanError(
            f"{kind} is an encoder and a decoder with cross-attention, which no workload has",
            where=where,
            hint=_INSTEAD,
        )
    if kind not in KINDS:
        raise PlanError(
            f"configurations of {kind!r} are not known",
            where=where,
            hint=f"known: {', '.join(KINDS)}; or describe it with --workload llama --set …",
        )
    own = {**KINDS[kind].defaults, **{k: v for k, v in data.items() if v is not None}}
    settings: dict[str, object] = {}
    try:
        KINDS[kind].read(own, settings, notes)
        weights = _published_format(own.get("quantization_config"))
        linear = recurrent_layers(own)
        recurrence = recurrence_of(own) if linear else None
        bare = int(str(settings.pop("bare_layers", 0)))
    except KeyError as error:
        raise PlanError(f"the configuration lacks {error}", where=where) from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise PlanError(f"the configuration cannot be read: {error}", where=where) from None
    of_steps = []
    if weights:
        of_steps.append("quantization_config is not read: --set products=fp8 quantises products")
    if own.get("num_nextn_predict_layers"):
        of_steps.append("the modules of multi-token prediction are left out")
    served_only = f"a model of which {linear} layers have a recurrent state" if linear else ""
    if "attention_chunk_size" in own:
        served_only = "a model of chunked attention whose layers take turns with experts"
    elif "index_topk" in own:
        served_only = "a model of sparse attention, which trains by other rules"
    return Preset(
        settings,
        tuple(notes),
        tuple(of_steps),
        source=where,
        linear_layers=linear,
        recurrence=recurrence,
        bare_layers=bare,
        weights=weights,
        served_only=served_only,
    )


def _published_format(data: object) -> str:
    """Format of the weights by ``quantization_config``, as it is named there if it is unusual."""
    if not isinstance(data, dict):
        return ""
    # ModelOpt and compressed-tensors (LLM Compressor) name formats of their own.
    groups = data.get("config_groups")
    first: object = next(iter(groups.values()), {}) if isinstance(groups, dict) else {}
    weights = first.get("weights") if isinstance(first, dict) else None
    kind = weights if isinstance(weights, dict) else {}
    named = str(data.get("quant_algo") or data.get("quant_method") or "").lower()
    bits = int(data.get("bits") or kind.get("num_bits") or 0)
    if named in ("awq", "gptq", "compressed-tensors", "modelopt", "auto-round"):
        floating = "float" in str(kind.get("type", ""))
        named = {4: "nvfp4" if floating else "int4", 8: "fp8" if floating else "int8"}.get(bits, "")
    named = {"fbgemm_fp8": "fp8", "modelopt_fp4": "nvfp4", "w4a16_awq": "int4"}.get(named, named)
    named = named or str(data.get("quant_method", "quantised"))
    return "fp8_block" if named == "fp8" and data.get("weight_block_size") else named


def _decoder(data: JsonMapping, out: dict[str, object], notes: list[str]) -> None:
    """Decoders with rotary positions, RMSNorm and a gated feed-forward."""
    heads = data["num_attention_heads"]
    out.update(
        layers=data["num_hidden_layers"],
        d_model=data["hidden_size"],
        heads=heads,
        kv_heads=data.get("num_key_value_heads", heads),
        head_dim=data.get("head_dim", 0),
        d_ff=data["intermediate_size"],
        vocab=data["vocab_size"],
        tied=data.get("tie_word_embeddings", False),
        seq=min(data.get("max_position_embeddings", _MOST_SEQ), _MOST_SEQ),
    )
    window = data.get("sliding_window")
    if window and data.get("use_sliding_window", True):
        out["window"] = window
        types = data.get("layer_types")
        if types:
            share = sum(t == "sliding_attention" for t in types) / len(types)
        elif "sliding_window_pattern" in data:
            layers = data["num_hidden_layers"]
            share = 1.0 - (layers // data["sliding_window_pattern"]) / layers
        else:
            share = 1.0
        # No layer has it: as if there were none.
        out.update({"window_share": share} if share else {"window": 0})


def _experts(data: JsonMapping, out: dict[str, object], notes: list[str]) -> None:
    """Decoders whose layers all have experts: Mixtral, Qwen's, gpt-oss."""
    _decoder(data, out, notes)
    if data.get("decoder_sparse_step", 1) != 1 or data.get("mlp_only_layers"):
        raise PlanError("layers take turns with and without experts, which no workload has")
    out["experts"] = data["num_experts"] if "num_experts" in data else data["num_local_experts"]
    out["top_k"] = data["num_experts_per_tok"]
    out["d_ff"] = data.get("moe_intermediate_size", data["intermediate_size"])
    shared = data.get("shared_expert_intermediate_size", 0)
    if shared:
        out["shared_experts"] = max(1, round(shared / int(str(out["d_ff"]))))


def _deepseek(data: JsonMapping, out: dict[str, object], notes: list[str]) -> None:
    """DeepSeek's decoders: latent attention, shared experts, dense first layers."""
    _decoder(data, out, notes)
    if data.get("moe_layer_freq", 1) != 1:
        raise PlanError("layers take turns with and without experts, which no workload has")
    out.update(
        kv_heads=0,
        head_dim=data["qk_nope_head_dim"],
        rope_dim=data["qk_rope_head_dim"],
        v_dim=data["v_head_dim"],
        q_lora=data.get("q_lora_rank", 0),
        kv_lora=data["kv_lora_rank"],
        experts=data["n_routed_experts"],
        top_k=data["num_experts_per_tok"],
        shared_experts=data.get("n_shared_experts", 0),
        expert_boxes=data.get("topk_group") or 0 if (data.get("n_group") or 1) > 1 else 0,
        dense_layers=data["first_k_dense_replace"],
        dense_ff=data["intermediate_size"],
        d_ff=data["moe_intermediate_size"],
    )


def _sparse(data: JsonMapping, out: dict[str, object], notes: list[str]) -> None:
    """DeepSeek-V3.2's: an indexer chooses the keys of each query, as many as a window has."""
    _deepseek(data, out, notes)
    out["window"] = data["index_topk"]


def _kimi_linear(data: JsonMapping, out: dict[str, object], notes: list[str]) -> None:
    """Kimi Linear's: latent attention between layers with a state, with keys of its own."""
    names = {
        "n_routed_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_token",
        "n_shared_experts": "num_shared_experts",
        "n_group": "num_expert_group",
    }
    known = {name: data[own] for name, own in names.items() if own in data}
    _deepseek({**data, **known}, out, notes)


def _nemotron(data: JsonMapping, out: dict[str, object], notes: list[str]) -> None:
    """Nemotron-H's: blocks of Mamba-2, attention and feed-forwards in an order of their own."""
    _decoder(data, out, notes)
    out["bare_layers"] = nemotron_layers(data, out)


def _glm_experts(data: JsonMapping, out: dict[str, object], notes: list[str]) -> None:
    """GLM-4.5's: grouped attention, shared experts, dense first layers."""
    _decoder(data, out, notes)
    out.update(
        experts=data["n_routed_experts"],
        top_k=data["num_experts_per_tok"],
        shared_experts=data.get("n_shared_experts", 0),
        dense_layers=data["first_k_dense_replace"],
        dense_ff=data["intermediate_size"],
        d_ff=data["moe_intermediate_size"],
    )


def _llama4(data: JsonMapping, out: dict[str, object], notes: list[str]) -> None:
    """Llama 4's: chunked attention in three of four layers, experts in all or every second."""
    _decoder(data, out, notes)
    layers, every = data["num_hidden_layers"], data.get("interleave_moe_layer_step", 1)
    types = data.get("layer_types") or ()
    out.update(
        experts=data["num_local_experts"],
        top_k=data["num_experts_per_tok"],
        shared_experts=1,
        # Where they stand does not matter to serving.
        dense_layers=layers - layers // every,
        dense_ff=data["intermediate_size_mlp"],
        window=data["attention_chunk_size"],
        window_share=sum(t == "chunked_attention" for t in types) / layers if types else 0.75,
    )


def _granite_experts(data: JsonMapping, out: dict[str, object], notes: list[str]) -> None:
    """Granite 4's: Mamba-2 and attention, each with experts and a shared feed-forward."""
    _experts(data, out, notes)
    width = data["intermediate_size"]
    out["shared_experts"] = max(1, round(data["shared_intermediate_size"] / width))


#: What encoders and GPTs have in common, unlike the defaults of a workload.
_PLAIN = {"kv_heads": 0, "gated": False, "norm": "layernorm", "rope": False, "positions": True}


def _gpt2(data: JsonMapping, out: dict[str, object], notes: list[str]) -> None:
    width = data["n_embd"]
    out.update(
        _PLAIN,
        layers=data["n_layer"],
        d_model=width,
        heads=data["n_head"],
        d_ff=data.get("n_inner", 4 * width),
        vocab=data["vocab_size"],
        seq=data["n_positions"],
        tied=data.get("tie_word_embeddings", True),
    )


def _bert(data: JsonMapping, out: dict[str, object], notes: list[str]) -> None:
    out.update(
        _PLAIN,
        layers=data["num_hidden_layers"],
        d_model=data["hidden_size"],
        heads=data["num_attention_heads"],
        d_ff=data["intermediate_size"],
        vocab=data["vocab_size"],
        seq=data["max_position_embeddings"],
        tied=True,
        causal=False,
        # Of the tokens that are masked (Devlin et al., 2019).
        head_share=0.15,
    )


def _vit(data: JsonMapping, out: dict[str, object], notes: list[str]) -> None:
    tokens = (data["image_size"] // data["patch_size"]) ** 2 + 1
    notes.append("the embedding of patches counts as a lookup")
    out.update(
        _PLAIN,
        layers=data["num_hidden_layers"],
        d_model=data["hidden_size"],
        heads=data["num_attention_heads"],
        d_ff=data["intermediate_size"],
        # A configuration lists its classes; ImageNet's where it lists none.
        vocab=len(data.get("id2label", ())) or 1000,
        seq=tokens,
        causal=False,
        # The class token alone reaches the head.
        head_share=1.0 / tokens,
    )


_GEMMA: dict[str, object] = {"tie_word_embeddings": True, "head_dim": 256}
#: Readers by ``model_type``.
KINDS = {
    "llama": _Kind(_decoder),
    "mistral": _Kind(_decoder),
    "qwen2": _Kind(_decoder, {"use_sliding_window": False}),
    "qwen3": _Kind(_decoder, {"use_sliding_window": False, "head_dim": 128}),
    "gemma": _Kind(_decoder, _GEMMA),
    "gemma2": _Kind(_decoder, {**_GEMMA, "sliding_window": 4096, "sliding_window_pattern": 2}),
    # Configurations of Gemma 3 name only what differs from the class's defaults, those of 4B.
    "gemma3_text": _Kind(
        _decoder,
        {
            **_GEMMA,
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
        },
    ),
    "mixtral": _Kind(_experts),
    "qwen2_moe": _Kind(_experts, {"use_sliding_window": False}),
    "qwen3_moe": _Kind(_experts, {"use_sliding_window": False, "head_dim": 128}),
    "phi3": _Kind(_decoder),
    "granite": _Kind(_decoder),
    "smollm3": _Kind(_decoder, {"use_sliding_window": False}),
    "qwen3_next": _Kind(_experts, {"use_sliding_window": False, "full_attention_interval": 4}),
    "qwen3_5_text": _Kind(_decoder, {"use_sliding_window": False, "full_attention_interval": 4}),
    "qwen3_5_moe_text": _Kind(
        _experts,
        {
            "use_sliding_window": False,
            "full_attention_interval": 4,
            # The class's experts replace its feed-forward, whose width it does not have.
            "intermediate_size": 0,
        },
    ),
    "granitemoehybrid": _Kind(_granite_experts),
    "kimi_linear": _Kind(_kimi_linear, {"q_lora_rank": 0}),
    "minimax_text_01": _Kind(_experts),
    "minimax_m1": _Kind(_experts),
    "nemotron_h": _Kind(_nemotron),
    "glm4_moe": _Kind(_glm_experts),
    "minimax_m2": _Kind(_experts, {"use_sliding_window": False}),
    "llama4_text": _Kind(_llama4, {"attention_chunk_size": 8192}),
    "gpt_oss": _Kind(_experts, {"sliding_window_pattern": 2}),
    "deepseek_v2": _Kind(_deepseek),
    "deepseek_v3": _Kind(_deepseek),
    "kimi_k2": _Kind(_deepseek),
    "deepseek_v32": _Kind(_sparse),
    "glm_moe_dsa": _Kind(_sparse),
    "gpt2": _Kind(_gpt2),
    "bert": _Kind(_bert, {"max_position_embeddings": 512}),
    "vit": _Kind(_vit),
}
