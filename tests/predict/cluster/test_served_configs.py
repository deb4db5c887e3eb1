"""Published ``config.json`` files of hybrid models as they are served, by parameters and states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from opcast.common.errors import PlanError
from opcast.simulate.serving.checkpoints import served_by_name
from opcast.simulate.serving.served import EnginePlan, Formats, ServedModel
from opcast.simulate.step.named_workloads import read_workload

ONE = EnginePlan()
_NEMOTRON = {
    "model_type": "nemotron_h", "vocab_size": 131072, "num_attention_heads": 32, "head_dim": 128,
    "n_groups": 8, "ssm_state_size": 128, "mamba_head_dim": 64, "conv_kernel": 4,
    "mlp_hidden_act": "relu2", "tie_word_embeddings": False, "mamba_num_heads": 128,
}  # fmt: skip
#: The keys that say the sizes, with the parameters that the models' cards state, in billions, and
#: the layers with a recurrent state.
CONFIGS: dict[str, tuple[dict[str, Any], float, int]] = {
    "NVIDIA-Nemotron-H-8B": (
        {**_NEMOTRON, "hidden_size": 4096, "intermediate_size": 21504, "num_key_value_heads": 8,
         "num_hidden_layers": 52,
         "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"},
        8.1, 24,
    ),
    "NVIDIA-Nemotron-3-Nano-30B-A3B": (
        {**_NEMOTRON, "hidden_size": 2688, "intermediate_size": 1856, "num_key_value_heads": 2,
         "num_hidden_layers": 52, "mamba_num_heads": 64, "n_routed_experts": 128,
         "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "n_shared_experts": 1,
         "moe_shared_expert_intermediate_size": 3712,
         "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"},
        31.6, 23,
    ),
    "granite-4.0-h-small": (
        {"model_type": "granitemoehybrid", "vocab_size": 100352, "hidden_size": 4096,
         "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
         "intermediate_size": 768, "shared_intermediate_size": 1536, "num_local_experts": 72,
         "num_experts_per_tok": 10, "mamba_n_heads": 128, "mamba_d_head": 64,
         "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2,
         "layer_types": (["mamba"] * 9 + ["attention"]) * 4, "tie_word_embeddings": True},
        32.2, 36,
    ),
    "granite-4.0-h-micro": (
        {"model_type": "granitemoehybrid", "vocab_size": 100352, "hidden_size": 2048,
         "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
         "intermediate_size": 8192, "shared_intermediate_size": 8192, "num_local_experts": 0,
         "num_experts_per_tok": 0, "mamba_n_heads": 64, "mamba_d_head": 64,
         "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2,
         "layer_types": (["mamba"] * 9 + ["attention"]) * 4, "tie_word_embeddings": True},
        3.2, 36,
    ),
    "Qwen3-Next-80B-A3B": (
        {"model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048,
         "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
         "head_dim": 256, "intermediate_size": 5120, "moe_intermediate_size": 512,
         "shared_expert_intermediate_size": 512, "num_experts": 512, "num_experts_per_tok": 10,
         "decoder_sparse_step": 1, "mlp_only_layers": [], "full_attention_interval": 4,
         "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
         "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4},
        79.7, 36,
    ),
    "Kimi-Linear-48B-A3B": (
        {"model_type": "kimi_linear", "vocab_size": 163840, "hidden_size": 2304,
         "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32,
         "head_dim": 72, "intermediate_size": 9216, "moe_intermediate_size": 1024,
         "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1,
         "num_expert_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1,
         "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
         "qk_rope_head_dim": 64, "v_head_dim": 128,
         "linear_attn_config": {
             "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32,
             "kda_layers": [n for n in range(1, 27) if n % 4], "short_conv_kernel_size": 4}},
        49.1, 20,
    ),
    "MiniMax-M1": (
        {"model_type": "minimax_m1", "vocab_size": 200064, "hidden_size": 6144,
         "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
         "head_dim": 128, "intermediate_size": 9216, "num_local_experts": 32,
         "num_experts_per_tok": 2, "attn_type_list": ([0] * 7 + [1]) * 10,
         "tie_word_embeddings": False},
        456.0, 70,
    ),
    "MiniMax-M2": (
        {"model_type": "minimax_m2", "vocab_size": 200064, "hidden_size": 3072,
         "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8,
         "head_dim": 128, "intermediate_size": 1536, "num_local_experts": 256,
         "num_experts_per_tok": 8, "attn_type_list": [1] * 62, "tie_word_embeddings": False},
        228.7, 0,
    ),
    "gpt-oss-120b": (
        {"model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880,
         "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8,
         "head_dim": 64, "intermediate_size": 2880, "num_local_experts": 128,
         "num_experts_per_tok": 4, "sliding_window": 128, "tie_word_embeddings": False,
         "layer_types": ["sliding_attention", "full_attention"] * 18},
        116.8, 0,
    ),
}  # fmt: skip


def served(name: str, folder: Path, **changes: object) -> ServedModel:
    path = folder / "config.json"
    path.write_text(json.dumps({**CONFIGS[name][0], **changes}))
    return served_by_name(str(path), {}, Formats(), files=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_has_the_parameters_of_its_card(tmp_path: Path, name: str) -> None:
    _, billions, states = CONFIGS[name]
    found = served(name, tmp_path)
    assert found.weight_bytes(ONE) / 2e9 == pytest.approx(billions, rel=0.015)
    assert found.linear_layers == states
    if states:
        with pytest.raises(PlanError, match="which no step has"):
            read_workload(str(tmp_path / "config.json"))


def test_states_and_caches_by_hand(tmp_path: Path) -> None:
    # Nemotron 3 Nano: 64 heads of 64 x 128 in f32 in 23 layers; two heads of 128 in six.
    nano = served("NVIDIA-Nemotron-3-Nano-30B-A3B", tmp_path)
    assert nano.state_bytes(ONE) == 23 * 64 * 64 * 128 * 4
    assert nano.token_bytes(ONE) == 6 * 2 * 2 * 128 * 2
    # 52 blocks are 29 layers, of which six have no feed-forward.
    assert (nano.workload.layers, nano.bare_layers, nano.workload.gated) == (29, 6, False)
    # Kimi Linear: 32 heads of 128 x 128 in 20 layers, a latent of 576 in seven.
    kimi = served("Kimi-Linear-48B-A3B", tmp_path)
    assert kimi.state_bytes(ONE) == 20 * 32 * 128 * 128 * 4
    assert kimi.token_bytes(ONE) == 7 * 576 * 2
    assert served("gpt-oss-120b", tmp_path).cache_layers() == (18.0, 18.0, 128)


def test_a_name_and_its_config_are_one_model(tmp_path: Path) -> None:
    by_name = served_by_name("Qwen/Qwen3-Next-80B-A3B-Instruct", {}, Formats())
    config = served("Qwen3-Next-80B-A3B", tmp_path)
    assert by_name.recurrence == config.recurrence
    assert by_name.weight_bytes(ONE) == pytest.approx(config.weight_bytes(ONE), rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hybrid_override_pattern": "MXM*"}, r"blocks \['X'\]"),
        ({"hybrid_override_pattern": "M---*"}, "3 feed-forwards behind 2 layers"),
        ({"moe_latent_size": 1024}, "narrower width"),
        ({"ssm_state_size": None}, "lacks 'ssm_state_size'"),
    ],
)
def test_patterns_that_are_none(tmp_path: Path, changes: dict[str, object], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        served("NVIDIA-Nemotron-3-Nano-30B-A3B", tmp_path, **changes)


def test_newer_configs_list_their_blocks(tmp_path: Path) -> None:
    letters = {"M": "mamba", "*": "attention", "-": "mlp"}
    pattern = str(CONFIGS["NVIDIA-Nemotron-H-8B"][0]["hybrid_override_pattern"])
    blocks = [letters[letter] for letter in pattern]
    listed = served(
        "NVIDIA-Nemotron-H-8B", tmp_path, hybrid_override_pattern=None, layers_block_type=blocks
    )
    assert listed == served("NVIDIA-Nemotron-H-8B", tmp_path)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"dtype": "fp8"}, "--weights fp8"),
        ({"products": "nvfp4"}, "--weights fp8"),
        ({"lora_rank": 16}, "merged into the weights"),
    ],
)
def test_types_of_training_are_not_those_of_serving(given, says):
    """Weights in bf16 were served, whatever was asked for."""
    with pytest.raises(PlanError, match=rf"changes nothing in serving.*{says}"):
        served_by_name("llama-3-8b", given, Formats())
