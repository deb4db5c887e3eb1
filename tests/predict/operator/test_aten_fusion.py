"""What ``torch.compile`` makes one kernel of: reductions, rotations, joints and constants."""

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from opcast.features.ir.torch.program import TorchProgram  # noqa: E402
from opcast.features.ir.torch.runs import record  # noqa: E402
from opcast.predict.operator.aten_fusion import fused  # noqa: E402

from ...support.torch_models import Called  # noqa: E402


def compiled(function, *shapes, dtype=torch.bfloat16):
    inputs = tuple(torch.empty(s, dtype=dtype, device="meta") for s in shapes)
    return fused(record(TorchProgram(Called(function), inputs)))


def test_a_norm_written_out_is_one_kernel():
    def norm(x, y, weight):
        wide = (x + y).float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    # Inductor's triton_red_fused__to_copy_add_mean_mul_pow_rsqrt: reads two, writes one.
    (kernel,) = compiled(norm, (512, 1024), (512, 1024), (1024,))
    assert kernel.bytes == 2 * (3 * 512 * 1024 + 1024) and kernel.launches == 1


def test_sums_of_sums_wait_for_them():
    # The second sum reads what all blocks of the first one wrote.
    first, second = compiled(lambda x: (x * x).sum(-1).sum(), (512, 1024), dtype=torch.float32)
    assert first.bytes == 4 * (512 * 1024 + 512) and second.bytes == 4 * (512 + 1)


def test_rotations_of_queries_are_one_kernel():
    def rotate(q, cos, sin):
        half = q.shape[-1] // 2
        return q * cos + torch.cat((-q[..., half:], q[..., :half]), -1) * sin

    (kernel,) = compiled(rotate, (8, 32, 128), (32, 128), (32, 128))
    assert kernel.bytes == 2 * (2 * 8 * 32 * 128 + 2 * 32 * 128)


def test_two_chains_that_meet_are_one_kernel_unless_a_product_lies_between():
    (kernel,) = compiled(lambda x, y: x.sin() * y.cos(), (64, 64), (64, 64))
    assert kernel.bytes == 2 * 3 * 64 * 64
    names = [w.name for w in compiled(lambda x: (x.sin() @ x) * x.cos().sin(), (64, 64))]
    assert names == ["sin", "mm", "cos+sin+mul"]
    names = [w.name for w in compiled(lambda x: (x.sin() @ x) + x.sin(), (64, 64))]
    assert names == ["sin", "mm", "sin+add"]
    # The chain is read by the product, and by what reads the product's result.
    assert [w.name for w in compiled(lambda x: x.sin() @ x + x.sin().cos(), (64, 64))][1] == "mm"
    waits = compiled(lambda x: (lambda s: (s @ x) + s.cos())(x.sin()), (64, 64))
    assert [w.name for w in waits][1] == "mm" and len(waits) == 3


def test_values_made_of_nothing_are_made_by_their_readers():
    def masked(x):
        at = torch.arange(256, device=x.device)
        return torch.where(at[:, None] >= at, x, torch.zeros((), dtype=x.dtype, device=x.device))

    (kernel,) = compiled(masked, (8, 256, 256))
    assert kernel.bytes == 2 * 2 * 8 * 256 * 256
    # What a sum of other kernels is added to is in memory.
    index = torch.zeros(64, dtype=torch.long, device="meta")
    made = compiled(lambda x: torch.zeros_like(x[:32]).index_add(0, index, x), (64, 8))
    assert made[0].name == "zeros_like" and made[0].bytes == 2 * 32 * 8


def test_only_images_of_two_dimensions_are_laid_with_the_channels_last():
    flat = torch.nn.Conv1d(256, 256, 31, padding=15, groups=256)
    square = torch.nn.Conv2d(256, 256, 3)
    for net, shape, last in ((flat, (4, 256, 500), False), (square, (4, 256, 32, 32), True)):
        x = torch.empty(shape, device="meta")
        (conv,) = fused(record(TorchProgram(net.to("meta"), (x,))))
        assert (conv.kind, conv.channels_last) == ("convolution", last)


def test_what_an_operator_only_writes_is_not_read():
    def kept(cache, x):
        cache[:, 4:8] = x
        return F.gelu(cache)

    written, read = record(
        TorchProgram(
            Called(kept),
            (torch.empty(2, 16, 64, device="meta"), torch.empty(2, 4, 64, device="meta")),
        )
    ).calls
    assert written.name == "aten.copy_" and [t.bytes for t in written.inputs] == [4 * 2 * 4 * 64]
    assert [t.memory for t in written.outputs] == [t.memory for t in read.inputs]


def test_readers_compute_what_has_few_sources_themselves():
    # As in gMLP: two halves of an activation are read by kernels of their own. Neither the
    # activation nor its passes exist; each kernel reads its half of the product.
    def halves(x, weight):
        u, v = F.gelu(x @ weight).chunk(2, -1)
        return u * (F.layer_norm(v, (64,)) @ weight[:64, :64])

    product, norm, inner, gate = compiled(halves, (512, 128), (128, 128))
    assert (product.name, inner.name) == ("mm", "mm")
    assert norm.bytes == 2 * (512 * 64 + 512 * 64)
    assert gate.bytes == 2 * (512 * 64 + 512 * 64 + 512 * 64)


def test_what_has_more_than_four_sources_is_written_for_several_readers():
    def both(*x):
        total = sum(x[1:], x[0])
        return total[:32].cos(), total[32:].sin()

    # Each reader computes the sum of its half: it reads as many halves, and writes one.
    few = [w.bytes for w in compiled(both, *[(64, 64)] * 4)]
    assert few == [2 * 5 * 32 * 64] * 2
    many = [w.bytes for w in compiled(both, *[(64, 64)] * 5)]
    assert many == [2 * 6 * 64 * 64, 2 * 2 * 32 * 64, 2 * 2 * 32 * 64]


def test_more_than_eight_tensors_are_put_together_by_copies():
    # As in DenseNet: results of convolutions are copied, those of generated kernels are written in
    # their place.
    def joined(count):
        def dense(*x):
            return torch.cat([x[0].cos(), *(a @ x[0] for a in x[1:])]).relu()

        return compiled(dense, *[(64, 64)] * count)

    names = [w.name for w in joined(8)]
    assert "cat" not in names and names.count("mm") == 7
    found = {w.name: w.bytes for w in joined(9)}
    assert found["cat"] == 2 * 2 * 8 * 64 * 64 and found["relu"] == 2 * 2 * 9 * 64 * 64


def test_parts_of_images_are_copied_for_convolutions():
    class Split(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one = torch.nn.Conv2d(64, 64, 3, padding=1, bias=False)
            self.two = torch.nn.Conv2d(64, 64, 5, padding=2, bias=False)

        def forward(self, x):
            a, b = x.relu().split(64, 1)
            return self.one(a), self.two(b)

    for layout in (torch.contiguous_format, torch.channels_last):
        with torch.device("meta"):
            net = Split().half().to(memory_format=layout)
            x = torch.empty(8, 128, 32, 32, dtype=torch.float16).to(memory_format=layout)
        recording = record(TorchProgram(net, (x,)))
        names = ["aten.relu", "contiguous", "aten.convolution", "contiguous", "aten.convolution"]
        assert [c.name for c in recording.calls] == names
        copies = [w for w in fused(recording) if w.name == "contiguous"]
        assert [w.bytes for w in copies] == [2 * 2 * 8 * 64 * 32 * 32] * 2


def test_a_kernel_reads_every_slice_of_a_tensor_that_it_adds_up():
    (kernel,) = compiled(lambda x: sum(x[:, t] for t in range(16)), (8, 16, 64))
    assert kernel.bytes == 2 * 8 * (16 + 1) * 64
    # Slices that overlap are no more than the tensor.
    (stencil,) = compiled(lambda x: 2 * x[1:-1] - x[2:] - x[:-2], (1026,))
    assert stencil.bytes == 2 * (1026 + 1024)
