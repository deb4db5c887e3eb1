"""Models by name and by their config.json, against the parameters that their sources state."""

import json

import pytest

from opcast.common.errors import PlanError
from opcast.simulate.step.named_workloads import make_workload, read_workload, workload_notes
from opcast.simulate.step.presets import find_preset, preset_names
from opcast.simulate.step.workload import MOST, layer_kinds


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_has_the_published_parameters(name):
    preset = find_preset(name)
    work = make_workload(name, {})
    assert work.parameters == pytest.approx(preset.published, rel=0.01)
    assert preset.source


# Keys of the models' own config.json that matter, and some that do not.
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "rope_theta": 5e5,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "tie_word_embeddings": False, "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}  # fmt: skip
CONFIGS = {
    "llama-3-8b": LLAMA_8B,
    "mixtral-8x7b": {
        **LLAMA_8B, "model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8,
        "num_experts_per_tok": 2, "sliding_window": None, "max_position_embeddings": 32768,
    },
    "mistral-7b": {
        **LLAMA_8B, "model_type": "mistral", "vocab_size": 32000, "sliding_window": 4096,
    },
    "qwen-2.5-0.5b": {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
        "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
        "vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 4096,
        "sliding_window": 32768, "use_sliding_window": False,
    },
    "qwen-3-235b-a22b": {
        "model_type": "qwen3_moe", "hidden_size": 4096, "intermediate_size": 12288,
        "moe_intermediate_size": 1536, "num_attention_heads": 64, "num_hidden_layers": 94,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936,
        "tie_word_embeddings": False, "max_position_embeddings": 4096, "sliding_window": None,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "num_attention_heads": 128, "num_key_value_heads": 128,
        "num_hidden_layers": 61, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "first_k_dense_replace": 3, "moe_layer_freq": 1,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "vocab_size": 129280, "num_nextn_predict_layers": 1,
        "max_position_embeddings": 4096, "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "fp8"},
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64,
        "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 36,
        "num_local_experts": 128, "num_experts_per_tok": 4, "vocab_size": 201088,
        "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 18,
        "max_position_embeddings": 131072, "tie_word_embeddings": False,
    },
    "gemma-3-4b": {
        "model_type": "gemma3", "vision_config": {"model_type": "siglip_vision_model"},
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
            "num_hidden_layers": 34, "sliding_window": 1024,
        },
    },
    "qwen-3-8b": {
        "model_type": "qwen3_vl", "tie_word_embeddings": False, "vision_config": {"depth": 27},
        "text_config": {
            "model_type": "qwen3_vl_text", "hidden_size": 4096, "intermediate_size": 12288,
            "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
            "vocab_size": 151936, "max_position_embeddings": 4096,
        },
    },
    "gpt-2-xl": {
        "model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25, "n_positions": 1024,
        "vocab_size": 50257,
    },
    "bert-base": {
        "model_type": "bert", "hidden_size": 768, "intermediate_size": 3072,
        "num_attention_heads": 12, "num_hidden_layers": 12, "vocab_size": 30522,
        "max_position_embeddings": 512,
    },
    "vit-b-16": {
        "model_type": "vit", "hidden_size": 768, "intermediate_size": 3072, "image_size": 224,
        "patch_size": 16, "num_attention_heads": 12, "num_hidden_layers": 12,
        "id2label": {str(i): "a class" for i in range(1000)},
    },
}  # fmt: skip


def written(tmp_path, data):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data))
    return str(path)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_makes_the_workload_of_its_model(tmp_path, name):
    found = read_workload(written(tmp_path, CONFIGS[name]))
    want = make_workload(name, {"seq": found.seq})
    assert found.parameters == pytest.approx(want.parameters, rel=1e-4)
    assert found.model_flops() == pytest.approx(want.model_flops(), rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "sizes", "image", "tokens", "published"),
    [
        ("clip_vision_model", (1024, 4096, 24, 16), 224, 257, 304e6),  # ViT-L/14 (Radford, 2021)
        # So400m/14 (Zhai, 2023), whose pooling has another 15 million.
        ("siglip_vision_model", (1152, 4304, 27, 16), 384, 730, 428e6 - 15e6),
    ],
)
def test_vision_encoders_are_read(tmp_path, kind, sizes, image, tokens, published):
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    data = {"model_type": kind, "image_size": image, "patch_size": 14}
    found = read_workload(written(tmp_path, data | dict(zip(names, sizes, strict=True))))
    assert (found.seq, found.causal) == (tokens, False)
    # Without the embedding and head of classes; patches of 14 x 14 x 3 are no parameters here.
    own = found.parameters - 2 * found.table_parameters + 14 * 14 * 3 * found.d_model
    assert own == pytest.approx(published, rel=0.005)


def test_what_a_config_has_beyond_a_workload_is_told(tmp_path):
    path = written(tmp_path, CONFIGS["deepseek-v3"])
    said = " ".join(workload_notes(path))
    assert "multi-token prediction" in said
    assert "products=fp8" in said
    # Serving drafts by them, and takes the format of the checkpoint.
    assert workload_notes(path, served=True) == ()
    assert "vision" in workload_notes("gemma-3-27b", served=True)[0]
    assert "gemma3" in " ".join(workload_notes(written(tmp_path, CONFIGS["gemma-3-4b"])))
    assert workload_notes("llama-3-8b") == workload_notes("llama") == ()
    assert "multi-token" in workload_notes("deepseek-v3")[0]


def test_five_of_six_layers_of_gemma_have_the_window(tmp_path):
    for work in (make_workload("gemma-3-27b", {}), make_workload("gemma-3-4b", {})):
        windows = [layer.window for layer in layer_kinds(work)]
        assert windows.count(0) == work.layers // 6
    # A share that binary fractions cannot hold: 52 of 62.
    work = make_workload("gemma-3-27b", {"window_share": 52 / 62})
    assert [k.window for k in layer_kinds(work)].count(1024) == 52


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "cross-attention"),
        ({"model_type": "mamba"}, "'mamba' are not known.*predict its program"),
        ({"_class_name": "FluxTransformer2DModel"}, "FluxTransformer2DModel of diffusers.*predict"),
        ({"hidden_size": 8}, "no model_type"),
        ({k: v for k, v in LLAMA_8B.items() if k != "hidden_size"}, "lacks 'hidden_size'"),
        (
            {
                "model_type": "llava",
                "text_config": {"model_type": "llama", "_name_or_path": "v-7b"},
            },
            r"the text_config lacks 'num_hidden_layers' \(--hf with the config.json of v-7b",
        ),
        ({**LLAMA_8B, "max_position_embeddings": "long"}, "cannot be read"),
        ({**CONFIGS["qwen-3-235b-a22b"], "mlp_only_layers": [0]}, "take turns"),
        ({**CONFIGS["deepseek-v3"], "moe_layer_freq": 2}, "take turns"),
        ([], "no model_type"),
    ],
)
def test_configs_that_cannot_be_a_workload(tmp_path, data, said):
    with pytest.raises(PlanError, match=said):
        read_workload(written(tmp_path, data))


@pytest.mark.parametrize(
    ("name", "said"), [("t5-11b", "cross-attention"), ("llama-3-7b", "llama-3-8b"), ("x", "--hf")]
)
def test_names_that_are_not_known(name, said):
    with pytest.raises(PlanError) as told:
        make_workload(name, {})
    assert said in str(told.value)


def test_names_and_settings_may_be_written_as_elsewhere():
    assert make_workload("Llama_3-8B", {}) == make_workload("llama-3-8b", {})
    own = make_workload("llama", {"dim": 2048, "hidden": 8192, "n_layers": 3})
    assert (own.d_model, own.d_ff, own.layers) == (2048, 8192, 3)


@pytest.mark.parametrize("name", MOST)
def test_sizes_beyond_any_model_are_refused_at_once(name):
    with pytest.raises(PlanError, match=f"{name}=.* beyond"):
        make_workload("llama", {name: "1e12"})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["seq=4096", "seq=2048"], "seq is given twice"),
        (["seq=4096", "sequence=2048"], "seq is given twice, as seq and as sequence"),
        (["n_layers=4,layers=8"], "layers is given twice, as n_layers and as layers"),
    ],
)
def test_a_size_is_given_once(settings, said):
    with pytest.raises(PlanError, match=said):
        read_workload("llama-3-8b", settings)


@pytest.mark.parametrize(
    ("given", "dtype", "products"),
    [
        ({"dtype": "fp8"}, "bf16", "fp8"),
        ({"dtype": "nvfp4", "products": "nvfp4"}, "bf16", "nvfp4"),
        ({"dtype": "float16"}, "f16", ""),
        ({"dtype": "fp32", "products": "bfloat16"}, "f32", "bf16"),
        ({"products": "float8_e4m3fn"}, "bf16", "fp8"),
    ],
)
def test_narrow_types_are_those_of_products(given, dtype, products):
    work = make_workload("llama-3-8b", given)
    assert (work.dtype, work.products) == (dtype, products)
    # 16-bit parameters and activations.
    assert work.width == (4 if dtype == "f32" else 2)


def test_two_narrow_types_are_refused():
    with pytest.raises(PlanError, match=r"dtype=fp8 quantises products.*nvfp4"):
        make_workload("llama", {"dtype": "fp8", "products": "nvfp4"})
