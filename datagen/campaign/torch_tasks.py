"""Tasks of a worker with PyTorch: whole models, products, long runs, launches, anchors."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Mapping, Sequence

import torch

from ...common.types import JsonObject
from ...features.ir.torch.libraries import DTYPES, ModelCase, build
from ..profile.runner import wall_runs
from .timing import Tell, each, time_calls, time_launches, time_loops, time_windows
from .torch_device import Step, captured, device, kernels, peak, release, wait
from .torch_device import describe as describe  # what a worker calls

#: Frameworks by their name in a plan.
_COMPILED, _GRAPH = "torch-compiled", "torch-graph"
#: Steps before a model is timed, and calls of a product under the profiler.
_WARM, _TRACED = 3, 9
#: Bytes over which the operands of a product rotate: beyond the last-level cache of any GPU.
_ROTATED_BYTES = 256e6
#: Element types of products by name, and whether f32 products may use TF32.
_TYPES = {
    "fp32": (torch.float32, False),
    "tf32": (torch.float32, True),
    "fp64": (torch.float64, False),
    "bf16": (torch.bfloat16, False),
    "fp16": (torch.float16, False),
    "int8": (torch.int8, False),
    "fp8": (torch.float8_e4m3fn, False),
}


def run(kind: str, cases: Sequence[JsonObject], tell: Tell) -> None:
    """Measure cases of one kind."""
    # Libraries stay: walking through their objects after each case would take longer than many do.
    gc.collect()
    gc.freeze()
    if kind == "products":
        _products(cases, tell)
        release()
        return
    one = {"models": _model, "sustained": _sustained, "launches": _launches}[kind]
    for case in cases:
        each([case], tell, one)
        release()


def _model(key: str, spec: JsonObject) -> list[JsonObject]:
    """A model, built with random weights, run as the case specifies."""
    dtype = str(spec["dtype"])
    plain = "fp32" if dtype.startswith("amp-") else dtype
    own = ModelCase(
        library=str(spec["library"]),
        model=str(spec["model"]),
        batch=int(spec["batch"]),
        img_size=int(spec.get("img_size", 0)),
        mode=str(spec["mode"]),
        dtype=plain,
        layout=str(spec.get("layout", "nchw")),
    )
    framework = str(spec["framework"])
    torch.manual_seed(0)
    program = build(own, device())
    module = program.source
    assert isinstance(module, torch.nn.Module)
    parameters = sum(p.numel() for p in module.parameters())
    if framework == _COMPILED:
        module = torch.compile(module)
    args = torch.utils._pytree.tree_map(_filled, program.args)
    step = _step(module, args, dict(program.kwargs), own.mode, DTYPES[dtype][1])
    if framework == _GRAPH:
        step = captured(step)
    begin = time.perf_counter()
    wait(step())
    cold = time.perf_counter() - begin
    for _ in range(_WARM):
        wait(step())
    memory = peak(step)
    start = time.time()
    seconds = min(time_calls(step, wait, 2)) * 1e-6
    walls = time_calls(step, wait, wall_runs(seconds))
    names = ("library", "model", "batch", "img_size", "mode", "dtype", "layout", "framework")
    row: JsonObject = {
        "table": "models",
        "key": key,
        **{name: spec[name] for name in names if name in spec},
        "torch": torch.__version__,
        "param_m": parameters / 1e6,
        "cold_s": cold,
        "walls_us": walls,
        "begin": start,
        "end": time.time(),
        **memory,
    }
    return [row, *(kernels(key, step) if framework == "torch-eager" else [])]


def _filled(value: object) -> object:
    """Random values in place of zeros; integers stay valid indices."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_floating_point():
        return torch.randn_like(value)
    return torch.randint_like(value, 0, 100) if value.dtype == torch.int64 else value


def _step(
    module: torch.nn.Module,
    args: Sequence[object],
    named: Mapping[str, object],
    mode: str,
    cast: str,
) -> Step:
    """A forward pass, or a training step with SGD and momentum."""
    own = getattr(torch, cast) if cast else None

    def forward() -> object:
        context = torch.autocast(device(), own) if own else contextlib.nullcontext()
        with context:
            return module(*args, **named)

    if mode == "infer":

        def infer() -> object:
            with torch.inference_mode():
                return forward()

        return infer
    optimiser = torch.optim.SGD(module.parameters(), lr=1e-4, momentum=0.9)
    labels: list[torch.Tensor] = []

    def train() -> torch.Tensor:
        optimiser.zero_grad(set_to_none=True)
        logits = next(v for v in torch.utils._pytree.tree_leaves(forward()) if v.dim() >= 2)
        flat = logits.float().reshape(-1, logits.shape[-1])
        if not labels:
            labels.append(torch.randint(0, flat.shape[-1], flat.shape[:1], device=flat.device))
        loss = torch.nn.functional.cross_entropy(flat, labels[0])
        loss.backward()
        optimiser.step()
        return loss

    return train


def _products(cases: Sequence[JsonObject], tell: Tell) -> None:
    """Products, timed in loops; on a GPU all of them once more in one profiler session."""
    calls: list[Step] = []
    rows: dict[str, JsonObject] = {}
    for case in cases:
        key = str(case["key"])
        try:
            call = _product(case["spec"])
            began, once = time.time(), min(time_calls(call, wait, 3)) * 1e-6
            own = {"begin": began, "us_each": time_loops(call, wait, once), "end": time.time()}
            rows[key] = {"table": "products", "key": key, **own, **case["spec"]}
            calls.append(call)
        except Exception as error:
            tell(key, error)
    traced: list[JsonObject] = []
    if calls:
        traced = kernels(next(iter(rows)), lambda: [call() for call in calls], _TRACED)
    for key, row in rows.items():
        tell(key, [row, *traced])
        traced = []


def _product(spec: JsonObject) -> Step:
    """A product of operands that rotate beyond the caches."""
    m, n, k = (int(spec[name]) for name in ("m", "n", "k"))
    dtype, narrow = _TYPES[str(spec["dtype"])]
    size = torch.empty((), dtype=dtype).element_size() * (m * k + n * k)
    rotated = _ROTATED_BYTES if torch.cuda.is_available() else 1.0
    sets = max(1, min(8, int(rotated / size)))
    lefts = [_random((m, k), dtype) for _ in range(sets)]
    # Weights in the layout of linear layers: n x k, used transposed.
    rights = [_random((n, k), dtype) for _ in range(sets)]
    turn = [0]

    def next_pair() -> tuple[torch.Tensor, torch.Tensor]:
        turn[0] = (turn[0] + 1) % sets
        return lefts[turn[0]], rights[turn[0]].t()

    if dtype == torch.int8:
        return lambda: torch._int_mm(*next_pair())
    if dtype == torch.float8_e4m3fn:
        one = torch.ones((), device=device())
        return lambda: torch._scaled_mm(
            *next_pair(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16
        )

    if dtype != torch.float32:
        return lambda: torch.mm(*next_pair())

    def product() -> torch.Tensor:
        # Set in the call, since the products of a trace run one after the other.
        torch.backends.cuda.matmul.allow_tf32 = narrow
        return torch.mm(*next_pair())

    return product


def _random(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.int8:
        return torch.randint(-100, 100, shape, dtype=dtype, device=device())
    return torch.randn(shape, device=device()).to(dtype)


def _sustained(key: str, spec: JsonObject) -> list[JsonObject]:
    """A product running back to back for a long time."""
    call = _product(spec)
    each = min(time_calls(call, wait, 5)) * 1e-6
    found = time_windows(call, wait, each, float(spec["seconds"]))
    sizes = {name: spec[name] for name in ("dtype", "m", "n", "k")}
    return [{"table": "windows", "key": key, **sizes, **window} for window in found]


def _launches(key: str, spec: JsonObject) -> list[JsonObject]:
    """The host's cost of a launch: an operator, a compiled one, a graph of some operators."""
    count, framework = int(spec["operators"]), str(spec["framework"])
    x = torch.zeros(8, device=device())

    def call(x: torch.Tensor = x) -> torch.Tensor:
        for _ in range(count):
            x = torch.relu(x)
        return x

    own: Step = call
    if framework == _COMPILED:
        own = torch.compile(call)
    elif framework == _GRAPH:
        own = captured(call)
    row = {"table": "launches", "key": key, "framework": framework, "operators": count}
    return [row | time_launches(own, wait)]


def anchors() -> JsonObject:
    """Two fixed programs, a product and a pass over memory, which show drift between workers."""
    small = not torch.cuda.is_available()
    size, rows = (256, 2**18) if small else (4096, 2**26)
    x = torch.ones(size, size, device=device(), dtype=torch.float32 if small else torch.bfloat16)
    y = torch.ones(rows, device=device())
    return {
        "table": "anchors",
        "framework": "torch",
        "begin": time.time(),
        "product_us": time_calls(lambda: x @ x, wait),
        "memory_us": time_calls(lambda: y * 1.5, wait),
    }
