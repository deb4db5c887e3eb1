"""Response schemas, for the OpenAPI document and the clients generated from it.

The responses themselves come from the functions behind ``--json``; ``tests/server`` checks them
against these schemas.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from ..common.types import JsonObject


class ErrorAnswer(BaseModel):
    """Why a request was refused."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "error": "DeviceError",
                    "what": "no device 'h1000'",
                    "where": "",
                    "hint": "list them with GET /v1/devices",
                }
            ]
        }
    )
    error: str = Field(description="Class of the error.")
    what: str = Field(description="What is wrong.")
    where: str = Field("", description="Line, op, row or part of the request.")
    hint: str = Field("", description="What to do.")


class KernelAnswers(BaseModel):
    """Predictions by column, in the order of the request; times in microseconds.

    Operators have ``roofline_us`` and ``scope`` (known, sibling, unseen or calibrated device),
    kernels have ``source`` (learned, roofline or compiler).
    """

    device: str
    model: str
    count: int
    latency_us: list[float] | None = None
    lo_us: list[float] | None = None
    hi_us: list[float] | None = None
    roofline_us: list[float] | None = None
    bound: list[str] | None = None
    scope: list[str] | None = None
    source: list[str] | None = None
    in_domain: list[bool] | None = None


class _Timed(BaseModel):
    """A time with its 90 % interval, in microseconds."""

    latency_us: float
    lo_us: float
    hi_us: float


class _Powered(_Timed):
    """A time, and the energy of all devices with its 90 % interval, in joules."""

    energy_j: float | None = Field(None, description="null if the power limit is unknown.")
    energy_lo_j: float | None = None
    energy_hi_j: float | None = None


class ProgramKernel(_Timed):
    """A kernel of a program; the time is that of one execution."""

    name: str
    kind: str
    multiplicity: float = Field(description="Executions in one run of the program.")
    bound: str = Field(description="compute, memory or latency.")
    source: str = Field(description="Origin of the estimate: learned, roofline or compiler.")
    in_domain: bool = Field(description="Whether the kernel is within the training data's range.")
    flops: float
    bytes: float
    source_op: str
    source_line: str
    module: str
    phase: str = Field(description="forward, backward, recomputed, or empty.")


class ChangedAnswer(_Powered):
    """The time of a program on one device, without its kernels."""

    share_by_kind: dict[str, float]
    in_domain_share: float
    peak_memory_bytes: float
    memory_source: str
    device_memory_bytes: float = Field(description="0 if it is unknown.")
    fits: bool | None = Field(description="null if the device's memory size is unknown.")
    compiler: str
    lowering: str
    model: str
    device: str
    notes: list[str]


class ProgramAnswer(ChangedAnswer):
    """The prediction of a program on one device: the output of ``opcast predict --json``."""

    kernels: list[ProgramKernel] = Field(description="In schedule order.")


class WhatIfAnswer(BaseModel):
    """Answers by point, in the order of the request; an error if a point cannot be predicted."""

    points: list[ChangedAnswer | ErrorAnswer]


class StepTerm(BaseModel):
    """A term of a step, and the interval of the step due to the uncertainty of this term alone."""

    name: str
    us: float
    step_lo_us: float
    step_hi_us: float
    learned: dict[str, float] = Field(description="Factors by level and value.")


class StepSamples(BaseModel):
    """Sampled steps under jitter and stragglers."""

    mean_us: float
    p5_us: float
    p50_us: float
    p95_us: float
    p99_us: float


class StepAnswer(_Powered):
    """A training step on a cluster: the output of ``opcast simulate --json``."""

    step_us: float
    compute_us: float
    exposed_communication_us: float
    bubble_us: float
    host_us: float
    communication_us: dict[str, float]
    memory_bytes_per_device: float
    memory_bytes: dict[str, float]
    capacity_bytes: float | None
    host_memory_bytes_per_box: float
    host_capacity_bytes_per_box: float
    fits: bool
    change_to_fit: str
    tflops_per_device: float
    mfu: float
    mfu_format: str
    tokens_per_s: float
    parameters: int
    devices: int
    microbatches: int
    cluster: str
    device: str
    plan: str
    framework: str
    known: str
    operators_us: dict[str, float]
    scope_share: dict[str, float]
    notes: list[str]
    samples: StepSamples | None = Field(None, description="With jitter.")
    terms: list[StepTerm] | None = Field(None, description="With explain.")
    learned_of_the_whole: dict[str, float] | None = Field(None, description="With explain.")
    cost: float | None = Field(None, description="With a price.")
    cost_lo: float | None = Field(None, description="With a price.")
    cost_hi: float | None = Field(None, description="With a price.")


#: Figures with interval bounds that every answer has, and those that some have, with the condition.
_ALWAYS = (
    *("request_throughput", "output_throughput", "output_throughput_per_gpu"),
    *(
        f"{level}_{metric}_ms"
        for metric in ("ttft", "tpot", "itl", "e2el")
        for level in ("mean", "std", "median", "p90", "p99")
    ),
)
_SOMETIMES = {
    "slo_attainment": "With an SLO.",
    **dict.fromkeys(("joules_per_request", "joules_per_output_token"), "If energy is known."),
    **dict.fromkeys(("dollars_per_million_tokens", "dollars_per_request"), "With a price."),
}
_FIGURES: JsonObject = {
    f"{figure}{end}": (float | None, Field(None, description=_SOMETIMES[figure]))
    if figure in _SOMETIMES
    else (float, ...)
    for figure in (*_ALWAYS, *_SOMETIMES)
    for end in ("", "_lo", "_hi")
}


class _Served(_Powered):
    """Performance of a deployment under a load, in the terms of ``vllm bench serve``."""

    num_prompts: int
    burstiness: float
    duration: float = Field(description="Seconds.")
    completed: int
    total_input_tokens: int
    total_output_tokens: int
    max_concurrency: int | None
    request_rate: float | str
    total_token_throughput: float
    # The key of vLLM's benchmark, colon included.
    request_goodput: float | None = Field(
        None, alias="request_goodput:", description="Requests per second that meet the SLO."
    )
    request_goodput_lo: float | None = None
    request_goodput_hi: float | None = None
    kv_occupancy_mean: float | None = None
    kv_occupancy_max: float | None = None
    batch_mean: float | None = None
    queue_mean: float | None = None
    queue_max: float | None = None
    preemptions: int
    iterations: int
    largest_batch: int
    prefix_hit_tokens: int
    cache_tokens: int
    queued_share: float
    overload_probability: float = Field(
        description="Probability that an open load exceeds the engines' capacity."
    )
    memory_bytes_per_device: dict[str, float]
    known: str = Field(description="Closest measured level: model, framework, device …")
    framework: str
    device: str
    gpus: int
    formats: dict[str, str] = Field(
        description="Number formats of weights and cache, and of experts if they differ."
    )
    plan: str
    replicas: int
    notes: list[str]


#: The output of ``opcast simulate-serving --json``, with all figures that have intervals.
ServingAnswer = create_model("ServingAnswer", __base__=_Served, **_FIGURES)


class SearchAnswer(BaseModel):
    """The output of ``opcast plan-serving --json``; deployments have the keys of a prediction."""

    best: dict[str, object] | None = Field(description="null if none meets the SLO.")
    by_estimate_only: bool
    surest: dict[str, object] | None
    nearest: list[str] = Field(description="The nearest misses if none meets the SLO.")
    reasons: list[str]
    commands: dict[str, str] = Field(description="Launch commands of the best, by framework.")
    launch: dict[str, list[dict[str, object]]] = Field(description="Their flags, with reasons.")
    front: list[dict[str, object]]
    judged: int = Field(description="Deployments that were simulated.")
    screened: int = Field(description="Those simulated without intervals, as they cannot win.")
    pruned: int
    refused: dict[str, str]
    fewest_devices: int | None
    stopped: bool


class SweepAnswer(BaseModel):
    """Number of evaluated plans of a step, and their Pareto front."""

    judged: int
    fits: int
    tokens: int = Field(description="Tokens per step.")
    front: list[dict[str, object]] = Field(description="Rows with the columns of `opcast sweep`.")
    nearest_miss: str = Field(description="If none fits, the plan that exceeds the memory least.")
    notes: list[str] = Field(description="Notes of `opcast simulate` on the first plan.")


class DeviceEntry(BaseModel):
    """A device that can be predicted."""

    name: str
    platform: str
    vendor: str
    architecture: str
    aliases: list[str]
    memory_bytes: float
    learned: bool = Field(description="Whether a served model was trained on it.")


class ModelEntry(BaseModel):
    """A model that is served."""

    name: str
    predicts: Literal["operators", "programs"]
    default: bool
    devices: list[str] = Field(description="Devices that it was trained on.")
    families: list[str] = Field(description="Operator families that it predicts.")
    digest: str


class Health(BaseModel):
    """State of the server."""

    status: Literal["ok"]
    version: str
    models: list[str]
    compiles: bool


class Ready(BaseModel):
    """The server accepts programs."""

    status: Literal["ready"]
