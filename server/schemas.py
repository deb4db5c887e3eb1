"""Bodies of requests, with examples for the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
)

from ..common.files import own_data
from ..common.types import JsonObject

#: Names of devices, models, clusters and workloads: without a slash they cannot leave the working
#: folder; names that end like files are refused where they are used.
NAME = r"^[A-Za-z0-9][A-Za-z0-9 ()+._-]{0,79}$"
#: The same, or nothing: one pattern, for generated clients cannot tell a union of texts apart.
NAME_OR_NONE = r"^([A-Za-z0-9][A-Za-z0-9 ()+._-]{0,79})?$"
#: A checkpoint's name, such as Qwen/Qwen3-32B: looked up among models, never among files.
CHECKPOINT = r"^([A-Za-z0-9][A-Za-z0-9._-]{0,39}/)?[A-Za-z0-9][A-Za-z0-9 ()+._-]{0,79}$"
CHECKPOINT_OR_NONE = CHECKPOINT.replace("^", "^(").replace("$", ")?$")
FORMAT = r"^[A-Za-z0-9_-]{0,20}$"
# Settings of a plan only: the pattern has no slash or dot, so a plan's file cannot be named.
PLAN_SETTINGS = r"^[A-Za-z0-9_=, -]*$"
TOKENS = r"^[a-z0-9.:]+$"
RANK = r"^[0-9]{1,6}$"
AXES = r"^[A-Za-z0-9_=,/ -]*$"
LOAD = r"^[a-z0-9_=,.: -]*$"
_DATA = own_data("server/schemas.yaml")
#: What each pattern allows, in words for answers.
ALLOWED = {
    own: _DATA["allowed"][name]
    for name, own in (
        *(("name", NAME), ("name_or_none", NAME_OR_NONE), ("checkpoint", CHECKPOINT)),
        *(("checkpoint_or_none", CHECKPOINT_OR_NONE), ("format", FORMAT), ("load", LOAD)),
        *(("plan_settings", PLAN_SETTINGS), ("tokens", TOKENS), ("axes", AXES), ("rank", RANK)),
    )
}
#: Values of fields that are no plain text or number, for answers.
EXAMPLES: Mapping[str, str] = _DATA["fields"]
# Largest trip count: beyond any real program, and its products with times stay finite.
LARGEST = 2**40

Name = Annotated[str, Field(pattern=NAME)]
NameOrNone = Annotated[str, Field(pattern=NAME_OR_NONE)]
Checkpoint = Annotated[str, Field(pattern=CHECKPOINT)]
CheckpointOrNone = Annotated[str, Field(pattern=CHECKPOINT_OR_NONE)]
Count = Annotated[int, Field(ge=0, le=LARGEST)]
Lowering = Literal["auto", "xla", "fused", "op"]
Fallback = Literal["", "fused", "op"]

#: A small program in StableHLO.
PROGRAM: str = _DATA["requests"]["ProgramQuery"]["program"]


def example_of(body: str) -> JsonObject:
    """What the OpenAPI document shows as a request of a body."""
    return {"examples": [_DATA["requests"][body]]}


class Body(BaseModel):
    """A request body: JSON types are not converted, unknown keys are refused."""

    model_config = ConfigDict(strict=True, extra="forbid")


class _Kernels(Body):
    device: Name = Field(description="A device that GET /v1/devices lists, or an alias of it.")
    model: Name | None = Field(
        None, description="A model that GET /v1/models lists; else the first."
    )
    fields: list[str] | None = Field(
        None, description="Columns of the answer; all of them if it is left out.", max_length=16
    )


class OpsQuery(_Kernels):
    """Operators of libraries, each as ``opcast predict --op`` takes it."""

    # A text of parameters has some hundred characters; the number of rows has a limit of its own.
    ops: list[Annotated[str, Field(max_length=1000)]] = Field(min_length=1)
    model_config = ConfigDict(json_schema_extra=example_of("OpsQuery"))


class ColumnsQuery(_Kernels):
    """Operators of one family by column: one number, or one per row; texts apply to all rows."""

    operator: Annotated[str, Field(max_length=80)] = Field(
        description="Family, or method/family, as the first word of an operator's text."
    )
    columns: dict[str, int | Annotated[str, Field(max_length=200)] | list[int]]
    model_config = ConfigDict(json_schema_extra=example_of("ColumnsQuery"))


class KernelsQuery(_Kernels):
    """Kernels as one-instruction HLO modules: the column ``kernel_ir`` of datasets."""

    kernels: list[str] = Field(min_length=1)
    model_config = ConfigDict(json_schema_extra=example_of("KernelsQuery"))


def _form(value: object) -> str:
    """Which of the three bodies a body of kernels is."""
    given = value if isinstance(value, dict) else {}
    return next((name for name in ("ops", "kernels") if name in given), "columns")


# The form is told by its key, so that an error names the fault in that form and not in all three.
Query = Annotated[
    Annotated[OpsQuery, Tag("ops")]
    | Annotated[ColumnsQuery, Tag("columns")]
    | Annotated[KernelsQuery, Tag("kernels")],
    Discriminator(_form),
]
QUERY: TypeAdapter[OpsQuery | ColumnsQuery | KernelsQuery] = TypeAdapter(Query)


class ProgramOptions(BaseModel):
    """Options of a program's prediction."""

    # Not strict: in a query every value is a text.
    model_config = ConfigDict(extra="forbid")
    device: Name = Field(description="A device that GET /v1/devices lists, or an alias of it.")
    model: Name | None = Field(
        None, description="A model that GET /v1/models lists; else the first."
    )
    lowering: Lowering = Field(
        "auto", description="xla compiles, which the server may not allow; then auto is fused."
    )
    fallback: Fallback = Field("", description="Lowering to take where the compiler fails.")
    trip_count: Count | None = Field(None, description="Trips of loops whose count is not found.")
    strict: bool = Field(False, description="Refuse kernels without a learned estimate.")


Settings = dict[Name, int | float | bool | Annotated[str, Field(max_length=40)]]


class ProgramQuery(ProgramOptions):
    """A program as text, or as base64 of bytes such as MLIR bytecode; or a workload of the zoo."""

    program: str = Field("", description="StableHLO or HLO; or none, with a workload.")
    encoding: Literal["text", "base64"] = "text"
    workload: NameOrNone = Field("", description="Of the zoo, as `opcast zoo list` has it.")
    settings: Settings = Field({}, description="Of the workload, such as batch and dtype.")
    model_config = ConfigDict(strict=True, json_schema_extra=example_of("ProgramQuery"))


class Point(Body):
    """What is changed of a device or of a workload of the zoo."""

    design: dict[Name, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        {}, description="Figures by the keys of a device file, such as hbm_bandwidth_gbps."
    )
    power_cap_w: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = Field(
        None, description="Sustained power of a device in watts."
    )
    settings: Settings = Field({}, description="Of the workload, where others than the query's.")


class WhatIfQuery(ProgramQuery):
    """A program, and what would change its time."""

    points: list[Point] = Field(min_length=1, max_length=64)
    model_config = ConfigDict(strict=True, json_schema_extra=example_of("WhatIfQuery"))
