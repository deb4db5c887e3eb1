"""Distances between uses of tensors, by hand, and what follows for fused and unfused kernels."""

import pytest

from ...support.cases import later

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from opcast.features.devices.catalogue import find_device  # noqa: E402
from opcast.features.ir.torch.program import TorchProgram  # noqa: E402
from opcast.features.ir.torch.runs import record  # noqa: E402
from opcast.predict.operator.aten_streams import Stream, Use, streams  # noqa: E402
from opcast.predict.operator.aten_traffic import read_traffic  # noqa: E402
from opcast.predict.operator.aten_work import works  # noqa: E402
from opcast.predict.operator.torch_framework import operator_bundle  # noqa: E402
from opcast.predict.operator.torch_price import price  # noqa: E402

from ...support.torch_models import Called  # noqa: E402


def test_distances_are_what_is_moved_in_between_and_twice_the_tensor():
    # x → a (10 bytes each), 100 bytes of others, then b of a and x.
    uses = [
        (Use(0, 10.0, False), Use(1, 10.0, True)),
        (Use(2, 40.0, False), Use(3, 60.0, True)),
        (Use(1, 10.0, False), Use(0, 10.0, False), Use(4, 10.0, True)),
    ]
    first, other, last = streams(uses, [20.0, 100.0, 30.0], kept={0, 4})
    # x was read last by the third kernel of the run before, right before this one begins.
    assert first == (Stream(10.0, 20.0), Stream(10.0, 120.0))
    # Read in every run, once: 150 bytes before; never read: all of the run passes.
    assert other == (Stream(40.0, 50.0 + 80.0), Stream(60.0, 150.0 + 120.0))
    assert last == (Stream(10.0, 120.0), Stream(10.0, 120.0), Stream(10.0, 170.0))


def test_streams_are_of_the_traffic_that_is_known():
    # A norm reads its input twice; of an operator of several kernels only what it touches is known.
    (norm,) = streams([(Use(0, 10.0, False), Use(1, 10.0, True))], [30.0], ())
    assert [s.bytes for s in norm] == [15.0, 15.0]
    assert streams([(Use(0, 0.0, False),)], [30.0], ()) == [()]


def test_a_slice_is_near_only_after_a_use_of_the_same_part():
    # Two slices of 10 bytes of one tensor, then the first once more, then all of it.
    one, other, whole = Use(0, 10.0, False), Use(0, 10.0, False, 10.0), Use(0, 20.0, False)
    first, second, third, last = streams(
        [(one,), (other,), (one,), (whole,)], [10.0, 10.0, 10.0, 20.0], kept={0}
    )
    # The whole was read at the end of the run before.
    assert (first, second) == ((Stream(10.0, 20.0),), (Stream(10.0, 30.0),))
    assert third == (Stream(10.0, 10.0 + 20.0),)
    # Never read at once in this run: nothing says that all of it is near.
    assert last == (Stream(20.0, 30.0 + 40.0),)


@pytest.mark.parametrize(("width", "read"), [(1, 32), (4, 32), (64, 256)])
@pytest.mark.parametrize("select", [lambda x, i: x[i], lambda x, i: x.index_select(0, i)])
def test_rows_narrower_than_a_sector_cost_a_sector(width, read, select):
    rows, count = 1 << 20, 4096
    table = torch.empty(rows, width, device="meta")
    places = torch.empty(count, dtype=torch.int64, device="meta")
    (call,) = record(TorchProgram(Called(select), (table, places))).calls
    assert read_traffic(call) == count * (8 + 4 * width + read)


ROWS, EDGES, WIDTH = 170_000, 1_200_000, 256


def along_edges(function, *others, device="t4"):
    """The kernel that takes most time of a function of a table of nodes and an index by edge."""
    table, source = (torch.empty(n, WIDTH, device="meta") for n in (ROWS, EDGES))
    index = torch.empty(EDGES, dtype=torch.int64, device="meta")
    recording = record(TorchProgram(Called(function), (table, index, source)))
    found = price(recording, find_device(device), "torch-eager", operator_bundle("default"))
    return max(found.operators, key=lambda o: o.latency_us)


@pytest.mark.parametrize(
    ("function", "times"),
    [
        (lambda x, i, e: x[i], 1),
        (lambda x, i, e: x.index_select(0, i), 1),
        (lambda x, i, e: x.gather(0, i[:, None].expand(-1, WIDTH)), 1),
        (lambda x, i, e: x.index_add_(0, i, e), 2),
        (lambda x, i, e: x.scatter_add_(0, i[:, None].expand(-1, WIDTH), e), 2),
    ],
)
def test_rows_that_are_selected_again_come_from_memory_unless_the_cache_holds_them(function, times):
    """Nodes of a graph with 7 edges each, of which the 4 MiB of a T4 hold 2 %."""
    found, table, edges = along_edges(function), 4 * WIDTH * ROWS, 4 * WIDTH * EDGES
    # Edges read or written, and an index of each; the table itself once or, to add, twice.
    assert found.bytes == edges + 8 * EDGES + times * table
    again = times * (edges - table) * (1 - 4 * 2**20 / table)
    # At the rate of a pass over two tensors of edges.
    plain = along_edges(lambda x, i, e: e * 2.0)
    rate = plain.bytes / plain.latency_us
    assert found.latency_us == pytest.approx((found.bytes + again) / rate, rel=0.03)
    # Indices in order select no row that is far away.
    assert found.lo_us == pytest.approx(found.bytes / rate, rel=0.05)


@pytest.mark.parametrize(
    ("rows", "function", "turns"),
    [
        (10, lambda x, i, e: x.index_add_(0, i, e), 1 << 18),
        (10, lambda x, i, e: x.scatter_add_(0, i, e), 1 << 18),
        (10, lambda x, i, e: x.put_(i, e, accumulate=True), 1 << 18),
        # Nothing is added up: the last value stays.
        (10, lambda x, i, e: x.scatter_(0, i, e), 0),
        # Sorted first, so that no two blocks add to one element.
        (10, lambda x, i, e: x.index_put_((i,), e, accumulate=True), 0),
    ],
)
def test_additions_to_few_elements_take_turns(rows, function, turns):
    count = 10 << 18
    table, source = (torch.empty(n, device="meta") for n in (rows, count))
    index = torch.empty(count, dtype=torch.int64, device="meta")
    recording = record(TorchProgram(Called(function), (table, index, source)))
    assert max(work.queued for work in works(recording.calls)) == turns
    found = price(recording, find_device("h100-sxm"), "torch-eager", operator_bundle("default"))
    # One per clock at the boost of 1.98 GHz.
    assert found.latency_us >= turns / 1980


def test_bags_of_a_small_table_read_it_from_the_cache():
    def bag(rows):
        table, index = torch.empty(rows, 128, device="meta"), torch.empty(65536, 32, device="meta")
        function = Called(lambda w, i: F.embedding_bag(i, w, mode="sum"))
        (call,) = record(TorchProgram(function, (table, index.long()))).calls[-1:]
        (work,) = works([call])
        (near,) = streams([work.uses], [work.bytes], ())
        return work.bytes, [s for s in near if s.again]

    rows, result, index = 65536 * 32 * 512, 65536 * 512, 65536 * 32 * 8
    assert bag(10_000_000) == (result + rows + index, [])
    moved, (again,) = bag(1000)
    # Each row of the table once.
    assert moved == result + 1000 * 512 + index
    assert again == Stream(rows - 1000 * 512, 1000 * 512, again=True)
    assert again.held(1e6) == 1.0 and again.held(256_000) == 0.5


class Block(torch.nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads, self.n1, self.n2 = heads, torch.nn.LayerNorm(d), torch.nn.LayerNorm(d)
        self.qkv, self.out = torch.nn.Linear(d, 3 * d), torch.nn.Linear(d, d)
        self.up, self.down = torch.nn.Linear(d, 4 * d), torch.nn.Linear(4 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        parts = self.qkv(self.n1(x)).view(b, t, 3, self.heads, d // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.n2(x))))


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("batch", [16, later(64)])
def test_compiled_kernels_never_take_longer_than_eager_ones(batch, train):
    """A layer of ViT-L, whose tensors lie around the caches of these chips."""
    with torch.device("meta"):
        module = Block(1024, 16).bfloat16()
        x = torch.empty(batch, 257, 1024, dtype=torch.bfloat16)
    options = {"train": "sgd", "loss": "sum"} if train else {}
    recording = record(TorchProgram(module, (x,), **options))
    bundle = operator_bundle("default")
    for device in ("h100-sxm", "rtx-4090", "l4"):
        spec = find_device(device)
        eager, compiled = (
            price(recording, spec, f"torch-{how}", bundle) for how in ("eager", "compiled")
        )
        assert compiled.device_us <= eager.device_us, device
        assert compiled.latency_us <= eager.latency_us, device
        # Passes are never faster than the last cache, nor all of them than main memory.
        passes = [o for o in compiled.operators if o.kind == "pass"]
        cache = spec.levels[0].bandwidth
        assert all(o.bytes / (o.latency_us * 1e-6) < 1.2 * cache for o in passes)


class Empty(torch.nn.Module):
    """An expert without tokens beside one with all of them."""

    def __init__(self):
        super().__init__()
        self.used, self.idle = (torch.nn.Linear(16, 16) for _ in range(2))
        self.norm = torch.nn.LayerNorm(16)

    def forward(self, x):
        return self.used(x).sum() + self.norm(self.idle(x[:0])).sum()


def test_nothing_is_launched_for_results_without_elements():
    program = TorchProgram(Empty(), (torch.zeros(8, 16),), train="sgd", loss="sum")
    found = works(record(program).calls)
    # A product forward and for the weights; those of the idle expert are zeros that are written.
    assert [w.shape for w in found if w.kind == "product"] == [(1, 8, 16, 16), (1, 16, 16, 8)]
    idle = [w for w in found if w.name == "mm" and w.kind == "pass"]
    assert [w.bytes for w in idle] == [16 * 16 * 4]
    assert not [w for w in found if w.kind == "norm"]
    own = price(record(program), find_device("h100-sxm"), "torch-eager", operator_bundle())
    assert own.latency_us > 0
