"""Lowering by our own fusion rules: roughly what XLA's GPU pipeline makes of a program."""

from __future__ import annotations

from ....common.errors import LoweringError
from ...devices.device import DeviceSpec
from ...ir.program import Program
from ...ir.reader import SourceProgram
from ...kernels.extract import extract_kernels
from ...kernels.kernel import LoweredProgram
from ...kernels.memory import peak_memory
from ..op import uncosted_notes, whole_notes
from .clusters import Clusters
from .convolutions import canonical_convs, expand_ops
from .emit import ComputationWriter, Emitter
from .epilogues import fuse_epilogues, fuse_softmax
from .graph import Graph, build_graph
from .loops import copy_loop_state, drop_dead_state, merge_counters
from .multi_output import HorizontalFusion, MultiOutputFusion
from .on_chip import on_chip_of, place_on_chip
from .priority import PriorityFusion, join_fills, own_fills
from .products import canonical_dots, merge_dots, sink_transposes
from .reductions import pad_products, reduce_vector_products, split_reductions
from .simplify import simplify
from .work import Machine, machine_of


def lower_fused(
    source: SourceProgram, device: DeviceSpec | None = None, *, horizontal: bool = False
) -> LoweredProgram:
    """List roughly the kernels that a GPU compiler would make.

    Args:
        source: StableHLO or HLO that is not optimised yet.
        device: Decides which fusions pay and what the libraries offer; an H100 stands in for any
            device that is not a GPU.
        horizontal: Whether independent work shares kernels, as in compilers before JAX 0.10.

    Raises:
        ProgramError: The program is malformed.
        LoweringError: The program is optimised already.
    """
    if source.program.is_scheduled:
        raise LoweringError(
            "the program is optimised already", where=source.origin, hint="use --lowering xla"
        )
    machine = machine_of(device)
    program = source.program
    graph = build_graph(program)
    emitter = Emitter(program)
    # As in XLA: expansions and simplifications first, then the libraries' forms, then fusion. Each
    # pass relies on the forms that those before it leave.
    expand_ops(graph, program)
    simplify(graph, program)
    merge_counters(graph)
    drop_dead_state(graph)
    # Library forms leave reshapes and transposes between ops, hence simplify() once more after it.
    prepare(graph, machine, program)
    simplify(graph, program)
    writer = _fused(graph, machine, emitter, is_entry=True, horizontal=horizontal)
    emitter.add(writer.write("main"))
    memory = on_chip_of(device)
    if memory is not None:
        place_on_chip(emitter.program, memory)
    kernels, notes = extract_kernels(emitter.program)
    notes += [*whole_notes(program, kernels), *uncosted_notes(kernels)]
    if device is not None and device.platform != "gpu":
        notes.append(
            f"{device.name} is a {device.platform}, but lowering fused has the fusion rules of "
            "GPUs only"
        )
    return LoweredProgram(
        kernels=kernels,
        lowering="fused",
        target=device.name if device is not None else "gpu",
        peak_memory_bytes=peak_memory(emitter.program),
        memory_source="liveness",
        notes=notes,
        module=emitter.program,
    )


def prepare(graph: Graph, machine: Machine, program: Program) -> None:
    """Bring products and convolutions into the libraries' form, in loops and branches too."""
    for node in graph.nodes():
        for inner in node.graphs:
            prepare(inner, machine, program)
    canonical_dots(graph)
    canonical_convs(graph, machine)
    simplify(graph, program)
    reduce_vector_products(graph, program)
    sink_transposes(graph)
    simplify(graph, program)
    merge_dots(graph)
    # After merging: a merged product may be a multiple of eight where its parts are not.
    pad_products(graph)
    split_reductions(graph)


def _fused(
    graph: Graph,
    machine: Machine,
    emitter: Emitter,
    *,
    is_entry: bool = False,
    horizontal: bool = False,
) -> ComputationWriter:
    copy_loop_state(graph)
    own_fills(graph)
    bodies: dict[int, tuple[str, ...]] = {}
    for node in graph.nodes():
        if node.graphs:
            names = []
            for inner in node.graphs:
                writer = _fused(inner, machine, emitter)
                one = node.opcode == "conditional"
                body = writer.write(emitter.name("body"), one_parameter=one)
                names.append(emitter.add(body))
            bodies[id(node)] = tuple(names)
    clusters = Clusters(graph)
    fuse_epilogues(clusters)
    if machine.tensor_fusion:
        fuse_softmax(clusters)
    # The order is XLA's: library epilogues and softmax kernels are fixed before loops are fused,
    # and kernels get several results only at the end.
    PriorityFusion(clusters, machine).run()
    # CopyFusion runs on the entry computation only (priority.py).
    if is_entry:
        join_fills(clusters)
    MultiOutputFusion(clusters, machine).run()
    if horizontal and is_entry:
        HorizontalFusion(clusters).run()
    return ComputationWriter(emitter, clusters, bodies)
