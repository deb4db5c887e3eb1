"""Models of library operators: one pair of regressors a family, for known and for unseen devices.

``rows`` turns datasets and published tables into one table, ``family`` learns a family's times,
``intervals`` says how far they can be trusted; ``model`` bundles the families, ``report`` judges
them. :mod:`opcast.models.adapt` adapts them to a device from a few samples, and chooses these.
"""

from .model import OpModel
from .rows import rows_of_dataset, rows_of_published

__all__ = ["OpModel", "rows_of_dataset", "rows_of_published"]
