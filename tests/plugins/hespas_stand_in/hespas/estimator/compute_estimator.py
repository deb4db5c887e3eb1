from .estimator import Estimator


class ComputeEstimator(Estimator):
    compute_estimator = True
