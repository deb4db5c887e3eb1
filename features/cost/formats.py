"""The number formats in which operators compute, each once: what is stored and what multiplies it.

One name of a format covers several of HLO's element types: that of the weights, and that whose
matrix rate counts. Formats with scales count each value's share of its block's scale.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

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


#: Formats without quantisation. Of two names of one HLO type the last is the usual one.
UNQUANTISED = ("tf32", "fp32", "fp16", "bf16")
#: Formats by the name that operator tables use. A scale of 8 bits is shared by 16 values of NVFP4
#: (4 + 8 / 16 bits a value) and by 32 of the OCP microscaling formats (4 + 8 / 32). Scales of fp8
#: (E4M3, the format of forward passes: Micikevicius et al., FP8 Formats for Deep Learning, 2022)
#: and int8, of a tensor, a channel or a large block, are too few to count. int4_wo counts as NVFP4,
#: which the shipped model of operators learned from.
TABLE_FORMATS: dict[str, Format] = {
    "fp32": Format("f32", "f32", 32.0, 32.0, fastest="tf32"),
    # f32 operands that the matrix unit rounds to TF32: XLA's default for f32 products.
    "tf32": Format("f32", "tf32", 32.0, 32.0),
    "fp16": Format("f16", "f16", 16.0, 16.0),
    "bf16": Format("bf16", "bf16", 16.0, 16.0),
    "fp64": Format("f64", "f64", 64.0, 64.0),
    "int8": Format("s8", "s8", 8.0, 8.0, wider="bf16"),
    "mxfp8": Format("f8e4m3fn", "f8e4m3fn", 8.25, 8.25, block=32, wider="bf16"),
    "mxfp4": Format("f4e2m1fn", "f4e2m1fn", 4.25, 4.25, block=32),
    "fp8": Format("f8e4m3fn", "f8e4m3fn", 8.0, 8.0, wider="bf16"),
    "fp8_block": Format("f8e4m3fn", "f8e4m3fn", 8.0, 8.0, block=128),
    "int8_sq": Format("s8", "s8", 8.0, 8.0),
    # Weights alone are quantised in the "wo" and "w4a16" schemes: they are widened to bf16.
    "int8_wo": Format("s8", "bf16", 8.0, 16.0),
    "nvfp4": Format("f4e2m1fn", "f4e2m1fn", 4.5, 4.5, block=16, wider="fp8"),
    "int4_wo": Format("s4", "bf16", 4.5, 16.0, block=128),
    "w4a16_mxfp4": Format("f4e2m1fn", "bf16", 4.25, 16.0, block=32, fastest="f4e2m1fn"),
    "w4a8_mxfp4_mxfp8": Format("f4e2m1fn", "f8e4m3fn", 4.25, 8.0, block=32),
}
#: The same by the names of steps and of serving, which add formats that no table has. Weights of
#: four bits meet activations of as few or of eight (W4A8 of QServe and TensorRT-LLM) at the
#: fastest; a scale of 16 bits is shared by 128 weights of int4 (AWQ's and GPTQ's usual group).
FORMATS: dict[str, Format] = {
    **TABLE_FORMATS,
    "f32": TABLE_FORMATS["fp32"],
    "f16": TABLE_FORMATS["fp16"],
    "fp8_wo": Format("f8e4m3fn", "bf16", 8.0, 16.0),
    "int4": Format("s4", "bf16", 4.125, 16.0, block=128, fastest="s8"),
    # Of engines: experts in MXFP4 whose activations stay in 16 bits, as gpt-oss is served.
    "mxfp4": TABLE_FORMATS["w4a16_mxfp4"],
}
#: Other names of the formats of steps and programs: NumPy's and PyTorch's.
ALIASES = {
    **{name: dtype for name, dtype in HLO_NAMES.items() if dtype in ("bf16", "f16", "f32")},
    "half": "f16",
    "fp16": "f16",
    "fp32": "f32",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}


def format_name(name: str) -> str:
    """Return the name in :data:`FORMATS` of a format given by any of its names, else the name."""
    return ALIASES.get(name, name)
