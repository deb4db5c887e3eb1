"""Predictions: from a program, device and model to a latency with an interval and an explanation.

``opcast.predict(program, *inputs, device=…)`` is :func:`opcast.predict.api.predict`, whose help has
its arguments.

``api.py`` and ``program/predictor.py`` are the public entries (``opcast.predict``,
``opcast.load``), ``cluster/`` predicts steps and partitioned programs, ``operator/`` single library
operators, ``published/`` published tables and op graphs. ``render/``, ``page/`` and ``export/``
convert predictions to text, HTML and files.
"""

from __future__ import annotations

import sys
from inspect import Signature, signature
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    """This package, which is also callable as ``opcast.predict(program, …)``.

    Importing a submodule binds the package's name in ``opcast``, which would replace a function.
    """

    def __call__(self, program: object, *args: object, **options: Any) -> object:
        """Predict a program; see :func:`opcast.predict.api.predict`."""
        from .api import predict

        return predict(program, *args, **options)

    @property
    def __signature__(self) -> Signature:
        """Of the function, for editors and :func:`help`."""
        from .api import predict

        return signature(predict)


sys.modules[__name__].__class__ = _CallableModule
