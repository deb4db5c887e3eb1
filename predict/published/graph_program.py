"""Programs of published labels: executions of each unique operation and collective.

Graphs list one layer of a model between its prologue and epilogue; fused graphs and mixtures of
experts list every layer. Variants in a label's last word: ``dp4`` is data-parallel on 4 devices
(the graph is one device's share of the batch), ``tp4`` tensor-parallel (the graph is one device's
shard), ``pp4_2`` a pipeline of 4 stages with 2 micro-batches (the graph is the whole model for one
micro-batch: ``gpt3_xl-train-2048-4-pp4_4`` has 2048 rows, a fourth of those of ``pp4_1``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ...common.errors import DatasetError
from ...common.files import own_data
from ...features.operators.op import Op
from ..operator.prices import PROBE, eager_row
from .opgraph import COLLECTIVES, OP_COLUMNS, element_width, graph_ops, op_rows

#: Columns of the table of collectives; ``bytes`` is the buffer.
COLLECTIVE_COLUMNS = ("device", "op", "bytes", "world_size", "dtype")
#: Calls with almost no work. That of a product is used for products where it is the shorter one:
#: products were measured on more chips than passes.
PROBES = (PROBE, Op("bmm", (1, 16, 16, 16), "f32"))
_OPS = {"ALLREDUCE": "all_reduce", "ALLREDUCE_ASYNC": "all_reduce", "SENDRECV": "send_recv"}


@dataclass(frozen=True)
class LayerSpan:
    """The nodes of a family's graphs that make up the repeated layer.

    Attributes:
        first: Name of its first node.
        last: Name of its last node.
        prefix: Name prefix of nodes that belong to it at any position.
        second: Name prefix of nodes in a second layer, which mark graphs that list every layer.
    """

    first: str
    last: str
    prefix: str
    second: str


_DATA: Any = own_data("predict/published/graphs.yaml")
#: Repeated layers by family, and numbers of layers of models whose labels omit them.
SPANS = {family: LayerSpan(**own) for family, own in _DATA["spans"].items()}
LAYERS: dict[str, int] = _DATA["layers"]


@dataclass(frozen=True)
class Variant:
    """Parallelism under which a label was measured.

    Attributes:
        kind: ``single``, ``fusion``, ``dp``, ``tp`` or ``pp``.
        devices: Number of devices.
        micro_batches: Micro-batches of a pipeline; 1 otherwise.
    """

    kind: str = "single"
    devices: int = 1
    micro_batches: int = 1

    @property
    def pipeline_share(self) -> float:
        """Time of a pipeline over that of one micro-batch through all stages on one device.

        With equal stages, ``m`` micro-batches take ``m + p - 1`` stage times, and a single one
        takes ``p`` (GPipe: Huang et al., NeurIPS 2019).
        """
        return (self.micro_batches + self.devices - 1) / self.devices if self.kind == "pp" else 1.0

    @property
    def pipeline_hops(self) -> int:
        """Consecutive exposed transfers between stages, in each direction."""
        return self.devices + self.micro_batches - 2 if self.kind == "pp" else 0


def parse_variant(text: object) -> Variant:
    """Parse the variant of a label; empty, None and NaN mean a plain run on one device.

    Raises:
        DatasetError: The variant is not one of ``fusion``, ``dpN``, ``tpN`` and ``ppN_M``.
    """
    # ``text != text`` is true only for NaN, which pandas reads from an empty cell.
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
    # A node of a second layer means that the graph lists all layers (fused graphs, mixtures of
    # experts), so nothing is repeated.
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
    """Return the number of layers of each label's model, shape ``(n,)``.

    Taken from the label, else from another label of the same model, else from :data:`LAYERS`; 1 for
    a model without a repeated layer.

    Raises:
        DatasetError: The number of layers of a model with a repeated layer is unknown.
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


@dataclass(frozen=True)
class Term:
    """One operation of a label: ``times`` executions of a row of a table of unique operations.

    Attributes:
        phase: ``fw``, ``bw`` or ``acc``.
        kind: Kind of operation in the graph; ``JOIN`` for traffic that joins another kernel.
        row: Position in the table of its kind (operations or collectives).
        times: Executions.
        size: Bytes of one collective; 0 for a kernel.
    """

    phase: str
    kind: str
    row: int
    times: float
    size: float = 0.0


@dataclass(frozen=True)
class GraphProgram:
    """The work of one label.

    Attributes:
        variant: Parallelism of the label.
        terms: Operations and collectives of the label.
        probes: Rows of operations with almost no work, whose latency is that of a launch.
    """

    variant: Variant
    terms: list[Term]
    probes: list[int]


@dataclass(frozen=True)
class GraphPrograms:
    """The programs of all labels.

    Attributes:
        programs: One for each label, in their order.
        operations: Unique operations: ``device`` and the columns of the published op schema.
        collectives: Unique collectives, with :data:`COLLECTIVE_COLUMNS`.
    """

    programs: list[GraphProgram]
    operations: pd.DataFrame
    collectives: pd.DataFrame


class _Unique:
    """Unique rows of a table in order of first occurrence."""

    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []
        self._places: dict[tuple[object, ...], int] = {}

    def place(self, row: dict[str, object]) -> int:
        key = tuple(row.values())
        if key not in self._places:
            self._places[key] = len(self.rows)
            self.rows.append(row)
        return self._places[key]

    def table(self, columns: tuple[str, ...]) -> pd.DataFrame:
        frame = pd.DataFrame(self.rows, columns=list(columns))
        # A nullable dtype: NumPy's integers have no missing values, and floats would round large
        # sizes.
        whole = [c for c in ("b", "m", "n", "k", "rows", "cols", "n_in") if c in frame]
        return frame.astype(dict.fromkeys(whole, "Int64"))


def graph_programs(labels: pd.DataFrame, graphs: pd.DataFrame) -> GraphPrograms:
    """Read the graph of every label.

    Args:
        labels: ``desc``, ``device``, ``model``, ``mode``, ``n_layer``, optionally ``variant`` and
            ``dtype``.
        graphs: Nodes of all graphs, in order, with the name of the graph in ``desc``.

    Raises:
        DatasetError: A graph is missing, or a list in it cannot be read.
    """
    ops, links = _Unique(), _Unique()
    by_name = dict(tuple(graphs.groupby("desc", sort=False)))
    programs = []
    for label, layers in zip(labels.to_dict("records"), label_layers(labels), strict=True):
        graph = by_name.get(label["desc"])
        if graph is None:
            raise DatasetError(f"no op graph is named {label['desc']!r}", hint="check graphs")
        plain = {str(k): v for k, v in label.items()}
        variant = parse_variant(plain.get("variant"))
        terms = _terms(plain, graph, int(layers), variant, ops, links)
        programs.append(GraphProgram(variant, terms, [ops.place(row) for row in _probes(plain)]))
    operations = ops.table(("device", *OP_COLUMNS))
    return GraphPrograms(programs, operations, links.table(COLLECTIVE_COLUMNS))


def _probes(label: dict[str, object]) -> list[dict[str, object]]:
    rows = [eager_row(probe, _dtype(label)) for probe in PROBES]
    device = label["device"]
    return [{"device": device, **{name: row.get(name) for name in OP_COLUMNS}} for row in rows]


def _dtype(label: dict[str, object]) -> str:
    given = label.get("dtype")
    return str(given) if given is not None and given == given else "fp32"


def _terms(
    label: dict[str, object],
    graph: pd.DataFrame,
    layers: int,
    variant: Variant,
    ops: _Unique,
    links: _Unique,
) -> list[Term]:
    dtype, device = _dtype(label), label["device"]
    # Labels without a known dtype belong to the f32 tables.
    width = element_width(dtype)
    repeats = node_repeats([str(n) for n in graph["Name"]], str(label["model"]), layers)
    # Equal operations are one term, since their errors are common and interval widths add up.
    totals: dict[tuple[str, str, int, float], float] = {}
    for phase, op, times in graph_ops(graph, str(label["mode"]), repeats, width):
        size = 0.0
        if op.kind in COLLECTIVES:
            size = float(op.shape[0]) * width
            # A transfer between stages has two ends, however many stages the pipeline has.
            world = 2 if op.kind == "SENDRECV" else variant.devices
            link = {"device": device, "op": _OPS[op.kind], "bytes": size, "world_size": world}
            row = links.place({**link, "dtype": dtype})
        else:
            row = ops.place({"device": device, **op_rows(op, dtype)})
        key = (phase, op.kind, row, size)
        totals[key] = totals.get(key, 0.0) + times
    return [Term(phase, kind, row, n, size) for (phase, kind, row, size), n in totals.items()]
