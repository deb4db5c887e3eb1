"""No answer about an operator of PyTorch, and no end of its interval, below the least it takes.

What operators must multiply comes from PyTorch's own counter of FLOPs or from formulas written out
here, what they must move from their tensors.
"""

import random
from functools import cache
from math import prod

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from opcast.common.errors import ProgramError  # noqa: E402
from opcast.features.devices.catalogue import find_device  # noqa: E402
from opcast.features.ir.torch import record as recording  # noqa: E402
from opcast.features.ir.torch import reductions, runs, shapes  # noqa: E402, F401
from opcast.features.ir.torch.program import TorchProgram  # noqa: E402
from opcast.features.ir.torch.table import TABLE  # noqa: E402
from opcast.predict.operator.aten_prices import least_times, raised  # noqa: E402
from opcast.predict.operator.aten_products import product_of  # noqa: E402
from opcast.predict.operator.aten_work import works  # noqa: E402
from opcast.predict.operator.torch_framework import operator_bundle, price  # noqa: E402

DEVICES = ("h100-sxm", "a100-sxm-80gb", "rtx-4090", "mi300x", "b200", "v100-sxm", "cpu-i9-10940x")
FRAMEWORKS = ("torch-eager", "torch-compiled")
#: Operators that read only what an index chooses of an operand, or nothing of it.
UNLIKE = ("embedding", "index", "gather", "zeros_like", "ones_like", "full_like", "rand_like")
#: Operators that write by an index of their own operands' shape.
BY_INDEX = {"scatter", "scatter_add", "scatter_reduce", "masked_scatter", "put", "take"}
HALF, SINGLE = torch.bfloat16, torch.float32
FP8, BYTE = torch.float8_e4m3fn, torch.int8


def recorded(run, *inputs):
    """What a function launches for tensors of the given shapes and types."""
    log = recording.Recorder(lambda _: True)
    with FakeTensorMode(), recording.watching(log):
        log.on = False
        tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in inputs]
        log.on = True
        with FlopCounterMode(display=False) as counter:
            run(*tensors)
    return log.recording, counter.get_total_flops()


@cache
def shipped():
    """The model of operators, read once."""
    return operator_bundle("default")


def floor_us(flops, moved, spec, rate):
    """Arithmetic at the peak, and bytes at the rates of main memory and of the caches."""
    near = min(moved, spec.cache_bytes)
    fastest = max(level.bandwidth for level in spec.levels)
    bytes_s = (moved - near) / spec.bandwidth + near / fastest
    return 1e6 * max(flops / spec.matrix_peak(rate), bytes_s)


def hold(found, flops, moved, rate, devices=DEVICES):
    """Assert that no answer on any device is below the floor."""
    for device in devices:
        spec = find_device(device)
        for framework in FRAMEWORKS:
            said = price(found, spec, framework, shipped())
            least = floor_us(flops, moved, spec, rate) * (1 - 1e-9)
            parts = sum(o.lo_us for o in said.operators)
            assert min(said.lo_us, parts) >= 0.999 * least, (device, framework, said)


def transposed(function):
    """A function of a product whose second operand is the transpose of the one given."""
    return lambda a, b, *rest: function(a, b.transpose(-2, -1), *rest)


def scaled(a, b, x, y):
    return torch._scaled_mm(a, b, x, y, out_dtype=HALF)


def scaled_experts(a, b, x, y, ends):
    return torch._scaled_grouped_mm(a, b, x, y, offs=ends, out_dtype=HALF)


def experts(a, b, ends):
    return torch._grouped_mm(a, b, offs=ends)


ONE, ENDS = ((1, 1), SINGLE), ((16,), torch.int32)
#: Function, operands, FLOPs and the HLO type of the units that multiply.
PRODUCTS = {
    "scaled": (
        transposed(scaled),
        [((8192, 4096), FP8), ((2048, 4096), FP8), ONE, ONE],
        2 * 8192 * 4096 * 2048,
        "f8e4m3fn",
    ),
    "integers": (
        torch._int_mm,
        [((8192, 4096), BYTE), ((4096, 2048), BYTE)],
        2 * 8192 * 4096 * 2048,
        "s8",
    ),
    "experts": (
        experts,
        [((8192, 2048), HALF), ((16, 2048, 1024), HALF), ENDS],
        2 * 8192 * 2048 * 1024,
        "bf16",
    ),
    "gradient of experts": (
        experts,
        [((2048, 8192), HALF), ((8192, 1024), HALF), ENDS],
        2 * 8192 * 2048 * 1024,
        "bf16",
    ),
    "scaled experts": (
        transposed(scaled_experts),
        [
            *(((8192, 2048), FP8), ((16, 1024, 2048), FP8), ((8192,), SINGLE)),
            *(((16, 1024), SINGLE), ENDS),
        ],
        2 * 8192 * 2048 * 1024,
        "f8e4m3fn",
    ),
    "weights of 8 bits": (
        torch.ops.aten._weight_int8pack_mm,
        [((2048, 4096), HALF), ((4096, 4096), BYTE), ((4096,), HALF)],
        2 * 2048 * 4096 * 4096,
        "bf16",
    ),
    "sum of products": (
        lambda a, b, c: torch.addbmm(c, a, b),
        [((8, 512, 512), HALF), ((8, 512, 512), HALF), ((512, 512), HALF)],
        2 * 8 * 512**3,
        "bf16",
    ),
    "in place": (
        lambda a, b, c: c.addmm_(a, b),
        [((4096, 4096), HALF), ((4096, 4096), HALF), ((4096, 4096), HALF)],
        2 * 4096**3,
        "bf16",
    ),
    "bilinear": (
        torch.nn.functional.bilinear,
        [((1024, 256), HALF), ((1024, 128), HALF), ((64, 256, 128), HALF)],
        2 * 1024 * 256 * 128 * 64,
        "bf16",
    ),
    "complex": (
        torch.mm,
        [((1024, 1024), torch.complex64), ((1024, 1024), torch.complex64)],
        8 * 1024**3,
        "f32",
    ),
    "double": (torch.mm, [((2048, 2048), torch.float64)] * 2, 2 * 2048**3, "f64"),
    "distances": (torch.cdist, [((4096, 256), SINGLE)] * 2, 2 * 4096**2 * 256, "f32"),
    "over time": (
        lambda x, w, b: torch.conv_tbc(x, w, b, 1),
        [((512, 64, 256), HALF), ((3, 256, 512), HALF), ((512,), HALF)],
        2 * 512 * 64 * 512 * 3 * 256,
        "bf16",
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_every_operator_that_multiplies_is_a_product(name):
    run, inputs, flops, rate = PRODUCTS[name]
    found, _ = recorded(run, *inputs)
    moved = sum(prod(shape) * dtype.itemsize for shape, dtype in inputs)
    narrow = rate == "f8e4m3fn"
    without = ("a100-sxm-80gb", "v100-sxm", "cpu-i9-10940x")
    own = [d for d in DEVICES if not narrow or d not in without]
    hold(found, flops, moved, rate, own)


def test_products_of_eight_bits_need_units_for_them():
    run, inputs, _, _ = PRODUCTS["scaled"]
    with pytest.raises(ProgramError, match="a100-sxm-80gb has none"):
        price(recorded(run, *inputs)[0], find_device("a100-sxm-80gb"), "torch-eager", None)


def test_products_of_eight_bits_take_half_of_the_time_of_sixteen():
    spec, bundle = find_device("h100-sxm"), shipped()
    sizes = [(8192, 8192), (8192, 8192)]
    narrow, _ = recorded(transposed(scaled), *[(s, FP8) for s in sizes], ONE, ONE)
    wide, _ = recorded(torch.mm, *[(s, HALF) for s in sizes])
    (own,) = price(narrow, spec, "torch-eager", bundle).operators
    (other,) = price(wide, spec, "torch-eager", bundle).operators
    assert own.latency_us == pytest.approx(other.latency_us / 2, rel=1e-3)
    assert (own.kind, own.dtype, own.shape) == ("product", "fp8", (1, 8192, 8192, 8192))


@pytest.mark.parametrize(("tokens", "busy"), [(4, 4), (32, 28), (8192, 128)])
def test_experts_without_tokens_are_not_read(tokens, busy):
    found, _ = recorded(experts, ((tokens, 64), HALF), ((128, 64, 32), HALF), ((128,), torch.int32))
    (call,) = found.calls
    # Distinct of 128 experts that so many random draws meet: 128 (1 - (127 / 128)^tokens).
    assert product_of(call).shape[0] == busy
    assert product_of(call).unread == 2 * 64 * 32 * (128 - busy)


def test_a_layer_of_another_library_is_known_by_its_shapes():
    torch.library.define("opcasttest::linear4", "(Tensor x, Tensor w, Tensor s) -> Tensor")
    torch.library.define("opcasttest::gate", "(Tensor x, Tensor y) -> Tensor")
    torch.library.register_fake(
        "opcasttest::linear4", lambda x, w, s: x.new_empty(*x.shape[:-1], s.shape[-1])
    )
    torch.library.register_fake("opcasttest::gate", lambda x, y: torch.empty_like(x))
    own = torch.ops.opcasttest
    packed = [((4, 64, 4096), HALF), ((4096, 11008 // 8), torch.int32), ((32, 11008), HALF)]
    found, _ = recorded(own.linear4, *packed)
    assert product_of(found.calls[0]) == ((1, 256, 11008, 4096), "int4_wo", 1, 1, 0.0)
    hold(found, 2 * 256 * 11008 * 4096, 0, "bf16")
    found, _ = recorded(own.gate, ((64, 4096), HALF), ((64, 4096), HALF))
    assert product_of(found.calls[0]) is None


ROWS, COLUMNS, LONG = ((2000, 256), SINGLE), ((256, 2000), SINGLE), torch.int64
MANY, SOURCE = ((40000,), LONG), ((40000, 256), SINGLE)
FEW = ((3, 256), SINGLE)
TABLE_BYTES, SOURCE_BYTES, INDEX_BYTES = 4 * 2000 * 256, 4 * 40000 * 256, 8 * 40000
#: Function that writes by an index, operands, and bytes of its kernels: sources and indices are
#: read, what is added to is read and written, and what is not in place is copied first.
WRITES = {
    "sums in place": (
        lambda o, i, s: o.index_add_(0, i, s),
        [ROWS, MANY, SOURCE],
        [INDEX_BYTES + SOURCE_BYTES + 2 * TABLE_BYTES],
    ),
    "sums": (
        lambda o, i, s: o.index_add(0, i, s),
        [ROWS, MANY, SOURCE],
        [2 * TABLE_BYTES, INDEX_BYTES + SOURCE_BYTES + 2 * TABLE_BYTES],
    ),
    # 4 columns of 256 rows, each element in a sector of 32 bytes of its own.
    "sums of columns": (
        lambda o, i, s: o.index_add_(1, i, s),
        [COLUMNS, ((4,), LONG), ((256, 4), SINGLE)],
        [8 * 4 + 4 * 256 * 4 + 2 * 32 * 256 * 4],
    ),
    "largest": (
        lambda o, i, s: o.index_reduce_(0, i, s, "amax"),
        [ROWS, MANY, SOURCE],
        [INDEX_BYTES + SOURCE_BYTES + 2 * TABLE_BYTES],
    ),
    # Three rows of a cache, whose others stay as they are.
    "rows": (
        lambda o, i, s: o.index_copy_(0, i, s),
        [ROWS, ((3,), LONG), FEW],
        [8 * 3 + 2 * 4 * 3 * 256],
    ),
    "filled": (
        lambda o, i: o.index_fill_(0, i, 0.0),
        [ROWS, ((3,), LONG)],
        [8 * 3 + 4 * 3 * 256],
    ),
    "reduced": (
        lambda o, i, s: o.scatter_reduce_(0, i, s, "sum"),
        [ROWS, ((2000, 256), LONG), ROWS],
        [8 * 2000 * 256 + TABLE_BYTES + 2 * TABLE_BYTES],
    ),
    "one value": (
        lambda o, i: o.scatter_(0, i, 1.0),
        [ROWS, ((3, 256), LONG)],
        [8 * 3 * 256 + 4 * 3 * 256],
    ),
    # A scan of the mask, of 8 bytes an element, which the choice reads with the table.
    "masked": (
        lambda o, m, s: o.masked_scatter_(m, s),
        [ROWS, ((2000, 256), torch.bool), ROWS],
        [(1 + 8) * 2000 * 256, (1 + 8) * 2000 * 256 + 2 * TABLE_BYTES + TABLE_BYTES],
    ),
    "anywhere": (
        lambda o, i, s: o.put_(i, s, accumulate=True),
        [ROWS, ((100,), LONG), ((100,), SINGLE)],
        [8 * 100 + 4 * 100 + 2 * 32 * 100],
    ),
    "from anywhere": (
        torch.take,
        [ROWS, ((100,), LONG)],
        [4 * 100 + 8 * 100 + 32 * 100],
    ),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_an_index_writes_is_read_first(name):
    run, inputs, moved = WRITES[name]
    found, _ = recorded(run, *inputs)
    assert [w.bytes for w in works(found.calls)] == moved
    hold(found, 0, sum(moved), "f32", ("h100-sxm", "cpu-i9-10940x"))


def test_a_long_source_of_sums_takes_its_bytes():
    sizes = ((200000, 256), SINGLE), ((4000000,), LONG), ((4000000, 256), SINGLE)
    found, _ = recorded(lambda o, i, s: o.index_add_(0, i, s), *sizes)
    said = price(found, find_device("h100-sxm"), "torch-eager", shipped())
    assert said.lo_us > 1e6 * 4 * 4000000 * 256 / 3.35e12


def drawn(draw):
    """A random operator that PyTorch counts the FLOPs of, and its operands."""
    size = lambda most=2048: draw.choice([1, 3, 8, 17, 64, 100, 256, 777, 1024, most])  # noqa: E731
    dtype = draw.choice([HALF, torch.float16, SINGLE])
    b, m, n, k = draw.choice([1, 2, 5, 16]), size(), size(), size(4096)
    aten = torch.ops.aten
    image = size(64)
    convolution = [((b, 8 * draw.choice([1, 4, 16]), 33, 40), dtype), ((16 * (1 + m % 9),), dtype)]
    channels = convolution[0][0][1]
    filters = ((convolution[1][0][0], channels, 3, 3), dtype)
    heads = (b, draw.choice([1, 8]), 1 + image, draw.choice([32, 64, 128]))
    return dtype, draw.choice(
        [
            (aten.mm, [((m, k), dtype), ((k, n), dtype)]),
            (aten.addmm, [((n,), dtype), ((m, k), dtype), ((k, n), dtype)]),
            (aten.bmm, [((b, m, k), dtype), ((b, k, n), dtype)]),
            (
                aten.baddbmm,
                [((b, m, n), dtype), ((b, m, k), dtype), ((b, k, n), dtype)],
            ),
            (torch.nn.functional.linear, [((b, m, k), dtype), ((n, k), dtype)]),
            (torch.nn.functional.conv2d, [convolution[0], filters]),
            (torch.nn.functional.scaled_dot_product_attention, [(heads, dtype)] * 3),
        ]
    )


@pytest.mark.parametrize("seed", range(24))
def test_random_products_are_above_their_roofline(seed):
    dtype, (run, inputs) = drawn(random.Random(seed))
    found, flops = recorded(run, *inputs)
    # Winograd's convolutions multiply less.
    flops = 0 if run is torch.nn.functional.conv2d else flops
    rate = {HALF: "bf16", torch.float16: "f16", SINGLE: "f32"}[dtype]
    if found.calls[0].name.endswith("attention") and dtype == SINGLE:
        rate = "tf32"
    moved = sum(prod(shape) * dtype.itemsize for shape, dtype in inputs)
    hold(found, flops, moved, rate, random.Random(seed).sample(DEVICES, 2))


def generic(operator, shape, dtype):
    """Arguments of an operator by its schema; ``None`` if there is a type that is not drawn."""
    plain = {"int": 1, "float": 0.5, "bool": False, "number": 2, "Scalar": 2, "str": "none"}
    args = []
    for own in operator._schema.arguments:
        kind = str(own.type)
        if own.has_default_value():
            break
        if kind == "Tensor":
            own_dtype = {"index": torch.int64, "mask": torch.bool}.get(own.name, dtype)
            args.append(torch.empty(shape, dtype=own_dtype))
        elif kind.startswith("List[int]"):
            args.append([1] * len(shape))
        elif kind.startswith("Optional"):
            args.append(None)
        elif kind in plain:
            args.append(plain[kind])
        else:
            return None
    return args


@pytest.mark.parametrize("dtype", [HALF, SINGLE])
def test_every_operator_with_a_translation_moves_its_tensors(dtype):
    """The operators that take tensors of one shape, of 4 M elements each, and write as many."""
    calls, moved = [], []
    for name in sorted({name.split(".")[1] for name in TABLE} - set(UNLIKE) | BY_INDEX):
        packet = getattr(torch.ops.aten, name, None)
        for overload in packet.overloads() if packet else ():
            operator = getattr(packet, overload)
            log = recording.Recorder(lambda _: True)
            with FakeTensorMode(), recording.watching(log):
                log.on = False
                args = generic(operator, (64, 256, 256), dtype)
                log.on = True
                try:
                    out = operator(*args) if args else None
                except Exception:
                    continue
            if isinstance(out, torch.Tensor) and len(log.recording.calls) == 1:
                calls += log.recording.calls
                tensors = [*(a for a in args if isinstance(a, torch.Tensor)), out]
                moved.append(sum(t.numel() * t.element_size() for t in tensors))
    assert len(calls) > 100
    for spec in map(find_device, ("h100-sxm", "cpu-i9-10940x")):
        priced = iter(price(recording.Recording(calls), spec, "torch-eager", shipped()).operators)
        for call, size in zip(calls, moved, strict=True):
            lo = sum(next(priced).lo_us for _ in works([call]))
            assert lo >= 0.999 * floor_us(0, size, spec, "f32"), call.name


def test_an_upper_bound_keeps_its_distance_from_an_estimate_that_is_raised():
    times = np.array([[2.0, 1.0, 3.0], [6.0, 5.0, 9.0]])
    assert raised(times, np.array([4.0, 4.0])).tolist() == [[4.0, 4.0, 6.0], [6.0, 5.0, 9.0]]


def test_recurrent_steps_may_find_their_weights_in_the_cache():
    # 6.3 MB of weights in 72 MB of cache, read 512 times.
    spec = find_device("rtx-4090")
    gru = torch.nn.GRU(1024, 1024, batch_first=True, device="meta", dtype=torch.half)
    x = torch.empty(32, 512, 1024, device="meta", dtype=torch.half)
    found = works(runs.record(TorchProgram(gru, (x,))).calls)
    (steps,) = [w for w in found if w.name == "cudnn_rnn steps"]
    read_anew = steps.bytes / spec.bandwidth
    assert steps.bytes > 3e9
    assert least_times([steps], spec)[0] < 0.4 * read_anew
    # A cache of 4 MB holds no 6 MB.
    assert least_times([steps], find_device("t4"))[0] > 0.7 * steps.bytes / 320e9
