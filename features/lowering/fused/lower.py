"""Lower a program with this project's fusion rules, which approximate XLA's pipelines."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import ceil, prod, sqrt

from ....common.errors import LoweringError
from ...cost.flops import op_cost
from ...devices.device import DeviceSpec
from ...ir.op_table import ELEMENTWISE, UPDATES
from ...ir.precision import as_computed
from ...ir.program import Computation, Op, Program, TensorType
from ...ir.reader import SourceProgram
from ...kernels.extract import extract_kernels
from ...kernels.kernel import LoweredProgram
from ...kernels.memory import entry_bytes, peak_memory
from ..op import ragged_notes, uncosted_notes, whole_notes
from .clusters import FOLDS, Clusters
from .convolutions import canonical_convs
from .emit import ComputationWriter, Emitter, bodies_of
from .epilogues import fuse_epilogues
from .expansions import expand_ops
from .folding import converted
from .generated import WIDENED, fuse_generated
from .graph import Graph, Node, build_graph, rewrite_all
from .layouts import assign_layouts
from .loops import (
    copy_loop_state,
    copy_overwritten,
    copy_results,
    drop_dead_state,
    inline_branches,
    join_fills,
    merge_counters,
    own_fills,
)
from .machine import Machine, machine_of
from .multi_output import HorizontalFusion, MultiOutputFusion
from .on_chip import on_chip_of, place_on_chip, prefetch
from .priority import PriorityFusion
from .product_rewrites import SMALL_PRODUCT, merge_dots, reduce_vector_products, sum_vector_products
from .products import canonical_dots, convolved_products, host_products, widen_products
from .reductions import pad_products, split_products, split_reductions
from .reshapes import join_by_maxima, move_reshapes
from .rows import fuse_softmax
from .simplify import simplify
from .transposes import move_transposes, sink_transposes
from .updates import copy_read_later, turn_loop_state, turn_updates

#: Reducers of the library's reductions and their types; it also has elementwise ops.
_REDUCERS, _TYPES = frozenset(("add", "maximum", "minimum")), frozenset(("f32", "f16", "bf16"))
_BESIDE = frozenset(("parameter", "constant", "broadcast", "reduce", "bitcast"))
#: Elementwise ops that the library lacks.
_LACKED = frozenset(("select", "compare", "is-finite", "clamp"))
#: Minimum bytes, or units of work, per part of a parallel loop, and the work of a transcendental
#: and of a byte (ParallelCostModel in XLA's cpu/parallel_task_assignment.cc; JAX 0.10.2 splits ten
#: loops for two cores from the sizes that these give).
_PART_BYTES, _PART_WORK = 256 << 10, 100_000
_TRANSCENDENTAL_WORK, _BYTE_WORK = 2, 10
#: Ops without a kernel whose expansion does different work: products for every group instead of
#: one, rows that are sorted instead of read once.
EXPANDED = frozenset(("ragged-dot", "topk", "fft"))


def lower_fused(
    source: SourceProgram,
    device: DeviceSpec | None = None,
    *,
    horizontal: bool = False,
    generated: bool = True,
) -> LoweredProgram:
    """List approximately the kernels that a GPU compiler would make.

    Args:
        source: StableHLO, or HLO before optimisation.
        device: Determines which fusions pay off and what the libraries offer; an H100 is assumed
            for any device that is not a GPU.
        horizontal: Whether independent work shares kernels, as in compilers before JAX 0.10.
        generated: Whether producers and consumers are fused into products with generated kernels.

    Raises:
        ProgramError: The program is malformed.
        LoweringError: The program is already optimised.
    """
    if source.program.is_scheduled:
        raise LoweringError(
            "the program is optimised already", where=source.origin, hint="use --lowering xla"
        )
    platform = device.platform if device is not None else "gpu"
    machine = machine_of(device)
    if not generated:
        machine = replace(machine, converted=frozenset())
    program = source.program
    graph = build_graph(program)
    emitter = Emitter(program)
    # As in XLA: expansions and simplifications first, then library forms, then fusion. Each pass
    # relies on the output of those before it.
    expand_ops(graph, program, platform)
    inline_branches(graph)
    simplify(graph, program)
    merge_counters(graph)
    drop_dead_state(graph)
    # Library forms leave reshapes and transposes between ops, hence another simplify() after it.
    prepare(graph, machine, program, is_entry=True)
    if not machine.fused_products:
        widen(graph, machine, program)
    simplify(graph, program)
    donated = {parameter for _, parameter in program.aliases}
    copy_results(graph, donated)
    if machine.fused_products:
        join_by_maxima(graph)
        assign_layouts(graph)
    writer = _fused(graph, machine, emitter, donated, is_entry=True, horizontal=horizontal)
    # Last, as in XLA: only values that are updated in place start from a copy.
    if platform == "gpu":
        copy_read_later(writer.clusters)
    copy_overwritten(writer.clusters, donated)
    emitter.add(writer.write("main"))
    memory = on_chip_of(device)
    if memory is not None:
        prefetch(emitter.program, memory)
        place_on_chip(emitter.program, memory)
    if machine.host:
        as_on_host(emitter.program, device.core_count if device is not None else 1)
    module = as_computed(emitter.program, platform)
    kernels, notes = extract_kernels(module)
    notes += [*whole_notes(program, kernels), *uncosted_notes(kernels)]
    opcodes = [op.opcode for c in program.computations.values() for op in c.ops]
    notes += ragged_notes(opcodes, kernels)
    if device is not None and device.platform != "gpu":
        rules = "a CPU's rules for products, sums, bf16 and library calls alone, GPUs' for the rest"
        if machine.fused_products:
            rules = "a TPU's rules for layouts, products and windows alone, GPUs' for the rest"
        notes.append(f"{device.name} is a {device.platform}, but lowering fused has {rules}")
    return LoweredProgram(
        kernels=kernels,
        lowering="fused",
        target=device.name if device is not None else "gpu",
        peak_memory_bytes=peak_memory(module),
        memory_source="liveness",
        notes=notes,
        entry_bytes=entry_bytes(module),
        module=module,
    )


def prepare(graph: Graph, machine: Machine, program: Program, *, is_entry: bool = False) -> None:
    """Bring products and convolutions into their libraries' form, in loops and branches too."""
    # TPU products read any dimension order and need no library form.
    if machine.fused_products:
        sum_vector_products(graph, program)
        convolved_products(graph)
        move_reshapes(graph)
        return
    if is_entry and not machine.host:
        turn_loop_state(graph)
    for node in graph.nodes():
        for inner in node.graphs:
            prepare(inner, machine, program)
    if machine.tensor_fusion and not machine.host:
        sum_vector_products(graph, program, batches=2)
    if machine.host:
        host_products(graph)
    move_transposes(graph)
    simplify(graph, program)
    widen_products(graph, machine.narrow)
    canonical_dots(graph, any_order=machine.tensor_fusion)
    canonical_convs(graph, machine)
    simplify(graph, program)
    # A CPU's compiler leaves matrix products of any size to its library.
    reduce_vector_products(graph, program, 0 if machine.host else SMALL_PRODUCT)
    sink_transposes(graph)
    if is_entry and not machine.host:
        turn_updates(graph)
    simplify(graph, program)
    merge_dots(graph)
    # After merging: a merged product is larger, and its size may be a multiple of eight even if the
    # sizes of its parts are not.
    if machine.converted:
        split_products(graph, machine, program)
    if not machine.tensor_fusion:
        pad_products(graph)
    if not machine.host:
        split_reductions(graph)


def _fused(
    graph: Graph,
    machine: Machine,
    emitter: Emitter,
    donated: Collection[int] = (),
    *,
    is_entry: bool = False,
    horizontal: bool = False,
) -> ComputationWriter:
    copy_loop_state(graph, donated)
    own_fills(graph)
    bodies = bodies_of(graph, emitter, lambda inner, _: _fused(inner, machine, emitter))
    clusters = Clusters(graph, fused_products=machine.fused_products)
    if machine.converted:
        fuse_generated(clusters, machine.converted, is_entry=is_entry)
    if not machine.host:
        fuse_epilogues(clusters, is_entry=is_entry)
    if machine.tensor_fusion and not machine.host:
        fuse_softmax(clusters)
    # As in XLA: library epilogues and softmax kernels are fixed before loops are fused, and
    # multi-output fusion comes last.
    PriorityFusion(clusters, machine, emitter.origin).run()
    # CopyFusion runs on the entry computation only (priority.py).
    if is_entry:
        join_fills(clusters)
    if not machine.host:
        MultiOutputFusion(clusters, machine).run()
    if horizontal and is_entry:
        HorizontalFusion(clusters).run()
    return ComputationWriter(emitter, clusters, bodies)


# bf16 arithmetic without GPU instructions runs in f32 between conversions, as in XLA's
# FloatNormalization with GpuFloatSupport: moves, comparisons, selects, signs, ``exp`` and ``log``
# stay in bf16, as do sums and products from compute capability 9.0 on; all other elementwise ops,
# and reductions by them, become f32. f16 is unchanged. The sets agree with the opcodes of 800
# programs compiled for an H100 and an A100 (JAX 0.10). A CPU computes in f32 only.
_NARROW, _WIDE = "bf16", "f32"
#: Elementwise ops that stay in bf16 on every GPU.
_KEPT = frozenset(
    ("abs", "and", "compare", "convert", "exponential", "log", "maximum", "minimum", "negate")
) | {"reduce-precision", "select", "bitcast-convert"}
#: Ops that stay in bf16 from compute capability 9.0 on.
_ARITHMETIC = frozenset(("add", "multiply", "subtract"))
#: Ops that stay in bf16 on a CPU; its reducers are treated as on every GPU.
_HOST_KEPT = frozenset(("convert", "bitcast-convert"))


def widen(graph: Graph, machine: Machine, program: Program) -> None:
    """Convert to f32 and back around ops without a bf16 version, in loops and branches too.

    Args:
        graph: Changed in place.
        machine: Determines whether bf16 sums and products are native.
        program: Receives the reducers on f32.
    """
    kept = _KEPT | _ARITHMETIC if machine.bf16_arithmetic and not machine.host else _KEPT
    alone = _HOST_KEPT if machine.host else kept

    def rule(node: Node) -> Node | None:
        if node.is_tuple or not any(t.dtype == _NARROW for t in _types(node)):
            return None
        # A CPU's scatter converts the whole array to f32.
        scatters = machine.host and node.opcode == "scatter"
        if node.opcode in FOLDS or scatters:
            inside = program.computations[node.called[0]].ops if node.called else []
            native = all(op.opcode == "parameter" or op.opcode in kept for op in inside)
            native &= not scatters
            return None if native else _wide(node, tuple(_reducer(n, program) for n in node.called))
        # Ops that CHLO expands are a single op here, which converts internally.
        own = node.opcode in ELEMENTWISE and node.opcode not in alone
        return _wide(node, ()) if own else None

    rewrite_all(graph, rule)


def _types(node: Node) -> list[TensorType]:
    return [*node.results, *(operand.type for operand in node.operands)]


def _wide(node: Node, called: tuple[str, ...]) -> Node:
    """Return the op computed in f32, with its result converted back."""
    operands = [converted(o, _WIDE) if o.type.dtype == _NARROW else o for o in node.operands]
    kind = node.type._replace(dtype=_WIDE) if node.type.dtype == _NARROW else node.type
    made = replace(node, operands=operands, results=(kind,), called=called)
    if kind == node.type:
        return made
    return Node("convert", [made], (node.type,), {WIDENED: True}, source=made.source)


def _reducer(name: str, program: Program) -> str:
    """Return the name of a reducer's f32 version, which is made on first use."""
    wide = f"{name}.{_WIDE}"
    if wide not in program.computations:
        own = program.computations[name]
        ops = [
            replace(op, results=tuple(
                t._replace(dtype=_WIDE) if t.dtype == _NARROW else t for t in op.results
            ))
            for op in own.ops
        ]  # fmt: skip
        program.computations[wide] = replace(own, name=wide, ops=ops)
    return wide


def as_on_host(program: Program, cores: int) -> None:
    """Give fusions the kind and the number of parallel parts that XLA:CPU would give them.

    Args:
        program: Fused by the rules for GPUs; changed in place.
        cores: Number of CPU cores.
    """
    for computation in [*program.computations.values()]:
        for op in computation.ops:
            if op.opcode != "fusion":
                continue
            if _by_library(program.computations[op.called[0]], program):
                config = {"fusion_config": {"kind": "__ynn_fusion"}}
                op.attrs |= {"kind": "kCustom", "backend_config": config}
                continue
            op.attrs["kind"] = "kLoop"
            parts = _parts(op, computation, program, cores)
            if parts > 1:
                op.attrs["backend_config"] = {"outer_dimension_partitions": [str(parts)]}


def _by_library(inner: Computation, program: Program) -> bool:
    reductions = [op for op in inner.ops if op.opcode == "reduce"]
    if not reductions or any(op.is_tuple for op in reductions):
        return False
    reducers = {program.computations[op.called[0]].root_op.opcode for op in reductions}
    others = {op.opcode for op in inner.ops} - _BESIDE
    typed = all(op.type.dtype in _TYPES for op in reductions)
    return typed and reducers <= _REDUCERS and others <= ELEMENTWISE - _LACKED


def _parts(op: Op, computation: Computation, program: Program, cores: int) -> int:
    """Count the parts of a loop: by its bytes if memory-bound, otherwise by its total work."""
    cost = op_cost(op, computation, program)
    if cost.flops <= cost.bytes:
        most, parts = ceil(sqrt(cores)), int(cost.bytes) // _PART_BYTES
    else:
        work = cost.flops + _TRANSCENDENTAL_WORK * cost.transcendentals + _BYTE_WORK * cost.bytes
        most, parts = cores, int(work) // _PART_WORK
    return max(min(most, parts, prod(op.type.shape)), 1)


def as_run(source: SourceProgram, platform: str) -> tuple[SourceProgram, list[str]]:
    """Expand the ops in ``EXPANDED``, and insert copies of values that the program overwrites.

    Args:
        source: StableHLO or HLO.
        platform: ``cpu``, ``gpu`` or ``tpu``.

    Returns:
        The program and notes; the source itself if nothing is added.
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
    # The graph contains only the copies that were inserted.
    if "copy" not in made and EXPANDED & made == EXPANDED.intersection(opcodes):
        return source, []
    notes = [] if "ragged-dot" in made else ragged_notes(opcodes, ())
    return source.with_program(emitter.program), notes


def _unfused(graph: Graph, emitter: Emitter) -> ComputationWriter:
    """Return a writer for a graph with one kernel per op, after writing its loops and branches."""
    copy_loop_state(graph)
    bodies = bodies_of(graph, emitter, _unfused)
    return ComputationWriter(emitter, Clusters(graph), bodies, wrapped=False)
