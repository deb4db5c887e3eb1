"""The families of the zoo as data: names, parameters, defaults and choices; imports nothing heavy.

A family module (``Family.module``) is imported only when one of its workloads is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Kept apart from the models, so that listing families does not import JAX.
Setting = int | float | str | bool
"""A value of a parameter of a family."""

# Parameters of every family; families override the defaults.
COMMON: dict[str, Setting] = {
    "batch": 8,
    "mode": "forward",
    "dtype": "f32",
    "optimizer": "adam",
    "data_parallel": 1,
}
COMMON_CHOICES: dict[str, tuple[Setting, ...]] = {
    "mode": ("forward", "train"),
    "dtype": ("f32", "bf16"),
    "optimizer": ("adam", "sgd"),
}
# Names of `opcast simulate` for the same thing, which settings may use as well.
ALIASES = {"d_model": "dim", "d_ff": "hidden", "n_layers": "layers", "sequence": "seq"}


@dataclass(frozen=True)
class Family:
    """A parametrised ML program.

    Attributes:
        name: Name by which it is built.
        summary: One-line description.
        module: Module of :mod:`.families` that holds it.
        defaults: Every parameter with its default; the default's type is the parameter's type.
        choices: Allowed values of parameters that take only some.
        headline: Parameters that always appear in a workload's name.
    """

    name: str
    summary: str
    module: str
    defaults: Mapping[str, Setting]
    choices: Mapping[str, tuple[Setting, ...]] = field(default_factory=dict)
    headline: tuple[str, ...] = ("batch",)


def _family(
    name: str,
    summary: str,
    own: dict[str, Setting],
    choices: dict[str, tuple[Setting, ...]] | None = None,
    headline: str = "",
    module: str = "",
) -> Family:
    shown = tuple(headline.split())
    return Family(
        name=name,
        summary=summary,
        module=module or name,
        defaults={**COMMON, **own},
        choices={**COMMON_CHOICES, **(choices or {})},
        headline=shown if "batch" in shown else (*shown, "batch"),
    )


# A hidden width of 2816 is 8/3 of the model's, rounded up to a multiple of 256, as in Llama
# (Touvron et al., 2023); 32000 is Llama's vocabulary.
_DECODER: dict[str, Setting] = {
    "layers": 8,
    "dim": 1024,
    "heads": 16,
    "kv_heads": 4,
    "hidden": 2816,
    "vocab": 32000,
}

_FAMILIES = (
    _family(
        "mlp",
        "Multi-layer perceptron with layer norm; classification or regression",
        {
            "batch": 128,
            "features": 256,
            "width": 1024,
            "layers": 4,
            "outputs": 10,
            "activation": "gelu",
            "target": "class",
        },
        {"activation": ("relu", "gelu", "silu", "tanh"), "target": ("class", "value")},
        "layers width",
    ),
    _family(
        "resnet",
        "ResNet v1.5 image classifier with batch norm (running statistics in training)",
        # 1000 classes of images of 224 x 224: ImageNet, here and in the families below.
        {
            "depth": 50,
            "image": 224,
            "width": 64,
            "classes": 1000,
            "stem": "imagenet",
            "optimizer": "sgd",
        },
        {"depth": (18, 34, 50, 101, 152, 200), "stem": ("imagenet", "cifar")},
        "depth",
    ),
    _family(
        "convnext",
        "ConvNeXt image classifier: depthwise 7x7 convolutions, layer norm, layer scale",
        {"size": "tiny", "image": 224, "classes": 1000},
        {"size": ("atto", "femto", "pico", "nano", "tiny", "small", "base")},
        "size",
    ),
    _family(
        "efficientnet",
        "EfficientNet image classifier: inverted bottlenecks, squeeze-excite, batch norm",
        {"size": "b0", "image": 224, "classes": 1000, "optimizer": "sgd"},
        {"size": ("mini", "b0", "b1", "b2", "b3", "b4")},
        "size",
    ),
    _family(
        "vit",
        "Vision transformer: patch embedding, class token, pre-norm encoder",
        # ViT-B/16.
        {
            "layers": 12,
            "dim": 768,
            "heads": 12,
            "hidden": 3072,
            "image": 224,
            "patch": 16,
            "classes": 1000,
        },
        {},
        "layers dim",
    ),
    _family(
        "bert",
        "BERT encoder with a masked-language-model head over gathered positions",
        # BERT base; 20 predictions for 128 tokens, as in its first phase of pre-training.
        {
            "layers": 12,
            "dim": 768,
            "heads": 12,
            "hidden": 3072,
            "seq": 128,
            "vocab": 30522,
            "max_positions": 512,
            "masked": 20,
            "dropout": 0.0,
        },
        {},
        "layers dim seq",
    ),
    _family(
        "llama",
        "Decoder: grouped-query attention, RoPE, RMSNorm, SwiGLU, vocabulary cross-entropy",
        {**_DECODER, "batch": 4, "seq": 256, "scan_layers": False, "remat": False},
        {},
        "layers dim seq",
    ),
    _family(
        "llama_decode",
        "One decoding step of the llama decoder with a key-value cache for a batch of sequences",
        {**_DECODER, "cache": 1024, "greedy": True},
        {"mode": ("forward",)},
        "layers dim cache",
        "llama",
    ),
    _family(
        "moe",
        "Mixture-of-experts decoder: top-k routing by einsum, scatter or dense dispatch",
        # Capacity factor of Switch Transformers (Fedus et al., JMLR 2022); experts as in Mixtral.
        {
            **_DECODER,
            "batch": 2,
            "layers": 4,
            "dim": 512,
            "heads": 8,
            "hidden": 1024,
            "seq": 256,
            "experts": 8,
            "top_k": 2,
            "capacity_factor": 1.25,
            "dispatch": "einsum",
        },
        {"dispatch": ("einsum", "scatter", "dense")},
        "layers dim experts seq",
    ),
    _family(
        "unet",
        "Diffusion U-Net: group norm, time embedding, attention at low resolution",
        {
            "batch": 4,
            "image": 64,
            "channels": 64,
            "levels": 4,
            "blocks": 2,
            "attention_levels": 2,
            "heads": 4,
            "image_channels": 3,
        },
        {},
        "image channels",
    ),
    _family(
        "ssm",
        "Selective state-space language model (Mamba-like) with an associative scan",
        # Expansion, state and window of Mamba's defaults (Gu and Dao, 2023).
        {
            "batch": 2,
            "layers": 4,
            "dim": 256,
            "expand": 2,
            "state": 16,
            "conv": 4,
            "seq": 256,
            "vocab": 16384,
        },
        {},
        "layers dim seq",
    ),
    _family(
        "lstm",
        "Recurrent language model: LSTM or GRU layers over lax.scan",
        # 10000 words: the Penn Treebank (Zaremba et al., 2014).
        {"batch": 32, "layers": 2, "dim": 512, "seq": 64, "vocab": 10000, "cell": "lstm"},
        {"cell": ("lstm", "gru")},
        "cell layers dim seq",
    ),
    _family(
        "gnn",
        "Message passing over edge lists with segment sums: GCN, GAT or edge-MLP messages",
        {
            "batch": 1,
            "nodes": 4096,
            "edges": 32768,
            "features": 64,
            "dim": 128,
            "layers": 3,
            "classes": 16,
            "heads": 4,
            "conv": "gcn",
        },
        {"conv": ("gcn", "gat", "mpnn")},
        "conv nodes edges dim",
    ),
    _family(
        "dlrm",
        "Recommender: embedding tables with summed lookups, MLPs, pairwise interactions",
        # 26 categorical and 13 dense features: the Criteo data sets.
        {
            "batch": 256,
            "tables": 26,
            "rows": 20000,
            "dim": 64,
            "dense": 13,
            "lookups": 4,
            "bottom": 512,
            "top": 1024,
        },
        {},
        "tables rows dim",
    ),
    _family(
        "convnet_1d",
        "Audio classifier: strided 1-D convolutions, then dilated residual blocks",
        # A second at 16 kHz, 35 words: Speech Commands (Warden, 2018).
        {
            "batch": 4,
            "samples": 16000,
            "channels": 128,
            "stem_layers": 5,
            "blocks": 8,
            "classes": 35,
        },
        {},
        "samples channels",
    ),
)

FAMILIES: dict[str, Family] = {family.name: family for family in _FAMILIES}
"""Every family by name."""
