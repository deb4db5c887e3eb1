"""Reads untrusted MLIR modules in a worker process and reports whether that went well.

A message comes for each module, and one goes back: :data:`READ` if it was read, walked and printed,
:data:`REFUSED` with what the parser says if it refuses it. :data:`READY` precedes all of them. A
crash ends the process. It imports MLIR alone, which takes a third of the time that importing JAX
takes.
"""

from __future__ import annotations

from jaxlib.mlir import ir

from ....common.child_process import Channel
from .bindings import parse_module

#: Messages to the parent, see the module.
READY, READ, REFUSED = b"ready", b"read", b"refused"


def check(data: bytes) -> bytes:
    """Do everything that the reader does in native code."""
    try:
        module = parse_module(data, verify=True)
    except ValueError as error:
        return REFUSED + (str(error) or "the data is damaged").encode("utf-8", "replace")
    with module.context:
        # Damage may show only here: bytecode is read lazily, and printing follows every attribute.
        module.operation.walk(_names_read)
        module.operation.get_asm(enable_debug_info=True, large_elements_limit=16)
        module.operation.get_asm(print_generic_op_form=True, large_elements_limit=16)
    return READ


def _names_read(op: ir.Operation) -> ir.WalkResult:
    """Read the names of an op and of its attributes: one that is not UTF-8 ends the process."""
    op.name, [getattr(attribute, "name", attribute) for attribute in op.attributes]
    return ir.WalkResult.ADVANCE


def main() -> None:
    """Report that the worker is ready, then check modules until there are no more."""
    channel = Channel()
    channel.send(READY)
    for data in channel:
        channel.send(check(data))


if __name__ == "__main__":
    main()
