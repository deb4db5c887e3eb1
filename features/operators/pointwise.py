"""Physics of passes over memory: element-wise ops, norms, softmax, quantisation, embedding."""

from __future__ import annotations

import numpy as np

from .columns import OpTable
from .gemm import FLOOR_CYCLES
from .machine import Machine
from .physics import (
    BACKENDS,
    Physics,
    combine,
    fill,
    fitted,
    least_seconds,
    log2,
    logs,
    multiples,
    other_vendor,
    resident_share,
    stream_seconds,
)
from .schema import FLAGS

EAGER_FLOOR_S = fitted("passes").numbers("eager_floor_s")
#: Operators of the published tables, one flag each.
OPS = FLAGS["passes"]
#: Elements per thread block of a vectorised element-wise kernel: 256 threads with four each, for
#: all frameworks. Engineering estimate.
BLOCK = 1024
#: Additional passes over the input of row-wise operators: maximum, sum and result of a softmax;
#: moments and result of a norm.
PASSES = {"softmax": 2.0, "ln": 1.0, "layernorm": 1.0, "rmsnorm": 1.0}
#: Rows in flight per core: softmax uses wide blocks, norms narrow ones. Engineering estimates that
#: only decide whether later passes find a row in the cache.
ROWS_IN_FLIGHT = {"softmax": 4.0, "ln": 16.0, "layernorm": 8.0, "rmsnorm": 4.0}
#: Longest softmax row that needs no second pass: PyTorch's persistent kernel keeps it in registers.
IN_REGISTERS = 1024
#: Vector instructions per element where they are many: a polynomial with range reduction (20), two
#: of them (40), a reciprocal with refinement (8). Engineering estimates.
WORK = {"gelu": 20.0, "tanh": 20.0, "pow": 40.0, "powu": 10.0, "div": 8.0, "softmax": 16.0}


def pointwise(table: OpTable) -> Physics:
    """Estimate an operator that reads ``n_in`` tensors of ``rows × cols`` and writes one."""
    rows, cols = table.numbers("rows", "cols")
    operands = np.nan_to_num(table.columns["n_in"], nan=1.0)
    mc = table.machine(multiprocessors=True)
    moved = rows * cols * _bytes_per_element(table, operands)
    # Graph and event timing repeat calls with the same operands, so small tensors stay cached.
    resident = resident_share(moved, mc.cache, 1.1, 0.5)
    in_flight, again = _again(table, rows, cols, mc)
    t_memory = stream_seconds(moved + again, resident, mc)
    # Four instructions for operators not listed: load, compute, store and addressing.
    t_vector = rows * cols * table.mapped("op", WORK, 4.0) / mc.vector
    floor = _floor(table, mc)
    base = floor + combine(t_memory, t_vector)
    row_waves, element_waves = rows / mc.cores, rows * cols / BLOCK / mc.cores
    features = {
        **{f"op_{name}": table.is_("op", name) * 1.0 for name in OPS},
        **{f"backend_{b}": table.is_("backend", b) * 1.0 for b in BACKENDS},
        # Contribution of each part to the estimate, as for products (gemm.py).
        **logs(memory_base=t_memory / base, vector_base=t_vector / base),
        "floor_base": floor / base,
        **logs(cycles=base * mc.clock),
        "resident": resident,
        **logs(rows=rows, cols=cols),
        "n_in": operands,
        **logs(row_waves=row_waves),
        "row_fill": fill(row_waves),
        **logs(waves=element_waves),
        "wave_fill": fill(element_waves),
        # Alignments required by vectorised loads.
        **multiples(cols=(cols, (4, 128))),
        "row_block_fill": cols / (np.ceil(cols / BLOCK) * BLOCK),
        "log_in_flight_cache": np.clip(log2(in_flight / mc.cache), -6, 4),
        "again": again / moved,
        "log_moved_cache": np.clip(log2(moved / mc.cache), -10, 10),
        **logs(core_bandwidth=mc.bandwidth / mc.cores / mc.clock),
    }
    return Physics(
        base,
        np.zeros(len(table)),
        least_seconds(moved, resident, mc),
        floor,
        # One FLOP per element for every operator, as XLA counts element-wise operations.
        rows * cols,
        moved,
        features,
        specific=("log_core_bandwidth",),
        keys=("log_memory_base", "floor_base", "log_rows", "log_cols", "log_moved_cache"),
    )


def _bytes_per_element(table: OpTable, operands: np.ndarray) -> np.ndarray:
    width = table.weight_bytes
    moved = (operands + 1) * width
    # Two bytes of bf16 in, one byte of fp8 out.
    moved = np.where(table.is_("op", "quantize_fp8"), 3.0, moved)
    # Gate and value lie in one tensor of ``cols`` columns; half as many elements are written.
    return np.asarray(np.where(table.is_("op", "silu_and_mul"), 1.5 * width, moved))


def _again(
    table: OpTable, rows: np.ndarray, cols: np.ndarray, mc: Machine
) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of the rows in flight, and the bytes read again from memory.

    A row-wise operator reads its row once per pass. Later passes find it in the cache as long as
    all rows in flight fit there.
    """
    width = table.weight_bytes
    in_flight = np.minimum(rows, mc.cores * table.mapped("op", ROWS_IN_FLIGHT, 1.0)) * cols * width
    # Later passes hit while the rows in flight take less than 0.3 of the cache, which they share
    # with other blocks' inputs and results, and miss above 0.9. Engineering estimates.
    missed = np.clip((in_flight / mc.cache - 0.3) / 0.6, 0, 1)
    passes = table.mapped("op", PASSES, 0.0)
    passes = np.where(table.is_("op", "softmax") & (cols <= IN_REGISTERS), 0.0, passes)
    return in_flight, passes * rows * cols * width * missed


def _floor(table: OpTable, mc: Machine) -> np.ndarray:
    method, family = table.family.split("/")
    if method == "eager":
        return np.full(len(table), EAGER_FLOOR_S[family])
    # See gemm.floor_s.
    other = other_vendor(table, 10.0)
    # Half of a GEMM's fixed cost, read off the same tables (docs/operators.md).
    return np.asarray(FLOOR_CYCLES[method] / 2 / mc.clock * other)
