"""A program to predict, the device, and how it is lowered and measured.

``opcast predict``, ``opcast.predict``, the server and ``opcast evaluate --programs`` use it, and
:meth:`.predictor.Predictor.answer` answers: a table of programs is a loop over its cases.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...common.errors import DatasetError
from ...features.lowering.options import DEFAULTS, LoweringOptions
from ..devices import resolve_device

if TYPE_CHECKING:
    from ...features.devices.device import DeviceSpec
    from ...features.ir.reader import SourceProgram
    from ...features.kernels.kernel import LoweredProgram
    from .predictor import Predictor

#: Maximum bytes of an unpacked program: ten times the largest published one.
MOST_BYTES = 2**30
#: Counts of devices in the header of HLO and of StableHLO.
_COUNTS = re.compile(rb"\b(num_partitions=|replica_count=|mhlo\.num_(?:partitions|replicas) = )\d+")


class LoweredCase(NamedTuple):
    """A lowered case: the program, its kernels and the device."""

    source: SourceProgram
    lowered: LoweredProgram
    device: DeviceSpec


@dataclass(frozen=True)
class ProgramCase:
    """A program on one device.

    Attributes:
        program: Path, text or bytes of StableHLO or HLO, an exported or lowered JAX function, or a
            function, jitted or not, followed by its example arguments; it is lowered for the
            device's platform, wherever this runs. A path that ends in ``.gz`` is unpacked.
        options: How it is lowered, and for which device.
        arguments: Example arguments of a function: arrays or ``jax.ShapeDtypeStruct``.
        keywords: Keyword arguments of a function.
        strict: Whether a kernel without a learned estimate is an error.
        power_cap_w: Sustained power of the device in watts, below its limit.
        whole: Whether one device runs the whole program even if its header states several devices.
        on_stream: Whether times are between events on the device's stream, which excludes the
            host's call.
    """

    program: object
    options: LoweringOptions = DEFAULTS
    arguments: tuple[object, ...] = ()
    keywords: Mapping[str, object] = field(default_factory=dict)
    strict: bool = False
    power_cap_w: float | None = None
    whole: bool = False
    on_stream: bool = False

    def lower(self, predictor: Predictor) -> LoweredCase:
        """Read the program and list its kernels.

        Raises:
            OpcastError: The program, device or lowering is not usable, or the program is for
                several devices (``predict_partitioned`` takes those).
        """
        from ...features.ir.partitioning import check_one_device
        from ...features.ir.platforms import platform_of
        from ...features.ir.reader import read_program
        from ...features.lowering.lower import lower_with
        from ...simulate.clusters.catalogue import named_cluster

        device = self.on(resolve_device(self.options.device, predictor.devices))
        source = read_program(
            self._program(),
            *self.arguments,
            trip_counts=self.options.trip_counts,
            platform=platform_of(device),
            **self.keywords,
        )
        # Check before the lowering, which may take minutes.
        check_one_device(source, device.name, named_cluster)
        options = replace(self.options, device=device, cache=predictor.cache)
        return LoweredCase(source, lower_with(source, options), device)

    def on(self, device: DeviceSpec) -> DeviceSpec:
        """Return a device as the case measures it."""
        # On the stream, only the launch of the first kernel remains of the call.
        return replace(device, dispatch=device.floor) if self.on_stream else device

    def _program(self) -> object:
        path = self.program
        if not isinstance(path, Path) or not (self.whole or path.suffix == ".gz"):
            return path
        # Reading the file directly keeps the source lines of its ops.
        read_as_it_is = path.suffix != ".gz" and not states_several(path)
        return path if read_as_it_is else program_text(path, self.whole)


def states_several(path: Path) -> bool:
    """Return whether a program's header states several devices, so that ``whole`` matters.

    Raises:
        DatasetError: See :func:`program_text`.
    """
    return program_text(path, whole=True) != program_text(path, whole=False)


def program_text(path: Path, whole: bool) -> bytes:
    """Return a program's file, unpacked; for ``whole`` see :class:`ProgramCase`.

    Raises:
        DatasetError: The file cannot be read, or is too large.
    """
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                data = file.read(MOST_BYTES + 1)
        else:
            data = path.read_bytes()
    except (OSError, EOFError) as error:
        raise DatasetError(f"the program cannot be read: {error}", where=str(path)) from None
    if len(data) > MOST_BYTES:
        raise DatasetError(f"the program is larger than {MOST_BYTES} bytes", where=str(path))
    if not whole:
        return data
    # HLO states the counts in its first line, StableHLO at the start of the module.
    head, opened, rest = data.partition(b"\n" if data.startswith(b"HloModule") else b"func.func")
    return _COUNTS.sub(rb"\g<1>1", head) + opened + rest
