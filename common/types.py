"""Types of data whose content is checked where it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: An object of JSON or YAML, or values by name that are written as one.
JsonObject = dict[str, Any]
#: One that is only read.
JsonMapping = Mapping[str, Any]
#: A value, type, attribute or operation of MLIR, where the stubs of its bindings lack the class.
MlirObject = Any
#: An object of JAX's own without a public type: lowered and compiled functions, jaxprs, devices.
JaxObject = Any
