"""Models of collectives: parameters fitted to measurements, over the formulas of ``simulate``."""
