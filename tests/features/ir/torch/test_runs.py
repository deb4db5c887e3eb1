"""Modules run as eager PyTorch runs them: what they decide, what they launch, what they leave."""

import functools
import logging
import sys
import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from opcast.common.errors import ProgramError  # noqa: E402
from opcast.features.ir.torch.export import export  # noqa: E402
from opcast.features.ir.torch.program import TorchProgram  # noqa: E402
from opcast.features.ir.torch.runs import record  # noqa: E402
from opcast.predict.operator.aten_work import works  # noqa: E402


def products(recording, phase):
    return [w.shape for w in works(recording.calls) if w.kind == "product" and w.phase == phase]


class Checkpointed(torch.nn.Module):
    """A layer that is called through a function which it holds, as libraries do."""

    def __init__(self, function):
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)
        self.again = function

    def __call__(self, x):
        return self.again(super().__call__, x) if self.again else super().__call__(x)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_are_computed_again_whatever_calls_them(reentrant):
    x = torch.zeros(8, 16, device="meta", requires_grad=reentrant)

    def trained(function):
        layer = Checkpointed(function).to("meta")
        return record(TorchProgram(layer, (x,), train="sgd", loss="sum"))

    plain = trained(None)
    found = trained(functools.partial(checkpoint, use_reentrant=reentrant))
    assert products(found, "forward") == products(plain, "forward")
    up, down = (1, 8, 64, 16), (1, 8, 16, 64)
    extra = products(found, "backward")
    for shape in products(plain, "backward"):
        extra.remove(shape)
    # Without re-entering autograd PyTorch stops at the last tensor that a gradient needs.
    assert extra == ([up, down] if reentrant else [up])
    again = next(c for c in found.calls if c.phase == "backward" and c.name == "aten.addmm")
    assert again.place.modules.endswith("up")


class Cache:
    """Keys and values that a user's own class holds."""

    def __init__(self, past):
        self.layers = [{"keys": past, "values": past.clone()}]

    def update(self, key, value):
        held = self.layers[0]
        held["keys"] = torch.cat([held["keys"], key], 2)
        held["values"] = torch.cat([held["values"], value], 2)
        return held["keys"], held["values"]


class Decoder(torch.nn.Module):
    """Attention that has a mask and repeated keys when it is exported, and neither when it runs."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(256, 256 + 2 * 64), torch.nn.Linear(256, 256)
        self.calls = 0

    def forward(self, x, cache):
        self.calls, self.last = self.calls + 1, x
        batch, queries, _ = x.shape
        q, k, v = (
            t.view(batch, queries, -1, 64).transpose(1, 2)
            for t in self.qkv(x).split([256, 64, 64], -1)
        )
        k, v = cache.update(k, v)
        if torch.compiler.is_exporting():
            k, v = (t.repeat_interleave(4, 1) for t in (k, v))
            mask = torch.ones(queries, k.shape[2], dtype=torch.bool)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2)), cache


def test_a_run_decides_as_eager_pytorch_does_and_leaves_the_module_as_it_was():
    model, past = Decoder().bfloat16().to("meta"), torch.zeros(4, 1, 31, 64, device="meta")
    cache = Cache(past.bfloat16())
    x = torch.zeros(4, 1, 256, dtype=torch.bfloat16, device="meta")
    before = [(n, id(p)) for n, p in model.named_parameters()]
    found = record(TorchProgram(model, (x, cache)))
    (use,) = found.attention
    assert not use.masked and use.grouped and use.key == (4, 1, 32, 64)
    assert [c.name for c in found.calls if "repeat" in c.name or "ones" in c.name] == []
    # What the cache holds afterwards outlives the program.
    joined = [c for c in found.calls if c.name == "aten.cat"]
    assert {c.outputs[0].memory for c in joined} <= found.kept
    assert [(n, id(p)) for n, p in model.named_parameters()] == before
    assert model.calls == 0 and not hasattr(model, "last")
    assert cache.layers[0]["keys"].shape == (4, 1, 31, 64)
    assert found.parameter_bytes == sum(p.numel() * 2 for p in model.parameters())


def test_what_a_run_cannot_decide_an_export_may():
    class Branch(torch.nn.Module):
        def forward(self, x):
            if torch.compiler.is_exporting() or x.sum() > 0:
                return x.exp()
            return x

    found = record(TorchProgram(Branch(), (torch.zeros(4),)))
    assert [c.name for c in found.calls] == ["aten.exp"]
    assert "DataDependent" in found.notes[0]

    class Worse(torch.nn.Module):
        def forward(self, x):
            return x.exp() if x.sum() > 0 else x

    with pytest.raises(ProgramError, match="a decision depends on values"):
        record(TorchProgram(Worse(), (torch.zeros(4),)))


def test_values_are_taken_to_be_finite_where_a_program_asks():
    class Clamped(torch.nn.Module):
        def forward(self, x):
            x = x.exp()
            if not torch.isfinite(x).all():
                x = x.clamp(-1, 1)
            if torch.isinf(x).any() or x.isnan().any().item():
                x = x * 2
            return x.sin()

    # As with numbers, with the kernels that look for others but without those that mend them.
    found = [c.name for c in record(TorchProgram(Clamped(), (torch.zeros(4),))).calls]
    assert found[0] == "aten.exp" and found[-1] == "aten.sin"
    assert "aten.clamp" not in found and found.count("aten.any") == 2 and "aten.all" in found

    class Other(torch.nn.Module):
        def forward(self, x):
            return x.exp() if (x > 0).all() else x

    with pytest.raises(ProgramError, match="a decision depends on values"):
        record(TorchProgram(Other(), (torch.zeros(4),)))


@pytest.mark.parametrize("given", ["tensors", "lists"])
def test_a_loss_whose_size_depends_on_lengths_says_so(given):
    class Loss(torch.nn.Module):
        def forward(self, x, targets, steps):
            steps, labels = (steps, steps) if given == "tensors" else ([20] * 8, [5] * 8)
            return torch.nn.functional.ctc_loss(x.log_softmax(-1), targets, steps, labels)

    inputs = torch.zeros(20, 8, 32), torch.zeros(8, 5).long(), torch.ones(8).long()
    with pytest.raises(ProgramError, match=r"aten\._ctc_loss") as refused:
        record(TorchProgram(Loss(), inputs))
    assert "on lengths" in refused.value.hint


def test_positions_that_nobody_gave_are_of_one_sequence(monkeypatch):
    masks = types.ModuleType("transformers.masking_utils")

    def find_packed_sequence_indices(positions):
        """As the library has it where it may not read values."""
        return positions.cumsum(-1)

    masks.find_packed_sequence_indices = find_packed_sequence_indices
    monkeypatch.setitem(sys.modules, masks.__name__, masks)

    class Model(torch.nn.Module):
        def forward(self, x, position_ids=None):
            positions = torch.arange(8)[None] if position_ids is None else position_ids
            packed = masks.find_packed_sequence_indices(positions)
            mask = None if packed is None else (packed[:, None, :, None] == packed[:, None, None])
            return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    x = torch.zeros(1, 2, 8, 64)
    (use,) = record(TorchProgram(Model(), (x,))).attention
    assert not use.masked
    given = {"position_ids": torch.zeros(1, 8, dtype=torch.int64)}
    (use,) = record(TorchProgram(Model(), (x,), given)).attention
    assert use.masked
    assert masks.find_packed_sequence_indices is find_packed_sequence_indices


def twice(x):
    return x.tanh() * 2  # The line that is asked for.


def line_of(text):
    lines = Path(__file__).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if text in line)


def test_lines_are_the_users_own():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())

        def forward(self, x):
            return self.parts(twice(x))

    found = record(TorchProgram(Model(), (torch.zeros(2, 4),)))
    places = {c.name: c.place for c in found.calls}
    assert places["aten.tanh"].file == __file__
    assert places["aten.tanh"].line == line_of("# The line that is " + "asked for")
    assert places["aten.relu"].line == line_of("return self.parts(" + "twice(x))")
    assert places["aten.relu"].modules == "Model/parts/1"
    # A line inside PyTorch is nobody's.
    alone = torch.nn.Sequential(torch.nn.Linear(4, 4))
    for program in (alone, export(TorchProgram(alone, (torch.zeros(2, 4),))).program):
        args = (torch.zeros(2, 4),) if program is alone else ()
        assert {c.place.file for c in record(TorchProgram(program, args)).calls} == {""}


def test_a_function_keeps_its_lines():
    def double(x):
        return x.exp() * 2  # A function's line.

    (place,) = {c.place for c in record(TorchProgram(double, (torch.zeros(4),))).calls}
    assert (place.file, place.line) == (__file__, line_of("# A function's " + "line"))


@pytest.mark.parametrize("first", [False, True])
def test_an_lstm_is_one_call_of_few_products(first):
    net = torch.nn.LSTM(24, 32, num_layers=2, bidirectional=True, batch_first=first)
    shape = (4, 10, 24) if first else (10, 4, 24)
    found = record(TorchProgram(net, (torch.zeros(shape),), train="sgd", loss="sum"))
    assert not found.recurrent

    def made(phase):
        own = [w for w in works(found.calls) if w.phase == phase and w.kind == "product"]
        return {(w.shape, round(w.op.scale)) for w in own}

    # Four gates of 32; 40 rows of 10 steps by 4; the second layer reads both directions.
    assert made("forward") == {
        ((1, 40, 128, 24), 2),
        ((1, 40, 128, 64), 2),
        ((1, 4, 128, 32), 10 * 2 * 2),
    }
    assert made("backward") == {
        *{((1, 40, 24, 128), 2), ((1, 128, 24, 40), 2)},
        *{((1, 40, 64, 128), 2), ((1, 128, 64, 40), 2)},
        *{((1, 4, 32, 128), 10 * 2 * 2), ((1, 128, 32, 40), 2 * 2)},
    }
    # Forward a cell reads its gates twice and three values of the state, for each of 4 · 32.
    (cell,) = [w for w in works(found.calls) if w.name.endswith("cells") and w.phase == "forward"]
    assert cell.bytes == 4 * 32 * (2 * 4 + 3) * 4 * (10 * 2 * 2)


class Quantised(torch.Tensor):
    """Weights of 8 bits with a scale that a layer widens, as in libraries of quantisation."""

    @staticmethod
    def __new__(cls, values, scale):
        own = {"dtype": scale.dtype, "device": values.device, "requires_grad": False}
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, **own)

    def __init__(self, values, scale):
        self.values_, self.scale = values, scale

    def __tensor_flatten__(self):
        return ["values_", "scale"], None

    @staticmethod
    def __tensor_unflatten__(held, _, size, stride):
        return Quantised(held["values_"], held["scale"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.detach.default, torch.ops.aten.t.default):
            own = args[0]
            return Quantised(function(own.values_), own.scale)
        x, weight = args
        return function(x, weight.values_.to(x.dtype)) * weight.scale


def test_quantised_weights_launch_what_they_say():
    layer = torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16, device="meta")
    values = torch.zeros(32, 64, dtype=torch.int8, device="meta")
    scale = torch.zeros(1, dtype=torch.bfloat16, device="meta")
    layer.weight = torch.nn.Parameter(Quantised(values, scale), requires_grad=False)
    x = torch.zeros(8, 64, dtype=torch.bfloat16, device="meta")
    found = record(TorchProgram(layer, (x,)))
    assert not found.notes
    assert [c.name for c in found.calls] == ["aten._to_copy", "aten.mm", "aten.mul"]
    # A byte a weight and the scale; the copy is read once and written in 16 bits.
    assert found.parameter_bytes == 64 * 32 + 2
    copy = found.calls[0]
    assert (copy.inputs[0].bytes, copy.outputs[0].bytes) == (64 * 32, 2 * 64 * 32)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_models_of_transformers_run_as_eager_runs_them():
    transformers = pytest.importorskip("transformers", reason="models of transformers need it")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, vocab_size=128,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    ids = torch.zeros(1, 32, dtype=torch.int64, device="meta")
    model.train()
    launched = []
    for again in (False, True):
        model.gradient_checkpointing_enable() if again else None
        found = record(TorchProgram(model, (ids,), {"labels": ids}, train="adamw"))
        assert [(u.masked, u.grouped) for u in found.attention] == [(False, True)]
        launched.append(len(products(found, "backward")))
    # All products of a layer but the last, whose result nobody needs again.
    assert launched[1] - launched[0] == 6


class _Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(x)


def test_products_of_unlike_formats_are_refused_as_pytorch_refuses_them() -> None:
    with pytest.raises(ProgramError, match="bfloat16 and float32"):
        record(TorchProgram(_Two(), (torch.zeros(8, 64, dtype=torch.bfloat16),)))
    given = torch.zeros(8, 64, dtype=torch.bfloat16)
    assert len(record(TorchProgram(_Two().bfloat16(), (given,))).calls) > 0


def test_inputs_that_do_not_fit_are_told_in_a_line(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ProgramError, match=r"does not run.*reduction dim") as refused:
        record(TorchProgram(_Two(), (torch.zeros(8, 5),)))
    assert refused.value.where.startswith(__file__)
    with pytest.raises(ProgramError, match="does not run") as refused:
        record(TorchProgram(_Two(), ((torch.zeros(8, 64),),)))
    assert "one by one, not as a tuple" in refused.value.hint
    # PyTorch's own tracebacks of the failed call are left out.
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]
