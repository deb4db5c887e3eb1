"""From a dataset to training data: preparation, splits, cross-fitting, metrics."""
