"""The model that a row of a table of serving means: sizes, formats, what its notes say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import cast

from ...common.errors import PlanError
from ...common.types import JsonObject
from ...simulate.serving.checkpoints import find_checkpoint, served_models
from ...simulate.serving.formats import Formats, format_in, in_formats
from ...simulate.serving.policies import framework_of, frameworks
from ...simulate.serving.served import ServedModel
from ...simulate.step.hybrid import Recurrence
from ...simulate.step.presets import find_preset, read_config
from ...simulate.step.workload import (
    ALIASES,
    FAMILIES,
    Workload,
    make_workload,
    read_workload,
)
from .step_table import Cells


def _sizes(known: str) -> dict[str, object]:
    """Columns of a model whose tables lack its sizes and which no preset describes."""
    return dict(cast("JsonObject", served_models().get(known, {}).get("sizes", {})))


def _recurrence(known: str) -> Recurrence | None:
    """Sizes of a model's layers with a recurrent state, if it is known to have any."""
    own = cast("list[int]", served_models().get(known, {}).get("recurrence", []))
    return Recurrence(*own) if own else None


#: Endings of names that say how a model was tuned, quantised or dated, not how large it is.
_ENDINGS = re.compile(
    r"-(instruct|it|hf|chat|base|thinking|preview|text|moe|kv|vl|dynamic|block|fp8|fp4|nvfp4|mxfp4"
    r"|mxfp6|mxfp8|int4|int8|awq|gptq|w4a16|w8a8|bf16|fp16|v0\.\d|\d{4,6}|tput|amd|nvidia)(?=-|$)"
)
#: Names by which models go whose sizes are another's.
_SAME_SIZES = (
    (r"deepseek-r1-distill-llama-8b\b.*", "llama-3.1-8b"),
    (r"deepseek-r1-distill-llama-70b\b.*", "llama-3.3-70b"),
    (r"deepseek-r1-distill-qwen-(\d[\d.]*b)\b.*", r"qwen-2.5-\1"),
    (r"deepseek-r1-qwen3-8b\b.*", "qwen-3-8b"),
    (r"deepseek-v3\.2\b.*", "deepseek-v3.2"),
    (r"deepseek-(r1|v3)\b.*", "deepseek-v3"),
    (r"kimi-k2\b.*", "kimi-k2"),
    (r"glm-4\.[5-7](-air)?\b.*", r"glm-4.5\1"),
    (r"glm-5\b.*", "glm-5"),
    (r"minimax-m2\b.*", "minimax-m2"),
    (r"gptj.*|gpt-j.*", "gpt-j-6b"),
    (r"llama-?([23])-(\d+b)", r"llama-\1-\2"),
    (r"llama-?3\.([123])-(\d+b)", r"llama-3.\1-\2"),
    (r"(mixtral|mistral)-?(\d.*)", r"\1-\2"),
    (r"llama-4-(maverick|scout).*", r"llama-4-\1"),
    (r"devstral-small.*|mistral-small.*", "mistral-small-24b"),
    (r"qwen-3-coder-30b-a3b", "qwen-3-30b-a3b"),
)


def plain_name(name: str) -> str:
    """A model's name as presets have it: without owner, tuning, format and date.

    ``meta-llama/Llama-3.1-70B-Instruct-FP8`` is ``llama-3.1-70b``.
    """
    text = name.lower().rsplit("/", 1)[-1].replace("_", "-").removeprefix("meta-")
    text = re.sub(r"^qwen(\d[\d.]*)", r"qwen-\1", text)
    text = _ENDINGS.sub("", text)
    for pattern, plain in _SAME_SIZES:
        if re.fullmatch(pattern, text):
            return re.sub(pattern, plain, text)
    return text


def known_framework(text: str) -> tuple[str, str]:
    """:func:`framework_of` of an engine that is known, or that is not named, and its version.

    Args:
        text: Such as ``vllm`` or ``vllm@0.18.0``.

    Raises:
        PlanError: The name is none of a framework, or the version has no number.
    """
    said, _, version = text.partition("@")
    name = framework_of(said)
    if name and name not in frameworks():
        near = get_close_matches(name, frameworks(), n=3, cutoff=0.5) or list(frameworks())
        raise PlanError(
            f"framework {said!r} is not known",
            hint=f"{', '.join(near)}; empty for one that is not listed",
        )
    if "@" in text and not version[:1].isdigit():
        raise PlanError(f"{version!r} is no version of {said}", hint="as in vllm@0.18.0")
    return name, version


def served_by_name(
    name: str, settings: Mapping[str, object], formats: Formats, *, files: bool = False
) -> ServedModel:
    """A model by its name, or by a file.

    Names are those of presets, of models that only tables of serving know, and of checkpoints
    (``Qwen/Qwen3-32B-FP8``), whose format counts where none is given, or else the one that a model
    is published in; so does the ``quantization_config`` of a ``config.json``.

    Args:
        name: Of a model; with ``files`` also a ``config.json``, or a YAML file of sizes.
        settings: Sizes that take precedence.
        formats: Of its numbers.
        files: Whether files are read.

    Raises:
        PlanError: The name or a format is unknown, a file cannot be read, or sizes do not fit.
    """
    given = {ALIASES.get(key, key): value for key, value in settings.items()}
    known, recurrent, own = plain_name(name), 0, ""
    sizes, bare = _recurrence(known), 0
    if files and name.lower().endswith(".json"):
        config = read_config(Path(name))
        recurrent, own = config.linear_layers, config.weights
        sizes, bare = config.recurrence, config.bare_layers
        work = make_workload("llama", {**config.settings, **given})
    elif files and name.lower().endswith((".yaml", ".yml")):
        work = read_workload(name, [f"{key}={value}" for key, value in given.items()])
    elif name in FAMILIES:
        work = make_workload(name, given)
    elif _sizes(known):
        model = served_model(Cells({"model": known}))
        recurrent = model.linear_layers
        values = {f.name: getattr(model.workload, f.name) for f in fields(model.workload)}
        work, own = make_workload("llama", {**values, **given}), format_in(name)
    else:
        # A name that is unknown either way is told as it was given.
        work = make_workload(known if find_preset(known) else name, given)
        own = format_in(name)
    weights, linear = formats.weights or own, formats.linear_layers or recurrent
    found = in_formats(work, formats._replace(weights=weights, linear_layers=linear))
    drafts = find_checkpoint(name if name.endswith(".json") else known).drafts
    return replace(found, recurrence=sizes if linear else None, bare_layers=bare, mtp=drafts)


def served_model(cell: Cells) -> ServedModel:
    """The model of a row.

    Raises:
        PlanError: Its sizes or formats are unknown, or do not make a model.
    """
    name = cell.text("model")
    if not cell.count("layers", 0) or not cell.count("d_model", 0):
        known = plain_name(name)
        preset = None if _sizes(known) else find_preset(known)
        if preset is not None:
            return _formats(cell, make_workload(known, {"mode": "forward", "seq": 1, "batch": 1}))
        if not _sizes(known):
            raise PlanError(
                f"the sizes of {name or 'the model'} are not known",
                hint="give layers, d_model, heads, d_ff and vocab",
            )
        cell = Cells({**_sizes(known), **cell.filled()})
    size = cell.count
    experts = size("experts", 0)
    note = cell.text("attention_note")
    layers = size("layers", 0)
    width = size("moe_d_ff", 0) if experts else size("d_ff", 0)
    arch = cell.text("arch").lower()
    dense = _dense_layers(cell, note, layers) if experts else 0
    latent = _latent(note) if cell.flag("mla", False) or "kv_lora" in note else {}
    windows = _window(note, layers)
    head = latent.pop("head_dim", 0) or size("head_dim", 0)
    workload = Workload(
        layers=layers,
        d_model=size("d_model", 0),
        heads=size("heads", 1),
        kv_heads=0 if latent else size("kv_heads", 0),
        head_dim=head,
        d_ff=width or size("d_ff", 0),
        vocab=size("vocab", 32000),
        seq=1,
        batch=1,
        dtype="bf16",
        experts=experts,
        top_k=size("top_k", 0) if experts else 0,
        shared_experts=size("shared_experts", 0) if experts else 0,
        dense_layers=dense,
        dense_ff=size("d_ff", 0) if dense else 0,
        gated=arch != "gpt",
        norm="layernorm" if arch == "gpt" else "rmsnorm",
        mode="forward",
        **latent,  # type: ignore[arg-type]
        **windows,  # type: ignore[arg-type]
    )
    found = _formats(cell, workload, _linear_layers(note, arch, workload.layers))
    sizes = _recurrence(plain_name(name)) if found.linear_layers else None
    return replace(found, recurrence=sizes)


def _formats(cell: Cells, workload: Workload, linear: int = 0) -> ServedModel:
    return in_formats(
        workload,
        Formats(
            cell.text("weight_dtype"),
            cell.text("kv_dtype"),
            linear_layers=linear,
            framework=framework_of(cell.text("framework")),
        ),
    )


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
        # An indexer chooses so many keys for each query (DeepSeek-V3.2, 2025, section 2.1).
        sparse = re.search(r"(?:sparse|dsa|top-?k)\D*(\d{3,5})", note.lower())
        return {"window": int(sparse[1])} if sparse else {}
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
