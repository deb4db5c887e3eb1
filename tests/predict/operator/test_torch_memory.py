"""Peak memory of programs that PyTorch runs: by hand, and against published runs."""

import os
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from opcast.features.devices.catalogue import find_device  # noqa: E402
from opcast.features.ir.torch.program import TorchProgram  # noqa: E402
from opcast.features.ir.torch.storages import (  # noqa: E402
    ACTIVATIONS,
    INPUTS,
    WEIGHTS,
    Storage,
    StorageLog,
    log_storages,
)
from opcast.predict.api import predict  # noqa: E402
from opcast.predict.operator.torch_framework import TorchPredictor  # noqa: E402
from opcast.predict.operator.torch_memory import (  # noqa: E402
    compiled_storages,
    torch_memory,
)

from ...support.cases import later  # noqa: E402
from ...support.torch_sam import ImageEncoder  # noqa: E402

PUBLISHED = (
    Path(os.environ.get("OPCAST_PUBLISHED_DATA", Path(__file__).parents[4] / "shared" / "data"))
    / "published-torch"
)
MIB = 2**20
GPU = find_device("a100-sxm-80gb")
#: cuBLAS's ``:4096:2:16:8``.
BLAS = (2 * 4096 + 8 * 16) * 1024


def log(*sizes, **options):
    """Weights, an input and tensors that are made one after the other and kept."""
    kinds = (WEIGHTS, INPUTS, *([ACTIVATIONS] * (len(sizes) - 2)))
    held = [Storage(n * MIB, kind, "net.py:3") for n, kind in zip(sizes, kinds, strict=True)]
    return StorageLog(held, list(range(len(held))), **options)


def test_a_replay_counts_blocks_segments_and_the_context():
    found = torch_memory(log(100, 30, 40, 8, products=True), GPU)
    assert found.allocated_bytes == 178 * MIB + BLAS
    # The workspace and the 8 MiB share a segment of 20 MiB.
    assert found.reserved_bytes == 190 * MIB
    assert found.peak_bytes == found.reserved_bytes + found.context_bytes
    assert 0.3 * 2**30 < found.context_bytes < 0.6 * 2**30
    assert found.lo_bytes >= found.parts[WEIGHTS] == 100 * MIB
    assert found.fits and found.out_of_memory < 1e-6
    assert found.holders[0].bytes == 48 * MIB


def test_the_chance_of_running_out_is_a_half_at_the_capacity():
    own = log(10_000, 10, *([1000] * 20), batch=20)
    needed = torch_memory(own, GPU).needed_bytes
    # 98.5 % of the data sheet are a process's.
    exact = replace(GPU, memory_bytes=needed / 0.985 * 1.0001)
    assert torch_memory(own, exact).out_of_memory == pytest.approx(0.5, abs=0.01)
    short = torch_memory(own, replace(GPU, memory_bytes=0.7 * exact.memory_bytes))
    assert not short.fits and short.out_of_memory > 0.99
    # What scales with the batch are 20,010 MiB, of which the capacity leaves some 10,950.
    assert short.change == "a batch of 10 instead of 20"
    assert torch_memory(own, replace(GPU, memory_bytes=0.0)).out_of_memory is None


def test_freed_segments_are_given_back_before_memory_runs_out():
    # 30 MiB are freed, then 40 are wanted: kept, unless the device is small.
    own = log(100, 30, 30, 40)
    own.events[3:3] = [~2]
    found = torch_memory(own, GPU)
    assert found.reserved_bytes == 200 * MIB
    assert found.needed_bytes == found.context_bytes + 170 * MIB


@pytest.mark.parametrize(("device", "size"), [("h100-sxm", 32), ("mi300x", 128), ("mi250x", 32)])
def test_workspaces_are_the_chips(device, size):
    found = torch_memory(log(2, 2, products=True, train=True), find_device(device))
    # One of each thread that calls cuBLAS.
    assert found.allocated_bytes == (4 + 2 * size) * MIB


class Layers(torch.nn.Sequential):
    """Layers that run in lines of this file."""

    def forward(self, x):
        for layer in self:
            x = layer(x)
        return x


def test_a_prediction_says_whether_it_fits():
    with torch.device("meta"):
        net = Layers(torch.nn.Linear(4096, 16384), torch.nn.Linear(16384, 4096))
        x = torch.zeros(65536, 4096)
    found = predict(net, x, device="rtx-4090", framework="torch-eager", train="adamw", loss="sum")
    memory = found.memory
    # Weights, gradients, two moments and the hidden layer's 4 GiB with its gradient.
    weights = 4 * (2 * 4096 * 16384 + 16384 + 4096)
    assert memory.allocated_bytes > 4 * weights + 4 * 65536 * (16384 + 4096)
    assert found.peak_memory_bytes == memory.peak_bytes == found.to_dict()["peak_memory_bytes"]
    assert found.fits is memory.fits is found.to_dict()["fits"]
    assert memory.lo_bytes < memory.peak_bytes < memory.hi_bytes
    assert memory.holders[0].line.rpartition("/")[2].startswith("test_torch_memory.py:")


def both(module, inputs, **options):
    """Storages of a program, eager and compiled."""
    program = TorchProgram(module, inputs, **options)
    recording = TorchPredictor("torch-compiled", "roofline").record(program, GPU)
    return recording.storages, compiled_storages(recording)


def test_compiled_kernels_write_what_others_read_and_over_what_nobody_reads():
    net = torch.nn.Sequential(
        torch.nn.Linear(256, 1024, bias=False),
        *(torch.nn.GELU(), torch.nn.Tanh(), torch.nn.Linear(1024, 256, bias=False)),
    )
    eager, compiled = both(net, (torch.zeros(4096, 256),))
    # Both weights, input and result; the hidden layer twice, or once where it is overwritten.
    assert eager.peak() == (2 + 4 + 2 * 16) * MIB
    assert compiled.peak() == (2 + 4 + 16 + 4) * MIB


class Chain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(256, 1024, bias=False)

    def forward(self, x):
        hidden = self.layer(x)
        return (hidden * hidden).exp().sum()


def test_compiled_backward_passes_compute_again_what_generated_kernels_can():
    eager, compiled = both(Chain(), (torch.zeros(4096, 256),), train="sgd")
    # Weight, input and the hidden layer; the exponential, its gradient and one more are eager's.
    fixed = 1 + 4 + 16
    assert eager.peak() >= (fixed + 3 * 16) * MIB
    assert fixed * MIB <= compiled.peak() <= (fixed + 16 + 1) * MIB + 1024


class Tower(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.Linear(256, 1024, bias=False),
                *(torch.nn.GELU(), torch.nn.Linear(1024, 256, bias=False)),
            )
            for _ in range(layers)
        )

    def forward(self, x):
        for layer in self.layers:
            more = checkpoint(layer, x, use_reentrant=False)
            x = x + more
        return x.sum()


@pytest.mark.parametrize("exported", [False, True])
def test_compiled_checkpoints_are_computed_again_one_at_a_time(exported):
    def peak(layers):
        module, inputs = Tower(layers), (torch.zeros(4096, 256),)
        if exported:
            module, inputs = torch.export.export(module, inputs), ()
        return both(module, inputs, train="sgd")[1].peak()

    # At the peak, where the backward pass begins, a layer more holds its input and its weights,
    # not its hidden 16 MiB.
    assert peak(8) - peak(4) == 4 * (4 + 2) * MIB


@pytest.mark.parametrize(
    ("technique", "size", "batch"),
    [
        later("fp32", "vit_b", 1), ("fp32", "vit_b", 8), later("bf16", "vit_b", 1),
        later("bf16", "vit_b", 8), later("fp32", "vit_h", 8), ("bf16", "vit_h", 1),
    ],
)  # fmt: skip
def test_peaks_are_those_of_published_runs_of_segment_anything(technique, size, batch):
    path = PUBLISHED / "segment-anything.csv"
    if not path.is_file():
        pytest.skip("the published runs are not here")
    rows = pd.read_csv(path)
    same = (rows.technique == technique) & (rows.sam_model_type == size)
    # ``torch.cuda.max_memory_allocated``, alike in all rows of a configuration.
    (measured,) = set(rows[same & (rows.batch_size == batch)]["memory(MiB)"])
    dtype = torch.float32 if technique == "fp32" else torch.bfloat16
    with torch.device("meta"):
        module = ImageEncoder(size).to(dtype)
        images = torch.zeros(batch, 3, 1024, 1024, dtype=dtype)
    found = torch_memory(log_storages(TorchProgram(module, (images,))), GPU)
    # The decoder of masks, which is small, is not in it.
    assert 0.97 * measured < found.allocated_bytes / MIB <= measured
    assert found.holders[0].line.rpartition("/")[2].startswith("torch_sam.py:")
