"""Kernels of calls that launch several: recurrent layers, and operators over lists of tensors.

cuDNN runs recurrent layers in one call with few kernels:

    forward:  inputs · weights over the whole sequence; per step states · weights and the cell
    backward: per step the cell and its gradient · weights; three products over the sequence

(Appleyard, Kocisky and Blunsom, Optimizing Performance of Recurrent Neural Networks on GPUs,
arXiv:1604.01946, 2016, sections 3 and 4.) The steps are sequential; layers may overlap, and
persistent kernels keep the weights on the chip, which the lower bound of the interval allows for.

Optimizers call operators over lists. A launch of ``multi_tensor_apply`` takes a limited number of
tensors, which depends on the number of lists read and written, and a limited number of blocks of
one chunk each (MultiTensorApply.cuh: ``depth_to_max_tensors``, ``depth_to_max_blocks``,
``kChunkSize``).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, prod

from ...features.cost.formats import ALIASES, FORMATS
from ...features.ir.torch.record import AtenCall
from ...features.ir.torch.stand_ins import RNN, RNN_BACKWARD, Sizes
from ...features.operators.op import Op, product_bytes

#: State values per unit that a cell reads and writes besides its gates (the gates are read twice:
#: the input's product and the state's): the state before, after, and the output; backward also the
#: gradients of state and output.
_STATES = {RNN: 3, RNN_BACKWARD: 5}
#: Names of the sequential kernels.
STEPS = ("cudnn_rnn steps", "cudnn_rnn cells")
#: Limits of a launch over lists: tensors by number of lists, blocks, and elements per block.
_TENSORS = (110, 64, 48, 36, 30)
_BLOCKS, _CHUNK = 320, 65536


def is_recurrent(name: str) -> bool:
    """Return whether a call is a library call of recurrent layers."""
    return name in (RNN, RNN_BACKWARD)


def recurrent_ops(call: AtenCall) -> list[Op]:
    """Return the products and cells of recurrent layers; equal steps are one op with a scale."""
    sizes = Sizes(*(call.whole(at) for at in range(len(Sizes._fields))))
    dtype = ALIASES.get(call.inputs[0].dtype, "f32")
    # torch.backends.cudnn.allow_tf32 is on by default, unlike for matrix products.
    own = "tf32" if dtype == "f32" else dtype
    width = FORMATS[own].element_bytes
    found = []
    for rows, columns, depth, times in _products(sizes, call.name == RNN_BACKWARD):
        moved = float(sum(product_bytes(1, rows, columns, depth, width, width)))
        shape = (1, rows, columns, depth)
        name = STEPS[0] if times > sizes.layers * sizes.directions else "cudnn_rnn"
        found.append(Op("bmm", shape, own, scale=float(times), name=name, traffic=moved))
    cell = width * sizes.batch * sizes.hidden * (2 * sizes.gates + _STATES[call.name])
    each = float(sizes.steps * sizes.layers * sizes.directions)
    moves = Op("move", (max(1, round(cell)),), dtype, each, name=STEPS[1], traffic=cell)
    return [*found, moves]


def _products(sizes: Sizes, backward: bool) -> Iterator[tuple[int, int, int, int]]:
    """Yield rows, columns, depth and number of the products."""
    gates, layers, directions, steps, batch, given, hidden, shown = sizes
    wide, all_steps = gates * hidden, steps * batch
    # The first layer reads the input, the others the output of the layer before.
    inputs = [(given, directions), (directions * shown, (layers - 1) * directions)]
    for depth, times in inputs:
        if times:
            yield (all_steps, depth, wide, times) if backward else (all_steps, wide, depth, times)
            if backward:
                yield wide, depth, all_steps, times
    each = layers * directions
    yield (batch, shown, wide, steps * each) if backward else (batch, wide, shown, steps * each)
    if backward:
        yield wide, shown, all_steps, each
    if shown != hidden:
        yield batch, shown, hidden, steps * each


def is_over_lists(name: str) -> bool:
    """Return whether an operator works on lists of tensors."""
    return name.startswith(("aten._foreach", "aten._fused_adam", "aten._fused_sgd"))


def list_launches(call: AtenCall) -> int:
    """Return the number of launches of an operator over lists."""
    each, given, written = list_length(call), len(call.inputs), len(call.outputs)
    if call.name.startswith("aten._fused_adam"):
        lists = 4
    elif call.name.startswith("aten._fused"):
        lists = given // each
    else:
        lists = max((given if call.name.endswith("_") else given + written) // each, 1)
    chunks = sum(ceil(prod(t.shape) / _CHUNK) for t in call.outputs[:each])
    return max(1, ceil(each / _TENSORS[min(lists, 5) - 1]), ceil(chunks / _BLOCKS))


def list_length(call: AtenCall) -> int:
    """Return the tensors in each list of an operator over lists."""
    given, written = len(call.inputs), len(call.outputs)
    if call.name.startswith("aten._fused_adam"):
        # Lists: parameters, gradients, two moments (three written); the step counts come besides.
        return max((given - written) // 2, 1)
    # Of what is fused, gradients are only read.
    return max(given - written if call.name.startswith("aten._fused") else written, 1)
