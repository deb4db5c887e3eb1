"""Traces of ``torch.profiler`` (Kineto): kernels, the calls that launched them, operators, steps.

Format: events of Chrome's trace format, written by Kineto
(https://github.com/pytorch/kineto/blob/main/libkineto/src/output_json.cpp) with PyTorch's
arguments (torch/csrc/autograd/profiler_kineto.cpp). Times are microseconds. Objects are read one by
one, since the trace of a training step has gigabytes.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from ...common.errors import DatasetError
from ...common.files import own_data
from ...features.ir.program import DTYPE_BITS, HLO_NAMES
from ..profile.executions import Event
from .trace import Collective, Nested, Operator, Trace, TraceKernel

#: Key of the list of events in a Chrome trace (the "JSON Object Format" of its documentation).
EVENTS = "traceEvents"
#: Bytes read at once, and maximum size of a single value: no event comes near it. Engineering
#: estimates.
_CHUNK, _LONGEST = 4_000_000, 400_000_000
#: Categories of device activities, and of host calls.
_KERNELS, _COPIES = ("kernel",), ("gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver", "hip_runtime")
_STEP = re.compile(r"ProfilerStep#(\d+)")
#: Collectives by NCCL's names, without underscores and case, as PyTorch and the kernels spell them.
COLLECTIVES: dict[str, str] = own_data("datagen/traces/operators.toml")["collectives"]
#: Bytes of an element by the type names of NumPy and of C, both of which occur in traces.
_WIDTHS = {name: DTYPE_BITS[kind] // 8 for name, kind in HLO_NAMES.items()} | {
    "half": 2, "float": 4, "double": 8, "int": 4, "long": 8, "byte": 1, "char": 1,
}  # fmt: skip


@dataclass
class _Read:
    """Content of a file that is kept."""

    kernels: list[tuple[TraceKernel, int, int | None, int | None]] = field(default_factory=list)
    calls: dict[object, list[tuple[float, float, Operator]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    #: Thread and start of the call with an external id.
    external: dict[int, tuple[object, float]] = field(default_factory=dict)
    launches: dict[int, tuple[object, float]] = field(default_factory=dict)
    steps: list[tuple[float, float, int]] = field(default_factory=list)
    device_names: set[str] = field(default_factory=set)
    names: int = 0


def read_kineto(path: Path, moved: Callable[[int, int], None] = lambda done, total: None) -> Trace:
    """Read a PyTorch trace.

    Args:
        path: JSON of ``export_chrome_trace``, possibly gzipped.
        moved: Callback with the number of bytes read and the total.

    Raises:
        DatasetError: It is truncated or not a trace, or contains no kernels.
    """
    read = _Read()
    for key, value in stream_events(path, moved):
        if key == EVENTS and isinstance(value, dict):
            try:
                _add(read, value)
            except (KeyError, TypeError, ValueError) as error:
                raise DatasetError(
                    f"event {value.get('name')!r} cannot be read: {type(error).__name__}: {error}",
                    where=str(path),
                    hint="expected the JSON that torch.profiler's export_chrome_trace writes",
                ) from None
        elif key == "deviceProperties" and isinstance(value, list):
            read.device_names = {str(d.get("name", "")) for d in value if isinstance(d, dict)}
    if not read.kernels:
        raise _no_kernels(path, read)
    return _trace(path, read)


def _no_kernels(path: Path, read: _Read) -> DatasetError:
    if not read.names:
        return DatasetError(
            "the trace holds no events of an operator or a device",
            where=str(path),
            hint="export it after an active step of the profiler's schedule has ended (call step() "
            "once more, or export in on_trace_ready); for a profile of JAX give its xplane.pb, "
            "which lies beside trace.json.gz",
        )
    return DatasetError(
        "the trace holds no kernels, only events of the host",
        where=str(path),
        hint="record with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA] and "
        "record_shapes=True",
    )


def _add(read: _Read, event: Mapping[str, object]) -> None:
    if event.get("ph") != "X":
        return
    category, name = str(event.get("cat", "")).lower(), str(event.get("name", ""))
    args = event.get("args")
    args = args if isinstance(args, dict) else {}
    start = _number(event["ts"])
    end = start + _number(event.get("dur", 0))
    thread = (event.get("pid"), event.get("tid"))
    if category in _KERNELS or category in _COPIES:
        read.names += 1
        kernel = TraceKernel.of(
            name,
            start * 1e3,
            end * 1e3,
            stream=str(args.get("stream", "")),
            collective=collective_of(name, args),
            copy=category in _COPIES,
        )
        device = _whole(args.get("device", event.get("pid"))) or 0
        read.kernels.append(
            (kernel, device, _whole(args.get("correlation")), _whole(args.get("External id")))
        )
    elif category in _CALLS:
        correlation = _whole(args.get("correlation"))
        if correlation is not None:
            read.launches[correlation] = (thread, start)
    elif category == "cpu_op":
        read.names += 1
        external = _whole(args.get("External id"))
        operator = Operator(
            name,
            _shapes(args.get("Input Dims")),
            tuple(map(str, _listed(args.get("Input type")))),
            tuple(map(str, _listed(args.get("Concrete Inputs")))),
            read.names,
        )
        read.calls[thread].append((start, end, operator))
        if external is not None:
            read.external[external] = (thread, start)
    elif category == "user_annotation" and (step := _STEP.match(name)):
        read.steps.append((start, end, int(step[1])))


def _number(value: object) -> float:
    # Newer versions write times as text, to keep nanoseconds.
    number = float(str(value))
    if not math.isfinite(number):
        raise ValueError(f"{value} is not a time")
    return number


def _whole(value: object) -> int | None:
    try:
        return int(str(value))
    except ValueError:
        return None


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _shapes(value: object) -> tuple[tuple[int, ...], ...]:
    """Dimensions by argument; a list of tensors is flattened, one tensor after the other."""
    found = []
    for item in _listed(value):
        flat = [v for v in _listed(item) if isinstance(v, int)]
        found.append(tuple(flat))
    return tuple(found)


def collective_of(name: str, args: Mapping[str, object]) -> Collective | None:
    """The NCCL collective, from PyTorch's arguments or else from the kernel's name."""
    said = str(args.get("Collective name", ""))
    lowered = name.lower()
    if not said and not lowered.startswith(("nccl", "rccl")):
        return None
    op = _op(said) or _op(lowered.removeprefix("nccldevkernel_").removeprefix("ncclkernel_"))
    dtype = str(args.get("dtype", "")).lower()
    given, taken = (_whole(args.get(f"{d} msg nelems")) or 0 for d in ("In", "Out"))
    # As nccl-tests counts: the whole buffer, which is the larger side of a gather or a scatter.
    elements = max(given, taken)
    size = elements * _WIDTHS.get(dtype, 0)
    return Collective(op or "other", size, _whole(args.get("Group size")) or 0, dtype)


def _op(text: str) -> str:
    """The collective whose name the text starts with; the longest match counts."""
    plain = re.sub(r"[^a-z]", "", text.lower()).removeprefix("nccl").removeprefix("coalesced")
    known = [name for name in COLLECTIVES if plain.startswith(name)]
    return COLLECTIVES[max(known, key=len)] if known else ""


def _trace(path: Path, read: _Read) -> Trace:
    threads = {thread: Nested(calls) for thread, calls in read.calls.items()}
    steps = Nested(read.steps)
    devices: dict[int, list[Event]] = defaultdict(list)
    for kernel, device, correlation, external in read.kernels:
        launch = read.launches.get(correlation) if correlation is not None else None
        if launch is not None:
            kernel.launched = launch[1] * 1e3
        # Without the call, use the operator that Kineto found around it.
        called = launch or (read.external.get(external) if external is not None else None)
        if called is not None and called[0] in threads:
            kernel.operators = tuple(threads[called[0]].around(called[1]))
        at = called[1] if called is not None else kernel.start * 1e-3
        kernel.run = next(iter(steps.around(at)), None)
        devices[device].append(kernel)
    notes = []
    every = [kernel for kernel, *_ in read.kernels]
    if not any(o.shapes for k in every for o in k.operators):
        notes.append("no operator has shapes: record with record_shapes=True")
    return Trace.of_gpus(path, "kineto", devices, read.device_names, notes=notes)


class _Text:
    """A forward-moving window on a text."""

    def __init__(self, path: Path, moved: Callable[[int, int], None]) -> None:
        self._path = path
        self._file: BinaryIO = path.open("rb")
        self._size = path.stat().st_size
        packed = self._file.read(2) == b"\x1f\x8b"
        self._file.seek(0)
        self._stream = gzip.GzipFile(fileobj=self._file) if packed else self._file
        self._decoder = json.JSONDecoder()
        self._moved = moved
        self._ended = False
        self._rest = b""
        self.text, self.place = "", 0

    def close(self) -> None:
        self._file.close()

    def _more(self) -> None:
        """Read the next chunk.

        Raises:
            DatasetError: The text ends here, or cannot be unpacked or decoded.
        """
        try:
            chunk = b"" if self._ended else self._stream.read(_CHUNK)
        except (OSError, EOFError, zlib.error) as error:
            raise self._cut(f"the file is cut off or damaged: {error}") from None
        self._moved(self._file.tell(), self._size)
        if not chunk:
            raise self._cut("the file ends in the middle")
        data = self._rest + chunk
        # A character may be split: at most three bytes of it are here.
        whole = len(data)
        while whole > len(data) - 4 and whole and data[whole - 1] & 0xC0 == 0x80:
            whole -= 1
        whole = whole - 1 if whole and data[whole - 1] >= 0xC0 else len(data)
        self._rest = data[whole:]
        # Kernel names that are not UTF-8 must not prevent reading a trace.
        self.text = self.text[self.place :] + data[:whole].decode(errors="replace")
        self.place = 0

    def _cut(self, what: str) -> DatasetError:
        return DatasetError(what, where=str(self._path), hint="export the trace again")

    def peek(self) -> str:
        """The next non-space character."""
        while True:
            while self.place < len(self.text) and self.text[self.place] in " \t\r\n":
                self.place += 1
            if self.place < len(self.text):
                return self.text[self.place]
            self._more()

    def take(self, wanted: str) -> None:
        """Consume one of the characters.

        Raises:
            DatasetError: There is a different one.
        """
        if self.peek() not in wanted:
            raise DatasetError(
                f"not a trace: {self.text[self.place : self.place + 20]!r} where one of "
                f"{' '.join(wanted)} is due",
                where=str(self._path),
                hint="expected the JSON that torch.profiler's export_chrome_trace writes",
            )
        self.place += 1

    def value(self) -> object:
        """The next complete value."""
        self.peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self.text, self.place)
            except json.JSONDecodeError as error:
                # An error before the end of the window is not due to missing text.
                inside = error.pos < len(self.text) - 100
                if inside and not error.msg.startswith("Unterminated"):
                    raise self._cut(f"not JSON: {error.msg} at {error.pos}") from None
                if len(self.text) - self.place > _LONGEST:
                    raise self._cut("a value does not end") from None
                self._more()
                continue
            # A number at the end of the window may continue.
            if end == len(self.text) and not isinstance(value, dict | list | str):
                self._more()
                continue
            self.place = end
            return value


def stream_events(
    path: Path, moved: Callable[[int, int], None] = lambda done, total: None
) -> Iterator[tuple[str, object]]:
    """Iterate over a Chrome trace: ``(traceEvents, event)`` per event, other keys as a whole.

    Args:
        path: JSON, possibly gzipped: an object with ``traceEvents``, or a list of events.
        moved: Callback with the number of bytes read and the total.

    Raises:
        DatasetError: The file is truncated, or not a trace.
    """
    text = _Text(path, moved)
    try:
        if text.peek() == "[":
            yield from _items(text)
            return
        text.take("{")
        while text.peek() != "}":
            key = text.value()
            text.take(":")
            if key == EVENTS:
                yield from _items(text)
            else:
                yield str(key), text.value()
            if text.peek() != "}":
                text.take(",")
    finally:
        text.close()


def _items(text: _Text) -> Iterator[tuple[str, object]]:
    text.take("[")
    while text.peek() != "]":
        yield EVENTS, text.value()
        if text.peek() != "]":
            text.take(",")
    text.take("]")
