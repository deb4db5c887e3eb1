"""Operators of published tables and libraries: a table of parameters in, physics and features out.

One row is one kernel (or one group of kernels) of a library: a GEMM, a convolution, an attention, a
mixture of experts, an element-wise pass. ``columns`` holds a table, ``gemm``, ``conv``,
``pointwise`` and ``attention`` the physics of each family (experts are products), ``features``
joins them. ``datagen`` imports tables, ``models`` learns from them.
"""

from .columns import OpTable
from .features import OpFeatures, op_features
from .schema import FAMILIES, family_keys

__all__ = ["FAMILIES", "OpFeatures", "OpTable", "family_keys", "op_features"]
