from __future__ import annotations

import numpy as np

from opcast.features.ir.hlo_reader import parse_hlo
from opcast.features.kernels.kernel import Kernel
from opcast.features.table.kernel_graph import (
    KERNEL_FEATURES,
    NODE_FEATURES,
    OPCODE_ID,
    OPCODES,
    UNKNOWN,
    graph_schema_hash,
    kernel_graph,
)

FUSION = """HloModule m
%fused (p0: f32[64,32], p1: f32[32]) -> f32[64,32] {
  %p0 = f32[64,32]{1,0} parameter(0)
  %p1 = f32[32]{0} parameter(1)
  %b = f32[64,32]{1,0} broadcast(%p1), dimensions={1}
  %m = f32[64,32]{1,0} multiply(%p0, %b)
  ROOT %a = f32[64,32]{1,0} add(%m, %p0)
}
ENTRY %main (x: f32[64,32], y: f32[32]) -> f32[64,32] {
  %x = f32[64,32]{1,0} parameter(0)
  %y = f32[32]{0} parameter(1)
  ROOT %k = f32[64,32]{1,0} fusion(%x, %y), kind=kLoop, calls=%fused
}"""
DOT = """HloModule m
ENTRY %main (a: bf16[64,32], b: bf16[32,16]) -> f32[64,16] {
  %a = bf16[64,32]{1,0} parameter(0)
  %b = bf16[32,16]{1,0} parameter(1)
  ROOT %d = f32[64,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}"""
STRANGE = """HloModule m
ENTRY %main () -> f32[] {
  ROOT %d = f32[] unheard-of()
}"""


def kernel(text: str, kind: str) -> Kernel:
    return Kernel("k", kind, parse_hlo(text), "", "")


def column(features: np.ndarray, name: str) -> list[float]:
    return [float(x) for x in features[:, NODE_FEATURES.index(name)]]


def test_fusion() -> None:
    graph = kernel_graph(kernel(FUSION, "fusion"))
    names = [OPCODES[i] for i in graph.node_opcode]
    assert names == ["parameter", "parameter", "broadcast", "multiply", "add"]
    # p1→b; p0→m, b→m; m→a, p0→a
    assert graph.edges.tolist() == [[1, 0, 2, 3, 0], [2, 3, 3, 4, 4]]
    assert graph.edges.dtype == graph.node_opcode.dtype == np.int32
    assert graph.node_features.dtype == graph.kernel_features.dtype == np.float32
    assert graph.node_features.shape == (5, len(NODE_FEATURES))
    assert graph.kernel_features.shape == (len(KERNEL_FEATURES),)
    assert column(graph.node_features, "is_root") == [0, 0, 0, 0, 1]
    assert column(graph.node_features, "is_input") == [1, 1, 0, 0, 0]
    assert column(graph.node_features, "n_users") == [2, 1, 1, 1, 0]
    assert column(graph.node_features, "depth") == [0, 0, 1, 2, 3]
    work = np.log2(1.0 + np.array([0, 0, 0.25 * 2048, 2048, 2048]))
    np.testing.assert_allclose(column(graph.node_features, "log_work"), work, rtol=1e-6)
    minor = np.log2(1.0 + np.array([32, 32, 32, 32, 32]))
    np.testing.assert_allclose(column(graph.node_features, "log_dim_0"), minor, rtol=1e-6)
    major = np.log2(1.0 + np.array([64, 0, 64, 64, 64]))
    np.testing.assert_allclose(column(graph.node_features, "log_dim_1"), major, rtol=1e-6)


def test_single_instruction() -> None:
    graph = kernel_graph(kernel(DOT, "gemm"))
    assert graph.edges.tolist() == [[0, 1], [2, 2]]
    np.testing.assert_allclose(
        column(graph.node_features, "log_work")[2], np.log2(1.0 + 2 * 64 * 16 * 32), rtol=1e-6
    )
    assert column(graph.node_features, "dtype_half") == [1, 1, 0]
    assert column(graph.node_features, "dtype_float") == [0, 0, 1]
    k = graph.kernel_features[KERNEL_FEATURES.index("log_gemm_k")]
    np.testing.assert_allclose(k, np.log2(33.0), rtol=1e-6)


def test_unknown_opcode_has_the_last_id() -> None:
    graph = kernel_graph(kernel(STRANGE, "fusion"))
    assert graph.node_opcode.tolist() == [UNKNOWN]
    assert graph.edges.shape == (2, 0)
    assert np.isfinite(graph.node_features).all()


def test_vocabulary_has_no_repeats_and_keeps_its_order() -> None:
    assert [OPCODE_ID[name] for name in OPCODES] == list(range(len(OPCODES)))
    assert OPCODES[0] == "parameter"
    assert OPCODES[-1] == "<unknown>"
    assert len(graph_schema_hash()) == 16
    assert graph_schema_hash() == graph_schema_hash()
