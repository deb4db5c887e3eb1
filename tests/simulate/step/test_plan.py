import pytest

from opcast.common.errors import PlanError
from opcast.simulate.step.named_workloads import make_workload, read_workload
from opcast.simulate.step.plan import (
    Group,
    Plan,
    idle_setting,
    parse_plan,
    resolved,
    says_schedule,
    stage_layers,
)

SIZES = {
    "layers": 32, "d_model": 4096, "heads": 32, "kv_heads": 8, "d_ff": 14336, "vocab": 128256,
    "seq": 8192, "batch": 256,
}  # fmt: skip


def test_plan_from_text_and_from_yaml_is_the_same(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("tp: 8\npp: 4\ndp: 4\nschedule: zero-bubble\nsp: false\n")
    plan = parse_plan("tp=8, pp=4,dp=4,schedule=zero-bubble,sp=no")
    assert plan == parse_plan(str(path)) == Plan(dp=4, tp=8, pp=4, schedule="zero-bubble", sp=False)
    assert plan.devices == 8 * 4 * 4
    assert parse_plan(plan.text()) == plan


def test_ranks_are_numbered_tensor_innermost_and_pipeline_outermost():
    plan = Plan(tp=2, cp=3, dp=5, pp=7, zero=1)
    assert plan.tensor_group == Group(2, 1)
    assert plan.context_group == Group(3, 2)
    assert plan.shard_group == Group(5 * 3, 2)
    assert plan.replica_group == Group(1, 30)
    assert plan.pipeline_group == Group(7, 2 * 3 * 5)


def test_fsdp_shards_inside_and_replicates_outside():
    plan = Plan(fsdp=4, dp=2, tp=8)
    assert (plan.stage, plan.shard_group, plan.replica_group) == (3, Group(4, 8), Group(2, 32))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tp=eight", "not of type int"),
        ("tp", "key=value"),
        ("tp=4,,pp=2", "key=value"),
        ("tp=4,tp=8", "tp is given twice"),
        ("tp=4,tensor=8", "tp is given twice, as tp and as tensor"),
        ("tensors=8", "no key 'tensors'"),
        ("dp=0", "at least 1"),
        ("schedule=fast", "gpipe"),
        ("fsdp=4,zero=1", "zero"),
        ("ep=3,dp=4", "ep=3"),
        ("pp=4,schedule=1f1b,virtual=2", "virtual above 1 needs schedule=interleaved"),
        ("pp=4,schedule=interleaved", "add virtual=2 or more"),
        ("sp=4,tp=8", "sp=4"),
        ("nowhere.yaml", "nowhere.yaml"),
    ],
)
def test_bad_plans_say_what_is_wrong(text, said):
    with pytest.raises(PlanError, match=said):
        parse_plan(text)


def test_a_batch_that_ranks_do_not_divide_says_which_they_do():
    """In words for commands and for Python alike: 64 ranks take a batch of 64, or 128 of 100."""
    for batch, next_batch in ((8, 64), (100, 128)):
        with pytest.raises(PlanError, match=f"does not divide batch={batch}") as refused:
            resolved(make_workload("llama", {"batch": batch}), parse_plan("fsdp=8,dp=8"), 64)
        assert refused.value.hint.endswith(f"or set another batch, such as batch={next_batch}")
        assert "--" not in refused.value.hint


def test_a_silent_plan_is_told_from_a_plain_one(tmp_path):
    path = tmp_path / "plan.yaml"
    for text, says in (("pp: 4", False), ("pp: 4\nchunks: 2", True), ("schedule: 1f1b", True)):
        path.write_text(text)
        pairs = text.replace(": ", "=").replace("\n", ",")
        assert says_schedule(str(path)) == says_schedule(pairs) == says
    assert Plan(pp=4).text() == "pp=4,schedule=1f1b" and Plan(dp=4).text() == "dp=4"


def test_chunks_are_those_of_the_interleaved_schedule():
    said = Plan(pp=4, schedule="interleaved", virtual=2)
    assert parse_plan("pp=4,virtual=2") == parse_plan("pp=4,chunks=2") == said
    assert parse_plan("pp=4,virtual=1") == Plan(pp=4)


@pytest.mark.parametrize(
    ("plan", "devices", "said"),
    [
        ("tp=8,dp=4", 64, "takes 32 devices, the cluster has 64"),
        ("tp=3", 3, "heads=32"),
        ("dp=3", 3, "batch=256"),
        ("tp=8,ep=2,dp=2", 16, "no experts"),
        ("pp=64", 64, "layers=32"),
        ("dp=4,microbatches=3", 4, "microbatches=3"),
        ("pp=4,schedule=interleaved,virtual=9", 4, "layers=32"),
    ],
)
def test_plans_that_do_not_fit_the_model_or_the_cluster(plan, devices, said):
    with pytest.raises(PlanError, match=said):
        resolved(make_workload("llama", SIZES), parse_plan(plan), devices)


@pytest.mark.parametrize(
    ("plan", "mode", "said"),
    [
        ("sp=false", "train", "sp=false changes nothing without tp above 1"),
        ("schedule=gpipe,dp=8", "train", "pp above 1"),
        ("virtual=2,dp=8", "train", "virtual=2 changes nothing without pp above 1"),
        ("zero=1", "train", "dp or cp above 1"),
        ("dp=8,zero=2", "forward", "mode=train"),
        ("overlap=false", "train", "several devices"),
        ("dp=8,hide_experts=true", "train", "ep above 1"),
        ("fsdp=8,quantized_weights=true", "train", "products=fp8"),
        ("recompute=full", "forward", "recompute=full changes nothing without mode=train"),
        # Defaults that are spelt out, and settings that matter.
        ("dp=8,sp=true,schedule=1f1b,virtual=1,quantized_weights=no", "train", ""),
        ("tp=2,pp=2,dp=2,sp=false,schedule=gpipe,zero=1,overlap=false", "train", ""),
        ("fsdp=8,zero=3", "forward", ""),
    ],
)
def test_settings_that_change_nothing_are_told(plan, mode, said):
    found = idle_setting(make_workload("llama", {**SIZES, "mode": mode}), parse_plan(plan))
    assert said in found and bool(said) == bool(found)


def test_microbatches_are_chosen_by_tokens():
    llama = make_workload("llama", SIZES)
    assert resolved(llama, parse_plan("tp=8,pp=2,dp=8"), 128).microbatches == 32
    # 512 sequences of 512 tokens over 8 replicas: 64 each, 16 of which are 8192 tokens.
    bert = make_workload("bert", {"batch": 512, "seq": 512})
    assert resolved(bert, parse_plan("dp=8"), 8).microbatches == 4


def test_parameters_of_published_models():
    assert make_workload("llama", SIZES).parameters == 8_030_261_248  # Llama 3 8B
    assert make_workload("gpt", {}).parameters == pytest.approx(353e6, rel=0.01)  # GPT-2 medium
    # Mixtral 8x7B: 46.7e9 parameters, of which 12.9e9 see a token.
    mixtral = make_workload("moe", {**SIZES, "vocab": 32000, "seq": 1, "batch": 1})
    assert mixtral.parameters == pytest.approx(46.7e9, rel=0.002)
    assert mixtral.model_flops() / 6 == pytest.approx(12.8e9, rel=0.01)


def test_model_flops_by_hand():
    w = make_workload(
        "llama",
        {"layers": 2, "d_model": 8, "heads": 2, "kv_heads": 1, "d_ff": 16, "vocab": 32, "seq": 4,
         "batch": 3},
    )  # fmt: skip
    tokens = 3 * 4
    weights = 2 * (8 * (2 + 2 * 1) * 4 + 8 * 8 + 3 * 8 * 16) + 8 * 32
    pairs = 3 * (1 + 2 + 3 + 4)
    assert w.model_flops() == 3 * (2 * weights * tokens + 2 * 2 * 2 * 2 * 4 * pairs)


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"heads": 5}, "multiple of heads"), ({"experts": 4}, "top_k"), ({"depth": 3}, "no key"),
     ({"kv_heads": 3}, "kv_heads"), ({"dtype": "f8"}, "dtype"), ({"seq": 0}, "at least 1")],
)  # fmt: skip
def test_bad_workloads(settings, said):
    with pytest.raises(PlanError, match=said):
        make_workload("llama", settings)


@pytest.mark.parametrize(
    ("given", "needs"),
    [("shared_experts=2", "experts"), ("expert_boxes=2", "experts"), ("dense_layers=2", "experts"),
     ("dense_ff=64", "dense_layers"), ("window_share=0.5", "window"), ("q_lora=64", "kv_lora"),
     ("rope_dim=64", "kv_lora"), ("v_dim=64", "kv_lora")],
)  # fmt: skip
def test_sizes_that_change_nothing_are_refused(given, needs):
    with pytest.raises(PlanError, match=f"{given} has no effect without {needs}"):
        read_workload("llama-3-8b", [given])


def test_layers_of_stages_spare_the_ends():
    assert stage_layers(32, Plan(pp=4)) == [8, 8, 8, 8]
    assert stage_layers(10, Plan(pp=4)) == [2, 3, 3, 2]
