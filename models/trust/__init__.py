"""How far a prediction holds: conformal intervals, training domain, nearest measured kernels."""
