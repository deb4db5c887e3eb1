"""Estimators of kernel latencies: roofline, ridge, forest, XGBoost, ensemble, TPUs."""
