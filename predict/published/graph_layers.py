"""How often each node of a published op graph runs, and what a label's variant means.

Graphs list one layer of a model between its prologue and epilogue; fused graphs and mixtures of
experts list every layer. Variants of a label's last word: ``dp4`` is data-parallel on 4 devices
(the graph is one device's share of the batch), ``tp4`` tensor-parallel (the graph is one device's
shard), ``pp4_2`` a pipeline of 4 stages fed with 2 micro-batches (the graph is the whole model for
one micro-batch: ``gpt3_xl-train-2048-4-pp4_4`` has 2048 rows, a fourth of those of ``pp4_1``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ...common.errors import DatasetError


@dataclass(frozen=True)
class LayerSpan:
    """Which nodes of a family's graphs make up the repeated layer.

    Attributes:
        first: Name of its first node.
        last: Name of its last node.
        prefix: Start of the names of nodes that belong to it wherever they stand.
        second: Start of names in the second layer: graphs that have them list every layer.
    """

    first: str
    last: str
    prefix: str
    second: str


# First and last node of layer 0, as torch.fx names them. Generated names such as ``add_15`` count
# calls from the top of the model, so they hold for the first layer alone.
SPANS = {
    "bert": LayerSpan(
        "bert_encoder_layer_0_attention_self_query",
        "bert_encoder_layer_0_output_layer_norm",
        "bert_encoder_layer_0_",
        "bert_encoder_layer_1_",
    ),
    "gpt": LayerSpan("transformer_h_0_ln_1", "add_15", "transformer_h_0_", "transformer_h_1_"),
    "opt": LayerSpan(
        "model_decoder_layers_0_self_attn_layer_norm",
        "view_11",
        "model_decoder_layers_0_",
        "model_decoder_layers_1_",
    ),
}
#: Layers of models whose labels omit the number (those of distributed runs): BERT large (Devlin et
#: al., 2019), GPT-2 large (Radford et al., 2019, table 2), GPT-3 XL and 2.7B (Brown et al., 2020,
#: table 2.1), OPT 1.3B (Zhang et al., 2022, table 1).
LAYERS = {"bert_large": 24, "gpt2_large": 36, "gpt3_xl": 24, "gpt3_27": 32, "opt_13": 24}


@dataclass(frozen=True)
class Variant:
    """Parallelism under which a label was measured.

    Attributes:
        kind: ``single``, ``fusion``, ``dp``, ``tp`` or ``pp``.
        devices: Devices that take part.
        micro_batches: Micro-batches of a pipeline; 1 otherwise.
    """

    kind: str = "single"
    devices: int = 1
    micro_batches: int = 1

    @property
    def pipeline_share(self) -> float:
        """Time of a pipeline over that of one micro-batch through all stages on one device.

        With equal stages, ``m`` micro-batches take ``m + p - 1`` stage times of the ``p`` that
        one of them needs (GPipe: Huang et al., NeurIPS 2019).
        """
        return (self.micro_batches + self.devices - 1) / self.devices if self.kind == "pp" else 1.0

    @property
    def pipeline_hops(self) -> int:
        """Consecutive transfers between stages that nothing hides, in each direction."""
        return self.devices + self.micro_batches - 2 if self.kind == "pp" else 0


def parse_variant(text: object) -> Variant:
    """Read the variant of a label; empty, None and NaN are a plain run on one device.

    Raises:
        DatasetError: The variant is not one of ``fusion``, ``dpN``, ``tpN`` and ``ppN_M``.
    """
    # ``text != text`` is true of NaN alone, which pandas reads from an empty cell.
    if text is None or text != text or text == "":
        return Variant()
    if text == "fusion":
        return Variant("fusion")
    match = re.fullmatch(r"(dp|tp)(\d+)|(pp)(\d+)_(\d+)", str(text))
    if match is None:
        raise DatasetError(f"variant {text!r} is not known", hint="fusion, dpN, tpN and ppN_M are")
    if match[3]:
        return Variant("pp", int(match[4]), int(match[5]))
    return Variant(match[1], int(match[2]))


def node_repeats(names: Sequence[str], model: str, layers: int) -> np.ndarray:
    """Count the executions of each node.

    Args:
        names: Names of the nodes in order, ``n`` of them.
        model: Name of the model, such as ``gpt2_large``.
        layers: Number of layers of the model.

    Returns:
        Shape ``(n,)``: ``layers`` inside the repeated layer and 1 outside; all 1 for graphs that
        list every layer and for models without repeated layer.

    Raises:
        DatasetError: The layer's first or last node is missing.
    """
    repeats = np.ones(len(names))
    # A node of a second layer means that the graph lists them all (fused graphs, mixtures of
    # experts): nothing is repeated.
    span = next((s for family, s in SPANS.items() if model.startswith(family)), None)
    if span is None or any(span.second in name for name in names):
        return repeats
    order = list(names)
    if span.first not in order or span.last not in order:
        raise DatasetError(
            f"the graph of {model} has no {span.first!r} or no {span.last!r}",
            hint="one layer must be listed from the first to the last of its nodes",
        )
    first, last = order.index(span.first), order.index(span.last)
    # By position, and by name for nodes of the layer that were traced out of order.
    inside = np.array(
        [first <= i <= last or n.startswith(span.prefix) for i, n in enumerate(order)]
    )
    repeats[inside] = layers
    return repeats


def label_layers(labels: pd.DataFrame) -> np.ndarray:
    """Find the number of layers of each label's model, shape ``(n,)``.

    Taken from the label, else from another label of the same model, else from :data:`LAYERS`; 1 for
    a model without a repeated layer.

    Raises:
        DatasetError: No source knows the layers of a model that has them.
    """
    given = labels["n_layer"].fillna(0).astype(int)
    others = given[given > 0].groupby(labels["model"]).first().to_dict()
    result = []
    for model, own in zip(labels["model"].astype(str), given, strict=True):
        layers = int(own) or int(others.get(model, 0)) or LAYERS.get(model, 0)
        if not layers and any(model.startswith(family) for family in SPANS):
            raise DatasetError(f"the number of layers of {model!r} is not known", hint="n_layer")
        result.append(layers or 1)
    return np.array(result)
