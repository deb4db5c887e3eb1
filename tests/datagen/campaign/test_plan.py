"""Plans of campaigns: every case can be made, and time goes by value."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from opcast.common.errors import ProfileError
from opcast.datagen.campaign.client import WORKERS
from opcast.datagen.campaign.jax_models import model
from opcast.datagen.campaign.jax_ops import operation
from opcast.datagen.campaign.plan import (
    CampaignSettings,
    Case,
    Entry,
    Plan,
    forecast,
    load_plan,
    outline,
)
from opcast.datagen.zoo import parse_settings, resolve

PLANS = pytest.mark.parametrize("platform", ("gpu", "tpu", "cpu"))


@PLANS
def test_every_case_has_a_key_a_worker_and_a_share(platform: str) -> None:
    plan = load_plan(platform)
    keys = [case.key for case in plan.cases]
    assert len(keys) == len(set(keys))
    assert {case.worker for case in plan.cases} <= set(WORKERS)
    assert {case.stage for case in plan.cases} == set(plan.shares)
    assert sum(plan.shares.values()) == pytest.approx(1.0)
    # A second measurement is of something that is measured first.
    assert all(
        c.key.partition("#")[0] in keys[: keys.index(c.key)] for c in plan.cases if c.replicate
    )


def test_operations_and_models_of_an_accelerator_can_be_traced() -> None:
    seen = set()
    for case in load_plan("gpu").cases:
        spec = dict(case.spec)
        if case.worker == "torch" or str(spec) in seen:
            continue
        seen.add(str(spec))
        with jax.enable_x64(True):
            if "op" in spec:
                function, args = operation(spec["op"], spec["shape"], spec["dtype"])
                structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in args]
                assert jax.tree.leaves(jax.eval_shape(function, *structs))
            elif "zoo" in spec:
                assert resolve(spec["zoo"], parse_settings(spec["zoo"], spec["set"].split()))
    assert len(seen) > 250


@pytest.mark.parametrize(
    ("name", "spec", "weights"),
    [
        # Embedding 64·16, final norm 16; a layer: 16·(4+2·2)·4 + 4·4·16 + 16·2·32 + 32·16 + 2·16.
        ("llama", {"layers": 1, "width": 16, "heads": 4, "kv_heads": 2, "ffn": 32, "vocabulary": 64,
                   "batch": 2, "length": 8}, 1024 + 16 + 512 + 256 + 1024 + 512 + 32),
        # The stem, four stages of two bottlenecks, and the head; counted by hand for width 1:
        # per stage with inner width w and input c: first c·w+9w²+4w²+4cw, second 4w²+9w²+4w²,
        # two figures for each channel of each convolution.
        ("resnet", {"depth": 26, "width": 1, "image": 16, "batch": 2}, None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mode", ("forward", "train", "decode"))
def test_models_have_the_weights_that_they_should(
    name: str, spec: dict[str, int], weights: int | None, mode: str
) -> None:
    if name == "resnet" and mode == "decode":
        pytest.skip("a ResNet has no tokens")
    function, args = model(name, {**spec, "mode": mode, "dtype": "float32"})
    if weights is None:
        convolutions, channels, cin = 7 * 7 * 3, 1, 1
        for stage in range(4):
            w = 2**stage
            convolutions += cin * w + 9 * w * w + 4 * w * w + 4 * cin * w + 17 * w * w
            channels += (w + w + 4 * w + 4 * w) + (w + w + 4 * w)
            cin = 4 * w
        weights = convolutions + 2 * channels + cin * 1000
    assert sum(leaf.size for leaf in jax.tree.leaves(args[0])) == weights
    out = jax.eval_shape(function, *args)
    if mode == "train":
        assert jax.tree.structure(out[:3]) == jax.tree.structure(args[:3])
        assert out[3].shape == ()
    elif mode == "decode":
        assert out[0].shape == (2, 1)
        assert [c.shape for c in out[1]] == [c.shape for c in args[2]]
    else:
        assert out.shape == ()


def test_time_goes_to_the_stage_that_is_furthest_behind() -> None:
    def entry(stage: str, worker: str = "xla") -> Entry:
        own = [Case(f"{stage}/k/{i}", stage, "k", worker, {}) for i in range(5)]
        return Entry(tuple(own), block=2)

    plan = Plan([entry("a"), entry("b"), entry("c", "torch")], {"a": 0.6, "b": 0.2, "c": 0.2})

    def keys(done=(), spent=None, each=None, left=100.0, prefer="", workers=("xla",)):
        block = plan.next_block(done, spent or {}, workers, each or {}, left, prefer)
        return [case.key for case in block]

    assert keys() == ["a/k/0", "a/k/1"]
    assert keys(["a/k/0"], {"a": 10.0}) == ["b/k/0", "b/k/1"]
    assert keys(["a/k/0"], {"a": 10.0}, prefer="a") == ["a/k/1", "a/k/2"]
    assert keys(spent={"a": 5.0, "b": 2.0}) == ["a/k/0", "a/k/1"]  # 5 / 0.6 < 2 / 0.2
    # A block is cut to what may end in time, and left out if nothing of it does.
    assert keys(each={("a", "k"): 30.0, ("b", "k"): 30.0}, left=50.0) == ["a/k/0"]
    assert keys(each={("a", "k"): 30.0, ("b", "k"): 30.0}, left=20.0) == []
    long = Case("d/k/0", "d", "k", "xla", {"seconds": 60})
    slow = Plan([Entry((long,))], {"d": 1.0})
    assert slow.next_block((), {}, ("xla",), {}, 59.0) == []
    assert slow.next_block((), {}, ("xla",), {}, 61.0) == [long]
    assert keys(workers=("torch",)) == ["c/k/0", "c/k/1"]


def test_workers_change_and_cases_are_repeated_as_late_as_they_can_be() -> None:
    def entry(stage: str, worker: str, again: int = 0) -> Entry:
        keys = [f"{stage}/k/0", f"{stage}/k/1"] + [f"{stage}/k/0#1"] * again
        return Entry(tuple(Case(k, stage, "k", worker, {}) for k in keys))

    plan = Plan([entry("a", "xla", 1), entry("b", "torch"), entry("c", "xla")],
                {"a": 0.5, "b": 0.25, "c": 0.25})  # fmt: skip
    both, spent = ("xla", "torch"), {"a": 9.0, "b": 1.0, "c": 2.0}
    # Both are behind the mean; the worker at hand goes on though the other is further behind.
    (case,) = plan.next_block(["a/k/0"], spent, both, {}, 99.0, worker="xla")
    assert case.key == "c/k/0"
    (case,) = plan.next_block(["a/k/0"], spent, both, {}, 99.0, worker="torch")
    assert case.key == "b/k/0"
    done = ["a/k/0", "a/k/1"]
    # A replicate waits for another process, and is measured at last all the same.
    (case,) = plan.next_block(done, {}, both, {}, 99.0, prefer="a", worker="xla", here=done)
    assert case.key == "c/k/0"
    (case,) = plan.next_block(done, {}, both, {}, 99.0, prefer="a", worker="xla")
    assert case.key == "a/k/0#1"
    rest = [*done, "b/k/0", "b/k/1", "c/k/0", "c/k/1"]
    (case,) = plan.next_block(rest, {}, both, {}, 99.0, worker="xla", here=done)
    assert case.key == "a/k/0#1"


def test_a_budget_is_told_beforehand_and_shortens_long_runs() -> None:
    found = {}
    for minutes in (13, 25, 60):
        plan = load_plan("gpu", budget_s=60.0 * minutes)
        blocks = list(forecast(plan, 60.0 * minutes))
        assert all(start < 60.0 * minutes for start, _ in blocks)
        found[minutes] = {case.key: case for _, block in blocks for case in block}
        # Something of each stage, however short it is.
        assert {case.stage for case in found[minutes].values()} == set(plan.shares)
    assert found[13].keys() <= found[25].keys() | {k for k in found[13] if "#" in k}
    steps = [
        {
            c.key: c.spec["seconds"]
            for c in own.values()
            if "llama-layers4-batch4" in c.key and not c.replicate
        }
        for own in found.values()
    ]
    # A fiftieth of the budget, and no more than a minute; the key stays.
    assert [set(own) for own in steps] == [set(steps[0])] * 3
    assert [max(own.values()) for own in steps] == [15.6, 30.0, 60.0]
    programs = [sum(c.stage == "programs" and not c.replicate for c in own.values())
                for own in found.values()]  # fmt: skip
    assert programs[0] >= 8
    assert programs[2] >= 40
    lines = outline(CampaignSettings(Path("unused"), 780.0))
    assert lines[0].startswith("plan for a gpu, 13 minutes")
    assert any(line.startswith("programs (traced): ") for line in lines)


def test_given_programs_are_called_by_digests(tmp_path: Path) -> None:
    (tmp_path / "secret-name.mlir").write_text("module {}")
    own = [c for c in load_plan("gpu", tmp_path).cases if "given-" in c.key]
    assert [c.kind for c in own] == ["traced"]
    assert not any("secret" in c.key for c in own)
    assert own[0].spec["file"].endswith("secret-name.mlir")
    with pytest.raises(ProfileError, match="no program in this folder"):
        load_plan("gpu", tmp_path / "empty")


def test_an_unknown_operation_names_the_known_ones() -> None:
    with pytest.raises(ProfileError, match=r"known: .*softmax"):
        operation("rows.sotfmax", [8, 8], "float32")
    with pytest.raises(ProfileError, match=r"known: .*movement"):
        operation("nothing", [8, 8], "float32")
