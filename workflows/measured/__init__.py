"""Commands on tables of measurements: board power, tile configurations, drift of libraries."""
