"""From a dataset to what is learned from: preparation, splits, cross-fitting, metrics."""
