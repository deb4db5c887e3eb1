"""Training, evaluation, tuning and the choice of ensembles."""
