"""Cases of a parametrised test: some in ``make test``, all in ``make test-all``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def later(*values: Any) -> Any:
    """A case of ``make test-all`` alone."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def every(step: int, cases: Iterable[Any]) -> list[Any]:
    """Cases of one value each; the first and each ``step``-th after it are in ``make test``."""
    return [later(case) if place % step else case for place, case in enumerate(cases)]
