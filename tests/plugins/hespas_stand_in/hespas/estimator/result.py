from dataclasses import dataclass
from typing import Any


@dataclass
class Result:
    success: bool
    runtime_estimate: float | None
    metadata: dict[str, Any] | None


@dataclass
class OpResult(Result):
    op_info: Any


@dataclass
class ModuleResult(Result):
    module: Any
