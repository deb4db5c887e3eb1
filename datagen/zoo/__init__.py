"""Families of machine-learning programs: from sizes to StableHLO programs with their arguments.

The profiler measures them, tests and benchmarks predict them, users export them as examples.
No heavy package is imported before a program is built; building requires jax, flax and optax.
"""

from __future__ import annotations

from .registry import (
    Family,
    Setting,
    all_families,
    build,
    describe,
    export,
    parse_settings,
    resolve,
    size_grid,
    suite,
    workload_name,
)
from .workload import Workload

__all__ = [
    "Family",
    "Setting",
    "Workload",
    "all_families",
    "build",
    "describe",
    "export",
    "parse_settings",
    "resolve",
    "size_grid",
    "suite",
    "workload_name",
]
