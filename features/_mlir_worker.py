"""Reads one untrusted MLIR module in a process of its own and says whether that went well.

Run as a script with the module on standard input: exit status 0 if it was read, walked and printed,
1 if the parser refuses it; anything else is a crash. It imports MLIR alone, which takes a third of
the time that JAX would.
"""

from __future__ import annotations

import resource
import sys

from jaxlib.mlir import ir
from jaxlib.mlir._mlir_libs import _jax_mlir_ext  # type: ignore[import-not-found]
from jaxlib.mlir.dialects import chlo, mhlo, mpmd, sdy, stablehlo

READ, REFUSED = 0, 1
#: Private memory that reading may take, beyond so many times the module's size.
_MEMORY, _FACTOR = 2 * 2**30, 200


def make_context() -> ir.Context:
    """A context with the dialects of JAX, as :func:`opcast.features._jax_compat.make_context`."""
    context = ir.Context()
    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    context.append_dialect_registry(registry)
    context.load_all_available_dialects()
    sdy.register_dialect(context)
    mpmd.register_dialect(context)
    mhlo.register_mhlo_dialect(context)
    chlo.register_dialect(context)
    stablehlo.register_dialect(context)
    context.allow_unregistered_dialects = True
    return context


def check(data: bytes) -> int:
    """Do all that the reader does in native code."""
    context = make_context()
    context.attach_diagnostic_handler(lambda diagnostic: True)
    try:
        with context:
            if data.startswith(b"ML\xefR") and b"StableHLO_v" in data[:64]:
                module = stablehlo.deserialize_portable_artifact(context, data)
            else:
                module = ir.Module.parse(data)
            module.operation.verify()
    except Exception:  # the bindings raise several unrelated classes
        return REFUSED
    with context:
        module.operation.walk(lambda op: ir.WalkResult.ADVANCE)
        module.operation.get_asm(enable_debug_info=True, large_elements_limit=16)
        module.operation.get_asm(print_generic_op_form=True, large_elements_limit=16)
    return READ


if __name__ == "__main__":
    given = sys.stdin.buffer.read()
    limit = _MEMORY + _FACTOR * len(given)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    sys.exit(check(given))
