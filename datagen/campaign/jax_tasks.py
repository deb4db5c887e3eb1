"""Tasks of a worker with JAX: traced and whole programs, long runs, launches, anchors.

Rows contain what was observed. Kernels are derived from them when a campaign is imported.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ...common import worker_process
from ...common.errors import ProfileError
from ...common.types import JsonObject
from ..profile.runner import (
    DEFAULT_CACHE_BYTES,
    SHARED_BYTES,
    Runner,
    first_runs,
    long_runs,
    rotation,
    wait,
    wall_runs,
)
from .jax_cases import Compiled, compile_cases
from .timing import Tell, each, time_calls, time_launches, time_loops, time_windows

if TYPE_CHECKING:
    from ..profile.executions import Event

#: Maximum number of executions under the profiler: their events are kept one by one.
_TRACED = 12


class _Measured(NamedTuple):
    """A case with its rows so far, starting with that of its program."""

    compiled: Compiled
    runner: Runner
    rows: list[JsonObject]


def describe() -> JsonObject:
    """Device, versions and host of this process, and why it sees no accelerator, if so."""
    from ..profile.host import describe_host

    found = dict(describe_host())
    if found["platform"] == "cpu":
        found["no_accelerator"] = _no_accelerator()
    return found


def _no_accelerator() -> str:
    import jax

    try:
        jax.devices("gpu")
    except RuntimeError as error:
        return str(error)
    return "JAX_PLATFORMS prefers the CPU"


def run(kind: str, cases: Sequence[JsonObject], tell: Tell) -> None:
    """Measure cases of one kind."""
    if kind == "traced":
        traced(cases, tell)
    else:
        each(cases, tell, {"launches": _launches, "device": _described}[kind])


def traced(cases: Sequence[JsonObject], tell: Tell) -> None:
    """Measure programs and operations: whole times, long runs, and the events of every kernel.

    Whole times and long runs use XLA's default compilation, with command buffers on GPUs; kernels
    come from a compilation without them.
    """
    group: list[_Measured] = []
    for case, compiled, runner, row in _ready(cases, tell):
        own = _Measured(compiled, runner, [row])
        try:
            _time_whole(own, float(case["spec"].get("seconds", 0.0)))
        except Exception as error:
            tell(compiled.key, error)
            continue
        tell(compiled.key, None)
        group.append(own)
        if compiled.bytes > SHARED_BYTES:
            _trace(group, tell)
    _trace(group, tell)


def _ready(
    cases: Sequence[JsonObject], tell: Tell
) -> Iterable[tuple[JsonObject, Compiled, Runner, JsonObject]]:
    """Compiled cases after a few executions, each with its first times as a row."""
    from ..profile.host import last_cache_bytes

    cache = last_cache_bytes() or DEFAULT_CACHE_BYTES
    every = compile_cases(cases, lambda key: tell(key, None))
    for case, compiled in zip(cases, every, strict=True):
        if isinstance(compiled, Exception):
            tell(case["key"], compiled)
            continue
        try:
            _check_fits(compiled)
            runner = Runner(
                (compiled.single and compiled.plain) or compiled.run,
                compiled.make_arguments,
                compiled.aliases,
                rotation(compiled.bytes, cache),
            )
            cold = runner.step()
            warm = [runner.step() for _ in range(1 if cold > 0.3 else 3)]
        except Exception as error:  # runtimes fail in many ways
            tell(case["key"], error)
            continue
        row: JsonObject = {
            "table": "programs",
            "key": compiled.key,
            "family": compiled.family,
            "compile_s": round(compiled.compile_s, 4),
            "cold_us": cold * 1e6,
            "warm_us": min(warm) * 1e6,
            "begin": time.time(),
            **compiled.memory,
        }
        yield case, compiled, runner, row


def _check_fits(compiled: Compiled) -> None:
    """Reject programs that do not fit: a host out of memory ends more than this process.

    Raises:
        ProfileError: The program exceeds the device's memory, or its arguments the host's.
    """
    from ..profile.host import memory_bytes

    needed = compiled.bytes + compiled.memory.get("temp_bytes", 0)
    for what, bytes_, limit in (
        ("the device has", needed, memory_bytes() or math.inf),
        # Random arguments are drawn on the host, where a copy may exist for a moment.
        ("drawn on a host of", 2 * compiled.bytes, worker_process.memory_bytes() or math.inf),
    ):
        if bytes_ > limit:
            raise ProfileError(f"needs {bytes_ / 1e9:.3g} GB, {what} {limit / 1e9:.3g} GB")


def _time_whole(own: _Measured, seconds: float) -> None:
    """Time whole executions, one by one and for some seconds back to back; then without buffers.

    A single operation's whole time is mostly its dispatch, which is not timed.
    """
    compiled, runner, (row, *_) = own
    each = float(row["warm_us"]) * 1e-6
    if not compiled.single:
        row["walls_us"] = [round(runner.step() * 1e6, 3) for _ in range(wall_runs(each))]
    if seconds:
        windows = time_windows(runner.launch, wait, each, seconds)
        own.rows.extend({"table": "windows", "key": compiled.key, **w} for w in windows)
    if not compiled.single and compiled.plain is not None:
        runner.run = compiled.plain
        runner.step()
        row["plain_us"] = [round(runner.step() * 1e6, 3) for _ in range(long_runs(each))]


def _trace(group: list[_Measured], tell: Tell) -> None:
    """Run one trace session and report its results; without kernels, times of loops."""
    from ..profile.trace import executed, recorded

    if not group:
        return
    for own in group:
        own.rows[0]["runs"] = min(_TRACED, first_runs(float(own.rows[0]["warm_us"]) * 1e-6))

    def execute() -> None:
        for own in group:
            for _ in range(own.rows[0]["runs"]):
                own.runner.step()

    events: Sequence[Event] = ()
    platform, trouble = "", "no kernel of it appears in the trace"
    try:
        # With several devices, the one that ran the programs.
        found = max(executed(recorded(execute)), key=lambda device: len(device.events))
        events, platform = found.events, found.platform
    except Exception as error:  # no tracing library, or no permission to trace
        trouble = f"{type(error).__name__}: {error}"
    for own in group:
        try:
            tell(own.compiled.key, own.rows + _seen(own, events, platform, trouble, len(group)))
        except Exception as error:
            tell(own.compiled.key, error)
    group.clear()


def _seen(
    own: _Measured, events: Sequence[Event], platform: str, trouble: str, count: int
) -> list[JsonObject]:
    """Rows of one program from a trace of some programs, completing its first row."""
    compiled, runner, (row, *_) = own
    ran = [e for e in events if e.module == compiled.module]
    if count == 1:  # whatever module name the trace uses
        ran = ran or list(events)
    more = _columns(ran, compiled.key, platform)
    if not ran:
        more = {"table": "notes", "key": compiled.key, "text": f"no kernels: {trouble}"}
        if compiled.single:
            row["us_each"] = time_loops(runner.launch, wait, float(row["warm_us"]) * 1e-6)
    row |= {"hlo": compiled.hlo, "end": time.time()}
    return [more]


def _columns(events: Sequence[Event], key: str, platform: str) -> JsonObject:
    """Events as columns; names and runs by number, times in ns from the first start."""
    zero = min((e.start for e in events), default=0.0)
    ops, names = (sorted({getattr(e, what) for e in events}) for what in ("op", "name"))
    runs = list(dict.fromkeys(e.run for e in events))
    at = {
        what: {v: i for i, v in enumerate(known)}
        for what, known in zip(("op", "name", "run"), (ops, names, runs), strict=True)
    }
    return {
        "table": "events",
        "key": key,
        "platform": platform,
        "ops": ops,
        "names": names,
        "marked": None not in runs,
        **{what: [own[getattr(e, what)] for e in events] for what, own in at.items()},
        "start": [round(e.start - zero) for e in events],
        "end": [round(e.end - zero) for e in events],
    }


def _launches(key: str, spec: JsonObject) -> list[JsonObject]:
    """The host's cost of a launch, by the number of arguments."""
    import jax
    import jax.numpy as jnp

    count = int(spec["arguments"])
    call = jax.jit(lambda *x: [v + 1.0 for v in x])
    values = [jnp.zeros((8,), jnp.float32) for _ in range(count)]
    row: JsonObject = {"table": "launches", "key": key, "framework": "jax", "arguments": count}
    return [row | time_launches(lambda: call(*values), wait)]


def _described(key: str, spec: JsonObject) -> list[JsonObject]:
    """The device as described by its own ceilings, as in a profile."""
    from ..profile.device_probe import probe_device

    description = probe_device(float(spec["seconds"])).to_json()
    return [{"table": "device", "key": key, "description": description}]


def anchors() -> JsonObject:
    """Two fixed programs, a product and a pass over memory, which show drift between workers."""
    import jax
    import jax.numpy as jnp

    small = jax.default_backend() == "cpu"
    size, rows = (256, 2**18) if small else (4096, 2**26)
    dtype = jnp.float32 if small else jnp.bfloat16
    x, y = jnp.ones((size, size), dtype), jnp.ones((rows,), jnp.float32)
    found: JsonObject = {"table": "anchors", "framework": "jax", "begin": time.time()}
    for name, call, value in (
        ("product_us", jax.jit(lambda a: a @ a), x),
        ("memory_us", jax.jit(lambda a: a * 1.5 + 1.0), y),
    ):
        found[name] = time_calls(partial(call, value), wait)
    return found
