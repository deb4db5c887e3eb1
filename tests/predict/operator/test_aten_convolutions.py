"""Times of cuDNN's convolutions against figures by hand, and Inductor's choice of a layout."""

from dataclasses import replace
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from opcast.features.devices.catalogue import find_device  # noqa: E402
from opcast.features.ir.torch.program import TorchProgram  # noqa: E402
from opcast.features.ir.torch.runs import record  # noqa: E402
from opcast.predict.operator.aten_convolutions import (  # noqa: E402
    depthwise_times,
    lays_channels_last,
)
from opcast.predict.operator.aten_prices import AtenPrices, bound_of  # noqa: E402
from opcast.predict.operator.torch_choices import is_one  # noqa: E402
from opcast.predict.operator.torch_price import works_of  # noqa: E402

BATCH, SIDE = 64, 56
#: None of its architecture has more power for a core, and 128 of them are filled by the blocks of
#: 128 results of most cases below.
SPEC = find_device("rtx-4090")


def recorded(*layers, channels, last=False, train=False):
    """What layers launch in f16 on images of some channels; of all a gradient, if it is trained."""
    layout = torch.channels_last if last else torch.contiguous_format
    with torch.device("meta"):
        module = torch.nn.Sequential(*layers).half().to(memory_format=layout)
        x = torch.empty(BATCH, channels, SIDE, SIDE, dtype=torch.float16)
    x = x.to(memory_format=layout).requires_grad_(train)
    options = {"train": "sgd", "loss": "sum"} if train else {}
    return record(TorchProgram(module, (x,), **options))


def times(recording, spec=SPEC, release=""):
    """Seconds of the convolutions, by direction."""
    found = [w for w in works_of(recording, "torch-eager", spec) if w.kind == "convolution"]
    seconds = AtenPrices(spec, None, 1.0, 1.0, release)(found)[0][:, 0] - spec.floor
    return {w.conv["op"]: own for w, own in zip(found, seconds, strict=True)}


def conv(channels, taps, groups=1):
    return torch.nn.Conv2d(channels, channels, taps, padding=taps // 2, groups=groups, bias=False)


def test_images_are_turned_unless_their_channels_lie_last():
    layer = conv(64, 1)
    last = times(recorded(layer, channels=64, last=True))["fwd"]
    moved = 2 * (2 * BATCH * 64 * SIDE * SIDE + 64 * 64)
    # Of two passes over the images, 0.8 beside the convolution (features/operators/fitted.yaml).
    assert last == pytest.approx(moved / (0.85 * SPEC.bandwidth))
    assert times(recorded(layer, channels=64))["fwd"] == pytest.approx(1.8 * last)


def test_groups_fill_tiles_of_32_or_64_columns():
    # Four groups of 48 channels: tiles of 64 hold three quarters. Images with the channels last are
    # transposed, since 48 is no power of two: RegNetX-032 takes as long in both layouts.
    products = 2 * BATCH * SIDE * SIDE * 192 * 48 * 9
    moved = 2 * (2 * BATCH * 192 * SIDE * SIDE + 192 * 48 * 9)
    layer = conv(192, 3, groups=4)
    found = times(recorded(layer, channels=192, last=True))["fwd"]
    turned = 0.8 * moved / (0.85 * SPEC.bandwidth)
    multiplied = products / 0.75 / (0.7 * SPEC.matrix_peak("f16"))
    assert found == pytest.approx(multiplied + turned, rel=1e-3)
    assert found == pytest.approx(times(recorded(layer, channels=192))["fwd"])
    # Eight channels fill a quarter of 32 columns.
    products = 2 * BATCH * SIDE * SIDE * 64 * 8 * 9
    found = times(recorded(conv(64, 3, groups=8), channels=64, last=True))["fwd"]
    assert found == pytest.approx(4 * products / (0.7 * SPEC.matrix_peak("f16")), rel=1e-3)
    # Twelve, which are no power of two, fill 12 of 64.
    products = 2 * BATCH * SIDE * SIDE * 96 * 12 * 9
    turned = 0.8 * 2 * (2 * BATCH * 96 * SIDE * SIDE + 96 * 12 * 9) / (0.85 * SPEC.bandwidth)
    found = times(recorded(conv(96, 3, groups=8), channels=96, last=True))["fwd"]
    multiplied = 64 / 12 * products / (0.7 * SPEC.matrix_peak("f16"))
    assert found == pytest.approx(multiplied + turned, rel=1e-3)


def test_what_goes_beside_products_decides_where_these_are_fast():
    # On an A100 products take 1 / (0.7778 · 312) and 0.0714 / 19.49 ns for 1,000 operations: 0.41
    # of the peak of 16 bits, and 0.54 of that of TF32, in which f32 is multiplied.
    a100 = find_device("a100-sxm-40gb")
    products = 2 * BATCH * SIDE * SIDE * 256 * 256 * 9
    # 3,136 blocks of 128 × 128 results are 29.04 waves of 108, which run as 30.
    products *= 30 * 108 / 3136
    found = times(recorded(conv(256, 3), channels=256, last=True), a100)["fwd"]
    assert found == pytest.approx(products * (4.1208 + 3.6634) * 1e-15, rel=1e-3)
    with torch.device("meta"):
        layer = conv(256, 3).to(memory_format=torch.channels_last)
        x = torch.empty(BATCH, 256, SIDE, SIDE).to(memory_format=torch.channels_last)
    found = times(record(TorchProgram(layer, (x,))), a100)["fwd"]
    assert found == pytest.approx(products * (8.2416 + 3.6634) * 1e-15, rel=1e-3)


@pytest.mark.parametrize(("taps", "waves"), [(1, 108 / 10), (3, 108 / 100)])
def test_few_small_images_leave_multiprocessors_idle(taps, waves):
    # The innermost layers of Stable Diffusion's U-Net: 2 × 8 × 8 rows and 1,280 columns are ten
    # blocks. The sums of nine taps, 11,520 terms, are split in ten parts; those of one tap are not.
    a100 = find_device("a100-sxm-40gb")
    with torch.device("meta"):
        layer = conv(1280, taps).half().to(memory_format=torch.channels_last)
        x = torch.empty(2, 1280, 8, 8).half().to(memory_format=torch.channels_last)
    found = times(record(TorchProgram(layer, (x,))), a100)["fwd"]
    products = 2 * 128 * 1280 * 1280 * taps**2
    assert found == pytest.approx(products * waves * (4.1208 + 3.6634) * 1e-15, rel=1e-3)


def test_gradients_of_few_grouped_filters_have_no_fast_kernels():
    few = times(recorded(conv(64, 3, groups=4), channels=64, last=True, train=True))
    # At 4 % of the vector units, with 16 channels as 32: regnets train slower by several times.
    products = 2 * BATCH * SIDE * SIDE * 64 * 16 * 9
    assert few["bwd_weights"] == pytest.approx(
        2 * products / (0.04 * SPEC.vector_peak("f32")), rel=1e-3
    )
    turned = times(recorded(conv(64, 3, groups=4), channels=64, train=True))
    assert turned["bwd_weights"] < few["bwd_weights"] / 5


@pytest.mark.parametrize(
    ("groups", "channels", "release", "fast"),
    [
        # Measured on an RTX 3090 (published-torch pack), channels last over NCHW: RegNet-Z 005 (4
        # channels) 4.6 by PyTorch 1.11 and 0.75 by 1.12, Visformer (8 × 48) 3.2 and 1.03, RegNet-Y
        # 040 (17 × 64) 3.0 and 3.4, ResNeXt-50 (32 × 4) 0.78 and 0.66.
        (104, 4, "1.11", False),
        (104, 4, "1.12", True),
        (8, 48, "1.11", False),
        (8, 48, "", True),
        (17, 64, "", False),
        (32, 4, "1.11", True),
        (32, 12, "", False),
    ],
)
def test_newer_libraries_serve_more_groups_at_once(groups, channels, release, fast):
    made = recorded(
        conv(groups * channels, 3, groups), channels=groups * channels, last=True, train=True
    )
    found = times(made, release=release)
    assert (found["bwd_weights"] < 1.5 * found["bwd_data"]) == fast


def test_gradients_of_depthwise_filters_go_twice_over_their_operands_by_cudnn():
    spec, both = find_device("rtx-3090"), {}
    found = works_of(recorded(conv(64, 3, groups=64), channels=64), "torch-eager", spec)
    (work,) = (w for w in found if w.kind == "convolution")
    for op in ("fwd", "bwd_weights"):
        own = replace(work, conv={**work.conv, "op": op})
        both[op] = (depthwise_times(own, spec)[0] - spec.floor) * spec.bandwidth / own.bytes
    # Over the time of two images, which no cache holds: a forward pass reads one and writes one.
    assert both["fwd"] > 1.0 and both["bwd_weights"] > 2.0
    assert both["bwd_weights"] > 1.5 * both["fwd"]


def test_batch_norms_in_training_have_a_block_for_each_channel():
    def norms(channels, **how):
        # As many bytes whatever the channels are.
        with torch.device("meta"):
            own = torch.empty(BATCH, channels, 2048 // channels, 64, dtype=torch.float16)
            module = torch.nn.BatchNorm2d(channels).half()
        last = how.pop("last", False)
        own = own.to(memory_format=torch.channels_last) if last else own
        own.requires_grad_(True)
        options = {"train": "sgd", "loss": "sum"} if how.pop("train", True) else {}
        module.train(bool(options))
        calls = works_of(record(TorchProgram(module, (own,), **options)), "torch-eager", spec)
        found = [w for w in calls if "batch_norm" in w.name]
        return found, AtenPrices(spec, None, 1.0, 1.0)(found)[0][:, 0]

    spec = find_device("rtx-3090")
    found, few = norms(32)
    # 512 threads of a block have 1.4 loads of 2 bytes under way for 480 cycles: 5 GB/s.
    block = 512 * 1.4 * 2 / (480 / spec.clock_hz)
    assert 4.5e9 < block < 5.5e9
    assert few == pytest.approx([w.bytes / (32 * block) for w in found])
    assert few[0] / found[0].bytes == pytest.approx(few[1] / found[1].bytes)
    # Enough channels fill the chip; other kernels split a channel, or have its moments already.
    for more in (norms(1024), norms(32, last=True), norms(32, train=False)):
        assert more[1][0] < few[0] / 4


def test_depthwise_filters_without_a_kernel_of_cudnn_are_slow_with_channels_last():
    # ConvMixer-1024/20 with 9 x 9 filters takes 2.0 s for 1,024 images of 16 x 16 with the channels
    # last, and 1.0 s otherwise (published-torch pack, RTX 3090).
    usual, seven, odd = (
        [times(recorded(conv(64, k, groups=64), channels=64, last=last))["fwd"] for last in (0, 1)]
        for k in (5, 7, 9)
    )
    assert usual[1] == pytest.approx(usual[0])
    assert odd[1] > 2 * odd[0]
    # PyTorch's own kernel of NCHW loops over the taps, 5 a cycle of each multiprocessor.
    products = BATCH * 64 * SIDE * SIDE * 49
    looped = products / (5 * SPEC.core_count * SPEC.clock_hz)
    assert seven[1] < looped / 2 and looped < seven[0] < 1.3 * looped
    # It takes 12.4 s with cuDNN 8.2, which PyTorch 1.11 comes with: 83 images a second for 391.
    layer = recorded(conv(64, 9, groups=64), channels=64, last=True)
    old, new = (times(layer, release=release)["fwd"] for release in ("1.11", "1.12"))
    assert new == odd[1] and 4 * new < old < 10 * new


def test_images_are_laid_as_the_filters_of_convolutions_and_group_norms_want_them():
    with torch.device("meta"):
        x = torch.empty(2, 8, 16, 16)
        layers = torch.nn.Sequential(conv(8, 3), torch.nn.GroupNorm(2, 8), conv(8, 3))
    layers.to(memory_format=torch.channels_last)
    specs = SPEC, find_device("cpu-i9-10940x")
    one_of = {s.platform: partial(is_one, s, framework="torch-eager") for s in specs}
    for last in (True, False):
        own = x.to(memory_format=torch.channels_last) if last else x
        program = TorchProgram(layers, (own,))
        found = record(program, one_of["gpu"]).calls
        laid = {c.name: c.inputs[0].channels_last for c in found}
        # A group norm's are turned before it and after (group_norm.cpp), as is an image in NCHW.
        names = ["convolution", "clone", "native_group_norm", "clone", "convolution"]
        expected = names if last else ["clone", *names]
        assert [c.name.removeprefix("aten.") for c in found] == expected
        assert laid["aten.convolution"] and not laid["aten.native_group_norm"]
        # A CPU's takes them as they lie.
        found = record(program, one_of["cpu"]).calls
        names = ["convolution", "native_group_norm", "convolution"]
        expected = names if last else ["clone", *names]
        assert [c.name.removeprefix("aten.") for c in found] == expected


@pytest.mark.parametrize(
    ("layers", "last"),
    [
        ([conv(64, 3), conv(64, 1)], True),
        # Grouped ones take 1.358 times as long, others 0.823: a third of the products suffices.
        ([conv(64, 3, groups=2), conv(64, 1)], False),
        ([conv(64, 3, groups=64), conv(64, 3)], True),
        ([torch.nn.ReLU()], False),
    ],
)
def test_inductor_chooses_the_layout_by_the_kinds_of_convolutions(layers, last):
    recording = recorded(*layers, channels=64)
    assert lays_channels_last(recording.calls) is last
    found = [w for w in works_of(recording, "torch-compiled", SPEC) if w.kind == "convolution"]
    assert all(w.channels_last is last for w in found)


def test_kernels_say_what_bounds_them():
    recording = recorded(conv(256, 3), torch.nn.ReLU(), channels=256, last=True)
    bounds = [bound_of(w, SPEC) for w in works_of(recording, "torch-eager", SPEC)]
    assert bounds == ["compute", "memory"]
    small = torch.empty(8, 8, device="meta")
    calls = record(TorchProgram(torch.nn.ReLU(), (small,)))
    assert [bound_of(w, SPEC) for w in works_of(calls, "torch-eager", SPEC)] == ["latency"]
