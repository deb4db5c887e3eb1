"""Models of measured collectives: parameters fitted on top of the formulas of ``simulate``."""
