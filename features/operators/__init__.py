"""Library operators (as in published tables): parameters in, analytical estimates and features out.

One row is one kernel, or one group of kernels, of a library: a GEMM, a convolution, an attention, a
mixture of experts or an element-wise pass. ``columns`` holds a table; ``gemm`` (which includes
experts), ``conv``, ``pointwise`` and ``attention`` estimate each family; ``features`` combines
them. ``datagen`` imports such tables and ``models`` learns from them.
"""

from .columns import OpTable
from .features import OpFeatures, op_features
from .schema import FAMILIES, family_keys

__all__ = ["FAMILIES", "OpFeatures", "OpTable", "family_keys", "op_features"]
