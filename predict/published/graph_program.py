"""Programs of published labels: how often each unique operation and collective runs."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from ...common.errors import DatasetError
from ..operator.eager import PROBE
from .graph_layers import Variant, label_layers, node_repeats, parse_variant
from .opgraph import COLLECTIVES, OP_COLUMNS, GraphOp, element_width, graph_ops, op_rows

#: Columns of the table of collectives; ``bytes`` is the buffer.
COLLECTIVE_COLUMNS = ("device", "op", "bytes", "world_size", "dtype")
_OPS = {"ALLREDUCE": "all_reduce", "ALLREDUCE_ASYNC": "all_reduce", "SENDRECV": "send_recv"}


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
        probe: Row of the operation with almost no work, whose latency is that of the launch.
    """

    variant: Variant
    terms: list[Term]
    probe: int


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
    """Unique rows of a table in the order in which they were first seen."""

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
        # A nullable dtype: NumPy's integers have no gaps, and as floats large sizes would be
        # rounded.
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
        programs.append(GraphProgram(variant, terms, ops.place(_probe(plain))))
    operations = ops.table(("device", *OP_COLUMNS))
    return GraphPrograms(programs, operations, links.table(COLLECTIVE_COLUMNS))


def _probe(label: dict[str, object]) -> dict[str, object]:
    return {"device": label["device"], **op_rows(GraphOp("VECrelu", PROBE.shape), _dtype(label))}


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
    # Labels without a known dtype are those of the f32 tables.
    width = element_width(dtype)
    repeats = node_repeats([str(n) for n in graph["Name"]], str(label["model"]), layers)
    # Equal operations are one term: interval widths add up within it, as their errors are common.
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
