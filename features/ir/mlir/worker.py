"""Reads untrusted MLIR modules in a worker process and reports whether that succeeded.

The parent sends a message for each module. The answer is :data:`READ` if the module was read,
walked and printed, or :data:`REFUSED` and the parser's message; :data:`READY` is sent once at the
start. A crash ends the process. Importing only MLIR takes a third of the time of importing JAX.
"""

from __future__ import annotations

from jaxlib.mlir import ir

from ....common.child_process import Channel
from .bindings import parse_module

#: Messages to the parent, see the docstring of the module.
READY, READ, REFUSED = b"ready", b"read", b"refused"


def check(data: bytes) -> bytes:
    """Run all steps of the reader that use native code."""
    try:
        module = parse_module(data, verify=True)
    except ValueError as error:
        return REFUSED + (str(error) or "the data is damaged").encode("utf-8", "replace")
    with module.context:
        # Some damage shows only here: bytecode is read lazily, and printing visits all attributes.
        module.operation.walk(_names_read)
        module.operation.get_asm(enable_debug_info=True, large_elements_limit=16)
        module.operation.get_asm(print_generic_op_form=True, large_elements_limit=16)
    return READ


def _names_read(op: ir.Operation) -> ir.WalkResult:
    """Read the names of an op and of its attributes; one that is not UTF-8 ends the process."""
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
