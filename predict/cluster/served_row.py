"""The model that a row of a table of serving means: sizes, formats, what its notes say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path

from ...common.errors import PlanError
from ...simulate.serving.checkpoints import find_checkpoint
from ...simulate.serving.formats import Formats, format_in, in_formats
from ...simulate.serving.policies import FRAMEWORKS
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

#: Columns of models whose tables lack their sizes and which no preset describes, from their
#: ``config.json`` files. DeciLM's key-value heads differ by layer: 2 on average.
_SIZES: dict[str, dict[str, object]] = {
    "decilm-7b": {
        "arch": "llama", "layers": 32, "d_model": 4096, "heads": 32, "kv_heads": 2, "d_ff": 14336,
    },
    "aquila-7b": {
        "arch": "llama", "layers": 32, "d_model": 4096, "heads": 32, "d_ff": 11008, "vocab": 100008,
    },
    "gemma-4-e4b": {
        "arch": "llama", "layers": 42, "d_model": 2560, "heads": 8, "kv_heads": 2, "head_dim": 256,
        "d_ff": 10240, "vocab": 262144, "attention_note": "5 of 6 layers sliding window 512",
    },
    "step-3.5-flash": {
        "arch": "moe", "layers": 45, "d_model": 4096, "heads": 64, "kv_heads": 8, "head_dim": 128,
        "d_ff": 11264, "experts": 288, "top_k": 8, "moe_d_ff": 1280, "shared_experts": 1,
        "dense_layers": 3, "vocab": 128896, "attention_note": "3 of 4 layers sliding window 512",
    },
    "llama-4-maverick": {
        "arch": "moe", "layers": 48, "d_model": 5120, "heads": 40, "kv_heads": 8, "head_dim": 128,
        "d_ff": 16384, "experts": 128, "top_k": 1, "moe_d_ff": 8192, "shared_experts": 1,
        "vocab": 202048,
        "attention_note": "MoE every 2nd layer; 3 of 4 layers chunked attention 8192",
    },
    "llama-4-scout": {
        "arch": "moe", "layers": 48, "d_model": 5120, "heads": 40, "kv_heads": 8, "head_dim": 128,
        "d_ff": 16384, "experts": 16, "top_k": 1, "moe_d_ff": 8192, "shared_experts": 1,
        "vocab": 202048, "attention_note": "3 of 4 layers chunked attention 8192",
    },
    "qwen-3-next-80b-a3b": {
        "arch": "hybrid", "layers": 48, "d_model": 2048, "heads": 16, "kv_heads": 2,
        "head_dim": 256, "d_ff": 5120, "experts": 512, "top_k": 10, "moe_d_ff": 512,
        "shared_experts": 1, "vocab": 151936, "attention_note": "3 of 4 layers gated delta net",
    },
    "qwen-3.5-397b-a17b": {
        "arch": "hybrid", "layers": 60, "d_model": 4096, "heads": 32, "kv_heads": 2,
        "head_dim": 256, "d_ff": 4096, "experts": 512, "top_k": 10, "moe_d_ff": 1024,
        "shared_experts": 1, "vocab": 248320, "attention_note": "3 of 4 layers gated delta net",
    },
    "deepseek-v3.2": {
        "arch": "mla-moe", "mla": "yes", "layers": 61, "d_model": 7168, "heads": 128,
        "d_ff": 18432, "experts": 256, "top_k": 8, "moe_d_ff": 2048, "shared_experts": 1,
        "dense_layers": 3, "vocab": 129280,
        "attention_note": "kv_lora 512, q_lora 1536, rope 64, nope 128, v 128; sparse top-k 2048",
    },
    "glm-5": {
        "arch": "mla-moe", "mla": "yes", "layers": 78, "d_model": 6144, "heads": 64,
        "d_ff": 12288, "experts": 256, "top_k": 8, "moe_d_ff": 2048, "shared_experts": 1,
        "dense_layers": 3, "vocab": 154880,
        "attention_note": "kv_lora 512, q_lora 2048, rope 64, nope 192, v 256; sparse top-k 2048",
    },
}  # fmt: skip
#: Layers with a recurrent state of these models: gated delta nets with 16 heads of keys and 32 or
#: 64 of values, each of 128 (``linear_num_value_heads`` and the like of their ``config.json``).
_RECURRENCES = {
    "qwen-3-next-80b-a3b": Recurrence(12352, 4096, 4096 * 128),
    "qwen-3.5-397b-a17b": Recurrence(20608, 8192, 8192 * 128),
}
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


#: Engines by words that their names contain: Dynamo and routers before them run one of these.
_ENGINES = (
    (r"trt|tensorrt", "tensorrt-llm"),
    ("sglang", "sglang"),
    ("vllm", "vllm"),
    ("lmdeploy|turbomind", "lmdeploy"),
    (r"\bmii\b|fastgen", "deepspeed-mii"),
)


def framework_of(text: str) -> str:
    """A framework's name in lower case, with the engines of one project as one."""
    name, _, remark = text.lower().partition(" (")
    for words in (name, remark):
        for pattern, known in _ENGINES:
            if re.search(pattern, words):
                return known
    return name.strip()


def known_framework(text: str) -> tuple[str, str]:
    """:func:`framework_of` of an engine that is known, or that is not named, and its version.

    Args:
        text: Such as ``vllm`` or ``vllm@0.18.0``.

    Raises:
        PlanError: The name is none of a framework, or the version has no number.
    """
    said, _, version = text.partition("@")
    name = framework_of(said)
    if name and name not in FRAMEWORKS:
        near = get_close_matches(name, FRAMEWORKS, n=3, cutoff=0.5) or list(FRAMEWORKS)
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
    sizes, bare = _RECURRENCES.get(known), 0
    if files and name.lower().endswith(".json"):
        config = read_config(Path(name))
        recurrent, own = config.linear_layers, config.weights
        sizes, bare = config.recurrence, config.bare_layers
        work = make_workload("llama", {**config.settings, **given})
    elif files and name.lower().endswith((".yaml", ".yml")):
        work = read_workload(name, [f"{key}={value}" for key, value in given.items()])
    elif name in FAMILIES:
        work = make_workload(name, given)
    elif known in _SIZES:
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
        preset = find_preset(known) if known not in _SIZES else None
        if preset is not None:
            return _formats(cell, make_workload(known, {"mode": "forward", "seq": 1, "batch": 1}))
        if known not in _SIZES:
            raise PlanError(
                f"the sizes of {name or 'the model'} are not known",
                hint="give layers, d_model, heads, d_ff and vocab",
            )
        cell = Cells({**_SIZES[known], **cell.filled()})
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
    sizes = _RECURRENCES.get(plain_name(name)) if found.linear_layers else None
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
