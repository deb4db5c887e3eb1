"""Which kernels PyTorch chooses for attention and for RMS norms."""

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from opcast import predict  # noqa: E402
from opcast.common.errors import ProgramError  # noqa: E402
from opcast.features.devices.catalogue import find_device  # noqa: E402
from opcast.features.ir.torch.program import TorchProgram  # noqa: E402
from opcast.features.ir.torch.record import AttentionUse, FunctionUse  # noqa: E402
from opcast.features.ir.torch.runs import record  # noqa: E402
from opcast.predict.operator.torch_choices import attention_backend, is_one  # noqa: E402
from opcast.predict.operator.torch_framework import TorchPredictor  # noqa: E402
from opcast.predict.operator.torch_price import works_of  # noqa: E402

Q, K, ONE = (2, 8, 256, 64), (2, 2, 256, 64), (2, 8, 1, 64)


@pytest.mark.parametrize(
    ("device", "use", "backend"),
    [
        ("h100-sxm", AttentionUse(Q, Q, Q, "bfloat16"), "cuDNN"),
        ("h100-sxm", AttentionUse(Q, K, K, "bfloat16", masked=True, grouped=True), "cuDNN"),
        # One query, but for dropout; never one key.
        ("h100-sxm", AttentionUse(ONE, Q, Q, "bfloat16"), "cuDNN"),
        ("h100-sxm", AttentionUse(ONE, Q, Q, "bfloat16", dropout=0.125), "FlashAttention 2"),
        ("h100-sxm", AttentionUse(Q, ONE, ONE, "bfloat16"), "FlashAttention 2"),
        ("h100-sxm", AttentionUse(Q, Q, Q, "bfloat16", dropout=0.1), "FlashAttention 2"),
        ("h100-sxm", AttentionUse(Q, Q, Q, "float32"), "memory-efficient"),
        ("h100-sxm", AttentionUse(Q, K, K, "float32", grouped=True), "math"),
        ("h100-sxm", AttentionUse(Q[1:], Q[1:], Q[1:], "bfloat16"), "math"),
        ("a100-sxm-80gb", AttentionUse(Q, Q, Q, "bfloat16"), "FlashAttention 2"),
        ("a100-sxm-80gb", AttentionUse(Q, K, K, "bfloat16", grouped=True), "FlashAttention 2"),
        ("a100-sxm-80gb", AttentionUse(Q, Q, Q, "bfloat16", masked=True), "memory-efficient"),
        ("a100-sxm-80gb", AttentionUse(ONE, Q, Q, "float16", causal=True), "memory-efficient"),
        ("a100-sxm-80gb", AttentionUse(Q, K, K, "float16", masked=True, grouped=True), "math"),
        (
            "h100-sxm",
            AttentionUse(Q, Q, Q, "bfloat16", allowed=("FlashAttention 2",)),
            "FlashAttention 2",
        ),
        (
            "h100-sxm",
            AttentionUse(Q, Q, Q, "bfloat16", allowed=("memory-efficient",)),
            "memory-efficient",
        ),
        ("h100-sxm", AttentionUse(Q, Q, Q, "bfloat16", allowed=("math",)), "math"),
        ("a100-sxm-80gb", AttentionUse(Q, Q, Q, "bfloat16", allowed=("cuDNN",)), "cuDNN"),
        ("mi300x", AttentionUse(Q, Q, Q, "bfloat16", allowed=("FlashAttention 2",)), ""),
        ("v100-sxm-16gb", AttentionUse(Q, Q, Q, "float16"), "memory-efficient"),
        ("v100-sxm-16gb", AttentionUse(Q, Q, Q, "bfloat16"), "math"),
        ("mi300x", AttentionUse(Q, Q, Q, "bfloat16"), ""),
        ("mi300x", AttentionUse(Q, K, K, "bfloat16", masked=True, grouped=True), "math"),
    ],
)
def test_attention_is_by_the_first_kernel_that_takes_it(device, use, backend):
    assert attention_backend(find_device(device), use) == backend


BF16 = FunctionUse("rms_norm", "bfloat16", "bfloat16")


@pytest.mark.parametrize(
    ("device", "use", "framework", "one"),
    [
        ("h100-sxm", BF16, "torch-eager", True),
        ("mi300x", BF16, "torch-eager@2.9", True),
        ("h100-sxm", FunctionUse("rms_norm", "float16"), "torch-eager@2.12.1", True),
        ("h100-sxm", BF16, "torch-eager@2.8", False),
        ("h100-sxm", FunctionUse("rms_norm", "bfloat16", "float32"), "torch-eager", False),
        (
            "h100-sxm",
            FunctionUse("rms_norm", "float32", "", channels_last=True),
            "torch-eager",
            False,
        ),
        ("h100-sxm", BF16, "torch-compiled", False),
        ("cpu-i9-10940x", BF16, "torch-eager", False),
        ("mi300x", FunctionUse("lstm_cell", "float32"), "torch-compiled", True),
        ("cpu-i9-10940x", FunctionUse("lstm_cell", "float32"), "torch-compiled", False),
    ],
)
def test_functions_are_one_kernel_of_gpus_and_since_a_release(device, use, framework, one):
    assert is_one(find_device(device), use, *framework.split("@")) == one


class Twice(torch.nn.Module):
    """RMS norms of PyTorch, as a module and as a function, and one written by hand."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.RMSNorm(64)

    def forward(self, x):
        x = F.rms_norm(self.norm(x), (64,))
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def launched(framework, device="h100-sxm", exported=False, train=""):
    source, x = Twice().to(torch.bfloat16), torch.zeros(8, 64, dtype=torch.bfloat16)
    program = TorchProgram(source, (x,), train=train, loss="sum" if train else None)
    if exported:
        program = TorchProgram(torch.export.export(source, (x,)))
    predictor = TorchPredictor(framework, "roofline")
    recording = predictor.record(program, device)
    return works_of(recording, predictor.framework, find_device(device)), recording


@pytest.mark.parametrize("exported", [False, True])
def test_rms_norms_read_and_write_their_array_once(exported):
    by_hand = ["pow", "mean", "add", "rsqrt", "mul"]
    found, recording = launched("torch-eager", exported=exported)
    assert [w.name for w in found] == ["_fused_rms_norm"] * 2 + by_hand
    # Two arrays of 16 bits, a factor in f32 for each of eight rows, and a weight.
    arrays = 2 * 2 * 8 * 64 + 4 * 8
    assert [w.bytes for w in found[:2]] == [arrays + 2 * 64, arrays]
    assert [(w.kind, w.shape, w.launches) for w in found[:2]] == [("norm", (8, 64), 1)] * 2
    # What other devices and releases launch is recorded anew, by one of the same it is not.
    same = TorchPredictor("torch-eager@2.9", "roofline")
    assert same.record(TorchProgram(Twice()), "mi300x", recording).calls is recording.calls
    for framework, device in (("torch-eager@2.4", "h100-sxm"), ("torch-eager", "cpu-i9-10940x")):
        passes = [w.name for w in launched(framework, device, exported)[0]]
        assert "_fused_rms_norm" not in passes and passes.count("rsqrt") == 3
    # The generated code of torch.compile is one kernel as before.
    assert len(launched("torch-compiled", exported=exported)[0]) == 1


def test_gradients_of_rms_norms_are_a_kernel_for_the_input_and_one_for_the_weight():
    found, recording = launched("torch-eager", train="sgd")
    norms = [w for w in found if w.name == "_fused_rms_norm_backward"]
    # The function has no weight, and the module's input takes no gradient.
    assert [w.launches for w in norms] == [1, 1]
    arrays = 2 * 2 * 8 * 64 + 4 * 8
    assert [w.bytes for w in norms] == [arrays + 2 * 8 * 64, arrays + 2 * 2 * 64]
    assert all(w.phase == "backward" and w.place.line for w in norms)
    # Between forward and backward the norms hold their inputs and a factor of each row.
    sizes = [s.bytes for s in recording.storages.storages if s.name == "aten.new_empty"]
    assert sizes.count(4 * 8) == 2 * 2


@pytest.mark.parametrize("framework", ["torch-eager", "torch-compiled"])
def test_cells_of_lstms_are_two_products_and_a_kernel(framework):
    cell, x, held = torch.nn.LSTMCell(16, 32), torch.zeros(8, 16), torch.zeros(8, 32)
    predictor = TorchPredictor(framework, "roofline")
    for source in (cell, torch.export.export(cell, (x, (held, held)))):
        given = (x, (held, held)) if source is cell else ()
        recording = predictor.record(TorchProgram(source, given), "h100-sxm")
        found = works_of(recording, framework, find_device("h100-sxm"))
        assert [w.name for w in found] == ["mm", "mm", "_thnn_fused_lstm_cell"]
        # Four gates by two products and biases, the cell before and after, the result, and the
        # gates that the gradient reads again.
        assert found[2].bytes == 4 * (2 * 8 * 128 + 2 * 128 + 3 * 8 * 32 + 8 * 128)
        assert recording.recurrent == 0
    on_cpu = predictor.record(TorchProgram(cell, (x,)), "cpu-i9-10940x")
    assert "aten._thnn_fused_lstm_cell" not in [call.name for call in on_cpu.calls]
    step = TorchProgram(cell, (x, (held, held)), train="sgd", loss="sum")
    trained = predictor.record(step, "h100-sxm")
    back = [w.name for w in works_of(trained, framework, find_device("h100-sxm"))]
    assert back.count("_thnn_fused_lstm_cell_backward_impl") == 1


class Attends(torch.nn.Module):
    """Attention alone, by the backends that the model allows."""

    def __init__(self, *allowed):
        super().__init__()
        self.allowed = [getattr(torch.nn.attention.SDPBackend, name) for name in allowed]

    def forward(self, query, key, value):
        grouped = query.shape[1] != key.shape[1]
        if not self.allowed:
            return F.scaled_dot_product_attention(query, key, value, enable_gqa=grouped)
        with torch.nn.attention.sdpa_kernel(self.allowed):
            return F.scaled_dot_product_attention(query, key, value, enable_gqa=grouped)


def attention(device, batch, groups, keys, queries=1, *, allowed=(), dtype=torch.bfloat16):
    """Predict attention of 32 heads of width 128; returns its operator and the prediction."""
    with torch.device("meta"):
        query = torch.empty(batch, 32, queries, 128, dtype=dtype)
        cache = torch.empty(batch, groups, keys, 128, dtype=dtype)
    found = predict(Attends(*allowed), query, cache, cache, device=device, framework="torch-eager")
    return next((own for own in found.operators if own.kind == "attention"), None), found


@pytest.mark.parametrize(
    ("batch", "groups", "keys", "microseconds"),
    # FlashAttention 2 in vLLM on an A100 (tensor-core pack).
    [(1, 8, 1024, 20.0), (1, 8, 8192, 40.2), (8, 8, 8192, 187.3), (32, 8, 2048, 235.7)],
)
def test_single_queries_split_their_keys_by_flash_attention_2(batch, groups, keys, microseconds):
    found, _ = attention("a100-sxm-80gb", batch, groups, keys)
    assert found.latency_us == pytest.approx(microseconds, rel=0.1)
    assert found.lo_us < microseconds < found.hi_us


@pytest.mark.parametrize("device", ["a100-sxm-80gb", "rtx-4090", "rtx-5090"])
@pytest.mark.parametrize("groups", [8, 32])
def test_single_queries_over_many_keys_take_about_the_time_of_memory(device, groups):
    found, _ = attention(device, 1, groups, 131072)
    least = 2 * 2 * groups * 131072 * 128 / find_device(device).bandwidth * 1e6
    assert least <= found.latency_us < 1.5 * least


def test_the_time_of_cudnn_for_a_single_query_may_be_that_of_split_keys():
    found, _ = attention("h100-sxm", 1, 8, 131072)
    least = 2 * 2 * 8 * 131072 * 128 / find_device("h100-sxm").bandwidth * 1e6
    assert "cuDNN" in found.name and found.lo_us < 1.2 * least


def test_measured_libraries_have_the_intervals_of_a_new_chip_alone():
    # No chip with FlashAttention 2 for attention without a mask is like an A100.
    found, _ = attention("a100-sxm-80gb", 4, 32, 4096, 4096)
    assert found.hi_us < 4 * found.latency_us


@pytest.mark.parametrize(
    ("allowed", "library", "factor"),
    # FlashAttention 2 takes 1.65 times as long as kernels made for Hopper (fitted.yaml), and half
    # as long as the memory-efficient one.
    [
        ("FLASH_ATTENTION", "FlashAttention 2", 1.65),
        ("EFFICIENT_ATTENTION", "memory-efficient", 3.3),
        ("CUDNN_ATTENTION", "cuDNN", 1.0),
    ],
)
def test_programs_that_ask_for_a_backend_get_it(allowed, library, factor):
    plain, first = attention("h100-sxm", 4, 32, 4096, 4096)
    assert plain.name.endswith("(cuDNN)") and any("cuDNN" in note for note in first.notes)
    found, second = attention("h100-sxm", 4, 32, 4096, 4096, allowed=(allowed,))
    assert found.name.endswith(f"({library})") and not any("cuDNN" in n for n in second.notes)
    assert found.latency_us == pytest.approx(factor * plain.latency_us)


def test_gradients_run_by_the_backend_of_the_forward_pass():
    with torch.device("meta"):
        query = torch.empty(2, 4, 64, 64, dtype=torch.float16, requires_grad=True)
    program = TorchProgram(Asks(), (query,), train="sgd", loss="sum")
    found = TorchPredictor("torch-eager").predict(program, "h100-sxm").operators
    names = [own.name for own in found if own.kind == "attention"]
    assert names == [
        "scaled_dot_product_attention (FlashAttention 2)",
        "scaled_dot_product_attention (cuDNN)",
        "scaled_dot_product_attention_backward (cuDNN)",
        "scaled_dot_product_attention_backward (FlashAttention 2)",
    ]


class Asks(torch.nn.Module):
    """Attention by FlashAttention 2, and then by what PyTorch prefers."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1, dtype=torch.float16))

    def forward(self, x):
        x = x * self.scale
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            x = F.scaled_dot_product_attention(x, x, x)
        return F.scaled_dot_product_attention(x, x, x)


def test_backends_that_do_not_support_a_call_are_refused():
    with pytest.raises(ProgramError, match=r"FlashAttention 2.*bfloat16 queries.*t4"):
        attention("t4", 4, 32, 64, 64, allowed=("FLASH_ATTENTION",))


def test_attention_written_out_says_why():
    _, found = attention("t4", 1, 32, 64, 64)
    assert any("do not multiply bfloat16" in note for note in found.notes)
    _, found = attention("t4", 1, 32, 64, 64, dtype=torch.float16, allowed=("MATH",))
    assert any("sdpa_kernel asks" in note for note in found.notes)


def asked(monkeypatch, matmul, cudnn):
    """Set what PyTorch may round to TF32."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", matmul)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", cudnn)


def multiplied(module, *shape, device="h100-sxm", dtype=torch.float32, model="roofline"):
    x = torch.empty(shape, device="meta", dtype=dtype)
    found = predict(
        module.to("meta", dtype), x, device=device, framework="torch-eager", model=model
    )
    return next(k for k in found.kernels if k.kind in ("product", "convolution"))


@pytest.mark.parametrize(
    ("device", "dtypes"),
    [
        ("a100-sxm-80gb", ("f32", "tf32")),
        # Without units for TF32, or with libraries that ignore the setting.
        ("v100-sxm", ("f32", "f32")),
        ("mi300x", ("f32", "f32")),
    ],
)
def test_products_take_tf32_where_the_program_allows_it(monkeypatch, device, dtypes):
    layer, spec = torch.nn.Linear(8192, 8192, bias=False), find_device(device)
    for allowed, dtype in zip((False, True), dtypes, strict=True):
        asked(monkeypatch, allowed, cudnn=False)
        found = multiplied(layer, 8192, 8192, device=device)
        assert found.dtype == dtype
        at_peak = 2 * 8192**3 / spec.matrix_peak(dtype) * 1e6
        # Steps on MI300X, in 8 and 16 bits, reach less of its peak than those of other GPUs.
        assert at_peak < found.latency_us < 2.0 * at_peak


def test_a_tf32_product_is_one_in_bf16_of_twice_the_depth(monkeypatch):
    asked(monkeypatch, matmul=True, cudnn=True)
    wide = multiplied(torch.nn.Linear(4096, 2048), 1024, 4096, model="default")
    half = multiplied(
        torch.nn.Linear(8192, 2048), 1024, 8192, dtype=torch.bfloat16, model="default"
    )
    assert wide.source == half.source == "learned:linear"
    # Steps in f32 and in 16 bits taught slightly different factors.
    assert wide.latency_us == pytest.approx(half.latency_us, rel=0.02)
    # Other kernels: 1.4 on either side.
    assert wide.hi_us == pytest.approx(1.4 * half.hi_us, rel=0.02)


def test_convolutions_and_recurrent_layers_take_f32_where_tf32_is_not_allowed(monkeypatch):
    conv = torch.nn.Conv2d(512, 512, 5, padding=2, bias=False)
    cells = torch.nn.LSTM(512, 512)
    for allowed, dtype in ((True, "tf32"), (False, "f32")):
        asked(monkeypatch, matmul=False, cudnn=allowed)
        found = multiplied(conv, 64, 512, 56, 56)
        assert found.dtype == multiplied(cells, 64, 32, 512).dtype == dtype
        flops, spec = 2 * 64 * 56 * 56 * 512 * 512 * 25, find_device("h100-sxm")
        assert found.latency_us > flops / spec.matrix_peak(dtype) * 1e6
    # Seven tenths of the peak, and the launch.
    assert found.latency_us == pytest.approx(
        flops / (0.7 * spec.matrix_peak("f32")) * 1e6 + spec.floor * 1e6
    )


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="since PyTorch 2.9")
def test_settings_of_either_kind_are_read(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32")
    monkeypatch.setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee")
    allowed = record(TorchProgram(torch.nn.ReLU(), (torch.zeros(8),))).tf32
    assert allowed == {"matmul", "rnn"}


class Uneven(torch.nn.Module):
    """Causal attention with values narrower than queries, as latent attention has them."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, query, value):
        return F.scaled_dot_product_attention(query * self.scale, query, value, is_causal=True)


@pytest.mark.parametrize("framework", ["torch-eager", "torch-compiled"])
def test_values_of_another_width_are_one_kernel_each_way(framework):
    given = tuple(torch.empty(1, 16, 2048, d, dtype=torch.bfloat16) for d in (192, 128))
    module = Uneven().to(torch.bfloat16)
    # cuDNN takes heads up to 128, FlashAttention values as wide as queries.
    found = predict(module, *given, device="h100-sxm", framework=framework, train="sgd", loss="sum")
    one = "scaled_dot_product_attention{} (memory-efficient)"
    attends = [k for k in found.kernels if k.kind == "attention"]
    assert [k.name for k in attends] == [one.format(""), one.format("_backward")]
    # Half of 2,048 squared scores by products of 192 and 128, at 989.4 TFLOP/s at best.
    least = 2 * 16 * 2048**2 / 2 * (192 + 128) / 989.4e12 * 1e6
    # The memory-efficient kernel is twice as slow as FlashAttention 2, on a chip for others.
    assert least < attends[0].latency_us < 12 * least
    # Heads wider than 128: 4.3 times the forward pass.
    assert attends[1].latency_us == pytest.approx(4.3 * attends[0].latency_us, rel=0.01)
    # Two operands, a result and a factor in f32 of each row.
    assert attends[0].bytes == 16 * 2048 * (2 * (192 + 192 + 128 + 128) + 4)
    assert "bmm" not in [k.name for k in found.kernels]
    # Ten megabytes for each tensor, not the 134 of the scores.
    assert found.memory.parts["activations"] < 16 * 2048**2
