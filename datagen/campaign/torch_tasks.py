"""What a worker with PyTorch measures: whole models, products, long runs, launches, anchors."""

from __future__ import annotations

import contextlib
import json
import platform
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ...common.errors import DatasetError
from ...common.types import JsonObject
from ...features.ir.torch.libraries import DTYPES, ModelCase, build
from ..profile.runner import wall_runs
from .timing import time_calls, time_launches, time_windows

#: Takes what was found of a case: rows, or the error that it ended with.
Tell = Callable[[str, "list[JsonObject] | Exception"], None]
#: One call of what is measured; what it returns is waited for.
Step = Callable[[], object]
#: Frameworks by the word in a plan.
_COMPILED, _GRAPH = "torch-compiled", "torch-graph"
#: Steps before a model is timed, and under the profiler.
_WARM, _TRACED = 3, 3
#: Calls of a product between two looks at the clock take at least this long, and such looks.
_LOOK_S, _LOOKS = 2e-3, 9
#: Bytes that the operands of a product rotate over: past the last cache of any GPU.
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


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _wait(value: object = None) -> object:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return value


def describe() -> JsonObject:
    """Device and versions of this process."""
    found: JsonObject = {
        "platform": "gpu" if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "hip": torch.version.hip or "",
        "python": platform.python_version(),
        "device_count": torch.cuda.device_count(),
    }
    for name in ("triton", "timm", "transformers", "torchvision", "diffusers"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    if torch.cuda.is_available():
        own = torch.cuda.get_device_properties(0)
        found |= {
            "device_kind": own.name,
            "memory_bytes": own.total_memory,
            "multiprocessors": own.multi_processor_count,
            "cache_bytes": getattr(own, "L2_cache_size", 0),
            "capability": f"{own.major}.{own.minor}",
            "arch": getattr(own, "gcnArchName", ""),
            "cudnn": torch.backends.cudnn.version() or 0,
        }
    else:
        found["device_kind"] = platform.processor() or platform.machine()
        found["no_accelerator"] = _no_accelerator()
    return found


def _no_accelerator() -> str:
    if not (torch.version.cuda or torch.version.hip):
        return "built without CUDA and ROCm"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error)
    return "the driver lists no device"


def run(kind: str, cases: Sequence[JsonObject], tell: Tell) -> None:
    """Measure cases of one kind."""
    if kind == "products":
        _products(cases, tell)
        return
    one = {"models": _model, "sustained": _sustained, "launches": _launches}[kind]
    for case in cases:
        try:
            rows = one(str(case["key"]), case["spec"])
        except Exception as error:  # out of memory, no such model, a compiler that fails
            tell(str(case["key"]), error)
        else:
            tell(str(case["key"]), rows)
        finally:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def _model(key: str, spec: JsonObject) -> list[JsonObject]:
    """A model, built with random weights, run as the case says."""
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
    program = build(own, _device())
    module = program.source
    assert isinstance(module, torch.nn.Module)
    parameters = sum(p.numel() for p in module.parameters())
    if framework == _COMPILED:
        module = torch.compile(module)
    args = torch.utils._pytree.tree_map(_filled, program.args)
    step = _step(module, args, dict(program.kwargs), own.mode, DTYPES[dtype][1])
    if framework == _GRAPH:
        step = _captured(step)
    begin = time.perf_counter()
    _wait(step())
    cold = time.perf_counter() - begin
    for _ in range(_WARM):
        _wait(step())
    memory = _peak(step)
    start = time.time()
    seconds = min(time_calls(step, _wait, 2)) * 1e-6
    walls = time_calls(step, _wait, wall_runs(seconds))
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
    traced = framework == "torch-eager" and torch.cuda.is_available()
    return [row, *(_kernels(key, step) if traced else [])]


def _filled(value: object) -> object:
    """Random values in the place of zeros; integers stay valid indices."""
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
        context = torch.autocast(_device(), own) if own else contextlib.nullcontext()
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


def _captured(step: Step) -> Step:
    """A step as a CUDA graph that is replayed."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    replay: Step = graph.replay
    return replay


def _peak(step: Step) -> JsonObject:
    """Bytes that a step allocates and that PyTorch reserves at the most; nothing on a CPU."""
    if not torch.cuda.is_available():
        return {}
    _wait()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    _wait(step())
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def _kernels(key: str, step: Step, steps: int = _TRACED) -> list[JsonObject]:
    """Operators with a row of a table, and all kernels by name, from a trace of some steps."""
    try:
        from ..traces.aten import traced_operators
        from ..traces.kineto import read_kineto
    except ImportError as error:  # NumPy is missing
        return [_note(key, error)]
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        for _ in range(steps):
            step()
        _wait()
    with tempfile.TemporaryDirectory(prefix="opcast-trace-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        try:
            events = [e for d in read_kineto(path).devices for e in d.executed.events]
        except DatasetError as error:  # the driver lets nobody trace
            return [_note(key, error)]
    kernels: dict[str, list[float]] = defaultdict(list)
    for event in events:
        kernels[event.name].append((event.end - event.start) * 1e-3)
    found: list[JsonObject] = [
        {"table": "kernels", "key": key, "name": name, "steps": steps, "us": us}
        for name, us in kernels.items()
    ]
    for operator in traced_operators(events):
        if operator.row:
            us = [s * 1e6 for s in operator.seconds]
            row = {"table": "operators", "key": key, "row": json.dumps(operator.row), "us": us}
            found.append(row | {"kernels": sorted(operator.kernels)})
    return found


def _note(key: str, error: Exception) -> JsonObject:
    return {"table": "notes", "key": key, "text": f"no kernels: {error}"}


def _products(cases: Sequence[JsonObject], tell: Tell) -> None:
    """Products, timed in loops; on a GPU each once more under the profiler, all in one session."""
    calls: list[Step] = []
    rows: dict[str, JsonObject] = {}
    for case in cases:
        key = str(case["key"])
        try:
            call = _product(case["spec"])
            rows[key] = {"table": "products", "key": key, **_looped(call), **case["spec"]}
            calls.append(call)
        except Exception as error:
            tell(key, error)
    traced: list[JsonObject] = []
    if calls and torch.cuda.is_available():
        first = next(iter(rows))
        traced = _kernels(first, lambda: [call() for call in calls], steps=_LOOKS)
    for key, row in rows.items():
        tell(key, [row, *traced])
        traced = []


def _product(spec: JsonObject) -> Step:
    """A product of operands that rotate past the caches."""
    m, n, k = (int(spec[name]) for name in ("m", "n", "k"))
    dtype, narrow = _TYPES[str(spec["dtype"])]
    size = torch.empty((), dtype=dtype).element_size() * (m * k + n * k)
    rotated = _ROTATED_BYTES if torch.cuda.is_available() else 1.0
    sets = max(1, min(8, int(rotated / size)))
    device = _device()
    lefts = [_random((m, k), dtype, device) for _ in range(sets)]
    # Weights as linear layers keep them: n x k, used transposed.
    rights = [_random((n, k), dtype, device) for _ in range(sets)]
    turn = [0]

    def next_pair() -> tuple[torch.Tensor, torch.Tensor]:
        turn[0] = (turn[0] + 1) % sets
        return lefts[turn[0]], rights[turn[0]].t()

    if dtype == torch.int8:
        return lambda: torch._int_mm(*next_pair())
    if dtype == torch.float8_e4m3fn:
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(
            *next_pair(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16
        )

    if dtype != torch.float32:
        return lambda: torch.mm(*next_pair())

    def product() -> torch.Tensor:
        # In the call, since the products of a trace run one after the other.
        torch.backends.cuda.matmul.allow_tf32 = narrow
        return torch.mm(*next_pair())

    return product


def _random(shape: tuple[int, int], dtype: torch.dtype, device: str) -> torch.Tensor:
    if dtype == torch.int8:
        return torch.randint(-100, 100, shape, dtype=dtype, device=device)
    return torch.randn(shape, device=device).to(dtype)


def _looped(call: Step) -> JsonObject:
    """Microseconds of a call, of loops that are long beside a look at the clock."""
    once = min(time_calls(call, _wait, 3)) * 1e-6
    count = max(1, round(_LOOK_S / max(once, 1e-6)))
    began, times = time.time(), []
    for _ in range(_LOOKS):
        start = time.perf_counter()
        for _ in range(count):
            call()
        _wait()
        times.append((time.perf_counter() - start) / count * 1e6)
    return {"us_each": times, "calls": count, "begin": began, "end": time.time()}


def _sustained(key: str, spec: JsonObject) -> list[JsonObject]:
    """A product for long, back to back."""
    call = _product(spec)
    each = min(time_calls(call, _wait, 5)) * 1e-6
    found = time_windows(call, _wait, each, float(spec["seconds"]))
    sizes = {name: spec[name] for name in ("dtype", "m", "n", "k")}
    return [{"table": "windows", "key": key, **sizes, **window} for window in found]


def _launches(key: str, spec: JsonObject) -> list[JsonObject]:
    """What a launch costs the host: an operator, a compiled one, a graph of some operators."""
    count, framework = int(spec["operators"]), str(spec["framework"])
    x = torch.zeros(8, device=_device())

    def call(x: torch.Tensor = x) -> torch.Tensor:
        for _ in range(count):
            x = torch.relu(x)
        return x

    own: Step = call
    if framework == _COMPILED:
        own = torch.compile(call)
    elif framework == _GRAPH:
        own = _captured(call)
    row = {"table": "launches", "key": key, "framework": framework, "operators": count}
    return [row | time_launches(own, _wait)]


def anchors() -> JsonObject:
    """Two fixed programs, a product and a pass over memory, which show drift between workers."""
    small = not torch.cuda.is_available()
    size, rows = (256, 2**18) if small else (4096, 2**26)
    x = torch.ones(size, size, device=_device(), dtype=torch.float32 if small else torch.bfloat16)
    y = torch.ones(rows, device=_device())
    return {
        "table": "anchors",
        "framework": "torch",
        "begin": time.time(),
        "product_us": time_calls(lambda: x @ x, _wait),
        "memory_us": time_calls(lambda: y * 1.5, _wait),
    }
