"""Tools for agents, served by the Model Context Protocol (MCP) over standard input and output.

They call the same functions as the commands, with the rights of the user who runs the agent: they
read files and import functions from Python files.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

from pydantic import Field

from .. import __version__
from ..common.errors import OpcastError, ProgramError, fault
from ..common.types import JsonObject
from . import cluster_tasks
from .cluster_schemas import ModelBody
from .schemas import Lowering
from .tasks import Predictors, Task

if TYPE_CHECKING:
    from ..features.ir.jax_function import FunctionCall

    # A type checker cannot use classes that are created at import time.
    SimulateQuery = ModelBody
    SimulateServingQuery = ModelBody
    SweepQuery = ModelBody
else:
    from .cluster_schemas import SimulateQuery, SimulateServingQuery, SweepQuery

F = TypeVar("F", bound=Callable[..., JsonObject])

#: Serialises the calls: they share the models and the working folder.
_LOCK = threading.Lock()
#: Default number of kernels in the prediction of a program.
TOP = 10

Program = Annotated[
    str,
    Field(
        description="Path of a StableHLO, HLO or export file, or module.py:function of a JAX "
        "function with example_args."
    ),
]
Operator = Annotated[
    str,
    Field(
        description="For example: linear m=4096 n=4096 k=4096 dtype=bf16; see opcast://operators"
    ),
]
Device = Annotated[
    str, Field(description="Name from opcast://devices, such as h100-sxm, or a device file.")
]
Top = Annotated[int, Field(ge=1, le=1000, description="Number of costliest kernels to return.")]


def predict_program(
    program: Program, device: Device, lowering: Lowering = "auto", top: Top = TOP
) -> JsonObject:
    """Predict the time of a program on a device that need not be present.

    Returns the time with its 90 % interval, memory, energy, and the costliest kernels with their
    bottleneck and source line. The lowering fused takes seconds; xla needs the device's compiler.
    """
    from ..predict.api import predict

    found: JsonObject = predict(_opened(program), device=device, lowering=lowering).to_dict()
    kernels = sorted(found["kernels"], key=lambda k: -k["latency_us"] * k["multiplicity"])
    return {**found, "kernels": kernels[:top], "kernel_count": len(kernels)}


def predict_operator(op: Operator, device: Device) -> JsonObject:
    """Predict the latency of a library operator on a device, with its 90 % interval."""
    from ..predict.operator.case import OperatorCase
    from ..predict.operator.predict import predict_op

    return predict_op(OperatorCase(op, device)).to_dict()


def predict_step(query: SimulateQuery) -> JsonObject:
    """Predict a training step of a model on a cluster under a parallel plan: time, memory, MFU."""
    return _clustered(cluster_tasks.simulate, query)


def predict_serving(query: SimulateServingQuery) -> JsonObject:
    """Predict latencies, throughput and memory of engines that serve a model under a load."""
    return _clustered(cluster_tasks.simulate_serving, query)


def find_plan(query: SweepQuery) -> JsonObject:
    """Evaluate parallel plans of a training step on a cluster; return the Pareto front."""
    return _clustered(cluster_tasks.sweep, query)


def explain(
    device: Device,
    program: Program = "",
    op: Operator | None = None,
    lowering: Lowering = "auto",
    top: Annotated[int, Field(ge=1, le=100)] = 3,
) -> JsonObject:
    """Explain a predicted time by the physics of its costliest kernels and the learned corrections.

    Give either a program or an operator.
    """
    if bool(program) == bool(op):
        raise ProgramError("give either a program or an op")
    if op:
        from ..predict.operator.case import OperatorCase
        from ..predict.operator.predict import explain_operator

        return cast("JsonObject", explain_operator(OperatorCase(op, device)).to_dict())
    from ..features.lowering.options import LoweringOptions
    from ..predict.api import loaded
    from ..predict.program.case import ProgramCase
    from ..predict.program.explain import explain as explain_program

    case = ProgramCase(_opened(program), LoweringOptions(lowering, device))
    return cast("JsonObject", explain_program(loaded("default"), case, top=top).to_dict())


#: The tools; agents see the names of the functions.
TOOLS: tuple[Callable[..., JsonObject], ...] = (
    predict_program, predict_operator, predict_step, predict_serving, find_plan, explain,
)  # fmt: skip


def devices() -> str:
    """Names of the devices in the catalogue, one per line."""
    from ..features.devices.catalogue import device_names

    return "\n".join(device_names())


def operators() -> str:
    """Operator families with their parameters, one per line."""
    from ..features.operators.schema import FAMILIES, PARAMETERS

    return "\n".join(f"{name}: {' '.join(PARAMETERS[kind])}" for name, kind in FAMILIES.items())


def workloads() -> str:
    """Names of the models for training steps and serving, one per line."""
    from ..simulate.step.presets import preset_names

    return "\n".join(preset_names())


#: The documents by the address that agents see.
DOCUMENTS: dict[str, Callable[[], str]] = {
    f"opcast://{own.__name__}": own for own in (devices, operators, workloads)
}


def _opened(program: str) -> Path | FunctionCall:
    from ..features.ir.jax_function import is_function_path, load_function

    path = Path(program)
    if is_function_path(program) and not path.exists():
        return load_function(program)
    if not path.is_file():
        raise ProgramError("no such file", where=program)
    return path


def _clustered(
    task: Callable[[Predictors, Task, bytes], JsonObject], query: ModelBody
) -> JsonObject:
    from ..predict.api import loaded

    name = query.model or "default"
    predictors = {} if name == "roofline" else {name: loaded(name)}
    return task(predictors, {"model": name}, query.model_dump_json().encode())


def _alone(tool: F, refusal: Callable[[str], Exception]) -> F:
    """Make a tool run alone and report its errors to the agent.

    Args:
        tool: The tool.
        refusal: Makes the exception whose message is sent to the agent.
    """

    @wraps(tool)
    def alone(*args: Any, **kwargs: Any) -> JsonObject:
        try:
            with _LOCK:
                return tool(*args, **kwargs)
        except OpcastError as error:
            raise refusal(str(error)) from error
        except Exception as error:
            # The message of any other exception would not reach the agent.
            raise refusal(str(fault(error))) from error

    return cast("F", alone)


def _described(tool: Callable[..., JsonObject]) -> Any:
    """Make an ``mcp`` ``Tool`` that refuses unknown arguments."""
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp.server.mcpserver.tools import Tool

    made = Tool.from_function(_alone(tool, ToolError))
    # By default the package ignores unknown arguments silently.
    arguments = made.fn_metadata.arg_model
    arguments.model_config["extra"] = "forbid"
    arguments.model_rebuild(force=True)
    made.parameters["additionalProperties"] = False
    return made


def make_server() -> Any:
    """Make the ``mcp.server.MCPServer`` with the tools and documents."""
    from mcp.server import MCPServer

    server = MCPServer(
        "opcast",
        version=__version__,
        instructions="Predicts how long ML programs, operators, training steps and serving take on "
        "GPUs, TPUs and clusters, without running them. Every time has a 90 % interval.",
        tools=[_described(tool) for tool in TOOLS],
    )
    for address, document in DOCUMENTS.items():
        server.resource(address, mime_type="text/plain")(document)
    return server
