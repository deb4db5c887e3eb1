"""PyTorch modules as programs: ``torch.export``'s core ATen graph translated to JAX, op by op.

PyTorch is imported only inside the functions that need it.
"""

from __future__ import annotations

import re


def release_numbers(text: str) -> tuple[int, ...]:
    """Return major and minor number of a release such as ``2.4.0+cu121``; none of a nightly one."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])
