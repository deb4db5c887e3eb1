"""Types of data whose content is checked where it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: An object of JSON or YAML, or values by name that are written as one.
JsonObject = dict[str, Any]
#: One that is only read.
JsonMapping = Mapping[str, Any]
