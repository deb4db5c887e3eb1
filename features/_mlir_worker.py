"""Reads untrusted MLIR modules in a process of its own and says whether that went well.

Run as a script. On standard input come modules, each behind its length in 8 bytes; for each a byte
goes to standard output: 0 if it was read, walked and printed, 1 if the parser refuses it; before
all of them a 2. A crash ends the process. It imports MLIR alone, which takes a third of the time
that JAX would.
"""

from __future__ import annotations

import resource
import sys

from jaxlib.mlir import ir
from jaxlib.mlir._mlir_libs import _jax_mlir_ext
from jaxlib.mlir.dialects import chlo, mhlo, mpmd, sdy, stablehlo

READ, REFUSED, READY = 0, 1, 2
#: Private memory that reading may take.
_MEMORY = 8 * 2**30


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


def serve() -> None:
    """Say that we are there, then check modules until the input ends."""
    sys.stdout.buffer.write(bytes([READY]))
    sys.stdout.buffer.flush()
    while len(head := sys.stdin.buffer.read(8)) == 8:
        data = sys.stdin.buffer.read(int.from_bytes(head, "little"))
        sys.stdout.buffer.write(bytes([check(data)]))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _MEMORY if most == resource.RLIM_INFINITY else min(_MEMORY, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    serve()
