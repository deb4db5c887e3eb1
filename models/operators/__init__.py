"""Models of library operators: a pair of regressors for each family, for known and unseen devices.

``rows`` turns datasets and published tables into one table, ``family`` learns a family's times, and
``prediction`` their intervals; :mod:`opcast.models.adapt` adapts them to a device from a few
samples and chooses these; ``model`` bundles the families, ``report`` tabulates their errors.
"""

from .model import OpModel
from .rows import rows_of_dataset, rows_of_published

__all__ = ["OpModel", "rows_of_dataset", "rows_of_published"]
