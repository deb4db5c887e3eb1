"""The model of a step: a transformer, given by its sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...common.errors import PlanError
from ...features.ir.dtypes import DTYPE_BITS
from ...features.operators.flops import attention_flops, causal_pairs
from .plan import Plan
from .settings import build, read_pairs

#: HLO type by dtype of a workload; fp8 is E4M3, the format of forward passes (Micikevicius et al.,
#: FP8 Formats for Deep Learning, 2022).
HLO_DTYPE = {"bf16": "bf16", "f16": "f16", "f32": "f32", "fp8": "f8e4m3fn"}
#: Bytes of an element by dtype of a workload.
WIDTH = {name: DTYPE_BITS[dtype] // 8 for name, dtype in HLO_DTYPE.items()}
#: A full training step, or a forward pass for inference.
MODES = ("train", "forward")
#: The zoo's names of the same settings, so that one ``--set`` works for both.
ALIASES = {"dim": "d_model", "hidden": "d_ff", "sequence": "seq", "n_layers": "layers"}
#: Tokens of a micro-batch that is chosen: enough rows to fill the matrix units of a large GPU
#: (engineering estimate; not fitted).
TOKENS = 8192
#: Settings of families that differ from the defaults of :class:`Workload`, which are llama's.
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    # Experts as in Mixtral 8x7B (Jiang et al., 2024).
    "moe": {"experts": 8, "top_k": 2},
    # GPT-2 medium (Radford et al., 2019).
    "gpt": {
        "kv_heads": 0,
        "gated": False,
        "norm": "layernorm",
        "rope": False,
        "tied": True,
        "vocab": 50257,
        "d_model": 1024,
        "heads": 16,
        "d_ff": 4096,
        "layers": 24,
        "seq": 1024,
    },
    # BERT base (Devlin et al., NAACL 2019), which predicts the 15 % of tokens that are masked.
    "bert": {
        "kv_heads": 0,
        "gated": False,
        "norm": "layernorm",
        "rope": False,
        "tied": True,
        "causal": False,
        "vocab": 30522,
        "d_model": 768,
        "heads": 12,
        "d_ff": 3072,
        "layers": 12,
        "seq": 512,
        "head_share": 0.15,
    },
}


@dataclass(frozen=True)
class Workload:
    """A transformer and its batch.

    Attributes:
        layers: Blocks of attention and feed-forward.
        d_model: Width.
        heads: Query heads.
        kv_heads: Key and value heads; 0 for as many as ``heads``.
        head_dim: Width of a head; 0 for ``d_model / heads``.
        d_ff: Width of the feed-forward (of one expert).
        vocab: Tokens of the vocabulary.
        seq: Tokens of a sequence.
        batch: Sequences of a step over all devices.
        dtype: Type of parameters and activations, a key of :data:`WIDTH`.
        experts: Experts of a layer; 0 for a plain feed-forward.
        top_k: Experts that a token goes to.
        gated: Whether the feed-forward has a gate (three matrices instead of two).
        causal: Whether a token sees only earlier ones.
        norm: ``rmsnorm`` or ``layernorm``.
        rope: Whether queries and keys are rotated.
        tied: Whether embedding and head share their weights.
        head_share: Share of the tokens that the vocabulary projection sees.
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
    mode: str = "train"

    def __post_init__(self) -> None:
        """Check that the sizes make a model.

        Raises:
            PlanError: A size is not positive, or heads or experts do not fit.
        """
        for name in ("layers", "d_model", "heads", "d_ff", "vocab", "seq", "batch"):
            if getattr(self, name) < 1:
                raise PlanError(
                    f"{name}={getattr(self, name)} must be at least 1", where="workload"
                )
        if self.dtype not in WIDTH or self.mode not in MODES:
            raise PlanError(
                f"dtype={self.dtype}, mode={self.mode}",
                where="workload",
                hint=f"dtype is one of {', '.join(WIDTH)}; mode one of {', '.join(MODES)}",
            )
        if self.norm not in ("rmsnorm", "layernorm") or not 0 < self.head_share <= 1:
            raise PlanError(
                f"norm={self.norm}, head_share={self.head_share}",
                where="workload",
                hint="norm is rmsnorm or layernorm; head_share lies above 0 and up to 1",
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
        """Key and value heads."""
        return self.kv_heads or self.heads

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return WIDTH[self.dtype]

    @property
    def matrices(self) -> int:
        """Matrices of a feed-forward."""
        return 3 if self.gated else 2

    @property
    def attention_parameters(self) -> int:
        """Parameters of a layer's attention and of the layer's two norms."""
        d, inner = self.d_model, self.head * (self.heads + 2 * self.groups)
        return d * inner + self.heads * self.head * d + 2 * d

    @property
    def expert_parameters(self) -> int:
        """Parameters of one feed-forward."""
        return self.matrices * self.d_model * self.d_ff

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer, all experts and their router included."""
        return (
            self.attention_parameters
            + self.expert_parameters * max(1, self.experts)
            + self.d_model * self.experts
        )

    @property
    def table_parameters(self) -> int:
        """Parameters of the embedding; an untied head has as many again."""
        return self.vocab * self.d_model

    @property
    def parameters(self) -> int:
        """All parameters; biases and positions are left out."""
        tables = self.table_parameters * (1 if self.tied else 2)
        # The last term is the final norm.
        return self.layers * self.layer_parameters + tables + self.d_model

    def model_flops(self) -> float:
        """Return the matrix FLOPs that a step needs, without recomputation.

        ``2`` per active parameter and token, and the two products of attention over visible pairs;
        twice as many again for the backward pass (Kaplan et al. 2020; Chowdhery et al., PaLM,
        appendix B, which counts masked pairs as well).
        """
        tokens = float(self.batch) * self.seq
        experts = self.expert_parameters * max(1, self.top_k) + self.d_model * self.experts
        # Norms are not products, and the embedding is a lookup: only the head's table counts.
        layer = self.attention_parameters - 2 * self.d_model + experts
        products = self.layers * layer + self.table_parameters * self.head_share
        visible = causal_pairs(self.seq, self.seq) if self.causal else float(self.seq) * self.seq
        pairs = self.batch * visible
        attention = self.layers * attention_flops(1.0, self.heads, pairs, 2.0 * self.head)
        forward = 2.0 * products * tokens + attention
        return forward * (3.0 if self.mode == "train" else 1.0)


def make_workload(family: str, settings: Mapping[str, object]) -> Workload:
    """A workload from a family and settings.

    Raises:
        PlanError: The family or a key is unknown, or the sizes do not fit.
    """
    if family not in FAMILIES:
        raise PlanError(
            f"no workload {family!r} can be spread over devices",
            hint="families: " + ", ".join(FAMILIES),
        )
    values = {ALIASES.get(k, k): v for k, v in settings.items()}
    return build(Workload, values, f"workload {family}", **FAMILIES[family])


def read_workload(text: str, settings: Sequence[str] = ()) -> Workload:
    """Read a workload from a family's name or a YAML file; settings take precedence.

    Args:
        text: A key of :data:`FAMILIES`, or a file with ``family`` and sizes.
        settings: Texts such as ``layers=32,d_model=4096``.

    Raises:
        PlanError: The file cannot be read, the family or a key is unknown, or sizes do not fit.
    """
    values: dict[str, object] = {}
    family = text
    if text.lower().endswith((".yaml", ".yml")):
        values = read_pairs(text, "workload")
        family = str(values.pop("family", "llama"))
    for part in settings:
        values |= read_pairs(part, "--set")
    return make_workload(family, values)


def stage_layers(layers: int, plan: Plan) -> list[int]:
    """Return the layers of each stage; first and last get the smaller share if it is uneven."""
    # The ends also hold embedding and head, which take time and memory of their own.
    least, more = divmod(layers, plan.pp)
    middle = sorted(range(plan.pp), key=lambda s: (s in (0, plan.pp - 1), s))
    fuller = set(middle[:more])
    return [least + (s in fuller) for s in range(plan.pp)]


def resolved(workload: Workload, plan: Plan, devices: int) -> Plan:
    """Return the plan with its micro-batches chosen, checked against model and cluster.

    Args:
        workload: The model.
        plan: The plan.
        devices: Devices of the cluster.

    Raises:
        PlanError: Plan, model and cluster do not fit; the message says what to change.
    """
    if plan.devices != devices:
        raise PlanError(
            f"the plan {plan.text()} takes {plan.devices} devices, the cluster has {devices}",
            where="plan",
            hint="dp*fsdp*tp*cp*pp must be the number of devices",
        )
    _divides("tp", plan.tp, "heads", workload.heads)
    _divides("tp", plan.tp, "d_ff", workload.d_ff)
    _divides("cp", plan.cp, "seq", workload.seq)
    _divides("tp*cp", plan.sequence_parallel * plan.cp, "seq", workload.seq)
    _divides("dp*fsdp", plan.batch_ranks, "batch", workload.batch)
    # More tensor-parallel ranks than key-value heads replicate these, each as often as the others.
    if plan.tp > workload.groups:
        _divides("kv_heads", workload.groups, "tp", plan.tp)
    else:
        _divides("tp", plan.tp, "kv_heads", workload.groups)
    if plan.ep > 1:
        if not workload.experts:
            raise PlanError(f"ep={plan.ep}, but the model has no experts", hint="use ep=1")
        _divides("ep", plan.ep, "experts", workload.experts)
    if plan.pp * plan.virtual > workload.layers:
        raise PlanError(
            f"pp*virtual={plan.pp * plan.virtual} is more than layers={workload.layers}",
            where="plan",
            hint="lower pp or virtual",
        )
    own = workload.batch // plan.batch_ranks
    count = plan.microbatches or _choose_microbatches(own, workload, plan)
    _divides("microbatches", count, "batch/(dp*fsdp)", own)
    # The interleaved order goes through groups of ``pp`` micro-batches (as in Megatron-LM), and its
    # chunks hold equal numbers of layers.
    if plan.schedule == "interleaved":
        _divides("pp", plan.pp, "microbatches", count)
        _divides("pp*virtual", plan.pp * plan.virtual, "layers", workload.layers)
    return plan.changed(microbatches=count)


def _divides(part: str, divisor: int, whole: str, number: int) -> None:
    if number % divisor:
        # Suggest divisors near the requested one: up to four times it, the eight largest of these.
        fits = [d for d in range(1, number + 1) if number % d == 0 and d <= 4 * divisor]
        raise PlanError(
            f"{part}={divisor} does not divide {whole}={number}",
            where="plan",
            hint=f"divisors of {whole}: {', '.join(map(str, fits[-8:]))}",
        )


def _choose_microbatches(own: int, workload: Workload, plan: Plan) -> int:
    """Choose the fewest micro-batches of at most :data:`TOKENS` tokens, or of one sequence."""
    # Context parallelism leaves each device 1/cp of a sequence's tokens.
    most = max(1, TOKENS * plan.cp // workload.seq)
    counts: Sequence[int] = [m for m in range(1, own + 1) if own % m == 0]
    fitting = [m for m in counts if own // m <= most]
    even = [m for m in fitting if m % plan.pp == 0]
    return (even if plan.schedule == "interleaved" and even else fitting)[0]
