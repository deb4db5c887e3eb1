"""Layers with a recurrent state, and how configurations of models that have them say their sizes.

Such layers project every token to queries, keys, values and gates, run a recurrence over them, and
project its output back: gated delta nets (Yang et al., 2025), Mamba-2 (Dao and Gu, 2024), Kimi
delta attention (Kimi Linear, 2025), lightning attention (MiniMax-01, 2025).
"""

from __future__ import annotations

from typing import NamedTuple

from ...common.errors import PlanError
from ...common.types import JsonMapping


class Recurrence(NamedTuple):
    """Sizes of a layer with a recurrent state.

    Attributes:
        inner: Columns of its input projections.
        outer: Rows of its output projection.
        state: Elements that it keeps of a sequence; its short convolution's are left out, some
            two per cent as many bytes.
    """

    inner: int
    outer: int
    state: int


#: Names of layers with a state in ``layer_types``.
_KINDS = ("linear_attention", "mamba")
#: Letters of Nemotron-H's patterns: Mamba-2, attention, feed-forward, experts.
_MAMBA, _ATTENTION, _FED, _EXPERTS = "M*-E"
_LETTERS = {"mamba": _MAMBA, "attention": _ATTENTION, "mlp": _FED, "moe": _EXPERTS}


def recurrent_layers(data: JsonMapping) -> int:
    """Layers with a recurrent state of a configuration."""
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
    """Sizes of these layers; ``None`` where the configuration does not say them."""
    if "linear_num_value_heads" in data:
        return _gated(
            data["linear_num_key_heads"] * data["linear_key_head_dim"],
            data["linear_num_value_heads"],
            data["linear_value_head_dim"],
            data["linear_key_head_dim"],
            gates=2,
        )
    if "mamba_num_heads" in data or "mamba_n_heads" in data:
        # Mamba-2 in the same terms: B and C of each group, inputs and gates, a step for each head.
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
        # Two gates through products as narrow as a head, which count as so many columns.
        narrow = 2 * (dim + round(dim * wide / data["hidden_size"]))
        return Recurrence(3 * wide + narrow + heads, wide, wide * dim)
    if "attn_type_list" in data:
        heads, dim = data["num_attention_heads"], data["head_dim"]
        return Recurrence(4 * heads * dim, heads * dim, heads * dim * dim)
    return None


def _gated(keys: int, heads: int, dim: int, key_dim: int, gates: int) -> Recurrence:
    """Queries and keys of ``keys`` columns each, values with as many gates, ``gates`` a head."""
    values = heads * dim
    return Recurrence(2 * keys + 2 * values + gates * heads, values, values * key_dim)


def layer_pattern(data: JsonMapping) -> str:
    """A letter for each block of a Nemotron-H model: ``M``, ``*``, ``-`` or ``E``.

    Raises:
        PlanError: A block is none of them.
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


def nemotron_layers(data: JsonMapping, out: dict[str, object]) -> int:
    """Adds layers and feed-forwards of a Nemotron-H model; how many layers have no feed-forward.

    Blocks are counted as layers of attention or Mamba-2, most of which a feed-forward follows.

    Raises:
        PlanError: There are more feed-forwards than layers, or experts of a narrower width.
    """
    pattern = layer_pattern(data)
    mixers = pattern.count(_MAMBA) + pattern.count(_ATTENTION)
    fed = pattern.count(_FED) + pattern.count(_EXPERTS)
    if not 0 < fed <= mixers:
        raise PlanError(
            f"{fed} feed-forwards behind {mixers} layers of attention or Mamba-2",
            hint="at least one, and at most as many as layers",
        )
    out.update(layers=mixers, d_ff=data["intermediate_size"], gated=False)
    if _EXPERTS in pattern:
        if data.get("moe_latent_size"):
            raise PlanError("experts work on a narrower width, which no workload has")
        width = data["moe_intermediate_size"]
        shared = data.get("moe_shared_expert_intermediate_size", width)
        out.update(
            experts=data["n_routed_experts"],
            top_k=data["num_experts_per_tok"],
            shared_experts=round(data.get("n_shared_experts", 0) * shared / width),
            # Where they stand does not matter to serving.
            dense_layers=round(pattern.count(_FED) * mixers / fed),
            dense_ff=data["intermediate_size"],
            d_ff=width,
        )
    return mixers - fed
