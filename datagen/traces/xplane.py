"""Profiles of JAX and XLA: ``*.xplane.pb``, with the optimised modules in them.

Events are read by ``jax.profiler.ProfileData``. It leaves out what describes events, where the
modules are (https://github.com/openxla/xla/blob/main/third_party/tsl/tsl/profiler/protobuf/xplane.proto);
those are read from the fields of the message, with everything else skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from ...common.errors import DatasetError
from ...common.wire import fields
from ..profile.trace import executed
from .trace import DeviceTrace, Trace

#: Plane of the profile that holds the modules that ran.
_METADATA = b"/host:metadata"
# Numbers of fields, by message.
_PLANES, _PLANE_NAME, _EVENT_METADATA = 1, 2, 4
_VALUE, _EVENT_NAME, _STATS, _STAT_BYTES, _HLO_MODULE = 2, 2, 5, 6, 1
#: Statistics of a device's plane that name the device.
_DEVICE_NAMES = ("device_type_string", "gpu_device_name", "device_name")


def read_xplane(path: Path) -> Trace:
    """Read a profile.

    Raises:
        DatasetError: It is cut off or damaged, or holds no kernels.
    """
    from jax.profiler import ProfileData

    data = path.read_bytes()
    try:
        profile = ProfileData.from_serialized_xspace(data)
        hlo = dict(_modules(memoryview(data)))
    except (RuntimeError, ValueError) as error:
        raise DatasetError(
            f"the profile is cut off or damaged: {error}",
            where=str(path),
            hint="copy it again; a trace is whole once stop_trace() has returned",
        ) from None
    devices = [DeviceTrace(i, e) for i, e in enumerate(executed(profile, by_program=True))]
    devices = [d for d in devices if d.executed.events]
    if not devices:
        raise DatasetError(
            "the profile holds no kernels, only events of the host",
            where=str(path),
            hint="record executions of compiled functions: block_until_ready() before "
            "stop_trace(), and host_tracer_level at least 1 on a CPU",
        )
    names = [_device_name(dict(plane.stats)) for plane in profile.planes]
    return Trace(str(path), "xplane", devices, next(filter(None, names), ""), hlo)


def _device_name(stats: Mapping[str, object]) -> str:
    return next((str(stats[name]) for name in _DEVICE_NAMES if name in stats), "")


def _modules(space: memoryview) -> Iterator[tuple[str, str]]:
    """Name and text of each module in a profile."""
    for number, plane in fields(space):
        if number == _PLANES and isinstance(plane, memoryview) and _named(plane):
            for of, entry in fields(plane):
                if of == _EVENT_METADATA and isinstance(entry, memoryview):
                    yield from _module(entry)


def _named(plane: memoryview) -> bool:
    return any(n == _PLANE_NAME and _bytes(v) == _METADATA for n, v in fields(plane))


def _bytes(value: int | memoryview) -> bytes:
    return bytes(value) if isinstance(value, memoryview) else b""


def _module(entry: memoryview) -> Iterator[tuple[str, str]]:
    from ...features.ir.jax_compat import hlo_text

    event = dict(fields(entry)).get(_VALUE)
    if not isinstance(event, memoryview):
        return
    name = ""
    for number, value in fields(event):
        if not isinstance(value, memoryview):
            continue
        if number == _EVENT_NAME:
            name = bytes(value).decode(errors="replace")
        # Each statistic is a module's message, or nothing but its key.
        stat = dict(fields(value)).get(_STAT_BYTES) if number == _STATS else None
        proto = dict(fields(stat)).get(_HLO_MODULE) if isinstance(stat, memoryview) else None
        if isinstance(proto, memoryview):
            yield name, hlo_text(bytes(proto))
