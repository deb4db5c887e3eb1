"""MLflow: runs, predictions, plots."""
