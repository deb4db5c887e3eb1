"""Attributes of StableHLO ops under the IR's names, from values as the reader gives them."""

from __future__ import annotations

import pytest

from opcast.features.ir.mlir.attributes import normalise
from opcast.features.ir.mlir.values import Raw, read_value
from opcast.features.ir.program import TensorType, WindowDim

MATRIX = TensorType("f32", (4, 8))


def test_dot_without_dimension_numbers_contracts_last_with_first():
    attrs = normalise("dot", {}, [MATRIX, TensorType("f32", (8, 2))], [TensorType("f32", (4, 2))])
    assert attrs == {
        "lhs_contracting_dims": (1,),
        "rhs_contracting_dims": (0,),
        "lhs_batch_dims": (),
        "rhs_batch_dims": (),
    }


def test_dot_general_keeps_batch_dimensions_and_a_precision_that_is_not_the_default():
    numbers = {
        "lhs_batching_dimensions": (0,),
        "rhs_batching_dimensions": (0,),
        "lhs_contracting_dimensions": (2,),
        "rhs_contracting_dimensions": (1,),
    }
    attrs = {"dot_dimension_numbers": numbers, "precision_config": ("DEFAULT", "HIGHEST")}
    found = normalise("dot", attrs, [MATRIX, MATRIX], [MATRIX])
    assert (found["lhs_batch_dims"], found["lhs_contracting_dims"]) == ((0,), (2,))
    assert found["operand_precision"] == ("default", "highest")
    plain = normalise("dot", {"precision_config": ("DEFAULT",)}, [MATRIX, MATRIX], [MATRIX])
    assert "operand_precision" not in plain


def test_convolution_takes_window_sizes_from_the_kernel():
    labels = "#stablehlo.conv<[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]>"
    attrs = {
        "dimension_numbers": Raw(labels),
        "padding": ((1, 2), (0, 0)),
        "window_strides": (2, 1),
        "feature_group_count": 4,
    }
    kernel = TensorType("f32", (3, 5, 1, 16))
    image = TensorType("f32", (1, 9, 9, 4))
    found = normalise("convolution", attrs, [image, kernel], [image])
    assert found["window"] == (
        WindowDim(3, stride=2, pad_low=1, pad_high=2),
        WindowDim(5),
    )
    assert found["dim_labels"] == "b01f_01io->b01f"
    assert (found["feature_group_count"], found["batch_group_count"]) == (4, 1)


def test_reduce_window_reads_dilations_under_their_own_names():
    attrs = {
        "window_dimensions": (1, 3),
        "base_dilations": (1, 2),
        "window_dilations": (1, 4),
        "padding": ((0, 0), (1, 1)),
    }
    found = normalise("reduce-window", attrs, [MATRIX, TensorType("f32")], [MATRIX])
    last = WindowDim(3, pad_low=1, pad_high=1, lhs_dilation=2, rhs_dilation=4)
    assert found == {"window": (WindowDim(1), last)}


@pytest.mark.parametrize(
    ("opcode", "given", "expected"),
    [
        ("transpose", {"permutation": (1, 0)}, {"dimensions": (1, 0)}),
        ("concatenate", {"dimension": 1}, {"dimensions": (1,)}),
        ("iota", {"iota_dimension": 0}, {"dimensions": (0,)}),
        ("broadcast", {"broadcast_dimensions": (1,)}, {"dimensions": (1,)}),
        # CHLO's form prepends one dimension of size 4: those of the operand come after it.
        ("broadcast", {"broadcast_sizes": (4,)}, {"dimensions": (1,)}),
        (
            "slice",
            {"start_indices": (0, 1), "limit_indices": (4, 5)},
            {"slice": ((0, 4, 1), (1, 5, 1))},
        ),
        (
            "pad",
            {"edge_padding_low": (1,), "edge_padding_high": (2,), "interior_padding": (3,)},
            {"padding": ((1, 2, 3),)},
        ),
        ("compare", {"comparison_direction": "LT", "compare_type": "FLOAT"}, {"direction": "LT"}),
        (
            "compare",
            {"comparison_direction": "LT", "compare_type": "TOTALORDER"},
            {"direction": "LT", "type": "TOTALORDER"},
        ),
        ("sort", {"dimension": -1, "is_stable": True}, {"dimension": 1, "is_stable": True}),
        ("rng", {"rng_distribution": "NORMAL"}, {"distribution": "rng_normal"}),
        ("fft", {"fft_type": "RFFT", "fft_length": (8,)}, {"fft_type": "RFFT", "fft_length": (8,)}),
        (
            "all-gather",
            {"all_gather_dim": 1, "channel_handle": {"handle": 3, "type": 1}},
            {
                "replica_groups": (),
                "channel_id": 3,
                "use_global_device_ids": False,
                "dimension": 1,
            },
        ),
        (
            "collective-permute",
            {"source_target_pairs": ((0, 1), (1, 0))},
            {"source_target_pairs": ((0, 1), (1, 0)), "channel_id": None},
        ),
        ("send", {}, {"channel_id": None}),
    ],
)
def test_rules(opcode, given, expected):
    assert normalise(opcode, dict(given), [MATRIX, MATRIX], [MATRIX]) == expected


def test_gather_and_scatter_share_their_index_numbers():
    gather = read_value(
        "#stablehlo.gather<offset_dims = [1], collapsed_slice_dims = [0], start_index_map = [0], "
        "index_vector_dim = 1>"
    )
    attrs = {"dimension_numbers": gather, "slice_sizes": (1, 8)}
    found = normalise("gather", attrs, [MATRIX, MATRIX], [MATRIX])
    assert (found["offset_dims"], found["index_vector_dim"]) == ((1,), 1)
    assert found["slice_sizes"] == (1, 8) and not found["indices_are_sorted"]
    scatter = {"update_window_dims": (1,), "inserted_window_dims": (0,), "index_vector_dim": 1}
    attrs = {"scatter_dimension_numbers": scatter, "unique_indices": True}
    found = normalise("scatter", attrs, [MATRIX, MATRIX, MATRIX], [MATRIX])
    assert found["scatter_dims_to_operand_dims"] == ()
    assert (found["index_vector_dim"], found["unique_indices"]) == (1, True)


def test_annotations_of_frameworks_are_left_out_and_the_rest_stays():
    attrs = {"mhlo.sharding": "x", "result_layout": (0,), "own": 3, "odd": Raw("#a.b<c>")}
    assert normalise("add", attrs, [MATRIX, MATRIX], [MATRIX]) == {"own": 3, "odd": "#a.b<c>"}
