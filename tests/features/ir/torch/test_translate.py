"""Translated modules compute what PyTorch computes, forward and backward, at the user's lines."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ....support.cases import every, later

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from opcast.common.errors import ProgramError  # noqa: E402
from opcast.features.devices.catalogue import find_device  # noqa: E402
from opcast.features.ir.platforms import Platform  # noqa: E402
from opcast.features.ir.reader import read_program  # noqa: E402
from opcast.features.ir.torch.eager import place_of  # noqa: E402
from opcast.features.ir.torch.export import export, jax_dtype  # noqa: E402
from opcast.features.ir.torch.program import TorchProgram, as_torch_program  # noqa: E402
from opcast.features.ir.torch.runs import record  # noqa: E402
from opcast.features.ir.torch.training import Translated  # noqa: E402
from opcast.features.ir.torch.translate import Forward  # noqa: E402
from opcast.features.lowering.lower import lower  # noqa: E402

from ....support import torch_user_models  # noqa: E402
from ....support.torch_models import GPT, examples  # noqa: E402

#: Compiles in a fraction of the time, to the same values.
QUICK = {"xla_backend_optimization_level": "0"}


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's values for JAX; for tests and checks, since predictions need shapes alone."""
    own = tensor.detach().cpu()
    if own.dtype == torch.bfloat16:
        return np.asarray(own.float().numpy()).astype(jnp.bfloat16)
    return np.asarray(own.numpy().astype(jax_dtype(own.dtype, "")))


def translated(module, *inputs):
    forward = Forward(export(TorchProgram(module, inputs)))
    values = {name: _to_numpy(tensor) for name, tensor in forward.values().items()}
    return forward, values


def run(module, *inputs):
    """The first output as PyTorch and as JAX compute it."""
    forward, values = translated(module, *inputs)
    parameters = {n: values[n] for n in forward.parameters}
    state = {n: values[n] for n in forward.state}
    key = jax.random.key(0) if forward.random else None
    # Compiled as one program, as users' are; operator by operator takes ten times as long.
    given = (parameters, state, tuple(map(_to_numpy, inputs)), key)
    found, _ = jax.jit(forward).lower(*given).compile(compiler_options=QUICK)(*given)
    wanted = module(*inputs)
    return torch.utils._pytree.tree_leaves(wanted), list(found)


def agree(module, *inputs, atol=1e-5):
    for wanted, found in zip(*run(module, *inputs), strict=True):
        assert tuple(found.shape) == tuple(wanted.shape)
        np.testing.assert_allclose(np.asarray(found), wanted.detach().numpy(), atol=atol, rtol=1e-4)


class Function(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


@pytest.mark.parametrize("kind", (*map(later, ("mlp", "gpt")), "resnet", "llama", "encoder"))
def test_a_forward_pass_is_pytorchs(kind):
    module, inputs = examples()[kind]
    agree(module.eval(), *inputs)


@pytest.mark.parametrize("kind", ("mamba", "moe", "dlrm", *map(later, ("unet", "vit", "whisper"))))
def test_models_as_users_write_them(kind):
    module, inputs = torch_user_models.examples()[kind]
    agree(module.eval(), *inputs)


class Rotary(torch.nn.Module):
    """Positions as rotations of complex numbers, as Llama's reference code has them."""

    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(16, 16)
        angle = torch.outer(torch.arange(6.0), 1e4 ** -torch.linspace(0, 1, 8))
        self.turns = torch.polar(torch.ones_like(angle), angle)

    def forward(self, x):
        pairs = torch.view_as_complex(self.project(x).float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.turns).flatten(-2).type_as(x)


def test_rotations_by_complex_numbers_and_their_gradient():
    module, x = Rotary(), torch.randn(2, 6, 16)
    agree(module, x)
    forward, values = translated(module, x)
    state = {n: values[n] for n in forward.state}

    def total(weight):
        parameters = {**{n: values[n] for n in forward.parameters}, "project.weight": weight}
        return forward(parameters, state, (_to_numpy(x),))[0][0].sum()

    found = jax.grad(total)(jnp.asarray(values["project.weight"]))
    module(x).sum().backward()
    np.testing.assert_allclose(found, module.project.weight.grad.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("mlp", *map(later, ("gpt", "resnet", "encoder", "llama"))))
def test_a_training_step_is_pytorchs(kind):
    """The loss, every weight after a step of SGD, and the buffers that the pass moved."""
    module, inputs = examples()[kind]
    own = copy.deepcopy(module.train())
    program = TorchProgram(module, inputs, train="momentum", loss="cross_entropy")
    call = Translated(program).call()
    _, values = translated(module, *inputs)
    trained, kept, initial, state, (_, (labels,)) = call.args
    labels = torch.randint(5, labels.shape)
    zeros = jax.tree.map(lambda t: jnp.zeros(t.shape, t.dtype), initial)
    loss, after, _, moved = jax.jit(call.function)(
        {n: values[n] for n in trained},
        {n: values[n] for n in kept},
        zeros,
        {n: values[n] for n in state},
        (tuple(map(_to_numpy, inputs)), (_to_numpy(labels),)),
    )
    wanted = F.cross_entropy(own(*inputs).flatten(0, -2), labels.flatten())
    wanted.backward()
    # PyTorch's own momentum begins with the gradient, as optax's does.
    torch.optim.SGD(own.parameters(), 1e-3, momentum=0.9).step()
    assert float(loss) == pytest.approx(float(wanted.detach()), rel=1e-5)
    tensors = dict(own.named_parameters())
    for name, weight in after.items():
        before = np.asarray(values[name], np.float64)
        step = tensors[name].detach().numpy() - before
        # Gradients within a thousandth of the largest of their tensor.
        np.testing.assert_allclose(
            np.asarray(weight, np.float64) - before, step, atol=1e-3 * np.abs(step).max() + 2e-7
        )
    for name, value in moved.items():
        np.testing.assert_allclose(np.asarray(value), own.state_dict()[name].numpy(), 1e-4, 1e-6)


def test_adamw_updates_as_pytorchs_does():
    module, inputs = examples()["mlp"]
    own = copy.deepcopy(module)
    call = Translated(TorchProgram(module, inputs, train="adamw", loss="sum")).call()
    _, values = translated(module, *inputs)
    trained, _, initial, *_ = call.args
    zeros = jax.tree.map(lambda t: jnp.zeros(t.shape, t.dtype), initial)
    given = ({n: values[n] for n in trained}, {}, zeros, {}, (tuple(map(_to_numpy, inputs)), ()))
    _, after, _, _ = call.function(*given)
    own(*inputs).sum().backward()
    torch.optim.AdamW(own.parameters(), 1e-3).step()
    for name, tensor in own.named_parameters():
        np.testing.assert_allclose(np.asarray(after[name]), tensor.detach().numpy(), atol=2e-6)


def test_tied_weights_are_one_parameter():
    forward, _ = translated(GPT(), torch.zeros(1, 16, dtype=torch.long))
    assert "wte.weight" in forward.trained or "lm_head.weight" in forward.trained
    assert not {"wte.weight", "lm_head.weight"} <= set(forward.trained)


X = torch.linspace(-2, 2, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
ROWS = torch.linspace(-1, 3, 24).reshape(4, 6).roll(5)
INDEX = torch.tensor([[0, 2, 1], [1, 1, 3]])
FUNCTIONS = {
    "max_pool": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max_pool_ceil": lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True),
    "avg_pool": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "avg_pool_ceil": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, (3, 5)),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"),
    "bilinear": lambda x: F.interpolate(x, (12, 12), mode="bilinear"),
    "reflect": lambda x: F.pad(x, (1, 2, 3, 1), mode="reflect"),
    "constant": lambda x: F.pad(x, (1, 2, -1, 1), value=7.0),
    "group_norm": lambda x: F.group_norm(x, 3),
    "instance_norm": lambda x: F.instance_norm(x),
    "shuffle": lambda x: F.pixel_shuffle(torch.cat([x, x, x, x], 1), 2),
    "glu": lambda x: F.glu(x, 2),
    "roll": lambda x: torch.roll(x, (1, -2), (0, 3)) + torch.roll(x, 5),
    "unfold": lambda x: torch.stack(x.unbind(1), 2).flip(0).tril(),
    "windows": lambda x: x.unfold(-1, 3, 2),
    "corners": lambda x: F.interpolate(x, (5, 13), mode="bilinear", align_corners=True),
    "bicubic": lambda x: F.interpolate(x, (9, 11), mode="bicubic"),
    "smooth": lambda x: F.interpolate(x, (5, 6), mode="bicubic", antialias=True),
    "smooth_linear": lambda x: F.interpolate(x, (5, 6), mode="bilinear", antialias=True),
    "area": lambda x: F.interpolate(x, (4, 2), mode="area"),
    "grid": lambda x: F.grid_sample(x, x[:, :2].permute(0, 2, 3, 1), align_corners=False),
    "border": lambda x: F.grid_sample(
        x, x[:, :2].permute(0, 2, 3, 1), padding_mode="border", align_corners=True
    ),
    "reflection": lambda x: F.grid_sample(
        x, x[:, :2].permute(0, 2, 3, 1), padding_mode="reflection", align_corners=True
    ),
}
ROW_FUNCTIONS = {
    "topk": lambda x: x.topk(3, dim=0),
    "smallest": lambda x: x.topk(2, largest=False),
    "sort": lambda x: x.sort(dim=1, descending=True),
    "cumsum": lambda x: x.cumsum(1),
    "histogram": lambda x: (x.histc(10, -1.0, 1.0), x.histc(7)),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "gather": lambda x: x.gather(0, INDEX % 4),
    "scatter": lambda x: torch.zeros(4, 6).scatter(1, INDEX, x[:2]),
    "scatter_add": lambda x: torch.zeros(4, 6).scatter_add(0, INDEX, x[:, :3]),
    "index_put": lambda x: x.index_put((INDEX[0], INDEX[1]), x[0, :3], accumulate=True),
    "mask": lambda x: x.masked_fill(x > 1, -3.0).clone().index_fill(0, INDEX[0], 2.0),
    "in_place": lambda x: x.clone().mul_(2).add_(x).clamp_(min=0.5),
    "var": lambda x: (x.var(0), x.std(1, correction=0), x.norm(), x.amax(1), x.argmin(0)),
    "elu": lambda x: F.elu(x) + F.softplus(x, 2.0) + F.hardswish(x) + F.leaky_relu(x, 0.3),
    "integers": lambda x: (x.int() // 2, x.int() % 3, -x.int() / 2, x.long() & 3),
    "logits": lambda x: (x.log_softmax(0), x.logsumexp(1)),
    "loss": lambda x: F.cross_entropy(x, torch.tensor([0, 5, -100, 2])),
    "chunk": lambda x: torch.cat([c.t().reshape(2, -1) for c in x.chunk(3, 1)]),
    "select": lambda x: x[1:, ::2] + x[-1, :3] * x[[0, 2, 1], 1:4],
    "rfft": lambda x: torch.fft.irfft(torch.fft.rfft(x, n=16) * torch.fft.rfft(x, n=16), n=16),
    "rfft2": lambda x: torch.fft.irfft2(torch.fft.rfft2(x, norm="ortho"), (4, 6), norm="ortho"),
    "fft": lambda x: torch.view_as_real(torch.fft.ifft(torch.fft.fft(x, dim=0), norm="forward")),
    "spectrum": lambda x: (torch.fft.fft(x).abs(), torch.fft.fftshift(torch.fft.fft2(x)).imag),
    "stft": lambda x: torch.stft(
        x, 4, window=torch.hann_window(4), return_complex=True, center=False
    ).abs(),
    "complex": lambda x: torch.view_as_real(torch.complex(x, 2 * x).conj() / torch.complex(x, x)),
    "angle": lambda x: (torch.complex(x, x + 1).angle(), torch.polar(x.abs(), x).real),
    "bags": lambda x: [
        F.embedding_bag(INDEX.flatten(), x, torch.tensor([0, 1, 4]), mode=mode)
        for mode in ("sum", "mean", "max")
    ],
    "weighted_bags": lambda x: F.embedding_bag(
        INDEX, x, mode="sum", per_sample_weights=x[:2, :3], padding_idx=1
    ),
    "scatter_reduce": lambda x: [
        x.scatter_reduce(0, INDEX % 4, x[:2, :3] + 1, how, include_self=own)
        for how in ("sum", "prod", "mean", "amax", "amin")
        for own in (True, False)
    ],
    "running": lambda x: (*x.cummax(0), *x.round().cummin(1), x.logcumsumexp(1)),
    "middle": lambda x: (*x.median(1), x.median(), x.quantile(0.3, 0), *x.kthvalue(2, 0)),
    "bins": lambda x: torch.bucketize(x, torch.tensor([-0.5, 0.0, 1.0]), right=True),
    "distances": lambda x: (torch.cdist(x, x[:2]), torch.cdist(x[None], x[None, :2], p=1.0)),
    "where": lambda x: torch.where(x > 0, x, torch.tensor(-1.0)).logical_not().any(0),
}  # fmt: skip


@pytest.mark.parametrize("name", every(3, FUNCTIONS))
def test_image_operators(name):
    agree(Function(FUNCTIONS[name]), X)


@pytest.mark.parametrize("name", every(3, ROW_FUNCTIONS))
def test_row_operators(name):
    agree(Function(ROW_FUNCTIONS[name]), ROWS)


@pytest.mark.parametrize(
    "layer",
    [
        torch.nn.Conv2d(3, 6, 3, 2, 1, groups=3),
        torch.nn.Conv2d(3, 4, (3, 1), dilation=(2, 1), padding="same"),
        torch.nn.ConvTranspose2d(3, 4, 3, 2, 1, output_padding=1),
        torch.nn.ConvTranspose2d(3, 6, 4, 2, 1, groups=3),
        torch.nn.ConvTranspose2d(3, 4, 3, 1, 1, output_padding=1, dilation=2),
    ],
)
def test_convolutions(layer):
    agree(layer, X)
    agree(torch.nn.Conv1d(3, 2, 3), X[:, :, 0])
    agree(torch.nn.Conv3d(2, 3, 2), X[:, :2, None].repeat(1, 1, 3, 1, 1))


def test_images_with_channels_last():
    pooled = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1))
    last = torch.channels_last
    agree(pooled.to(memory_format=last), X.contiguous(memory_format=last))


@pytest.mark.parametrize("causal", [later(False), True])
@pytest.mark.parametrize("groups", [1, later(2), 4])
def test_attention_with_groups_and_masks(causal, groups):
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, n, 6, 8) for n in (4, groups, groups))
    attend = F.scaled_dot_product_attention
    agree(Function(lambda a, b, c: attend(a, b, c, is_causal=causal, enable_gqa=True)), q, k, v)
    mask = torch.randn(2, 1, 6, 6)
    agree(Function(lambda a, b, c: attend(a, b, c, mask, scale=0.3, enable_gqa=True)), q, k, v)
    # Each query sees a key.
    seen = (mask > 0) | torch.eye(6, dtype=torch.bool)
    agree(Function(lambda a, b, c: attend(a, b, c, seen, enable_gqa=True)), q, k, v)


def kernels_of(module, *inputs):
    """Kernels of an H100 by the rules of ``fused``."""
    device = find_device("h100-sxm")
    source = read_program(TorchProgram(module, inputs), platform=Platform("cuda", 90))
    return lower(source, "fused", device=device).kernels


def test_forms_that_xla_knows_are_kept():
    # A transposed convolution is the gradient of one, not one of an image padded with zeros of four
    # times the work: each of 8 x 8 positions of 16 channels meets 4 x 4 taps of 8 channels.
    layer = torch.nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False).bfloat16()
    image = torch.zeros(2, 16, 8, 8, dtype=torch.bfloat16)
    (conv,) = (k for k in kernels_of(layer, image) if k.kind == "conv")
    assert conv.flops <= 2 * 2 * 8 * 8 * 16 * 16 * 8
    # Windows of Swin are turned round by two slices, without an index.
    turned = kernels_of(Function(lambda x: torch.roll(x, 3, 1)), torch.zeros(64, 64))
    assert [k.kind for k in turned] == ["copy"]


def targets(source):
    from opcast.features.ir.mlir.bindings import walk_ops

    calls = [op for op in walk_ops(source.module) if op.name == "stablehlo.custom_call"]
    return [str(op.attributes["call_target_name"]).strip('"') for op in calls]


def test_attention_is_cudnns_on_nvidia_and_written_out_elsewhere():
    module = GPT().bfloat16()
    program = TorchProgram(module, (torch.zeros(2, 16, dtype=torch.long),), train="sgd", loss="sum")
    source = read_program(program, platform=Platform("cuda", 90))
    calls = [t for t in targets(source) if t.startswith("__cudnn$fmha")]
    assert calls.count("__cudnn$fmhaSoftmax") == 2
    assert calls.count("__cudnn$fmhaSoftmaxBackward") == 2
    # JAX must not remember the other platform's trace.
    assert not targets(source.for_platform(Platform("tpu")))
    assert not targets(read_program(program, platform=Platform("cuda", 70)))


@pytest.mark.parametrize(
    "layer",
    [
        torch.nn.LSTM(6, 4, 2, batch_first=True),
        torch.nn.LSTM(6, 4, bidirectional=True),
        torch.nn.GRU(6, 4),
        torch.nn.RNN(6, 4, nonlinearity="relu"),
        torch.nn.TransformerEncoder(
            torch.nn.TransformerEncoderLayer(6, 2, 12, batch_first=True), 2
        ),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_of_pytorch(layer):
    agree(layer.eval(), torch.randn(3, 5, 6))


def test_multi_head_attention_with_masks():
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x, causal = torch.randn(2, 5, 8), torch.ones(5, 5, dtype=torch.bool).triu(1)
    padded = torch.arange(5)[None] >= torch.tensor([[5], [3]])

    def attend(x):
        return attention(x, x, x, attn_mask=causal, key_padding_mask=padded)

    agree(Function(attend), x)


def test_dropout_draws_and_scales():
    module = torch.nn.Sequential(torch.nn.Dropout(0.25)).train()
    _, (found,) = run(module, torch.ones(100, 100))
    kept = np.asarray(found) > 0
    assert 0.73 < kept.mean() < 0.77
    np.testing.assert_allclose(np.asarray(found)[kept], 1 / 0.75)


def test_gradients_stop_where_the_module_stops_them():
    class Stopped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Parameter(torch.tensor([2.0]))
            self.b = torch.nn.Parameter(torch.tensor([3.0]))

        def forward(self, x):
            with torch.no_grad():
                fixed = x * self.b
            return (x * self.a + fixed + (self.a * self.b).detach()).sum()

    program = torch.export.export(Stopped(), (torch.ones(4),))
    for _ in range(2):
        forward = Forward(export(TorchProgram(program)))
        values = {name: _to_numpy(tensor) for name, tensor in forward.values().items()}
        found = jax.grad(lambda p, f=forward: f(p, {}, (np.ones(4, np.float32),))[0][0])(values)
        assert float(found["a"][0]) == 4.0 and float(found["b"][0]) == 0.0
    # The user's own export is as it was.
    assert "stop_gradient" not in program.graph_module.code


def test_autocast_casts():
    class Cast(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.own = torch.nn.Linear(8, 8)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.own(x)

    assert run(Cast(), torch.ones(2, 8))[1][0].dtype == jnp.bfloat16


class Mixed(torch.nn.Module):
    """Casts within its own forward pass, as mixed precision is written."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(8)
        self.own = torch.nn.Linear(8, 16)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.own(self.norm(x))
            with torch.no_grad():
                scale = torch.ones(4, 1, device=x.device) * hidden.abs().mean(1, keepdim=True)
            return hidden / scale


def test_autocast_casts_alike_on_meta():
    programs = []
    for device in ("cpu", "meta"):
        module, x = Mixed().to(device), torch.ones(4, 8, device=device)
        program = torch.export.export(module, (x,))
        code = program.graph_module.code
        source = read_program(TorchProgram(program, train="sgd", loss="sum"))
        programs.append(str(source.module.operation.get_asm(enable_debug_info=False)))
        # The user's own export is as it was.
        assert program.graph_module.code == code
        assert {t.device.type for t in program.state_dict.values()} == {device}
    assert "tensor<4x8xbf16>" in programs[0]
    assert programs[0] == programs[1]


class CastForCuda(torch.nn.Module):
    """Casts as a user's code on a GPU does, whatever machine it runs on."""

    def __init__(self):
        super().__init__()
        self.own, self.norm = torch.nn.Linear(8, 16), torch.nn.LayerNorm(16)

    def forward(self, x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return self.norm(torch.relu(self.own(x)))


def test_autocast_of_cuda_casts_where_there_is_none():
    texts = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            module, x = CastForCuda(), torch.ones(4, 8)
        source = read_program(TorchProgram(module, (x,)))
        texts.append(str(source.module.operation.get_asm(enable_debug_info=False)))
        calls = record(TorchProgram(module, (x,))).calls
        kinds = {call.name: call.outputs[0].dtype for call in calls}
        # The product in 16 bits, the norm in 32 (the lists of ATen/autocast_mode.h).
        assert kinds["aten.addmm"] == kinds["aten.relu"] == "bfloat16", device
        assert kinds["aten.native_layer_norm"] == "float32", device
    assert "dot_general" in texts[0] and "tensor<4x16xbf16>" in texts[0]
    assert texts[0] == texts[1]
    # Only the prediction casts so.
    with pytest.warns(UserWarning, match="CUDA is not available"):
        assert CastForCuda()(torch.ones(4, 8)).dtype == torch.float32


class NormAsAutocast(torch.nn.Module):
    """Keeps a norm out of autocast, in its format, whatever device its input is on."""

    def __init__(self):
        super().__init__()
        self.own, self.norm = torch.nn.Linear(8, 16), torch.nn.LayerNorm(16)

    def forward(self, x):
        kind = x.device.type
        with torch.autocast("cuda"):
            x = self.own(x)
            assert torch.is_autocast_enabled(kind)
            dtype = torch.get_autocast_dtype(kind)
            weight, bias = self.norm.weight.to(dtype), self.norm.bias.to(dtype)
            with torch.autocast(kind, enabled=False):
                assert not torch.is_autocast_enabled(kind)
                return torch.nn.functional.layer_norm(x.to(dtype), (16,), weight, bias)


@pytest.mark.parametrize("kind", ["cpu", "meta"])
def test_models_ask_the_device_of_their_input_about_autocast(kind):
    with torch.device(kind):
        program = TorchProgram(NormAsAutocast(), (torch.ones(4, 8),))
    before = torch.is_autocast_enabled, torch.get_autocast_dtype
    kinds = {call.name: call.outputs[0].dtype for call in record(program).calls}
    # CUDA's format, where none is named.
    assert kinds["aten.addmm"] == kinds["aten.native_layer_norm"] == "float16"
    assert (torch.is_autocast_enabled, torch.get_autocast_dtype) == before


def test_lines_of_regions_are_the_users():
    module = Mixed()
    program = torch.export.export(module, (torch.ones(4, 8),))
    first = Mixed.forward.__code__.co_firstlineno
    wanted = {
        "aten.linear.default": first + 2,
        "aten.mean.dim": first + 4,
        "aten.div.Tensor": first + 5,
    }
    forward = Forward(export(TorchProgram(program)))
    places = {str(n.target): place_of(n) for n in forward.graph.graph.nodes}
    assert {name: places[name].line for name in wanted} == wanted
    assert places["aten.linear.default"].modules == "Mixed/own"
    # As PyTorch runs it, forward and backward.
    calls = record(TorchProgram(program, train="sgd", loss="sum")).calls
    lines = {(c.name, c.phase): c.place.line for c in calls}
    assert lines["aten.addmm", "forward"] == lines["aten.mm", "backward"] == first + 2
    assert lines["aten.mean", "forward"] == first + 4


def test_lines_and_modules_are_the_users():
    module, inputs = examples()["llama"]
    forward, _ = translated(module, *inputs)
    linear = next(n for n in forward.graph.graph.nodes if "linear" in str(n.target))
    place = place_of(linear)
    assert place.file.endswith("torch_models.py")
    assert place.modules == "Llama/layers.0/wq"
    source = read_program(TorchProgram(module, inputs))
    text = str(source.module.operation.get_asm(enable_debug_info=True))
    assert f'torch_models.py":{place.line}:' in text
    assert "Llama/layers.0/wq/" in text


class Bessel(torch.nn.Module):
    def forward(self, x):
        return torch.special.bessel_j0(x)


def refused(module, *inputs, **options):
    with pytest.raises(ProgramError) as told:
        Translated(TorchProgram(module, inputs, **options)).call()
    return told.value


def test_an_operator_without_translation_is_named_with_its_line():
    error = refused(Bessel(), torch.ones(3))
    assert "aten.special_bessel_j0" in error.what and "test_translate.py:" in error.what
    assert "torch-eager" in error.hint


def test_a_solver_is_not_sent_where_it_is_refused_too():
    error = refused(Function(lambda a: torch.linalg.svd(a)[1]), torch.ones(8, 8))
    assert "_linalg_svd" in error.what and "test_translate.py:" in error.what
    assert "torch-eager" not in error.hint and "measure" in error.hint


def test_what_cannot_be_exported_says_why():
    error = refused(Function(lambda x: x if x.sum() > 0 else -x), torch.ones(3))
    assert "a decision depends on values" in error.what and error.where.startswith(__file__)
    assert "torch.where" in error.hint
    error = refused(Function(lambda x: x[x > 0]), torch.ones(3))
    assert "how much aten.index.Tensor finds" in error.what
    error = refused(Function(lambda x: x * x.sum().item()), torch.ones(3))
    assert "aten.item reads a value" in error.what and error.where.startswith(__file__)
    assert "float64" in refused(Function(lambda x: x * 2), torch.ones(3, dtype=torch.float64)).what


def test_sizes_that_depend_on_values_are_refused():
    def found(x):
        return x[torch.where(x[:, 0] > 0)[0]]

    error = refused(Function(found), torch.ones(3, 2))
    assert "depend on the values" in error.what and "a capacity" in error.hint
    assert "aten.where" in error.what and error.where.startswith(__file__)


def test_dynamic_shapes_take_the_sizes_of_inputs():
    rows = torch.export.Dim("rows", max=64)
    program = torch.export.export(
        Function(torch.relu), (torch.ones(4, 2),), dynamic_shapes=(((rows, None),),)
    )
    with pytest.raises(ProgramError, match="dynamic: 0 of ") as told:
        export(TorchProgram(program))
    assert "give inputs" in told.value.hint
    sized = TorchProgram(program, (torch.ones(16, 2),))
    (call,) = record(sized).calls
    assert call.outputs[0].shape == (16, 2) and call.place.file == __file__
    assert Translated(sized).forward.inputs[0].shape == (16, 2)
    for wrong in (torch.ones(65, 2), torch.ones(4, 3)):
        with pytest.raises(ProgramError, match=r"does not take these inputs: .*size\(\)"):
            export(TorchProgram(program, (wrong,)))


def test_training_options_are_checked():
    module, inputs = examples()["mlp"]
    assert "no optimiser 'lion'" in refused_options(train="lion")
    assert "no loss 'l1'" in refused_options(train="sgd", loss="l1")
    assert "without an optimiser" in refused_options(loss="sum")
    assert "float32[3, 5], no loss" in refused(module, *inputs, train="sgd").what
    frozen = copy.deepcopy(module).requires_grad_(False)
    assert "no parameter" in refused(frozen, *inputs, train="sgd", loss="sum").what


def refused_options(**options):
    with pytest.raises(ProgramError) as told:
        TorchProgram(torch.nn.ReLU(), (torch.ones(2),), **options)
    return told.value.what


def test_a_loss_of_the_users_own_is_translated():
    module, inputs = examples()["mlp"]
    program = TorchProgram(module, inputs, train="sgd", loss=lambda y: (y**2).mean())
    call = Translated(program).call()
    _, values = translated(module, *inputs)
    given = ({n: values[n] for n in call.args[0]}, {}, call.args[2], {}, (inputs_of(inputs), ()))
    zeros = jax.tree.map(lambda t: jnp.zeros(t.shape, t.dtype), given[2])
    loss, *_ = call.function(given[0], {}, zeros, {}, given[4])
    wanted = (module(*inputs) ** 2).mean().detach()
    assert float(loss) == pytest.approx(float(wanted), rel=1e-5)


def inputs_of(tensors):
    return tuple(map(_to_numpy, tensors))


def test_functions_of_tensors_are_pytorchs():
    layer = torch.nn.Linear(4, 2)

    def apply(x):
        return layer(x).relu()

    program = as_torch_program(apply, (torch.ones(3, 4),))
    assert program is not None
    assert set(Forward(export(program)).trained) == {"used.0.weight", "used.0.bias"}
    assert as_torch_program(apply, (jnp.ones((3, 4)),)) is None


def test_inputs_go_where_a_module_without_values_is():
    with torch.device("meta"):
        module = torch.nn.Linear(8, 4)
    exported = export(TorchProgram(module, (torch.zeros(2, 8),)))
    assert exported.program.graph_signature.user_inputs
