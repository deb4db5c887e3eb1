import numpy as np
import pandas as pd
import pytest

from opcast.common.errors import DatasetError
from opcast.predict.published.graph_program import (
    Variant,
    label_layers,
    node_repeats,
    parse_variant,
)

GPT = ["wte", "transformer_h_0_ln_1_grad", "transformer_h_0_ln_1", "softmax", "add_15", "lm_head"]


@pytest.mark.parametrize(
    ("text", "variant"),
    [
        (None, Variant()),
        (float("nan"), Variant()),
        ("fusion", Variant("fusion")),
        ("dp4", Variant("dp", 4)),
        ("tp8", Variant("tp", 8)),
        ("pp4_2", Variant("pp", 4, 2)),
    ],
)
def test_variants(text, variant):
    assert parse_variant(text) == variant


def test_unknown_variants_are_refused():
    with pytest.raises(DatasetError, match="ep4"):
        parse_variant("ep4")


@pytest.mark.parametrize(
    ("text", "share", "hops"), [("pp4_1", 1.0, 3), ("pp4_4", 7 / 4, 6), ("dp4", 1.0, 0)]
)
def test_a_pipeline_takes_m_plus_p_minus_1_stages(text, share, hops):
    variant = parse_variant(text)
    assert variant.pipeline_share == share and variant.pipeline_hops == hops


def test_one_layer_is_repeated_and_its_surroundings_are_not():
    np.testing.assert_array_equal(node_repeats(GPT, "gpt2_large", 36), [1, 36, 36, 36, 36, 1])


def test_graphs_that_list_every_layer_repeat_nothing():
    listed = [*GPT, "transformer_h_1_ln_1"]
    assert (node_repeats(listed, "gpt2_large", 36) == 1).all()
    assert (node_repeats(["a", "b"], "switchxl4", 24) == 1).all()


def test_a_graph_without_the_layer_is_refused():
    with pytest.raises(DatasetError, match="add_15"):
        node_repeats(GPT[:3], "gpt2_large", 36)


def test_layers_come_from_the_label_then_its_model_then_the_list():
    labels = pd.DataFrame(
        {"model": ["gpt3_xl", "gpt3_xl", "bert_large", "switchxl4"], "n_layer": [20, 0, None, 0]}
    )
    np.testing.assert_array_equal(label_layers(labels), [20, 20, 24, 1])
    with pytest.raises(DatasetError, match="gpt9"):
        label_layers(pd.DataFrame({"model": ["gpt9"], "n_layer": [0]}))
