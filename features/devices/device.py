"""Device descriptions: peaks, memory levels and launch floors."""

from __future__ import annotations

import json
import math
import os
import platform
import re
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path

import numpy as np

from ...common.errors import DeviceError
from ...common.files import is_yaml, parse_json
from ...common.types import JsonObject
from ..ir.program import DTYPE_BITS, DTYPES, REDUCED
from .rules import Architecture, makers, rules_of

#: Default bytes/s in one direction to the host: PCI Express 4.0 x16, 16 GT/s x 16 lanes / 8 bits
#: (31.5 GB/s after 128b/130b encoding), rounded as in data sheets.
HOST_BANDWIDTH = 32e9
#: The same to other nodes: 200 Gb/s per device, as with InfiniBand HDR.
NETWORK_BANDWIDTH = 25e9
#: GPU memory reserved by NVIDIA's driver: bytes, and a fraction. The totals in messages of
#: ``torch.OutOfMemoryError`` in public issues are 14.57 to 14.75 of 15 GiB, 23.5 to 23.69 of 24,
#: 31.36 of 32, 39.39 to 39.56 of 40, 44.4 of 45, 79.1 to 79.33 of 80, 139.8 of 141 and 178.35 of
#: 180, which it reproduces within 0.2 GiB. AMD's driver reserves almost nothing (23.98 of 24).
_DRIVER, _DRIVER_SHARE = 0.2 * 2**30, 0.008
#: Fraction reserved by libtpu, from XLA's messages: 7.48 GiB remain of 8 (v2), 15.48 of 16 (v3),
#: 30.75 of 32 (v4) and 15.75 of 16 (v5e).
_LIBTPU_SHARE = 0.03
#: Longest name; files are named after devices, and file systems allow 255 bytes.
MAX_NAME = 200


@dataclass(frozen=True)
class MemoryLevel:
    """A level of the memory hierarchy, as seen by a program that runs on the whole device.

    Attributes:
        capacity: Capacity in bytes.
        bandwidth: Sustained bytes/s, reads plus writes.
    """

    capacity: float
    bandwidth: float


@dataclass(frozen=True)
class DeviceSpec:
    """A device, as used by the roofline and the features. SI units throughout.

    Attributes:
        name: Canonical name, such as ``cpu-xeon-2.50ghz-2c`` or ``h100-sxm``.
        platform: ``cpu``, ``gpu`` or ``tpu``.
        peak_flops: Dense matrix FLOP/s by HLO dtype; ``f32`` is true FP32, while products with
            operands rounded to TensorFloat-32 are under ``tf32``.
        vector_flops: Element-wise FLOP/s by HLO dtype.
        levels: Memory levels, fastest first; the last one is main memory.
        floor: Smallest duration of a kernel, in seconds.
        launch_gap: Time between two kernels, in seconds.
        dispatch: Time of an empty program, from call to ready, in seconds.
        core_count: Cores, SMs or tensor cores.
        clock_hz: Clock under load.
        memory_bytes: Device memory.
        source: Source of the figures (``measured`` or a document).
        extra: Additional information.
        vendor: Vendor.
        architecture: Generation, such as ``hopper``; see ``features/devices/generations``.
        lanes_per_core: FP32 lanes of a core, SM or CU; 0 if unknown.
        power_w: Board power limit in watts; 0 if unknown.
        link_bandwidth: Bytes/s in one direction over all scale-up links of a device together.
        inter_node_bandwidth: Bytes/s in one direction to other nodes, per device.
        host_bandwidth: Bytes/s in one direction to the host.
        devices_per_node: Devices per node; 0 if unknown.
        shared_bytes_per_core: Shared memory (LDS, VMEM) of a core in bytes; 0 if unknown.
        array_rows: Rows of a systolic array, along which products accumulate; 0 if unknown.
        array_columns: Columns of a systolic array; 0 if unknown.
        arrays_per_core: Systolic arrays per core; 0 if unknown.
        compiler: Figures only for a compiler: ``target`` (``sm_90``, ``v5e``), and threads,
            registers and shared memory in bytes of a GPU core, by key of the device file.
        aliases: Other names of the device, such as JAX's device kind.
        base: Catalogue device that a design starts from, as named in its file; else empty.
        provenance: Source of each figure, by key of the device file.
        defaulted: Keys that the device file omits and that a rule filled.
    """

    name: str
    platform: str
    peak_flops: dict[str, float]
    vector_flops: dict[str, float]
    levels: tuple[MemoryLevel, ...]
    floor: float
    launch_gap: float = 0.0
    dispatch: float = 0.0
    core_count: int = 1
    clock_hz: float = 0.0
    memory_bytes: float = 0.0
    source: str = ""
    extra: JsonObject = field(default_factory=dict)
    vendor: str = ""
    architecture: str = ""
    lanes_per_core: int = 0
    power_w: float = 0.0
    link_bandwidth: float = 0.0
    inter_node_bandwidth: float = 0.0
    host_bandwidth: float = 0.0
    devices_per_node: int = 0
    shared_bytes_per_core: float = 0.0
    array_rows: int = 0
    array_columns: int = 0
    arrays_per_core: int = 0
    compiler: JsonObject = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    provenance: dict[str, str] = field(default_factory=dict)
    defaulted: tuple[str, ...] = ()
    base: str = ""

    @property
    def runs_cuda(self) -> bool:
        """Whether the device is modelled with NVIDIA's libraries.

        This holds for NVIDIA's GPUs and for vendors without measurements. Libraries of the other
        measured vendors start more slowly and reach less, which is not assumed of an unknown one.
        """
        known = makers()
        return self.platform == "gpu" and (self.vendor == "NVIDIA" or self.vendor not in known)

    @property
    def rules(self) -> Architecture:
        """Rules of its generation, or of its platform if the generation is not listed."""
        return rules_of(self.architecture, self.platform)

    @property
    def line(self) -> str:
        """Its generation, or the one that this revises: both have the same kernels."""
        return line_of(self.architecture)

    @property
    def dies(self) -> int:
        """Compute dies; 0 if the cores per die are not given."""
        return round(self.core_count / float(self.extra.get("cores_per_die") or math.inf))

    @property
    def bandwidth(self) -> float:
        """Main-memory bandwidth in bytes/s."""
        return self.levels[-1].bandwidth

    @property
    def usable_bytes(self) -> float:
        """Memory available to programs in bytes, as the driver reports it; 0 if unknown."""
        kept, share = self._kept
        return max(0.0, (1.0 - share) * self.memory_bytes - kept)

    def with_usable(self, usable: float) -> DeviceSpec:
        """Return the device with its memory set so that programs can use ``usable`` bytes."""
        kept, share = self._kept
        return replace(self, memory_bytes=(usable + kept) / (1.0 - share))

    @property
    def _kept(self) -> tuple[float, float]:
        """Memory reserved by the driver: bytes, and a fraction."""
        if self.platform == "tpu":
            return 0.0, _LIBTPU_SHARE
        return (_DRIVER, _DRIVER_SHARE) if self.runs_cuda else (0.0, 0.0)

    @property
    def host_link(self) -> float:
        """Bytes/s in one direction to the host, :data:`HOST_BANDWIDTH` by default."""
        return self.host_bandwidth or HOST_BANDWIDTH

    @property
    def cache_bytes(self) -> float:
        """Capacity of the last cache before main memory; 0 if none is described."""
        return self.levels[-2].capacity if len(self.levels) > 1 else 0.0

    @cached_property
    def rates(self) -> np.ndarray:
        """Matrix and vector FLOP/s by dtype code, shape ``(2, len(DTYPES))``.

        Raises:
            DeviceError: The device lists no peaks.
        """
        asked = (self.matrix_peak, self.vector_peak)
        return np.array([[peak(dtype) for dtype in DTYPES] for peak in asked])

    def matrix_peak(self, dtype: str) -> float:
        """Return dense matrix FLOP/s for ``dtype``, or for the nearest wider type listed."""
        return _lookup(self.peak_flops, dtype)

    def vector_peak(self, dtype: str) -> float:
        """Return element-wise FLOP/s for ``dtype``, or for the nearest wider type listed."""
        return _lookup(self.vector_flops or self.peak_flops, dtype)

    def to_json(self) -> str:
        """Serialise to JSON text."""
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_dict(cls, data: JsonObject, where: str = "device") -> DeviceSpec:
        """Build from plain data.

        Raises:
            DeviceError: A key is missing or unknown, or a value has the wrong type.
        """
        try:
            values = dict(data)
            values["levels"] = tuple(MemoryLevel(**level) for level in values["levels"])
            # JSON has no tuples.
            for name in ("aliases", "defaulted"):
                values[name] = tuple(values.get(name, ()))
            spec = cls(**values)
            check_figures(spec)
            return spec
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DeviceError(
                f"device description is incomplete or has unknown keys: {error}",
                where=where,
                hint="give name, platform, peak_flops, vector_flops, levels and floor",
            ) from None

    @classmethod
    def from_file(cls, path: Path | str) -> DeviceSpec:
        """Read a description: JSON from :meth:`to_json`, or a YAML device file.

        Raises:
            DeviceError: The file cannot be read, or figures are missing, unknown or contradict
                each other.
        """
        path = Path(path)
        if is_yaml(path):
            # Device files may name a base in the catalogue, which imports this module.
            read: DeviceSpec = import_module(".catalogue", __package__).load_device_file(path)
            return read
        try:
            data = parse_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise DeviceError("no such device file", where=str(path)) from None
        except (OSError, ValueError) as error:
            raise DeviceError(f"not JSON: {error}", where=str(path)) from None
        return cls.from_dict(data, where=str(path))


def _lookup(table: dict[str, float], dtype: str) -> float:
    if dtype in table:
        return table[dtype]
    # Descriptions saved before tf32 had a rate, and devices without such a unit.
    if dtype == REDUCED and "f32" in table:
        return table["f32"]
    if not table:
        raise DeviceError("device lists no peak FLOP/s", hint="add peak_flops")
    # A narrower type is converted to a wider one that the device has, so it runs at that one's
    # rate; only if none is wide enough, the widest is used.
    bits = DTYPE_BITS.get(dtype, 32)
    # tf32, a reduced precision, is not an HLO type and substitutes for none.
    known = [d for d in table if d in DTYPE_BITS] or list(table)
    wider = [d for d in known if DTYPE_BITS.get(d, 32) >= bits]
    pick = min(wider or known, key=lambda d: abs(DTYPE_BITS.get(d, 32) - bits))
    return table[pick]


def local_device_name() -> str:
    """Return the canonical name of JAX's default device.

    Returns:
        For a CPU its model and the number of usable cores, such as
        ``cpu-intel-xeon-processor-2.50ghz-2c``; otherwise JAX's device kind, such as
        ``nvidia-h200`` or ``tpu-v5-lite``.
    """
    import jax

    device = jax.devices()[0]
    if device.platform != "cpu":
        return device_slug(device.device_kind)
    # The number of cores is part of the name: a container with two cores is a different device from
    # the whole machine.
    return f"cpu-{device_slug(_cpu_model())}-{usable_cores()}c"


def line_of(architecture: str) -> str:
    """Return a GPU's architecture, or the one that it revises."""
    return rules_of(architecture, "gpu").revises or architecture


def device_slug(text: str) -> str:
    """Normalise a name to lower case and dashes: ``NVIDIA H200`` gives ``nvidia-h200``."""
    # As in "Intel(R) Xeon(R) CPU @ 2.50GHz".
    plain = re.sub(r"\((?:r|tm|c)\)|®|™|\bcpu\b", " ", text.lower())
    return re.sub(r"[^a-z0-9.]+", "-", plain).strip("-.") or "unknown"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def usable_cores() -> int:
    """Count the logical cores that this process may use."""
    # Affinity reflects what a container or batch system grants, cpu_count() the whole machine.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_name(name: object) -> str:
    """Check that a name is usable as a file name and printable on a terminal.

    Raises:
        ValueError: It is empty or too long, or has slashes or control characters.
    """
    if not isinstance(name, str) or not name or len(name) > MAX_NAME:
        raise ValueError(f"{str(name)[:MAX_NAME]!r} is not a valid name")
    if not name.isprintable() or set("/\\") & set(name) or name.startswith("."):
        raise ValueError(f"name {name!r} has characters that a name cannot have")
    return name


def check_figures(spec: DeviceSpec) -> None:
    """Check names and figures.

    Raises:
        ValueError: A figure is not a number, is not finite, or is below its minimum.
    """
    check_name(spec.name)
    if spec.platform not in ("cpu", "gpu", "tpu"):
        raise ValueError(f"platform {spec.platform!r} is not cpu, gpu or tpu")
    for table in ("peak_flops", "vector_flops"):
        for dtype, rate in getattr(spec, table).items():
            _number(f"{table}.{dtype}", rate, above=True)
    if not spec.levels:
        raise ValueError("levels is empty")
    for level in spec.levels:
        _number("capacity", level.capacity, above=False, finite=False)
        _number("bandwidth", level.bandwidth, above=True)
    for figure in fields(spec):
        if figure.type in ("float", "int"):
            # The floor is a divisor; for the others 0 means "unknown" or "none".
            _number(figure.name, getattr(spec, figure.name), above=figure.name == "floor")


def _number(name: str, value: object, *, above: bool, finite: bool = True) -> None:
    # Descriptions are untrusted: True is an int for Python, and every comparison with NaN is false.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {value!r}, not a number")
    if value != value or (finite and math.isinf(value)) or value < 0 or (above and value == 0):
        raise ValueError(f"{name} is {value!r}")
