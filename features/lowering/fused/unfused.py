"""What every compiler adds to a program before it fuses: work that no reading op by op may lack."""

from __future__ import annotations

from ...ir.op_table import UPDATES
from ...ir.reader import SourceProgram
from ..op import ragged_notes
from .clusters import Clusters
from .emit import ComputationWriter, Emitter, bodies_of
from .expansions import expand_ops
from .graph import Graph, build_graph
from .loops import copy_loop_state, copy_overwritten

#: Ops without a kernel whose expansion is other work than their own: products for every group
#: instead of one, sorted rows instead of rows that are read once.
EXPANDED = frozenset(("ragged-dot", "topk"))


def as_run(source: SourceProgram, platform: str) -> tuple[SourceProgram, list[str]]:
    """The program with such ops spelled out, and with copies of what it and its loops overwrite.

    Args:
        source: StableHLO or HLO.
        platform: ``cpu``, ``gpu`` or ``tpu``.

    Returns:
        The source itself if nothing is added, and notes.
    """
    program = source.program
    opcodes = [op.opcode for own in program.computations.values() for op in own.ops]
    if program.is_scheduled or not (EXPANDED | UPDATES | {"while"}).intersection(opcodes):
        return source, []
    graph, emitter = build_graph(program), Emitter(program)
    expand_ops(graph, program, platform, EXPANDED)
    writer = _unfused(graph, emitter)
    copy_overwritten(writer.clusters, {parameter for _, parameter in program.aliases})
    emitter.add(writer.write("main"))
    made = {op.opcode for own in emitter.program.computations.values() for op in own.ops}
    # Graphs have no copies but those that were added.
    if "copy" not in made and EXPANDED & made == EXPANDED.intersection(opcodes):
        return source, []
    notes = [] if "ragged-dot" in made else ragged_notes(opcodes, ())
    return source.with_program(emitter.program), notes


def _unfused(graph: Graph, emitter: Emitter) -> ComputationWriter:
    """Writer of a graph each of whose ops is a kernel, its loops and branches written."""
    copy_loop_state(graph)
    bodies = bodies_of(graph, emitter, _unfused)
    return ComputationWriter(emitter, Clusters(graph), bodies, wrapped=False)
