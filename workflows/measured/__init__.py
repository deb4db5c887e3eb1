"""Work on measurements: board power, tile configurations, drift of libraries, calibration."""
