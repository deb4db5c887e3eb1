"""The model that a step runs: a transformer, described by its sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from ...common.errors import PlanError
from ...common.units import plain
from ...features.cost.formats import FORMATS, format_name
from ...features.operators.op import attention_flops, visible_pairs

#: Formats of parameters and activations.
DTYPES = ("bf16", "f16", "f32")
#: Formats to which products may be quantised.
PRODUCTS = (*DTYPES, "fp8", "mxfp8", "nvfp4", "int8")
#: A full training step, or a forward pass for inference.
MODES = ("train", "forward")
#: Implementations of attention: the fastest fused one of the device; FlashAttention-2 or Triton's
#: copy of it, which do not use the asynchronous units of Hopper and later; scores in memory with a
#: framework's fused softmax; scores in memory with XLA's kernels.
ATTENTION = ("fused", "flash2", "eager", "naive")
#: Linear layers with adapters: those of attention, or of the feed-forward as well (as
#: ``all-linear`` of Hugging Face's PEFT).
LORA_TARGETS = ("attention", "all-linear")
#: Those that keep scores in memory.
WRITTEN_OUT = ("eager", "naive")
#: Aliases of settings, as the zoo names them.
ALIASES = {"dim": "d_model", "hidden": "d_ff", "sequence": "seq", "n_layers": "layers"}
#: Maximum sizes, beyond any model or step, so that a slip (``batch=1e12``) is reported instead of
#: simulated.
MOST = {"layers": 10_000, "d_model": 10**6, "d_ff": 10**7, "vocab": 10**8, "seq": 10**8,
        "batch": 10**7, "heads": 10**5, "experts": 10**5, "lora_rank": 10**5}  # fmt: skip
#: Above the error of a share of the layers as a binary number, and far below one layer.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Workload:
    """A transformer and its batch.

    Attributes:
        layers: Number of layers (attention and feed-forward).
        d_model: Hidden size.
        heads: Query heads.
        kv_heads: Key-value heads; 0 for as many as ``heads``.
        head_dim: Width of a head; 0 for ``d_model / heads``.
        d_ff: Width of the feed-forward (of one expert).
        vocab: Vocabulary size.
        seq: Tokens per sequence.
        batch: Sequences per step over all devices.
        dtype: Type of parameters and activations, one of :data:`DTYPES`.
        experts: Experts per layer; 0 for a dense feed-forward.
        top_k: Experts per token.
        expert_boxes: Maximum number of boxes that hold the experts of a token, for box-limited
            routing (``topk_group`` of a DeepSeek-V3 router, with one group per box); 0 for no
            limit.
        gated: Whether the feed-forward is gated (three matrices instead of two).
        causal: Whether attention is causal.
        norm: ``rmsnorm`` or ``layernorm``.
        rope: Whether queries and keys have rotary embeddings.
        tied: Whether embedding and head share their weights.
        head_share: Fraction of the tokens that go through the vocabulary projection.
        products: Format to which the operands of the layers' matrix products are quantised, one of
            :data:`PRODUCTS`; empty for ``dtype``. Parameters, activations, attention and the
            vocabulary projection stay in ``dtype``, as in Transformer Engine's recipes.
        shared_experts: Experts that every token uses, in addition to ``top_k``.
        dense_layers: Number of leading layers with a dense feed-forward in a model with experts.
        dense_ff: Width of the feed-forward of these layers; 0 for ``d_ff``.
        window: Sliding window of attention in tokens; 0 for none.
        window_share: Fraction of the layers that have the window; 0.5 for every second one.
        q_lora: Rank of compressed queries of multi-head latent attention (MLA); 0 for none.
        kv_lora: Rank of compressed keys and values of MLA; 0 for plain attention.
        rope_dim: Additional rotary width of queries and keys of MLA.
        v_dim: Width of a value head of MLA; 0 for ``head_dim``.
        positions: Whether learned positions are added to the embeddings.
        attention: One of :data:`ATTENTION`.
        lora_rank: Rank of low-rank adapters beside linear layers, which alone are trained (Hu et
            al., LoRA, ICLR 2022); 0 to train all parameters.
        lora_targets: Layers that have adapters, one of :data:`LORA_TARGETS`.
        mode: ``train`` or ``forward``.
    """

    # Layers of Llama 3 8B (Llama team, The Llama 3 Herd of Models, 2024) with Llama 2's vocabulary.
    layers: int = 32
    d_model: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 0
    d_ff: int = 14336
    vocab: int = 32000
    seq: int = 4096
    batch: int = 8
    dtype: str = "bf16"
    experts: int = 0
    top_k: int = 0
    gated: bool = True
    causal: bool = True
    norm: str = "rmsnorm"
    rope: bool = True
    tied: bool = False
    head_share: float = 1.0
    products: str = ""
    shared_experts: int = 0
    expert_boxes: int = 0
    dense_layers: int = 0
    dense_ff: int = 0
    window: int = 0
    window_share: float = 1.0
    q_lora: int = 0
    kv_lora: int = 0
    rope_dim: int = 0
    v_dim: int = 0
    positions: bool = False
    attention: str = "fused"
    lora_rank: int = 0
    lora_targets: str = "attention"
    mode: str = "train"

    def __post_init__(self) -> None:
        """Check that the sizes are consistent.

        Raises:
            PlanError: A size is not positive, or heads or experts do not fit.
        """
        for name in ("layers", "d_model", "heads", "d_ff", "vocab", "seq", "batch"):
            if getattr(self, name) < 1:
                raise PlanError(
                    f"{name}={getattr(self, name)} must be at least 1", where="workload"
                )
        for name, most in MOST.items():
            if getattr(self, name) > most:
                raise PlanError(
                    f"{name}={plain(getattr(self, name), 4)} is beyond any model or step",
                    where="workload",
                    hint=f"at most {plain(most, 4)}",
                )
        if self.dtype not in DTYPES or self.mode not in MODES:
            raise PlanError(
                f"dtype={self.dtype}, mode={self.mode}",
                where="workload",
                hint=f"dtype is one of {', '.join(DTYPES)}; mode one of {', '.join(MODES)}",
            )
        if self.norm not in ("rmsnorm", "layernorm") or not 0 < self.head_share <= 1:
            raise PlanError(
                f"norm={self.norm}, head_share={self.head_share}",
                where="workload",
                hint="norm is rmsnorm or layernorm; head_share lies above 0 and up to 1",
            )
        known = (
            ("products", (*PRODUCTS, "")),
            ("attention", ATTENTION),
            ("lora_targets", LORA_TARGETS),
        )
        for name, allowed in known:
            if getattr(self, name) not in allowed:
                raise PlanError(
                    f"{name}={getattr(self, name)!r} is not known",
                    where="workload",
                    hint="one of " + ", ".join(filter(None, allowed)),
                )
        if self.lora_rank < 0 or (self.lora_rank and self.adapts_feed_forward and self.experts):
            raise PlanError(
                f"lora_rank={self.lora_rank}, lora_targets={self.lora_targets}",
                where="workload",
                hint="a rank is at least 0; adapters of experts are not simulated: "
                "lora_targets=attention",
            )
        if not self.head_dim and self.d_model % self.heads:
            raise PlanError(
                f"d_model={self.d_model} is not a multiple of heads={self.heads}",
                where="workload",
                hint="give head_dim, or other heads",
            )
        if self.kv_heads < 0 or self.heads % self.groups:
            raise PlanError(
                f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}",
                where="workload",
                hint="choose kv_heads that divide heads",
            )
        if not 0 <= self.top_k <= self.experts or (self.experts > 0) != (self.top_k > 0):
            raise PlanError(
                f"experts={self.experts}, top_k={self.top_k}",
                where="workload",
                hint="give both or neither, top_k at most experts",
            )

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.head_dim or self.d_model // self.heads

    @property
    def groups(self) -> int:
        """Key-value heads."""
        return self.kv_heads or self.heads

    @property
    def width(self) -> int:
        """Bytes per element."""
        return int(FORMATS[self.dtype].element_bytes)

    @property
    def matrices(self) -> int:
        """Matrices per feed-forward."""
        return 3 if self.gated else 2

    @property
    def product_dtype(self) -> str:
        """Format of the operands of the layers' products, one of :data:`PRODUCTS`."""
        return self.products or self.dtype

    @property
    def operand_width(self) -> float:
        """Bytes per operand of the layers' products, at most those of an element."""
        return min(float(self.width), float(FORMATS[self.product_dtype].element_bytes))

    @property
    def product_bits(self) -> int:
        """Bits per operand of the layers' products."""
        return round(8 * FORMATS[self.product_dtype].element_bytes)

    @property
    def value(self) -> int:
        """Width of a value head."""
        return self.v_dim or self.head

    @property
    def attention_sizes(self) -> tuple[tuple[int, int], ...]:
        """Widths of input and output of attention's linear layers; queries, keys, values are one.

        With MLA they are products of low rank (DeepSeek-V2, 2024, section 2.1).
        """
        d, heads = self.d_model, self.heads
        if not self.kv_lora:
            return (d, self.head * (heads + 2 * self.groups)), (heads * self.head, d)
        query = heads * (self.head + self.rope_dim)
        queries = ((d, self.q_lora), (self.q_lora, query)) if self.q_lora else ((d, query),)
        keys = (d, self.kv_lora + self.rope_dim)
        values = (self.kv_lora, heads * (self.head + self.value))
        return (*queries, keys, values, (heads * self.value, d))

    @property
    def attention_parameters(self) -> int:
        """Parameters of a layer's attention, norms included."""
        return sum(ahead * behind for ahead, behind in self.attention_sizes) + 2 * self.d_model

    @property
    def adapts_feed_forward(self) -> bool:
        """Whether adapters are beside the linear layers of the feed-forward, too."""
        return self.lora_targets == "all-linear"

    @property
    def adapter_parameters(self) -> int:
        """Parameters of a layer's adapters: two products of the rank beside each target."""
        if not self.lora_rank:
            return 0
        sizes = self.attention_sizes
        if self.adapts_feed_forward:
            wide = self.d_ff * (self.matrices - 1)
            sizes = (*sizes, (self.d_model, wide), (self.d_ff, self.d_model))
        return self.lora_rank * sum(ahead + behind for ahead, behind in sizes)

    @property
    def expert_parameters(self) -> int:
        """Parameters of one feed-forward."""
        return self.matrices * self.d_model * self.d_ff

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer, all experts and their router included."""
        return (
            self.attention_parameters
            + self.expert_parameters * (max(1, self.experts) + self.shared_experts)
            + self.d_model * self.experts
            + self.adapter_parameters
        )

    @property
    def table_parameters(self) -> int:
        """Parameters of the embedding; an untied head has as many again."""
        return self.vocab * self.d_model

    @property
    def mixed(self) -> bool:
        """Whether layers differ from one another."""
        return bool(self.dense_layers) or (self.window > 0 and self.window_share < 1.0)

    @property
    def parameters(self) -> int:
        """All parameters except biases."""
        tables = self.table_parameters * (1 if self.tied else 2)
        tables += self.seq * self.d_model * self.positions
        return sum(w.layer_parameters for w in layer_kinds(self)) + tables + self.d_model

    @property
    def trained_parameters(self) -> int:
        """Parameters that a step changes."""
        adapters = sum(w.adapter_parameters for w in layer_kinds(self))
        return adapters if self.lora_rank else self.parameters

    def model_flops(self) -> float:
        """Matrix FLOPs that a step needs, without recomputation.

        ``2`` per active parameter and token, and the two products of attention over visible pairs;
        twice as many again for the backward pass (Kaplan et al. 2020; Chowdhery et al., PaLM,
        appendix B, which counts masked pairs as well), once for frozen parameters.
        """
        tokens = float(self.batch) * self.seq
        products = self.table_parameters * self.head_share
        attention = adapters = 0.0
        for layer in layer_kinds(self):
            active = max(1, layer.top_k) + layer.shared_experts
            experts = layer.expert_parameters * active + layer.d_model * layer.experts
            products += layer.attention_parameters - 2 * layer.d_model + experts
            pairs = self.batch * layer.visible_pairs()
            width = float(layer.head + layer.rope_dim + layer.value)
            attention += attention_flops(1.0, layer.heads, pairs, width)
            adapters += layer.adapter_parameters
        passes = 3.0 if self.mode == "train" else 1.0
        trained = 2.0 * adapters * tokens + attention
        frozen = min(passes, 2.0) if self.lora_rank else passes
        return 2.0 * products * tokens * frozen + trained * passes

    def visible_pairs(self) -> float:
        """Pairs of a query and a visible key, in one sequence and layer."""
        window = self.window if self.causal else 0
        return visible_pairs(self.seq, self.seq, window, self.causal)


def trained_in(name: str) -> dict[str, str]:
    """``dtype`` and ``products`` of a model that is said to be trained in one format.

    Narrow formats are those of products: parameters and activations stay in 16 bits, as in the
    recipes of Transformer Engine.

    Args:
        name: One of :data:`PRODUCTS`, or another name of it.
    """
    own = format_name(name)
    narrow = own in PRODUCTS and own not in DTYPES
    return {"dtype": "bf16", "products": own} if narrow else {"dtype": own, "products": ""}


@lru_cache(maxsize=4096)
def layer_kinds(workload: Workload) -> tuple[Workload, ...]:
    """The workload of each layer, first to last.

    Layers without experts, or without the window, are separate workloads; windowed layers are
    evenly spaced.
    """
    if not workload.mixed:
        return (workload,) * workload.layers
    kinds = []
    for layer in range(workload.layers):
        share = workload.window_share
        # Binary numbers round some shares down, such as 52 of 62 layers.
        windowed = int((layer + 1) * share + _ROUNDING) > int(layer * share + _ROUNDING)
        changes: dict[str, int | float] = {"dense_layers": 0, "window_share": 1.0}
        if layer < workload.dense_layers:
            width = workload.dense_ff or workload.d_ff
            changes |= {"experts": 0, "top_k": 0, "shared_experts": 0, "d_ff": width}
        if not windowed:
            changes["window"] = 0
        kinds.append(replace(workload, **changes))  # type: ignore[arg-type]
    return tuple(kinds)
