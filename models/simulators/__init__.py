"""Third-party simulators and compilers as estimators: SCALE-Sim, ZigZag, IREE and libtpu.

Each predicts the kernels that its tool can model; all others take the roofline, with a reason. The
tools run in a separate process, and their answers are cached on disk (docs/fidelities.md).
"""

from .base import Answer, AnsweringEstimator, SimulatorEstimator

__all__ = ["Answer", "AnsweringEstimator", "SimulatorEstimator"]
