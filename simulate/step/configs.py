"""Workload settings from a Hugging Face ``config.json``.

Recurrent layers project every token to queries, keys, values and gates, run a recurrence over them,
and project its output back: gated delta nets (Yang et al., 2025), Mamba-2 (Dao and Gu, 2024), Kimi
delta attention (Kimi Linear, 2025), lightning attention (MiniMax-01, 2025).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...common.errors import PlanError
from ...common.files import own_data, parse_json
from ...common.types import JsonMapping
from .presets import INSTEAD, Preset, Recurrence

#: Rules for reading configurations, by model type.
_RULES = "simulate/step/configs.yaml"
#: Longest training sequence in tokens; longer context lengths describe use, not training.
_MOST_SEQ = 8192
#: Names of recurrent layers in ``layer_types``.
_KINDS = ("linear_attention", "mamba")
#: Methods of quantisation of which no serving run was measured.
_UNMEASURED = ("bitsandbytes", "hqq")
#: Letters of Nemotron-H's layer patterns: Mamba-2, attention, feed-forward, experts.
_MAMBA, _ATTENTION, _FED, _EXPERTS = "M*-E"
_LETTERS = {"mamba": _MAMBA, "attention": _ATTENTION, "mlp": _FED, "moe": _EXPERTS}


def read_config(path: Path) -> Preset:
    """Read a local ``config.json`` as written by transformers; nothing is downloaded.

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
    if isinstance(data, dict) and "model_type" not in data and "_class_name" in data:
        named = f"{data['_class_name']} of diffusers"
        raise PlanError(f"{named} is no model that a workload has", where=where, hint=INSTEAD)
    if not isinstance(data, dict) or "model_type" not in data:
        raise PlanError(
            "no configuration of a model: it has no model_type",
            where=where,
            hint="give the config.json of a model on huggingface.co",
        )
    notes: list[str] = []
    part = "configuration"
    if isinstance(data.get("text_config"), dict):
        # A model of text and images: describe its decoder only.
        notes.append(f"only the text model of {data['model_type']} is described")
        part = "text_config"
        whole = {"tie_word_embeddings": data.get("tie_word_embeddings", True)}
        if "quantization_config" in data:
            whole["quantization_config"] = data["quantization_config"]
        data = {**data["text_config"], **whole}
    elif "vision_config" in data:
        notes.append(f"only the text model of {data['model_type']} is described")
    kind = str(data.get("model_type", ""))
    if data.get("is_encoder_decoder"):
        raise PlanError(
            f"{kind} is an encoder and a decoder with cross-attention, which no workload has",
            where=where,
            hint=INSTEAD,
        )
    kinds = own_data(_RULES)["kinds"]
    if kind not in kinds:
        raise PlanError(
            f"configurations of {kind!r} are not known",
            where=where,
            hint=f"known: {', '.join(kinds)}; or describe it with --workload llama --set … if it "
            f"is a transformer, or {INSTEAD}",
        )
    own = {**kinds[kind], **{k: v for k, v in data.items() if v is not None}}
    settings: dict[str, object] = {}
    try:
        _read(kinds[kind]["reader"], own, settings, notes)
        weights = _published_format(own.get("quantization_config"))
        linear = recurrent_layers(own)
        recurrence = recurrence_of(own) if linear else None
        bare = int(str(settings.pop("bare_layers", 0)))
    except KeyError as error:
        # A fine-tuned multimodal model may leave out keys that it shares with its base model.
        alone = f"--hf with the config.json of {data.get('_name_or_path') or 'the text model'}"
        hint = alone if part == "text_config" else ""
        raise PlanError(f"the {part} lacks {error}", where=where, hint=hint) from None
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
    """Weight format in ``quantization_config``; under its name there if it is unusual."""
    if not isinstance(data, dict):
        return ""
    # ModelOpt and compressed-tensors (LLM Compressor) use names of their own.
    groups = data.get("config_groups")
    first: object = next(iter(groups.values()), {}) if isinstance(groups, dict) else {}
    weights = first.get("weights") if isinstance(first, dict) else None
    kind = weights if isinstance(weights, dict) else {}
    named = str(data.get("quant_algo") or data.get("quant_method") or "").lower()
    bits = _bits({**kind, **data})
    if named in _UNMEASURED:
        return f"{named} of {bits} bits" if bits else named
    if named in ("awq", "gptq", "compressed-tensors", "modelopt", "auto-round"):
        floating = "float" in str(kind.get("type", ""))
        # Only weights are quantised where compressed-tensors gives no format of activations, and by
        # the methods that have none.
        narrow = "" if isinstance(first, dict) and first.get("input_activations") else "_wo"
        eight = ("fp8" if floating else "int8") + narrow
        named = {4: "nvfp4" if floating else "int4", 8: eight}.get(bits, "")
    quark = data.get("global_quant_config")
    if named == "quark" and isinstance(quark, dict) and isinstance(quark.get("weight"), dict):
        named = str(quark["weight"].get("dtype")).removesuffix("_e4m3")
        named = {"fp4": "mxfp4"}.get(named, named)
    named = {"fbgemm_fp8": "fp8", "modelopt_fp4": "nvfp4", "w4a16_awq": "int4"}.get(named, named)
    named = named or str(data.get("quant_method", "quantised"))
    return "fp8_block" if named == "fp8" and data.get("weight_block_size") else named


def _bits(data: JsonMapping) -> int:
    """Bits of a weight, under the key of its method of quantisation; 0 if none is given."""
    own = data.get("quant_config")
    hqq = own.get("weight_quant_params") if isinstance(own, dict) else None
    loaded = next((n for n in (4, 8) if data.get(f"load_in_{n}bit")), 0)
    told = data.get("bits") or data.get("num_bits") or loaded
    return int(told or (hqq.get("nbits", 0) if isinstance(hqq, dict) else 0))


def _read(reader: str, data: JsonMapping, out: dict[str, object], notes: list[str]) -> None:
    """Add the settings of a reader of ``configs.yaml``, after those of the reader it extends."""
    rule = own_data(_RULES)["readers"][reader]
    if "like" in rule:
        renamed = {k: data[own] for k, own in rule.get("rename", {}).items() if own in data}
        _read(rule["like"], {**data, **renamed}, out, notes)
    out.update(rule.get("set", {}))
    for name, key in rule.get("read", {}).items():
        out[name] = _value(data, key if isinstance(key, list) else [key])
    if reader in _MORE:
        _MORE[reader](data, out, notes)


def _value(data: JsonMapping, keys: list[Any]) -> object:
    """Value of the first key that is present; the last entry may be a default value instead."""
    *_, last = keys
    found = next((key for key in keys if key in data), last)
    return data[found] if isinstance(found, str) else found


def _decoder(data: JsonMapping, out: dict[str, object], notes: list[str]) -> None:
    out["seq"] = min(data.get("max_position_embeddings", _MOST_SEQ), _MOST_SEQ)
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
        # If no layer has the window, there is none.
        out.update({"window_share": share} if share else {"window": 0})


def _experts(data: JsonMapping, out: dict[str, object], notes: list[str]) -> None:
    if data.get("decoder_sparse_step", 1) != 1 or data.get("mlp_only_layers"):
        raise PlanError("layers take turns with and without experts, which no workload has")
    shared = data.get("shared_expert_intermediate_size", 0)
    if shared:
        out["shared_experts"] = max(1, round(shared / int(str(out["d_ff"]))))


def _granite_experts(data: JsonMapping, out: dict[str, object], notes: list[str]) -> None:
    width = data["intermediate_size"]
    out["shared_experts"] = max(1, round(data["shared_intermediate_size"] / width))


def _deepseek(data: JsonMapping, out: dict[str, object], notes: list[str]) -> None:
    if data.get("moe_layer_freq", 1) != 1:
        raise PlanError("layers take turns with and without experts, which no workload has")
    grouped = (data.get("n_group") or 1) > 1
    out["expert_boxes"] = data.get("topk_group") or 0 if grouped else 0


def _llama4(data: JsonMapping, out: dict[str, object], notes: list[str]) -> None:
    layers, every = data["num_hidden_layers"], data.get("interleave_moe_layer_step", 1)
    types = data.get("layer_types") or ()
    # The position of dense layers does not matter to serving.
    out["dense_layers"] = layers - layers // every
    chunked = sum(t == "chunked_attention" for t in types)
    out["window_share"] = chunked / layers if types else 0.75


def _gpt2(data: JsonMapping, out: dict[str, object], notes: list[str]) -> None:
    out["d_ff"] = data.get("n_inner", 4 * data["n_embd"])


def _vit(data: JsonMapping, out: dict[str, object], notes: list[str]) -> None:
    tokens = (data["image_size"] // data["patch_size"]) ** 2 + 1
    notes.append("the embedding of patches counts as a lookup")
    # ImageNet's number of classes if the configuration lists none. Only the class token reaches
    # the head.
    out.update(vocab=len(data.get("id2label", ())) or 1000, seq=tokens, head_share=1.0 / tokens)


def recurrent_layers(data: JsonMapping) -> int:
    """Number of recurrent layers in a configuration."""
    if "hybrid_override_pattern" in data or "layers_block_type" in data:
        return layer_pattern(data).count(_MAMBA)
    if "linear_attn_config" in data:
        return len(data["linear_attn_config"]["kda_layers"])
    if "attn_type_list" in data:
        return sum(kind == 0 for kind in data["attn_type_list"])
    types = data.get("layer_types") or ()
    named = sum(kind in _KINDS for kind in types)
    every = data.get("full_attention_interval")
    return named or (data["num_hidden_layers"] * (every - 1) // every if every else 0)


def recurrence_of(data: JsonMapping) -> Recurrence | None:
    """Sizes of these layers; ``None`` if the configuration does not contain them."""
    if "linear_num_value_heads" in data:
        return _gated(
            data["linear_num_key_heads"] * data["linear_key_head_dim"],
            data["linear_num_value_heads"],
            data["linear_value_head_dim"],
            data["linear_key_head_dim"],
            gates=2,
        )
    if "mamba_num_heads" in data or "mamba_n_heads" in data:
        # Mamba-2 in the same terms: B and C of each group, inputs and gates, one step per head.
        long = "mamba_num_heads" in data
        names = (
            ("n_groups", "ssm_state_size", "mamba_num_heads", "mamba_head_dim")
            if long
            else ("mamba_n_groups", "mamba_d_state", "mamba_n_heads", "mamba_d_head")
        )
        groups, state, heads, dim = (data[name] for name in names)
        return _gated(groups * state, heads, dim, state, gates=1)
    if "linear_attn_config" in data:
        own = data["linear_attn_config"]
        heads, dim = own["num_heads"], own["head_dim"]
        wide = heads * dim
        # Two gates through low-rank products of head width, counted as equivalent columns.
        narrow = 2 * (dim + round(dim * wide / data["hidden_size"]))
        return Recurrence(3 * wide + narrow + heads, wide, wide * dim)
    if "attn_type_list" in data:
        heads, dim = data["num_attention_heads"], data["head_dim"]
        return Recurrence(4 * heads * dim, heads * dim, heads * dim * dim)
    return None


def _gated(keys: int, heads: int, dim: int, key_dim: int, gates: int) -> Recurrence:
    """Layer with queries and keys of ``keys`` columns, gated values, and ``gates`` per head."""
    values = heads * dim
    return Recurrence(2 * keys + 2 * values + gates * heads, values, values * key_dim)


def layer_pattern(data: JsonMapping) -> str:
    """Layer pattern of a Nemotron-H model, one letter per block: ``M``, ``*``, ``-`` or ``E``.

    Raises:
        PlanError: A block has an unknown type.
    """
    if "hybrid_override_pattern" in data:
        text = str(data["hybrid_override_pattern"])
    else:
        text = "".join(_LETTERS.get(kind, "?") for kind in data["layers_block_type"])
    other = set(text) - set(_LETTERS.values())
    if other or not text:
        raise PlanError(
            f"blocks {sorted(other)} of the pattern {text!r} are not known",
            hint="M (Mamba-2), * (attention), - (feed-forward) and E (experts)",
        )
    return text


def _nemotron(data: JsonMapping, out: dict[str, object], notes: list[str]) -> None:
    """Add the layers and feed-forwards of a Nemotron-H model.

    Attention and Mamba-2 blocks count as layers, most of which are followed by a feed-forward.

    Raises:
        PlanError: There are more feed-forwards than layers, or experts have a latent width.
    """
    pattern = layer_pattern(data)
    mixers = pattern.count(_MAMBA) + pattern.count(_ATTENTION)
    fed = pattern.count(_FED) + pattern.count(_EXPERTS)
    if not 0 < fed <= mixers:
        raise PlanError(
            f"{fed} feed-forwards behind {mixers} layers of attention or Mamba-2",
            hint="at least one, and at most as many as layers",
        )
    out.update(layers=mixers, bare_layers=mixers - fed, gated=False)
    if _EXPERTS in pattern:
        if data.get("moe_latent_size"):
            raise PlanError("experts work on a narrower width, which no workload has")
        width = data["moe_intermediate_size"]
        shared = data.get("moe_shared_expert_intermediate_size", width)
        out.update(
            experts=data["n_routed_experts"],
            top_k=data["num_experts_per_tok"],
            shared_experts=round(data.get("n_shared_experts", 0) * shared / width),
            # The position of dense layers does not matter to serving.
            dense_layers=round(pattern.count(_FED) * mixers / fed),
            dense_ff=data["intermediate_size"],
            d_ff=width,
        )


#: Settings that readers compute.
_MORE: dict[str, Callable[[JsonMapping, dict[str, object], list[str]], None]] = {
    "decoder": _decoder,
    "experts": _experts,
    "granite_experts": _granite_experts,
    "deepseek": _deepseek,
    "nemotron": _nemotron,
    "llama4": _llama4,
    "gpt2": _gpt2,
    "vit": _vit,
}
