"""What a core of a GPU holds, by compute capability, and how device files name it."""

from __future__ import annotations

#: Where :data:`CAPABILITIES` comes from.
SOURCE = "CUDA C++ programming guide, technical specifications by compute capability, from memory"

#: Nearest NVIDIA architecture to AMD's: HBM, a large L2 and bf16 in the matrix unit, as an A100.
NEAREST = {"gfx908": "sm_80", "gfx90a": "sm_80"}
#: How NVIDIA's architectures are named.
NVIDIA = "sm_"
_KEYS = (
    "threads_per_core", "shared_kb_per_block_optin", "shared_kb_per_block", "threads_per_block",
    "registers_per_core", "registers_per_block",
)  # fmt: skip
#: Keys of a device file that only a compiler asks for.
COMPILER_KEYS = _KEYS


def capability_of(architecture: str) -> int | None:
    """Compute capability × 10 of ``sm_90`` or ``sm_120``; ``None`` for what is not NVIDIA's."""
    digits = architecture.removeprefix(NVIDIA)
    return int(digits) if architecture.startswith(NVIDIA) and digits.isdigit() else None


def _row(threads: float, shared_optin: float) -> dict[str, float]:
    """Threads of a core and shared memory that a block may ask for; the rest never changed."""
    return dict(zip(_KEYS, (threads, shared_optin, 48.0, 1024.0, 65536.0, 65536.0), strict=True))


#: By compute capability × 10, in the units of a device file.
CAPABILITIES: dict[int, dict[str, float]] = {
    60: _row(2048, 48), 61: _row(2048, 48), 70: _row(2048, 96), 75: _row(1024, 64),
    80: _row(2048, 163), 86: _row(1536, 99), 87: _row(1536, 163), 89: _row(1536, 99),
    90: _row(2048, 227), 100: _row(2048, 227), 103: _row(2048, 227), 120: _row(1536, 99),
    121: _row(1536, 99),
}  # fmt: skip
