"""Bodies of requests, with examples for the OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, is_dataclass
from dataclasses import Field as DataField
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    create_model,
)

from ..common.options import Option, described
from ..predict.cluster.serving_case import ServingCase
from ..predict.cluster.step_case import StepCase

B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")

#: Names of devices, models, clusters and workloads: without a slash they cannot leave the working
#: folder; names that end like files are refused where they are used.
NAME = r"^[A-Za-z0-9][A-Za-z0-9 ()+._-]{0,79}$"
#: The same, or nothing: one pattern, for generated clients cannot tell a union of texts apart.
NAME_OR_NONE = r"^([A-Za-z0-9][A-Za-z0-9 ()+._-]{0,79})?$"
#: A checkpoint's name, such as Qwen/Qwen3-32B: looked up among models, never among files.
CHECKPOINT = r"^([A-Za-z0-9][A-Za-z0-9._-]{0,39}/)?[A-Za-z0-9][A-Za-z0-9 ()+._-]{0,79}$"
_FORMAT = r"^[A-Za-z0-9_-]{0,20}$"
# Settings of a plan only: the pattern has no slash or dot, so a plan's file cannot be named.
_SETTINGS = r"^[A-Za-z0-9_=, -]*$"
_TOKENS = r"^[a-z0-9.:]+$"
_RANK = r"^[0-9]{1,6}$"
#: What each pattern allows, in words for answers.
ALLOWED = {
    NAME: "a name: letters and digits, then also spaces and ( ) + . _ -, at most 80 characters; no "
    "path of a file",
    NAME_OR_NONE: "a name, or nothing: letters and digits, then also spaces and ( ) + . _ -, at "
    "most 80 characters; no path of a file",
    CHECKPOINT: "a model's name, or owner/name: letters, digits, spaces and ( ) + . _ -; no path",
    _FORMAT: "a format such as fp8: letters, digits, _ and -, at most 20 characters",
    _SETTINGS: "settings such as tp=8,dp=2: letters, digits, _ = - and commas; no file",
    _TOKENS: "numbers of tokens such as 1024, or a distribution such as lognormal:800:0.6",
    _RANK: "a rank: a whole number of at most six digits",
}
# Largest trip count: beyond any real program, and its products with times stay finite.
LARGEST = 2**40

Name = Annotated[str, Field(pattern=NAME)]
NameOrNone = Annotated[str, Field(pattern=NAME_OR_NONE)]
Checkpoint = Annotated[str, Field(pattern=CHECKPOINT)]
Count = Annotated[int, Field(ge=0, le=LARGEST)]
Lowering = Literal["auto", "xla", "fused", "op"]
Fallback = Literal["", "fused", "op"]

# Examples of the OpenAPI document, from which the fuzzing benchmark draws its requests.
OPERATOR = "linear m=64 n=4096 k=4096 dtype=bf16 backend=vllm"
KERNEL = (
    "HloModule k\nENTRY e {\n  a = f32[64,256]{1,0} parameter(0)\n"
    "  ROOT r = f32[64,256]{1,0} tanh(a)\n}\n"
)
PROGRAM = (
    "module {\n  func.func public @main(%a: tensor<64x256xf32>) -> tensor<64x256xf32> {\n"
    "    %0 = stablehlo.tanh %a : tensor<64x256xf32>\n    return %0 : tensor<64x256xf32>\n  }\n}\n"
)


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
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"device": "h100-sxm", "ops": [OPERATOR]}]}
    )


class ColumnsQuery(_Kernels):
    """Operators of one family by column: one number, or one per row; texts apply to all rows."""

    operator: Annotated[str, Field(max_length=80)] = Field(
        description="Family, or method/family, as the first word of an operator's text."
    )
    columns: dict[str, int | Annotated[str, Field(max_length=200)] | list[int]]
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "device": "h100-sxm",
                    "operator": "linear",
                    "fields": ["latency_us"],
                    "columns": {
                        "m": [1, 64, 4096],
                        "n": 4096,
                        "k": 4096,
                        "dtype": "bf16",
                        "backend": "vllm",
                    },
                }
            ]
        }
    )


class KernelsQuery(_Kernels):
    """Kernels as one-instruction HLO modules: the column ``kernel_ir`` of datasets."""

    kernels: list[str] = Field(min_length=1)
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"device": "a100-sxm-80gb", "kernels": [KERNEL]}]}
    )


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


_Settings = dict[Name, int | float | bool | Annotated[str, Field(max_length=40)]]


class ProgramQuery(ProgramOptions):
    """A program as text, or as base64 of bytes such as MLIR bytecode; or a workload of the zoo."""

    program: str = Field("", description="StableHLO or HLO; or none, with a workload.")
    encoding: Literal["text", "base64"] = "text"
    workload: NameOrNone = Field("", description="Of the zoo, as `opcast zoo list` has it.")
    settings: _Settings = Field({}, description="Of the workload, such as batch and dtype.")
    model_config = ConfigDict(
        strict=True,
        json_schema_extra={
            "examples": [{"device": "h100-sxm", "lowering": "fused", "program": PROGRAM}]
        },
    )


class Point(Body):
    """What is changed of a device or of a workload of the zoo."""

    design: dict[Name, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        {}, description="Figures by the keys of a device file, such as hbm_bandwidth_gbps."
    )
    power_cap_w: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = Field(
        None, description="Sustained power of a device in watts."
    )
    settings: _Settings = Field({}, description="Of the workload, where others than the query's.")


class WhatIfQuery(ProgramQuery):
    """A program, and what would change its time."""

    points: list[Point] = Field(min_length=1, max_length=64)
    model_config = ConfigDict(
        strict=True,
        json_schema_extra={
            "examples": [
                {
                    "device": "h100-sxm",
                    "workload": "mlp",
                    "points": [{"design": {"hbm_bandwidth_gbps": 4000}}, {"power_cap_w": 400}],
                }
            ]
        },
    )


def body_of(
    name: str, case: type, base: type[B], narrower: Mapping[str, Any], *left_out: str
) -> type[B]:
    """Make the schema of a request.

    Args:
        name: Of the schema.
        case: Dataclass, whose fields that are dataclasses are flattened.
        base: What the schema extends; its own fields count.
        narrower: Types of fields of which a server takes less than a command line, by name.
        left_out: Names of fields that requests do not have.
    """
    made: dict[str, Any] = {}
    for field, hint, option in _flat(case):
        if field.name in base.model_fields or field.name in left_out:
            continue
        known = {"ge": option.least, "le": option.most}
        limits: dict[str, Any] = {k: v for k, v in known.items() if v is not None}
        if option.unit is not None or hint is float:
            limits["allow_inf_nan"] = False
        if option.choices:
            hint = Literal[option.choices]
        if field.name in narrower:
            hint, limits = narrower[field.name], {}
        made_anew = field.default_factory is not MISSING
        limits |= (
            {"default_factory": field.default_factory} if made_anew else {"default": field.default}
        )
        # Names of options are those of fields.
        words = option.help.replace("--", "")
        made[field.name] = (hint, Field(description=words, **limits))
    return create_model(name, __base__=base, __doc__=base.__doc__, **made)


def example(body: type[Body]) -> bytes:
    """Return the first example of a request, as JSON."""
    extra: Any = body.model_config["json_schema_extra"]
    return json.dumps(extra["examples"][0]).encode()


def build(case: type[T], given: Mapping[str, Any]) -> T:
    """Make a dataclass from the values of a request, by name."""
    values: dict[str, Any] = {}
    for field, hint, option in described(case):
        if is_dataclass(hint) and isinstance(hint, type):
            values[field.name] = build(hint, given)
        elif option is not None and field.name in given:
            own = given[field.name]
            values[field.name] = own if option.unit is None else own * option.unit
    return case(**values)


def _flat(case: type) -> Iterator[tuple[DataField[Any], Any, Option]]:
    for field, hint, option in described(case):
        if is_dataclass(hint) and isinstance(hint, type):
            yield from _flat(hint)
        elif option is not None:
            yield field, hint, option


_Format = Annotated[str, Field(pattern=_FORMAT)]
_Plan = Annotated[str, Field(max_length=200, pattern=_SETTINGS)]
_Source = Annotated[str, Field(max_length=80)]
_Price = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
_Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
# Most people's lengths are numbers.
_Lengths = Annotated[
    str,
    Field(max_length=60, pattern=_TOKENS),
    BeforeValidator(lambda given: str(given) if type(given) is int else given),
]


#: Texts are names, never files; NumPy's generators take no negative seeds.
_STEP: dict[str, Any] = {
    "plan": _Plan,
    "settings": _Settings,
    "framework": NameOrNone,
    "source": _Source,
    # A standard deviation of the logarithm: 10 is a factor of 22,000, beyond any real cluster.
    "jitter": Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)],
    # Keys of JSON objects are texts; six digits exceed any cluster of the catalogue.
    "speed": dict[Annotated[str, Field(pattern=_RANK)], float],
    "price": _Price | None,
    "power_cap_w": Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None,
    "seed": _Seed,
}


class StepBody(Body):
    """A training step on a cluster, as ``opcast simulate`` takes it."""

    workload: Checkpoint = Field(
        description="A family (llama, moe, gpt, bert), or a model by name: llama-3-8b."
    )
    cluster: Name = Field(description="Such as dgx-h100-x128.")
    model: Name | None = Field(None, description="A model of operators, or roofline.")
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "workload": "llama",
                    "cluster": "dgx-h100-x16",
                    "plan": "tp=8,dp=2",
                    "settings": {"layers": 4, "batch": 16},
                }
            ]
        }
    )


# The models of steps that a command takes are files.
SimulateQuery = body_of("SimulateQuery", StepCase, StepBody, _STEP, "steps")

#: Texts are names, never files; and what would take a server long is refused.
_SERVING: dict[str, Any] = {
    **dict.fromkeys(("weights", "experts", "activations", "kv_cache"), _Format),
    **dict.fromkeys(("plan", "prefill"), _Plan),
    **dict.fromkeys(("prompt", "output"), _Lengths),
    "settings": _Settings,
    "draft": Checkpoint,
    "framework": Annotated[str, Field(max_length=60)],
    "source": _Source,
    "slo": Annotated[str, Field(max_length=80)],
    "linear_layers": Annotated[int, Field(ge=0, le=10_000)],
    **dict.fromkeys(("replicas", "prefill_replicas"), Annotated[int, Field(ge=0, le=4096)]),
    # The simulation takes 0.1 ms a request, and each answer is three runs.
    **dict.fromkeys(("concurrency", "batch", "count"), Annotated[int, Field(ge=0, le=100_000)]),
    **dict.fromkeys(("transfer", "rate", "price"), _Price),
    "burstiness": Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)],
    "drafts": Annotated[int, Field(ge=0, le=64)],
    "accepted": Annotated[float, Field(ge=1, le=65, allow_inf_nan=False)],
    "seed": _Seed,
}


class ServingBody(Body):
    """A deployment under a load, as ``opcast simulate-serving`` takes it."""

    workload: Checkpoint = Field(description="A model by name: llama-3.1-70b, Qwen/Qwen3-32B.")
    cluster: NameOrNone = Field("", description="Such as h100-sxm-x8; or a device.")
    device: NameOrNone = ""
    model: Name | None = Field(None, description="A model of operators, or roofline.")
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "workload": "llama-3.1-8b",
                    "device": "h100-sxm",
                    "plan": "tp=1",
                    "concurrency": 8,
                    "count": 16,
                    "model": "roofline",
                }
            ]
        }
    )


SimulateServingQuery = body_of(
    "SimulateServingQuery", ServingCase, ServingBody, _SERVING, "hf", "requests"
)
