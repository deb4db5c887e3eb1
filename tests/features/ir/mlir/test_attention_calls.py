"""Where batch and heads of cuDNN's attention are."""

import pytest

from opcast.features.ir.mlir.attention_calls import attention_axes

B, T, N, K, H = 8, 128, 4, 2, 64
QUERY, KEY, OUT, STATISTICS = (B, T, N, H), (B, T, K, H), (B, N, T, H), (B, N, T)
GRADIENT = (B, K, T, H)


def config(name, heads, **more):
    numbers = {"lhs_batch_dimensions": ["0", str(heads)]}
    shape = {"dimensions": [str(n) for n in (B, N, T, T)]}
    own = {name: numbers, "intermediate_tensor_shape": shape, **more}
    return {"cudnn_fmha_backend_config": own}


FORWARD = config("bmm1_dot_dimension_numbers", 2)
BACKWARD = config("bmm2_grad_gemm2_dot_dimension_numbers", 2)


def test_heads_of_grouped_queries_are_cut_with_those_of_keys():
    batch, heads = attention_axes(
        "__cudnn$fmhaSoftmax", FORWARD, [QUERY, KEY, KEY], [OUT, STATISTICS, (0,)]
    )
    assert batch.operands == ((0, 0), (1, 0), (2, 0)) and batch.results == ((0, 0), (1, 0))
    assert heads.operands == ((0, 2), (1, 2), (2, 2)) and heads.results == ((0, 1), (1, 1))


def test_heads_may_stand_before_positions():
    shapes = [(B, N, T, H)] * 3
    told = config("bmm1_dot_dimension_numbers", 1)
    assert attention_axes("__cudnn$fmhaSoftmax", told, shapes, [OUT, (0,)])[1].operands == (
        (0, 1), (1, 1), (2, 1),
    )  # fmt: skip


def test_lengths_have_a_batch_and_no_heads():
    batch, heads = attention_axes(
        "__cudnn$fmhaSoftmax", FORWARD, [QUERY, QUERY, QUERY, (B,), (B,)], [OUT, (0,)]
    )
    assert batch.operands[3:] == ((3, 0), (4, 0)) and len(heads.operands) == 3


def test_a_bias_for_all_sequences_is_whole():
    shapes = [QUERY, QUERY, QUERY, (1, N, T, T)]
    batch, heads = attention_axes("__cudnn$fmhaScaleBiasSoftmax", FORWARD, shapes, [OUT, (0,)])
    assert (3, 0) not in batch.operands and (3, 1) in heads.operands


def test_the_backward_call():
    shapes = [QUERY, KEY, KEY, STATISTICS, QUERY, QUERY]
    results = [OUT, GRADIENT, GRADIENT, (0,)]
    batch, heads = attention_axes("__cudnn$fmhaSoftmaxBackward", BACKWARD, shapes, results)
    assert sorted(batch.operands) == [(k, 0) for k in range(6)]
    assert sorted(heads.operands) == [(0, 2), (1, 2), (2, 2), (3, 1), (4, 2), (5, 2)]
    assert batch.results == ((0, 0), (1, 0), (2, 0))


def test_the_gradient_of_a_bias_for_all_sequences_is_a_sum_over_them():
    bias = (1, N, T, T)
    shapes = [QUERY, QUERY, QUERY, STATISTICS, QUERY, bias, QUERY]
    target = "__cudnn$fmhaScaleBiasSoftmaxBackward"
    batch, heads = attention_axes(target, BACKWARD, shapes, [OUT, OUT, OUT, bias, (0,)])
    assert batch == ((), ())
    assert {(5, 1), (6, 2)} <= set(heads.operands) and heads.results[3] == (3, 1)


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("__cudnn$convForward", FORWARD),
        ("__cudnn$fmhaSoftmaxF8", FORWARD),
        ("__cudnn$fmhaSoftmax", {}),
        ("__cudnn$fmhaSoftmax", {"cudnn_fmha_backend_config": {"is_flash_attention": True}}),
        ("__cudnn$fmhaSoftmax", config("bmm1_dot_dimension_numbers", 7)),
        ("__cudnn$fmhaSoftmax", config("bmm1_dot_dimension_numbers", 2, is_paged_attention=True)),
    ],
)
def test_other_calls_stay_whole(target, told):
    assert attention_axes(target, told, [QUERY] * 3, [OUT, (0,)]) == ()
