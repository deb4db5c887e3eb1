"""Request schemas, with examples for the OpenAPI document."""

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

#: Names of devices, models, clusters and workloads. Without a slash they cannot leave the working
#: folder; names with the suffix of a file are refused where they are used.
NAME = r"^[A-Za-z0-9][A-Za-z0-9 ()+._-]{0,79}$"
#: A name or nothing, as one pattern, because generated clients cannot represent a union of strings.
NAME_OR_NONE = r"^([A-Za-z0-9][A-Za-z0-9 ()+._-]{0,79})?$"
#: Name of a checkpoint such as Qwen/Qwen3-32B; looked up among models, never among files.
CHECKPOINT = r"^([A-Za-z0-9][A-Za-z0-9._-]{0,39}/)?[A-Za-z0-9][A-Za-z0-9 ()+._-]{0,79}$"
CHECKPOINT_OR_NONE = CHECKPOINT.replace("^", "^(").replace("$", ")?$")
FORMAT = r"^[A-Za-z0-9_-]{0,20}$"
# Settings of a plan; without slash and dot, so that it cannot name a file.
PLAN_SETTINGS = r"^[A-Za-z0-9_=, -]*$"
TOKENS = r"^[a-z0-9.:]+$"
RANK = r"^[0-9]{1,6}$"
AXES = r"^[A-Za-z0-9_=,/ -]*$"
LOAD = r"^[a-z0-9_=,.: -]*$"
_DATA = own_data("server/schemas.yaml")
#: Descriptions of the patterns, for error messages.
ALLOWED = {
    own: _DATA["allowed"][name]
    for name, own in (
        *(("name", NAME), ("name_or_none", NAME_OR_NONE), ("checkpoint", CHECKPOINT)),
        *(("checkpoint_or_none", CHECKPOINT_OR_NONE), ("format", FORMAT), ("load", LOAD)),
        *(("plan_settings", PLAN_SETTINGS), ("tokens", TOKENS), ("axes", AXES), ("rank", RANK)),
    )
}
#: Example values of structured fields, for error messages.
EXAMPLES: Mapping[str, str] = _DATA["fields"]
# Largest trip count: beyond any real program, and small enough for finite times.
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
    """Example of a request, for the OpenAPI document."""
    return {"examples": [_DATA["requests"][body]]}


class Body(BaseModel):
    """A request body; JSON types are not converted, and unknown keys are refused."""

    model_config = ConfigDict(strict=True, extra="forbid")


class _Kernels(Body):
    device: Name = Field(description="A device that GET /v1/devices lists, or an alias of it.")
    model: Name | None = Field(
        None, description="A model that GET /v1/models lists; default: the first."
    )
    fields: list[str] | None = Field(
        None, description="Columns of the answer; default: all.", max_length=16
    )


class OpsQuery(_Kernels):
    """Library operators, each written as for ``opcast predict --op``."""

    # An operator's text has about a hundred characters; the number of rows is limited separately.
    ops: list[Annotated[str, Field(max_length=1000)]] = Field(min_length=1)
    model_config = ConfigDict(json_schema_extra=example_of("OpsQuery"))


class ColumnsQuery(_Kernels):
    """Operators of one family by column: a value for all rows, or a number for each row."""

    operator: Annotated[str, Field(max_length=80)] = Field(
        description="Family or method/family, like the first word of an operator's text."
    )
    columns: dict[str, int | Annotated[str, Field(max_length=200)] | list[int]]
    model_config = ConfigDict(json_schema_extra=example_of("ColumnsQuery"))


class KernelsQuery(_Kernels):
    """Kernels as one-instruction HLO modules, like the column ``kernel_ir`` of datasets."""

    kernels: list[str] = Field(min_length=1)
    model_config = ConfigDict(json_schema_extra=example_of("KernelsQuery"))


def _form(value: object) -> str:
    """Tag of the schema that a request about kernels has."""
    given = value if isinstance(value, dict) else {}
    return next((name for name in ("ops", "kernels") if name in given), "columns")


# Discriminated by key, so that validation reports errors of one schema and not of all three.
Query = Annotated[
    Annotated[OpsQuery, Tag("ops")]
    | Annotated[ColumnsQuery, Tag("columns")]
    | Annotated[KernelsQuery, Tag("kernels")],
    Discriminator(_form),
]
QUERY: TypeAdapter[OpsQuery | ColumnsQuery | KernelsQuery] = TypeAdapter(Query)


class ProgramOptions(BaseModel):
    """Options of a program's prediction."""

    # Not strict, because all values of a query are strings.
    model_config = ConfigDict(extra="forbid")
    device: Name = Field(description="A device that GET /v1/devices lists, or an alias of it.")
    model: Name | None = Field(
        None, description="A model that GET /v1/models lists; default: the first."
    )
    lowering: Lowering = Field(
        "auto", description="xla compiles; if the server does not allow it, auto means fused."
    )
    fallback: Fallback = Field("", description="Lowering to use if the compiler fails.")
    trip_count: Count | None = Field(None, description="Trip count of loops of unknown count.")
    strict: bool = Field(False, description="Refuse kernels without a learned estimate.")


Settings = dict[Name, int | float | bool | Annotated[str, Field(max_length=40)]]


class ProgramQuery(ProgramOptions):
    """A program as text or base64 (for example of MLIR bytecode), or a workload of the zoo."""

    program: str = Field("", description="StableHLO or HLO; empty with a workload.")
    encoding: Literal["text", "base64"] = "text"
    workload: NameOrNone = Field("", description="Workload of the zoo (`opcast zoo list`).")
    settings: Settings = Field({}, description="Settings of the workload, such as batch and dtype.")
    model_config = ConfigDict(strict=True, json_schema_extra=example_of("ProgramQuery"))


class Point(Body):
    """Modifications of the device or of the zoo workload."""

    design: dict[Name, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        {}, description="Values by key of a device file, such as hbm_bandwidth_gbps."
    )
    power_cap_w: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = Field(
        None, description="Sustained power of a device in watts."
    )
    settings: Settings = Field({}, description="Settings of the workload that differ.")


class WhatIfQuery(ProgramQuery):
    """A program, and modifications of its device or workload to predict it with."""

    points: list[Point] = Field(min_length=1, max_length=64)
    model_config = ConfigDict(strict=True, json_schema_extra=example_of("WhatIfQuery"))
