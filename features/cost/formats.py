"""The number formats in which operators compute, each once: what is stored and what multiplies it.

One name of a format covers several of HLO's element types: that of the weights, and that whose
matrix rate counts. Formats with scales count each value's share of its block's scale.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ...common.files import own_data
from ..ir.program import DTYPE_BITS, HLO_NAMES

if TYPE_CHECKING:
    from ..devices.device import DeviceSpec


class Format(NamedTuple):
    """A number format, named after its quantisation scheme.

    Attributes:
        weights: HLO type of the weights.
        rate: HLO type whose matrix rate counts: that of the wider operand.
        weight_bits: Stored bits of a weight, its share of its block's scale included.
        activation_bits: Bits of an activation as the matrix unit reads it.
        block: Weights that share a scale; 0 for scales too few to count.
        fastest: HLO type at whose peak its products run at most, on devices where that is faster
            than ``rate``: kernels may narrow the activations of quantised weights, and round f32.
        wider: Format to which software widens it on devices without units for it.
    """

    weights: str
    rate: str
    weight_bits: float
    activation_bits: float
    block: int = 0
    fastest: str = ""
    wider: str = ""

    def peak_on(self, device: DeviceSpec) -> float:
        """Most operations a second of its products on a device.

        Some have few units for :attr:`fastest`, such as Blackwell Ultra for integers.
        """
        return max(device.matrix_peak(kind) for kind in (self.rate, self.fastest) if kind)

    @property
    def weight_bytes(self) -> float:
        """Bytes of a weight, its share of its block's scale included."""
        return self.weight_bits / 8.0

    @property
    def element_bytes(self) -> float:
        """Bytes of an element without scales."""
        return DTYPE_BITS[self.weights] / 8.0


def _formats(section: str) -> dict[str, Format]:
    """Formats of a section of ``formats.toml``; a text stands for a format of the tables."""
    read = own_data("features/cost/formats.toml")
    named = {k: read["tables"][v] if isinstance(v, str) else v for k, v in read[section].items()}
    return {name: Format(**own) for name, own in named.items()}


#: Formats without quantisation. Of two names of one HLO type the last is the usual one.
UNQUANTISED = ("tf32", "fp32", "fp16", "bf16")
#: Formats by the name that operator tables use.
TABLE_FORMATS: dict[str, Format] = _formats("tables")
#: The same by the names of steps and of serving, which add formats that no table has.
FORMATS: dict[str, Format] = {**TABLE_FORMATS, **_formats("engines")}
#: Other names of the formats of steps and programs: NumPy's and PyTorch's.
ALIASES: dict[str, str] = {
    **{name: dtype for name, dtype in HLO_NAMES.items() if dtype in ("bf16", "f16", "f32")},
    **own_data("features/cost/formats.toml")["aliases"],
}


def format_name(name: str) -> str:
    """Return the name in :data:`FORMATS` of a format given by any of its names, else the name."""
    return ALIASES.get(name, name)
