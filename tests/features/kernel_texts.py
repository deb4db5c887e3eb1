"""Texts of kernels that several tests read."""

from __future__ import annotations


def reducing(*lines: str) -> str:
    """A kernel whose entry may call ``c0``, the sum of two scalars.

    Args:
        lines: Instructions of the entry.
    """
    entry = "\n".join(f"  {line}" for line in lines)
    return f"""HloModule kernel

c0 {{
  v0 = f32[] parameter(0)
  v1 = f32[] parameter(1)
  ROOT v2 = f32[] add(v0, v1)
}}

ENTRY main {{
{entry}
}}
"""
