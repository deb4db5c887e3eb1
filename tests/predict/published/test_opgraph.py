import pytest

from opcast.common.errors import DatasetError
from opcast.predict.published.opgraph import GraphOp, node_kernels, op_rows, parse_ops, parse_shapes


def node(name, fw="[]", bw="[]", acc="[]", inputs="[(4, 8)]", output="(4, 8)"):
    return {
        "Name": "n", "OpName": name, "FwOps": fw, "BwOps": bw, "AccOps": acc,
        "InputShapes": inputs, "OutputShape": output,
    }  # fmt: skip


def test_lists_are_read_as_lists_or_tuples():
    text = "[['Linear', (64, 32, 16)], ('MEM', ((2, 3), (1,))), ['VECadd', [1, 8]]]"
    assert parse_ops(text) == [
        GraphOp("Linear", (64, 32, 16)),
        GraphOp("MEM", ((2, 3), (1,))),
        GraphOp("VECadd", (1, 8)),
    ]
    assert parse_shapes("[(2, 3), (1,)]") == [(2, 3), (1,)]
    assert parse_shapes("(2, 3)") == [(2, 3)]


@pytest.mark.parametrize("text", ["__import__('os').getcwd()", "[1, 2]", "[['Linear'"])
def test_nothing_is_evaluated_and_bad_text_is_refused(text):
    with pytest.raises(DatasetError, match="cannot be read"):
        parse_ops(text)


def test_gemm_columns_follow_the_published_schema():
    # Linear is (rows, reduced, columns): out[64, 16] = sum over 32.
    row = op_rows(GraphOp("Linear", (64, 32, 16)), "fp32")
    assert (row["b"], row["m"], row["n"], row["k"], row["family"]) == (1, 64, 16, 32, "linear")
    row = op_rows(GraphOp("BMM", (8, 64, 32, 16)), "fp32")
    assert (row["b"], row["m"], row["n"], row["k"], row["op"]) == (8, 64, 16, 32, "bmm")


@pytest.mark.parametrize(
    ("kind", "family", "inputs"),
    [("VECadd", "elementwise", 2), ("VECaddu", "elementwise", 1), ("VECln", "ln", 1)],
)
def test_vector_columns_follow_the_published_schema(kind, family, inputs):
    row = op_rows(GraphOp(kind, (4, 8)), "fp32")
    assert (row["op"], row["family"], row["n_in"]) == (kind[3:], family, inputs)
    assert (row["rows"], row["cols"], row["m"]) == (4, 8, None)


def test_moved_bytes_are_a_relu_of_the_same_traffic():
    row = op_rows(GraphOp("MOVE", (2 * 4 * 1024 * 10.0,)), "fp32")
    assert (row["op"], row["rows"], row["cols"]) == ("relu", 10, 1024)


def test_unknown_operations_are_refused():
    with pytest.raises(DatasetError, match="FFT"):
        op_rows(GraphOp("FFT", (8,)), "fp32")


@pytest.mark.parametrize(
    "silent",
    [
        (node("getitem", "[['MEM', ((4, 8), (4, 8))]]"), "fw", "train"),
        (node("misc"), "fw", "inf"),
        (node("dropout", "[['MEM', ((4, 8), (4, 8))]]"), "fw", "inf"),
        (node("VECadd", bw="[['MEM', ((4, 8),)], ['MEM', ((4, 8),)]]"), "bw", "train"),
        (node("where", "[['MEM', ((1,), (1,))]]"), "fw", "train"),
    ],
)
def test_what_launches_nothing_costs_nothing(silent):
    assert node_kernels(*silent) == []


def test_moves_count_every_listed_tensor():
    copy = node("contiguous", "[['MEM', ((4, 8), (4, 8))]]")
    assert node_kernels(copy, "fw", "inf") == [GraphOp("MOVE", (4 * 64.0,))]


def test_dropout_moves_a_mask_and_its_gradient_three_times():
    both = node("dropout", "[['MEM', ((4, 8), (4, 8))]]", "[['MEM', ((4, 8),)]]")
    assert node_kernels(both, "fw", "train") == [GraphOp("MOVE", (2.25 * 4 * 32,))]
    assert node_kernels(both, "bw", "train") == [GraphOp("MOVE", (6.25 * 4 * 32,))]
    # Of two bytes an element, the byte mask is half of a tensor.
    assert node_kernels(both, "fw", "train", 2) == [GraphOp("MOVE", (2.5 * 2 * 32,))]
    assert node_kernels(both, "bw", "train", 2) == [GraphOp("MOVE", (6.5 * 2 * 32,))]


def test_a_broadcast_operand_is_not_read_as_a_tensor():
    scalar = node(
        "VECdiv",
        "[['VECdiv', (4, 8)]]",
        "[['VECdiv', (4, 8)], ['VECdiv', (4, 8)]]",
        inputs="[(4, 8), (1,)]",
    )
    assert node_kernels(scalar, "fw", "inf") == [GraphOp("VECdivu", (4, 8))]
    assert node_kernels(scalar, "bw", "train") == [GraphOp("VECdivu", (4, 8))]
    full = node("VECdiv", "[['VECdiv', (4, 8)]]", inputs="[(4, 8), (4, 8)]")
    assert node_kernels(full, "fw", "inf") == [GraphOp("VECdiv", (4, 8))]


def test_gradients_read_what_they_need():
    ln = node("VECln", bw="[['VECmul', (4, 8)]]", acc="[['VECadd', [1, 8]]]")
    assert node_kernels(ln, "bw", "train") == [GraphOp("VECmul", (4, 8))] * 2
    assert node_kernels(ln, "acc", "train") == [GraphOp("VECadd", (1, 8))]
    softmax = node("VECsoftmax", bw="[['VECmul', (4, 8)], ['VECsoftmax', (4, 8)]]")
    assert node_kernels(softmax, "bw", "train") == [GraphOp("VECmul", (4, 8))] * 2
    gelu = node("VECgelu", bw="[['VECgelu', (4, 8)]]")
    assert node_kernels(gelu, "bw", "train") == [GraphOp("VECmul", (4, 8))]


def test_products_of_heads_copy_what_is_no_batch_of_matrices():
    """Two sequences of 8 positions in 3 heads of 4: queries and keys, then the values."""
    scores = node("BMM", "[['BMM', (6, 8, 4, 8)]]", "[]", inputs="[(2, 3, 8, 4), (2, 3, 4, 8)]")
    moved = GraphOp("MOVE", (2 * 4 * 2 * 3 * 8 * 4.0,))
    assert node_kernels(scores, "fw", "inf") == [moved, moved, GraphOp("BMM", (6, 8, 4, 8))]
    values = node("BMM", "[['BMM', (6, 8, 8, 4)]]", inputs="[(2, 3, 8, 8), (2, 3, 8, 4)]")
    assert node_kernels(values, "fw", "inf") == [moved, GraphOp("BMM", (6, 8, 8, 4))]
    # The heads of one sequence are a batch as they lie, and three dimensions are one already.
    for inputs in ("[(1, 3, 8, 4), (1, 3, 4, 8)]", "[(3, 8, 4), (3, 4, 8)]"):
        alone = node("BMM", "[['BMM', (3, 8, 4, 8)]]", inputs=inputs)
        assert node_kernels(alone, "fw", "inf") == [GraphOp("BMM", (3, 8, 4, 8))]


def test_a_fused_chain_moves_its_inputs_and_its_output():
    chain = node("fused", "[['VECmulu', (4, 8)], ['VECtanh', (4, 8)]]", inputs="[(4, 8), (8,)]")
    assert node_kernels(chain, "fw", "inf") == [GraphOp("MOVE", (4.0 * (32 + 8 + 32),))]


def test_a_fused_softmax_keeps_its_cost_and_adds_the_other_traffic():
    chain = node("fused", "[['VECadd', (4, 8)], ['VECsoftmax', (4, 8)]]", inputs="[(4, 8), (4, 8)]")
    assert node_kernels(chain, "fw", "inf") == [
        GraphOp("VECsoftmax", (4, 8)),
        GraphOp("JOIN", (4.0 * 32,)),
    ]


def test_collectives_pass_through():
    reduce = node("allreduce", "[['ALLREDUCE', (32,)]]", "[['ALLREDUCE_ASYNC', (16,)]]")
    assert node_kernels(reduce, "fw", "train") == [GraphOp("ALLREDUCE", (32,))]
    assert node_kernels(reduce, "bw", "train") == [GraphOp("ALLREDUCE_ASYNC", (16,))]
