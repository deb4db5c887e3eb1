"""Number formats of operators: storage of operands, and the rate at which they are multiplied.

A format covers several HLO element types: that of the weights, and that whose matrix rate applies.
Formats with scales include each value's share of its block's scale.
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
        rate: HLO type whose matrix rate applies: that of the wider operand.
        weight_bits: Stored bits of a weight, including its share of the block's scale.
        activation_bits: Bits of an activation as the matrix unit reads it.
        block: Weights that share a scale; 0 if scales are too few to count.
        fastest: HLO type that bounds the speed of its products on devices where it is faster than
            ``rate``: kernels may narrow the activations of quantised weights, and round f32.
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
        """Return the peak operations per second of its products on a device.

        Some devices are slower at :attr:`fastest`, such as Blackwell Ultra at integers.
        """
        return max(device.matrix_peak(kind) for kind in (self.rate, self.fastest) if kind)

    @property
    def weight_bytes(self) -> float:
        """Bytes of a weight, including its share of the block's scale."""
        return self.weight_bits / 8.0

    @property
    def element_bytes(self) -> float:
        """Bytes of an element, excluding scales."""
        return DTYPE_BITS[self.weights] / 8.0


def _formats(section: str) -> dict[str, Format]:
    """Return the formats in a section of ``formats.toml``; a text refers to a table format."""
    read = own_data("features/cost/formats.toml")
    named = {k: read["tables"][v] if isinstance(v, str) else v for k, v in read[section].items()}
    return {name: Format(**own) for name, own in named.items()}


#: Formats without quantisation. Of two names for one HLO type, the last is the usual one.
UNQUANTISED = ("tf32", "fp32", "fp16", "bf16")
#: Formats by the name that operator tables use.
TABLE_FORMATS: dict[str, Format] = _formats("tables")
#: The same by the names used in steps and serving, plus formats that no table has.
FORMATS: dict[str, Format] = {**TABLE_FORMATS, **_formats("engines")}
#: Alternative names of formats in steps and programs: NumPy's and PyTorch's.
ALIASES: dict[str, str] = {
    **{name: dtype for name, dtype in HLO_NAMES.items() if dtype in ("bf16", "f16", "f32")},
    **own_data("features/cost/formats.toml")["aliases"],
}


def format_name(name: str) -> str:
    """Return the :data:`FORMATS` name of a format given by any of its names; others unchanged."""
    return ALIASES.get(name, name)
