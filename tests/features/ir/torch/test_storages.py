"""Live tensors of programs against those of real runs on the CPU, and by hand."""

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from opcast.features.ir.torch.program import TorchProgram  # noqa: E402
from opcast.features.ir.torch.storages import (  # noqa: E402
    ACTIVATIONS,
    GRADIENTS,
    STATES,
    WEIGHTS,
    log_storages,
)

from ....support.torch_models import examples  # noqa: E402


def measured_peak(module, inputs, train):
    """Most bytes that the profiler sees allocated, with those that were there before."""
    held = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in (*module.parameters(), *module.buffers(), *inputs)
    }
    watched = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with watched as profiled, torch.set_grad_enabled(train):
        found = module(*inputs)
        if train:
            found.float().sum().backward()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most + sum(held.values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", ["mlp", "resnet", "gpt", "llama", "encoder"])
def test_live_tensors_are_those_of_a_real_run(name, train):
    module, inputs = examples()[name]
    options = {"train": "sgd", "loss": "sum"} if train else {}
    log = log_storages(TorchProgram(module.train(), inputs, **options))
    assert log.framed
    measured = measured_peak(module, inputs, train)
    if name == "resnet":
        # The CPU's convolutions and batch norms take memory of their own.
        assert 0.85 * measured < log.peak() <= measured
    else:
        # The second step of training is as the first; plain SGD has no moments.
        assert log.peak() == measured


class Frames(torch.nn.Module):
    """A function whose caller still holds what it was given."""

    def forward(self, x):
        scores = x * 2
        scores = self.biased(scores)
        return scores.sum()

    def biased(self, scores):
        return scores + 1 + 2


def test_frames_hold_what_an_export_has_freed():
    program = TorchProgram(Frames(), (torch.zeros(256),))
    # The input, the scores of the caller, a sum that nobody names and its own sum.
    assert log_storages(program).peak() == 4 * 1024
    exported = TorchProgram(torch.export.export(Frames(), (torch.zeros(256),)))
    log = log_storages(exported)
    assert (log.peak(), log.framed) == (3 * 1024, False)


def linear(train):
    net = torch.nn.Linear(256, 512, bias=False)
    return log_storages(TorchProgram(net, (torch.zeros(8, 256),), train=train, loss="sum"))


def sums(log):
    found = {}
    for own in log.storages:
        found[own.kind] = found.get(own.kind, 0) + own.bytes
    return found


def test_a_step_holds_weights_gradients_and_moments():
    weight = 256 * 512 * 4
    log = linear("adamw")
    found = sums(log)
    assert found[WEIGHTS] == weight
    # A gradient in each of two steps; moments once.
    assert found[GRADIENTS] == 2 * weight
    assert found[STATES] == 2 * weight
    # Weight, gradient, both moments and the root that the update takes of all of them at once.
    assert log.peak() == pytest.approx(5 * weight, rel=0.05)
    assert linear("momentum").peak() == pytest.approx(3 * weight, rel=0.05)


class Layers(torch.nn.Module):
    def __init__(self, checkpointed):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.Linear(64, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 64)
            )
            for _ in range(8)
        )
        self.checkpointed = checkpointed

    def forward(self, x):
        for layer in self.layers:
            if self.checkpointed:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return x


def activations(**options):
    module = Layers(options.pop("checkpointed", False))
    program = TorchProgram(module, (torch.zeros(512, 64),), train="sgd", loss="sum", **options)
    return log_storages(program)


def test_checkpoints_keep_their_inputs_alone():
    fixed = 2 * 4 * 8 * (2 * 64 * 1024 + 1024 + 64)
    hidden, narrow = 4 * 512 * 1024, 4 * 512 * 64
    # Each layer keeps both its wide tensors; checkpointed, the one that is computed again does.
    whole, saved = activations().peak(), activations(checkpointed=True).peak()
    assert whole == pytest.approx(fixed / 2 + 16 * hidden + 9 * narrow, rel=0.15)
    assert saved < fixed + 4 * hidden + 12 * narrow


class Normed(torch.nn.Module):
    """Layers of a norm and a product, checkpointed unless ``reentrant`` is ``None``."""

    def __init__(self, norm, reentrant):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros(64, 64) for _ in range(8))
        self.norm, self.reentrant = norm, reentrant

    def layer(self, x, weight):
        return x + getattr(F, self.norm)(x, (64,)) @ weight

    def forward(self, x):
        for weight in self.weights:
            if self.reentrant is None:
                x = self.layer(x, weight)
            else:
                x = torch.utils.checkpoint.checkpoint(
                    self.layer, x, weight, use_reentrant=self.reentrant
                )
        return x


@pytest.mark.parametrize("train", ["", "sgd"])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_rms_norms_keep_no_more_than_layer_norms(reentrant, train):
    def peak(norm):
        given = torch.zeros(4096, 64, requires_grad=True)
        options = {"train": train, "loss": "sum"} if train else {}
        log = log_storages(TorchProgram(Normed(norm, reentrant), (given,), **options))
        assert log.framed
        return log.peak()

    # Layer norms keep a mean of each row besides the factor.
    assert abs(peak("rms_norm") - peak("layer_norm")) <= 8 * 4096 * 4


@pytest.mark.parametrize(("kind", "kept"), [("LSTM", 6), ("GRU", 5), ("RNN", 1)])
@pytest.mark.parametrize("train", ["", "sgd"])
def test_recurrent_layers_keep_gates_and_states_of_each_step_in_training(kind, kept, train):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = getattr(torch.nn, kind)(32, 32, 2)

        def forward(self, x):
            return self.layers(x)[0]

    module, given = Net().train(bool(train)), torch.zeros(100, 64, 32)
    options = {"train": train, "loss": "sum"} if train else {}
    log = log_storages(TorchProgram(module, (given,), **options))
    sizes = [s.bytes for s in log.storages if s.name == "aten.new_empty"]
    # Of two layers, 100 steps and 64 sequences, in f32; nothing without a gradient.
    reserved = 2 * 100 * 64 * 32 * kept * 4
    assert (reserved in sizes) is bool(train)
    assert log.peak() > reserved or not train


def test_lines_are_those_of_the_model_not_of_its_caller():
    given = (torch.zeros(64, 64),)
    (made,) = log_storages(TorchProgram(torch.nn.Linear(64, 64), given)).storages[3:]
    assert (made.name, made.line) == ("aten.addmm", "")
    lines = {s.line for s in log_storages(TorchProgram(Cast(), (torch.zeros(4, 512),))).storages}
    assert {line.rpartition(":")[0] for line in lines} == {"", __file__}


class Cast(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(512, 512, bias=False)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.layer(self.layer(x))


def test_autocast_keeps_its_copy_of_a_weight_while_it_lasts():
    log = log_storages(TorchProgram(Cast(), (torch.zeros(4, 512),)))
    copies = [s for s in log.storages if s.kind == ACTIVATIONS and s.bytes == 512 * 512 * 2]
    assert len(copies) == 1
    assert copies[0].line.rpartition("/")[2].startswith("test_storages.py:")


class Attention(torch.nn.Module):
    def forward(self, q):
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)


@pytest.mark.parametrize("layer", [False, True])
def test_fused_attention_keeps_no_scores_though_it_has_dropout(layer):
    if layer:
        module = torch.nn.TransformerEncoderLayer(32, 4, 32, 0.1, batch_first=True)
        given = torch.zeros(1, 1024, 32)
    else:
        module, given = Attention(), torch.zeros(1, 4, 1024, 8)
    scores = 4 * 1024 * 1024 * 4
    options = {"train": "sgd", "loss": "sum"} if layer else {}
    program = TorchProgram(module.train(), (given,), **options)
    assert log_storages(program).peak() < scores / 4
    assert log_storages(program, lambda _: False).peak() > scores


def test_a_module_is_left_as_it_was():
    module, inputs = examples()["resnet"]
    before = {name: value.clone() for name, value in module.state_dict().items()}
    log_storages(TorchProgram(module, inputs, train="sgd", loss="sum"))
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize(
    ("dtype", "layout", "groups", "copies"),
    [
        (torch.float16, torch.contiguous_format, 1, True),
        (torch.float16, torch.channels_last, 1, False),
        (torch.float16, torch.contiguous_format, 32, False),
        (torch.float32, torch.contiguous_format, 1, False),
    ],
)
def test_convolutions_of_16_bits_copy_images_that_have_their_channels_first(
    dtype, layout, groups, copies
):
    conv = torch.nn.Conv2d(32, 64, 3, padding=1, groups=groups, bias=False)
    module = conv.to(dtype).to(memory_format=layout)
    x = torch.zeros(8, 32, 28, 28, dtype=dtype).to(memory_format=layout)
    pixels, size = 8 * 28 * 28, x.element_size()
    found = sums(log_storages(TorchProgram(module, (x,))))
    assert found.get("workspace", 0) == copies * pixels * (32 + 64) * size
    train = log_storages(TorchProgram(module, (x,), train="sgd", loss="sum"))
    # Forward and backward, in each of two steps.
    assert sums(train).get("workspace", 0) == 4 * copies * pixels * (32 + 64) * size
