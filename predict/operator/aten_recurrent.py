"""Recurrent layers as cuDNN runs them: one call, few kernels.

    forward:  inputs · weights over the whole sequence; for each step states · weights and the cell
    backward: for each step the cell and its gradient · weights; three products over the sequence

(Appleyard, Kocisky and Blunsom, Optimizing Performance of Recurrent Neural Networks on GPUs,
arXiv:1604.01946, 2016, sections 3 and 4.) The steps follow one another; layers may overlap, and
persistent kernels keep the weights on the chip, which the lower end of the interval allows for.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...features.cost.formats import ALIASES, FORMATS
from ...features.ir.torch.record import AtenCall
from ...features.ir.torch.stand_ins import RNN, RNN_BACKWARD, Sizes
from ...features.operators.op import Op, product_bytes

#: Values of a unit of the state that a cell reads and writes beside its gates, each read twice (of
#: the input's product and of the state's): the state before, after, and what is returned; backward
#: also the gradients of state and result.
_STATES = {RNN: 3, RNN_BACKWARD: 5}
#: Names of what follows step by step.
STEPS = ("cudnn_rnn steps", "cudnn_rnn cells")


def is_recurrent(name: str) -> bool:
    """Whether a call is a library's of recurrent layers."""
    return name in (RNN, RNN_BACKWARD)


def recurrent_ops(call: AtenCall) -> list[Op]:
    """The products and cells of recurrent layers; those of equal steps are one of that scale."""
    sizes = Sizes(*(call.whole(at) for at in range(len(Sizes._fields))))
    dtype = ALIASES.get(call.inputs[0].dtype, "f32")
    # torch.backends.cudnn.allow_tf32 is on by default.
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
    """Rows, columns, depth and number of the products."""
    gates, layers, directions, steps, batch, given, hidden, shown = sizes
    wide, all_steps = gates * hidden, steps * batch
    # The first layer reads the input, the others what those before return.
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
