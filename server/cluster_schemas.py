"""Request schemas for clusters and serving, derived from the options of the commands."""

from __future__ import annotations

import json
from dataclasses import MISSING
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from ..common.options import flat_options
from ..common.types import JsonMapping, JsonObject
from ..predict.cluster.serving_case import SearchCase, ServingCase
from ..predict.cluster.step_case import StepCase
from .schemas import (
    AXES,
    FORMAT,
    LOAD,
    PLAN_SETTINGS,
    RANK,
    TOKENS,
    Body,
    Checkpoint,
    CheckpointOrNone,
    Name,
    NameOrNone,
    Settings,
    example_of,
)

B = TypeVar("B", bound=BaseModel)


def body_of(name: str, case: type, base: type[B], narrower: JsonMapping, *left_out: str) -> type[B]:
    """Make the schema of a request from the options of a command.

    Args:
        name: Name of the schema.
        case: Dataclass with the options; nested dataclasses are flattened.
        base: Schema to extend; its fields take precedence.
        narrower: Types by field name, where the server accepts less than the command.
        left_out: Names of fields that requests do not have.
    """
    made: JsonObject = {}
    for field, hint, option in flat_options(case):
        if field.name in base.model_fields or field.name in left_out:
            continue
        known = {"ge": option.least, "le": option.most}
        limits: JsonObject = {k: v for k, v in known.items() if v is not None}
        if option.unit is not None or hint is float:
            limits["allow_inf_nan"] = False
        if option.choices:
            hint = Literal[option.choices]
        if field.name in narrower:
            hint, limits = narrower[field.name], {}
        if field.default_factory is not MISSING:
            limits["default_factory"] = field.default_factory
        elif field.default is not MISSING:
            limits["default"] = field.default
        # Options are named like fields.
        words = option.help.replace("--", "").replace(", or a YAML file", "")
        made[field.name] = (hint, Field(description=words, **limits))
    return create_model(name, __base__=base, __doc__=base.__doc__, **made)


def example(body: type[Body]) -> bytes:
    """Return the first example of a request as JSON."""
    extra: Any = body.model_config["json_schema_extra"]
    return json.dumps(extra["examples"][0]).encode()


_Format = Annotated[str, Field(pattern=FORMAT)]
_Plan = Annotated[str, Field(max_length=200, pattern=PLAN_SETTINGS)]
_Source = Annotated[str, Field(max_length=80)]
_Price = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
_Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
# Lengths may be given as numbers, too.
_Lengths = Annotated[
    str,
    Field(max_length=60, pattern=TOKENS),
    BeforeValidator(lambda given: str(given) if type(given) is int else given),
]


#: Strings are names, never files. NumPy's generators do not accept negative seeds.
_STEP: JsonObject = {
    "plan": _Plan,
    "settings": Settings,
    "run": Settings,
    "framework": NameOrNone,
    "source": _Source,
    # Standard deviation of the logarithm: 10 is a factor of 22,000, beyond any real cluster.
    "jitter": Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)],
    # Keys of JSON objects are strings; six digits exceed any cluster in the catalogue.
    "speed": dict[Annotated[str, Field(pattern=RANK)], float],
    "price": _Price | None,
    "power_cap_w": Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None,
    "seed": _Seed,
}


class ModelBody(Body):
    """A model by name or by its configuration."""

    workload: CheckpointOrNone = Field(
        "",
        description="Name of a model such as llama-3.1-70b or Qwen/Qwen3-32B; for training steps "
        "also llama, moe, gpt or bert with settings.",
    )
    config: Annotated[str, Field(max_length=100_000)] = Field(
        "", description="Instead of a workload: contents of a model's config.json."
    )
    model: Name | None = Field(None, description="Operator model, or roofline.")


class StepBody(ModelBody):
    """A training step on a cluster, as for ``opcast simulate``."""

    cluster: Name = Field(description="Name of a cluster, such as dgx-h100-x128.")
    model_config = ConfigDict(json_schema_extra=example_of("StepBody"))


# Without ``steps``, which names a file.
SimulateQuery = body_of("SimulateQuery", StepCase, StepBody, _STEP, "steps")


class SweepQuery(ModelBody):
    """Parallel plans of a training step on a cluster, as for ``opcast sweep``."""

    cluster: Name = Field(description="Name of a cluster, such as dgx-h100-x16.")
    settings: Settings = Field({}, description="Sizes of the model, such as batch and seq.")
    grid: Annotated[str, Field(max_length=200, pattern=AXES)] = Field(
        "", description="Values of each axis, such as tp=4/8,recompute=none/full."
    )
    framework: NameOrNone = Field("", description="Framework; empty for an average.")
    compiled: bool = Field(False, description="Steps are compiled, or replayed as CUDA graphs.")
    price: _Price | None = Field(None, description="Price of a device per hour.")
    power_cap_w: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = Field(
        None, description="Sustained power of a device in watts."
    )
    model_config = ConfigDict(json_schema_extra=example_of("SweepQuery"))


#: Strings are names, never files, and limits exclude requests that would take too long.
_SERVING: JsonObject = {
    **dict.fromkeys(("weights", "experts", "activations", "kv_cache"), _Format),
    **dict.fromkeys(("plan", "prefill"), _Plan),
    **dict.fromkeys(("prompt", "output"), _Lengths),
    "settings": Settings,
    "draft": Checkpoint,
    "framework": Annotated[str, Field(max_length=60)],
    "source": _Source,
    "slo": Annotated[str, Field(max_length=80)],
    "linear_layers": Annotated[int, Field(ge=0, le=10_000)],
    **dict.fromkeys(("replicas", "prefill_replicas"), Annotated[int, Field(ge=0, le=4096)]),
    # The simulation takes 0.1 ms per request, and each answer needs three runs.
    **dict.fromkeys(("concurrency", "batch", "count"), Annotated[int, Field(ge=0, le=100_000)]),
    **dict.fromkeys(("transfer", "price"), _Price),
    "gpus": Annotated[int, Field(ge=1, le=256)],
    "burstiness": Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)],
    "drafts": Annotated[int, Field(ge=0, le=64)],
    "accepted": Annotated[float, Field(ge=1, le=65, allow_inf_nan=False)],
    "seed": _Seed,
}


class ServingBody(ModelBody):
    """A deployment under a load, as for ``opcast simulate-serving``."""

    cluster: NameOrNone = Field("", description="Name of a cluster, such as h100-sxm-x8.")
    device: NameOrNone = ""
    # Not above 0 alone: generated clients send the default of every field.
    rate: _Price = Field(
        0.0,
        description="Open load: requests per second; 0 for none. Without any load, all requests "
        "are sent at once.",
    )
    fleet: Annotated[str, Field(max_length=100_000)] = Field(
        "",
        description="Instead of all other fields: contents of a fleet's YAML file, as for "
        "`opcast simulate-serving --fleet`.",
    )
    model_config = ConfigDict(json_schema_extra=example_of("ServingBody"))


SimulateServingQuery = body_of(
    "SimulateServingQuery", ServingCase, ServingBody, _SERVING, "hf", "requests"
)


class SearchBody(ModelBody):
    """A search for deployments on devices under a load, as for ``opcast plan-serving``."""

    device: Name = Field(description="A device that GET /v1/devices lists, or an alias of it.")
    load: Annotated[str, Field(max_length=120, pattern=LOAD)] = Field(
        description="concurrency=64 or rate=4, with prompt=1024,output=256,count=500."
    )
    model_config = ConfigDict(json_schema_extra=example_of("SearchBody"))


PlanServingQuery = body_of("PlanServingQuery", SearchCase, SearchBody, _SERVING, "hf")
