"""Rough work and memory of a traced function, to keep generated programs within limits.

Only the order of magnitude matters: nothing is predicted from these figures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from .draws import DATA

#: Factor for ops whose operand is f16: few CPUs compute in it, so every op converts.
_WORK_F16 = 4.0
#: Work per element of any other op, due to memory traffic on a CPU rather than arithmetic.
_WORK_DEFAULT = 20.0
#: Work per comparison of a sort, per element of a scatter's updates, and per element of a window:
#: XLA's CPU backend hardly vectorises these.
_WORK_SORT = 400.0
_WORK_SCATTER = 600.0
_WORK_WINDOW = 100.0
#: Work of grouped convolutions, which no library supports: for one channel per group, for the
#: filter gradient, and the minimum.
_WORK_GROUPED, _WORK_BATCH_GROUPED, _WORK_GROUPED_LEAST = 600.0, 2500.0, 20.0
#: Work of products of integers, and of a vector, which are memory-bound.
_WORK_INTEGER_DOT, _WORK_VECTOR_DOT = 60.0, 25.0
#: Ops that move nothing or are removed by the compiler.
_NO_WORK = {"reshape", "squeeze", "expand_dims", "stop_gradient", "copy_p"}


@dataclass(frozen=True)
class Estimate:
    """Estimated cost of a program.

    Attributes:
        flops: Floating-point operations, one per element for ops other than products.
        work: The same weighted by how slow each op is, in FLOPs of a matrix product.
        peak_bytes: Maximum bytes alive at a time, without fusion, including arguments and results.
        n_ops: Number of ops; a loop body's ops count once.
    """

    flops: float
    work: float
    peak_bytes: float
    n_ops: int


def estimate(jaxpr: Jaxpr | ClosedJaxpr) -> Estimate:
    """Cost of a jaxpr, closed or not.

    Scans count with their trip count, other loops once, conditionals with their most expensive
    branch.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    # Liveness without fusion: a value lives from its op to its last reader; arguments and results
    # live throughout. Literals have a ``val`` and take no memory.
    last_use = {}
    for position, eqn in enumerate(jaxpr.eqns):
        last_use.update({v: position for v in eqn.invars if not hasattr(v, "val")})
    kept = {v for v in jaxpr.outvars if not hasattr(v, "val")}
    arguments = {*jaxpr.invars, *jaxpr.constvars}
    live = peak = float(sum(_bytes(v) for v in arguments))
    flops = work = 0.0
    n_ops = 0
    for position, eqn in enumerate(jaxpr.eqns):
        cost = _eqn(eqn)
        flops, work, n_ops = flops + cost.flops, work + cost.work, n_ops + cost.n_ops
        out = sum(_bytes(v) for v in eqn.outvars)
        peak = max(peak, live + max(out, cost.peak_bytes))
        live += out
        for v in {v for v in eqn.invars if not hasattr(v, "val")}:
            if last_use[v] == position and v not in kept and v not in arguments:
                live -= _bytes(v)
    return Estimate(flops, work, peak, n_ops)


def _bytes(var: Var | Literal) -> int:
    return _size(var) * int(getattr(getattr(var.aval, "dtype", None), "itemsize", 4))


def _size(var: Var | Literal) -> int:
    return math.prod(_shape(var))


def _shape(var: Var | Literal) -> tuple[int, ...]:
    return getattr(var.aval, "shape", ())


def _eqn(eqn: JaxprEqn) -> Estimate:
    name, params = eqn.primitive.name, eqn.params
    inner = [params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params]
    # Reducers also have a jaxpr, but of a scalar function: they are priced per element below.
    if inner and name not in ("reduce", "reduce_window", "select_and_scatter", "scatter"):
        body = estimate(inner[0])
        repeats = float(params.get("length", 1)) if name == "scan" else 1.0
        # The arguments of the inner function are already alive outside.
        peak = body.peak_bytes - sum(_bytes(v) for v in eqn.invars) * (repeats == 1)
        return Estimate(body.flops * repeats, body.work * repeats, max(0.0, peak), body.n_ops)
    if name == "cond":
        branches = [estimate(b) for b in params["branches"]]
        return max(branches, key=lambda b: (b.work, b.peak_bytes))
    # The trip count is unknown here; JAX writes loops with a known one as scans.
    if name == "while":
        return estimate(params["body_jaxpr"])
    flops, work = _plain(name, eqn)
    if eqn.invars and str(getattr(eqn.invars[0].aval, "dtype", "")) == "float16":
        work *= _WORK_F16
    return Estimate(flops, work, 0.0, 0 if name in _NO_WORK else 1)


def _plain(name: str, eqn: JaxprEqn) -> tuple[float, float]:
    """FLOPs and work of an op without nested regions."""
    out = sum(_size(v) for v in eqn.outvars)
    first = _size(eqn.invars[0]) if eqn.invars else out
    if name == "dot_general":
        return _product(eqn, out)
    if name == "conv_general_dilated":
        return _convolution(eqn, out)
    if name == "sort":
        n = _shape(eqn.invars[0])[eqn.params["dimension"]]
        steps = first * math.log2(n + 2)
        return steps, steps * _WORK_SORT * len(eqn.invars) ** 0.5
    if name == "top_k":
        return first, first * 100.0
    if name == "fft":
        n = math.prod(eqn.params["fft_lengths"])
        # 5 n log2 n, the usual count of a radix-2 transform (as in FFTW's benchmarks).
        flops = 5.0 * max(out, first) * math.log2(n + 1)
        return flops, flops * 10
    if name in ("cholesky", "triangular_solve"):
        n = _shape(eqn.invars[0])[-1]
        flops = float(out * n) / (3 if name == "cholesky" else 1)
        return flops, flops * 10
    if name.startswith("scatter"):
        updates = _size(eqn.invars[-1])
        return updates, updates * _WORK_SCATTER + out * _WORK_DEFAULT
    if name.startswith(("reduce_window", "select_and")):
        window = math.prod(eqn.params["window_dimensions"])
        return float(out * window), out * window * _WORK_WINDOW
    # A reduction works on its input.
    elements = max(out, first) if name.startswith(("reduce", "arg")) else out
    weight = 0.0 if name in _NO_WORK else DATA["work"].get(name, _WORK_DEFAULT)
    return float(elements), elements * weight


def _product(eqn: JaxprEqn, out: int) -> tuple[float, float]:
    left, right = (_shape(v) for v in eqn.invars[:2])
    ((contracting, _), (batch, _)) = eqn.params["dimension_numbers"]
    k = math.prod(left[d] for d in contracting)
    b = math.prod(left[d] for d in batch)
    flops = 2.0 * out * k
    if getattr(getattr(eqn.invars[0].aval, "dtype", None), "kind", "") in ("i", "u"):
        return flops, flops * _WORK_INTEGER_DOT
    vector = min(math.prod(left), math.prod(right)) <= b * k
    return flops, flops * (_WORK_VECTOR_DOT if vector else 1.0)


def _convolution(eqn: JaxprEqn, out: int) -> tuple[float, float]:
    spec = eqn.params["dimension_numbers"].rhs_spec
    rhs = _shape(eqn.invars[1])
    flops = 2.0 * out * math.prod(rhs) / rhs[spec[0]] / math.prod(eqn.params["lhs_dilation"])
    groups, batch_groups = eqn.params["feature_group_count"], eqn.params["batch_group_count"]
    factor = 1.0
    if groups > 1:
        factor = max(_WORK_GROUPED_LEAST, _WORK_GROUPED / rhs[spec[1]])
    if batch_groups > 1:
        factor = _WORK_BATCH_GROUPED if rhs[spec[0]] > batch_groups else _WORK_GROUPED / 2
    return flops, flops * factor
