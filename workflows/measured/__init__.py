"""Train on tables of measured power and of tile configurations: models and their errors."""
