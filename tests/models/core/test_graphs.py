from __future__ import annotations

import numpy as np
import pytest

from opcast.features.devices.device import DeviceSpec
from opcast.features.ir.hlo_reader import parse_hlo
from opcast.features.kernels.extract import extract_kernels
from opcast.features.kernels.kernel import Kernel
from opcast.features.table.kernel_graph import NODE_FEATURES, KernelGraph, kernel_graph
from opcast.models.core import kernel_table as module
from opcast.models.core.kernel_table import KernelGraphs, PackedGraphs, concatenate, kernel_table

HLO = """HloModule net, is_scheduled=true

ENTRY main {
  x = f32[64,512] parameter(0)
  w = f32[512,256] parameter(1)
  y = f32[64,256] dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  e = f32[64,256] exponential(y)
  ROOT z = f32[64,256] add(e, y)
}
"""


def graph(opcodes: list[int], edges: list[tuple[int, int]]) -> KernelGraph:
    return KernelGraph(
        np.array(opcodes, np.int32),
        np.repeat(np.array(opcodes, np.float32)[:, None], len(NODE_FEATURES), 1),
        np.array(edges, np.int32).reshape(-1, 2).T,
        np.zeros(0, np.float32),
    )


CHAIN, ALONE, FORK = (
    graph([1, 2, 3], [(0, 1), (1, 2)]),
    graph([4], []),
    graph([5, 6, 7], [(0, 1), (0, 2)]),
)


@pytest.fixture(scope="module")
def kernels() -> list[Kernel]:
    return extract_kernels(parse_hlo(HLO))[0]


def test_packed_graphs_are_taken_in_any_order() -> None:
    packed = PackedGraphs.pack([CHAIN, ALONE, FORK])
    np.testing.assert_array_equal(packed.edges, [[0, 1, 4, 4], [1, 2, 5, 6]])
    np.testing.assert_array_equal(packed.graph_of_node, [0, 0, 0, 1, 2, 2, 2])
    taken = packed.take(np.array([2, 1, 0]))
    np.testing.assert_array_equal(taken.opcode, [5, 6, 7, 4, 1, 2, 3])
    np.testing.assert_array_equal(taken.features[:, 0], taken.opcode)
    np.testing.assert_array_equal(taken.edges, [[0, 0, 4, 5], [1, 2, 5, 6]])
    assert len(taken) == 3
    again = packed.take(np.array([1, 1]))
    assert list(again.opcode) == [4, 4] and again.edges.shape == (2, 0)


def test_equal_kernels_share_a_graph() -> None:
    found = KernelGraphs.of(["a", "b", "a", "a"], [CHAIN, ALONE, CHAIN, CHAIN])
    assert len(found) == 4 and len(found.packed) == 2
    np.testing.assert_array_equal(found.index, [0, 1, 0, 0])
    part = found.take(np.array([False, True, True, False]))
    np.testing.assert_array_equal(part.index, [1, 0])
    assert part.packed is found.packed


def test_concatenation_joins_the_kernels_of_all_parts() -> None:
    first = KernelGraphs.of(["a", "b"], [CHAIN, ALONE])
    second = KernelGraphs.of(["c", "a"], [FORK, CHAIN])
    joined = KernelGraphs.concatenate([first, second])
    np.testing.assert_array_equal(joined.index, [0, 1, 2, 0])
    np.testing.assert_array_equal(joined.packed.nodes, [3, 1, 3])
    halves = [first.take(np.array([1])), first.take(np.array([0]))]
    same = KernelGraphs.concatenate(halves)
    np.testing.assert_array_equal(same.index, [1, 0])
    assert same.packed is first.packed


def test_kernels_and_texts_give_the_same_graphs(
    kernels: list[Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHUNK", 2)
    hashes = [k.hash for k in kernels]
    mixed = [kernels[0], kernels[1].ir, kernel_graph(kernels[2])]
    read = KernelGraphs.of(hashes, [k.ir for k in kernels]).packed
    for other in (KernelGraphs.of(hashes, kernels).packed, KernelGraphs.of(hashes, mixed).packed):
        for field in PackedGraphs.__slots__:
            np.testing.assert_array_equal(getattr(read, field), getattr(other, field))


def test_tables_carry_graphs_only_if_wanted(kernels: list[Kernel], cpu: DeviceSpec) -> None:
    plain = kernel_table(kernels, cpu)
    assert plain.graphs is None and plain.take(np.array([0])).graphs is None
    table = kernel_table(kernels, cpu, graphs=True)
    twice = concatenate([table, table.take(np.array([2]))])
    assert twice.graphs is not None
    np.testing.assert_array_equal(twice.graphs.index, [0, 1, 2, 2])
    assert concatenate([table, plain]).graphs is None


def test_nothing_is_read_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_graphs", lambda sources: pytest.fail("read too early"))
    found = KernelGraphs.of(["a", "b"], ["text a", "text b"])
    KernelGraphs.concatenate([found.take(np.array([1])), KernelGraphs.of(["c"], ["text c"])])
