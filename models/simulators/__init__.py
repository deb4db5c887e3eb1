"""Foreign simulators and compilers as estimators: SCALE-Sim, ZigZag and IREE.

Kernels and a device go in, seconds of each kernel that the tool can model come out; the others take
the roofline, with a reason. Tools run in a process of their own, answers stay on disk.
"""

from .answers import Answer, AnsweringEstimator
from .base import SimulatorEstimator

__all__ = ["Answer", "AnsweringEstimator", "SimulatorEstimator"]
