"""Features in groups that a person can name, to say which of them moved a prediction."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

OTHER = "other"
#: Groups and the names that belong to them; the first match counts.
_RULES: tuple[tuple[str, str], ...] = (
    ("device", r"device_"),
    ("communication", r"collective_|log_group_size|log_n_groups|is_async"),
    ("kind and library", r"kind_|fusion_|library_|root_"),
    ("dtype", r"dtype_|mixed_dtype|out_bits|in_bits"),
    ("parallelism", r"log_partitions|partitions_|cores_used|.*_per_core|.*_per_part|.*waves?_"),
    ("tile padding", r"fill_|padding_|array_fill"),
    ("memory spaces", r"near_share_|largest_near$|result_near$|log_n_(main|near)$"),
    (
        "operands and layout",
        r"log_n_(inputs|outputs|scalar_inputs|shared)$|out_aligned|transposing|layouts_differ"
        r"|broadcast_minor|in_over_out|touched_share|largest_input_share|(?!log_).*_minor$"
        r"|reduce_(major|all)$|same_(sub)?lanes$|lanes_to_sublanes|conv_canonical|conv_window_over_output|share_moved_",
    ),
    (
        "arithmetic intensity",
        r"(main|registers|compute|start)_share$|padded_products_|compute_over_|weighted_over_|intensity_over_|work_over_|.*_per_output|work_per_element",
    ),
    ("loops", r"log_trip_count|log_loop_ops|trip_unknown"),
    ("size", r"log_\w+_floor$|set_over_|\w+_over_(first|middle|last)$"),
    ("op mix", r"log_n_|log_depth|share_|log_reducer_ops|log_sort_comparator|.*_ordered$"),
    (
        "shape",
        r"log_(out|in|window|slice|reduced?|gemm|conv|gather|scatter|sort|fft|linalg)_|gemm_|conv_"
        r"|sort_|scatter_|fft_|pad_|window_",
    ),
)  # fmt: skip
_PATTERNS = tuple((group, re.compile(pattern)) for group, pattern in _RULES)
#: All groups, in the order of their rules.
GROUPS = (*(group for group, _ in _RULES), OTHER)


def group_of(name: str) -> str:
    """The group of a feature; ``other`` for one that no rule knows."""
    return next((group for group, pattern in _PATTERNS if pattern.match(name)), OTHER)


def group_columns(names: Sequence[str]) -> dict[str, np.ndarray]:
    """Columns of every group that has any, by group."""
    found: dict[str, list[int]] = {}
    for column, name in enumerate(names):
        found.setdefault(group_of(name), []).append(column)
    return {group: np.array(found[group]) for group in GROUPS if group in found}
